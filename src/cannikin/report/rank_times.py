"""Where a step's time goes on each rank: computing, communicating, waiting for slower ranks, loading data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cannikin.core.records import FloatArray
from cannikin.report.window import before_ms, padded
from cannikin.runlog import WindowRecord

__all__ = ["ACTIVITIES", "RankTimes", "activities", "rank_times"]

ACTIVITIES = ("optimizer and forward", "backward", "communication", "waiting", "loading", "other")


def activities(
    *,
    before: FloatArray,
    backward: FloatArray,
    done: FloatArray,
    wait: FloatArray,
    loader: FloatArray,
    other: FloatArray,
) -> FloatArray:
    """What ranks did with the time of a step, in the order of `ACTIVITIES` along a last axis more.

    Communication is what no computing hid and no slower rank caused. Loading and other work count as 0 where they were
    not measured (NaN); any of the others makes what depends on it NaN.

    Args:
        before: optimizer and forward, without loading.
        backward: until the last gradient was there.
        done: from the start of backward to the end of the last all-reduce.
        wait: the part of that in which a slower rank was waited for.
        loader, other: waiting for data, and the user's own work.

    Example:
        >>> times = {"before": 10.0, "backward": 20.0, "done": 30.0, "wait": 4.0, "loader": np.nan, "other": 0.0}
        >>> activities(**{name: np.array(ms) for name, ms in times.items()}).tolist()
        [10.0, 20.0, 6.0, 4.0, 0.0, 0.0]
    """
    exposed = np.maximum(done - backward, 0.0)
    waiting = np.clip(wait, 0.0, exposed)
    return np.stack(
        [before, backward, exposed - waiting, waiting, np.nan_to_num(loader), np.nan_to_num(other)], axis=-1
    )


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """A rank's typical step, milliseconds.

    Args:
        compute_ms: forward, backward and optimizer.
        communication_ms: all-reduce that no computing of this rank hid, without the waiting.
        wait_ms: waiting for a slower rank.
        loading_ms: waiting for data.
    """

    compute_ms: float
    communication_ms: float
    wait_ms: float
    loading_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """All of it."""
        return sum(self.parts_ms)

    @property
    def parts_ms(self) -> tuple[float, float, float, float]:
        """Compute, communication, wait and loading."""
        return self.compute_ms, self.communication_ms, self.wait_ms, self.loading_ms

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """The same as shares of the step; all 0 where it took no time."""
        compute, communication, wait, loading = self.parts_ms
        whole = self.total_ms or 1.0
        return compute / whole, communication / whole, wait / whole, loading / whole


def rank_times(window: WindowRecord) -> list[RankTimes | None]:
    """Every rank's times in a window; None where nothing of a rank was measured.

    Example:
        >>> window = WindowRecord(first_step=0, num_steps=5, num_valid=5, total_batch=8, local_batches=(4, 4),
        ...                       before_ms=(10.0, None), backward_ms=(20.0, 20.0), done_ms=(50.0, 25.0),
        ...                       wait_ms=(25.0, 0.0))
        >>> rank_times(window)[0].parts_ms, rank_times(window)[1]
        ((30.0, 5.0, 25.0, 0.0), None)
    """
    columns = (before_ms(window), window.backward_ms, window.done_ms, window.wait_ms, window.loader_ms)
    size = len(window.local_batches)
    before, backward, done, wait, loader = (np.array(padded(times, size), dtype=np.float64) for times in columns)
    times = activities(
        before=before,
        backward=backward,
        done=done,
        wait=np.nan_to_num(wait),
        loader=loader,
        other=np.zeros(size),
    )
    found: list[RankTimes | None] = []
    for first, back, communication, waited, loading, _ in times.tolist():
        spent = RankTimes(compute_ms=first + back, communication_ms=communication, wait_ms=waited, loading_ms=loading)
        found.append(spent if math.isfinite(spent.total_ms) else None)
    return found
