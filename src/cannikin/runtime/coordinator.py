"""Windows become plans: what the ranks tell each other, at fixed steps and beside the training.

`core.schedule` says at which steps: gather, learn and plan in a thread on rank 0, broadcast, install. None of our
collectives is waited for in the step that started it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from cannikin.core.gone_wrong import Divergence, SumLoss
from cannikin.core.lr import Progress, Worth
from cannikin.core.planner import Decision, Planner
from cannikin.core.schedule import ANNOUNCE, GATHER, IN_FORCE, INSTALL, LEARN, Schedule, takes_norms
from cannikin.core.values import NO_MAX, Job, Plan
from cannikin.runtime.device import Device, HostCopy
from cannikin.runtime.entry import BatchEntry
from cannikin.runtime.exchange import Exchange
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.update import Rates, Update
from cannikin.runtime.wire import (
    Gathered,
    check_cuts,
    decode_decision,
    empty_decision,
    encode_decision,
    encode_steps,
    merge_windows,
    start_reading,
)


@dataclass(frozen=True, kw_only=True)
class Happened:
    """What happened between two steps.

    Args:
        decision: what has just been installed, and on rank 0 the measurements that it was made of.
    """

    decision: Decision | None = None
    gathered: Gathered | None = None


_NOTHING = Happened()


@dataclass(frozen=True, kw_only=True, eq=False)
class _EndedWindow:
    """A window on its way to becoming a plan: its steps, before which step it ended, and the tick that counts from."""

    first_step: int
    end: int
    steps: list[StepInProgress]
    measured: HostCopy
    tick: int


class Unplanned:
    """Stands where a coordinator will be, until a loader is bound: there is no plan, and ranks exchange nothing."""

    is_bound = False
    planner: Planner | None = None
    job: Job | None = None
    noise_scale = math.nan
    max_batch = NO_MAX

    def plan_at(self, step: int) -> Plan | None:
        """Return None: there is no plan."""
        return None

    def splits_alike(self, earlier: BatchEntry, later: BatchEntry) -> bool:
        """Return whether two batches are split alike on all ranks, which is not known of those of the script's own."""
        return False

    def takes_norms(self, step: int) -> bool:
        """Return whether gradient norms are taken in this step."""
        return takes_norms(step)

    def gain_at(self, step: int, num_batches: int) -> float:
        """Return what a step is worth while the noise scale is not known."""
        return 1.0

    def lr_factor(self, update: Update, step: int, rates: Rates | None = None) -> float:
        """Return 1: learning rates stay the user's own."""
        return 1.0

    def worth(self, progress: Progress, steps: Sequence[StepInProgress]) -> Worth:
        """Return 1: a step is a step."""
        return progress.worth(lengths=[1.0], gain=1.0, ratio=1.0)

    def add(self, step: StepInProgress) -> None:
        """Forget a finished step: nobody learns from it."""

    def tick(self, step: int) -> Happened:
        """Do nothing: no rank waits for this one."""
        return _NOTHING

    def planner_state(self) -> dict[str, Any] | None:
        """Return None: nothing was learned."""
        return None


class Coordinator:
    """Collects this rank's steps, and keeps the plans that rank 0 makes of everybody's.

    Args:
        exchange, device: of this model.
        job, planner: who plans, and what for.
        prefetch_depth: batches whose indices the loader cuts ahead of the one in training, at least; where there are
            none, nothing else goes on while a batch is loaded.
    """

    is_bound = True

    def __init__(self, exchange: Exchange, device: Device, job: Job, planner: Planner, *, prefetch_depth: int) -> None:
        self.exchange = exchange
        self.max_batch = NO_MAX  # largest local batch that this rank's memory holds, as far as is known
        self.schedule = Schedule(job, planner.decide(None, job, 0))
        self._planner = planner
        self._device = device
        self._num_ahead = prefetch_depth
        self._loaded_alone = prefetch_depth == 0
        self._step = 0
        self._furthest = 0  # last step that a plan was asked for, so that it has been cut
        self._num_ticks = 0
        self._steps: list[StepInProgress] = []
        self._window_start = 0
        self._ended: _EndedWindow | None = None  # until a plan has come of it
        self._gathered: Gathered | None = None
        self._planning: Future[Decision] | None = None
        self._thread = ThreadPoolExecutor(1, "cannikin-planner") if exchange.rank == 0 else None
        self._divergence, self._sum_loss = Divergence(), SumLoss()
        self._failed = self._silent = False

    @property
    def job(self) -> Job | None:
        """What the planner may choose from, with the user's own bounds."""
        return self.schedule.job

    @property
    def planner(self) -> Planner:
        """The planner, once it is done with the window it is at."""
        if self._planning is not None:
            self._planning.exception()
        return self._planner

    def planner_state(self) -> dict[str, Any] | None:
        """Return everything that the planner has learned."""
        return self.planner.state_dict()

    def plan_at(self, step: int) -> Plan:
        """Return the plan in force at this step, which from now on counts as cut."""
        self._furthest = max(self._furthest, step)
        return self.schedule.plan_at(step)

    def splits_alike(self, earlier: BatchEntry, later: BatchEntry) -> bool:
        """Return whether two batches are split alike on all ranks; every rank has the same answer."""
        plans = [self.schedule.plan_at(entry.step).local_batches for entry in (earlier, later)]
        whole = all(entry.total_batch == sum(plan) for entry, plan in zip((earlier, later), plans, strict=True))
        return whole and plans[0] == plans[1] and not (earlier.is_told or later.is_told or later.own)

    def takes_norms(self, step: int) -> bool:
        """Return whether gradient norms are taken in this step of the optimizer."""
        return self.schedule.takes_norms(step)

    def gain_at(self, step: int, num_batches: int) -> float:
        """Return how many steps at the initial batch a step over so many batches is worth."""
        return self.schedule.gain_at(step, num_batches)

    def lr_factor(self, update: Update, step: int, rates: Rates | None = None) -> float:
        """Return the factor on these learning rates, or the first optimizer's, under the plan in force at this step."""
        return update.factor(self.schedule, step, rates)

    def worth(self, progress: Progress, steps: Sequence[StepInProgress]) -> Worth:
        """Return what a step of the optimizer on the gradients of all these batches is worth."""
        schedule, last = self.schedule, steps[-1].entry.step
        counted = [step.entry for step in steps if not step.entry.is_extra] or [steps[-1].entry]
        # What the user says of a batch (use_batch) may count other things than the loader's samples.
        lengths = [
            schedule.length(entry.step, None if entry.is_told else entry.count_all(), ends_pass=entry.ends_pass)
            for entry in counted
        ]
        return progress.worth(lengths=lengths, gain=schedule.gain_at(last, len(lengths)), ratio=schedule.length(last))

    @property
    def noise_scale(self) -> float:
        """phi = S/G in samples, the same on every rank; NaN before it is known."""
        noise = self.schedule.decision.noise
        return math.nan if noise is None else noise.noise_scale

    def add(self, step: StepInProgress) -> None:
        """Keep a finished step for the window it belongs to."""
        self._steps.append(step)

    def agree(self) -> None:
        """Begin with rank 0's plan on every rank, which knows stored profiles; the others wait for it here."""
        own = self.schedule.decision
        values = self.exchange.broadcast_now(encode_decision(own))
        # Rank 0 too, whose restored noise scale is in it: gains and rates must not differ.
        self.schedule.begin_with(own if self._thread is not None else decode_decision(values))

    def begin_again(self) -> None:
        """Begin with the plan of the planner, which has taken a saved state."""
        self._divergence = Divergence()
        self.schedule.begin_with(self.planner.decide(None, self.schedule.job, 0))

    def tick(self, step: int) -> Happened:
        """Do what is due between ranks before this step's forward, the same on every rank."""
        self._num_ticks += 1
        self._step = step
        self._num_ahead = max(self._num_ahead, self._furthest - step)
        if self._ended is None and len(self._steps) >= self.schedule.window_steps(self._window_start):
            self._ended = _EndedWindow(
                first_step=self._window_start,
                end=step,
                steps=self._steps,
                measured=start_reading(self._steps, self._device),
                tick=self._num_ticks + self._device.lag,
            )
            self._steps, self._window_start = [], step
        happened = _NOTHING
        if self._ended is not None:
            stage = self._num_ticks - self._ended.tick
            if stage == GATHER:
                self._gather(self._ended)
            elif stage == LEARN:
                self._learn(self._ended)
            elif stage == ANNOUNCE:
                self._announce()
            elif stage == INSTALL:
                happened, self._ended = self._install(), None
        return happened

    def _gather(self, ended: _EndedWindow) -> None:
        """Begin to send this rank's steps to rank 0."""
        sent = encode_steps(
            ended.steps, ended.measured, self._device, num_ahead=self._num_ahead, max_batch=self.max_batch
        )
        self.exchange.start_gather(sent)

    def _learn(self, ended: _EndedWindow) -> None:
        """Begin to plan, on rank 0 in a thread beside the training."""
        sent, num_steps = self.exchange.finish_gather(), len(ended.steps)
        check_cuts(sent, ended.first_step, num_steps)  # on every rank: all must stop where these differ
        if self._thread is not None:
            free_step = ended.end + self._device.lag + IN_FORCE  # in a loop that looks not ahead
            self._planning = self._thread.submit(self._decide, sent, ended.first_step, num_steps, free_step)

    def _decide(self, sent: torch.Tensor, first_step: int, num_steps: int, free_step: int) -> Decision:
        """Learn from the window and plan; a planner that fails costs its plans, not the training."""
        self._gathered = gathered = merge_windows(sent, first_step, num_steps, loaded_alone=self._loaded_alone)
        free_step += gathered.num_ahead
        kept = replace(self.schedule.decision, plan=self.schedule.newest, changes=(), choice=None)
        if self._failed:
            return kept
        try:
            decision = self.schedule.decide(self._planner, gathered.window, free_step)
        except Exception as error:
            self._failed = True
            warnings.warn(
                f"the planner failed at step {free_step} ({type(error).__name__}: {error}): training goes on with "
                f"local batches {kept.plan.local_batches}, which no longer adapt; please open an issue",
                RuntimeWarning,
                stacklevel=2,
            )
            reason = f"kept: the planner failed with {type(error).__name__}"
            return replace(kept, plan=replace(kept.plan, reason=reason))
        return decision

    def _warn_if_silent(self, decision: Decision) -> None:
        """Say once where a planner lets the total batch grow and says nothing of the noise."""
        job = self.schedule.job
        if decision.noise is None and decision.plan.total_batch > job.batch_size and not self._silent:
            self._silent = True
            warnings.warn(
                f"the planner {type(self._planner).__name__} lets the total batch grow to {decision.plan.total_batch} "
                f"from {job.batch_size} and gives no noise estimate: learning rates that follow the gain stay as they "
                "are, and every step counts as one in progress and epochs(); return Decision(noise=Noise(...))",
                RuntimeWarning,
                stacklevel=2,
            )

    def _announce(self) -> None:
        """Begin to broadcast rank 0's decision."""
        message = empty_decision(self.schedule.job.num_ranks)
        if self._planning is not None:
            message = encode_decision(self._planning.result())
        self.exchange.start_broadcast(message)

    def _install(self) -> Happened:
        """Take the decision, on every rank at the same step, rank 0 too: schedules and progress must not differ."""
        values = self.exchange.finish_broadcast()
        if self._planning is None:
            decision = decode_decision(values)
        else:
            decision, self._planning = self._planning.result(), None
        self.schedule.install(decision, self._step)
        if self._gathered is not None:
            self._warn_if_silent(decision)
            for notices in (self._divergence, self._sum_loss):
                warning = notices.observe(self._gathered.window)
                if warning is not None:
                    warnings.warn(warning, RuntimeWarning, stacklevel=2)
        return Happened(decision=decision, gathered=self._gathered)
