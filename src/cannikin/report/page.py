"""The page: its parts, and one HTML text of them that needs nothing beside it.

A figure is traces and layout as plotly's JavaScript takes them, with words around them. Titles, legends and captions
are HTML beside the drawing, never in it, so that they wrap on narrow screens and cannot cover anything. A colour is the
name of a role ("series-0", "waiting"), to which the page gives a colour for light and one for dark.

Plotly's JavaScript, the style and the numbers are in the page, and its policy for content forbids every request, so
that it opens the same without a network. Whatever comes from a log is escaped, also where plotly would take markup.
"""

from __future__ import annotations

import html
import math
import re
from dataclasses import KW_ONLY, dataclass, field
from importlib import resources
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from cannikin._version import __version__
from cannikin.errors import CannikinError

NO_WINDOWS = "The log holds no measured window yet."
MOST_LINES = 8  # more lines than colours that can be told apart become a map of colours
_FEW_POINTS = 40
_MOST_TICKS = 5  # of a logarithmic axis
_LOG_LIMITS = (1e-300, 1e300)  # of what a damaged log may say; beyond them lie 0 and infinity


class Key(NamedTuple):
    """One entry of a legend: what a colour stands for; `style` names the shape of its swatch."""

    label: str
    colour: str
    style: str = "fill"


@dataclass(frozen=True)
class View:
    """One of the drawings that a figure offers to choose from."""

    label: str
    traces: list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """One drawing, or several to choose from, the last one shown first, with its words and axes.

    `more` is the rest of the layout. `scale` is what the ends of a colour scale mean, where there is one.
    """

    name: str
    title: str
    caption: str
    views: list[View]
    x: dict[str, Any]
    y: dict[str, Any]
    _: KW_ONLY
    more: dict[str, Any] = field(default_factory=dict)
    legend: tuple[Key, ...] = ()
    scale: tuple[str, str] | None = None
    height: int = 300
    wide: bool = False

    @property
    def layout(self) -> dict[str, Any]:
        """The layout as plotly takes it."""
        return {"xaxis": self.x, "yaxis": self.y, **self.more, "height": self.height}


class Missing(NamedTuple):
    """The place of a figure for which the log has nothing, and why."""

    name: str
    title: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table: one text per column in each row; `note` says what is left out. `folded` tables open on a click."""

    title: str
    rows: list[dict[str, str]]
    note: str = ""
    folded: bool = False


Item = Figure | Missing | Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: sentences, single facts, then headings with figures and tables; folded, a click opens it."""

    title: str
    sentences: list[str]
    facts: list[tuple[str, str]]
    parts: dict[str, list[Item]]
    folded: bool = False


# What figures are made of.


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with its title and unit."""
    return {"title": {"text": title}, **more}


STEPS = axis("step (number)")


def row_axis(title: str, num_rows: int, **more: Any) -> dict[str, Any]:
    """Return an axis of rows from the top down."""
    return axis(title, range=[num_rows - 0.5, -0.5], showgrid=False, **more)


def log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis with few round numbers, powers of ten first, so that no label covers another."""
    low, high = (min(max(end, _LOG_LIMITS[0]), _LOG_LIMITS[1]) for end in (low, high))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for firsts in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 7)):
        more = [first * 10.0**power for power in powers for first in firsts]
        more = [tick for tick in more if low <= tick <= high]
        ticks = more if len(more) <= _MOST_TICKS else ticks or more[:: -(-len(more) // _MOST_TICKS)]
    if len(ticks) < 2:
        ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 3)})
    labels = [f"{tick:,.6g}" for tick in ticks]
    return axis(title, type="log", range=numbers(np.log10([low, high])), tickvals=ticks, ticktext=labels)


def line(
    x: npt.ArrayLike, y: npt.ArrayLike, name: str, colour: str, *, steps: bool = False, **more: Any
) -> dict[str, Any]:
    """Return a line; a curve of few points shows them. `steps` holds each value up to the next point."""
    xs, ys = numbers(x), numbers(y)
    drawn = {"color": colour, "width": 2, "shape": "hv" if steps else "linear"}
    mode = "lines+markers" if len(xs) <= _FEW_POINTS and not steps else "lines"
    trace = {"type": "scatter", "mode": mode, "x": xs, "y": ys, "name": text(name), "line": drawn}
    return {**trace, "marker": {"size": 5, "color": colour}, **more}


def bars(words: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Return bars that lie; with `words`, one text per bar to show where it is pointed at."""
    shown = {"text": words, "textposition": "none", "hovertemplate": "%{text}<extra></extra>"} if words else {}
    return {"type": "bar", "orientation": "h", **shown, **more}


def numbers(values: npt.ArrayLike) -> list[float | None]:
    """Return numbers as JSON has them, six digits each: more cannot be seen, and a page holds many.

    Example:
        >>> numbers([1234567.0, 0.123456789, float("nan")])
        [1234567.0, 0.123457, None]
    """
    plain: list[float] = np.asarray(values, dtype=np.float64).tolist()
    digits = (value if value.is_integer() else float(f"{value:.6g}") for value in plain)
    return [value if math.isfinite(value) else None for value in digits]


def text(value: str) -> str:
    """Return text for plotly to draw as it is."""
    return html.escape(value, quote=False)


def short(value: str, most: int = 18) -> str:
    """Return text for a label of an axis, where there is little room: cut if need be, and drawn as it is.

    Example:
        >>> short("accuracy"), short("a name of more than eighteen letters")
        ('accuracy', 'a name of more...')
    """
    return text(value if len(value) <= most else f"{value[: most - 3].rstrip()}...")


def series_colour(place: int) -> str:
    """Return the role of one of up to `MOST_LINES` ranks, runs or other things in a figure."""
    return f"series-{place % MOST_LINES}"


def series_keys(names: list[str], style: str = "line") -> tuple[Key, ...]:
    """Return a legend of things that have colours by their order."""
    return tuple(Key(name, series_colour(place), style) for place, name in enumerate(names))


def time_unit(longest_ms: float) -> tuple[str, float]:
    """Return the unit for an axis of times up to `longest_ms`, and milliseconds in it.

    Example:
        >>> time_unit(20465.0), time_unit(720_000.0)
        (('s', 1000.0), ('min', 60000.0))
    """
    for limit, unit, scale in ((600e3, "s", 1e3), (36e6, "min", 60e3)):
        if not longest_ms >= limit:
            return unit, scale
    return "h", 3.6e6


# From the parts to HTML.


def make_page(title: str, sections: list[Section], plotly_js: str) -> str:
    """Return the whole page: assets/page.html, filled in."""
    from jinja2 import Environment, PackageLoader

    assets = Environment(
        loader=PackageLoader("cannikin.report", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    assets.filters |= {"unbroken": _unbroken, "arranged": _arranged}
    figures = {
        f"s{place}-{item.name}": {"layout": item.layout, "views": item.views}
        for place, section in enumerate(sections)
        for item in chain(*section.parts.values())
        if isinstance(item, Figure)
    }
    page = assets.get_template("page.html")
    return page.render(
        title=title, sections=sections, version=__version__, figures=_embedded(figures), plotly=plotly_js
    )


def plotly_source() -> str:
    """Return Plotly's JavaScript, from the plotly package.

    Raises:
        CannikinError: what makes pages is not installed.
    """
    try:
        resources.files("jinja2")
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise CannikinError("the report needs plotly and jinja2: pip install 'cannikin[report]'") from error


def _embedded(value: Any) -> str:
    """Return JSON that is safe inside a `<script>` element: characters that could close it are escaped."""
    plain = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        plain = plain.replace(character, f"\\u{ord(character):04x}")
    return plain


def _unbroken(sentence: str) -> str:
    """Return a sentence in which no line ends between a number and its unit."""
    joined = re.sub(r"(\d) (ms|s|min|h|x)(?= |\W|$)", "\\1\u00a0\\2", sentence)
    return joined.replace("\u00a0x ", "\u00a0x\u00a0")


def _arranged(items: list[Item]) -> list[tuple[Item, bool]]:
    """Return the items in an order that leaves no figure alone in two columns, and whether each is wide."""
    ordered = sorted(items, key=lambda item: isinstance(item, Missing))
    widths: list[bool] = []
    alone = False  # whether a figure of one column still has none beside it
    for item in ordered:
        narrow = isinstance(item, Figure) and not item.wide
        if not narrow and alone:
            widths[-1] = True
        alone = narrow and not alone
        widths.append(not narrow)
    if alone:
        widths[-1] = True
    return list(zip(ordered, widths, strict=True))
