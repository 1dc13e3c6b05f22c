"""How long a step takes on a cluster of unlike ranks (paper, section 3.2, in its general per-bucket form).

Legend, rank i of n, bucket j of J, local batch b:

    a_i(b) = max(F, s + q b)     forward and optimizer step
    P_i(b) = max(F', m + k b)    backward
    gamma_ij                     share of backward after which bucket j is ready; the last bucket's is 1
    C_j                          tail: all-reduce of bucket j and of every later one
    L_i(b)                       loading of the next batch, which overlaps all of this
    T = max( max over i, j of  a_i(b_i) + gamma_ij P_i(b_i) + C_j ,  max over i of  L_i(b_i) )

The paper keeps the first and the last bucket only: gamma, C_1 = T_o + T_u and C_2 = T_u (`Cluster.two_point`). Every
rank's time is thus the largest of a few lines alpha + beta b with beta >= 0, which is all that the split needs to know.
Where ranks meet layer by layer instead of in an all-reduce of each bucket, the formula is another: `layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cannikin.core.values import NO_MAX, FloatArray, IntArray
from cannikin.errors import InvalidInputError

if TYPE_CHECKING:
    from cannikin.core.layers import Layers


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A duration as a function of the local batch, one entry per rank: max(floor_s, fixed_s + per_sample_s * b).

    A floor is the time that kernel launches take even on a small batch; 0 means no floor.

    Example:
        >>> Curve(fixed_s=[0.5], per_sample_s=[0.25], floor_s=[2.0]).at([[1], [8]]).ravel().tolist()
        [2.0, 2.5]
    """

    fixed_s: FloatArray
    per_sample_s: FloatArray
    floor_s: FloatArray

    def __init__(
        self, *, fixed_s: npt.ArrayLike, per_sample_s: npt.ArrayLike, floor_s: npt.ArrayLike | None = None
    ) -> None:
        fixed = np.atleast_1d(np.asarray(fixed_s, dtype=np.float64))  # only for its shape: values are copied below
        for name, value in (("fixed_s", fixed), ("per_sample_s", per_sample_s), ("floor_s", floor_s)):
            array = np.zeros_like(fixed) if value is None else np.atleast_1d(np.array(value, dtype=np.float64))
            if array.shape != fixed.shape or array.ndim != 1:
                raise InvalidInputError(f"{name} has shape {array.shape}, fixed_s has {fixed.shape}: give one per rank")
            if not (np.isfinite(array) & (array >= 0)).all():
                raise InvalidInputError(f"{name}={array.tolist()}: times must be finite and not negative")
            object.__setattr__(self, name, array)

    def at(self, local_batches: npt.ArrayLike) -> FloatArray:
        """Return the duration at these local batches, seconds; the last axis is the rank."""
        line = self.fixed_s + self.per_sample_s * np.asarray(local_batches, dtype=np.float64)
        floored: FloatArray = np.maximum(self.floor_s, line)
        return floored

    def take(self, ranks: IntArray) -> Curve:
        """Return the curves of these ranks only."""
        return Curve(fixed_s=self.fixed_s[ranks], per_sample_s=self.per_sample_s[ranks], floor_s=self.floor_s[ranks])


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """The performance model of a whole cluster.

    Args:
        forward: a_i, forward and optimizer.
        backward: P_i.
        gammas: share of backward after which each bucket is ready, [n, J], or [J] for one share on all ranks.
        tails_s: C_j, seconds, [J], not increasing.
        min_batch, max_batch: bounds on each local batch, samples, [n]; 1 and no upper bound where left out.
        names: one per rank, for people; `rank 0`, `rank 1`, ... where left out.
        load: L_i, the time a rank's loader needs for a batch while the rank computes; no time where left out.
        layers: how ranks meet layer by layer, where they do: these, not the buckets, then decide the step's time.
    """

    forward: Curve
    backward: Curve
    gammas: FloatArray
    tails_s: FloatArray
    min_batch: IntArray
    max_batch: IntArray
    names: tuple[str, ...]
    load: Curve
    layers: Layers | None

    def __init__(
        self,
        *,
        forward: Curve,
        backward: Curve,
        gammas: npt.ArrayLike,
        tails_s: npt.ArrayLike,
        min_batch: npt.ArrayLike | None = None,
        max_batch: npt.ArrayLike | None = None,
        names: Sequence[str] | None = None,
        load: Curve | None = None,
        layers: Layers | None = None,
    ) -> None:
        n = len(forward.fixed_s)
        if n == 0:
            raise InvalidInputError("forward describes 0 ranks: a cluster needs at least 1")
        tails = np.array(tails_s, dtype=np.float64)
        shares = np.array(gammas, dtype=np.float64)
        _check_buckets(shares, tails, n)
        low = _whole_per_rank("min_batch", [1] * n if min_batch is None else min_batch)
        high = _whole_per_rank("max_batch", [NO_MAX] * n if max_batch is None else max_batch)
        labels = tuple(names) if names is not None else tuple(f"rank {i}" for i in range(n))
        loading = Curve(fixed_s=np.zeros(n), per_sample_s=np.zeros(n)) if load is None else load
        _check_ranks(
            n,
            backward=len(backward.fixed_s),
            min_batch=len(low),
            max_batch=len(high),
            names=len(labels),
            load=len(loading.fixed_s),
            layers=n if layers is None else len(layers.shares),
        )
        if (low < 1).any() or (high < low).any():
            raise InvalidInputError(
                f"min_batch={low.tolist()}, max_batch={high.tolist()}: need 1 <= min_batch <= max_batch on every rank"
            )
        gammas = np.broadcast_to(shares, (n, len(tails)))
        values = (forward, backward, gammas, tails, low, high, labels, loading, layers)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)

    @classmethod
    def two_point(
        cls,
        *,
        forward: Curve,
        backward: Curve,
        gamma: float,
        overlapped_s: float,
        last_s: float,
        min_batch: npt.ArrayLike | None = None,
        max_batch: npt.ArrayLike | None = None,
        names: Sequence[str] | None = None,
        load: Curve | None = None,
    ) -> Cluster:
        """Make a cluster in the paper's form: T = max_i max(a_i + P_i + T_u, a_i + gamma P_i + T_o + T_u).

        Args:
            forward, backward, min_batch, max_batch, names, load: as in `Cluster`.
            gamma: share of backward before the first bucket is ready, 0 to 1.
            overlapped_s: T_o, all-reduce of every bucket but the last.
            last_s: T_u, all-reduce of the last bucket.
        """
        return cls(
            forward=forward,
            backward=backward,
            gammas=[gamma, 1.0],
            tails_s=[overlapped_s + last_s, last_s],
            min_batch=min_batch,
            max_batch=max_batch,
            names=names,
            load=load,
        )

    @property
    def num_ranks(self) -> int:
        """n."""
        return len(self.forward.fixed_s)

    def without(self, rank: int) -> Cluster:
        """Return the cluster after one rank has left."""
        if not 0 <= rank < self.num_ranks:
            raise InvalidInputError(f"rank={rank}: this cluster has ranks 0 to {self.num_ranks - 1}")
        if self.num_ranks == 1:
            raise InvalidInputError(f"{self.names[0]!r} is the only rank: nothing would be left")
        return self.take(np.delete(np.arange(self.num_ranks), rank))

    def take(self, ranks: npt.ArrayLike) -> Cluster:
        """Return a cluster of these ranks, each as often as it is named; communication is rescaled (`rescaled_tails`).

        Example:
            >>> curve = Curve(fixed_s=[1.0, 2.0], per_sample_s=[0.25, 0.5])
            >>> pair = Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[3.0], names=("new", "old"))
            >>> more = pair.take([0, 0, 1])
            >>> more.names, more.forward.fixed_s.tolist(), more.tails_s.tolist()
            (('new', 'new', 'old'), [1.0, 1.0, 2.0], [4.0])
        """
        chosen = np.asarray(ranks, dtype=np.int64)
        return replace(
            self,
            forward=self.forward.take(chosen),
            backward=self.backward.take(chosen),
            gammas=self.gammas[chosen],
            tails_s=rescaled_tails(self.tails_s, self.num_ranks, len(chosen)),
            min_batch=self.min_batch[chosen],
            max_batch=self.max_batch[chosen],
            names=tuple(self.names[rank] for rank in chosen.tolist()),
            load=self.load.take(chosen),
            layers=None if self.layers is None else self.layers.of(self.layers.shares[chosen]),
        )

    @cached_property
    def loads(self) -> bool:
        """Whether some rank's loading takes time."""
        return bool(self.load.fixed_s.any() or self.load.per_sample_s.any() or self.load.floor_s.any())

    def lines(self) -> tuple[FloatArray, FloatArray]:
        """Return intercepts and slopes of every line a + gamma P + C of every rank, and of its loading, each [L, n]."""
        shares, tails_s = self.gammas.T, self.tails_s[:, None]
        alphas, betas = [], []
        for start_alpha, start_beta in _choices(self.forward):
            for work_alpha, work_beta in _choices(self.backward):
                alphas.append(start_alpha + shares * work_alpha + tails_s)
                betas.append(start_beta + shares * work_beta)
        if self.loads:
            for load_alpha, load_beta in _choices(self.load):
                alphas.append(load_alpha[None])
                betas.append(load_beta[None])
        return np.concatenate(alphas), np.concatenate(betas)

    def bucket_times(self, local_batches: npt.ArrayLike) -> FloatArray:
        """Return a_i + gamma_ij P_i + C_j, seconds, [n, J]."""
        before, backward = self.forward.at(local_batches), self.backward.at(local_batches)
        # In memory all ranks of a bucket lie side by side: maxima over a few buckets of many ranks are then quick.
        return (before + self.gammas.T * backward + self.tails_s[:, None]).T

    def finish_s(self, local_batches: npt.ArrayLike) -> FloatArray:
        """Return when each rank alone has reduced its buckets and loaded its next batch, seconds, [n]."""
        times: FloatArray = self.bucket_times(local_batches).max(axis=1)
        return np.maximum(times, self.load.at(local_batches)) if self.loads else times


def rescaled_tails(tails_s: npt.ArrayLike, before: int, after: int) -> FloatArray:
    """Return all-reduce times that were measured between `before` ranks as they would be between `after` ranks.

        C' = C * (1 - 1/n') / (1 - 1/n)

    In a ring of n ranks each sends and receives 2 (n - 1)/n of the bytes, at the pace of the slowest link, which is
    taken to stay as it was. One rank alone sends nothing, so its tails say nothing about a ring: they stay 0.

    Example:
        >>> rescaled_tails([6.0, 1.5], 4, 2).tolist(), rescaled_tails([6.0], 2, 1).tolist()
        ([4.0, 1.0], [0.0])
    """
    tails = np.asarray(tails_s, dtype=np.float64)
    if before == after:
        return tails.copy()
    # By whole numbers first: the times of like rings then agree to the last digit.
    return tails * ((after - 1) * before / (after * (before - 1))) if before > 1 else np.zeros_like(tails)


def _choices(curve: Curve) -> list[tuple[FloatArray, FloatArray]]:
    """Return intercepts and slopes of the lines whose maximum is the curve; a floor is a flat line."""
    sloped = (curve.fixed_s, curve.per_sample_s)
    # A floor of 0 lies below every sloped line.
    return [sloped, (curve.floor_s, np.zeros_like(curve.floor_s))] if curve.floor_s.any() else [sloped]


def _whole_per_rank(name: str, values: npt.ArrayLike) -> IntArray:
    """Return bounds as whole numbers, and refuse fractions, which numpy would cut off without a word."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not ((np.abs(numbers) <= NO_MAX) & (numbers == np.floor(numbers))).all():
        raise InvalidInputError(f"{name}={numbers.tolist()}: give one whole number per rank, at most {NO_MAX}")
    return numbers.astype(np.int64)


def _check_ranks(num_ranks: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size != num_ranks:
            raise InvalidInputError(f"{name} describes {size} ranks, forward describes {num_ranks}")


def _check_buckets(gammas: FloatArray, tails_s: FloatArray, num_ranks: int) -> None:
    """Refuse shares and tails that no run of buckets can have."""
    if tails_s.ndim != 1 or not tails_s.size or gammas.shape not in ((len(tails_s),), (num_ranks, len(tails_s))):
        shapes = f"gammas have shape {gammas.shape}, tails_s {tails_s.shape}"
        raise InvalidInputError(f"{shapes}: give one of each per bucket")
    if not ((gammas >= 0) & (gammas <= 1)).all() or not (gammas[..., -1] == 1).all():
        raise InvalidInputError(
            f"gammas={gammas.tolist()}: shares of backward lie in 0 to 1 and the last bucket's is 1"
        )
    if not (np.isfinite(tails_s) & (tails_s >= 0)).all() or (np.diff(tails_s) > 0).any():
        raise InvalidInputError(f"tails_s={tails_s.tolist()}: must be finite, not negative and not increasing")


def step_time(cluster: Cluster, local_batches: npt.ArrayLike) -> float:
    """Return the seconds that one step takes when rank i has `local_batches[i]` samples.

        T = max( max over i, j of  a_i(b_i) + gamma_ij P_i(b_i) + C_j ,  max over i of  L_i(b_i) )

    or, where the cluster has layers, what `layers` says in place of the first of the two.

    Args:
        cluster: the performance model.
        local_batches: b_i, whole or not, [n].

    Example:
        >>> curve = Curve(fixed_s=[1.0, 1.0], per_sample_s=[0.25, 0.5])
        >>> pair = Cluster.two_point(forward=curve, backward=curve, gamma=0.25, overlapped_s=2.0, last_s=1.0)
        >>> step_time(pair, [8, 4])
        7.0
    """
    batches = np.asarray(local_batches, dtype=np.float64)
    if batches.shape != (cluster.num_ranks,):
        raise InvalidInputError(f"{batches.size} local batches for {cluster.num_ranks} ranks: give one per rank")
    if not np.isfinite(batches).all():
        raise InvalidInputError(f"local_batches={batches.tolist()}: must be finite")
    if cluster.layers is None:
        return float(cluster.finish_s(batches).max())
    layered_s = cluster.layers.step_s(cluster.forward.at(batches), cluster.backward.at(batches))
    return max(layered_s, float(cluster.load.at(batches).max()))


# How much of the hardware a step uses.


def hardware_use(local_batches: npt.ArrayLike, compute_s: npt.ArrayLike, step_s: npt.ArrayLike) -> FloatArray:
    """Return the throughput of a step over the sum of what every device would do alone at its batch, 0 to 1.

        use = (B / T) / sum over i of  b_i / (a_i(b_i) + P_i(b_i))

    What is missing from 1 is communication that no computing hides, and waiting for slower ranks and for data. All
    arrays may have more axes in front; a rank without samples adds nothing, and what is not known (NaN) stays so.

    Args:
        local_batches: b_i, [..., n].
        compute_s: a_i(b_i) + P_i(b_i), of the model or measured, [..., n].
        step_s: T, one number, or as every rank sees it on its own clock, [..., n].

    Example:
        >>> curve = Curve(fixed_s=[1.0, 1.0], per_sample_s=[0.25, 0.5])
        >>> pair = Cluster.two_point(forward=curve, backward=curve, gamma=0.25, overlapped_s=2.0, last_s=1.0)
        >>> compute_s = pair.forward.at([8, 4]) + pair.backward.at([8, 4])
        >>> round(float(hardware_use([8, 4], compute_s, step_time(pair, [8, 4]))), 3)
        0.857
    """
    batches = np.asarray(local_batches, dtype=np.float64)
    with np.errstate(all="ignore"):  # no time, no samples, times of a damaged log: 0 or NaN, as it should be
        stretched = np.asarray(step_s, dtype=np.float64) / np.asarray(compute_s, dtype=np.float64)
        spent = np.where(batches > 0, batches * stretched, 0.0).sum(axis=-1)
        use: FloatArray = batches.sum(axis=-1) / spent
    return use


def even_step_time(cluster: Cluster, total_batch: int) -> float:
    """Return the seconds that one step takes with DDP's even split; infinite where that breaks a rank's bound.

    Every rank has B // n samples, the first B mod n ranks one more.

    Example:
        >>> curve = Curve(fixed_s=[1.0, 1.0], per_sample_s=[0.25, 0.5])
        >>> pair = Cluster.two_point(forward=curve, backward=curve, gamma=0.25, overlapped_s=2.0, last_s=1.0)
        >>> even_step_time(pair, 12)
        9.0
    """
    least, more = divmod(int(total_batch), cluster.num_ranks)
    even = least + (np.arange(cluster.num_ranks) < more)
    if (even < cluster.min_batch).any() or (even > cluster.max_batch).any():
        return float("inf")
    return step_time(cluster, even)


def even_speed(cluster: Cluster, local_batches: npt.ArrayLike) -> float:
    """Return how fast DDP's even split of the same total batch is against this split; 0 where it breaks a bound.

        T(b) / T(even)

    The use of the hardware under this split, times this, is what DDP would use of the same.
    """
    return step_time(cluster, local_batches) / even_step_time(cluster, int(np.sum(local_batches)))
