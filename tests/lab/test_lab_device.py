"""The device's arithmetic, and the pace by a clock that only moves when told."""

from __future__ import annotations

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from cannikin.lab.cluster import DEFAULT_SAMPLE_S, LabCluster, Slowdown
from cannikin.lab.throttle import Pace


def test_half_the_speed_takes_twice_as_long_for_a_sample_and_as_long_for_the_rest():
    cluster = LabCluster(speeds=(1.0, 0.5), sample_s=0.002, fixed_s=0.008, forward_share=0.25)
    fast, slow = cluster.devices()
    assert fast.times_s(num_samples=16, forward=0) == pytest.approx((0.010, 0.030))
    assert slow.times_s(num_samples=16, forward=0) == pytest.approx((0.018, 0.054))


def test_a_rank_has_its_own_part_of_forward_where_one_is_given():
    first, second = LabCluster(
        speeds=(1.0, 1.0), sample_s=0.01, forward_share=0.25, forward_shares=(None, 0.5)
    ).devices()
    assert first.times_s(num_samples=4, forward=0) == pytest.approx((0.01, 0.03))
    assert second.times_s(num_samples=4, forward=0) == pytest.approx((0.02, 0.02))


def test_a_change_of_speed_holds_until_the_next_one_and_on_its_rank_alone():
    changes = (Slowdown(rank=1, factor=1.0, step=20), Slowdown(rank=1, factor=0.5, step=10))
    first, second = LabCluster(speeds=(1.0, 1.0), slowdowns=changes).devices()

    def step_s(device, forward):
        return sum(device.times_s(num_samples=8, forward=forward))

    unit_s = 8 * DEFAULT_SAMPLE_S
    assert [step_s(second, forward) for forward in (0, 9, 10, 19, 20, 99)] == pytest.approx(
        [unit_s, unit_s, 2 * unit_s, 2 * unit_s, unit_s, unit_s]
    )
    assert step_s(first, 15) == pytest.approx(unit_s)


@given(
    works=st.lists(st.floats(0, 0.03), min_size=1, max_size=8),
    budget_s=st.floats(0, 0.1),
)
def test_a_stretch_lasts_as_long_as_the_device_takes_or_the_work_if_that_is_longer(works, budget_s):
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    pace.budget_s = budget_s
    for number, work_s in enumerate(works, start=1):
        clock.work(work_s)
        pace.reach(number / len(works))
        assert clock.now_s - 100 >= budget_s * number / len(works) - 1e-4, "no gradient comes before the device's"
    # A place is reached by then or by the work since an earlier one, never later.
    latest_s = max(budget_s * k / len(works) + sum(works[k:]) for k in range(len(works) + 1))
    assert clock.now_s - 100 <= latest_s + 1e-9
    assert pace.work_s == pytest.approx(sum(works))
    assert pace.slept_s == pytest.approx(sum(clock.sleeps))


def test_sleep_is_only_for_what_work_has_left_over():
    clock = Clock()
    pace = Pace(clock, clock.sleep)
    pace.budget_s = 0.010
    clock.work(0.004)
    pace.reach()
    assert clock.sleeps == pytest.approx([0.006])
