"""Step times: from an even start epoch by epoch, against the total batch, fixed and changing, and against speeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.paper.clusters import ONE_SHARE, drawn_shares, machine_at, unlike_ranks, with_forward_shares
from benchmarks.paper.optimum import (
    best_split,
    bottleneck,
    equal_split,
    even_limit,
    expected_s,
    lb_bsp_split,
    settled_step_s,
)
from cannikin.core.goodput import total_grid
from cannikin.core.policies.cannikin import Controller
from cannikin.core.policies.plans import even_batches, inverse_batches
from cannikin.core.values import IntArray, Job
from cannikin.sim.hardware import Machine
from cannikin.sim.runs import find_machine, job_for, named_planner
from cannikin.sim.simulation import Simulation
from cannikin.sim.workload import find_workload

EPOCH_STEPS = 1000
_NUM_EPOCHS = 16
_SETTLE_STEPS = 400  # until a policy has done what it will do
_SWEEP_STEPS = 1000  # after that, over which the sweep of speeds is judged
SLOWEST = (1.0, 1.5, 2.0, 3.0, 4.0)  # of the sweep: the slowest rank's time per sample over the fastest's
_PAPER_EPOCH = 50  # steps of an epoch for the policies that plan once an epoch


def from_even_start(cluster: str, workload: str, total_batch: int, policy: str, seed: int) -> dict[str, Any]:
    """Return the mean step time of each epoch of 1,000 steps, from an even split at a fixed total batch."""
    machine, job = _fixed(cluster, workload, total_batch, EPOCH_STEPS)
    planner, pace = named_planner(policy, job)
    run = Simulation(machine, planner, job, seed=seed, pace=pace).run(max_epochs=_NUM_EPOCHS)
    best = best_split(machine, job, total_batch)
    starts = [(step, plan.local_batches) for step, plan in run.plans]
    return {
        "step_s": [epoch.step_s for epoch in run.epochs],
        "expected_s": [float(expected_s(machine, np.array(epoch.local_batches))) for epoch in run.epochs],
        "local_batches": [list(epoch.local_batches) for epoch in run.epochs],
        "best": best.tolist(),
        "best_s": settled_step_s(machine, best, seed),
        "best_expected_s": float(expected_s(machine, best)),
        "plans": [
            [step, float(expected_s(machine, np.array(batches)))] for step, batches in starts if step <= 2 * EPOCH_STEPS
        ],
    }


def by_total_batch(
    cluster: str,
    workload: str,
    seed: int,
    bandwidth_gbit: float | None = None,
    num_points: int = 7,
    with_changes: bool = True,
) -> list[dict[str, Any]]:
    """Return noiseless step times of every policy's split, settled at each total batch and right after a change to it.

    Totals reach from the initial one to the largest that DDP holds, and one beyond where the ranks hold more: there
    "even" is missing. After a change: the total grew by a tenth of the range. LB-BSP keeps its shares of the batch; the
    controller splits the new total by the model it has learned at the old one. "one share" has the same times where
    forward takes a third of compute time on every device, "drawn" those of every draw of shares. "equal" is LB-BSP's
    goal, equal compute times, "lb-bsp" where its steps of 5 samples end.

    Args:
        cluster, workload, seed, bandwidth_gbit: as for `convergence.train`.
        num_points: totals that DDP holds.
        with_changes: whether the paper's method and times after a change are asked for too.
    """
    machine = machine_at(cluster, workload, bandwidth_gbit)
    whole = job_for(machine, find_workload(workload))
    limit = even_limit(machine, whole)
    rows = []
    for total in sorted({*total_grid(whole.batch_size, limit, num_points).tolist(), whole.largest_total}):
        job = replace(whole, batch_size=total, max_batch_size=None, num_samples=_PAPER_EPOCH * total)
        row = _of_truth(machine, job, is_even=total <= limit)
        row["lb-bsp"] = _expected(machine, lb_bsp_split(machine, job, total))
        row["cannikin"] = _expected(machine, _settle(machine, job, "cannikin", seed)[0])
        if with_changes:
            row["paper"] = _expected(machine, _settle(machine, job, "paper", seed)[0])
            row |= _after_a_change(machine, whole, job, seed)
        row["one share"] = _of_truth(with_forward_shares(machine, ONE_SHARE), job, is_even=total <= limit)
        row["drawn"] = [_of_truth(other, job, is_even=False) for other in drawn_shares(machine, seed)]
        rows.append(row)
    return rows


def by_slowest(workload: str, seed: int) -> list[dict[str, Any]]:
    """Return noiseless step times of 16 ranks whose slowest takes 1 to 4 times as long per sample as the fastest.

    The total is half of what DDP holds. "even taken" and "cannikin taken" are means of simulated steps, with noise,
    drift, which plans follow, and the slow first step at a new size.
    """
    rows = []
    for slowest in SLOWEST:
        machine = unlike_ranks(workload, slowest)
        whole = job_for(machine, find_workload(workload))
        total = even_limit(machine, whole) // 2
        job = replace(whole, batch_size=total, max_batch_size=None, num_samples=_PAPER_EPOCH * total)
        own_lb = _expected(machine, lb_bsp_split(machine, job, total))
        settled = {name: _sweep(machine, job, name, seed) for name in ("even", "cannikin")}
        row = {"slowest": slowest, **_of_truth(machine, job, is_even=True), "lb-bsp": own_lb}
        row["cannikin"] = _expected(machine, settled["cannikin"][0])
        rows.append({**row, **{f"{name} taken": taken for name, (_, taken) in settled.items()}})
    return rows


def _sweep(machine: Machine, job: Job, policy: str, seed: int) -> tuple[IntArray, float]:
    """Return the split that a policy arrives at, and what steps take on average after that."""
    planner, pace = named_planner(policy, job)
    simulation = Simulation(machine, planner, job, seed=seed, pace=pace)
    settled = simulation.run(max_steps=_SETTLE_STEPS)
    end = simulation.run(max_steps=_SETTLE_STEPS + _SWEEP_STEPS)
    return np.array(settled.plan.local_batches), (end.elapsed_s - settled.elapsed_s) / _SWEEP_STEPS


def _of_truth(machine: Machine, job: Job, *, is_even: bool) -> dict[str, Any]:
    """Return what needs no planner: DDP's split, that of equal compute times, the best, and what decides its time."""
    total = job.batch_size
    best = best_split(machine, job, total)
    row: dict[str, Any] = {"total_batch": total, "best": _expected(machine, best)}
    row["bottleneck"] = bottleneck(machine, best)
    row["equal"] = _expected(machine, equal_split(machine, job, total))
    if is_even:
        row["even"] = _expected(machine, np.array(even_batches(job, total)))
    return row


def _after_a_change(machine: Machine, whole: Job, job: Job, seed: int) -> dict[str, float]:
    total = job.batch_size
    before = total - round((whole.largest_total - whole.batch_size) / 10)
    if before < whole.batch_size:
        return {}
    old = replace(job, batch_size=before, num_samples=_PAPER_EPOCH * before)
    moved = np.array(inverse_batches(job, total, 1.0 / lb_bsp_split(machine, old, before)))
    row = {"lb-bsp after a change": _expected(machine, moved)}
    _, controller = _settle(machine, old, "cannikin", seed)
    assert isinstance(controller, Controller)
    batches = controller.batches_for(total)
    assert batches is not None
    row["cannikin after a change"] = _expected(machine, np.array(batches))
    return row


def _settle(machine: Machine, job: Job, policy: str, seed: int) -> tuple[IntArray, Any]:
    """Return the split that a policy arrives at, and its planner."""
    planner, pace = named_planner(policy, job)
    run = Simulation(machine, planner, job, seed=seed, pace=pace).run(max_steps=_SETTLE_STEPS)
    return np.array(run.plan.local_batches), planner


def _expected(machine: Machine, split: IntArray) -> float:
    return float(f"{float(expected_s(machine, split)):.7g}")


def _fixed(cluster: str, workload: str, total_batch: int, epoch_steps: int) -> tuple[Machine, Job]:
    machine = find_machine(cluster, workload)
    job = job_for(machine, find_workload(workload), batch_size=total_batch, max_batch_size=total_batch)
    return machine, replace(job, max_batch_size=None, num_samples=epoch_steps * total_batch)
