"""What turns a DDP module into one with unequal local batches: hooks around forward, gradients and optimizer.

One engine a model; no global state. A batch that the loader hands out waits in a queue; the first training forward
after the backward of the batch before takes it, so a loop that looks one batch ahead stays right.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch

from cannikin.core.goodput import efficiency
from cannikin.core.lr import lr_factor
from cannikin.core.planners import make_planner
from cannikin.core.records import Job, Plan, Planner, StepWindow
from cannikin.errors import BatchMatchError, InvalidInputError, StateError
from cannikin.runlog import Observer
from cannikin.runtime.buffers import RunningStatistics
from cannikin.runtime.coordinator import Coordinator
from cannikin.runtime.entries import BatchEntry, BatchSource
from cannikin.runtime.exchange import Exchange
from cannikin.runtime.hook import HookState, share_of, weighted_hook
from cannikin.runtime.messages import Decision
from cannikin.runtime.rates import RateScaler, choose_rule
from cannikin.runtime.recording import Recorder
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.timing import make_clock
from cannikin.runtime.weighting import choose_weighting, has_batch_norm, mark_outputs

__all__ = ["Engine", "attach"]

# Norms cost two passes over the gradient: on every step at first, then on one in four.
_NORMS_ALWAYS, _NORMS_EVERY = 60, 4


class Engine:
    """The adaptive side of one DDP module; made by `attach`, kept as `model.engine`."""

    def __init__(
        self,
        ddp: torch.nn.parallel.DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        policy: str | Planner = "cannikin",
        weighting: str = "auto",
        lr_rule: str = "auto",
        grad_scaler: Any = None,
        comm_wrapper: Any = None,
        observers: tuple[Observer, ...] = (),
        run_dir: str | Path | None = None,
    ) -> None:
        self.policy = policy
        self.weighting, self.weighting_reason = choose_weighting(weighting, ddp.module)
        self.lr_rule, self.lr_reason = choose_rule(lr_rule, optimizer)
        self.has_batch_norm = has_batch_norm(ddp.module)
        self.progress = 0.0
        self.coordinator: Coordinator | None = None
        self._ddp = ddp
        self._grad_scaler = grad_scaler
        self._exchange = Exchange(ddp.process_group)
        self._statistics = RunningStatistics(ddp.module, ddp.process_group)
        self._recorder = Recorder(observers, run_dir, active=self._exchange.rank == 0)
        self._restored: dict[str, Any] | None = None  # a state loaded before there was a planner to take it
        self._clock = make_clock(next(ddp.parameters()).device)
        self._state = HookState(ddp.process_group, self._clock)
        self._rates = RateScaler()
        self._queue: deque[BatchEntry] = deque()
        self._next_step = 0
        self._epoch_over = False
        self._part: float | None = None  # share of the local batch that the present micro-batch has
        self._parts_synced = True  # whether the last part of the batch in hand will be synchronised
        self._item_count: Any = None
        self._epoch_complete = True
        self._unsynced = 0  # backward passes under no_sync whose gradients wait for the next synchronised one
        self._num_taken = 0
        self._num_ahead = 0  # batches that were handed out already when the one in training was taken
        self._first_valid = 2 if ddp.static_graph else 1  # DDP rebuilds its buckets after the first steps
        self._register(ddp, optimizer, comm_wrapper)

    def _register(self, ddp: Any, optimizer: torch.optim.Optimizer, comm_wrapper: Any) -> None:
        hook = weighted_hook if comm_wrapper is None else comm_wrapper(weighted_hook)

        def cannikin_hook(state, bucket):  # type: ignore[no-untyped-def]
            # DDP refuses a bf16 wrapper, by its name, where there is no CUDA; gloo carries bf16 well.
            return hook(state, bucket)

        try:
            ddp.register_comm_hook(self._state, cannikin_hook)
        except RuntimeError as error:
            raise InvalidInputError(
                "this DDP module has a communication hook already, and takes only one: "
                "pass a compression wrapper as comm_wrapper= instead of registering it"
            ) from error
        # Hooks run outside of forward, so its own exemption from the compiler does not cover them.
        undisturbed: Any = torch.compiler.disable
        ddp.register_forward_pre_hook(undisturbed(self._before_forward), with_kwargs=True)
        ddp.register_forward_hook(undisturbed(self._after_forward))
        optimizer.register_step_pre_hook(self._before_optimizer)
        optimizer.register_step_post_hook(self._after_optimizer)

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
        return self._next_step

    def bind(self, source: BatchSource, job: Job, settings: dict[str, int]) -> None:
        """Take this loader as the source of batches, after checking that all ranks agree on it."""
        if self.coordinator is not None:
            raise InvalidInputError("this model has a loader already: give each model one HeteroDataLoader")
        named = isinstance(self.policy, str)
        policy = self.policy if isinstance(self.policy, str) else type(self.policy).__name__
        low, high = job.bounds
        self._exchange.check_agreement(
            {
                **settings,
                "policy": policy,
                "weighting": self.weighting,
                "lr_rule": self.lr_rule,
                "batch_size": job.batch_size,
                "max_batch_size": job.max_batch_size or 0,
                "local_bounds": [low.tolist(), high.tolist()],
                "num_samples": job.num_samples or 0,
            }
        )
        planner: Any = make_planner(policy, job, batch_norm=self.has_batch_norm) if named else self.policy
        if self._restored is not None:
            planner.load_state_dict(self._restored)
        self.coordinator = Coordinator(self._exchange, self._clock, job, planner, source.prefetch_depth)
        self.coordinator.on_decision = self._decided
        self._item_count = source.item_count
        self._recorder.begin(job, policy, self._ddp.module)

    def _decided(self, decision: Decision, window: StepWindow | None) -> None:
        planner = self._bound.planner
        self._recorder.decided(decision, window, planner, progress=self.progress, lr_factor=self.lr_scale)

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
        self._queue.append(entry)
        self._next_step = entry.step + 1
        self._epoch_over = False

    def begin_epoch(self) -> None:
        """A new iteration starts: batches of an abandoned one that were never trained on are forgotten.

        Those of a complete one are not: a loop may look one batch ahead across the end of an epoch.
        """
        if not self._epoch_complete:
            for entry in self._queue:
                self._state.item_sums.pop(entry.step, None)
            self._queue.clear()
        self._num_ahead = -1  # and so is one that had its forward but no backward
        self._epoch_complete = False

    def complete_epoch(self) -> None:
        """Every batch was handed out: BatchNorm's statistics become the same on all ranks, for the evaluation."""
        self._epoch_complete = True
        self._average_statistics()

    def _average_statistics(self) -> None:
        entry = self.current_entry
        if entry is not None:
            self._statistics.average(entry.local_batch / entry.total_batch)

    def end_epoch(self) -> None:
        """The iterator ends: nothing of ours stays outstanding."""
        self._epoch_over = True
        self._exchange.wait()

    def use_batch(self, local: int, total: int) -> None:
        """Say what the next training forward holds, where a script has its own loader."""
        self.hand_out(BatchEntry(step=self._next_step, local_batch=local, total_batch=total, checked=False))

    def begin_part(self, part: Any, share: float, *, synced: bool) -> None:
        """The next forward takes this part, a share of the batch in hand, which is not used up before `end_parts`.

        `synced` is whether the last part will be: the batch is not one of several that accumulate.
        """
        step = self._state.step
        if step is None or (self._part is None and self._is_used_up(step)):
            step = self._take()
        items = step.entry.items
        if items is not None and self._item_count is None:
            raise InvalidInputError("micro_batches() of items needs item_count= of the loader to weigh the parts")
        self._part = self._item_count(part) / items if items else share
        self._parts_synced = synced

    def end_parts(self) -> None:
        """The batch in hand has been cut up and used."""
        self._part = None

    @property
    def current_entry(self) -> BatchEntry | None:
        """The batch in training."""
        return None if self._state.step is None else self._state.step.entry

    @property
    def current_share(self) -> float:
        """This rank's part of the samples, or items, of the batch in training; 0 where it is padding."""
        step = self._state.step
        if step is None:
            raise BatchMatchError("there is no training step yet: call forward first")
        return 0.0 if step.entry.is_padding else share_of(self._state, step)

    # Forward.

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        step = self._state.step
        if step is None or (self._part is None and self._is_used_up(step)):
            step = self._take()
        self._check_size(step.entry, args, kwargs)
        if step.forward_start is None:
            step.forward_start = self._clock.mark()

    def _is_used_up(self, step: StepInProgress) -> bool:
        """Whether the next forward is another batch's: after backward, or where a batch was passed over without one.

        Several forwards may go before one backward; but no batch is handed out between them.
        """
        return step.backward_began or len(self._queue) > self._num_ahead

    def _take(self) -> StepInProgress:
        """Finish with the step before, keep the appointments between ranks, and begin the oldest step in the queue."""
        if not self._queue:
            raise BatchMatchError(
                "no batch was handed out for this forward pass: iterate over this model's own HeteroDataLoader, "
                "or call model.use_batch(local, total) before forward"
            )
        entry, previous = self._queue.popleft(), self._state.step
        self._num_ahead = len(self._queue)
        if previous is not None:
            if previous.backward_began:
                self._unsynced = 0 if previous.synced else self._unsynced + 1
            share_of(self._state, previous)  # so that no sum of items is left behind under no_sync
            if self.coordinator is not None:
                self.coordinator.add(previous)
        if self.coordinator is not None:
            if self._epoch_over and not self._queue:  # looked ahead: nobody will come to finish what starts now
                self._exchange.wait()
            elif self.coordinator.tick(entry.step, self._grad_scale):
                self._average_statistics()
        self._num_taken += 1
        step = StepInProgress(entry=entry, valid=self._num_taken > self._first_valid)
        step.take_norms = self._num_taken <= _NORMS_ALWAYS or self._num_taken % _NORMS_EVERY == 0
        self._state.step = step
        return step

    def _grad_scale(self) -> float:
        return 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())

    def _check_size(self, entry: BatchEntry, args: Any, kwargs: Any) -> None:
        if not entry.checked or entry.is_padding or self._part is not None:
            return
        tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim > 0), None)
        if tensor is not None and tensor.shape[0] != entry.local_batch:
            raise BatchMatchError(
                f"forward got {tensor.shape[0]} samples in dimension 0, the loader handed out {entry.local_batch} for "
                f"step {entry.step}: feed each batch as it comes, or call model.use_batch(local, total) before forward"
            )

    def _after_forward(self, module: Any, args: Any, output: Any) -> Any:
        step = self._state.step
        if step is None or not (module.training and torch.is_grad_enabled()):
            return output
        synced = module.require_backward_grad_sync if self._part is None else self._parts_synced
        part, inward = self._weigh(step, accumulating=not synced or self._unsynced > 0)

        def at_backward() -> float:
            if step.backward_start is None:
                step.backward_start = self._clock.mark()
            return part * self.world_size * share_of(self._state, step) if inward else part

        return mark_outputs(output, at_backward)

    def _weigh(self, step: StepInProgress, *, accumulating: bool) -> tuple[float, bool]:
        """Set what the hook multiplies by; return this forward's part of the batch, and whether its outputs' gradient
        is to be weighted.

        Gradients that pile up under no_sync may stem from different splits, so they are weighted on their way in.
        """
        part = 1.0
        if self._part is not None:
            part = self._part
            step.valid = False  # forward and backward alternate: the step's times are not those of the model
        inward = self.weighting == "loss" or (self.weighting == "hook" and accumulating)
        step.weight = None if self.weighting == "hook" and not inward else 1.0 / self.world_size
        step.accumulated = self._unsynced > 0
        step.take_norms = step.take_norms and not accumulating
        scale = self.world_size * step.entry.local_batch / step.entry.total_batch
        step.norm_scale = 1.0 / scale**2 if inward and scale > 0 else 1.0
        return part, inward

    # The optimizer.

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._state.step
        if step is not None and step.synced:
            step.optimizer_start = self._clock.mark()
        if self.coordinator is not None:
            self._rates.apply(optimizer, self.lr_scale)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._rates.undo()
        self.progress += self.gain
        step = self._state.step
        if step is not None and step.optimizer_start is not None:
            step.optimizer_end = self._clock.mark()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Progress and everything learned, in plain types. Rank 0 has learned it: save there."""
        planner = None if self.coordinator is None else self.coordinator.planner.state_dict()
        return {"version": 1, "progress": self.progress, "planner": planner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, on every rank, and on another number of them too."""
        if not isinstance(state, dict) or state.get("version") != 1:
            raise StateError("not the state of a cannikin engine of version 1: load what engine.state_dict() returned")
        self.progress = float(state["progress"])
        self._restored = state["planner"]
        if self.coordinator is not None and self._restored is not None:
            self.coordinator.restore(self._restored)

    # For users.

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
        trace, signal = coordinator.decision.noise_trace, coordinator.decision.signal_sqnorm
        if not trace + signal > 0:  # not known, or no gradient at all
            return 1.0
        initial = coordinator.job.batch_size
        worth = efficiency(plan.total_batch, initial_batch=initial, noise_trace=trace, signal_sqnorm=signal)
        return float(worth) * plan.total_batch / initial

    @property
    def noise_scale(self) -> float:
        """phi = S/G in samples, the same on every rank; NaN before it is known, inf where noise drowns the signal."""
        if self.coordinator is None:
            return float("nan")
        trace, signal = self.coordinator.decision.noise_trace, self.coordinator.decision.signal_sqnorm
        if trace != trace:
            return trace
        return trace / signal if signal > 0 else float("inf")

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
        )


def attach(ddp: torch.nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer, **keywords: Any) -> Engine:
    """Make an existing DDP module adaptive, for instance one that a framework built.

    Args:
        ddp: the module, before its first training step and without a communication hook of its own.
        optimizer: the one that steps its parameters.
        **keywords: as for `HeteroDataParallel`, without DDP's own.
    """
    return Engine(ddp, optimizer, **keywords)
