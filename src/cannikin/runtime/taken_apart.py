"""A torch DataLoader, or an iterator over batches, taken apart: what a `HeteroDataLoader` needs to stand in its place.

A DataLoader of one process, or of one rank of plain DDP, says how its samples are ordered, read and collated. All of
that is kept but one thing: how many samples a batch has. What orders samples by rank, or cuts batches its own way, does
what a plan does, and is refused. An iterator over batches, such as a generator that hides its loader, says only what
its batches are: they are cut into samples, and these are joined into batches of the plan's sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data.sampler import SequentialSampler

from cannikin.errors import InvalidInputError
from cannikin.runtime.slicing import Slicer

# Keywords that a DataLoader keeps under their own names.
_KEPT = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
# Classes of Accelerate, torchdata and Ray, by name, whose own work is not needed: they deal out, seed, move and resume.
_LOADERS = ("DataLoaderShard", "StatefulDataLoader", "_WrappedDataLoader")
_DEALERS = ("BatchSamplerShard",)
_RANDOM = ("SeedableRandomSampler",)


def keywords_of(
    loader: object, options: Mapping[str, Any], *, num_ranks: int | None, batch_size: int | None, batch_dim: int = 0
) -> dict[str, Any]:
    """Return the keywords of a HeteroDataLoader that stands in this loader's place.

    Args:
        loader: a torch DataLoader, or an iterator over batches.
        options: keywords that take the place of what the loader says.
        num_ranks: how many train on it, None where that is not known yet.
        batch_size: the total batch, None for that of local batches that are set, or else for as many of the loader's
            batches as there are ranks.
        batch_dim: the dimension of tensors that counts samples.
    """
    if isinstance(loader, Iterator) and not isinstance(loader, DataLoader):  # Ray's is both
        return _of_batches(SingleSamples(loader, batch_dim), options, num_ranks, batch_size)
    if not isinstance(loader, DataLoader):
        raise InvalidInputError(
            f"like() got a {type(loader).__name__}, and takes a torch.utils.data.DataLoader or an iterator over "
            "batches: build the loader itself, HeteroDataLoader(dataset, batch_size=..., model=...)"
        )
    if type(loader).__iter__ is not DataLoader.__iter__ and type(loader).__name__ not in _LOADERS:
        raise InvalidInputError(
            f"the loader is a {type(loader).__name__} with an __iter__ of its own, which would be lost: give the "
            "DataLoader that it is made of, and do what it adds in collate_fn or in the loop"
        )
    found = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        _refuse_dealt_out(loader.dataset)
        found["drop_last"], local = loader.drop_last, loader.batch_size
    else:
        batches = _plain(loader)
        found["drop_last"], local = batches.drop_last, batches.batch_size
        if "sampler" not in options and "shuffle" not in options:
            found |= _order(batches.sampler, loader.dataset)
    total = _pinned(options) or _total(local, num_ranks) if batch_size is None else batch_size
    return {**found, "batch_size": total, **options}


class SingleSamples(IterableDataset[Any]):
    """The samples of an iterator over batches, each as a batch of one; a second pass goes on where the first was left.

    The first batch is read at once, to see how many samples it has.
    """

    def __init__(self, batches: Iterator[Any], batch_dim: int = 0) -> None:
        self._batches = batches
        self._slicer = Slicer(batch_dim, caller="like()")
        self._is_over = False
        first = next(batches, None)
        if first is None:
            raise InvalidInputError("like() got an iterator that has no batch: give it before it has been used up")
        self.num_first = self._slicer.num_samples(first, certain=True)
        self._samples = self._cut_from(first)

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            raise InvalidInputError(
                "the iterator that like() was given has ended, and cannot begin again for another pass: give like() "
                "the DataLoader that it is made of, or an iterator without end"
            )
        return self._samples

    def _cut_from(self, batch: Any) -> Iterator[Any]:
        while batch is not None:
            for sample in range(self._slicer.num_samples(batch, certain=True)):
                yield self._slicer.cut(batch, sample, sample + 1)
            batch = next(self._batches, None)
        self._is_over = True

    def join(self, samples: Sequence[Any]) -> Any:
        """Return a batch as the iterator has them."""
        return self._slicer.join(samples)


def _of_batches(
    samples: SingleSamples, options: Mapping[str, Any], num_ranks: int | None, batch_size: int | None
) -> dict[str, Any]:
    """Return the keywords of a loader that cuts each rank's batches anew."""
    if options.get("num_workers"):
        raise InvalidInputError(
            f"num_workers={options['num_workers']}: an iterator over batches is read in this process; it may have "
            "workers of its own inside"
        )
    total = _pinned(options) or _total(samples.num_first, num_ranks) if batch_size is None else batch_size
    return {"dataset": samples, "collate_fn": samples.join, "sharded": True, "batch_size": total, **options}


def _pinned(options: Mapping[str, Any]) -> int:
    """Return the sum of the local batches that are set; 0 where none are, or where they will be refused."""
    batches = options.get("local_batches")
    is_list = isinstance(batches, Sequence) and all(isinstance(batch, int) for batch in batches)
    return sum(batches) if is_list else 0  # type: ignore[arg-type]


def _total(local_batch: int | None, num_ranks: int | None) -> int:
    """Return as many samples as the ranks' loaders have in a batch together."""
    if local_batch is None:
        raise InvalidInputError(
            "the loader has batch_size=None, so that how many samples a batch has is not known: pass batch_size=, the "
            "total over all ranks, and a dataset whose items are single samples"
        )
    if num_ranks is None:
        if not dist.is_initialized():
            raise InvalidInputError(
                "like() without batch_size takes the loader's batch_size times the number of ranks, which is not known "
                "before there is a model or a process group: pass batch_size=, the total over all ranks, or model="
            )
        num_ranks = dist.get_world_size()
    return local_batch * num_ranks


def _plain(loader: DataLoader[Any]) -> BatchSampler:
    """Return what cuts equal batches of a row of samples; refuse batches that are cut in a way of their own."""
    batches: Any = loader.batch_sampler
    if batches is None:
        raise InvalidInputError(
            "the loader has batch_size=None: its dataset's items are whole batches, which the plan cannot cut; give a "
            "DataLoader over single samples"
        )
    while type(batches).__name__ in _DEALERS:
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        raise InvalidInputError(
            f"the loader's batch_sampler is a {type(batches).__name__}, which cuts batches its own way, as the plan "
            "does: give a DataLoader with batch_size= and, where the order of samples matters, sampler=; for tokens "
            "instead of samples pass item_count="
        )
    return batches


def _order(sampler: Any, dataset: Any) -> dict[str, Any]:
    """Return what says the same order of samples to a HeteroDataLoader."""
    is_random = type(sampler) is RandomSampler or type(sampler).__name__ in _RANDOM
    if type(sampler) is SequentialSampler and len(sampler) == len(dataset):
        return {"shuffle": False}
    if is_random and not sampler.replacement and len(sampler) == len(dataset):
        if sampler.generator is None:
            return {"shuffle": True}
        return {"shuffle": True, "seed": sampler.generator.initial_seed() % 2**63}
    if hasattr(sampler, "num_replicas") and type(sampler) is not DistributedSampler:
        raise InvalidInputError(
            f"the loader's sampler is a {type(sampler).__name__}, which gives each rank a part of its own (it has "
            "num_replicas), as the plan does: give a sampler of the order over all ranks, or none"
        )
    return {"sampler": sampler}


def _refuse_dealt_out(dataset: object) -> None:
    """Refuse a stream that is dealt out to ranks already, step by step."""
    if type(dataset).__name__ == "IterableDatasetShard":
        raise InvalidInputError(
            "the loader's dataset is Accelerate's IterableDatasetShard, which deals samples out to ranks, as the plan "
            "does: give the DataLoader as it was before accelerator.prepare()"
        )
