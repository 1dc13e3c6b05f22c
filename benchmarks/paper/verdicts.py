"""The first table of the evaluation: every figure and table of the paper, its value, ours and whether they agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.paper import published
from benchmarks.paper.prediction import METHODS, UNCORRECTED
from benchmarks.paper.step_time import largest_gains, overlap_gains, settled_gains
from benchmarks.paper.steps import EPOCH_STEPS
from benchmarks.paper.tables import Results, mean_of, of_seeds, table
from benchmarks.paper.time_to_target import behind
from cannikin.sim.catalog import workload_names

_GOAL = 0.02  # no other policy is to be ahead by more
_CLOSE = 0.05  # a share that is this close to the paper's agrees


def all_items(results: Results, measured: Results) -> str:
    """Return the table, of whatever sections there are."""
    rows = [
        row
        for write in (_states, _gamma, _totals, _times, _fixed, _worst, _start, _steps, _sweep, _errors, _weighting)
        for row in write(results)
    ]
    rows += _overhead(measured)
    return table(["of the paper", "the paper's", "ours, simulated", "ours, for real", "verdict"], rows)


def _agrees(ours: float, paper: float) -> str:
    if abs(ours - paper) <= _CLOSE:
        return "agrees"
    return "larger than the paper's" if ours > paper else "smaller than the paper's"


def _below(cells: dict[str, Any], rival: str) -> dict[str, float]:
    """Return how far ours is below another policy in time to target, by workload."""
    found = {}
    for workload in workload_names():
        if of_seeds(cells, workload, rival) and of_seeds(cells, workload, "cannikin"):
            ours, theirs = (mean_of(cells, "elapsed_s", workload, each) for each in ("cannikin", rival))
            found[workload] = 1 - ours / theirs
    return found


def _told(shares: dict[str, float]) -> str:
    return ", ".join(f"{workload} {share:.1%}" for workload, share in shares.items())


def _states(results: Results) -> list[list[str]]:
    if "steps" not in results:
        return []
    decided = [by for _, by in overlap_gains(results["steps"], "own")]
    told = ", ".join(f"{each} in {np.mean([by == each for by in decided]):.0%}" for each in sorted(set(decided)))
    item = "figures 1 to 3: ranks that wait for computing, for communication, for both in one step"
    mixed = f"the general case is {np.mean([by == 'mixed' for by in decided]):.0%} of cells"
    inputs = "times of public traces, noise of public runs (`src/cannikin/sim/data`)"
    return [
        ["table 1, figure 4, algorithm 1", "described", "nothing to measure", "-", "-"],
        ["tables 2 to 4: clusters A and B, five workloads", "real ones", inputs, published.REAL["inputs"], "simulated"],
        [item, "drawings", f"of {len(decided)} cells {told}", published.REAL["states"], mixed],
    ]


def _gamma(results: Results) -> list[list[str]]:
    rows = [row for seeds in results.get("gamma", {}).values() for row in seeds]
    if not rows:
        return []
    spread = [row["sd"] / row["mean"] for row in rows]
    told = f"an input: {min(row['mean'] for row in rows):.2f} to {max(row['mean'] for row in rows):.2f}"
    told += f", scattering by {min(spread):.0%} to {max(spread):.0%}"
    low, high = min(row["mean"] for row in rows), max(row["mean"] for row in rows)
    real = [mean for _, mean, _ in published.GAMMAS["ResNet-18"]]
    inside = sum(low <= mean <= high for mean in real)
    verdict = f"no numbers to compare; holds {inside} of {len(real)} of the real ResNet-18's means"
    return [["figure 6: gamma by GPU and batch", "figure without numbers", told, published.REAL["gamma"], verdict]]


def _totals(results: Results) -> list[list[str]]:
    cells = results.get("convergence", {})
    runs = [of_seeds(cells, "cifar10", policy) for policy in ("cannikin", "adaptdl")]
    if not all(runs):
        return []
    ours, theirs = ({epoch: total for epoch, _, _, total, _ in found[0]["epochs"]} for found in runs)
    all_runs = [run for workload in workload_names() for run in of_seeds(cells, workload, "cannikin")]
    larger = float(np.mean([ours[epoch] > theirs[epoch] for epoch in ours if epoch in theirs]))
    verdict = "agrees" if larger > 0.5 else "does not agree"
    return [
        [
            *("figure 5a: larger totals than AdaptDL's on CIFAR-10", "in most epochs", f"in {larger:.0%} of epochs"),
            *(published.REAL["totals"], verdict),
        ],
        [
            "figures 5b, 5c: accuracy unharmed",
            "same accuracy",
            "by construction, as quality follows progress alone",
            published.REAL["accuracy"],
            f"{sum(run['reached'] for run in all_runs)} of {len(all_runs)} simulated trainings reach the target",
        ],
    ]


def _times(results: Results) -> list[list[str]]:
    cells, rows = results.get("convergence", {}), []
    for rival, name in (("ddp@B0", "DDP"), ("adaptdl", "AdaptDL"), ("lb-bsp@B0", "LB-BSP")):
        found = _below(cells, rival)
        if found:
            paper = published.TIME_BELOW[name]
            item = f"figures 7 and 8: time to target below {name}, cluster B"
            at = " at B0" if rival.endswith("@B0") else ""
            rows.append([item + at, f"up to {paper:.0%}", _told(found), published.REAL[rival]])
            rows[-1].append(f"{_agrees(max(found.values()), paper)}: {_why(cells, rival, found)}")
    for workload, share in _below(cells, "adaptdl").items():
        if workload in published.ADAPTDL_BELOW:
            paper = published.ADAPTDL_BELOW[workload]
            item, real = f"figure 7: below AdaptDL on {workload}", published.REAL["adaptdl"]
            rows.append([item, f"{paper:.0%}", f"{share:.1%}", real, _agrees(share, paper)])
    for rival in ("ddp@best", "lb-bsp-5@best", "lb-bsp@best", "paper"):
        found = _below(cells, rival)
        if found:
            item = f"not in the paper: below {rival}, cluster B"
            rows.append([item, "-", _told(found), published.REAL[rival], f"worst {min(found.values()):+.1%}"])
    return rows


def _why(cells: dict[str, Any], rival: str, found: dict[str, float]) -> str:
    """Return what explains the largest gain: how much of it a better fixed total gains too, or how short the run is."""
    where = max(found, key=lambda workload: found[workload])
    if rival.endswith("@B0"):
        best = _below(cells, rival.replace("@B0", "@best"))
        return (
            f"of {found[where]:.1%} on {where}, {best[where]:.1%} are left at the rival's best total" if best else "-"
        )
    passes = mean_of(cells, "num_epochs", where, rival)
    return f"most on {where}, {passes:.1f} passes of a rival that plans once per pass"


def _worst(results: Results) -> list[list[str]]:
    """Return the cells in which ours is furthest behind any rival."""
    found = behind(results)
    if not found:
        return []
    far = [share for share, _ in found if share > _GOAL]
    told = "; ".join(f"{share:+.1%} {where}" for share, where in found[:3])
    item = f"not in the paper: never behind another policy by more than {_GOAL:.0%}"
    verdict = "holds" if not far else f"missed in {len(far)} of {len(found)} comparisons"
    return [[item, "-", f"time to target of ours over a rival's, largest: {told}", "-", verdict]]


def _fixed(results: Results) -> list[list[str]]:
    rows = []
    for cluster in ("a", "c"):
        rivals = ("ddp@best", "lb-bsp@best", "adaptdl")
        found = {rival: _below(results.get(f"cluster-{cluster}", {}), rival) for rival in rivals}
        if all(found.values()):
            told = "; ".join(f"below {rival}: {_told(shares)}" for rival, shares in found.items())
            item = "section 6: cluster C aligns with A and B" if cluster == "c" else "not in the paper: trainings on A"
            worst = min(min(shares.values()) for shares in found.values())
            rows.append([item, "-", told, published.REAL["sharing"] if cluster == "c" else "-", f"worst {worst:+.1%}"])
    return rows


def _start(results: Results) -> list[list[str]]:
    cells = results.get("start", {})
    if not of_seeds(cells, "cannikin"):
        return []
    run = of_seeds(cells, "cannikin")[0]
    step = next((step for step, seconds in run["plans"] if seconds <= 1.03 * run["best_expected_s"]), None)
    item = "figure 9: OptPerf from an even start, cluster A, ImageNet, 128"
    paper = f"epoch {published.EPOCH_AT_OPTPERF}; LB-BSP after {published.LB_BSP_EPOCHS} epochs"
    first, last = ((published.EPOCH_AT_OPTPERF - k) * EPOCH_STEPS for k in (1, 0))
    verdict = "does not agree" if step is None or step > last else "sooner" if step < first else "agrees"
    return [[item, paper, f"within 3% of the best from a plan of step {step} on", published.REAL["start"], verdict]]


def _steps(results: Results) -> list[list[str]]:
    rows = []
    for name, rival in (("DDP", "even"), ("LB-BSP", "lb-bsp")):
        found = {c: largest_gains(results.get("steps", {}), c, "10").get(rival) for c in ("a", "b", "c")}
        told = [f"{c.upper()} {gain[0]:.0%}" for c, gain in found.items() if gain]
        if told:
            paper = published.STEP_BELOW[name]
            item = f"figure 10: step time below {name}, fixed total"
            row = [item, f"up to {paper:.0%} (B)", f"10 Gbit/s: {', '.join(told)}", published.REAL[f"steps {rival}"]]
            rows.append([*row, "-" if found["b"] is None else f"{_agrees(found['b'][0], paper)} on B"])
    gains = [gain for gain, _ in overlap_gains(results.get("steps", {}), "own")]
    if gains:
        settled = [gain for gain, _ in settled_gains(results["steps"])]
        told = f"at most {max(gains):.1%} in {len(gains)} cells; over LB-BSP settled at most {max(settled):.1%}, "
        told += "which moves 5 samples at a time"
        paper = published.STEP_BELOW["LB-BSP"]
        verdict = f"the paper's {paper:.0%} is {'' if max(gains) >= paper else 'not '}reached by it"
        item = "figure 10: of that, what modelling overlap gains over equal compute times"
        rows.append([item, "-", told, published.REAL["overlap"], verdict])
    changed = [row for rows in results.get("steps", {}).values() for row in rows if "cannikin after a change" in row]
    if changed:
        above = [row["cannikin after a change"] / row["best"] - 1 for row in changed]
        theirs = [row["lb-bsp after a change"] / row["best"] - 1 for row in changed if "lb-bsp after a change" in row]
        told = f"B: ours at most {max(above):.1%} above the best, LB-BSP {max(theirs, default=math.nan):.1%}"
        verdict = (
            "agrees" if max(above) < 0.02 else "does not agree" if max(above) > max(theirs, default=0.0) else "partly"
        )
        item = "figure 10: right after the total has grown by a tenth of its range"
        rows.append([item, "at OptPerf; LB-BSP is not", told, published.REAL["change"], verdict])
    return rows


def _sweep(results: Results) -> list[list[str]]:
    """Return the gain over the even split by workload, in steps as they are taken, from equal ranks on."""
    rows = []
    for workload in workload_names():
        for found in of_seeds(results.get("slowest", {}), workload)[:1]:
            gains = {row["slowest"]: 1 - row["cannikin taken"] / row["even taken"] for row in found}
            told = ", ".join(f"1/{slowest:g}: {gain:.1%}" for slowest, gain in gains.items())
            grows = list(gains.values()) == sorted(gains.values())
            loses = [f"1/{slowest:g}" for slowest, gain in gains.items() if gain < 0]
            verdict = "agrees" if grows and max(gains.values()) > 0 else "does not agree"
            verdict += f"; loses at {', '.join(loses)}, {-min(gains.values()):.1%} at most" if loses else ""
            item = f"section 6: more heterogeneity, more gain, {workload}"
            rows.append([item, "-", f"slowest {told}", published.REAL["sweep"], verdict])
    return rows


def _rows_of(results: Results, cluster: str, workload: str) -> list[dict[str, Any]]:
    return [row for seed in of_seeds(results.get("prediction", {}), cluster, workload) for row in seed]


def _errors(results: Results) -> list[list[str]]:
    """Return the errors of predictions by cluster, judged by each workload's own limit."""
    rows = []
    for cluster in ("a", "b", "c"):
        errors, bare, before, beyond, early = [], [], [], [], 0
        for workload in workload_names():
            limit = published.PREDICTION_ERRORS[published.LIMIT_OF[workload]]
            for row in _rows_of(results, cluster, workload):
                errors += [] if row[METHODS[0]] is None else [abs(row[METHODS[0]])]
                bare += [] if row.get(UNCORRECTED) is None else [abs(row[UNCORRECTED])]
                beyond += [workload] if abs(row[METHODS[0]] or 0.0) > limit else []
                told = [abs(error) for error in row[f"{METHODS[0]}: before it ran"]]
                before, early = before + told, early + sum(error > limit for error in told)
        if not errors:
            continue
        text = f"predicted optimum {_spread(errors)}"
        text += f"; without the factor learned from the steps {_spread(bare)}" if bare else ""
        text += f"; before a plan ran {_spread(before)}" if before else ""
        paper = " and ".join(f"{error:.0%} ({names})" for names, error in published.PREDICTION_ERRORS.items())
        verdict = f"beyond the paper's in {len(beyond)} of {len(errors)}" if beyond else "agrees"
        verdict += f"; before they ran {early} of {len(before)} plans are beyond it" if before else ""
        item = f"section 5.3: prediction of OptPerf, cluster {cluster.upper()}"
        rows.append([item, f"at most {paper} (A)", text, published.REAL["prediction"], verdict])
    return rows


def _spread(errors: list[float]) -> str:
    return f"median {np.median(errors):.1%}, worst {max(errors):.1%}"


def _weighting(results: Results) -> list[list[str]]:
    """Return what inverse-variance weighting is worth to the paper's method, on cluster A."""
    found = [row for workload in workload_names() for row in _rows_of(results, "a", workload)]
    pairs = [[abs(row[method]) for row in found if row[method] is not None] for method in METHODS[1:]]
    if not all(pairs):
        return []
    told = f"paper's method with it {_spread(pairs[0])}; with a plain mean {_spread(pairs[1])}"
    more = max(pairs[1]) - max(pairs[0])
    item = "section 5.3: error without inverse-variance weighting, cluster A"
    verdict = f"{'agrees' if more > _CLOSE else 'does not agree'}: worst {more:+.1%} without it"
    return [[item, f"up to {published.UNWEIGHTED_ERROR:.0%}", told, "none", verdict]]


def _overhead(measured: Results) -> list[list[str]]:
    """Return the planner's share of a run and of its worst epoch, on the cluster where it is largest, and on each."""
    sections = {"A": "cluster-a", "B": "convergence", "C": "cluster-c"}
    found = {
        name: [
            run for workload in workload_names() for run in of_seeds(measured.get(section, {}), workload, "cannikin")
        ]
        for name, section in sections.items()
    }
    shares = {
        name: [max(run[share] for run in runs) for share in ("planner_share", "most_planner_share")]
        for name, runs in found.items()
        if runs
    }
    if not shares:
        return []
    told = ", ".join(f"{name} {whole:.2%} and {worst:.2%}" for name, (whole, worst) in shares.items())
    limit = max(share for _, share in published.OVERHEAD.values() if share is not None)
    verdict = "agrees" if max(whole for whole, _ in shares.values()) <= limit else "larger than the paper's"
    paper, item = "2.7 to 3.9% of a run, 12% of an epoch", "table 5: overhead"
    return [
        [
            item,
            paper,
            f"planner's CPU time, of a run and of the worst epoch: {told}",
            published.REAL["overhead"],
            verdict,
        ]
    ]
