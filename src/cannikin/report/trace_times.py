"""Where a trace puts things: steps and records on the time of the run."""

from __future__ import annotations

from cannikin.report.rank_steps import finite
from cannikin.runlog import WindowRecord

__all__ = ["RunClock"]


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
