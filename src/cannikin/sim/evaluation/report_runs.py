"""The page's sections about whole trainings: times to target, curves, batches by epoch, and the planner's cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cannikin.sim.catalog import workload_names
from cannikin.sim.evaluation import svg
from cannikin.sim.evaluation.cells import POLICIES
from cannikin.sim.evaluation.markdown import Page, Results, mean_of, of_seeds, table

__all__ = ["write_cluster_c", "write_convergence", "write_links", "write_overhead"]

_PAPER_OVERALL = "Paper: time to target up to 85% below DDP, 52% below AdaptDL, 82% below LB-BSP."
_PAPER_OVERHEAD = {
    "imagenet": ("<< 1%", "<< 1%"),
    "deepspeech2": ("<< 1%", "<< 1%"),
    "bert": ("<< 1%", "<< 1%"),
    "cifar10": ("9%", "2.7%"),
    "ncf": ("12%", "3.9%"),
}


def write_convergence(cells: dict[str, Any]) -> Page:
    text, plots = _overall(cells, "overall", "Time to target, cluster B")
    for workload in ("cifar10", "imagenet"):
        runs = {p: of_seeds(cells, workload, p)[0] for p in POLICIES if of_seeds(cells, workload, p)}
        series = {p: [(e[1] / 3600, e[2]) for e in run["epochs"]] for p, run in runs.items()}
        plots[f"curve-{workload}.svg"] = svg.lines(f"{workload}, cluster B", "hours", "metric", series)
    return "\n\n".join([text, _curves(cells), *_batches(cells, plots)]), plots


def write_cluster_c(cells: dict[str, Any]) -> Page:
    return _overall(cells, "cluster-c", "Time to target, cluster C (16 RTX 6000, shares from 1 to 1/4)")


def write_links(cells: dict[str, Any]) -> Page:
    """Other bandwidths than the 10 Gbit/s assumed."""
    rows = []
    for gbit in sorted({name.split("/")[0] for name in cells}, key=float):
        for workload in ("cifar10", "bert", "deepspeech2"):
            times = {
                p: mean_of(cells, "elapsed_s", gbit, workload, p) for p in ("even", "adaptdl", "paper", "cannikin")
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
    return "\n".join(["## Other bandwidths", "", text, "", table(headers, rows)]), {}


def write_overhead(measured: Results) -> str:
    """CPU time that the planner really took, against simulated training time."""
    cells = measured.get("convergence", {})
    rows = []
    for workload in [w for w in workload_names() if of_seeds(cells, w, "cannikin")]:
        row = [workload]
        for policy in ("cannikin", "paper"):
            runs = of_seeds(cells, workload, policy)
            row += [f"{max(r['most_planner_share'] for r in runs):.2%}", f"{max(r['planner_share'] for r in runs):.2%}"]
        row.append(f"{np.mean([r['window_ms'] for r in of_seeds(cells, workload, 'cannikin')]):.1f}")
        rows.append([*row, *_PAPER_OVERHEAD[workload]])
    headers = [
        "workload",
        "cannikin, worst epoch",
        "cannikin, run",
        "paper's method, worst epoch",
        "paper's method, run",
    ]
    headers += ["cannikin, ms a window", "Paper: worst epoch", "Paper: run"]
    text = "Measured: CPU time in the planner over simulated training time, 16 ranks; it runs beside the training."
    return "\n".join(["## Overhead, cluster B", "", text, "", table(headers, rows)])


def _overall(cells: dict[str, Any], name: str, heading: str) -> Page:
    workloads = [w for w in workload_names() if of_seeds(cells, w, "even")]
    times = {p: [mean_of(cells, "elapsed_s", w, p) for w in workloads] for p in POLICIES}
    share = {p: [t / e for t, e in zip(times[p], times["even"], strict=True)] for p in POLICIES}
    rows = []
    for place, workload in enumerate(workloads):
        cell = [f"{times[p][place] / 60:.1f} ({share[p][place]:.3f})" for p in POLICIES]
        missed = [p for p in POLICIES if not all(run["reached"] for run in of_seeds(cells, workload, p))]
        rows.append([workload, *cell, ", ".join(missed) or "none"])
    below = [
        [
            workload,
            *(f"{1 - times['cannikin'][place] / times[p][place]:+.1%}" for p in POLICIES if p != "cannikin"),
            *(f"{mean_of(cells, 'num_epochs', workload, p):.1f}" for p in ("even", "adaptdl", "paper", "cannikin")),
            *(f"{of_seeds(cells, workload, p)[0]['total_batch']:,}" for p in ("adaptdl", "paper", "cannikin")),
        ]
        for place, workload in enumerate(workloads)
    ]
    text = [
        f"## {heading}",
        "",
        "Minutes to the target, and in brackets normalised to `even`.",
        "",
        table(["workload", *POLICIES, "target missed by"], rows),
        "",
        "How far `cannikin` is below each other policy, passes over the data, and the last total batch.",
        "",
        table(
            ["workload", *(f"below {p}" for p in POLICIES if p != "cannikin")]
            + [f"epochs {p}" for p in ("even", "adaptdl", "paper", "cannikin")]
            + [f"last B {p}" for p in ("adaptdl", "paper", "cannikin")],
            below,
        ),
        "",
        _PAPER_OVERALL,
    ]
    return "\n".join(text), {f"{name}.svg": svg.bars(heading, "normalised time to target", workloads, share)}


def _curves(cells: dict[str, Any]) -> str:
    """When each policy reached which accuracy."""
    text = ["### Convergence curves", "", "Minutes until the metric is first reached (`curve-*.svg`)."]
    for workload, levels in (("cifar10", (0.8, 0.9, 0.92, 0.94)), ("imagenet", (0.4, 0.6, 0.7, 0.74))):
        rows = []
        for policy in POLICIES:
            runs = of_seeds(cells, workload, policy)
            if runs:
                found = [next((e[1] / 60 for e in runs[0]["epochs"] if e[2] >= level), None) for level in levels]
                rows.append([policy, *("-" if minutes is None else f"{minutes:.1f}" for minutes in found)])
        text += ["", table([workload, *(f"{level:.0%}" for level in levels)], rows)]
    return "\n".join(text)


def _batches(cells: dict[str, Any], plots: dict[str, str]) -> Iterator[str]:
    """Total batch and accuracy by epoch of CIFAR-10."""
    runs = {
        p: of_seeds(cells, "cifar10", p)[0] for p in ("adaptdl", "paper", "cannikin") if of_seeds(cells, "cifar10", p)
    }
    totals = {p: [(e[0], e[3]) for e in run["epochs"]] for p, run in runs.items()}
    metrics = {p: [(e[0], e[2]) for e in run["epochs"]] for p, run in runs.items()}
    plots["cifar10-total-batch.svg"] = svg.lines("CIFAR-10, cluster B", "epoch", "total batch", totals)
    plots["cifar10-accuracy.svg"] = svg.lines("CIFAR-10, cluster B", "epoch", "top-1 accuracy", metrics)
    rows = []
    for epoch in (1, 2, 3, 5, 10, 20, 40, 60, 80, 100, 140):
        row = [str(epoch)]
        for run in runs.values():
            near = [e for e in run["epochs"] if e[0] <= epoch]
            over = run["epochs"][-1][0] < epoch
            row.append("ended" if over else f"{near[-1][3]:,} / {near[-1][2]:.3f}" if near else "-")
        rows.append(row)
    yield "\n".join(["### Total batch and accuracy by epoch, CIFAR-10", "", table(["epoch", *runs], rows)])
