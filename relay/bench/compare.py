"""Two results against each other: same scenario, sink, tool and mode, figure by figure. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relay.bench.figures import BY_NAME
from relay.bench.result import Report, Spread, Summary

# Ratios to a limit or baseline say the same as the figures that they are made of.
_SKIPPED = ("wal_load_bytes_per_event",)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure in both results; `verdict` is empty when one run's median lies within the other's spread."""

    scenario: str
    sink: str
    tool: str
    mode: str
    figure: str
    before: Spread
    after: Spread
    ratio: float | None  # after / before
    verdict: str  # better, worse or ""


def compare(before: Report, after: Report) -> list[Comparison]:
    """What both have. Without repetitions there is no spread, so every difference is shown as one."""
    old = {_key(each): each for each in before.summaries}
    found = []
    for each in after.summaries:
        other = old.get(_key(each))
        if other is None:
            continue
        for name, spread in each.figures.items():
            was = other.figures.get(name)
            if was is None or name not in BY_NAME or name in _SKIPPED:
                continue
            ratio = round(spread.median / was.median, 4) if was.median else None
            found.append(Comparison(*_key(each), name, was, spread, ratio, verdict(name, was, spread)))
    return found


def verdict(figure: str, was: Spread, now: Spread) -> str:
    better = BY_NAME[figure].better
    same = was.low <= now.median <= was.high or now.low <= was.median <= now.high
    if same or not better:
        return ""
    return "better" if (now.median > was.median) == (better == "more") else "worse"


def render_comparison(found: Sequence[Comparison]) -> RenderableType:
    if not found:
        return Text("The two results have nothing in common.")
    groups = list(dict.fromkeys((each.scenario, each.sink, each.tool, each.mode) for each in found))
    tables: list[RenderableType] = []
    for key in groups:
        scenario, sink, tool, mode = key
        table = Table(title=f"{scenario}: {tool} {mode}, {sink}", title_justify="left")
        table.add_column("")
        for name in ("A", "B", "B / A", ""):
            table.add_column(name, justify="right")
        for each in found:
            if (each.scenario, each.sink, each.tool, each.mode) != key:
                continue
            figure = BY_NAME[each.figure]
            ratio = f"{each.ratio:.2f}" if each.ratio is not None else ""
            style = {"better": "green", "worse": "red"}.get(each.verdict, "")
            values = (figure.shown(each.before.median), figure.shown(each.after.median), ratio)
            table.add_row(figure.title, *values, Text(each.verdict, style=style))
        tables.append(table)
    return Group(*tables)


def _key(each: Summary) -> tuple[str, str, str, str]:
    return each.scenario, each.sink, each.tool, each.mode
