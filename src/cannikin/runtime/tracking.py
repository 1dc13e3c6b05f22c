"""Follows training steps: which batch each forward has, how its gradient is weighted, and when its parts began.

Hooks around forward, gradients and optimizer write it all into the step in progress.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from cannikin.errors import BatchMatchError, InvalidInputError
from cannikin.runtime.entries import BatchEntry
from cannikin.runtime.hook import HookState, share_of, weighted_hook
from cannikin.runtime.matching import BatchQueue, Part, check_size
from cannikin.runtime.memory import MemoryGauge
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.weighting import scale_outputs, watch_outputs, weigh

__all__ = ["StepTracker"]

# Norms cost two passes over the gradient: on every step at first, then on one in four.
_NORMS_ALWAYS, _NORMS_EVERY = 60, 4
_UNUSED = 30  # gradients that nobody used after which somebody should look


class StepTracker:
    """The steps of one DDP module.

    Args:
        ddp: the module.
        state: holds the step in progress, for the communication hook too.
        queue: batches handed out and not trained on yet.
        memory: learns how large a batch fits.
        weighting: "hook", "loss" or "none".
        grad_scaler: one that is enabled, if any.
        on_take: called between two steps, with the batch of the next and the step before.
        on_update, on_updated: called before and after the optimizer changes the parameters.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        state: HookState,
        queue: BatchQueue,
        memory: MemoryGauge,
        *,
        weighting: str,
        grad_scaler: Any,
        on_take: Callable[[BatchEntry, StepInProgress | None], None],
        on_update: Callable[[], None],
        on_updated: Callable[[], None],
    ) -> None:
        self.bound = False  # a loader of ours hands out the batches
        self.part: Part | None = None  # the micro-batch in hand
        self._state, self._queue, self._memory = state, queue, memory
        self._weighting, self._grad_scaler = weighting, grad_scaler
        self._on_take, self._on_update, self._on_updated = on_take, on_update, on_updated
        self._world_size: int = state.group.size()
        self._device = next(ddp.parameters()).device
        # Sizes that steps were finished with: at a new one a GPU chooses kernels and finds memory, once.
        self._sizes: set[int] | None = None if self._device.type == "cpu" else set()
        self._unsynced = 0  # backward passes under no_sync whose gradients wait for the next synchronised one
        self._num_taken = 0
        self._num_unused: int | None = 0  # gradients that no optimizer step of ours has used; None after the first one
        self._first_valid = 2 if ddp.static_graph else 1  # DDP rebuilds its buckets after the first steps

    def register(self, ddp: Any, optimizer: torch.optim.Optimizer, comm_wrapper: Any) -> None:
        """Set the hooks; `comm_wrapper` is one of DDP's that compress, or None."""
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

    # Forward.

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        step = self.current_or_next()
        if self.part is None:
            check_size(step.entry, args, kwargs)
        if step.forward_start is None:
            step.forward_start = self._state.clock.mark()

    def current_or_next(self) -> StepInProgress:
        """The step that a training forward now belongs to."""
        step = self._state.step
        if step is None or (self.part is None and self._queue.is_over(step)):
            return self._take()
        return step

    def _take(self) -> StepInProgress:
        """Finish with the step before, keep the appointments between ranks, and begin the oldest step in the queue."""
        entry, previous, scale = self._queue.take(), self._state.step, self._loss_scale()
        if previous is not None:
            previous.next_scale = scale
            previous.unwatch()
            if previous.backward_began:
                self._unsynced = 0 if previous.synced else self._unsynced + 1
                self._warn_if_unused(previous)
            share_of(self._state, previous)  # so that no sum of items is left behind under no_sync
        self._on_take(entry, previous)
        self._num_taken += 1
        step = StepInProgress(entry=entry, valid=self._num_taken > self._first_valid)
        step.previous_end = None if previous is None else previous.optimizer_end
        step.take_norms = (
            self._num_taken <= _NORMS_ALWAYS
            or self._num_taken % _NORMS_EVERY == 0
            or self._state.previous is not None  # which must be that of the step before
        )
        step.loss_scale = scale
        self._memory.begin_step(entry.local_batch)
        self._state.step = step
        return step

    def _warn_if_unused(self, previous: StepInProgress) -> None:
        """Say so once where another optimizer steps the parameters, or none."""
        if self._num_unused is None or not (previous.synced and self.bound):
            return
        self._num_unused += 1
        if self._num_unused == _UNUSED:
            warnings.warn(
                f"{_UNUSED} gradients, and step() of the optimizer that HeteroDataParallel was given has not been "
                "called: nothing is measured and no learning rate is scaled; give it the optimizer that the loop steps",
                RuntimeWarning,
                stacklevel=2,
            )

    def _loss_scale(self) -> torch.Tensor | None:
        """What a GradScaler multiplies the next loss by, as it is now."""
        if self._grad_scaler is None:
            return None
        scale = getattr(self._grad_scaler, "_scale", None)  # its public get_scale() would wait for the device
        if scale is None:  # before the first loss, when get_scale() has nothing to wait for
            return torch.full((), self._grad_scaler.get_scale(), device=self._device)
        kept: torch.Tensor = scale.clone()
        return kept

    def _after_forward(self, module: Any, args: Any, output: Any) -> Any:
        step, part = self._state.step, self.part
        if step is None or not (module.training and torch.is_grad_enabled()):
            return output
        synced = module.require_backward_grad_sync if part is None else part.synced
        step.accumulated = self._unsynced > 0
        inward = weigh(step, self._weighting, self._world_size, accumulating=not synced or self._unsynced > 0)
        share = 1.0 if part is None else part.share

        def begin(*_: Any) -> None:
            # Of a batch in parts, all but the last one's backward counts as what comes before.
            if step.backward_start is None or (part is not None and not step.synced):
                step.backward_start = self._state.clock.mark()

        def begin_and_weigh() -> float:
            begin()
            return share * self._world_size * share_of(self._state, step) if inward else share

        scaled = inward or part is not None
        if scaled:
            output, num_marked = scale_outputs(output, begin_and_weigh)
        else:
            handles = watch_outputs(output, begin)
            step.watches += handles
            num_marked = len(handles)
        if num_marked == 0 and self._num_taken == 1:
            _explain_unmarked(output, needed=scaled)
        return output

    # The optimizer.

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin_update()
            return None

        def train_and_begin_update() -> Any:
            # Lightning trains in here: the update begins once it is done.
            loss = closure()
            self._begin_update()
            return loss

        return (args[0], train_and_begin_update, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _begin_update(self) -> None:
        step, self._num_unused = self._state.step, None
        if self._state.unmatched and self.bound:
            self._state.unmatched = False
            raise BatchMatchError(
                "optimizer.step() with gradients of a forward in eval mode, which cannot be matched to a batch and are "
                "not weighted: train with model.train(), and to freeze layers call eval() on those, in model.module"
            )
        if step is not None and step.synced:
            step.optimizer_start = self._state.clock.mark()
        self._on_update()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._on_updated()
        step = self._state.step
        if step is not None and step.optimizer_start is not None:
            step.optimizer_end = self._state.clock.mark()
            self._memory.end_step(step.forward_size)
            if self._sizes is not None and step.forward_size not in self._sizes:
                self._sizes.add(step.forward_size)
                step.valid = False


def _explain_unmarked(output: Any, *, needed: bool) -> None:
    """Say what follows where forward's output has nothing to mark."""
    text = f"forward returned a {type(output).__name__} in which no tensor with a gradient was found"
    advice = "return tensors, also in lists, tuples, dicts or dataclasses"
    if needed:
        raise InvalidInputError(f"{text}, so its loss cannot be weighted: {advice}")
    effect = "gradients are right, but this rank's time cannot be measured and nothing adapts"
    warnings.warn(f"{text}: {effect}; {advice}", RuntimeWarning, stacklevel=2)
