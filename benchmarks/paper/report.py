"""Writes the evaluation as a page of tables, beside the paper's own numbers, and its plots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import drawing
from benchmarks.paper import published
from benchmarks.paper.cells import POLICIES, START_POLICIES
from benchmarks.paper.prediction import METHODS
from cannikin.sim.catalog import workload_names

Results = dict[str, dict[str, Any]]
Page = tuple[str, dict[str, str]]  # text, and plots by file name

_INTRODUCTION = """\
"Paper" is always a number that the paper states; everything else came of this run. The policies are `even` (PyTorch
DDP), `adaptdl`, `lb-bsp` (per window, and per epoch as in its paper), `paper` (the paper's method as published) and
`cannikin` (ours)."""


def write_report(results: Results, measured: Results) -> Page:
    """Return the whole page, of whatever sections there are."""
    text = ["# The paper's evaluation, simulated", "", _INTRODUCTION, ""]
    plots: dict[str, str] = {}
    for section, write in _SECTIONS.items():
        if section in results:
            words, drawn = write(results[section])
            text += [words, ""]
            plots |= drawn
    if measured:
        text += [_overhead(measured), ""]
    return "\n".join(text), plots


def _start(cells: dict[str, Any]) -> Page:
    runs = {policy: _of_seeds(cells, policy)[0] for policy in START_POLICIES if _of_seeds(cells, policy)}
    first = next(iter(runs.values()))
    rows = []
    for epoch in range(len(first["step_s"])):
        rows.append([str(epoch + 1), *(f"{run['step_s'][epoch] * 1e3:.1f}" for run in runs.values())])
    near = {
        policy: next((k + 1 for k, t in enumerate(run["expected_s"]) if t <= 1.03 * run["best_expected_s"]), None)
        for policy, run in runs.items()
    }
    steps = {
        policy: next((step for step, t in run["plans"] if t <= 1.03 * run["best_expected_s"]), None)
        for policy, run in runs.items()
    }
    text = [
        "## Step time from an even start, cluster A, ResNet-50 on ImageNet, total batch 128",
        "",
        "Mean milliseconds a step; an epoch is 1,000 steps here.",
        "",
        _table(["epoch", *runs], rows),
        "",
        f"The best split there is, {first['best']}, takes {first['best_s'] * 1e3:.1f} ms (median with noise).",
        "",
        "First epoch that ends with a split within 3% of it, and the step at which that split was planned:",
        "",
        _table(
            ["policy", "epoch", "step"],
            [[p, str(near[p] or "never"), "-" if steps[p] is None else str(steps[p])] for p in runs],
        ),
        "",
        f"Paper: Cannikin at OptPerf in epoch {published.EPOCH_AT_OPTPERF}; LB-BSP after more than "
        f"{published.LB_BSP_EPOCHS} epochs.",
    ]
    series = {p: [(k + 1.0, t * 1e3) for k, t in enumerate(run["step_s"])] for p, run in runs.items()}
    return "\n".join(text), {"start.svg": drawing.lines("ImageNet, cluster A, B = 128", "epoch", "ms per step", series)}


def _steps(cells: dict[str, Any]) -> Page:
    names = ["even", "lb-bsp", "lb-bsp after a change", "paper", "cannikin", "cannikin after a change", "best"]
    text = [
        "## Step time against the total batch, cluster B",
        "",
        "Without noise, each policy settled; in brackets over `even`. `best` is the ground truth's own optimum.",
        "`after a change`: the total has just grown by a tenth of its range.",
    ]
    plots, best_even, best_lb = {}, 0.0, 0.0
    for workload in [w for w in workload_names() if _of_seeds(cells, w)]:
        rows, shown_rows = _of_seeds(cells, workload)[0], []
        for row in rows:
            shown = [f"{row[n] * 1e3:.1f} ({row[n] / row['even']:.2f})" if n in row else "-" for n in names]
            shown_rows.append([f"{row['total_batch']:,}", *shown])
            best_even = max(best_even, 1 - row["cannikin"] / row["even"])
            best_lb = max(best_lb, 1 - row["cannikin"] / row["lb-bsp"])
        text += ["", f"### {workload}", "", _table(["total batch", *names], shown_rows)]
        series = {n: [(row["total_batch"], row[n] / row["even"]) for row in rows if n in row] for n in names}
        plots[f"steps-{workload}.svg"] = drawing.lines(
            f"{workload}, cluster B", "total batch", "step time over even", series, log_x=True
        )
    text += [
        "",
        f"At most {best_even:.0%} below `even` and {best_lb:.0%} below `lb-bsp`. "
        f"Paper: up to {_below(published.STEP_BELOW)}.",
    ]
    return "\n".join(text), plots


def _prediction(cells: dict[str, Any]) -> Page:
    text = [
        "## Prediction of OptPerf",
        "",
        "Predicted step time over the best split's (median of 1,000 noisy steps), less 1; all total batches.",
        "`reached` is how far the step time of the split itself is above the best one's.",
        "",
    ]
    rows: list[list[str]] = []
    pooled: dict[str, list[float]] = {method: [] for method in METHODS}
    for cluster in ("a", "b"):
        for workload in workload_names():
            found = [row for seed in _of_seeds(cells, cluster, workload) for row in seed]
            for row in found:
                errors = ["none" if row[m] is None else f"{row[m]:+.1%}" for m in METHODS]
                reached = [f"{row[f'{m}: reached']:+.1%}" for m in METHODS]
                rows.append([cluster, workload, f"{row['total_batch']:,}", *errors, *reached])
                if cluster == "a":
                    for method in METHODS:
                        pooled[method] += [] if row[method] is None else [abs(row[method])]
    summary = [
        [method, f"{np.median(values):.1%}", f"{np.quantile(values, 0.9):.1%}", f"{max(values):.1%}", str(len(values))]
        for method, values in pooled.items()
        if values
    ]
    most = " and ".join(f"{error:.0%} ({names})" for names, error in published.PREDICTION_ERRORS.items())
    text += [
        _table(["cluster", "workload", "total batch", *METHODS, *(f"{m}: reached" for m in METHODS)], rows),
        "",
        "Absolute errors on cluster A:",
        "",
        _table(["method", "median", "90%", "largest", "cells"], summary),
        "",
        f"Paper, cluster A: at most {most}; up to {published.UNWEIGHTED_ERROR:.0%} without the weighting.",
    ]
    return "\n".join(text), {}


def _gamma(cells: dict[str, Any]) -> Page:
    rows: list[list[str]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    for cluster in ("a", "b"):
        for found in _of_seeds(cells, cluster)[:1]:
            for row in found:
                rows.append([row["device"], str(row["local_batch"]), f"{row['mean']:.4f}", f"{row['sd']:.4f}"])
                series.setdefault(row["device"], []).append((row["local_batch"], row["mean"]))
    text = [
        "## Spread of the measured overlap ratio gamma, CIFAR-10",
        "",
        "Over 200 steps each. The ground truth's, so only what a planner has to cope with.",
        "",
        _table(["device", "local batch", "mean", "standard deviation"], sorted(rows, key=lambda r: (r[0], int(r[1])))),
    ]
    plot = drawing.lines("CIFAR-10", "local batch", "mean gamma", series, log_x=True)
    return "\n".join(text), {"gamma.svg": plot}


def _convergence(cells: dict[str, Any]) -> Page:
    text, plots = _overall(cells, "overall", "Time to target, cluster B")
    for workload in ("cifar10", "imagenet"):
        runs = {p: _of_seeds(cells, workload, p)[0] for p in POLICIES if _of_seeds(cells, workload, p)}
        series = {p: [(e[1] / 3600, e[2]) for e in run["epochs"]] for p, run in runs.items()}
        plots[f"curve-{workload}.svg"] = drawing.lines(f"{workload}, cluster B", "hours", "metric", series)
    return "\n\n".join([text, _curves(cells), *_batches(cells, plots)]), plots


def _cluster_c(cells: dict[str, Any]) -> Page:
    return _overall(cells, "cluster-c", "Time to target, cluster C (16 RTX 6000, shares from 1 to 1/4)")


def _links(cells: dict[str, Any]) -> Page:
    """Return the section on other bandwidths than the assumed 10 Gbit/s."""
    rows = []
    for gbit in sorted({name.split("/")[0] for name in cells}, key=float):
        for workload in ("cifar10", "bert", "deepspeech2"):
            times = {
                p: _mean_of(cells, "elapsed_s", gbit, workload, p) for p in ("even", "adaptdl", "paper", "cannikin")
            }
            own = times["cannikin"]
            rows.append([gbit, workload, *(f"{t / 60:.1f}" for t in times.values())])
            rows[-1] += [f"{1 - own / times[p]:+.1%}" for p in ("even", "adaptdl", "paper")]
    headers = [
        "Gbit/s",
        "workload",
        "even",
        "adaptdl",
        "paper",
        "cannikin",
        "below even",
        "below adaptdl",
        "below paper",
    ]
    text = "Minutes to the target on cluster B with other links: the paper does not state its network."
    return "\n".join(["## Other bandwidths", "", text, "", _table(headers, rows)]), {}


def _overhead(measured: Results) -> str:
    """Return the section on the planner's real CPU time, against simulated training time."""
    cells = measured.get("convergence", {})
    rows = []
    for workload in [w for w in workload_names() if _of_seeds(cells, w, "cannikin")]:
        row = [workload]
        for policy in ("cannikin", "paper"):
            runs = _of_seeds(cells, workload, policy)
            row += [f"{max(r['most_planner_share'] for r in runs):.2%}", f"{max(r['planner_share'] for r in runs):.2%}"]
        row.append(f"{np.mean([r['window_ms'] for r in _of_seeds(cells, workload, 'cannikin')]):.1f}")
        rows.append(
            [*row, *("<< 1%" if share is None else f"{share * 100:.3g}%" for share in published.OVERHEAD[workload])]
        )
    headers = [
        "workload",
        "cannikin, worst epoch",
        "cannikin, run",
        "paper's method, worst epoch",
        "paper's method, run",
    ]
    headers += ["cannikin, ms per window", "Paper: worst epoch", "Paper: run"]
    text = "Measured: CPU time in the planner over simulated training time, 16 ranks; it runs beside the training."
    return "\n".join(["## Overhead, cluster B", "", text, "", _table(headers, rows)])


def _overall(cells: dict[str, Any], name: str, heading: str) -> Page:
    workloads = [w for w in workload_names() if _of_seeds(cells, w, "even")]
    times = {p: [_mean_of(cells, "elapsed_s", w, p) for w in workloads] for p in POLICIES}
    share = {p: [t / e for t, e in zip(times[p], times["even"], strict=True)] for p in POLICIES}
    rows = []
    for place, workload in enumerate(workloads):
        cell = [f"{times[p][place] / 60:.1f} ({share[p][place]:.3f})" for p in POLICIES]
        missed = [p for p in POLICIES if not all(run["reached"] for run in _of_seeds(cells, workload, p))]
        rows.append([workload, *cell, ", ".join(missed) or "none"])
    below = [
        [
            workload,
            *(f"{1 - times['cannikin'][place] / times[p][place]:+.1%}" for p in POLICIES if p != "cannikin"),
            *(f"{_mean_of(cells, 'num_epochs', workload, p):.1f}" for p in ("even", "adaptdl", "paper", "cannikin")),
            *(f"{_of_seeds(cells, workload, p)[0]['total_batch']:,}" for p in ("adaptdl", "paper", "cannikin")),
        ]
        for place, workload in enumerate(workloads)
    ]
    text = [
        f"## {heading}",
        "",
        "Minutes to the target, and in brackets normalised to `even`.",
        "",
        _table(["workload", *POLICIES, "target missed by"], rows),
        "",
        "How far `cannikin` is below each other policy, passes over the data, and the last total batch.",
        "",
        _table(
            ["workload", *(f"below {p}" for p in POLICIES if p != "cannikin")]
            + [f"epochs {p}" for p in ("even", "adaptdl", "paper", "cannikin")]
            + [f"last B {p}" for p in ("adaptdl", "paper", "cannikin")],
            below,
        ),
        "",
        f"Paper: time to target up to {_below(published.TIME_BELOW)}.",
    ]
    return "\n".join(text), {f"{name}.svg": drawing.bars(heading, "normalised time to target", workloads, share)}


def _curves(cells: dict[str, Any]) -> str:
    """Plot when each policy reached which accuracy."""
    text = ["### Convergence curves", "", "Minutes until the metric is first reached (`curve-*.svg`)."]
    for workload, levels in (("cifar10", (0.8, 0.9, 0.92, 0.94)), ("imagenet", (0.4, 0.6, 0.7, 0.74))):
        rows = []
        for policy in POLICIES:
            runs = _of_seeds(cells, workload, policy)
            if runs:
                found = [next((e[1] / 60 for e in runs[0]["epochs"] if e[2] >= level), None) for level in levels]
                rows.append([policy, *("-" if minutes is None else f"{minutes:.1f}" for minutes in found)])
        text += ["", _table([workload, *(f"{level:.0%}" for level in levels)], rows)]
    return "\n".join(text)


def _batches(cells: dict[str, Any], plots: dict[str, str]) -> Iterator[str]:
    """Plot total batch and accuracy by epoch of CIFAR-10."""
    runs = {
        p: _of_seeds(cells, "cifar10", p)[0] for p in ("adaptdl", "paper", "cannikin") if _of_seeds(cells, "cifar10", p)
    }
    totals = {p: [(e[0], e[3]) for e in run["epochs"]] for p, run in runs.items()}
    metrics = {p: [(e[0], e[2]) for e in run["epochs"]] for p, run in runs.items()}
    plots["cifar10-total-batch.svg"] = drawing.lines("CIFAR-10, cluster B", "epoch", "total batch", totals)
    plots["cifar10-accuracy.svg"] = drawing.lines("CIFAR-10, cluster B", "epoch", "top-1 accuracy", metrics)
    rows = []
    for epoch in (1, 2, 3, 5, 10, 20, 40, 60, 80, 100, 140):
        row = [str(epoch)]
        for run in runs.values():
            near = [e for e in run["epochs"] if e[0] <= epoch]
            over = run["epochs"][-1][0] < epoch
            row.append("ended" if over else f"{near[-1][3]:,} / {near[-1][2]:.3f}" if near else "-")
        rows.append(row)
    yield "\n".join(["### Total batch and accuracy by epoch, CIFAR-10", "", _table(["epoch", *runs], rows)])


def _table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _of_seeds(cells: dict[str, Any], *key: str) -> list[Any]:
    """Return the results of one cell for every seed."""
    prefix = "/".join(key) + "/"
    return [value for name, value in cells.items() if name.startswith(prefix) and "/" not in name[len(prefix) :]]


def _mean_of(cells: dict[str, Any], field: str, *key: str) -> float:
    return float(np.mean([run[field] for run in _of_seeds(cells, *key)]))


def _below(shares: dict[str, float]) -> str:
    """Return "85% below DDP, 52% below AdaptDL"."""
    return ", ".join(f"{share:.0%} below {name}" for name, share in shares.items())


_SECTIONS: dict[str, Callable[[dict[str, Any]], Page]] = {
    "convergence": _convergence,
    "start": _start,
    "steps": _steps,
    "prediction": _prediction,
    "cluster-c": _cluster_c,
    "links": _links,
    "gamma": _gamma,
}
