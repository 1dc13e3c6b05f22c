"""A run that resumes on other ranks: what was learned is found again by device, and what the user says now counts."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import resuming_cases
from ranks import run_ranks
from resuming_cases import TOTAL

from benchmarks.synthetic import Training
from cannikin.core.perf import Cluster, Curve
from cannikin.core.policies import make_planner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.values import Job
from cannikin.errors import InvalidInputError, StateError
from cannikin.runlog import RankInfo
from cannikin.runtime.engine_state import departed_devices, device_id, restore_planner, why_afresh


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


@pytest.mark.parametrize("kind", ["StepLR", "LambdaLR"])
def test_a_learning_rate_is_the_saved_one_until_it_is_changed_after_the_snapshot_is_loaded(tmp_path, kind):
    """As docs/hosts.md says; the scheduler halves the rate after each step."""
    ((first, second, third),) = run_ranks(resuming_cases.rates_of_three_starts, 1, str(tmp_path), kind)
    assert first == pytest.approx([0.1, 0.05])
    assert second == pytest.approx([0.025, 0.0125]), "not the 0.03 that the script says now"
    assert third == pytest.approx([0.1 * 0.00625, 0.1 * 0.003125])


# What a saved state knows of devices that have gone.

FAST, SLOW = (RankInfo(host=host, device="A100", uuid=f"GPU-{host}") for host in "ab")


def first_batches(planner):
    return planner.decide(None, Job(num_ranks=1, batch_size=1), 0).plan.local_batches


def saved(planner, ranks, departed):
    """What an engine saves that is needed here, once through a file."""
    devices = [asdict(device_id(rank)) for rank in ranks]
    return json.loads(
        json.dumps({"planner": planner.state_dict(), "devices": devices, "departed": departed, "saved_s": 100.0})
    )


def resumed(state, ranks):
    """The planner that begins with a state on these ranks, and what the next state remembers."""
    planner = Controller(Job(num_ranks=len(ranks), batch_size=40))
    departed = departed_devices(planner, state, ranks)
    restore_planner(planner, state, ranks, None)
    return planner, departed


@pytest.fixture(scope="module")
def trained():
    job = Job(num_ranks=2, batch_size=40)
    planner = Controller(job)
    curve = Curve(fixed_s=[1e-4, 4e-4], per_sample_s=[1e-3, 4e-3])
    cluster = Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[1e-4])
    Training(planner, job, np.random.default_rng(0)).run(cluster, 60, noise=0.0)
    return planner


def test_a_rank_that_leaves_and_returns_has_its_share_though_one_of_the_same_name_stayed(trained):
    alone, departed = resumed(saved(trained, [FAST, SLOW], []), [FAST])
    again, left = resumed(saved(alone, [FAST], departed), [FAST, SLOW])
    assert first_batches(again) == first_batches(trained) == (32, 8)
    assert left == []


def test_a_state_that_remembers_departed_devices_by_name_as_older_ones_do_still_loads(trained):
    alone, [profile] = resumed(saved(trained, [FAST, SLOW], []), [FAST])
    name = profile.pop("device")
    older = saved(alone, [FAST], {name: profile})
    again, left = resumed(older, [FAST, SLOW])
    assert first_batches(again) == (32, 8)
    assert left == []
    _, left = resumed(older, [FAST])
    assert left == [{**profile, "device": "A100"}]


def test_one_rank_is_spoken_of_in_the_singular(trained):
    """In what a resumed run says of the number of ranks, wherever that can be one."""
    job = Job(num_ranks=1, batch_size=8)
    of_one = {"policy": "lb-bsp", "planner": make_planner("lb-bsp", job).state_dict()}
    assert why_afresh("lb-bsp", of_one, 2).startswith("on 1 rank, and policy='lb-bsp' has no use on 2 ")
    with pytest.raises(StateError, match="saved plan is for 1 rank, this job has 2"):
        make_planner("lb-bsp", Job(num_ranks=2, batch_size=8)).load_state_dict(of_one["planner"])
    alone, _ = resumed(saved(trained, [FAST, SLOW], []), [FAST])
    assert "resumed with 1 rank after 2" in alone.decide(None, job, 0).plan.reason
    with pytest.raises(StateError, match="names 1 device of 2 ranks"):
        resumed(saved(trained, [FAST], []), [FAST])
    with pytest.raises(InvalidInputError, match="batch_size=9 is outside what the 1 rank can hold, 1 to 8"):
        Job(num_ranks=1, batch_size=9, max_local=8)


@pytest.mark.parametrize("departed", [None, 5, "A100", [5], [{}], {"A100": None}, [{"device": "A100"}]])
def test_a_state_whose_departed_devices_are_damaged_is_refused(trained, departed):
    with pytest.raises(StateError):
        resumed(saved(trained, [FAST, SLOW], departed), [FAST])
