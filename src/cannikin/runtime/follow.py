"""A second model on the batches of a first, such as the discriminator of a GAN on its generator's.

It has no loader and no plan of its own: a training forward of it is one of the batch that the loop is at, as the first
model's queue knows it, with that batch's weight, and its learning rates follow the first model's plan. It may run
forward, backward and its optimizer any number of times per batch. Nothing of it is measured: its time is part of the
first model's steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from cannikin.errors import BatchMatchError, InvalidInputError
from cannikin.runtime.coordinator import Coordinator, Unplanned
from cannikin.runtime.entry import BatchEntry
from cannikin.runtime.loop import Loop, loops_of
from cannikin.runtime.memory import MemoryGauge
from cannikin.runtime.options import unwrapped
from cannikin.runtime.step import StepInProgress

_NOT_OF_FOLLOWERS = ("policy", "observers", "run_dir", "profiles")


class Follower(Loop):
    """The steps of a model that follows another, in whose `Loop` batches and plans are.

    Args:
        leader: the steps of the model that it follows.
        **parts: see `Loop`.
    """

    def __init__(self, leader: Loop, **parts: Any) -> None:
        super().__init__(**parts)
        self._leader = leader
        self._mistakes.seeks_unplanned = False  # it is the first model's loop
        self.memory = MemoryGauge(None)  # the first model's gauge sees the memory of both

    def register(self, module: torch.nn.Module) -> None:
        """Set the hooks, and let the first model hold this one's reductions back with its own (`micro_batches`)."""
        super().register(module)
        self._module = weakref.ref(module)
        self._leader.followers.append(self)

    def no_own_sync(self) -> AbstractContextManager[None]:
        """See `Beside`."""
        module = self._module()
        return nullcontext() if module is None else self._reducer.no_sync(module)

    def note_backward(self, task: int) -> None:
        """See `Beside`: a GAN's generator learns through its discriminator, which throws these gradients away."""
        self._pile.note_backward(task)

    def half_done_beside(self, oldest: int | None, *, begins: bool) -> str:
        """See `Beside`: nothing but those gradients may be left, and no batch be used that the first model has not."""
        step = self.step
        if step is None or self._module() is None:
            return ""
        if self._pile.has_own_gradients:
            return f"optimizer.step() of a model that follows, with {self._pile.describe()}"
        if step.backward_began:
            if oldest is None or step.entry.step < oldest:
                return ""
            return f"the first model's forward of step {step.entry.step}, on which the one that follows was trained"
        # A forward that has no backward is left out, as soon as the next batch's begins.
        return "" if begins else f"the backward of step {step.entry.step} of a model that follows"

    @property
    def coordinator(self) -> Unplanned | Coordinator:
        """Who keeps the first model's plans."""
        return self._leader.coordinator

    def _watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if _is_watched(optimizer, self._leader):
            self._mistakes.note_update()  # its steps are seen there
            optimizer.register_step_post_hook(self._pile.clear)
        else:
            super()._watch_optimizer(optimizer)

    @property
    def in_hand(self) -> BatchEntry | None:
        """The batch that the loop is at."""
        entry = self._around()
        return None if entry is None else replace(entry, checked=False)  # this model has other inputs

    def _around(self) -> BatchEntry | None:
        return self._leader._around()

    def _entry(self) -> BatchEntry:
        entry = self.in_hand
        if entry is None:
            raise BatchMatchError(
                "no batch was handed out for this forward pass: this model follows another, so iterate over that one's "
                "HeteroDataLoader, or call use_batch(local, total) of that one"
            )
        return entry

    def _is_over(self, step: StepInProgress) -> bool:
        """Return whether the next forward comes after a backward, or belongs to another batch."""
        return step.backward_began or step.entry.step != self._entry().step

    def _next_entry(self) -> BatchEntry:
        self._item_count = self._leader._item_count
        return self._entry()

    def _skip_to(self, inputs: Iterable[torch.Tensor]) -> None:
        self._leader._skip_to(inputs)

    def _compare_told(self, previous: StepInProgress) -> None:
        """Do nothing: the first model's numbers are this one's."""

    def _meet(self, entry: BatchEntry, previous: StepInProgress | None) -> None:
        """Do nothing: the first model meets for both."""

    def _take(self) -> StepInProgress:
        step = super()._take()
        step.take_norms = step.valid = False
        return step


def leader_of(follows: Any, options: Any) -> Loop:
    """Return the steps of the model to follow; refuse what is none, and options that only that one can have."""
    loop = getattr(unwrapped(follows), "loop", None)
    if not isinstance(loop, Loop):
        kind = type(follows).__name__
        raise InvalidInputError(f"follows= is a {kind}: give the HeteroDataParallel, or what attach() returned for it")
    if isinstance(loop, Follower):
        raise InvalidInputError("follows= is a model that follows another itself: follow the one that has the loader")
    given = [name for name in _NOT_OF_FOLLOWERS if options.get(name)]
    if given:
        raise InvalidInputError(
            f"{given[0]}= of a model that follows another: give it to that one, which plans for both"
        )
    return loop


def _is_watched(optimizer: torch.optim.Optimizer, leader: Loop) -> bool:
    """Return whether the optimizer steps another model on the same batches too, which scales its rates already."""
    loops = loops_of(optimizer)
    return any(loop is leader or (isinstance(loop, Follower) and loop._leader is leader) for loop in loops)
