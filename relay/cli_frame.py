"""What commands share: options, and how results are printed (to stdout; heavy modules where they are needed)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file; relay.toml if it exists.", metavar="FILE")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def show(value: Any, render: Any, *, json: bool) -> None:
    with printing():
        if json:
            typer.echo(_json(value))
        else:
            from rich.console import Console  # noqa: PLC0415

            Console(soft_wrap=True, highlight=False).print(render(value))


@contextmanager
def printing() -> Iterator[None]:
    """Results go out, whatever stdout is: a mark that its encoding lacks becomes `?`; a full disk is one sentence."""
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # behind a descriptor that was replaced it cannot seek; what we want is set by then
            sys.stdout.reconfigure(errors="replace")
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where it can be explained, and not when Python ends
    except BrokenPipeError:
        raise  # whoever read has seen enough: the library ends quietly
    except OSError as exc:
        unwritable(exc)


def unwritable(exc: OSError) -> NoReturn:
    # What is still buffered would fail again when Python ends, with a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stderr.write(f"error: the result cannot be written to stdout: {exc.strerror or exc}\n")
    raise SystemExit(1) from None


def _json(value: Any) -> str:
    import orjson  # noqa: PLC0415

    text = orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # JSON can say every character in ASCII: nothing needs to be replaced
        from json import dumps  # noqa: PLC0415

        return dumps(orjson.loads(text), indent=2)
    return text
