"""`HeteroDataLoader`: torch's DataLoader, giving each rank as many samples of each step as the plan in force says."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from cannikin.errors import InvalidInputError
from cannikin.runtime.arguments import check_names
from cannikin.runtime.cutting import Bookmark, Bounds, make_job
from cannikin.runtime.entries import BatchEntry
from cannikin.runtime.passes import (
    CutStep,
    IndexSource,
    Passes,
    Source,
    StreamSource,
    bind_settings,
    check_length,
    feed_has_batch_norm,
    feed_of,
    refusing,
)

__all__ = ["HeteroDataLoader"]

ADVICE = {
    "sampler": "the order of samples is set by shuffle and seed and shared by all ranks; to choose samples, wrap the "
    "dataset in torch.utils.data.Subset",
    "batch_sampler": "the plan decides how many samples each rank gets; to keep a DataLoader of your own, give it a "
    "cannikin.HeteroBatchSampler",
}
# Of a stream, what happens after samples are read: in this process, once it is known how many are this rank's.
AFTER_READING = ("collate_fn", "pin_memory", "pin_memory_device")


class HeteroDataLoader:
    """A DataLoader whose batches have the size that the plan gives this rank; an epoch gives every sample once.

        model = cannikin.HeteroDataParallel(net, optimizer)
        loader = cannikin.HeteroDataLoader(data, model=model, batch_size=64, max_batch_size=4096)
        for inputs, targets in loader:
            ...

    Every rank takes the same number of steps. A short last batch is split over the ranks in proportion to the plan; a
    rank left without samples gets two samples of the dataset that count for nothing (`is_padding`). Each `iter()`
    begins the next epoch unless `set_epoch()` or a loaded state says otherwise; a loop broken off abandons its epoch.
    With workers a new plan takes effect once the batches already asked for, `prefetch_depth`, are used up.

    Iterable datasets: every rank must read *the same stream in the same order*, of which each keeps its slice: take
    out `split_dataset_by_node`, `split_by_node` and the like (those of datasets and webdataset are recognised and
    refused; others cannot be seen). Every rank thus reads all of the data. Workers read samples, divided among them
    as under DataLoader; collation is in this process. `set_epoch` of the dataset is called where it has one. A resumed
    pass reads and skips what was consumed.

    Args:
        dataset: map-style, or an IterableDataset.
        model: the HeteroDataParallel that trains on it, or the engine `cannikin.attach` returned.
        batch_size: the *total* batch over all ranks at the start.
        max_batch_size: the largest total batch, never more than the dataset; None keeps the total at `batch_size`.
        local_batches: one local batch a rank, together `batch_size`: pins the split, and nothing adapts.
        local_bounds: `(low, high)` of every local batch, or one pair a rank; None for a side leaves it open. The
            default is 1 at least, 2 with BatchNorm in the model.
        item_count: `item_count(batch)` is the batch's weight in items, such as tokens, where the loss is a mean over
            those; None weights by samples.
        shuffle: None is True, and False for an iterable dataset, whose order is its own.
        seed: what orders the samples, along with the epoch.
        drop_last: leave out a last batch shorter than the total batch.
        **dataloader_kwargs: `num_workers`, `collate_fn`, `pin_memory`, `persistent_workers`, `prefetch_factor`,
            `generator` (which seeds workers) and what else torch's DataLoader takes.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        model: object,
        batch_size: int,
        max_batch_size: int | None = None,
        local_batches: Sequence[int] | None = None,
        local_bounds: Bounds | None = None,
        item_count: Callable[[Any], float] | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        **dataloader_kwargs: Any,
    ) -> None:
        self._feed = feed_of(model)
        with refusing(self._feed):
            _check_kwargs(dataloader_kwargs)
            if item_count is not None and not callable(item_count):
                raise InvalidInputError(f"item_count={item_count!r} must be a callable that takes a batch")
            num_samples = _length(dataset)
            job = make_job(
                num_ranks=self._feed.world_size,
                batch_size=batch_size,
                max_batch_size=max_batch_size,
                local_batches=local_batches,
                local_bounds=local_bounds,
                num_samples=num_samples,
                has_batch_norm=feed_has_batch_norm(self._feed),
            )
            if num_samples is not None:
                check_length(num_samples, job.batch_size, drop_last=drop_last)
            self.dataset = dataset
            self.batch_size = job.batch_size
            self.item_count = item_count
            self.is_padding = False
            shuffle = _shuffled(dataset, shuffle, self._feed.world_size)
            self._bookmark = Bookmark(num_samples=num_samples, seed=seed, shuffle=shuffle)
            source, fetched, dataloader_kwargs = _source(dataset, seed, shuffle, dataloader_kwargs)
            passes = Passes(self._feed, source, bookmark=self._bookmark, num_samples=num_samples, drop_last=drop_last)
            self._sampler = _NotedSampler(passes)
            self._loader = DataLoader(fetched, batch_sampler=self._sampler, **dataloader_kwargs)
        self._feed.bind(self, job, bind_settings(self, self._bookmark, drop_last=drop_last))

    def __iter__(self) -> Iterator[Any]:
        self._check_free()
        return self._pass()

    def _check_free(self) -> None:
        if self._bookmark.underway:
            raise InvalidInputError(
                f"this loader is already in a pass over epoch {self.epoch}, and ranks take steps together: finish "
                "that loop, break it off or close() its iterator first"
            )

    def _pass(self) -> Iterator[Any]:
        self._check_free()
        notes = self._sampler.start()
        self._feed.begin_epoch(self._bookmark.next.epoch, self._bookmark.next.position)
        try:
            start_s, batches = time.perf_counter(), iter(self._loader)
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                step = notes.popleft()
                entry = replace(step.entry, load_s=time.perf_counter() - start_s, loaded_alone=not self.prefetch_depth)
                self._feed.hand_out(self._weighed(entry, batch))
                self._bookmark.advance(step.position)
                self.is_padding = step.entry.is_padding
                yield batch
                start_s = time.perf_counter()
            self._bookmark.finish()
            self._feed.complete_epoch()
        finally:
            self._bookmark.end()
            self._feed.end_epoch()

    def _weighed(self, entry: BatchEntry, batch: Any) -> BatchEntry:
        if self.item_count is None:
            return entry
        items = 0.0 if entry.is_padding else float(self.item_count(batch))
        if not (math.isfinite(items) and items >= 0):
            raise InvalidInputError(f"item_count returned {items} for the batch of step {entry.step}: it must be >= 0")
        return replace(entry, items=items)

    def __len__(self) -> int:
        """Steps of this pass, or between passes of the next, under the current plan; a resumed pass is shorter."""
        return len(self._sampler)

    @property
    def prefetch_depth(self) -> int:
        """Batches whose indices are cut before the batch in training was yielded: num_workers * prefetch_factor."""
        return self._loader.num_workers * (self._loader.prefetch_factor or 0)

    @property
    def epoch(self) -> int:
        """The epoch underway; between passes the one that the next `iter()` begins."""
        return self._bookmark.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next `iter()` begins; a loaded position in that epoch is kept."""
        self._bookmark.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where in the data training is, counting the batches yielded; plain numbers, the same on every rank.

        After a loop was broken off, it still says where: a run resumed from it goes on with that epoch.
        """
        return self._bookmark.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, on any number of ranks: the next `iter()` begins at the next sample."""
        self._bookmark.load_state_dict(state)


class _NotedSampler(Sampler[list[Any]]):
    """The batch sampler under the loader: notes each step it cuts, to be paired with the batch that comes of it."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._notes: deque[CutStep] = deque()

    def start(self) -> deque[CutStep]:
        """Notes of a new pass."""
        self._notes = deque()
        return self._notes

    def __iter__(self) -> Iterator[list[Any]]:
        for step, batch in self._passes.steps():
            self._notes.append(step)
            yield batch

    def __len__(self) -> int:
        return len(self._passes)


class _AsRead(Dataset[Any]):
    """Stands where DataLoader looks samples up by index, for samples that have been read already."""

    def __getitem__(self, sample: Any) -> Any:
        return sample

    def __getitems__(self, samples: list[Any]) -> list[Any]:
        return samples


def _unchanged(sample: Any) -> Any:
    """A collate function of single samples that does nothing (a module function, to be picklable)."""
    return sample


def _source(
    dataset: Any, seed: int, shuffle: bool, kwargs: dict[str, Any]
) -> tuple[Source, Dataset[Any], dict[str, Any]]:
    """Where steps come from, what DataLoader fetches from, and the keywords left for it."""
    if not isinstance(dataset, IterableDataset):
        return IndexSource(len(dataset), seed=seed, shuffle=shuffle), dataset, kwargs
    reading = {name: value for name, value in kwargs.items() if name not in AFTER_READING}
    reader = DataLoader(dataset, batch_size=None, collate_fn=_unchanged, **reading)
    after = {name: value for name, value in kwargs.items() if name in AFTER_READING}
    return StreamSource(dataset, reader), _AsRead(), after


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    for name, advice in ADVICE.items():
        if kwargs.get(name) is not None:
            raise InvalidInputError(f"HeteroDataLoader takes no {name}: {advice}")
    check_names(HeteroDataLoader, DataLoader, kwargs)
    if not kwargs.get("in_order", True):
        raise InvalidInputError("in_order=False: batches must come in the order of steps, which all ranks share")


def _length(dataset: Any) -> int | None:
    if isinstance(dataset, IterableDataset):
        try:
            return len(dataset)  # type: ignore[arg-type]  # it has one or raises
        except (TypeError, NotImplementedError):
            return None
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InvalidInputError(
            f"dataset is a {type(dataset).__name__}: it must have __len__ and __getitem__, or be a "
            "torch.utils.data.IterableDataset; put a generator into one of those"
        )
    return len(dataset)


def _shuffled(dataset: Any, shuffle: bool | None, world_size: int) -> bool:
    """Whether we shuffle; refuses what an iterable dataset cannot have."""
    if not isinstance(dataset, IterableDataset):
        return shuffle is None or bool(shuffle)
    if shuffle:
        raise InvalidInputError("shuffle=True with an iterable dataset: its order is its own; shuffle inside of it")
    if world_size > 1 and _is_sharded(dataset):
        raise InvalidInputError(
            "the iterable dataset is already divided by rank, but how many samples each rank gets changes from step to "
            "step: give every rank the same stream (no split_dataset_by_node, nodesplitter=None)"
        )
    return False


def _is_sharded(dataset: Any) -> bool:
    """Whether a stream says that it differs between ranks: `datasets` and `webdataset` streams do."""
    if getattr(getattr(dataset, "_distributed", None), "world_size", 1) > 1:
        return True
    pipeline = getattr(dataset, "pipeline", ())
    stages = pipeline if isinstance(pipeline, list | tuple) else ()
    return any(getattr(stage, "__name__", "") == "split_by_node" for stage in stages)
