"""What `relay check` says: findings, each bad one with its remedy; and how names and sizes are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from psycopg import sql
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from relay.source.slot import split

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    message: str
    remedy: str = ""


def exit_code(findings: Sequence[Finding]) -> int:
    return 3 if any(finding.level == "error" for finding in findings) else 0


def identifier(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def qualified(table: str) -> str:
    return sql.Identifier(*split(table)).as_string(None)


def size(count: int) -> str:
    for unit, factor in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def render(findings: Sequence[Finding]) -> RenderableType:
    """For people: a mark, what was looked at, what was found, and what to do about it."""
    table = Table.grid(padding=(0, 2))
    marks = {"ok": "[green]✓[/]", "warning": "[yellow]![/]", "error": "[red]✗[/]"}
    for finding in findings:
        message = Text(finding.message)
        if finding.remedy and finding.level != "ok":
            message.append(f"\n→ {finding.remedy}", style="bold")
        table.add_row(marks[finding.level], Text(finding.subject, style="bold"), message)
    return table
