"""How long a step takes where ranks meet layer by layer, as under `fully_shard`, and how the layers' times are learned.

A step is a row of K segments of computing, the same on every rank: the optimizer, the layers of forward, the layers of
backward. Legend, rank i, segment k:

    c_ki = share_ki a_i(b_i)    computing in forward, and share_ki P_i(b_i) in backward; shares do not depend on b
    G_k, S_k                    the all-gather that segment k waits for, the reduce-scatter after it; some have none
    s_ki, e_ki                  start and end of the computing
    g_k, r_k                    end of the gather and of the reduce-scatter: one at a time, in the order they are issued

    g_k   = G_k + max( wire free,  max_i s_(k-1)i )    where gathers run one segment ahead,
            G_k + max( wire free,  max_i e_(k-1)i )    where they begin when they are needed: the first of forward and
                                                       the first of backward always do
    s_ki  = max( e_(k-1)i , g_k )
    e_ki  = s_ki + c_ki, and where a reduce-scatter follows, not before the one that was issued `in_flight` before it
    r_k   = S_k + max( wire free,  max_i e_ki );  with in_flight = 0 no rank goes on before it
    T     = when all ranks and the wire are done

T grows with every b_i, and is convex: a sum of maxima of sums. Where a collective begins when all ranks have got to it,
and all wait for its end, ranks stand in line again: the step falls into stages whose times add up. Where every
collective blocks (gloo on a CPU), that is T = sum over k of  max_i c_ki + G_k + S_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cannikin.core.fit import shrunken_gammas, trimmed_mean
from cannikin.core.perf import rescaled_tails
from cannikin.core.saved import LONG_S, table, whole
from cannikin.core.values import BoolArray, FloatArray, LayerTimes, StepWindow
from cannikin.errors import InvalidInputError

_RECENT = 32  # steps whose trimmed mean gives shares and times of collectives


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """The segments of a step, as `Cluster` has them.

    Args:
        shares: share of a rank's forward (the first F columns), and of its backward, in each segment, [n, K]; each of
            the two sums to 1.
        gather_s, reduce_s: G_k and S_k, seconds, [K]; NaN where there is none.
        num_forward, ahead, in_flight: as in `LayerTimes`.
    """

    shares: FloatArray
    gather_s: FloatArray
    reduce_s: FloatArray
    num_forward: int
    ahead: bool
    in_flight: int

    def __post_init__(self) -> None:
        size = self.shares.shape[-1]
        if self.shares.ndim != 2 or self.gather_s.shape != (size,) or self.reduce_s.shape != (size,):
            shapes = f"{self.shares.shape}, {self.gather_s.shape}, {self.reduce_s.shape}"
            raise InvalidInputError(f"shares, gather_s, reduce_s have shapes {shapes}: give [n, K], [K], [K]")
        if not 0 < self.num_forward < size or self.in_flight < 0:
            raise InvalidInputError(
                f"num_forward={self.num_forward} of {size} segments, in_flight={self.in_flight}: forward and backward "
                "have at least one segment each, and in_flight is not negative"
            )
        times = np.concatenate([self.gather_s, self.reduce_s])
        for name, values in (("shares", self.shares), ("gather_s and reduce_s", times[~np.isnan(times)])):
            if not (np.isfinite(values) & (values >= 0)).all():
                raise InvalidInputError(
                    f"{name} has {values[~(values >= 0) | np.isinf(values)][0]}: give finite numbers from 0"
                )

    def of(self, shares: FloatArray) -> Layers:
        """Return the layers of other ranks, with these shares; times of collectives are rescaled to their number."""
        gather_s, reduce_s = (
            rescaled_tails(times, len(self.shares), len(shares)) for times in (self.gather_s, self.reduce_s)
        )
        # One rank alone meets nobody; what is no collective (NaN) stays none.
        gather_s, reduce_s = gather_s + 0.0 * self.gather_s, reduce_s + 0.0 * self.reduce_s
        return replace(self, shares=shares, gather_s=gather_s, reduce_s=reduce_s)

    def step_s(self, before_s: FloatArray, backward_s: FloatArray) -> float:
        """Return T for these a_i and P_i, seconds, [n] each.

        Example:
            >>> crossed = Layers(
            ...     shares=np.array([[0.25, 0.75, 1.0], [0.75, 0.25, 1.0]]), gather_s=np.array([np.nan, 1.0, np.nan]),
            ...     reduce_s=np.array([np.nan, np.nan, 2.0]), num_forward=2, ahead=False, in_flight=0)
            >>> crossed.step_s(np.array([4.0, 4.0]), np.array([8.0, 8.0]))
            17.0
        """
        return float(self.stages(before_s, backward_s)[:, 0].sum())

    def stages(self, before_s: FloatArray, backward_s: FloatArray) -> FloatArray:
        """Return one row per stage, [M, 1 + 2n].

        A row is the stage's longest path: its seconds, then the share of each rank's a_i, then of each rank's P_i, that
        lie on it; what these leave of the seconds are collectives. Over other batches the same path takes what its
        shares say, and T is at least that: rows are tangents from below.
        """
        num_segments = self.shares.shape[1]
        compute_s = self.shares.T * np.where(np.arange(num_segments)[:, None] < self.num_forward, before_s, backward_s)
        walk = _Walk(self.shares, self.num_forward)
        for k in range(num_segments):
            if self._gathers[k] and not self._is_ahead[k]:
                walk.collective(self.gather_s[k])
                walk.end_stage()
            elif self._gathers[k]:
                walk.wait(walk.gathered)
            if k + 1 < num_segments and self._is_ahead[k + 1]:
                walk.gathered = walk.collective(self.gather_s[k + 1])
            walk.compute(compute_s[k])
            if self._reduces[k]:
                walk.reduce(self.reduce_s[k], self.in_flight)
        walk.collective(0.0)  # until all ranks and the wire are done
        walk.end_stage()
        return np.stack(walk.stages)

    @cached_property
    def _gathers(self) -> list[bool]:
        return [not np.isnan(time) for time in self.gather_s]

    @cached_property
    def _reduces(self) -> list[bool]:
        return [not np.isnan(time) for time in self.reduce_s]

    @cached_property
    def _is_ahead(self) -> list[bool]:
        """Whether a gather begins with the segment before it: one of the same pass, with a gather of its own."""
        before = [False, *self._gathers]
        return [
            self.ahead and before[k] and gathers and k != self.num_forward for k, gathers in enumerate(self._gathers)
        ]


class _Moment(NamedTuple):
    """The end of a collective, in seconds since its stage began, and what it had to wait for.

    That is an earlier collective (`after`), or a rank that had computed `position` segments and done `num_waits` waits.
    """

    seconds: float
    after: _Moment | None = None
    rank: int = 0
    position: int = 0
    num_waits: int = 0


class _Walk:
    """One pass over the segments, which remembers who waited for what: the longest paths are read off backwards."""

    def __init__(self, shares: FloatArray, num_forward: int) -> None:
        self.stages: list[FloatArray] = []
        self._shares, self._num_forward = shares, num_forward
        self._position = 0  # segments computed so far
        self._begin()

    def _begin(self) -> None:
        """Begin a stage: all ranks have waited for the wire, and nothing is under way."""
        self._start = self._position
        self._ends = np.zeros(len(self._shares))
        self._wire = self.gathered = _Moment(0.0)  # when it is free, and when the gather that runs ahead is done
        self._reduced: list[_Moment] = []
        self._waits: list[tuple[int, BoolArray, _Moment]] = []  # the position, which ranks, and for what

    def compute(self, seconds: FloatArray) -> None:
        """Let every rank compute its next segment."""
        self._ends += seconds
        self._position += 1

    def collective(self, seconds: float) -> _Moment:
        """Return the end of a collective that begins when all ranks are here and the wire is free."""
        rank = int(self._ends.argmax())
        last_s = float(self._ends[rank])
        if last_s >= self._wire.seconds:
            self._wire = _Moment(last_s + seconds, None, rank, self._position, len(self._waits))
        else:
            self._wire = _Moment(self._wire.seconds + seconds, self._wire)
        return self._wire

    def wait(self, moment: _Moment) -> None:
        """Let no rank go on before this moment."""
        late = self._ends < moment.seconds
        self._waits.append((self._position, late, moment))
        self._ends[late] = moment.seconds

    def reduce(self, seconds: float, in_flight: int) -> None:
        """Issue a reduce-scatter, after an earlier one has ended where as many as may be are under way."""
        if in_flight and len(self._reduced) >= in_flight:
            self.wait(self._reduced[-in_flight])
        self._reduced.append(self.collective(seconds))
        if not in_flight:
            self.end_stage()

    def end_stage(self) -> None:
        """Keep the longest path to here, where all ranks have waited for the wire, and begin a stage."""
        n = len(self._shares)
        row, moment = np.zeros(1 + 2 * n), self._wire
        row[0] = moment.seconds
        while moment.num_waits or moment.position or moment.after is not None:
            if moment.after is not None:
                moment = moment.after
                continue
            rank = moment.rank
            waited = (wait for wait in reversed(self._waits[: moment.num_waits]) if wait[1][rank])
            start, _, earlier = next(waited, (self._start, None, _Moment(0.0)))
            middle = min(max(self._num_forward, start), moment.position)
            row[1 + rank] += self._shares[rank, start:middle].sum()
            row[1 + n + rank] += self._shares[rank, middle : moment.position].sum()
            moment = earlier
        self.stages.append(row)
        self._begin()


class LayerHistory:
    """Shares and times of collectives in recent steps; empty as long as ranks meet in all-reduces of buckets only."""

    def __init__(self, num_ranks: int) -> None:
        self._kind = (1, False, 0)  # num_forward, ahead, in_flight
        self._shares = np.zeros((0, num_ranks, 0))
        self._collectives = np.zeros((0, 2, 0))  # gathers and reduce-scatters

    def observe(self, window: StepWindow) -> None:
        """Take in one window, without the steps marked invalid."""
        if window.layers is None:
            return
        shares, collectives, kind = _measured(window, window.layers)
        if not len(shares):
            return
        same_places = len(self._shares) and collectives.shape == (len(collectives), *self._collectives.shape[1:])
        same_places = same_places and (np.isnan(collectives[-1]) == np.isnan(self._collectives[-1])).all()
        if kind != self._kind or not same_places:  # the module was sharded anew: its layers are others
            self._shares, self._collectives = shares[:0], collectives[:0]
        self._kind = kind
        self._shares = np.concatenate([self._shares, shares])[-_RECENT:]
        self._collectives = np.concatenate([self._collectives, collectives])[-_RECENT:]

    def layers(self) -> Layers | None:
        """Return the layers as they were measured; None where there are none."""
        if not len(self._shares):
            return None
        num_forward, ahead, in_flight = self._kind
        # Ranks run one module: shares that differ by no more than chance does are taken for equal.
        shares = shrunken_gammas(*trimmed_mean(self._shares)).clip(0.0, 1.0)
        gather_s, reduce_s = trimmed_mean(self._collectives)[0]
        return Layers(
            shares=_by_pass(shares, num_forward),
            gather_s=gather_s,
            reduce_s=reduce_s,
            num_forward=num_forward,
            ahead=ahead,
            in_flight=in_flight,
        )

    def with_ranks(self, origins: Sequence[int | None]) -> LayerHistory:
        """Return a history of other ranks, each with the shares of the rank that it was; see `Learner.with_ranks`."""
        other, before = LayerHistory(len(origins)), self.layers()
        known = [was for was in origins if was is not None]
        if before is None or not known or (len(before.shares) == 1 < len(origins)):
            return other
        common = before.shares[known].mean(axis=0)
        shares = np.stack([common if was is None else before.shares[was] for was in origins])
        after = before.of(shares)
        other._kind = self._kind
        other._shares, other._collectives = shares[None], np.stack([after.gather_s, after.reduce_s])[None]
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned, as plain numbers and lists; NaN, which is not JSON, is None."""
        arrays = {"shares": self._shares, "collectives": self._collectives}
        return {
            "kind": [*self._kind],
            "num_segments": self._shares.shape[2],
            **{name: [None if x != x else x for x in array.ravel().tolist()] for name, array in arrays.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        size, ranks = whole("num_segments", state["num_segments"]), self._shares.shape[1]
        rows = len(state["shares"]) // max(ranks * size, 1)
        num_forward, ahead, in_flight = state["kind"]
        self._shares = table("shares", state["shares"], (rows, ranks, size), 0.0, 1.0, gaps=True)
        self._collectives = table("collectives", state["collectives"], (rows, 2, size), 0.0, LONG_S, gaps=True)
        self._kind = whole("num_forward", num_forward, 1, max(size - 1, 1)), bool(ahead), whole("in_flight", in_flight)


def _measured(window: StepWindow, layers: LayerTimes) -> tuple[FloatArray, FloatArray, tuple[int, bool, int]]:
    """Return shares, [S', n, K], and times of collectives, [S', 2, K], of the steps that most ranks have measured.

    The last rank to come to a collective waits for no other: the least time over the ranks is the collective's own.
    """
    usable = window.valid.mean(axis=1) >= 0.5
    valid = window.valid[usable][..., None]
    shares = _by_pass(np.where(valid, layers.compute_s[usable], np.nan), layers.num_forward)
    seen = np.stack([layers.gather_s[usable], layers.reduce_s[usable]], axis=2)
    least = np.where(valid[..., None] & np.isfinite(seen), seen, np.inf).min(axis=1)
    collectives = np.where(np.isfinite(least), np.maximum(least, 0.0), np.nan)
    return shares, collectives, (layers.num_forward, layers.ahead, layers.in_flight)


def _by_pass(values: FloatArray, num_forward: int) -> FloatArray:
    """Return each value over the sum of its pass, forward's or backward's, along the last axis."""
    parts = [np.maximum(part, 1e-12) for part in np.split(values, [num_forward], axis=-1)]
    return np.concatenate([part / part.sum(axis=-1, keepdims=True) for part in parts], axis=-1)
