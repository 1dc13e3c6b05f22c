"""The paper's Algorithm 1 (section 4.2) as written: the `paper` planner's method and the solver benchmark's baseline.

Legend, rank i of n: a = s + q b, P = m + k b, gamma, T_o and T_u as in `perf`. A rank is compute-bound where
(1 - gamma) P >= T_o and communication-bound elsewhere. For a guessed overlap state of every rank it solves n + 1
linear equations in b_1..b_n and T' = t_compute' = syncStart' + T_o,

    s_i + m_i + (q_i + k_i) b_i = T'                         on compute-bound ranks
    s_i + gamma m_i + T_o + (q_i + gamma k_i) b_i = T'       on communication-bound ranks
    b_1 + ... + b_n = B

and OptPerf = T' + T_u. Check 1 guesses "all compute-bound", Check 2 "all communication-bound". Ranks on which both
solutions agree keep that state; the others, the outliers, are ranked by fixed time s + m, and a binary search looks for
the boundary below which they are compute-bound. Where it finds a state that does not contradict itself and no batch is
negative, the result is the optimum in reals. Where it falls short (docs/mathematics.md has more), `failure` and
`reason` of the result say so:

- "Bound alike in both checks, so bound alike at the optimum" is false, and fixed time is the wrong order; the right one
  is the time at which a rank passes from one state to the other, over all ranks. The search may thus end in a state
  that contradicts itself; the loop as printed, which runs until there is none, would then not end.
- Nothing bounds the batches: they may be negative, or beyond what a rank can hold.
- Rounding (section 4.5) need not keep the sum: `round_batches` says by how much.
- It has one gamma, two buckets and no floors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from cannikin.core.perf import Cluster, step_time
from cannikin.core.values import BoolArray, FloatArray, IntArray
from cannikin.errors import InvalidInputError

Failure = Literal["", "inexpressible", "singular", "overlap", "search", "negative_batch", "bounds"]

# A rank this close to its crossing, relative to T_o, is in both states: both of its lines give the same time there.
_TIE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Algorithm1Result:
    """What Algorithm 1 returns, and whether it may be believed.

    Args:
        local_batches: b_i in reals, possibly negative; empty where no system could be solved.
        predicted_s: OptPerf as the algorithm states it, T' + T_u.
        step_s: what the model says these batches take; more than `predicted_s` where an overlap state is wrong.
        num_solves: linear systems of n + 1 unknowns solved.
        failure: "" where this is the optimum in reals; else "inexpressible" (the cluster has floors or buckets beyond
            the paper's model), "singular", "overlap" (both checks agreed on a rank's state, which the result
            contradicts), "search" (no boundary in this order suits the outliers), "negative_batch" or "bounds".
        reason: one sentence for people.
    """

    local_batches: tuple[float, ...]
    predicted_s: float
    step_s: float
    num_solves: int
    failure: Failure
    reason: str


def algorithm1(cluster: Cluster, total_batch: int, *, order: FloatArray | None = None) -> Algorithm1Result:
    """Split a total batch in reals by the paper's Algorithm 1, and say why where the result is not valid.

    Args:
        cluster: two-point form (`Cluster.two_point`) without floors.
        total_batch: B, samples, at least 1.
        order: what the search sorts all ranks by, [n]; where left out, the outliers by fixed time, as in the paper.

    Example:
        Both checks find the second rank communication-bound, and at the optimum it is not (optimum 47.05 s):

        >>> from cannikin.core.perf import Curve
        >>> forward = Curve(fixed_s=[5, 6, 1], per_sample_s=[1, 0, 0])
        >>> backward = Curve(fixed_s=[0, 0, 0], per_sample_s=[1, 4, 2])
        >>> trio = Cluster.two_point(forward=forward, backward=backward, gamma=0.2, overlapped_s=28, last_s=0)
        >>> result = algorithm1(trio, 45)
        >>> result.failure, round(result.predicted_s, 2), round(result.step_s, 2)
        ('overlap', 44.71, 59.55)
    """
    if not total_batch >= 1:
        raise InvalidInputError(f"total_batch={total_batch}: need at least 1 sample")
    unsolved = Algorithm1Result(
        local_batches=(), predicted_s=np.inf, step_s=np.inf, num_solves=0, failure="inexpressible", reason=""
    )
    if problem := _beyond_the_model(cluster):
        return replace(unsolved, reason=problem)
    system = _System(cluster, total_batch)
    try:
        failure, reason = _search(system, order)
    except np.linalg.LinAlgError:
        reason = "the linear system is singular: with this overlap state two ranks' times do not depend on their batch"
        return replace(unsolved, num_solves=system.num_solves, failure="singular", reason=reason)
    if not failure:
        failure, problem = _check_batches(cluster, system.batches)
        reason = problem or reason
    return Algorithm1Result(
        local_batches=tuple(system.batches.tolist()),
        predicted_s=system.ready_s + float(cluster.tails_s[-1]),
        step_s=step_time(cluster, system.batches),
        num_solves=system.num_solves,
        failure=failure,
        reason=reason,
    )


def round_batches(local_batches: npt.ArrayLike, total_batch: int) -> tuple[tuple[int, ...], str]:
    """Round each local batch to the nearest whole number (paper, section 4.5), and say what that does to the sum.

    Example:
        >>> round_batches([2.5, 1.25, 1.25], 5)  # a half goes to the even number
        ((2, 1, 1), 'rounded batches sum to 4, not 5')
    """
    whole = tuple(np.rint(np.asarray(local_batches, dtype=np.float64)).astype(np.int64).tolist())
    verdict = "as asked" if sum(whole) == total_batch else f"not {total_batch}"
    return whole, f"rounded batches sum to {sum(whole)}, {verdict}"


class _System:
    """The n + 1 equations for one overlap state after another, with the last solution."""

    def __init__(self, cluster: Cluster, total_batch: int) -> None:
        n, forward, backward = cluster.num_ranks, cluster.forward, cluster.backward
        self.cluster = cluster
        self.num_solves = 0
        # One bucket is the two-point form in which nothing overlaps.
        self.gamma = float(cluster.gammas[0, 0])
        self.overlapped_s = float(cluster.tails_s[0] - cluster.tails_s[-1])
        self.fixed_s = forward.fixed_s + backward.fixed_s
        self._compute_slope = forward.per_sample_s + backward.per_sample_s
        self._communication_fixed_s = forward.fixed_s + self.gamma * backward.fixed_s + self.overlapped_s
        self._communication_slope = forward.per_sample_s + self.gamma * backward.per_sample_s
        # In LAPACK's order, column by column: numpy's copy into its workspace is then quick.
        matrix = np.zeros((n + 1, n + 1), order="F")
        matrix[:n, n] = -1.0
        matrix[n, :n] = 1.0
        self._matrix = matrix
        self._diagonal = matrix.reshape(-1, order="F")[: n * (n + 2) : n + 2]
        self._right = np.full(n + 1, float(total_batch))
        self.batches: FloatArray = np.empty(n)
        self.ready_s = np.nan

    def solve(self, compute_bound: BoolArray) -> FloatArray:
        """Solve for this state, and return by how much each rank's backward outlasts T_o, (1 - gamma) P_i - T_o."""
        n = len(compute_bound)
        self._diagonal[:] = np.where(compute_bound, self._compute_slope, self._communication_slope)
        np.negative(np.where(compute_bound, self.fixed_s, self._communication_fixed_s), out=self._right[:n])
        self.num_solves += 1
        solution = np.linalg.solve(self._matrix, self._right)
        if not np.isfinite(solution).all():
            raise np.linalg.LinAlgError
        self.batches, self.ready_s = solution[:n], float(solution[n])
        backward = self.cluster.backward
        margin_s: FloatArray = backward.fixed_s + backward.per_sample_s * self.batches
        margin_s *= 1 - self.gamma
        margin_s -= self.overlapped_s
        return margin_s


def _search(system: _System, order: FloatArray | None) -> tuple[Failure, str]:
    """Do checks 1 and 2, then find the boundary among the outliers; the last solution stays in `system`."""
    n = system.cluster.num_ranks
    first = system.solve(np.ones(n, dtype=np.bool_)) >= 0
    if first.all():
        return "", "every rank is compute-bound"
    second = system.solve(np.zeros(n, dtype=np.bool_)) >= 0
    if not second.any():
        return "", "every rank is communication-bound"
    if order is not None:
        ranked, always = np.argsort(order, kind="stable"), np.zeros(n, dtype=np.bool_)
    else:
        outliers = np.flatnonzero(first != second)
        ranked, always = outliers[np.argsort(system.fixed_s[outliers], kind="stable")], first & second
    return _find_boundary(system, ranked, always)


def _find_boundary(system: _System, ranked: IntArray, always: BoolArray) -> tuple[Failure, str]:
    """Halve the range of boundaries until no rank contradicts its state.

    The paper does not say how `beg` and `end` move. A compute-bound rank that ought to be communication-bound asks for
    a lower boundary, the opposite for a higher one; where both occur no boundary is right, and the lower one is tried.
    """
    tie_s = _TIE * system.overlapped_s
    begin, end = 0, len(ranked)
    while begin <= end:
        boundary = (begin + end) // 2
        compute_bound = always.copy()
        compute_bound[ranked[:boundary]] = True
        margin_s = system.solve(compute_bound)
        wrong = np.where(compute_bound, margin_s < -tie_s, margin_s > tie_s)
        if not wrong.any():
            return "", f"{int(compute_bound.sum())} of {len(always)} ranks are compute-bound"
        if (wrong & compute_bound).any():
            end = boundary - 1
        else:
            begin = boundary + 1
    wrong[ranked] &= ~np.delete(wrong, ranked).any()  # a rank outside the search is named first: no boundary helps it
    rank = int(wrong.argmax())
    failure: Failure = "search" if rank in ranked else "overlap"
    was, ought = ("compute", "communication") if compute_bound[rank] else ("communication", "compute")
    return failure, (
        f"{system.cluster.names[rank]} is taken for {was}-bound and comes out {ought}-bound "
        f"with {system.batches[rank]:.2f} samples: "
        + ("no boundary in this order is right" if failure == "search" else "both checks agreed on the wrong state")
    )


def _check_batches(cluster: Cluster, batches: FloatArray) -> tuple[Failure, str]:
    """Refuse batches that no rank can have; the tolerance is the rounding of the linear solve."""
    rank = int(batches.argmin())
    slack = _TIE * np.abs(batches).max()
    if batches[rank] < -slack:
        return "negative_batch", f"{cluster.names[rank]} would get {batches[rank]:.2f} samples"
    outside = (batches < cluster.min_batch - slack) | (batches > cluster.max_batch + slack)
    if outside.any():
        rank = int(outside.argmax())
        low, high = int(cluster.min_batch[rank]), int(cluster.max_batch[rank])
        return "bounds", f"{cluster.names[rank]} would get {batches[rank]:.2f} samples, outside {low} to {high}"
    return "", ""


def _beyond_the_model(cluster: Cluster) -> str:
    """Say why the paper's two-point model cannot express this cluster; return nothing where it can."""
    num_buckets = len(cluster.tails_s)
    if num_buckets > 2:
        return f"{num_buckets} buckets: the paper's model has the first and the last one only"
    if np.ptp(cluster.gammas[:, 0]) > 0:
        return f"gamma differs between ranks, {cluster.gammas[:, 0].tolist()}: the paper's model has one for all"
    for name, curve in (("forward", cluster.forward), ("backward", cluster.backward)):
        floored = curve.floor_s > curve.fixed_s
        if floored.any():
            return f"{cluster.names[int(floored.argmax())]} has a floor on {name}: the paper's model is linear"
    if cluster.loads:
        return "some rank has a loading time: the paper's model has none"
    return ""
