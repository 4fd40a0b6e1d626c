"""The relay as one object: for `relay run`, and for applications that carry it inside their own life.

async with Relay(load(Path("relay.toml"))) as relay:
    ...                      # the application runs; events flow
    await relay.wait()       # optional: until it ends; raises what only a person can cure
                             # leaving the block drains, checkpoints, confirms
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from relay.admin.server import AdminServer
from relay.config import Config
from relay.metrics import Metrics
from relay.progress import Progress
from relay.sink import Sink, open_sink
from relay.supervisor import Supervisor


class Relay:
    """A running relay. Configure logging yourself (relay.log) if you want its lines."""

    def __init__(self, config: Config, *, sink: Sink | None = None, from_now: bool = False) -> None:
        self.progress = Progress()
        self.metrics = Metrics(
            self.progress,
            relay_name=config.relay.name,
            service=config.relay.service,
            stalled_after=config.delivery.stalled_after,
        )
        self.admin = AdminServer(
            config.admin.listen, self.progress, self.metrics, stalled_after=config.delivery.stalled_after
        )
        self._supervisor = Supervisor(config, sink or open_sink(config), self.progress, self.metrics, from_now=from_now)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.admin.start()
        # Not in a TaskGroup: a relay that has to stop must not cancel the application around it. We await it below.
        self._task = asyncio.get_running_loop().create_task(self._supervisor.run(), name="relay")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        try:
            self.stop()
            await self._task
        finally:
            await self.admin.stop()

    async def wait(self) -> None:
        """Until the relay ends; raises what ended it."""
        assert self._task is not None
        await asyncio.shield(self._task)

    def stop(self) -> None:
        """Begin to drain; `wait` and the end of the block return when it is done."""
        self._supervisor.stop()

    def abort(self) -> None:
        """Stop at once, without draining: what was not confirmed comes again."""
        if self._task is not None:
            self._task.cancel()
