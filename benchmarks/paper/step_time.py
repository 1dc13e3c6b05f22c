"""The pages of step times at fixed totals: by cluster and network, by ratio of forward to backward, by speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import drawing
from benchmarks.paper import published
from benchmarks.paper.cells import CLUSTERS, LINKS_GBIT
from benchmarks.paper.clusters import NUM_DRAWS, SHARE_RANGE
from benchmarks.paper.tables import Page, below, of_seeds, table
from cannikin.sim.catalog import workload_names

_NAMES = ["even", "lb-bsp", "lb-bsp after a change", "equal", "paper", "cannikin", "cannikin after a change", "best"]
_MATTERS = 0.05  # from here on modelling overlap is called worth it
_NOTHING = 0.01  # and up to here it is called to make no difference


def rows_of(cells: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Return cluster, Gbit/s, workload and row of every cell of the first seed."""
    for cluster in CLUSTERS:
        for gbit in LINKS_GBIT:
            for workload in workload_names():
                for rows in of_seeds(cells, cluster, f"{gbit:g}", workload)[:1]:
                    yield from ((cluster, f"{gbit:g}", workload, row) for row in rows)


def largest_gains(cells: dict[str, Any], cluster: str, gbit: str) -> dict[str, tuple[float, str, int]]:
    """Return how far ours is below `even` and `lb-bsp` at most, with the workload and total where it is."""
    return {name: max(gains) for name, gains in _gains(cells, cluster, gbit).items()}


def _gains(cells: dict[str, Any], cluster: str, gbit: str) -> dict[str, list[tuple[float, str, int]]]:
    """Return how far ours is below `even` and `lb-bsp`, with workload and total, of every cell that has the rival."""
    found: dict[str, list[tuple[float, str, int]]] = {}
    for where, link, workload, row in rows_of(cells):
        if (where, link) == (cluster, gbit):
            for name in ("even", "lb-bsp"):
                if name in row:
                    gain = 1 - row["cannikin"] / row[name]
                    found.setdefault(name, []).append((gain, workload, row["total_batch"]))
    return found


def above(cells: dict[str, Any], rival: str) -> list[float]:
    """Return how far ours is above a rival where it is, by a 10,000th or more, of all cells that have both."""
    excess = [row["cannikin"] / row[rival] - 1 for *_, row in rows_of(cells) if rival in row]
    return sorted(share for share in excess if share >= 1e-4)


def overlap_gains(cells: dict[str, Any], shares: str) -> list[tuple[float, str]]:
    """Return how far the best split is below equal compute times, and what decides its time, of every cell.

    Args:
        cells: the section.
        shares: of forward: "own", "one share" or "drawn".
    """
    found = []
    for *_, row in rows_of(cells):
        for each in [row] if shares == "own" else row["drawn"] if shares == "drawn" else [row["one share"]]:
            found.append((1 - each["best"] / each["equal"], str(each["bottleneck"])))
    return found


def steps(cells: dict[str, Any]) -> Page:
    """Return the page of step times against the total batch."""
    own = list(rows_of(cells))
    text = [
        "## Step time against the total batch, simulated",
        "",
        "Without noise, each policy settled; in brackets over `even`. `equal` is LB-BSP's goal, equal compute times, "
        "to the sample; `lb-bsp` is where its own steps of 5 samples end. `best` is the ground truth's own optimum. "
        "`-` under `even`: DDP cannot hold that total, since the same batch does not fit into every rank's memory. "
        "`after a change`: the total has just grown by a tenth of its range; `-` there: the total before would have "
        "been below the initial one, or, in the column of ours alone, the planner had measured no batches near enough "
        "to split the new total by its model, and would have kept each rank's share.",
        "",
        f"All {len(own)} cells are in `paper.json`; below are the largest gains of each cluster and network, then "
        "all of cluster B at 10 Gbit/s.",
        "",
        table(
            [
                *("cluster", "Gbit/s", "most below even", "most below lb-bsp", "most above even", "most above lb-bsp"),
                *("ours above best: median", "largest"),
            ],
            [row for cluster in CLUSTERS for gbit in LINKS_GBIT for row in _largest(cells, cluster, f"{gbit:g}")],
        ),
        "",
        f"Paper, cluster B: up to {below(published.STEP_BELOW)}.",
        "",
        _other_side(cells),
        "",
        *_overlap(cells),
    ]
    plots = {}
    for workload in workload_names():
        for rows in of_seeds(cells, "b", "10", workload)[:1]:
            text += ["", f"### {workload}, cluster B, 10 Gbit/s, simulated", "", _totals(rows)]
            series = {
                n: [(row["total_batch"], row[n] / row["even"]) for row in rows if n in row and "even" in row]
                for n in _NAMES
            }
            plots[f"steps-{workload}.svg"] = drawing.lines(
                f"Simulated: {workload}, cluster B", "total batch", "step time over even", series, log_x=True
            )
    return "\n".join(text), plots


def _totals(rows: list[dict[str, Any]]) -> str:
    shown = []
    for row in rows:
        cells = ["-" if n not in row else f"{row[n] * 1e3:.1f}" for n in _NAMES]
        if "even" in row:
            cells = [
                cell if n not in row else f"{cell} ({row[n] / row['even']:.2f})"
                for n, cell in zip(_NAMES, cells, strict=True)
            ]
        shown.append([f"{row['total_batch']:,}", *cells, row["bottleneck"]])
    return table(["total batch", *_NAMES, "decided by"], shown)


def _largest(cells: dict[str, Any], cluster: str, gbit: str) -> Iterator[list[str]]:
    gains = _gains(cells, cluster, gbit)
    if gains:
        told = [f"{gain:.0%} ({workload}, {total:,})" for gain, workload, total in map(max, gains.values())]
        for gain, workload, total in map(min, gains.values()):
            told.append(f"{-gain:.1%} ({workload}, {total:,})" if gain <= -1e-4 else "nowhere")
        rows = [row for where, link, _, row in rows_of(cells) if (where, link) == (cluster, gbit)]
        above = [row["cannikin"] / row["best"] - 1 for row in rows]
        yield [cluster, gbit, *told, f"{np.median(above):.1%}", f"{max(above):.1%}"]


def _other_side(cells: dict[str, Any]) -> str:
    """Say where ours is the slower one."""
    told = []
    for rival, name in (("lb-bsp", "settled LB-BSP"), ("even", "the even split")):
        found, num = above(cells, rival), sum(rival in row for *_, row in rows_of(cells))
        far = sum(share > _NOTHING for share in found)
        worst = f", by {found[-1]:.1%} at worst and by more than {_NOTHING:.0%} in {far}" if found else ""
        told.append(f"0.01% or more above {name} in {len(found)} of {num} cells{worst}")
    lost = [row for *_, row in rows_of(cells) if "lb-bsp after a change" in row]
    missing = sum("cannikin after a change" not in row for row in lost)
    return f"Ours is {'; '.join(told)}. After a change LB-BSP has {len(lost)} cells, {missing} of which ours lacks."


def _overlap(cells: dict[str, Any]) -> list[str]:
    """Return how often overlap decides anything, by what is assumed of forward and backward."""
    low, high = SHARE_RANGE
    names = {
        "one share": "a third on every device",
        "own": "each kind its own, .30 to .39",
        "drawn": f"drawn for each kind from {low} to {high}, {NUM_DRAWS} draws",
    }
    rows = []
    for shares, told in names.items():
        found = overlap_gains(cells, shares)
        if found:
            gains, decided = np.array([gain for gain, _ in found]), [by for _, by in found]
            of = [f"{np.mean([by == each for by in decided]):.0%}" for each in ("compute", "communication", "mixed")]
            parts = [f"{(gains >= _MATTERS).mean():.1%}", f"{(gains <= _NOTHING).mean():.1%}", f"{gains.max():.1%}"]
            rows.append([told, str(len(found)), *of, *parts])
    return [
        "### What modelling the overlap is worth, simulated",
        "",
        "Of all cells of the three clusters and networks: what decides the best split's step time (ranks that end "
        "within 1% of it), and how far that split is below equal compute times, which is what modelling overlap gains "
        "over LB-BSP's goal. What forward's share is on real devices is an assumption (`devices.toml`).",
        "",
        table(
            [
                "forward's share of compute time",
                "cells",
                "compute",
                "communication",
                "mixed",
                f"gain of {_MATTERS:.0%} or more",
                f"gain of at most {_NOTHING:.0%}",
                "largest gain",
            ],
            rows,
        ),
        "",
        _settled(cells),
        "",
        "The ten cells with the largest gain over equal compute times, each kind with its own share; `ours` is what "
        "the planner reached in noisy steps:",
        "",
        _top(cells),
    ]


def settled_gains(cells: dict[str, Any]) -> list[tuple[float, str]]:
    """Return how far the best split is below where LB-BSP settles, and what decides its time, of every cell."""
    rows = [row for *_, row in rows_of(cells) if "lb-bsp" in row]
    return [(1 - row["best"] / row["lb-bsp"], str(row["bottleneck"])) for row in rows]


def _settled(cells: dict[str, Any]) -> str:
    far = [by for gain, by in settled_gains(cells) if gain >= _MATTERS]
    rows = [row for *_, row in rows_of(cells) if "lb-bsp" in row]
    over_best = sum(row["lb-bsp"] / row["best"] - 1 >= _MATTERS for row in rows)
    goal = sum(gain >= _MATTERS for gain, _ in overlap_gains(cells, "own"))
    return (
        f"With each kind's own share, the best split is {_MATTERS:.0%} or more below LB-BSP settled in {len(far)} of "
        f"{len(rows)} cells (LB-BSP is {_MATTERS:.0%} or more above it in {over_best}), "
        f"{sum(by != 'compute' for by in far)} of which are decided by communication or mixed. It is so far below "
        f"equal compute times to the sample, which have no step of 5 samples, in {goal}."
    )


def _top(cells: dict[str, Any]) -> str:
    held = [each for each in rows_of(cells) if "lb-bsp" in each[3]]
    rows = sorted(held, key=lambda each: each[3]["best"] / each[3]["equal"])[:10]
    return table(
        [
            *("cluster", "Gbit/s", "workload", "total batch", "equal", "lb-bsp", "ours", "best"),
            *("best below equal", "ours below lb-bsp", "decided by"),
        ],
        [
            [
                cluster,
                gbit,
                workload,
                f"{row['total_batch']:,}",
                *(f"{row[name] * 1e3:.1f}" for name in ("equal", "lb-bsp", "cannikin", "best")),
                f"{1 - row['best'] / row['equal']:.1%}",
                f"{1 - row['cannikin'] / row['lb-bsp']:.1%}",
                row["bottleneck"],
            ]
            for cluster, gbit, workload, row in rows
        ],
    )


def slowest(cells: dict[str, Any]) -> Page:
    """Return the page of the sweep of speeds."""
    rows, series = [], {}
    for workload in workload_names():
        for found in of_seeds(cells, workload)[:1]:
            for row in found:
                gain = {name: 1 - row[name] / row["even"] for name in ("best", "cannikin", "lb-bsp")}
                told = [f"{gain[name]:.1%}" for name in ("best", "cannikin", "lb-bsp")]
                taken = 1 - row["cannikin taken"] / row["even taken"]
                told += [f"{taken:.1%}", row["bottleneck"]]
                rows.append([workload, f"{row['total_batch']:,}", f"1/{row['slowest']:g}", *told])
                series.setdefault(workload, []).append((row["slowest"], taken))
    text = [
        "## How much unlike devices gain, simulated",
        "",
        "16 ranks like an RTX 6000 at 10 Gbit/s whose times per sample grow evenly from the fastest to the slowest; "
        "half of the total that DDP holds. Step time below the even split's, without noise and drift; `taken` is of "
        "1,000 simulated steps with both, and with the slow first steps at new sizes:",
        "",
        table(
            ["workload", "total batch", "slowest", "best split", "cannikin", "lb-bsp", "cannikin, taken", "decided by"],
            rows,
        ),
        "",
        "Paper: more heterogeneity, more gain; none on equal devices. Every rank's speed drifts by 2% here, each at "
        "its own time: a plan that follows it is slower by times without drift, and not by those that are taken.",
    ]
    plot = drawing.lines("Simulated: 16 ranks", "fastest over slowest", "step time below even", series)
    return "\n".join(text), {"slowest.svg": plot}
