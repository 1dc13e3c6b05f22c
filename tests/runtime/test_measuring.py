"""What is measured while training, where it is written down, and what the plans make of it."""

from __future__ import annotations

import math
import socket
from functools import partial
from statistics import median

import measuring_cases as cases
import pytest
from measuring_cases import EVALUATION_S, LOAD_S
from ranks import run_ranks
from told import run_cases, values

from cannikin.runlog import EventRecord, Header, PlanRecord, WindowRecord

BAD_STEPS = (7, 22)
TWO_RANKS = {
    "slow data, even": partial(cases.slow_data, sample_s=LOAD_S, policy="even"),
    "slow data": partial(cases.slow_data, sample_s=LOAD_S, policy="cannikin"),
    "one part": partial(cases.loop_of_micro_batches, num_parts=(None, None)),
    "three parts on one rank": partial(cases.loop_of_micro_batches, num_parts=(1, 3)),
    "bad gradients, cannikin": partial(cases.bad_gradients, policy="cannikin", bad_steps=BAD_STEPS),
    "bad gradients, even": partial(cases.bad_gradients, policy="even", bad_steps=BAD_STEPS),
    "every size counts": partial(cases.steps_that_count, chooses_kernels=False),
    "new sizes are slow": partial(cases.steps_that_count, chooses_kernels=True),
}
ONE_RANK = {
    "free total": partial(cases.train_alone, max_batch_size=192),
    "fixed total": partial(cases.train_alone, max_batch_size=None),
    "fused": partial(cases.progress_with_skipped_steps, fused=True),
    "not fused": partial(cases.progress_with_skipped_steps, fused=False),
    "failing observer": cases.failing_observer,
}


@pytest.fixture(scope="module")
def two():
    return run_ranks(run_cases, 2, TWO_RANKS, timeout_s=100)


@pytest.fixture(scope="module")
def alone():
    return run_ranks(run_cases, 1, ONE_RANK, timeout_s=100)


def of_kind(records, kind):
    return [record for record in records if isinstance(record, kind)]


# Records


def test_the_header_says_where_every_rank_runs(two):
    (_, records), (_, none) = values(two, "slow data, even")
    (header,) = of_kind(records, Header)
    assert records[0] is header
    assert header.world_size == len(header.ranks) == 2
    for rank in header.ranks:
        assert rank.host == socket.gethostname()
        assert rank.device.endswith(", 1 thread")
    assert (header.policy, header.model.name, header.job.batch_size) == ("even", "TinyNet", 12)
    assert none == [], "rank 0 alone tells"


def test_loading_is_a_line_of_its_own_in_every_window(two):
    (_, records), _ = values(two, "slow data, even")
    windows = of_kind(records, WindowRecord)
    assert len(windows) >= 4
    for rank, sample_s in enumerate(LOAD_S):
        loader_ms = median(window.loader_ms[rank] for window in windows)
        assert 6 * sample_s * 1e3 <= loader_ms < 3 * 6 * sample_s * 1e3
        before_ms = median(window.before_ms[rank] for window in windows)
        assert before_ms >= loader_ms, "a loader without workers holds the computation up"


def test_an_evaluation_between_steps_is_the_users_own_time_and_not_the_ranks_speed(two):
    """Once in every window of five steps, so that it takes a fifth of its time a step."""
    (_, records), _ = values(two, "slow data, even")
    for window in of_kind(records, WindowRecord):
        for rank, sample_s in enumerate(LOAD_S):
            assert window.other_ms[rank] > 0.8 * EVALUATION_S * 1e3 / 5
            assert window.other_ms[rank] < window.before_ms[rank] + EVALUATION_S * 1e3
            assert window.before_ms[rank] < 6 * sample_s * 1e3 + 0.8 * EVALUATION_S * 1e3


@pytest.mark.parametrize("policy", ["cannikin", "even"])
def test_a_gradient_that_is_not_finite_leaves_an_event_under_every_policy(two, policy):
    records, _ = values(two, f"bad gradients, {policy}")
    events = [event for event in of_kind(records, EventRecord) if event.kind == "nonfinite"]
    assert [event.data["count"] for event in events] == [1, 1]
    for bad, event in zip(BAD_STEPS, events, strict=True):
        assert bad < event.step <= bad + 5
    assert "2 so far" in events[-1].text
    assert sum(window.num_skipped for window in of_kind(records, WindowRecord)) == 2


def test_the_first_step_at_each_size_does_not_count_on_a_device_that_chooses_kernels_for_it(two):
    every, _ = values(two, "every size counts")
    assert [[counts for _, counts in steps].count(False) for steps in every] == [1, 1], "a run's first step never does"
    later, _ = values(two, "new sizes are slow")
    for steps in later:
        sizes = [size for size, _ in steps]
        assert len(steps) >= 30
        assert set(sizes) == {2, 4}
        assert [k for k, (_, counts) in enumerate(steps) if not counts] == sorted(sizes.index(size) for size in (2, 4))


# Plans


def final_split(steps):
    return steps[-1].plan


def test_a_rank_whose_data_comes_slowly_is_given_fewer_samples_without_workers(two):
    (steps, records), (others, _) = values(two, "slow data")
    fast, slow = final_split(steps)
    assert final_split(others) == (fast, slow)
    assert fast > 1.5 * slow
    assert of_kind(records, PlanRecord)[-1].local_batches == (fast, slow)


@pytest.mark.parametrize("name", ["one part", "three parts on one rank"])
def test_a_loop_that_always_cuts_its_batches_learns(two, name):
    (steps, records), _ = values(two, name)
    fast, slow = final_split(steps)
    assert fast > 1.5 * slow
    assert all(window.num_valid >= 2 for window in of_kind(records, WindowRecord)), "its steps count"


def test_one_process_alone_gets_a_noise_scale_and_may_change_the_total_batch(alone):
    (free,) = values(alone, "free total")
    assert free.totals[0] == 12
    assert max(free.totals) > 12
    assert free.noise_scale > 0
    assert "biased" in free.flags
    assert "noise scale" in free.reason


def test_one_process_alone_with_a_fixed_total_keeps_it_and_compares_nothing(alone):
    (fixed,) = values(alone, "fixed total")
    assert set(fixed.totals) == {12}
    assert math.isnan(fixed.noise_scale)


@pytest.mark.parametrize("name", ["fused", "not fused"])
def test_a_step_that_the_scaler_skips_is_no_progress(alone, name):
    ((progress, moved),) = values(alone, name)
    assert moved == [number != 3 for number in range(8)]
    assert progress == [1, 2, 3, 3, 4, 5, 6, 7]


def test_an_observer_that_fails_is_left_out_and_training_goes_on(alone):
    ((num_steps, warned),) = values(alone, "failing observer")
    assert num_steps == 12
    assert ["observer Failing failed" in w.text for w in warned] == [True]
