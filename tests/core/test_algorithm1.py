"""The paper's Algorithm 1: right where it says it is valid, and honest about where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.policies.algorithm1 import algorithm1, round_batches
from cannikin.core.split import SplitSolver, optimal_split
from cannikin.errors import InvalidInputError


def two_point(q: object, s: object, k: object, m: object, *, gamma: float, overlapped_s: float) -> Cluster:
    return Cluster.two_point(
        forward=Curve(fixed_s=s, per_sample_s=q),
        backward=Curve(fixed_s=m, per_sample_s=k),
        gamma=gamma,
        overlapped_s=overlapped_s,
        last_s=0.5,
    )


def random_instance(seed: int) -> tuple[Cluster, int]:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 12))
    q, s, k, m = rng.uniform(0, 1, (4, n)) * np.array([[1.0], [10.0], [2.0], [5.0]])
    cluster = two_point(q, s, k, m, gamma=rng.uniform(0, 0.6), overlapped_s=rng.uniform(0, 50))
    return cluster, int(rng.integers(2, 40)) * n


def crossing_s(cluster: Cluster) -> np.ndarray:
    """The right order: a_i(b*) + P* with P* = T_o / (1 - gamma) = P_i(b*), when a rank's state changes."""
    forward, backward = cluster.forward, cluster.backward
    backward_s = float(cluster.tails_s[0] - cluster.tails_s[-1]) / (1 - float(cluster.gammas[0, 0]))
    short_s = backward_s - backward.fixed_s
    moves = backward.per_sample_s > 0
    batch = np.divide(short_s, backward.per_sample_s, out=np.zeros_like(short_s), where=moves)
    at_s = forward.fixed_s + forward.per_sample_s * batch + backward_s
    return np.where(moves, at_s, np.where(short_s > 0, np.inf, -np.inf))


@pytest.mark.parametrize("order", ["fixed time", "crossing time"])
def test_a_valid_result_is_the_optimum_in_reals(order: str) -> None:
    num_valid = num_searched = 0
    for seed in range(600):
        cluster, total = random_instance(seed)
        result = algorithm1(cluster, total, order=crossing_s(cluster) if order == "crossing time" else None)
        if not result.failure:
            num_valid += 1
            num_searched += result.num_solves > 2
            best_s = float(SplitSolver(cluster).step_times(total))
            assert result.step_s == pytest.approx(best_s, rel=1e-9), f"seed={seed}"
            assert result.predicted_s == pytest.approx(best_s, rel=1e-9), f"seed={seed}"
            assert sum(result.local_batches) == pytest.approx(total, rel=1e-9), f"seed={seed}"
    assert num_valid > 300
    assert num_searched > 50


def test_an_invalid_result_is_never_faster_than_the_optimum() -> None:
    failures = set()
    for seed in range(600):
        cluster, total = random_instance(seed)
        result = algorithm1(cluster, total)
        failures.add(result.failure)
        if min(result.local_batches) >= 1:  # within the bounds, so the optimum is a lower limit
            assert result.step_s >= float(SplitSolver(cluster).step_times(total)) * (1 - 1e-9), f"seed={seed}"
    assert {"", "overlap", "negative_batch", "bounds"} <= failures


def test_the_order_by_crossing_time_never_ends_in_a_contradiction() -> None:
    for seed in range(600):
        cluster, total = random_instance(seed)
        assert algorithm1(cluster, total, order=crossing_s(cluster)).failure in ("", "negative_batch", "bounds")


def counter_example() -> Cluster:
    return two_point([1, 0, 0], [5, 6, 1], [1, 4, 2], [0, 0, 0], gamma=0.2, overlapped_s=28)


def test_both_checks_may_agree_on_the_wrong_state() -> None:
    result = algorithm1(counter_example(), 45)
    assert result.failure == "overlap"
    assert result.reason.startswith("rank 1 is taken for communication-bound and comes out compute-bound")
    assert result.step_s - 0.5 == pytest.approx(59.55, abs=0.005)
    assert result.step_s == step_time(counter_example(), result.local_batches)
    assert float(SplitSolver(counter_example()).step_times(45)) - 0.5 == pytest.approx(47.05, abs=0.005)
    right = algorithm1(counter_example(), 45, order=crossing_s(counter_example()))
    assert right.step_s - 0.5 == pytest.approx(47.05, abs=0.005)


def test_no_boundary_in_the_order_of_fixed_time_may_be_right() -> None:
    searches = (algorithm1(*random_instance(seed)) for seed in range(20_000))
    result = next(result for result in searches if result.failure == "search")
    assert "no boundary in this order is right" in result.reason


def cifar10_trace() -> Cluster:
    """One A100, V100 and RTX 6000 on public CIFAR-10 traces, compute only."""
    forward = Curve(fixed_s=np.array([26.8, 69.9, 26.1]) * 1e-3, per_sample_s=np.array([92.4, 182, 254]) * 1e-6)
    none = Curve(fixed_s=[0, 0, 0], per_sample_s=[0, 0, 0])
    return Cluster(forward=forward, backward=none, gammas=[1.0], tails_s=[0.0], names=["a100", "v100", "rtx6000"])


def test_large_fixed_costs_give_negative_batches() -> None:
    result = algorithm1(cifar10_trace(), 64)
    assert result.failure == "negative_batch"
    assert result.reason.startswith("v100 would get -155.96 samples")
    assert round_batches(result.local_batches, 64)[0] == (159, -156, 61)
    assert min(optimal_split(cifar10_trace(), 64).local_batches) >= 1


def test_batches_beyond_the_bounds_are_not_valid() -> None:
    curve = Curve(fixed_s=[1, 1], per_sample_s=[1, 3])
    pair = Cluster.two_point(forward=curve, backward=curve, gamma=0.2, overlapped_s=0, last_s=0, max_batch=[10, 100])
    result = algorithm1(pair, 40)
    assert (result.failure, result.reason) == ("bounds", "rank 0 would get 30.00 samples, outside 1 to 10")


def test_ranks_without_slope_make_the_system_singular() -> None:
    result = algorithm1(two_point([0, 0, 1], [1, 2, 1], [0, 0, 1], [1, 1, 1], gamma=0.5, overlapped_s=1), 12)
    assert (result.failure, result.local_batches, result.step_s) == ("singular", (), np.inf)
    assert result.failure


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (
            Cluster.two_point(
                forward=Curve(fixed_s=[1], per_sample_s=[1], floor_s=[3]),
                backward=Curve(fixed_s=[1], per_sample_s=[1]),
                gamma=0.5,
                overlapped_s=1,
                last_s=1,
            ),
            "rank 0 has a floor on forward",
        ),
        (
            Cluster(
                forward=Curve(fixed_s=[1], per_sample_s=[1]),
                backward=Curve(fixed_s=[1], per_sample_s=[1]),
                gammas=[0.2, 0.5, 1.0],
                tails_s=[3, 2, 1],
            ),
            "3 buckets",
        ),
        (
            Cluster(
                forward=Curve(fixed_s=[1, 1], per_sample_s=[1, 1]),
                backward=Curve(fixed_s=[1, 1], per_sample_s=[1, 1]),
                gammas=[[0.2, 1.0], [0.3, 1.0]],
                tails_s=[2, 1],
            ),
            "gamma differs between ranks",
        ),
    ],
)
def test_a_cluster_beyond_the_papers_model_is_refused_with_a_reason(cluster: Cluster, words: str) -> None:
    result = algorithm1(cluster, 8)
    assert result.failure == "inexpressible"
    assert words in result.reason
    assert result.num_solves == 0


def test_one_bucket_is_all_compute() -> None:
    curve = Curve(fixed_s=[1, 1], per_sample_s=[1, 3])
    result = algorithm1(Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[4.0]), 40)
    assert not result.failure
    assert result.local_batches == pytest.approx((30, 10))
    assert (result.num_solves, result.reason) == (1, "every rank is compute-bound")


def test_rounding_one_by_one_may_miss_the_total() -> None:
    assert round_batches([3.4, 3.3, 3.3], 10) == ((3, 3, 3), "rounded batches sum to 9, not 10")
    assert round_batches([2.6, 2.6, 4.8], 10) == ((3, 3, 5), "rounded batches sum to 11, not 10")
    assert round_batches([2.6, 2.4], 5) == ((3, 2), "rounded batches sum to 5, as asked")


def test_rounding_misses_the_total_in_many_valid_results() -> None:
    surpluses = [
        sum(round_batches(result.local_batches, total)[0]) - total
        for cluster, total in map(random_instance, range(300))
        if not (result := algorithm1(cluster, total)).failure and cluster.num_ranks >= 5
    ]
    assert sum(surplus != 0 for surplus in surpluses) > len(surpluses) / 4


def test_a_total_below_one_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="total_batch=0: need at least 1 sample"):
        algorithm1(counter_example(), 0)
