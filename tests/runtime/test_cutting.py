"""How steps are cut, jobs are made of a loader's arguments, and a place in the data is kept."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cannikin.core.cutting import Bookmark, EpochState, cut, make_job, num_steps
from cannikin.core.values import NO_MAX
from cannikin.errors import InvalidInputError, StateError

splits = st.lists(st.integers(1, 40), min_size=1, max_size=6)
lengths = st.integers(2, 200)  # of an epoch


def counts_of(split: list[int], remaining: int, min_local: int = 1) -> list[int]:
    return [count for _, count in cut(split, remaining, min_local=min_local)]


# cut


@given(split=splits, remaining=st.integers(0, 300), min_local=st.integers(1, 2))
def test_slices_are_contiguous_in_rank_order_and_take_all_there_is(split, remaining, min_local):
    slices = cut(split, remaining, min_local=min_local)
    position = 0
    for (start, count), most in zip(slices, split, strict=True):
        assert start == position
        assert 0 <= count <= most + (set(split) == {min_local})
        position += count
    shares = min_local == 2 <= min(split) and remaining == sum(split) + 1
    assert position == min(remaining, sum(split)) or (shares and remaining // 2 <= position <= remaining)


@given(split=splits, extra=st.integers(0, 50), min_local=st.integers(1, 2))
def test_a_full_batch_is_cut_as_planned(split, extra, min_local):
    extra += extra == 1 < min_local  # a single one that is left is another matter
    assert counts_of(split, sum(split) + extra, min_local) == split


@given(split=splits, data=st.data())
def test_a_short_batch_leaves_no_rank_empty_while_there_are_samples_enough(split, data):
    remaining = data.draw(st.integers(0, sum(split)))
    counts = counts_of(split, remaining)
    assert sum(count > 0 for count in counts) == min(remaining, len(split))


@given(split=splits, data=st.data())
def test_a_short_batch_is_proportional_to_the_plan(split, data):
    remaining = data.draw(st.integers(0, sum(split)))
    shares = [remaining * size / sum(split) for size in split]
    counts = counts_of(split, remaining)
    if min(shares) >= 1:
        assert all(np.floor(share) <= count <= np.ceil(share) for share, count in zip(shares, counts, strict=True))
    for (a, count_a), (b, count_b) in itertools.combinations(zip(split, counts, strict=True), 2):
        assert a == b or (count_a - count_b) * (a - b) >= 0, "a rank with a larger local batch gets no less"


@given(split=st.lists(st.integers(2, 40), min_size=1, max_size=6), data=st.data())
def test_with_batch_norm_no_rank_gets_a_single_sample_and_more_than_its_batch_only_where_it_must(split, data):
    remaining = data.draw(st.integers(0, sum(split)))
    counts = counts_of(split, remaining, min_local=2)
    assert 1 not in counts or remaining == 1
    possible = any(  # some set of ranks can take them, at least 2 and at most b_i each
        2 * len(ranks) <= remaining <= sum(ranks)
        for n in range(len(split) + 1)
        for ranks in itertools.combinations(split, n)
    )
    assert all(count <= most for count, most in zip(counts, split, strict=True)) or not possible
    if remaining >= 2 * len(split):
        assert min(counts) >= 2


@given(plans=st.lists(st.lists(st.integers(2, 12), min_size=3, max_size=3), min_size=1, max_size=4), length=lengths)
def test_with_batch_norm_no_epoch_ends_in_a_single_sample_whatever_the_plans(plans, length):
    left, steps = length, 0
    while left:
        counts = counts_of(plans[steps % len(plans)], left, min_local=2)
        assert 1 not in counts
        left, steps = left - sum(counts), steps + 1
    assert steps == num_steps(length, sum(plans[0]), min_local=2) or len(plans) > 1


@pytest.mark.parametrize(("length", "steps"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_with_batch_norm_a_sample_joins_a_step_of_two_which_cannot_share(length, steps):
    left, taken = length, []
    while left:
        taken += counts_of([2], left, min_local=2)
        left -= taken[-1]
    assert (len(taken), num_steps(length, 2, min_local=2)) == (steps, steps)
    assert 1 not in taken or length == 1


@pytest.mark.parametrize(
    ("split", "remaining", "min_local", "counts"),
    [
        ([97, 1, 1, 1], 50, 1, [47, 1, 1, 1]),
        ([4, 4, 4], 2, 1, [1, 1, 0]),
        ([4, 4, 4], 7, 1, [3, 2, 2]),
        ([4, 4, 4], 5, 2, [3, 2, 0]),
        ([2, 8, 4], 1, 1, [0, 1, 0]),
        ([2, 8, 4], 1, 2, [0, 1, 0]),
        ([2, 2], 3, 2, [3, 0]),
        ([2, 2], 5, 2, [3, 0]),
        ([8, 4], 13, 2, [5, 2]),
        ([8, 4], 14, 2, [8, 4]),
        ([8, 1], 10, 2, [8, 1]),
        ([3, 2, 2], 8, 2, [2, 2, 0]),
        ([3, 0], 2, 1, [2, 0]),
    ],
)
def test_short_batches_worked_by_hand(split, remaining, min_local, counts):
    assert counts_of(split, remaining, min_local) == counts


@given(remaining=st.integers(0, 1000), total=st.integers(1, 100))
def test_num_steps_counts_the_cuts(remaining, total):
    left, steps = remaining, 0
    while left >= total:
        left, steps = left - total, steps + 1
    assert num_steps(remaining, total, drop_last=True) == steps
    assert num_steps(remaining, total) == steps + (left > 0)


# make_job


def test_a_pinned_split_leaves_nothing_to_choose():
    job = make_job(num_ranks=2, batch_size=32, local_batches=[24, 8], num_samples=100)
    assert (job.min_local, job.max_local, job.max_batch_size) == ((24, 8), (24, 8), None)


def test_bounds_are_one_pair_or_one_a_rank_and_a_side_may_be_open():
    assert make_job(num_ranks=3, batch_size=32, local_bounds=(2, 16)).bounds[0].tolist() == [2, 2, 2]
    job = make_job(num_ranks=2, batch_size=32, local_bounds=[(1, 20), (None, None)], has_batch_norm=True)
    assert [bound.tolist() for bound in job.bounds] == [[1, 2], [20, NO_MAX]]


def test_batch_norm_asks_for_two_samples_a_rank():
    assert make_job(num_ranks=2, batch_size=4, has_batch_norm=True).min_local == (2, 2)
    with pytest.raises(InvalidInputError, match="below 4: it is the total over all ranks, and the model has BatchNorm"):
        make_job(num_ranks=2, batch_size=3, has_batch_norm=True)


def test_the_total_batch_never_outgrows_the_epoch():
    assert make_job(num_ranks=2, batch_size=8, max_batch_size=4096, num_samples=100).max_batch_size == 100
    assert make_job(num_ranks=2, batch_size=8, max_batch_size=4096, num_samples=5).max_batch_size == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 2}, "batch_size=2 is below the 3 ranks"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"batch_size": 32.0}, r"batch_size=32\.0 must be a whole number"),
        ({"batch_size": True}, "batch_size=True must be a whole number"),
        ({"batch_size": "32"}, "batch_size='32' must be a whole number"),
        ({"batch_size": 32, "max_batch_size": 31}, "max_batch_size=31 is below batch_size=32"),
        ({"batch_size": 32, "max_batch_size": 64.5}, r"max_batch_size=64\.5"),
        ({"batch_size": 32, "local_bounds": (1, 10)}, "outside what the 3 ranks can hold, 3 to 30"),
        ({"batch_size": 32, "local_bounds": (11, 40)}, "outside what the 3 ranks can hold, 33 to 120"),
        ({"batch_size": 32, "local_bounds": (20, 10)}, "need 1 <= min_local <= max_local"),
        ({"batch_size": 32, "local_bounds": [(1, 32), (1, 32)]}, "one such pair for each of the 3 ranks"),
        ({"batch_size": 32, "local_bounds": (1, 2, 3)}, "one such pair for each of the 3 ranks"),
        ({"batch_size": 32, "local_bounds": 16}, r"local_bounds=16 must be \(low, high\), or one such pair for each"),
        ({"batch_size": 32, "local_bounds": (0, 32)}, "low of local_bounds=0"),
        ({"batch_size": 32, "local_batches": 16}, "local_batches=16 must be a list"),
        ({"batch_size": 32, "local_batches": [16, 16]}, "has 2 sizes for 3 ranks"),
        ({"batch_size": 32, "local_batches": [16, 8, 4]}, "sum to 28, not batch_size=32"),
        ({"batch_size": 32, "local_batches": [32, 1, -1]}, r"local_batches\[2\]=-1"),
        ({"batch_size": 32, "local_batches": [16, 8, 8], "max_batch_size": 64}, "max_batch_size has no use"),
        ({"batch_size": 32, "local_batches": [16, 8, 8], "local_bounds": (1, 64)}, "local_bounds has no use"),
    ],
)
def test_impossible_jobs_are_refused_with_their_numbers(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        make_job(num_ranks=3, **arguments)


# Bookmark


def bookmark(**changes) -> Bookmark:
    return Bookmark(**({"num_samples": 10, "seed": 3, "shuffle": True} | changes))


def test_a_broken_off_pass_abandons_its_epoch_here_but_not_in_the_checkpoint():
    mark = bookmark()
    mark.begin()
    mark.advance(4)
    mark.end()
    other = bookmark()
    other.load_state_dict(mark.state_dict())
    assert mark.begin() == EpochState(epoch=1)
    assert other.begin() == EpochState(epoch=0, position=4)
    assert other.begin() == EpochState(epoch=1)


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_only():
    mark = bookmark()
    mark.load_state_dict({**mark.state_dict(), "epoch": 2, "position": 6})
    mark.set_epoch(2)
    assert mark.next == EpochState(epoch=2, position=6)
    mark.set_epoch(5)
    assert mark.next == EpochState(epoch=5)
    assert mark.state_dict()["epoch"] == 5


def test_set_epoch_during_a_pass_is_for_the_next_one():
    mark = bookmark()
    mark.begin()
    mark.set_epoch(7)
    assert (mark.epoch, mark.state_dict()["epoch"]) == (0, 0)
    mark.finish()
    assert (mark.epoch, mark.state_dict()["epoch"], mark.begin()) == (7, 7, EpochState(epoch=7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 11}, "the saved num_samples=11 is not this loader's 10"),
        ({"seed": 4}, "the saved seed=4 is not this loader's 3"),
        ({"shuffle": 0}, "the saved shuffle=0 is not this loader's 1"),
        ({"position": 11}, "saved position=11 must be .* at most 10"),
        ({"position": 1.5}, r"saved position=1\.5"),
        ({"epoch": -1}, "saved epoch=-1"),
    ],
)
def test_a_state_of_other_data_is_refused(changes, message):
    mark = bookmark()
    with pytest.raises(StateError, match=message):
        mark.load_state_dict({**mark.state_dict(), **changes})
    assert mark.next == EpochState()


def test_a_state_that_lacks_something_or_comes_during_a_pass_is_refused():
    mark = bookmark()
    with pytest.raises(StateError, match="lacks num_samples, position, seed, shuffle"):
        mark.load_state_dict({"epoch": 1})
    mark.begin()
    with pytest.raises(StateError, match="load it before the loop"):
        mark.load_state_dict(mark.state_dict())


@pytest.mark.parametrize("seed", [-1, 2**63, 0.5, None])
def test_a_seed_is_a_whole_number_of_63_bits(seed):
    with pytest.raises(InvalidInputError, match="seed="):
        bookmark(seed=seed)


@pytest.mark.parametrize("epoch", [-1, 1.0, "1"])
def test_an_epoch_is_a_whole_number(epoch):
    with pytest.raises(InvalidInputError, match="epoch="):
        bookmark().set_epoch(epoch)


@pytest.mark.parametrize(
    "state", [7, None, [1], {"shards": 3}, {"epoch": 0.5}, {"position": float("nan")}, {"epoch": "x"}]
)
def test_what_is_no_state_of_a_loader_is_refused_as_such(state):
    mark = Bookmark(num_samples=10, seed=0, shuffle=True)
    whole = {**mark.state_dict(), **state} if isinstance(state, dict) else state
    with pytest.raises(StateError):
        mark.load_state_dict(whole)
    assert mark.next == EpochState()
