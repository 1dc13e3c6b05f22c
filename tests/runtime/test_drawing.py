"""Drawing without a DataLoader: how many samples to make, in scripts that make their own."""

from __future__ import annotations

from itertools import pairwise

import drawing_cases as cases
import pytest
from ranks import run_ranks, run_ranks_with_errors
from told import run_cases, values

CASES = {
    "like nanoGPT": cases.like_nanogpt,
    "bounded": cases.bounded,
    "a wrong keyword": cases.with_a_wrong_keyword,
    "two loaders": cases.with_a_loader_already,
    "a late state": cases.state_loaded_too_late,
    "a slow rank": cases.slow_rank,
}


@pytest.fixture(scope="module")
def told():
    """What every case said on both ranks, in one launch."""
    return run_ranks(run_cases, 2, CASES, timeout_s=60)


def test_a_script_that_draws_ahead_accumulates_and_evaluates_on_one_rank_has_the_right_gradient(told):
    for error, num_splits, num_waiting in values(told, "like nanoGPT"):
        assert error < 1e-12
        assert num_splits > 3
        assert num_waiting == 1, "the batch that was drawn ahead"


def test_draws_keep_to_pinned_batches_by_next_and_by_iter(told):
    assert values(told, "bounded") == [[(5, 6)] * 2, [(1, 6)] * 2]


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("a wrong keyword", "TypeError", "batches takes no shuffle=: that is for HeteroDataLoader"),
        ("two loaders", "InvalidInputError", "has a loader already"),
        ("a late state", "StateError", "load it before the loop"),
    ],
)
def test_what_cannot_be_is_refused_with_advice(told, case, kind, text):
    for answers in told:
        assert answers[case].kind == kind
        assert text in answers[case].text


def test_the_split_follows_the_ranks_speeds(told):
    one, other = values(told, "a slow rank")
    assert one == other
    assert sum(one) == 24
    assert one[0] > 2 * one[1]


def test_numbers_of_samples_are_consecutive_over_ranks_steps_and_a_resume_on_other_ranks():
    told = run_ranks(cases.draw, 2, 25, None, timeout_s=30)
    states = [state for _, state in told]
    assert states[0] == states[1]
    told_after = run_ranks(cases.draw, 3, 20, states[0], timeout_s=30)
    ranges = [seen[step] for step in range(25) for seen, _ in told]
    assert states[0]["position"] == ranges[-1][1]
    ranges += [seen[step] for step in range(20) for seen, _ in told_after]
    assert ranges[0][0] == 0
    assert all(end == start for (_, end), (start, _) in pairwise(ranges))
    assert len({end - start for start, end in ranges}) > 3


def test_a_rank_that_draws_once_more_than_another_is_found_out():
    answers = run_ranks_with_errors(cases.one_more_on_rank_0, 2, timeout_s=30)
    assert {kind for kind, _ in answers.values()} == {"error"}
    assert "batches were taken" in answers[0][1]
