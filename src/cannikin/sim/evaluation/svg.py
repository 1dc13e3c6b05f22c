"""Two kinds of plot as SVG text, with nothing but the standard library: lines, and groups of bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

__all__ = ["bars", "lines"]

_COLOURS = ("#7f7f7f", "#1f77b4", "#ff7f0e", "#bcbd22", "#9467bd", "#2ca02c", "#d62728", "#17becf")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 360, 64, 150, 34, 48

Points = Sequence[tuple[float, float]]


def lines(title: str, x_name: str, y_name: str, series: Mapping[str, Points], *, log_x: bool = False) -> str:
    """One line a series.

    >>> lines("t", "x", "y", {"a": [(1.0, 2.0), (2.0, 3.0)]}).startswith("<svg")
    True
    """
    points = [point for values in series.values() for point in values]
    x_axis = _Axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, log=log_x)
    y_axis = _Axis([*(y for _, y in points), 0.0], _HEIGHT - _BOTTOM, _TOP)
    parts = _frame(title, x_name, y_name, x_axis, y_axis)
    for number, (name, values) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in values)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(_legend(number, name, colour))
    return _whole(parts)


def bars(title: str, y_name: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """One group of bars for each of `groups`, a bar a series.

    >>> bars("t", "y", ["g"], {"a": [1.0]}).count("<rect")
    3
    """
    y_axis = _Axis([*(value for values in series.values() for value in values), 0.0], _HEIGHT - _BOTTOM, _TOP)
    parts = _frame(title, "", y_name, None, y_axis)
    room = (_WIDTH - _RIGHT - _LEFT) / max(len(groups), 1)
    width = 0.8 * room / max(len(series), 1)
    for place, group in enumerate(groups):
        middle = _LEFT + (place + 0.5) * room
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 16, group, anchor="middle"))
        for number, values in enumerate(series.values()):
            left, top = middle - 0.4 * room + number * width, y_axis.at(values[place])
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{width * 0.92:.1f}" '
                f'height="{y_axis.at(0.0) - top:.1f}" fill="{_COLOURS[number % len(_COLOURS)]}"/>'
            )
    parts += [_legend(number, name, _COLOURS[number % len(_COLOURS)]) for number, name in enumerate(series)]
    return _whole(parts)


class _Axis:
    """Maps values to places, with round ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool = False) -> None:
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        self.log = log and low > 0
        self.low, self.high = (math.log10(low), math.log10(high)) if self.log else (low, high)
        if self.high <= self.low:
            self.high = self.low + 1.0
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        return self.start + (place - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            return [10.0**k for k in range(math.ceil(self.low), math.floor(self.high) + 1)] or [10.0**self.low]
        raw = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * k for k in (1, 2, 5, 10) if size * k >= raw)
        first = math.ceil(self.low / step)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _frame(title: str, x_name: str, y_name: str, x_axis: _Axis | None, y_axis: _Axis) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>', _text(_LEFT, 20, title, weight="bold")]
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    for tick in x_axis.ticks() if x_axis is not None else ():
        x = x_axis.at(tick) if x_axis is not None else 0.0
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="black"/>')
        parts.append(_text(x, bottom + 16, f"{tick:g}", anchor="middle"))
    parts.append(f'<path d="M{_LEFT},{_TOP} V{bottom} H{right}" fill="none" stroke="black"/>')
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 10, x_name, anchor="middle"))
    parts.append(
        f'<g transform="translate(14,{(_TOP + bottom) / 2:.0f}) rotate(-90)">{_text(0, 0, y_name, "middle")}</g>'
    )
    return parts


def _legend(number: int, name: str, colour: str) -> str:
    y = _TOP + 18 * number
    x = _WIDTH - _RIGHT + 12
    return f'<rect x="{x}" y="{y}" width="12" height="10" fill="{colour}"/>' + _text(x + 18, y + 9, name)


def _text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def _whole(parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
    return head + f'height="{_HEIGHT}" font-family="sans-serif" font-size="11">\n' + "\n".join(parts) + "\n</svg>\n"
