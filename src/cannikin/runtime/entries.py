"""What passes between the loader, which hands out batches, and the engine, which matches them to backward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cannikin.core.records import Job, Plan

__all__ = ["BatchEntry", "BatchSource", "Feed"]


@dataclass(frozen=True, kw_only=True)
class BatchEntry:
    """One batch as the loader handed it out on this rank.

    Args:
        step: number of the step since training began, the same on all ranks.
        local_batch: b_i, this rank's samples in it; 0 where it is padding.
        total_batch: B of this step, which is less than the plan's for a short last batch.
        is_padding: there were fewer samples than ranks: this rank takes part with weight 0.
        items: weight of this rank's batch in items (tokens), where the user counts those; None counts samples.
        checked: whether dimension 0 of forward's first tensor must be `local_batch`.
        load_s: how long the loop waited for it.
        loaded_alone: whether nothing else went on meanwhile, as in a loader without workers.
    """

    step: int
    local_batch: int
    total_batch: int
    is_padding: bool = False
    items: float | None = None
    checked: bool = True
    load_s: float = field(default=0.0, compare=False)
    loaded_alone: bool = field(default=False, compare=False)


class Feed(Protocol):
    """What a loader needs of an engine."""

    @property
    def rank(self) -> int:
        """This process's rank in the model's process group."""

    @property
    def world_size(self) -> int:
        """n."""

    def refuse(self, error: Exception) -> None:
        """This rank cannot build its loader: tell the others, who wait in `bind`, before the error is raised here."""

    def bind(self, source: BatchSource, job: Job, settings: dict[str, int]) -> None:
        """Take this loader as the source of batches: check on all ranks that job and settings agree, make the planner.

        Raises the same error on every rank, within seconds of the last one's arrival.
        """

    def plan_at(self, step: int) -> Plan:
        """The plan in force at this step, asked when the step's indices are cut; asking again is allowed."""

    @property
    def next_step(self) -> int:
        """Number of the first step that no batch has been handed out for yet."""

    def hand_out(self, entry: BatchEntry) -> None:
        """A batch is being yielded: its backward is to be weighted and measured."""

    def begin_epoch(self, epoch: int, position: int) -> None:
        """A new iteration starts, at this sample of this epoch on every rank.

        Batches of an abandoned one that were never trained on are forgotten.
        """

    def complete_epoch(self) -> None:
        """Every batch of the epoch has been handed out, on all ranks: what must agree at its end may be made to."""

    def end_epoch(self) -> None:
        """The iterator ends or is closed: nothing of ours may be left outstanding. No new collective may start here."""


class BatchSource(Protocol):
    """What an engine needs of a loader."""

    @property
    def prefetch_depth(self) -> int:
        """Batches whose indices may be cut before the batch in training was yielded."""

    item_count: Callable[[object], float] | None

    @property
    def epoch(self) -> int:
        """The epoch underway; between passes the one that the next `iter()` begins."""
