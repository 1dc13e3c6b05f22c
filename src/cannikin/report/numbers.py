"""What the arrays of a run come to: shares of time, errors of predictions, and fewer points for drawing.

Legend: W windows, n ranks, A activities.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cannikin.core.records import BoolArray, FloatArray, IntArray
from cannikin.report.arrays import ByRank, Metric, Windows
from cannikin.report.rank_times import ACTIVITIES, activities

__all__ = [
    "Phase",
    "activity_ms",
    "column_means",
    "early_rows",
    "late_rows",
    "mean_shares",
    "phase",
    "prediction_error",
    "rank_rows",
    "thin",
    "time_to_target_ms",
]

_MOST_PHASE_WINDOWS = 50


def thin(values: FloatArray, most_bins: int) -> IntArray:
    """Indices of the rows to draw: of each bin of rows the first, the last, the lowest and the highest.

    Nothing is lost where there are few rows; where there are many, a line through what is left covers the same
    pixels, peaks included. `values` is [W] or [W, k]; of several columns each keeps its own peaks.

    Example:
        >>> thin(np.array([0.0, 9.0, 1.0, 2.0, 3.0, 4.0, -5.0, 6.0]), most_bins=1).tolist()
        [0, 1, 6, 7]
    """
    num = len(values)
    if num <= 4 * most_bins:
        return np.arange(num)
    table = values.reshape(num, -1)
    kept = [np.array([0, num - 1])]
    edges = np.linspace(0, num, most_bins + 1).astype(np.int64)
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = table[start:end]
        low, high = np.where(np.isfinite(part), part, np.inf), np.where(np.isfinite(part), part, -np.inf)
        kept.append(start + np.array([0, end - start - 1, *low.argmin(axis=0), *high.argmax(axis=0)]))
    return np.unique(np.concatenate(kept))


def column_means(windows: Windows, values: FloatArray | ByRank, most_columns: int) -> tuple[FloatArray, FloatArray]:
    """Equal stretches of steps: their edges, [C + 1], and the means of `values`, [W, n], over each, [C, n].

    A stretch that lies inside a window has that window's values; NaN where no window of it knows any.
    """
    ends = windows.first_step + windows.num_steps
    edges = np.linspace(windows.first_step[0], ends[-1], min(most_columns, len(windows)) + 1)
    last = len(windows) - 1
    starts = np.clip(np.searchsorted(ends, edges[:-1], side="right"), 0, last)
    stops = np.maximum(np.searchsorted(windows.first_step, edges[1:], side="left"), starts + 1)
    means = np.full((len(starts), values.shape[1]), np.nan)
    for column, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        part = np.asarray(values[start:stop], dtype=np.float64)
        known = np.isfinite(part).sum(axis=0)
        np.divide(np.nan_to_num(part).sum(axis=0), known, out=means[column], where=known > 0)
    return edges, means


def rank_rows(num_ranks: int, most: int) -> list[int]:
    """The ranks to draw one by one: all, or `most` of them evenly spaced, the first and the last among them.

    Example:
        >>> rank_rows(3, 64), rank_rows(9, 3)
        ([0, 1, 2], [0, 4, 8])
    """
    ranks = np.unique(np.linspace(0, num_ranks - 1, min(num_ranks, most)).round())
    return [int(rank) for rank in ranks]


def activity_ms(windows: Windows, rows: slice | IntArray | BoolArray) -> FloatArray:
    """What each rank did with the time of a step in these windows, [W, n, A]; NaN where a rank measured nothing.

    Example:
        >>> from cannikin.report.gather import gather
        >>> from cannikin.runlog import Header, JobInfo, WindowRecord
        >>> window = WindowRecord(first_step=0, num_steps=5, num_valid=5, total_batch=32, local_batches=(24, 8),
        ...     before_ms=(10.0, 12.0), backward_ms=(20.0, 23.0), done_ms=(30.0, 28.0), wait_ms=(5.0, 0.0))
        >>> job = JobInfo(batch_size=32)
        >>> run = gather([Header(cannikin_version="1", started="", policy="even", world_size=2, job=job), window])
        >>> activity_ms(run.windows, slice(None))[0].tolist()
        [[10.0, 20.0, 5.0, 5.0, 0.0, 0.0], [12.0, 23.0, 5.0, 0.0, 0.0, 0.0]]
    """
    names = ("before", "backward", "done", "wait", "loader", "other")
    return activities(**{name: getattr(windows, f"{name}_ms")[rows].astype(np.float64) for name in names})


def mean_shares(times_ms: FloatArray, num_steps: FloatArray) -> FloatArray:
    """Each activity's share of each rank's time over windows of this many steps, [n, A]; NaN for a silent rank."""
    weights = np.where(np.isfinite(times_ms).all(axis=-1), num_steps[:, None], 0.0)
    spent = (np.nan_to_num(times_ms) * weights[..., None]).sum(axis=0)
    whole = spent.sum(axis=-1, keepdims=True)
    shares: FloatArray = np.divide(spent, whole, out=np.full_like(spent, np.nan), where=whole > 0)
    return shares


def early_rows(windows: Windows) -> IntArray:
    """The first windows, as long as they have the first split, and not too many of them."""
    return _run_of_equals(windows, first=True)


def late_rows(windows: Windows) -> IntArray:
    """The last windows, as far back as they have the last split, and not too many of them."""
    return _run_of_equals(windows, first=False)


def _run_of_equals(windows: Windows, *, first: bool) -> IntArray:
    num = len(windows)
    rows = np.arange(num)[:_MOST_PHASE_WINDOWS] if first else np.arange(num)[::-1][:_MOST_PHASE_WINDOWS]
    if not num:
        return rows
    split = np.nan_to_num(windows.local_batches[rows])
    same = np.logical_and.accumulate((split == split[0]).all(axis=1))
    return np.sort(rows[same])


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase:
    """A stretch of windows with one split: medians over them, and shares of time.

    `spread` is by how much of the step the rank that waits most waits longer than the one that waits least, and
    `slowest` the latter: the rank that the others wait for. None where that was not measured.
    """

    local_batches: tuple[int, ...]
    step_ms: float
    samples_per_s: float
    shares: FloatArray
    slowest: int | None
    spread: float

    @property
    def total_batch(self) -> int:
        """B."""
        return sum(self.local_batches)


def phase(windows: Windows, rows: IntArray) -> Phase:
    """What these windows, at least one, have in common."""
    split = windows.local_batches[rows[-1]]
    local_batches = tuple(int(batch) for batch in split[np.isfinite(split)])
    step_ms = _median(windows.step_ms[rows])
    shares = mean_shares(activity_ms(windows, rows), windows.num_steps[rows])
    wait = shares[:, ACTIVITIES.index("waiting")]
    known = np.isfinite(wait).any()
    return Phase(
        local_batches=local_batches,
        step_ms=step_ms,
        samples_per_s=sum(local_batches) / step_ms * 1e3 if step_ms > 0 else float("nan"),
        shares=shares,
        slowest=int(np.nanargmin(wait)) if known else None,
        spread=float(np.nanmax(wait) - np.nanmin(wait)) if known else float("nan"),
    )


def prediction_error(windows: Windows) -> float:
    """Median of |predicted - measured| / measured over the windows with a prediction; NaN where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.abs(windows.predicted_ms / windows.step_ms - 1.0)
    return _median(errors)


def time_to_target_ms(metric: Metric, target: float, *, upwards: bool) -> float | None:
    """When the metric first reached the target; None where it never did, or at a time that is not known."""
    reached = (metric.value >= target if upwards else metric.value <= target) & np.isfinite(metric.elapsed_ms)
    return float(metric.elapsed_ms[reached.argmax()]) if reached.any() else None


def _median(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")
