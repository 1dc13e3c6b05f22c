"""From windows to the noise scale: one rank alone, gradients that are not finite, and steps that do not count."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import Training, measure
from cannikin.core.noise.tracker import NoiseTracker
from cannikin.core.perf import Cluster, Curve
from cannikin.core.policies.adaptdl import AdaptdlPlanner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.values import Job, StepWindow

RNG = np.random.default_rng
ALONE = Cluster(
    forward=Curve(fixed_s=[0.01], per_sample_s=[1e-4]),
    backward=Curve(fixed_s=[0.01], per_sample_s=[2e-4]),
    gammas=[1.0],
    tails_s=[0.0],
)
PAIR = Cluster(
    forward=Curve(fixed_s=[0.01, 0.01], per_sample_s=[1e-4, 2e-4]),
    backward=Curve(fixed_s=[0.01, 0.01], per_sample_s=[2e-4, 4e-4]),
    gammas=[1.0],
    tails_s=[0.001],
)


def alone(local_batches: tuple[int, ...], num_steps: int, trace: float, *, first_step: int = 0) -> StepWindow:
    """Steps of one rank with |G|^2 = 1: norms and products of neighbouring gradients at their expectations."""
    batches = [local_batches] * num_steps
    window = measure(ALONE, batches, RNG(0), first_step=first_step, noise=0.01, sqnorms=(1.0, trace))
    return replace(window, previous_dot=np.ones(num_steps))


def train(planner: Controller | AdaptdlPlanner, job: Job, num_windows: int, trace: float) -> Training:
    training = Training(planner, job, RNG(0))
    for k in range(num_windows):
        training.show(alone(training.plans[-1].local_batches, 10, trace, first_step=10 * k))
    return training


@pytest.mark.parametrize("kind", [Controller, AdaptdlPlanner])
def test_one_rank_alone_adapts_its_total_batch_to_its_noise(kind: type[Controller] | type[AdaptdlPlanner]) -> None:
    totals = {}
    for trace in (1.0, 1e3, 1e6):
        job = Job(num_ranks=1, batch_size=16, max_batch_size=512, num_samples=16 * 20)
        training = train(kind(job), job, 40, trace)
        plans, noise = training.plans, training.decision.noise
        totals[trace] = plans[-1].total_batch
        assert noise is not None
        assert noise.noise_scale == pytest.approx(trace, rel=1e-6)
        assert {plan.local_batches for plan in plans} == {(plan.total_batch,) for plan in plans}
        if plans[-1].total_batch > 16:
            assert any("biased: one rank compares consecutive steps" in plan.reason for plan in plans)
    assert totals[1.0] == 16
    assert 16 < totals[1e3] <= totals[1e6]
    assert totals[1e6] >= 400  # the last step to 512 would gain less than 5%


def test_one_rank_alone_goes_back_to_its_initial_batch_where_its_gradients_point_apart() -> None:
    job = Job(num_ranks=1, batch_size=16, max_batch_size=512)
    training = train(Controller(job), job, 10, 1e6)
    plan = training.plans[-1]
    assert plan.total_batch > 16
    for k in range(10, 30):
        window = alone(plan.local_batches, 10, 1e6, first_step=10 * k)
        plan = training.show(replace(window, previous_dot=-100 * window.previous_dot)).plan
    assert plan.total_batch == 16
    assert "noise scale not known: one rank compares consecutive steps" in plan.reason


def test_one_rank_alone_without_products_keeps_its_total_batch() -> None:
    job = Job(num_ranks=1, batch_size=16, max_batch_size=512)
    training = Training(Controller(job), job, RNG(0))
    for k in range(10):
        batches = [training.plans[-1].local_batches] * 10
        plan = training.show(measure(ALONE, batches, RNG(k), first_step=10 * k, sqnorms=(1.0, 1e6))).plan
    assert plan.total_batch == 16
    assert "noise scale not known yet (0 of 20 steps)" in plan.reason


def test_a_saved_controller_of_one_rank_goes_on_as_the_first_would_have() -> None:
    job = Job(num_ranks=1, batch_size=16, max_batch_size=512)
    first, second = Controller(job), Controller(job)
    *_, before, plan = train(first, job, 12, 1e3).plans
    assert plan.local_batches == before.local_batches, "a batch that has not run yet would not be resumed with"
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    window = alone(plan.local_batches, 10, 1e3, first_step=120)
    assert first.decide(window, job, 130) == second.decide(window, job, 130)


def test_a_gradient_is_compared_with_the_step_before_it_only() -> None:
    window = alone((16,), 5, 100.0)
    for left_out, num_pairs in (([], 4), ([2], 2), ([0], 3), ([1, 3], 0)):
        sqnorms = window.local_sqnorm.copy()
        sqnorms[left_out] = np.nan  # not taken
        tracker = NoiseTracker(initial_batch=16)
        tracker.observe(replace(window, local_sqnorm=sqnorms))
        assert tracker.num_steps == num_pairs, f"without steps {left_out}"


def test_averages_forget_by_what_was_trained_on_whether_norms_were_taken_or_not() -> None:
    every, fourth = NoiseTracker(initial_batch=16), NoiseTracker(initial_batch=16)
    for k in range(80):
        sqnorms = (2.0, 100.0) if k < 40 else (0.125, 130.0)  # gradients of one size
        window = measure(PAIR, [(8, 8)] * 10, RNG(k), first_step=10 * k, sqnorms=sqnorms)
        every.observe(window)
        local = np.where(np.arange(10 * k, 10 * k + 10)[:, None] % 4 == 3, window.local_sqnorm, np.nan)
        fourth.observe(replace(window, local_sqnorm=local))
    assert fourth.num_steps == every.num_steps / 4
    assert 50 < every.noise_scale < 1040
    assert fourth.noise_scale == pytest.approx(every.noise_scale, rel=0.01)


def test_norms_of_gradients_that_piled_up_are_of_so_many_times_the_batch() -> None:
    """K means of b_i Gaussian samples each: S and G without bias, times K^2, and the noise scale is right."""
    rng, trace, dimensions, num_batches = RNG(3), 400.0, 50, 3
    batches, signal = np.array([4, 12]), np.full(dimensions, (1 / dimensions) ** 0.5)
    window = measure(PAIR, [(4, 12)] * 600, RNG(0), noise=0.01, sqnorms=(1.0, trace))
    scale = np.sqrt(trace / dimensions / (num_batches * batches))
    piled = num_batches * (signal + scale[:, None] * rng.standard_normal((600, 2, dimensions)))
    whole = np.einsum("i,sid->sd", batches / batches.sum(), piled)
    taken = replace(
        window,
        local_sqnorm=(piled**2).sum(axis=2),
        global_sqnorm=(whole**2).sum(axis=1),
        accumulated=np.full(600, num_batches),
    )
    tracker = NoiseTracker(initial_batch=16)
    tracker.observe(taken)
    low, high = tracker.limits
    assert low < trace < high < 1.5 * low
    # 3 x 32 samples against 3 x 16, at phi = 400.
    expected = 2 * (tracker.noise_scale + 48) / (tracker.noise_scale + 96)
    assert tracker.gain(32) == pytest.approx(expected)
    restored = NoiseTracker(initial_batch=16)
    restored.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert restored.gain(32) == tracker.gain(32)


@pytest.mark.parametrize("kind", [Controller, AdaptdlPlanner])
def test_a_total_is_worth_less_where_more_batches_pile_up(kind: type[Controller] | type[AdaptdlPlanner]) -> None:
    """At phi = 100 and B0 = 16 the total grows; where 64 batches pile up, the noise is averaged out already."""
    totals = []
    for num_batches in (1, 64):
        job = Job(num_ranks=2, batch_size=16, max_batch_size=256, num_samples=200)
        training = Training(kind(job), job, RNG(0))
        for k in range(12):
            batches = training.plans[-1].local_batches
            window = measure(PAIR, [batches] * 10, RNG(k), first_step=10 * k, noise=0.01, sqnorms=(1.0, 100.0))
            local = 1.0 + 100.0 / (num_batches * window.local_batches)
            whole = 1.0 + 100.0 / (num_batches * window.local_batches.sum(axis=1))
            piled = np.full(10, num_batches)
            training.show(replace(window, local_sqnorm=local, global_sqnorm=whole, accumulated=piled))
        totals.append(training.plans[-1].total_batch)
    assert totals[0] > 2 * totals[1]


def test_norms_count_where_no_step_of_the_optimizer_followed() -> None:
    """The first batch of each group, where every batch is reduced: its times do not count, its norms do."""
    window = measure(PAIR, [(8, 8)] * 9, RNG(0), noise=0.01, sqnorms=(1.0, 16.0))
    position = np.tile([1, 2, 3], 3)
    sqnorms = np.where((position == 1)[:, None], window.local_sqnorm, np.nan)
    tracker = NoiseTracker(initial_batch=16)
    valid = np.repeat((position == 3)[:, None], 2, axis=1)
    tracker.observe(replace(window, local_sqnorm=sqnorms, valid=valid, accumulated=position))
    assert (tracker.num_steps, tracker.num_skipped) == (3, 0)
    assert tracker.noise_scale == pytest.approx(shown(window, [0, 3, 6]).noise_scale)


def shown(window: StepWindow, steps: list[int]) -> NoiseTracker:
    """A tracker that has seen these steps, each with an optimizer step of its own."""
    tracker = NoiseTracker(initial_batch=16)
    for s in steps:
        tracker.update(window.local_batches[s], window.local_sqnorm[s], float(window.global_sqnorm[s]))
    return tracker


def test_of_a_windows_first_step_the_one_before_is_not_known() -> None:
    window = alone((16,), 5, 100.0)
    tracker = NoiseTracker(initial_batch=16)
    tracker.observe(window)
    tracker.observe(window)
    assert tracker.num_steps == 8


def overflowing(window: StepWindow) -> StepWindow:
    """The window with a rank's overflow in step 1 and one of the sum in step 3, whose times do not count then."""
    local, total, valid = window.local_sqnorm.copy(), window.global_sqnorm.copy(), window.valid.copy()
    local[1, 0] = total[1] = total[3] = np.inf
    valid[[1, 3]] = False
    return replace(window, local_sqnorm=local, global_sqnorm=total, valid=valid)


def counts(training: Training) -> tuple[int, int]:
    """Steps whose norms a planner took in and steps that it skipped, as its saved state has them."""
    steps = training.planner.state_dict()["noise"]["steps"]
    return steps["num_taken"], steps["num_skipped"]


@pytest.mark.parametrize("kind", [Controller, AdaptdlPlanner])
def test_gradients_that_are_not_finite_are_counted_and_spoil_nothing(
    kind: type[Controller] | type[AdaptdlPlanner],
) -> None:
    job = Job(num_ranks=2, batch_size=32)
    training = Training(kind(job), job, RNG(0))
    noise = training.show(overflowing(measure(PAIR, [(16, 16)] * 5, RNG(0), sqnorms=(1.0, 100.0)))).noise
    assert counts(training) == (3, 2)
    assert noise is not None
    assert noise.noise_scale == pytest.approx(100.0)


@pytest.mark.parametrize("kind", [Controller, AdaptdlPlanner])
def test_a_negative_norm_is_no_norm(kind: type[Controller] | type[AdaptdlPlanner]) -> None:
    job = Job(num_ranks=2, batch_size=32)
    training = Training(kind(job), job, RNG(0))
    window = measure(PAIR, [(16, 16)] * 5, RNG(0), sqnorms=(1.0, 100.0))
    window.local_sqnorm[2, 1] = -1.0
    training.show(window)
    assert counts(training) == (4, 1)


def test_a_window_counts_its_steps_that_are_not_finite_without_any_planner() -> None:
    window = measure(PAIR, [(16, 16)] * 5, RNG(0), sqnorms=(1.0, 100.0))
    assert window.num_nonfinite == 0
    assert overflowing(window).num_nonfinite == 2
    assert overflowing(window).overflowed.tolist() == [False, True, False, True, False]
    not_taken = replace(window, local_sqnorm=np.full((5, 2), np.nan), global_sqnorm=np.full(5, np.nan))
    assert not_taken.num_nonfinite == 0


def test_one_ranks_overflow_is_counted_and_breaks_the_chain() -> None:
    window = alone((16,), 6, 100.0)
    window.local_sqnorm[2, 0] = np.inf
    tracker = NoiseTracker(initial_batch=16)
    tracker.observe(window)
    assert (tracker.num_steps, tracker.num_skipped) == (3, 1)
