"""How good a run's predictions were: what plans promised before they ran, and what their steps then took.

A log has one record per decision, and none is ever changed. The first record that names a split was written before any
step had that split, so its prediction cannot have been learned from the steps that it is compared with. Later records
of the same split predict anew, with what those steps have shown: they do not count here, and neither does a plan that
goes back to a split that had run.

The second measure is the paper's (section 5.3): the step time predicted for the best split against the best one that
was measured. A log only knows the splits that its run tried; benchmarks measure many more.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from cannikin.runlog.reader import RunLogReader, numbers_only
from cannikin.runlog.records import LEAST_MS, MOST, EventRecord, Header, PlanRecord, Record, WindowRecord
from cannikin.runlog.times import RecentPlans

_LEAST_STEPS = 3  # most of a short window: the median of fewer is one step's time

_Split = tuple[int, ...]
_Steps = list[tuple[float, int]]  # windows: the median step in milliseconds, and the number of steps behind it


@dataclass(frozen=True, kw_only=True)
class PlanOutcome:
    """A plan with another split than the plan before it, and what was measured while it was in force.

    Args:
        plan: its first record, with what it predicted.
        measured_ms: the median over its valid steps, made of the windows' medians; None where no window has its split.
        num_steps: those steps.
        is_new: whether no step had run its split when it was decided; None where the log begins in mid-run, and does
            not say.
    """

    plan: PlanRecord
    measured_ms: float | None
    num_steps: int
    is_new: bool | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None unless the split was new, was predicted and ran for some steps."""
        predicted_ms = self.plan.predicted_step_ms
        if not self.is_new or predicted_ms is None or self.measured_ms is None or self.num_steps < _LEAST_STEPS:
            return None
        return predicted_ms / self.measured_ms - 1


class PredictionErrors(NamedTuple):
    """How far off the predictions of some plans were, in absolute terms."""

    median: float
    worst: float
    num_plans: int


class OptimumError(NamedTuple):
    """The last prediction of all, beside the best of the splits of the same total batch that ran."""

    total_batch: int
    predicted_ms: float
    best_ms: float
    num_splits: int

    @property
    def error(self) -> float:
        """Predicted over the best measured, less 1."""
        return self.predicted_ms / self.best_ms - 1


@dataclass
class _Stay:
    """A plan's time in force, as far as the records go."""

    plan: PlanRecord
    is_new: bool | None
    steps: _Steps = field(default_factory=list)


class Predictions:
    """Takes a run's records in their order, out of a log or as an observer of the run.

    Example:
        >>> def plan(step, batches, ms):
        ...     return PlanRecord(step=step, first_step=step, total_batch=8, local_batches=batches,
        ...                       predicted_step_ms=ms, phase="", reason="")
        >>> def window(step, batches, ms):
        ...     return WindowRecord(first_step=step, num_steps=5, num_valid=5, total_batch=8, local_batches=batches,
        ...                         step_ms=ms)
        >>> predictions = Predictions()
        >>> for record in (window(0, (4, 4), 50.0), plan(5, (6, 2), 44.0), window(5, (6, 2), 40.0),
        ...                plan(10, (6, 2), 40.1)):  # the last one has seen the window before it
        ...     predictions.write(record)
        >>> [(each.plan.first_step, each.measured_ms, round(each.error, 3)) for each in predictions.outcomes]
        [(5, 40.0, 0.1)]
        >>> round(predictions.optimum.error, 4)
        0.0025
    """

    def __init__(self) -> None:
        self._stays: list[_Stay] = []
        self._recent = RecentPlans()  # those with which a stay began
        self._named: set[_Split] = set()  # splits that have run, or may have: plans and windows had them
        self._last: PlanRecord | None = None
        self._promised: PlanRecord | None = None  # the last that predicts anything
        self._steps: dict[_Split, _Steps] = {}  # of each split, at the ranks' present speeds
        self.first_step: int | None = None  # of the log, where it has a header

    def write(self, event: Record, /) -> None:
        """Take one record."""
        if isinstance(event, PlanRecord):
            self._take_plan(event)
        elif isinstance(event, WindowRecord):
            self._take_window(event)
        elif isinstance(event, Header):
            self.first_step = event.first_step if self.first_step is None else self.first_step
            self._last = None
            self._recent.clear()
            self._steps.clear()
        elif isinstance(event, EventRecord) and event.kind == "changed_speed":
            self._steps.clear()

    def _take_plan(self, plan: PlanRecord) -> None:
        if self._last is None or plan.local_batches != self._last.local_batches:
            is_new = plan.local_batches not in self._named and plan.step <= plan.first_step
            self._stays.append(_Stay(plan, None if is_new and self.first_step else is_new))
            self._recent.add(plan)
        self._named.add(plan.local_batches)
        self._last = plan
        if plan.predicted_step_ms is not None:
            self._promised = plan

    def _take_window(self, window: WindowRecord) -> None:
        self._named.add(window.local_batches)
        if window.step_ms is None or not LEAST_MS < window.step_ms < MOST or window.num_valid < 1:
            return
        measured = (window.step_ms, window.num_valid)
        self._steps.setdefault(window.local_batches, []).append(measured)
        plan = self._recent.of(window)
        if plan is not None:  # else an epoch's short last batches, or the first split
            next(stay for stay in reversed(self._stays) if stay.plan is plan).steps.append(measured)

    @property
    def outcomes(self) -> list[PlanOutcome]:
        """Every plan with another split than the one before it, with what was then measured."""
        return [
            PlanOutcome(
                plan=stay.plan,
                measured_ms=_median_ms(stay.steps) if stay.steps else None,
                num_steps=sum(num for _, num in stay.steps),
                is_new=stay.is_new,
            )
            for stay in self._stays
        ]

    @property
    def before_it_ran(self) -> PredictionErrors | None:
        """How far off plans were that were predicted before any step had run their split; None where there is none."""
        errors = [abs(each.error) for each in self.outcomes if each.error is not None]
        return PredictionErrors(median(errors), max(errors), len(errors)) if errors else None

    @property
    def predicted_ms(self) -> float | None:
        """The last prediction of all; None where no plan made one."""
        return None if self._promised is None else self._promised.predicted_step_ms

    @property
    def optimum(self) -> OptimumError | None:
        """The paper's measure, among the splits that this run tried since it resumed or a rank changed its speed."""
        if self._promised is None or self.predicted_ms is None:
            return None
        total = self._promised.total_batch
        medians = [
            _median_ms(steps)
            for split, steps in self._steps.items()
            if sum(split) == total and sum(num for _, num in steps) >= _LEAST_STEPS
        ]
        if not medians:
            return None
        return OptimumError(total, self.predicted_ms, min(medians), len(medians))

    def numbers(self) -> dict[str, Any]:
        """Return both measures and the plans behind the first as plain numbers, for programs."""
        errors, optimum = self.before_it_ran, self.optimum
        return {
            "before_it_ran": None if errors is None else errors._asdict(),
            "optimum": None if optimum is None else {**optimum._asdict(), "error": optimum.error},
            "plans": [
                {
                    "step": each.plan.step,
                    "first_step": each.plan.first_step,
                    "local_batches": list(each.plan.local_batches),
                    "predicted_ms": each.plan.predicted_step_ms,
                    "measured_ms": each.measured_ms,
                    "num_steps": each.num_steps,
                    "is_new": each.is_new,
                    "error": each.error,
                }
                for each in self.outcomes
            ],
        }


def read_predictions(path: str | os.PathLike[str]) -> Predictions:
    """Read what a log, or the one in a run directory, promised and measured.

    Raises:
        RunLogError: the file is missing, is no run log, or has another version of the format.
    """
    predictions = Predictions()
    with RunLogReader(path) as reader, numbers_only(reader.path):
        for record in reader.records():
            predictions.write(record)
    return predictions


def _median_ms(steps: _Steps) -> float:
    """Return the median over all steps, each taken for as long as its window's median."""
    half, so_far = sum(num for _, num in steps) / 2, 0
    ordered = sorted(steps)
    for place, (step_ms, num) in enumerate(ordered):
        so_far += num
        if so_far >= half:
            return step_ms if so_far > half else (step_ms + ordered[place + 1][0]) / 2
    return math.nan
