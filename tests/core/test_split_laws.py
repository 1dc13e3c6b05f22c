"""What must hold for every exact split, by Hypothesis; the same examples in each run."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
from clusters import clusters, clusters_with_total, finish_table
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.split import SplitSolver, optimal_split

LAW = settings(max_examples=200, deadline=None, derandomize=True)


@LAW
@given(clusters_with_total())
def test_a_split_sums_to_the_total_within_bounds_and_takes_what_it_says(instance: tuple[Cluster, int]) -> None:
    cluster, total = instance
    split = optimal_split(cluster, total)
    batches = np.array(split.local_batches)
    assert batches.sum() == total
    assert ((cluster.min_batch <= batches) & (batches <= cluster.max_batch)).all()
    assert np.isclose(split.step_s, step_time(cluster, batches), rtol=1e-12, atol=0)


def batches_by_kind(cluster: Cluster, total: int) -> Counter[tuple[object, ...]]:
    """How many ranks of each kind have each batch; a kind is its bounds and its times within reach."""
    batches = optimal_split(cluster, total).local_batches
    table = finish_table(cluster, total)
    facts = zip(table.tolist(), cluster.min_batch.tolist(), cluster.max_batch.tolist(), batches, strict=True)
    return Counter((tuple(times), *rest) for times, *rest in facts)


def take(cluster: Cluster, ranks: list[int] | np.ndarray) -> Cluster:
    order = np.asarray(ranks)
    return Cluster(
        forward=cluster.forward.take(order),
        backward=cluster.backward.take(order),
        gammas=cluster.gammas[order],
        tails_s=cluster.tails_s,
        min_batch=cluster.min_batch[order],
        max_batch=cluster.max_batch[order],
    )


def tied_kinds() -> tuple[Cluster, int]:
    """Times 1 + b and 3 b / 2 meet at b = 2: one of two kinds gets the third sample, whichever comes first."""
    forward = Curve(fixed_s=[1.0, 0.0], per_sample_s=[1.0, 1.5])
    none = Curve(fixed_s=[0.0, 0.0], per_sample_s=[0.0, 0.0])
    return Cluster(forward=forward, backward=none, gammas=[1.0], tails_s=[0.0]), 3


@LAW
@given(clusters_with_total(coarse=True), st.randoms(use_true_random=False))
@example(tied_kinds(), Random(0))
@example(tied_kinds(), Random(1))
def test_the_order_of_ranks_changes_neither_the_time_nor_what_each_kind_gets(
    instance: tuple[Cluster, int], random: Random
) -> None:
    cluster, total = instance
    shuffled = take(cluster, random.sample(range(cluster.num_ranks), cluster.num_ranks))
    assert optimal_split(shuffled, total).step_s == optimal_split(cluster, total).step_s
    assert batches_by_kind(shuffled, total) == batches_by_kind(cluster, total)


@LAW
@given(clusters_with_total(equal_bounds=True), st.integers(1, 4))
def test_equal_ranks_with_equal_bounds_differ_by_at_most_one(instance: tuple[Cluster, int], copies: int) -> None:
    cluster, total = instance
    ranks = [0] * copies + list(range(cluster.num_ranks))
    total += copies * int(cluster.min_batch[0])
    batches = optimal_split(take(cluster, ranks), total).local_batches
    assert np.ptp(batches[: copies + 1]) <= 1


def with_slower_copy(cluster: Cluster, rank: int, more_s: float, times: float) -> Cluster:
    """The cluster and a last rank that is this one, with every time `times` as long and `more_s` more."""
    n = cluster.num_ranks
    slowed = np.append(np.zeros(n), more_s)
    factor = np.append(np.ones(n), times)
    whole = take(cluster, [*range(n), rank])
    forward, backward = (
        Curve(
            fixed_s=curve.fixed_s * factor + slowed,
            per_sample_s=curve.per_sample_s * factor,
            floor_s=np.where(curve.floor_s > 0, curve.floor_s * factor + slowed, 0.0),
        )
        for curve in (whole.forward, whole.backward)
    )
    return Cluster(
        forward=forward,
        backward=backward,
        gammas=whole.gammas,
        tails_s=whole.tails_s,
        min_batch=whole.min_batch,
        max_batch=whole.max_batch,
    )


@LAW
@given(clusters_with_total(equal_bounds=True), st.integers(1, 8), st.integers(0, 4), st.data())
def test_a_slower_rank_never_gets_more_samples(
    instance: tuple[Cluster, int], more: int, slower: int, data: st.DataObject
) -> None:
    cluster, total = instance
    rank = data.draw(st.integers(0, cluster.num_ranks - 1))
    grown = with_slower_copy(cluster, rank, more_s=more / 4, times=1 + slower / 4)
    batches = optimal_split(grown, total + int(cluster.min_batch[rank])).local_batches
    assert batches[-1] <= batches[rank]


@LAW
@given(clusters_with_total())
def test_a_larger_total_never_takes_less_time(instance: tuple[Cluster, int]) -> None:
    cluster, total = instance
    totals = np.arange(total, min(total + 5, int(cluster.max_batch.sum())) + 1)
    solver = SplitSolver(cluster)
    assert (np.diff([solver.split(int(each)).step_s for each in totals]) >= 0).all()
    in_reals = solver.step_times(totals)
    assert (np.diff(in_reals) >= -1e-12 * in_reals[1:]).all()


@LAW
@given(clusters_with_total(), st.randoms(use_true_random=False))
def test_no_other_split_is_faster(instance: tuple[Cluster, int], random: Random) -> None:
    cluster, total = instance
    best_s = optimal_split(cluster, total).step_s
    even = np.array([total // cluster.num_ranks + (i < total % cluster.num_ranks) for i in range(cluster.num_ranks)])
    if ((cluster.min_batch <= even) & (even <= cluster.max_batch)).all():
        assert best_s <= step_time(cluster, even) * (1 + 1e-12)
    for _ in range(5):
        batches = cluster.min_batch.copy()
        for _ in range(total - int(batches.sum())):
            batches[random.choice(np.flatnonzero(batches < cluster.max_batch).tolist())] += 1
        assert best_s <= step_time(cluster, batches) * (1 + 1e-12)


@LAW
@given(clusters(), st.integers(1, 50))
def test_an_impossible_total_has_a_reason_with_the_numbers(cluster: Cluster, by: int) -> None:
    lowest, highest = int(cluster.min_batch.sum()), int(cluster.max_batch.sum())
    for total, limit, word in ((lowest - by, lowest, "below"), (highest + by, highest, "above")):
        split = optimal_split(cluster, total)
        assert not split.feasible
        assert (split.local_batches, split.step_s, split.bottlenecks) == ((), np.inf, ())
        assert f"total batch {total} is {word} {limit}," in split.reason
        assert SplitSolver(cluster).step_times(total) == np.inf


@LAW
@given(clusters_with_total())
def test_the_real_optimum_is_the_least_time_at_which_the_ranks_hold_the_total(instance: tuple[Cluster, int]) -> None:
    # T* = max(T_r, max_i t_i(lo_i)) with T_r = inf{T : sum b_i(T) >= B}, and no whole split is faster.
    cluster, total = instance
    solver = SplitSolver(cluster)
    best_s = float(solver.step_times(total))
    at_least_s = float(solver.finish_s(solver.low).max())
    assert best_s >= at_least_s
    assert solver.batches_at(best_s * (1 + 1e-12)).sum() >= total * (1 - 1e-12)
    if best_s > at_least_s:
        assert solver.batches_at(best_s * (1 - 1e-9)).sum() < total
    assert best_s <= solver.split(total).step_s * (1 + 1e-12)


@LAW
@given(clusters_with_total(), st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_many_totals_at_once_give_what_each_gives_alone(instance: tuple[Cluster, int], totals: list[int]) -> None:
    solver = SplitSolver(instance[0])
    together = solver.step_times(np.array(totals).reshape(-1, 1))
    assert together.shape == (len(totals), 1)
    assert np.allclose(together.ravel(), [float(solver.step_times(total)) for total in totals], rtol=1e-12, atol=0)


@LAW
@given(clusters_with_total(), st.sampled_from([1, 2, 8]), st.floats(0, 0.5), st.randoms(use_true_random=False))
def test_a_split_near_another_ends_in_time_and_leaves_a_plan_that_does_as_it_is(
    instance: tuple[Cluster, int], unit: int, slack: float, random: Random
) -> None:
    cluster, total = instance
    solver, best = SplitSolver(cluster), optimal_split(cluster, total)
    present = np.array(best.local_batches)
    for _ in range(3):  # samples go from one rank to another
        giver, taker = random.randrange(len(present)), random.randrange(len(present))
        moved = min(int((present - cluster.min_batch)[giver]), int((cluster.max_batch - present)[taker]))
        present[giver] -= moved
        present[taker] += moved
    step_s = best.step_s * (1 + slack) * (1 + 1e-9)
    near = solver.near(present, step_s, unit)
    if step_time(cluster, present) <= step_s:
        assert near is not None
        assert near.local_batches == tuple(present.tolist())
    if near is not None:
        batches = np.array(near.local_batches)
        assert batches.sum() == total
        assert ((cluster.min_batch <= batches) & (batches <= cluster.max_batch)).all()
        assert step_time(cluster, batches) <= step_s * (1 + 1e-9)


def test_a_split_near_another_changes_to_whole_units_where_there_is_room() -> None:
    slowness = np.array([1.0, 2.0, 4.0])
    curve = Curve(fixed_s=0.004 * slowness, per_sample_s=1e-5 * slowness)
    cluster = Cluster.two_point(forward=curve, backward=curve, gamma=0.1, overlapped_s=0.1, last_s=0.01)
    best, present = optimal_split(cluster, 1000), (333, 333, 334)
    near = SplitSolver(cluster).near(present, best.step_s * 1.003, 8)
    assert near is not None
    pairs = zip(near.local_batches, present, strict=True)
    changed = [batch for batch, before in pairs if batch != before and batch >= 32]
    assert sum(batch % 8 != 0 for batch in changed) <= 1 < len(changed)
    assert near.step_s <= best.step_s * 1.003
