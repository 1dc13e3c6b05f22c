"""Windows become plans: what the ranks tell each other, at fixed steps and beside the training.

For a window that ends before step w, at the forward of step

    w      its norms start their way to the host
    w + 1  every rank's measurements start to be gathered
    w + 2  rank 0 learns and plans
    w + 3  the plan starts to be broadcast, in whole numbers
    w + 5  it is known everywhere, and holds from the first step whose indices no loader may have cut yet

so none of our collectives is waited for in the step that started it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cannikin.core.controller import window_steps
from cannikin.core.records import Job, Plan, Planner
from cannikin.runtime.exchange import Exchange
from cannikin.runtime.messages import Decision, decision_length, decode_decision, encode_decision
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.timing import Clock
from cannikin.runtime.windows import encode_steps, merge_windows, start_reading

__all__ = ["Coordinator"]

_AHEAD = 2  # a loop that looks one batch ahead has cut this many steps beyond the one in training


class Coordinator:
    """Collects this rank's steps, and keeps the plans that rank 0 makes of everybody's."""

    def __init__(self, exchange: Exchange, clock: Clock, job: Job, planner: Planner, prefetch_depth: int) -> None:
        self.exchange = exchange
        self.job = job
        self.planner = planner
        self.on_decision: Callable[[Decision, Any], None] | None = None
        self.decision = self._decide(planner.plan(0))
        self._decided = self.decision
        self.num_steps = 0
        self._clock = clock
        self._prefetch_depth = prefetch_depth
        self._plans: list[Plan] = [self.decision.plan]
        self._steps: list[StepInProgress] = []
        self._window_start = 0
        self._agenda: deque[tuple[int, Callable[[], None]]] = deque()
        self._sending: tuple[list[StepInProgress], torch.Tensor, int] = ([], torch.empty(0, 2), 0)
        self._message = torch.empty(0, dtype=torch.int64)
        self._window: Any = None
        self._failed = False

    def plan_at(self, step: int) -> Plan:
        """The plan in force at this step."""
        return next((plan for plan in reversed(self._plans) if plan.first_step <= step), self._plans[0])

    def add(self, step: StepInProgress) -> None:
        """Keep a finished step for the window it belongs to."""
        self._steps.append(step)

    def restore(self, state: dict[str, Any]) -> None:
        """Let the planner take a saved state, and begin with the plan it held."""
        self.planner.load_state_dict(state)
        self.decision = self._decide(self.planner.plan(0))
        self._plans = [self.decision.plan]

    def tick(self, step: int, grad_scale: Callable[[], float]) -> bool:
        """What is due between ranks before this step's forward, the same on every rank; whether a window has ended."""
        self.num_steps += 1
        ended = False
        if len(self._steps) >= window_steps(self._window_start) and not self._agenda:
            self._sending = (self._steps, start_reading(self._steps), self._window_start)
            scale = grad_scale()
            self._steps = []
            self._window_start = step
            stages = (
                (1, lambda: self._gather(scale)),
                (2, self._learn),
                (3, lambda: self.exchange.start_broadcast(self._message)),
                (5, self._install),
            )
            self._agenda.extend((self.num_steps + delay, action) for delay, action in stages)
            ended = True
        while self._agenda and self._agenda[0][0] <= self.num_steps:
            self._agenda.popleft()[1]()
        return ended

    def _gather(self, grad_scale: float) -> None:
        steps, norms, _ = self._sending
        self.exchange.start_gather(encode_steps(steps, norms, self._clock, grad_scale))

    def _learn(self) -> None:
        """Rank 0 plans for the first step that is free everywhere; the others wait for its word."""
        steps, _, first_step = self._sending
        sent = self.exchange.finish_gather()
        self._message = torch.empty(decision_length(self.job.num_ranks), dtype=torch.int64)
        self._window = None
        if self.exchange.rank == 0:
            self._window = merge_windows(sent, first_step, len(steps))
            # It arrives five steps after the window; the loader is ahead by its prefetch and the user's lookahead.
            self._decided = self._decide(self._plan(steps[-1].entry.step + 6 + _AHEAD + self._prefetch_depth))
            self._message = encode_decision(self._decided)

    def _plan(self, free_step: int) -> Plan:
        """Learn from the window and plan; a planner that fails costs its plans, not the training."""
        now = self._plans[-1]
        if self._failed:
            return now
        try:
            self.planner.observe(self._window)
            plan = self.planner.plan(free_step)
        except Exception as error:
            self._failed = True
            warnings.warn(
                f"the planner failed at step {free_step} ({type(error).__name__}: {error}): training goes on with "
                f"local batches {now.local_batches}, which no longer adapt; please report this",
                RuntimeWarning,
                stacklevel=2,
            )
            return replace(now, reason=f"kept: the planner failed with {type(error).__name__}")
        return plan if plan.local_batches == now.local_batches else replace(plan, first_step=free_step)

    def _decide(self, plan: Plan) -> Decision:
        noise = getattr(self.planner, "noise", None)
        if noise is None:
            return Decision(plan=plan)
        return Decision(
            plan=plan,
            signal_sqnorm=noise.signal_sqnorm,
            noise_trace=noise.noise_trace,
            num_skipped=noise.num_skipped,
        )

    def _install(self) -> None:
        """Every rank takes the decision at the same step, rank 0 too: schedules and progress must not differ."""
        values = self.exchange.finish_broadcast()
        first = self.exchange.rank == 0
        self.decision = self._decided if first else decode_decision(values, reason="as rank 0 planned")
        plan = self.decision.plan
        if plan.local_batches != self._plans[-1].local_batches:
            self._plans.append(plan)
        else:
            self._plans[-1] = replace(plan, first_step=self._plans[-1].first_step)
        if self.on_decision is not None:
            self.on_decision(self.decision, self._window)
