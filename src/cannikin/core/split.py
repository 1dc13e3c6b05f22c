"""OptPerf: the fastest split of a total batch over unlike ranks (paper, section 3.3), exactly and in whole numbers.

    minimise T = max_i t_i(b_i)   subject to   sum b_i = B,  lo_i <= b_i <= hi_i,  b_i whole

where t_i is the largest of rank i's lines alpha + beta b (`perf`). The paper calls this NP-hard; it is a search in one
dimension. For a trial T the most rank i can take is b_i(T) = clip(min (T - alpha)/beta, lo_i, hi_i), and lo_i while T
is below its flat line. b_i(T) changes its slope at a few known times only, so the smallest T whose batches sum to B
lies between two neighbours among all ranks' sorted times, and the sum is linear there. Whole numbers: every further
sample has a finish time t_i(b_i + 1); handing the missing ones out in the order of finish time (then the smaller
batch, then the lower rank) is optimal for a min-max of increasing functions. Cost O(n L log(n L)), L lines a rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cannikin.core.perf import Cluster
from cannikin.core.records import FloatArray, IntArray, Split
from cannikin.errors import InvalidInputError

__all__ = ["SplitSolver", "drop_candidate", "optimal_split"]

# Finish times closer than this, relative, count as one: the search finds T up to rounding, and the batches must not
# depend on the order in which the ranks were summed.
_TIE = 1e-12


class SplitSolver:
    """Everything about a cluster that does not depend on the total batch, computed once for many total batches."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.low = cluster.min_batch.astype(np.float64)
        self.high = cluster.max_batch.astype(np.float64)
        self._alphas, self._betas = _envelope(*cluster.lines(), self.low, self.high)
        # A flat line never limits the batch, it only delays it: below its height the rank stays at its lower bound.
        # As a sloped line it becomes one that any T > -1 s reaches at once.
        flat = self._betas == 0
        self._flat_s = np.where(flat, self._alphas, -np.inf).max(axis=0)
        self._any_flat = bool(flat.any())
        self._zeros = np.where(flat, -1.0, self._alphas)
        self._inverse = np.divide(1.0, self._betas, out=np.full_like(self._betas, np.inf), where=~flat)
        self._low_s = self.finish_s(self.low)
        self._times = np.sort(np.concatenate([self._low_s, self.finish_s(self.high), *self._kink_times()]))

    def finish_s(self, batches: npt.NDArray[np.float64 | np.int64]) -> FloatArray:
        """t_i(b_i) of every rank, seconds."""
        finish: FloatArray = self._alphas[0] + self._betas[0] * batches
        for alpha, beta in zip(self._alphas[1:], self._betas[1:], strict=True):
            np.maximum(finish, alpha + beta * batches, out=finish)
        return finish

    def batches_at(self, step_s: npt.ArrayLike, *, before: bool = False) -> FloatArray:
        """b_i(T), the real batch every rank can finish by T, [..., n]; with `before`, the limit from below T."""
        time = np.asarray(step_s, dtype=np.float64)[..., None]
        most: FloatArray = (time - self._zeros[0]) * self._inverse[0]
        for zero, inverse in zip(self._zeros[1:], self._inverse[1:], strict=True):
            np.minimum(most, (time - zero) * inverse, out=most)
        if self._any_flat:
            most[time <= self._flat_s if before else time < self._flat_s] = -np.inf
        np.maximum(most, self.low, out=most)
        return np.minimum(most, self.high, out=most)

    def step_times(self, totals: npt.ArrayLike) -> FloatArray:
        """The optimum in reals for each total batch, seconds, the shape of `totals`; inf where it is infeasible.

        T* = max(T_r, max_i t_i(lo_i)) with T_r = inf{T : sum b_i(T) >= B}.
        """
        wanted = np.asarray(totals, dtype=np.float64)
        feasible = (self.low.sum() <= wanted) & (wanted <= self.high.sum())
        times = np.maximum(self._reach(np.where(feasible, wanted, self.low.sum())), self._low_s.max())
        return np.where(feasible, times, np.inf)

    def split(self, total_batch: int) -> Split:
        """The optimum in whole numbers, or the reason why there is none."""
        lowest, highest = int(self.cluster.min_batch.sum()), int(self.cluster.max_batch.sum())
        if total_batch != int(total_batch):
            raise InvalidInputError(f"total_batch={total_batch} is not a whole number")
        if not lowest <= total_batch <= highest:
            return Split(local_batches=(), step_s=np.inf, bottlenecks=(), reason=_infeasible(self.cluster, total_batch))
        batches, reached_s = self._whole(int(total_batch))
        step_s = float(self.finish_s(batches).max())
        kinds = self._bottlenecks(batches, step_s, reached_s)
        return Split(
            local_batches=tuple(batches.tolist()),
            step_s=step_s,
            bottlenecks=kinds,
            reason=_describe(self.cluster, batches, kinds),
        )

    def _kink_times(self) -> list[FloatArray]:
        """Times at which a rank passes from one line of its envelope to the next."""
        kinks = []
        for k in range(len(self._alphas) - 1):
            rise = self._betas[k + 1] - self._betas[k]
            at = np.divide(self._alphas[k] - self._alphas[k + 1], rise, out=self.low.copy(), where=rise > 0)
            kinks.append(self.finish_s(np.minimum(np.maximum(at, self.low), self.high)))
        return kinks

    def _reach(self, totals: FloatArray) -> FloatArray:
        """T_r for each total: between two neighbouring times by binary search, then by the straight line there."""
        below = np.full(totals.shape, -1)
        above = np.full(totals.shape, len(self._times) - 1)
        while (above - below > 1).any():
            middle = (below + above + 1) // 2
            enough = self.batches_at(self._times[middle]).sum(axis=-1) >= totals
            above = np.where(enough & (middle < above), middle, above)
            below = np.where(~enough & (middle < above), middle, below)
        top_s = self._times[above]
        bottom_s = self._times[np.maximum(below, 0)]
        reached_s = (top_s + bottom_s) / 2
        inside = (below >= 0) & (self.batches_at(top_s, before=True).sum(axis=-1) >= totals)
        rate = self._rate(reached_s)
        for _ in range(2):  # the second pass only removes the rounding of the first
            missing = totals - self.batches_at(reached_s).sum(axis=-1)
            step = np.divide(missing, rate, out=np.zeros_like(rate), where=rate > 0)
            reached_s = np.minimum(np.maximum(reached_s + step, bottom_s), top_s)
        found: FloatArray = np.where(inside, reached_s, top_s)
        return found

    def _rate(self, step_s: FloatArray) -> FloatArray:
        """Samples a second that all ranks together gain with T, at a T where no rank's slope changes."""
        time = step_s[..., None]
        most = np.full((*step_s.shape, len(self.low)), np.inf)
        rate = np.zeros_like(most)
        for zero, inverse in zip(self._zeros, self._inverse, strict=True):
            batch = (time - zero) * inverse
            closer = batch < most
            most, rate = np.where(closer, batch, most), np.where(closer, inverse, rate)
        moving = (time > self._flat_s) & (most > self.low) & (most < self.high)
        total: FloatArray = np.where(moving, rate, 0.0).sum(axis=-1)
        return total

    def _whole(self, total_batch: int) -> tuple[IntArray, float]:
        """Whole local batches that sum to the total, with T_r."""
        ranks = len(self.low)
        top = min(total_batch + ranks, int(self.cluster.max_batch.sum()))
        reached_s, top_s = (float(t) for t in self._reach(np.array([total_batch, top], dtype=np.float64)))
        batches = self._count(reached_s * (1 + _TIE))
        missing = total_batch - int(batches.sum())
        if missing < 0:  # flat lines: more samples finish at T_r itself than are left
            before = self._count(reached_s * (1 - _TIE))
            return _fill_evenly(before, batches, total_batch - int(before.sum())), reached_s
        # Rounding down lost fewer than n samples, and n more in reals make good for that at top_s; in between each
        # sample has a finish time of its own, at most 2 n of them.
        batches = batches + self._earliest(batches, self._count(top_s * (1 - _TIE)), missing)
        missing = total_batch - int(batches.sum())
        if missing:
            batches = _fill_evenly(batches, self._count(top_s * (1 + _TIE)), missing)
        return batches, reached_s

    def _count(self, step_s: float) -> IntArray:
        """The most whole samples every rank can finish by T, exactly as `finish_s` computes finish times."""
        count = np.floor(self.batches_at(step_s))
        count -= (self.finish_s(count) > step_s) & (count > self.low)
        more = np.minimum(count + 1, self.high)
        count = np.where(self.finish_s(more) <= step_s, more, count)
        return count.astype(np.int64)

    def _earliest(self, batches: IntArray, cap: IntArray, num_samples: int) -> IntArray:
        """How many of the `num_samples` earliest finishing samples in (batches, cap] fall to each rank."""
        room = np.maximum(cap - batches, 0)
        rank = np.repeat(np.arange(len(room)), room)
        first = np.cumsum(room) - room
        batch = batches[rank] + np.arange(len(rank)) - first[rank] + 1
        # [L, candidates]: each candidate's finish time from its own rank's lines
        finish = (self._alphas[:, rank] + self._betas[:, rank] * batch).max(axis=0)
        order = np.lexsort((rank, batch, finish))[:num_samples]
        given: IntArray = np.bincount(rank[order], minlength=len(room))
        return given

    def _bottlenecks(self, batches: IntArray, step_s: float, reached_s: float) -> tuple[str, ...]:
        """What keeps each rank from finishing earlier or taking more."""
        cluster = self.cluster
        times = cluster.bucket_times(batches)
        last_bucket = times[:, -1] >= times.max(axis=1)
        floored = cluster.backward.floor_s > cluster.backward.fixed_s + cluster.backward.per_sample_s * batches
        kinds = np.where(last_bucket, np.where(floored, "floor", "compute"), "communication").astype(object)
        kinds[(batches == cluster.max_batch) & (self.finish_s(batches + 1) <= step_s)] = "max_batch"
        kinds[(batches == cluster.min_batch) & (self.finish_s(batches) > reached_s * (1 + _TIE))] = "min_batch"
        return tuple(kinds.tolist())


def optimal_split(cluster: Cluster, total_batch: int) -> Split:
    """The fastest split of a total batch, in whole numbers, within every rank's bounds.

        minimise  max over i, j of  a_i(b_i) + gamma_ij P_i(b_i) + C_j   subject to   sum b_i = B

    Args:
        cluster: the performance model, for instance from `cannikin.load_cluster`.
        total_batch: B, samples.

    Returns:
        The split; where the bounds cannot hold the total, an infeasible one whose reason says so.

    Example:
        >>> from cannikin.core.perf import Cluster, Curve
        >>> curve = Curve(fixed_s=[1.0, 1.0], per_sample_s=[0.25, 0.5])
        >>> pair = Cluster.two_point(forward=curve, backward=curve, gamma=0.25, overlapped_s=2.0, last_s=1.0)
        >>> split = optimal_split(pair, 12)
        >>> split.local_batches, split.step_s
        ((8, 4), 7.0)
    """
    return SplitSolver(cluster).split(total_batch)


def drop_candidate(cluster: Cluster, total_batch: int) -> tuple[int, Split] | None:
    """The rank without which the step would be fastest, and the split then; None where every rank helps.

    The ring all-reduce of one rank less is accounted for. Ranks of the same kind are tried once.
    """
    best_s = optimal_split(cluster, total_batch).step_s
    best: tuple[int, Split] | None = None
    if cluster.num_ranks == 1:
        return None
    alphas, betas = cluster.lines()
    kinds = np.vstack([alphas, betas, cluster.min_batch, cluster.max_batch])
    _, first_of_kind = np.unique(kinds, axis=1, return_index=True)
    for rank in sorted(first_of_kind.tolist()):
        split = optimal_split(cluster.without(rank), total_batch)
        if split.step_s < best_s:
            best_s, best = split.step_s, (rank, split)
    return best


def _envelope(
    alphas: FloatArray, betas: FloatArray, low: FloatArray, high: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The lines that are the largest somewhere in [low, high], by increasing slope, [K, n]; the last one repeated."""
    ranks = np.arange(alphas.shape[1])
    height = alphas + betas * low
    current = _steepest(betas, height >= height.max(axis=0))
    found = [current]
    for _ in range(len(alphas) - 1):
        rise = betas - betas[current, ranks]
        at = np.divide(alphas[current, ranks] - alphas, rise, out=np.full_like(rise, np.inf), where=rise > 0)
        nearest = at.min(axis=0)
        onward = nearest < high
        if not onward.any():
            break
        current = np.where(onward, _steepest(betas, at <= nearest), current)
        found.append(current)
    chosen = np.stack(found)
    return np.take_along_axis(alphas, chosen, axis=0), np.take_along_axis(betas, chosen, axis=0)


def _steepest(betas: FloatArray, among: npt.NDArray[np.bool_]) -> IntArray:
    """For each rank the line with the largest slope among those marked."""
    best: IntArray = np.where(among, betas, -1.0).argmax(axis=0)
    return best


def _fill_evenly(batches: IntArray, cap: IntArray, num_samples: int) -> IntArray:
    """Hand out samples that all finish at one time: to the smallest batch first, then to the lower rank, up to cap."""
    bottom, top = int(batches.min()), int(cap.max())
    target = int(batches.sum()) + num_samples
    while bottom < top:  # the largest level that does not hand out too many
        level = (bottom + top + 1) // 2
        if np.clip(level, batches, cap).sum() <= target:
            bottom = level
        else:
            top = level - 1
    filled: IntArray = np.clip(bottom, batches, cap)
    open_ranks = np.flatnonzero((filled == bottom) & (filled < cap))
    filled[open_ranks[: target - int(filled.sum())]] += 1
    return filled


def _infeasible(cluster: Cluster, total_batch: int) -> str:
    lowest, highest = int(cluster.min_batch.sum()), int(cluster.max_batch.sum())
    if total_batch < lowest:
        return (
            f"total batch {total_batch} is below {lowest}, the sum of min_batch over {cluster.num_ranks} ranks: "
            "raise the total or lower min_batch"
        )
    return (
        f"total batch {total_batch} is above {highest}, the sum of max_batch over {cluster.num_ranks} ranks: "
        "lower the total or raise max_batch"
    )


def _describe(cluster: Cluster, batches: IntArray, kinds: tuple[str, ...]) -> str:
    slowest = int(cluster.bucket_times(batches).max(axis=1).argmax())
    return f"{cluster.names[slowest]} finishes last with {batches[slowest]} samples ({kinds[slowest]})"
