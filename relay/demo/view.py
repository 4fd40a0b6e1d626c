"""The demo's live view: a picture on a terminal, a line a second elsewhere. It reads, and never decides anything."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from relay.demo.ledger import Delivered, Ledger
from relay.demo.summary import duration, milliseconds, size

_REFRESH = 0.25
_MINUTE = 60
_OTHER_LINES = 18  # of the picture, without the events
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"streaming": "green", "recovering": "cyan", "polling": "cyan", "down": "red"}


@dataclass(slots=True)
class Scene:
    """What the view shows: the ledger, the relay's own /status, and what happened last."""

    broker: str
    admin_url: str
    ledger: Ledger
    started: float = 0.0  # monotonic
    kills: int = 0
    status: dict[str, Any] = field(default_factory=dict)  # empty: it does not answer
    dropped_before: int = 0  # repeats that the broker dropped, as relays that are gone have told
    news: list[str] = field(default_factory=lambda: ["Ctrl-C closes the shop, waits for the rest, and counts"])

    def say(self, what: str) -> None:
        self.news.append(f"{_clock()} {what}")

    @property
    def dropped(self) -> int:
        """Events that were published again, and that the broker recognised by their ids."""
        return self.dropped_before + int(self.status.get("counters", {}).get("duplicate_events", 0))

    @property
    def state(self) -> str:
        return str(self.status.get("state", "down"))

    @property
    def lag(self) -> str:
        lag = self.status.get("lag_bytes")
        return "-" if lag is None else size(lag)

    @property
    def in_flight(self) -> str:
        return f"{self.status['in_flight']['events']:,}" if self.status else "-"


class _Sample(NamedTuple):
    at: float
    committed: int
    delivered: int


class View:
    """Draws the scene until cancelled."""

    def __init__(self, console: Console, scene: Scene) -> None:
        self._console = console
        self._scene = scene
        self._samples: deque[_Sample] = deque(maxlen=int(2 / _REFRESH) + 1)  # rates are over two seconds
        self._history: deque[float] = deque(maxlen=_MINUTE)  # delivered in each second

    async def run(self) -> None:
        if self._console.is_terminal:
            await self._picture()
        else:
            await self._lines()

    async def _lines(self) -> None:
        told = 0
        self._take()
        while True:
            for what in self._scene.news[told:]:
                self._console.print(what, soft_wrap=True)
            told = len(self._scene.news)
            await asyncio.sleep(1.0)
            self._take()
            self._console.print(self.line(), soft_wrap=True)

    async def _picture(self) -> None:
        with Live(console=self._console, auto_refresh=False) as live:
            ticks = 0
            try:
                while True:
                    self._take()
                    if ticks % round(1 / _REFRESH) == 0:
                        self._history.append(self.rates()[1])
                    ticks += 1
                    # In a thread: drawing takes longer than an event does, and the consumer must not wait for it.
                    await asyncio.to_thread(live.update, self.picture(), refresh=True)
                    await asyncio.sleep(_REFRESH)
            finally:
                live.update(self.picture(), refresh=True)  # the last numbers stay on the screen

    def _take(self) -> None:
        ledger = self._scene.ledger
        self._samples.append(_Sample(time.monotonic(), ledger.committed, ledger.delivered))

    def rates(self) -> tuple[float, float]:
        """Committed and delivered events a second."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        first, last = self._samples[0], self._samples[-1]
        seconds = last.at - first.at
        return (last.committed - first.committed) / seconds, (last.delivered - first.delivered) / seconds

    def line(self) -> str:
        scene, ledger = self._scene, self._scene.ledger
        committed, delivered = self.rates()
        latency = ledger.recent_latency()
        parts = [
            f"{_clock()} {scene.state:<10}",
            f"committed {ledger.committed:,} ({committed:,.0f}/s)",
            f"delivered {ledger.delivered:,} ({delivered:,.0f}/s)",
            f"rolled back {ledger.rolled_back:,}",
            f"duplicates {ledger.duplicates:,}",
            f"lag {scene.lag}",
            f"in flight {scene.in_flight}",
            milliseconds(latency) if latency else "",
        ]
        return "  ".join(part for part in parts if part)

    def picture(self) -> Group:
        events = max(3, self._console.height - _OTHER_LINES)
        columns = Table.grid(expand=True)
        columns.add_column(ratio=1)
        columns.add_column(ratio=1)
        columns.add_row(self._flow(), self._relay())
        news = Text(f" {self._scene.news[-1]}", "italic", no_wrap=True, overflow="ellipsis")
        return Group(self._title(), columns, self._minute(), self._events(events), news)

    def _title(self) -> Table:
        scene = self._scene
        seconds = int(time.monotonic() - scene.started)
        title = Table.grid(expand=True, padding=(0, 1))
        title.add_column()
        title.add_column(justify="right", style="dim")
        way = Text.assemble(" ", ("relay demo", "bold"), f"   shop → PostgreSQL 18 → relay → {scene.broker} → consumer")
        title.add_row(way, f"{seconds // 60:02d}:{seconds % 60:02d}")
        title.add_row(
            Text.assemble((" look at      ", "dim"), (f"{scene.admin_url}/status", "cyan"), ("  /metrics", "cyan"))
        )
        return title

    def _flow(self) -> Panel:
        ledger = self._scene.ledger
        committed, delivered = self.rates()
        table = _numbers()
        table.add_row("committed", f"{ledger.committed:,}", f"{committed:,.0f}/s")
        table.add_row("delivered", f"{ledger.delivered:,}", f"{delivered:,.0f}/s")
        table.add_row("on the way", f"{ledger.owed:,}", "")
        table.add_row("rolled back", f"{ledger.rolled_back:,}", _never(ledger.uncommitted_delivered, "never seen"))
        table.add_row("repeats", f"{self._scene.dropped:,}", "dropped by broker")
        table.add_row("duplicates", f"{ledger.duplicates:,}", "dropped by consumer")
        table.add_row("out of order", f"{ledger.out_of_order:,}", "")
        return Panel(table, title="Events", title_align="left", border_style="dim", box=box.ROUNDED)

    def _relay(self) -> Panel:
        scene = self._scene
        latency = scene.ledger.recent_latency()
        table = _numbers()
        table.add_row("state", Text(f"● {scene.state}", _COLOURS.get(scene.state, "yellow")), "")
        table.add_row("killed", f"{scene.kills}", "times, kill -9")
        table.add_row("lag", scene.lag, "WAL to confirm")
        table.add_row("in flight", scene.in_flight, "events")
        table.add_row("latency p50", duration(latency.p50) if latency else "-", "COMMIT → consumer")
        table.add_row("p99", duration(latency.p99) if latency else "-", "")
        table.add_row("max", duration(latency.max) if latency else "-", "")
        return Panel(table, title="Relay", title_align="left", border_style="dim", box=box.ROUNDED)

    def _minute(self) -> Text:
        label = " delivered/s, last minute  "
        room = min(_MINUTE, self._console.width - len(label))
        bars = sparkline(list(self._history)[-room:]).rjust(room)
        return Text.assemble((label, "dim"), (bars, "green"), no_wrap=True, overflow="crop")

    def _events(self, count: int) -> Panel:
        table = Table(box=None, expand=True, padding=(0, 1), header_style="dim")
        table.add_column("arrived", no_wrap=True, width=12)
        table.add_column("event", no_wrap=True, width=13)
        table.add_column("order", justify="right", no_wrap=True, width=8)
        table.add_column("id", style="dim", no_wrap=True, ratio=1)
        table.add_column("after", justify="right", no_wrap=True)
        newest: list[Delivered] = list(self._scene.ledger.last)[-count:][::-1]
        now, clock = time.monotonic(), time.time()
        for arrival, latency in newest:
            at = datetime.fromtimestamp(clock - (now - arrival.at), UTC).astimezone()
            table.add_row(
                f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}",
                Text(f"order.{arrival.type}", _STEP_COLOURS.get(arrival.type, "")),
                arrival.aggregate_id,
                arrival.id,
                duration(latency),
            )
        for _ in range(count - len(newest)):
            table.add_row()
        return Panel(table, title="Last events", title_align="left", border_style="dim", box=box.ROUNDED)


_STEP_COLOURS = {"placed": "yellow", "paid": "cyan", "shipped": "green"}


def sparkline(values: Collection[float]) -> str:
    top = max(values, default=0.0)
    if not top:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * (len(_BARS) - 1) + 0.5))] for value in values)


def _numbers() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=12)
    table.add_column(justify="right", no_wrap=True, min_width=11)
    table.add_column(style="dim", no_wrap=True)
    return table


def _never(count: int, good: str) -> str | Text:
    return Text(f"{count:,} DELIVERED", "bold red") if count else good


def _clock() -> str:
    return f"{datetime.now(UTC).astimezone():%H:%M:%S}"
