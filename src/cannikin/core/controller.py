"""cannikin's own planner: learn, split, choose the total batch, again and again (paper, section 4), window by window.

The first window runs an even split, the second one batches in inverse proportion to the measured time a sample
(equation 8), and from then on OptPerf of the model learned so far. Between windows nothing happens. A new split must
promise more than the noise allows to believe, or the old one stays: equal ranks stay even, and loaders, compilers and
the noise estimate are left in peace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cannikin.core.goodput import choose_total, total_grid
from cannikin.core.learner import Learner, ModelFit
from cannikin.core.noise_tracker import NoiseTracker
from cannikin.core.perf import Cluster, step_time
from cannikin.core.plans import even_batches, inverse_batches, load_plan, make_plan, restoring, save_plan
from cannikin.core.records import FloatArray, Job, Plan, Split, StepWindow
from cannikin.core.split import SplitSolver
from cannikin.errors import StateError

__all__ = ["Controller", "window_steps"]

_TRUST = 2.0  # a rank is never given more than this times the largest batch it was measured at
_GROWTH = 2.0  # nor does the total batch grow by more than this at a time: times are extrapolated
# Gains in step time that are not worth a change: this much in any case, and these multiples of the precision to which
# a rank's time is known. The best of n noisy times looks 1 to 2 times that better than it is: equal ranks stay even.
_SAME, _STAY, _EVEN = 0.002, 0.25, 1.5
_NOISE_STEPS = 20  # steps before the noise scale is believed


def window_steps(first_step: int) -> int:
    """Length of the window that begins at this step: 5 while the model is young, then 10."""
    return 5 if first_step < 40 else 10


class Controller:
    """The planner behind `policy="cannikin"`."""

    def __init__(self, job: Job, *, batch_norm: bool = False) -> None:
        self.job = job
        self.learner = Learner(job.num_ranks)
        self.noise = NoiseTracker(initial_batch=job.batch_size, batch_norm=batch_norm)
        even = even_batches(job, job.batch_size)
        self._current = make_plan(0, even, phase="even", reason="nothing measured yet: even split")
        self._excess = 0.0  # log of measured over modelled step time: jitter makes the slowest of n slower
        self._model: ModelFit | None = None  # of the last window, until a plan has been made of it
        self._in_force = False  # whether a step under the plan made last has been observed
        self._news: list[str] = []

    def observe(self, window: StepWindow) -> None:
        """Learn every rank's speed, the communication times and the noise scale from one window."""
        num_before = self.learner.num_changes
        self.learner.observe(window)
        self._news += [
            f"rank {rank} takes {factor:.2f} times as long since step {step}"
            for step, rank, factor in self.learner.changes[
                len(self.learner.changes) + num_before - self.learner.num_changes :
            ]
        ]
        self._in_force = bool((window.local_batches == self._current.local_batches).all(axis=1).any())
        self._observe_noise(window)
        self._model = self.learner.model(*self.job.bounds)
        self._observe_excess(window, self._model.cluster)

    def plan(self, step: int) -> Plan:
        """The plan from `step` on; without a new window, the one that is in force."""
        if self._model is not None:
            model, self._model = self._model, None
            self._current = self._decide(step, model)
            self._news = []
        return self._current

    def _decide(self, step: int, model: ModelFit) -> Plan:
        now = self._current
        if model.cluster is None:
            return replace(now, reason=f"kept: {model.reason}")
        smallest, largest = self.learner.batch_range()
        if now.phase == "even" and not (largest > smallest).any():
            batches = np.array(now.local_batches)
            return self._second(
                step, (model.cluster.forward.at(batches) + model.cluster.backward.at(batches)) / batches
            )
        if now.phase == "inverse" and not self._in_force:
            return replace(now, reason="kept: equation 8's split has not been measured yet")
        trusted = np.minimum(model.cluster.max_batch, np.ceil(_TRUST * largest).astype(np.int64))
        solver = SplitSolver(replace(model.cluster, max_batch=np.maximum(trusted, model.cluster.min_batch)))
        total_batch, why = self._total(solver)
        split = solver.split(total_batch)
        if not split.feasible:
            return replace(now, reason=f"kept: {split.reason}")
        if not model.known.all():
            why = [*why, model.reason]
        return self._settle(step, model.cluster, split, why + self._news)

    def _second(self, step: int, sample_s: FloatArray) -> Plan:
        """The second window's plan: equation 8."""
        batches = inverse_batches(self.job, self._current.total_batch, sample_s)
        reason = "batches in inverse proportion to the measured time a sample (equation 8), to see a second batch size"
        return make_plan(step, batches, phase="inverse", reason=reason)

    def _settle(self, step: int, cluster: Cluster, best: Split, why: list[str]) -> Plan:
        """The best split, unless the present one or the even one is as good within the noise."""
        now, precision = self._current, self.learner.precision
        total_batch, best_s = sum(best.local_batches), step_time(cluster, best.local_batches)
        batches, phase, said = best.local_batches, "optperf", best.reason
        even = even_batches(self.job, total_batch)
        if step_time(cluster, even) <= best_s * (1 + max(_SAME, _EVEN * precision)):
            batches, phase, said = even, "even", "no rank differs from another by more than the noise"
        if now.total_batch == total_batch:
            now_s = step_time(cluster, now.local_batches)
            if batches == now.local_batches:
                said = f"kept: {said}"
            elif now_s <= best_s * (1 + max(_SAME, _STAY * precision)):
                batches, phase = now.local_batches, now.phase if now.phase == "even" else "optperf"
                said = f"kept: the best split would be {1 - best_s / now_s:.1%} faster"
            else:
                said = f"{1 - best_s / now_s:.1%} faster than the last split; {said}"
        predicted_s = step_time(cluster, batches) * float(np.exp(self._excess))
        first_step = now.first_step if batches == now.local_batches else step
        return make_plan(first_step, batches, phase=phase, reason="; ".join([said, *why]), predicted_step_s=predicted_s)

    def _total(self, solver: SplitSolver) -> tuple[int, list[str]]:
        """The total batch with the best goodput within reach, and why, if it may change at all."""
        now = self._current.total_batch
        if self.job.largest_total == self.job.batch_size:
            return now, []
        if self.job.num_ranks == 1:
            return now, ["total batch stays: one rank alone does not tell the noise scale"]
        if self.noise.num_steps < _NOISE_STEPS:
            return now, [f"noise scale not known yet ({self.noise.num_steps} of {_NOISE_STEPS} steps)"]
        grid = total_grid(self.job.batch_size, self.job.largest_total)
        grid = np.unique(np.append(grid[grid <= _GROWTH * now], now))
        choice = choose_total(grid, solver.step_times(grid), self.noise.efficiency(grid), now)
        return choice.total_batch, [f"{choice.reason}, noise scale {self.noise.noise_scale:.0f}"]

    def _observe_noise(self, window: StepWindow) -> None:
        """Feed the tracker every step whose norms were taken on all ranks, and those with an infinite one to count.

        Of the latter the optimizer mostly takes no step (GradScaler), so their times are not valid.
        """
        if window.num_ranks < 2:
            return
        overflowed = np.isinf(window.local_sqnorm).any(axis=1) | np.isinf(window.global_sqnorm)
        for s in np.flatnonzero(overflowed | window.valid.all(axis=1)):
            if not np.isnan(window.local_sqnorm[s]).all():
                # A negative norm is no norm: counted as skipped, like one that is not finite.
                local = np.where(window.local_sqnorm[s] >= 0, window.local_sqnorm[s], np.nan)
                self.noise.update(window.local_batches[s], local, float(window.global_sqnorm[s]))

    def _observe_excess(self, window: StepWindow, cluster: Cluster | None) -> None:
        """Learn how much longer steps take than the model's, once there is one."""
        steps = np.flatnonzero(window.valid.all(axis=1))
        if cluster is None or not len(steps):
            return
        modelled = np.array([step_time(cluster, window.local_batches[s]) for s in steps])
        measured = np.median(window.step_s[steps], axis=1)
        excess = float(np.clip(np.median(np.log(measured / modelled)), -0.2, 0.4))
        self._excess = excess if self._excess == 0.0 else 0.7 * self._excess + 0.3 * excess

    def state_dict(self) -> dict[str, Any]:
        """Everything learned and decided, as plain numbers, strings, lists and dicts."""
        return {
            "version": 1,
            "learner": self.learner.state_dict(),
            "noise": self.noise.state_dict(),
            "plan": save_plan(self._current),
            "excess": self._excess,
            "due": self._model is not None,
            "in_force": self._in_force,
            "news": list(self._news),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned.

        With another number of ranks the noise scale and the total batch are kept, and the ranks are learned anew.
        """
        with restoring("controller"):
            self._restore(state)

    def _restore(self, state: dict[str, Any]) -> None:
        if state.get("version") != 1:
            raise StateError(f"controller state of version {state.get('version')!r}: this cannikin reads version 1")
        self.noise.load_state_dict(state["noise"])
        num_saved = len(state["plan"]["local_batches"])
        if num_saved != self.job.num_ranks:
            total = min(max(int(state["plan"]["total_batch"]), self.job.batch_size), self.job.largest_total)
            reason = f"resumed with {self.job.num_ranks} ranks after {num_saved}: even split of the same total batch"
            self._current = make_plan(0, even_batches(self.job, total), phase="even", reason=reason)
            return
        self.learner.load_state_dict(state["learner"])
        self._current = load_plan(state["plan"], self.job)
        self._excess = float(state["excess"])
        self._model = self.learner.model(*self.job.bounds) if state["due"] else None
        self._in_force = bool(state["in_force"])
        self._news = list(state["news"])
