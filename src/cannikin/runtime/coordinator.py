"""Windows become plans: what the ranks tell each other, at fixed steps and beside the training.

For a window that ends before step w, at the forward of step

    w      every rank's measurements start to be gathered (a step later on a GPU, from where they are copied first)
    w + 1  rank 0 learns and plans, in a thread beside the training
    w + 2  the plan starts to be broadcast, in whole numbers
    w + 3  it is known everywhere, and holds from the first step whose indices no rank has cut yet

so none of our collectives is waited for in the step that started it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from cannikin.core.controller import window_steps
from cannikin.core.divergence import Divergence
from cannikin.core.records import NO_MAX, Job, Plan, Planner
from cannikin.errors import InvalidInputError
from cannikin.runtime.exchange import Exchange
from cannikin.runtime.hostcopy import HostCopy
from cannikin.runtime.messages import Decision, decision_length, decode_decision, encode_decision
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.timing import Clock
from cannikin.runtime.windows import Report, check_cuts, encode_steps, merge_windows, start_reading

__all__ = ["Coordinator"]


class Coordinator:
    """Collects this rank's steps, and keeps the plans that rank 0 makes of everybody's.

    Args:
        exchange, clock, job, planner: of this model.
        prefetch_depth: batches whose indices the loader cuts ahead of the one in training, at least.
        loaded_alone: whether nothing else goes on while a batch is loaded.
        on_decision: called on every rank when a decision takes effect; with the window behind it on rank 0.
    """

    def __init__(
        self,
        exchange: Exchange,
        clock: Clock,
        job: Job,
        planner: Planner,
        *,
        prefetch_depth: int,
        loaded_alone: bool,
        on_decision: Callable[[Decision, Report | None], None],
    ) -> None:
        self.job = job
        self.max_batch = NO_MAX  # largest local batch that this rank's memory holds, as far as is known
        self.decision = Decision(plan=_checked(planner.plan(0), job), window_steps=window_steps(0))
        self._exchange = exchange
        self._planner = planner
        self._on_decision = on_decision
        self._clock = clock
        self._num_ahead = prefetch_depth
        self._loaded_alone = loaded_alone
        self._step = 0
        self._furthest = 0  # last step that a plan was asked for, so that it has been cut
        self._num_ticks = 0
        self._plans: list[Plan] = [self.decision.plan]
        self._steps: list[StepInProgress] = []
        self._window_start = 0
        self._agenda: deque[tuple[int, Callable[[], None]]] = deque()
        self._report: Report | None = None
        self._decided: Future[Decision] | None = None
        self._thread = ThreadPoolExecutor(1, "cannikin-planner") if exchange.rank == 0 else None
        self._num_nonfinite = 0
        self._divergence = Divergence()
        self._failed = False

    @property
    def planner(self) -> Planner:
        """The planner, once it is done with the window it is at."""
        if self._decided is not None:
            self._decided.exception()
        return self._planner

    def plan_at(self, step: int) -> Plan:
        """The plan in force at this step."""
        self._furthest = max(self._furthest, step)
        return next((plan for plan in reversed(self._plans) if plan.first_step <= step), self._plans[0])

    def add(self, step: StepInProgress) -> None:
        """Keep a finished step for the window it belongs to."""
        self._steps.append(step)

    def agree(self) -> None:
        """Every rank begins with rank 0's plan, which knows stored profiles; the others wait for it here."""
        decision = self._decide(self._plans[0])
        values = self._exchange.broadcast_now(encode_decision(decision))
        # Rank 0 too, whose restored noise scale is in it: gains and rates must not differ.
        self.begin_with(decision if self._thread is not None else decode_decision(values, reason="as rank 0 planned"))

    def restore(self, state: dict[str, Any]) -> None:
        """Let the planner take a saved state, and begin with the plan it held."""
        self.planner.load_state_dict(state)
        self._divergence = Divergence()
        self.begin_with(self._decide(self.planner.plan(0)))

    def begin_with(self, decision: Decision) -> None:
        """Forget earlier plans: this one is in force."""
        self.decision = decision
        self._plans = [_checked(decision.plan, self.job)]

    def tick(self, step: int) -> bool:
        """What is due between ranks before this step's forward, the same on every rank; whether a window has ended."""
        self._num_ticks += 1
        self._step = step
        self._num_ahead = max(self._num_ahead, self._furthest - step)
        ended = len(self._steps) >= self.decision.window_steps and not self._agenda
        if ended:
            self._schedule(step)
        while self._agenda and self._agenda[0][0] <= self._num_ticks:
            self._agenda.popleft()[1]()
        return ended

    def _schedule(self, step: int) -> None:
        """A window has ended before this step: put what follows of it on the agenda."""
        steps, self._steps = self._steps, []
        first_step, self._window_start = self._window_start, step
        measured, lag = start_reading(steps), self._clock.lag
        free_step = step + lag + 4  # the first that is cut after the plan is known, in a loop that looks not ahead
        stages = (
            (lag, lambda: self._gather(steps, measured)),
            (lag + 1, lambda: self._learn(first_step, len(steps), free_step)),
            (lag + 2, self._announce),
            (lag + 3, self._install),
        )
        self._agenda.extend((self._num_ticks + delay, action) for delay, action in stages)

    def _gather(self, steps: list[StepInProgress], measured: HostCopy) -> None:
        sent = encode_steps(steps, measured, self._clock, num_ahead=self._num_ahead, max_batch=self.max_batch)
        self._exchange.start_gather(sent)

    def _learn(self, first_step: int, num_steps: int, free_step: int) -> None:
        sent = self._exchange.finish_gather()
        check_cuts(sent, first_step, num_steps)  # on every rank: all must stop where these differ
        if self._thread is not None:
            self._decided = self._thread.submit(self._plan, sent, first_step, num_steps, free_step)

    def _plan(self, sent: torch.Tensor, first_step: int, num_steps: int, free_step: int) -> Decision:
        """Learn from the window and plan; a planner that fails costs its plans, not the training."""
        report = self._report = merge_windows(sent, first_step, num_steps, loaded_alone=self._loaded_alone)
        self._num_nonfinite += report.window.num_nonfinite
        free_step += report.num_ahead
        now = self._plans[-1]
        if self._failed:
            return self._decide(now)
        try:
            self._planner.observe(report.window)
            plan = _checked(self._planner.plan(free_step), self.job)
        except Exception as error:
            self._failed = True
            warnings.warn(
                f"the planner failed at step {free_step} ({type(error).__name__}: {error}): training goes on with "
                f"local batches {now.local_batches}, which no longer adapt; please report this",
                RuntimeWarning,
                stacklevel=2,
            )
            return self._decide(replace(now, reason=f"kept: the planner failed with {type(error).__name__}"))
        if plan.local_batches != now.local_batches:
            plan = replace(plan, first_step=free_step)
        return self._decide(plan)

    def _decide(self, plan: Plan) -> Decision:
        noise = getattr(self._planner, "noise", None)
        # The window in which this will be known has begun: its length is meant, whatever step the training is at.
        length = window_steps(self._window_start, self._planner)
        decision = Decision(plan=plan, num_nonfinite=self._num_nonfinite, window_steps=length)
        if noise is None:
            return decision
        return replace(decision, signal_sqnorm=float(noise.signal_sqnorm), noise_trace=float(noise.noise_trace))

    def _announce(self) -> None:
        message = torch.empty(decision_length(self.job.num_ranks), dtype=torch.int64)
        if self._decided is not None:
            message = encode_decision(self._decided.result())
        self._exchange.start_broadcast(message)

    def _install(self) -> None:
        """Every rank takes the decision at the same step, rank 0 too: schedules and progress must not differ."""
        values = self._exchange.finish_broadcast()
        if self._decided is None:
            self.decision = decode_decision(values, reason="as rank 0 planned")
        else:
            self.decision, self._decided = self._decided.result(), None
        plan = self.decision.plan
        if plan.local_batches != self._plans[-1].local_batches:
            in_force = self._plans.index(self.plan_at(self._step))
            self._plans = [*self._plans[in_force:], plan]
        else:
            self._plans[-1] = replace(plan, first_step=self._plans[-1].first_step)
        warning = None if self._report is None else self._divergence.observe(self._report.window)
        if warning is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        self._on_decision(self.decision, self._report)


def _checked(plan: Plan, job: Job) -> Plan:
    """A plan that can be carried out, whoever made it."""
    for name, counts in (("local batches", plan.local_batches), ("micro-batches", plan.micro_batches)):
        if len(counts) != job.num_ranks or min(counts) < 1:
            raise InvalidInputError(
                f"the planner gave {name} {counts} for {job.num_ranks} ranks: it must give each rank one, of at least 1"
            )
    low, high = job.bounds
    if (low > plan.local_batches).any() or (high < plan.local_batches).any():
        raise InvalidInputError(
            f"the planner gave local batches {plan.local_batches}, outside of the loader's local_batches or "
            f"local_bounds, {low.tolist()} to {high.tolist()}: leave these out, or have the planner keep to them"
        )
    return plan
