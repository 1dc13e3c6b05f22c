"""Made-up clusters with a known truth, and the noisy windows a runtime would measure on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.layered import measure_layers
from cannikin.core.perf import Cluster, Curve
from cannikin.core.planner import Decision, Planner, SpeedChange
from cannikin.core.schedule import Schedule
from cannikin.core.split import optimal_split
from cannikin.core.values import Job, Plan, StepWindow


def random_cluster(rng: np.random.Generator, *, hard: bool = False, max_ranks: int = 16) -> tuple[Cluster, int]:
    """Draw a cluster over an 8x range of speeds, and a total batch for it.

    Shares of the total in proportion to speed give every rank the same variable time. Measured at those shares, fixed
    costs are up to 3 times the variable ones, the floors of 30% of the ranks (on forward and on backward) lie between
    a third of the time and all of it, and T_o is anything up to the mean compute time. In half of these clusters one
    rank's fixed cost alone decides the optimum, which many splits then reach; with `hard` those are drawn again.
    """
    while True:
        cluster, total_batch = _draw(rng, max_ranks)
        alone_s = cluster.bucket_times(cluster.min_batch).max()
        if not hard or optimal_split(cluster, total_batch).step_s > 1.001 * alone_s:
            return cluster, total_batch


def _draw(rng: np.random.Generator, max_ranks: int) -> tuple[Cluster, int]:
    n = int(rng.integers(2, max_ranks + 1))
    num_buckets = int(rng.integers(2, 7))
    speed = 2 ** rng.uniform(0, 3, n)
    total_batch = round(n * np.exp(rng.uniform(np.log(16), np.log(256))))
    share = total_batch * speed / speed.sum()
    floored = rng.random(n) < 0.3
    curves = []
    for portion in (1 / 3, 2 / 3):
        per_sample = 8e-3 * portion / speed
        fixed = rng.uniform(0, 3, n) * per_sample * share
        floor = np.where(floored, rng.uniform(1 / 3, 1, n) * (fixed + per_sample * share), 0.0)
        curves.append(Curve(fixed_s=fixed, per_sample_s=per_sample, floor_s=floor))
    compute_s = (curves[0].at(share) + curves[1].at(share)).mean()
    gammas = np.sort(rng.uniform(0.1, 0.9, num_buckets))
    gammas[-1] = 1.0
    overlapped = rng.dirichlet(np.full(num_buckets - 1, 5.0)) * rng.uniform(0, 1) * compute_s
    times = np.append(overlapped, rng.uniform(0.01, 0.1) * compute_s)
    tails = times[::-1].cumsum()[::-1]
    cluster = Cluster(forward=curves[0], backward=curves[1], gammas=gammas, tails_s=tails)
    return cluster, total_batch


def slowed(cluster: Cluster, rank: int, factor: float) -> Cluster:
    """Return the same cluster with every time of one rank multiplied."""
    times = np.ones(cluster.num_ranks)
    times[rank] = factor
    curves = [
        Curve(fixed_s=c.fixed_s * times, per_sample_s=c.per_sample_s * times, floor_s=c.floor_s * times)
        for c in (cluster.forward, cluster.backward)
    ]
    return replace(cluster, forward=curves[0], backward=curves[1])


def measure(
    cluster: Cluster,
    batches: npt.ArrayLike,
    rng: np.random.Generator,
    *,
    noise: float = 0.1,
    outliers: float = 0.02,
    first_step: int = 0,
    sqnorms: tuple[float, float] | None = None,
) -> StepWindow:
    """Draw one window of steps with these local batches, [S, n]: times have lognormal noise and now and then are 3
    times as long.

    With `sqnorms` = (|G|^2, tr Sigma) the squared norms are their expectations; otherwise they are NaN.
    """
    batches = np.asarray(batches)
    shape = batches.shape

    def jitter(*size: int) -> np.ndarray:
        return np.exp(noise * rng.standard_normal(size)) * np.where(rng.random(size) < outliers, 3.0, 1.0)

    before = cluster.forward.at(batches) * jitter(*shape)
    backward = cluster.backward.at(batches)
    ready = cluster.gammas * backward[..., None] * jitter(*shape, cluster.gammas.shape[1])
    times = -np.diff(cluster.tails_s, append=0.0) * jitter(len(batches), len(cluster.tails_s))
    moment = np.zeros(len(batches))
    done = np.empty_like(ready)
    for j in range(ready.shape[-1]):
        moment = np.maximum(moment, (before + ready[..., j]).max(axis=1)) + times[:, j]
        done[..., j] = moment[:, None] - before
    signal, trace = sqnorms or (np.nan, np.nan)
    return StepWindow(
        first_step=first_step,
        local_batches=batches,
        before_s=before,
        ready_s=ready,
        done_s=done,
        local_sqnorm=signal + trace / batches,
        global_sqnorm=signal + trace / batches.sum(axis=1),
    )


class Training:
    """Drives a planner by the core's schedule; plans take effect `delay` steps after a window.

    `decisions` has every decision that was made, the first of them before any window.
    """

    def __init__(self, planner: Planner, job: Job, rng: np.random.Generator, *, delay: int = 0) -> None:
        self.planner = planner
        self.rng = rng
        self.delay = delay
        self.step = 0
        self.schedule = Schedule(job, planner.decide(None, job, 0))
        self.decisions: list[Decision] = [self.schedule.decision]

    @property
    def decision(self) -> Decision:
        """The decision made last."""
        return self.schedule.decision

    @property
    def plans(self) -> list[Plan]:
        """Every plan that was made."""
        return [decision.plan for decision in self.decisions]

    @property
    def phases(self) -> list[str]:
        """What the planner called each decision."""
        return [decision.phase for decision in self.decisions]

    @property
    def changes(self) -> list[SpeedChange]:
        """Every change of speed that was found."""
        return [change for decision in self.decisions for change in decision.changes]

    def run(self, cluster: Cluster, num_steps: int, **noise: Any) -> Plan:
        """Train for whole windows, `num_steps` or a little more, and return the plan made last."""
        end = self.step + num_steps
        while self.step < end:
            batches = self.schedule.local_batches(self.step, self.schedule.window_steps(self.step))
            measured = measure if cluster.layers is None else measure_layers
            self.show(measured(cluster, batches, self.rng, first_step=self.step, **noise))
        return self.plans[-1]

    def show(self, window: StepWindow) -> Decision:
        """Show the planner this window, whatever was planned, and return its decision."""
        self.step = window.first_step + window.num_steps
        decision = self.schedule.decide(self.planner, window, self.step + self.delay)
        self.schedule.install(decision, self.step)
        self.decisions.append(decision)
        return decision
