"""From windows to the noise scale: one rank alone, gradients that are not finite, and steps that do not count."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import measure
from cannikin.core.adaptdl import AdaptdlPlanner
from cannikin.core.controller import Controller
from cannikin.core.noise_tracker import NoiseTracker
from cannikin.core.noise_windows import observe_noise
from cannikin.core.perf import Cluster, Curve
from cannikin.core.plans import make_plan
from cannikin.core.records import Job, Plan, StepWindow

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


def alone(plan: Plan, num_steps: int, trace: float) -> StepWindow:
    """Steps of one rank with |G|^2 = 1: norms and products of neighbouring gradients at their expectations."""
    window = measure(ALONE, [plan] * num_steps, RNG(0), noise=0.01, sqnorms=(1.0, trace))
    return replace(window, previous_dot=np.ones(num_steps))


def train(planner: Controller | AdaptdlPlanner, num_windows: int, trace: float) -> list[Plan]:
    plans = [planner.plan(0)]
    for k in range(num_windows):
        planner.observe(alone(plans[-1], 10, trace))
        plans.append(planner.plan(10 * k + 10))
    return plans


@pytest.mark.parametrize("kind", [Controller, AdaptdlPlanner])
def test_one_rank_alone_adapts_its_total_batch_to_its_noise(kind: type[Controller] | type[AdaptdlPlanner]) -> None:
    totals = {}
    for trace in (1.0, 1e3, 1e6):
        planner = kind(Job(num_ranks=1, batch_size=16, max_batch_size=512, num_samples=16 * 20))
        plans = train(planner, 40, trace)
        totals[trace] = plans[-1].total_batch
        assert planner.noise.noise_scale == pytest.approx(trace, rel=1e-6)
        assert {plan.local_batches for plan in plans} == {(plan.total_batch,) for plan in plans}
        if plans[-1].total_batch > 16:
            assert any("biased: one rank compares consecutive steps" in plan.reason for plan in plans)
    assert totals[1.0] == 16
    assert 16 < totals[1e3] <= totals[1e6]
    assert totals[1e6] >= 400  # the last step to 512 would gain less than 5%


def test_one_rank_alone_goes_back_to_its_initial_batch_where_its_gradients_point_apart() -> None:
    controller = Controller(Job(num_ranks=1, batch_size=16, max_batch_size=512))
    assert train(controller, 10, 1e6)[-1].total_batch > 16
    plan = controller.plan(100)
    for k in range(10, 30):
        window = alone(plan, 10, 1e6)
        controller.observe(replace(window, previous_dot=-100 * window.previous_dot))
        plan = controller.plan(10 * k + 10)
    assert plan.total_batch == 16
    assert "noise scale not known: one rank compares consecutive steps" in plan.reason


def test_one_rank_alone_without_products_keeps_its_total_batch() -> None:
    controller = Controller(Job(num_ranks=1, batch_size=16, max_batch_size=512))
    plan = controller.plan(0)
    for k in range(10):
        controller.observe(measure(ALONE, [plan] * 10, RNG(k), sqnorms=(1.0, 1e6)))
        plan = controller.plan(10 * k + 10)
    assert plan.total_batch == 16
    assert "noise scale not known yet (0 of 20 steps)" in plan.reason


def test_a_saved_controller_of_one_rank_goes_on_as_the_first_would_have() -> None:
    job = Job(num_ranks=1, batch_size=16, max_batch_size=512)
    first, second = Controller(job), Controller(job)
    plan = train(first, 5, 1e3)[-1]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for planner in (first, second):
        planner.observe(alone(plan, 10, 1e3))
    assert first.plan(60) == second.plan(60)


def test_a_gradient_is_compared_with_the_step_before_it_only() -> None:
    window = alone(make_plan(0, (16,), phase="even", reason=""), 5, 100.0)
    for left_out, num_pairs in (([], 4), ([2], 2), ([0], 3), ([1, 3], 0)):
        valid = np.ones((5, 1), dtype=np.bool_)
        valid[left_out] = False
        tracker = NoiseTracker(initial_batch=16)
        observe_noise(tracker, replace(window, valid=valid))
        assert tracker.num_steps == num_pairs, f"without steps {left_out}"


def test_of_a_windows_first_step_the_one_before_is_not_known() -> None:
    window = alone(make_plan(0, (16,), phase="even", reason=""), 5, 100.0)
    tracker = NoiseTracker(initial_batch=16)
    observe_noise(tracker, window)
    observe_noise(tracker, window)
    assert tracker.num_steps == 8


def overflowing(window: StepWindow) -> StepWindow:
    """The window with a rank's overflow in step 1 and one of the sum in step 3, whose times do not count then."""
    local, total, valid = window.local_sqnorm.copy(), window.global_sqnorm.copy(), window.valid.copy()
    local[1, 0] = total[1] = total[3] = np.inf
    valid[[1, 3]] = False
    return replace(window, local_sqnorm=local, global_sqnorm=total, valid=valid)


@pytest.mark.parametrize("kind", [Controller, AdaptdlPlanner])
def test_gradients_that_are_not_finite_are_counted_and_spoil_nothing(
    kind: type[Controller] | type[AdaptdlPlanner],
) -> None:
    planner = kind(Job(num_ranks=2, batch_size=32))
    planner.observe(overflowing(measure(PAIR, [planner.plan(0)] * 5, RNG(0), sqnorms=(1.0, 100.0))))
    assert (planner.noise.num_steps, planner.noise.num_skipped) == (3, 2)
    assert planner.noise.noise_scale == pytest.approx(100.0)


@pytest.mark.parametrize("kind", [Controller, AdaptdlPlanner])
def test_a_negative_norm_is_no_norm(kind: type[Controller] | type[AdaptdlPlanner]) -> None:
    planner = kind(Job(num_ranks=2, batch_size=32))
    window = measure(PAIR, [planner.plan(0)] * 5, RNG(0), sqnorms=(1.0, 100.0))
    window.local_sqnorm[2, 1] = -1.0
    planner.observe(window)
    assert (planner.noise.num_steps, planner.noise.num_skipped) == (4, 1)


def test_a_window_counts_its_steps_that_are_not_finite_without_any_planner() -> None:
    window = measure(PAIR, [make_plan(0, (16, 16), phase="even", reason="")] * 5, RNG(0), sqnorms=(1.0, 100.0))
    assert window.num_nonfinite == 0
    assert overflowing(window).num_nonfinite == 2
    assert overflowing(window).overflowed.tolist() == [False, True, False, True, False]
    not_taken = replace(window, local_sqnorm=np.full((5, 2), np.nan), global_sqnorm=np.full(5, np.nan))
    assert not_taken.num_nonfinite == 0


def test_one_ranks_overflow_is_counted_and_breaks_the_chain() -> None:
    window = alone(make_plan(0, (16,), phase="even", reason=""), 6, 100.0)
    window.local_sqnorm[2, 0] = np.inf
    tracker = NoiseTracker(initial_batch=16)
    observe_noise(tracker, window)
    assert (tracker.num_steps, tracker.num_skipped) == (3, 1)
