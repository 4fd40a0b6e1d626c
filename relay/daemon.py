"""`relay run`: the relay as a process, until SIGTERM or SIGINT; a second signal stops it without draining.

It starts in its usual form without the library that reads the other commands: that takes 2 MB and a tenth of the time
to the first event. Whatever is not the usual form is left to that library, errors and help included.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relay import __version__
from relay.errors import RelayError
from relay.frame import go, load

if TYPE_CHECKING:
    from relay.config import Config


def usual(arguments: Sequence[str]) -> tuple[Path | None, bool] | None:
    """`run [--config FILE] [--from-now]`: the file, and whether from now; None: it is something else."""
    config: Path | None = None
    from_now = False
    if arguments[:1] != ["run"]:
        return None
    rest = iter(arguments[1:])
    for word in rest:
        name, equals, value = word.partition("=")
        if word == "--from-now":
            from_now = True
        elif word in ("--config", "-c"):
            config = Path(next(rest, ""))
        elif name == "--config" and equals:
            config = Path(value)
        else:
            return None
    return None if config == Path() else (config, from_now)


def run(config: Path | None = None, *, from_now: bool = False) -> None:
    settings = load(config, apart="relay.config" not in sys.modules)
    from relay import log  # noqa: PLC0415

    # Events live for milliseconds and form no cycles: looking for garbage among them every 700 is time lost.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    log.configure(settings.log, sys.stderr if settings.sink.kind == "console" else sys.stdout)
    go(_run(settings, from_now=from_now), quick=True)


async def _run(settings: Config, *, from_now: bool) -> None:
    import structlog  # noqa: PLC0415

    from relay.app import Relay  # noqa: PLC0415

    lines = structlog.get_logger("relay.daemon")
    loop = asyncio.get_running_loop()
    asked = False
    try:
        async with Relay(settings, from_now=from_now) as relay:

            def signalled() -> None:
                nonlocal asked
                if asked:
                    lines.warning("relay.aborted")
                    relay.abort()
                else:
                    asked = True
                    lines.info("relay.draining", in_flight_events=relay.progress.in_flight_events)
                    relay.stop()

            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, signalled)
            lines.info("relay.started", version=__version__, name=settings.relay.name, admin_port=relay.admin.port)
            try:
                await relay.wait()
            except asyncio.CancelledError:
                if not asked:
                    raise
                raise RelayError("stopped without draining, by a second signal") from None
    except RelayError as exc:  # for whoever reads the log; stderr gets the plain sentence
        lines.error("relay.failed", error=exc)
        raise
    lines.info("relay.stopped", published_events=relay.progress.published_events)
