"""Ranks have one model at every step: BatchNorm's statistics by weight, all other buffers as under DDP."""

from __future__ import annotations

import alike_cases
import pytest
from ranks import run_ranks
from told import values


@pytest.fixture(scope="module")
def told():
    return run_ranks(alike_cases.run, 2, timeout_s=60)


@pytest.mark.parametrize("kind", ["wrapped", "attached"])
def test_ranks_have_the_same_statistics_after_every_step(told, kind):
    one, other = values(told, f"at each step, {kind}")
    assert len(one) == 7
    assert one == other


def test_statistics_are_those_of_the_whole_batch_though_it_is_shared_out_unequally(told):
    for found, truth in values(told, "truth"):
        assert found == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("kind", ["wrapped", "attached"])
def test_buffers_that_are_not_batch_norms_begin_each_forward_as_rank_0_has_them(told, kind):
    (before, after), (other_before, _) = values(told, f"other buffers, {kind}")
    assert before == other_before == [[0.0, 0.0, 0.0], *after[:-1]]
    assert before[-1][-1] == 9 * 9, "the count of rank 0, of 9 samples per step"


def test_a_rate_by_the_validation_in_mid_epoch_keeps_the_replicas_together(told):
    (rates, parameters), (other_rates, other_parameters) = values(told, "plateau")
    assert rates == other_rates
    assert rates[-1] < 0.1, "the rate never fell"
    assert parameters == other_parameters


def test_rank_0_may_evaluate_alone(told):
    one, other = values(told, "rank 0 alone")
    assert one == other


def test_two_forwards_may_go_before_a_backward_and_frozen_layers_keep_their_statistics(told):
    (one, frozen), (other, other_frozen) = values(told, "two forwards")
    assert one == other
    assert frozen == other_frozen == pytest.approx([0.1] * 3, rel=1e-7)


def test_batch_norm_trains_on_a_sample_that_whole_batches_would_leave_alone(told):
    one, other = values(told, "lone last samples")
    assert one == other == [([12, 7, 6], 3.0), ([7, 6], 2.0)]


def test_a_loss_that_is_a_sum_is_noticed_on_rank_0(told):
    (warning,), others = values(told, "a sum")
    assert "the loss seems to be a sum over the local batch" in warning
    assert others == []


@pytest.mark.parametrize("name", ["a mean", "a sum, not weighted"])
def test_nothing_is_said_of_a_loss_that_is_weighted_right(told, name):
    assert values(told, name) == [[], []]


def test_a_pass_that_ends_under_no_sync_ends_with_the_same_statistics(told):
    one, other = values(told, "accumulation")
    assert one == other
