"""cannikin's own planner: learn, split, choose the total batch, again and again (paper, section 4), window by window.

The first window runs an even split, the second a guess that shows ranks another batch size, and from then on OptPerf
of the model learned so far. Between windows nothing happens. A new split must promise more than the noise allows to
believe, or the old one stays: equal ranks stay even, and loaders, compilers and the noise estimate are left in peace.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from cannikin.core.goodput import TotalChoice, choose_total, total_grid
from cannikin.core.learner import Learner, ModelFit
from cannikin.core.noise_tracker import NoiseTracker
from cannikin.core.noise_windows import observe_noise
from cannikin.core.perf import Cluster, step_time
from cannikin.core.plans import (
    even_batches,
    held_by_memory,
    load_plan,
    make_plan,
    restoring,
    save_plan,
    within_bounds,
)
from cannikin.core.profiles import load_profiles, save_profiles
from cannikin.core.records import Job, Plan, Split, StepWindow
from cannikin.core.split import SplitSolver
from cannikin.errors import InvalidInputError, StateError

__all__ = ["Controller", "window_steps"]

_TRUST = 2.0  # a rank is never given more than this times the largest batch it was measured at,
_TRUST_DOWN = 8.0  # nor less than the smallest over this
_GROWTH = 2.0  # nor does the total batch grow by more than this at a time: times are extrapolated
# Gains in step time that are not believed: this much in any case, and these multiples of the precision to which a
# rank's time is known. The best of n noisy times looks 1 to 2 times that better than it is: equal ranks stay even.
_SAME, _STAY, _EVEN = 0.002, 0.25, 1.5
_WORTH = 0.005  # what a change of batches must promise at least: at a new size a GPU has one slow step
_YOUNG = 40  # steps for which a model is
_NOISE_STEPS = 20  # steps before the noise scale is believed
_LOADING = 0.9  # a rank whose loader takes this share of a step at least is said to wait for its data


def window_steps(first_step: int, planner: object = None) -> int:
    """Length of the window that begins at this step: 5 while the model is young or has just changed, then 10."""
    changed = getattr(planner, "last_change", None)
    # A change in a run that this one resumes has a step number of that run, mostly a later one.
    return 5 if first_step < _YOUNG or (changed is not None and changed <= first_step < changed + _YOUNG) else 10


class Controller:
    """The planner behind `policy="cannikin"`."""

    def __init__(self, job: Job, *, batch_norm: bool = False) -> None:
        self.job = job  # with the bounds that memory sets at present
        self._own_job = job
        self.learner = Learner(job.num_ranks)
        self.noise = NoiseTracker(initial_batch=job.batch_size, batch_norm=batch_norm)
        even = even_batches(job, job.batch_size)
        self._current = make_plan(0, even, phase="even", reason="nothing measured yet: even split")
        self._excess = 0.0  # log of measured over modelled step time: jitter makes the slowest of n slower
        self._model: ModelFit | None = None  # of the last window, until a plan has been made of it
        self._in_force = False  # whether a step under the plan made last has been observed
        self._news: list[str] = []
        self.choice: TotalChoice | None = None  # among total batches, where the plan made last compared some

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
        observe_noise(self.noise, window)
        self.job = self._own_job.limited(window.max_batch, self._current.total_batch)
        self._model = self.learner.model(*self.job.bounds)
        self._observe_excess(window, self._model.cluster)

    @property
    def last_change(self) -> int | None:
        """The step at which a rank was last seen to change its speed."""
        return self.learner.changes[-1][0] if self.learner.changes else None

    def profiles(self) -> list[dict[str, Any] | None]:
        """What is known of each rank's device, for `start_from` of a later run (`profiles`); None where nothing is."""
        return save_profiles(self.learner)

    def start_from(self, profiles: list[dict[str, Any] | None]) -> None:
        """Before the first window: begin with what another run learned of these ranks' devices.

        Where all ranks are known the first plan is OptPerf of that, else the even split. Profiles weigh little: a few
        steps that say otherwise outweigh them. A damaged one raises StateError.
        """
        if np.isfinite(self.learner.batch_range()[0]).any():
            raise InvalidInputError("start_from comes too late, after steps have been measured: call it on a new run")
        known = load_profiles(self.learner, profiles)
        model = self.learner.model(*self.job.bounds)
        if model.cluster is None:
            missing = ", ".join(str(rank) for rank in np.flatnonzero(~known))
            self._current = replace(self._current, reason=f"even split: no stored profile of rank {missing}")
            return
        split = self._solver(model.cluster).split(self._current.total_batch)
        if not split.feasible:
            self._current = replace(self._current, reason=f"even split: the stored profiles end early, {split.reason}")
            return
        self._current = self._settle(0, model.cluster, split, [f"from stored profiles of all {len(known)} ranks"])

    def plan(self, step: int) -> Plan:
        """The plan from `step` on; without a new window, the one that is in force."""
        if self._model is not None:
            model, self._model = self._model, None
            self.choice = None
            self._current = self._decide(step, model)
            self._news = []
        return self._current

    def split_for(self, total_batch: int) -> Split | None:
        """The best split of another total batch by what has been learned so far; None while nothing has."""
        cluster = self.learner.model(*self.job.bounds).cluster
        return None if cluster is None else self._solver(cluster).split(total_batch)

    def _decide(self, step: int, model: ModelFit) -> Plan:
        before, self._current = self._current, within_bounds(self._current, self.job, step)
        now = self._current
        if model.cluster is None:
            return replace(now, reason=f"kept: {model.reason}") if now is before else now
        smallest, largest = self.learner.batch_range()
        if now.phase == "even" and self.job.num_ranks > 1 and not (largest > smallest).any():
            second = self._second(step, model.cluster)
            if second.local_batches != now.local_batches:  # equal ranks have no second batch size to see
                return second
        if now.phase == "inverse" and not self._in_force:
            return replace(now, reason="kept: the guess has not been measured yet")
        solver = self._solver(model.cluster)
        total_batch, why = self._total(solver)
        split = solver.split(total_batch)
        if not split.feasible:
            return replace(now, reason=f"kept: {split.reason}")
        if not model.known.all():
            why = [*why, model.reason]
        return self._settle(step, model.cluster, split, why + self._news)

    def _solver(self, cluster: Cluster) -> SplitSolver:
        """The solver for this model, within reach of what has been measured."""
        smallest, largest = self.learner.batch_range()
        least = np.maximum(cluster.min_batch, np.floor(smallest / _TRUST_DOWN).astype(np.int64))
        most = np.minimum(cluster.max_batch, np.ceil(_TRUST * largest).astype(np.int64))
        return SplitSolver(replace(cluster, min_batch=np.minimum(least, most), max_batch=np.maximum(most, least)))

    def _second(self, step: int, cluster: Cluster) -> Plan:
        """The second window's plan, to see a second batch size: equal computing times by the prior of `fit`.

        Equation 8 goes in that direction but not far: it takes all of the time measured for time a sample.
        """
        alone = replace(cluster, tails_s=np.zeros_like(cluster.tails_s))
        split = self._solver(alone).split(self._current.total_batch)
        if not split.feasible:
            return self._current
        reason = "a first guess, as if half of every rank's time were fixed, to see a second batch size"
        reason = "; ".join([reason, *self._limits(cluster, split.local_batches)])
        return make_plan(step, split.local_batches, phase="inverse", reason=reason)

    def _limits(self, cluster: Cluster, local_batches: tuple[int, ...]) -> list[str]:
        """What else than its speed limits a rank: its memory, or its data."""
        load_s, step_s = cluster.load.at(local_batches), step_time(cluster, local_batches)
        late = np.flatnonzero(load_s >= _LOADING * step_s).tolist()
        waits = [f"rank {rank} waits for its data: more loader workers would help" for rank in late]
        return held_by_memory(self._own_job, self.job, local_batches) + waits

    def _settle(self, step: int, cluster: Cluster, best: Split, why: list[str]) -> Plan:
        """The best split, unless the present one or the even one is as good within the noise."""
        now, precision = self._current, self.learner.precision
        total_batch, best_s = sum(best.local_batches), step_time(cluster, best.local_batches)
        batches, phase, said = best.local_batches, "optperf", best.reason
        even = even_batches(self.job, total_batch)
        if step_time(cluster, even) <= best_s * (1 + max(_SAME, _EVEN * precision)):
            alone = "one rank has the whole batch"
            said = alone if len(even) == 1 else "no rank differs from another by more than the noise"
            batches, phase = even, "even"
        if now.total_batch == total_batch:
            now_s = step_time(cluster, now.local_batches)
            if batches == now.local_batches:
                said = f"kept: {said}"
            elif phase == "even" and now.phase == "inverse":
                pass  # what was tried only to see a second batch size is not worth keeping
            elif now_s <= best_s * (1 + max(_WORTH, _STAY * precision)):
                batches, phase = now.local_batches, now.phase if now.phase == "even" else "optperf"
                said = f"kept: the best split would be {1 - best_s / now_s:.1%} faster"
            else:
                said = f"{1 - best_s / now_s:.1%} faster than the last split; {said}"
        predicted_s = step_time(cluster, batches) * float(np.exp(self._excess))
        first_step = now.first_step if batches == now.local_batches else step
        low, high = self._own_job.bounds
        said_and_why = ["the local batches are set, and stay"] if (low == high).all() else [said, *why]
        reason = "; ".join([*said_and_why, *self._limits(cluster, batches)])
        return make_plan(first_step, batches, phase=phase, reason=reason, predicted_step_s=predicted_s)

    def _total(self, solver: SplitSolver) -> tuple[int, list[str]]:
        """The total batch with the best goodput within reach, and why, if it may change at all."""
        now = self._current.total_batch
        if self.job.largest_total == self.job.batch_size:
            return now, []
        if self.noise.num_steps < _NOISE_STEPS:
            return now, [f"noise scale not known yet ({self.noise.num_steps} of {_NOISE_STEPS} steps)"]
        grid = total_grid(self.job.batch_size, self.job.largest_total)
        grid = np.unique(np.append(grid[grid <= _GROWTH * now], now))
        self.choice = choice = choose_total(grid, solver.step_times(grid), self.noise.efficiency(grid), now)
        noise_scale = f"{self.noise.noise_scale:.0f}"
        if "biased" in self.noise.flags:
            noise_scale += " (biased: one rank compares consecutive steps)"
        if math.isnan(self.noise.noise_scale):
            noise_scale = "not known: one rank compares consecutive steps, and at this learning rate they point apart"
        return choice.total_batch, [f"{choice.reason}, noise scale {noise_scale}"]

    def _observe_excess(self, window: StepWindow, cluster: Cluster | None) -> None:
        """Learn how much longer steps take than the model's, once there is one."""
        steps = np.flatnonzero(window.valid.all(axis=1))
        if cluster is None or not len(steps):
            return
        modelled = np.array([step_time(cluster, window.local_batches[s]) for s in steps])
        measured = np.median(window.interval_s[steps], axis=1)
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
            "max_local": self.job.bounds[1].tolist(),
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
        self._current = load_plan(state["plan"], self._own_job)
        caps = np.array(state.get("max_local", self._own_job.bounds[1]), dtype=np.int64)  # older states have none
        self.job = self._own_job.limited(caps, self._current.total_batch)
        self._excess = float(state["excess"])
        self._model = self.learner.model(*self.job.bounds) if state["due"] else None
        self._in_force = bool(state["in_force"])
        self._news = list(state["news"])
