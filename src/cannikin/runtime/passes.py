"""Passes over the data: one order per epoch for all ranks, cut step by step as the plans say.

What `HeteroDataLoader` and `HeteroBatchSampler` share. Samples come from a dataset with indices or from a stream; the
steps are cut the same way.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from cannikin.core.cutting import NO_TRAIL, Bookmark, EpochState, Trail, cut, least_local, make_job, num_steps
from cannikin.core.ordering import NUM_STORED, IndexOrder
from cannikin.core.values import Job, Plan
from cannikin.errors import InvalidInputError
from cannikin.runtime.entry import BatchEntry, BatchSource
from cannikin.runtime.fingerprints import length_of, list_fingerprint, list_names
from cannikin.runtime.loop import Loop
from cannikin.runtime.options import DrawOptions, LoaderOptions

NO_LENGTH = "an iterable dataset, or a sampler, without a length gives a loader without one"

_log = logging.getLogger("cannikin")

if TYPE_CHECKING:  # an engine makes draws, which are cut here
    from cannikin.runtime.engine import Engine


@contextmanager
def refusing(engine: Engine | None) -> Iterator[None]:
    """Let an error of this rank alone reach the others, which wait for it in `bind`, before it is raised here."""
    try:
        yield
    except Exception as error:
        if engine is not None:
            engine.refuse(error)
        raise


def job_of(engine: Engine, num_samples: int | None, batch_size: int, options: LoaderOptions | DrawOptions) -> Job:
    """Return what the planner may choose from, out of a loader's options; refuse data that would make no step."""
    job = make_job(
        num_ranks=engine.world_size,
        batch_size=batch_size,
        max_batch_size=options.get("max_batch_size"),
        local_batches=options.get("local_batches"),
        local_bounds=options.get("local_bounds"),
        num_samples=num_samples,
        drop_last=bool(options.get("drop_last", False)),
        has_batch_norm=engine.has_batch_norm,
    )
    if num_samples == 0:
        raise InvalidInputError("the dataset is empty: there is nothing to train on; check its path or split")
    if options.get("drop_last", False) and num_samples is not None and num_samples < job.batch_size:
        raise InvalidInputError(
            f"drop_last=True on a dataset of {num_samples} samples, less than one batch of "
            f"batch_size={job.batch_size}, leaves no step: lower batch_size or set drop_last=False"
        )
    if num_samples is not None and batch_size > num_samples and engine.rank == 0:
        _log.warning(
            "batch_size=%d is more than the %d samples of the dataset: every step is a whole pass over it; lower "
            "batch_size, which is the total over all ranks",
            batch_size,
            num_samples,
        )
    return job


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor | IndexOrder:
    """Return the samples' order in an epoch, the same on every rank, by position: slice it.

    Orders of up to `NUM_STORED` samples are stored; others are computed where they are needed.

    Examples:
        >>> epoch_order(4, seed=0, epoch=0, shuffle=False)[1:3].tolist()
        [1, 2]
        >>> sorted(epoch_order(4, seed=0, epoch=3, shuffle=True).tolist())
        [0, 1, 2, 3]
    """
    if not shuffle:
        return IndexOrder(num_samples, seed=None)
    if num_samples > NUM_STORED:
        return IndexOrder(num_samples, seed=seed, epoch=epoch)
    # Not seed + epoch, as DistributedSampler has it: there run 1 sees in epoch 0 what run 0 sees in epoch 1.
    (mixed,) = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64).tolist()
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(mixed))


@dataclass(frozen=True, kw_only=True)
class CutStep:
    """One step as one rank sees it.

    Args:
        entry: what the engine is told.
        start: where this rank's slice begins, counted from the first sample of the epoch.
        position: samples of the epoch that are handed out once this step is.
        shards: of each rank's stream, where each has its own.
        copies: how often this rank's samples are given: twice where it is the only one left, which BatchNorm cannot
            normalise alone. It counts once.
        trail: tells a later launch what has been handed out once this step is.
        is_last: whether nothing of the epoch is left after it; None where the epoch's length says so.
    """

    entry: BatchEntry
    start: int
    position: int
    shards: tuple[int, ...] = ()
    copies: int = 1
    trail: Trail = NO_TRAIL
    is_last: bool | None = None


class Cutter:
    """Cuts the steps of one pass in turn, asking for each step's plan as it goes.

    Args:
        feed: what the loader is bound to, which knows the plans.
        rank: whose slices these are.
        drop_last: leave out a last batch shorter than the plan's total.
        min_local: fewest samples a rank should get of a short last batch (`least_local`).
        lists: stands for the lists in the dataset (`Trail`).
    """

    def __init__(self, feed: Loop, rank: int, *, drop_last: bool, min_local: int, lists: int = 0) -> None:
        self._feed = feed
        self.rank = rank
        self._trail = Trail(lists=lists)
        self._drop_last = drop_last
        self._min_local = min_local
        self._step = feed.next_step
        self.num_cut = 0
        self.position = 0
        self.plan: Plan | None = None

    def look(self) -> int:
        """Return how many samples must be in sight to cut the next step: the plan's, and those it may not leave."""
        self.plan = self._feed.plan_at(self._step)
        ahead = 0 if self._drop_last or self._min_local == 1 else self._min_local
        return self.plan.total_batch + ahead

    def cut(self, position: int, remaining: int) -> CutStep | None:
        """Return the step at `position` with `remaining` samples left, after `look`; None where the pass is over."""
        plan = self.plan
        assert plan is not None, "look() comes first"
        if remaining < self.num_needed:
            return None
        if self._drop_last:
            remaining = plan.total_batch
        slices = cut(plan.local_batches, remaining, min_local=self._min_local)
        (start, count), total = slices[self.rank], sum(slices[-1])
        entry, copies = self._next(plan, count, total_batch=total, ends_pass=total == remaining)
        self.position = position + total
        return CutStep(entry=entry, start=position + start, position=self.position, copies=copies, trail=self._trail)

    @property
    def num_needed(self) -> int:
        """The fewest samples of which a step can be made, by the plan that `look` has seen."""
        assert self.plan is not None, "look() comes first"
        return self.plan.total_batch if self._drop_last else 1

    def take(self, shards: tuple[int, ...], count: int) -> CutStep:
        """Return a step in which this rank has `count` samples of its own stream, after `look`.

        `shards` has how many samples each rank has had before it, as far as its stream has not ended.
        """
        plan = self.plan
        assert plan is not None, "look() comes first"
        entry, copies = self._next(plan, count, total_batch=plan.total_batch, own=True, whole=False)
        after = tuple(n + b for n, b in zip(shards, plan.local_batches, strict=True))
        return CutStep(entry=entry, start=shards[self.rank], position=sum(after), shards=after, copies=copies)

    def _next(self, plan: Plan, count: int, **more: Any) -> tuple[BatchEntry, int]:
        """Return the entry of the next step, in which this rank has so many samples, and how often they are given."""
        # Plans that ask for single samples are the user's wish.
        copies = 2 if count == 1 < min(self._min_local, plan.local_batches[self.rank]) else 1
        entry = BatchEntry(step=self._step, local_batch=count, is_padding=count == 0, checked=copies == 1, **more)
        self._step += 1
        self.num_cut += 1
        return entry, copies


def two_of(samples: list[Any]) -> list[Any]:
    """Return two samples to pad with, if need be the same one twice: BatchNorm in training refuses one."""
    return samples if len(samples) != 1 else samples * 2


class Source(Protocol):
    """Where the samples of an epoch come from; `tagged` where ranks compare what they have read, step by step."""

    @property
    def tagged(self) -> bool:
        """Whether they do."""

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, as was last heard; None where that is not known."""

    def measure(self, epoch: int | None = None) -> None:
        """Look again how long an epoch is; where it is given, this one."""

    def steps(self, state: EpochState, cutter: Cutter) -> Iterator[tuple[CutStep, list[Any]]]:
        """Yield the steps from `state` to the epoch's end, each with what this rank gets of it."""


class IndexSource:
    """A dataset with indices: steps come with the indices of this rank's samples, padding with those of any two."""

    tagged = False

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle

    def measure(self, epoch: int | None = None) -> None:
        """Leave the length as it was said, which the order of samples depends on."""

    def steps(self, state: EpochState, cutter: Cutter) -> Iterator[tuple[CutStep, list[Any]]]:
        order = epoch_order(self.num_samples, seed=self._seed, epoch=state.epoch, shuffle=self._shuffle)
        position = state.position
        while position < self.num_samples:
            cutter.look()
            step = cutter.cut(position, self.num_samples - position)
            if step is None:
                return
            mine = order[step.start : step.start + step.entry.local_batch].tolist()
            yield step, mine * step.copies or two_of(order[:2].tolist())
            position = step.position


class Passes:
    """Pass after pass over the data: what sampler and loader share.

    Args:
        engine: of the model, not bound yet.
        source: where samples come from.
        bookmark: where in the data the passes are.
        drop_last: leave out a last batch shorter than the plan's total.
        data: what has the samples, of which lists are compared; None where there is nothing to compare.

    Attributes:
        compares_lists: whether ranks compare them when a pass begins.
    """

    def __init__(
        self, engine: Engine, source: Source, *, bookmark: Bookmark, drop_last: bool, data: Any = None
    ) -> None:
        self.bookmark = bookmark
        self._engine = engine
        self.source = source
        self._drop_last = drop_last
        self._data = data
        self._names = list_names(data)
        self._lists = 0
        self.compares_lists = True
        self._has_told = False  # that there are more samples than was said, or fewer
        self._min_local = least_local(engine.has_batch_norm)
        self._cutter: Cutter | None = None

    def bind(self, loader: BatchSource, job: Job) -> Loop:
        """Bind the loader whose passes these are to its model, and return what it hands batches out to."""
        # What ranks must agree on beside the job: an order of samples, and when plans take effect.
        settings = self.bookmark.identity
        settings["drop_last"] = int(self._drop_last)
        settings["prefetch_depth"] = loader.prefetch_depth
        settings["item_count"] = int(loader.item_count is not None)
        self.feed = self._engine.bind(loader, job, settings)
        return self.feed

    def settle_place(self) -> None:
        """Begin with the next epoch where the plan makes no step of what is left: loops count from `loader.epoch`."""
        place = self.bookmark.next
        if self.bookmark.underway or not place.position or self.source.num_samples is None:
            return
        self.source.measure(place.epoch)
        num_left = (self.source.num_samples or 0) - place.position
        plan = self.feed.plan_at(self.feed.next_step)
        # More samples than an order that may grow is said to have: that they have come shows that it has more.
        if self._steps_from(place.position, plan) or (num_left <= 0 and not self.bookmark.is_fixed):
            return
        self.bookmark.leave_rest()
        if num_left and self._engine.rank == 0:
            warnings.warn(
                f"of epoch {place.epoch}, {num_left} samples are left, fewer than the total "
                f"batch of {plan.total_batch}, and drop_last=True leaves them out: training goes on with epoch "
                f"{place.epoch + 1}. A scheduler that steps once per epoch has not taken that epoch's step",
                RuntimeWarning,
                stacklevel=4,
            )

    def open(self) -> None:
        """Begin a pass, on every rank: from here on its batches are cut."""
        self.bookmark.turn()
        self._lists = 0 if self._data is None else list_fingerprint(self._data, self._names)
        self._tell_if_changed()
        place = self.bookmark.next
        self.feed.begin_epoch(place.epoch, place.position, self._lists if self.compares_lists else 0)

    def steps(self) -> Iterator[tuple[CutStep, list[Any]]]:
        """Yield the steps of one pass; a resumed pass that has none left becomes one over the next epoch."""
        while True:
            state = self.bookmark.begin()
            if state.position and state.trail.lists not in (0, self._lists):
                warn_of_another_order(
                    self._engine.rank,
                    state,
                    "the lists in the dataset (files, labels, indices) are not those of the saved state",
                    "sort what is listed from folders, give random_split and shuffles a seed",
                )
            options: Any = {"drop_last": self._drop_last, "min_local": self._min_local}
            self._cutter = cutter = Cutter(self.feed, self._engine.rank, lists=self._lists, **options)
            for step, samples in self.source.steps(state, cutter):
                self._tell_if_longer(step)
                yield step, samples
            if cutter.num_cut or not state.position:
                return

    def _tell_if_changed(self) -> None:
        """Warn once where a dataset with indices has become longer or shorter than the order that is cut."""
        length = self.source.num_samples
        now = length_of(self._data) if self.bookmark.is_fixed else None
        if self._has_told or now in (None, length):
            return
        self._has_told = True
        if self._engine.rank == 0:
            warnings.warn(
                f"the dataset has {now} samples, and {length} when its loader was built: a pass goes over {length}, "
                "and others are never trained on; for a dataset that grows or shrinks give HeteroDataLoader "
                "sampler=torch.utils.data.RandomSampler(dataset), which is asked for its length in each pass",
                RuntimeWarning,
                stacklevel=2,
            )

    def _tell_if_longer(self, step: CutStep) -> None:
        """Warn once of a pass that has more samples than was said."""
        length = self.source.num_samples
        if self._has_told or length is None or step.position <= length:
            return
        self._has_told = True
        if self._engine.rank == 0:
            warnings.warn(
                f"this pass has more samples than the {length} that len() of its sampler or iterable dataset says: all "
                "of them are trained on, but len(loader) goes by that number; let __len__ say how many come in the "
                "epoch that set_epoch has set",
                RuntimeWarning,
                stacklevel=2,
            )

    def is_last(self, step: CutStep) -> bool:
        """Return whether nothing is left of the epoch after this step, as far as its length is known."""
        if step.is_last is not None:
            return step.is_last
        cutter = self._cutter
        if self.source.num_samples is None or cutter is None or cutter.plan is None or cutter.position > step.position:
            return False
        return self._steps_from(step.position, cutter.plan) == 0

    def __len__(self) -> int:
        """Steps of the pass underway, or else of the next, with the plan in force for all that are not cut yet."""
        if self.source.num_samples is None:
            raise TypeError(NO_LENGTH)
        cutter = self._cutter
        if self.bookmark.underway and cutter is not None and cutter.num_cut and cutter.plan is not None:
            return cutter.num_cut + self._steps_from(cutter.position, cutter.plan)
        self.source.measure()
        plan = self.feed.plan_at(self.feed.next_step)
        return self._steps_from(self.bookmark.next.position, plan) or self._steps_from(0, plan)

    def _steps_from(self, position: int, plan: Plan) -> int:
        remaining = max(0, (self.source.num_samples or 0) - position)
        min_local = min(self._min_local, *plan.local_batches)
        return num_steps(remaining, plan.total_batch, drop_last=self._drop_last, min_local=min_local)


def warn_of_another_order(rank: int, place: EpochState, what: str, advice: str) -> None:
    """Warn, on rank 0, that a saved place is one in another order of samples."""
    if rank == 0:
        warnings.warn(
            f"{what}, which is {place.position} samples into epoch {place.epoch}: in another order that is another "
            f"place, and samples of this epoch may come twice or not at all; {advice}. Where the change is meant, "
            'begin the epoch anew, by loader.load_state_dict({**loader.state_dict(), "position": 0}) before its loop',
            RuntimeWarning,
            stacklevel=3,
        )


class OverPasses:
    """What a loader and a sampler say of the passes that they make over the data."""

    _bookmark: Bookmark
    _passes: Passes

    def __len__(self) -> int:
        """Steps of this pass, or between passes of the next, under the current plan; a resumed pass is shorter."""
        return len(self._passes)

    @property
    def epoch(self) -> int:
        """The epoch underway; between passes the one that the next `iter()` begins."""
        return self._bookmark.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next `iter()` begins; a loaded position in that epoch is kept."""
        self._bookmark.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where in the data training is, in plain numbers, the same on every rank.

        A sampler counts batches that are cut. After a loop was broken off, it still says where: a run resumed from it
        goes on with that epoch. At an epoch's last batch it is at the beginning of the next epoch.
        """
        return self._bookmark.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, on any number of ranks: the next `iter()` begins at the next sample.

        With `drop_last`, where fewer samples are left than the total batch now has, it begins the next epoch.
        """
        self._bookmark.load_state_dict(state)
        self.settle_place()

    def settle_place(self) -> None:
        """Look again at what is left of a loaded epoch: called where the plan has become known, or another one."""
        self._passes.settle_place()
