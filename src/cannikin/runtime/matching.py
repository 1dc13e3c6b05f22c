"""Which batch a forward pass belongs to.

A batch that the loader hands out waits in a queue; the first training forward after the backward of the batch before
takes it, so a loop that looks one batch ahead stays right.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from cannikin.errors import BatchMatchError
from cannikin.runtime.entries import BatchEntry
from cannikin.runtime.step import StepInProgress

__all__ = ["BatchQueue", "Part", "check_size"]


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

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_taken(self) -> int:
        """Number of the first step that has not been taken yet."""
        return self.next_step - len(self._entries)

    def add(self, entry: BatchEntry) -> None:
        """A batch is being yielded."""
        self._entries.append(entry)
        self.next_step = entry.step + 1

    def describe(self, local: int, total: int) -> BatchEntry:
        """Say what the next batch holds, in place of what the loader said where it has handed one out; which that is.

        The first dimension of such a batch is not checked: it may have been filtered, or have samples elsewhere.
        """
        if self._entries and self._entries[0].checked:
            self._entries[0] = replace(
                self._entries[0], local_batch=local, total_batch=total, items=None, checked=False
            )
            return self._entries[0]
        self.add(BatchEntry(step=self.next_step, local_batch=local, total_batch=total, checked=False))
        return self._entries[-1]

    def begin_pass(self) -> list[BatchEntry]:
        """Forget the batches of an abandoned pass that were never trained on; which those were.

        Those of a complete one are kept: a loop may look one batch ahead across the end of an epoch. Not so where none
        of several was trained on: that was an evaluation on the training data.
        """
        is_over = not self._is_complete or (not self._is_trained_on and len(self._entries) > 1)
        forgotten = list(self._entries) if is_over else []
        if forgotten:
            self._entries.clear()
        self._num_ahead = -1  # and so is one that had its forward but no backward
        self._is_complete = self._is_trained_on = False
        self._first_step = self.next_step
        return forgotten

    def complete_pass(self) -> None:
        """Every batch was handed out."""
        self._is_complete = True

    def is_over(self, step: StepInProgress | None) -> bool:
        """Whether the next forward is another batch's: after backward, or where a batch was passed over without one.

        Several forwards may go before one backward; but no batch is handed out between them.
        """
        return step is None or step.backward_began or len(self._entries) > self._num_ahead

    def take(self) -> BatchEntry:
        """The oldest batch."""
        if not self._entries:
            raise BatchMatchError(
                "no batch was handed out for this forward pass: iterate over this model's own HeteroDataLoader, "
                "or call model.use_batch(local, total) before forward"
            )
        entry = self._entries.popleft()
        self._num_ahead = len(self._entries)
        self._is_trained_on = self._is_trained_on or entry.step >= self._first_step
        return entry


def check_size(entry: BatchEntry, args: Any, kwargs: Any) -> None:
    """Refuse a forward whose first tensor has not as many samples as the batch has."""
    if not entry.checked or entry.is_padding:
        return
    tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim > 0), None)
    if tensor is not None and tensor.shape[0] != entry.local_batch:
        raise BatchMatchError(
            f"forward got {tensor.shape[0]} samples in dimension 0, the loader handed out {entry.local_batch} for "
            f"step {entry.step}: feed each batch as it comes, or call model.use_batch(local, total) before forward"
        )
