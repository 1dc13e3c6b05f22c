"""What a job would do on other ranks, by what was learned on those it has: against clusters that are known exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import Training, measure
from cannikin.core.advice import LearnedCluster
from cannikin.core.perf import Cluster, Curve
from cannikin.core.planner import Noise
from cannikin.core.policies.cannikin import Controller
from cannikin.core.split import optimal_split
from cannikin.core.values import NO_MAX, Job
from cannikin.errors import InvalidInputError, StateError

DEVICES = [("a100", "node0"), ("a100", "node0"), ("v100", "node1"), ("t4", "node2")]
TRUE = Cluster(
    forward=Curve(fixed_s=[0.01, 0.01, 0.012, 0.02], per_sample_s=[4e-4, 4e-4, 8e-4, 2e-3]),
    backward=Curve(fixed_s=[0.01, 0.01, 0.014, 0.02], per_sample_s=[9e-4, 9e-4, 1.7e-3, 4e-3]),
    gammas=[0.3, 0.6, 1.0],
    tails_s=[0.03, 0.012, 0.004],
)
TOTAL = 96


def trained(max_batch_size: int | None = None, num_steps: int = 80, **options) -> Controller:
    """A planner that has run on the true cluster."""
    job = Job(num_ranks=4, batch_size=TOTAL, max_batch_size=max_batch_size, **options)
    planner = Controller(job)
    Training(planner, job, np.random.default_rng(0)).run(
        TRUE, num_steps, noise=0.01, outliers=0.0, sqnorms=(1.0, 400.0)
    )
    return planner


@pytest.fixture(scope="module")
def learned() -> LearnedCluster:
    return trained().cluster(DEVICES)


@pytest.mark.parametrize("rank", range(4))
def test_what_a_rank_is_worth_is_what_the_true_cluster_says(learned, rank):
    outlook = learned.without(rank).outlook()
    truth = optimal_split(TRUE.without(rank), TOTAL)
    assert outlook.step_s == pytest.approx(truth.step_s, rel=0.04)
    assert sum(outlook.local_batches) == TOTAL
    assert outlook.goodput_per_s == pytest.approx(TOTAL / outlook.step_s)


@pytest.mark.parametrize(("device", "like"), [("a100", 0), ("v100", 2), ("t4", 3)])
def test_one_more_device_is_worth_what_the_true_cluster_says(learned, device, like):
    outlook = learned.plus(learned.like(device)).outlook()
    truth = optimal_split(TRUE.take([0, 1, 2, 3, like]), TOTAL)
    assert outlook.step_s == pytest.approx(truth.step_s, rel=0.04)


def test_several_ranks_may_leave_and_join_at_once(learned):
    outlook = learned.plus(learned.like("a100"), 2).without(2, 3).outlook()
    truth = optimal_split(TRUE.take([0, 0, 0, 0]), TOTAL)
    assert outlook.step_s == pytest.approx(truth.step_s, rel=0.04)
    assert outlook.local_batches == (24, 24, 24, 24)


def test_ranks_keep_their_numbers_when_others_leave(learned):
    rest = learned.without(1)
    assert [rank.rank for rank in rest.ranks] == [0, 2, 3]
    assert [rank.rank for rank in rest.without(2).ranks] == [0, 3]
    with pytest.raises(InvalidInputError, match="rank 1 is not in this run: it has ranks 0, 2, 3"):
        rest.without(1)


def test_somebody_must_stay(learned):
    with pytest.raises(InvalidInputError, match="no rank would be left"):
        learned.without(0, 1, 2, 3)


def test_a_device_that_only_a_profile_knows_is_as_fast_as_where_it_was_measured(learned):
    profile = trained().profiles()[3]
    stored = learned.without(3).from_profile("t4", profile)
    own = learned.ranks[3]
    assert stored.forward.curve.at([10.0]) == pytest.approx(own.forward.curve.at([10.0]), rel=0.03)
    assert stored.backward.curve.at([10.0]) == pytest.approx(own.backward.curve.at([10.0]), rel=0.03)
    outlook = learned.without(3).plus(stored).outlook()
    assert outlook.step_s == pytest.approx(learned.outlook().step_s, rel=0.03)


@pytest.mark.parametrize("damage", [{"batches": []}, {"forward_s": [-1.0]}, {"noise": "much"}])
def test_a_damaged_profile_is_refused(learned, damage):
    with pytest.raises(StateError, match="the profile of t4 has"):
        learned.from_profile("t4", {**trained().profiles()[3], **damage})


def test_where_the_total_may_grow_more_ranks_get_a_larger_one(learned):
    growing = replace(
        learned, max_batch_size=4 * TOTAL, noise=Noise(signal_sqnorm=1.0, noise_trace=float(TOTAL), num_steps=50)
    )
    more = growing.plus(growing.like("a100"), 4)
    assert TOTAL <= growing.outlook().total_batch < more.outlook().total_batch <= 2 * TOTAL
    assert more.outlook().efficiency < growing.outlook().efficiency <= 1.0


def test_it_looks_at_totals_as_far_as_the_planner_would_go_next(learned):
    noise = Noise(signal_sqnorm=1.0, noise_trace=100.0 * TOTAL, limits=(3.0 * TOTAL, 1e9), num_steps=50)
    far = replace(learned, max_batch_size=40 * TOTAL, noise=noise)
    assert far.outlook().total_batch == 5 * TOTAL  # by a factor of 2 + phi/B, phi at its lower limit
    assert far.outlook().extrapolated


def test_where_batches_pile_up_a_sample_is_worth_what_it_is_in_all_of_them(learned):
    noise = Noise(signal_sqnorm=1.0, noise_trace=40.0 * TOTAL, num_batches=4, num_steps=50)
    growing = replace(learned, max_batch_size=4 * TOTAL, noise=noise)
    total = growing.outlook().total_batch
    assert total > TOTAL
    assert growing.outlook().efficiency == pytest.approx(44 * TOTAL / (40 * TOTAL + 4 * total))


@pytest.mark.parametrize("noise", [None, Noise(signal_sqnorm=float("nan"), noise_trace=float("nan"))])
def test_without_a_noise_scale_the_total_stays(learned, noise):
    assert replace(learned, max_batch_size=4 * TOTAL, noise=noise).outlook().total_batch == TOTAL


def test_ranks_that_cannot_hold_the_total_have_no_goodput_and_a_reason(learned):
    small = replace(learned, ranks=tuple(replace(rank, max_batch=30) for rank in learned.ranks))
    outlook = small.without(0).outlook()
    assert outlook.reason == "a total batch of 96 does not fit: the 3 ranks take at most 90 samples"
    assert outlook.goodput_per_s == 0
    assert json.loads(json.dumps(outlook.as_dict(), allow_nan=False))["possible"] is False


def test_a_batch_far_from_all_that_was_measured_is_marked(learned):
    assert not learned.outlook().extrapolated
    assert learned.without(0, 1, 2).outlook().extrapolated


def test_curves_near_the_split_in_force_are_what_programs_get(learned):
    told = json.loads(json.dumps(learned.as_dict(), allow_nan=False))
    for rank, batch in zip(told["ranks"], learned.local_batches, strict=True):
        seconds = (rank["backward_ms"]["fixed"] + rank["backward_ms"]["per_sample"] * batch) / 1e3
        truth = TRUE.backward.fixed_s[rank["rank"]] + TRUE.backward.per_sample_s[rank["rank"]] * batch
        assert seconds == pytest.approx(truth, rel=0.03)
    assert [rank["device"] for rank in told["ranks"]] == ["a100", "a100", "v100", "t4"]
    assert told["communication_ms"]["tails"] == pytest.approx([30.0, 12.0, 4.0], rel=0.1)


def test_a_cluster_that_ranks_have_left_and_joined_is_plain_types_too(learned):
    changed = learned.plus(learned.like("t4")).without(1)
    told = json.loads(json.dumps(changed.as_dict(), allow_nan=False))
    assert [rank["rank"] for rank in told["ranks"]] == [0, 2, 3, None]
    assert told["communication_ms"]["num_ranks"] == 4
    assert told["local_batches"] == list(learned.local_batches), "what is in force now"


def test_bounds_that_memory_has_set_are_learned_too():
    job = Job(num_ranks=4, batch_size=TOTAL)
    planner, rng = Controller(job), np.random.default_rng(0)
    window = measure(TRUE, [[30, 30, 26, 10]] * 5, rng, noise=0.01, outliers=0.0)
    planner.decide(replace(window, max_batch=np.array([30, NO_MAX, NO_MAX, NO_MAX])), job, 5)
    assert [rank.max_batch for rank in planner.cluster(DEVICES).ranks] == [30, NO_MAX, NO_MAX, NO_MAX]


def test_before_anything_was_measured_there_is_no_cluster():
    assert Controller(Job(num_ranks=4, batch_size=TOTAL)).cluster(DEVICES) is None
