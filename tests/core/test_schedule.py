"""The schedule that all drivers share: window lengths, steps with norms, and which plan holds at which step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import Training, measure, slowed
from cannikin.core.perf import Cluster, Curve
from cannikin.core.planner import Decision, Noise
from cannikin.core.policies.cannikin import Controller
from cannikin.core.schedule import Schedule, takes_norms
from cannikin.core.values import NO_MAX, Job, Plan, StepWindow
from cannikin.errors import InvalidInputError

JOB = Job(num_ranks=2, batch_size=32, max_batch_size=128, min_local=2, max_local=(24, 99))
CLUSTER = Cluster.two_point(
    forward=Curve(fixed_s=[0.004, 0.004], per_sample_s=[1e-4, 3e-4]),
    backward=Curve(fixed_s=[0.004, 0.004], per_sample_s=[2e-4, 6e-4]),
    gamma=0.2,
    overlapped_s=0.0,
    last_s=0.001,
)


def decided(first_step: int, *local_batches: int, reason: str = "by script", **about: Any) -> Decision:
    plan = Plan(first_step=first_step, total_batch=sum(local_batches), local_batches=local_batches, reason=reason)
    return Decision(plan=plan, **about)


class Script:
    """A planner of the user's own: it says these local batches, whatever it is shown, and keeps what it was asked."""

    def __init__(self, *local_batches: int, phase: str = "night shift") -> None:
        self.local_batches, self.phase = local_batches, phase
        self.asked: list[tuple[StepWindow | None, Job, int]] = []

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        self.asked.append((window, job, step))
        return decided(step, *self.local_batches, phase=self.phase)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take back."""


def window(*caps: int) -> StepWindow:
    shown = measure(CLUSTER, [(16, 16)] * 5, np.random.default_rng(0))
    return replace(shown, max_batch=np.array(caps)) if caps else shown


def even() -> Schedule:
    return Schedule(JOB, decided(0, 16, 16))


def test_windows_are_short_at_first_and_longer_later() -> None:
    schedule = even()
    assert [schedule.window_steps(step) for step in (0, 5, 35, 39, 40, 50, 1000)] == [5, 5, 5, 5, 10, 10, 10]


def test_windows_are_short_again_for_forty_steps_while_a_planner_has_not_settled() -> None:
    schedule = even()
    schedule.install(decided(100, 20, 12, settled=False), 100)
    assert [schedule.window_steps(step) for step in (100, 110, 139, 140, 200)] == [5, 5, 5, 10, 10]
    schedule.install(decided(120, 20, 12, settled=False), 120)
    assert [schedule.window_steps(step) for step in (140, 159, 160)] == [5, 5, 10]
    schedule.install(decided(130, 20, 12), 130)
    assert schedule.window_steps(130) == 10


def test_a_change_of_speed_shortens_the_controllers_windows_for_forty_steps() -> None:
    job = Job(num_ranks=2, batch_size=64)
    training = Training(Controller(job), job, np.random.default_rng(1))
    training.run(CLUSTER, 100, noise=0.02, outliers=0.0)
    assert training.decision.settled
    assert training.schedule.window_steps(training.step) == 10
    slow = slowed(CLUSTER, 0, 2.0)
    training.run(slow, 10, noise=0.02, outliers=0.0)
    (change,) = training.changes
    lengths = {}
    while training.step < change.step + 60:
        lengths[training.step] = training.schedule.window_steps(training.step)
        training.run(slow, 1, noise=0.02, outliers=0.0)
    assert len(training.changes) == 1
    assert lengths == {step: 5 if step < change.step + 40 else 10 for step in lengths}
    assert set(lengths.values()) == {5, 10}


def test_norms_are_taken_in_the_first_sixty_steps_and_in_one_of_four_after() -> None:
    assert [step for step in range(73) if takes_norms(step)] == [*range(60), 63, 67, 71]


def test_a_plan_holds_from_its_first_step_and_the_one_before_until_then() -> None:
    schedule = even()
    schedule.install(decided(9, 20, 12), 8)
    assert [schedule.plan_at(step).local_batches for step in (0, 8, 9, 50)] == [(16, 16)] * 2 + [(20, 12)] * 2
    assert schedule.local_batches(7, 4).tolist() == [[16, 16], [16, 16], [20, 12], [20, 12]]
    assert schedule.newest.local_batches == (20, 12)


def test_plans_that_wait_come_into_force_one_after_the_other() -> None:
    schedule = even()
    schedule.install(decided(12, 20, 12), 5)
    schedule.install(decided(15, 22, 10), 10)
    assert [schedule.plan_at(step).local_batches[0] for step in (11, 12, 14, 15)] == [16, 20, 20, 22]
    assert schedule.local_batches(10, 7)[:, 0].tolist() == [16, 16, 20, 20, 20, 22, 22]
    assert schedule.local_batches(13, 1).tolist() == [[20, 12]]


def test_a_decision_that_keeps_the_batches_keeps_their_first_step_and_brings_its_own_reason() -> None:
    schedule = even()
    schedule.install(decided(9, 20, 12), 5)
    schedule.install(decided(19, 20, 12, reason="kept", phase="later"), 15)
    assert schedule.newest == decided(9, 20, 12, reason="kept").plan
    assert schedule.decision.phase == "later"
    assert schedule.plan_at(9).local_batches == (20, 12)


def test_after_a_new_beginning_only_that_decision_counts() -> None:
    schedule = even()
    schedule.install(decided(9, 20, 12, settled=False), 100)
    schedule.begin_with(decided(0, 10, 22))
    assert {schedule.plan_at(step).local_batches for step in (0, 9, 200)} == {(10, 22)}
    assert schedule.window_steps(100) == 10


def test_a_plan_of_other_batches_holds_from_the_first_free_step_whatever_the_planner_says() -> None:
    schedule = even()
    planner = Script(20, 12)
    decision = schedule.decide(planner, window(), 9)
    assert [step for _, _, step in planner.asked] == [9]
    assert decision.plan.first_step == 9
    early = schedule.decide(Script(16, 16), window(), 9)
    assert early.plan.local_batches == (16, 16)
    assert schedule.newest.local_batches == (16, 16), "nothing holds before it is installed"

    class Early(Script):
        def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
            return decided(0, *self.local_batches)

    assert schedule.decide(Early(20, 12), window(), 9).plan.first_step == 9


@pytest.mark.parametrize(
    ("local_batches", "words"),
    [
        ((16,), "for 2 ranks: it must give each rank one, of at least 1"),
        ((16, 8, 8), "for 2 ranks"),
        ((32, 0), "of at least 1"),
        ((25, 7), r"\(25, 7\), outside of the loader's local_batches or local_bounds, \[2, 2\] to \[24, 99\]"),
        ((1, 31), "outside of the loader's"),
    ],
)
def test_a_plan_that_breaks_the_jobs_bounds_is_refused_with_them(local_batches: tuple[int, ...], words: str) -> None:
    schedule = even()
    with pytest.raises(InvalidInputError, match=words):
        schedule.decide(Script(*local_batches), window(), 9)
    assert schedule.newest.local_batches == (16, 16)
    with pytest.raises(InvalidInputError, match=words):
        Schedule(JOB, decided(0, *local_batches))


def test_the_planner_is_given_the_job_within_what_memory_holds_and_told_nothing_where_that_is_no_limit() -> None:
    schedule, planner = even(), Script(20, 12)
    schedule.decide(planner, window(), 9)
    schedule.decide(planner, window(20, NO_MAX), 9)
    free, held = (job for _, job, _ in planner.asked)
    assert free is JOB
    assert held == replace(JOB, max_local=(20, 99))


def test_a_rank_at_what_its_memory_holds_is_named_once() -> None:
    schedule = even()
    assert schedule.decide(Script(20, 12), window(20, NO_MAX), 9).plan.reason == (
        "by script; memory holds rank 0 to 20 samples"
    )
    assert schedule.decide(Script(19, 13), window(20, NO_MAX), 9).plan.reason == "by script"
    at_the_users_own = schedule.decide(Script(24, 8), window(NO_MAX, 40), 9)
    assert at_the_users_own.plan.reason == "by script"

    class Says(Script):
        def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
            return decided(step, *self.local_batches, reason="memory holds rank 0 to 20 samples, 4 less than before")

    said = schedule.decide(Says(20, 12), window(20, NO_MAX), 9).plan.reason
    assert said == "memory holds rank 0 to 20 samples, 4 less than before"


def test_a_planner_of_ones_own_may_call_its_phase_what_it_likes() -> None:
    training = Training(Script(20, 12), JOB, np.random.default_rng(0))
    training.run(CLUSTER, 20)
    assert set(training.phases) == {"night shift"}
    assert training.plans[-1].local_batches == (20, 12)


def test_a_step_is_worth_what_the_noise_says_of_the_total_batch_in_force() -> None:
    schedule, noise = even(), Noise(signal_sqnorm=1.0, noise_trace=32.0)
    assert schedule.gain_at(0) == 1.0
    schedule.install(decided(9, 20, 44, noise=noise), 5)
    assert schedule.gain_at(8) == 1.0
    assert schedule.gain_at(9) == pytest.approx(2 * (32 + 32) / (32 + 64))
    schedule.install(decided(12, 20, 44), 10)
    assert schedule.gain_at(12) == 1.0, "nothing is known of the noise"


def test_a_step_over_several_batches_compares_with_as_many_initial_ones() -> None:
    schedule, noise = even(), Noise(signal_sqnorm=1.0, noise_trace=32.0)
    schedule.install(decided(9, 20, 44, noise=noise), 5)
    assert schedule.gain_at(8, 4) == 1.0
    assert schedule.gain_at(9, 4) == pytest.approx(2 * (32 + 4 * 32) / (32 + 4 * 64))


@given(totals=st.lists(st.sampled_from([32, 48, 64, 104]), min_size=1, max_size=4), num_samples=st.integers(1, 2000))
def test_no_pass_is_longer_than_at_the_initial_total_nor_shorter_than_its_samples(
    totals: list[int], num_samples: int
) -> None:
    job = replace(JOB, num_samples=num_samples, max_local=99)
    schedule, position, length, number = Schedule(job, decided(0, 16, 16)), 0, 0.0, 0
    while position < num_samples:
        total = totals[number % len(totals)]
        schedule.install(decided(0, total // 2, total // 2), 0)
        cut = min(total, num_samples - position)
        length += schedule.length(0, cut)
        position, number = position + cut, number + 1
    longest = -(-num_samples // 32)
    assert num_samples / 32 - 1e-9 <= length <= longest + 1e-9
    assert length == pytest.approx(longest) or set(totals) != {32}


def test_a_pass_that_leaves_its_short_batch_out_is_shorter() -> None:
    job = replace(JOB, num_samples=100)
    assert (job.pass_steps, replace(job, drop_last=True).pass_steps, JOB.pass_steps) == (4, 3, None)


@pytest.mark.parametrize(
    ("signal", "trace", "scale", "gain"),
    [
        (0.0, 5.0, np.inf, 4.0),
        (np.nan, np.nan, np.nan, 1.0),
        (0.0, 0.0, np.inf, 1.0),
        (1.0, 0.0, 0.0, 1.0),
        (1.0, np.inf, np.inf, 1.0),
    ],
    ids=["drowned", "unknown", "no gradient", "no noise", "infinite"],
)
def test_the_gain_is_one_where_nothing_is_known_and_the_ratio_where_noise_drowns_the_signal(
    signal: float, trace: float, scale: float, gain: float
) -> None:
    noise = Noise(signal_sqnorm=signal, noise_trace=trace)
    assert noise.noise_scale == pytest.approx(scale, nan_ok=True)
    assert noise.gain(128, 32) == gain
