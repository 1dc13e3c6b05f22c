"""What a live view knows: a fold over the records of a run, without clock, file or terminal."""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import NamedTuple

from cannikin.runlog import EventRecord, Header, PlanRecord, Record, WindowRecord
from cannikin.runlog.times import RankTimes, RecentPlans, Speed, numbers_of, rank_times, speed_of, step_of, use_of

_NUM_POINTS = 60  # windows remembered, for sparklines and rates
_NUM_EVENTS = 3
_SHOWN_ELSEWHERE = {"epoch", "eval", "end"}


class Point(NamedTuple):
    """How far the run was at a window's end; `samples` are of all ranks since the header."""

    elapsed_ms: float | None
    progress: float | None
    step_ms: float | None
    total_batch: int
    samples: int


class Pass(NamedTuple):
    """A pass over the data: its number, from 0, where it began, and the passes asked for in all, if known."""

    epoch: int
    first_step: int
    position: int
    goal: float | None


class LiveState:
    """Take records with `take`, in the order of the run; everything else only looks."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.window: WindowRecord | None = None
        self.plan: PlanRecord | None = None
        self.window_plan: PlanRecord | None = None  # the last one with the split of `window`, before it was measured
        self.step = 0
        self.elapsed_ms: float | None = None
        self.current_pass: Pass | None = None
        self.metrics: dict[str, float] = {}
        self.metrics_step = 0
        self.events: deque[EventRecord] = deque(maxlen=_NUM_EVENTS)
        self.end: EventRecord | None = None
        self.points: deque[Point] = deque(maxlen=_NUM_POINTS)
        self._plans = RecentPlans()
        self._samples = 0
        self._samples_of_pass = 0
        self._times: list[RankTimes | None] | None = None  # of `window`, once asked for

    def take(self, record: Record) -> None:
        """Take one more record."""
        if isinstance(record, WindowRecord):
            self._take_window(record)
        elif isinstance(record, PlanRecord):
            self.plan = record
            self._plans.add(record)
        elif isinstance(record, EventRecord):
            self._take_event(record)
        else:
            self._begin(record)
        self.step = max(self.step, step_of(record))
        elapsed_ms = getattr(record, "elapsed_ms", None)
        if elapsed_ms is not None:
            self.elapsed_ms = max(elapsed_ms, self.elapsed_ms or 0.0)

    def _begin(self, header: Header) -> None:
        """Begin a run, or go on from an older state, with the step numbers and the clock of this process."""
        self.header, self.step = header, header.first_step
        self.window = self.plan = self.end = self.window_plan = self.elapsed_ms = self.current_pass = None
        self._times, self._samples, self._samples_of_pass = None, 0, 0
        self.points.clear()
        self._plans.clear()

    def _take_window(self, window: WindowRecord) -> None:
        self.window, self._times = window, None
        self.window_plan = self._plans.of(window)
        end = window.first_step + window.num_steps
        self._samples += window.num_steps * window.total_batch
        if self.current_pass is not None:
            num_steps = max(0, min(window.num_steps, end - self.current_pass.first_step))
            self._samples_of_pass += num_steps * window.total_batch
        measured = (window.elapsed_ms, window.progress, window.step_ms, window.total_batch)
        self.points.append(Point(*measured, samples=self._samples))

    def _take_event(self, event: EventRecord) -> None:
        if event.kind not in _SHOWN_ELSEWHERE:
            self.events.append(event)
        elif event.kind == "end":
            self.end = event
        elif event.kind == "eval":
            self.metrics, self.metrics_step = numbers_of(event), event.step
        else:
            numbers = numbers_of(event)
            epoch, position = (int(numbers.get(name, 0)) for name in ("epoch", "position"))
            self.current_pass = Pass(epoch=epoch, first_step=event.step, position=position, goal=numbers.get("goal"))
            self._samples_of_pass = 0

    # How far it is.

    @property
    def goal_share(self) -> float | None:
        """The part of the passes asked for that progress has made, 0 to 1; None where nothing was asked for."""
        goal = None if self.current_pass is None else self.current_pass.goal
        progress = None if self.window is None else self.window.progress
        return None if not goal or progress is None else min(1.0, progress / goal)

    @property
    def pass_share(self) -> float | None:
        """The part of the data that the present pass has seen, 0 to 1; None where that is not known."""
        num_samples = None if self.header is None else self.header.job.num_samples
        if self.current_pass is None or not num_samples:
            return None
        return min(1.0, (self.current_pass.position + self._samples_of_pass) / num_samples)

    @property
    def left_s(self) -> float | None:
        """Time left at the present pace: to the goal, or else to the end of the pass; None where it is not known."""
        timed = [point for point in self.points if point.elapsed_ms is not None]
        if len(timed) < 2 or self.header is None:
            return None
        first, last = timed[0], timed[-1]
        seconds = ((last.elapsed_ms or 0.0) - (first.elapsed_ms or 0.0)) / 1e3
        goal = None if self.current_pass is None else self.current_pass.goal
        if goal is not None:
            if last.progress is None or first.progress is None:
                return None
            done, missing = last.progress - first.progress, max(0.0, goal - last.progress)
        else:
            share, num_samples = self.pass_share, self.header.job.num_samples
            if share is None or num_samples is None:
                return None
            done, missing = last.samples - first.samples, (1.0 - share) * num_samples
        return missing / done * seconds if done > 0 and seconds > 0 else None

    # How fast it is.

    @property
    def predicted_ms(self) -> float | None:
        """The step time that was predicted for the last window's split before it was measured."""
        return None if self.window_plan is None else self.window_plan.predicted_step_ms

    @property
    def even_speed(self) -> float | None:
        """How fast DDP's even split would be against the last window's, predicted before it was measured."""
        return None if self.window_plan is None else self.window_plan.even_speed

    @property
    def use(self) -> float | None:
        """How much of what the hardware can do the last window used, 0 to 1; None where it was not measured."""
        return None if self.window is None else use_of(self.window.local_batches, self.times)

    @property
    def times(self) -> list[RankTimes | None]:
        """Where the time of the last window's steps went, rank by rank."""
        if self._times is None:
            self._times = [] if self.window is None else rank_times(self.window)
        return self._times

    @property
    def wait_share(self) -> float | None:
        """The part of a step that ranks wait for slower ones, their mean; None where fewer than two were measured."""
        waits = [times.wait_ms / (times.total_ms or 1.0) for times in self.times if times is not None]
        return fmean(waits) if len(waits) > 1 else None

    @property
    def speed(self) -> Speed:
        """How fast the steps of the last window are."""
        if self.window is None:
            return Speed()
        return speed_of(self.window, None if self.header is None else self.header.job.batch_size)
