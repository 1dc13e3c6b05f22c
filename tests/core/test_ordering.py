"""Orders by position: permutations that nothing is stored for, and that look as random as stored ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cannikin.core.ordering import IndexOrder

quick = settings(max_examples=200, deadline=None)


@quick
@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_an_order_has_every_number_once(length, seed, epoch):
    assert sorted(IndexOrder(length, seed=seed, epoch=epoch).tolist()) == list(range(length))


@quick
@given(length=st.integers(1, 500), seed=st.none() | st.integers(0, 9), bounds=st.tuples(*[st.integers(0, 600)] * 2))
def test_a_slice_is_that_of_the_whole(length, seed, bounds):
    order = IndexOrder(length, seed=seed)
    assert order[slice(*bounds)].tolist() == order.tolist()[slice(*bounds)]
    assert len(order) == length


@pytest.mark.parametrize("length", [10**10, 2**62 + 1])
def test_far_more_numbers_than_memory_holds_are_below_the_length_and_not_twice_the_same(length):
    order = IndexOrder(length, seed=1)
    found = np.concatenate([order[start : start + 10_000] for start in (0, length // 3, length - 10_000)])
    assert len(np.unique(found)) == len(found) == 30_000
    assert 0 <= found.min() < found.max() < length
    assert IndexOrder(length, seed=None)[length - 2 :].tolist() == [length - 2, length - 1]


def test_orders_differ_between_seeds_epochs_and_lengths():
    orders = [IndexOrder(2000 + n, seed=s, epoch=e)[:50].tolist() for n in (0, 1) for s in (0, 1) for e in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 12


def excess(values, num_bins: int) -> float:
    """Chi-squared of values that should fall into every bin alike, in standard deviations above its mean."""
    counts = np.bincount(values, minlength=num_bins)
    mean = len(values) / num_bins
    return float((((counts - mean) ** 2).sum() / mean - (num_bins - 1)) / np.sqrt(2 * (num_bins - 1)))


@pytest.mark.parametrize(("num_rounds", "looks_random"), [(8, True), (3, False)])
def test_displacements_neighbours_and_strides_are_those_of_a_random_order(num_rounds, looks_random):
    length = 200_003
    worst = 0.0
    for seed in range(3):
        order = IndexOrder(length, seed=seed, num_rounds=num_rounds)[:]
        displacements = (order - np.arange(length)) % length
        bins = order * 64 // length
        worst = max(worst, excess(displacements * 64 // length, 64), excess(bins[:-1] * 64 + bins[1:], 4096))
        for lag in (1, 447, 448):  # 448 is the root of the length, the network's own stride
            worst = max(worst, excess((order[lag:] - order[:-lag]) % length * 4096 // length, 4096))
    assert (worst < 4.5) == looks_random, worst
