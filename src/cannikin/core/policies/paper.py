"""The paper's own method, as published: a baseline that shows what exactness and windows of steps are worth.

The model is linear without floors, with one gamma for all ranks by inverse-variance weighting, and T_o and T_u by the
least over ranks (section 4.5). It plans once per epoch, after one epoch of an even split and one of equation 8 (section
4.2), which is "for the total batch size for the upcoming epoch": the total may move from the second epoch on. OptPerf
comes from Algorithm 1 with rounding, the noise scale from Theorem 1 with AdaptDL's averages and norms in every step,
the total batch from goodput (section 2.2). Where the paper says nothing we choose what suits it best, so that it never
gets stuck:

- Negative batches are raised to the lower bound, and the others scaled down.
- A line that is flat or falls with the batch is taken to rise a little, since Algorithm 1's linear system has no
  solution with two flat ranks.
- If a rank has run one local batch only, half its time counts as fixed, as in AdaptDL.

It differs from the paper in what plans cost, not in which are made: the paper keeps OptPerf of all candidates from one
epoch to the next (OptPerf_init), starts Algorithm 1 from the last overlap state, and begins anew when that has changed.
Those caches save solving 50 candidates per epoch, which takes milliseconds here, and could only make its plans older.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cannikin.core.fit import pooled_gammas
from cannikin.core.goodput import TotalChoice, choose_total, total_grid
from cannikin.core.noise.estimate import noise_scale
from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.planner import Decision, Noise
from cannikin.core.policies import plans
from cannikin.core.policies.adaptdl import SMOOTHING
from cannikin.core.policies.algorithm1 import algorithm1, round_batches
from cannikin.core.values import FloatArray, Job, StepWindow
from cannikin.errors import InvalidInputError

_EPOCHS_KEPT = 50  # epochs whose means the lines are fitted to, only the latest for each local batch
_SAME_BATCH = 0.5  # samples: mean local batches of two epochs that differ by less count as one
_LEAST_SLOPE = 0.01  # share of the time per sample: the slope that a flat line is given


class PaperPlanner:
    """The planner behind `policy="paper"`.

    Args:
        job: what to plan for.
        pooling: how ranks' overlap ratios become one: "inverse-variance" (section 4.5), or "mean", which the paper
            compares it with.
    """

    def __init__(self, job: Job, *, pooling: str = "inverse-variance") -> None:
        if pooling not in ("inverse-variance", "mean"):
            raise InvalidInputError(f"pooling={pooling!r} is unknown: choose inverse-variance or mean")
        self._job = job
        self._pooling = pooling
        self._plan = plans.make_plan(0, plans.even_batches(job, job.batch_size), reason="first epoch: even split")
        self._phase = "even"  # then "inverse" for an epoch, then "optperf"
        # One row per epoch and rank: epoch, rank, mean batch, mean a, mean P.
        self._rows: list[list[float]] = []
        self._sums = np.zeros((4, job.num_ranks))  # of this epoch: steps, b, a, P
        self._gamma_sums = np.zeros((3, job.num_ranks))  # of the run: steps, gamma, gamma^2
        self._comm_sums = np.zeros(3)  # of the run: steps, T_o, T_u
        self._noise = np.zeros(3)  # running weight, S, G
        self._num_batches = 1  # that pile up for one step of the optimizer
        self._samples = 0
        self._epoch = 0
        self._num_plans = 0  # made at the ends of epochs; a short epoch may pass within one window

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        """Make a new plan at the start of an epoch, else keep the one in force."""
        epoch_over = window is not None and self._observe(window)
        self._plan = plans.within_bounds(self._plan, job, step)
        choice = None
        if epoch_over:
            self._num_plans += 1
            choice = self._replan(job, step)
        return Decision(plan=self._plan, noise=self._known_noise(), choice=choice, phase=self._phase, norms_always=True)

    def _known_noise(self) -> Noise | None:
        """Return the averages of S and G; None before the first step."""
        weight, trace, signal = self._noise.tolist()
        if weight <= 0:
            return None
        return Noise(signal_sqnorm=signal / weight, noise_trace=trace / weight, num_batches=self._num_batches)

    def _observe(self, window: StepWindow) -> bool:
        """Add up this epoch's times, average the noise, and return whether an epoch has ended."""
        valid = window.valid.all(axis=1)
        if valid.any():
            self._add_times(window, np.flatnonzero(valid))
            self._num_batches = int(window.accumulated[valid][-1])
        self._observe_noise(window)
        self._samples += int(window.local_batches.sum())
        epoch = self._samples // plans.epoch_samples(self._job)
        if epoch <= self._epoch or not self._sums[0].any():
            return False
        steps, batch, before, backward = self._sums
        for rank in range(self._job.num_ranks):
            means = [float(total[rank] / steps[rank]) for total in (batch, before, backward)]
            self._rows = [row for row in self._rows if row[1] != rank or abs(row[2] - means[0]) >= _SAME_BATCH]
            self._rows.append([self._epoch, rank, *means])
        self._rows = self._rows[-_EPOCHS_KEPT * self._job.num_ranks :]
        self._sums[:] = 0.0
        self._epoch = epoch
        return True

    def _add_times(self, window: StepWindow, steps: Any) -> None:
        ready, done = window.ready_s[steps], np.maximum.accumulate(window.done_s[steps], axis=-1)
        batches, before = window.local_batches[steps], window.before_s[steps]
        self._sums += [
            np.full(window.num_ranks, len(steps)),
            *(x.sum(axis=0) for x in (batches, before, ready[..., -1])),
        ]
        gamma = ready[..., 0] / ready[..., -1]
        self._gamma_sums += [np.full(window.num_ranks, len(steps)), gamma.sum(axis=0), (gamma**2).sum(axis=0)]
        overlapped = (done[..., -2] - ready[..., 0]).min(axis=1) if window.num_buckets > 1 else np.zeros(len(steps))
        last_start = np.maximum(ready[..., -1], done[..., -2]) if window.num_buckets > 1 else ready[..., -1]
        last = (done[..., -1] - last_start).min(axis=1)
        self._comm_sums += [len(steps), overlapped.clip(0).sum(), last.clip(0).sum()]

    def _observe_noise(self, window: StepWindow) -> None:
        """Average Theorem 1's estimate as AdaptDL does, where norms were taken on all ranks."""
        taken = np.isfinite(window.local_sqnorm).all(axis=1) & np.isfinite(window.global_sqnorm)
        for s in np.flatnonzero(taken) if window.num_ranks > 1 else ():
            batches = window.local_batches[s] * window.accumulated[s]
            found = noise_scale(batches, window.local_sqnorm[s], float(window.global_sqnorm[s]), estimator="theorem1")
            keep = SMOOTHING ** (batches.sum() / self._job.batch_size)
            self._noise = keep * self._noise + (1 - keep) * np.array([1.0, found.noise_trace, found.signal_sqnorm])

    def _replan(self, job: Job, step: int) -> TotalChoice | None:
        """Plan for the epoch that begins, and return the choice among total batches, if there was one."""
        cluster = self._model(job)
        if self._num_plans == 1:
            table = np.array(self._rows)[-job.num_ranks :]
            sample_s = (table[:, 3] + table[:, 4]) / table[:, 2]
            total, choice = self._total(
                job, lambda total: step_time(cluster, plans.inverse_batches(job, total, sample_s))
            )
            batches = plans.inverse_batches(job, total, sample_s)
            reason = "second epoch: equation 8" + ("" if choice is None else f"; {choice.reason}")
            self._plan, self._phase = plans.make_plan(step, batches, reason=reason), "inverse"
            return choice
        total, choice = self._total(job, lambda total: algorithm1(cluster, total).step_s)
        result = algorithm1(cluster, total)
        if not result.local_batches:
            self._plan = plans.make_plan(step, self._plan.local_batches, reason=f"kept: {result.reason}")
            return choice
        batches, rounding = round_batches(_repaired(np.array(result.local_batches), total, job), total)
        reason = f"Algorithm 1: {result.reason}; {rounding}" + ("" if choice is None else f"; {choice.reason}")
        self._plan = plans.make_plan(step, batches, reason=reason, predicted_step_s=result.predicted_s)
        self._phase = "optperf"
        return choice

    def _model(self, job: Job) -> Cluster:
        """Fit the two-point model by least squares over epochs."""
        n = job.num_ranks
        lines = np.zeros((2, 2, n))
        for rank in range(n):
            table = np.array([row for row in self._rows if row[1] == rank])
            for c in (0, 1):
                batches, seconds = table[:, 2], table[:, 3 + c]
                slope, fixed = seconds[0] / batches[0] / 2, seconds[0] / 2
                if len(table) > 1:
                    slope, fixed = np.polyfit(batches, seconds, 1)
                least = _LEAST_SLOPE * float((seconds / batches).mean())
                lines[c, :, rank] = max(float(fixed), 0.0), float(slope) if slope > 0 else least
        steps, gamma, square = self._gamma_sums
        mean = gamma / steps
        variance = np.maximum(square / steps - mean**2, 1e-12) / steps
        weighted = self._pooling == "inverse-variance"
        shared = float(pooled_gammas(mean[:, None], variance[:, None])[0] if weighted else mean.mean())
        low, high = job.bounds
        return Cluster.two_point(
            forward=Curve(fixed_s=lines[0, 0], per_sample_s=lines[0, 1]),
            backward=Curve(fixed_s=lines[1, 0], per_sample_s=lines[1, 1]),
            gamma=min(max(shared, 0.0), 1.0),
            overlapped_s=float(self._comm_sums[1] / self._comm_sums[0]),
            last_s=float(self._comm_sums[2] / self._comm_sums[0]),
            min_batch=low,
            max_batch=high,
        )

    def _total(self, job: Job, step_s_of: Callable[[int], float]) -> tuple[int, TotalChoice | None]:
        """Choose the total batch with the best goodput, by the times that this method expects of each."""
        now = min(max(self._plan.total_batch, job.batch_size), job.largest_total)  # rounding may have moved it
        noise = self._known_noise()
        if job.largest_total == job.batch_size or noise is None:
            return now, None
        grid = np.unique(np.append(total_grid(job.batch_size, job.largest_total), now))
        step_s = np.array([step_s_of(int(total)) for total in grid])
        choice = choose_total(grid, step_s, noise.efficiency(grid, job.batch_size), now)
        return choice.total_batch, choice

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned and decided."""
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        counters = [self._samples, self._epoch, self._num_plans]
        return {
            "plan": plans.save_plan(self._plan),
            "phase": self._phase,
            "rows": self._rows,
            "counters": counters,
            **arrays,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        with plans.restoring("paper planner"):
            self._plan = plans.resumed_plan(state["plan"], self._job)
            self._phase = str(state["phase"])
            self._rows = [list(row) for row in state["rows"]]
            self._samples, self._epoch, self._num_plans = state["counters"]
            for name in _ARRAYS:
                setattr(self, name, np.asarray(state[name], dtype=np.float64))


_ARRAYS = ("_sums", "_gamma_sums", "_comm_sums", "_noise")


def _repaired(batches: FloatArray, total: int, job: Job) -> FloatArray:
    """Return batches within the bounds that still sum to the total, in proportion to what Algorithm 1 gave."""
    low, high = (bound.astype(np.float64) for bound in job.bounds)
    for _ in range(job.num_ranks):
        batches = np.clip(batches, low, high)
        surplus = batches.sum() - total
        room = (batches - low) if surplus > 0 else np.minimum(high, 2.0 * total) - batches
        if abs(surplus) < 1e-9 or room.sum() <= 0:
            break
        batches = batches - surplus * room / room.sum()
    return batches
