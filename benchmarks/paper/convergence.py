"""Whole trainings: the overall figure, convergence curves, total batch by epoch, other clusters, the planner's cost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.paper.clusters import ONE_SHARE, machine_at, with_forward_shares
from benchmarks.paper.fixed import Moves, best_totals, larger_moves, published_moves
from benchmarks.paper.optimum import best_split, expected_s, taken_s
from cannikin.core.policies.lb_bsp import LbBspPlanner
from cannikin.core.policies.plans import even_batches
from cannikin.core.values import Job
from cannikin.sim.hardware import Machine
from cannikin.sim.runs import job_for, simulate
from cannikin.sim.simulation import RunResult, Simulation
from cannikin.sim.workload import Workload, find_workload

# As they are called in tables, and the policy's name. "@B0" keeps the paper's B0, "@best" the best fixed total.
# "lb-bsp-5@best" moves 5 samples, as published; "lb-bsp@best" is the better of that and of moves of a 64th of it.
TRAINED = {
    "ddp@B0": "even",
    "ddp@best": "even",
    "lb-bsp@B0": "lb-bsp",
    "lb-bsp-5@best": "lb-bsp",
    "lb-bsp@best": "lb-bsp",
    "adaptdl": "adaptdl",
    "paper": "paper",
    "cannikin": "cannikin",
}
MOVES: dict[str, tuple[Moves, ...]] = {"lb-bsp@best": (published_moves, larger_moves)}
_MOST_POINTS = 200  # of a curve that are kept
_BOUND_STEPS = 4000  # one wave of the drift
_MOST_EPOCHS = 2000  # more than any best fixed total needs to its target
_TRIED = 3  # fixed totals that are trained with, of those that promise most


def train(
    cluster: str,
    workload: str,
    policy: str,
    seed: int,
    bandwidth_gbit: float | None = None,
    one_share: bool = False,
    new_size: float | None = None,
) -> dict[str, Any]:
    """Train to the target, and return how long it took and how it went.

    Args:
        cluster, workload, bandwidth_gbit, new_size: as for `machine_at`.
        policy: a name in `TRAINED`.
        seed: of all noise.
        one_share: whether forward takes the same share of compute time on every device.
    """
    found, machine = find_workload(workload), machine_at(cluster, workload, bandwidth_gbit, new_size)
    if one_share:
        machine = with_forward_shares(machine, ONE_SHARE)
    job = job_for(machine, found)
    run, moves = _run(machine, found, policy, job, seed)
    stride = max(1, -(-len(run.epochs) // _MOST_POINTS))
    epochs = [replace(epoch, planner_s=0.0) for epoch in run.epochs][::stride]
    # The first epoch of a short run may hold no step after its first window: leave such epochs out.
    shares, before_s = [], 0.0
    for epoch in run.epochs:
        if epoch.elapsed_s > before_s:
            shares.append(epoch.planner_s / (epoch.elapsed_s - before_s))
        before_s = epoch.elapsed_s
    return {
        "reached": run.reached,
        "reason": run.reason,
        "elapsed_s": run.elapsed_s,
        "num_steps": run.num_steps,
        "num_epochs": run.num_samples / found.spec.num_samples,
        "total_batch": run.plan.total_batch,
        "local_batches": list(run.plan.local_batches),
        **({} if moves is None else {"samples_moved": moves(run.plan.total_batch)}),
        **(_bounds(machine, job, run.plan.total_batch) if policy == "ddp@best" else {}),
        **({"changes": _changes(machine, job, run)} if policy == "cannikin" else {}),
        "epochs": [[e.epoch, e.elapsed_s, e.metric, e.total_batch, e.step_s] for e in epochs],
        "measured": {
            "planner_share": run.planner_s / run.elapsed_s,
            "most_planner_share": max(shares, default=run.planner_s / run.elapsed_s),
            "window_ms": run.planner_s / max(run.num_steps / 10, 1) * 1e3,
        },
    }


def _run(machine: Machine, workload: Workload, policy: str, job: Job, seed: int) -> tuple[RunResult, Moves | None]:
    """Return the run, and by how many samples LB-BSP moved at a best total."""
    name = TRAINED[policy]
    if not policy.endswith("@best"):
        return simulate(machine, workload, name, job=job, seed=seed), None
    runs: list[tuple[RunResult, Moves | None]] = []
    for moves in MOVES.get(policy, (published_moves,)):
        for total in best_totals(machine, workload, job, name, _TRIED, moves):
            fixed = replace(job, batch_size=total, max_batch_size=None)
            if name == "even":
                runs.append((simulate(machine, workload, name, job=fixed, seed=seed), None))
            else:
                planner = LbBspPlanner(fixed, samples_moved=moves(total))
                run = Simulation(machine, planner, fixed, workload, seed=seed).run(max_epochs=_MOST_EPOCHS)
                runs.append((run, moves))
    return min(runs, key=lambda pair: pair[0].elapsed_s)


def _bounds(machine: Machine, job: Job, total_batch: int) -> dict[str, float]:
    """Return what unlike devices allow at a fixed total: the even split's step time over the best one's.

    "bound" is without noise. "noisy bound" is of steps as they are taken: ranks that all end at about the same time
    wait for the latest of them in every step, so a balanced split loses more by noise than one with a clear straggler.
    """
    even, best = np.array(even_batches(job, total_batch)), best_split(machine, job, total_batch)
    taken = [taken_s(machine, np.tile(split, (_BOUND_STEPS, 1))) for split in (even, best)]
    return {
        "bound": float(expected_s(machine, even) / expected_s(machine, best)),
        "noisy bound": taken[0] / taken[1],
    }


def _changes(machine: Machine, job: Job, run: RunResult) -> list[list[float]]:
    """Return step, total before, total after, and time over the best split's of each first plan of another total.

    Times are without noise.
    """
    found = []
    for (_, before), (step, plan) in itertools.pairwise(run.plans):
        if plan.total_batch != before.total_batch:
            best = best_split(machine, job, plan.total_batch)
            above = expected_s(machine, np.array(plan.local_batches)) / expected_s(machine, best)
            found.append([step, before.total_batch, plan.total_batch, float(f"{float(above):.5g}")])
    return found
