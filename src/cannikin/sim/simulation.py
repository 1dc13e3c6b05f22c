"""Drives a planner through a simulated run, as the runtime drives it through a real one: steps, windows, plans.

The core's `Schedule` says how long windows are, in which steps gradient norms are taken, and from which step a plan is
in force, as in the runtime without worker processes. A planner paced by epochs (`pace="epoch"`) sees the last steps of
each epoch and nothing else; one paced by steps (`pace="step"`) sees every step, and its plan is in force in the next.
Epochs are cut as the runtime cuts them, with a short last batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cannikin._version import __version__
from cannikin.core.cutting import cut, least_local
from cannikin.core.lr import LR_RULES
from cannikin.core.planner import Decision, Planner
from cannikin.core.schedule import IN_FORCE, Schedule
from cannikin.core.values import BoolArray, FloatArray, IntArray, Job, Plan, StepWindow
from cannikin.errors import InvalidInputError
from cannikin.runlog import (
    EventRecord,
    Header,
    ModelInfo,
    Observer,
    RankInfo,
    Record,
    decision_records,
    job_info,
    plan_record,
)
from cannikin.sim.hardware import Machine, StepTimes
from cannikin.sim.workload import Workload, sample_sqnorms

_MAX_CHUNK = 2048  # steps simulated at once where no planner looks
_PADDING = 2  # samples in the batch of a rank that gets none; their gradient does not count


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One pass over the data: where the run was at its end, and what its steps took on average."""

    epoch: int
    elapsed_s: float
    progress: float
    metric: float
    total_batch: int
    local_batches: tuple[int, ...]
    step_s: float
    planner_s: float


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A whole run; `reason` says in a sentence why it ended, `planner_s` is CPU time really spent in the planner."""

    reached: bool
    reason: str
    elapsed_s: float
    num_steps: int
    num_samples: int
    plan: Plan
    plans: tuple[tuple[int, Plan], ...]
    epochs: tuple[EpochRecord, ...]
    planner_s: float


class Simulation:
    """One run of one planner on one machine.

    Args:
        machine: the ground truth.
        planner, job: who plans, and what for; `job.num_samples` ends epochs.
        workload: what steps are worth; None for a run that only takes time, without norms.
        seed: of all noise; the same seed, planner and machine give the same run.
        pace: "window"; "epoch" for a planner that sees one window per epoch, "step" for one that plans in every step.
        lag: steps by which every plan is later, as on devices whose times reach the host that late.
        observers: get the records that the runtime would write, in simulated time.
        on_progress: called with the share of the run that is done, now and then.
    """

    def __init__(
        self,
        machine: Machine,
        planner: Planner,
        job: Job,
        workload: Workload | None = None,
        *,
        seed: int = 0,
        pace: str = "window",
        lag: int = 0,
        observers: tuple[Observer, ...] = (),
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self.machine, self.planner, self.job, self.workload = machine, planner, job, workload
        self.pace, self.lag = pace, lag
        self._goal = math.inf if workload is None else workload.target_progress
        self.step, self.samples, self.progress, self.elapsed_s, self.planner_s = 0, 0, 0.0, 0.0, 0.0
        self.epochs: list[EpochRecord] = []
        self._observers, self._on_progress = observers, on_progress
        self._rng = np.random.default_rng(seed)
        self._schedule = Schedule(job, planner.decide(None, job, 0))
        self._plans: list[tuple[int, Plan]] = [(0, self._schedule.newest)]
        self._sizes: list[set[int]] = [set() for _ in machine.names]  # local batches that each rank has run,
        self._last_sizes = np.zeros(machine.num_ranks, dtype=np.int64)  # and the one of its last step
        self._epoch_start = (0, 0.0, 0.0)  # step, elapsed and planner's time at the start of the epoch

    def begin(self, policy: str, tags: dict[str, str]) -> None:
        """Write down what runs, on what, and the first plan."""
        model = ModelInfo()
        if self.workload is not None:
            spec = self.workload.spec
            sizes = tuple(int(size * 1e6) for size in spec.bucket_mb)
            model = ModelInfo(name=spec.title, num_parameters=int(spec.num_parameters), bucket_bytes=sizes)
        self._write(
            Header(
                cannikin_version=__version__,
                started="",
                policy=policy,
                world_size=self.job.num_ranks,
                job=job_info(self.job),
                ranks=tuple(RankInfo(name=name, device=name) for name in self.machine.names),
                model=model,
                tags={"simulated": "yes", **tags},
            ),
            plan_record(self._schedule.decision, 0, elapsed_ms=0.0),
        )

    def _write(self, *records: Record) -> None:
        for record in records:
            for observer in self._observers:
                observer.write(record)

    def run(self, *, max_epochs: float = math.inf, max_steps: float = math.inf) -> RunResult:
        """Train until the target, or until either limit; a run without any would never end, and is refused."""
        goal = self._goal
        if math.isinf(goal) and math.isinf(max_steps) and (math.isinf(max_epochs) or not self.job.num_samples):
            raise InvalidInputError("the run has no end: give max_steps, or max_epochs of a job with num_samples")
        while self.progress < goal and self.step < max_steps and self._passes < max_epochs:
            if self.pace == "epoch":
                self._advance(min(self._steps_before_look(), self._steps_left(max_epochs, max_steps)))
            window = self._advance(min(self._window_steps(), self._steps_left(max_epochs, max_steps)))
            if window is not None and self.progress < goal:
                self._look(window)
            if self._on_progress is not None:
                done = max(self.progress / goal, self._passes / max_epochs, self.step / max_steps)
                self._on_progress(min(done, 1.0))
        return self._result(max_epochs)

    def _window_steps(self) -> int:
        return 1 if self.pace == "step" else self._schedule.window_steps(self.step)

    @property
    def _total_batch(self) -> int:
        """The total batch of the step taken last."""
        return self._schedule.plan_at(max(self.step - 1, 0)).total_batch

    @property
    def _passes(self) -> float:
        return self.samples / self.job.num_samples if self.job.num_samples else 0.0

    def _steps_left(self, max_epochs: float, max_steps: float) -> int:
        """Return the steps until either limit, under the plan in force."""
        samples = math.inf if not self.job.num_samples else max_epochs * self.job.num_samples - self.samples
        left = min(max_steps - self.step, samples / self._total_batch, 2.0**62)
        return max(0, math.ceil(left))

    def _steps_before_look(self) -> int:
        """Return the steps until the last window of this epoch, under the plan in force."""
        left = (self.job.num_samples or 0) * (len(self.epochs) + 1) - self.samples
        steps = math.ceil(left / self._total_batch)
        return max(0, steps - self._schedule.window_steps(self.step + steps))

    def _advance(self, num_steps: int) -> StepWindow | None:
        """Take steps, and return the window of the last chunk; None where there was nothing to do."""
        window, end = None, self.step + num_steps
        while self.step < end and self.progress < self._goal:
            chunk = min(_MAX_CHUNK, end - self.step)
            batches = self._cut(self._schedule.local_batches(self.step, chunk))
            sizes = np.where(batches > 0, batches, _PADDING)
            is_new, slowness = self._new_sizes(sizes) if self.machine.new_size else (batches < 0, None)
            times = self.machine.measure(sizes, self.step, self._rng, slowness)
            window = self._window(batches, times, ~is_new) if chunk == self._window_steps() else None
            self._account(batches, times.step_s)
        return window

    def _new_sizes(self, sizes: IntArray) -> tuple[BoolArray, FloatArray]:
        """Return where a rank runs a size for the first time, and how much longer steps take after a change, [S, n]."""
        changed = np.diff(sizes, axis=0, prepend=self._last_sizes[None]) != 0
        is_new = np.zeros(sizes.shape, dtype=np.bool_)
        for step, rank in np.argwhere(changed).tolist():
            is_new[step, rank] = sizes[step, rank] not in self._sizes[rank]
            self._sizes[rank].add(int(sizes[step, rank]))
        self._last_sizes = sizes[-1]
        return is_new, 1.0 + self.machine.new_size * np.where(is_new, 1.0, 0.1 * changed)

    def _cut(self, batches: IntArray) -> IntArray:
        """Cut an epoch's last batches short, as the runtime does, [S, n]; a rank may be left without samples."""
        num_samples, first, position = self.job.num_samples, 0, self.samples % (self.job.num_samples or 1)
        min_local = least_local(self.workload is not None and self.workload.spec.batch_norm)
        while num_samples:
            ends = position + batches[first:].sum(axis=1).cumsum()
            reached = int(np.searchsorted(ends, num_samples - min_local + 1))  # leaves less than a step, or nothing
            if reached == len(ends):
                break
            last = first + reached
            remaining = num_samples - int(ends[reached] - batches[last].sum())
            batches[last] = [count for _, count in cut(batches[last].tolist(), remaining, min_local=min_local)]
            first, position = last + 1, (num_samples - remaining + int(batches[last].sum())) % num_samples
        return batches

    def _account(self, batches: IntArray, step_s: FloatArray) -> None:
        """Count time, samples and progress step by step, up to the step that reaches the goal."""
        totals = batches.sum(axis=1)
        progress = np.full(len(totals), self.progress)
        if self.workload is not None:
            for _ in range(2):  # the gain changes on the way: once more with the progress of the first guess
                progress = self.progress + self.workload.gains(totals, progress).cumsum()
        count = min(int(np.searchsorted(progress, self._goal)) + 1, len(totals))
        elapsed = self.elapsed_s + step_s[:count].cumsum()
        samples = self.samples + totals[:count].cumsum()
        if self.job.num_samples:
            passes = samples // self.job.num_samples
            ends = np.flatnonzero(np.diff(passes, prepend=self.samples // self.job.num_samples))
            for end in ends.tolist():
                self._end_epoch(self.step + end + 1, float(elapsed[end]), float(progress[end]))
        self.step += count
        self.samples, self.elapsed_s = int(samples[-1]), float(elapsed[-1])
        self.progress = float(progress[count - 1])

    def _end_epoch(self, step: int, elapsed_s: float, progress: float) -> None:
        first_step, start_s, planner_s = self._epoch_start
        plan = self._schedule.plan_at(step - 1)  # of which the last batch of an epoch may be a part only
        record = EpochRecord(
            epoch=len(self.epochs) + 1,
            elapsed_s=elapsed_s,
            progress=progress,
            metric=math.nan if self.workload is None else self.workload.metric(progress),
            total_batch=plan.total_batch,
            local_batches=plan.local_batches,
            step_s=(elapsed_s - start_s) / (step - first_step),
            planner_s=self.planner_s - planner_s,
        )
        self.epochs.append(record)
        self._epoch_start = (step, elapsed_s, self.planner_s)
        if self.workload is not None:
            data: dict[str, Any] = {self.workload.spec.metric_name: record.metric}
            self._write(EventRecord(step=step, kind="eval", data=data, elapsed_ms=elapsed_s * 1e3))

    def _window(self, batches: IntArray, times: StepTimes, usual: BoolArray) -> StepWindow:
        """Return what the runtime would have measured; the first step of a run never counts, nor do unusual ones."""
        shape = batches.shape
        steps = self.step + np.arange(len(batches))
        local, total = np.full(shape, np.nan), np.full(len(batches), np.nan)
        taken = np.array([self._schedule.takes_norms(step) for step in steps.tolist()])
        if self.workload is not None and taken.any() and shape[1] > 1:
            local[taken], total[taken] = sample_sqnorms(
                np.maximum(batches[taken], 1), *self.workload.moments(self.progress), self._rng
            )
        return StepWindow(
            first_step=self.step,
            local_batches=np.maximum(batches, 1),
            before_s=times.before_s,
            ready_s=times.ready_s,
            done_s=times.done_s,
            local_sqnorm=local,
            global_sqnorm=total,
            valid=(steps[:, None] > 0) & (batches > 0) & usual,
        )

    def _look(self, window: StepWindow) -> None:
        """Show the planner a window, and put its decision on the schedule."""
        start_s, last = time.process_time(), self._schedule.newest
        delay = 0 if self.pace == "step" else IN_FORCE + self.lag
        decision = self._schedule.decide(self.planner, window, self.step + delay)
        self.planner_s += time.process_time() - start_s
        plan = decision.plan
        if (plan.local_batches, plan.reason) != (last.local_batches, last.reason):
            self._plans.append((self.step, plan))
        self._schedule.install(decision, self.step)
        if self._observers:
            self._write_decision(window, decision)

    def _write_decision(self, window: StepWindow, decision: Decision) -> None:
        """Write down a window and the plan that it led to."""
        passes = factor = None
        if self.workload is not None:
            passes = self.progress / self.workload.epoch_progress
            initial, total = self.job.batch_size, decision.plan.total_batch
            gain = 1.0 if decision.noise is None else decision.noise.gain(total, initial)
            rule = LR_RULES[self.workload.spec.lr_rule]
            factor = rule(total, initial_batch=initial, gain=gain, progress=math.inf)
        elapsed_ms = self.elapsed_s * 1e3
        records = decision_records(
            window, decision, num_lost_before=0, progress=passes, lr_factor=factor, elapsed_ms=elapsed_ms
        )
        self._write(*records)  # no gradient of a simulated run is ever lost

    def _result(self, max_epochs: float) -> RunResult:
        reached = self.workload is not None and self.progress >= self._goal
        if reached and self.workload is not None:
            reason = f"reached {self.workload.spec.metric_name} {self.workload.target:g}"
        elif self._passes >= max_epochs:
            reason = f"stopped at its limit of {max_epochs:g} epochs"
        else:
            reason = f"stopped at its limit of {self.step} steps"
        if not reached and self.workload is not None:
            name, metric = self.workload.spec.metric_name, self.workload.metric(self.progress)
            reason += f" with {name} {metric:.4g}: target {self.workload.target:g} not reached"
            if math.isinf(self._goal):
                reason += ", which the measured run never reaches either"
        self._write(EventRecord(step=self.step, kind="end", text=reason, elapsed_ms=self.elapsed_s * 1e3))
        return RunResult(
            reached=reached,
            reason=reason,
            elapsed_s=self.elapsed_s,
            num_steps=self.step,
            num_samples=self.samples,
            plan=self._schedule.newest,
            plans=tuple(self._plans),
            epochs=tuple(self.epochs),
            planner_s=self.planner_s,
        )
