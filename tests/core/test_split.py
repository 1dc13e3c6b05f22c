"""The exact split against oracles: brute force, a min-max dynamic programme and HiGHS; its labels; leaving a rank out.

Each oracle states the problem from the curves and buckets, without `Cluster.lines`. 5,600 instances, 1 in 20 of them
infeasible: 7 kinds of 300 by brute force, 100 by dynamic programme, 150 by mixed-integer and 250 by linear programme.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from clusters import KINDS, draw_cluster, draw_total, finish_table, rng_of
from scipy.optimize import LinearConstraint, linprog, milp

from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.split import SplitSolver, alike, fewer_ranks, optimal_split
from cannikin.errors import InvalidInputError

RELATIVE = 1e-9


def brute_force(cluster: Cluster, total: int) -> float:
    """The least T over every whole split; inf where there is none."""
    table = finish_table(cluster, total)
    sizes = [np.flatnonzero(np.isfinite(times)) for times in table]
    heads = np.meshgrid(*sizes[:-1], indexing="ij")
    rest = np.asarray(total - sum(heads))
    times = [times[batches] for times, batches in zip(table, (*heads, np.maximum(rest, 0)), strict=True)]
    return float(np.min(np.where(rest >= 0, np.max(times, axis=0), np.inf), initial=np.inf))


def dynamic_programme(cluster: Cluster, total: int) -> float:
    """The same by min-max convolution, rank by rank: best[B] = min over b of max(best[B - b], t_i(b))."""
    best = np.full(total + 1, np.inf)
    best[0] = 0.0
    for times in finish_table(cluster, total):
        grown = np.full(total + 1, np.inf)
        for batch in np.flatnonzero(np.isfinite(times)):
            grown[batch:] = np.minimum(grown[batch:], np.maximum(best[: total + 1 - batch], times[batch]))
        best = grown
    return float(best[total])


def programme(cluster: Cluster, unit_s: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The linear programme in b_i, a_i, P_i and T (in units of `unit_s`): rows, right-hand sides and lower bounds."""
    n = cluster.num_ranks
    eye, none = np.eye(n), np.zeros((n, n))
    forward, backward = cluster.forward, cluster.backward
    blocks = [
        np.hstack([np.diag(forward.per_sample_s / unit_s), -eye, none, np.zeros((n, 1))]),
        np.hstack([np.diag(backward.per_sample_s / unit_s), none, -eye, np.zeros((n, 1))]),
    ]
    limits = [-forward.fixed_s / unit_s, -backward.fixed_s / unit_s]
    for share, tail in zip(cluster.gammas.T, cluster.tails_s, strict=True):
        blocks.append(np.hstack([none, eye, np.diag(share), -np.ones((n, 1))]))
        limits.append(np.full(n, -tail / unit_s))
    for slope, fixed_s in ((cluster.load.per_sample_s, cluster.load.fixed_s), (np.zeros(n), cluster.load.floor_s)):
        blocks.append(np.hstack([np.diag(slope / unit_s), none, none, -np.ones((n, 1))]))
        limits.append(-fixed_s / unit_s)
    lower = np.concatenate([cluster.min_batch, forward.floor_s / unit_s, backward.floor_s / unit_s, [0.0]])
    return np.vstack(blocks), np.concatenate(limits), lower


def highs(cluster: Cluster, total: int, *, whole: bool) -> np.ndarray | None:
    """HiGHS' local batches; None where it finds the problem infeasible.

    Its tolerances are absolute: 1e-10 at best on rows of the linear programme, and a gap of 1e-6 in branch and bound
    that scipy does not let us lower. So times are counted in units in which T is of the order of 1 and of 1e4. (At 1e6
    its branch and bound returned a split 0.4% slower than ours in 1 of 420 instances; at 1e2 to 1e4 in none of 1,050.)
    """
    n = cluster.num_ranks
    unit_s = step_time(cluster, cluster.min_batch + total / n) * (1e-4 if whole else 1.0)
    rows, limits, lower = programme(cluster, unit_s)
    cost = np.append(np.zeros(3 * n), 1.0)
    sums = np.append(np.ones(n), np.zeros(2 * n + 1))
    upper = np.concatenate([cluster.max_batch, np.full(2 * n + 1, np.inf)])
    if whole:
        answer = milp(
            cost,
            constraints=[LinearConstraint(rows, ub=limits), LinearConstraint(sums, lb=total, ub=total)],
            integrality=np.append(np.ones(n), np.zeros(2 * n + 1)),
            bounds=(lower, upper),
            options={"mip_rel_gap": 0.0},
        )
    else:
        tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
        answer = linprog(
            cost, rows, limits, sums[None], [total], np.stack([lower, upper], axis=1), method="highs", options=tight
        )
    assert answer.status in (0, 2), answer.message
    return None if answer.status == 2 else answer.x[:n]


def instances(kind: str, count: int, *, max_ranks: int, per_rank: int) -> Iterator[tuple[Cluster, int, str]]:
    """Instances with the words that identify them in a failure."""
    for seed in range(count):
        rng = rng_of(kind, seed)
        cluster = draw_cluster(rng, kind, int(rng.integers(1, max_ranks + 1)))
        total = draw_total(rng, cluster, per_rank)
        yield cluster, total, f"kind={kind!r} seed={seed} n={cluster.num_ranks} B={total}"


def check_whole(cluster: Cluster, total: int, best_s: float, label: str) -> None:
    """The split is feasible and takes the time it says, so that is no less than the optimum; and it is the oracle's."""
    split = optimal_split(cluster, total)
    assert split.feasible == np.isfinite(best_s), label
    if split.feasible:
        batches = np.array(split.local_batches)
        assert batches.sum() == total, label
        assert ((cluster.min_batch <= batches) & (batches <= cluster.max_batch)).all(), label
        assert split.step_s == pytest.approx(step_time(cluster, batches), rel=1e-12), label
        assert split.step_s == pytest.approx(best_s, rel=RELATIVE, abs=0), label


@pytest.mark.parametrize("kind", KINDS)
def test_whole_optimum_equals_brute_force(kind: str) -> None:
    for cluster, total, label in instances(kind, 300, max_ranks=4, per_rank=5):
        check_whole(cluster, total, brute_force(cluster, total), label)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_optimum_equals_dynamic_programme_on_more_ranks(kind: str) -> None:
    for cluster, total, label in instances(kind, 100, max_ranks=20, per_rank=6):
        check_whole(cluster, total, dynamic_programme(cluster, total), label)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_optimum_equals_mixed_integer_programme(kind: str) -> None:
    for cluster, total, label in instances(kind, 150, max_ranks=12, per_rank=20):
        batches = highs(cluster, total, whole=True)
        if batches is not None:
            batches = np.rint(batches)
            assert batches.sum() == total, label
        check_whole(cluster, total, np.inf if batches is None else step_time(cluster, batches), label)


@pytest.mark.parametrize("kind", KINDS)
def test_real_optimum_equals_linear_programme(kind: str) -> None:
    for cluster, total, label in instances(kind, 250, max_ranks=30, per_rank=30):
        solver = SplitSolver(cluster)
        best_s = float(solver.step_times(total))
        batches = highs(cluster, total, whole=False)
        assert (batches is not None) == np.isfinite(best_s), label
        if batches is not None:
            # T of HiGHS' own batches, which obey the bounds and the sum but for rounding, not the T it reports.
            assert batches.sum() == pytest.approx(total, rel=1e-12), label
            batches = np.clip(batches, cluster.min_batch, cluster.max_batch)
            assert best_s == pytest.approx(step_time(cluster, batches), rel=RELATIVE, abs=0), label
            assert solver.batches_at(best_s * (1 + 1e-12)).sum() >= total, f"{label}: T is too short"


def test_many_unbounded_ranks_do_not_overflow_their_sum() -> None:
    # 1,024 ranks without an upper bound hold 2**63 samples, one more than a 64-bit whole number.
    curve = Curve(fixed_s=np.ones(1024), per_sample_s=np.zeros(1024))
    cluster = Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[0.0])
    assert set(optimal_split(cluster, 4096).local_batches) == {4}


def test_a_total_that_is_not_whole_is_refused() -> None:
    for total in (4.5, float("nan"), float("inf")):
        with pytest.raises(InvalidInputError, match="not a whole number"):
            optimal_split(pair(), total)  # type: ignore[arg-type]


def pair(**options: object) -> Cluster:
    """Two ranks of a = 1 + b/4, P = 1 + b/2, the second one twice as slow in everything that grows."""
    slopes = {"forward": [0.25, 0.5], "backward": [0.5, 1.0]}
    curves = {name: Curve(fixed_s=[1.0, 1.0], per_sample_s=slope) for name, slope in slopes.items()}
    settings = {"gamma": 0.25, "overlapped_s": 0.0, "last_s": 1.0} | curves | options
    return Cluster.two_point(**settings)  # type: ignore[arg-type]


def floored(floor_s: float) -> Curve:
    return Curve(fixed_s=[1.0, 1.0], per_sample_s=[0.5, 1.0], floor_s=[floor_s, 0.0])


def late_second_rank() -> Curve:
    """With T_o = 7 s backward must last 28/3 s to hide it: a late second rank gets too few samples for that."""
    return Curve(fixed_s=[1.0, 7.0], per_sample_s=[0.25, 0.5])


@pytest.mark.parametrize(
    ("cluster", "total", "labels"),
    [
        (pair(), 30, ("compute", "compute")),
        (pair(overlapped_s=100.0), 30, ("communication", "communication")),
        (pair(forward=late_second_rank(), overlapped_s=7.0), 24, ("compute", "communication")),
        (pair(backward=floored(9.0)), 20, ("floor", "compute")),
        (pair(min_batch=[1, 20]), 30, ("compute", "min_batch")),
        (pair(max_batch=[5, 100]), 30, ("max_batch", "compute")),
    ],
)
def test_a_rank_is_labelled_by_what_holds_it(cluster: Cluster, total: int, labels: tuple[str, str]) -> None:
    assert optimal_split(cluster, total).bottlenecks == labels


def test_the_reason_names_the_rank_that_finishes_last() -> None:
    split = optimal_split(pair(min_batch=[1, 20], names=["fast", "slow"]), 30)
    assert split.reason == "slow finishes last with 20 samples (min_batch)"


def test_a_rank_without_a_name_is_called_by_its_number() -> None:
    assert optimal_split(pair(max_batch=[20, 1]), 20).reason == "rank 0 finishes last with 19 samples (compute)"
    assert optimal_split(pair(max_batch=[100, 1], min_batch=[1, 1]), 2).reason.endswith("with 1 sample (min_batch)")


def test_a_rank_whose_fixed_cost_exceeds_the_step_is_better_left_out() -> None:
    cluster = pair(forward=Curve(fixed_s=[1.0, 50.0], per_sample_s=[0.25, 0.5]))
    dropped = fewer_ranks(cluster, 30)
    assert dropped is not None
    ranks, split = dropped
    assert (ranks, split.local_batches) == ((1,), (30,))
    assert split.step_s < optimal_split(cluster, 30).step_s


def test_no_rank_is_left_out_where_each_helps() -> None:
    assert fewer_ranks(pair(), 300) is None
    assert fewer_ranks(pair().without(1), 300) is None


def test_a_shorter_ring_counts_when_a_rank_is_left_out() -> None:
    # One rank alone has no all-reduce at all, which saves more than the second rank does.
    dropped = fewer_ranks(pair(overlapped_s=40.0), 12)
    assert dropped is not None
    assert dropped[0] == (1,)
    assert dropped[1].step_s == step_time(pair().without(1), [12])


def test_of_ranks_of_one_kind_the_first_is_the_one_to_leave_out() -> None:
    forward = Curve(fixed_s=[1.0, 50.0, 50.0], per_sample_s=[0.25, 0.5, 0.5])
    backward = Curve(fixed_s=[1.0, 1.0, 1.0], per_sample_s=[0.5, 1.0, 1.0])
    trio = Cluster.two_point(forward=forward, backward=backward, gamma=0.25, overlapped_s=9.0, last_s=1.0)
    dropped = fewer_ranks(trio, 30)
    assert dropped is not None
    assert dropped[0] == (1,)


def test_a_search_that_ends_where_a_flat_begins_still_hands_out_every_sample() -> None:
    # 27 = 23 + 4 ranks is reached exactly where the last rank leaves its floor, and jumps.
    cluster = Cluster(
        forward=Curve(fixed_s=[2, 0, 3, 3], per_sample_s=[0, 0, 2, 0], floor_s=[13, 39, 14, 0]),
        backward=Curve(fixed_s=[6, 7, 1, 6], per_sample_s=[3, 0, 0, 1], floor_s=[11, 0, 0, 34]),
        gammas=[0.0, 1.0],
        tails_s=[6.0, 2.0],
        min_batch=[4, 3, 4, 3],
    )
    check_whole(cluster, 23, brute_force(cluster, 23), "23 samples")


def test_ranks_that_take_no_time_at_all_share_evenly() -> None:
    curve = Curve(fixed_s=[0.0, 0.0], per_sample_s=[0.0, 0.0])
    cluster = Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[0.0])
    assert [optimal_split(cluster, total).local_batches for total in (2, 5)] == [(1, 1), (3, 2)]


def test_like_ranks_of_one_name_are_left_out_together_where_that_is_fastest() -> None:
    forward = Curve(fixed_s=[1.0, 50.0, 50.0], per_sample_s=[0.25, 0.5, 0.5])
    backward = Curve(fixed_s=[1.0, 1.0, 1.0], per_sample_s=[0.5, 1.0, 1.0])
    for names, expected in ((("new", "old", "old"), (1, 2)), (("new", "old", "other"), (1,))):
        trio = Cluster.two_point(
            forward=forward, backward=backward, gamma=0.25, overlapped_s=9.0, last_s=1.0, names=names
        )
        found = fewer_ranks(trio, 30)
        assert found is not None
        assert found[0] == expected
        assert found[1].step_s < optimal_split(trio, 30).step_s
    assert fewer_ranks(pair(), 300) is None


def test_ranks_are_alike_where_times_and_bounds_are() -> None:
    twins = Curve(fixed_s=[1.0, 1.0], per_sample_s=[0.25, 0.25])
    assert alike(pair(forward=twins, backward=twins), [0, 1])
    assert not alike(pair(forward=twins, backward=twins, max_batch=[8, 9]), [0, 1])
    assert not alike(pair(), [0, 1])
    assert alike(pair(), [1])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_samples_that_take_less_than_a_float_can_tell_are_handed_out_too(num_ranks):
    cluster = Cluster(
        forward=Curve(fixed_s=[1e6] * num_ranks, per_sample_s=[1e-15] * num_ranks),
        backward=Curve(fixed_s=[0.0] * num_ranks, per_sample_s=[1e-3] * num_ranks, floor_s=[0.01] * num_ranks),
        gammas=[0.0, 1.0],
        tails_s=[0.0, 0.0],
    )
    for total_batch in (num_ranks, num_ranks + 1, 2 * num_ranks, 50):
        assert sum(optimal_split(cluster, total_batch).local_batches) == total_batch
