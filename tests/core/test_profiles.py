"""Starting from what an earlier run has learned of the same devices."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from clusters import excess

from benchmarks.synthetic import Training, random_cluster, slowed
from cannikin.core.perf import Cluster, Curve
from cannikin.core.planner import DevicePlanner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.split import optimal_split
from cannikin.core.values import Job
from cannikin.errors import InvalidInputError, StateError

Profiles = list[dict[str, Any] | None]


def exact_profiles(cluster: Cluster, total_batch: int, *, shared: bool = True) -> Profiles:
    """What a run without noise would store of this cluster, from small to large batches."""
    best = np.array(optimal_split(cluster, total_batch).local_batches)
    batches = np.maximum(np.round(best * np.array([[0.25], [0.5], [1.0], [1.5], [2.0]])), 1)
    forward_s, backward_s = cluster.forward.at(batches), cluster.backward.at(batches)
    return [
        {
            "batches": batches[:, rank].tolist(),
            "forward_s": forward_s[:, rank].tolist(),
            "backward_s": backward_s[:, rank].tolist(),
            "steps": [5.0, 5.0, 80.0, 5.0, 5.0],
            "noise": 0.01,
            "shared": {
                "num_ranks": cluster.num_ranks,
                "gammas": cluster.gammas[rank].tolist(),
                "tails_s": cluster.tails_s.tolist(),
            }
            if shared
            else None,
        }
        for rank in range(cluster.num_ranks)
    ]


def started(cluster: Cluster, total_batch: int, profiles: Profiles, rng: np.random.Generator | int = 0) -> Training:
    job = Job(num_ranks=cluster.num_ranks, batch_size=total_batch)
    controller = Controller(job)
    controller.start_from(json.loads(json.dumps(profiles)))
    return Training(controller, job, np.random.default_rng(rng))


def cluster_of(speeds: list[float]) -> Cluster:
    slowness = 1 / np.array(speeds)
    return Cluster.two_point(
        forward=Curve(fixed_s=0.004 * slowness, per_sample_s=1e-4 * slowness),
        backward=Curve(fixed_s=0.004 * slowness, per_sample_s=3e-4 * slowness),
        gamma=0.2,
        overlapped_s=0.02,
        last_s=0.001,
    )


TRIO = cluster_of([1.0, 0.5, 0.25])


def test_with_right_profiles_the_first_plan_is_within_three_per_cent_of_the_best() -> None:
    for seed in range(40):
        cluster, total_batch = random_cluster(np.random.default_rng(seed))
        decision = started(cluster, total_batch, exact_profiles(cluster, total_batch)).decision
        plan = decision.plan
        assert excess(cluster, plan.local_batches) < 0.03, f"seed {seed}: {plan.reason}"
        if decision.phase != "even":
            assert decision.phase == "optperf"
            assert f"from stored profiles of all {cluster.num_ranks} ranks" in plan.reason


def test_what_a_noisy_run_stores_lets_the_next_one_begin_where_it_ended() -> None:
    values = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        cluster, total_batch = random_cluster(rng)
        job = Job(num_ranks=cluster.num_ranks, batch_size=total_batch)
        first = Controller(job)
        Training(first, job, rng).run(cluster, 60)
        plan = started(cluster, total_batch, first.profiles()).decision.plan
        values.append(excess(cluster, plan.local_batches))
    assert (np.array(values) <= 0.05).sum() >= 38
    assert (np.array(values) <= 0.03).sum() >= 36


def test_profiles_that_are_wrong_about_a_rank_are_overcome_within_thirty_steps() -> None:
    values = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        stored, total_batch = random_cluster(rng)
        cluster = slowed(stored, int(rng.integers(stored.num_ranks)), 2.0)
        training = started(stored, total_batch, exact_profiles(stored, total_batch), rng)
        values.append(excess(cluster, training.run(cluster, 30).local_batches))
    assert (np.array(values) <= 0.05).sum() >= 38
    assert (np.array(values) <= 0.03).sum() >= 36


def test_a_rank_that_has_slowed_down_since_its_profile_was_stored_is_found_out_in_the_first_window() -> None:
    training = started(TRIO, 192, exact_profiles(TRIO, 192), 2)
    training.run(slowed(TRIO, 1, 2.0), 5, noise=0.03, outliers=0.0)
    (change,) = training.changes
    assert change.rank == 1
    assert change.factor == pytest.approx(2.0, rel=0.1)


def test_without_communication_times_the_first_plan_balances_the_computation() -> None:
    plan = started(TRIO, 192, exact_profiles(TRIO, 192, shared=False)).decision.plan
    compute_s = TRIO.forward.at(plan.local_batches) + TRIO.backward.at(plan.local_batches)
    assert compute_s.max() / compute_s.min() < 1.05
    assert plan.predicted_step_s == pytest.approx(compute_s.max(), rel=0.02)


@pytest.mark.parametrize("change", ["another number of ranks", "other buckets", "one without"])
def test_communication_times_are_used_only_where_ranks_and_buckets_agree(change: str) -> None:
    profiles = exact_profiles(TRIO, 192)
    first = profiles[0]
    assert first is not None
    if change == "another number of ranks":
        first["shared"]["num_ranks"] = 4
    elif change == "other buckets":
        first["shared"] |= {"gammas": [1.0], "tails_s": [0.1]}
    else:
        first["shared"] = None
    without = started(TRIO, 192, exact_profiles(TRIO, 192, shared=False)).decision.plan
    assert started(TRIO, 192, profiles).decision.plan == without
    assert started(TRIO, 192, exact_profiles(TRIO, 192)).decision.plan.predicted_step_s != without.predicted_step_s


def test_where_a_rank_is_unknown_the_plan_stays_even_until_it_has_been_measured() -> None:
    profiles = exact_profiles(TRIO, 192)
    profiles[1] = None
    training = started(TRIO, 192, profiles)
    plan = training.decision.plan
    assert plan.local_batches == (64, 64, 64)
    assert "no stored profile of rank 1" in plan.reason
    training.run(TRIO, 5, noise=0.02)
    assert training.decision.phase == "optperf", "the known ranks need no second batch size"
    assert excess(TRIO, training.run(TRIO, 15, noise=0.02).local_batches) < 0.03


def test_equal_ranks_start_even() -> None:
    equal = cluster_of([1.0, 1.0, 1.0])
    decision = started(equal, 192, exact_profiles(equal, 192)).decision
    assert (decision.phase, decision.plan.local_batches) == ("even", (64, 64, 64))


def test_profiles_that_end_far_below_the_batch_are_not_trusted_beyond_twice_theirs() -> None:
    plan = started(TRIO, 9600, exact_profiles(TRIO, 192)).decision.plan
    assert plan.local_batches == (3200, 3200, 3200)
    assert "stored profiles" in plan.reason


def test_a_profile_says_what_was_measured_and_goes_through_json() -> None:
    job = Job(num_ranks=3, batch_size=192)
    controller = Controller(job)
    assert controller.profiles() == [None, None, None]
    Training(controller, job, np.random.default_rng(0)).run(TRIO, 40, noise=0.0, outliers=0.0)
    for rank, profile in enumerate(json.loads(json.dumps(controller.profiles(), allow_nan=False))):
        for batch, forward_s in zip(profile["batches"], profile["forward_s"], strict=True):
            assert forward_s == pytest.approx(TRIO.forward.at([batch] * 3)[rank], rel=0.02)
        assert profile["shared"]["tails_s"] == pytest.approx(TRIO.tails_s, rel=1e-6)
        assert profile["shared"]["gammas"] == pytest.approx(TRIO.gammas[rank], rel=1e-6)
        assert min(profile["steps"]) > 0


def test_a_stored_profile_weighs_no_more_than_a_few_steps() -> None:
    planner = started(TRIO, 192, exact_profiles(TRIO, 192)).planner
    assert isinstance(planner, DevicePlanner)
    for profile in planner.profiles():
        assert profile is not None
        assert sum(profile["steps"]) < 10


@pytest.mark.parametrize(
    "damage",
    [
        {"batches": []},
        {"batches": [0.5] * 5},
        {"batches": ["many"] * 5},
        {"forward_s": [0.01] * 4},
        {"forward_s": [0.0] * 5},
        {"backward_s": [-1.0] * 5},
        {"backward_s": [float("nan")] * 5},
        {"steps": None},
        {"noise": "loud"},
        {"noise": 1e200},
        {"forward_s": [1e-300] * 5},
        {"backward_s": [1e300] * 5},
        {"batches": [10**400] * 5},
        {"shared": {}},
        {"max_batch": 0},
        {"max_batch": "many"},
        {"shared": {"num_ranks": 3, "gammas": [0.5], "tails_s": [0.1]}},
        {"shared": {"num_ranks": 3, "gammas": [0.5, 1.0], "tails_s": [0.1, 0.2]}},
    ],
)
def test_a_damaged_profile_is_refused_by_rank_and_changes_nothing(damage: dict[str, Any]) -> None:
    profiles = exact_profiles(TRIO, 192)
    assert profiles[1] is not None
    profiles[1] |= damage
    controller = Controller(Job(num_ranks=3, batch_size=192))
    before = controller.state_dict()
    with pytest.raises(StateError, match="rank 1"):
        controller.start_from(profiles)
    assert controller.state_dict() == before


def test_what_is_no_profile_at_all_is_refused() -> None:
    controller = Controller(Job(num_ranks=3, batch_size=192))
    for profiles in ([None, None], [None, 7, None], [None, {}, None]):
        with pytest.raises(StateError):
            controller.start_from(profiles)  # type: ignore[arg-type]


def test_profiles_come_before_the_first_window() -> None:
    job = Job(num_ranks=3, batch_size=192)
    controller = Controller(job)
    Training(controller, job, np.random.default_rng(0)).run(TRIO, 5)
    with pytest.raises(InvalidInputError, match="too late"):
        controller.start_from(exact_profiles(TRIO, 192))
