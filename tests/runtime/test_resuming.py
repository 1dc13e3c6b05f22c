"""A run that resumes on other ranks: what was learned is found again by device, and what the user says now counts."""

from __future__ import annotations

import pytest
import resuming_cases
from ranks import run_ranks
from resuming_cases import TOTAL


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("resuming"))


@pytest.fixture(scope="module")
def three(folder):
    """Runs on three ranks that begin with what one of them saved, as each rank tells it."""
    return run_ranks(resuming_cases.three_ranks, 3, folder, timeout_s=90)


@pytest.fixture(scope="module")
def two(folder, three):
    """Runs on two ranks that begin with the same state."""
    return run_ranks(resuming_cases.two_ranks, 2, folder, timeout_s=60)


def test_every_rank_begins_with_the_same_plan(three, two):
    for told in (three, two):
        for name, first in told[0].items():
            assert all(rank[name].local_batches == first.local_batches for rank in told), name
            assert all(rank[name].progress == first.progress for rank in told), name


def test_where_ranks_have_changed_places_each_device_keeps_its_share(three):
    fast, middle, slow = three[0]["same"].local_batches
    assert fast > 1.3 * middle > 1.3 * slow
    for name in ("moved", "moved, loaded late"):
        assert three[0][name].local_batches == (middle, slow, fast)


def test_a_new_batch_size_counts_and_progress_is_counted_in_it(three):
    for name in ("smaller batch", "smaller batch, loaded late"):
        begun = three[0][name]
        assert sum(begun.local_batches) == TOTAL // 2
        assert begun.local_batches[0] > begun.local_batches[2]
        assert begun.progress == pytest.approx(2 * three[0]["same"].progress)


def test_new_bounds_count(three):
    fast, middle, slow = three[0]["bounded"].local_batches
    assert fast == 13
    assert fast + middle + slow == TOTAL
    assert middle > slow


def test_on_fewer_ranks_the_devices_that_are_left_share_the_batch_by_what_is_known_of_them(two):
    begun = two[0]["fewer"]
    slow, fast = begun.local_batches
    assert fast > 2 * slow
    assert "resumed with 2 ranks after 3" in begun.reason
    assert two[0]["of a kind"].local_batches == (TOTAL // 2, TOTAL // 2)


def test_devices_that_the_state_does_not_know_begin_alike_or_with_stored_profiles(two):
    assert two[0]["other devices"].local_batches == (TOTAL // 2, TOTAL // 2)
    for name in ("other devices, profiles", "other devices, profiles, loaded late"):
        slow, fast = two[0][name].local_batches
        assert fast > 2 * slow
