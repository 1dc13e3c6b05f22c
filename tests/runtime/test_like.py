"""`HeteroDataLoader.like`: a user's DataLoader taken apart, in one process and without a training."""

from __future__ import annotations

import re

import pytest
import torch
from scripted_feed import ScriptedFeed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from cannikin.errors import InvalidInputError
from cannikin.runtime.loader import HeteroDataLoader

DATA = TensorDataset(torch.arange(40.0))


def samples_of(loader: HeteroDataLoader) -> list[list[int]]:
    """The samples of each batch of a pass."""
    loader.bind(ScriptedFeed([[loader.batch_size]]))
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch[0].tolist() for batch in loader]


def set_up(worker: int) -> None:
    get_worker_info().dataset.worker = worker


def as_sum(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([sample for (sample,) in samples]) * 2


def test_everything_that_says_how_samples_are_read_is_kept():
    given = DataLoader(
        DATA,
        batch_size=8,
        num_workers=2,
        collate_fn=as_sum,
        drop_last=True,
        timeout=30.0,
        worker_init_fn=set_up,
        generator=torch.Generator().manual_seed(5),
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    loader = HeteroDataLoader.like(given, batch_size=16)
    assert loader.dataset is DATA
    assert loader.batch_size == 16
    kept = ("num_workers", "collate_fn", "drop_last", "timeout", "worker_init_fn", "generator", "prefetch_factor")
    for name in (*kept, "persistent_workers", "multiprocessing_context", "pin_memory"):
        assert getattr(loader, name) == getattr(given, name), name


def test_batches_are_what_the_given_loader_has_on_one_rank():
    given = DataLoader(DATA, batch_size=7, collate_fn=as_sum, drop_last=True)
    assert samples_of(HeteroDataLoader.like(given, batch_size=7)) == [batch.tolist() for batch in given]


@pytest.mark.parametrize(
    ("sampler", "in_order"),
    [
        (None, True),
        (SequentialSampler(DATA), True),
        (RandomSampler(DATA), False),
        (DistributedSampler(DATA, num_replicas=4, rank=1, shuffle=False), True),
        (DistributedSampler(DATA, num_replicas=4, rank=1), False),
    ],
)
def test_a_plain_order_is_taken_as_one_over_all_ranks(sampler, in_order):
    loader = HeteroDataLoader.like(DataLoader(DATA, batch_size=8, sampler=sampler), batch_size=8)
    samples = [sample for batch in samples_of(loader) for sample in batch]
    assert sorted(samples) == list(range(40))
    assert (samples == sorted(samples)) == in_order


def test_the_order_is_that_of_a_distributed_sampler_s_seed_and_follows_its_epochs():
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0, seed=7)
    loader = HeteroDataLoader.like(DataLoader(DATA, batch_size=8, sampler=sampler), batch_size=8)
    sampler.set_epoch(3)
    same = HeteroDataLoader(DATA, batch_size=8, seed=7)
    same.set_epoch(3)
    assert samples_of(loader) == samples_of(same)


def test_a_seeded_generator_says_which_order_a_shuffle_has():
    def batches(of_generator: int, **options) -> list[list[int]]:
        generator = torch.Generator().manual_seed(of_generator)
        given = DataLoader(DATA, batch_size=8, shuffle=True, generator=generator)
        return samples_of(HeteroDataLoader.like(given, batch_size=8, **options))

    assert batches(1) == batches(1) != batches(2)
    assert batches(1, seed=9) == batches(2, seed=9)


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler([3, 5, 7, 9], generator=torch.Generator().manual_seed(0)),
        WeightedRandomSampler([0.0] * 36 + [1.0] * 4, num_samples=12),
        RandomSampler(DATA, replacement=True, num_samples=100),
    ],
)
def test_any_other_sampler_gives_the_order_over_all_ranks(sampler):
    loader = HeteroDataLoader.like(DataLoader(DATA, batch_size=8, sampler=sampler), batch_size=8)
    samples = [sample for batch in samples_of(loader) for sample in batch]
    assert len(samples) == len(sampler)
    if isinstance(sampler, SubsetRandomSampler):
        assert sorted(samples) == [3, 5, 7, 9]


class Backwards(RandomSampler):
    """An order of the user's own, whatever it is derived from."""

    def __iter__(self):
        return iter(range(len(DATA) - 1, -1, -1))


@pytest.mark.parametrize("sampler", [Backwards(DATA), SequentialSampler(range(5))])
def test_a_sampler_that_only_looks_plain_gives_its_own_order(sampler):
    loader = HeteroDataLoader.like(DataLoader(DATA, batch_size=8, sampler=sampler), batch_size=8)
    assert [sample for batch in samples_of(loader) for sample in batch] == list(sampler)


def test_a_plain_batch_sampler_is_taken_apart_too():
    batches = BatchSampler(SequentialSampler(DATA), batch_size=12, drop_last=True)
    loader = HeteroDataLoader.like(DataLoader(DATA, batch_sampler=batches), model=ScriptedFeed([[16, 8]]))
    assert (loader.batch_size, loader.drop_last) == (24, True)
    assert [batch.tolist() for (batch,) in loader] == [list(range(16))]


def test_what_accelerate_has_prepared_is_taken_apart_with_what_it_was_made_of():
    data_loader = pytest.importorskip("accelerate.data_loader")
    given = DataLoader(DATA, batch_size=12, shuffle=True, drop_last=True)
    prepared = data_loader.prepare_data_loader(
        given, num_processes=2, process_index=1, put_on_device=False, use_seedable_sampler=True
    )
    loader = HeteroDataLoader.like(prepared, model=ScriptedFeed([[16, 8]]))
    assert (loader.batch_size, loader.drop_last) == (24, True)
    same = HeteroDataLoader.like(given, model=ScriptedFeed([[16, 8]]))
    assert [batch.tolist() for (batch,) in loader] == [batch.tolist() for (batch,) in same]


def test_a_stream_that_accelerate_has_dealt_out_is_refused_by_the_name_that_its_class_has():
    data_loader = pytest.importorskip("accelerate.data_loader")
    prepared = data_loader.prepare_data_loader(
        DataLoader(Stream(), batch_size=4), num_processes=2, process_index=1, put_on_device=False
    )
    with pytest.raises(InvalidInputError, match=r"before accelerator\.prepare\(\)"):
        HeteroDataLoader.like(prepared, batch_size=8)


class _WrappedDataLoader(DataLoader):
    """As Ray's is called (tests/integrations/test_ray.py has Ray's own), which is an iterator too."""

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


def test_what_ray_has_prepared_is_taken_apart_though_it_is_an_iterator_too():
    loader = HeteroDataLoader.like(_WrappedDataLoader(DATA, batch_size=8), batch_size=16)
    assert (loader.dataset, loader.sharded) == (DATA, False)


def test_options_take_the_place_of_what_the_loader_says():
    given = DataLoader(DATA, batch_size=8, sampler=SubsetRandomSampler([1, 2, 3]), drop_last=True)
    loader = HeteroDataLoader.like(given, batch_size=40, shuffle=False, drop_last=False)
    assert samples_of(loader) == [list(range(40))]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_a_stream_stays_a_stream():
    loader = HeteroDataLoader.like(DataLoader(Stream(), batch_size=4), batch_size=4)
    assert samples_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_without_a_batch_size_it_is_the_loader_s_times_the_ranks():
    loader = HeteroDataLoader.like(DataLoader(DATA, batch_size=8), model=ScriptedFeed([[12, 8, 4]], rank=1))
    assert loader.batch_size == 24
    assert [len(batch) for (batch,) in loader] == [8, 5]


class OwnBatches(BatchSampler):
    pass


class OwnIteration(DataLoader):
    def __iter__(self):
        return iter(())


class PartOfARank(torch.utils.data.Sampler):
    num_replicas = 2

    def __iter__(self):
        return iter(range(20))


class Dealt(DistributedSampler):
    pass


class IterableDatasetShard(Stream):
    """As Accelerate's is called."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: [1, 2], "like() got a list, and takes a torch.utils.data.DataLoader or an iterator"),
        (lambda: iter([]), "got an iterator that has no batch"),
        (lambda: iter([torch.zeros(3)]), "pass batch_size=, the total over all ranks, or model="),
        (lambda: iter([(torch.zeros(3), torch.zeros(2, 3))]), "cannot cut this batch: its tensors and lists have 3, 2"),
        (lambda: OwnIteration(DATA, batch_size=4), "OwnIteration with an __iter__ of its own"),
        (
            lambda: DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 4, False)),
            "batch_sampler is a OwnBatches, which cuts batches its own way",
        ),
        (lambda: DataLoader(DATA, batch_size=None), "its dataset's items are whole batches"),
        (lambda: DataLoader(Stream(), batch_size=None), "how many samples a batch has is not known"),
        (lambda: DataLoader(DATA, batch_size=4, sampler=PartOfARank()), "gives each rank a part of its own"),
        (lambda: DataLoader(DATA, batch_size=4, sampler=Dealt(DATA, 2, 0)), "gives each rank a part of its own"),
        (lambda: DataLoader(IterableDatasetShard(), batch_size=4), "before accelerator.prepare()"),
        (lambda: DataLoader(DATA, batch_size=4), "pass batch_size=, the total over all ranks, or model="),
    ],
)
def test_what_cannot_be_kept_is_refused_with_advice(given, message):
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        HeteroDataLoader.like(given())


def test_a_subset_is_a_dataset_as_any_other():
    given = DataLoader(Subset(DATA, range(10, 14)), batch_size=2)
    assert samples_of(HeteroDataLoader.like(given, batch_size=2)) == [[10, 11], [12, 13]]


def test_local_batches_that_are_set_say_what_the_total_is():
    given = DataLoader(DATA, batch_size=4)
    assert HeteroDataLoader.like(given, local_batches=[5, 2]).batch_size == 7


# An iterator over batches


def hidden(num: int, size: int):
    """A generator with its loader inside: batches of inputs, a dict, names and what a batch has one of."""
    for first in range(0, num, size):
        inputs = torch.arange(first, min(num, first + size))
        yield inputs, {"y": -inputs[:, None]}, [f"name {k}" for k in inputs.tolist()], {}, None


def feed_of(*script: list[int]) -> ScriptedFeed:
    feed = ScriptedFeed(script)
    feed.num_own_steps = 10**6
    return feed


def test_batches_of_an_iterator_are_cut_anew_and_nothing_of_them_is_lost():
    feed = feed_of([3], [8], [1])
    loader = HeteroDataLoader.like(hidden(1000, 5), model=feed, batch_size=4)
    at = 0
    for size, batch in zip([3, 8, 1, 3, 8], loader, strict=False):
        inputs, rest, names, empty, none = batch
        assert inputs.tolist() == list(range(at, at + size))
        assert rest["y"].tolist() == [[-k] for k in inputs.tolist()]
        assert names == [f"name {k}" for k in inputs.tolist()]
        assert (empty, none) == ({}, None)
        at += size
    assert feed.job.batch_size == 4


def test_without_a_batch_size_it_is_the_iterator_s_times_the_ranks():
    assert HeteroDataLoader.like(hidden(100, 6), model=feed_of([3, 9, 6])).batch_size == 18


def test_an_iterator_s_samples_may_be_in_another_dimension():
    feed = feed_of([2])
    feed.batch_dim = 1
    given = (torch.arange(12).view(2, 6) for _ in range(2))  # 2 steps of time, 6 samples
    loader = HeteroDataLoader.like(given, model=feed)
    assert loader.batch_size == 6
    assert next(iter(loader)).tolist() == [[0, 1], [6, 7]]


def test_an_iterator_ends_once_and_cannot_be_passed_over_again():
    feed = ScriptedFeed([[4]])
    loader = HeteroDataLoader.like(hidden(10, 5), model=feed, batch_size=4)
    assert [len(batch[0]) for batch in loader] == [4, 4, 2]
    with pytest.raises(InvalidInputError, match="has ended, and cannot begin again"):
        list(loader)


def test_what_batches_have_one_of_each_cannot_be_joined():
    loader = HeteroDataLoader.like(((torch.zeros(3), scale) for scale in (0.5, 0.25)), model=feed_of([4]))
    with pytest.raises(InvalidInputError, match=r"whose batches had 0\.5 and 0\.25 in the same place"):
        next(iter(loader))


def test_an_iterator_is_read_in_this_process():
    with pytest.raises(InvalidInputError, match="num_workers=2: an iterator over batches is read in this process"):
        HeteroDataLoader.like(hidden(10, 5), model=feed_of([4]), num_workers=2)
