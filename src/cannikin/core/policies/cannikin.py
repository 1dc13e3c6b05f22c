"""cannikin's own planner: in every window it learns, splits and chooses the total batch (paper, section 4).

The first window runs an even split, or one by the devices' data sheets where these differ; the second a guess that
shows ranks another batch size, and later ones OptPerf of the model learned so far. A new split must promise a gain that
exceeds the noise of measurements and, over the steps that it may live, what new sizes cost, or the old one stays: equal
ranks stay even, and loaders, compilers and the noise estimate are not disturbed for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cannikin.core.advice import LearnedCluster, learned_ranks
from cannikin.core.devices import Origin, suppose_unknown
from cannikin.core.goodput import TotalChoice, choose_total, growth_limit, total_grid
from cannikin.core.learner import TRUST, TRUST_DOWN, Learner, ModelFit
from cannikin.core.noise.tracker import NoiseTracker
from cannikin.core.perf import Cluster, even_speed, step_time
from cannikin.core.planner import Decision, SpeedChange
from cannikin.core.policies import plans
from cannikin.core.prior import DataSheet, first_shares
from cannikin.core.profiles import Profile, load_profiles, profile_caps, save_profiles
from cannikin.core.saved import number, whole, whole_numbers
from cannikin.core.sizes import SizeHistory
from cannikin.core.split import SplitSolver, solver_for
from cannikin.core.values import NO_MAX, Job, Plan, Split, StepWindow
from cannikin.errors import InvalidInputError, StateError
from cannikin.words import counted

# Another total batch must promise a gain of `_GAIN`. The longer the present one has run, the less: what a change costs
# in steps, `_RELEARNED` and those of new sizes, divided by that age, but never below `_LEAST_GAIN`.
_GAIN, _LEAST_GAIN = 0.05, 0.01
_RELEARNED = 5.0  # steps
# A gain in step time is believed only if it exceeds `_SAME` (against the even split) or `_WORTH` (against the present
# one: at a new size a GPU has one slow step), and the given multiple of the precision to which a rank's time is known.
# The best of n noisy times looks 1 to 2 times that precision better than it is: equal ranks stay even.
_SAME, _EVEN = 0.002, 1.5
_WORTH, _STAY = 0.005, 0.25
# A change must also save what it costs over the steps that the plan may live: as many as the cluster has been steady
# for, and not fewer than `_LEAST_LIFE`, or `_STEADY_LIFE` while no rank was ever seen to change its speed. Once the
# model is learned, add `_RISK` steps to the measured cost: a size never run may be slower than the model says.
_LEAST_LIFE, _STEADY_LIFE, _RISK = 100, 300, 1.0
# A split may be this much slower than the best where that changes fewer batches, or makes them multiples of these.
_FREE, _UNITS = 0.003, (8, 4, 2, 1)
_LEEWAY = 1.5  # where all curves are known, a rank's batch may grow by this times the growth of the total
_ROUNDS = 3  # solutions of one model, each with the curves near the batches of the one before
_FIRST = 0.01  # a first plan is even only where that loses no more than this, however little is known
_MANY_SIZES = 8  # compilers that make a program for each size keep about so many
_UNSETTLED = 40  # steps after a change of speed during which the model is being learned again
# Steps before the noise scale's limits are believed. Those of one rank alone share gradients, and are too narrow.
_NOISE_STEPS, _NOISE_STEPS_ALONE = 5, 20
_PINNED = "the local batches are set, and stay"
_MAX_TOLD = 8  # ranks whose shares a reason names one by one
_LOADING = 0.9  # a rank waits for its data where its loader takes at least this share of a step


class Controller:
    """The planner behind `policy="cannikin"`."""

    def __init__(self, job: Job, *, batch_norm: bool = False) -> None:
        self._job = job
        self._learner = Learner(job.num_ranks)
        self._noise = NoiseTracker(initial_batch=job.batch_size, batch_norm=batch_norm)
        # The largest batch that each rank's memory holds: as another run has found, until the rank knows by itself.
        self._caps, self._own_caps = np.full((2, job.num_ranks), NO_MAX)
        self._sheets: Sequence[DataSheet] = ()  # of the ranks' devices, where they are known
        self._plan = self._first_plan(job.batch_size, "nothing measured yet: even split")
        # The first split is "even" though data sheets may say otherwise: each rank has run one size.
        self._phase = "even"  # "guess" while the second window's split is tried, "optperf" from then on
        self._excess = 0.0  # log of measured over modelled step time: jitter makes the slowest of n slower
        self._sizes = SizeHistory(job.num_ranks)
        # Step of the last change of the total batch or of a rank's speed; None until the first window after a resume.
        self._steady_since: int | None = 0
        self._last_change: int | None = None  # step at which a rank was last seen to change its speed
        self._ran: tuple[int, ...] | None = None  # the split that was seen to run last

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        """Learn every rank's speed, the communication times and the noise scale, and plan with what is known now."""
        if window is None:
            return Decision(plan=self._plan, noise=self._noise.summary(), phase=self._phase)
        self._own_caps = window.max_batch
        self._caps = np.where(self._own_caps < NO_MAX, NO_MAX, self._caps)
        job = job.limited(self._caps, self._plan.total_batch)
        if self._steady_since is None:
            self._steady_since = window.first_step
        changes = self._learner.observe(window)
        self._sizes.observe(window)
        self._ran = tuple(window.local_batches[-1].tolist())
        self._noise.observe(window)
        model = self._learner.model(*job.bounds)
        self._observe_excess(window, model.cluster)
        in_force = (window.local_batches == self._plan.local_batches).all(axis=1)
        if changes:
            self._last_change = self._steady_since = changes[-1].step
        before, end = self._plan.total_batch, window.first_step + window.num_steps
        is_measured = bool((in_force & window.valid.all(axis=1)).any())
        choice = self._replan(step, model, job, changes, in_force=bool(in_force.any()), is_measured=is_measured)
        # Windows stay short while the total grows: at B0 a step is worth least, and every window doubles it.
        steady = self._last_change is None or not self._last_change <= end < self._last_change + _UNSETTLED
        return Decision(
            plan=self._plan,
            noise=self._noise.summary(),
            choice=choice,
            changes=changes,
            even_speed=None if model.cluster is None else even_speed(model.cluster, self._plan.local_batches),
            settled=steady and self._plan.total_batch <= before,
            phase=self._phase,
        )

    def profiles(self) -> list[Profile | None]:
        """Return what is known of each rank's device, for `start_from` of a later run; None where nothing is."""
        return save_profiles(self._learner, np.minimum(self._caps, self._own_caps))

    def start_from(self, profiles: list[Profile | None]) -> None:
        """Begin with what another run learned of these ranks' devices, before the first window.

        Where all ranks are known the first plan is OptPerf of their profiles, else the even split. Profiles weigh
        little: a few steps with other times outweigh them. A damaged profile raises StateError.
        """
        if np.isfinite(self._learner.batch_range()[0]).any():
            raise InvalidInputError("start_from comes too late, after steps have been measured: call it on a new run")
        caps = profile_caps(profiles)
        known, self._caps = load_profiles(self._learner, profiles), caps
        model = self._learner.model(*self._job.limited(self._caps, self._plan.total_batch).bounds)
        if model.cluster is None:
            missing = ", ".join(str(rank) for rank in np.flatnonzero(~known))
            self._plan = replace(self._plan, reason=f"even split: no stored profile of rank {missing}")
            return
        split = self._best(model, self._plan.total_batch)
        if not split.feasible:
            self._plan = replace(self._plan, reason=f"even split: the stored profiles end early, {split.reason}")
            return
        n = len(known)
        told = f"from stored profiles of all {n} ranks" if n > 1 else "from the rank's stored profile"
        self._settle(0, model, self._job, split, [told])

    def start_by(self, sheets: Sequence[DataSheet]) -> None:
        """Begin with a split by the devices' data sheets, one per rank, unless a state or profiles say more of them."""
        self._sheets = sheets
        if self.model().cluster is None:
            self._plan = self._first_plan(self._plan.total_batch, self._plan.reason)

    def _first_plan(self, total_batch: int, reason: str) -> Plan:
        """Return the plan of ranks that have not been measured: by their data sheets, else even for this reason."""
        job, shares = self._job.limited(self._caps, total_batch), first_shares(self._sheets)
        low, high = self._job.bounds
        if (low == high).all():
            return plans.make_plan(0, tuple(low.tolist()), reason=_PINNED)
        if shares is None:
            return plans.make_plan(0, plans.even_batches(job, total_batch), reason=reason)
        batches = plans.inverse_batches(job, total_batch, 1.0 / shares)
        told = ", ".join(f"{share:.0%}" for share in shares.tolist())
        if len(shares) > _MAX_TOLD:
            told = f"{shares.min():.1%} to {shares.max():.1%}"
        reason = f"first split by the devices' data sheets, speed as far as memory allows: {told} of the samples"
        return plans.make_plan(0, batches, reason=reason)

    def batches_for(self, total_batch: int) -> tuple[int, ...] | None:
        """Return the local batches with which another total would begin; None while nothing has been learned."""
        model = self.model()
        if model.cluster is None:
            return None
        split, growth = self._best(model, total_batch), total_batch / self._plan.total_batch
        if split.feasible and _is_in_reach(model, growth):
            return split.local_batches
        return self._shares_as_before(self._job, total_batch)

    def model(self) -> ModelFit:
        """Return the performance model as far as it is known, within the job's own bounds."""
        return self._learner.model(*self._job.bounds)

    def cluster(self, devices: Sequence[tuple[str, str]]) -> LearnedCluster | None:
        """Return cluster and job as they are known now; None while nothing is. `devices`: each rank's, and its host."""
        job = self._job.limited(np.minimum(self._caps, self._own_caps), self._plan.total_batch)
        model = self._learner.model(*job.bounds)
        if model.cluster is None:
            return None
        return LearnedCluster(
            ranks=learned_ranks(self._learner, model, devices),
            tails_s=model.cluster.tails_s,
            layers=model.cluster.layers,
            batch_size=self._job.batch_size,
            max_batch_size=self._job.max_batch_size,
            local_batches=self._plan.local_batches,
            noise=self._noise.summary(),
            slowdown=float(np.exp(self._excess)),
            time_noise=self._learner.noise,
        )

    def _replan(
        self,
        step: int,
        model: ModelFit,
        job: Job,
        changes: tuple[SpeedChange, ...],
        *,
        in_force: bool,
        is_measured: bool,
    ) -> TotalChoice | None:
        """Replace the plan, and return the choice among total batches, if there was one.

        `in_force` is whether a step of the window ran under the plan made last, `is_measured` whether a valid one did.
        """
        before, self._plan = self._plan, plans.within_bounds(self._plan, job, step)
        if self._plan.total_batch != before.total_batch:
            self._steady_since = step
        if model.cluster is None:
            if self._plan is before:
                self._plan = replace(self._plan, reason=f"kept: {model.reason}")
            return None
        smallest, largest = self._learner.batch_range()
        if self._phase == "even" and job.num_ranks > 1 and (smallest == largest).all():  # each rank has run one size
            if self._guess(step, model.cluster):
                return None
        elif self._phase == "guess" and not in_force:
            self._plan = replace(self._plan, reason="kept: the guess has not been measured yet")
            return None
        total_batch, choice, why = self._total(step, model.cluster, job, in_force, is_measured)
        split, growth = self._best(model, total_batch), total_batch / self._plan.total_batch
        if growth > 1 and not (split.feasible and _is_in_reach(model, growth)):
            self._grow(step, model, job, total_batch, why)
            return choice
        if not split.feasible:
            self._plan = replace(self._plan, reason=f"kept: {split.reason}")
            return choice
        if not model.known.all():
            why = [*why, model.reason]
        news = [f"rank {c.rank} takes {c.factor:.2f} times as long since step {c.step}" for c in changes]
        self._settle(step, model, job, split, why + news)
        return choice

    def _best(self, model: ModelFit, total_batch: int, *, is_first: bool = False) -> Split:
        """Return the best split of a total batch, each rank's curve taken near the batch that the split gives it.

        Of splits that cost the same it is the one closest to the present plan. Where the total grows, curves rise more
        steeply beyond what was measured. `is_first` is for first plans: their total must be held, however far it is
        from what was measured, and no step has run the present one.
        """
        now = self._plan
        growth = total_batch / now.total_batch
        near: tuple[float, ...] = tuple(batch * growth for batch in now.local_batches)
        curves, trust = model.near, TRUST
        if growth > 1 and not is_first:
            curves = partial(model.beyond, self._learner.batch_range()[1])
            trust = max(TRUST, _LEEWAY * growth) if model.known.all() else TRUST
        tried: list[tuple[float, Split]] = []
        for _ in range(_ROUNDS):
            solver = self._solver(curves(near), total_batch if is_first else None, trust)
            split = solver.split(total_batch)
            if not split.feasible:
                return split
            has_run = now.total_batch == total_batch and not is_first
            wanted = now.local_batches if has_run else split.local_batches
            rounded = (solver.near(wanted, split.step_s * (1 + _FREE), unit) for unit in _UNITS)
            best = next((each for each in rounded if each is not None), split)
            tried.append((step_time(curves(best.local_batches), best.local_batches), best))
            if split.local_batches == near:
                break
            near = split.local_batches
        return min(tried, key=lambda pair: pair[0])[1]

    def _solver(self, cluster: Cluster, total_batch: int | None = None, trust: float = TRUST) -> SplitSolver:
        """Return the solver for this model, within reach of the batches that were measured: up to `trust` times them.

        Where a total batch is given, these are first made larger or smaller in proportion, until they can hold it.
        """
        smallest, largest = self._learner.batch_range()
        if total_batch is not None:
            smallest = smallest * min(1.0, total_batch / smallest.sum())
            largest = largest * max(1.0, total_batch / largest.sum())
        least = np.maximum(cluster.min_batch, np.floor(smallest / TRUST_DOWN).astype(np.int64))
        most = np.minimum(cluster.max_batch, np.ceil(trust * largest).astype(np.int64))
        return solver_for(replace(cluster, min_batch=np.minimum(least, most), max_batch=np.maximum(most, least)))

    def _guess(self, step: int, cluster: Cluster) -> bool:
        """Plan the second window, to see a second batch size: equal computing times by the prior of `fit`.

        Equation 8 changes batches in the same direction but too little: it takes all of a time for time per sample.
        Return whether there is such a plan; equal ranks get the same batches again, and so do ranks whose communication
        takes so long that no split can save anything.
        """
        now, best = self._plan.local_batches, self._solver(cluster).split(self._plan.total_batch)
        if best.feasible and step_time(cluster, now) <= best.step_s * (1 + _WORTH):
            return False
        alone = replace(cluster, tails_s=np.zeros_like(cluster.tails_s), layers=None)
        split = self._solver(alone).split(self._plan.total_batch)
        if not split.feasible or split.local_batches == now:
            return False
        reason = "a first guess, as if half of every rank's time were fixed, to see a second batch size"
        reason = "; ".join([reason, *_waits(cluster, split.local_batches)])
        self._plan, self._phase = plans.make_plan(step, split.local_batches, reason=reason), "guess"
        return True

    def _grow(self, step: int, model: ModelFit, job: Job, total_batch: int, why: list[str]) -> None:
        """Plan for a total that is too far from what was measured for its own best split: each rank's share stays."""
        batches = self._shares_as_before(job, total_batch)
        predicted_s = model.step_s(batches) * float(np.exp(self._excess))
        reason = "; ".join(["shares as before, until this total has been measured", *why])
        self._plan = plans.make_plan(step, batches, reason=reason, predicted_step_s=predicted_s)
        self._steady_since = step

    def _shares_as_before(self, job: Job, total_batch: int) -> tuple[int, ...]:
        """Return the local batches of another total of which each rank has the share that it has now."""
        now = self._plan
        if now.local_batches == plans.even_batches(job, now.total_batch):
            return plans.even_batches(job, total_batch)
        return plans.inverse_batches(job, total_batch, 1.0 / np.array(now.local_batches))

    def _settle(
        self, step: int, model: ModelFit, job: Job, best: Split, why: list[str], *, is_first: bool = False
    ) -> None:
        """Plan for the best split, unless the present one or the even one is as good within the noise.

        `is_first` is whether no step has run the present one, so that a change from it costs nothing.
        """
        now, precision = self._plan, self._learner.precision
        total_batch, best_s = sum(best.local_batches), model.step_s(best.local_batches)
        batches, phase, reason = best.local_batches, "optperf", best.reason
        even = plans.even_batches(job, total_batch)
        same = max(_SAME, _EVEN * precision)
        if model.step_s(even) <= best_s * (1 + (min(same, _FIRST) if is_first else same)):
            alone = "one rank has the whole batch"
            reason = alone if len(even) == 1 else "no rank differs from another by more than the noise"
            batches, phase = even, "even"
        if now.total_batch != total_batch:
            self._steady_since = step
        elif not is_first:
            now_s, noise = model.step_s(now.local_batches), max(_WORTH, _STAY * precision)
            if batches == now.local_batches:
                reason = f"kept: {reason}"
            elif phase == "even" and self._phase == "guess":
                pass  # a split that was tried only to see a second batch size is not kept
            elif now_s <= best_s * (1 + max(noise, self._least_gain(step, batches))):
                if now_s > best_s * (1 + noise):
                    why = [f"a change costs {self._sizes.change_steps(batches):.1f} steps", *why]
                batches, phase = now.local_batches, "even" if self._phase == "even" else "optperf"
                reason = f"kept: the best split would be {max(0.0, 1 - best_s / now_s):.1%} faster"
            else:
                reason = f"{1 - best_s / now_s:.1%} faster than the last split; {reason}"
                why = [*why, *self._many_sizes()]
        cluster = model.near(batches)
        predicted_s = step_time(cluster, batches) * float(np.exp(self._excess))
        first_step = now.first_step if batches == now.local_batches else step
        low, high = self._job.bounds
        reasons = [_PINNED] if (low == high).all() else [reason, *why]
        reason = "; ".join([*reasons, *_waits(cluster, batches)])
        self._plan = plans.make_plan(first_step, batches, reason=reason, predicted_step_s=predicted_s)
        self._phase = phase

    def _least_gain(self, step: int, local_batches: tuple[int, ...]) -> float:
        """Return the share of a step's time that a change must save to be worth its cost while the plan lives."""
        age = self._age(step)
        # Whether a loader has become faster is found out by small changes, which must not have to wait for large ones.
        risk = _RISK if age > _UNSETTLED and not self._learner.loading.known.any() else 0.0
        least = _STEADY_LIFE if self._last_change is None else _LEAST_LIFE
        return (self._sizes.change_steps(local_batches) + risk) / max(age, least)

    def _age(self, step: int) -> int:
        """Return for how many steps the total batch and the ranks' speeds have stayed."""
        return max(step - (step if self._steady_since is None else self._steady_since), 1)

    def _many_sizes(self) -> list[str]:
        """Say how many sizes a rank has run where a compiler that does not allow for other sizes may suffer."""
        most = max(self._sizes.num_sizes)
        return [f"rank {self._sizes.num_sizes.index(most)} has run {most} sizes"] if most >= _MANY_SIZES else []

    def _total(
        self, step: int, cluster: Cluster, job: Job, in_force: bool, is_measured: bool
    ) -> tuple[int, TotalChoice | None, list[str]]:
        """Choose the total batch with the best goodput, or one on the way to it, and say why, if it may change at all.

        Totals are compared over the whole range, though the model is extrapolated there: a total that gains 6% may
        be four times the present one, and its half only 4%. The way there is gone in steps (`growth_limit`), each of
        which must have run before the next. A total is not left for a smaller one before it has been measured.
        """
        now, noise = self._plan.total_batch, self._noise
        if job.largest_total == job.batch_size:
            return now, None, []
        needed = _NOISE_STEPS if job.num_ranks > 1 else _NOISE_STEPS_ALONE
        if noise.num_steps < needed:
            return now, None, [f"noise scale not known yet ({noise.num_steps} of {needed} steps)"]
        if not in_force:
            return now, None, [f"total batch {now} has not run yet"]
        grid = np.unique(np.append(total_grid(job.batch_size, job.largest_total), now))
        grid = grid if is_measured else grid[grid >= now]
        step_s = solver_for(cluster).step_times(grid)
        smallest, largest = self._learner.batch_range()
        if (smallest == largest).all():
            # Each rank has run one size, and fixed time cannot be told from time per sample: it is tried once.
            step_s = np.where(grid > now, step_s[grid == now], step_s)
        growth = growth_limit(noise.limits[0], noise.num_batches * now)
        cost_steps = _RELEARNED + self._sizes.cost_steps
        threshold = min(_GAIN, max(_LEAST_GAIN, cost_steps / self._age(step)))
        choice = choose_total(grid, step_s, noise.supported(grid, now), now, threshold=threshold, growth=growth)
        noise_scale = f"{noise.noise_scale:.0f}"
        if "biased" in noise.flags:
            noise_scale += " (biased: one rank compares consecutive steps)"
        if math.isnan(noise.noise_scale):
            noise_scale = "not known: one rank compares consecutive steps, and at this learning rate they point apart"
        return choice.total_batch, choice, [f"{choice.reason}, noise scale {noise_scale}"]

    def _observe_excess(self, window: StepWindow, cluster: Cluster | None) -> None:
        """Learn how much longer steps take than the model says, once there is one."""
        steps = np.flatnonzero(window.valid.all(axis=1))
        if cluster is None or not len(steps):
            return
        modelled = np.array([step_time(cluster, window.local_batches[s]) for s in steps])
        measured = np.median(window.interval_s[steps], axis=1)
        excess = float(np.clip(np.median(np.log(measured / modelled)), -0.2, 0.4))
        self._excess = excess if self._excess == 0.0 else 0.7 * self._excess + 0.3 * excess

    # Other ranks: what was learned belongs to devices.

    def with_ranks(self, origins: Sequence[Origin]) -> Controller:
        """Return a planner for other ranks that has learned what this one has; this one stays as it is.

        Its first plan, `decide(None, job, step)`, is OptPerf of what is known of the ranks' devices.

        Args:
            origins: as for `load_state_dict`. Each rank has the bounds that it had here, and one that joins the lowest
                (`Job.with_ranks`).
        """
        was = [origin if isinstance(origin, int) else None for origin in origins]
        other = Controller(self._job.with_ranks(was), batch_norm="batch_norm" in self._noise.flags)
        if self._sheets:
            other._sheets = [DataSheet() if rank is None else self._sheets[rank] for rank in was]
        other.load_state_dict(self.state_dict(), origins)
        return other

    def start_with_noise(self, state: dict[str, Any]) -> None:
        """Begin with the noise that another policy's planner had tracked, its `state_dict()["noise"]`."""
        self._noise.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned and decided, as plain numbers, strings, lists and dicts."""
        return {
            "version": 1,
            "learner": self._learner.state_dict(),
            "noise": self._noise.state_dict(),
            "plan": plans.save_plan(self._plan),
            "phase": self._phase,
            "excess": self._excess,
            "sizes": self._sizes.state_dict(),
            "steady_since": self._steady_since,
            "max_batch": np.minimum(self._caps, self._own_caps).tolist(),
            "ran": None if self._ran is None else list(self._ran),
        }

    def load_state_dict(self, state: dict[str, Any], origins: Sequence[Origin] | None = None) -> None:
        """Take back what `state_dict` returned, for ranks on the same devices or on others.

        Where ranks, bounds and the total batch are as they were, so is the plan, unless it has larger batches than a
        rank has ever run: then it is the one that ran, since memory may not hold the new one. Otherwise the total is
        kept as far as the job allows it, and the first plan is OptPerf of what is known of the ranks' devices.

        Args:
            origins: for each rank of this job, what is known of its device: the number of the saved rank that had it
                (named a second time, it is another device of the same kind); a profile, as `profiles` returns it; or
                None, then its data sheet, or else the middle one of the known devices, stands for it; these ranks begin
                anew, and their first steps may be slow. Where left out, ranks go by number; nothing is known of their
                devices where these are more or fewer than were saved.
        """
        with plans.restoring("controller"):
            if state.get("version") != 1:
                raise StateError(f"controller state of version {state.get('version')!r}: this cannikin reads version 1")
            saved, phase, sizes = _saved_plan(state)
            n, num_ranks = len(saved.local_batches), self._job.num_ranks
            is_same_process = origins is None
            if origins is None:
                origins = list(range(n)) if n == num_ranks else [None] * num_ranks
            was = _saved_ranks(origins, n, num_ranks)
            learner = Learner(n)
            learner.load_state_dict(state["learner"])
            learner = learner.with_ranks(was)
            if not is_same_process:
                learner.num_steps = 0  # its first steps are slow again
            profiles = [origin if isinstance(origin, dict) else None for origin in origins]
            caps = profile_caps(profiles)
            load_profiles(learner, profiles)
            for rank, before in enumerate(was):
                if before is not None:
                    caps[rank] = whole("max_batch", state["max_batch"][before], 1, NO_MAX)
            excess = number("excess", state["excess"], -20.0, 20.0)
            steady_since = None  # another process counts its steps anew, and other ranks have not been steady
            if is_same_process and state["steady_since"] is not None:
                steady_since = whole("steady_since", state["steady_since"], -1)
            self._noise.load_state_dict(state["noise"])  # all or nothing
        self._learner, self._sizes, self._caps = learner, sizes.with_ranks(was), caps
        self._excess, self._steady_since = excess, steady_since
        unknown = [rank for rank, origin in enumerate(origins) if origin is None]
        suppose_unknown(self._learner, unknown, self._sheets)
        self._resume(saved, phase, was, f", {len(unknown)} of them on unknown devices" if unknown else "")

    def _resume(self, saved: Plan, phase: str, was: list[int | None], unknown: str) -> None:
        """Begin with the plan that was saved, each rank's batch where its device is, or with a new one."""
        n, total = len(saved.local_batches), min(max(saved.total_batch, self._job.batch_size), self._job.largest_total)
        job, kept = self._job.limited(self._caps, total), [rank for rank in was if rank is not None]
        if sorted(kept) == list(range(n)) and len(was) == n and total == saved.total_batch:
            batches = tuple(saved.local_batches[rank] for rank in kept)
            low, high = job.bounds
            if (low <= batches).all() and (batches <= high).all():
                self._plan, self._phase, self._ran = replace(saved, local_batches=batches), phase, batches
                return
        told = f"resumed with {counted(len(was), 'rank')}" + ("" if len(was) == n else f" after {n}")
        self._plan, self._phase = self._first_plan(total, f"{told}: even split of the same total batch"), "even"
        self._ran = None
        model = self._learner.model(*job.bounds)
        split = None if model.cluster is None else self._best(model, total, is_first=True)
        if split is not None and split.feasible:
            self._settle(0, model, job, split, [told + unknown], is_first=True)


def _is_in_reach(model: ModelFit, growth: float) -> bool:
    """Return whether the model may split a total that grows by this factor: by a large one only if it is known."""
    return growth <= TRUST or bool(model.known.all())


def _saved_plan(state: dict[str, Any]) -> tuple[Plan, str, SizeHistory]:
    """Return the plan to go on with, its phase, and the sizes that ranks have run, as they were saved.

    A plan with larger batches than a rank has ever run gives way to the one that ran.
    """
    plan, sizes = plans.load_plan(state["plan"]), SizeHistory(len(state["plan"]["local_batches"]))
    sizes.load_state_dict(state["sizes"])
    phase, ran = str(state["phase"]), state["ran"]
    if ran is not None and any(b > most for b, most in zip(plan.local_batches, sizes.largest, strict=True)):
        batches = tuple(whole_numbers("ran", ran, 1, NO_MAX))
        plan = plans.make_plan(plan.first_step, batches, reason="resumed with the last split that has run")
        phase = "even" if phase == "guess" else phase
    return plan, phase, sizes


def _saved_ranks(origins: Sequence[Origin], num_saved: int, num_ranks: int) -> list[int | None]:
    """Return which saved rank's device each rank has, None where it is no saved one's."""
    was = [origin if isinstance(origin, int) else None for origin in origins]
    if len(was) != num_ranks or any(rank is not None and not 0 <= rank < num_saved for rank in was):
        raise StateError(f"origins={was}: give one per rank of {num_ranks}, of the saved ranks 0 to {num_saved - 1}")
    return was


def _waits(cluster: Cluster, local_batches: tuple[int, ...]) -> list[str]:
    """Return one sentence per rank that its data rather than its speed holds up."""
    load_s, step_s = cluster.load.at(local_batches), step_time(cluster, local_batches)
    late = np.flatnonzero(load_s >= _LOADING * step_s).tolist()
    return [f"rank {rank} waits for its data: more loader workers would help" for rank in late]
