"""When things happen in a run, and which plan holds at which step: one schedule for all that drive a planner.

The runtime, the simulator and the benchmarks use it, so what the simulator shows is what trains. The steps of a run
belong to consecutive windows. After a window that ends before step w,

    w      every rank's measurements start to be gathered
    w + 1  rank 0 learns and plans
    w + 2  the plan starts to be broadcast
    w + 3  the plan is known everywhere
    w + 4  the plan is in force, in a loop that loads no batches ahead

each `lag` steps later where a device's measurements take that long to reach the host. Windows are short while a run is
young and while a planner has not settled. Gradient norms cost two passes over the gradient, so they are taken in every
step at first, then in every fourth, unless the planner asks for all of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cannikin.core.planner import Decision, Planner
from cannikin.core.values import IntArray, Job, Plan, StepWindow
from cannikin.errors import InvalidInputError

GATHER, LEARN, ANNOUNCE, INSTALL, IN_FORCE = range(5)  # steps from the end of a window, plus a lag

_SHORT_WINDOW, _LONG_WINDOW = 5, 10  # steps
_YOUNG = 40  # windows stay short for this many steps after the start, or after a planner was last unsettled
_NORMS_ALWAYS, _NORMS_EVERY = 60, 4


def takes_norms(step: int) -> bool:
    """Return whether gradient norms are taken in this step of a run where the planner does not ask for all of them.

    Example:
        >>> [step for step in range(58, 72) if takes_norms(step)]
        [58, 59, 63, 67, 71]
    """
    return step < _NORMS_ALWAYS or (step + 1) % _NORMS_EVERY == 0


class Schedule:
    """The decision in force, the plans of the steps ahead and the lengths of windows; the same on every rank.

    Args:
        job: what planners may choose from, with the user's own bounds.
        first: the decision to begin with.

    Example:
        >>> job = Job(num_ranks=2, batch_size=8)
        >>> schedule = Schedule(job, Decision(plan=Plan(first_step=0, total_batch=8, local_batches=(4, 4))))
        >>> schedule.install(Decision(plan=Plan(first_step=9, total_batch=8, local_batches=(6, 2))), 8)
        >>> schedule.plan_at(8).local_batches, schedule.plan_at(9).local_batches
        ((4, 4), (6, 2))
    """

    def __init__(self, job: Job, first: Decision) -> None:
        self.job = job
        self.begin_with(first)

    def begin_with(self, decision: Decision) -> None:
        """Forget earlier plans: this decision is in force from now on."""
        self.decision = decision
        self._gains: dict[tuple[int, int], float] = {}
        self._plans = [checked(decision.plan, self.job)]
        self._decided_step = 0
        self._norms_always = decision.norms_always

    def takes_norms(self, step: int) -> bool:
        """Return whether gradient norms are taken in this step of a run, counted from 0."""
        return self._norms_always or takes_norms(step)

    @property
    def newest(self) -> Plan:
        """The plan decided last, which may not be in force yet."""
        return self._plans[-1]

    def plan_at(self, step: int) -> Plan:
        """Return the plan in force at this step."""
        return next((plan for plan in reversed(self._plans) if plan.first_step <= step), self._plans[0])

    def local_batches(self, first_step: int, num_steps: int) -> IntArray:
        """Return the local batches of consecutive steps, [S, n]."""
        rows = np.empty((num_steps, self.job.num_ranks), dtype=np.int64)
        rows[:] = self.plan_at(first_step).local_batches
        for plan in self._plans:
            if first_step < plan.first_step < first_step + num_steps:
                rows[plan.first_step - first_step :] = plan.local_batches
        return rows

    def window_steps(self, first_step: int) -> int:
        """Return the length of the window that begins at this step."""
        settling = not self.decision.settled and first_step < self._decided_step + _YOUNG
        return _SHORT_WINDOW if first_step < _YOUNG or settling else _LONG_WINDOW

    def decide(self, planner: Planner, window: StepWindow, free_step: int) -> Decision:
        """Show a planner a window, and return its decision: a plan of other batches holds from `free_step` on.

        The planner's job is limited to what the ranks' memories hold. Raises `InvalidInputError` where a plan breaks
        the job's own bounds. The decision holds once it is installed.
        """
        now = self.newest
        job = self.job.limited(window.max_batch, now.total_batch)
        decision = planner.decide(window, job, free_step)
        plan = checked(decision.plan, self.job)
        held = [text for text in _held_by_memory(self.job, job, plan) if text not in plan.reason]
        first_step = plan.first_step if plan.local_batches == now.local_batches else free_step
        return replace(decision, plan=replace(plan, first_step=first_step, reason="; ".join([plan.reason, *held])))

    def install(self, decision: Decision, step: int) -> None:
        """Put a decision on the schedule, which has become known at this step."""
        self.decision, self._decided_step, self._gains, plan = decision, step, {}, decision.plan
        if plan.local_batches != self.newest.local_batches:
            in_force = self._plans.index(self.plan_at(step))
            self._plans = [*self._plans[in_force:], plan]
        else:
            self._plans[-1] = replace(plan, first_step=self.newest.first_step)

    def gain_at(self, step: int, num_batches: int = 1) -> float:
        """Return how many steps at the initial batch this step is worth; 1 before the gradient noise is known.

        A step over K batches that pile up (`num_batches`) has the total K B, and compares with one at K B0.
        """
        noise, total = self.decision.noise, self.plan_at(step).total_batch
        key = total, num_batches
        if key not in self._gains:  # asked in every step, for one total or two until the next decision
            noise = None if noise is None else replace(noise, num_batches=num_batches)
            self._gains[key] = 1.0 if noise is None else noise.gain(total, self.job.batch_size)
        return self._gains[key]

    def length(self, step: int, total_batch: int | None = None, *, ends_pass: bool = True) -> float:
        """Return how many initial batches the samples of this step's batch make, B/B0.

        The last batch of a pass, where it is not the plan's, is lengthened by what the last one of a pass at B0 would
        lack, so that no pass is longer than `Job.pass_steps`, and one at B0 is just that.

        Args:
            step: whose plan is asked for.
            total_batch: the samples that were cut for it; the plan's where left out.
            ends_pass: whether these are the last of a pass.
        """
        full, initial = self.plan_at(step).total_batch, self.job.batch_size
        if total_batch is None or total_batch == full or not ends_pass:
            return min(full, total_batch or full) / initial
        if self.job.num_samples is None or self.job.pass_steps is None:
            return float(-(-total_batch // initial))
        return self.job.pass_steps - (self.job.num_samples - total_batch) / initial


def checked(plan: Plan, job: Job) -> Plan:
    """Return the plan if it can be carried out, whoever made it."""
    if len(plan.local_batches) != job.num_ranks or min(plan.local_batches) < 1:
        raise InvalidInputError(
            f"the planner gave local batches {plan.local_batches} for {job.num_ranks} ranks: it must give each rank "
            "one, of at least 1"
        )
    low, high = job.bounds
    if (low > plan.local_batches).any() or (high < plan.local_batches).any():
        raise InvalidInputError(
            f"the planner gave local batches {plan.local_batches}, outside of the loader's local_batches or "
            f"local_bounds, {low.tolist()} to {high.tolist()}: leave these out, or have the planner keep to them"
        )
    return plan


def _held_by_memory(own: Job, limited: Job, plan: Plan) -> list[str]:
    """Return one sentence per rank whose batch is capped by its memory rather than by the user's bound."""
    if limited is own:
        return []
    (_, own_high), (_, high) = own.bounds, limited.bounds
    ranks = np.flatnonzero((high < own_high) & (high == plan.local_batches)).tolist()
    return [f"memory holds rank {rank} to {high[rank]} samples" for rank in ranks]
