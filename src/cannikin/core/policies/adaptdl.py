"""AdaptDL's policy (Pollux, OSDI'21): equal batches, and the total batch with the best goodput of equal replicas.

Legend: n replicas with m samples each, m at most what the smallest memory holds.

    T_grad(m) = alpha + beta m        T(m) = (T_grad^p + T_sync^p)^(1/p),  1 <= p <= 10

The model is AdaptDL's, fitted to the times of rank 0, the only one that it profiles: it cannot know that ranks differ,
and takes the wait for a slow rank for a part of T_sync. The total is chosen once per epoch; the first choice always
counts, later ones only where goodput grows by more than 5%. Norms are taken in every step. AdaptDL's averages decay by
.999^(B/B0); its artifact sets .997 by hand for DeepSpeech2 and YOLOv3, which we take for all: DeepSpeech2 on cluster B
then needs a third less of simulated time, CIFAR-10 and BERT as much as before.

Kinder to it than it is: a step has none of the overhead of its hooks, and epochs are passes over the data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cannikin.core.goodput import TotalChoice, choose_total, total_grid
from cannikin.core.noise.tracker import NoiseTracker
from cannikin.core.planner import Decision
from cannikin.core.policies import plans
from cannikin.core.values import FloatArray, IntArray, Job, StepWindow

SMOOTHING = 0.997  # of the averages of signal and noise, per B0 samples


class AdaptdlPlanner:
    """The planner behind `policy="adaptdl"`."""

    def __init__(self, job: Job, *, batch_norm: bool = False) -> None:
        self._job = job
        self._noise = NoiseTracker(initial_batch=job.batch_size, batch_norm=batch_norm, smoothing=SMOOTHING)
        self._plan = plans.make_plan(0, plans.ddp_batches(job, job.batch_size), reason="even split at B0")
        self._points: dict[int, list[float]] = {}  # total batch -> [steps, sum of T_grad, sum of T]
        self._samples = 0
        self._epoch = 0
        self._decided_epoch = 0

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        """At a new epoch choose the total with the best goodput, evenly split; else keep the plan in force."""
        if window is not None:
            self._observe(window)
        self._hold(job, step)
        choice = self._choose(job, step)
        return Decision(plan=self._plan, noise=self._noise.summary(), choice=choice, phase="even", norms_always=True)

    def _hold(self, job: Job, step: int) -> None:
        """Where a memory turns out not to hold its part, give all ranks what it holds, but not less than B0 in all."""
        most = max(_largest_local(job), -(-job.batch_size // job.num_ranks))
        if max(self._plan.local_batches) > most:
            reason = f"the smallest memory holds {most} samples: as many for every rank"
            self._plan = plans.make_plan(step, (most,) * job.num_ranks, reason=reason)

    def _observe(self, window: StepWindow) -> None:
        """Add up compute and step times by total batch, and track the noise scale."""
        for s in np.flatnonzero(window.valid.all(axis=1)):
            point = self._points.setdefault(int(window.local_batches[s].sum()), [0.0, 0.0, 0.0])
            point[0] += 1
            point[1] += float(window.before_s[s, 0] + window.ready_s[s, 0, -1])
            point[2] += float(window.interval_s[s, 0])
        self._noise.observe(window)
        self._samples += int(window.local_batches.sum())
        self._epoch = self._samples // plans.epoch_samples(self._job)

    def _choose(self, job: Job, step: int) -> TotalChoice | None:
        """Compare total batches where that is due, and plan for the best one."""
        fixed = job.largest_total == job.batch_size
        if fixed or self._epoch == self._decided_epoch or not self._points or not self._noise.num_steps:
            return None
        first = self._decided_epoch == 0
        self._decided_epoch = self._epoch
        now = self._plan.total_batch
        grid = np.unique(np.append(_equal_totals(job), now))
        step_s = replica_times(self._fit(), grid / job.num_ranks)
        choice = choose_total(grid, step_s, self._noise.efficiency(grid), now, threshold=0.0 if first else 0.05)
        if choice.total_batch != now:
            batches, reason = (choice.total_batch // job.num_ranks,) * job.num_ranks, choice.reason
            predicted_s = float(step_s[grid == choice.total_batch][0])
            if "biased" in self._noise.flags:
                reason += "; noise scale biased: one rank compares consecutive steps"
            self._plan = plans.make_plan(step, batches, reason=reason, predicted_step_s=predicted_s)
        return choice

    def _fit(self) -> tuple[float, float, float, float]:
        table = np.array([[total, *point] for total, point in sorted(self._points.items())])
        local, steps = table[:, 0] / self._job.num_ranks, table[:, 1]
        return fit_replicas(local, table[:, 2] / steps, table[:, 3] / steps)

    def start_with_noise(self, state: dict[str, Any]) -> None:
        """Begin with the noise that another policy's planner had tracked, its `state_dict()["noise"]`."""
        self._noise.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned and decided."""
        return {
            "plan": plans.save_plan(self._plan),
            "noise": self._noise.state_dict(),
            "points": [[total, *point] for total, point in self._points.items()],
            "counters": [self._samples, self._epoch, self._decided_epoch],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        with plans.restoring("AdaptDL planner"):
            self._plan = plans.resumed_plan(state["plan"], self._job)
            self._noise.load_state_dict(state["noise"])
            self._points = {int(total): list(point) for total, *point in state["points"]}
            self._samples, self._epoch, self._decided_epoch = state["counters"]


def _largest_local(job: Job) -> int:
    """Return the largest batch that every rank holds."""
    return int(job.bounds[1].min())


def _equal_totals(job: Job) -> IntArray:
    """Return AdaptDL's candidates for the total: n times whole local batches, of which every rank holds one."""
    n = job.num_ranks
    most = min(job.largest_total // n, _largest_local(job))
    locals_ = np.minimum(-(-total_grid(job.batch_size, max(job.largest_total, job.batch_size)) // n), most)
    totals: IntArray = n * np.unique(locals_[n * locals_ >= job.batch_size])
    return totals


def replica_times(fit: tuple[float, float, float, float], local_batch: FloatArray) -> FloatArray:
    """Return T(m) of AdaptDL's model with (alpha, beta, T_sync, p), seconds."""
    alpha, beta, sync, power = fit
    grad = alpha + beta * local_batch
    larger = np.maximum(grad, sync)
    # Scaled by the larger term, so that a power of 10 neither overflows nor vanishes.
    times: FloatArray = larger * ((grad / larger) ** power + (sync / larger) ** power) ** (1 / power)
    return times


def fit_replicas(local_batch: FloatArray, grad_s: FloatArray, step_s: FloatArray) -> tuple[float, float, float, float]:
    """Fit AdaptDL's model (alpha, beta, T_sync, p) to mean times at different local batches.

    If only one local batch was seen, alpha is half the compute time, as in AdaptDL. T_sync and p minimise the squared
    error of log T, with AdaptDL's penalty of 1e-3 (p - 1)^2, over a grid.

    Example:
        >>> fit = fit_replicas(np.array([8.0, 16.0]), np.array([0.010, 0.014]), np.array([0.012, 0.016]))
        >>> [round(value, 4) for value in fit]
        [0.006, 0.0005, 0.002, 1.0]
    """
    if len(local_batch) == 1:
        alpha, beta = float(grad_s[0]) / 2, float(grad_s[0] / local_batch[0]) / 2
    else:
        rows = np.stack([np.ones_like(local_batch), local_batch], axis=1) / grad_s[:, None]
        solution, *_ = np.linalg.lstsq(rows, np.ones_like(local_batch), rcond=None)
        if solution.min() < 0:  # batches next to each other, and noise: the better line with one of both alone
            alone = rows.sum(axis=0) / (rows**2).sum(axis=0)
            worse = ((rows * alone - 1) ** 2).sum(axis=0).argmax()
            solution = np.where(np.arange(2) == worse, 0.0, alone)
        alpha, beta = (max(float(value), 1e-8) for value in solution)
    best, best_loss = (alpha, beta, 1e-8, 1.0), np.inf
    for power in np.linspace(1.0, 10.0, 19):
        # T_sync that would explain each mean exactly; candidates lie between the extremes of these.
        exact = np.maximum(step_s**power - (alpha + beta * local_batch) ** power, 1e-16 * step_s**power) ** (1 / power)
        for sync in np.geomspace(exact.min(), exact.max() * (1 + 1e-12), 9):
            fit = (alpha, beta, float(sync), float(power))
            error = np.log(replica_times(fit, local_batch) / step_s)
            loss = float(np.sqrt((error**2).mean())) + 1e-3 * (power - 1) ** 2
            if loss < best_loss - 1e-12:
                best, best_loss = fit, loss
    return best
