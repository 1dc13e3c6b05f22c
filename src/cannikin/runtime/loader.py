"""`HeteroDataLoader`: a DataLoader that gives each rank as many samples of each step as the plan in force says."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self, Unpack

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    default_collate,
)

from cannikin.core.cutting import Bookmark, num_steps, whole_number
from cannikin.errors import InvalidInputError
from cannikin.runtime.ending import PatientWorker
from cannikin.runtime.engine import Engine
from cannikin.runtime.entry import BatchEntry
from cannikin.runtime.fingerprints import list_fingerprint
from cannikin.runtime.loop import Loop
from cannikin.runtime.options import DataLoaderOptions, LoaderOptions, check_names, engine_of
from cannikin.runtime.passes import NO_LENGTH, CutStep, IndexSource, OverPasses, Passes, Source, job_of, refusing
from cannikin.runtime.streams import CommonStream, OwnStream, restore_sampler, sampler_state
from cannikin.runtime.taken_apart import keywords_of

ADVICE = {
    "batch_sampler": "the plan decides how many samples each rank gets; to keep a DataLoader of your own, give it a "
    "cannikin.HeteroBatchSampler",
}
# Of a stream, what happens after samples are read: in this process, once it is known how many are this rank's.
AFTER_READING = ("collate_fn", "pin_memory", "pin_memory_device")
# What scripts and frameworks read from a DataLoader, with its defaults.
READ: dict[str, Any] = {
    "num_workers": 0,
    "drop_last": False,
    "collate_fn": default_collate,
    "pin_memory": False,
    "pin_memory_device": "",
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": None,
    "persistent_workers": False,
}


class HeteroDataLoader(OverPasses):
    """A DataLoader whose batches have the size that the plan gives this rank; an epoch gives every sample once.

        model = cannikin.HeteroDataParallel(net, optimizer)
        loader = cannikin.HeteroDataLoader(data, model=model, batch_size=64, max_batch_size=4096)
        for inputs, targets in loader:
            ...

    Every rank takes the same number of steps. A short last batch is split over the ranks in proportion to the plan; a
    rank left without samples gets two samples of the dataset that count for nothing (`is_padding`). With BatchNorm,
    which cannot normalise one sample, the last two steps share theirs where one would be left. `is_last` is whether a
    pass of known length ends with this batch. Each `iter()` begins the next epoch unless `set_epoch()` or a loaded
    state says otherwise; a loop broken off abandons its epoch.
    With workers a new plan takes effect once the batches already asked for, `prefetch_depth`, are used up.

    Iterable datasets: either every rank reads *the same stream in the same order*, of which each keeps its slice, and
    all ranks stop at the first step at which they differ. Random numbers that reading draws from torch, Python and
    numpy are the same on every rank. Or, with `sharded`, each rank's stream is a part of the data of its own, of which
    it takes as many samples as the plan says; a rank whose stream has ended gets padding until all have, so that a pass
    gives each rank every sample of its stream once. Workers read samples, divided among them as under DataLoader;
    collation is in this process. `set_epoch` of the dataset is called where it has one. A resumed pass reads and skips
    what was consumed; with `sharded` on as many ranks as before.

    A `sampler` gives the order over all ranks, of which the plan cuts batches: weighted, by length, a curriculum. The
    random numbers that it draws from torch, Python and numpy depend on `seed` and the epoch alone; `set_epoch`,
    `state_dict` and `load_state_dict` of it are called where it has them. Of a DistributedSampler, which may stay in
    the script, only `shuffle`, `seed` and `set_epoch` count.

    Args:
        dataset: map-style, or an IterableDataset.
        batch_size: the *total* batch over all ranks at the start.
        model: the HeteroDataParallel that trains on it, or the engine `cannikin.attach` returned. Where the model is
            made later, leave it out and give it the loader: `HeteroDataParallel(net, optimizer, loader=loader)`.
        **options: see `LoaderOptions` and `DataLoaderOptions`. All other keywords are passed on to torch's DataLoader:
            `num_workers`, `collate_fn`, `pin_memory`, `persistent_workers`, `prefetch_factor`, `generator` (which seeds
            workers) and what else it takes.
    """

    def __init__(
        self, dataset: Any, *, batch_size: int, model: object = None, **options: Unpack[DataLoaderOptions]
    ) -> None:
        engine = None if model is None else engine_of(model)
        with refusing(engine):
            self._options, self._kwargs = _parted(options)
            self.item_count: Callable[[Any], float] | None = options.get("item_count")
            if self.item_count is not None and not callable(self.item_count):
                raise InvalidInputError(f"item_count={self.item_count!r} must be a callable that takes a batch")
            self.dataset = dataset
            self.batch_size = whole_number("batch_size", batch_size, low=1)
            self.is_padding, self.is_last = False, False
            self.sharded = _is_own(dataset, self._options)
            self._order = _order(dataset, options)
            self._num_samples = None if self.sharded else _length(dataset, self._order)
            seed, shuffle = options.get("seed", 0), self._order is None and _shuffled(dataset, options.get("shuffle"))
            self._told = options.get("sampler") if self._order is None else None
            if self._told is not None:
                seed, shuffle = options.get("seed", self._told.seed), self._told.shuffle
            self._told_epoch = 0  # that the DistributedSampler was at in the pass before
            self._bookmark = Bookmark(
                num_samples=self._num_samples,
                seed=seed,
                shuffle=shuffle,
                sharded=self.sharded,
                is_fixed=self._order is None and not isinstance(dataset, IterableDataset),
            )
            self._shuffle, self._seed = shuffle, seed
            given = {name: value for name, value in options.items() if name in READ and value is not None}
            self._read = {**READ, "prefetch_factor": 2 if options.get("num_workers") else None, **given}
        self._feed: Loop | None = None
        self._this_pass: object = None  # the one underway
        self._reader: DataLoader[Any] | None = None  # of a stream
        if engine is not None:
            self.bind(engine)

    @classmethod
    def like(
        cls,
        loader: object,
        *,
        model: object = None,
        batch_size: int | None = None,
        **options: Unpack[DataLoaderOptions],
    ) -> Self:
        """Return a loader that stands in the place of a torch DataLoader: same data, order, workers and collation.

            loader = cannikin.HeteroDataLoader.like(DataLoader(data, batch_size=32, shuffle=True), model=model)

        Of a DistributedSampler only whether and how it shuffles counts; any other sampler gives the order over all
        ranks. The order of `shuffle=True` is that of `seed`, or of the seed of the loader's `generator`.

        Or of an iterator over batches, such as an endless generator that has its loader inside: each rank's batches are
        cut into samples and joined in the plan's sizes (`sharded`).

        Args:
            loader: a torch DataLoader, as it is for one process or for one rank of plain DDP, or an iterator over this
                rank's batches.
            model: as of `HeteroDataLoader`; it may be given later, too.
            batch_size: the *total* batch over all ranks at the start; None is the sum of `local_batches`, or else the
                loader's times the number of ranks.
            **options: take the place of what the loader says.

        Raises:
            InvalidInputError: the loader has something that cannot be kept, such as a batch sampler of its own.
        """
        engine = None if model is None else engine_of(model)
        with refusing(engine):
            num_ranks, batch_dim = (None, 0) if engine is None else (engine.world_size, engine.batch_dim)
            found = keywords_of(loader, options, num_ranks=num_ranks, batch_size=batch_size, batch_dim=batch_dim)
        return cls(model=model, **found)

    def bind(self, model: object) -> None:
        """Give a loader that was built without `model` the one that trains on it, on every rank.

        `HeteroDataParallel(net, optimizer, loader=loader)` and `attach(ddp, optimizer, loader=loader)` do so.
        """
        engine = engine_of(model)
        with refusing(engine):
            if self._feed is not None:
                raise InvalidInputError("this loader has a model already: build a HeteroDataLoader for each model")
            job = job_of(engine, self._num_samples, self.batch_size, self._options)
            kwargs, drop_last = self._kwargs, self._options.get("drop_last", False)
            fetched: Dataset[Any] = self.dataset
            self._source: Source = IndexSource(self._num_samples or 0, seed=self._seed, shuffle=self._shuffle)
            if self._order is not None:
                several, order = engine.world_size > 1, self._order
                self._source = CommonStream(order, order, self._measured, seed=self._seed, tagged=several)
            elif isinstance(self.dataset, IterableDataset):
                self._source, kwargs = self._stream(engine)
                fetched = _AsRead()
            data = None if isinstance(self.dataset, IterableDataset) else self.dataset
            self._passes = Passes(engine, self._source, bookmark=self._bookmark, drop_last=drop_last, data=data)
            self._cuts = _NotedSampler(self._passes)
            self._loader = DataLoader(fetched, batch_sampler=self._cuts, **kwargs)
        self._feed = self._passes.bind(self, job)
        self.settle_place()
        self._warn_if_parted(engine)

    def _stream(self, engine: Engine) -> tuple[Source, dict[str, Any]]:
        """Return where the steps of a stream come from, and which keywords are left for what happens after reading."""
        reading = {name: value for name, value in self._kwargs.items() if name not in AFTER_READING}
        after = {name: value for name, value in self._kwargs.items() if name in AFTER_READING}
        generator = None
        if not self.sharded and reading.get("generator") is None:
            generator = reading["generator"] = torch.Generator()
        reader = self._reader = DataLoader(self.dataset, batch_size=None, collate_fn=_unchanged, **reading)
        if self.sharded:
            return OwnStream(self.dataset, reader, rank=engine.rank, num_ranks=engine.world_size), after
        tagged = engine.world_size > 1 and self._options.get("sharded") is None
        stream = CommonStream(self.dataset, reader, self._measured, seed=self._seed, generator=generator, tagged=tagged)
        return stream, after

    def _measured(self) -> int | None:
        """Return the samples of an epoch as they are told now: a sampler's, or a stream's, may be another one's."""
        return None if self._num_samples is None else _length(self.dataset, self._order)

    def _warn_if_parted(self, engine: Engine) -> None:
        """Say so where ranks have lists of different samples, as those that each took its part of."""
        if isinstance(self.dataset, IterableDataset) or engine.agrees(list_fingerprint(self.dataset)):
            return
        self._passes.compares_lists = False  # it is said once
        if engine.rank == 0:
            warnings.warn(
                "the dataset's samples differ between ranks: index 7, say, must be the same sample on every rank, of "
                "which the plan gives each its own; take out a split by rank and sort what is listed from folders, or "
                "some samples are never trained on. Where each rank makes random data of its own, this does no harm",
                RuntimeWarning,
                stacklevel=4,
            )

    def __len__(self) -> int:
        if self._feed is not None:
            return super().__len__()
        num_samples = self._measured()
        if num_samples is None:
            raise TypeError(NO_LENGTH)
        return num_steps(num_samples, self.batch_size, drop_last=self.drop_last)

    def state_dict(self) -> dict[str, Any]:
        """Return where in the data training is, and what a sampler says of itself; the same on every rank.

        It counts the batches that training forwards have taken: a loop that looks ahead loses none of those that wait.
        After a loop was broken off, it still says where: a run resumed from it goes on with that epoch. Once the last
        batch of an epoch is taken, it is at the beginning of the next epoch.
        """
        place = None if self._feed is None else self._feed.place
        state = self._bookmark.state_dict(place)
        now = sampler_state(self._order)
        if now is not None:
            is_inside = not self._bookmark.is_set and (place is not None or state["position"])
            begun = self._source.begun if is_inside and isinstance(self._source, CommonStream) else None
            state["sampler"] = now if begun is None else begun
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned: the next `iter()` begins at the next sample."""
        self._bookmark.load_state_dict(state)
        if "sampler" in state:
            restore_sampler(self._order, state["sampler"])
        self.settle_place()

    def settle_place(self) -> None:
        """Look again at what is left of a loaded epoch, once there is a plan."""
        if self._feed is not None:
            super().settle_place()

    @property
    def sampler(self) -> Order:
        """The order of samples, for scripts that call `loader.sampler.set_epoch(epoch)`."""
        return Order(self, self._measured())

    @property
    def batch_sampler(self) -> Sampler[list[Any]]:
        """What cuts this rank's batches, once the loader has a model; to be looked at, not iterated over."""
        self._bound()
        return self._cuts

    def __getattr__(self, name: str) -> Any:
        """Return a setting as it is read from a DataLoader, such as `num_workers`."""
        if name in READ and "_read" in vars(self):
            return self._read[name]
        raise AttributeError(f"'HeteroDataLoader' object has no attribute {name!r}")

    def _bound(self) -> Loop:
        if self._feed is None:
            raise InvalidInputError(
                "this loader has no model yet: give it one, HeteroDataLoader(..., model=model), or give it to the "
                "model, HeteroDataParallel(net, optimizer, loader=loader) or attach(ddp, optimizer, loader=loader)"
            )
        return self._feed

    def __iter__(self) -> Iterator[Any]:
        self._bound()
        self._check_free()
        return self._pass()

    def finish(self) -> None:
        """End the pass underway, if there is one, on every rank: the loop will not ask for more.

        For frameworks that count batches and never ask for the end, after the epoch's last step and before they
        evaluate or save. A pass all of whose batches were yielded is complete, any other is broken off. BatchNorm's
        statistics are the same on all ranks from then on, whatever loop it was.
        """
        feed = self._bound()
        if self._this_pass is None:
            feed.settle_statistics()  # a loop that looked ahead has ended it before its last step
            return
        is_over = self._bookmark.is_at_end
        feed.pass_is_out()
        feed.between_steps(is_over=is_over)
        self._end_pass(is_complete=is_over)

    def _end_pass(self, *, is_complete: bool) -> None:
        feed, self._this_pass = self._bound(), None
        try:
            if is_complete:
                self._bookmark.finish()
                feed.complete_epoch()
        finally:
            self._bookmark.end()
            feed.end_epoch()

    def _check_free(self) -> None:
        """End a pass whose end nobody has asked for; refuse to begin another inside of one."""
        if self._this_pass is not None and self._bookmark.is_at_end:
            self.finish()
        if self._this_pass is not None:
            raise InvalidInputError(
                f"this loader is already in a pass over epoch {self.epoch}, and ranks take steps together: finish "
                "that loop, break it off or call finish() of the loader first"
            )

    def _pass(self) -> Iterator[Any]:
        self._check_free()
        if self._told is not None and self._told.epoch != self._told_epoch:
            self._told_epoch = self._told.epoch
            self.set_epoch(self._told_epoch)
        feed = self._bound()
        self._cuts.start()
        this_pass = self._this_pass = object()
        self._passes.open()
        try:
            start_s, batches = time.perf_counter(), iter(self._loader)
            start_s += feed.between_steps(is_over=False)
            while (read := self._next_batch(batches, start_s)) is not None:
                step, entry, batch = read
                if not feed.hand_out(entry, batch):
                    break
                self.is_padding, self.is_last = step.entry.is_padding, self._passes.is_last(step)
                self._bookmark.advance(step.position, step.shards, is_last=self.is_last, trail=step.trail)
                if self.is_last:
                    feed.pass_is_out()
                yield batch
                if self._this_pass is not this_pass:  # finish() has ended it
                    return
                feed.between_steps(is_over=None if self._num_samples is None else self._bookmark.is_at_end)
                start_s = time.perf_counter()
            self._end_pass(is_complete=True)
        finally:
            if self._this_pass is this_pass:
                self._end_pass(is_complete=False)

    def _next_batch(self, batches: Iterator[Any], start_s: float) -> tuple[CutStep, BatchEntry, Any] | None:
        """Return the next step, as it was cut and as it is handed out, and its batch; None where the pass is over."""
        feed = self._bound()
        try:
            batch, load_s = next(batches), time.perf_counter() - start_s
            step = self._cuts.notes.popleft()
            entry = self._weighed(step.entry, batch)
        except StopIteration:
            if self._source.tagged:
                feed.end_stream()
            return None
        except Exception:
            if self._source.tagged or self.sharded or self.item_count is not None:  # others wait for a sum
                feed.give_up()
            raise
        place, loaded_alone = self._bookmark.place, not self.prefetch_depth
        return step, replace(entry, place=place, load_s=load_s, loaded_alone=loaded_alone), batch

    def _weighed(self, entry: BatchEntry, batch: Any) -> BatchEntry:
        if self.item_count is None:
            return entry
        items = 0.0 if entry.is_padding else float(self.item_count(batch))
        if not (math.isfinite(items) and items >= 0):
            raise InvalidInputError(f"item_count returned {items} for the batch of step {entry.step}: it must be >= 0")
        return replace(entry, items=items)

    def keep_workers(self) -> None:
        """Let workers that start from now on outlive SIGTERM, so that a last step can be finished."""
        for loader in (self._loader, self._reader):
            if loader is not None:
                loader.worker_init_fn = PatientWorker(loader.worker_init_fn)

    @property
    def prefetch_depth(self) -> int:
        """Batches whose indices are cut before the batch in training was yielded: num_workers * prefetch_factor."""
        return self._loader.num_workers * (self._loader.prefetch_factor or 0)


class Order(Sampler[Any]):
    """The order of a loader's samples, as far as scripts look at `loader.sampler`.

    Args:
        loader: whose order it is.
        num_samples: samples of an epoch on all ranks, None where that is not known.
    """

    def __init__(self, loader: HeteroDataLoader, num_samples: int | None) -> None:
        self._loader = loader
        self._num_samples = num_samples

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the loader's next `iter()` begins."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError(NO_LENGTH)
        return self._num_samples

    def __iter__(self) -> Iterator[Any]:
        raise InvalidInputError("the order of samples is cut into batches by the plan: iterate over the loader")


class _NotedSampler(Sampler[list[Any]]):
    """The batch sampler under the loader: notes each step it cuts, to be paired with the batch that comes of it."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self.notes: deque[CutStep] = deque()

    def start(self) -> None:
        """Begin the notes of a new pass."""
        self.notes = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        for step, batch in self._passes.steps():
            self.notes.append(step)
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


def _parted(options: DataLoaderOptions) -> tuple[DataLoaderOptions, dict[str, Any]]:
    """Part what is ours from what torch's DataLoader gets; refuse what neither takes."""
    for name, advice in ADVICE.items():
        if options.get(name) is not None:
            raise InvalidInputError(f"HeteroDataLoader takes no {name}: {advice}")
    own = ("model", "batch_size", "item_count", "sampler", "sharded", *LoaderOptions.__annotations__)
    check_names("HeteroDataLoader", own, DataLoader, options)
    if not options.get("in_order", True):
        raise InvalidInputError("in_order=False: batches must come in the order of steps, which all ranks share")
    ours: Any = {name: value for name, value in options.items() if name in own}
    return ours, {name: value for name, value in options.items() if name not in own}


def _length(dataset: Any, order: Any) -> int | None:
    """Return the samples of an epoch over all ranks; None where that is not known."""
    streams = isinstance(dataset, IterableDataset)
    if not streams and (not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__")):
        raise InvalidInputError(
            f"dataset is a {type(dataset).__name__}: it must have __len__ and __getitem__, or be a "
            "torch.utils.data.IterableDataset; put a generator into one of those"
        )
    if order is None and not streams:
        return len(dataset)
    try:
        return len(dataset if order is None else order)
    except (TypeError, NotImplementedError):
        return None


def _order(dataset: Any, options: DataLoaderOptions) -> Any:
    """Return the user's sampler, and refuse what is not an order over all ranks.

    None where there is none, or torch's DistributedSampler: of that we take whether and how it shuffles.
    """
    sampler = options.get("sampler")
    if sampler is None:
        return None
    kind = type(sampler).__name__
    if isinstance(sampler, DistributedSampler) and type(sampler) is not DistributedSampler:
        raise InvalidInputError(
            f"sampler is a {kind}, a DistributedSampler, which gives each rank a part of the same size: give an order "
            "over all ranks, of which the plan gives each its part"
        )
    if isinstance(sampler, BatchSampler) or not hasattr(sampler, "__iter__") or isinstance(sampler, Iterator):
        raise InvalidInputError(
            f"sampler is a {kind}: give a Sampler or a list of single indices, the order of samples over all ranks, "
            "which can be gone through once per epoch; the plan cuts batches"
        )
    if isinstance(dataset, IterableDataset) or options.get("shuffle"):
        other = "an iterable dataset" if isinstance(dataset, IterableDataset) else "shuffle=True"
        raise InvalidInputError(f"sampler beside {other}: only one of them can order the samples; leave one out")
    return None if isinstance(sampler, DistributedSampler) else sampler


def _shuffled(dataset: Any, shuffle: bool | None) -> bool:
    """Return whether we shuffle; refuse what an iterable dataset cannot have."""
    if not isinstance(dataset, IterableDataset):
        return shuffle is None or bool(shuffle)
    if shuffle:
        raise InvalidInputError("shuffle=True with an iterable dataset: its order is its own; shuffle inside of it")
    return False


def _is_own(dataset: Any, options: DataLoaderOptions) -> bool:
    """Return whether each rank's stream is its own; refuse what cannot be."""
    sharded, streams = options.get("sharded"), isinstance(dataset, IterableDataset)
    if sharded and not streams:
        raise InvalidInputError(
            "sharded=True is for iterable datasets: give every rank the whole dataset, of which the plan cuts each "
            "rank's batches, without a split by rank"
        )
    if sharded is False and _says_sharded(dataset):
        raise InvalidInputError(
            "sharded=False, but the iterable dataset is divided by rank: leave sharded= out, or give every rank the "
            "same stream (no split_dataset_by_node, nodesplitter=None)"
        )
    own = bool(sharded) or (streams and _says_sharded(dataset))
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
