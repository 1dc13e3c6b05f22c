"""The figures of one run over time, and those of several runs side by side, each from their arrays alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from cannikin.core.values import FloatArray
from cannikin.report import page
from cannikin.report.numbers import Metric, Reached, RunArrays, Windows, thin, window_uses
from cannikin.report.rank_charts import computing, local_batches, step_timeline, utilisation
from cannikin.runlog import PlanRecord, Predictions
from cannikin.words import amount, duration, percent

_BINS, _COMPARED_BINS = 200, 150  # of points, for a line
_MOST_METRICS, _MOST_COMPARED_METRICS = 6, 4


def run_charts(run: RunArrays) -> dict[str, list[page.Figure | page.Missing]]:
    """Return the figures of one run by their headings."""
    windows = run.windows
    return {
        "Batches": [local_batches(windows), _total_batch(run)],
        "Where the time goes": [
            step_timeline(run),
            utilisation(windows),
            computing(windows),
            _use(windows),
            _predicted(run),
        ],
        "Noise, goodput and learning": [
            _noise(windows),
            _goodput(run),
            _lr_factor(windows),
            _progress(run),
            *_metrics(run),
        ],
    }


# One value over steps.


def _total_batch(run: RunArrays) -> page.Figure | page.Missing:
    job = run.header.job
    allowed = "" if job.max_batch_size is None else f"; up to {job.max_batch_size:,} is allowed"
    given = f"Samples in one step on all ranks together. The run was given {job.batch_size:,}{allowed}."
    words = ("total", "Total batch", given, "total batch (samples)")
    return _stairs(run.windows, run.windows.total_batch, *words, missing=page.NO_WINDOWS)


def _lr_factor(windows: Windows) -> page.Figure | page.Missing:
    caption = "What the user's own learning rate is multiplied by, so that a larger total batch takes larger steps."
    words = ("lr", "Learning-rate factor", caption, "factor (times the user's rate)")
    return _stairs(windows, windows.lr_factor, *words, missing="This log holds no learning-rate factors.")


def _stairs(
    windows: Windows, values: FloatArray, name: str, title: str, caption: str, unit: str, *, missing: str
) -> page.Figure | page.Missing:
    """Draw a line that holds each value, the last one up to the last window's end."""
    if not np.isfinite(values).any():
        return page.Missing(name, title, missing)
    rows = thin(values, _BINS)
    drawn = page.line(
        windows.stairs(rows), np.append(values[rows], values[-1]), unit.partition(" (")[0], "main", steps=True
    )
    return page.Figure(name, title, caption, [page.View("", [drawn])], page.STEPS, page.axis(unit, rangemode="tozero"))


def _use(windows: Windows) -> page.Figure | page.Missing:
    title = "Use of the hardware"
    uses = 100 * window_uses(windows.local_batches, windows.times_ms)
    rows = np.flatnonzero(np.isfinite(uses))
    if not len(rows):
        return page.Missing("use", title, page.NO_WINDOWS)
    even = uses * np.where(windows.even_speed > 0, windows.even_speed, np.nan)
    rows = rows[thin(np.stack([uses[rows], even[rows]], axis=1), _BINS)]
    x = windows.first_step[rows]
    traces, keys = [page.line(x, uses[rows], "this run", "main")], [page.Key("this run", "main", "line")]
    caption = "Samples per second against what the devices would do alone, each at its batch and with no communication."
    if np.isfinite(even).any():
        traces.append(page.line(x, even[rows], "DDP", "second", mode="lines"))
        keys.append(page.Key("DDP's even split, predicted", "second", "line"))
    y = page.axis("use of the hardware (%)", range=[0, 102])
    return page.Figure("use", title, caption, [page.View("", traces)], page.STEPS, y, legend=tuple(keys))


def _predicted(run: RunArrays) -> page.Figure | page.Missing:
    """Draw what steps took, what was expected of them, and what plans promised of splits that had never run."""
    title, windows = "Step time, predicted and measured", run.windows
    rows = np.flatnonzero(np.isfinite(windows.step_ms))
    if not len(rows):
        return page.Missing("predicted", title, page.NO_WINDOWS)
    rows = rows[thin(np.stack([windows.step_ms[rows], windows.predicted_ms[rows]], axis=1), _BINS)]
    x, measured, predicted = windows.first_step[rows], windows.step_ms[rows], windows.predicted_ms[rows]
    traces, keys = [page.line(x, measured, "measured", "main")], [page.Key("measured", "main", "line")]
    caption = "What a step took. This policy predicts no step times."
    if np.isfinite(predicted).any():
        traces.append(page.line(x, predicted, "expected", "second", mode="lines"))
        keys.append(page.Key("expected, corrected by the split's own earlier steps", "second", "line"))
        promised = [each for each in run.predictions.outcomes if each.error is not None]
        if promised:
            points = np.array([(each.plan.first_step, each.plan.predicted_step_ms) for each in promised])
            points = points[thin(points[:, 1], _BINS)]
            marks = page.line(points[:, 0], points[:, 1], "promised", "second", mode="markers")
            marks["marker"] |= {"size": 11, "symbol": "diamond"}
            traces.append(marks)
            keys.append(page.Key("predicted before the split had run", "second", "dot"))
        caption = " ".join(prediction_words(run.predictions)) or "No plan for a new split has run long enough to judge."
    times = page.axis("step time (ms)", rangemode="tozero")
    if measured.max() > 20 * np.median(measured) and measured.min() > 0:  # one stall must not flatten all the rest
        drawn = np.concatenate([measured, predicted[predicted > 0]])
        times = page.log_axis("step time (ms, log scale)", drawn.min() / 1.2, drawn.max() * 1.2)
    return page.Figure("predicted", title, caption, [page.View("", traces)], page.STEPS, times, legend=tuple(keys))


def prediction_words(predictions: Predictions) -> list[str]:
    """Return how far off predictions were, in sentences: before a split had run, and by the paper's measure."""
    errors, optimum, said = predictions.before_it_ran, predictions.optimum, []
    if errors is not None:
        said.append(
            f"The one plan for a split that had never run predicted its step time {percent(errors.worst)} off."
            if errors.num_plans == 1
            else f"Half of the {errors.num_plans:,} plans for splits that had never run predicted their step time to "
            f"within {percent(errors.median)}; the worst was {percent(errors.worst)} off."
        )
    elif any(each.is_new is None for each in predictions.outcomes):
        said.append(
            f"The log begins at step {predictions.first_step:,}: which splits had run before is not known, so no "
            "prediction counts as made before its split had run."
        )
    if optimum is not None:
        ran = "the one split" if optimum.num_splits == 1 else f"the best of {optimum.num_splits:,} splits"
        said.append(
            f"The last plan predicts {duration(optimum.predicted_ms)}; {ran} of this total batch that ran "
            f"took {duration(optimum.best_ms)}: {percent(abs(optimum.error))} off."
        )
    return said


def _noise(windows: Windows) -> page.Figure | page.Missing:
    title = "Gradient noise scale"
    table = np.stack([windows.noise_scale, windows.noise_low, windows.noise_high, windows.total_batch], axis=1)
    table = np.where(np.isfinite(table) & (table > 0), table, np.nan)
    rows = np.flatnonzero(np.isfinite(table[:, :3]).any(axis=1))
    if not len(rows):
        return page.Missing("noise", title, "This log holds no noise scale: the policy did not measure it.")
    rows = rows[thin(table[rows], _BINS)]
    x, (scale, low, high, total) = windows.first_step[rows], table[rows].T
    floor, top = float(np.nanmin(table[rows])) / 2, float(np.nanmax(table[rows])) * 2
    edge: dict[str, Any] = {"mode": "lines", "hoverinfo": "skip", "showlegend": False}
    filled = {**edge, "fill": "tonexty", "fillcolor": "band"}
    low_line = page.line(x, np.where(np.isfinite(low), low, floor), "low", "band", **edge)
    high_line = page.line(x, np.where(np.isfinite(high), high, top), "high", "band", **filled)
    low_line["line"]["width"] = high_line["line"]["width"] = 0
    own = page.line(x, scale, "noise scale", "main", mode="lines+markers" if len(x) < 40 else "lines")
    beside = page.line(x, total, "total batch", "second", steps=True, mode="lines")
    return page.Figure(
        "noise",
        title,
        "The batch at which noise and signal weigh the same: far below it a larger total batch pays. Where a limit is "
        "not known, the band reaches the edge.",
        [page.View("", [low_line, high_line, own, beside])],
        page.STEPS,
        page.log_axis("samples (log scale)", floor, top),
        legend=(
            page.Key("noise scale", "main", "line"),
            page.Key("its 90% limits", "band"),
            page.Key("total batch", "second", "line"),
        ),
    )


# Goodput over total batches.


def _goodput(run: RunArrays) -> page.Figure | page.Missing:
    title = "Goodput over total batches"
    curves = [(plan, *_curve(plan)) for plan in run.compared]
    curves = [curve for curve in curves if len(curve[1])]
    if not curves:
        fixed = run.header.job.max_batch_size in (None, run.header.job.batch_size)
        why = "the total batch is fixed, so none were compared" if fixed else "its plans do not say what was compared"
        return page.Missing("goodput", title, f"There is no goodput to draw: {why}.")
    views = []
    for plan, totals, goodputs in curves:
        at = float(np.interp(plan.total_batch, totals, goodputs))
        chosen = page.line([plan.total_batch], [at], "chosen", "second", mode="markers")
        chosen["marker"] |= {"size": 13, "symbol": "diamond"}
        label = f"Plan of step {plan.step:,}: total batch {plan.total_batch:,}, {amount(at)} useful samples/s"
        views.append(page.View(label, [page.line(totals, goodputs, "goodput", "main"), chosen]))
    low, high = (end([end(totals) for _, totals, _ in curves]) for end in (min, max))
    room = max(high / low, 2.0) ** 0.04
    return page.Figure(
        name="goodput",
        title=title,
        caption="Useful samples per second at each total batch that the planner compared, plan by plan; it moves only "
        "for a clear gain.",
        views=views,
        x=page.log_axis("total batch (samples, log scale)", low / room, high * room),
        y=page.axis("goodput (useful samples/s)", range=[0, 1.1 * float(max(max(curve[2]) for curve in curves))]),
        legend=(page.Key("goodput", "main", "line"), page.Key("chosen", "second", "dot")),
    )


def _curve(plan: PlanRecord) -> tuple[FloatArray, FloatArray]:
    """Return the total batches that a plan gives a goodput of, in order, and the goodputs."""
    both = zip(plan.candidate_totals, plan.candidate_goodputs, strict=False)
    known = sorted((total, goodput) for total, goodput in both if goodput is not None and total > 0)
    totals, goodputs = np.array(known, dtype=np.float64).reshape(-1, 2).T
    return totals, goodputs


# Over time, of one run or of several.


def _over_time(
    runs: list[RunArrays],
    curves: list[Metric | None],
    name: str,
    title: str,
    caption: str,
    y: dict[str, Any],
    *,
    missing: str,
    label: str = "",
    clock: str = "time since the start",
    **more: Any,
) -> page.Figure | page.Missing:
    """Draw one curve per run, as far as it is known when it was measured, in the unit that suits the longest run.

    Several runs have their names and colours, one has `label` and the main colour.
    """
    unit, scale = page.time_unit(max((run.duration_ms for run in runs if math.isfinite(run.duration_ms)), default=0.0))
    keys = page.series_keys([run.name for run in runs]) if len(runs) > 1 else (page.Key(label, "main"),)
    traces = []
    for key, (elapsed_ms, values) in ((key, curve) for key, curve in zip(keys, curves, strict=True) if curve):
        rows = np.flatnonzero(np.isfinite(elapsed_ms))
        rows = rows[thin(values[rows], _BINS if len(runs) == 1 else _COMPARED_BINS)]
        if len(rows):
            traces.append(page.line(elapsed_ms[rows] / scale, values[rows], key.label, key.colour, **more))
    if not traces:
        return page.Missing(name, title, missing)
    x = page.axis(f"{clock} ({unit})", rangemode="tozero")
    return page.Figure(name, title, caption, [page.View("", traces)], x, y, legend=keys if len(runs) > 1 else ())


def _column_over_time(
    runs: list[RunArrays], column: str, name: str, title: str, caption: str, unit: str, *, missing: str, **more: Any
) -> page.Figure | page.Missing:
    """Draw a column of each run's windows, where it is known."""
    curves: list[Metric | None] = []
    for run in runs:
        values: FloatArray = getattr(run.windows, column)
        known = np.isfinite(values)
        curves.append(Metric(run.windows.elapsed_ms[known], values[known]))
    y = page.axis(unit, rangemode="tozero")
    return _over_time(runs, curves, name, title, caption, y, missing=missing, label=column, mode="lines", **more)


def _evaluation(
    runs: list[RunArrays], metric: str, name: str, caption: str, missing: str
) -> page.Figure | page.Missing:
    clock = "time spent training" if all(run.in_training_time for run in runs) else "time since the start"
    curves, y = [run.metrics.get(metric) for run in runs], page.axis(f"{page.short(metric)} (as logged)")
    words = (name, f"Evaluation: {metric}", caption)
    return _over_time(runs, curves, *words, y, missing=missing, label=metric, clock=clock)


def _progress(run: RunArrays) -> page.Figure | page.Missing:
    caption = "Passes over the data at the initial batch that the training is worth: the steeper, the better."
    words = ("progress", "Progress", caption, "progress (passes)")
    return _column_over_time([run], "progress", *words, missing="This log holds no progress over time.")


def _metrics(run: RunArrays) -> list[page.Figure | page.Missing]:
    """Draw one figure per metric that the user evaluated."""
    missing = "The log does not say when it was evaluated."
    figures = []
    for place, (name, metric) in enumerate(list(run.metrics.items())[:_MOST_METRICS]):
        caption = f"What the user evaluated; the last {name} is {amount(metric.value[-1], 4)}."
        figures.append(_evaluation([run], name, f"metric-{place}", caption, missing))
    return figures


def compare_charts(runs: list[RunArrays], result: Reached | None) -> list[page.Figure | page.Missing]:
    """Draw all runs side by side."""
    figures: list[page.Figure | page.Missing] = []
    if result is not None and any(time is not None for time in result.times_ms):
        figures.append(_times_to_target(runs, result))
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    if result is not None:
        names.sort(key=lambda name: name != result.target.metric)
    for place, name in enumerate(names[:_MOST_COMPARED_METRICS]):
        figures.append(_compared_metric(runs, name, place, result))
    if not names:
        why = "These logs hold no evaluations: write them with model.log(accuracy=...) to compare what was learned."
        figures.append(page.Missing("compare-metric", "Evaluation", why))
    missing = "The logs hold no measured window yet."
    words = ("Step time", "What a step took; compare runs of like total batches.", "step time (ms)")
    figures.append(_column_over_time(runs, "step_ms", "compare-step_ms", *words, missing=missing))
    words = ("Total batch", "Samples in one step on all ranks together.", "total batch (samples)")
    figures.append(_column_over_time(runs, "total_batch", "compare-total_batch", *words, missing=missing, steps=True))
    return figures


def _times_to_target(runs: list[RunArrays], result: Reached) -> page.Figure:
    """Draw one bar per run that reached the target."""
    unit, scale = page.time_unit(max(time for time in result.times_ms if time is not None))
    places = list(range(len(runs)))
    times = [float("nan") if time is None else time / scale for time in result.times_ms]
    words = ["not reached" if math.isnan(time) else f"{amount(time)} {unit}" for time in times]
    colours = {"color": [page.series_colour(place) for place in places]}
    names = [page.short(run.name) for run in runs]
    goal = f"{result.target.metric} of {result.target.value:g}"
    return page.Figure(
        name="compare-times",
        title="Time to target",
        caption=f"How long each run took to its first {goal}; a run without a bar did not get there.",
        views=[page.View("", [page.bars(words, x=page.numbers(times), y=places, marker=colours)])],
        x=page.axis(f"time to target ({unit})", rangemode="tozero"),
        y=page.row_axis("run (name)", len(runs), tickvals=places, ticktext=names),
        more={"bargap": 0.35},
        height=110 + 36 * len(runs),
    )


def _compared_metric(
    runs: list[RunArrays], name: str, place: int, result: Reached | None
) -> page.Figure | page.Missing:
    caption = f"The further left a curve gets there, the better: {name} as each run evaluated it."
    missing = "These logs do not say when they evaluated."
    drawn = _evaluation(runs, name, f"compare-metric-{place}", caption, missing)
    if isinstance(drawn, page.Missing) or result is None or result.target.metric != name:
        return drawn
    traces = drawn.views[0].traces
    ends = [0.0, max(x for trace in traces for x in trace["x"])]
    target = page.line(ends, [result.target.value] * 2, "target", "muted", mode="lines")
    target["line"]["dash"] = "dash"
    return replace(
        drawn, views=[page.View("", [*traces, target])], legend=(*drawn.legend, page.Key("target", "muted", "dash"))
    )
