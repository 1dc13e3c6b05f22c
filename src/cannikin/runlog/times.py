"""What the times in a log mean, rank by rank: of a window's typical step, and of one step's timeline.

A report, a live view, a trace and trackers all take them from here, so that they agree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cannikin.core.perf import hardware_use
from cannikin.core.planner import Noise
from cannikin.core.values import FloatArray
from cannikin.runlog.records import MOST, EventRecord, Header, NoiseRecord, PlanRecord, Record, Timeline, WindowRecord

MEASURED = ("before_ms", "backward_ms", "done_ms", "wait_ms", "loader_ms", "other_ms")  # of a `WindowRecord`
ACTIVITIES = ("optimizer and forward", "backward", "communication", "waiting", "loading", "other")
NS_PER_MS = 1_000_000
_NUM_PLANS = 16

# A window as a whole, and an event.


def numbers_of(event: EventRecord) -> dict[str, float]:
    """Return the numbers among an event's data, which may also hold text."""
    return {name: float(value) for name, value in event.data.items() if isinstance(value, int | float)}


def step_of(record: Record) -> int:
    """Return the step a record's numbers belong to: a window's are known at its end."""
    if isinstance(record, Header):
        return record.first_step
    return record.first_step + record.num_steps if isinstance(record, WindowRecord) else record.step


class Speed(NamedTuple):
    """How fast a window's steps are, in samples of all ranks; each None where it is not known."""

    samples_per_s: float | None = None
    efficiency: float | None = None  # of the total batch, from the noise measured by then
    goodput: float | None = None  # samples per second times efficiency


def speed_of(window: WindowRecord, initial_batch: int | None) -> Speed:
    """Return how fast a window's steps are; without the initial batch only their samples per second are known.

    Example:
        >>> from cannikin.runlog import NoiseRecord
        >>> speed_of(WindowRecord(
        ...     first_step=0, num_steps=5, num_valid=5, total_batch=192, local_batches=(96, 96), step_ms=100.0,
        ...     noise=NoiseRecord(signal_sqnorm=1.0, noise_trace=64.0, noise_scale=64.0)), 64)
        Speed(samples_per_s=1920.0, efficiency=0.5, goodput=960.0)
    """
    total, noise = window.total_batch, window.noise or NoiseRecord()
    pace = total / window.step_ms * 1e3 if window.step_ms else None
    signal, trace = noise.signal_sqnorm, noise.noise_trace
    if initial_batch is None or signal is None or trace is None:
        return Speed(pace)
    known = Noise(signal_sqnorm=signal, noise_trace=trace, num_batches=noise.num_batches)
    share = float(known.efficiency(total, initial_batch))
    return Speed(pace, share, None if pace is None else pace * share)


class RecentPlans:
    """The plans among which that of a window is looked for: where loaders read far ahead, one of some windows ago.

    Example:
        >>> plans = RecentPlans()
        >>> for step, batches in ((5, (6, 2)), (10, (5, 3))):
        ...     plan = PlanRecord(step=step, first_step=step, total_batch=8, local_batches=batches, phase="", reason="")
        ...     plans.add(plan)
        >>> plans.of(WindowRecord(first_step=5, num_steps=5, num_valid=5, total_batch=8, local_batches=(6, 2))).step
        5
    """

    def __init__(self) -> None:
        self._plans: deque[PlanRecord] = deque(maxlen=_NUM_PLANS)

    @property
    def last(self) -> PlanRecord | None:
        """The newest; None where there is none."""
        return self._plans[-1] if self._plans else None

    def add(self, plan: PlanRecord) -> None:
        """Take one more plan."""
        self._plans.append(plan)

    def of(self, window: WindowRecord) -> PlanRecord | None:
        """Return the last plan that has the window's split, with what it predicted; None where none has."""
        return next((plan for plan in reversed(self._plans) if plan.local_batches == window.local_batches), None)

    def clear(self) -> None:
        """Forget all, at the beginning of another run."""
        self._plans.clear()


# Where a step's time goes on each rank: computing, communicating, waiting for slower ranks, loading data.


def measured_ms(window: WindowRecord) -> list[tuple[float | None, ...]]:
    """Return what was measured of every rank, [6, n], None where nothing was.

    The rows are those of `MEASURED`; `before_ms` comes without the loading that the log may count there.
    """
    size = len(window.local_batches)
    columns = (getattr(window, name) for name in MEASURED)
    rows = [times if len(times) == size else (*times, *(None,) * size)[:size] for times in columns]
    if window.loader_inside:
        pairs = zip(rows[0], rows[4], strict=True)
        rows[0] = tuple(None if ms is None else max(0.0, ms - (loader or 0.0)) for ms, loader in pairs)
    return rows


def activities(measured: FloatArray) -> FloatArray:
    """Return what ranks did with the time of a step, [..., n, A] in the order of `ACTIVITIES`.

    Communication is what no computing hid and no slower rank caused. Loading and other work count as 0 where they
    were not measured (NaN); any of the others makes what depends on it NaN.

    Args:
        measured: times as `measured_ms` returns them, [..., 6, n].

    Example:
        >>> activities(np.array([[10.0], [20.0], [30.0], [4.0], [np.nan], [0.0]])).tolist()
        [[10.0, 20.0, 6.0, 4.0, 0.0, 0.0]]
    """
    before, backward, done, wait, loader, other = np.moveaxis(measured, -2, 0)
    exposed = np.maximum(done - backward, 0.0)
    waiting = np.clip(wait, 0.0, exposed)
    between = (np.nan_to_num(loader), np.nan_to_num(other))
    return np.stack([before, backward, exposed - waiting, waiting, *between], axis=-1)


def activity(times: npt.NDArray[Any], *names: str) -> npt.NDArray[Any]:
    """Return the sum of these activities, in times or shares that have all of them along their last axis.

    Example:
        >>> float(activity(np.array([10.0, 20.0, 6.0, 4.0, 0.0, 0.0]), "optimizer and forward", "backward"))
        30.0
    """
    total: npt.NDArray[Any] = times[..., [ACTIVITIES.index(name) for name in names]].sum(axis=-1)
    return total


class RankTimes(NamedTuple):
    """A rank's typical step, in milliseconds."""

    compute_ms: float  # forward, backward and optimizer
    communication_ms: float  # all-reduce that no computing of this rank hid, without the waiting
    wait_ms: float  # for a slower rank
    loading_ms: float = 0.0  # waiting for data

    @property
    def total_ms(self) -> float:
        """Their sum."""
        return sum(self)

    @property
    def shares(self) -> dict[str, float]:
        """The same as shares of the step, by the names above; all 0 where it took no time."""
        whole = self.total_ms or 1.0
        return {name: part_ms / whole for name, part_ms in zip(self._fields, self, strict=True)}


def rank_times(window: WindowRecord) -> list[RankTimes | None]:
    """Return every rank's times in a window; None where nothing of a rank was measured.

    Example:
        >>> window = WindowRecord(first_step=0, num_steps=5, num_valid=5, total_batch=8, local_batches=(4, 4),
        ...                       before_ms=(10.0, None), backward_ms=(20.0, 20.0), done_ms=(50.0, 25.0),
        ...                       wait_ms=(25.0, 0.0))
        >>> rank_times(window)
        [RankTimes(compute_ms=30.0, communication_ms=5.0, wait_ms=25.0, loading_ms=0.0), None]
    """
    measured = np.array(measured_ms(window), dtype=np.float64)
    measured[3:] = np.nan_to_num(measured[3:])  # who does not know its waiting is shown without any
    found = activities(measured).tolist()
    times = (RankTimes(before + backward, rest, wait, load) for before, backward, rest, wait, load, _ in found)
    return [spent if math.isfinite(spent.total_ms) else None for spent in times]


def use_of(local_batches: Sequence[int], times: Sequence[RankTimes | None]) -> float | None:
    """Return how much of what their devices can do ranks used in these typical steps, 0 to 1; None where not known.

    The user's own work between steps, such as an evaluation, belongs to no step and does not count.

    Example:
        >>> use_of((24, 8), [RankTimes(20.0, 4.0, 16.0), RankTimes(36.0, 4.0, 0.0)])
        0.5625
    """
    compute_ms = [math.nan if spent is None else spent.compute_ms for spent in times]
    step_ms = [math.nan if spent is None else spent.total_ms for spent in times]
    use = float(hardware_use(local_batches, compute_ms, step_ms))
    return use if math.isfinite(use) else None


# One step's timeline. Ranks' clocks differ, so they are lined up by the end of the last all-reduce, which is one moment
# for all of them: a rank's backward starts its `length_ns` before that moment.


@dataclass(frozen=True, kw_only=True)
class RankMoments:
    """One rank's step in whole nanoseconds.

    Lengths, and the moments at which each bucket was ready and done, count from the start of backward.
    """

    local_batch: int
    before_ns: int
    backward_ns: int
    length_ns: int
    buckets: tuple[tuple[int, int], ...]


def rank_moments(line: Timeline) -> dict[int, RankMoments]:
    """Return the ranks that have all of their times; a time never goes back."""
    steps = {}
    for rank, (batch, before, ready, done) in enumerate(
        zip(line.local_batches, line.before_ms, line.ready_ms, line.done_ms, strict=False)
    ):
        times = [finite(time) for time in (before, *ready, *done)]
        if None in times or not ready or len(ready) != len(done):
            continue
        before_ns, *moments = (as_ns(time) for time in times if time is not None)
        ready_ns, done_ns = moments[: len(ready)], moments[len(ready) :]
        buckets = tuple((start, max(start, end)) for start, end in zip(ready_ns, done_ns, strict=True))
        steps[rank] = RankMoments(
            local_batch=batch,
            before_ns=before_ns,
            backward_ns=max(ready_ns),
            length_ns=max(end for _, end in buckets),
            buckets=buckets,
        )
    return steps


def longest_ns(steps: Iterable[RankMoments]) -> int:
    """Return the time from where the first of these ranks, lined up, begins to where all of them end."""
    return max(step.before_ns + step.length_ns for step in steps)


def finite(value: float | None) -> float | None:
    """Return a number that can be a time or a count, at least 0; None for anything else."""
    return max(value, 0.0) if value is not None and math.isfinite(value) and value < MOST else None


def as_ns(time_ms: float) -> int:
    """Return milliseconds as whole nanoseconds."""
    return round(time_ms * NS_PER_MS)
