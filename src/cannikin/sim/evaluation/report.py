"""The evaluation as a page of tables, beside the paper's own numbers, and its plots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cannikin.sim.catalog import workload_names
from cannikin.sim.evaluation import svg
from cannikin.sim.evaluation.cells import START_POLICIES
from cannikin.sim.evaluation.markdown import Page, Results, of_seeds, table
from cannikin.sim.evaluation.prediction import METHODS
from cannikin.sim.evaluation.report_runs import write_cluster_c, write_convergence, write_links, write_overhead

__all__ = ["write_report"]

_INTRODUCTION = """\
"Paper" is always a number that the paper states; everything else came of this run. The policies are `even` (PyTorch
DDP), `adaptdl`, `lb-bsp` (per window, and per epoch as in its paper), `paper` (the paper's method as published) and
`cannikin` (ours)."""


def write_report(results: Results, measured: Results) -> Page:
    """The whole page, of whatever sections there are."""
    text = ["# The paper's evaluation, simulated", "", _INTRODUCTION, ""]
    plots: dict[str, str] = {}
    for section, write in _SECTIONS.items():
        if section in results:
            words, drawn = write(results[section])
            text += [words, ""]
            plots |= drawn
    if measured:
        text += [write_overhead(measured), ""]
    return "\n".join(text), plots


def _start(cells: dict[str, Any]) -> Page:
    runs = {policy: of_seeds(cells, policy)[0] for policy in START_POLICIES if of_seeds(cells, policy)}
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
        table(["epoch", *runs], rows),
        "",
        f"The best split there is, {first['best']}, takes {first['best_s'] * 1e3:.1f} ms (median with noise).",
        "",
        "First epoch that ends with a split within 3% of it, and the step at which that split was planned:",
        "",
        table(
            ["policy", "epoch", "step"],
            [[p, str(near[p] or "never"), "-" if steps[p] is None else str(steps[p])] for p in runs],
        ),
        "",
        "Paper: Cannikin at OptPerf in the third epoch; LB-BSP after more than ten.",
    ]
    series = {p: [(k + 1.0, t * 1e3) for k, t in enumerate(run["step_s"])] for p, run in runs.items()}
    return "\n".join(text), {"start.svg": svg.lines("ImageNet, cluster A, B = 128", "epoch", "ms a step", series)}


def _steps(cells: dict[str, Any]) -> Page:
    names = ["even", "lb-bsp", "lb-bsp after a change", "paper", "cannikin", "cannikin after a change", "best"]
    text = [
        "## Step time against the total batch, cluster B",
        "",
        "Without noise, each policy settled; in brackets over `even`. `best` is the ground truth's own optimum.",
        "`after a change`: the total has just grown by a tenth of its range.",
    ]
    plots, best_even, best_lb = {}, 0.0, 0.0
    for workload in [w for w in workload_names() if of_seeds(cells, w)]:
        rows, shown_rows = of_seeds(cells, workload)[0], []
        for row in rows:
            shown = [f"{row[n] * 1e3:.1f} ({row[n] / row['even']:.2f})" if n in row else "-" for n in names]
            shown_rows.append([f"{row['total_batch']:,}", *shown])
            best_even = max(best_even, 1 - row["cannikin"] / row["even"])
            best_lb = max(best_lb, 1 - row["cannikin"] / row["lb-bsp"])
        text += ["", f"### {workload}", "", table(["total batch", *names], shown_rows)]
        series = {n: [(row["total_batch"], row[n] / row["even"]) for row in rows if n in row] for n in names}
        plots[f"steps-{workload}.svg"] = svg.lines(
            f"{workload}, cluster B", "total batch", "step time over even", series, log_x=True
        )
    text += [
        "",
        f"At most {best_even:.0%} below `even` and {best_lb:.0%} below `lb-bsp`. "
        "Paper: up to 53% below DDP and 18% below LB-BSP.",
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
            found = [row for seed in of_seeds(cells, cluster, workload) for row in seed]
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
    text += [
        table(["cluster", "workload", "total batch", *METHODS, *(f"{m}: reached" for m in METHODS)], rows),
        "",
        "Absolute errors on cluster A:",
        "",
        table(["method", "median", "90%", "largest", "cells"], summary),
        "",
        "Paper, cluster A: at most 3% (NeuMF, ResNets) and 7% (BERT, DeepSpeech2); up to 21% without the weighting.",
    ]
    return "\n".join(text), {}


def _gamma(cells: dict[str, Any]) -> Page:
    rows: list[list[str]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    for cluster in ("a", "b"):
        for found in of_seeds(cells, cluster)[:1]:
            for row in found:
                rows.append([row["device"], str(row["local_batch"]), f"{row['mean']:.4f}", f"{row['sd']:.4f}"])
                series.setdefault(row["device"], []).append((row["local_batch"], row["mean"]))
    text = [
        "## Spread of the measured overlap ratio gamma, CIFAR-10",
        "",
        "Over 200 steps each. The ground truth's, so only what a planner has to cope with.",
        "",
        table(["device", "local batch", "mean", "standard deviation"], sorted(rows, key=lambda r: (r[0], int(r[1])))),
    ]
    plot = svg.lines("CIFAR-10", "local batch", "mean gamma", series, log_x=True)
    return "\n".join(text), {"gamma.svg": plot}


_SECTIONS: dict[str, Callable[[dict[str, Any]], Page]] = {
    "convergence": write_convergence,
    "start": _start,
    "steps": _steps,
    "prediction": _prediction,
    "cluster-c": write_cluster_c,
    "links": write_links,
    "gamma": _gamma,
}
