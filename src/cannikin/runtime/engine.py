"""What turns a DDP module into one with unequal local batches: plans for the loader, state and figures for the user.

One engine a model; no global state. What happens inside a step is `tracking`'s.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cannikin.core.lr import lr_factor
from cannikin.core.records import Job, Plan, Planner
from cannikin.errors import BatchMatchError, InvalidInputError, StateError
from cannikin.runlog import Observer, RankInfo
from cannikin.runtime.arguments import check_model
from cannikin.runtime.binding import check_owner, planner_for, policy_name, settings_of
from cannikin.runtime.buffers import RunningStatistics
from cannikin.runtime.coordinator import Coordinator
from cannikin.runtime.cutting import whole_number
from cannikin.runtime.entries import BatchEntry, BatchSource
from cannikin.runtime.exchange import Exchange, pause_at_exit
from cannikin.runtime.hook import HookState, share_of
from cannikin.runtime.matching import BatchQueue, Part
from cannikin.runtime.memory import CudaMemory, MemoryGauge, advise_when_uncaught, is_out_of_memory
from cannikin.runtime.messages import Decision
from cannikin.runtime.metrics import check_metrics
from cannikin.runtime.precondition import InverseVariance, is_adam
from cannikin.runtime.profiles import ProfileStore, introduce, model_key
from cannikin.runtime.progress import Progress
from cannikin.runtime.rates import RateScaler, choose_rule
from cannikin.runtime.recording import Recorder, end_unless_broken
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.timing import make_clock
from cannikin.runtime.tracking import StepTracker
from cannikin.runtime.weighting import choose_weighting, has_batch_norm, refuse_sparse
from cannikin.runtime.windows import Report

__all__ = ["Engine", "attach"]


class Engine:
    """The adaptive side of one DDP module; made by `attach`, kept as `model.engine`."""

    def __init__(
        self,
        ddp: torch.nn.parallel.DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        policy: str | Planner | None = None,
        weighting: str = "auto",
        lr_rule: str = "auto",
        warmup_steps: float = 0.0,
        grad_scaler: Any = None,
        comm_wrapper: Any = None,
        observers: Sequence[Observer] = (),
        run_dir: str | Path | None = None,
        profiles: str | Path | None = None,
    ) -> None:
        check_model(ddp.module, optimizer)
        refuse_sparse(ddp.module)
        self.policy = os.environ.get("CANNIKIN_POLICY", "cannikin") if policy is None else policy
        self.weighting, self.weighting_reason = choose_weighting(weighting, ddp.module)
        self.lr_rule, self.lr_reason = choose_rule(lr_rule, optimizer, warmup_steps)
        self.has_batch_norm = has_batch_norm(ddp.module)
        self.coordinator: Coordinator | None = None
        self.source: BatchSource | None = None  # the loader
        self.goal: float | None = None  # passes of progress that the loop has asked for (`epochs`)
        self._device = device = next(ddp.parameters()).device
        self._ddp = ddp
        self._optimizer = optimizer
        self._warmup_steps = warmup_steps
        if grad_scaler is not None and not grad_scaler.is_enabled():  # GradScaler(enabled=use_amp)
            grad_scaler = None
        self._exchange = Exchange(ddp.process_group)
        self._statistics = RunningStatistics(ddp.module, ddp.process_group)
        self._recorder = Recorder(observers, run_dir, active=self._exchange.rank == 0)
        model = model_key(ddp.module, scaled=grad_scaler is not None)
        self._store = None if profiles is None else ProfileStore(profiles, model)
        self._ranks: list[RankInfo] = []
        self._restored: dict[str, Any] | None = None  # a state loaded before there was a planner to take it
        self._clock = make_clock(device)
        self._memory = MemoryGauge(CudaMemory(device) if device.type == "cuda" else None)
        self._variance = InverseVariance(optimizer) if is_adam(optimizer) else None
        self._state = HookState(ddp.process_group, self._clock, self._variance)
        self._rates = RateScaler()
        self._progress = Progress()
        self._queue = BatchQueue()
        self._pass: dict[str, int] | None = None  # where a pass begins, until the ranks have agreed on it
        self._pass_over = False
        self._cuts_batches = False  # the loop uses micro_batches()
        self._item_count: Any = None
        self._tracker = StepTracker(
            ddp,
            self._state,
            self._queue,
            self._memory,
            weighting=self.weighting,
            grad_scaler=grad_scaler,
            on_take=self._keep_appointments,
            on_update=self._begin_update,
            on_updated=self._end_update,
        )
        self._tracker.register(ddp, optimizer, comm_wrapper)
        weakref.finalize(self, end_unless_broken, self._recorder, self._queue)
        advise_when_uncaught(self)
        pause_at_exit()

    # The loader's side (entries.Feed).

    @property
    def rank(self) -> int:
        """This process's rank in the model's process group."""
        return self._exchange.rank

    @property
    def world_size(self) -> int:
        """n."""
        return self._exchange.world_size

    @property
    def next_step(self) -> int:
        """Number of the first step that no batch has been handed out for yet."""
        return self._queue.next_step

    def bind(self, source: BatchSource, job: Job, settings: dict[str, int]) -> None:
        """Take this loader as the source of batches, after checking that all ranks agree on it."""
        if self.coordinator is not None:
            raise InvalidInputError("this model has a loader already: give each model one HeteroDataLoader")
        check_owner(self._optimizer, self._tracker)
        policy = policy_name(self.policy)
        choices = {"policy": policy, "weighting": self.weighting, "lr_rule": self.lr_rule}
        agreed = settings_of(job, **choices, warmup_steps=self._warmup_steps)
        self._exchange.check_agreement({**settings, **agreed})
        self._ranks = introduce(self._exchange, self._device)
        planner = planner_for(
            self.policy,
            job,
            batch_norm=self.has_batch_norm,
            restored=self._restored,
            store=self._store if self.rank == 0 else None,
            ranks=self._ranks,
        )
        self._recorder.skip_changes(planner)
        self.coordinator = Coordinator(
            self._exchange,
            self._clock,
            job,
            planner,
            prefetch_depth=source.prefetch_depth,
            loaded_alone=source.prefetch_depth == 0,
            on_decision=self._decided,
        )
        self._tracker.bound = True
        self.coordinator.agree()
        if self.world_size == 1 and job.largest_total > job.batch_size:
            self._state.previous = {}
        self._item_count, self.source = source.item_count, source
        self._recorder.begin(job, policy, self._ddp.module, self._ranks)

    def _decided(self, decision: Decision, report: Report | None) -> None:
        if report is not None:
            job, buckets = self._bound.job, tuple(self._state.bucket_bytes)
            passes = None if job.num_samples is None else self.progress * job.batch_size / job.num_samples
            self._recorder.decided(
                self._bound.planner,
                report,
                decision.plan,
                progress=passes,
                lr_factor=self.lr_scale,
                bucket_bytes=buckets,
            )

    def refuse(self, error: Exception) -> None:
        """This rank cannot build its loader: tell the others, which wait in `bind`."""
        self._exchange.refuse(error)

    def plan_at(self, step: int) -> Plan:
        """The plan in force at this step."""
        return self._bound.plan_at(step)

    @property
    def _bound(self) -> Coordinator:
        if self.coordinator is None:
            raise BatchMatchError("this model has no loader yet: build a HeteroDataLoader(..., model=model) first")
        return self.coordinator

    def hand_out(self, entry: BatchEntry) -> None:
        """A batch is being yielded: its backward is to be weighted and measured."""
        if entry.items is not None:
            self._state.item_sums[entry.step] = self._exchange.start_sum(entry.items)
        self._queue.add(entry)
        self._pass_over = False

    def begin_epoch(self, epoch: int, position: int) -> None:
        """A new iteration starts, at this sample of this epoch."""
        for entry in self._queue.begin_pass():
            self._state.item_sums.pop(entry.step, None)
        self._pass = {"epoch": epoch, "position": position, "step": self.next_step}
        goal = {} if self.goal is None else {"goal": self.goal}
        self._recorder.start()
        self._recorder.event(self.next_step, "epoch", {"epoch": epoch, "position": position, **goal})

    def complete_epoch(self) -> None:
        """Every batch was handed out: BatchNorm's statistics become the same on all ranks, for the evaluation."""
        self._queue.complete_pass()
        self._average_statistics()

    def _average_statistics(self) -> None:
        entry = self.current_entry
        if entry is not None:
            self._statistics.average(entry.local_batch / entry.total_batch)

    def end_epoch(self) -> None:
        """The iterator ends: nothing of ours stays outstanding."""
        self._pass_over = True
        self._exchange.wait()
        for wait_for_sum in self._state.item_sums.values():
            wait_for_sum()
        self._save_profiles()

    def _save_profiles(self) -> None:
        planner: Any = self._bound.planner if self.rank == 0 else None
        if self._store is not None and hasattr(planner, "profiles"):
            self._store.save([rank.device for rank in self._ranks], planner.profiles())

    def use_batch(self, local: int, total: int) -> None:
        """Say what the next training forward holds, where a script has its own loader or changes a batch of ours."""
        total = whole_number("total", total, low=1)
        entry = self._queue.describe(whole_number("local", local, low=0, high=total), total)
        self._state.item_sums.pop(entry.step, None)

    def begin_part(self, part: Any, share: float, *, synced: bool) -> None:
        """The next forward takes this part, a share of the batch in hand, which is not used up before `end_parts`.

        `synced` is whether the last part will be: the batch is not one of several that accumulate.
        """
        step = self._tracker.current_or_next()
        self._cuts_batches = True
        step.part_size = max(step.part_size, round(share * step.entry.local_batch))
        items = step.entry.items
        if items is not None and self._item_count is None:
            raise InvalidInputError("micro_batches() of items needs item_count= of the loader to weigh the parts")
        self._tracker.part = Part(share=self._item_count(part) / items if items else share, synced=synced)

    def end_parts(self) -> None:
        """The batch in hand has been cut up and used."""
        self._tracker.part = None

    def num_parts(self, local_batch: int) -> int:
        """Parts that a batch must be cut into for each to fit into memory, as far as is known."""
        return -(-local_batch // max(1, min(self._memory.max_batch, local_batch)))

    @property
    def current_entry(self) -> BatchEntry | None:
        """The batch in training."""
        return None if self._state.step is None else self._state.step.entry

    @property
    def current_share(self) -> float:
        """This rank's part of the samples, or items, of the batch in training; 0 where it is padding."""
        step = self._state.step
        if step is None:
            raise BatchMatchError("there is no training step yet: call the wrapped model, not the module inside")
        return 0.0 if step.entry.is_padding else share_of(self._state, step)

    # The tracker's side: what a step waits for.

    def _keep_appointments(self, entry: BatchEntry, previous: StepInProgress | None) -> None:
        """What ranks do together at fixed steps, between the end of one step and the next."""
        coordinator = self.coordinator
        if coordinator is None:
            return
        if self._pass is not None:
            batches = coordinator.plan_at(entry.step).local_batches
            place, self._pass = {**self._pass, "progress": self.progress, "local_batches": batches}, None
            self._exchange.check_agreement(place, "load the same saved state on every rank, and begin passes together")
        if previous is not None:
            coordinator.add(previous)
        if self._pass_over and not self._queue:  # looked ahead: nobody will come to finish what starts now
            self._exchange.wait()
            return
        if not self._cuts_batches:
            coordinator.max_batch = self._memory.max_batch
        if coordinator.tick(entry.step):
            self._average_statistics()

    def _begin_update(self) -> None:
        if self.coordinator is not None:
            self._rates.apply(self._optimizer, self.lr_scale)

    def _end_update(self) -> None:
        self._rates.undo()
        self._progress.advance(self._optimizer, self.gain)
        if self._variance is not None:
            self._variance.count_step()

    def explain(self, error: BaseException) -> None:
        """Say what to do where a training step ran out of memory."""
        step = self._state.step
        if is_out_of_memory(error) and step is not None and step.optimizer_end is None:
            advice = self._memory.advice(self.rank, step.forward_size)
            if advice not in getattr(error, "__notes__", ()):
                error.add_note(advice)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Progress and everything learned, in plain types. Rank 0 has learned it: save there."""
        planner = None if self.coordinator is None else self.coordinator.planner.state_dict()
        num_steps = self._queue.num_taken + self._recorder.steps_before
        return {"version": 1, "progress": self._progress.settle(), "num_steps": num_steps, "planner": planner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, on every rank, and on another number of them too."""
        if not isinstance(state, dict) or state.get("version") != 1:
            raise StateError("not the state of a cannikin engine of version 1: load what engine.state_dict() returned")
        self._progress.total = float(state["progress"])
        self._recorder.resume(int(state.get("num_steps", 0)) - self._queue.num_taken)
        self._restored = state["planner"]
        if self.coordinator is not None and self._restored is not None:
            self.coordinator.restore(self._restored)
            self._recorder.skip_changes(self.coordinator.planner)

    # For users.

    def epochs(self, num_epochs: float) -> Iterator[int]:
        """See `HeteroDataParallel.epochs`."""
        coordinator, source = self.coordinator, self.source
        if coordinator is None or source is None or coordinator.job.num_samples is None:
            raise InvalidInputError("epochs() needs a HeteroDataLoader of known length: build it first, or use range()")
        goal = num_epochs * coordinator.job.num_samples / coordinator.job.batch_size
        self.goal = float(num_epochs)
        try:
            while self.progress < goal - 0.5:  # a last step that is half done would cost a whole pass
                yield source.epoch
        finally:
            self.goal = None

    def weighted_mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """See `HeteroDataParallel.weighted_mean`."""
        share = self.current_share
        total = torch.as_tensor(value, device=self._device).detach() * share
        if share == 0:
            total = torch.zeros_like(total)  # not multiplied by 0: 0 x NaN is NaN
        dist.all_reduce(total, group=self._ddp.process_group)
        return total

    def log(self, /, **metrics: Any) -> None:
        """See `HeteroDataParallel.log`."""
        numbers = check_metrics(metrics, read=self._recorder.active)
        self._recorder.event(self._queue.num_taken, "eval", numbers)

    def close(self) -> None:
        """The training is over: say so in the run log, and write nothing more.

        Without it that is done when the program ends without an exception. A process that leaves by `os._exit`, as
        those of `multiprocessing` do, never gets there.
        """
        self._recorder.end(self._queue.num_taken)

    @property
    def plan(self) -> Plan | None:
        """The plan in force at the step in training, or at the first one."""
        if self.coordinator is None:
            return None
        step = self._state.step
        return self.coordinator.plan_at(0 if step is None else step.entry.step)

    @property
    def gain(self) -> float:
        """B0-steps that one step at the plan's total batch is worth; 1 before the noise scale is known."""
        plan, coordinator = self.plan, self.coordinator
        if plan is None or coordinator is None:
            return 1.0
        return coordinator.decision.gain(plan.total_batch, coordinator.job.batch_size)

    @property
    def noise_scale(self) -> float:
        """phi = S/G in samples, the same on every rank; NaN before it is known, inf where noise drowns the signal."""
        return float("nan") if self.coordinator is None else self.coordinator.decision.noise_scale

    @property
    def progress(self) -> float:
        """B0-steps that training so far has been worth."""
        return self._progress.total

    @property
    def lr_scale(self) -> float:
        """The factor on every learning rate under the plan in force."""
        plan, coordinator = self.plan, self.coordinator
        if plan is None or coordinator is None:
            return 1.0
        return lr_factor(
            self.lr_rule,
            plan.total_batch,
            initial_batch=coordinator.job.batch_size,
            gain=self.gain,
            progress=self.progress,
            warmup_progress=self._warmup_steps,
        )


def attach(ddp: torch.nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer, **keywords: Any) -> Engine:
    """Make an existing DDP module adaptive, for instance one that a framework built.

    With BatchNorm in it, DDP's broadcast of rank 0's buffers is switched off: they become the weighted mean over ranks.

    Args:
        ddp: the module, before its first training step and without a communication hook of its own.
        optimizer: the one that steps its parameters.
        **keywords: as for `HeteroDataParallel`, without DDP's own.
    """
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        raise InvalidInputError(
            f"attach() got a {type(ddp).__name__}, not a DistributedDataParallel: wrap the module first; a framework "
            "does so once it runs on several processes, for instance under torchrun"
        )
    engine = Engine(ddp, optimizer, **keywords)
    if engine.has_batch_norm:
        ddp.broadcast_buffers = False
    return engine
