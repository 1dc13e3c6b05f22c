"""Loaders that give each rank as many samples of each step as the plan in force says.

`HeteroDataLoader` is torch's DataLoader with such batches; `HeteroBatchSampler` is for a DataLoader of one's own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from cannikin.core.cutting import Bookmark, whole_number
from cannikin.errors import InvalidInputError
from cannikin.runtime.engine import Engine
from cannikin.runtime.options import DataLoaderOptions, LoaderOptions, check_names
from cannikin.runtime.passes import CutStep, IndexSource, Passes, Source, engine_of, job_of, refusing
from cannikin.runtime.step import BatchEntry
from cannikin.runtime.streams import CommonStream, OwnStream

ADVICE = {
    "sampler": "the order of samples is set by shuffle and seed and shared by all ranks; to choose samples, wrap the "
    "dataset in torch.utils.data.Subset",
    "batch_sampler": "the plan decides how many samples each rank gets; to keep a DataLoader of your own, give it a "
    "cannikin.HeteroBatchSampler",
}
# Of a stream, what happens after samples are read: in this process, once it is known how many are this rank's.
AFTER_READING = ("collate_fn", "pin_memory", "pin_memory_device")


class _OverPasses:
    """What a loader and a sampler say of the passes that they make over the data."""

    _passes: Passes

    def __len__(self) -> int:
        """Steps of this pass, or between passes of the next, under the current plan; a resumed pass is shorter."""
        return len(self._passes)

    @property
    def epoch(self) -> int:
        """The epoch underway; between passes the one that the next `iter()` begins."""
        return self._passes.bookmark.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next `iter()` begins; a loaded position in that epoch is kept."""
        self._passes.bookmark.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where in the data training is, in plain numbers, the same on every rank.

        A loader counts batches yielded, a sampler batches cut. After a loop was broken off, it still says where: a run
        resumed from it goes on with that epoch.
        """
        return self._passes.bookmark.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, on any number of ranks: the next `iter()` begins at the next sample."""
        self._passes.bookmark.load_state_dict(state)


class HeteroDataLoader(_OverPasses):
    """A DataLoader whose batches have the size that the plan gives this rank; an epoch gives every sample once.

        model = cannikin.HeteroDataParallel(net, optimizer)
        loader = cannikin.HeteroDataLoader(data, model=model, batch_size=64, max_batch_size=4096)
        for inputs, targets in loader:
            ...

    Every rank takes the same number of steps. A short last batch is split over the ranks in proportion to the plan; a
    rank left without samples gets two samples of the dataset that count for nothing (`is_padding`). Each `iter()`
    begins the next epoch unless `set_epoch()` or a loaded state says otherwise; a loop broken off abandons its epoch.
    With workers a new plan takes effect once the batches already asked for, `prefetch_depth`, are used up.

    Iterable datasets: either every rank reads *the same stream in the same order*, of which each keeps its slice, and
    all ranks stop at the first step at which they differ. Random numbers that reading draws from torch, Python and
    numpy are the same on every rank. Or, with `sharded`, each rank's stream is a part of the data of its own, of which
    it takes as many samples as the plan says; a rank whose stream has ended gets padding until all have, so that a pass
    gives each rank every sample of its stream once. Workers read samples, divided among them as under DataLoader;
    collation is in this process. `set_epoch` of the dataset is called where it has one. A resumed pass reads and skips
    what was consumed; with `sharded` on as many ranks as before.

    Args:
        dataset: map-style, or an IterableDataset.
        model: the HeteroDataParallel that trains on it, or the engine `cannikin.attach` returned.
        batch_size: the *total* batch over all ranks at the start.
        **options: see `LoaderOptions`, and `item_count`: `item_count(batch)` is the batch's weight in items, such as
            tokens, where the loss is a mean over those. All other keywords are passed on to torch's DataLoader:
            `num_workers`, `collate_fn`, `pin_memory`, `persistent_workers`, `prefetch_factor`, `generator` (which seeds
            workers) and what else it takes.
    """

    def __init__(self, dataset: Any, *, model: object, batch_size: int, **options: Unpack[DataLoaderOptions]) -> None:
        engine = engine_of(model)
        with refusing(engine):
            own, kwargs = _parted(options)
            self.item_count: Callable[[Any], float] | None = options.get("item_count")
            if self.item_count is not None and not callable(self.item_count):
                raise InvalidInputError(f"item_count={self.item_count!r} must be a callable that takes a batch")
            self.sharded = _is_own(dataset, own, engine.world_size)
            num_samples = None if self.sharded else _length(dataset)
            job = job_of(engine, num_samples, batch_size, own)
            self.dataset = dataset
            self.batch_size = job.batch_size
            self.is_padding = False
            seed, drop_last = own.get("seed", 0), own.get("drop_last", False)
            shuffle = _shuffled(dataset, own.get("shuffle"))
            bookmark = Bookmark(num_samples=num_samples, seed=seed, shuffle=shuffle, sharded=self.sharded)
            fetched: Dataset[Any] = dataset
            source: Source = IndexSource(num_samples or 0, seed=seed, shuffle=shuffle)
            if isinstance(dataset, IterableDataset):
                tagged = engine.world_size > 1 and own.get("sharded") is None
                source, kwargs = _stream(dataset, kwargs, engine, own=self.sharded, seed=seed, tagged=tagged)
                fetched = _AsRead()
            self._passes = Passes(engine, source, bookmark=bookmark, num_samples=num_samples, drop_last=drop_last)
            self._sampler = _NotedSampler(self._passes)
            self._loader = DataLoader(fetched, batch_sampler=self._sampler, **kwargs)
        self._feed = self._passes.bind(self, job)

    def __iter__(self) -> Iterator[Any]:
        self._check_free()
        return self._pass()

    def _check_free(self) -> None:
        if self._passes.bookmark.underway:
            raise InvalidInputError(
                f"this loader is already in a pass over epoch {self.epoch}, and ranks take steps together: finish "
                "that loop, break it off or close() its iterator first"
            )

    def _pass(self) -> Iterator[Any]:
        self._check_free()
        notes = self._sampler.start()
        self._feed.begin_epoch(self._passes.bookmark.next.epoch, self._passes.bookmark.next.position)
        try:
            start_s, batches = time.perf_counter(), iter(self._loader)
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    if self._passes.source.tagged:
                        self._feed.end_stream()
                    break
                except Exception:
                    if self._passes.source.tagged or self.sharded:
                        self._feed.give_up()
                    raise
                step = notes.popleft()
                entry = replace(step.entry, load_s=time.perf_counter() - start_s, loaded_alone=not self.prefetch_depth)
                if not self._feed.hand_out(self._weighed(entry, batch), batch):
                    break
                self._passes.bookmark.advance(step.position, step.shards)
                self.is_padding = step.entry.is_padding
                yield batch
                start_s = time.perf_counter()
            self._passes.bookmark.finish()
            self._feed.complete_epoch()
        finally:
            self._passes.bookmark.end()
            self._feed.end_epoch()

    def _weighed(self, entry: BatchEntry, batch: Any) -> BatchEntry:
        if self.item_count is None:
            return entry
        items = 0.0 if entry.is_padding else float(self.item_count(batch))
        if not (math.isfinite(items) and items >= 0):
            raise InvalidInputError(f"item_count returned {items} for the batch of step {entry.step}: it must be >= 0")
        return replace(entry, items=items)

    @property
    def prefetch_depth(self) -> int:
        """Batches whose indices are cut before the batch in training was yielded: num_workers * prefetch_factor."""
        return self._loader.num_workers * (self._loader.prefetch_factor or 0)


class HeteroBatchSampler(_OverPasses, Sampler[list[int]]):
    """This rank's indices of each step, for a DataLoader of your own: `DataLoader(data, batch_sampler=...)`.

        engine = cannikin.attach(ddp, optimizer)
        sampler = cannikin.HeteroBatchSampler(data, model=engine, batch_size=64, prefetch_depth=4)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)

    It tells the engine of a batch when it cuts the batch's indices, as it cannot see the batch come out of the
    DataLoader: training must take the batches in order and leave none out. For the same reason `state_dict()` counts
    batches that are cut, up to `prefetch_depth` more than were trained on: save between epochs, or with a DataLoader
    that keeps the sampler's state of each batch (torchdata's StatefulDataLoader), or use `HeteroDataLoader`, whose
    state counts what it yielded. Each `iter()` is a new pass, over the next epoch, and ends an older one.

    Args:
        data: the dataset, or its length.
        model: a HeteroDataParallel or the engine `attach` returned.
        batch_size: the *total* batch over all ranks at the start.
        prefetch_depth: the DataLoader's num_workers * prefetch_factor; a new plan waits for this many batches.
        **options: see `LoaderOptions`.
    """

    item_count: Callable[[Any], float] | None = None

    def __init__(
        self,
        data: Sized | int,
        *,
        model: object,
        batch_size: int,
        prefetch_depth: int = 0,
        **options: Unpack[LoaderOptions],
    ) -> None:
        engine = engine_of(model)
        with refusing(engine):
            own = ("model", "batch_size", "prefetch_depth", *LoaderOptions.__annotations__)
            check_names("HeteroBatchSampler", own, None, options)
            num_samples = whole_number("length of data", data if isinstance(data, int) else len(data), low=0)
            job = job_of(engine, num_samples, batch_size, options)
            self.prefetch_depth = whole_number("prefetch_depth", prefetch_depth, low=0)
            seed, drop_last = options.get("seed", 0), options.get("drop_last", False)
            shuffle = options.get("shuffle")
            shuffle = shuffle is None or bool(shuffle)
            bookmark = Bookmark(num_samples=num_samples, seed=seed, shuffle=shuffle)
            source = IndexSource(num_samples, seed=seed, shuffle=shuffle)
            self._passes = Passes(engine, source, bookmark=bookmark, num_samples=num_samples, drop_last=drop_last)
            self._pass: object = None
        self._feed = self._passes.bind(self, job)

    def __iter__(self) -> Iterator[list[int]]:
        if self._pass is not None:
            self._feed.end_epoch()
        this_pass = self._pass = object()
        place = self._passes.bookmark.next
        self._feed.begin_epoch(place.epoch, place.position)
        try:
            for step, indices in self._passes.steps():
                self._feed.hand_out(step.entry)
                self._passes.bookmark.advance(step.position)
                yield indices
                if self._pass is not this_pass:
                    raise InvalidInputError("this pass was ended by a later iter() over the sampler: use that one")
            self._passes.bookmark.finish()
        finally:
            if self._pass is this_pass:
                self._pass = None
                self._passes.bookmark.end()
                self._feed.end_epoch()

    @property
    def sampler(self) -> HeteroBatchSampler:
        """Itself: frameworks look for `set_epoch` on `batch_sampler.sampler`."""
        return self


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
    """Return the sample: a collate function of the module, so that it can be pickled."""
    return sample


def _stream(
    dataset: Any, kwargs: dict[str, Any], engine: Engine, *, own: bool, seed: int, tagged: bool
) -> tuple[Source, dict[str, Any]]:
    """Return where the steps of a stream come from, and which keywords are left for what happens after reading."""
    reading = {name: value for name, value in kwargs.items() if name not in AFTER_READING}
    after = {name: value for name, value in kwargs.items() if name in AFTER_READING}
    generator = None
    if not own and reading.get("generator") is None:
        generator = reading["generator"] = torch.Generator()
    reader = DataLoader(dataset, batch_size=None, collate_fn=_unchanged, **reading)
    if own:
        return OwnStream(dataset, reader, rank=engine.rank, num_ranks=engine.world_size), after
    return CommonStream(dataset, reader, seed=seed, generator=generator, tagged=tagged), after


def _parted(options: DataLoaderOptions) -> tuple[DataLoaderOptions, dict[str, Any]]:
    """Part what is ours from what torch's DataLoader gets; refuse what neither takes."""
    for name, advice in ADVICE.items():
        if options.get(name) is not None:
            raise InvalidInputError(f"HeteroDataLoader takes no {name}: {advice}")
    own = ("model", "batch_size", "item_count", "sharded", *LoaderOptions.__annotations__)
    check_names("HeteroDataLoader", own, DataLoader, options)
    if not options.get("in_order", True):
        raise InvalidInputError("in_order=False: batches must come in the order of steps, which all ranks share")
    ours: Any = {name: value for name, value in options.items() if name in own}
    return ours, {name: value for name, value in options.items() if name not in own}


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


def _shuffled(dataset: Any, shuffle: bool | None) -> bool:
    """Return whether we shuffle; refuse what an iterable dataset cannot have."""
    if not isinstance(dataset, IterableDataset):
        return shuffle is None or bool(shuffle)
    if shuffle:
        raise InvalidInputError("shuffle=True with an iterable dataset: its order is its own; shuffle inside of it")
    return False


def _is_own(dataset: Any, options: DataLoaderOptions, world_size: int) -> bool:
    """Return whether each rank's stream is its own; refuse what cannot be."""
    sharded, streams = options.get("sharded"), isinstance(dataset, IterableDataset)
    if sharded and not streams:
        raise InvalidInputError(
            "sharded=True is for iterable datasets: give every rank the whole dataset, of which the plan cuts each "
            "rank's batches, without a split by rank"
        )
    if sharded is False and world_size > 1 and _says_sharded(dataset):
        raise InvalidInputError(
            "sharded=False, but the iterable dataset is divided by rank: leave sharded= out, or give every rank the "
            "same stream (no split_dataset_by_node, nodesplitter=None)"
        )
    own = bool(sharded) or (streams and world_size > 1 and _says_sharded(dataset))
    if own and options.get("drop_last"):
        raise InvalidInputError(
            "drop_last=True where each rank's stream is its own: the streams end at different steps, and a rank whose "
            "stream has ended takes part with padding; leave drop_last out"
        )
    return own


def _says_sharded(dataset: Any) -> bool:
    """Return whether a stream says that it differs between ranks: `datasets` and `webdataset` streams do."""
    if getattr(getattr(dataset, "_distributed", None), "world_size", 1) > 1:
        return True
    pipeline = getattr(dataset, "pipeline", ())
    stages = pipeline if isinstance(pipeline, list | tuple) else ()
    return any(getattr(stage, "__name__", "") == "split_by_node" for stage in stages)
