"""A run as arrays, and what these come to: shares of time, bars of a step, points to draw.

Legend: W windows, n ranks (the most there ever were), A activities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from cannikin.core.perf import hardware_use
from cannikin.core.values import BoolArray, FloatArray, IntArray
from cannikin.runlog import EventRecord, Header, PlanRecord, Predictions, RunLogReader, Timeline
from cannikin.runlog.times import NS_PER_MS, activity, longest_ns, rank_moments

ByRank = npt.NDArray[np.float32]  # a long log of many ranks has most of its numbers in these
_MOST_STRETCH_WINDOWS = 50

T = TypeVar("T")


# What to keep of a stream of unknown length.


class Ends(Generic[T]):
    """The first and the last `size` of a stream.

    Example:
        >>> ends = Ends[int](2)
        >>> for number in range(9):
        ...     ends.add(number)
        >>> ends.kept, ends.num_seen
        ([0, 1, 7, 8], 9)
    """

    def __init__(self, size: int) -> None:
        self._size, self.num_seen = size, 0
        self.kept: list[T] = []

    def add(self, value: T) -> None:
        """Take one more."""
        self.num_seen += 1
        self.kept.append(value)
        del self.kept[self._size : -self._size]  # the one in the middle, once there are too many


class Spread(Generic[T]):
    """At most `size` of a stream, evenly spaced, the first and the last among them.

    Example:
        >>> spread = Spread[int](4)
        >>> for number in range(100):
        ...     spread.add(number)
        >>> spread.kept
        (0, 64, 99)
    """

    def __init__(self, size: int) -> None:
        self._size, self._stride, self._num_seen = size, 1, 0
        self._kept: list[T] = []
        self._last: list[T] = []

    def add(self, value: T) -> None:
        """Take one more."""
        self._last = [value]
        if self._num_seen % self._stride == 0:
            self._kept.append(value)
            if len(self._kept) == self._size:
                self._kept, self._stride = self._kept[::2], self._stride * 2
        self._num_seen += 1

    @property
    def kept(self) -> tuple[T, ...]:
        """Those kept, in order."""
        return tuple(self._kept) if self._kept[-1:] == self._last else (*self._kept, *self._last)


# One run.


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """The windows that count, oldest first, [W]; NaN where not known.

    As in `WindowRecord`, but `elapsed_ms` goes on over resumes, `predicted_ms` and `even_speed` are what the last plan
    before the window said of the window's split, and the noise scale and its limits are here. By rank there are the
    local batches, [W, n], and what each rank did with the time of a step, [W, n, A].
    """

    first_step: FloatArray
    num_steps: FloatArray
    total_batch: FloatArray
    step_ms: FloatArray
    elapsed_ms: FloatArray
    progress: FloatArray
    lr_factor: FloatArray
    noise_scale: FloatArray
    noise_low: FloatArray
    noise_high: FloatArray
    predicted_ms: FloatArray
    even_speed: FloatArray
    local_batches: ByRank
    times_ms: ByRank

    def __len__(self) -> int:
        return len(self.first_step)

    def stairs(self, rows: IntArray) -> FloatArray:
        """Return the first steps of these windows and the end of the last window of all: where lines turn."""
        return np.append(self.first_step[rows], self.first_step[-1] + self.num_steps[-1])


class Metric(NamedTuple):
    """What the user evaluated, over time: [E] each."""

    elapsed_ms: FloatArray
    value: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class RunArrays:
    """One run, of any length, in little memory."""

    name: str  # for people
    headers: tuple[Header, ...]  # the first, and one for each resume
    windows: Windows
    num_redone: int  # windows left out, since a resume from an older state did their steps again
    metrics: dict[str, Metric]
    targets: dict[str, float]  # values that metrics are to reach, where the run logged them as `target_NAME`
    in_training_time: bool  # whether metrics are over the time spent training, as the run logged it in `train_s`
    plans: Ends[PlanRecord]  # those that changed the split
    predictions: Predictions
    last_plan: PlanRecord | None
    compared: tuple[PlanRecord, ...]  # plans that compared total batches, spread evenly over the run
    events: Ends[EventRecord]  # all but evaluations and epochs
    early: Timeline | None  # a step of the first split
    late: Timeline | None  # a step of the last split
    last_step: int  # the highest that the log mentions since the last header
    ended: EventRecord | None  # the event that says so, where the run ended, as it should or early
    reader: RunLogReader  # which knows what it left out

    @property
    def header(self) -> Header:
        """The last header: the run as it is now."""
        return self.headers[-1]

    @property
    def duration_ms(self) -> float:
        """Time that the log spans, pauses before resumes left out; NaN where it tells of none."""
        times = [self.windows.elapsed_ms, *(metric.elapsed_ms for metric in self.metrics.values())]
        return float(np.fmax.reduce(np.concatenate([each[-1:] for each in times]), initial=np.nan))


def latest(steps: FloatArray) -> BoolArray:
    """Return which entries stand, where a step that comes again takes the place of what was there from that step on.

    Example:
        >>> latest(np.array([0.0, 10.0, 20.0, 10.0, 20.0])).tolist()
        [True, False, False, True, True]
    """
    stands = np.ones(len(steps), dtype=np.bool_)
    if len(steps) > 1:
        stands[:-1] = steps[:-1] < np.minimum.accumulate(steps[::-1])[::-1][1:]
    return stands


# What they come to.


def thin(values: FloatArray, most_bins: int) -> IntArray:
    """Return the indices of the rows to draw: of each bin of rows the first, the last, the lowest and the highest.

    Nothing is lost where there are few rows; where there are many, a line through the kept ones covers the same
    pixels, peaks included. `values` is [W] or [W, k]; of several columns each keeps its own peaks.

    Example:
        >>> thin(np.array([0.0, 9.0, 1.0, 2.0, 3.0, 4.0, -5.0, 6.0]), most_bins=1).tolist()
        [0, 1, 6, 7]
    """
    num = len(values)
    if num <= 4 * most_bins:
        return np.arange(num)
    table = values.reshape(num, -1)
    kept = [np.array([0, num - 1])]
    edges = np.linspace(0, num, most_bins + 1).astype(np.int64)
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = table[start:end]
        low, high = np.where(np.isfinite(part), part, np.inf), np.where(np.isfinite(part), part, -np.inf)
        kept.append(start + np.array([0, end - start - 1, *low.argmin(axis=0), *high.argmax(axis=0)]))
    return np.unique(np.concatenate(kept))


def column_means(windows: Windows, values: FloatArray | ByRank, most_columns: int) -> tuple[FloatArray, FloatArray]:
    """Return the edges, [C + 1], of equal stretches of steps, and the means of `values`, [W, n], over each, [C, n].

    A stretch that lies inside a window has that window's values; NaN where no window of it knows any.
    """
    ends = windows.first_step + windows.num_steps
    edges = np.linspace(windows.first_step[0], ends[-1], min(most_columns, len(windows)) + 1)
    last = len(windows) - 1
    starts = np.clip(np.searchsorted(ends, edges[:-1], side="right"), 0, last)
    stops = np.maximum(np.searchsorted(windows.first_step, edges[1:], side="left"), starts + 1)
    means = np.full((len(starts), values.shape[1]), np.nan)
    for column, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        part = np.asarray(values[start:stop], dtype=np.float64)
        known = np.isfinite(part).sum(axis=0)
        np.divide(np.nan_to_num(part).sum(axis=0), known, out=means[column], where=known > 0)
    return edges, means


def ranks_to_draw(num_ranks: int, most: int) -> list[int]:
    """Return the ranks to draw one by one: all, or `most` of them evenly spaced, the first and the last among them.

    Example:
        >>> ranks_to_draw(3, 64), ranks_to_draw(9, 3)
        ([0, 1, 2], [0, 4, 8])
    """
    ranks = np.unique(np.linspace(0, num_ranks - 1, min(num_ranks, most)).round())
    return [int(rank) for rank in ranks]


def mean_shares(times_ms: FloatArray | ByRank, num_steps: FloatArray) -> FloatArray:
    """Return each activity's share of each rank's time over windows of so many steps, [n, A]; NaN for a silent rank."""
    weights = np.where(np.isfinite(times_ms).all(axis=-1), num_steps[:, None], 0.0)
    spent = (np.nan_to_num(times_ms) * weights[..., None]).sum(axis=0)
    whole = spent.sum(axis=-1, keepdims=True)
    shares: FloatArray = np.divide(spent, whole, out=np.full_like(spent, np.nan), where=whole > 0)
    return shares


def window_uses(local_batches: FloatArray | ByRank, times_ms: FloatArray | ByRank) -> FloatArray:
    """Return how much of what the hardware can do windows used, 0 to 1, [W]; NaN where that is not known.

    Args:
        local_batches: [W, n], NaN where there was no such rank yet, or no longer.
        times_ms: what each rank did with the time of a step, [W, n, A].
    """
    compute_ms = activity(times_ms, "optimizer and forward", "backward")
    step_ms = compute_ms + activity(times_ms, "communication", "waiting", "loading")
    return hardware_use(np.nan_to_num(local_batches), compute_ms, step_ms)


def early_rows(windows: Windows) -> IntArray:
    """Return the first windows, as long as they have the first split, and not too many of them."""
    return _alike(windows, np.arange(len(windows)))


def late_rows(windows: Windows) -> IntArray:
    """Return the last windows, as far back as they have the last split, and not too many of them."""
    return _alike(windows, np.arange(len(windows))[::-1])[::-1]


def _alike(windows: Windows, rows: IntArray) -> IntArray:
    """Return the first of these rows, as long as they have the split of the very first."""
    rows = rows[:_MOST_STRETCH_WINDOWS]
    split = np.nan_to_num(windows.local_batches[rows])
    return rows[np.logical_and.accumulate((split == split[:1]).all(axis=1))]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretch:
    """A stretch of windows with one split: medians over them, and shares of time.

    `spread` is by how much of the step the rank that waits most waits longer than the one that waits least, and
    `slowest` the latter: the rank that the others wait for. None where that was not measured. `use` is how much of what
    the hardware can do it used, and `even_speed` how fast DDP's even split would be against this one, by the last plan
    before its last window; NaN where not known.
    """

    local_batches: tuple[int, ...]
    step_ms: float
    samples_per_s: float
    shares: FloatArray
    slowest: int | None
    spread: float
    use: float
    even_speed: float

    @property
    def total_batch(self) -> int:
        """The total batch B."""
        return sum(self.local_batches)


def late_stretch(windows: Windows) -> Stretch | None:
    """Return the last windows, as far back as they have the last split; None where there is no window."""
    return stretch(windows, late_rows(windows)) if len(windows) else None


def stretch(windows: Windows, rows: IntArray) -> Stretch:
    """Return what these windows, at least one, have in common."""
    split = windows.local_batches[rows[-1]]
    local_batches = tuple(int(batch) for batch in split[np.isfinite(split)])
    step_ms = _median(windows.step_ms[rows])
    shares = mean_shares(windows.times_ms[rows], windows.num_steps[rows])
    wait = activity(shares, "waiting")
    known = np.isfinite(wait).any()
    return Stretch(
        local_batches=local_batches,
        step_ms=step_ms,
        samples_per_s=sum(local_batches) / step_ms * 1e3 if step_ms > 0 else float("nan"),
        shares=shares,
        slowest=int(np.nanargmin(wait)) if known else None,
        spread=float(np.nanmax(wait) - np.nanmin(wait)) if known else float("nan"),
        use=_median(window_uses(windows.local_batches[rows], windows.times_ms[rows])),
        even_speed=float(windows.even_speed[rows[-1]]),
    )


class Target(NamedTuple):
    """A value of a metric that runs are to reach."""

    metric: str
    value: float


class Reached(NamedTuple):
    """When each run first reached the target; None for one that did not, or at a time that is not known."""

    target: Target
    times_ms: tuple[float | None, ...]


def reached(runs: list[RunArrays], target: Target) -> Reached | None:
    """Return when each run reached the target; None where no run has the metric.

    More is better where the runs begin below the target.
    """
    known = [run.metrics[target.metric] for run in runs if target.metric in run.metrics]
    if not known:
        return None
    sign = 1 if float(np.median([metric.value[0] for metric in known])) <= target.value else -1
    times_ms: list[float | None] = []
    for run in runs:
        elapsed_ms, value = run.metrics.get(target.metric, Metric(np.zeros(0), np.zeros(0)))
        there = elapsed_ms[(sign * value >= sign * target.value) & np.isfinite(elapsed_ms)]
        times_ms.append(float(there[0]) if len(there) else None)
    return Reached(target=target, times_ms=tuple(times_ms))


def _median(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


# One step as bars: what each rank computes, and each gradient bucket's all-reduce (the paper's overlap figures).


class Bar(NamedTuple):
    """Something that a rank did from `start_ms` for `length_ms`; computing and communication are lanes of their own."""

    rank: int
    lane: str
    kind: str
    bucket: int | None
    start_ms: float
    length_ms: float


def timeline_bars(line: Timeline) -> list[Bar]:
    """Return the bars of a timeline without gaps in its numbers, 0 ms where the first rank begins.

    An all-reduce begins when the last rank has its bucket ready and the rank is done with the bucket before; what lies
    between a rank's own readiness and that moment is waiting. In a lane no bar covers another, unless all-reduces
    finished in another order than they began.

    Example:
        >>> line = Timeline(step=12, local_batches=(24, 8), before_ms=(10.0, 12.0), ready_ms=((20.0,), (26.0,)),
        ...                 done_ms=((33.0,), (31.0,)))
        >>> [(bar.rank, bar.kind, bar.start_ms, bar.length_ms) for bar in timeline_bars(line) if bar.lane == "link"]
        [(0, 'waiting', 30.0, 8.0), (0, 'all-reduce', 38.0, 5.0), (1, 'all-reduce', 38.0, 5.0)]
    """
    steps = rank_moments(line)
    end_ns = longest_ns(steps.values())
    moments = {}  # of each rank's buckets, on one clock
    bars = []
    for rank, step in steps.items():
        start_ns = end_ns - step.length_ns
        moments[rank] = [(start_ns + ready, start_ns + done) for ready, done in step.buckets]
        forward_ns, ready_ns = start_ns - step.before_ns, start_ns + step.backward_ns
        bars.append(_bar(rank, "compute", "optimizer and forward", None, forward_ns, start_ns))
        bars.append(_bar(rank, "compute", "backward", None, start_ns, ready_ns))
    all_ready_ns = [max(ready for ready, _ in buckets) for buckets in zip(*moments.values(), strict=True)]
    for rank, buckets in moments.items():
        bars += _link_bars(rank, buckets, all_ready_ns)
    return [bar for bar in bars if bar.length_ms > 0]


def _link_bars(rank: int, buckets: list[tuple[int, int]], all_ready_ns: list[int]) -> list[Bar]:
    """Return waiting and all-reduces of one rank, whose buckets these are."""
    bars = []
    free = 0  # the rank is done with all buckets so far
    for bucket, (all_ready, (own_ready, end)) in enumerate(zip(all_ready_ns, buckets, strict=True)):
        start = min(all_ready, end)
        if end >= free:  # not overtaken by a later bucket
            begin = max(own_ready, free)
            start = min(max(all_ready, begin), end)
            bars.append(_bar(rank, "link", "waiting", bucket, begin, start))
        bars.append(_bar(rank, "link", "all-reduce", bucket, start, end))
        free = max(free, end)
    return bars


def _bar(rank: int, lane: str, kind: str, bucket: int | None, start_ns: int, end_ns: int) -> Bar:
    return Bar(rank, lane, kind, bucket, start_ns / NS_PER_MS, (end_ns - start_ns) / NS_PER_MS)
