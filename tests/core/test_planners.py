"""The baselines behind the same protocol as the controller."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import Training, measure
from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.policies import POLICIES, make_planner
from cannikin.core.policies.adaptdl import fit_replicas, replica_times
from cannikin.core.policies.cannikin import Controller
from cannikin.core.policies.paper import PaperPlanner
from cannikin.core.policies.plans import even_batches, inverse_batches
from cannikin.core.split import optimal_split
from cannikin.core.values import NO_MAX, Job
from cannikin.errors import InfeasibleError, InvalidInputError, StateError

CLUSTER = Cluster.two_point(
    forward=Curve(fixed_s=[0.002, 0.004, 0.006], per_sample_s=[1e-4, 2e-4, 4e-4]),
    backward=Curve(fixed_s=[0.002, 0.004, 0.006], per_sample_s=[3e-4, 6e-4, 12e-4]),
    gamma=0.2,
    overlapped_s=0.006,
    last_s=0.002,
)


def started(policy: str, job: Job, seed: int, *, delay: int = 0) -> Training:
    """The training of a new planner of that name."""
    return Training(make_planner(policy, job), job, np.random.default_rng(seed), delay=delay)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_plans_within_the_job_and_says_why(policy: str) -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=768, num_samples=96 * 20, max_local=400)
    training = started(policy, job, 0)
    training.run(CLUSTER, 150, sqnorms=(1.0, 400.0))
    for plan in training.plans:
        assert len(plan.local_batches) == 3
        assert sum(plan.local_batches) == plan.total_batch
        assert min(plan.local_batches) >= 1
        assert max(plan.local_batches) <= 400
        assert plan.reason
    if policy != "paper":  # whose rounding need not keep the sum
        assert all(96 <= plan.total_batch <= 768 for plan in training.plans)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_goes_on_from_its_saved_state(policy: str) -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=768, num_samples=96 * 20)
    first = make_planner(policy, job)
    plan = Training(first, job, np.random.default_rng(1)).run(CLUSTER, 90, sqnorms=(1.0, 400.0))
    second = make_planner(policy, job)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.decide(None, job, 90) == first.decide(None, job, 90)
    rng = np.random.default_rng(2)
    for step in range(90, 170, 10):
        window = measure(CLUSTER, [plan.local_batches] * 10, rng, first_step=step, sqnorms=(1.0, 400.0))
        decision = first.decide(window, job, step + 10)
        assert second.decide(window, job, step + 10) == decision
        plan = decision.plan


@pytest.mark.parametrize("policy", ["cannikin", "adaptdl", "paper"])
def test_a_plan_that_compared_total_batches_says_which_and_what_they_give(policy: str) -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=768, num_samples=96 * 100)
    training, choices = started(policy, job, 8), []
    for k in range(40):
        now = training.plans[-1]
        before = now.total_batch
        decision = training.show(
            measure(CLUSTER, [now.local_batches] * 10, training.rng, first_step=10 * k, sqnorms=(1.0, 400.0))
        )
        plan = decision.plan
        choices.append(decision.choice)
        if decision.choice is None:
            assert abs(plan.total_batch - before) <= 1, "but for the paper's rounding"
            continue
        totals, goodputs = decision.choice.totals, decision.choice.goodputs
        assert len(totals) == len(goodputs) <= 51
        best = totals[int(np.argmax(goodputs))]
        assert any(abs(plan.total_batch - total) <= 1 for total in (before, best))
    assert None in choices
    assert any(choices)
    if policy != "cannikin":
        assert choices.count(None) > 20, "an epoch has three windows at least"


@pytest.mark.parametrize("policy", ["cannikin", "adaptdl", "paper"])
def test_where_the_total_is_fixed_nothing_is_compared(policy: str) -> None:
    training = started(policy, Job(num_ranks=3, batch_size=96, num_samples=96 * 20), 9)
    training.run(CLUSTER, 100, sqnorms=(1.0, 400.0))
    assert {decision.choice for decision in training.decisions} == {None}


def test_even_never_changes() -> None:
    training = started("even", Job(num_ranks=3, batch_size=98), 3)
    training.run(CLUSTER, 50)
    assert {plan.local_batches for plan in training.plans} == {(33, 33, 32)}


def test_lb_bsp_moves_five_samples_a_window_from_the_slowest_rank_to_the_fastest() -> None:
    training = started("lb-bsp", Job(num_ranks=3, batch_size=192), 4)
    training.run(CLUSTER, 15, noise=0.0, outliers=0.0)
    batches = [plan.local_batches for plan in training.plans]
    assert batches[:3] == [(64, 64, 64), (69, 64, 59), (74, 64, 54)]


def test_lb_bsp_stops_when_a_move_no_longer_helps() -> None:
    training = started("lb-bsp", Job(num_ranks=3, batch_size=192), 5)
    plan = training.run(CLUSTER, 400, noise=0.0, outliers=0.0)
    assert training.plans[-20].local_batches == plan.local_batches
    compute = CLUSTER.forward.at(plan.local_batches) + CLUSTER.backward.at(plan.local_batches)
    assert compute.max() / compute.min() < 1.2


def test_lb_bsp_waits_until_its_last_move_is_in_force() -> None:
    training = started("lb-bsp", Job(num_ranks=3, batch_size=192), 6, delay=9)
    training.run(CLUSTER, 40, noise=0.0, outliers=0.0)
    moved = {plan.local_batches for plan in training.plans}
    assert len(moved) == 1 + 8 // 2  # a move every second of eight windows


def test_adaptdl_splits_evenly_and_chooses_its_total_once_an_epoch() -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=960, num_samples=96 * 40)
    training = started("adaptdl", job, 7)
    training.run(CLUSTER, 35, sqnorms=(1.0, 1e5))
    assert {plan.total_batch for plan in training.plans} == {96}
    training.run(CLUSTER, 100, sqnorms=(1.0, 1e5))
    assert training.plans[-1].total_batch > 300
    assert all(max(plan.local_batches) - min(plan.local_batches) <= 1 for plan in training.plans)


def test_adaptdls_first_choice_counts_however_small_its_gain_and_later_ones_only_above_five_per_cent() -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=960, num_samples=96 * 20)
    training = started("adaptdl", job, 7)
    quiet = {"noise": 0.0, "outliers": 0.0}
    first = training.run(CLUSTER, 20, sqnorms=(1.0, 30.0), **quiet)
    assert first.total_batch > 96
    assert 0 < float(first.reason.split("goodput +")[1].split("%")[0]) <= 4
    # Another noise would make the best total another, for too small a gain.
    later = training.run(CLUSTER, 200, sqnorms=(1.0, 33.0), **quiet)
    assert later.total_batch == first.total_batch
    assert "not more than 5.0%" in [each.choice.reason for each in training.decisions if each.choice][-1]


def test_adaptdl_gives_all_ranks_the_same_and_no_more_than_the_smallest_memory_holds() -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=960, max_local=(400, 100, 50), num_samples=96 * 20)
    training = started("adaptdl", job, 7)
    plan = training.run(CLUSTER, 200, sqnorms=(1.0, 1e6))
    assert plan.local_batches == (50, 50, 50)


def test_adaptdl_gives_all_ranks_less_where_a_memory_turns_out_smaller() -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=960, num_samples=96 * 20)
    training = started("adaptdl", job, 7)
    assert training.run(CLUSTER, 100, sqnorms=(1.0, 1e6)).local_batches[0] > 60
    for cap, most in ((60, 60), (20, 32)):  # never less than B0: there AdaptDL runs out of memory
        batches = [training.plans[-1].local_batches] * 10
        window = measure(CLUSTER, batches, training.rng, first_step=training.step, sqnorms=(1.0, 1e6))
        plan = training.show(replace(window, max_batch=np.array([NO_MAX, cap, NO_MAX]))).plan
        assert plan.local_batches == (most,) * 3
        assert f"the smallest memory holds {most} samples" in plan.reason


def test_adaptdl_profiles_rank_0_alone() -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=960, num_samples=96 * 20)
    window = measure(CLUSTER, [(32, 32, 32)] * 20, np.random.default_rng(1), sqnorms=(1.0, 500.0))
    learned = []
    for factors in ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [2.0, 1.0, 1.0]):
        planner, slower = make_planner("adaptdl", job), np.array(factors)
        times = {"before_s": window.before_s * slower, "ready_s": window.ready_s * slower[:, None]}
        planner.decide(replace(window, **times), job, 20)
        learned.append(planner.state_dict()["points"])
    assert learned[0] == learned[1]
    assert learned[0] != learned[2]


@pytest.mark.parametrize("policy", ["adaptdl", "paper"])
def test_policies_of_others_take_norms_in_every_step(policy: str) -> None:
    training = started(policy, Job(num_ranks=3, batch_size=96), 0)
    assert all(training.schedule.takes_norms(step) for step in range(200))
    training.run(CLUSTER, 50)
    assert all(training.schedule.takes_norms(step) for step in range(200))
    assert not started("cannikin", Job(num_ranks=3, batch_size=96), 0).schedule.takes_norms(100)


def test_adaptdls_noise_scale_forgets_by_its_own_constant() -> None:
    job = Job(num_ranks=3, batch_size=96, num_samples=96 * 20)
    training = started("adaptdl", job, 0)
    training.run(CLUSTER, 500, sqnorms=(1.0, 100.0))
    training.run(CLUSTER, 500, sqnorms=(1.0, 1000.0))
    noise, kept = training.decision.noise, 0.997**500
    assert noise is not None
    assert noise.noise_scale == pytest.approx(1000 - 900 * kept * (1 - kept) / (1 - kept**2), rel=0.01)


def test_adaptdls_model_is_recovered_from_its_own_times() -> None:
    local = np.array([8.0, 16.0, 32.0, 64.0])
    for truth in ((0.004, 2e-4, 0.006, 1.0), (0.004, 2e-4, 0.006, 3.0)):
        alpha, beta, *_ = truth
        fit = fit_replicas(local, alpha + beta * local, replica_times(truth, local))
        assert replica_times(fit, local) == pytest.approx(replica_times(truth, local), rel=0.02)


@pytest.mark.parametrize("grad_s", [(0.020, 0.030), (0.030, 0.020)])
def test_adaptdls_model_stays_near_what_was_measured_where_noise_tilts_its_line(grad_s: tuple[float, float]) -> None:
    """As a short last batch does beside the others: a fixed or a sample's time would come out below 0."""
    local, measured_s = np.array([15.0, 16.0]), np.array(grad_s)
    alpha, beta, *_ = fit_replicas(local, measured_s, measured_s + 0.001)
    assert alpha + beta * local == pytest.approx([0.024, 0.024], rel=0.1)
    assert alpha >= 0.0
    assert beta >= 0.0


def test_adaptdl_with_one_batch_seen_takes_half_the_compute_time_as_fixed() -> None:
    alpha, beta, *_ = fit_replicas(np.array([16.0]), np.array([0.010]), np.array([0.012]))
    assert alpha == pytest.approx(0.005)
    assert beta * 16 == pytest.approx(0.005)


def test_the_paper_learns_for_two_epochs_and_reaches_optperf_in_the_third() -> None:
    job = Job(num_ranks=3, batch_size=192, num_samples=192 * 20)
    training = started("paper", job, 8)
    training.run(CLUSTER, 70, noise=0.0, outliers=0.0)
    phases = training.phases
    assert phases.index("inverse") < phases.index("optperf")
    steps_in_even = sum(5 if k < 8 else 10 for k, phase in enumerate(phases) if phase == "even")
    assert steps_in_even >= 20
    plan = training.plans[-1]
    optimum = optimal_split(CLUSTER, plan.total_batch).step_s
    assert step_time(CLUSTER, plan.local_batches) <= 1.02 * optimum
    assert plan.predicted_step_s == pytest.approx(optimum, rel=0.02)


def test_the_papers_total_moves_from_the_second_epoch_on() -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=768, num_samples=96 * 40)
    training = started("paper", job, 8)
    training.run(CLUSTER, 45, sqnorms=(1.0, 1e5), noise=0.0, outliers=0.0)
    plan = training.plans[training.phases.index("inverse")]
    assert plan.total_batch > 2 * 96
    sample_s = [1 / batch for batch in plan.local_batches]
    assert sample_s == sorted(sample_s), "by equation 8: the slower, the fewer"
    assert "second epoch: equation 8; total batch 96 ->" in plan.reason


def test_the_paper_never_hands_out_negative_batches() -> None:
    # Public CIFAR-10 measurements of an A100, a V100 and an RTX 6000: the equal-time split of 64 samples is negative.
    fixed, slope = np.array([0.0268, 0.0699, 0.0261]), np.array([92.4e-6, 182e-6, 254e-6])
    cluster = Cluster.two_point(
        forward=Curve(fixed_s=fixed / 3, per_sample_s=slope / 3),
        backward=Curve(fixed_s=fixed * 2 / 3, per_sample_s=slope * 2 / 3),
        gamma=0.15,
        overlapped_s=0.003,
        last_s=0.001,
    )
    training = started("paper", Job(num_ranks=3, batch_size=64, num_samples=640), 9)
    plan = training.run(cluster, 60, noise=0.0, outliers=0.0)
    assert "rank 1 would get -155.96 samples" in plan.reason
    assert min(plan.local_batches) >= 1
    assert plan.total_batch == pytest.approx(64, abs=1)


def test_the_papers_gamma_is_the_mean_over_the_whole_run() -> None:
    def predicted_s(gammas: list[float]) -> float:
        training = started("paper", Job(num_ranks=3, batch_size=192, num_samples=192 * 20), 3)
        for gamma in gammas:
            plan = training.run(replace(comm_bound, gammas=np.tile([gamma, 1.0], (3, 1))), 20, noise=0.01, outliers=0.0)
        assert training.decision.phase == "optperf"
        assert plan.predicted_step_s is not None
        return plan.predicted_step_s

    comm_bound = replace(CLUSTER, tails_s=np.array([0.5, 0.01]))
    low_s, high_s = predicted_s([0.2] * 4), predicted_s([0.6] * 4)
    assert low_s < high_s
    assert low_s + 0.2 * (high_s - low_s) < predicted_s([0.2, 0.2, 0.6, 0.6]) < high_s - 0.2 * (high_s - low_s)


@pytest.mark.parametrize("seed", range(5))
def test_the_paper_goes_on_where_ranks_times_do_not_depend_on_their_batch(seed: int) -> None:
    # Launching kernels takes all the time: some of the fitted lines fall, and Algorithm 1 has no solution for those.
    flat = Curve(fixed_s=[0.02, 0.03, 0.05], per_sample_s=[1e-9] * 3)
    cluster = Cluster.two_point(forward=flat, backward=flat, gamma=0.15, overlapped_s=0.003, last_s=0.001)
    job = Job(num_ranks=3, batch_size=30, max_batch_size=300, num_samples=300)
    training = started("paper", job, seed)
    plan = training.run(cluster, 100, noise=0.03, outliers=0.0, sqnorms=(1.0, 1e4))
    assert training.decision.phase == "optperf"
    assert plan.total_batch > 30


def test_the_papers_overlap_ratio_may_be_a_plain_mean_instead() -> None:
    job = Job(num_ranks=3, batch_size=30)
    assert PaperPlanner(job, pooling="mean").decide(None, job, 0) == PaperPlanner(job).decide(None, job, 0)
    with pytest.raises(InvalidInputError, match="pooling='median' is unknown: choose inverse-variance or mean"):
        PaperPlanner(job, pooling="median")


def test_equation_8_gives_batches_in_inverse_proportion_within_the_bounds() -> None:
    job = Job(num_ranks=3, batch_size=70, max_local=(30, 99, 99))
    assert inverse_batches(job, 70, np.array([1.0, 2.0, 4.0])) == (30, 27, 13)
    assert inverse_batches(Job(num_ranks=3, batch_size=70), 70, np.array([1.0, 2.0, 4.0])) == (40, 20, 10)


@pytest.mark.parametrize("policy", ["even", "adaptdl"])
@pytest.mark.parametrize(
    ("bounds", "words"), [({"max_local": (30, 99, 99)}, "at most 30"), ({"min_local": (1, 50, 1)}, "at least 50")]
)
def test_an_even_split_that_ddp_cannot_hold_is_infeasible(policy: str, bounds: dict[str, Any], words: str) -> None:
    with pytest.raises(InfeasibleError, match=f"an even split of 96 gives rank . 32 samples, and it may have {words}"):
        make_planner(policy, Job(num_ranks=3, batch_size=96, **bounds))


def test_lb_bsp_starts_as_even_as_memory_allows() -> None:
    job = Job(num_ranks=3, batch_size=96, max_local=(20, 99, 99))
    assert make_planner("lb-bsp", job).decide(None, job, 0).plan.local_batches == (20, 38, 38)


def test_local_batches_that_are_set_are_what_even_means() -> None:
    job = Job(num_ranks=2, batch_size=32, min_local=(24, 8), max_local=(24, 8))
    assert make_planner("even", job).decide(None, job, 0).plan.local_batches == (24, 8)


def test_a_split_to_begin_with_respects_bounds() -> None:
    assert even_batches(Job(num_ranks=3, batch_size=10), 10) == (4, 3, 3)
    assert even_batches(Job(num_ranks=3, batch_size=10, max_local=(2, 9, 9)), 10) == (2, 4, 4)


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="cannikin, even, lb-bsp, adaptdl, paper"):
        make_planner("fastest", Job(num_ranks=2, batch_size=8))


def test_underscores_in_a_policys_name_are_forgiven() -> None:
    assert started("lb_bsp", Job(num_ranks=2, batch_size=8), 0).phases == ["lb-bsp"]


@pytest.mark.parametrize("policy", ["lb-bsp", "adaptdl", "paper"])
def test_a_state_for_another_number_of_ranks_is_refused(policy: str) -> None:
    state = make_planner(policy, Job(num_ranks=3, batch_size=96)).state_dict()
    with pytest.raises(StateError):
        make_planner(policy, Job(num_ranks=2, batch_size=96)).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_ranks": 0}, "at least 1 rank"),
        ({"batch_size": 2}, "3 to"),
        ({"max_local": 10}, "3 to 30"),
        ({"max_local": (10, 10)}, "2 local bounds for 3 ranks"),
        ({"min_local": 20, "max_local": 10}, "min_local"),
        ({"max_batch_size": 50}, "max_batch_size=50"),
    ],
)
def test_an_impossible_job_is_refused_with_the_limit(change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Job(**({"num_ranks": 3, "batch_size": 96} | change))  # type: ignore[arg-type]


def test_the_controller_is_the_policy_of_our_name() -> None:
    assert isinstance(make_planner("cannikin", Job(num_ranks=2, batch_size=8)), Controller)


def test_the_paper_goes_through_its_phases_where_epochs_are_shorter_than_windows() -> None:
    training = started("paper", Job(num_ranks=3, batch_size=96, num_samples=192), 0)
    training.run(CLUSTER, 100)
    assert {"even", "inverse", "optperf"} <= set(training.phases)


def test_the_papers_rounding_never_carries_the_total_beyond_its_limit() -> None:
    training = started("paper", Job(num_ranks=3, batch_size=96, max_batch_size=97, num_samples=960), 1)
    training.run(CLUSTER, 600, sqnorms=(1.0, 1e6))
    assert max(plan.total_batch for plan in training.plans) <= 99


def test_a_job_may_have_thousands_of_unbounded_ranks() -> None:
    assert Job(num_ranks=4096, batch_size=8192).largest_total == 8192


@pytest.mark.parametrize("policy", ["lb-bsp", "adaptdl", "paper"])
def test_an_empty_state_is_refused(policy: str) -> None:
    with pytest.raises(StateError):
        make_planner(policy, Job(num_ranks=2, batch_size=8)).load_state_dict({})


@pytest.mark.parametrize("policy", ["cannikin", "adaptdl", "paper"])
def test_where_the_total_batch_grows_the_decision_says_what_a_step_is_worth(policy: str) -> None:
    job = Job(num_ranks=3, batch_size=96, max_batch_size=768, num_samples=96 * 20)
    training = started(policy, job, 3)
    assert training.decision.noise is None
    assert training.schedule.gain_at(0) == 1.0
    training.run(CLUSTER, 300, sqnorms=(1.0, 1e6))
    total, noise = training.schedule.plan_at(training.step).total_batch, training.decision.noise
    assert total > 96
    assert noise is not None
    assert noise.noise_scale == pytest.approx(1e6, rel=0.05)
    assert 1 < training.schedule.gain_at(training.step) <= total / 96
    assert training.schedule.gain_at(training.step) == pytest.approx(total / 96, rel=0.01), "noise drowns the signal"


@pytest.mark.parametrize("policy", ["even", "lb-bsp"])
def test_a_policy_that_measures_no_noise_says_so(policy: str) -> None:
    training = started(policy, Job(num_ranks=3, batch_size=96), 4)
    training.run(CLUSTER, 60, sqnorms=(1.0, 1e6))
    assert {decision.noise for decision in training.decisions} == {None}
    assert training.schedule.gain_at(training.step) == 1.0
