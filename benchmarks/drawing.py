"""Draws the figures of reports and documentation as SVG text, by matplotlib: lines, and groups of bars.

The same data give the same bytes, and words stay text that can be searched.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import cycle

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

Points = Sequence[tuple[float, float]]

_INCHES = (6.67, 3.75)  # 640 x 360 pixels in a browser
_COLOURS = ("#7f7f7f", "#1f77b4", "#ff7f0e", "#bcbd22", "#9467bd", "#2ca02c", "#d62728", "#17becf")
_STYLE = {
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8.5,
    "axes.xmargin": 0,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
    "font.size": 8.5,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "cannikin",
}


@rc_context(_STYLE)
def lines(
    title: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Points],
    *,
    log_x: bool = False,
    stairs: Sequence[str] = (),
) -> str:
    """Return a plot with one line per series; each value of the series named in `stairs` holds until the next begins.

    >>> lines("t", "x", "y", {"a": [(1.0, 2.0), (2.0, 3.0)]}).count("<svg")
    1
    """
    figure, axes = _begin(title, y_name)
    axes.set_xlabel(x_name)
    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
    for (name, points), colour in zip(series.items(), cycle(_COLOURS)):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, label=name, color=colour, drawstyle="steps-post" if name in stairs else "default")
    return _end(figure)


@rc_context(_STYLE)
def bars(
    title: str, y_name: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], *, log_y: bool = False
) -> str:
    """Return a plot with one group of bars for each of `groups`, with one bar per series.

    With `log_y` bars begin at a power of 10 below all values.

    >>> bars("t", "y", ["g"], {"a": [1.0]}).count("<svg")
    1
    """
    figure, axes = _begin(title, y_name)
    axes.margins(x=0.02)
    width = 0.8 / max(len(series), 1)
    for number, ((name, values), colour) in enumerate(zip(series.items(), cycle(_COLOURS))):
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(groups))]
        axes.bar(places, values, width * 0.92, label=name, color=colour)
    axes.set_xticks(range(len(groups)), groups)
    if not log_y:
        return _end(figure)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    least = min((value for values in series.values() for value in values), default=1.0)
    return _end(figure, bottom=10 ** math.floor(math.log10(least)))


def _begin(title: str, y_name: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_ylabel(y_name)
    axes.grid(visible=True, axis="y")
    return figure, axes


def _end(figure: Figure, bottom: float = 0.0) -> str:
    """Return the figure as SVG, with its legend on the right."""
    figure.axes[0].set_ylim(bottom=bottom)
    figure.legend(loc="outside right upper")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
