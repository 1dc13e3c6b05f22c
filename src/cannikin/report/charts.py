"""The figures of one run over time, and those of several runs side by side, each from their arrays alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cannikin.core.values import FloatArray
from cannikin.report.numbers import Reached, RunArrays, Windows, prediction_error, thin
from cannikin.report.page import (
    Figure,
    Key,
    Missing,
    View,
    axis,
    line,
    log_axis,
    numbers,
    rank_colour,
    series_keys,
    short,
    time_unit,
)
from cannikin.report.rank_charts import ranks_over_time, step_timeline, utilisation
from cannikin.runlog import PlanRecord
from cannikin.runlog.times import activity
from cannikin.words import amount, percent

_STEP_AXIS = "step (number)"
_BINS, _COMPARED_BINS = 200, 150
_MOST_METRICS, _MOST_COMPARED_METRICS = 6, 4


class RunCharts(NamedTuple):
    """The figures of one run by what they are about."""

    batches: list[Figure | Missing]
    times: list[Figure | Missing]
    learning: list[Figure | Missing]


def run_charts(run: RunArrays) -> RunCharts:
    """Draw one run."""
    return RunCharts(
        batches=[_local_batches(run), _total_batch(run)],
        times=[step_timeline(run), utilisation(run), _computing(run), _predicted(run)],
        learning=[_noise(run), _goodput(run), _lr_factor(run), _progress(run), *_metrics(run)],
    )


def _local_batches(run: RunArrays) -> Figure | Missing:
    return ranks_over_time(
        run.windows,
        run.windows.local_batches,
        name="split",
        title="Local batches by rank",
        unit="local batch (samples)",
        caption="How many samples each rank takes in a step: faster ranks should come to take more.",
        stacked=True,
    )


def _computing(run: RunArrays) -> Figure | Missing:
    windows = run.windows
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = 100 * activity(windows.times_ms, "optimizer and forward", "backward") / windows.times_ms.sum(axis=-1)
    return ranks_over_time(
        windows,
        shares,
        name="computing",
        title="Time spent computing, by rank",
        unit="share of the time (%)",
        caption="A rank that computes little waits for others or for the network: a good split brings all up together.",
        stacked=False,
    )


def _total_batch(run: RunArrays) -> Figure | Missing:
    title = "Total batch"
    x, (total,) = _stairs(run.windows, run.windows.total_batch)
    if not len(x):
        return _no_windows("total", title)
    job = run.header.job
    allowed = "" if job.max_batch_size is None else f"; up to {job.max_batch_size:,} is allowed"
    return Figure(
        name="total",
        title=title,
        caption=f"Samples in one step on all ranks together. The run was given {job.batch_size:,}{allowed}.",
        views=(View("", [line(x, total, "total batch", "main", steps=True)]),),
        layout={"xaxis": axis(_STEP_AXIS), "yaxis": axis("total batch (samples)", rangemode="tozero")},
    )


def _predicted(run: RunArrays) -> Figure | Missing:
    windows, title = run.windows, "Step time, predicted and measured"
    known = np.isfinite(windows.step_ms)
    if not known.any():
        return _no_windows("predicted", title)
    rows = np.flatnonzero(known)
    rows = rows[thin(np.stack([windows.step_ms[rows], windows.predicted_ms[rows]], axis=1), _BINS)]
    x, measured, predicted = windows.first_step[rows], windows.step_ms[rows], windows.predicted_ms[rows]
    traces, keys = [line(x, measured, "measured", "main")], [Key("measured", "main", "line")]
    caption = "What a step took. This policy predicts no step times."
    error = prediction_error(windows)
    if np.isfinite(error):
        traces.append(line(x, predicted, "predicted", "second", mode="lines"))
        keys.append(Key("predicted before it was measured", "second", "line"))
        caption = f"Each window was predicted before it began: half of the predictions are within {percent(error)}."
    times = axis("step time (ms)", rangemode="tozero")
    if measured.max() > 20 * np.median(measured) and measured.min() > 0:  # one stall must not flatten all the rest
        drawn = np.concatenate([measured, predicted[predicted > 0]])
        times = log_axis("step time (ms, log scale)", drawn.min() / 1.2, drawn.max() * 1.2)
    return Figure(
        name="predicted",
        title=title,
        caption=caption,
        views=(View("", traces),),
        layout={"xaxis": axis(_STEP_AXIS), "yaxis": times},
        legend=tuple(keys),
    )


def _noise(run: RunArrays) -> Figure | Missing:
    windows, title = run.windows, "Gradient noise scale"
    scale, low, high = (_positive(v) for v in (windows.noise_scale, windows.noise_low, windows.noise_high))
    rows = np.flatnonzero(np.isfinite(scale) | np.isfinite(low) | np.isfinite(high))
    if not len(rows):
        return Missing(
            name="noise", title=title, reason="This log holds no noise scale: the policy did not measure it."
        )
    table = np.stack([scale, low, high, _positive(windows.total_batch)], axis=1)
    rows = rows[thin(table[rows], _BINS)]
    scale, low, high, total = table[rows].T
    finite = table[rows][np.isfinite(table[rows])]
    floor, top = float(finite.min()) / 2, float(finite.max()) * 2
    x = windows.first_step[rows]
    edge: dict[str, Any] = {"mode": "lines", "hoverinfo": "skip", "showlegend": False}
    low_line = line(x, np.where(np.isfinite(low), low, floor), "low", "band", **edge)
    high_line = line(
        x, np.where(np.isfinite(high), high, top), "high", "band", fill="tonexty", fillcolor="band", **edge
    )
    low_line["line"]["width"] = high_line["line"]["width"] = 0
    return Figure(
        name="noise",
        title=title,
        caption="The batch at which noise and signal weigh the same: far below it a larger total batch pays. Where a "
        "limit is not known, the band reaches the edge.",
        views=(
            View(
                "",
                [
                    low_line,
                    high_line,
                    line(x, scale, "noise scale", "main", mode="lines+markers" if len(x) < 40 else "lines"),
                    line(x, total, "total batch", "second", steps=True, mode="lines"),
                ],
            ),
        ),
        layout={
            "xaxis": axis(_STEP_AXIS),
            "yaxis": log_axis("samples (log scale)", floor, top),
        },
        legend=(
            Key("noise scale", "main", "line"),
            Key("its 90% limits", "band"),
            Key("total batch", "second", "line"),
        ),
    )


def _goodput(run: RunArrays) -> Figure | Missing:
    title = "Goodput over total batches"
    curves = [(plan, *_curve(plan)) for plan in run.compared]
    curves = [curve for curve in curves if len(curve[1])]
    if not curves:
        fixed = run.header.job.max_batch_size in (None, run.header.job.batch_size)
        why = "the total batch is fixed, so none were compared" if fixed else "its plans do not say what was compared"
        return Missing(name="goodput", title=title, reason=f"There is no goodput to draw: {why}.")
    views = []
    for plan, totals, goodputs in curves:
        at = float(np.interp(plan.total_batch, totals, goodputs))
        chosen = line([plan.total_batch], [at], "chosen", "second", mode="markers")
        chosen["marker"] |= {"size": 13, "symbol": "diamond"}
        label = f"Plan of step {plan.step:,}: total batch {plan.total_batch:,}, {amount(at)} useful samples/s"
        views.append(View(label, [line(totals, goodputs, "goodput", "main"), chosen]))
    low, high = (end([end(totals) for _, totals, _ in curves]) for end in (min, max))
    room = max(high / low, 2.0) ** 0.04
    return Figure(
        name="goodput",
        title=title,
        caption="Useful samples per second at each total batch that the planner compared, plan by plan; it moves only "
        "for a clear gain.",
        views=tuple(views),
        layout={
            "xaxis": log_axis("total batch (samples, log scale)", low / room, high * room),
            "yaxis": axis("goodput (useful samples/s)", range=[0, 1.1 * float(max(max(curve[2]) for curve in curves))]),
        },
        legend=(Key("goodput", "main", "line"), Key("chosen", "second", "dot")),
    )


def _curve(plan: PlanRecord) -> tuple[FloatArray, FloatArray]:
    """Return the total batches that a plan gives a goodput of, in order, and the goodputs."""
    both = zip(plan.candidate_totals, plan.candidate_goodputs, strict=False)
    known = sorted((total, goodput) for total, goodput in both if goodput is not None and total > 0)
    totals, goodputs = np.array(known, dtype=np.float64).reshape(-1, 2).T
    return totals, goodputs


def _lr_factor(run: RunArrays) -> Figure | Missing:
    title = "Learning-rate factor"
    x, (factor,) = _stairs(run.windows, run.windows.lr_factor)
    if not np.isfinite(factor).any():
        return Missing(name="lr", title=title, reason="This log holds no learning-rate factors.")
    return Figure(
        name="lr",
        title=title,
        caption="What the user's own learning rate is multiplied by, so that a larger total batch takes larger steps.",
        views=(View("", [line(x, factor, "factor", "main", steps=True)]),),
        layout={"xaxis": axis(_STEP_AXIS), "yaxis": axis("factor (times the user's rate)", rangemode="tozero")},
    )


def _progress(run: RunArrays) -> Figure | Missing:
    windows, title = run.windows, "Progress"
    rows = np.flatnonzero(np.isfinite(windows.progress) & np.isfinite(windows.elapsed_ms))
    if not len(rows):
        return Missing(name="progress", title=title, reason="This log holds no progress over time.")
    rows = rows[thin(windows.progress[rows], _BINS)]
    unit, scale = time_unit(run.duration_ms)
    return Figure(
        name="progress",
        title=title,
        caption="Passes over the data at the initial batch that the training is worth: the steeper, the better.",
        views=(
            View(
                "", [line(windows.elapsed_ms[rows] / scale, windows.progress[rows], "progress", "main", mode="lines")]
            ),
        ),
        layout={
            "xaxis": axis(f"time since the start ({unit})", rangemode="tozero"),
            "yaxis": axis("progress (passes)", rangemode="tozero"),
        },
    )


def _metrics(run: RunArrays) -> list[Figure | Missing]:
    """Draw one figure per metric that the user evaluated."""
    unit, scale = time_unit(run.duration_ms)
    figures: list[Figure | Missing] = []
    for place, (name, metric) in enumerate(list(run.metrics.items())[:_MOST_METRICS]):
        rows = np.flatnonzero(np.isfinite(metric.elapsed_ms))
        if not len(rows):
            why = "The log does not say when it was evaluated."
            figures.append(Missing(name=f"metric-{place}", title=f"Evaluation: {name}", reason=why))
            continue
        rows = rows[thin(metric.value[rows], _BINS)]
        figures.append(
            Figure(
                name=f"metric-{place}",
                title=f"Evaluation: {name}",
                caption=f"What the user evaluated; the last {name} is {amount(metric.value[-1], 4)}.",
                views=(View("", [line(metric.elapsed_ms[rows] / scale, metric.value[rows], name, "main")]),),
                layout={
                    "xaxis": axis(f"{_clock_of([run])} ({unit})", rangemode="tozero"),
                    "yaxis": axis(f"{short(name)} (as logged)"),
                },
            )
        )
    return figures


def _stairs(windows: Windows, *columns: FloatArray) -> tuple[FloatArray, list[FloatArray]]:
    """Return columns over steps for lines that hold each value, the last one up to the last window's end."""
    if not len(windows):
        return np.zeros(0), [np.zeros(0) for _ in columns]
    rows = thin(np.stack(columns, axis=1), _BINS)
    end = windows.first_step[-1] + windows.num_steps[-1]
    return np.append(windows.first_step[rows], end), [np.append(column[rows], column[-1]) for column in columns]


def _positive(values: FloatArray) -> FloatArray:
    kept: FloatArray = np.where(np.isfinite(values) & (values > 0), values, np.nan)
    return kept


def _no_windows(name: str, title: str) -> Missing:
    return Missing(name=name, title=title, reason="The log holds no measured window yet.")


# Several runs.


def compare_charts(runs: list[RunArrays], result: Reached | None) -> list[Figure | Missing]:
    """Draw all runs side by side."""
    figures: list[Figure | Missing] = []
    if result is not None and any(time is not None for time in result.times_ms):
        figures.append(_times_to_target(runs, result))
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    if result is not None:
        names.sort(key=lambda name: name != result.target.metric)
    for place, name in enumerate(names[:_MOST_COMPARED_METRICS]):
        figures.append(_compared_metric(runs, name, place, result))
    if not names:
        why = "These logs hold no evaluations: write them with model.log(accuracy=...) to compare what was learned."
        figures.append(Missing(name="compare-metric", title="Evaluation", reason=why))
    return [*figures, _compared_column(runs, "step_ms"), _compared_column(runs, "total_batch")]


def _times_to_target(runs: list[RunArrays], result: Reached) -> Figure:
    """Draw one bar per run that reached the target."""
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


def _compared_metric(runs: list[RunArrays], name: str, place: int, result: Reached | None) -> Figure | Missing:
    unit, scale = time_unit(max(_longest(runs), 0.0))
    traces, keys = [], list(series_keys([run.name for run in runs]))
    for number, run in enumerate(runs):
        if name in run.metrics:
            metric = run.metrics[name]
            rows = np.flatnonzero(np.isfinite(metric.elapsed_ms))
            rows = rows[thin(metric.value[rows], _COMPARED_BINS)]
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
            "xaxis": axis(f"{_clock_of(runs)} ({unit})", rangemode="tozero"),
            "yaxis": axis(f"{short(name)} (as logged)"),
        },
        legend=tuple(keys),
    )


def _compared_column(runs: list[RunArrays], column: str) -> Figure | Missing:
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
            rows = rows[thin(values[rows], _COMPARED_BINS)]
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


def _clock_of(runs: list[RunArrays]) -> str:
    """Return what the time of these runs' evaluations counts."""
    return "time spent training" if all(run.in_training_time for run in runs) else "time since the start"
