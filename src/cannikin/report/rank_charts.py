"""Figures with one line, row or bar per rank: legible for three ranks and for a thousand."""

from __future__ import annotations

from typing import Any

import numpy as np

from cannikin.core.values import IntArray
from cannikin.report import page
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
from cannikin.runlog.times import ACTIVITIES, activity
from cannikin.words import amount, duration, rank_name, split

_BINS = 100  # of points, for each line
_COLUMNS = 160  # of a map of colours
_MOST_ROWS = 64
_ROLES = dict(zip(ACTIVITIES, ("forward", "backward", "allreduce", "waiting", "loading", "other"), strict=True))


def local_batches(windows: Windows) -> page.Figure | page.Missing:
    """Draw the split over steps."""
    caption = "How many samples each rank takes in a step: faster ranks should come to take more."
    words = ("split", "Local batches by rank", caption, "local batch (samples)")
    return _ranks_over_time(windows, windows.local_batches, *words, stacked=True)


def computing(windows: Windows) -> page.Figure | page.Missing:
    """Draw the share of its time that each rank computes, over steps."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = 100 * activity(windows.times_ms, "optimizer and forward", "backward") / windows.times_ms.sum(axis=-1)
    caption = "A rank that computes little waits for others or for the network: a good split brings all up together."
    words = ("computing", "Time spent computing, by rank", caption, "share of the time (%)")
    return _ranks_over_time(windows, shares, *words, stacked=False)


def _ranks_over_time(
    windows: Windows, values: ByRank, name: str, title: str, caption: str, unit: str, *, stacked: bool
) -> page.Figure | page.Missing:
    """Draw values of each rank, [W, n], over steps: lines, stacked where they add up, or a map of colours."""
    if not np.isfinite(values).any():
        return page.Missing(name, title, page.NO_WINDOWS)
    if values.shape[1] > page.MOST_LINES:
        return _colour_map(windows, values, name, title, caption, unit)
    rows = thin(np.asarray(values, dtype=np.float64), _BINS)
    x, names = windows.stairs(rows), [rank_name(rank) for rank in range(values.shape[1])]
    more = {"stackgroup": "ranks"} if stacked else {}
    traces = [
        page.line(x, np.append(own[rows], own[-1]), names[rank], page.series_colour(rank), steps=True, **more)
        for rank, own in enumerate(values.T)
    ]
    y = page.axis(unit, rangemode="tozero", **({} if stacked else {"range": [0, 102]}))
    caption += " The top edge is the total batch." if stacked else ""
    legend = page.series_keys(names, "fill" if stacked else "line")
    return page.Figure(name, title, caption, [page.View("", traces)], page.STEPS, y, legend=legend)


def _colour_map(windows: Windows, values: ByRank, name: str, title: str, caption: str, unit: str) -> page.Figure:
    """Draw one row per rank, one column per stretch of steps."""
    edges, means = column_means(windows, values, _COLUMNS)
    ranks = ranks_to_draw(values.shape[1], _MOST_ROWS)
    shown = means[:, ranks].T
    low, high = float(np.nanmin(shown)), float(np.nanmax(shown))
    trace = {
        "type": "heatmap",
        "x": page.numbers((edges[1:] + edges[:-1]) / 2),
        "y": list(range(len(ranks))),
        "z": [page.numbers(row) for row in shown],
        "zmin": low,
        "zmax": high if high > low else low + 1,
        "colorscale": "Cividis",
        "showscale": False,
        "text": [[rank_name(rank)] * len(means) for rank in ranks],
        "hovertemplate": "%{text}<br>step %{x:.0f}<br>%{z:.4g}<extra></extra>",
    }
    return page.Figure(
        name=name,
        title=title,
        caption=f"{caption} A row is a rank, a colour its {unit}, the mean of a stretch of steps.",
        views=[page.View("", [trace])],
        x=page.STEPS,
        y=_rank_axis(ranks, most_labels=12),
        scale=(f"{amount(low)}", f"{amount(high)} {unit}"),
    )


def utilisation(windows: Windows) -> page.Figure | page.Missing:
    """Draw what each rank does with its time: under the first split, over the whole run, under the last split."""
    title = "What each rank does with its time"
    early, late = early_rows(windows), late_rows(windows)
    whole: IntArray = np.linspace(0, len(windows) - 1, min(len(windows), 2000)).astype(np.int64)
    stretches = [("whole run", whole)]
    if len(windows) and len(np.intersect1d(early, late)) == 0:
        stretches = [(_steps_of("first", windows, early), early), *stretches, (_steps_of("last", windows, late), late)]
    ranks = ranks_to_draw(windows.local_batches.shape[1], _MOST_ROWS)
    places, views = list(range(len(ranks))), []
    for label, rows in stretches:
        shares = 100 * mean_shares(windows.times_ms[rows], windows.num_steps[rows])
        if np.isfinite(shares).any():
            traces = [
                page.bars(x=page.numbers(own), y=places, name=name, marker=_filling(role), hovertemplate="%{x:.1f}%")
                for (name, role), own in zip(_ROLES.items(), shares[ranks].T, strict=True)
            ]
            views.append(page.View(label, traces))
    if not views:
        return page.Missing("utilisation", title, page.NO_WINDOWS)
    return page.Figure(
        name="utilisation",
        title=title,
        caption="Mean over the steps. Waiting is for slower ranks; communication is what no computing hides. The rank "
        "that hardly waits is the one that holds the others up.",
        views=views,
        x=page.axis("share of the rank's time (%)", range=[0, 100]),
        y=_rank_axis(ranks),
        more={"barmode": "stack", "bargap": 0.25},
        legend=tuple(page.Key(name, role, "hatch" if role == "waiting" else "fill") for name, role in _ROLES.items()),
        height=110 + len(ranks) * (34 if len(ranks) <= page.MOST_LINES else 17),
        wide=True,
    )


def _steps_of(which: str, windows: Windows, rows: IntArray) -> str:
    start, end = windows.first_step[rows[0]], windows.first_step[rows[-1]] + windows.num_steps[rows[-1]] - 1
    return f"{which} split (steps {start:,.0f} to {end:,.0f})"


def step_timeline(run: RunArrays) -> page.Figure | page.Missing:
    """Draw a step to scale, one before anything was learned and one of the last."""
    title = "Timeline of one step"
    steps = [step for step in (run.early, run.late) if step is not None]
    steps = steps[:1] if len(steps) == 2 and steps[0] == steps[1] else steps
    if not steps:
        return page.Missing("timeline", title, "The log holds no step's full timeline.")
    ranks = ranks_to_draw(max(len(step.local_batches) for step in steps), _MOST_ROWS)
    views, longest_ms = [], 0.0
    for when, step in zip(("early: ", "late: ") if len(steps) == 2 else ("",), steps, strict=True):
        drawn = timeline_bars(step)
        length_ms = max(bar.start_ms + bar.length_ms for bar in drawn)
        batches = f", split {split(step.local_batches)}" if len(step.local_batches) <= 4 else ""
        label = f"{when}step {step.step:,}, {duration(length_ms)}{batches}"
        views.append(page.View(label, _timeline_traces(drawn, ranks)))
        longest_ms = max(longest_ms, length_ms)
    return page.Figure(
        name="timeline",
        title=title,
        caption="Above, what a rank computes; below, its gradient's all-reduces, bucket by bucket. Ranks are lined up "
        "by the end of the last all-reduce. In a good split no rank waits long.",
        views=views,
        x=page.axis("time in the step (ms)", range=[0, 1.02 * longest_ms]),
        y=_rank_axis(ranks),
        more={"barmode": "overlay", "hovermode": "closest"},
        legend=(
            page.Key("optimizer and forward", "forward"),
            page.Key("backward", "backward"),
            page.Key("all-reduces of buckets, in turn", "allreduce", "shades"),
            page.Key("waiting for a slower rank", "waiting", "hatch"),
        ),
        height=110 + len(ranks) * (42 if len(ranks) <= page.MOST_LINES else 22),
        wide=True,
    )


def _timeline_traces(drawn: list[Bar], ranks: list[int]) -> list[dict[str, Any]]:
    """Return one trace per kind; buckets take two shades in turn, so that neighbours can be told apart."""
    rows = {rank: row for row, rank in enumerate(ranks)}
    kinds: dict[str, list[Bar]] = {}
    for bar in drawn:
        if bar.rank in rows:
            role = _ROLES.get(bar.kind, "allreduce")
            shade = "-odd" if bar.kind == "all-reduce" and (bar.bucket or 0) % 2 else ""
            kinds.setdefault(role + shade, []).append(bar)
    return [
        page.bars(
            [_bar_words(bar) for bar in group],
            base=page.numbers([bar.start_ms for bar in group]),
            x=page.numbers([bar.length_ms for bar in group]),
            y=[rows[bar.rank] + (0.2 if bar.lane == "link" else -0.2) for bar in group],
            width=0.36,
            marker=_filling(role),
        )
        for role, group in kinds.items()
    ]


def _bar_words(bar: Bar) -> str:
    what = bar.kind if bar.bucket is None else f"{bar.kind}, bucket {bar.bucket + 1}"
    return f"{rank_name(bar.rank)}: {what}<br>{amount(bar.length_ms)} ms from {amount(bar.start_ms)} ms"


def _filling(role: str) -> dict[str, Any]:
    hatch = {"pattern": {"shape": "/", "size": 6, "solidity": 0.35}} if role == "waiting" else {}
    return {"color": role, "line": {"width": 0}, **hatch}


def _rank_axis(ranks: list[int], most_labels: int = _MOST_ROWS) -> dict[str, Any]:
    """Return an axis of ranks, each with its label, or every so many."""
    places = list(range(0, len(ranks), -(-len(ranks) // most_labels)))
    labels = [str(ranks[place]) for place in places]
    return page.row_axis("rank (number)", len(ranks), tickvals=places, ticktext=labels, zeroline=False)
