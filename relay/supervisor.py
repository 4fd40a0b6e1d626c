"""The supervisor: life after life with Postgres, until told to stop. It owns the one retry loop on that side.

What it does not know it does not retry. When the lock's session hears that Postgres shuts down, everything stops and
the walsender is closed at once: a walsender that waits for a broker would keep Postgres from stopping (G11).
"""

from __future__ import annotations

import asyncio
import random
import time

import structlog

from relay.backoff import Backoff
from relay.config import Config
from relay.errors import RelayError, SlotBusy, StreamIncomplete, Superseded, TransientError, decisive
from relay.life import Life
from relay.life_memory import Memory
from relay.metrics import Metrics
from relay.progress import Progress
from relay.singleton import STANDBY_INTERVAL, hold_lock, pause
from relay.sink import Sink
from relay.writeback import WriteBack

log = structlog.get_logger("relay.supervisor")


class Supervisor:
    """Runs one relay. `run` returns after `stop`, and raises what only a person can cure."""

    def __init__(
        self, config: Config, sink: Sink, progress: Progress, metrics: Metrics, *, from_now: bool = False
    ) -> None:
        self._config = config
        self._sink = sink
        self._progress = progress
        self._metrics = metrics
        self._from_now = from_now
        self._stopping = asyncio.Event()
        self._memory = Memory()
        self._write_back = WriteBack.of(config, progress)
        self._life: Life | None = None

    def stop(self) -> None:
        """Drain, checkpoint, confirm, and return from `run`."""
        self._stopping.set()
        if self._life is not None:
            self._life.stop()

    async def run(self) -> None:
        delivery = self._config.delivery
        backoff = Backoff(delivery.backoff_initial, delivery.backoff_max)
        try:
            while not self._stopping.is_set():
                started = time.monotonic()
                try:
                    await self._live()
                except (RelayError, BaseExceptionGroup) as exc:
                    failure = decisive(exc)
                    self._metrics.failed(failure)
                    if not isinstance(failure, TransientError):
                        raise failure from exc
                    # A life that lasted for a while was healthy: this failure is a new story.
                    if time.monotonic() - started > 2 * delivery.backoff_initial:
                        backoff.reset()
                    await self._wait_after(failure, backoff)
        finally:
            await self._sink.close()
            self._progress.enter("stopped")

    async def _live(self) -> None:
        async with hold_lock(self._config, self._progress, self._stopping) as session:
            if session is None:
                return
            self._life = Life(
                self._config,
                session,
                self._sink,
                self._progress,
                self._metrics,
                self._stopping,
                self._memory,
                self._write_back,
            )
            try:
                await self._life.run(from_now=self._from_now)
            finally:
                self._life = None
                await self._sink.close()

    async def _wait_after(self, failure: TransientError, backoff: Backoff) -> None:
        progress = self._progress
        progress.last_error, progress.last_hint = str(failure), failure.hint
        if isinstance(failure, SlotBusy | Superseded):
            if progress.enter("standby"):
                log.info("relay.standing_by", reason=str(failure))
            wait = STANDBY_INTERVAL
        elif isinstance(failure, StreamIncomplete):
            log.error("audit.failed", error=failure, transactions=None if failure.xids is None else len(failure.xids))
            wait = 0.0
        else:
            progress.source_reconnects += 1
            progress.enter("connecting")
            wait = backoff.next(random.random())  # noqa: S311  spreading, not secrecy
            log.warning("source.failed", error=failure, attempt=backoff.attempt, wait_seconds=round(wait, 3))
        await pause(self._stopping, wait)
