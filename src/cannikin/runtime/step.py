"""The step in training on one rank: what is noted of the batch that a forward has taken, until it becomes a record.

Hooks around forward, gradients and optimizer write into the step in progress; it is closed once the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from cannikin.runtime.device import Device
from cannikin.runtime.entry import BatchEntry, added_up
from cannikin.runtime.passage import Passage, Segments


@dataclass(frozen=True, kw_only=True)
class Part:
    """A micro-batch in hand: its share of the local batch, and whether the last one will be synchronised."""

    share: float
    synced: bool


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
    task: int | None = None  # torch's number of the backward that came to forward's outputs last
    watches: list[Any] = field(default_factory=list)  # handles to the hooks that tell of the start of backward
    item_total: float | None = None  # items on all ranks, once they have been added up
    sample_total: float = 0.0  # and samples
    accumulates: bool = False  # its gradients pile up on others, or under others, as its first forward has found
    weight: float | None = None  # None: this rank's share
    accumulated: int = 0  # batches whose gradients have piled up, this one's included; 0 before its backward
    norm_scale: float = 1.0
    loss_scale: torch.Tensor | None = None  # what a GradScaler multiplies this step's loss by
    next_scale: torch.Tensor | None = None  # and the next one's: smaller where this step's gradient was not finite
    take_norms: bool = True  # the same on all ranks
    uneven_items: bool = False  # this rank's share of items is not that of its samples, which the estimate counts
    norms_missing: bool = False  # of some bucket
    passage: Passage | None = None  # through the layers of a sharded module
    ready: list[Any] = field(default_factory=list)
    done: list[Any] = field(default_factory=list)
    ahead: tuple[Any, Any] | None = None  # another sum before the first bucket's: when it was ready, and its work
    noted: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)  # by column of `wire` and bucket
    sample: torch.Tensor | None = None  # of the last bucket, where norms are not taken
    optimizer_start: Any = None
    optimizer_end: Any = None
    synced: bool = False  # the communication hook has run
    is_through: bool = False  # its gradients came with the first model's own backward, which passed this one
    is_stale: bool = False  # a forward in eval mode came after its backward: gradients now may be that one's
    part_size: int = 0  # samples of the largest part, where the batch is cut into micro-batches
    valid: bool = True

    @property
    def forward_size(self) -> int:
        """Samples that went through the network at once, at most."""
        return self.part_size or self.entry.size

    @property
    def keeps_earlier(self) -> bool:
        """Whether the buckets have gradients of earlier batches in them, which have been weighted on their way in."""
        return self.accumulated > 1 and self.weight is not None

    def share(self) -> float:
        """Return this rank's part of the step's samples, or of its items, for whose sum over ranks this waits once."""
        entry = self.entry
        if entry.sums is None:
            self.uneven_items = entry.is_uneven
            return entry.local_batch / entry.total_batch
        if self.item_total is None:
            self.item_total, self.sample_total = added_up(entry, entry.sums)
            if entry.items is not None:
                by_samples, by_items = entry.local_batch * self.item_total, entry.items * self.sample_total
                # The estimate counts samples: it would take a share of items for noise.
                self.uneven_items = abs(by_items - by_samples) >= 0.01 * by_samples
        if entry.items is None:
            return entry.local_batch / self.sample_total
        return entry.items / self.item_total if self.item_total > 0 else 0.0

    def sample_share(self) -> float:
        """Return this rank's part of the step's samples."""
        if self.entry.own:
            self.share()  # the total is known once everybody has said how many samples it has
        return self.entry.local_batch / (self.sample_total or self.entry.total_batch)

    def unwatch(self) -> None:
        """Let go of forward's outputs, which may outlive the step."""
        for handle in self.watches:
            handle.remove()
        self.watches.clear()

    def make_room(self, num_buckets: int) -> None:
        """Make places for the moments of this many buckets."""
        for places in (self.ready, self.done):
            places.extend([None] * (num_buckets - len(places)))

    def has_bucket(self, index: int) -> bool:
        """Return whether this bucket's gradient has come already, which it does once per step."""
        return index < len(self.ready) and self.ready[index] is not None

    def norms(self) -> dict[str, list[torch.Tensor]]:
        """Return what was noted of every bucket, by name and on the device, and a sample of the last bucket."""
        found: dict[str, list[torch.Tensor]] = {}
        for name, bucket in sorted(self.noted) if not self.norms_missing else ():
            found.setdefault(name, []).append(self.noted[name, bucket])
        if len(found.get("previous_dot", ())) < len(self.ready):  # DDP has made other buckets since the step before
            found.pop("previous_dot", None)
        return found if self.sample is None else {**found, "sample": [self.sample]}

    @property
    def has_norms(self) -> bool:
        """Whether norms were taken on all ranks; this one may have had no bucket's sum to read."""
        return self.synced and self.take_norms and not self.norms_missing

    @property
    def backward_began(self) -> bool:
        """Whether the batch has been used up: the next training forward belongs to the next entry."""
        return self.backward_start is not None or self.synced

    def close(self, device: Device) -> StepRecord:
        """Return durations instead of marks."""
        reduced = zip(self.ready, self.done, strict=True)  # a layer that no forward has used brings no gradient
        finished = (
            self.synced and self.optimizer_end is not None and all((a is None) == (b is None) for a, b in reduced)
        )
        if not finished or self.forward_start is None or self.backward_start is None:
            return StepRecord(valid=False)
        load_s, segments = self.entry.load_s, None
        update = device.seconds(self.optimizer_start, self.optimizer_end)
        update += load_s if self.entry.loaded_alone else 0.0
        before = device.seconds(self.forward_start, self.backward_start) + update
        if self.passage is None:
            ready = [device.seconds(self.backward_start, mark) for mark in self.ready]
            done = device.ends_s(self.backward_start, ready, self.done, self.ahead)
        else:
            segments = self.passage.close(self.backward_start, update)
            if segments is None:
                return StepRecord(valid=False)
            ready, done = segments.ready_s, segments.done_s
        other = max(0.0, device.seconds(self.backward_start, self.optimizer_start) - max(done))
        if self.previous_end is not None:
            other += max(0.0, device.seconds(self.previous_end, self.forward_start) - load_s)
        waited = 0.0 if segments is None else before - segments.before_s
        return StepRecord(
            before_s=before - waited,
            ready_s=ready,
            done_s=[moment + waited for moment in done],
            load_s=load_s,
            other_s=other,
            segments=segments,
            valid=self.valid and not self.entry.is_padding,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The times of one finished step on one rank, seconds.

    Args:
        before_s: forward, optimizer, and loading where nothing else goes on meanwhile.
        ready_s, done_s: after the start of backward, bucket by bucket. Of a sharded module, `before_s` and `ready_s`
            are compute alone, and all that forward has waited comes before `done_s`.
        load_s: waiting for the batch.
        other_s: between the steps, and between the last all-reduce and the optimizer: the user's own.
        segments: of a sharded module.
        valid: whether the step counts.
    """

    before_s: float = 0.0
    ready_s: list[float] = field(default_factory=list)
    done_s: list[float] = field(default_factory=list)
    load_s: float = 0.0
    other_s: float = 0.0
    segments: Segments | None = None
    valid: bool = True
