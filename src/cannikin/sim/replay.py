"""Fits a simulated cluster to a real run's log, and runs its splits again on it: does the simulator tell the truth?

The log has, window by window, each rank's median times at its local batch and one step in full. Curves go through the
windows' medians by local batch; overlap shares, all-reduce times and each rank's scatter come from the full steps.
These are steps of median length, so they show too little scatter, and scatter is what makes the slowest of n ranks
slower: one factor on all ranks' scatter is raised until the log's steps take as long as measured. The fit is of the
whole run: a rank that changed its speed is fitted as if it had not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cannikin.core.fit import bucket_times, fit_curves
from cannikin.core.perf import Curve
from cannikin.core.values import NO_MAX, FloatArray, StepWindow
from cannikin.errors import RunLogError
from cannikin.runlog import RunLog, WindowRecord, replay_window
from cannikin.runlog.records import LEAST_MS, MOST
from cannikin.sim.hardware import Machine

_SKIPPED = 1  # windows at a run's start that hold its warm-up
_LEAST_JITTER, _MOST_JITTER = 0.001, 0.3
_STEPS = 400  # simulated for each split that is compared
_HALVINGS = 12  # of the range in which the scatter is sought
_ALL = slice(None)
_MOST_POINTS = 32  # local batches per rank that the fit looks at


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One split of the log: its steps' median duration as measured and as simulated."""

    local_batches: tuple[int, ...]
    num_windows: int
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Simulated over measured time, minus 1."""
        return self.simulated_s / self.measured_s - 1


def machine_from_log(log: RunLog, part: slice = _ALL) -> Machine:
    """Return the cluster that a run log, or a part of its windows, describes.

    Raises:
        RunLogError: the log has no window with a step in full.
    """
    usable = _usable(log, part)
    ranks, num_buckets = usable[-1][1].num_ranks, usable[-1][1].num_buckets
    windows = [window for _, window in usable if window.num_buckets == num_buckets and window.valid.all()]
    curves = [_curve([record for record, _ in usable], name) for name in ("before_ms", "backward_ms")]
    ready = np.concatenate([window.ready_s for window in windows])
    shares = np.minimum(np.maximum.accumulate(np.median(ready / ready[..., -1:], axis=0), axis=-1), 1.0)
    header = log.headers[-1]
    names = tuple(info.name for info in header.ranks) if len(header.ranks) == ranks else ()
    limits = header.job.max_local or (None,) * ranks
    machine = Machine(
        names=names if all(names) and names else tuple(f"rank{i}" for i in range(ranks)),
        launch_s=np.stack([curve.floor_s for curve in curves]),
        fixed_s=np.stack([curve.fixed_s for curve in curves]),
        sample_s=np.stack([curve.per_sample_s for curve in curves]),
        sharpness=np.full(ranks, 64.0),
        ready_by_layers=shares,
        ready_by_work=shares,
        bucket_s=np.median(np.concatenate([bucket_times(window) for window in windows]), axis=0),
        max_batch=np.array([NO_MAX if limit is None else limit for limit in limits]),
        jitter=_jitter(windows, curves),
        bucket_jitter=np.zeros(ranks),
        outliers=np.zeros(ranks),
        comm_jitter=0.0,
        comm_outliers=0.0,
        drift=0.0,
    )
    return _scattered(machine, log, part)


def _scattered(machine: Machine, log: RunLog, part: slice) -> Machine:
    """Return the machine with the least factor (>= 1) on its ranks' scatter that makes steps as long as measured."""

    def at(factor: float) -> Machine:
        return replace(machine, jitter=np.minimum(factor * machine.jitter, _MOST_JITTER))

    def too_short(factor: float) -> bool:
        rows = compare(log, at(factor), part)
        return float(sum(row.num_windows * np.log(1 + row.error) for row in rows)) < 0

    low, high = 1.0, _MOST_JITTER / float(machine.jitter.min())
    if not too_short(low):
        return machine
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if too_short(middle) else (low, middle)
    return at(low)


def compare(log: RunLog, machine: Machine, part: slice = _ALL, *, seed: int = 0) -> list[Comparison]:
    """Run every split of the log, or of a part of its windows, on the machine; the most frequent comes first."""
    groups: dict[tuple[int, ...], list[float]] = {}
    for record, _ in _usable(log, part):
        if record.step_ms is not None:
            groups.setdefault(record.local_batches, []).append(record.step_ms / 1e3)
    rng = np.random.default_rng(seed)
    rows = []
    for batches, measured in sorted(groups.items(), key=lambda group: -len(group[1])):
        times = machine.measure(np.tile(np.array(batches), (_STEPS, 1)), 0, rng)
        rows.append(
            Comparison(
                local_batches=batches,
                num_windows=len(measured),
                measured_s=float(np.median(measured)),
                simulated_s=float(np.median(times.step_s)),
            )
        )
    return rows


def _usable(log: RunLog, part: slice) -> list[tuple[WindowRecord, StepWindow]]:
    """Return the windows measured on all ranks, without the run's first, each with its step in full."""
    complete = [
        (record, window)
        for record in log.windows[_SKIPPED:][part]
        if (window := replay_window(record)) is not None and _is_whole(record, window.num_ranks)
    ]
    if not any(window.valid.all() for _, window in complete):
        raise RunLogError("the run log has no window measured on all ranks after its first: train longer, then fit")
    ranks = complete[-1][1].num_ranks
    return [(record, window) for record, window in complete if window.num_ranks == ranks]


def _is_whole(record: WindowRecord, num_ranks: int) -> bool:
    """Return whether a record has possible times and batches of all ranks."""
    lists = (record.local_batches, record.before_ms, record.backward_ms)
    times = (*record.before_ms, *record.backward_ms, record.step_ms)
    possible = all(time_ms is not None and LEAST_MS < time_ms < MOST for time_ms in times)
    sizes = all(1 <= batch < MOST for batch in record.local_batches) and 0 < record.num_valid < MOST
    return possible and sizes and {len(values) for values in lists} == {num_ranks}


def _curve(records: list[WindowRecord], name: str) -> Curve:
    """Fit each rank's curve to the medians of its windows, by local batch."""
    ranks = len(records[0].local_batches)
    batches, seconds = np.ones((2, ranks, _MOST_POINTS))
    weights = np.zeros((ranks, _MOST_POINTS))
    for rank in range(ranks):
        points: dict[int, list[tuple[float, int]]] = {}
        for record in records:
            time_ms = getattr(record, name)[rank]
            points.setdefault(record.local_batches[rank], []).append((time_ms / 1e3, record.num_valid))
        common = sorted(points, key=lambda batch: -len(points[batch]))[:_MOST_POINTS]
        for k, batch in enumerate(sorted(common)):
            batches[rank, k] = batch
            seconds[rank, k] = max(float(np.median([time_s for time_s, _ in points[batch]])), 1e-9)
            weights[rank, k] = sum(count for _, count in points[batch])
    return fit_curves(batches, seconds, weights, noise=0.03).curve


def _jitter(windows: list[StepWindow], curves: list[Curve]) -> FloatArray:
    """Return each rank's relative scatter about its curves, from the steps in full."""
    forward, backward = curves
    batches = np.concatenate([window.local_batches for window in windows])
    seconds = np.concatenate([window.before_s + window.ready_s[..., -1] for window in windows])
    residuals = np.log(seconds / (forward.at(batches) + backward.at(batches)))
    spread = 1.4826 * np.median(np.abs(residuals - np.median(residuals, axis=0)), axis=0)
    scatter: FloatArray = np.clip(spread, _LEAST_JITTER, _MOST_JITTER)
    return scatter
