"""What memory allows: no planner hands out more, from the window that says so on, and until another says otherwise."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import measure
from cannikin.core.controller import Controller
from cannikin.core.perf import Cluster, Curve
from cannikin.core.planners import make_planner
from cannikin.core.records import NO_MAX, Job, Plan, Planner
from cannikin.errors import InvalidInputError

CLUSTER = Cluster.two_point(
    forward=Curve(fixed_s=[0.002, 0.004, 0.006], per_sample_s=[1e-4, 2e-4, 4e-4]),
    backward=Curve(fixed_s=[0.002, 0.004, 0.006], per_sample_s=[3e-4, 6e-4, 12e-4]),
    gamma=0.2,
    overlapped_s=0.006,
    last_s=0.002,
)
ADAPTIVE = ["cannikin", "lb-bsp", "adaptdl", "paper"]


def train(planner: Planner, caps: list[int], num_windows: int, *, first_step: int = 0) -> list[Plan]:
    """The plans made after each window, with these caps in every one."""
    rng, plan, plans = np.random.default_rng(0), planner.plan(first_step), []
    for k in range(num_windows):
        window = measure(CLUSTER, [plan] * 10, rng, noise=0.01, outliers=0.0, sqnorms=(1.0, 1e5))
        planner.observe(replace(window, max_batch=np.array(caps)))
        plan = planner.plan(first_step + 10 * k + 10)
        plans.append(plan)
    return plans


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_no_policy_gives_a_rank_more_than_its_memory_holds(policy: str) -> None:
    job = Job(num_ranks=3, batch_size=192, max_batch_size=768, num_samples=192 * 20)
    plans = train(make_planner(policy, job), [72, 400, 400], 30)
    assert max(plan.local_batches[0] for plan in plans) == 72
    assert all(sum(plan.local_batches) == plan.total_batch for plan in plans)
    assert any("memory holds rank 0 to 72 samples" in plan.reason for plan in plans)


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_a_batch_above_a_new_cap_is_cut_down_at_once(policy: str) -> None:
    planner = make_planner(policy, Job(num_ranks=3, batch_size=192, num_samples=192 * 20))
    assert planner.plan(0).local_batches[1] == 64
    (plan,) = train(planner, [NO_MAX, 40, NO_MAX], 1)
    assert plan.local_batches[1] <= 40
    assert plan.total_batch == 192


def test_a_cap_holds_before_anything_else_is_known() -> None:
    controller = Controller(Job(num_ranks=3, batch_size=192))
    window = measure(CLUSTER, [controller.plan(0)] * 5, np.random.default_rng(0))
    nothing = np.zeros(window.valid.shape, dtype=np.bool_)
    controller.observe(replace(window, valid=nothing, max_batch=np.array([NO_MAX, 40, NO_MAX])))
    plan = controller.plan(9)
    assert plan.local_batches == (76, 40, 76)
    assert plan.first_step == 9
    assert "memory holds rank 1 to 40 samples" in plan.reason


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_a_cap_may_be_raised_again_up_to_the_users_own_bound(policy: str) -> None:
    job = Job(num_ranks=3, batch_size=192, max_local=100, num_samples=192 * 10)
    planner = make_planner(policy, job)
    low = train(planner, [70, NO_MAX, NO_MAX], 12)
    high = train(planner, [NO_MAX] * 3, 30, first_step=120)
    assert max(plan.local_batches[0] for plan in low) <= 70
    if policy != "adaptdl":  # whose split is even
        assert high[-1].local_batches[0] > 70
    assert max(max(plan.local_batches) for plan in high) <= 100
    assert "memory" not in high[-1].reason


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_caps_too_low_for_the_total_batch_never_stop_the_training(policy: str) -> None:
    planner = make_planner(policy, Job(num_ranks=3, batch_size=192, max_batch_size=768, num_samples=192 * 20))
    for caps in ([10, 10, 10], [1, NO_MAX, 1], [0, 0, 0]):
        for plan in train(planner, caps, 6):
            assert plan.total_batch >= 189  # the paper's rounding need not keep the sum
            assert min(plan.local_batches) >= 1


def test_memory_bounds_the_total_batch_as_well() -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=3072)
    free, held = (train(Controller(job), caps, 40)[-1].total_batch for caps in ([NO_MAX] * 3, [120, 60, 30]))
    assert free > 210
    assert 96 < held <= 210


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_a_limited_job_keeps_to_the_caps_wherever_they_hold_the_total(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5))
    low = data.draw(st.lists(st.integers(1, 8), min_size=n, max_size=n))
    high = [a + data.draw(st.integers(0, 40)) for a in low]
    batch_size = data.draw(st.integers(sum(low), sum(high)))
    total = data.draw(st.integers(batch_size, sum(high)))
    caps = np.array(data.draw(st.lists(st.integers(0, 60), min_size=n, max_size=n)))
    job = Job(num_ranks=n, batch_size=batch_size, min_local=tuple(low), max_local=tuple(high))
    _, limited = job.limited(caps, total).bounds
    wanted = np.clip(caps, low, high)
    assert ((wanted <= limited) & (limited <= high)).all()
    assert limited.sum() >= total
    if wanted.sum() >= total:
        assert (limited == wanted).all()


def test_the_job_itself_comes_back_where_memory_is_no_limit() -> None:
    job = Job(num_ranks=2, batch_size=64, max_local=99)
    assert job.limited(np.array([NO_MAX, 99]), 64) is job


def test_a_saved_controller_remembers_the_caps() -> None:
    job = Job(num_ranks=3, batch_size=192, max_batch_size=768)
    first = Controller(job)
    train(first, [70, NO_MAX, NO_MAX], 6)
    second = Controller(job)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.job == first.job
    assert second.job.bounds[1].tolist() == [70, NO_MAX, NO_MAX]


def test_caps_of_another_number_of_ranks_are_refused() -> None:
    window = measure(CLUSTER, [make_planner("even", Job(num_ranks=3, batch_size=9)).plan(0)], np.random.default_rng(0))
    with pytest.raises(InvalidInputError, match="max_batch has shape"):
        replace(window, max_batch=np.array([1, 2]))
