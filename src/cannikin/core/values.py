"""The values that planners are given and make: jobs, windows of measured steps, splits and plans.

Legend: S steps of a window, n ranks, J gradient buckets, K segments of a sharded module's step. Times are seconds on
the measuring rank's own clock: only durations are ever compared between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cannikin.errors import InvalidInputError
from cannikin.words import counted

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NO_MAX = 2**53
"""Stands for "no upper bound" on a local batch: the largest whole number below which every float is exact."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a total batch is divided over the ranks, or why it cannot be divided.

    Where there is no split, `local_batches` and `bottlenecks` are empty, `step_s` is infinite and `reason` says why.
    """

    local_batches: tuple[int, ...]
    step_s: float
    bottlenecks: tuple[str, ...]
    reason: str

    @property
    def feasible(self) -> bool:
        """Whether there is a split at all."""
        return bool(self.local_batches)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every rank does from step `first_step` on, until the next plan.

    `predicted_step_s` is None while no model is known. `reason` is one sentence for people.
    """

    first_step: int
    total_batch: int
    local_batches: tuple[int, ...]
    predicted_step_s: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if sum(self.local_batches) != self.total_batch:
            raise InvalidInputError(
                f"local_batches={self.local_batches} sum to {sum(self.local_batches)}, not {self.total_batch}"
            )


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a planner may choose from: the ranks, their bounds and the range of total batches.

    Args:
        num_ranks: n.
        batch_size: the total batch at the start, B0.
        max_batch_size: the largest total batch; `None` keeps the total at `batch_size`.
        min_local, max_local: bounds on each local batch, one pair for all ranks or one per rank.
        num_samples: length of an epoch in samples, for planners that plan once per epoch; `None` where unknown.
        drop_last: whether a last batch shorter than the total is left out.
    """

    num_ranks: int
    batch_size: int
    max_batch_size: int | None = None
    min_local: int | tuple[int, ...] = 1
    max_local: int | tuple[int, ...] = NO_MAX
    num_samples: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InvalidInputError(f"num_ranks={self.num_ranks}: a job needs at least 1 rank")
        lo, hi = self.bounds
        if (lo < 1).any() or (hi < lo).any():
            raise InvalidInputError(
                f"min_local={self.min_local}, max_local={self.max_local}: need 1 <= min_local <= max_local"
            )
        lowest, highest = sum(lo.tolist()), sum(hi.tolist())  # as Python's: 1,024 x NO_MAX overflows numpy's
        if self.batch_size != int(self.batch_size):
            raise InvalidInputError(f"batch_size={self.batch_size} must be a whole number of samples")
        if not lowest <= self.batch_size <= highest:
            raise InvalidInputError(
                f"batch_size={self.batch_size} is outside what the {counted(self.num_ranks, 'rank')} can hold, "
                f"{lowest} to {highest}: change batch_size or the local bounds"
            )
        if self.num_samples is not None and self.num_samples < 0:
            raise InvalidInputError(f"num_samples={self.num_samples}: must not be negative; None where unknown")
        if self.max_batch_size is not None and self.max_batch_size < self.batch_size:
            raise InvalidInputError(
                f"max_batch_size={self.max_batch_size} is below batch_size={self.batch_size}: it is what the total may "
                "grow to; raise it, or leave it out for a total that stays"
            )

    @property
    def bounds(self) -> tuple[IntArray, IntArray]:
        """Lower and upper bound of each rank's local batch."""
        lo, hi = (np.asarray(bound, dtype=np.int64) for bound in (self.min_local, self.max_local))
        for bound in (lo, hi):
            if bound.shape not in ((), (self.num_ranks,)):
                raise InvalidInputError(
                    f"{bound.size} local bounds for {self.num_ranks} ranks: give one, or one per rank"
                )
        return np.broadcast_to(lo, self.num_ranks).copy(), np.broadcast_to(hi, self.num_ranks).copy()

    @property
    def pass_steps(self) -> int | None:
        """Batches of one pass over the data at the initial total; `None` where its length is unknown."""
        if self.num_samples is None:
            return None
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    def limited(self, max_batch: IntArray, total_batch: int) -> Job:
        """Return this job with upper bounds of at most `max_batch`, [n], that still hold the total batch in force.

        No bound falls below `min_local`. Caps that together cannot hold `total_batch` (or the initial one) are raised
        by the same number of samples on every rank, as far as the job's own bounds allow: the run goes on as it is.

        Example:
            >>> Job(num_ranks=2, batch_size=64, max_local=99).limited(np.array([40, 200]), 64).max_local
            (40, 99)
            >>> Job(num_ranks=2, batch_size=64).limited(np.array([16, 8]), 64).max_local
            (36, 28)
        """
        low, high = self.bounds
        if (max_batch >= high).all():
            return self
        held = min(max(int(total_batch), self.batch_size), sum(high.tolist()))
        caps = np.clip(max_batch, low, high)
        while (missing := held - sum(caps.tolist())) > 0:
            room = caps < high
            caps[room] = np.minimum(caps[room] + -(-missing // int(room.sum())), high[room])
        return replace(self, max_local=tuple(caps.tolist()))

    def with_ranks(self, origins: Sequence[int | None]) -> Job:
        """Return this job for other ranks, each with the bounds of the rank that it was, the rest as it is.

        Args:
            origins: for each of the new ranks, the rank here that it was; None for one that joins. Where bounds differ
                by rank, one that joins has the lowest ones.

        Example:
            >>> Job(num_ranks=3, batch_size=64, max_local=(32, 16, 48)).with_ranks([2, 0, None]).max_local
            (48, 32, 16)
        """
        bounds: dict[str, int | tuple[int, ...]] = {}
        for name, bound in (("min_local", self.min_local), ("max_local", self.max_local)):
            if isinstance(bound, tuple):
                bound = tuple(min(bound) if was is None else bound[was] for was in origins)
            bounds[name] = bound
        return replace(self, num_ranks=len(origins), **bounds)  # type: ignore[arg-type]

    @property
    def largest_total(self) -> int:
        """The largest total batch allowed by `max_batch_size` and the upper bounds together."""
        _, hi = self.bounds
        return int(min(self.max_batch_size or self.batch_size, sum(hi.tolist())))


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTimes:
    """What was measured in the steps of a window where ranks meet layer by layer, as under `fully_shard`.

    A step is a row of K segments of computing, the same on every rank, cut where a collective is needed: segment 0 is
    the optimizer, the start of backward begins a segment, and each all-gather does. See `layers` for what follows.

    Args:
        compute_s: each segment's own computing, without any waiting, [S, n, K].
        gather_s: the all-gather that segment k waits for, as long as it took on this rank, waiting for slower ranks
            included, [S, n, K]; NaN on every rank where the segment needs none.
        reduce_s: the same of the reduce-scatter after segment k.
        num_forward: F; so many segments come before backward.
        ahead: whether a gather begins while the segment before it computes, as on a GPU, or only when it is needed.
        in_flight: reduce-scatters that may run beside the computing; 0 where each must end first.
    """

    compute_s: FloatArray
    gather_s: FloatArray
    reduce_s: FloatArray
    num_forward: int
    ahead: bool
    in_flight: int

    def __post_init__(self) -> None:
        shape = self.compute_s.shape
        if len(shape) != 3 or self.gather_s.shape != shape or self.reduce_s.shape != shape:
            shapes = f"{shape}, {self.gather_s.shape}, {self.reduce_s.shape}"
            raise InvalidInputError(f"compute_s, gather_s, reduce_s have shapes {shapes}: give [S, n, K] of each")
        if not 0 < self.num_forward < shape[-1] or self.in_flight < 0:
            raise InvalidInputError(
                f"num_forward={self.num_forward}, in_flight={self.in_flight}: {shape[-1]} segments need at least one "
                "before backward and one in it, and in_flight is not negative"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepWindow:
    """What was measured in S consecutive steps, on all ranks.

    Args:
        first_step: number of the first of these steps.
        local_batches: b_i, samples, [S, n].
        before_s: a_i, optimizer step and forward (from the last all-reduce's end to the start of backward), [S, n].
        ready_s: moment each bucket was ready, after this rank's start of backward, [S, n, J]; the last is P_i.
        done_s: moment each bucket's all-reduce was done, on the same clock, [S, n, J].
        local_sqnorm: |g_i|^2, [S, n]; NaN where it was not taken.
        global_sqnorm: |g|^2, [S]; NaN where it was not taken.
        valid: whether this rank's measurement of this step counts, [S, n]; impossible times never do.
        load_s: how long this rank waited for its data before `before_s` begins, [S, n]. This is data that is loaded
            while the rank computes; loading that holds up the computation belongs to `before_s`.
        previous_dot: g_t . g_(t-1), this step's gradient times the one of the step before, [S]; NaN where it was not
            taken. Only needed where one rank trains alone.
        max_batch: the largest local batch that each rank's memory allows, as far as is known, [n].
        accumulated: batches whose gradients had piled up since the optimizer's last step, this one included, [S]. Norms
            are of a mean over so many times `local_batches`. Times are valid only in the last step of such a group.
        layers: times by segment, where ranks meet layer by layer. `before_s` and `ready_s` are then sums of its
            `compute_s`, forward's and backward's, and `done_s` counts from `before_s` after the step's start: all
            waiting of a step lies between `ready_s` and `done_s`.

    The last six may be left out: then every measurement counts, no rank waited for data, no product was taken, memory
    has no limit, every batch has its own step of the optimizer, and ranks meet in all-reduces of buckets only.
    """

    first_step: int
    local_batches: IntArray
    before_s: FloatArray
    ready_s: FloatArray
    done_s: FloatArray
    local_sqnorm: FloatArray
    global_sqnorm: FloatArray
    valid: BoolArray = field(default_factory=lambda: np.ones((0, 0), dtype=np.bool_))
    load_s: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    previous_dot: FloatArray = field(default_factory=lambda: np.zeros(0))
    max_batch: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    accumulated: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    layers: LayerTimes | None = None

    def __post_init__(self) -> None:
        steps, ranks = self.local_batches.shape
        if self.layers is not None and self.layers.compute_s.shape[:2] != (steps, ranks):
            given = self.layers.compute_s.shape[:2]
            raise InvalidInputError(f"layers are of {given} steps and ranks, the window of {(steps, ranks)}")
        wanted: tuple[tuple[str, tuple[int, ...], float | None], ...] = (
            ("before_s", (steps, ranks), None),
            ("ready_s", (steps, ranks, self.num_buckets), None),
            ("done_s", (steps, ranks, self.num_buckets), None),
            ("local_sqnorm", (steps, ranks), None),
            ("global_sqnorm", (steps,), None),
            ("valid", (steps, ranks), True),
            ("load_s", (steps, ranks), 0.0),
            ("previous_dot", (steps,), np.nan),
            ("max_batch", (ranks,), NO_MAX),
            ("accumulated", (steps,), 1),
        )
        for name, shape, left_out in wanted:
            if left_out is not None and getattr(self, name).size == 0:
                object.__setattr__(self, name, np.full(shape, left_out))
            given = getattr(self, name).shape
            if given != shape:
                raise InvalidInputError(f"{name} has shape {given}, the window's other arrays ask for {shape}")
        object.__setattr__(self, "valid", self.valid & self._possible())

    def _possible(self) -> BoolArray:
        """Return where the times can be times: a measurement gone wrong must not outlive its step."""
        finite = np.isfinite(self.before_s) & np.isfinite(self.load_s)
        finite &= np.isfinite(self.ready_s).all(axis=-1) & np.isfinite(self.done_s).all(axis=-1)
        with np.errstate(invalid="ignore"):
            positive = (self.before_s >= 0) & (self.load_s >= 0)
            positive &= (self.ready_s[..., -1] > 0) & (self.done_s.max(axis=-1) > 0)
        possible: BoolArray = finite & positive & (self.local_batches >= 1)
        return possible

    @property
    def num_steps(self) -> int:
        """S."""
        return int(self.local_batches.shape[0])

    @property
    def num_ranks(self) -> int:
        """n."""
        return int(self.local_batches.shape[1])

    @property
    def num_buckets(self) -> int:
        """J."""
        return int(self.ready_s.shape[-1])

    @property
    def step_s(self) -> FloatArray:
        """Each rank's own view of each step's duration, a_i to the last all-reduce, [S, n]."""
        last_done_s: FloatArray = self.done_s.max(axis=-1)
        return self.before_s + last_done_s

    @property
    def interval_s(self) -> FloatArray:
        """Each rank's own view of the time from one step to the next: its step and its wait for data, [S, n]."""
        return self.step_s + self.load_s

    @property
    def overflowed(self) -> BoolArray:
        """Steps in which some rank's gradient, or the sum of all, was not finite, [S]."""
        steps: BoolArray = np.isinf(self.local_sqnorm).any(axis=1) | np.isinf(self.global_sqnorm)
        return steps

    @property
    def num_nonfinite(self) -> int:
        """Number of steps whose gradient was not finite, whatever the policy makes of them."""
        return int(self.overflowed.sum())
