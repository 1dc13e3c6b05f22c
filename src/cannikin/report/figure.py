"""What a figure of the page is: traces and layout as plotly's JavaScript takes them, and words around them.

Titles, legends and captions are HTML beside the drawing, never in it, so that they wrap on narrow screens and cannot
cover anything. A colour is the name of a role ("series-0", "waiting"), to which the page gives a colour for light and
one for dark. Text from logs is escaped here, since plotly takes some markup in what it draws.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "MOST_LINES",
    "Figure",
    "Key",
    "Missing",
    "View",
    "axis",
    "line",
    "log_axis",
    "numbers",
    "rank_colour",
    "series_keys",
    "short",
    "text",
    "time_unit",
]

MOST_LINES = 8  # more lines than colours that can be told apart become a map of colours
_FEW_POINTS = 40
_LOG_LIMITS = (1e-300, 1e300)  # of what a damaged log may say; beyond them lie 0 and infinity


class Key(NamedTuple):
    """One entry of a legend: what a colour stands for; `style` names the shape of its swatch."""

    label: str
    colour: str
    style: str = "fill"


class View(NamedTuple):
    """One of the drawings that a figure offers to choose from."""

    label: str
    traces: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One drawing, or several to choose from, with its words.

    `scale` is what the ends of a colour scale mean, where there is one. `chosen` is the view shown first.
    """

    name: str
    title: str
    caption: str
    views: tuple[View, ...]
    layout: dict[str, Any]
    legend: tuple[Key, ...] = ()
    scale: tuple[str, str] | None = None
    chosen: int = -1
    height: int = 300
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Missing:
    """The place of a figure for which the log has nothing, and why."""

    name: str
    title: str
    reason: str
    views: tuple[View, ...] = field(default=(), init=False)


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title and unit."""
    return {"title": {"text": title}, **more}


def log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis from `low` to `high`, with few enough labels that none covers another."""
    low, high = (min(max(end, _LOG_LIMITS[0]), _LOG_LIMITS[1]) for end in (low, high))
    ticks = _log_ticks(low, high)
    labels = [f"{tick:,.6g}" for tick in ticks]
    return axis(title, type="log", range=numbers(np.log10([low, high])), tickvals=ticks, ticktext=labels)


def _log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: as many as there may be, powers of ten first.

    Example:
        >>> _log_ticks(8.0, 20000.0), _log_ticks(60.0, 2800.0), _log_ticks(41.0, 43.0)
        ([10.0, 100.0, 1000.0, 10000.0], [100.0, 200.0, 500.0, 1000.0, 2000.0], [41.0, 42.0, 43.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for firsts in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 7)):
        more = [first * 10.0**power for power in powers for first in firsts]
        more = [tick for tick in more if low <= tick <= high]
        ticks = more if len(more) <= most else ticks or more[:: -(-len(more) // most)]
    return ticks if len(ticks) > 1 else sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 3)})


def line(
    x: npt.ArrayLike, y: npt.ArrayLike, name: str, colour: str, *, steps: bool = False, **more: Any
) -> dict[str, Any]:
    """A line; a curve of few points shows them. `steps` holds each value up to the next point."""
    xs, ys = numbers(x), numbers(y)
    drawn = {"color": colour, "width": 2, "shape": "hv" if steps else "linear"}
    mode = "lines+markers" if len(xs) <= _FEW_POINTS and not steps else "lines"
    trace = {"type": "scatter", "mode": mode, "x": xs, "y": ys, "name": text(name), "line": drawn}
    return {**trace, "marker": {"size": 5, "color": colour}, **more}


def numbers(values: npt.ArrayLike) -> list[float | None]:
    """Numbers as JSON has them, six digits each: more cannot be seen, and a page holds many.

    Example:
        >>> numbers([1234567.0, 0.123456789, float("nan")])
        [1234567.0, 0.123457, None]
    """
    array = np.asarray(values, dtype=np.float64)
    return [_short(value) for value in array.tolist()]


def _short(value: float) -> float | None:
    if not np.isfinite(value):
        return None
    return value if value.is_integer() else float(f"{value:.6g}")


def text(value: str) -> str:
    """Text for plotly to draw as it is."""
    return html.escape(value, quote=False)


def short(value: str, most: int = 18) -> str:
    """Text for a label of an axis, where there is little room: cut if need be, and drawn as it is.

    Example:
        >>> short("accuracy"), short("a name of more than eighteen letters")
        ('accuracy', 'a name of more...')
    """
    return text(value if len(value) <= most else f"{value[: most - 3].rstrip()}...")


def rank_colour(rank: int) -> str:
    """The role of a rank, or of any other thing of which there are up to `MOST_LINES`."""
    return f"series-{rank % MOST_LINES}"


def series_keys(names: list[str], style: str = "line") -> tuple[Key, ...]:
    """A legend of things that have colours by their order."""
    return tuple(Key(name, rank_colour(place), style) for place, name in enumerate(names))


def time_unit(longest_ms: float) -> tuple[str, float]:
    """The unit for an axis of times up to `longest_ms`, and milliseconds in it.

    Example:
        >>> time_unit(20465.0), time_unit(720_000.0)
        (('s', 1000.0), ('min', 60000.0))
    """
    for limit, unit, scale in ((600e3, "s", 1e3), (36e6, "min", 60e3)):
        if not longest_ms >= limit:
            return unit, scale
    return "h", 3.6e6
