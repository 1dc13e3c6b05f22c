"""The first split, before anything has run: what devices' data sheets say, and that it is soon forgotten."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import Training, random_cluster
from cannikin.core.perf import Cluster, step_time
from cannikin.core.policies.cannikin import Controller
from cannikin.core.prior import DataSheet, first_shares
from cannikin.core.split import optimal_split
from cannikin.core.values import Job

GB = 10**9
A100 = DataSheet(capability=(8, 0), num_multiprocessors=108, clock_mhz=1410, room_bytes=38 * GB)
V100 = DataSheet(capability=(7, 0), num_multiprocessors=80, clock_mhz=1530, room_bytes=15 * GB)
T4 = DataSheet(capability=(7, 5), num_multiprocessors=40, clock_mhz=1590, room_bytes=15 * GB)
HOST = DataSheet()

sheets = st.builds(
    DataSheet,
    capability=st.sampled_from([None, (3, 5), (6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 1)]),
    num_multiprocessors=st.integers(1, 200) | st.none(),
    clock_mhz=st.floats(500, 3000) | st.none(),
    room_bytes=st.floats(-5 * GB, 200 * GB) | st.none(),
)
clusters = st.lists(sheets, min_size=1, max_size=6)
FEW = settings(max_examples=200, deadline=None, derandomize=True)


def shares_of(*ranks: DataSheet) -> list[float]:
    shares = first_shares(ranks)
    return [1 / len(ranks)] * len(ranks) if shares is None else shares.tolist()


def started(job: Job, ranks: list[DataSheet], seed: int = 0) -> Training:
    controller = Controller(job)
    controller.start_by(ranks)
    return Training(controller, job, np.random.default_rng(seed))


def excess(cluster: Cluster, local_batches: tuple[int, ...]) -> float:
    return step_time(cluster, local_batches) / optimal_split(cluster, sum(local_batches)).step_s - 1


@FEW
@given(clusters, st.integers(0, 500), st.data())
def test_the_first_split_has_every_sample_once_and_keeps_to_the_bounds(ranks, more, data):
    low = data.draw(st.lists(st.integers(1, 9), min_size=len(ranks), max_size=len(ranks)))
    high = [bound + data.draw(st.integers(0, 300)) for bound in low]
    total = min(sum(low) + more, sum(high))
    job = Job(num_ranks=len(ranks), batch_size=total, min_local=tuple(low), max_local=tuple(high))
    batches = started(job, ranks).plans[0].local_batches
    assert sum(batches) == total
    assert all(bottom <= batch <= top for bottom, batch, top in zip(low, batches, high, strict=True))


@FEW
@given(clusters, st.data())
def test_a_rank_with_more_multiprocessors_or_more_memory_never_gets_less(ranks, data):
    rank = data.draw(st.integers(0, len(ranks) - 1))
    sheet = ranks[rank]
    better = replace(
        sheet,
        num_multiprocessors=sheet.num_multiprocessors and sheet.num_multiprocessors + data.draw(st.integers(0, 200)),
        room_bytes=sheet.room_bytes and sheet.room_bytes + data.draw(st.floats(0, 200 * GB)),
    )
    before = shares_of(*ranks)[rank]
    assert shares_of(*ranks[:rank], better, *ranks[rank + 1 :])[rank] >= before * (1 - 1e-9)


@FEW
@given(clusters, st.data())
def test_ranks_of_one_kind_have_equal_shares(ranks, data):
    rank = data.draw(st.integers(0, len(ranks) - 1))
    shares = shares_of(*ranks, ranks[rank])
    assert shares[rank] == pytest.approx(shares[-1])


@FEW
@given(sheets.filter(lambda sheet: sheet.room_bytes is not None and sheet.room_bytes > 0), st.floats(0.91, 1.0))
def test_devices_alike_but_for_a_tenth_of_their_memory_start_even(sheet, factor):
    assert first_shares([sheet, replace(sheet, room_bytes=factor * sheet.room_bytes), sheet]) is None


def test_a_third_of_the_memory_is_a_third_of_the_samples_though_the_devices_are_the_same():
    small = replace(A100, room_bytes=A100.room_bytes / 3)
    job = Job(num_ranks=3, batch_size=768)
    plan = started(job, [A100, small, A100]).plans[0]
    assert plan.local_batches == (329, 110, 329)
    assert plan.reason.startswith("first split by the devices' data sheets")
    assert "43%, 14%, 43%" in plan.reason


def test_a_fast_card_gets_more_and_a_card_with_little_memory_no_more_than_its_memory_says():
    assert 0.6 < shares_of(V100, T4)[0] < 0.75, "memory alike: by speed"
    large, small = shares_of(replace(T4, room_bytes=24 * GB), replace(V100, room_bytes=12 * GB))
    assert small == pytest.approx(1 / 3, abs=0.02), "fast, but with half of the memory"
    assert large == pytest.approx(1 - small)


def test_what_one_rank_does_not_tell_no_rank_is_judged_by():
    assert first_shares([]) is None
    assert first_shares([A100, HOST]) is None
    without_clock = [replace(sheet, clock_mhz=None) for sheet in (V100, T4)]
    assert shares_of(V100, without_clock[1]) == shares_of(*without_clock)
    assert shares_of(A100, replace(T4, num_multiprocessors=None)) == shares_of(
        replace(HOST, room_bytes=A100.room_bytes), replace(HOST, room_bytes=T4.room_bytes)
    )


def test_a_capability_that_is_not_listed_counts_as_the_next_lower_one():
    assert shares_of(A100, replace(A100, capability=(8, 7))) == shares_of(A100, replace(A100, capability=(8, 6)))
    assert first_shares([replace(A100, capability=(2, 0)), replace(A100, capability=(3, 0))]) is None


def test_batches_that_the_user_has_pinned_stay():
    job = Job(num_ranks=2, batch_size=8, min_local=(5, 3), max_local=(5, 3))
    plan = started(job, [A100, T4]).plans[0]
    assert plan.local_batches == (5, 3)
    assert plan.reason == "the local batches are set, and stay"


def test_of_many_ranks_the_reason_names_the_smallest_and_the_largest_share():
    plan = started(Job(num_ranks=12, batch_size=1200), [A100] * 6 + [T4] * 6).plans[0]
    assert plan.reason.endswith("3.6% to 13.1% of the samples")


def test_stored_profiles_of_all_ranks_say_more_than_data_sheets_and_of_some_less():
    rng = np.random.default_rng(0)
    cluster, total = random_cluster(rng, max_ranks=2)
    job = Job(num_ranks=2, batch_size=total)
    first = Controller(job)
    Training(first, job, rng).run(cluster, 40)
    profiles = first.profiles()
    for stored, word in ((profiles, "stored profiles"), ([profiles[0], None], "data sheets")):
        controller = Controller(job)
        controller.start_from(stored)
        controller.start_by([A100, T4])
        assert word in controller.decide(None, job, 0).plan.reason


def test_a_saved_state_says_more_unless_it_is_of_another_number_of_ranks():
    rng = np.random.default_rng(0)
    cluster, total = random_cluster(rng, max_ranks=2)
    saved = Controller(Job(num_ranks=2, batch_size=total))
    plan = Training(saved, Job(num_ranks=2, batch_size=total), rng).run(cluster, 40)
    state = json.loads(json.dumps(saved.state_dict()))
    same = Controller(Job(num_ranks=2, batch_size=total))
    same.load_state_dict(state)
    same.start_by([A100, T4])
    assert same.decide(None, Job(num_ranks=2, batch_size=total), 0).plan.local_batches == plan.local_batches
    job = Job(num_ranks=3, batch_size=total)
    for order in ("state first", "data sheets first"):
        other = Controller(job)
        if order == "state first":
            other.load_state_dict(state)
        other.start_by([A100, T4, T4])
        if order == "data sheets first":
            other.load_state_dict(state)
        assert other.decide(None, job, 0).plan.reason.startswith("first split by the devices' data sheets")


def test_a_first_split_that_is_wrong_is_overcome_as_soon_as_an_even_one():
    wrong, even = [], []
    for seed in range(40):
        cluster, total = random_cluster(np.random.default_rng(seed), max_ranks=8)
        n = cluster.num_ranks
        job = Job(num_ranks=n, batch_size=total)
        rng = np.random.default_rng(100 + seed)
        ranks = [replace(A100, num_multiprocessors=int(count)) for count in rng.integers(20, 160, n)]
        wrong.append(excess(cluster, started(job, ranks, seed).run(cluster, 30).local_batches))
        even.append(excess(cluster, started(job, [HOST] * n, seed).run(cluster, 30).local_batches))
    assert (np.array(wrong) <= 0.05).sum() >= 38
    assert np.median(wrong) <= np.median(even) + 0.005


def test_after_a_first_split_that_is_not_even_ranks_are_shown_a_second_size():
    for seed in range(20):
        cluster, total = random_cluster(np.random.default_rng(seed), max_ranks=4)
        job = Job(num_ranks=cluster.num_ranks, batch_size=total)
        ranks = [A100, T4, V100, T4][: cluster.num_ranks]
        training = started(job, ranks, seed)
        training.run(cluster, 30)
        assert len({plan.local_batches for plan in training.plans}) > 1, training.plans[0]
        assert training.phases[:2] == ["even", "guess"]
