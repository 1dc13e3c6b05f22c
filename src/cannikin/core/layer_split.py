"""The fastest split where ranks meet layer by layer (`layers`), in whole numbers.

    minimise T(b) = sum of the stages' times   subject to   sum b_i = B,  lo_i <= b_i <= hi_i,  b_i whole

Every stage is a maximum over very many paths, each a line in b. Few of them matter near the optimum, so they are found
as they are needed (outer approximation): the best split for the paths known so far is found by scipy's HiGHS, a walk
over the layers says what it really takes, and by which path; that one is added, until nothing is gained. The paths hold
for every total batch, so later totals find most of theirs known. Every round gives a bound from below. In whole numbers
single samples are moved as long as that helps, and HiGHS is asked for anything better until there is nothing, the
split is within `_CLOSE` of the bound, or the search becomes long; docs/decisions/0012 has the reasons, and times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.split import SplitSolver
from cannikin.core.values import BoolArray, FloatArray, IntArray, Split
from cannikin.errors import CannikinError
from cannikin.words import counted

_CLOSE = 1e-3  # relative: splits this near to the bound from below are not searched for better ones: times are noisier
_ROUGH = 3e-3  # relative error that is good enough to compare total batches
_EXACT = 1e-5  # relative difference that counts; HiGHS keeps to its constraints within a tenth of it
_ROUNDS = 200  # far more than were ever needed
# The search for a better split in whole numbers: nodes after which the known one stands, and paths with which there is
# none, since 1,500 of them take HiGHS half a second without a single node.
_MOST_NODES, _MOST_PATHS = 100, 600


def require_scipy() -> Any:
    """Return scipy's optimizers, or say what to install."""
    try:
        import scipy.optimize  # only who shards a module needs it
    except ImportError as error:
        raise CannikinError("a split of sharded modules needs scipy: pip install 'cannikin[fsdp]'") from error
    return scipy.optimize


class LayerSolver(SplitSolver):
    """Everything about a cluster with layers that does not depend on the total batch, and all paths found so far.

    What it inherits splits for equal computing, which is the optimum where all ranks' layers are alike, and the start
    of the search elsewhere.
    """

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.layers is not None
        super().__init__(replace(cluster, gammas=np.ones(1), tails_s=np.zeros(1), layers=None))
        self.cluster, self._layers = cluster, cluster.layers
        self._optimize = require_scipy()
        self._unit_s = max(float(self._stages(self.low)[0].sum()), 1e-12)  # HiGHS wants numbers of the order of 1
        self._found: dict[int, tuple[IntArray, float]] = {}  # answers in whole numbers
        # The paths, sorted by stage: each is a line in b that its stage never falls below.
        self._stage_of, self._first = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._constants, self._slopes = np.zeros(0), np.zeros((0, cluster.num_ranks))

    def step_times(self, totals: npt.ArrayLike) -> FloatArray:
        """Return the optimum in reals for each total batch within `_ROUGH`, seconds; inf where it is infeasible.

        The optimum is convex in the total: where the middle lies on the line between two totals, so do all others.
        """
        wanted = np.asarray(totals, dtype=np.float64)
        times = np.full(wanted.shape, np.inf)
        order = np.flatnonzero((self.low.sum() <= wanted) & (wanted <= self.high.sum()))
        order = order[np.argsort(wanted[order])]
        if len(order):
            found = {k: self._real(wanted[order[k]], _ROUGH)[1] for k in {0, len(order) - 1}}
            self._between(wanted[order], found, 0, len(order) - 1)
            known = sorted(found)
            times[order] = np.interp(wanted[order], wanted[order[known]], [found[k] for k in known])
        return times

    def _between(self, totals: FloatArray, found: dict[int, float], first: int, last: int) -> None:
        """Find the optima of some totals between two, so that lines through them are right for the others."""
        middle = (first + last) // 2
        if middle in (first, last):
            return
        line = np.interp(totals[middle], totals[[first, last]], [found[first], found[last]])
        found[middle] = self._real(totals[middle], _ROUGH)[1]
        if line - found[middle] > 0.5 * _ROUGH * found[middle]:  # a convex curve leaves its chord by twice that at most
            self._between(totals, found, first, middle)
            self._between(totals, found, middle, last)

    def near(self, local_batches: npt.ArrayLike, step_s: float, unit: int = 1) -> Split | None:
        """Return these batches if they end by `step_s`, else the best ones made of whole units, if those do; or None.

        As in `SplitSolver.near`, batches below four units stay as they are, and one rank takes what is left.
        """
        batches = np.asarray(local_batches, dtype=np.int64)
        if not self._ends_by(batches, step_s):
            best = self._whole(int(batches.sum()))[0]
            batches = np.where(best >= 4 * unit, best // unit * unit, best)
            for rank in np.argsort(batches - best, kind="stable"):  # those that lost most come first
                batches[rank] += min(unit, int(best.sum() - batches.sum()))
        return self._described(batches, step_s) if self._ends_by(batches, step_s) else None

    def _ends_by(self, batches: IntArray, step_s: float) -> bool:
        inside = ((self.low <= batches) & (batches <= self.high)).all()
        return bool(inside) and step_time(self.cluster, batches) <= step_s

    def _whole(self, total_batch: int) -> tuple[IntArray, float]:
        """Return whole local batches that sum to the total, and the optimum in reals."""
        if total_batch in self._found:
            return self._found[total_batch]
        real, bound_s = self._real(float(total_batch))
        best = super()._whole(total_batch)[0].astype(np.float64)
        best_s, known = self._add(best), -1
        candidate: FloatArray | None = self._rounded(real, total_batch)
        while candidate is not None and known < len(self._stage_of):  # else HiGHS and the walk differ by rounding
            known = len(self._stage_of)
            found, found_s = self._exchanged(candidate)
            if found_s < best_s * (1 - _EXACT):  # equal computing is kept where it is as good
                best, best_s, known = found, found_s, -1
            is_close = best_s <= bound_s * (1 + _CLOSE) or len(self._stage_of) > _MOST_PATHS
            candidate = None if is_close else self._better(total_batch, best_s * (1 - _EXACT))
        self._found[total_batch] = self._untangled(best.astype(np.int64)), bound_s
        return self._found[total_batch]

    def _real(self, total_batch: float, within: float = _CLOSE) -> tuple[FloatArray, float]:
        """Return the best batches in reals for a total that the bounds allow, and a bound from below, seconds.

        Their time is within half of `within` of the bound.
        """
        best, bound_s = super()._whole(round(total_batch))[0].astype(np.float64), 0.0
        for rank in range(len(best) if not len(self._stage_of) else 0):  # every rank's own paths, to begin with
            others = np.arange(len(best)) != rank
            self._add(np.clip(np.where(others, 0.9 * best, 1.25 * best), self.low, self.high))
        best_s = self._add(best)
        for _ in range(_ROUNDS):
            result = self._master(total_batch, np.inf)
            if result.x is None:  # never seen; what is known then stands
                return best, best_s
            batches, bound_s = np.clip(result.x[: len(best)], self.low, self.high), result.fun * self._unit_s
            seconds = self._add(batches)
            self._add(0.5 * (best + batches))  # half way paths meet the optimum sooner than at the corners
            if seconds < best_s:
                best, best_s = batches, seconds
            if best_s <= bound_s * (1 + 0.5 * within):
                break
        return best, bound_s

    def _better(self, total_batch: int, below_s: float) -> FloatArray | None:
        """Return whole batches that take less than `below_s` by all paths known so far; None where there are none."""
        result = self._master(float(total_batch), below_s)
        return None if result.x is None else np.clip(np.round(result.x[: len(self.low)]), self.low, self.high)

    def _rounded(self, batches: FloatArray, total_batch: int) -> FloatArray:
        """Return whole batches near these that sum to the total: the largest remainders are rounded up."""
        whole = np.floor(batches + _EXACT)
        missing = total_batch - int(whole.sum())
        up = np.argsort(np.where(whole < self.high, whole - batches, np.inf), kind="stable")[:missing]
        whole[up] += 1
        return whole

    def _exchanged(self, batches: FloatArray) -> tuple[FloatArray, float]:
        """Move single samples between two ranks as long as T falls; return the batches, and their seconds.

        The paths known so far say which move is best, and the walk over the layers whether they are right.
        """
        best, best_s = batches, self._add(batches)
        for _ in range(_ROUNDS):
            moves_s = self._moves(best)
            to, away = np.unravel_index(int(moves_s.argmin()), moves_s.shape)
            if moves_s[to, away] >= best_s * (1 - _EXACT):
                break
            moved = best.copy()
            moved[to] += 1
            moved[away] -= 1
            seconds = self._add(moved)
            if seconds < best_s:
                best, best_s = moved, seconds
        return best, best_s

    def _moves(self, batches: FloatArray) -> FloatArray:
        """Return T by the paths known so far after one sample has moved to rank i from rank j, seconds, [n, n]."""
        here_s, steepest = self._constants + self._slopes @ batches, self._slopes.max(axis=1)
        longest_s = np.maximum.reduceat(here_s - steepest, self._first)
        kept = np.flatnonzero(here_s + steepest >= longest_s[self._stage_of])  # one sample brings no other path up
        first = np.searchsorted(self._stage_of[kept], np.arange(len(longest_s)))
        slopes, here_s = self._slopes[kept], here_s[kept, None, None]
        moves_s = np.maximum.reduceat(here_s + slopes[:, :, None] - slopes[:, None, :], first).sum(axis=0)
        load = self.cluster.load
        moves_s = np.maximum(moves_s, np.maximum(load.at(batches + 1)[:, None], load.at(batches).max()))
        moves_s[batches + 1 > self.high] = np.inf
        moves_s[:, batches - 1 < self.low] = np.inf
        return np.asarray(moves_s)

    def _stages(self, batches: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the stages' times, [M], and their slopes over each rank's batch, [M, n]."""
        forward, backward = self.cluster.forward, self.cluster.backward
        rows, n = self._layers.stages(forward.at(batches), backward.at(batches)), len(batches)
        slopes = rows[:, 1 : n + 1] * _slope(forward, batches) + rows[:, n + 1 :] * _slope(backward, batches)
        return rows[:, 0], slopes

    def _add(self, batches: FloatArray) -> float:
        """Remember the paths that decide at these batches, where they were not known; return T, seconds."""
        seconds, slopes = self._stages(batches)
        if not len(self._stage_of):
            self._first = np.zeros(len(seconds), dtype=np.int64)
            known_s = np.full(len(seconds), -np.inf)
        else:
            known_s = np.maximum.reduceat(self._constants + self._slopes @ batches, self._first)
        new = np.flatnonzero(seconds > known_s + 1e-9 * self._unit_s)
        if len(new):
            stage_of = np.concatenate([self._stage_of, new])
            order = np.argsort(stage_of, kind="stable")
            self._stage_of = stage_of[order]
            self._constants = np.concatenate([self._constants, (seconds - slopes @ batches)[new]])[order]
            self._slopes = np.concatenate([self._slopes, slopes[new]])[order]
            self._first = np.searchsorted(self._stage_of, np.arange(len(seconds)))
        return max(float(seconds.sum()), float(self.cluster.load.at(batches).max()))

    def _master(self, total_batch: float, below_s: float) -> Any:
        """Ask HiGHS for the batches of least T by the paths known so far, whole ones where T must be below a time.

        Unknowns: b_i, the time of each stage, and T, which is at least their sum and every rank's loading.
        """
        n, num_stages, num_paths = len(self.low), len(self._first), len(self._stage_of)
        load = self.cluster.load
        matrix = np.zeros((num_paths + 2 + n, n + num_stages + 1))
        upper = np.full(len(matrix), 0.0)
        matrix[:num_paths, :n] = self._slopes / self._unit_s
        matrix[np.arange(num_paths), n + self._stage_of] = -1.0
        upper[:num_paths] = -self._constants / self._unit_s
        matrix[num_paths, n:] = [*[1.0] * num_stages, -1.0]
        matrix[num_paths + 1, :n], upper[num_paths + 1] = 1.0, total_batch
        matrix[num_paths + 2 :, :n], matrix[num_paths + 2 :, -1] = np.diag(load.per_sample_s) / self._unit_s, -1.0
        upper[num_paths + 2 :] = -load.fixed_s / self._unit_s
        lower = np.full(len(matrix), -np.inf)
        lower[num_paths + 1] = total_batch
        rest = np.append(np.full(num_stages, np.inf), below_s / self._unit_s)
        at_least = np.append(np.zeros(num_stages), load.floor_s.max() / self._unit_s)
        return self._optimize.milp(
            np.append(np.zeros(n + num_stages), 1.0),
            constraints=self._optimize.LinearConstraint(matrix, lower, upper),
            bounds=self._optimize.Bounds(
                np.append(self.low, at_least), np.append(np.minimum(self.high, total_batch), rest)
            ),
            integrality=np.append(np.full(n, float(below_s < np.inf)), np.zeros(num_stages + 1)),
            options={"mip_rel_gap": _CLOSE, "node_limit": _MOST_NODES},
        )

    def _untangled(self, batches: IntArray) -> IntArray:
        """Let two ranks change places where the slower one has more: T does not grow, and ties leave no such pairs."""
        slower = self._slower
        swapped = True
        while swapped:
            swapped = False
            for i, j in zip(*np.nonzero(slower & (batches[None] > batches[:, None])), strict=True):
                pair = np.array([batches[j], batches[i]])
                inside = ((self.low[[i, j]] <= pair) & (pair <= self.high[[i, j]])).all()
                if inside and batches[j] > batches[i]:
                    batches[[i, j]] = pair
                    swapped = True
        return batches

    @property
    def _slower(self) -> BoolArray:
        """Whether rank j takes at least as long as rank i in every segment, at any batch, [i, j]; a twin, if later."""
        layers, num_forward = self._layers, self._layers.num_forward
        parts = []
        for curve, shares in (
            (self.cluster.forward, layers.shares[:, :num_forward]),
            (self.cluster.backward, layers.shares[:, num_forward:]),
        ):
            for line in (curve.fixed_s, curve.per_sample_s, curve.floor_s):
                parts.append(line[:, None] * shares)
        parts += [self.cluster.load.fixed_s[:, None], self.cluster.load.per_sample_s[:, None]]
        facts = np.concatenate(parts, axis=1)
        slower = np.asarray((facts[None] >= facts[:, None]).all(axis=-1), dtype=np.bool_)
        return slower & (~slower.T | np.triu(np.ones_like(slower)))

    def _described(self, batches: IntArray, reached_s: float) -> Split:
        """Return these batches with their step time and what keeps each rank from less."""
        cluster, n = self.cluster, len(batches)
        before_s, backward_s = cluster.forward.at(batches), cluster.backward.at(batches)
        path = self._layers.stages(before_s, backward_s).sum(axis=0)
        on_path_s = path[1 : n + 1] * before_s + path[n + 1 :] * backward_s
        step_s, slowest = step_time(cluster, batches), int(on_path_s.argmax())
        kinds = self._kinds(batches, before_s + backward_s, on_path_s, step_s)
        samples = counted(int(batches[slowest]), "sample")
        waited = f"{cluster.names[slowest]} is waited for most with {samples} ({kinds[slowest]})"
        exposed = (path[0] - on_path_s.sum()) / max(path[0], 1e-300)
        return Split(
            local_batches=tuple(batches.tolist()),
            step_s=step_s,
            bottlenecks=kinds,
            reason=f"{waited}, {exposed:.0%} of the step is communication that no computing hides",
        )

    def _kinds(self, batches: IntArray, compute_s: FloatArray, on_path_s: FloatArray, step_s: float) -> tuple[str, ...]:
        """Return what each rank's time is made of: computing, or collectives where these take longer; or its bound."""
        cluster, layers = self.cluster, self._layers
        collectives_s = np.nansum(layers.gather_s) + np.nansum(layers.reduce_s)
        kinds = np.where(compute_s >= collectives_s, "compute", "communication").astype("U13")
        backward = cluster.backward
        floored = backward.floor_s > backward.fixed_s + backward.per_sample_s * batches
        kinds[(kinds == "compute") & floored] = "floor"
        if cluster.loads:
            kinds[cluster.load.at(batches) >= step_s * (1 - _EXACT)] = "loading"
        kinds[(batches == cluster.max_batch) & (on_path_s == 0)] = "max_batch"
        kinds[(batches == cluster.min_batch) & (on_path_s >= 0.5 * compute_s)] = "min_batch"
        return tuple(kinds.tolist())


def _slope(curve: Curve, batches: FloatArray) -> FloatArray:
    """Return the curves' slopes at these batches."""
    slope: FloatArray = np.where(curve.floor_s > curve.fixed_s + curve.per_sample_s * batches, 0.0, curve.per_sample_s)
    return slope
