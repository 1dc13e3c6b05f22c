"""The batches that were handed out and wait for their forward, oldest first.

The first training forward after the backward of the batch before takes the next one, so a loop that looks one batch
ahead stays right. A script may say what the batch in hand holds, leave it out, or train on it once more. What it says
without a loader, ranks compare.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from cannikin.core.cutting import EpochState
from cannikin.errors import BatchMatchError, DisagreementError
from cannikin.runtime.entry import BatchEntry, PendingSum
from cannikin.runtime.exchange import Exchange
from cannikin.runtime.step import StepInProgress

_PLAIN = (torch.Tensor, Mapping, str, bytes, int, float)  # whose samples, if any, are seen
_SEQUENCES = (list, tuple)
_COMPARED = 30  # first steps without a loader in which ranks compare the numbers of use_batch()


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
            again = {"is_extra": True, "is_again": True, "load_s": 0.0}
            self.add(replace(entry, step=self.next_step, checked=False, **again))  # type: ignore[arg-type]
        else:
            self._entries[0] = replace(entry, checked=False)

    def describe(self, local: int, total: int) -> BatchEntry:
        """Say what the next batch holds, in place of what the loader said where it has handed one out; return it.

        The first dimension of such a batch is not checked: it may have been filtered, or have samples elsewhere.
        """
        if self._entries and self._entries[0].checked:
            handed = self._entries[0]
            _refuse_other_total(handed, local, total)
            entry = replace(handed, total_batch=total, items=None, sums=None, checked=False, is_told=True)
            if total > handed.total_batch:  # views or tokens
                entry = replace(entry, samples=(handed.local_batch, handed.total_batch))
            if not handed.is_padding:
                entry = replace(entry, local_batch=local, whole=local >= handed.local_batch)
                self._unsaid = None if self._unsaid is None else handed.local_batch - local
            self._entries[0] = entry
            return entry
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

    def skip_to(self, inputs: Iterable[torch.Tensor]) -> list[BatchEntry]:
        """Forget batches that are older than the one these tensors are of, where that is certain; return them."""
        if len(self._entries) < 2:
            return []
        return [self._entries.popleft() for _ in range(self._find(inputs) or 0)]

    def has(self, inputs: Iterable[torch.Tensor]) -> bool:
        """Return whether these tensors are certainly of a batch that waits."""
        return bool(self._entries) and self._find(inputs) is not None

    def leave_step(self) -> None:
        """Take note that the next forward is of a batch that waits, though the one in training has had no backward."""
        self._num_ahead = -1

    def _find(self, inputs: Iterable[torch.Tensor]) -> int | None:
        known = list(inputs)
        for index, entry in enumerate(self._entries):
            if any(_is_same(ref(), tensor) for ref in entry.tensors for tensor in known):
                return index
        return None

    def skip(self) -> BatchEntry:
        """Forget the oldest batch, which the script does not train on; return it."""
        if not self._entries:
            raise BatchMatchError("skip_batch() found no batch to skip: call it before the batch's forward, not after")
        return self._entries.popleft()

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
                "no batch was handed out for this forward pass: iterate over this model's own HeteroDataLoader "
                "(HeteroDataLoader.like(loader, model=model) makes one of a DataLoader), or draw by `for local, total "
                "in model.batches(...)`; for another forward and backward on the batch before, call model.use_batch() "
                "first; to evaluate, call model.eval() first"
            )
        entry = self._entries.popleft()
        self._num_ahead = len(self._entries)
        self._is_trained_on = self._is_trained_on or entry.step >= self._first_step
        return entry


class ToldTotals:
    """Refuses totals that the ranks' local batches do not make, where no loader's plan is there to compare them with.

    In the first steps ranks add up what their scripts said (`use_batch`), and look at the sums one step later.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._num_compared = 0
        self._underway: tuple[PendingSum, BatchEntry] | None = None

    def compare(self, entry: BatchEntry) -> None:
        """Begin to compare the numbers of a step whose gradients were weighted by them."""
        if self._num_compared < _COMPARED:
            self._num_compared += 1
            total = float(entry.total_batch)
            self._underway = self._exchange.start_sum(total, entry.local_batch, total**2), entry

    def check(self) -> None:
        """Raise an error on every rank where the numbers of the step before did not fit."""
        if self._underway is None:
            return
        (sums, entry), self._underway = self._underway, None
        (totals, batches, squares), num_ranks = sums.values(), self._exchange.world_size
        is_alike = math.isclose(totals**2, num_ranks * squares, rel_tol=1e-9)  # the mean's square, and the squares'
        if totals != num_ranks * batches or not is_alike:
            raise DisagreementError(
                f"use_batch({entry.local_batch}, {entry.total_batch}) for step {entry.step}: the ranks' local "
                f"batches make {batches:.0f}, which is not the total that every rank was told, so that gradients "
                "were weighted wrongly: pass the samples of all ranks together as total"
            )


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


def check_size(entry: BatchEntry, waiting: BatchQueue, args: Any, kwargs: Any, dim: int = 0) -> None:
    """Refuse a forward whose inputs have not as many samples as the batch has, in this dimension.

    That is told by the first tensor, or where all are inside of mappings and lists by these.
    """
    if not entry.checked or entry.is_padding:
        return
    inputs = [*args, *kwargs.values()]
    tensor = next((x for x in inputs if isinstance(x, torch.Tensor) and x.ndim > dim), None)
    if tensor is not None:
        sizes, got = {tensor.shape[dim]}, f"{tensor.shape[dim]} samples in dimension {dim}"
    else:
        sizes, got = _sizes_inside(inputs, dim)
    if not sizes or entry.local_batch in sizes:
        return
    if any(map(waiting.has_size, sizes)):
        advice = (
            f"{len(waiting)} batches were taken after it and not trained on, so that the forward may be one of "
            "those; to resume a run, load_state_dict() of the loader begins at the next sample; to leave a batch out, "
            "call model.skip_batch(); for any other batch, model.use_batch(local, total)"
        )
    elif min(sizes) < entry.local_batch:
        advice = (
            "parts of a batch are for model.micro_batches(batch); where samples were left out, call "
            "model.use_batch(local, total) before forward"
        )
    else:
        advice = (
            "feed each batch as it comes; where samples are in another dimension, give the model batch_dim= or call "
            "model.use_batch() before forward; where samples of another loader stand beside it, call that too, and "
            "draw them in proportion to model.local_batch, or they are weighted wrongly"
        )
    raise BatchMatchError(
        f"forward got {got}, the loader handed out {entry.local_batch} for step {entry.step}: {advice}"
    )


def _sizes_inside(inputs: Iterable[Any], dim: int) -> tuple[set[int], str]:
    """Return the sizes of tensors and lists inside of inputs, and these in words; no sizes where they tell nothing.

    A list may be one of samples or hold tensors that have them. Tensors of several sizes may be a graph's, and an
    object of another class, such as a packed sequence, may hold anything: these tell nothing.
    """
    found = [part for value in inputs for part in _walk(value)]
    rows = {part.shape[dim] for part in found if isinstance(part, torch.Tensor) and part.ndim > dim}
    lengths = {len(part) for part in found if isinstance(part, list) and part}
    is_known = all(part is None or isinstance(part, _PLAIN) or type(part) in _SEQUENCES for part in found)
    if not is_known or len(rows or lengths) != 1:
        return set(), ""
    tensors = [f"tensors of {size} samples in dimension {dim}" for size in rows]
    return rows | lengths, " and ".join(tensors + [f"lists of {length}" for length in sorted(lengths)])


def _walk(value: Any) -> Iterator[Any]:
    """Yield a value and all that is inside of it, as far as that is in mappings, plain lists and plain tuples."""
    yield value
    if isinstance(value, Mapping):
        value = value.values()
    elif type(value) not in _SEQUENCES:
        return
    for part in value:
        yield from _walk(part)
