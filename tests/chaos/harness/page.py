"""The report as one HTML page that needs nothing else: the text, and a timeline of events per second and faults."""

from __future__ import annotations

import html

from tests.chaos.harness.faults import Injected
from tests.chaos.harness.schedule import KINDS

_COLOURS = {
    "relay": "#7c3aed",
    "broker": "#dc2626",
    "broker link": "#ea580c",
    "postgres": "#2563eb",
    "postgres link": "#0891b2",
    "slot": "#be185d",
    "writers": "#65a30d",
}
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1f2937;
       background: #fff }
pre { font: 12.5px/1.45 ui-monospace, monospace; background: #f3f4f6; padding: 1rem; overflow-x: auto;
      border-radius: 6px }
h1 { font-size: 1.3rem } .ok { color: #15803d } .bad { color: #b91c1c }
svg { width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: #4b5563 }
@media (prefers-color-scheme: dark) { body { background: #111827; color: #e5e7eb } pre { background: #1f2937 }
  svg text { fill: #9ca3af } }
"""
_WIDTH, _LEFT, _HIGH, _LANE = 1180, 150, 180, 16


def page(
    text: str,
    faults: list[Injected],
    series: dict[str, list[tuple[int, int]]],
    times: dict[str, float],
    *,
    passed: bool,
) -> str:
    verdict = '<span class="ok">passed</span>' if passed else '<span class="bad">failed</span>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Chaos run</title>'
        f"<style>{_STYLE}</style></head><body><h1>Chaos run: {verdict}</h1>"
        f"{timeline(faults, series, times)}<pre>{html.escape(text)}</pre></body></html>\n"
    )


def timeline(faults: list[Injected], series: dict[str, list[tuple[int, int]]], times: dict[str, float]) -> str:
    """Above, events per second as they were committed (line) and as they arrived in the broker (area).

    Below, a lane per kind: the bar is the fault, the thin line behind it the time until an event that was committed
    after it had arrived.
    """
    began = times.get("began", 0.0)
    total = max(times.get("storm", 0.0) + times.get("settle", 0.0), 1.0)
    arrived, committed = dict(series["arrived"]), dict(series["committed"])
    most = max([*arrived.values(), *committed.values()], default=1)
    lanes = [kind for kind in KINDS if any(fault.kind == kind for fault in faults)]
    height = _HIGH + 30 + _LANE * len(lanes) + 20

    def x(seconds: float) -> float:
        return round(_LEFT + max(seconds, 0.0) / total * (_WIDTH - _LEFT - 10), 1)

    def y(events: int) -> float:
        return round(_HIGH - events / most * (_HIGH - 20), 1)

    def points(events: dict[int, int]) -> str:
        return " ".join(f"{x(second)},{y(events.get(second, 0))}" for second in range(int(total) + 1))

    drawn = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Events per second, and faults, over time">',
        f'<polygon points="{x(0)},{_HIGH} {points(arrived)} {x(total)},{_HIGH}" fill="#10b981" fill-opacity=".4"/>',
        f'<polyline points="{points(committed)}" fill="none" stroke="#6b7280"/>',
        f'<text x="{_LEFT - 8}" y="20" text-anchor="end">{most:,} events/s</text>',
        f'<text x="{_LEFT - 8}" y="{_HIGH}" text-anchor="end">0</text>',
    ]
    quiet = x(times.get("storm", total))
    drawn.append(
        f'<line x1="{quiet}" x2="{quiet}" y1="10" y2="{height - 20}" stroke="#6b7280" stroke-dasharray="4 3"/>'
    )
    drawn.append(f'<text x="{quiet + 4}" y="18">quiet</text>')
    for number, kind in enumerate(lanes):
        top = _HIGH + 24 + number * _LANE
        colour = _COLOURS[KINDS[kind].target]
        drawn.append(f'<text x="{_LEFT - 8}" y="{top + 9}" text-anchor="end">{kind}</text>')
        for fault in faults:
            if fault.kind != kind:
                continue
            start, end = fault.began - began, fault.ended - began
            faded = ' fill-opacity=".25"' if fault.effect.startswith("missed") else ""
            wide = max(x(end) - x(start), 3)
            note = f"{kind} at {start:.1f} s for {end - start:.1f} s; {fault.effect}"
            if fault.seconds_to_recover is not None and fault.recovered is not None:
                note += f"; recovered {fault.seconds_to_recover:.2f} s later"
                until, middle = x(fault.recovered - began), top + 5
                drawn.append(f'<line x1="{x(end)}" x2="{until}" y1="{middle}" y2="{middle}" stroke="{colour}"/>')
            drawn.append(
                f'<rect x="{x(start)}" y="{top}" width="{wide}" height="10" rx="2" fill="{colour}"{faded}>'
                f"<title>{html.escape(note)}</title></rect>"
            )
    step = next(s for s in (5, 10, 30, 60, 300, 600, 3600, 86400) if total / s <= 15)
    drawn += [
        f'<text x="{x(second)}" y="{height - 4}" text-anchor="middle">{second} s</text>'
        for second in range(0, int(total) + 1, step)
    ]
    return "\n".join([*drawn, "</svg>"])
