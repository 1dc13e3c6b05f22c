"""Made-up clusters for the tests of the performance model and of the solvers.

`draw_cluster` is for oracles: many instances a second, each from a seed. `clusters` is the Hypothesis strategy for
laws, whose failures shrink. Both put some times on a coarse grid, where finish times coincide exactly.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.split import optimal_split
from cannikin.core.values import NO_MAX

KINDS = ("two-point", "bounds", "floors", "buckets", "large fixed costs", "ties", "flats", "loading")
"""What an instance stresses; every kind but the first has bounds in half of its instances."""


def rng_of(kind: str, seed: int) -> np.random.Generator:
    """The generator of one instance, so that a failure can be repeated from its kind and seed."""
    return np.random.default_rng([KINDS.index(kind), seed])


def draw_cluster(rng: np.random.Generator, kind: str, num_ranks: int) -> Cluster:
    """One cluster of a kind of `KINDS`; times are of the order of 1 to 100 (with large fixed costs, 1e5)."""
    coarse = kind in ("ties", "flats")

    def times(top: float) -> np.ndarray:
        return rng.integers(0, int(top) + 1, num_ranks).astype(float) if coarse else rng.uniform(0, top, num_ranks)

    fixed_s = 1e5 if kind == "large fixed costs" else 8.0
    floors = kind in ("floors", "buckets", "ties", "flats")
    curves = []
    for _ in range(2):
        slope = times(3.0) + (0.0 if coarse else 0.01)
        if kind == "flats":
            slope[rng.random(num_ranks) < 0.6] = 0.0
        floor = times(40.0) * (rng.random(num_ranks) < 0.5) if floors else None
        curves.append(Curve(fixed_s=times(fixed_s), per_sample_s=slope, floor_s=floor))
    gammas, tails_s = _draw_buckets(rng, kind, num_ranks)
    low, high = _draw_bounds(rng, kind, num_ranks)
    load = _draw_load(rng, num_ranks) if kind == "loading" else None
    return Cluster(
        forward=curves[0],
        backward=curves[1],
        gammas=gammas,
        tails_s=tails_s,
        min_batch=low,
        max_batch=high,
        load=load,
    )


def _draw_load(rng: np.random.Generator, num_ranks: int) -> Curve:
    """Loading that some ranks wait for: lines, half of them through the origin, floors, and ranks without any."""
    slow = rng.random(num_ranks) < 0.7
    slope, fixed_s = rng.uniform(0, 10, num_ranks) * slow, rng.uniform(0, 20, num_ranks) * slow
    floor_s = rng.uniform(0, 40, num_ranks) * (slow & (rng.random(num_ranks) < 0.2))
    return Curve(fixed_s=fixed_s * (rng.random(num_ranks) < 0.5), per_sample_s=slope, floor_s=floor_s)


def _draw_buckets(rng: np.random.Generator, kind: str, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    num_buckets = int(rng.integers(1, 6)) if kind == "buckets" else 2
    gammas = np.sort(rng.random((num_ranks if kind == "buckets" else 1, num_buckets)), axis=1)
    gammas[:, -1] = 1.0
    costs_s = rng.uniform(0, 20, num_buckets)
    if kind in ("ties", "flats"):
        gammas, costs_s = np.round(gammas * 4) / 4, np.round(costs_s)
    tails_s = np.cumsum(costs_s[::-1])[::-1]
    return (gammas if len(gammas) == num_ranks else gammas[0]), tails_s


def _draw_bounds(rng: np.random.Generator, kind: str, num_ranks: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    if kind == "two-point" or (kind != "bounds" and rng.random() < 0.5):
        return None, None
    low = rng.integers(1, 5, num_ranks)
    return low, (low + rng.integers(0, 12, num_ranks) if rng.random() < 0.8 else None)


def draw_total(rng: np.random.Generator, cluster: Cluster, per_rank: int) -> int:
    """A total batch of up to `per_rank` samples a rank; 1 in 20 lies outside what the bounds allow."""
    lowest, highest = int(cluster.min_batch.sum()), sum(cluster.max_batch.tolist())
    if rng.random() < 0.05:
        return highest + 1 if highest < NO_MAX and rng.random() < 0.5 else lowest - 1
    return int(rng.integers(lowest, min(highest, lowest + per_rank * cluster.num_ranks) + 1))


def finish_table(cluster: Cluster, top: int) -> np.ndarray:
    """t_i(b) for b = 0..top straight from the curves and buckets, [n, top + 1]; inf outside the bounds."""
    batches = np.arange(top + 1)[:, None]
    forward, backward, load = (
        np.maximum(curve.floor_s, curve.fixed_s + curve.per_sample_s * batches)
        for curve in (cluster.forward, cluster.backward, cluster.load)
    )
    buckets = zip(cluster.gammas.T, cluster.tails_s, strict=True)
    table = np.max([load, *(forward + share * backward + tail for share, tail in buckets)], axis=0)
    table[(batches < cluster.min_batch) | (batches > cluster.max_batch)] = np.inf
    return table.T


def excess(cluster: Cluster, local_batches: tuple[int, ...]) -> float:
    """How much slower than the best split of the same total this one is, by the truth."""
    return step_time(cluster, local_batches) / optimal_split(cluster, sum(local_batches)).step_s - 1


# On a grid of quarters many finish times coincide; the floats come close to each other without coinciding.
_QUARTERS = st.integers(0, 8).map(lambda quarters: quarters / 4)
_TIMES = st.one_of(st.integers(0, 40).map(lambda quarters: quarters / 4), st.floats(0.001, 10))
_SLOPES = st.one_of(_QUARTERS, st.floats(0.001, 2))


@st.composite
def clusters(draw: st.DrawFn, *, max_ranks: int = 6, equal_bounds: bool = False, coarse: bool = False) -> Cluster:
    """Clusters of a few kinds of rank, each kind once or several times, in any order; with `coarse`, full of ties."""
    times, slopes = (_QUARTERS, _QUARTERS) if coarse else (_TIMES, _SLOPES)
    n = draw(st.integers(1, max_ranks))
    num_kinds = draw(st.integers(1, n))
    kind_of = np.array(draw(st.lists(st.integers(0, num_kinds - 1), min_size=n, max_size=n)))

    def per_kind(values: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=num_kinds, max_size=num_kinds)))[kind_of]

    def curve() -> Curve:
        return Curve(fixed_s=per_kind(times), per_sample_s=per_kind(slopes), floor_s=per_kind(st.just(0.0) | times))

    num_buckets = draw(st.integers(1, 3))
    shares = sorted(draw(st.lists(st.integers(0, 4), min_size=num_buckets - 1, max_size=num_buckets - 1)))
    tails = sorted(draw(st.lists(times, min_size=num_buckets, max_size=num_buckets)), reverse=True)
    bounds = st.tuples(st.integers(1, 4), st.integers(0, 20) | st.none())
    num_pairs = 1 if equal_bounds else num_kinds
    pairs = draw(st.lists(bounds, min_size=num_pairs, max_size=num_pairs)) * (num_kinds // num_pairs)
    low = np.array([pair[0] for pair in pairs])[kind_of]
    width = np.array([10_000 if pair[1] is None else pair[1] for pair in pairs])[kind_of]
    return Cluster(
        forward=curve(),
        backward=curve(),
        gammas=[*(share / 4 for share in shares), 1.0],
        tails_s=tails,
        min_batch=low,
        max_batch=low + width,
    )


@st.composite
def clusters_with_total(draw: st.DrawFn, **options: bool) -> tuple[Cluster, int]:
    """A cluster and a total batch that its bounds allow."""
    cluster = draw(clusters(**options))
    lowest = int(cluster.min_batch.sum())
    return cluster, draw(st.integers(lowest, min(int(cluster.max_batch.sum()), lowest + 60)))
