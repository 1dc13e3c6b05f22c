"""The loader and the sampler, with n ranks played in one process: n loaders, each with an engine's part by script."""

from __future__ import annotations

import itertools
import json
import re
import threading
import tracemalloc
import warnings
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_feed import Script, ScriptedFeed
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from cannikin.core.values import Job
from cannikin.errors import InvalidInputError, StateError
from cannikin.runtime.batch_sampler import HeteroBatchSampler
from cannikin.runtime.entry import BatchEntry
from cannikin.runtime.fingerprints import list_fingerprint
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.passes import epoch_order

FEEDS: weakref.WeakKeyDictionary[HeteroDataLoader, ScriptedFeed] = weakref.WeakKeyDictionary()


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.length
        return index


class Stream(IterableDataset):
    """The numbers in order, from worker processes in turn."""

    def __init__(self, length: int, known: bool = False) -> None:
        self.length = length
        if known:
            self.__class__ = SizedStream

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.length, step))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


def as_list(samples: list) -> list:
    return samples


def build(
    data: Dataset, script: Script, *, rank: int = 0, has_batch_norm: bool = False, **keywords
) -> HeteroDataLoader:
    feed = ScriptedFeed(script, rank, has_batch_norm)
    keywords.setdefault("batch_size", max(sum(script[0]), 2 * len(script[0])))
    keywords.setdefault("collate_fn", as_list)
    loader = HeteroDataLoader(data, model=feed, **keywords)
    FEEDS[loader] = feed
    return loader


def build_all(data: Dataset, script: Script, **keywords) -> list[HeteroDataLoader]:
    return [build(data, script, rank=rank, **keywords) for rank in range(len(script[0]))]


def feed_of(loader: HeteroDataLoader | HeteroBatchSampler) -> ScriptedFeed:
    return FEEDS[loader]


def steps_of(loaders: Sequence[HeteroDataLoader], limit: int | None = None) -> list[list[int]]:
    """The samples of each step in rank order, padding left out, after checking what the engines were told of it."""
    steps = []
    for batches in itertools.islice(zip(*loaders, strict=True), limit):
        entries = [feed_of(loader).entries[-1] for loader in loaders]
        samples: list[int] = []
        for loader, entry, batch in zip(loaders, entries, batches, strict=True):
            assert loader.is_padding == entry.is_padding == (entry.local_batch == 0)
            assert len(batch) == (2 if entry.is_padding else entry.local_batch)
            samples += [] if entry.is_padding else list(batch)
        assert {(entry.step, entry.total_batch) for entry in entries} == {(entries[0].step, len(samples))}
        steps.append(samples)
    return steps


def flat(steps: Sequence[Sequence[int]]) -> list[int]:
    return [sample for step in steps for sample in step]


def scripts(num_ranks: int) -> st.SearchStrategy[Script]:
    return st.lists(st.tuples(*[st.integers(1, 9)] * num_ranks), min_size=1, max_size=6)


any_script = st.integers(1, 5).flatmap(scripts)
quick = settings(max_examples=200, deadline=None)
quicker = settings(max_examples=50, deadline=None)


# Exactly once


@quick
@given(
    script=any_script, length=st.integers(1, 120), shuffle=st.booleans(), seed=st.integers(0, 9), iterable=st.booleans()
)
def test_an_epoch_gives_every_sample_once_in_one_shared_order(script, length, shuffle, seed, iterable):
    data = Stream(length) if iterable else Numbers(length)
    loaders = build_all(data, script, seed=seed, shuffle=shuffle and not iterable)
    steps = steps_of(loaders)
    order = epoch_order(length, seed=seed, epoch=0, shuffle=shuffle and not iterable).tolist()
    assert flat(steps) == order, "slices are contiguous in rank order, and nothing is left out or doubled"
    assert sorted(order) == list(range(length))
    totals = [sum(script[step % len(script)]) for step in range(len(steps))]
    assert [len(step) for step in steps[:-1]] == totals[:-1]
    assert len(steps[-1]) <= totals[-1]


@quick
@given(script=any_script, length=st.integers(60, 120), iterable=st.booleans())
def test_drop_last_leaves_out_only_a_tail_shorter_than_a_batch(script, length, iterable):
    data = Stream(length) if iterable else Numbers(length)
    steps = steps_of(build_all(data, script, shuffle=False, drop_last=True))
    seen = flat(steps)
    assert seen == list(range(len(seen)))
    assert length - len(seen) < sum(script[len(steps) % len(script)])
    assert [len(step) for step in steps] == [sum(script[step % len(script)]) for step in range(len(steps))]


@quick
@given(
    data=st.data(),
    script=any_script,
    script_after=any_script,
    length=st.integers(1, 120),
    epoch=st.integers(0, 3),
    iterable=st.booleans(),
)
def test_a_resume_on_another_number_of_ranks_gives_exactly_the_rest(
    data, script, script_after, length, epoch, iterable
):
    dataset = Stream(length) if iterable else Numbers(length)
    loaders = build_all(dataset, script)
    for loader in loaders:
        loader.set_epoch(epoch)
    num_steps = data.draw(st.integers(1, 40), label="steps before the save")
    before = flat(steps_of(loaders, num_steps))
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    resumed = build_all(dataset, script_after)
    for loader in resumed:
        loader.load_state_dict(json.loads(json.dumps(states[0])))
    if len(before) < length:  # save and resume a second time in the same epoch
        before += flat(steps_of(resumed, 1))
        state = resumed[0].state_dict()
        resumed = build_all(dataset, script)
        for loader in resumed:
            loader.load_state_dict(state)
    after = flat(steps_of(resumed))
    if len(before) < length:
        assert sorted(before + after) == list(range(length))
    else:
        assert sorted(after) == list(range(length)), "nothing was left: the next epoch begins"
    assert resumed[0].epoch == epoch + (1 if len(before) < length else 2)


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("keywords", [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}])
def test_worker_processes_change_nothing_about_what_is_seen(keywords, iterable):
    data = Stream(31) if iterable else Numbers(31)
    script = [(3, 1), (2, 2), (1, 5)]
    loaders = build_all(data, script, prefetch_factor=2, **keywords)
    for epoch in range(3):
        if epoch == 1:  # broken off while batches are underway
            assert len(flat(steps_of(loaders, 2))) < 31
            continue
        assert sorted(flat(steps_of(loaders))) == list(range(31))
    assert feed_of(loaders[0]).epochs_ended == 3


def test_with_workers_a_position_counts_what_was_yielded_not_what_was_cut():
    loaders = build_all(Numbers(40), [(3, 1)], num_workers=2, shuffle=False)
    batches = [iter(loader) for loader in loaders]
    for iterator in batches:
        assert len(next(iterator)) in (1, 3)
    assert {loader.state_dict()["position"] for loader in loaders} == {4}
    for iterator in batches:
        iterator.close()
    assert loaders[0].prefetch_depth == 4
    assert feed_of(loaders[0]).settings["prefetch_depth"] == 4


def test_orders_differ_between_epochs_and_seeds_and_are_the_same_for_the_same():
    first, again, other = (build(Numbers(50), [(10,)], seed=seed) for seed in (1, 1, 2))
    epochs = [[flat(loader) for _ in range(2)] for loader in (first, again, other)]
    assert epochs[0] == epochs[1]
    assert len({tuple(order) for orders in (epochs[0], epochs[2]) for order in orders}) == 4
    # not by adding them up: seed 1 in epoch 0 is not seed 0 in epoch 1
    assert not torch.equal(
        epoch_order(50, seed=1, epoch=0, shuffle=True), epoch_order(50, seed=0, epoch=1, shuffle=True)
    )


def test_the_first_batches_of_ten_thousand_million_shuffled_samples_take_no_memory_for_their_order():
    tracemalloc.start()
    try:
        feed = ScriptedFeed([(600, 400)], 1)
        sampler = HeteroBatchSampler(10**10, model=feed, batch_size=1000)
        batches = iter(sampler)
        drawn = [next(batches) for _ in range(3)]
        batches.close()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert drawn == [
        epoch_order(10**10, seed=0, epoch=0, shuffle=True)[start : start + 400].tolist() for start in (600, 1600, 2600)
    ]
    assert peak_bytes < 2**20


# Short batches and padding


def test_ranks_without_samples_get_two_that_count_for_nothing():
    loaders = build_all(Numbers(8), [(2, 2, 2)], shuffle=False)
    batches = [list(loader) for loader in loaders]
    assert batches == [[[0, 1], [6]], [[2, 3], [7]], [[4, 5], [0, 1]]]
    assert [loader.is_padding for loader in loaders] == [False, False, True]
    padding = BatchEntry(step=1, local_batch=0, total_batch=2, is_padding=True, ends_pass=True)
    assert feed_of(loaders[2]).entries[-1] == padding


@pytest.mark.parametrize("data", [Numbers(1), Stream(1)])
def test_a_dataset_of_one_sample_pads_with_it_twice(data):
    assert [list(loader) for loader in build_all(data, [(2, 2)])] == [[[0]], [[0, 0]]]


@pytest.mark.parametrize("data", [Numbers, SizedStream])
@pytest.mark.parametrize(
    ("script", "length", "totals"),
    [
        ([(4, 4)], 17, [8, 5, 4]),
        ([(4, 4)], 18, [8, 8, 2]),
        ([(2, 2)], 9, [4, 3, 2]),
        ([(2,)], 5, [2, 3]),
        ([(8, 8), (2, 2)], 17, [9, 4, 4]),
        ([(4, 4), (6, 6)], 21, [8, 7, 6]),
    ],
)
def test_with_batch_norm_the_last_two_steps_share_what_would_leave_a_single_sample(data, script, length, totals):
    loaders = build_all(data(length), script, has_batch_norm=True, shuffle=False if data is Numbers else None)
    first = len(loaders[0])
    batches = [list(loader) for loader in loaders]
    entries = [feed_of(loader).entries for loader in loaders]
    assert [entry.total_batch for entry in entries[0]] == totals
    assert len(totals) == first or len(script) > 1
    assert all(entry.local_batch != 1 and entry.checked for own in entries for entry in own)
    assert [entry.ends_pass for entry in entries[0]] == [False] * (len(totals) - 1) + [True]
    kept = [
        b for own, said in zip(batches, entries, strict=True) for b, e in zip(own, said, strict=True) if e.local_batch
    ]
    assert sorted(itertools.chain(*kept)) == list(range(length))


def test_with_batch_norm_the_last_two_steps_go_on_after_a_resume_between_them():
    loader = build(Numbers(17), [(8,)], has_batch_norm=True)
    passing = iter(loader)
    before = [next(passing), next(passing)]
    resumed = build(Numbers(17), [(8,)], has_batch_norm=True)
    resumed.load_state_dict(loader.state_dict())
    batches = [*before, *resumed]
    assert [len(batch) for batch in batches] == [8, 5, 4]
    assert sorted(itertools.chain(*batches)) == list(range(17))


def test_without_its_last_batch_an_epoch_has_whole_steps_with_batch_norm_too():
    for data in (Numbers(17), Stream(17)):
        (loader,) = build_all(data, [(8,)], has_batch_norm=True, drop_last=True)
        assert [len(batch) for batch in loader] == [8, 8]


@pytest.mark.parametrize(("position", "data"), [(0, Numbers(1)), (16, Numbers(17)), (0, Stream(1))])
def test_with_batch_norm_a_sample_that_is_alone_is_given_twice_and_counts_once(position, data):
    (loader,) = build_all(data, [(8,)], has_batch_norm=True)
    loader.load_state_dict({**loader.state_dict(), "position": position})
    ((first, second),) = loader
    assert first == second
    (entry,) = feed_of(loader).entries
    assert (entry.local_batch, entry.total_batch, entry.checked) == (1, 1, False)


def test_with_batch_norm_a_short_batch_gives_no_rank_a_single_sample():
    loaders = build_all(Numbers(11), [(4, 4)], has_batch_norm=True, shuffle=False)
    assert [list(loader)[-1] for loader in loaders] == [[8, 9, 10], [0, 1]]
    assert feed_of(loaders[0]).job.min_local == (2, 2)


# Epochs


def test_each_iter_begins_the_next_epoch_unless_told_otherwise():
    loader = build(Numbers(20), [(5,)])
    orders = [epoch_order(20, seed=0, epoch=epoch, shuffle=True).tolist() for epoch in range(8)]
    assert [flat(loader), flat(loader)] == orders[:2]
    loader.set_epoch(7)
    assert (loader.epoch, flat(loader), loader.epoch) == (7, orders[7], 8)
    loader.set_epoch(2)
    for _ in loader:
        assert loader.epoch == 2
        break
    assert (loader.epoch, flat(loader)) == (3, orders[3])


def fail_in(loader: HeteroDataLoader) -> None:
    for _ in loader:
        _ = 1 / 0


@pytest.mark.parametrize("how", ["exhausted", "break", "error", "closed"])
def test_the_engine_hears_of_the_end_of_a_pass_however_it_ends(how):
    loader = build(Numbers(20), [(5,)])
    iterator = iter(loader)
    assert feed_of(loader).epochs_begun == 0
    if how == "exhausted":
        assert len(list(iterator)) == 4
    elif how == "closed":
        next(iterator)
        iterator.close()
    elif how == "break":
        for _ in loader:
            break
    else:
        with pytest.raises(ZeroDivisionError):
            fail_in(loader)
    assert (feed_of(loader).epochs_begun, feed_of(loader).epochs_ended) == (1, 1)
    assert len(list(loader)) == 4


def test_an_error_in_the_dataset_ends_the_pass():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise OSError("no such file")

    loader = build(Broken(20), [(5,)])
    for _ in range(2):
        with pytest.raises(OSError, match="no such file"):
            list(loader)
    assert feed_of(loader).epochs_ended == 2
    assert loader.state_dict()["position"] == 0


def test_two_passes_at_once_are_refused():
    loader = build(Numbers(20), [(5,)])
    unused = iter(loader)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(InvalidInputError, match="already in a pass over epoch 0"):
        iter(loader)
    with pytest.raises(InvalidInputError, match="already in a pass over epoch 0"):
        next(unused)
    assert len(list(iterator)) == 3
    assert len(list(loader)) == 4


# Length


@pytest.mark.parametrize(("drop_last", "length"), [(False, 3), (True, 2)])
def test_len_is_the_steps_of_the_pass(drop_last, length):
    loader = build(Numbers(10), [(4,)], drop_last=drop_last)
    assert len(loader) == length
    assert [len(loader) for _ in loader] == [length] * length


def test_len_follows_the_plan_in_force():
    loader = build(Numbers(20), [(2,), (6,)])
    assert len(loader) == 10
    # 20 samples as 2, 6, 2, 6, 2, 2: what is not cut yet counts as if the last plan asked for stayed
    assert [(len(batch), len(loader)) for batch in loader] == [(2, 10), (6, 4), (2, 8), (6, 5), (2, 6), (2, 6)]


def test_len_of_a_resumed_pass_is_what_is_left():
    loader = build(Numbers(10), [(4,)])
    state = loader.state_dict()
    loader.load_state_dict({**state, "position": 4})
    assert len(loader) == len(list(loader)) == 2
    loader.load_state_dict({**state, "position": 10})
    assert len(loader) == len(list(loader)) == 3


def test_a_stream_has_a_length_if_its_dataset_has():
    assert len(build(Stream(10, known=True), [(4,)])) == 3
    with pytest.raises(TypeError, match="without a length"):
        len(build(Stream(10), [(4,)]))


# State


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("iterable", [False, True])
def test_a_state_saved_right_after_the_last_batch_resumes_with_the_next_epoch(iterable, drop_last):
    data = Stream(10) if iterable else Numbers(10)
    loader = build(data, [(4,)], drop_last=drop_last)
    states = [loader.state_dict() for _ in loader]
    for state in (states[-1], loader.state_dict()):
        resumed = build(data, [(4,)], drop_last=drop_last)
        resumed.load_state_dict(state)
        assert len(list(resumed)) == len(states)
        assert resumed.epoch == 2


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}])
@pytest.mark.parametrize(("drop_last", "places"), [(False, [(0, 4), (0, 8), (1, 0)]), (True, [(0, 4), (1, 0)])])
def test_a_loop_that_counts_from_the_resumed_epoch_trains_no_epoch_twice(drop_last, places, workers):
    loader = build(Numbers(10), [(4,)], drop_last=drop_last, **workers)
    states = [loader.state_dict() for _ in loader]
    assert [(state["epoch"], state["position"]) for state in states] == places
    resumed = build(Numbers(10), [(4,)], drop_last=drop_last)
    resumed.load_state_dict(states[-1])
    passes = [(resumed.epoch, len(list(resumed))) for _ in range(resumed.epoch, 3)]
    assert passes == [(1, len(places)), (2, len(places))]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("totals", "passes"), [((4, 4), [(0, 2), (1, 12), (2, 12)]), ((20, 20), [(1, 2), (2, 2)])])
def test_a_total_that_the_rest_of_a_resumed_epoch_does_not_fill_begins_the_next_epoch(own, totals, passes):
    make = {False: build, True: lambda *args, **keywords: own_loaders(*args, **keywords)[0][0]}[own]
    before = make(Numbers(100), [(4, 4)], drop_last=True, batch_size=8)
    resumed = make(Numbers(100), [totals], drop_last=True, batch_size=sum(totals))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.load_state_dict({**before.state_dict(), "position": 80})
    epoch = passes[0][0]
    assert resumed.epoch == resumed.state_dict()["epoch"] == epoch
    assert resumed.state_dict()["position"] == (0 if epoch else 80)
    assert ["scheduler that steps once per epoch" in str(warning.message) for warning in caught] == [True] * epoch
    assert [(resumed.epoch, len(resumed), len(list(resumed))) for _ in range(resumed.epoch, 3)] == [
        (epoch, num_steps, num_steps) for epoch, num_steps in passes
    ]


def test_a_state_is_a_few_plain_numbers():
    loader = build(Numbers(10), [(4,)], seed=5)
    next(iter(loader))
    assert loader.state_dict() == {"epoch": 0, "position": 4, "num_samples": 10, "seed": 5, "shuffle": 1}
    assert all(type(number) is int for number in loader.state_dict().values())


@pytest.mark.parametrize("keywords", [{"seed": 1}, {"shuffle": False}, {"data": Numbers(11)}])
def test_a_state_of_another_order_of_samples_is_refused(keywords):
    state = build(Numbers(10), [(4,)]).state_dict()
    loader = build(**({"data": Numbers(10), "script": [(4,)]} | keywords))
    with pytest.raises(StateError, match="build the loader as it was"):
        loader.load_state_dict(state)


def test_a_state_cannot_be_loaded_during_a_pass():
    loader = build(Numbers(10), [(4,)])
    for _ in loader:
        with pytest.raises(StateError, match="before the loop"):
            loader.load_state_dict(loader.state_dict())


def test_a_stream_that_became_shorter_than_the_saved_position_is_refused():
    loader = build(Stream(5), [(4,)])
    loader.load_state_dict({**loader.state_dict(), "position": 8})
    with pytest.raises(StateError, match="ended after 5 samples, the saved state is at sample 8"):
        list(loader)


# What DataLoader does


def test_batches_are_collated_as_by_dataloader():
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2.0)
    loader = build(data, [(3, 1)], shuffle=False, collate_fn=None)
    inputs, targets = next(iter(loader))
    assert torch.equal(inputs, torch.tensor([0, 1, 2]))
    assert torch.equal(targets, torch.tensor([0.0, 2.0, 4.0]))
    stream = build(Stream(10), [(3, 1)], rank=1, collate_fn=None)
    assert torch.equal(next(iter(stream)), torch.tensor([3]))


@pytest.mark.parametrize("data", [Numbers(9), Stream(9)])
def test_pin_memory_is_passed_on(data):
    loader = build(data, [(3,)], pin_memory=True)
    if torch.accelerator.is_available():
        pytest.skip("this is about machines without an accelerator")
    with pytest.warns(UserWarning, match="no accelerator is found"):
        assert len(list(loader)) == 3


def test_workers_are_set_up_as_by_dataloader():
    seen = []
    loader = build(
        Numbers(9),
        [(3,)],
        num_workers=1,
        worker_init_fn=seen.append,
        generator=torch.Generator().manual_seed(0),
        timeout=30,
        multiprocessing_context="fork",
    )
    assert sorted(flat(loader)) == list(range(9))
    assert seen == [], "the function runs in the worker"


@pytest.mark.parametrize("data", [Numbers(9), Stream(9)])
def test_a_keyword_that_dataloader_does_not_know_is_a_type_error(data):
    with pytest.raises(TypeError, match=r"HeteroDataLoader takes no colate_fn=: did you mean collate_fn\?"):
        build(data, [(3,)], colate_fn=None)


def test_the_items_of_a_batch_are_counted_and_padding_has_none():
    loaders = build_all(Numbers(5), [(2, 2)], shuffle=False, item_count=sum)
    assert [len(list(loader)) for loader in loaders] == [2, 2]
    assert [[entry.items for entry in feed_of(loader).entries] for loader in loaders] == [[1.0, 4.0], [5.0, 0.0]]
    assert [entry.items for entry in feed_of(loaders[1]).entries if entry.is_padding] == [0.0]


@pytest.mark.parametrize("items", [-1, float("nan"), float("inf")])
def test_an_impossible_count_of_items_is_refused(items):
    with pytest.raises(InvalidInputError, match="item_count returned"):
        list(build(Numbers(5), [(2,)], item_count=lambda batch: items))


# Streams


def test_the_epoch_of_a_stream_is_set_on_its_dataset():
    class Shifting(Stream):
        def set_epoch(self, epoch):
            self.shift = epoch * 100

        def __iter__(self):
            return (self.shift + number for number in range(4))

    loader = build(Shifting(4), [(4,)])
    assert [list(loader), list(loader)] == [[[0, 1, 2, 3]], [[100, 101, 102, 103]]]


@pytest.mark.parametrize(
    "mark",
    [
        {"_distributed": SimpleNamespace(rank=0, world_size=2)},
        {"pipeline": [as_list, SimpleNamespace(__name__="split_by_node")]},
    ],
    ids=["datasets", "webdataset"],
)
def test_a_stream_divided_by_rank_is_taken_as_each_ranks_own(mark):
    data = Stream(10)
    vars(data).update(mark)
    loaders = build_all(data, [(3, 1)])
    for loader in loaders:
        feed_of(loader).num_own_steps = 10
    assert [list(loader)[:4] for loader in loaders] == [
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]],
        [[0], [1], [2], [3]],
    ]
    assert [loader.sharded for loader in loaders] == [True, True]
    assert feed_of(loaders[0]).settings["sharded"] == 1
    with pytest.raises(InvalidInputError, match="sharded=False, but the iterable dataset is divided by rank"):
        build(data, [(3, 1)], sharded=False)
    assert len(list(build(data, [(5,)]))) == 2, "alone it is the whole"


def test_a_state_of_ranks_with_streams_of_their_own_is_for_as_many_ranks():
    loader = build(Stream(10), [(3, 1)], sharded=True)
    state = {**loader.state_dict(), "position": 8, "shards": [6, 2]}
    loader.load_state_dict(state)
    feed_of(loader).num_own_steps = 2
    assert next(iter(loader)) == [6, 7, 8]
    three = build(Stream(10), [(1, 1, 1)], sharded=True)
    three.load_state_dict(state)
    with pytest.raises(StateError, match="of 2 ranks that each had a stream of its own, and these are 3"):
        next(iter(three))
    assert feed_of(three).gave_up, "the other ranks are told"
    with pytest.raises(StateError, match="the loader's state lacks sharded"):
        loader.load_state_dict(build(Stream(10), [(3, 1)]).state_dict())


def test_an_iterable_dataset_cannot_be_shuffled():
    with pytest.raises(InvalidInputError, match="shuffle inside of it"):
        build(Stream(10), [(4,)], shuffle=True)


def test_an_empty_stream_makes_no_step():
    assert [list(loader) for loader in build_all(Stream(0), [(3, 1)])] == [[], []]


# A sampler


class Curriculum:
    """Indices from the shortest sample on, the epoch's first ones last; it keeps a count of its passes."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.num_passes = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"num_passes": self.num_passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_passes = state["num_passes"]

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return iter([(index + self.epoch + 10 * self.num_passes) % self.length for index in range(self.length)])


@quicker
@given(script=any_script, length=st.integers(1, 60))
def test_a_sampler_gives_the_order_over_all_ranks(script, length):
    order = [(7 * index) % 60 for index in range(length)]
    loaders = build_all(Numbers(60), script, sampler=order)
    assert len(loaders[0].sampler) == length, "which need not be that of the dataset"
    assert flat(steps_of(loaders)) == order
    assert flat(steps_of(loaders)) == order, "again in the next epoch"


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightedRandomSampler(torch.arange(1.0, 41.0), 50),
        lambda: RandomSampler(Numbers(40)),
        lambda: RandomSampler(Numbers(40), replacement=True, num_samples=30),
    ],
)
def test_ranks_that_draw_from_other_random_numbers_get_one_order_from_a_sampler(make):
    orders = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        loader = build(Numbers(40), [(1,)], sampler=make(), batch_size=2, seed=3)
        orders.append([flat(loader), flat(loader)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1], "another one in each epoch"


def test_a_sampler_resumes_where_it_was():
    torch.manual_seed(0)
    weights = torch.arange(1.0, 41.0)
    whole = flat(build(Numbers(40), [(4,)], sampler=WeightedRandomSampler(weights, 50)))
    loader = build(Numbers(40), [(4,)], sampler=WeightedRandomSampler(weights, 50))
    before = flat(steps_of([loader], 3))
    resumed = build(Numbers(40), [(5,)], sampler=WeightedRandomSampler(weights, 50))
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert before + flat(steps_of([resumed])) == whole


def test_a_sampler_with_a_state_goes_on_from_that_of_its_pass():
    loader = build(Numbers(40), [(4,)], sampler=Curriculum(40))
    first, second = flat(steps_of([loader])), flat(steps_of([loader], 2))
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["sampler"] == {"num_passes": 1}, "as it was before the pass that is to be resumed"
    resumed = build(Numbers(40), [(4,)], sampler=Curriculum(40))
    resumed.load_state_dict(state)
    second += flat(steps_of([resumed]))
    assert first == [(index + 10) % 40 for index in range(40)]
    assert second == [(index + 1 + 20) % 40 for index in range(40)], "epoch 1, second pass"


@pytest.mark.parametrize(
    "make",
    [
        lambda generator: RandomSampler(Numbers(40), generator=generator),
        lambda generator: SubsetRandomSampler(range(40), generator=generator),
        lambda generator: WeightedRandomSampler(torch.arange(1.0, 41.0), 50, generator=generator),
    ],
)
@pytest.mark.parametrize("num_steps", [None, 3])
def test_a_sampler_with_a_generator_of_its_own_goes_on_in_its_later_passes(make, num_steps):
    def fresh():
        return build(Numbers(40), [(4,)], sampler=make(torch.Generator().manual_seed(5)))

    whole = fresh()
    passes = [flat(steps_of([whole])) for _ in range(3)]
    assert passes[0] != passes[1]
    loader = fresh()
    steps_of([loader])
    second = flat(steps_of([loader], num_steps))
    resumed = fresh()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    second += [] if num_steps is None else flat(steps_of([resumed]))
    assert [second, flat(steps_of([resumed]))] == passes[1:]


def test_a_damaged_state_of_a_generator_is_refused():
    loader = build(Numbers(40), [(4,)], sampler=RandomSampler(Numbers(40), generator=torch.Generator()))
    for damage in ("", "zz", 7, [1]):
        with pytest.raises(StateError, match="the sampler's generator is damaged"):
            loader.load_state_dict({**loader.state_dict(), "sampler": damage})


def test_a_loaded_state_of_a_sampler_is_the_one_that_is_saved_again_whatever_was_read_before():
    loader = build(Numbers(40), [(4,)], sampler=Curriculum(40))
    steps_of([loader])
    steps_of([loader], 2)
    state = loader.state_dict()
    used = build(Numbers(40), [(4,)], sampler=Curriculum(40))
    steps_of([used], 3)
    used.load_state_dict(state)
    assert used.state_dict() == state


def test_a_sampler_without_a_length_gives_a_loader_without_one():
    loader = build(Numbers(10), [(4,)], sampler=Curriculum(10))
    with pytest.raises(TypeError, match="or a sampler, without a length"):
        len(loader)
    with pytest.raises(TypeError, match="or a sampler, without a length"):
        len(loader.sampler)
    assert len(list(loader)) == 3


def test_a_distributed_sampler_that_stays_in_the_script_is_read_and_not_followed():
    samplers = [DistributedSampler(Numbers(20), 2, rank, seed=4) for rank in (0, 1)]
    loaders = [build(Numbers(20), [(3, 1)], rank=rank, sampler=samplers[rank]) for rank in (0, 1)]
    orders = [epoch_order(20, seed=4, epoch=epoch, shuffle=True).tolist() for epoch in range(6)]
    assert flat(steps_of(loaders)) == orders[0]
    assert flat(steps_of(loaders)) == orders[1], "though set_epoch was not called"
    for sampler in samplers:
        sampler.set_epoch(5)
    assert flat(steps_of(loaders)) == orders[5]
    unshuffled = build(Numbers(20), [(4,)], sampler=DistributedSampler(Numbers(20), 1, 0, shuffle=False))
    assert flat(unshuffled) == list(range(20))


# An epoch that is longer or shorter than was said


class Said(IterableDataset):
    """The numbers below `length`, of which it says that there are `said`."""

    def __init__(self, length: int, said: int) -> None:
        self.length, self.said = length, said

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Growing:
    """A curriculum: 40 samples in the first epoch, 40 more in each later one."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 40 * (self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def places_of(loader: HeteroDataLoader, num_steps: int | None = None) -> list[tuple[int, int, bool]]:
    """Epoch and position that are saved after each step, and whether the loader takes it for the last."""
    places = []
    for _ in itertools.islice(loader, num_steps):
        state = loader.state_dict()
        places.append((state["epoch"], state["position"], loader.is_last))
    return places


@quick
@given(
    script=any_script,
    length=st.integers(1, 60),
    said=st.integers(1, 60),
    num_steps=st.integers(1, 20),
    sampled=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:this pass has more samples")
def test_an_epoch_of_another_length_than_was_said_is_resumed_exactly(script, length, said, num_steps, sampled):
    def fresh(script):
        data = Said(length, said)
        return build_all(Numbers(60), script, sampler=data) if sampled else build_all(data, script)

    loaders = fresh(script)
    before = flat(steps_of(loaders, num_steps))
    assert not loaders[0].is_last or len(before) == length
    resumed = fresh([(7,)])
    resumed[0].load_state_dict(loaders[0].state_dict())
    after = flat(steps_of(resumed))
    assert before + after == list(range(length)) if len(before) < length else after == list(range(length))


@pytest.mark.parametrize("keywords", [{}, {"num_workers": 1}, {"drop_last": True}])
def test_a_curriculum_that_grows_is_gone_through_to_its_end_in_each_epoch(keywords):
    loader = build(Numbers(200), [(16,)], sampler=Growing(), **keywords)
    whole = bool(keywords.get("drop_last"))
    for epoch, length in enumerate((40, 80, 120)):
        ends = [*range(16, length, 16), *([] if length % 16 == 0 else [length])]
        ends = [end for end in ends if not whole or end % 16 == 0]
        ends += [length] if length % 16 == 0 else []
        places = places_of(loader)
        assert places == [(epoch, end, False) for end in ends[:-1]] + [(epoch + 1, 0, True)]
    loader.set_epoch(1)
    for _ in loader:
        assert len(loader) == 5
        assert len(loader.sampler) == 80


def test_a_curriculum_resumes_in_an_epoch_that_is_longer_than_its_first_one():
    loader = build(Numbers(200), [(10,)], sampler=Growing())
    places_of(loader)
    assert places_of(loader, 5)[-1] == (1, 50, False)
    resumed = build(Numbers(200), [(20,)], sampler=Growing())
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert (resumed.epoch, len(resumed)) == (1, 2)
    assert flat(resumed) == list(range(50, 80))
    assert (resumed.epoch, len(flat(resumed))) == (2, 120)


def test_with_drop_last_a_curriculum_of_which_too_little_is_left_begins_its_next_epoch():
    loader = build(Numbers(200), [(10,)], sampler=Growing(), drop_last=True)
    state = {**loader.state_dict(), "epoch": 1, "position": 70}
    resumed = build(Numbers(200), [(20,)], sampler=Growing(), drop_last=True)
    with pytest.warns(RuntimeWarning, match="of epoch 1, 10 samples are left"):
        resumed.load_state_dict(state)
    assert resumed.epoch == 2


def test_a_stream_that_gives_more_than_it_says_is_told_once_and_ends_where_reading_ends():
    loader = build(Said(10, 4), [(4,)])
    with pytest.warns(RuntimeWarning, match="more samples than the 4 that len") as caught:
        places = [*places_of(loader), *places_of(loader)]
    assert places == [(0, 4, False), (0, 8, False), (1, 0, True), (1, 4, False), (1, 8, False), (2, 0, True)]
    assert len(caught) == 1


def test_a_stream_that_gives_less_than_it_says_ends_where_reading_ends():
    loader = build(Said(8, 12), [(4,)])
    assert places_of(loader) == [(0, 4, False), (0, 8, False)]
    assert (loader.state_dict()["epoch"], loader.epoch) == (1, 1)


# Before the model


def test_a_loader_may_be_built_before_its_model():
    loader = HeteroDataLoader(Numbers(10), batch_size=4, shuffle=False, collate_fn=as_list)
    assert (len(loader), loader.epoch, loader.dataset.length, loader.batch_size) == (3, 0, 10, 4)
    loader.sampler.set_epoch(2)
    loader.load_state_dict({**loader.state_dict(), "position": 4})
    with pytest.raises(InvalidInputError, match=r"no model yet: .*model=model.*loader=loader"):
        iter(loader)
    loader.bind(ScriptedFeed([(4,)]))
    assert list(loader) == [[4, 5, 6, 7], [8, 9]]
    assert loader.epoch == 3
    with pytest.raises(InvalidInputError, match="this loader has a model already"):
        loader.bind(ScriptedFeed([(4,)]))


def test_what_is_read_from_a_dataloader_can_be_read():
    plain = DataLoader(Numbers(10), batch_size=4)
    loader = build(Numbers(10), [(4,)], collate_fn=None, num_workers=2, drop_last=True)
    assert (loader.num_workers, loader.drop_last, loader.prefetch_factor) == (2, True, 2)
    assert loader.collate_fn is default_collate
    names = ("pin_memory", "timeout", "worker_init_fn", "generator", "persistent_workers", "multiprocessing_context")
    assert all(getattr(loader, name) == getattr(plain, name) for name in names)
    assert build(Numbers(10), [(4,)], collate_fn=as_list).collate_fn is as_list
    assert HeteroDataLoader(Numbers(10), batch_size=4).collate_fn is default_collate
    assert len(loader.sampler) == 10
    assert len(loader.batch_sampler) == 2
    loader.sampler.set_epoch(5)
    assert loader.epoch == 5
    with pytest.raises(InvalidInputError, match="iterate over the loader"):
        iter(loader.sampler)
    with pytest.raises(AttributeError, match="'HeteroDataLoader' object has no attribute 'batchsize'"):
        _ = loader.batchsize


# The same dataset on every rank


class Around(Numbers):
    """A dataset around another one."""

    def __init__(self, inner: Any, length: int | None = None) -> None:
        super().__init__(len(inner) if length is None else length)
        self.inner = inner


class Rows:
    """As a dataset of Hugging Face: rows that can be had as they are stored."""

    def __init__(self, numbers: Any) -> None:
        self._numbers, self._fingerprint = numbers, str(id(self))

    def __len__(self) -> int:
        return len(self._numbers)

    def with_format(self, name: str) -> Rows:
        assert name == "arrow"
        return self

    def __getitem__(self, places: list[int]) -> Rows:
        return Rows([self._numbers[place] for place in places])

    def to_pylist(self) -> list[dict[str, Any]]:
        return [{"image": {"bytes": b"%d" % number, "path": f"{id(self)}/a.png"}} for number in self._numbers]


class Table:
    """As a table of pandas."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: slice) -> Table:
        return Table(self.rows[places])

    @property
    def iloc(self) -> Table:
        return self

    def to_numpy(self) -> Any:
        return np.array(self.rows)


class Files(Numbers):
    def __init__(self, files: list, folder: str = "/data") -> None:
        super().__init__(len(files))
        self.files = [f"{folder}/{name}.png" for name in files]
        self.resolution = object()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Files(range(0, 10, 2)), Files(range(1, 10, 2))),
        (TensorDataset(torch.arange(9)[::3]), TensorDataset(torch.arange(9)[1::3])),
        (Subset(Numbers(9), [0, 3, 6]), Subset(Numbers(9), [1, 4, 7])),
        (Files([1, 2]), Files([2, 1])),
        (Subset(Numbers(9), range(0, 9, 3)), Subset(Numbers(9), range(1, 9, 3))),
        (Around(Subset(Numbers(9), [0, 3, 6])), Around(Subset(Numbers(9), [1, 4, 7]))),
        (Around({"train": Files([1, 2])}, 2), Around({"train": Files([2, 1])}, 2)),
        (ConcatDataset([Numbers(5), Files([1])]), ConcatDataset([Numbers(5), Files([2])])),
        (Rows(range(9)[::3]), Rows(range(9)[1::3])),
        (Around(Rows(range(5))), Around(Rows(range(5, 10)))),
        (Around(Table(range(5)), 5), Around(Table(range(5, 10)), 5)),
        (range(5), range(5, 10)),
    ],
)
def test_a_dataset_that_is_split_by_rank_is_known_by_its_lists(one, other):
    assert len(one) == len(other)
    assert list_fingerprint(one) == list_fingerprint(one)
    assert list_fingerprint(one) != list_fingerprint(other)


def test_the_same_files_in_other_folders_are_the_same_dataset():
    assert list_fingerprint(Files(range(200))) == list_fingerprint(Files(range(200), "/local/rank1"))
    assert list_fingerprint([["/a/x", 1]]) == list_fingerprint([["/b/x", 1]])


class Cached(Around):
    """Keeps what it has read, itself, and what cannot be compared."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.read: list[Any] = [None] * len(inner)
        self.by_index: dict[int, Any] = {}
        self.own, self.lock, self.kinds = self, threading.Lock(), {"a", "b"}

    def __getitem__(self, index: int) -> Any:
        self.read[index] = self.by_index[index] = self.inner[index]
        return self.read[index]


def test_what_one_rank_has_read_already_makes_no_other_dataset():
    fresh, used = Cached(Numbers(9)), Cached(Numbers(9))
    assert used[3] == 3
    assert list_fingerprint(fresh) == list_fingerprint(used)


def test_a_stored_dataset_is_known_by_its_rows_and_not_by_a_number_that_files_and_chance_make():
    one, other = Rows(range(5)), Rows(range(5))
    assert one._fingerprint != other._fingerprint
    assert list_fingerprint(one) == list_fingerprint(other)


def test_of_a_dataset_of_many_parts_and_entries_few_are_looked_at():
    class Counted(list):
        num_read = 0

        def __iter__(self) -> Any:
            raise AssertionError("read whole")

        def __getitem__(self, place: Any) -> Any:
            found = list.__getitem__(self, place)
            Counted.num_read += len(found)
            return found

    parts = Counted(Subset(Numbers(10**6), Counted(range(1000))) for _ in range(1000))
    data = ConcatDataset([Numbers(1)])
    data.datasets = parts
    list_fingerprint(data)
    assert Counted.num_read < 64 * 70 * 2


def test_rank_0_warns_of_a_dataset_that_is_another_on_other_ranks():
    feed = ScriptedFeed([(4,)])
    feed.alike = False
    with pytest.warns(RuntimeWarning, match="the dataset's samples differ between ranks"):
        HeteroDataLoader(Numbers(10), model=feed, batch_size=4)


@pytest.mark.parametrize(("num_samples", "num_warnings"), [(3, 1), (4, 0)])
def test_a_batch_size_above_the_length_of_the_dataset_is_warned_of(caplog, num_samples, num_warnings):
    with caplog.at_level("WARNING", "cannikin"):
        HeteroDataLoader(Numbers(num_samples), model=ScriptedFeed([(2, 2)]), batch_size=4)
    assert (
        sum("batch_size=4 is more than the 3 samples of the dataset" in text for text in caplog.messages)
        == num_warnings
    )


@pytest.mark.parametrize("make", [build, lambda *args: own_loaders(*args)[0][1]])
def test_a_dataset_that_has_grown_since_its_loader_was_built_is_told_once(make):
    data = Numbers(40)
    loader = make(data, [(4,)])
    data.length = 60
    with pytest.warns(RuntimeWarning, match="has 60 samples, and 40 when its loader was built") as caught:
        passes = [flat(loader), flat(loader)]
    assert [len(numbers) for numbers in passes] == [40, 40]
    assert len(caught) == 1


def test_a_dataset_that_grows_is_gone_through_in_the_order_of_a_random_sampler():
    data = Numbers(40)
    loader = build(data, [(7,)], sampler=RandomSampler(data))
    assert sorted(flat(loader)) == list(range(40))
    data.length = 60
    assert sorted(flat(loader)) == list(range(60))
    assert loader.state_dict()["epoch"] == 2


# Another order after a resume


class Blocks(Stream):
    """The numbers, of which each worker reads a block, as in the example of torch's documentation."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        size = -(-self.length // parts)
        return iter(range(first * size, min((first + 1) * size, self.length)))


def warned_of(loaders: Sequence[HeteroDataLoader], state: dict[str, Any]) -> list[str]:
    """What is said when a state is loaded and two passes are made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(2):
            assert steps_of(loaders)
    return [str(warning.message) for warning in caught]


def state_after(loaders: Sequence[HeteroDataLoader], num_steps: int = 3) -> dict[str, Any]:
    steps_of(loaders, num_steps)
    assert loaders[0].state_dict() == loaders[-1].state_dict()
    return loaders[0].state_dict()


@pytest.mark.parametrize(
    ("one", "other", "keywords"),
    [
        (Files(range(40)), Files(range(39, -1, -1)), {}),
        (Subset(Numbers(80), range(40)), Subset(Numbers(80), range(40, 80)), {}),
        (Files(range(40)), Files(range(39, -1, -1)), {"sampler": list(range(40))}),
    ],
)
def test_a_dataset_that_lists_its_samples_in_another_order_is_warned_of_when_a_pass_is_resumed(one, other, keywords):
    state = state_after(build_all(one, [(3, 1)], **keywords))
    (text,) = warned_of(build_all(other, [(3, 1)], **keywords), state)
    assert text.startswith("the lists in the dataset (files, labels, indices) are not those of the saved state, which ")
    assert "12 samples into epoch 0" in text
    assert "samples of this epoch may come twice or not at all; sort what is listed" in text
    assert 'loader.load_state_dict({**loader.state_dict(), "position": 0})' in text
    assert warned_of(build_all(other, [(3, 1)], **keywords), {**state, "position": 0}) == [], "an epoch begun anew"
    of_old = {name: state[name] for name in ("epoch", "position", "num_samples", "seed", "shuffle")}
    assert warned_of(build_all(other, [(3, 1)], **keywords), of_old) == [], "a state in which it is not said"


def test_a_dataloader_of_ones_own_hears_of_another_order_too():
    ((sampler, loader),) = own_loaders(Files(range(40)), [(4,)])
    next(iter(loader))
    state = sampler.state_dict()
    ((resumed, loader),) = own_loaders(Files(range(39, -1, -1)), [(4,)])
    resumed.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match="the lists in the dataset"):
        assert len(list(loader)) == 9


class Shuffled(Files):
    """Files that the script puts in an order of the epoch before each pass."""

    def begin(self, epoch: int) -> None:
        np.random.default_rng(epoch).shuffle(self.files)


def test_lists_that_are_the_same_when_the_pass_begins_say_nothing():
    loader, other = build(Shuffled(range(40)), [(4,)]), build(Shuffled(range(40)), [(4,)])
    for epoch in (0, 1):
        loader.dataset.files.sort()
        loader.dataset.begin(epoch)
        steps_of([loader], None if epoch == 0 else 3)
    state = loader.state_dict()
    other.dataset.files.sort()
    other.dataset.begin(1)
    assert warned_of([other], state) == []
    ended = build(Files(range(40)), [(4,)])
    steps_of([ended])
    assert warned_of([build(Files(range(39, -1, -1)), [(4,)])], ended.state_dict()) == [], "between two passes"
    elsewhere = build(Files(range(40), "/local"), [(4,)])
    assert warned_of([elsewhere], state_after([build(Files(range(40)), [(4,)])])) == []


def test_a_cache_that_was_full_and_is_empty_again_says_nothing():
    loader = build(Cached(Numbers(40)), [(4,)])
    steps_of([loader])
    assert None not in loader.dataset.read
    assert warned_of([build(Cached(Numbers(40)), [(4,)])], state_after([loader])) == []


@pytest.mark.parametrize("script", [[(4,)], [(3, 1)]])
def test_another_sampler_is_warned_of_when_a_pass_is_resumed(script):
    order = list(range(40))
    state = state_after(build_all(Numbers(40), script, sampler=order))
    assert (state["sample_at"], state["position"]) == (11, 12)
    assert warned_of(build_all(Numbers(40), script, sampler=order), state) == []
    (text,) = warned_of(build_all(Numbers(40), script, sampler=order[::-1]), state)
    assert text.startswith("sample 11 of the sampler is not the one of the saved state, which is 12 samples into")
    assert "build the sampler as it was" in text


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)])
def test_a_stream_that_other_workers_read_in_another_order_is_warned_of(before, after):
    state = state_after(build_all(Blocks(40), [(3, 1)], num_workers=before))
    assert warned_of(build_all(Blocks(40), [(3, 1)], num_workers=before), state) == []
    (text,) = warned_of(build_all(Blocks(40), [(3, 1)], num_workers=after), state)
    assert text.startswith("sample 8 of the stream is not the one of the saved state (num_workers: then ")
    assert "with as many workers" in text


def test_a_stream_in_the_same_order_from_any_number_of_workers_says_nothing():
    state = state_after(build_all(Stream(40), [(3, 1)], num_workers=2))
    assert warned_of(build_all(Stream(40), [(3, 1)]), state) == []


def test_another_stream_is_warned_of_when_a_pass_is_resumed():
    class Later(Stream):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5, 5 + self.length))

    state = state_after(build_all(Stream(40), [(3, 1)]))
    (text,) = warned_of(build_all(Later(40), [(3, 1)]), state)
    assert "sample 8 of the stream is not the one of the saved state, which" in text


@pytest.mark.parametrize(("script", "keywords"), [([(4,)], {}), ([(3, 1)], {"sharded": False})])
def test_where_samples_are_not_compared_other_workers_are_warned_of(script, keywords):
    state = state_after(build_all(Stream(40), script, num_workers=2, **keywords))
    (text,) = warned_of(build_all(Stream(40), script, **keywords), state)
    assert text.startswith("the stream is not read as it was for the saved state (num_workers: then 2 read, now 1)")
    assert "every n-th sample has one order for all" in text


def test_streams_of_ranks_that_other_workers_read_are_warned_of():
    before = build(Stream(40), [(3, 1)], sharded=True, num_workers=2)
    feed_of(before).num_own_steps = 10
    assert list(itertools.islice(before, 3))[-1] == [6, 7, 8]
    state = before.state_dict()
    assert state["num_readers"] == 2
    after = build(Stream(40), [(3, 1)], sharded=True)
    feed_of(after).num_own_steps = 20
    after.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match="then 2 read, now 1"):
        assert next(iter(after)) == [9, 10, 11]
    anew = build(Stream(40), [(3, 1)], sharded=True)
    anew.load_state_dict({**state, "position": 0})
    assert next(iter(anew)) == [0, 1, 2]


# Bad input


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"data": Numbers(0)}, "the dataset is empty"),
        ({"data": Stream(0, known=True)}, "the dataset is empty"),
        ({"data": Numbers(3), "drop_last": True}, "3 samples, less than one batch of batch_size=4"),
        ({"batch_size": 1}, "batch_size=1 is below the 2 ranks"),
        ({"batch_size": 4.0}, r"batch_size=4\.0 must be a whole number"),
        ({"local_batches": [3, 2]}, "sum to 5, not batch_size=4"),
        ({"local_bounds": (1, 1)}, "outside what the 2 ranks can hold, 2 to 2"),
        ({"sampler": BatchSampler([0, 1], 2, False)}, "sampler is a BatchSampler: give a Sampler or a list of single"),
        ({"sampler": iter([0, 1])}, "sampler is a list_iterator: .* once per epoch"),
        ({"sampler": 3}, "sampler is a int"),
        ({"sampler": [0, 1], "shuffle": True}, "sampler beside shuffle=True"),
        ({"sampler": [0, 1], "data": Stream(9)}, "sampler beside an iterable dataset"),
        ({"sampler": type("Ours", (DistributedSampler,), {})(range(9), 2, 0)}, "sampler is a Ours, a Distributed"),
        ({"batch_sampler": [[0, 1]]}, "takes no batch_sampler: .*HeteroBatchSampler"),
        ({"in_order": False}, "in_order=False"),
        ({"sharded": True}, "sharded=True is for iterable datasets"),
        ({"data": Stream(9), "sharded": True, "drop_last": True}, "leave drop_last out"),
        ({"item_count": 3}, "item_count=3 must be a callable"),
        ({"seed": -1}, "seed=-1"),
        ({"data": (number for number in range(9))}, "dataset is a generator: .*IterableDataset"),
    ],
)
def test_bad_arguments_are_refused_before_other_ranks_are_asked(keywords, message):
    arguments = {"data": Numbers(10), "batch_size": 4, **keywords}
    feed = ScriptedFeed([(3, 1)])
    with pytest.raises(InvalidInputError, match=message):
        HeteroDataLoader(arguments.pop("data"), model=feed, **arguments)
    assert feed.job is None


@pytest.mark.parametrize("model", [torch.nn.Linear(1, 1), SimpleNamespace(engine=3)])
def test_a_model_without_an_engine_is_refused(model):
    message = r"has no cannikin engine: pass the cannikin\.HeteroDataParallel .* cannikin\.attach"
    with pytest.raises(InvalidInputError, match=message):
        HeteroDataLoader(Numbers(10), model=model, batch_size=4)


def test_the_engine_is_told_what_ranks_must_agree_on():
    feed = ScriptedFeed([(3, 1)])
    loader = HeteroDataLoader(Numbers(10), model=SimpleNamespace(engine=feed), batch_size=4, max_batch_size=8, seed=7)
    assert feed.source() is loader
    assert feed.job == Job(
        num_ranks=2, batch_size=4, max_batch_size=8, min_local=(1, 1), max_local=feed.job.max_local, num_samples=10
    )
    assert feed.settings == {
        "num_samples": 10,
        "seed": 7,
        "shuffle": 1,
        "drop_last": 0,
        "prefetch_depth": 0,
        "item_count": 0,
    }


# HeteroBatchSampler in a DataLoader of the user's


def own_loaders(data: Dataset, script: Script, **keywords) -> list[tuple[HeteroBatchSampler, DataLoader]]:
    num_workers = keywords.pop("num_workers", 0)
    made = []
    for rank in range(len(script[0])):
        keywords.setdefault("batch_size", max(sum(script[0]), len(script[0])))
        feed = ScriptedFeed(script, rank)
        sampler = HeteroBatchSampler(data, model=feed, prefetch_depth=2 * num_workers, shuffle=False, **keywords)
        FEEDS[sampler] = feed
        made.append((sampler, DataLoader(data, batch_sampler=sampler, num_workers=num_workers, collate_fn=as_list)))
    return made


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=any_script, length=st.integers(1, 120))
def test_a_dataloader_of_ones_own_gives_every_sample_once_too(script, length):
    made = own_loaders(Numbers(length), script)
    seen = []
    for batches in zip(*(loader for _, loader in made), strict=True):
        for (sampler, _), batch in zip(made, batches, strict=True):
            entry = feed_of(sampler).entries[-1]
            assert len(batch) == (entry.local_batch or 2)
            seen += batch[: entry.local_batch]
    assert seen == list(range(length))


def test_with_workers_the_engine_hears_of_batches_in_order_as_they_are_cut():
    ((sampler, loader),) = own_loaders(Numbers(20), [(4,), (2,)], num_workers=1)
    iterator = iter(loader)
    batches = [next(iterator)]
    assert sampler.state_dict()["position"] == 10, "the batch in training and two more"
    batches += list(iterator)
    entries = feed_of(sampler).entries
    assert [len(batch) for batch in batches] == [entry.local_batch for entry in entries] == [4, 2, 4, 2, 4, 2, 2]
    assert feed_of(sampler).epochs_ended == 1


def test_the_sampler_resumes_at_the_sample_and_counts_its_steps():
    ((sampler, loader),) = own_loaders(Numbers(10), [(4,)])
    assert len(sampler) == len(loader) == 3
    next(iter(loader))
    ((resumed, rest),) = own_loaders(Numbers(10), [(3,)])
    resumed.load_state_dict(sampler.state_dict())
    assert len(rest) == 2
    assert list(rest) == [[4, 5, 6], [7, 8, 9]]
    assert (resumed.epoch, sampler.epoch) == (1, 1)


def test_a_later_iter_over_the_sampler_ends_the_one_before():
    ((sampler, _),) = own_loaders(Numbers(10), [(4,)])
    first, second = iter(sampler), iter(sampler)
    next(first)
    assert next(second) == [0, 1, 2, 3]
    with pytest.raises(InvalidInputError, match="ended by a later iter"):
        next(first)
    assert list(second) == [[4, 5, 6, 7], [8, 9]]
    assert (feed_of(sampler).epochs_begun, feed_of(sampler).epochs_ended) == (2, 2)


@pytest.mark.parametrize(("shuffle", "in_order"), [(False, True), (0, True), (None, False), (True, False)])
def test_the_sampler_shuffles_unless_told_not_to(shuffle, in_order):
    sampler = HeteroBatchSampler(Numbers(40), model=ScriptedFeed([(40,)]), batch_size=40, shuffle=shuffle)
    (indices,) = sampler
    assert (indices == list(range(40))) == in_order


def test_the_sampler_knows_its_own_keywords():
    with pytest.raises(TypeError, match=r"takes no prefetch_dept=: did you mean prefetch_depth\?"):
        HeteroBatchSampler(Numbers(10), model=ScriptedFeed([(4,)]), batch_size=4, prefetch_dept=2)


def test_frameworks_find_set_epoch_on_the_sampler_of_the_batch_sampler():
    ((sampler, loader),) = own_loaders(Numbers(10), [(4,)])
    loader.batch_sampler.sampler.set_epoch(4)
    assert sampler.epoch == 4


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"batch_size": 1}, "batch_size=1 is below the 2 ranks"),
        ({"batch_size": 12, "drop_last": True}, "leaves no step"),
        ({"batch_size": 4, "prefetch_depth": -1}, "prefetch_depth=-1"),
        ({"batch_size": 4, "data": 0}, "the dataset is empty"),
        ({"batch_size": 4, "local_batches": [2, 1]}, "sum to 3"),
    ],
)
def test_bad_arguments_of_the_sampler_are_refused(keywords, message):
    arguments = {"data": Numbers(10), **keywords}
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        HeteroBatchSampler(arguments.pop("data"), model=ScriptedFeed([(3, 1)]), **arguments)
