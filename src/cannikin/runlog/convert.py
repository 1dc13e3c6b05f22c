"""Turns the values of the core into records of a log, seconds into milliseconds, and back for a replay.

Legend: S steps of a window, n ranks, J gradient buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cannikin.core.planner import Decision, Noise
from cannikin.core.values import NO_MAX, BoolArray, FloatArray, Job, StepWindow
from cannikin.errors import InvalidInputError
from cannikin.runlog.records import (
    MOST,
    EventRecord,
    JobInfo,
    NoiseRecord,
    PlanRecord,
    Real,
    Reals,
    Record,
    Timeline,
    WindowRecord,
)

_DECIMALS = 4  # of a millisecond: finer than any clock used, and half the bytes of a full double


def job_info(job: Job) -> JobInfo:
    """Return a job as a header has it, with one pair of bounds per rank."""
    low, high = (bound.tolist() for bound in job.bounds)
    return JobInfo(
        batch_size=job.batch_size,
        max_batch_size=job.max_batch_size,
        min_local=tuple(low),
        max_local=tuple(None if bound >= NO_MAX else bound for bound in high),
        num_samples=job.num_samples,
    )


def decision_records(
    window: StepWindow, decision: Decision, *, num_lost_before: int, elapsed_ms: float, **measured: Any
) -> Iterator[Record]:
    """Yield the records of one decision: the window behind it, the events that show in it, and the plan.

    Args:
        window, decision: what the planner saw, and what it decided.
        num_lost_before: steps of earlier windows whose gradient was not finite.
        elapsed_ms: since the start of the run.
        **measured: as in `window_record`.
    """
    noise = None if decision.noise is None else noise_record(decision.noise)
    num_lost = window.num_nonfinite
    yield window_record(window, noise=noise, num_skipped=num_lost, elapsed_ms=elapsed_ms, **measured)
    step = window.first_step + window.num_steps
    if num_lost:
        steps = "1 step" if num_lost == 1 else f"{num_lost} steps"
        text = f"{steps} had a gradient that was not finite, {num_lost_before + num_lost} so far"
        yield EventRecord(step=step, kind="nonfinite", text=text, data={"count": num_lost}, elapsed_ms=elapsed_ms)
    for change in decision.changes:
        text = f"rank {change.rank} takes {change.factor:.2f} times as long"
        data: dict[str, Any] = {"rank": change.rank, "factor": change.factor}
        yield EventRecord(step=change.step, kind="changed_speed", text=text, data=data, elapsed_ms=elapsed_ms)
    yield plan_record(decision, step, elapsed_ms=elapsed_ms)


def plan_record(decision: Decision, step: int, *, elapsed_ms: float | None = None) -> PlanRecord:
    """Return the record of a plan that was decided at `step`, with the total batches that were compared."""
    plan, choice = decision.plan, decision.choice
    predicted_ms = None if plan.predicted_step_s is None else _ms(plan.predicted_step_s)
    return PlanRecord(
        step=step,
        first_step=plan.first_step,
        total_batch=plan.total_batch,
        local_batches=plan.local_batches,
        predicted_step_ms=predicted_ms,
        phase=decision.phase,
        reason=plan.reason,
        elapsed_ms=elapsed_ms,
        candidate_totals=() if choice is None else choice.totals,
        candidate_goodputs=() if choice is None else tuple(map(_goodput, choice.goodputs)),
        even_speed=None if decision.even_speed is None else _finite(round(decision.even_speed, _DECIMALS)),
    )


def noise_record(noise: Noise) -> NoiseRecord:
    """Return the record of what is known of the gradient noise."""
    low, high = noise.limits
    return NoiseRecord(
        signal_sqnorm=_finite(noise.signal_sqnorm),
        noise_trace=_finite(noise.noise_trace),
        noise_scale=_finite(noise.noise_scale),
        low=_finite(low),
        high=_finite(high),
        flags=noise.flags,
        num_batches=noise.num_batches,
    )


def window_record(
    window: StepWindow,
    *,
    loader_s: FloatArray | None = None,
    other_s: FloatArray | None = None,
    noise: NoiseRecord | None = None,
    progress: float | None = None,
    lr_factor: float | None = None,
    num_skipped: int = 0,
    elapsed_ms: float | None = None,
    bucket_bytes: tuple[int, ...] = (),
) -> WindowRecord:
    """Return a window as medians over its steps, with the full timeline of the step of median duration.

    Only the valid steps of the most frequent split count (the latest such split, should two be equally frequent): a
    plan that took effect inside the window, or an epoch's short last batch, does not blur the medians. There is no
    timeline where no step counts on every rank. `other_ms` is a mean over all valid steps: the median of work that
    happens in few of them would be 0.

    Args:
        window: what was measured, at least one step.
        loader_s, other_s: waiting for data, and the user's own work between steps, [S, n].
        noise, progress, lr_factor, num_skipped, elapsed_ms: as in `WindowRecord`.
        bucket_bytes: as in `Timeline`.
    """
    if not window.num_steps:
        raise InvalidInputError(f"the window at step {window.first_step} has no steps: there is nothing to record")
    split = _usual_split(window)
    counted: BoolArray = window.valid & (window.local_batches == split).all(axis=1, keepdims=True)
    backward_s, done_s = window.ready_s[..., -1], window.done_s.max(axis=-1)
    step_s = _medians(window.step_s.T, counted.T)
    columns = {"before_ms": window.before_s, "backward_ms": backward_s, "done_ms": done_s}
    columns["wait_ms"] = _waits(done_s - backward_s, counted)
    if loader_s is not None:
        columns["loader_ms"] = loader_s
    return WindowRecord(
        first_step=window.first_step,
        num_steps=window.num_steps,
        num_valid=int(counted.all(axis=1).sum()),
        total_batch=sum(split),
        local_batches=split,
        step_ms=_ms(_medians(step_s[:, None], np.isfinite(step_s)[:, None])[0]),
        elapsed_ms=_finite(elapsed_ms),
        progress=_finite(progress),
        lr_factor=_finite(lr_factor),
        num_skipped=num_skipped,
        noise=noise,
        timeline=_timeline(window, np.where(counted.all(axis=1), step_s, np.inf), bucket_bytes),
        loader_inside=loader_s is not None and bool(loader_s.any() and not window.load_s.any()),
        other_ms=() if other_s is None else _row_ms(_means(other_s, window.valid)),
        **{name: _row_ms(_medians(values, counted)) for name, values in columns.items()},
    )


def replay_window(record: WindowRecord) -> StepWindow | None:
    """Return the step of a record's timeline as a window of one step, without norms.

    There is None without a timeline, or with one that is damaged: of another number of ranks or buckets in some list,
    or with batches that cannot be. Times that cannot be make their rank invalid.
    """
    line = record.timeline
    if line is None or not _is_whole(line):
        return None
    before_s, ready_s, done_s = (
        np.array([times], dtype=np.float64) / 1000 for times in (line.before_ms, line.ready_ms, line.done_ms)
    )
    possible = np.abs(before_s) < MOST
    for times in (ready_s, done_s):
        possible &= (np.abs(times) < MOST).all(axis=-1)
    return StepWindow(
        first_step=line.step,
        local_batches=np.array([line.local_batches], dtype=np.int64),
        before_s=before_s,
        ready_s=ready_s,
        done_s=done_s,
        local_sqnorm=np.full(before_s.shape, np.nan),
        global_sqnorm=np.full(1, np.nan),
        valid=possible,
    )


def _is_whole(line: Timeline) -> bool:
    """Return whether a timeline's lists are all of one number of ranks and of buckets, and its batches possible."""
    num_ranks = len(line.local_batches)
    rows = (*line.ready_ms, *line.done_ms)
    same = {len(line.before_ms), len(line.ready_ms), len(line.done_ms)} == {num_ranks}
    return (
        same and len({len(row) for row in rows}) == 1 and all(rows) and all(1 <= b < MOST for b in line.local_batches)
    )


def _usual_split(window: StepWindow) -> tuple[int, ...]:
    """Return the split with the most valid measurements; of several, the latest.

    Not so where that is an epoch's short last step, alone valid among steps whose gradients pile up.
    """
    num_valid: dict[tuple[int, ...], int] = {}
    num_steps: dict[tuple[int, ...], int] = {}
    rows = zip(window.local_batches.tolist(), window.valid.sum(axis=1).tolist(), strict=True)
    for batches, valid in reversed(list(rows)):
        split = tuple(batches)
        num_valid[split] = num_valid.get(split, 0) + valid
        num_steps[split] = num_steps.get(split, 0) + 1
    measured, usual = (max(counts, key=lambda split: counts[split]) for counts in (num_valid, num_steps))
    is_short = sum(measured) < sum(usual) and not num_valid[usual]
    return usual if is_short else measured


def _waits(tail_s: FloatArray, counted: BoolArray) -> FloatArray:
    """Return how much longer each rank took from its last bucket to the end than the quickest one, [S, n]."""
    with np.errstate(invalid="ignore"):
        shortest_s = np.where(counted, tail_s, np.inf).min(axis=1, keepdims=True)
        waits: FloatArray = tail_s - shortest_s
    return waits


def _medians(values: FloatArray, counted: BoolArray) -> FloatArray:
    """Return the median of each column over its finite counted entries; inf where it has none."""
    finite = counted & np.isfinite(values)
    ordered = np.sort(np.where(finite, values, np.inf), axis=0)
    num, column = finite.sum(axis=0), np.arange(values.shape[1])
    middle: FloatArray = (ordered[(num - 1) // 2, column] + ordered[num // 2 - (num == 0), column]) / 2
    return middle


def _means(values: FloatArray, counted: BoolArray) -> FloatArray:
    """Return the mean of each column over its finite counted entries; inf where it has none."""
    finite = counted & np.isfinite(values)
    num = finite.sum(axis=0)
    means: FloatArray = np.where(num > 0, np.where(finite, values, 0.0).sum(axis=0) / np.maximum(num, 1), np.inf)
    return means


def _timeline(window: StepWindow, step_s: FloatArray, bucket_bytes: tuple[int, ...]) -> Timeline | None:
    """Return the step of median duration; a step of infinite duration is not eligible."""
    num = int(np.isfinite(step_s).sum())
    if not num:
        return None
    s = int(np.argsort(step_s, kind="stable")[(num - 1) // 2])
    return Timeline(
        step=window.first_step + s,
        local_batches=tuple(window.local_batches[s].tolist()),
        before_ms=_row_ms(window.before_s[s]),
        ready_ms=_rows_ms(window.ready_s[s]),
        done_ms=_rows_ms(window.done_s[s]),
        bucket_bytes=bucket_bytes,
    )


def _row_ms(times_s: FloatArray) -> Reals:
    return _rows_ms(times_s[None])[0]


def _rows_ms(times_s: FloatArray) -> tuple[Reals, ...]:
    times = np.round(times_s * 1000, _DECIMALS)
    rows = times.tolist()
    if not np.isfinite(times).all():
        rows = [[_finite(time_ms) for time_ms in row] for row in rows]
    return tuple(map(tuple, rows))


def _ms(time_s: float) -> Real:
    return _finite(round(float(time_s) * 1000, _DECIMALS))


def _goodput(samples_per_s: float) -> Real:
    return _finite(round(samples_per_s, _DECIMALS)) if samples_per_s > 0 else None


def _finite(value: Any) -> Real:
    """Return the number, or None where it is not finite or not known."""
    return float(value) if value is not None and math.isfinite(value) else None
