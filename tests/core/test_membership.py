"""Members that come and go keep what was learned of them, and every sample is trained on once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cannikin.core.cutting import cut
from cannikin.core.membership import MEASURED, Member, Membership, Place
from cannikin.core.ordering import IndexOrder
from cannikin.errors import InvalidInputError, StateError

SAMPLE_S = {"a": 1e-3, "b": 2e-3, "c": 4e-3, "d": 2e-3}
FIXED_S, COMM_S = 2e-3, 1e-3
A, B, C, D = (Member(name=name, device=f"device of {name}") for name in SAMPLE_S)


def crew_of(*members: Member, batch_size: int = 42) -> Membership:
    crew = Membership(batch_size=batch_size, num_samples=1000)
    crew.change(members)
    return crew


def train(crew: Membership, num_steps: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Run so many steps with 2% of noise, plans in force at once; the plans of all steps."""
    noise = np.random.default_rng(seed)
    plans = []
    for _ in range(num_steps):
        plans.append(crew.local_batches)
        times = FIXED_S + np.array([SAMPLE_S[name] for name in crew.names]) * crew.local_batches
        times *= noise.lognormal(0.0, 0.02, len(times))
        done_s = times.max() + COMM_S - times / 3
        rows = np.stack([np.array(crew.local_batches), times / 3, times * 2 / 3, done_s, np.zeros(len(times))], axis=1)
        assert rows.shape[1] == len(MEASURED)
        proposed = crew.observe(rows)
        if proposed is not None:
            crew.install(proposed)
    return plans


def over_best(crew: Membership, plan: tuple[int, ...]) -> float:
    """How much longer the slowest member takes than if all took as long."""
    seconds = [SAMPLE_S[name] for name in crew.names]
    best = sum(plan) / sum(1 / each for each in seconds)
    return max(batch * each for batch, each in zip(plan, seconds, strict=True)) / best - 1


def test_the_good_split_is_found():
    crew = crew_of(A, B, C)
    assert train(crew, 60)[0] == (14, 14, 14)
    assert over_best(crew, crew.local_batches) < 0.05


@pytest.mark.parametrize("lost", [A, B, C], ids=lambda member: member.name)
def test_those_who_remain_have_the_good_split_at_once(lost):
    crew = crew_of(A, B, C)
    train(crew, 60)
    crew.change([member for member in (A, B, C) if member is not lost])
    assert over_best(crew, crew.local_batches) < 0.05


def test_who_comes_back_finds_its_share_at_once():
    crew = crew_of(A, B, C)
    train(crew, 60)
    crew.change([A, B])
    train(crew, 30)
    crew.change([A, B, C])
    assert over_best(crew, crew.local_batches) < 0.05


def test_who_joins_with_a_profile_gets_its_share_at_once():
    before = crew_of(A, C)
    train(before, 60)
    crew = crew_of(A, B)
    train(crew, 60)
    profile = json.loads(json.dumps(before.profiles()["c"]))
    crew.change([A, B, Member(name="c", device="new", profile=profile)])
    assert over_best(crew, crew.local_batches) < 0.05


def test_who_joins_with_a_known_kind_of_device_gets_its_share_at_once():
    crew = crew_of(A, B)
    train(crew, 60)
    crew.change([A, B, Member(name="d", device=B.device)])
    assert over_best(crew, crew.local_batches) < 0.05


def test_who_is_new_gets_a_middling_share_and_then_its_own():
    crew = crew_of(A, B)
    train(crew, 60)
    crew.change([A, B, C])
    first = crew.local_batches
    assert first[0] > 14  # a is not slowed down to the even split
    train(crew, 25)
    assert over_best(crew, crew.local_batches) < 0.05 < over_best(crew, first)


def test_a_member_that_takes_over_the_state_plans_as_the_others_do():
    crew = crew_of(A, B, C)
    train(crew, 60)
    crew.change([A, B])
    train(crew, 30)
    joined = Membership(batch_size=42, num_samples=1000)
    joined.load_state_dict(json.loads(json.dumps(crew.state_dict())))
    for each in (crew, joined):
        each.change([A, B, C])
    assert joined.local_batches == crew.local_batches
    assert joined.profiles().keys() == {"a", "b", "c"}
    assert train(joined, 40) == train(crew, 40)


def test_a_member_with_other_settings_is_refused():
    with pytest.raises(StateError, match="batch_size=42, and this one has 64: start it with the same"):
        Membership(batch_size=64, num_samples=1000).load_state_dict(crew_of(A).state_dict())
    with pytest.raises(StateError, match="seed=None, and this one has 1: start it with the same"):
        Membership(batch_size=42, num_samples=1000, seed=1).load_state_dict(crew_of(A).state_dict())


def test_a_damaged_profile_stops_its_own_member_alone():
    with pytest.raises(StateError, match="has no numbers under 'batches': delete it"):
        Member(name="d", profile={})


def test_the_total_is_kept_to_what_the_members_hold():
    small = Member(name="b", max_local=8)
    crew = crew_of(A, small)
    assert sum(crew.local_batches) == 42
    assert crew.local_batches[1] <= 8
    crew.change([small])
    assert crew.local_batches == (8,)
    crew.change([small, A])
    assert sum(crew.local_batches) == 42


def test_members_that_the_total_is_too_small_for_wait():
    crew = crew_of(A, B, C, batch_size=2)
    assert crew.local_batches == (1, 1, 0)
    train(crew, 20)
    assert crew.local_batches == (1, 1, 0)
    crew.change([B, C])
    assert crew.local_batches == (1, 1)


def test_members_of_one_name_are_told_apart():
    assert crew_of(A, A, A).names == ("a", "a #2", "a #3")


def test_no_data_is_refused():
    with pytest.raises(InvalidInputError, match="dataset is empty"):
        Membership(batch_size=4, num_samples=0)


def test_members_that_trained_apart_have_other_histories():
    together = Place().after("ab", [4, 4], num_samples=100)
    apart = Place().after("b", [8], num_samples=100)
    assert (together.num_steps, together.position) == (apart.num_steps, apart.position)
    assert together.history != apart.history


steps = st.lists(st.tuples(st.sets(st.sampled_from([A, B, C, D]), min_size=1), st.booleans()), min_size=1, max_size=30)


@given(events=steps, num_samples=st.integers(1, 60), batch_size=st.integers(1, 20), min_local=st.sampled_from([1, 2]))
def test_every_sample_is_committed_once_whoever_comes_and_goes(events, num_samples, batch_size, min_local):
    crew = Membership(batch_size=max(batch_size, min_local), num_samples=num_samples, min_local=min_local)
    trained: dict[int, list[int]] = {}
    for members, commits in events:
        if {member.name for member in members} != set(crew.names):
            crew.change(sorted(members, key=lambda member: member.name))
        place = crew.place
        slices = cut(crew.local_batches, num_samples - place.position, min_local=min_local)
        order = IndexOrder(num_samples, seed=0, epoch=place.epoch)
        handed = [order[place.position + start :][:count].tolist() for start, count in slices]
        if commits:
            trained.setdefault(place.epoch, []).extend(sample for part in handed for sample in part)
            crew.place = place.after(crew.names, [count for _, count in slices], num_samples)
    for epoch, samples in trained.items():
        whole = IndexOrder(num_samples, seed=0, epoch=epoch)[:].tolist()
        assert samples == whole[: len(samples)]
        assert len(samples) == num_samples or epoch == crew.place.epoch
