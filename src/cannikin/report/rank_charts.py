"""Figures with one line, row or bar per rank: legible for three ranks and for a thousand."""

from __future__ import annotations

from typing import Any

import numpy as np

from cannikin.core.values import FloatArray, IntArray
from cannikin.report.numbers import (
    Bar,
    ByRank,
    RunArrays,
    Windows,
    column_means,
    early_rows,
    late_rows,
    mean_shares,
    ranks_to_draw,
    thin,
    timeline_bars,
)
from cannikin.report.page import (
    MOST_LINES,
    Figure,
    Key,
    Missing,
    View,
    axis,
    line,
    numbers,
    rank_colour,
    series_keys,
)
from cannikin.runlog import Timeline
from cannikin.runlog.times import ACTIVITIES
from cannikin.words import amount, duration, rank_name, split

_BINS = 100
_COLUMNS = 160  # of a map of colours
_MOST_ROWS = 64
_ROLES = dict(zip(ACTIVITIES, ("forward", "backward", "allreduce", "waiting", "loading", "other"), strict=True))


def ranks_over_time(
    windows: Windows,
    values: FloatArray | ByRank,
    *,
    name: str,
    title: str,
    unit: str,
    caption: str,
    stacked: bool,
) -> Figure | Missing:
    """Draw values of each rank, [W, n], over steps: lines, stacked where they add up, or a map of colours."""
    if not np.isfinite(values).any():
        return Missing(name=name, title=title, reason="The log holds no measured window yet.")
    if values.shape[1] > MOST_LINES:
        return _colour_map(windows, values, name=name, title=title, unit=unit, caption=caption)
    rows = thin(np.asarray(values, dtype=np.float64), _BINS)
    x = np.append(windows.first_step[rows], windows.first_step[-1] + windows.num_steps[-1])
    more: dict[str, Any] = {"stackgroup": "ranks"} if stacked else {}
    traces = []
    for rank in range(values.shape[1]):
        y = np.append(values[rows, rank], values[-1, rank])
        traces.append(line(x, y, rank_name(rank), rank_colour(rank), steps=True, **more))
    top = {} if stacked else {"range": [0, 102]}
    return Figure(
        name=name,
        title=title,
        caption=f"{caption} The top edge is the total batch." if stacked else caption,
        views=(View("", traces),),
        layout={"xaxis": axis("step (number)"), "yaxis": axis(unit, rangemode="tozero", **top)},
        legend=series_keys([rank_name(rank) for rank in range(values.shape[1])], "fill" if stacked else "line"),
    )


def _colour_map(
    windows: Windows, values: FloatArray | ByRank, *, name: str, title: str, unit: str, caption: str
) -> Figure:
    """Draw one row per rank, one column per stretch of steps."""
    edges, means = column_means(windows, values, _COLUMNS)
    ranks = ranks_to_draw(values.shape[1], _MOST_ROWS)
    shown = means[:, ranks].T
    finite = shown[np.isfinite(shown)]
    low, high = float(finite.min()), float(finite.max())
    trace = {
        "type": "heatmap",
        "x": numbers((edges[1:] + edges[:-1]) / 2),
        "y": list(range(len(ranks))),
        "z": [numbers(row) for row in shown],
        "zmin": low,
        "zmax": high if high > low else low + 1,
        "colorscale": "Cividis",
        "showscale": False,
        "text": [[rank_name(rank)] * len(means) for rank in ranks],
        "hovertemplate": "%{text}<br>step %{x:.0f}<br>%{z:.4g}<extra></extra>",
    }
    return Figure(
        name=name,
        title=title,
        caption=f"{caption} A row is a rank, a colour its {unit}, the mean of a stretch of steps.",
        views=(View("", [trace]),),
        layout={"xaxis": axis("step (number)"), "yaxis": _rank_axis(ranks, most_labels=12)},
        scale=(f"{amount(low)}", f"{amount(high)} {unit}"),
    )


def utilisation(run: RunArrays) -> Figure | Missing:
    """Draw what each rank does with its time: under the first split, over the whole run, under the last split."""
    windows, title = run.windows, "What each rank does with its time"
    early, late = early_rows(windows), late_rows(windows)
    whole: IntArray = np.linspace(0, len(windows) - 1, min(len(windows), 2000)).astype(np.int64)
    stretches = [("whole run", whole)]
    if len(windows) and len(np.intersect1d(early, late)) == 0:
        stretches = [(_steps_of("first", windows, early), early), *stretches, (_steps_of("last", windows, late), late)]
    ranks = ranks_to_draw(windows.num_ranks, _MOST_ROWS)
    views = []
    for label, rows in stretches:
        shares = 100 * mean_shares(windows.times_ms[rows], windows.num_steps[rows])
        if np.isfinite(shares).any():
            views.append(View(label, _share_bars(shares[ranks])))
    if not views:
        return Missing(name="utilisation", title=title, reason="The log holds no measured window yet.")
    return Figure(
        name="utilisation",
        title=title,
        caption="Mean over the steps. Waiting is for slower ranks; communication is what no computing hides. The rank "
        "that hardly waits is the one that holds the others up.",
        views=tuple(views),
        layout={
            "barmode": "stack",
            "bargap": 0.25,
            "xaxis": axis("share of the rank's time (%)", range=[0, 100]),
            "yaxis": _rank_axis(ranks),
        },
        legend=tuple(Key(name, role, "hatch" if role == "waiting" else "fill") for name, role in _ROLES.items()),
        height=_height(len(ranks)),
        wide=True,
    )


def _steps_of(which: str, windows: Windows, rows: IntArray) -> str:
    start, end = windows.first_step[rows[0]], windows.first_step[rows[-1]] + windows.num_steps[rows[-1]] - 1
    return f"{which} split (steps {start:,.0f} to {end:,.0f})"


def _share_bars(shares: FloatArray) -> list[dict[str, Any]]:
    places = list(range(len(shares)))
    return [
        {
            "type": "bar",
            "orientation": "h",
            "x": numbers(shares[:, place]),
            "y": places,
            "name": name,
            "marker": _filling(_ROLES[name]),
            "hovertemplate": "%{x:.1f}%",
        }
        for place, name in enumerate(ACTIVITIES)
    ]


def step_timeline(run: RunArrays) -> Figure | Missing:
    """Draw a step to scale, one before anything was learned and one of the last."""
    title = "Timeline of one step"
    lines = [line for line in (run.early, run.late) if line is not None]
    lines = lines[:1] if len(lines) == 2 and lines[0] == lines[1] else lines
    if not lines:
        return Missing(name="timeline", title=title, reason="The log holds no step's full timeline.")
    drawn = [timeline_bars(line) for line in lines]
    longest_ms = max(bar.start_ms + bar.length_ms for bars in drawn for bar in bars)
    labels = ("early", "late") if len(lines) == 2 else ("",)
    num_ranks = max(len(line.local_batches) for line in lines)
    ranks = ranks_to_draw(num_ranks, _MOST_ROWS)
    return Figure(
        name="timeline",
        title=title,
        caption="Above, what a rank computes; below, its gradient's all-reduces, bucket by bucket. Ranks are lined up "
        "by the end of the last all-reduce. In a good split no rank waits long.",
        views=tuple(
            View(_timeline_label(label, line, bars), _timeline_traces(bars, ranks))
            for label, line, bars in zip(labels, lines, drawn, strict=True)
        ),
        layout={
            "barmode": "overlay",
            "xaxis": axis("time in the step (ms)", range=[0, 1.02 * longest_ms]),
            "yaxis": _rank_axis(ranks),
            "hovermode": "closest",
        },
        legend=(
            Key("optimizer and forward", "forward"),
            Key("backward", "backward"),
            Key("all-reduces of buckets, in turn", "allreduce", "shades"),
            Key("waiting for a slower rank", "waiting", "hatch"),
        ),
        height=_height(len(ranks), row=42 if len(ranks) <= MOST_LINES else 22),
        wide=True,
    )


def _timeline_label(which: str, line: Timeline, bars: list[Bar]) -> str:
    length_ms = max(bar.start_ms + bar.length_ms for bar in bars)
    name = f"{which}: step {line.step:,}" if which else f"step {line.step:,}"
    return f"{name}, {duration(length_ms)}" + (
        f", split {split(line.local_batches)}" if len(line.local_batches) <= 4 else ""
    )


def _timeline_traces(bars: list[Bar], ranks: list[int]) -> list[dict[str, Any]]:
    """Return one trace per kind; buckets take two shades in turn, so that neighbours can be told apart."""
    rows = {rank: row for row, rank in enumerate(ranks)}
    kinds: dict[str, list[Bar]] = {}
    for bar in bars:
        if bar.rank in rows:
            role = _ROLES.get(bar.kind, "allreduce")
            shade = "-odd" if bar.kind == "all-reduce" and (bar.bucket or 0) % 2 else ""
            kinds.setdefault(role + shade, []).append(bar)
    return [
        {
            "type": "bar",
            "orientation": "h",
            "base": numbers([bar.start_ms for bar in group]),
            "x": numbers([bar.length_ms for bar in group]),
            "y": [rows[bar.rank] + (0.2 if bar.lane == "link" else -0.2) for bar in group],
            "width": 0.36,
            "text": [_bar_words(bar) for bar in group],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "marker": _filling(role),
        }
        for role, group in kinds.items()
    ]


def _bar_words(bar: Bar) -> str:
    what = bar.kind if bar.bucket is None else f"{bar.kind}, bucket {bar.bucket + 1}"
    return f"{rank_name(bar.rank)}: {what}<br>{amount(bar.length_ms)} ms from {amount(bar.start_ms)} ms"


def _filling(role: str) -> dict[str, Any]:
    hatch = {"pattern": {"shape": "/", "size": 6, "solidity": 0.35}} if role == "waiting" else {}
    return {"color": role, "line": {"width": 0}, **hatch}


def _rank_axis(ranks: list[int], most_labels: int = _MOST_ROWS) -> dict[str, Any]:
    """Return an axis of ranks from the top down, each with its label, or every so many."""
    places = list(range(0, len(ranks), -(-len(ranks) // most_labels)))
    labels = [str(ranks[place]) for place in places]
    ends = [len(ranks) - 0.5, -0.5]
    return axis("rank (number)", range=ends, tickvals=places, ticktext=labels, showgrid=False, zeroline=False)


def _height(num_rows: int, row: int = 0) -> int:
    return 110 + num_rows * (row or (34 if num_rows <= MOST_LINES else 17))
