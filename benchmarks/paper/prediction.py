"""How well OptPerf is predicted, with and without inverse-variance weighting, and how the overlap ratio scatters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.paper.optimum import best_split, settled_step_s
from cannikin.core.goodput import total_grid
from cannikin.core.planner import Planner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.policies.paper import PaperPlanner
from cannikin.core.values import Job
from cannikin.runlog import Predictions
from cannikin.sim.runs import find_machine, job_for
from cannikin.sim.simulation import Simulation
from cannikin.sim.workload import find_workload

UNCORRECTED = "cannikin: without the learned factor"
METHODS = ("cannikin", "paper, weighted", "paper, plain mean")
_STEPS = 800
_EPOCH_STEPS = 100
_GAMMA_STEPS = 200


def prediction_errors(cluster: str, workload: str, seed: int, num_points: int = 6) -> list[dict[str, Any]]:
    """Return the predicted step time of each method's plan after 800 steps over the best split's, minus 1.

    The best split is the ground truth's own, its time the median of 1,000 noisy steps. "METHOD: before it ran" are the
    errors of all plans for splits that had not run, by the steps that then ran under them. `UNCORRECTED` is what the
    model alone predicts, without the factor by which its steps turned out to take longer.
    """
    machine, found = find_machine(cluster, workload), find_workload(workload)
    whole = job_for(machine, found)
    rows = []
    for total in total_grid(whole.batch_size, whole.largest_total, num_points).tolist():
        job = replace(whole, batch_size=total, max_batch_size=None, num_samples=_EPOCH_STEPS * total)
        best_s = settled_step_s(machine, best_split(machine, job, total), seed)
        row: dict[str, Any] = {"total_batch": total, "best_s": best_s}
        for method in METHODS:
            told = Predictions()
            planner = _planner(method, job)
            simulation = Simulation(machine, planner, job, seed=seed, observers=(told,))
            run = simulation.run(max_steps=_STEPS)
            row[method] = None if told.predicted_ms is None else told.predicted_ms / 1e3 / best_s - 1
            if isinstance(planner, Controller):
                row[UNCORRECTED] = _uncorrected(planner, machine.names, row[method])
            row[f"{method}: before it ran"] = [each.error for each in told.outcomes if each.error is not None]
            row[f"{method}: reached"] = settled_step_s(machine, np.array(run.plan.local_batches), seed) / best_s - 1
        rows.append(row)
    return rows


def _uncorrected(planner: Controller, names: tuple[str, ...], error: float | None) -> float | None:
    """Return the error without the factor by which steps took longer than the model said, which they taught it."""
    learned = planner.cluster([(name, name) for name in names])
    return None if learned is None or error is None else (1 + error) / learned.slowdown - 1


def _planner(method: str, job: Job) -> Planner:
    if method == "cannikin":
        return Controller(job)
    return PaperPlanner(job, pooling="inverse-variance" if method == "paper, weighted" else "mean")


def gamma_spread(cluster: str, workload: str, seed: int) -> list[dict[str, Any]]:
    """Return mean and deviation of the first bucket's measured overlap ratio, by device and local batch."""
    machine = find_machine(cluster, workload)
    first = {name: machine.names.index(name) for name in machine.names}
    rng = np.random.default_rng(seed)
    rows = []
    for batch in (8, 16, 32, 64, 128, 256):
        times = machine.measure(np.full((_GAMMA_STEPS, machine.num_ranks), batch), 0, rng)
        gammas = times.ready_s[..., 0] / times.ready_s[..., -1]
        for name, rank in first.items():
            mean, spread = float(gammas[:, rank].mean()), float(gammas[:, rank].std())
            rows.append({"device": name, "local_batch": batch, "mean": mean, "sd": spread})
    return rows
