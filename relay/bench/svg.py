"""Plots as SVG text, without a library and without anything from elsewhere: bars, stacked bars, curves. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#0891b2", "#a16207", "#db2777")
_INK, _FAINT = "#334155", "#cbd5e1"
_FONT = 'font-family="system-ui, sans-serif"'
_LETTER = 6.8  # width of one, about: for names at the left
_ROW, _TOP = 26, 34


@dataclass(frozen=True, slots=True)
class Bar:
    """A name and its parts, drawn one after another; `low` and `high` make a whisker."""

    label: str
    parts: tuple[float, ...]
    shown: str
    low: float | None = None
    high: float | None = None
    colour: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]


def bars(title: str, found: Sequence[Bar], *, legend: Sequence[str] = (), width: int = 720) -> str:
    """Horizontal bars from zero."""
    top = _TOP + (20 if legend else 0)
    height = top + _ROW * len(found) + 10
    highest = max((max(sum(bar.parts), bar.high or 0.0) for bar in found), default=0.0) or 1.0
    left = 24 + _LETTER * max((len(bar.label) for bar in found), default=0)
    room = width - left - 110

    def x(value: float) -> float:
        return left + room * max(value, 0.0) / highest

    body = [_text(8, 20, title, size=14, weight="600")]
    body += _legend(legend, left, 38)
    for number, bar in enumerate(found):
        y = top + number * _ROW
        body.append(_text(left - 8, y + 15, bar.label, anchor="end"))
        at = 0.0
        for index, part in enumerate(bar.parts):
            colour = bar.colour or COLOURS[index % len(COLOURS)]
            body.append(_rect(x(at), y + 3, x(at + part) - x(at), 16, colour))
            at += part
        end = x(at)
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            body.append(_line(x(bar.low), y + 11, x(bar.high), y + 11, _INK))
            body += [_line(x(each), y + 7, x(each), y + 15, _INK) for each in (bar.low, bar.high)]
            end = max(end, x(bar.high))
        body.append(_text(end + 6, y + 15, bar.shown))
    return _svg(width, height, title, body)


def curves(title: str, found: Sequence[Line], *, unit: str, width: int = 720, height: int = 300) -> str:
    """Shares (0 to 1, upwards) over values on a logarithmic axis."""
    left, right, top, bottom = 50, 20, 34 + 18 * math.ceil(len(found) / 2), 36
    values = [max(x, 1e-3) for line in found for x, _ in line.points]
    low = math.floor(math.log10(min(values, default=1.0)))
    high = max(math.ceil(math.log10(max(values, default=10.0))), low + 1)
    height += top - 34

    def x_of(value: float) -> float:
        return left + (width - left - right) * (math.log10(max(value, 1e-3)) - low) / (high - low)

    def y_of(share: float) -> float:
        return top + (height - top - bottom) * (1 - share)

    body = [_text(8, 20, title, size=14, weight="600")]
    for decade in range(low, high + 1):
        x = x_of(10.0**decade)
        body.append(_line(x, top, x, height - bottom, _FAINT))
        body.append(_text(x, height - bottom + 16, f"{10.0**decade:g} {unit}", anchor="middle"))
    for share in (0.0, 0.25, 0.5, 0.75, 0.99):
        body.append(_line(left, y_of(share), width - right, y_of(share), _FAINT))
        body.append(_text(left - 6, y_of(share) + 4, f"{share:.0%}", anchor="end"))
    for number, line in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at_x, at_y = left + (number % 2) * (width - left) / 2, 36 + 18 * (number // 2)
        body += [_rect(at_x, at_y, 10, 10, colour), _text(at_x + 16, at_y + 10, line.label)]
    return _svg(width, height, title, body)


def stacked(pictures: Sequence[str], width: int = 720) -> str:
    """Several plots below each other as one picture."""
    body, y = [], 0
    for each in pictures:
        body.append(each.replace("<svg ", f'<svg y="{y}" ', 1))
        y += int(each.split('height="', 1)[1].split('"', 1)[0]) + 8
    return _svg(width, y, "", body)


def ticks(shown: Callable[[float], str], low: float, high: float) -> str:
    """A spread in words; empty when there is none."""
    return "" if shown(low) == shown(high) else f" ({shown(low)}…{shown(high)})"


def _legend(names: Sequence[str], x: float, y: float) -> list[str]:
    body = []
    for number, name in enumerate(names):
        body += [_rect(x, y - 9, 10, 10, COLOURS[number % len(COLOURS)]), _text(x + 15, y, name)]
        x += 35 + 7 * len(name)
    return body


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{_INK}">{escape(text)}</text>'
    )


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height:.1f}" fill="{colour}" rx="1"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _svg(width: float, height: float, title: str, body: Sequence[str]) -> str:
    named = f"<title>{escape(title)}</title>" if title else ""
    frame = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" {_FONT}>{named}{frame}{"".join(body)}</svg>'
    )
