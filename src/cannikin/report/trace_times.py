"""Where a trace puts things: steps and records on the time of the run, and the parts of a rank's step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cannikin.runlog import Timeline, WindowRecord

__all__ = ["RankStep", "RunClock", "as_ns", "finite", "rank_steps"]

_NS_PER_MS = 1_000_000
_MOST = 1e15  # what a damaged log may say beyond it is no time and no batch


class RunClock:
    """Places steps on the time of the run, in ms since it started; what is resumed follows what was before."""

    def __init__(self) -> None:
        self.latest_ms = 0.0
        self.began_ms = 0.0  # of the window last seen
        self._offset_ms = self._end_ms = self._pace_ms = 0.0
        self._last_step = -1

    def resume(self, first_step: int) -> None:
        """A header: times count from 0 again."""
        self._offset_ms = self._end_ms = self.latest_ms
        self._last_step = first_step - 1

    def see(self, window: WindowRecord) -> None:
        """A window has ended; without a time of its own it took its steps' time."""
        num_steps = max(window.num_steps, 1)
        step_ms = finite(window.step_ms) or 0.0
        elapsed_ms = finite(window.elapsed_ms)
        before_ms = self._end_ms
        end_ms = before_ms + num_steps * step_ms if elapsed_ms is None else self._offset_ms + elapsed_ms
        self._end_ms = self._note(max(end_ms, before_ms))
        fits_ms = (self._end_ms - before_ms) / num_steps
        self._pace_ms = min(step_ms, fits_ms) if step_ms else fits_ms
        self._last_step = window.first_step + window.num_steps - 1
        self.began_ms = self._end_ms - num_steps * self._pace_ms

    def end_of(self, step: int) -> float:
        """When a step ended, by its distance from the end of the window last seen."""
        return self._note(max(self._end_ms + (step - self._last_step) * self._pace_ms, self._offset_ms))

    def at(self, step: int, elapsed_ms: float | None) -> float:
        """When something was written down."""
        elapsed_ms = finite(elapsed_ms)
        return self.end_of(step) if elapsed_ms is None else self._note(self._offset_ms + elapsed_ms)

    def _note(self, time_ms: float) -> float:
        self.latest_ms = max(self.latest_ms, time_ms)
        return time_ms


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


def finite(value: float | None) -> float | None:
    """A number that can be a time or a count; None for anything else."""
    return max(value, 0.0) if value is not None and math.isfinite(value) and value < _MOST else None


def as_ns(time_ms: float) -> int:
    """Milliseconds as whole nanoseconds."""
    return round(time_ms * _NS_PER_MS)
