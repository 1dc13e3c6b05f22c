"""One step's timeline, rank by rank, in whole nanoseconds.

Ranks' clocks differ, so they are lined up by the end of the last all-reduce, which is one moment for all of them: a
rank's backward starts its `length_ns` before that moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cannikin.runlog import Timeline

__all__ = ["NS_PER_MS", "RankStep", "as_ns", "finite", "longest_ns", "rank_steps"]

NS_PER_MS = 1_000_000
_MOST = 1e15  # what a damaged log may say beyond it is no time and no batch


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One rank's step in nanoseconds; moments of buckets (ready, done) and lengths are after the start of backward."""

    local_batch: int
    before_ns: int
    backward_ns: int
    length_ns: int
    buckets: tuple[tuple[int, int], ...]

    @property
    def tail_ns(self) -> int:
        """From the end of backward to the end of the last all-reduce."""
        return self.length_ns - self.backward_ns


def rank_steps(line: Timeline) -> dict[int, RankStep]:
    """The ranks that have all of their times, which never go back."""
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
        steps[rank] = RankStep(
            local_batch=batch,
            before_ns=before_ns,
            backward_ns=max(ready_ns),
            length_ns=max(end for _, end in buckets),
            buckets=buckets,
        )
    return steps


def longest_ns(steps: Iterable[RankStep]) -> int:
    """From where the first of these ranks, lined up, begins to where all of them end."""
    return max(step.before_ns + step.length_ns for step in steps)


def finite(value: float | None) -> float | None:
    """A number that can be a time or a count; None for anything else."""
    return max(value, 0.0) if value is not None and math.isfinite(value) and value < _MOST else None


def as_ns(time_ms: float) -> int:
    """Milliseconds as whole nanoseconds."""
    return round(time_ms * NS_PER_MS)
