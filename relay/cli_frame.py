"""What commands share: options, and how results are printed (to stdout; heavy modules where they are needed)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file; relay.toml if it exists.", metavar="FILE")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def show(value: Any, render: Any, *, json: bool) -> None:
    if json:
        import orjson  # noqa: PLC0415

        typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode())
    else:
        from rich.console import Console  # noqa: PLC0415

        Console(soft_wrap=True, highlight=False).print(render(value))
