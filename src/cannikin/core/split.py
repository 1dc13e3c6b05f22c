"""OptPerf: the fastest split of a total batch over unlike ranks (paper, section 3.3), exactly and in whole numbers.

    minimise T = max_i t_i(b_i)   subject to   sum b_i = B,  lo_i <= b_i <= hi_i,  b_i whole

where t_i is the largest of rank i's lines alpha + beta b (`perf`). The paper calls this NP-hard; it is a search in one
dimension. For a trial T the most that rank i can take is b_i(T) = clip(min (T - alpha)/beta, lo_i, hi_i), and lo_i
while T is below its flat line. b_i(T) changes its slope at a few known times only, so the smallest T whose batches sum
to B lies between two neighbours among all ranks' sorted times, and the sum is linear there. Whole numbers: every
further sample has a finish time t_i(b_i + 1); to hand the missing samples out in the order of finish time is optimal
for a min-max of increasing functions. Ties go to the smaller batch, then to one kind of rank, whatever the order of the
ranks, then to the lower rank. Cost O(n L log(n L)) with L lines per rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cannikin.core.perf import Cluster
from cannikin.core.values import FloatArray, IntArray, Split
from cannikin.errors import InvalidInputError
from cannikin.words import counted

# Finish times whose relative difference is below this count as one: the search finds T up to rounding, and the batches
# must not depend on the order in which the ranks were summed.
_TIE = 1e-12


class SplitSolver:
    """Everything about a cluster that does not depend on the total batch, computed once for many total batches."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.low = cluster.min_batch.astype(np.float64)
        self.high = cluster.max_batch.astype(np.float64)
        alphas, betas = cluster.lines()
        # A slope whose whole rise is below the line's last digit counts as 0: its inverse would be far too large.
        betas[betas * self.high <= np.maximum(1e-16 * alphas, 1e-280)] = 0.0
        self._alphas, self._betas = _envelope(alphas, betas, self.low, self.high)
        # A flat line never limits the batch, it only delays it: below its height the rank stays at its lower bound.
        # Among the sloped lines its place is taken by one that any T > -1 s reaches at once.
        self._flat = self._betas == 0
        self._any_flat = bool(self._flat.any())
        if self._any_flat:
            self._flat_s = np.where(self._flat, self._alphas, -np.inf).max(axis=0)
            self._zeros = np.where(self._flat, -1.0, self._alphas)
            self._inverse = np.divide(1.0, self._betas, out=np.full_like(self._betas, np.inf), where=~self._flat)
        else:
            self._zeros, self._inverse = self._alphas, 1.0 / self._betas
        self._low_s = self.finish_s(self.low)
        self._times, self._filled, self._rates = self._events()

    def finish_s(self, batches: npt.NDArray[np.float64 | np.int64], ranks: IntArray | None = None) -> FloatArray:
        """Return t_i(b_i) of every rank, or of the given ones, seconds."""
        finish: FloatArray | None = None
        for alpha, beta in zip(self._alphas, self._betas, strict=True):
            line = alpha + beta * batches if ranks is None else alpha[ranks] + beta[ranks] * batches
            finish = line if finish is None else np.maximum(finish, line, out=finish)
        assert finish is not None
        return finish

    def batches_at(self, step_s: npt.ArrayLike, *, before: bool = False) -> FloatArray:
        """Return b_i(T), the real batch every rank can finish by T, [..., n]; with `before`, the limit from below T."""
        time = np.asarray(step_s, dtype=np.float64)[..., None]
        most: FloatArray = (time - self._zeros[0]) * self._inverse[0]
        for zero, inverse in zip(self._zeros[1:], self._inverse[1:], strict=True):
            np.minimum(most, (time - zero) * inverse, out=most)
        if self._any_flat:
            most[time <= self._flat_s if before else time < self._flat_s] = -np.inf
        np.maximum(most, self.low, out=most)
        return np.minimum(most, self.high, out=most)

    def step_times(self, totals: npt.ArrayLike) -> FloatArray:
        """Return the optimum in reals for each total batch, seconds; inf where it is infeasible.

        T* = max(T_r, max_i t_i(lo_i)) with T_r = inf{T : sum b_i(T) >= B}.
        """
        wanted = np.asarray(totals, dtype=np.float64)
        feasible = (self.low.sum() <= wanted) & (wanted <= self.high.sum())
        times = np.maximum(self._reach(np.where(feasible, wanted, self.low.sum())), self._low_s.max())
        return np.where(feasible, times, np.inf)

    def split(self, total_batch: int) -> Split:
        """Return the optimum in whole numbers, or the reason why there is none."""
        lowest, highest = int(self.low.sum()), int(self.high.sum())  # in floats: 1,024 x NO_MAX overflows whole numbers
        if not float(total_batch).is_integer():
            raise InvalidInputError(f"total_batch={total_batch} is not a whole number")
        if not lowest <= total_batch <= highest:
            return Split(local_batches=(), step_s=np.inf, bottlenecks=(), reason=self._infeasible(total_batch))
        return self._described(*self._whole(int(total_batch)))

    def near(self, local_batches: npt.ArrayLike, step_s: float, unit: int = 1) -> Split | None:
        """Return a split of the same total that ends by `step_s` and changes little; None where none is found.

        Ranks that would be late give samples up, the others get them in proportion to the room that they have. Batches
        of at least four units that change become whole units, all but one where the total is not made of units.
        """
        wanted = np.asarray(local_batches, dtype=np.int64)
        total = int(wanted.sum())
        cap = np.maximum(self._count(step_s, total), self.low.astype(np.int64))
        held = np.minimum(wanted, cap)
        room = cap - held
        missing = total - int(held.sum())
        if missing > room.sum() or self._low_s.max() > step_s:
            return None
        aim = held + room * (missing / max(int(room.sum()), 1))
        batches = np.where((aim == wanted) | (aim < 4 * unit), np.floor(aim), np.floor(aim / unit) * unit)
        batches = np.maximum(batches, self.low).astype(np.int64)
        for size in (unit, 1):
            while (missing := total - int(batches.sum())) >= size:
                lack = np.where((batches + size <= cap) & ((batches != wanted) | (size == 1)), aim - batches, -np.inf)
                rank = int(lack.argmax())
                if lack[rank] == -np.inf:
                    break
                batches[rank] += size if size > 1 else min(missing, int(cap[rank] - batches[rank]))
        if batches.sum() != total:
            return None
        return self._described(batches, step_s)

    def _described(self, batches: IntArray, reached_s: float) -> Split:
        """Return these batches with their step time and what keeps each rank from less."""
        finish_s = self.finish_s(batches)
        slowest = int(finish_s.argmax())
        kinds = self._bottlenecks(batches, finish_s, reached_s)
        samples = counted(int(batches[slowest]), "sample")
        return Split(
            local_batches=tuple(batches.tolist()),
            step_s=float(finish_s[slowest]),
            bottlenecks=kinds,
            reason=f"{self.cluster.names[slowest]} finishes last with {samples} ({kinds[slowest]})",
        )

    def _events(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return times at which some b_i(T) changes its slope; without flat lines also their sum and its slope."""
        times, gains = [self._low_s], [self._inverse[0]]
        for k in range(len(self._betas) - 1):
            rise = self._betas[k + 1] - self._betas[k]
            at = np.divide(self._alphas[k] - self._alphas[k + 1], rise, out=self.low.copy(), where=rise > 0)
            times.append(self.finish_s(np.minimum(np.maximum(at, self.low), self.high)))
            if not self._any_flat:
                gains.append(self._inverse[k + 1] - self._inverse[k])
        every_s = np.concatenate([*times, self.finish_s(self.high)])
        if self._any_flat:
            every_s.sort()
            return every_s, np.empty(0), np.empty(0)
        order = np.argsort(every_s)
        every_s = every_s[order]
        rates = np.cumsum(np.concatenate([*gains, -self._inverse[-1]])[order])
        filled = np.full_like(every_s, self.low.sum())
        filled[1:] += np.cumsum(rates[:-1] * np.diff(every_s))
        # Where every rank waits or is full the sum stands still, and its slope is nothing but rounding error.
        return every_s, np.maximum.accumulate(filled), np.where(rates > 1e-9 * rates.max(), rates, np.inf)

    def _reach(self, totals: FloatArray) -> FloatArray:
        """Return T_r for each total: from the last of the times that is too early, along the line that begins there."""
        if self._any_flat:
            return self._search(totals)
        begin = np.maximum(np.searchsorted(self._filled, totals), 1) - 1
        rate = self._rates[begin]
        reached_s: FloatArray = np.asarray(self._times[begin] + (totals - self._filled[begin]) / rate)
        for _ in range(3):
            missing = totals - self.batches_at(reached_s).sum(axis=-1)
            reached_s += missing / rate
            if (np.abs(missing) <= 1e-8 + 1e-15 * totals).all():
                return reached_s
        return self._search(totals)  # the running sums have lost too much to rounding

    def _search(self, totals: FloatArray) -> FloatArray:
        """Return T_r for each total without running sums, also where some b_i(T) jumps."""
        below, above = self._bisect(totals)
        start_s, end_s = self._times[np.maximum(below, 0)], self._times[above]
        start = self.batches_at(start_s).sum(axis=-1)
        end = self.batches_at(end_s, before=True).sum(axis=-1)
        rate = np.divide(end - start, end_s - start_s, out=np.full_like(end_s, np.inf), where=end > start)
        reached_s = start_s + (totals - start) / rate
        for _ in range(2):  # at start_s, where a nearly flat line ends, its batch is rounded coarsely; beyond it is not
            held = np.where(reached_s < end_s, self.batches_at(reached_s).sum(axis=-1), end)  # without jumps at end_s
            reached_s = np.minimum(reached_s + (totals - held) / rate, end_s)
        found: FloatArray = np.where((below >= 0) & (end >= totals), reached_s, end_s)
        return found

    def _bisect(self, totals: FloatArray) -> tuple[IntArray, IntArray]:
        """Return for each total the last of the times that is too early, -1 where none is, and the one after it."""
        below = np.full(totals.shape, -1)
        above = np.full(totals.shape, len(self._times) - 1)
        while (above - below > 1).any():
            middle = (below + above + 1) // 2
            enough = self.batches_at(self._times[middle]).sum(axis=-1) >= totals
            above = np.where(enough & (middle < above), middle, above)
            below = np.where(~enough & (middle < above), middle, below)
        return below, above

    def _whole(self, total_batch: int) -> tuple[IntArray, float]:
        """Return whole local batches that sum to the total, and T_r."""
        top = min(float(total_batch + len(self.low)), self.high.sum())
        reached_s, top_s = self._reach(np.array([total_batch, top], dtype=np.float64)).tolist()
        batches, cap = self._count([reached_s * (1 + _TIE), top_s * (1 - _TIE)], total_batch)
        missing = total_batch - int(batches.sum())
        if missing < 0:  # flat lines: more samples finish at T_r itself than are needed
            # If all of a rank's times are 0, T (1 - _TIE) is T: take the next smaller float.
            before = self._count(min(reached_s * (1 - _TIE), np.nextafter(reached_s, -np.inf)), total_batch)
            return self._fill_evenly(before, batches, total_batch - int(before.sum())), reached_s
        # Rounding down lost fewer than n samples, which n more in reals make up for at top_s. Between the two times lie
        # at most 2 n samples, each with a finish time of its own.
        batches = self._add_earliest(batches, cap, missing)
        missing = total_batch - int(batches.sum())
        if missing:
            batches = self._fill_evenly(batches, self._count(top_s * (1 + _TIE), total_batch), missing)
        missing = total_batch - int(batches.sum())
        if missing:  # a sample takes less than a float can tell: all of these finish at one time
            batches = self._fill_evenly(batches, np.minimum(self.high, total_batch).astype(np.int64), missing)
        return batches, reached_s

    def _count(self, step_s: npt.ArrayLike, total_batch: int) -> IntArray:
        """Return the most whole samples every rank can finish by T, exactly as `finish_s` computes times, [..., n].

        No count exceeds the total: no rank has use for more, and a sum of many `NO_MAX` would overflow.
        """
        time = np.asarray(step_s, dtype=np.float64)[..., None]
        count = np.floor(self.batches_at(step_s))
        count -= (self.finish_s(count) > time) & (count > self.low)
        more = np.minimum(count + 1, self.high)
        count = np.where(self.finish_s(more) <= time, more, count)
        return np.asarray(np.minimum(count, total_batch), dtype=np.int64)

    def _add_earliest(self, batches: IntArray, cap: IntArray, num_samples: int) -> IntArray:
        """Hand out the `num_samples` samples in (batches, cap] that finish earliest; ties go to the smaller batch."""
        if num_samples == 0:
            return batches
        room: IntArray = np.maximum(cap - batches, 0)
        rank = np.repeat(np.arange(len(room)), room)
        if len(rank) <= num_samples:
            return batches + room
        batch = np.arange(1, len(rank) + 1) + (batches - np.cumsum(room) + room)[rank]
        finish = self.finish_s(batch, rank)
        cut_s = np.partition(finish, num_samples - 1)[num_samples - 1]
        given = finish < cut_s
        tied = np.flatnonzero(finish == cut_s)
        missing = num_samples - int(given.sum())
        if missing < len(tied):
            tied = tied[np.lexsort((*self._kind_keys(rank[tied]), batch[tied]))]
        given[tied[:missing]] = True
        return batches + np.bincount(rank[given], minlength=len(room))

    def _fill_evenly(self, batches: IntArray, cap: IntArray, num_samples: int) -> IntArray:
        """Hand out samples that all finish at one time: to the smallest batch first, up to cap."""
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
        open_ranks = open_ranks[np.lexsort(self._kind_keys(open_ranks))]
        filled[open_ranks[: target - int(filled.sum())]] += 1
        return filled

    def _kind_keys(self, ranks: IntArray) -> tuple[FloatArray, ...]:
        """Return sort keys that put ranks of one kind together: rank numbers then decide only within a kind."""
        return (*self._alphas[:, ranks], *self._betas[:, ranks], self.low[ranks], self.high[ranks])

    def _bottlenecks(self, batches: IntArray, finish_s: FloatArray, reached_s: float) -> tuple[str, ...]:
        """Return what keeps each rank from finishing earlier or taking more."""
        cluster = self.cluster
        times = cluster.bucket_times(batches)
        last_bucket = times[:, -1] >= times.max(axis=1)
        kinds = np.where(last_bucket, "compute", "communication")
        if cluster.backward.floor_s.any():
            sloped_s = cluster.backward.fixed_s + cluster.backward.per_sample_s * batches
            kinds[last_bucket & (cluster.backward.floor_s > sloped_s)] = "floor"
        if cluster.loads:
            kinds[cluster.load.at(batches) > times.max(axis=1)] = "loading"
        kinds[(batches == cluster.max_batch) & (self.finish_s(batches + 1) <= finish_s.max())] = "max_batch"
        kinds[(batches == cluster.min_batch) & (finish_s > reached_s * (1 + _TIE))] = "min_batch"
        return tuple(kinds.tolist())

    def _infeasible(self, total_batch: int) -> str:
        """Say why the bounds cannot hold the total."""
        side, bound, name, advice = "below", self.low, "min_batch", "raise the total or lower min_batch"
        if total_batch > self.high.sum():
            side, bound, name, advice = "above", self.high, "max_batch", "lower the total or raise max_batch"
        sum_over = f"the sum of {name} over {counted(self.cluster.num_ranks, 'rank')}"
        return f"total batch {total_batch} is {side} {int(bound.sum())}, {sum_over}: {advice}"


def optimal_split(cluster: Cluster, total_batch: int) -> Split:
    """Return the fastest split of a total batch, in whole numbers, within every rank's bounds.

        minimise  max over i, j of  a_i(b_i) + gamma_ij P_i(b_i) + C_j  and  L_i(b_i)   subject to   sum b_i = B

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
    return solver_for(cluster).split(total_batch)


def solver_for(cluster: Cluster) -> SplitSolver:
    """Return the solver for a cluster, by how its ranks meet."""
    if cluster.layers is None:
        return SplitSolver(cluster)
    from cannikin.core.layer_split import LayerSolver  # it is made of this module's solver

    return LayerSolver(cluster)


def fewer_ranks(cluster: Cluster, total_batch: int) -> tuple[tuple[int, ...], Split] | None:
    """Return the ranks without which the step would be fastest, and the split then; None where every rank helps.

    One rank less is tried, for each kind of rank, and all ranks of one name less where these are alike. Each time the
    ring of the all-reduce becomes shorter.

    Example:
        >>> from cannikin.core.perf import Cluster, Curve
        >>> curve = Curve(fixed_s=[1.0, 9.0, 9.0], per_sample_s=[0.25] * 3)
        >>> names = ("new", "old", "old")
        >>> trio = Cluster.two_point(
        ...     forward=curve, backward=curve, gamma=0.25, overlapped_s=2.0, last_s=1.0, names=names
        ... )
        >>> ranks, split = fewer_ranks(trio, 12)
        >>> ranks, split.local_batches
        ((1, 2), (12,))
    """
    _, first_of_kind = np.unique(_facts(cluster), axis=1, return_index=True)
    candidates: list[tuple[int, ...]] = [(rank,) for rank in sorted(first_of_kind.tolist())]
    for name in dict.fromkeys(cluster.names):
        ranks = tuple(rank for rank, label in enumerate(cluster.names) if label == name)
        if len(ranks) > 1 and alike(cluster, ranks):
            candidates.append(ranks)
    best_s, best = optimal_split(cluster, total_batch).step_s, None
    for ranks in candidates:
        if len(ranks) == cluster.num_ranks:
            continue
        smaller = cluster
        for rank in reversed(ranks):
            smaller = smaller.without(rank)
        split = optimal_split(smaller, total_batch)
        if split.step_s < best_s:
            best_s, best = split.step_s, (ranks, split)
    return best


def alike(cluster: Cluster, ranks: Sequence[int]) -> bool:
    """Return whether these ranks have the same times and bounds."""
    facts = _facts(cluster)[:, ranks]
    return bool((facts == facts[:, :1]).all())


def _facts(cluster: Cluster) -> FloatArray:
    """Return all that tells one rank from another, one column per rank."""
    return np.vstack([*cluster.lines(), cluster.min_batch, cluster.max_batch])


def _envelope(
    alphas: FloatArray, betas: FloatArray, low: FloatArray, high: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the lines that are largest somewhere in [low, high], by increasing slope, [K, n]; the last repeats."""
    if len(alphas) == 2 and (betas[0] <= betas[1]).all():
        return alphas, betas  # the two-point form; `_events` puts a crossing beyond the bounds at the bound
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
    """Return for each rank the line with the largest slope among those marked."""
    best: IntArray = np.where(among, betas, -1.0).argmax(axis=0)
    return best
