"""One step on one rank, while it happens: its entry, its weight, its moments and its norms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from cannikin.runtime.entries import BatchEntry
from cannikin.runtime.timing import Clock

__all__ = ["StepInProgress", "StepRecord"]


@dataclass(slots=True)
class StepInProgress:
    """What the forward hooks, the communication hook and the optimizer hooks write down about the current step.

    `weight` is what the bucket is multiplied by before the sum over ranks, `norm_scale` what the bucket's squared norm
    is multiplied by to be that of the mean over this rank's samples.
    """

    entry: BatchEntry
    previous_end: Any = None  # when the optimizer was done with the step before
    forward_start: Any = None
    backward_start: Any = None
    watches: list[Any] = field(default_factory=list)  # handles to the hooks that tell of the start of backward
    item_total: float | None = None  # items on all ranks, once they have been added up
    weight: float | None = None  # None: this rank's share
    accumulated: bool = False  # the buckets have gradients of earlier batches in them
    norm_scale: float = 1.0
    loss_scale: torch.Tensor | None = None  # what a GradScaler multiplies this step's loss by
    next_scale: torch.Tensor | None = None  # and the next one's: smaller where this step's gradient was not finite
    take_norms: bool = True
    ready: list[Any] = field(default_factory=list)
    done: list[Any] = field(default_factory=list)
    local_sqnorms: list[torch.Tensor | None] = field(default_factory=list)  # bucket by bucket
    global_sqnorms: list[torch.Tensor | None] = field(default_factory=list)
    previous_dots: list[torch.Tensor | None] = field(default_factory=list)  # with the gradient of the step before
    sample: torch.Tensor | None = None  # of the last bucket, where norms are not taken
    optimizer_start: Any = None
    optimizer_end: Any = None
    synced: bool = False  # the communication hook has run
    part_size: int = 0  # samples of the largest part, where the batch is cut into micro-batches
    valid: bool = True

    @property
    def forward_size(self) -> int:
        """Samples that went through the network at once, at most."""
        return self.part_size or self.entry.local_batch

    def unwatch(self) -> None:
        """Let go of forward's outputs, which may outlive the step."""
        for handle in self.watches:
            handle.remove()
        self.watches.clear()

    def make_room(self, num_buckets: int) -> None:
        """Places for the moments and norms of this many buckets."""
        kinds = (self.local_sqnorms, self.global_sqnorms, self.previous_dots)
        for places in (self.ready, self.done, *kinds):
            places.extend([None] * (num_buckets - len(places)))

    def has_bucket(self, index: int) -> bool:
        """Whether this bucket's gradient has come already, which it does once a step."""
        return index < len(self.ready) and self.ready[index] is not None

    def norms(self) -> list[list[torch.Tensor]]:
        """|g_i|^2, |g|^2, g . g' with the step before, by bucket and on its device, and a sample; [] if not taken."""
        kinds = (self.local_sqnorms, self.global_sqnorms, self.previous_dots, [self.sample])
        # Not `None in parts`, which compares tensors with None.
        found = [[part for part in parts if part is not None] for parts in kinds]
        return [taken if len(taken) == len(parts) else [] for taken, parts in zip(found, kinds, strict=True)]

    @property
    def backward_began(self) -> bool:
        """Whether the batch has been used up: the next training forward belongs to the next entry."""
        return self.backward_start is not None or self.synced

    def close(self, clock: Clock) -> StepRecord:
        """Durations instead of marks."""
        finished = self.synced and self.optimizer_end is not None and None not in self.done
        if not finished or self.forward_start is None or self.backward_start is None:
            return StepRecord(valid=False)
        load_s = self.entry.load_s
        before = clock.seconds(self.forward_start, self.backward_start)
        before += clock.seconds(self.optimizer_start, self.optimizer_end)
        done = [clock.seconds(self.backward_start, mark) for mark in self.done]
        other = max(0.0, clock.seconds(self.backward_start, self.optimizer_start) - max(done))
        if self.previous_end is not None:
            other += max(0.0, clock.seconds(self.previous_end, self.forward_start) - load_s)
        return StepRecord(
            before_s=before + (load_s if self.entry.loaded_alone else 0.0),
            ready_s=[clock.seconds(self.backward_start, mark) for mark in self.ready],
            done_s=done,
            load_s=load_s,
            other_s=other,
            valid=self.valid and not self.entry.is_padding,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The times of one finished step on one rank, seconds.

    Args:
        before_s: forward, optimizer, and loading where nothing else goes on meanwhile.
        ready_s, done_s: after the start of backward, bucket by bucket.
        load_s: waiting for the batch.
        other_s: between the steps, and between the last all-reduce and the optimizer: the user's own.
        valid: whether the step counts.
    """

    before_s: float = 0.0
    ready_s: list[float] = field(default_factory=list)
    done_s: list[float] = field(default_factory=list)
    load_s: float = 0.0
    other_s: float = 0.0
    valid: bool = True
