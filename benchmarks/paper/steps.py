"""Step times: from an even start epoch by epoch, and against the total batch, fixed and changing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.paper.optimum import best_split, expected_s, settled_step_s
from cannikin.core.goodput import total_grid
from cannikin.core.policies.cannikin import Controller
from cannikin.core.policies.plans import even_batches, inverse_batches
from cannikin.core.values import IntArray, Job
from cannikin.sim.hardware import Machine
from cannikin.sim.runs import find_machine, job_for, named_planner
from cannikin.sim.simulation import Simulation
from cannikin.sim.workload import find_workload

_EPOCH_STEPS = 1000
_NUM_EPOCHS = 16
_SETTLE_STEPS = 600  # until a policy has done what it will do
_LB_BSP_STEPS = 40_000  # and LB-BSP, which moves 5 samples at a time
_PAPER_EPOCH = 50  # steps of an epoch for the policies that plan once an epoch


def from_even_start(cluster: str, workload: str, total_batch: int, policy: str, seed: int) -> dict[str, Any]:
    """Return the mean step time of each epoch of 1,000 steps, from an even split at a fixed total batch."""
    machine, job = _fixed(cluster, workload, total_batch, _EPOCH_STEPS)
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
            [step, float(expected_s(machine, np.array(batches)))]
            for step, batches in starts
            if step <= 2 * _EPOCH_STEPS
        ],
    }


def by_total_batch(
    cluster: str, workload: str, seed: int, num_points: int = 7, lb_bsp_steps: int = _LB_BSP_STEPS
) -> list[dict[str, Any]]:
    """Return noiseless step times of every policy's split, settled at each total batch and right after a change to it.

    After a change: the total grew by a tenth of the range. LB-BSP keeps its shares of the batch; the controller splits
    the new total by the model it has learned at the old one.
    """
    found = find_workload(workload)
    machine = find_machine(cluster, workload)
    whole = job_for(machine, found)
    lowest, highest = whole.batch_size, whole.largest_total
    return [
        _at_total(machine, whole, int(total), round((highest - lowest) / 10), seed, lb_bsp_steps)
        for total in total_grid(lowest, highest, num_points)
    ]


def _at_total(machine: Machine, whole: Job, total: int, change: int, seed: int, lb_bsp_steps: int) -> dict[str, Any]:
    job = replace(whole, batch_size=total, max_batch_size=None, num_samples=_PAPER_EPOCH * total)
    row = {"total_batch": total, "even": _expected(machine, np.array(even_batches(job, total)))}
    row["best"] = _expected(machine, best_split(machine, job, total))
    for policy, steps in (("lb-bsp", lb_bsp_steps), ("paper", _SETTLE_STEPS), ("cannikin", _SETTLE_STEPS)):
        row[policy] = _expected(machine, _settle(machine, job, policy, seed, steps)[0])
    before = total - change
    if before >= whole.batch_size:
        old = replace(job, batch_size=before, num_samples=_PAPER_EPOCH * before)
        shares, _ = _settle(machine, old, "lb-bsp", seed, lb_bsp_steps)
        moved = np.array(inverse_batches(job, total, 1.0 / shares))
        row["lb-bsp after a change"] = _expected(machine, moved)
        _, controller = _settle(machine, old, "cannikin", seed, _SETTLE_STEPS)
        assert isinstance(controller, Controller)
        split = controller.split_for(total)
        if split is not None and split.feasible:
            row["cannikin after a change"] = _expected(machine, np.array(split.local_batches))
    return row


def _settle(machine: Machine, job: Job, policy: str, seed: int, steps: int) -> tuple[IntArray, Any]:
    """Return the split that a policy arrives at, and its planner."""
    planner, pace = named_planner(policy, job)
    run = Simulation(machine, planner, job, seed=seed, pace=pace).run(max_steps=steps)
    return np.array(run.plan.local_batches), planner


def _expected(machine: Machine, split: IntArray) -> float:
    return float(expected_s(machine, split))


def _fixed(cluster: str, workload: str, total_batch: int, epoch_steps: int) -> tuple[Machine, Job]:
    machine = find_machine(cluster, workload)
    job = job_for(machine, find_workload(workload), batch_size=total_batch, max_batch_size=total_batch)
    return machine, replace(job, max_batch_size=None, num_samples=epoch_steps * total_batch)
