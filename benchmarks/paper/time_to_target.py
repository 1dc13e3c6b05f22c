"""The pages of whole trainings: minutes to the target, what unlike devices allow, curves, and total batch by epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import drawing
from benchmarks.paper import published
from benchmarks.paper.cells import BEST, CLUSTERS, HELD_OUT, LINKED, MORE_SEEDS, OTHERS, short_workloads
from benchmarks.paper.convergence import TRAINED
from benchmarks.paper.tables import Page, Results, below, mean_of, of_seeds, over, table
from cannikin.sim.catalog import workload_names

_YOUNG = 100  # steps in which the total is still on its way up from B0
_LEGEND = (
    "Simulated minutes to the target; behind `@best` the total that was best of 50. "
    "`ddp@best` and `lb-bsp@best` keep the best fixed total batch for the whole run, found in this simulator. LB-BSP "
    "starts as evenly as memory allows, so that it may have totals that DDP cannot hold. `lb-bsp-5@best` moves 5 "
    "samples at a time, as published; `lb-bsp@best` is the better of that and of moves of max(5, B/64)."
)


def cluster_b(cells: dict[str, Any]) -> Page:
    """Return the page of cluster B: the paper's overall figure, curves, and total batch by epoch."""
    text, plots = _overall(cells, "overall", "Simulated time to target, cluster B", tuple(TRAINED))
    text += f"\n\nPaper: time to target up to {below(published.TIME_BELOW)}, all at B0."
    for workload in ("cifar10", "imagenet"):
        runs = {p: of_seeds(cells, workload, p)[0] for p in TRAINED if of_seeds(cells, workload, p)}
        series = {p: [(e[1] / 3600, e[2]) for e in run["epochs"]] for p, run in runs.items()}
        title = f"Simulated: {workload}, cluster B"
        plots[f"curve-{workload}.svg"] = drawing.lines(title, "hours", "metric", series)
    return "\n\n".join([text, _curves(cells), *_batches(cells, plots)]), plots


def cluster_a(cells: dict[str, Any]) -> Page:
    """Return the page of cluster A."""
    return _overall(cells, "cluster-a", "Simulated time to target, cluster A (A5000, A4000, P4000)", OTHERS)


def cluster_c(cells: dict[str, Any]) -> Page:
    """Return the page of cluster C."""
    heading = "Simulated time to target, cluster C (16 RTX 6000, shares from 1 to 1/4)"
    return _overall(cells, "cluster-c", heading, OTHERS)


def behind(results: Results) -> list[tuple[float, str]]:
    """Return how far ours is behind each rival in time to target, of every cell of every section, with where it is."""
    found = []
    for section, cluster in (("convergence", "b"), ("cluster-a", "a"), ("cluster-c", "c")):
        cells = results.get(section, {})
        for workload in workload_names():
            rivals = [(over(cells, rival, workload), rival) for rival in TRAINED if rival != "cannikin"]
            found += [
                (share, f"{workload} on {cluster.upper()}, {rival}") for share, rival in rivals if share is not None
            ]
    for cluster, workload, rival in itertools.product(CLUSTERS, short_workloads(), BEST[:-1]):
        for seed, share in _by_seed(results.get("seeds", {}), rival, cluster, workload).items():
            found.append((share, f"{workload} on {cluster.upper()}, {rival}, seed {seed}"))
    for world, workload, rival in itertools.product(HELD_OUT, short_workloads(), BEST[:-1]):
        share = over(results.get("held-out", {}), rival, world, workload)
        if share is not None:
            found.append((share, f"{workload} on {world}, {rival}"))
    for gbit, workload, rival in itertools.product(("25", "100"), LINKED, OTHERS[:-1]):
        share = over(results.get("links", {}), rival, gbit, workload)
        if share is not None:
            found.append((share, f"{workload} on B at {gbit} Gbit/s, {rival}"))
    return sorted(found, reverse=True)


def _by_seed(cells: dict[str, Any], rival: str, *key: str) -> dict[str, float]:
    """Return ours over a rival, less 1, by seed."""
    prefix = "/".join(key)
    seeds = [name.split("/")[-1] for name in cells if name.startswith(f"{prefix}/cannikin/")]
    return {
        s: cells[f"{prefix}/cannikin/{s}"]["elapsed_s"] / cells[f"{prefix}/{rival}/{s}"]["elapsed_s"] - 1 for s in seeds
    }


def seeds(cells: dict[str, Any]) -> Page:
    """Return the page of other seeds."""
    keys = list(itertools.product(CLUSTERS, short_workloads()))
    rows = []
    for cluster, workload in keys:
        found = {rival: _by_seed(cells, rival, cluster, workload) for rival in BEST[:-1]}
        rows.append([cluster, workload, *(", ".join(f"{x:+.1%}" for x in each.values()) for each in found.values())])
    text = [
        "## Other seeds, simulated",
        "",
        f"Time to target of ours over each at its best fixed total, a figure for each of {len(MORE_SEEDS)} more seeds. "
        "ImageNet is left out: it takes most of the evaluation's time.",
        "",
        table(["cluster", "workload", *(f"ours over {rival}" for rival in BEST[:-1])], rows),
    ]
    return "\n".join(text), {}


def held_out(cells: dict[str, Any]) -> Page:
    """Return the page of worlds on which nothing was chosen."""
    rows = []
    for world, workload in itertools.product(HELD_OUT, short_workloads()):
        if of_seeds(cells, world, workload, "cannikin"):
            times = {p: mean_of(cells, "elapsed_s", world, workload, p) / 60 for p in BEST}
            moved = of_seeds(cells, world, workload, "lb-bsp@best")[0]
            told = [f"{minutes:.2f}" for minutes in times.values()]
            told[1] += f" ({moved['total_batch']:,}, moves of {moved['samples_moved']})"
            rows.append([world, workload, *told, *(f"{times['cannikin'] / times[p] - 1:+.1%}" for p in BEST[:-1])])
    text = [
        "## Cells that nothing was chosen on, simulated",
        "",
        "The constants of the planner's growth were chosen on clusters A to C at 10 Gbit/s, where the first step at a "
        "new batch size takes 1.34 of a step. Here ranks are equal, the network is slower, or that step takes 2.9 of "
        "one, as was measured over gloo on shares of one H200. Simulated minutes to the target:",
        "",
        table(["where", "workload", *BEST, *(f"ours over {rival}" for rival in BEST[:-1])], rows),
    ]
    return "\n".join(text), {}


def one_share(cells: dict[str, Any]) -> Page:
    """Return the page of cluster B where all devices have one ratio of forward to backward."""
    heading = "Simulated time to target, cluster B, forward a third of compute time on every device"
    text, _ = _overall(cells, "one-share", heading, BEST)
    return text, {}


def links(cells: dict[str, Any]) -> Page:
    """Return the page on other bandwidths than the assumed 10 Gbit/s."""
    text = ["## Simulated time to target, cluster B, other bandwidths", "", "The paper does not state its network."]
    rows = []
    for gbit in sorted({name.split("/")[0] for name in cells}, key=float):
        for workload in LINKED:
            rows.append([gbit, workload, *_row(cells, OTHERS, gbit, workload)])
    text += ["", _LEGEND, "", table(["Gbit/s", "workload", *_headers(OTHERS)], rows)]
    return "\n".join(text), {}


def _headers(policies: Sequence[str]) -> list[str]:
    rivals = [policy for policy in policies if policy != "cannikin"]
    bounds = ["even / best split", "ours over what that allows", "with noise", "ours over that"]
    return [*policies, *(f"ours over {p}" for p in rivals), *bounds]


def _row(cells: dict[str, Any], policies: Sequence[str], *key: str) -> list[str]:
    """Return minutes under each policy, ours over each, and how far ours is from what unlike devices allow."""
    times = {p: mean_of(cells, "elapsed_s", *key, p) for p in policies}
    row = []
    for policy, seconds in times.items():
        runs = of_seeds(cells, *key, policy)
        total = f" ({runs[0]['total_batch']:,}{_moved(runs[0])})" if policy.endswith("@best") else ""
        missed = "" if all(run["reached"] for run in runs) else ", target missed"
        row.append(f"{seconds / 60:.2f}{total}{missed}")
    row += [f"{times['cannikin'] / times[p] - 1:+.1%}" for p in policies if p != "cannikin"]
    for name in ("bound", "noisy bound"):
        bound = mean_of(cells, name, *key, "ddp@best")
        row += [f"{bound:.3f}", f"{times['cannikin'] * bound / times['ddp@best'] - 1:+.1%}"]
    return row


def _moved(run: dict[str, Any]) -> str:
    return f", moves of {run['samples_moved']}" if "samples_moved" in run else ""


def _overall(cells: dict[str, Any], name: str, heading: str, policies: Sequence[str]) -> Page:
    workloads = [w for w in workload_names() if of_seeds(cells, w, "cannikin")]
    rows = [[workload, *_row(cells, policies, workload)] for workload in workloads]
    passes = [
        [
            workload,
            *(f"{mean_of(cells, 'num_epochs', workload, p):.1f}" for p in policies),
            *(f"{of_seeds(cells, workload, p)[0]['total_batch']:,}" for p in policies),
        ]
        for workload in workloads
    ]
    text = [
        f"## {heading}",
        "",
        _LEGEND,
        "",
        table(["workload", *_headers(policies)], rows),
        "",
        "`even / best split` is the bound: the even split's step time over the best one's at `ddp@best`'s total, so "
        "all that unlike devices allow to gain on it at that total; the column behind it is ours over `ddp@best` "
        "divided by it. `with noise` is the same of steps as they are taken: in a balanced split every step waits for "
        "whichever rank is late, so noise takes some of what the split gains.",
        "",
        *_changes(cells, workloads),
        "Passes over the data, and the last total batch:",
        "",
        table(["workload", *(f"passes {p}" for p in policies), *(f"last B {p}" for p in policies)], passes),
    ]
    times = {p: [mean_of(cells, "elapsed_s", w, p) for w in workloads] for p in policies}
    share = {p: [t / best for t, best in zip(times[p], times["ddp@best"], strict=True)] for p in policies}
    plot = drawing.bars(heading, "time to target over ddp@best", workloads, share, log_y=True)  # B0: up to 300
    return "\n".join(text), {f"{name}.svg": plot}


def _changes(cells: dict[str, Any], workloads: Sequence[str]) -> list[str]:
    """Return how good the first plan of every new total was."""
    rows = []
    for workload in workloads:
        runs = of_seeds(cells, workload, "cannikin")
        above = np.array([change[3] - 1 for run in runs for change in run["changes"]])
        if len(above):
            late = [change[3] - 1 for run in runs for change in run["changes"] if change[0] >= _YOUNG]
            told = [f"{np.median(late):.1%}, {max(late):.1%}" if late else "-"]
            rows.append([workload, str(len(above)), f"{np.median(above):.1%}", f"{max(above):.1%}", *told])
    if not rows:
        return []
    return [
        "Right after each change of the total, time of ours over the best split's, without noise (the next window "
        "shows how the split does, and corrects it):",
        "",
        table(["workload", "changes", "median", "largest", f"from step {_YOUNG} on: median, largest"], rows),
        "",
    ]


def _curves(cells: dict[str, Any]) -> str:
    """Return when each policy reached which accuracy."""
    text = ["### Convergence curves", "", "Simulated minutes until the metric is first reached (`curve-*.svg`)."]
    for workload, levels in (("cifar10", (0.8, 0.9, 0.92, 0.94)), ("imagenet", (0.4, 0.6, 0.7, 0.74))):
        rows = []
        for policy in TRAINED:
            runs = of_seeds(cells, workload, policy)
            if runs:
                found = [next((e[1] / 60 for e in runs[0]["epochs"] if e[2] >= level), None) for level in levels]
                rows.append([policy, *("-" if minutes is None else f"{minutes:.1f}" for minutes in found)])
        text += ["", table([workload, *(f"{level:.0%}" for level in levels)], rows)]
    return "\n".join(text)


def _batches(cells: dict[str, Any], plots: dict[str, str]) -> Iterator[str]:
    """Return total batch and accuracy by epoch of CIFAR-10, and plot them."""
    runs = {
        p: of_seeds(cells, "cifar10", p)[0] for p in ("adaptdl", "paper", "cannikin") if of_seeds(cells, "cifar10", p)
    }
    totals = {p: [(e[0], e[3]) for e in run["epochs"]] for p, run in runs.items()}
    metrics = {p: [(e[0], e[2]) for e in run["epochs"]] for p, run in runs.items()}
    title = "Simulated: CIFAR-10, cluster B"
    plots["cifar10-total-batch.svg"] = drawing.lines(title, "epoch", "total batch", totals)
    plots["cifar10-accuracy.svg"] = drawing.lines(title, "epoch", "top-1 accuracy", metrics)
    rows = []
    for epoch in (1, 2, 3, 5, 10, 20, 40, 60, 80, 100, 140):
        row = [str(epoch)]
        for run in runs.values():
            near = [e for e in run["epochs"] if e[0] <= epoch]
            over = run["epochs"][-1][0] < epoch
            row.append("ended" if over else f"{near[-1][3]:,} / {near[-1][2]:.3f}" if near else "-")
        rows.append(row)
    yield "\n".join(["### Total batch and accuracy by epoch, CIFAR-10, simulated", "", table(["epoch", *runs], rows)])
