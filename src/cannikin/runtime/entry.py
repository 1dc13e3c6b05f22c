"""A batch as the loader hands it out on one rank, and what all ranks add up of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from cannikin.core.cutting import EpochState
from cannikin.errors import DisagreementError


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
        head: what this rank's `own` stream began with, as a number, in the step by which every rank has read that far;
            None in other steps, and where all of it is alike.
        sums: `items`, `tag` or the samples of an `own` stream, and `head`, over all ranks; None where none is needed.
        checked: whether forward's first tensor must have `local_batch` samples.
        whole: whether the local batch is all that this rank was to have, so that those of all ranks make the total;
            not so where the script has left samples out, or has a loader of its own.
        is_told: the numbers are the script's (`use_batch`).
        samples: the loader's own numbers, of this rank and of all, where the script's count other things, such as views
            or tokens: times, memory and noise go by these.
        is_extra: not a batch of the loader's: one of the user's own, or the batch before once more.
        is_again: the batch before once more.
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
    head: int | None = field(default=None, compare=False)
    sums: PendingSum | None = field(default=None, compare=False)
    checked: bool = True
    whole: bool = True
    is_told: bool = False
    samples: tuple[int, int] | None = None
    is_extra: bool = False
    is_again: bool = False
    ends_pass: bool = False
    place: EpochState | None = field(default=None, compare=False)
    tensors: tuple[weakref.ref[torch.Tensor], ...] = field(default=(), compare=False, repr=False)
    load_s: float = field(default=0.0, compare=False)
    loaded_alone: bool = field(default=False, compare=False)

    @property
    def size(self) -> int:
        """This rank's samples, by which its times and its memory are known."""
        return self.local_batch if self.samples is None else self.samples[0]

    @property
    def is_uneven(self) -> bool:
        """Whether this rank's share by the script's numbers is not that of its samples, which the estimate counts."""
        if self.samples is None:
            return False
        by_samples = self.samples[0] * self.total_batch
        return abs(self.local_batch * self.samples[1] - by_samples) >= 0.01 * by_samples

    def count_all(self) -> int:
        """Return the samples of all ranks; of streams of their own this waits for what the others have.

        Other sums are not waited for: a script that asks in each step would count its wait as its own time.
        """
        return round(added_up(self, self.sums)[1]) if self.own and self.sums is not None else self.total_batch


class BatchSource(Protocol):
    """What an engine needs of a loader."""

    @property
    def prefetch_depth(self) -> int:
        """Batches whose indices may be cut before the batch in training was yielded."""

    item_count: Callable[[Any], float] | None

    @property
    def epoch(self) -> int:
        """The epoch underway; between passes the one that the next `iter()` begins."""

    def settle_place(self) -> None:
        """Look again at what is left of a loaded epoch: another plan may make no step of it."""


def different_streams(step: int) -> DisagreementError:
    """Return what to raise where ranks do not read the same samples in the same order."""
    return DisagreementError(
        f"the ranks have read different samples for step {step} (the first one differs, or one rank has no more), so "
        "that some are trained on twice and others never: let every rank read the same in the same order, without a "
        "split by rank and with shuffles of one seed; where each rank's stream is its own part, pass sharded=True"
    )


def added_up(entry: BatchEntry, sums: PendingSum) -> tuple[float, float]:
    """Return the items and the samples of all ranks; refuse a step of which ranks have not read the same samples."""
    items, second, _ = sums.values()
    if entry.tag is not None and second != sums.num_ranks * entry.tag:
        raise different_streams(entry.step)
    return items, second if entry.own else entry.total_batch


def begins_alike(entry: BatchEntry) -> bool:
    """Return whether the streams that ranks have of their own were found to begin with the same samples."""
    if entry.head is None or entry.sums is None or entry.sums.num_ranks == 1:
        return False
    return entry.sums.values()[2] == entry.sums.num_ranks * entry.head
