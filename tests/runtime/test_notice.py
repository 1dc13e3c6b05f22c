"""Code that assumes equal batches is noticed, and where going on would be certainly wrong every rank stops."""

from __future__ import annotations

import notice_cases
import pytest
from ranks import run_ranks
from told import values


@pytest.fixture(scope="module")
def told():
    return run_ranks(notice_cases.run, 2, timeout_s=100)


@pytest.mark.parametrize(
    "name",
    ["gather", "gather at once", "gather, functional", "gather, a number per sample", "gather, begun late"],
)
def test_rows_of_the_batch_in_an_all_gather_are_warned_of_and_stop_every_rank_at_the_first_unequal_batches(told, name):
    (warned, raised, left), (others, other_raised, _) = values(told, name)
    assert len(warned) == 1
    assert "notice_cases.py:" in warned[0]
    assert "all_gather" in warned[0]
    assert others == []
    assert all("use `rows, numbers = model.all_gather(x)`" in text for text in (raised, other_raised))
    assert not left


@pytest.mark.parametrize("name", ["gather, unequal from the start", "gather, even, pinned"])
def test_where_batches_are_unequal_from_the_start_ranks_stop_before_the_first_gather(told, name):
    for warned, raised, left in values(told, name):
        assert (warned, left) == ([], False)
        assert "torch gathers equal shapes only" in raised


def test_a_vector_that_is_as_long_as_the_batch_by_chance_stops_nobody(told):
    (warned, raised, _), (_, other_raised, _) = values(told, "gather, a number per class")
    assert len(warned) == 1
    assert (raised, other_raised) == ("", "")


@pytest.mark.parametrize("name", ["sum", "sum, functional", "sum, begun late", "sum, even, pinned"])
def test_a_sum_over_ranks_in_the_loss_is_warned_of_with_its_line(told, name):
    (warned, raised, _), (others, _, _) = values(told, name)
    (text,) = warned
    assert "calls all_reduce in forward or loss" in text
    assert "model.global_mean(x)" in text
    assert 'weighting="none"' in text
    assert (raised, others) == ("", [])


@pytest.mark.parametrize(
    "name",
    ["nothing", "ours", "padded by hand", "sum after backward", "gather, even", "second, frozen", "second, follows"],
)
def test_nothing_is_said_of_what_is_right(told, name):
    assert values(told, name) == [([], "", False)] * 2


@pytest.mark.parametrize(
    "name", ["second, trains", "second, trains late", "second, piles up", "second, trains, even, pinned"]
)
def test_a_second_model_that_trains_under_plain_ddp_is_warned_of(told, name):
    (warned, raised, _), (others, _, _) = values(told, name)
    (text,) = warned
    assert "a Linear under plain DistributedDataParallel trains beside" in text
    assert "follows=the_first_model)" in text
    assert "cannikin.attach(ddp, its_optimizer, follows=" in text
    assert (raised, others) == ("", [])
