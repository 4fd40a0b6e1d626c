"""The frame of every command: shared options, the configuration, the event loop, what is printed, errors explained.

Results go to stdout, talk to stderr. Heavy modules are imported where they are needed, as in `cli.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from relay.errors import ConfigError, RelayError

if TYPE_CHECKING:
    from relay.config import Config

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file; relay.toml if it exists.", metavar="FILE")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

T = TypeVar("T")


def load(path: Path | None) -> Config:
    from relay import config, log  # noqa: PLC0415

    default = Path("relay.toml")
    with Explained():
        settings = config.load(path if path is not None else default if default.exists() else None)
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


def show(value: Any, render: Any, *, json: bool) -> None:
    if json:
        import orjson  # noqa: PLC0415

        typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode())
    else:
        from rich.console import Console  # noqa: PLC0415

        Console(soft_wrap=True, highlight=False).print(render(value))


class Explained:
    """Turns our errors into one sentence, a hint and an exit code."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RelayError):
            faults = error.faults if isinstance(error, ConfigError) else [str(error)]
            for fault in faults:
                typer.echo(f"error: {fault}", err=True)
            if error.hint:
                typer.echo(f"hint: {error.hint}", err=True)
            raise typer.Exit(error.exit_code) from None
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(130) from None
