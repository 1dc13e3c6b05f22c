"""Writes the evaluation as a page of tables, beside the paper's own numbers, and its plots."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import drawing
from benchmarks.paper import published, step_time, time_to_target, verdicts
from benchmarks.paper.cells import CLUSTERS, START_POLICIES
from benchmarks.paper.prediction import METHODS, UNCORRECTED
from benchmarks.paper.tables import Page, Results, of_seeds, table
from cannikin.sim.catalog import workload_names

_INTRODUCTION = """\
Everything here is simulated, but for the column "ours, for real" and the planner's CPU time. "Paper" is always a number
that the paper states. The policies: `ddp@B0` (PyTorch DDP, called `even` in tables of step times), `ddp@best` and
`lb-bsp@best` (DDP and LB-BSP with the best fixed total batch there is, found by trying; LB-BSP starts as evenly as
memory allows, where its own paper has equal batches, and so no total that DDP cannot hold; it has the better of moves
of 5 samples, as published, which alone are `lb-bsp-5@best`, and of moves of a 64th of the total), `adaptdl`, `lb-bsp`
(in every window; `@step` in every step, as in its own paper; `@epoch` once per epoch, as the Cannikin paper has it),
`paper` (the paper's method) and `cannikin` (ours)."""


def write_report(results: Results, measured: Results, about: list[str] | None = None) -> Page:
    """Return the whole page, of whatever sections there are; `about` says in lines what made it."""
    text = ["# The paper's evaluation, simulated", "", *(about or []), _INTRODUCTION, ""]
    text += ["## Every figure and table of the paper", "", verdicts.all_items(results, measured), ""]
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
        "## Step time from an even start, cluster A, ResNet-50 on ImageNet, total batch 128, simulated",
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
        f"Paper: Cannikin at OptPerf in epoch {published.EPOCH_AT_OPTPERF}; LB-BSP after more than "
        f"{published.LB_BSP_EPOCHS} epochs.",
    ]
    series = {p: [(k + 1.0, t * 1e3) for k, t in enumerate(run["step_s"])] for p, run in runs.items()}
    return "\n".join(text), {
        "start.svg": drawing.lines("Simulated: ImageNet, cluster A, B = 128", "epoch", "ms per step", series)
    }


def _prediction(cells: dict[str, Any]) -> Page:
    text = [
        "## Prediction of OptPerf, simulated",
        "",
        "Predicted step time over the best split's (median of 1,000 noisy steps), less 1; all total batches.",
        "`reached` is how far the step time of the split itself is above the best one's.",
        "",
    ]
    rows: list[list[str]] = []
    pooled: dict[tuple[str, str], list[float]] = {}
    for cluster in CLUSTERS:
        for workload in workload_names():
            found = [row for seed in of_seeds(cells, cluster, workload) for row in seed]
            for row in found:
                errors = ["none" if row[m] is None else f"{row[m]:+.1%}" for m in METHODS]
                reached = [f"{row[f'{m}: reached']:+.1%}" for m in METHODS]
                rows.append([cluster, workload, f"{row['total_batch']:,}", *errors, *reached])
                for method in (METHODS[0], UNCORRECTED, *METHODS[1:]):
                    if row.get(method) is not None:
                        pooled.setdefault((cluster, method), []).append(abs(row[method]))
    summary = [[*key, *_spread(values)] for key, values in pooled.items()]
    before = [[*key, *_spread(values)] for key, values in _before_it_ran(cells).items() if values]
    most = " and ".join(f"{error:.0%} ({names})" for names, error in published.PREDICTION_ERRORS.items())
    text += [
        table(["cluster", "workload", "total batch", *METHODS, *(f"{m}: reached" for m in METHODS)], rows),
        "",
        "Absolute errors. Ours multiplies what its model says by a factor that it learned from the 800 steps; without "
        "the learned factor it is the model alone:",
        "",
        table(["cluster", "method", "median", "90%", "largest", "cells"], summary),
        "",
        f"Paper, cluster A: at most {most}; up to {published.UNWEIGHTED_ERROR:.0%} without the weighting.",
    ]
    if before:  # results of older versions have none
        text += [
            "",
            "Absolute errors of every plan for a split that had not run before, against the median of its own steps:",
            "",
            table(["cluster", "method", "median", "90%", "largest", "plans"], before),
        ]
    return "\n".join(text), {}


def _spread(errors: list[float]) -> list[str]:
    return [f"{np.median(errors):.1%}", f"{np.quantile(errors, 0.9):.1%}", f"{max(errors):.1%}", str(len(errors))]


def _before_it_ran(cells: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Return the absolute errors of predictions made before a plan ran, by cluster and method."""
    found: dict[tuple[str, str], list[float]] = {}
    for cluster, method in itertools.product(CLUSTERS, METHODS):
        rows = [row for workload in workload_names() for seed in of_seeds(cells, cluster, workload) for row in seed]
        found[cluster, method] = [abs(error) for row in rows for error in row.get(f"{method}: before it ran", [])]
    return found


def _gamma(cells: dict[str, Any]) -> Page:
    rows: list[list[str]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    for cluster in ("a", "b"):
        for found in of_seeds(cells, cluster)[:1]:
            for row in found:
                rows.append([row["device"], str(row["local_batch"]), f"{row['mean']:.4f}", f"{row['sd']:.4f}"])
                series.setdefault(row["device"], []).append((row["local_batch"], row["mean"]))
    real = [
        [network, str(batch), f"{mean:.4f}", f"{deviation:.4f}"]
        for network, found in published.GAMMAS.items()
        for batch, mean, deviation in found
    ]
    text = [
        "## Spread of the measured overlap ratio gamma, CIFAR-10, simulated",
        "",
        "Over 200 steps each. The ground truth's, so only what a planner has to cope with.",
        "",
        table(["device", "local batch", "mean", "standard deviation"], sorted(rows, key=lambda r: (r[0], int(r[1])))),
        "",
        "Real networks beside it, over 24 steps each, on one H200 that nobody else used "
        "([NCCL](2026-11-16-nccl.md)); of spin kernels, whose gamma is known, it is measured to 0.2% there:",
        "",
        table(["network", "local batch", "mean", "standard deviation"], real),
    ]
    plot = drawing.lines("Simulated: CIFAR-10", "local batch", "mean gamma", series, log_x=True)
    return "\n".join(text), {"gamma.svg": plot}


def _overhead(measured: Results) -> str:
    """Return the section on the planner's CPU time, cluster by cluster."""
    sections = {"convergence": "B", "cluster-a": "A", "cluster-c": "C"}
    found = {name: measured[section] for section, name in sections.items() if section in measured}
    told = "Measured: CPU time in the planner over simulated training time; it runs beside the training."
    parts = [f"### Cluster {name}\n\n{_planner_time(cells)}" for name, cells in found.items()]
    return "\n\n".join(["## Overhead of the planner", told, *parts])


def _planner_time(cells: dict[str, Any]) -> str:
    """Return the planner's real CPU time against simulated training time."""
    rows = []
    for workload in [w for w in workload_names() if of_seeds(cells, w, "cannikin")]:
        row = [workload]
        for policy in ("cannikin", "paper"):
            runs = of_seeds(cells, workload, policy)
            row += [f"{max(r['most_planner_share'] for r in runs):.2%}", f"{max(r['planner_share'] for r in runs):.2%}"]
        row.append(f"{np.mean([r['window_ms'] for r in of_seeds(cells, workload, 'cannikin')]):.1f}")
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
    return table(headers, rows)


_SECTIONS: dict[str, Callable[[dict[str, Any]], Page]] = {
    "convergence": time_to_target.cluster_b,
    "cluster-a": time_to_target.cluster_a,
    "cluster-c": time_to_target.cluster_c,
    "seeds": time_to_target.seeds,
    "held-out": time_to_target.held_out,
    "one-share": time_to_target.one_share,
    "links": time_to_target.links,
    "start": _start,
    "steps": step_time.steps,
    "slowest": step_time.slowest,
    "prediction": _prediction,
    "gamma": _gamma,
}
