"""The frame of every command: the configuration, the event loop, errors explained. Talk goes to stderr.

`relay run` needs nothing else of the command line, so nothing here may load the libraries that the others are made of.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from relay.errors import ConfigError, RelayError

if TYPE_CHECKING:
    from relay.config import Config

T = TypeVar("T")


def load(path: Path | None, *, apart: bool = False) -> Config:
    """The configuration; `apart`: checked by another process, so that the library that checks it is not loaded here."""
    default = Path("relay.toml")
    with Explained():
        if apart:
            from relay.apart import load as read  # noqa: PLC0415
        else:
            from relay.config import load as read  # noqa: PLC0415
        settings = read(path if path is not None else default if default.exists() else None)
    from relay import log  # noqa: PLC0415

    log.configure(settings.log)  # talk goes to stderr: stdout is for results; only `run` changes that
    return settings


def go(work: Coroutine[Any, Any, T], *, quick: bool = False) -> T:
    """Run it to its end; `quick`: on uvloop's loop where there is one, which saves a third of an event's latency."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if quick:
        with suppress(ImportError):
            from uvloop import new_event_loop as factory  # noqa: PLC0415
    with Explained(), asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


class Explained:
    """Turns our errors into one sentence, a hint and an exit code."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RelayError):
            faults = error.faults if isinstance(error, ConfigError) else [str(error)]
            said = [f"error: {fault}\n" for fault in faults]
            if error.hint:
                said.append(f"hint: {error.hint}\n")
            sys.stderr.writelines(said)
            raise SystemExit(error.exit_code) from None
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(130) from None
