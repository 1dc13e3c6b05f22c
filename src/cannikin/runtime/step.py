"""What a step is on one rank: the batch that the loader hands out, its place in the queue, and what is noted of it.

A batch that the loader hands out waits in a queue; the first training forward after the backward of the batch before
takes it, so a loop that looks one batch ahead stays right. From then on it is the step in progress, into which hooks
around forward, gradients and optimizer write, until it is closed and becomes a record.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from cannikin.core.cutting import EpochState
from cannikin.errors import BatchMatchError, DisagreementError
from cannikin.runtime.device import Device
from cannikin.runtime.passage import Passage, Segments


@dataclass(frozen=True, eq=False)
class PendingSum:
    """Numbers of every rank that are being added up, on the host, beside the training."""

    work: Any
    totals: torch.Tensor
    num_ranks: int
    finish: Callable[[Any], None]  # waits for the work

    def values(self) -> list[float]:
        """Return the sums, for which this waits; raise where a rank had no numbers to give (`Exchange.give_up`)."""
        self.finish(self.work)
        sums: list[float] = self.totals.tolist()
        if math.isnan(sums[-1]):
            raise DisagreementError("another rank could not read its samples of this step: its own error says why")
        return sums


@dataclass(frozen=True, kw_only=True)
class BatchEntry:
    """One batch as the loader handed it out on this rank.

    Args:
        step: number of the step since training began, the same on all ranks.
        local_batch: b_i, this rank's samples in it; 0 where it is padding.
        total_batch: B of this step, which is less than the plan's for a short last batch.
        is_padding: there were fewer samples than ranks: this rank takes part with weight 0.
        items: weight of this rank's batch in items (tokens), where the user counts those; None counts samples.
        tag: what the ranks should all have at the head of this step, as a number (`streams.fingerprint`); None where
            nothing need be compared.
        own: the samples are of a stream of this rank's own, so that only the sum over ranks tells the step's total.
        sums: `items`, and `tag` or the samples of an `own` stream, over all ranks; None where neither is needed.
        checked: whether forward's first tensor must have `local_batch` samples.
        whole: whether the local batch is all that this rank was to have, so that those of all ranks make the total;
            not so where the script has left samples out, or has a loader of its own.
        is_told: the numbers are the script's (`use_batch`), which may count other things than the loader's samples.
        is_extra: not a batch of the loader's: one of the user's own, or the batch before once more.
        ends_pass: whether it is the last of a pass, as far as all ranks' samples are one row.
        place: where in the data it begins, where the loader says so.
        tensors: weak references to what the loader yielded, as far as that is known.
        load_s: how long the loop waited for it.
        loaded_alone: whether nothing else went on meanwhile, as in a loader without workers.
    """

    step: int
    local_batch: int
    total_batch: int
    is_padding: bool = False
    items: float | None = None
    tag: int | None = field(default=None, compare=False)
    own: bool = False
    sums: PendingSum | None = field(default=None, compare=False)
    checked: bool = True
    whole: bool = True
    is_told: bool = False
    is_extra: bool = False
    ends_pass: bool = False
    place: EpochState | None = field(default=None, compare=False)
    tensors: tuple[weakref.ref[torch.Tensor], ...] = field(default=(), compare=False, repr=False)
    load_s: float = field(default=0.0, compare=False)
    loaded_alone: bool = field(default=False, compare=False)

    def count_all(self) -> int:
        """Return the samples of all ranks; of streams of their own this waits for what the others have."""
        return self.total_batch if self.sums is None else round(added_up(self, self.sums)[1])


class BatchSource(Protocol):
    """What an engine needs of a loader."""

    @property
    def prefetch_depth(self) -> int:
        """Batches whose indices may be cut before the batch in training was yielded."""

    item_count: Callable[[Any], float] | None

    @property
    def epoch(self) -> int:
        """The epoch underway; between passes the one that the next `iter()` begins."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A micro-batch in hand: its share of the local batch, and whether the last one will be synchronised."""

    share: float
    synced: bool


class BatchQueue:
    """Batches that were handed out and not trained on yet, oldest first."""

    def __init__(self) -> None:
        self.next_step = 0  # the first that no batch has been handed out for
        self._entries: deque[BatchEntry] = deque()
        self._num_ahead = 0  # batches that were handed out already when the one in training was taken
        self._is_complete = True  # the loader has handed out all of its pass
        self._first_step = 0  # of the pass
        self._is_trained_on = False  # some batch of the pass has been taken
        self._unsaid: int | None = 0  # samples of the loader's batch that use_batch() has left out; None once warned

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_taken(self) -> int:
        """Number of the first step that has not been taken yet."""
        return self.next_step - len(self._entries)

    @property
    def newest(self) -> BatchEntry | None:
        """The batch that was handed out last, unless it has been taken."""
        return self._entries[-1] if self._entries else None

    @property
    def place(self) -> EpochState | None:
        """Where in the data the oldest batch begins that waits; None where none does, or nobody trains on this pass."""
        if self._is_evaluation:
            return None
        return next((entry.place for entry in self._entries if entry.place is not None), None)

    @property
    def _is_evaluation(self) -> bool:
        """Whether the pass was handed out whole and none of several batches was trained on."""
        return self._is_complete and not self._is_trained_on and len(self._entries) > 1

    def has_size(self, local_batch: int) -> bool:
        """Return whether a batch of this size is waiting."""
        return any(entry.local_batch == local_batch for entry in self._entries)

    def add(self, entry: BatchEntry) -> None:
        """Put a batch that is being yielded at the end."""
        self._entries.append(entry)
        self.next_step = entry.step + 1
        if entry.checked and self._unsaid is not None:
            self._unsaid = 0

    def in_hand(self, step: StepInProgress | None) -> BatchEntry | None:
        """Return the batch that a training forward now would belong to, or that the last one belonged to."""
        if self._entries and self.is_over(step):
            return self._entries[0]
        return None if step is None else step.entry

    def use_in_hand(self, step: StepInProgress | None) -> None:
        """Let the next training forward be of the batch in hand, whatever its inputs look like.

        Where no other batch was handed out since the last backward, it is that batch once more.
        """
        entry = self.in_hand(step)
        if entry is None:
            raise BatchMatchError(
                "use_batch() without numbers means the batch in hand, and none was handed out: iterate over this "
                "model's own HeteroDataLoader or model.batches(...), or say use_batch(local, total)"
            )
        if step is not None and entry is step.entry:
            if not self.is_over(step):
                step.entry = replace(entry, checked=False)
                return
            self.add(replace(entry, step=self.next_step, checked=False, is_extra=True, load_s=0.0))
        else:
            self._entries[0] = replace(entry, checked=False)

    def describe(self, local: int, total: int) -> BatchEntry:
        """Say what the next batch holds, in place of what the loader said where it has handed one out; return it.

        The first dimension of such a batch is not checked: it may have been filtered, or have samples elsewhere.
        """
        if self._entries and self._entries[0].checked:
            handed = self._entries[0]
            _refuse_other_total(handed, local, total)
            said = {"total_batch": total, "items": None, "sums": None, "checked": False, "is_told": True}
            if not handed.is_padding:
                said |= {"local_batch": local, "whole": local >= handed.local_batch}
                self._unsaid = None if self._unsaid is None else handed.local_batch - local
            self._entries[0] = replace(handed, **said)  # type: ignore[arg-type]
            return self._entries[0]
        self._warn_of_slices(local)
        said = {"checked": False, "whole": False, "is_told": True, "is_extra": True}
        self.add(BatchEntry(step=self.next_step, local_batch=local, total_batch=total, **said))  # type: ignore[arg-type]
        return self._entries[-1]

    def _warn_of_slices(self, local: int) -> None:
        """Say so once where one batch of the loader is described piece by piece."""
        if self._unsaid is None or self._unsaid < local or not local:
            return
        self._unsaid = None
        warnings.warn(
            "use_batch() describes slices of one batch of the loader: gradients are right, but each slice is taken for "
            "a step, so that nothing adapts any more; write `for part in model.micro_batches(batch): "
            "loss(part).backward()` instead",
            RuntimeWarning,
            stacklevel=4,
        )

    def skip_to(self, inputs: Iterable[torch.Tensor]) -> int:
        """Forget batches that are older than the one these tensors are of, where that is certain; return how many."""
        if len(self._entries) < 2:
            return 0
        known = list(inputs)
        for index, entry in enumerate(self._entries):
            if any(_is_same(ref(), tensor) for ref in entry.tensors for tensor in known):
                for _ in range(index):
                    self._entries.popleft()
                return index
        return 0

    def skip(self) -> None:
        """Forget the oldest batch: the script does not train on it."""
        if not self._entries:
            raise BatchMatchError("skip_batch() found no batch to skip: call it before the batch's forward, not after")
        self._entries.popleft()

    def begin_pass(self) -> None:
        """Forget the batches of an abandoned pass that were never trained on.

        Those of a complete one are kept: a loop may look one batch ahead across the end of an epoch. Not so where none
        of several was trained on: that was an evaluation on the training data.
        """
        if not self._is_complete or self._is_evaluation:
            self._entries.clear()
        self._num_ahead = -1  # also forget a batch that had its forward but never its backward
        self._is_complete = self._is_trained_on = False
        self._first_step = self.next_step

    def complete_pass(self) -> None:
        """Take note that every batch was handed out."""
        self._is_complete = True
        if self._entries:  # a loop that looks ahead has got none, and is at the next batch all the same
            self._num_ahead = min(self._num_ahead, len(self._entries) - 1)

    def is_over(self, step: StepInProgress | None) -> bool:
        """Return whether the next forward is another batch's: after backward, or where a batch was passed over.

        Several forwards may go before one backward; but no batch is handed out between them.
        """
        return step is None or step.backward_began or len(self._entries) > self._num_ahead

    def entry_at(self, step: StepInProgress | None) -> BatchEntry | None:
        """Return the batch that the loop around this model is at, before and after the model trains on it.

        It is the oldest one as soon as a batch was handed out since the one in training was taken.
        """
        if self._entries and (step is None or len(self._entries) > self._num_ahead):
            return self._entries[0]
        return None if step is None else step.entry

    def take(self) -> BatchEntry:
        """Take the oldest batch out."""
        if not self._entries:
            raise BatchMatchError(
                "no batch was handed out for this forward pass: iterate over this model's own HeteroDataLoader, or "
                "draw by `for local, total in model.batches(...)`; for another forward and backward on the batch "
                "before, call model.use_batch() first"
            )
        entry = self._entries.popleft()
        self._num_ahead = len(self._entries)
        self._is_trained_on = self._is_trained_on or entry.step >= self._first_step
        return entry


def _is_same(kept: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one that was yielded, or begins at the same place in memory, as a view of it does."""
    if kept is None or kept is tensor:
        return kept is not None
    plain = type(kept) is type(tensor) is torch.Tensor and kept.layout == tensor.layout == torch.strided
    return plain and kept.numel() > 0 and kept.device == tensor.device and kept.data_ptr() == tensor.data_ptr()


def _refuse_other_total(handed: BatchEntry, local: int, total: int) -> None:
    """Refuse a total that cannot be: this rank has all of its samples, and all ranks are to have more than there are.

    Fewer may be: another rank may have left samples out. Other numbers may count views or tokens; whether those add up,
    ranks compare at the end of the window (`wire.check_cuts`).
    """
    if local == handed.local_batch and total > handed.total_batch and not handed.is_padding:
        raise BatchMatchError(
            f"use_batch({local}, {total}), but the loader handed out {handed.local_batch} of {handed.total_batch} "
            f"samples for step {handed.step}, which is less than the plan's total at the end of an epoch or before a "
            "new plan: call model.use_batch() without numbers, or use model.local_batch and model.total_batch"
        )


def different_streams(step: int) -> DisagreementError:
    """Return what to raise where ranks do not read the same samples in the same order."""
    return DisagreementError(
        f"the ranks have read different samples for step {step} (the first one differs, or one rank has no more), so "
        "that some are trained on twice and others never: let every rank read the same in the same order, without a "
        "split by rank and with shuffles of one seed; where each rank's stream is its own part, pass sharded=True"
    )


def added_up(entry: BatchEntry, sums: PendingSum) -> tuple[float, float]:
    """Return the items and the samples of all ranks; refuse a step of which ranks have not read the same samples."""
    items, second = sums.values()
    if entry.tag is not None and second != sums.num_ranks * entry.tag:
        raise different_streams(entry.step)
    return items, second if entry.own else entry.total_batch


def check_size(entry: BatchEntry, waiting: BatchQueue, args: Any, kwargs: Any, dim: int = 0) -> None:
    """Refuse a forward whose first tensor has not as many samples as the batch has, in this dimension."""
    if not entry.checked or entry.is_padding:
        return
    tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim > dim), None)
    if tensor is None or tensor.shape[dim] == entry.local_batch:
        return
    size = tensor.shape[dim]
    if waiting.has_size(size):
        advice = (
            f"{len(waiting)} batches were taken after it and not trained on, so that the forward may be one of "
            "those; to resume a run, load_state_dict() of the loader begins at the next sample; to leave a batch out, "
            "call model.skip_batch(); for any other batch, model.use_batch(local, total)"
        )
    elif size < entry.local_batch:
        advice = (
            "parts of a batch are for model.micro_batches(batch); where samples were left out, call "
            "model.use_batch(local, total) before forward"
        )
    else:
        advice = (
            "feed each batch as it comes; where samples are in another dimension, give the model batch_dim= or call "
            "model.use_batch() before forward"
        )
    raise BatchMatchError(
        f"forward got {size} samples in dimension {dim}, the loader handed out {entry.local_batch} for step "
        f"{entry.step}: {advice}"
    )


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
    is_stale: bool = False  # a forward in eval mode came after its backward: gradients now may be that one's
    part_size: int = 0  # samples of the largest part, where the batch is cut into micro-batches
    valid: bool = True

    @property
    def forward_size(self) -> int:
        """Samples that went through the network at once, at most."""
        return self.part_size or self.entry.local_batch

    @property
    def keeps_earlier(self) -> bool:
        """Whether the buckets have gradients of earlier batches in them, which have been weighted on their way in."""
        return self.accumulated > 1 and self.weight is not None

    def share(self) -> float:
        """Return this rank's part of the step's samples, or of its items, for whose sum over ranks this waits once."""
        entry = self.entry
        if entry.sums is None:
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


def is_alike(step: StepInProgress, earlier: StepInProgress) -> bool:
    """Return whether an earlier batch, whose gradient lies below this step's, was split alike and not reduced yet."""
    now, before = step.entry, earlier.entry
    same = (now.local_batch, now.total_batch) == (before.local_batch, before.total_batch)
    return same and not (earlier.synced or earlier.uneven_items)


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
