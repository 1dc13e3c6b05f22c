"""What memory allows: no planner hands out more, from the window that says so on, and until another says otherwise."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import Training, measure
from cannikin.core.perf import Cluster, Curve
from cannikin.core.policies import make_planner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.values import NO_MAX, Job, Plan, StepWindow
from cannikin.errors import InvalidInputError

CLUSTER = Cluster.two_point(
    forward=Curve(fixed_s=[0.002, 0.004, 0.006], per_sample_s=[1e-4, 2e-4, 4e-4]),
    backward=Curve(fixed_s=[0.002, 0.004, 0.006], per_sample_s=[3e-4, 6e-4, 12e-4]),
    gamma=0.2,
    overlapped_s=0.006,
    last_s=0.002,
)
ADAPTIVE = ["cannikin", "lb-bsp", "adaptdl", "paper"]


def started(policy: str, job: Job) -> Training:
    return Training(make_planner(policy, job), job, np.random.default_rng(0))


def next_window(training: Training, caps: list[int]) -> StepWindow:
    """Ten steps under the plan made last, with these caps."""
    batches, step = [training.plans[-1].local_batches] * 10, training.step
    window = measure(CLUSTER, batches, training.rng, first_step=step, noise=0.01, outliers=0.0, sqnorms=(1.0, 1e5))
    return replace(window, max_batch=np.array(caps))


def train(training: Training, caps: list[int], num_windows: int) -> list[Plan]:
    """The plans made after each window, with these caps in every one."""
    return [training.show(next_window(training, caps)).plan for _ in range(num_windows)]


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_no_policy_gives_a_rank_more_than_its_memory_holds(policy: str) -> None:
    job = Job(num_ranks=3, batch_size=192, max_batch_size=768, num_samples=192 * 20)
    plans = train(started(policy, job), [72, 400, 400], 30)
    assert max(plan.local_batches[0] for plan in plans) == 72
    assert all(sum(plan.local_batches) == plan.total_batch for plan in plans)
    assert any("memory holds rank 0 to 72 samples" in plan.reason for plan in plans)


@pytest.mark.parametrize("policy", ["cannikin", "lb-bsp", "paper"])
def test_a_batch_above_a_new_cap_is_cut_down_at_once(policy: str) -> None:
    training = started(policy, Job(num_ranks=3, batch_size=192, num_samples=192 * 20))
    assert training.plans[0].local_batches[1] == 64
    (plan,) = train(training, [NO_MAX, 40, NO_MAX], 1)
    assert plan.local_batches[1] <= 40
    assert plan.total_batch == 192


def test_an_even_split_that_memory_does_not_hold_has_no_speed() -> None:
    training = started("cannikin", Job(num_ranks=3, batch_size=192))
    train(training, [NO_MAX] * 3, 4)
    assert training.decision.even_speed > 0
    train(training, [NO_MAX, NO_MAX, 40], 1)
    assert training.decision.even_speed == 0


def test_a_cap_holds_before_anything_else_is_known() -> None:
    job = Job(num_ranks=3, batch_size=192)
    training = Training(Controller(job), job, np.random.default_rng(0), delay=4)
    window = measure(CLUSTER, [(64, 64, 64)] * 5, training.rng)
    nothing = np.zeros(window.valid.shape, dtype=np.bool_)
    plan = training.show(replace(window, valid=nothing, max_batch=np.array([NO_MAX, 40, NO_MAX]))).plan
    assert plan.local_batches == (76, 40, 76)
    assert plan.first_step == 9
    assert "memory holds rank 1 to 40 samples" in plan.reason


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_a_cap_may_be_raised_again_up_to_the_users_own_bound(policy: str) -> None:
    job = Job(num_ranks=3, batch_size=192, max_local=100, num_samples=192 * 10)
    training = started(policy, job)
    low = train(training, [70, NO_MAX, NO_MAX], 12)
    high = train(training, [NO_MAX] * 3, 30)
    assert max(plan.local_batches[0] for plan in low) <= 70
    if policy != "adaptdl":  # whose split is even
        assert high[-1].local_batches[0] > 70
    assert max(max(plan.local_batches) for plan in high) <= 100
    assert "memory" not in high[-1].reason


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_caps_too_low_for_the_total_batch_never_stop_the_training(policy: str) -> None:
    training = started(policy, Job(num_ranks=3, batch_size=192, max_batch_size=768, num_samples=192 * 20))
    for caps in ([10, 10, 10], [1, NO_MAX, 1], [0, 0, 0]):
        for plan in train(training, caps, 6):
            assert plan.total_batch >= 189  # the paper's rounding need not keep the sum
            assert min(plan.local_batches) >= 1


def test_memory_bounds_the_total_batch_as_well() -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=3072)
    free, held = (train(started("cannikin", job), caps, 40)[-1].total_batch for caps in ([NO_MAX] * 3, [120, 60, 30]))
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


def test_a_restored_controller_keeps_to_the_caps_as_the_first_would_have() -> None:
    job, caps = Job(num_ranks=3, batch_size=192, max_batch_size=768), [70, NO_MAX, NO_MAX]
    training = started("cannikin", job)
    train(training, caps, 6)
    second = Controller(job)
    second.load_state_dict(json.loads(json.dumps(training.planner.state_dict())))
    for _ in range(6):
        window = next_window(training, caps)
        decision = training.schedule.decide(second, window, training.step + 10)
        assert decision == training.show(window)
        assert decision.plan.local_batches[0] <= 70
    assert "memory holds rank 0 to 70 samples" in decision.plan.reason


def test_caps_of_another_number_of_ranks_are_refused() -> None:
    window = measure(CLUSTER, [(3, 3, 3)], np.random.default_rng(0))
    with pytest.raises(InvalidInputError, match="max_batch has shape"):
        replace(window, max_batch=np.array([1, 2]))
