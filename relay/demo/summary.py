"""The demo's last word, for people. Pure."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from relay.demo.ledger import Latency, Summary


def render(summary: Summary) -> Table:
    """What was counted, and what it means."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(style="dim")
    verdict = Text("nothing lost", "bold green") if summary.ok else Text("NOT what was promised", "bold red")
    killed = f", killed {summary.kills} times with kill -9" if summary.kills else ""
    table.add_row("", verdict, f"{summary.seconds:.0f} s{killed}")
    rows = (
        (summary.committed, "committed", "transactions of the shop", False),
        (summary.rolled_back, "rolled back", "their events must never be seen", False),
        (summary.delivered, "delivered", "to the consumer, each counted once", False),
        (summary.lost, "lost", "committed, not delivered", True),
        (summary.uncommitted_delivered, "never committed", "and delivered all the same", True),
        (summary.out_of_order, "out of order", "within their order", True),
        (summary.duplicates, "duplicates", "reached the consumer, which knew their ids", False),
        (summary.dropped_by_broker, "repeats", "published again after a kill; the broker knew their ids", False),
    )
    for number, name, meaning, bad in rows:
        table.add_row(Text(f"{number:,}", "bold red" if bad and number else "bold"), name, meaning)
    if summary.latency_seconds:
        table.add_row("", Text(milliseconds(summary.latency_seconds)), "from COMMIT to the consumer")
    return table


def milliseconds(latency: Latency) -> str:
    """`p50 1.9 ms · p99 6.2 ms · max 14 ms`"""
    return f"p50 {duration(latency.p50)} · p99 {duration(latency.p99)} · max {duration(latency.max)}"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def size(count: float) -> str:
    """Bytes, in the unit that fits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
