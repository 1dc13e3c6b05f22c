"""Several runs side by side: who reached the target when, and what their steps and batches were."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cannikin.report.arrays import Metric, RunArrays
from cannikin.report.figure import (
    Figure,
    Key,
    Missing,
    View,
    axis,
    line,
    numbers,
    rank_colour,
    series_keys,
    short,
    time_unit,
)
from cannikin.report.numbers import late_rows, phase, thin, time_to_target_ms
from cannikin.words import amount, duration, split

__all__ = ["Reached", "Target", "compare_charts", "compare_headline", "compare_table", "reached"]

_BINS = 150
_MOST_METRICS = 4


@dataclass(frozen=True, kw_only=True)
class Target:
    """A value of a metric that runs are to reach."""

    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When each run reached the target, None for one that did not; `upwards` where more is better."""

    target: Target
    upwards: bool
    times_ms: tuple[float | None, ...]


def reached(runs: list[RunArrays], target: Target) -> Reached | None:
    """When each run reached the target; None where no run has the metric.

    More is better where the runs begin below the target.
    """
    known = [run.metrics[target.metric] for run in runs if target.metric in run.metrics]
    if not known:
        return None
    upwards = float(np.median([metric.value[0] for metric in known])) <= target.value
    nothing = Metric(step=np.zeros(0), elapsed_ms=np.zeros(0), value=np.zeros(0))
    times = (time_to_target_ms(run.metrics.get(target.metric, nothing), target.value, upwards=upwards) for run in runs)
    return Reached(target=target, upwards=upwards, times_ms=tuple(times))


def compare_headline(runs: list[RunArrays], result: Reached | None) -> list[str]:
    """Who was first, in sentences."""
    said = [f"{len(runs)} runs side by side: {', '.join(run.name for run in runs)}."]
    if result is None:
        return said
    goal = f"{result.target.metric} {result.target.value:g}"
    known = sorted((time, run.name) for run, time in zip(runs, result.times_ms, strict=True) if time is not None)
    if not known:
        return [*said, f"None of them reached {goal}."]
    (best, first), others = known[0], known[1:]
    sentence = f"{first} reached {goal} first, in {duration(best)}"
    slower = [f"{name} in {duration(time)} ({time / best:.2f} times as long)" for time, name in others if best > 0]
    sentence += f"; {', '.join(slower)}." if slower else "."
    missed = [run.name for run, time in zip(runs, result.times_ms, strict=True) if time is None]
    return [*said, sentence, *([f"{', '.join(missed)} did not reach it."] if missed else [])]


def compare_charts(runs: list[RunArrays], result: Reached | None) -> list[Figure | Missing]:
    """The figures that hold all runs."""
    figures: list[Figure | Missing] = []
    if result is not None and any(time is not None for time in result.times_ms):
        figures.append(_times(runs, result))
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    if result is not None:
        names.sort(key=lambda name: name != result.target.metric)
    for place, name in enumerate(names[:_MOST_METRICS]):
        figures.append(_metric(runs, name, place, result))
    if not names:
        why = "These logs hold no evaluations: write them with model.log(accuracy=...) to compare what was learned."
        figures.append(Missing(name="compare-metric", title="Evaluation", reason=why))
    return [*figures, _column(runs, "step_ms"), _column(runs, "total_batch")]


def compare_table(runs: list[RunArrays], result: Reached | None) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: one row a run."""
    titles = ["run", "policy", "ranks", "steps", "time", "last step time", "last total batch", "last split"]
    rows = []
    for place, run in enumerate(runs):
        row = [run.name, run.header.policy, f"{run.header.world_size}", f"{run.last_step:,}", duration(run.duration_ms)]
        if len(run.windows):
            late = phase(run.windows, late_rows(run.windows))
            row += [duration(late.step_ms), f"{late.total_batch:,}", split(late.local_batches)]
        else:
            row += ["not known"] * 3
        if result is not None:
            time = result.times_ms[place]
            row.insert(5, "not reached" if time is None else duration(time))
        rows.append(row)
    if result is not None:
        titles.insert(5, f"time to {result.target.metric} {result.target.value:g}")
    return titles, rows


def _times(runs: list[RunArrays], result: Reached) -> Figure:
    """A bar a run that reached the target."""
    unit, scale = time_unit(max(time for time in result.times_ms if time is not None))
    places = list(range(len(runs)))
    times = [float("nan") if time is None else time / scale for time in result.times_ms]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": numbers(times),
        "y": places,
        "marker": {"color": [rank_colour(place) for place in places]},
        "text": ["not reached" if math.isnan(time) else f"{amount(time)} {unit}" for time in times],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }
    labels = [short(run.name) for run in runs]
    goal = f"{result.target.metric} of {result.target.value:g}"
    return Figure(
        name="compare-times",
        title="Time to target",
        caption=f"How long each run took to its first {goal}; a run without a bar did not get there.",
        views=(View("", [trace]),),
        layout={
            "xaxis": axis(f"time to target ({unit})", rangemode="tozero"),
            "yaxis": axis(
                "run (name)", range=[len(runs) - 0.5, -0.5], tickvals=places, ticktext=labels, showgrid=False
            ),
            "bargap": 0.35,
        },
        height=110 + 36 * len(runs),
    )


def _metric(runs: list[RunArrays], name: str, place: int, result: Reached | None) -> Figure | Missing:
    unit, scale = time_unit(max(_longest(runs), 0.0))
    traces, keys = [], list(series_keys([run.name for run in runs]))
    for number, run in enumerate(runs):
        if name in run.metrics:
            metric = run.metrics[name]
            rows = np.flatnonzero(np.isfinite(metric.elapsed_ms))
            rows = rows[thin(metric.value[rows], _BINS)]
            traces.append(line(metric.elapsed_ms[rows] / scale, metric.value[rows], run.name, rank_colour(number)))
    if not any(trace["x"] for trace in traces):
        why = "These logs do not say when they evaluated."
        return Missing(name=f"compare-metric-{place}", title=f"Evaluation: {name}", reason=why)
    if result is not None and result.target.metric == name:
        ends = [0.0, max(x for trace in traces for x in trace["x"])]
        drawn = line(ends, [result.target.value] * 2, "target", "muted", mode="lines")
        drawn["line"]["dash"] = "dash"
        traces.append(drawn)
        keys.append(Key("target", "muted", "dash"))
    return Figure(
        name=f"compare-metric-{place}",
        title=f"Evaluation: {name}",
        caption=f"The further left a curve gets there, the better: {name} as each run evaluated it.",
        views=(View("", traces),),
        layout={
            "xaxis": axis(f"time since the start ({unit})", rangemode="tozero"),
            "yaxis": axis(f"{short(name)} (as logged)"),
        },
        legend=tuple(keys),
    )


def _column(runs: list[RunArrays], column: str) -> Figure | Missing:
    title, unit_of, caption = {
        "step_ms": ("Step time", "step time (ms)", "What a step took; compare runs of like total batches."),
        "total_batch": ("Total batch", "total batch (samples)", "Samples in one step on all ranks together."),
    }[column]
    unit, scale = time_unit(_longest(runs))
    traces = []
    for number, run in enumerate(runs):
        values = getattr(run.windows, column)
        rows = np.flatnonzero(np.isfinite(values) & np.isfinite(run.windows.elapsed_ms))
        if len(rows):
            rows = rows[thin(values[rows], _BINS)]
            x, steps = run.windows.elapsed_ms[rows] / scale, column == "total_batch"
            traces.append(line(x, values[rows], run.name, rank_colour(number), steps=steps, mode="lines"))
    if not traces:
        return Missing(name=f"compare-{column}", title=title, reason="The logs hold no measured window yet.")
    return Figure(
        name=f"compare-{column}",
        title=title,
        caption=caption,
        views=(View("", traces),),
        layout={
            "xaxis": axis(f"time since the start ({unit})", rangemode="tozero"),
            "yaxis": axis(unit_of, rangemode="tozero"),
        },
        legend=series_keys([run.name for run in runs]),
    )


def _longest(runs: list[RunArrays]) -> float:
    known = [run.duration_ms for run in runs if math.isfinite(run.duration_ms)]
    return max(known, default=0.0)
