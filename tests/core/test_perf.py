"""The performance model against an event-by-event simulation, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from clusters import KINDS, clusters, clusters_with_total, draw_cluster, rng_of
from hypothesis import assume, given
from hypothesis import strategies as st

from cannikin.core.perf import Cluster, Curve, even_speed, even_step_time, hardware_use, rescaled_tails, step_time
from cannikin.core.split import optimal_split
from cannikin.errors import InvalidInputError


def simulate(cluster: Cluster, local_batches: np.ndarray) -> float:
    """Bucket by bucket: its all-reduce starts when every rank has it ready and the one before is done."""
    costs_s = -np.diff(cluster.tails_s, append=0.0)
    done_s = 0.0
    for bucket, cost_s in enumerate(costs_s):
        ready_s = []
        for rank, batch in enumerate(local_batches):
            before_s, backward_s = (
                max(curve.floor_s[rank], curve.fixed_s[rank] + curve.per_sample_s[rank] * batch)
                for curve in (cluster.forward, cluster.backward)
            )
            ready_s.append(before_s + cluster.gammas[rank, bucket] * backward_s)
        done_s = max(*ready_s, done_s) + cost_s
    load = cluster.load
    loaded_s = [
        max(floor_s, fixed_s + slope * batch)
        for floor_s, fixed_s, slope, batch in zip(
            load.floor_s, load.fixed_s, load.per_sample_s, local_batches, strict=True
        )
    ]
    return max(done_s, *loaded_s)


@pytest.mark.parametrize("kind", KINDS)
def test_step_time_equals_an_event_by_event_simulation(kind: str) -> None:
    for seed in range(100):
        rng = rng_of(kind, seed)
        cluster = draw_cluster(rng, kind, int(rng.integers(1, 9)))
        batches = rng.uniform(0, 60, cluster.num_ranks)
        simulated_s = simulate(cluster, batches)
        assert step_time(cluster, batches) == pytest.approx(simulated_s, rel=1e-12), f"kind={kind!r} seed={seed}"


@pytest.mark.parametrize("kind", KINDS)
def test_step_time_is_the_largest_of_the_lines(kind: str) -> None:
    for seed in range(50):
        rng = rng_of(kind, seed)
        cluster = draw_cluster(rng, kind, int(rng.integers(1, 9)))
        batches = rng.uniform(0, 60, cluster.num_ranks)
        alphas, betas = cluster.lines()
        assert (betas >= 0).all()
        highest_s = (alphas + betas * batches).max()
        assert step_time(cluster, batches) == pytest.approx(highest_s, rel=1e-12), f"kind={kind!r} seed={seed}"


def test_two_point_form_is_the_papers_maximum_of_two_cases() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        q, s, k, m, b = rng.uniform(0, 5, (5, 4))
        gamma, overlapped_s, last_s = rng.random(), *rng.uniform(0, 50, 2)
        forward, backward = Curve(fixed_s=s, per_sample_s=q), Curve(fixed_s=m, per_sample_s=k)
        cluster = Cluster.two_point(
            forward=forward, backward=backward, gamma=gamma, overlapped_s=overlapped_s, last_s=last_s
        )
        a, p = q * b + s, k * b + m
        expected_s = max((a + p + last_s).max(), (a + gamma * p + overlapped_s + last_s).max())
        assert step_time(cluster, b) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("n", range(2, 20))
def test_a_ring_of_one_rank_less_scales_by_n_times_n_less_2_over_n_less_1_squared(n: int) -> None:
    curve = Curve(fixed_s=np.ones(n), per_sample_s=np.ones(n))
    smaller = Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[1.0]).without(0)
    assert smaller.tails_s[0] == pytest.approx(n * (n - 2) / (n - 1) ** 2, rel=1e-15, abs=0)


@pytest.mark.parametrize("n", range(2, 20))
def test_a_rank_that_comes_back_brings_the_ring_back_as_it_was(n: int) -> None:
    tails_s = np.array([3.0, 0.7])
    assert rescaled_tails(rescaled_tails(tails_s, n, n + 1), n + 1, n) == pytest.approx(tails_s, rel=1e-15)
    assert rescaled_tails(tails_s, n, n + 1)[0] == pytest.approx(3.0 * (n / (n + 1)) / ((n - 1) / n), rel=1e-15)


def test_one_rank_alone_tells_nothing_of_the_all_reduces_of_several() -> None:
    assert rescaled_tails([3.0], 1, 4).tolist() == [0.0]
    assert rescaled_tails([3.0], 1, 1).tolist() == [3.0]


def test_a_cluster_grows_by_ranks_like_those_it_has() -> None:
    cluster = trio(min_batch=[1, 2, 3], max_batch=[10, 20, 30], names=["a", "b", "c"])
    more = cluster.take([0, 1, 2, 1])
    assert more.names == ("a", "b", "c", "b")
    assert more.backward.fixed_s.tolist() == [1.0, 2.0, 3.0, 2.0]
    assert more.max_batch.tolist() == [10, 20, 30, 20]
    assert more.tails_s == pytest.approx(cluster.tails_s * (3 / 4) / (2 / 3), rel=1e-15)


def test_a_rank_that_leaves_takes_its_curves_bounds_and_name_along() -> None:
    cluster = trio(min_batch=[1, 2, 3], max_batch=[10, 20, 30], names=["a", "b", "c"])
    rest = cluster.without(1)
    assert rest.names == ("a", "c")
    assert rest.forward.fixed_s.tolist() == [1.0, 3.0]
    assert (rest.min_batch.tolist(), rest.max_batch.tolist()) == ([1, 3], [10, 30])
    assert rest.tails_s.tolist() == (cluster.tails_s * 0.75).tolist()


def test_the_last_rank_cannot_leave() -> None:
    alone = trio().without(0).without(0)
    with pytest.raises(InvalidInputError, match="'rank 2' is the only rank"):
        alone.without(0)


def test_a_curve_keeps_its_values_when_the_callers_array_changes() -> None:
    fixed_s = np.array([1.0])
    curve = Curve(fixed_s=fixed_s, per_sample_s=[1.0])
    fixed_s[0] = -5.0
    assert curve.fixed_s.tolist() == [1.0]


def trio(**options: Any) -> Cluster:
    curve = Curve(fixed_s=[1.0, 2.0, 3.0], per_sample_s=[1.0, 1.0, 1.0])
    return Cluster(**({"forward": curve, "backward": curve, "gammas": [0.5, 1.0], "tails_s": [2.0, 1.0]} | options))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fixed_s": [-1.0], "per_sample_s": [1.0]}, "fixed_s=[-1.0]: times must be finite and not negative"),
        ({"fixed_s": [1.0], "per_sample_s": [np.nan]}, "per_sample_s=[nan]: times must be finite"),
        ({"fixed_s": [1.0], "per_sample_s": [1.0], "floor_s": [np.inf]}, "floor_s=[inf]: times must be finite"),
        ({"fixed_s": [1.0, 2.0], "per_sample_s": [1.0]}, "per_sample_s has shape (1,), fixed_s has (2,)"),
        ({"fixed_s": [[1.0]], "per_sample_s": [[1.0]]}, "fixed_s has shape (1, 1)"),
    ],
)
def test_a_curve_says_what_is_wrong_with_it(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        Curve(**arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gammas": [0.5, 0.9]}, "the last bucket's is 1"),
        ({"gammas": [1.5, 1.0]}, "shares of backward lie in 0 to 1"),
        ({"gammas": [np.nan, 1.0]}, "shares of backward lie in 0 to 1"),
        ({"gammas": [1.0]}, "gammas have shape (1,), tails_s (2,)"),
        ({"gammas": [[0.5, 1.0]] * 2}, "gammas have shape (2, 2)"),
        ({"gammas": [], "tails_s": []}, "give one of each per bucket"),
        ({"tails_s": [1.0, 2.0]}, "tails_s=[1.0, 2.0]: must be finite, not negative and not increasing"),
        ({"tails_s": [1.0, -1.0]}, "not negative"),
        ({"tails_s": [np.inf, 1.0]}, "must be finite"),
        ({"backward": Curve(fixed_s=[1.0], per_sample_s=[1.0])}, "backward describes 1 ranks, forward describes 3"),
        ({"min_batch": [1, 1]}, "min_batch describes 2 ranks, forward describes 3"),
        ({"max_batch": [9] * 4}, "max_batch describes 4 ranks"),
        ({"names": ["a"]}, "names describes 1 ranks"),
        ({"load": Curve(fixed_s=[1.0], per_sample_s=[1.0])}, "load describes 1 ranks"),
        ({"min_batch": [0, 1, 1]}, "need 1 <= min_batch <= max_batch"),
        ({"min_batch": [5, 5, 5], "max_batch": [9, 4, 9]}, "need 1 <= min_batch <= max_batch"),
        ({"min_batch": 2}, "min_batch=2.0: give one whole number per rank"),
        ({"min_batch": [1.5, 1, 1]}, "min_batch=[1.5, 1.0, 1.0]: give one whole number per rank"),
        ({"max_batch": [np.nan, 9, 9]}, "give one whole number per rank"),
        ({"max_batch": [2.0**60, 9, 9]}, "at most 9007199254740992"),
        ({"max_batch": [[9], [9], [9]]}, "give one whole number per rank"),
        ({"forward": Curve(fixed_s=[], per_sample_s=[])}, "forward describes 0 ranks: a cluster needs at least 1"),
    ],
)
def test_a_cluster_says_what_is_wrong_with_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        trio(**options)


def test_step_time_wants_one_batch_a_rank() -> None:
    with pytest.raises(InvalidInputError, match="2 local batches for 3 ranks"):
        step_time(trio(), [1, 2])


# Use of the hardware


def compute_s(cluster: Cluster, local_batches: Any) -> np.ndarray:
    return cluster.forward.at(local_batches) + cluster.backward.at(local_batches)


@given(clusters(), st.data())
def test_a_step_uses_more_than_nothing_and_at_most_all_of_the_hardware(cluster: Cluster, data: st.DataObject) -> None:
    batches = data.draw(st.lists(st.integers(1, 50), min_size=cluster.num_ranks, max_size=cluster.num_ranks))
    alone_s = compute_s(cluster, batches)
    assume((alone_s > 0).all())
    assert 0 < hardware_use(batches, alone_s, step_time(cluster, batches)) <= 1 + 1e-12


@given(clusters(max_ranks=1), st.integers(1, 50))
def test_one_rank_without_communication_uses_all_of_its_device(cluster: Cluster, batch: int) -> None:
    alone = Cluster(forward=cluster.forward, backward=cluster.backward, gammas=[1.0], tails_s=[0.0])
    assume(step_time(alone, [batch]) > 0)
    assert hardware_use([batch], compute_s(alone, [batch]), step_time(alone, [batch])) == pytest.approx(1.0, rel=1e-12)


@given(clusters_with_total())
def test_ddp_never_uses_more_than_the_best_split(instance: tuple[Cluster, int]) -> None:
    cluster, total = instance
    best = optimal_split(cluster, total)
    assume(best.step_s > 0)
    assert 0 <= even_speed(cluster, best.local_batches) <= 1 + 1e-12


def test_what_ddp_would_use_is_its_throughput_over_what_the_devices_would_do_at_the_plans_batches() -> None:
    rng = rng_of("buckets", 3)
    cluster = draw_cluster(rng, "buckets", 5)
    best = np.array([20, 3, 8, 9, 14])
    free = Cluster(forward=cluster.forward, backward=cluster.backward, gammas=cluster.gammas, tails_s=cluster.tails_s)
    alone_s = compute_s(free, best)
    even_s = step_time(free, [11, 11, 11, 11, 10])
    assert even_step_time(free, 54) == even_s
    ours = hardware_use(best, alone_s, step_time(free, best))
    assert ours == pytest.approx(54 / step_time(free, best) / (best / alone_s).sum())
    assert ours * even_speed(free, best) == pytest.approx(54 / even_s / (best / alone_s).sum())


@pytest.mark.parametrize(("low", "high"), [((1, 1), (60, 8)), ((1, 11), (60, 60))])
def test_an_even_split_that_breaks_a_bound_takes_for_ever_and_has_no_speed(
    low: tuple[int, ...], high: tuple[int, ...]
) -> None:
    curve = Curve(fixed_s=[1.0, 1.0], per_sample_s=[1.0, 1.0])
    cluster = Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[0.0], min_batch=low, max_batch=high)
    assert even_step_time(cluster, 20) == np.inf
    assert even_speed(cluster, [12, 8]) == 0


def test_use_of_many_steps_at_once_leaves_out_ranks_without_samples_and_keeps_what_is_not_known() -> None:
    batches = [[8, 4], [8, 0], [8, 4]]
    alone_s = [[4.0, 4.0], [4.0, np.nan], [4.0, np.nan]]
    step_s = [[8.0, 5.0], [8.0, np.nan], [8.0, np.nan]]  # as every rank sees it
    uses = hardware_use(batches, alone_s, step_s)
    assert uses[:2].tolist() == pytest.approx([12 / (8 * 2 + 4 * 1.25), 0.5])
    assert np.isnan(uses[2])
