"""Ranks that wait for their data: the further line of the model, and how it is learned and forgotten."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from clusters import clusters_with_total
from hypothesis import given, settings

from benchmarks.synthetic import Training, measure
from cannikin.core.loading import LoadHistory
from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.policies.cannikin import Controller
from cannikin.core.split import SplitSolver, optimal_split
from cannikin.core.values import Job, Plan, StepWindow

RNG = np.random.default_rng
NO_LOAD = [0.0, 0.0, 0.0]


def cluster_of(load_per_sample_s: list[float]) -> Cluster:
    slowness = np.array([1.0, 1.0, 2.0])
    return Cluster.two_point(
        forward=Curve(fixed_s=0.004 * slowness, per_sample_s=1e-4 * slowness),
        backward=Curve(fixed_s=0.004 * slowness, per_sample_s=3e-4 * slowness),
        gamma=0.2,
        overlapped_s=0.002,
        last_s=0.001,
        load=Curve(fixed_s=NO_LOAD, per_sample_s=load_per_sample_s),
    )


def measured(cluster: Cluster, plan: Plan, rng: np.random.Generator, *, first_step: int, noise: float) -> StepWindow:
    """A window in which the rank whose loading takes longest waits for its data, if that is longer than the step.

    It waits until its own step ends at L_i; the others, whose loaders are ahead, wait for it in the all-reduce.
    """
    window = measure(cluster, [plan.local_batches] * 10, rng, noise=noise, outliers=0.0, first_step=first_step)
    needs_s = cluster.load.at(window.local_batches)
    alone_s = window.before_s + (window.ready_s + cluster.tails_s).max(axis=-1)
    slowest = (needs_s == needs_s.max(axis=1, keepdims=True)) & (needs_s > alone_s.max(axis=1, keepdims=True))
    load_s = np.where(slowest, needs_s - alone_s, 0.0)
    start_s, moment_s, done_s = load_s + window.before_s, np.zeros(window.num_steps), np.empty_like(window.done_s)
    for j, cost_s in enumerate(-np.diff(cluster.tails_s, append=0.0)):
        moment_s = np.maximum(moment_s, (start_s + window.ready_s[..., j]).max(axis=1)) + cost_s
        done_s[..., j] = moment_s[:, None] - start_s
    return replace(window, load_s=load_s, done_s=done_s)


def train(controller: Controller, job: Job, cluster: Cluster, num_windows: int, *, noise: float = 0.0) -> list[Plan]:
    training = Training(controller, job, RNG(0))
    for k in range(num_windows):
        training.show(measured(cluster, training.plans[-1], training.rng, first_step=10 * k, noise=noise))
    return training.plans


def waiting(controller: Controller) -> list[bool]:
    """Which ranks the controller knows to wait for their data."""
    cluster = controller.model().cluster
    assert cluster is not None
    return ((cluster.load.per_sample_s > 0) | (cluster.load.fixed_s > 0)).tolist()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(clusters_with_total())
def test_loading_in_no_time_changes_nothing_at_all(instance: tuple[Cluster, int]) -> None:
    cluster, total = instance
    none = np.zeros(cluster.num_ranks)
    explicit = replace(cluster, load=Curve(fixed_s=none, per_sample_s=none))
    # A line that is never the highest must not change the answer either, though the solver sees it.
    idle = replace(cluster, load=Curve(fixed_s=np.full(cluster.num_ranks, 1e-9), per_sample_s=none))
    assert [len(c.lines()[0]) for c in (explicit, idle)] == [len(cluster.lines()[0]) + extra for extra in (0, 1)]
    split = optimal_split(cluster, total)
    assert optimal_split(explicit, total) == split
    assert float(SplitSolver(explicit).step_times(total)) == float(SplitSolver(cluster).step_times(total))
    if split.step_s > 1e-6:
        assert optimal_split(idle, total).step_s == pytest.approx(split.step_s, rel=1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(clusters_with_total())
def test_a_step_never_ends_before_its_loading(instance: tuple[Cluster, int]) -> None:
    cluster, total = instance
    ones = np.ones(cluster.num_ranks)
    loading = replace(cluster, load=Curve(fixed_s=ones, per_sample_s=ones))
    split = optimal_split(loading, total)
    batches = np.array(split.local_batches)
    assert split.step_s >= 1 + batches.max()
    assert split.step_s >= optimal_split(cluster, total).step_s
    assert step_time(loading, batches) == max(step_time(cluster, batches), 1.0 + batches.max())


def test_a_rank_whose_loader_decides_is_called_so_and_gets_less() -> None:
    split = optimal_split(cluster_of([0.0, 2e-3, 0.0]), 96)
    assert split.bottlenecks[1] == "loading"
    assert split.local_batches[1] < optimal_split(cluster_of(NO_LOAD), 96).local_batches[1]
    assert split.step_s >= 2e-3 * split.local_batches[1]


def test_communication_is_not_put_on_top_of_loading() -> None:
    cluster = cluster_of([0.0, 1.0, 0.0])
    assert step_time(cluster, [8, 8, 8]) == 8.0


def test_a_cluster_without_a_rank_keeps_the_others_loading() -> None:
    rest = cluster_of([1.0, 2.0, 3.0]).without(1)
    assert rest.load.per_sample_s.tolist() == [1.0, 3.0]


def test_a_rank_that_waits_for_its_data_is_given_less_and_the_reason_says_why() -> None:
    cluster = cluster_of([0.0, 2e-3, 0.0])
    job = Job(num_ranks=3, batch_size=96)
    plans = train(Controller(job), job, cluster, 6)
    assert "rank 1 waits for its data: more loader workers would help" in plans[3].reason
    best_s = optimal_split(cluster, 96).step_s
    assert step_time(cluster, plans[-1].local_batches) < 1.05 * best_s
    assert step_time(cluster, plans[-1].local_batches) < 0.7 * step_time(cluster, plans[0].local_batches)
    assert plans[-1].predicted_step_s == pytest.approx(best_s, rel=0.05)


def test_a_split_that_leaves_no_wait_stays_though_the_wait_is_gone() -> None:
    # Now and then a few samples more are tried, for a loader may have become faster: on average that costs little.
    cluster = cluster_of([0.0, 2e-3, 0.0])
    job = Job(num_ranks=3, batch_size=960)
    plans = train(Controller(job), job, cluster, 80, noise=0.02)[10:]
    times_s = [step_time(cluster, plan.local_batches) for plan in plans]
    best_s = optimal_split(cluster, 960).step_s
    assert np.mean(times_s) < 1.03 * best_s
    assert max(times_s) < 1.06 * best_s


def test_a_loader_that_has_become_fast_is_forgotten() -> None:
    job = Job(num_ranks=3, batch_size=96)
    controller = Controller(job)
    train(controller, job, cluster_of([0.0, 2e-3, 0.0]), 12)
    assert any(waiting(controller))
    fast = cluster_of(NO_LOAD)
    plan = train(controller, job, fast, 150)[-1]
    assert not any(waiting(controller))
    assert "waits for its data" not in plan.reason
    assert step_time(fast, plan.local_batches) < 1.03 * optimal_split(fast, 96).step_s


def handed_over(
    cluster: Cluster, local_batches: tuple[int, ...], rng: np.random.Generator, handing_s: float, *, first_step: int = 0
) -> StepWindow:
    """A window in which the loaders are ahead, but every batch takes a moment from the worker to the rank."""
    window = measure(cluster, [local_batches] * 10, rng, noise=0.02, outliers=0.0, first_step=first_step)
    load_s = handing_s * rng.uniform(0.5, 1.5, window.before_s.shape)
    start_s, moment_s, done_s = load_s + window.before_s, np.zeros(window.num_steps), np.empty_like(window.done_s)
    for j, cost_s in enumerate(-np.diff(cluster.tails_s, append=0.0)):
        moment_s = np.maximum(moment_s, (start_s + window.ready_s[..., j]).max(axis=1)) + cost_s
        done_s[..., j] = moment_s[:, None] - start_s
    return replace(window, load_s=load_s, done_s=done_s)


def test_a_rank_that_waits_for_the_others_too_is_not_held_up_by_its_loader() -> None:
    cluster, history = cluster_of(NO_LOAD), LoadHistory(3)
    history.observe(handed_over(cluster, (32, 32, 32), RNG(0), 0.006))
    assert history.known[:2].tolist() == [False, False]  # rank 2, twice as slow, is the one they wait for


def test_the_moment_that_handing_over_a_batch_takes_does_not_drive_the_split_away() -> None:
    cluster, job = cluster_of(NO_LOAD), Job(num_ranks=3, batch_size=96)
    training = Training(Controller(job), job, RNG(0))
    for k in range(60):
        local_batches = training.plans[-1].local_batches
        training.show(handed_over(cluster, local_batches, training.rng, 0.003, first_step=10 * k))
    times_s = [step_time(cluster, plan.local_batches) for plan in training.plans[10:]]
    assert np.mean(times_s) < 1.1 * optimal_split(cluster, 96).step_s


def window_of(batch: int, wait_s: list[float], *, interval_s: float = 1.0) -> StepWindow:
    """One rank's steps of this whole length, each with its own wait."""
    load_s = np.array(wait_s)[:, None]
    before_s = np.full_like(load_s, 0.2) * interval_s
    return StepWindow(
        first_step=0,
        local_batches=np.full(load_s.shape, batch),
        before_s=before_s,
        ready_s=np.full((*load_s.shape, 1), 0.1) * interval_s,
        done_s=(interval_s - load_s - before_s)[..., None],
        local_sqnorm=np.full(load_s.shape, np.nan),
        global_sqnorm=np.full(len(load_s), np.nan),
        load_s=load_s,
    )


def test_one_batch_gives_a_line_through_the_origin_and_two_give_a_line() -> None:
    history = LoadHistory(1)
    history.observe(window_of(20, [0.3] * 5))
    assert history.curve().at([10]) == pytest.approx([0.5])
    history.observe(window_of(10, [0.3] * 5, interval_s=0.6))
    assert history.curve().at([30]) == pytest.approx([1.4])
    history.observe(window_of(11, [0.3] * 5, interval_s=0.64))
    assert history.curve().at([20]) == pytest.approx([1.0]), "the far point is kept, the near one replaced"


@pytest.mark.parametrize(("wait_s", "known"), [(0.19, False), (0.21, True)])
def test_a_wait_counts_from_a_fifth_of_the_interval(wait_s: float, known: bool) -> None:
    history = LoadHistory(1)
    history.observe(window_of(20, [wait_s] * 5))
    assert history.known.tolist() == [known]


def test_a_wait_in_some_steps_only_does_not_count() -> None:
    history = LoadHistory(1)
    history.observe(window_of(20, [0.5, 0.5, 0.0, 0.0, 0.0]))
    assert not history.known.any()


def test_no_wait_where_the_line_promises_one_refutes_the_line() -> None:
    history = LoadHistory(1)
    history.observe(window_of(20, [0.3] * 5))
    history.observe(window_of(20, [0.0] * 5, interval_s=0.9))
    assert not history.known.any()


def test_no_wait_at_a_batch_the_loader_can_keep_up_with_refutes_nothing() -> None:
    history = LoadHistory(1)
    history.observe(window_of(20, [0.3] * 5))
    history.observe(window_of(16, [0.0] * 5, interval_s=0.9))
    assert history.curve().at([20]) == pytest.approx([0.99])


def test_steps_that_do_not_count_teach_nothing_of_loading() -> None:
    history = LoadHistory(1)
    window = window_of(20, [0.3] * 5)
    history.observe(replace(window, valid=np.zeros((5, 1), dtype=np.bool_)))
    assert not history.known.any()
    impossible = replace(window, load_s=np.full((5, 1), np.nan))
    assert not impossible.valid.any()
    assert not replace(window, load_s=np.full((5, 1), -0.1)).valid.any()


def test_what_is_known_of_loading_is_saved() -> None:
    job = Job(num_ranks=3, batch_size=96)
    controller = Controller(job)
    train(controller, job, cluster_of([0.0, 2e-3, 0.0]), 4)
    state = json.loads(json.dumps(controller.state_dict()))
    restored = Controller(job)
    restored.load_state_dict(state)
    assert waiting(restored) == [False, True, False]
    was, now = controller.model().cluster, restored.model().cluster
    assert was is not None
    assert now is not None
    assert now.load.at([9, 9, 9]) == pytest.approx(was.load.at([9, 9, 9]))


def test_the_predicted_step_time_of_one_rank_alone_includes_its_wait() -> None:
    curve = Curve(fixed_s=[0.01], per_sample_s=[1e-4])
    load = Curve(fixed_s=[0.0], per_sample_s=[2e-3])
    cluster = Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[0.0], load=load)
    job = Job(num_ranks=1, batch_size=32)
    plan = train(Controller(job), job, cluster, 8)[-1]
    assert plan.predicted_step_s == pytest.approx(0.064, rel=0.01)
