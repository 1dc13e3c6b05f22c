"""The records of one decision after another: what a planner was shown, what it found out, and what it planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cannikin.core.records import Plan, StepWindow
from cannikin.runlog.convert import noise_record, plan_record, window_record
from cannikin.runlog.records import EventRecord, Record

__all__ = ["Decisions"]


class Decisions:
    """Remembers what has been told of a planner, so that each event is told once.

    A planner may have `noise` (a `NoiseTracker`), `learner` (a `Learner`) and `choice` (a `TotalChoice`); what it has
    not is left out.
    """

    def __init__(self) -> None:
        self._num_changes = 0
        self._num_nonfinite = 0

    def records(
        self, planner: Any, window: StepWindow, plan: Plan, *, elapsed_ms: float, **measured: Any
    ) -> Iterator[Record]:
        """A window, the events that show in it, and the plan that came of it; `measured` as in `window_record`."""
        tracker = getattr(planner, "noise", None)
        noise = noise_record(tracker) if tracker is not None and tracker.num_steps > 0 else None
        num_bad = window.num_nonfinite
        yield window_record(window, noise=noise, num_skipped=num_bad, elapsed_ms=elapsed_ms, **measured)
        step = window.first_step + window.num_steps
        if num_bad:
            self._num_nonfinite += num_bad
            steps = "1 step" if num_bad == 1 else f"{num_bad} steps"
            text = f"{steps} had a gradient that was not finite, {self._num_nonfinite} so far"
            yield EventRecord(step=step, kind="nonfinite", text=text, data={"count": num_bad}, elapsed_ms=elapsed_ms)
        for changed_step, rank, factor in self._new_changes(planner):
            text = f"rank {rank} takes {factor:.2f} times as long"
            data: dict[str, Any] = {"rank": rank, "factor": factor}
            yield EventRecord(step=changed_step, kind="changed_speed", text=text, data=data, elapsed_ms=elapsed_ms)
        yield plan_record(plan, step, choice=getattr(planner, "choice", None), elapsed_ms=elapsed_ms)

    def skip_changes(self, planner: Any) -> None:
        """What the planner knows already, from a run that this one resumes, is no event of this run."""
        self._num_changes = getattr(getattr(planner, "learner", None), "num_changes", 0)

    def _new_changes(self, planner: Any) -> list[tuple[int, int, float]]:
        learner = getattr(planner, "learner", None)
        if learner is None:
            return []
        num_new, self._num_changes = learner.num_changes - self._num_changes, learner.num_changes
        return list(learner.changes[len(learner.changes) - num_new :])
