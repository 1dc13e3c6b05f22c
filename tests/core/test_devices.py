"""What was learned belongs to devices: ranks leave, join and change places, and nothing that is known gets lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from clusters import excess

from benchmarks.synthetic import Training, measure, random_cluster
from cannikin.core.devices import MOST_DEPARTED, DeviceId, Origin, find_departed, find_origins, match_devices
from cannikin.core.perf import Cluster, Curve
from cannikin.core.policies import make_planner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.prior import DataSheet
from cannikin.core.values import NO_MAX, Job
from cannikin.errors import StateError

SPEEDS = (68, 43, 17)
TOTAL = 128


def cluster_of(speeds: tuple[float, ...]) -> Cluster:
    """Ranks of these speeds, and a ring between them."""
    n, slowness = len(speeds), 100 / np.array(speeds)
    return Cluster.two_point(
        forward=Curve(fixed_s=0.002 * slowness, per_sample_s=1e-4 * slowness),
        backward=Curve(fixed_s=0.002 * slowness, per_sample_s=3e-4 * slowness),
        gamma=0.2,
        overlapped_s=0.02 * (n - 1) / n,
        last_s=0.001 * (n - 1) / n,
    )


def learned(speeds: tuple[float, ...] = SPEEDS, *, num_steps: int = 60, **job: Any) -> Controller:
    """A planner that has trained on ranks of these speeds."""
    whole = Job(num_ranks=len(speeds), batch_size=TOTAL, **job)
    planner = Controller(whole)
    Training(planner, whole, np.random.default_rng(0)).run(cluster_of(speeds), num_steps, noise=0.03)
    return planner


def first_plan(planner: Controller) -> tuple[int, ...]:
    return planner.decide(None, Job(num_ranks=1, batch_size=1), 0).plan.local_batches


@pytest.mark.parametrize("origins", [[0, 1], [2, 0], [1], [2, 0, 1], [0, 1, 2, 1], [2, 2, 2], [0, 0, 1, 1, 2, 2]])
def test_on_any_of_the_devices_in_any_order_the_first_plan_is_within_three_per_cent_of_the_best(
    origins: list[int],
) -> None:
    planner = learned().with_ranks(origins)
    cluster = cluster_of(tuple(SPEEDS[rank] for rank in origins))
    assert excess(cluster, first_plan(planner)) < 0.03
    training = Training(planner, Job(num_ranks=len(origins), batch_size=TOTAL), np.random.default_rng(1))
    assert not training.changes, "nothing is taken for a change of speed"
    assert excess(cluster, training.run(cluster, 20, noise=0.03).local_batches) < 0.03


def test_a_rank_that_leaves_or_joins_leaves_the_planner_that_was_asked_as_it_is() -> None:
    planner = learned()
    before = json.dumps(planner.state_dict())
    fewer, more = planner.with_ranks([0, 2]), planner.with_ranks([0, 1, 2, planner.profiles()[0]])
    assert json.dumps(planner.state_dict()) == before
    assert excess(cluster_of((68, 17)), first_plan(fewer)) < 0.03
    assert excess(cluster_of((68, 43, 17, 68)), first_plan(more)) < 0.03
    Training(fewer, Job(num_ranks=2, batch_size=TOTAL), np.random.default_rng(0)).run(cluster_of((68, 17)), 10)
    assert json.dumps(planner.state_dict()) == before


def test_the_noise_scale_the_total_batch_and_the_bounds_stay_when_a_rank_leaves() -> None:
    job = Job(num_ranks=3, batch_size=TOTAL, max_batch_size=8 * TOTAL, max_local=(400, 300, 200))
    planner = Controller(job)
    training = Training(planner, job, np.random.default_rng(0))
    total = training.run(cluster_of(SPEEDS), 100, noise=0.03, sqnorms=(1.0, 1e4)).total_batch
    assert total > TOTAL
    resumed = planner.with_ranks([1, 2]).decide(None, job, 0)
    assert resumed.noise == training.decision.noise
    assert resumed.plan.total_batch == min(total, 500)
    assert (np.array(resumed.plan.local_batches) <= (300, 200)).all()


def test_of_a_ring_of_more_ranks_all_reduces_take_longer_by_the_rings_factor() -> None:
    planner = learned()
    was = planner.model().cluster
    for origins, factor in (([0, 1], 3 / 4), ([0, 1, 2, 0], 9 / 8), ([2, 0, 1], 1.0), ([0], 0.0)):
        now = planner.with_ranks(origins).model().cluster
        assert was is not None
        assert now is not None
        assert now.tails_s == pytest.approx(was.tails_s * factor)
    alone = planner.with_ranks([0])
    again = alone.with_ranks([0, 0]).model().cluster
    assert again is not None
    assert not again.tails_s.any(), "one rank alone says nothing about a ring"


def test_a_new_device_begins_by_its_data_sheet_beside_the_known_ones() -> None:
    fast, slow = (DataSheet(num_multiprocessors=m, capability=(8, 0), clock_mhz=1000.0) for m in (100, 50))
    planner = learned((100, 100))
    job = Job(num_ranks=3, batch_size=TOTAL)
    resumed = Controller(job)
    resumed.start_by([fast, fast, slow])
    resumed.load_state_dict(planner.state_dict(), [0, 1, None])
    one, two, new = first_plan(resumed)
    assert one == pytest.approx(two, abs=2)
    assert new == pytest.approx(0.5**0.8 * one, rel=0.25)


@pytest.mark.parametrize("speed", [100, 30, 10])
def test_a_device_of_which_nothing_is_known_begins_as_the_middle_one_and_is_soon_found_out(speed: float) -> None:
    planner = learned().with_ranks([0, 1, 2, None])
    batches = first_plan(planner)
    assert batches[3] == pytest.approx(batches[1], abs=2)
    cluster = cluster_of((68, 43, 17, speed))
    plan = Training(planner, Job(num_ranks=4, batch_size=TOTAL), np.random.default_rng(0)).run(cluster, 20, noise=0.03)
    assert excess(cluster, plan.local_batches) < 0.03


@pytest.mark.parametrize("factor", [0.6, 1.4, 2.0])
def test_a_second_device_of_a_kind_that_is_slower_or_faster_than_the_first_is_soon_found_out(factor: float) -> None:
    planner = learned().with_ranks([0, 1, 2, 1])
    planner = planner.with_ranks([3, 0, 1, 2])  # before it was measured
    cluster = cluster_of((43 / factor, 68, 43, 17))
    training = Training(planner, Job(num_ranks=4, batch_size=TOTAL), np.random.default_rng(0))
    assert excess(cluster, training.run(cluster, 20, noise=0.03).local_batches) < 0.03


def test_caps_of_memory_travel_with_devices_until_a_rank_knows_its_own() -> None:
    job = Job(num_ranks=3, batch_size=TOTAL)
    planner = learned()
    caps = np.array([40, NO_MAX, NO_MAX])
    window = measure(cluster_of(SPEEDS), [[40, 60, 28]] * 5, np.random.default_rng(0), noise=0.03)
    object.__setattr__(window, "max_batch", caps)
    planner.decide(window, job.limited(caps, TOTAL), 65)
    assert [profile and profile["max_batch"] for profile in planner.profiles()] == [40, None, None]
    moved = planner.with_ranks([2, 0, 1])
    assert first_plan(moved)[1] == 40
    assert first_plan(planner.with_ranks([1, 2, planner.profiles()[0]]))[2] <= 40
    training = Training(moved, job, np.random.default_rng(0))
    cluster = cluster_of((17, 68, 43))
    assert training.run(cluster, 20, noise=0.03).local_batches[1] <= 40, "the rank has not said anything yet"
    window = measure(cluster, [training.plans[-1].local_batches] * 5, np.random.default_rng(0), noise=0.03)
    object.__setattr__(window, "max_batch", np.array([NO_MAX, 50, NO_MAX]))
    training.show(window)
    assert training.run(cluster, 20, noise=0.03).local_batches[1] > 40


def test_a_state_that_was_saved_before_larger_batches_ran_resumes_with_those_that_ran() -> None:
    """Else a plan that runs out of memory in its first step does so again after every restart."""
    planner = learned(num_steps=5)
    assert planner.decide(None, Job(num_ranks=3, batch_size=TOTAL), 0).phase == "guess"
    assert max(first_plan(planner)) > 43
    resumed = Controller(Job(num_ranks=3, batch_size=TOTAL))
    resumed.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    assert first_plan(resumed) == (43, 43, 42)
    training = Training(resumed, Job(num_ranks=3, batch_size=TOTAL), np.random.default_rng(0))
    plan = training.run(cluster_of(SPEEDS), 20, noise=0.03)
    assert excess(cluster_of(SPEEDS), plan.local_batches) < 0.03


@pytest.mark.parametrize("policy", ["cannikin", "lb-bsp", "adaptdl", "paper"])
@pytest.mark.parametrize(
    ("changed", "total"),
    [
        ({"batch_size": 16}, 16),
        ({"batch_size": 100}, 100),
        ({"batch_size": 16, "max_batch_size": 32}, 32),
        ({"batch_size": 16, "max_batch_size": 500}, 64),
        ({"batch_size": 64, "max_local": 22}, 64),
    ],
)
def test_a_resumed_run_keeps_to_the_batch_size_and_the_bounds_that_it_is_given(
    policy: str, changed: dict[str, Any], total: int
) -> None:
    job = Job(num_ranks=3, batch_size=64, num_samples=6400)
    planner = make_planner(policy, job)
    Training(planner, job, np.random.default_rng(0)).run(cluster_of(SPEEDS), 40, noise=0.03)
    job = Job(**{"num_ranks": 3, "num_samples": 6400, **changed})
    resumed = make_planner(policy, job)
    resumed.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    plan = resumed.decide(None, job, 0).plan
    assert plan.total_batch == total
    assert max(plan.local_batches) <= job.bounds[1][0]
    if policy == "cannikin" and "max_local" not in changed:
        assert excess(cluster_of(SPEEDS), plan.local_batches) < 0.03


def test_another_total_far_from_all_that_was_measured_is_planned_by_the_same_curves() -> None:
    state = learned().state_dict()
    for total in (10, 30 * TOTAL):
        resumed = Controller(Job(num_ranks=3, batch_size=total))
        resumed.load_state_dict(state)
        assert excess(cluster_of(SPEEDS), first_plan(resumed)) < 0.15
        assert first_plan(resumed)[0] > 2 * first_plan(resumed)[2]


def test_random_clusters_that_lose_a_rank_or_gain_one_of_a_known_kind_go_on_near_the_best() -> None:
    values = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        cluster, total = random_cluster(rng, max_ranks=6)
        n, job = cluster.num_ranks, Job(num_ranks=cluster.num_ranks, batch_size=total)
        planner = Controller(job)
        Training(planner, job, rng).run(cluster, 60, noise=0.03)
        leaver = int(rng.integers(n))
        for origins in ([rank for rank in range(n) if rank != leaver], [*range(n), leaver]):
            values.append(excess(cluster.take(origins), first_plan(planner.with_ranks(origins))))
    assert (np.array(values) <= 0.03).mean() >= 0.9
    assert max(values) < 0.15


def test_a_state_or_a_profile_that_is_refused_changes_nothing() -> None:
    state = learned(num_steps=10).state_dict()
    planner = Controller(Job(num_ranks=3, batch_size=TOTAL))
    before = json.dumps(planner.state_dict())
    for damaged in (state | {"noise": {}}, state | {"learner": {}}, state | {"max_batch": ["many"] * 3}):
        with pytest.raises(StateError):
            planner.load_state_dict(damaged)
    with pytest.raises(StateError, match="rank 1"):
        planner.load_state_dict(state, [0, {"batches": "many"}, 2])
    assert json.dumps(planner.state_dict()) == before


def test_origins_that_cannot_be_are_refused() -> None:
    planner = learned(num_steps=5)
    wrong: list[list[Origin]] = [[0, 3], [0, -1], [0, {}, 1]]
    for origins in wrong:
        with pytest.raises(StateError):
            planner.with_ranks(origins)
    with pytest.raises(StateError, match="origins"):
        Controller(Job(num_ranks=2, batch_size=8)).load_state_dict(planner.state_dict(), [0, 1, 2])


A, B = DeviceId(host="a", name="H200", uuid="GPU-1"), DeviceId(host="a", name="H200", uuid="GPU-2")
T4, LAB = DeviceId(host="b", name="T4"), DeviceId(host="a", name="lab GPU of speed 17", uuid="GPU-1")


@pytest.mark.parametrize(
    ("present", "found"),
    [
        ([A, B, T4, LAB], [0, 1, 2, 3]),
        ([LAB, T4, B, A], [3, 2, 1, 0]),
        ([B], [1]),
        ([DeviceId(host="z", name="H200", uuid="GPU-2")], [1]),  # moved to another host
        ([DeviceId(host="a", name="H200", uuid="GPU-9"), B], [0, 1]),  # a card was replaced
        ([DeviceId(host="z", name="T4")], [2]),  # a machine was replaced
        ([T4, T4, DeviceId(name="T4")], [2, 2, 2]),
        ([DeviceId(host="a", name="L4")], [None]),
        ([DeviceId(host="a", name="lab GPU of speed 68", uuid="GPU-1")], [None]),
    ],
)
def test_devices_are_found_by_uuid_then_by_host_and_name_then_by_name(
    present: list[DeviceId], found: list[int | None]
) -> None:
    assert match_devices([A, B, T4, LAB], present) == found


def stored(rank: int, *, saved_s: float, factor: float = 1.0, uuid: str = "GPU-1") -> dict[str, Any]:
    """A profile of the trio's rank whose device has since become slower by a factor."""
    profile = learned().profiles()[rank]
    assert profile is not None
    slower = {name: [factor * seconds for seconds in profile[name]] for name in ("forward_s", "backward_s")}
    return {**profile, **slower, "saved_s": saved_s, "host": "a", "uuid": uuid}


def origins_of(present: list[DeviceId], profiles: list[Any]) -> list[Origin]:
    """What is known of these devices after a run on A, B and T4 that was saved at 100 s."""
    return find_origins(learned().state_dict(), [A, B, T4], present, profiles, saved_s=100.0)


def test_a_measured_device_gives_way_to_a_later_profile_of_itself_that_differs_and_to_no_other() -> None:
    later = stored(0, saved_s=101.0, factor=1.5)
    assert origins_of([A, T4], [later, None]) == [later, 2]
    for profile in (
        stored(0, saved_s=99.0, factor=1.5),
        stored(0, saved_s=101.0),
        stored(0, saved_s=101.0, factor=1.5, uuid="GPU-2"),
        {name: value for name, value in later.items() if name != "saved_s"},
    ):
        assert origins_of([A, T4], [profile, None]) == [0, 2]


def test_another_device_of_a_known_kind_takes_the_newer_of_state_and_profile() -> None:
    earlier, later = stored(0, saved_s=99.0), stored(0, saved_s=101.0)
    third = DeviceId(host="c", name="H200", uuid="GPU-3")
    assert origins_of([A, B, third], [earlier] * 3) == [0, 1, 0]
    assert origins_of([A, B, third], [later] * 3) == [0, 1, later]


def test_a_device_that_the_state_does_not_know_takes_its_profile() -> None:
    profile = stored(0, saved_s=1.0)
    new = DeviceId(host="c", name="L4")
    assert origins_of([new, A, new], [profile, None, None]) == [profile, 0, None]


def gone(device: DeviceId, *, saved_s: float, rank: int = 0) -> dict[str, Any]:
    """A departed device that had the curve of this rank of the trio."""
    return {**stored(rank, saved_s=saved_s), "device": device.name, "host": device.host, "uuid": device.uuid}


def devices_of(departed: list[dict[str, Any]]) -> list[DeviceId]:
    return [DeviceId(host=each["host"], name=each["device"], uuid=each["uuid"]) for each in departed]


L4 = DeviceId(host="c", name="L4")


def test_a_device_that_has_gone_is_remembered_until_it_is_there_again() -> None:
    departed = find_departed(learned().state_dict(), [A, B, T4], [B], [gone(L4, saved_s=1.0)], saved_s=100.0)
    assert devices_of(departed) == [A, T4, L4], "the newest first"
    assert [each["saved_s"] for each in departed] == [100.0, 100.0, 1.0]
    alone = learned().with_ranks([1]).state_dict()
    assert find_origins(alone, [B], [B, T4], [None] * 2, saved_s=200.0, departed=departed) == [0, departed[1]]
    assert devices_of(find_departed(alone, [B], [B, T4], departed, saved_s=200.0)) == [A, L4]


@pytest.mark.parametrize(
    "pair",
    [
        (A, B),
        (DeviceId(host="a", name="H200", uuid="GPU-1"), DeviceId(host="b", name="H200", uuid="GPU-2")),
        (DeviceId(host="a", name="CPU"), DeviceId(host="b", name="CPU")),
        (DeviceId(host="a", name="CPU"), DeviceId(host="a", name="CPU")),
    ],
)
def test_of_two_devices_of_one_name_and_unlike_speed_the_one_that_leaves_has_its_share_when_it_is_back(
    pair: tuple[DeviceId, DeviceId],
) -> None:
    both = learned((80, 20))
    shares = first_plan(both)
    assert shares[0] > 2.5 * shares[1]
    state = both.state_dict()
    departed = find_departed(state, pair, pair[:1], [], saved_s=100.0)
    alone = both.with_ranks(find_origins(state, pair, pair[:1], [None], saved_s=100.0))
    origins = find_origins(alone.state_dict(), pair[:1], pair, [None] * 2, saved_s=200.0, departed=departed)
    assert origins == [0, departed[0]]
    assert first_plan(alone.with_ranks(origins)) == pytest.approx(shares, abs=2)


def test_a_device_that_is_new_takes_the_curve_of_one_of_its_name_that_was_there_last_before_one_that_had_left() -> None:
    third = DeviceId(host="z", name="H200", uuid="GPU-3")
    assert match_devices([A, T4], [A, third], [B]) == [0, 0]
    assert match_devices([A, T4], [third], [B]) == [0]
    assert match_devices([T4], [third, third, third], [B, A]) == [1, 2, 1]


def test_a_device_that_had_left_is_itself_again_before_it_is_taken_for_another_of_its_name() -> None:
    assert match_devices([A], [B], [B]) == [1]
    assert match_devices([DeviceId(host="a", name="CPU")], [DeviceId(host="b", name="CPU")], [T4]) == [0]
    assert match_devices([DeviceId(host="a", name="T4")], [T4], [T4]) == [1]
    assert match_devices([A], [DeviceId(host="z", name="H200", uuid="GPU-2")], [B]) == [1], "on another host by now"


def test_a_device_is_remembered_though_another_of_its_name_has_taken_its_place() -> None:
    replacement = DeviceId(host="z", name="H200", uuid="GPU-9")
    state = learned((68,)).state_dict()
    departed = find_departed(state, [A], [replacement], [], saved_s=100.0)
    assert devices_of(departed) == [A]
    assert match_devices([replacement], [replacement, A], devices_of(departed)) == [0, 1]


def test_a_device_that_had_left_gives_way_to_a_later_profile_of_itself_that_differs_and_to_no_other() -> None:
    alone, departed = learned((43,)).state_dict(), [gone(A, saved_s=100.0)]
    for profile, wins in (
        (stored(0, saved_s=101.0, factor=1.5), True),
        (stored(0, saved_s=99.0, factor=1.5), False),
        (stored(0, saved_s=101.0), False),
        (stored(0, saved_s=101.0, factor=1.5, uuid="GPU-2"), False),
    ):
        found = find_origins(alone, [B], [B, A], [None, profile], saved_s=200.0, departed=departed)
        assert found == [0, profile if wins else departed[0]]


def test_of_a_run_on_ever_new_machines_the_last_few_dozen_are_remembered() -> None:
    state = learned((68,)).state_dict()
    spots = [DeviceId(host=f"spot-{number}", name="A100", uuid=f"GPU-{number}") for number in range(3 * MOST_DEPARTED)]
    departed: list[dict[str, Any]] = []
    for number, (before, now) in enumerate(itertools.pairwise(spots)):
        departed = find_departed(state, [before], [now], departed, saved_s=float(number))
    assert devices_of(departed) == spots[-2 : -2 - MOST_DEPARTED : -1]


def test_a_state_that_names_other_devices_than_it_has_ranks_is_refused() -> None:
    with pytest.raises(StateError, match="names 2 devices of 3 ranks"):
        find_origins(learned().state_dict(), [A, B], [A, B, T4], [None] * 3, saved_s=0.0)
