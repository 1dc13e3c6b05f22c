"""A run reduced to arrays: what the figures are drawn from.

Legend: W windows, n ranks, the most there ever were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cannikin.core.records import BoolArray, FloatArray
from cannikin.runlog import EventRecord, Header, PlanRecord, Timeline

__all__ = ["WINDOW_COLUMNS", "ByRank", "Metric", "RunArrays", "Windows", "latest"]

ByRank = npt.NDArray[np.float32]  # [W, n]: a long log of many ranks has most of its numbers in these

# What a window says once, in the order in which it is kept.
WINDOW_COLUMNS = (
    *("first_step", "num_steps", "total_batch", "step_ms", "elapsed_ms", "progress", "lr_factor", "num_skipped"),
    *("noise_scale", "noise_low", "noise_high", "predicted_ms"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """The windows that count, oldest first: [W], and by rank [W, n]; NaN where not known.

    As in `WindowRecord`, but `before_ms` is without loading, `elapsed_ms` goes on over resumes, the noise scale and its
    limits are here, and `predicted_ms` is what the last plan before the window said of the window's split.
    """

    first_step: FloatArray
    num_steps: FloatArray
    total_batch: FloatArray
    step_ms: FloatArray
    elapsed_ms: FloatArray
    progress: FloatArray
    lr_factor: FloatArray
    num_skipped: FloatArray
    noise_scale: FloatArray
    noise_low: FloatArray
    noise_high: FloatArray
    predicted_ms: FloatArray
    local_batches: ByRank
    before_ms: ByRank
    backward_ms: ByRank
    done_ms: ByRank
    wait_ms: ByRank
    loader_ms: ByRank
    other_ms: ByRank

    def __len__(self) -> int:
        return len(self.first_step)

    @property
    def num_ranks(self) -> int:
        """n."""
        return int(self.local_batches.shape[1])


class Metric(NamedTuple):
    """What the user evaluated, over time: [E] each."""

    step: FloatArray
    elapsed_ms: FloatArray
    value: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class RunArrays:
    """One run, of any length, in little memory.

    Args:
        name: for people.
        headers: the first, and one for each resume.
        windows: what was measured.
        num_redone: windows left out, since a resume from an older state did their steps again.
        metrics: by name.
        plans: those that changed the split, the first and the last such ones of very many.
        num_changes: how often the split changed.
        last_plan: the last plan of all.
        compared: plans that compared total batches, spread evenly over the run.
        events: all but evaluations and epochs, the first and the last ones of very many.
        num_events: how many there were.
        early, late: a step's timeline of the first and of the last split.
        last_step: the highest step of which the log tells since the last header.
        ended: the event that says so, where the run ended as it should.
        truncated, num_unreadable, num_unknown: as in `RunLog`.
    """

    name: str
    headers: tuple[Header, ...]
    windows: Windows
    num_redone: int
    metrics: dict[str, Metric]
    plans: tuple[PlanRecord, ...]
    num_changes: int
    last_plan: PlanRecord | None
    compared: tuple[PlanRecord, ...]
    events: tuple[EventRecord, ...]
    num_events: int
    early: Timeline | None
    late: Timeline | None
    last_step: int
    ended: EventRecord | None
    truncated: bool
    num_unreadable: int
    num_unknown: int

    @property
    def header(self) -> Header:
        """The last header: the run as it is now."""
        return self.headers[-1]

    @property
    def duration_ms(self) -> float:
        """Time that the log spans, pauses before resumes left out; NaN where it tells of none."""
        known = [value.elapsed_ms[-1] for value in self.metrics.values() if len(value.elapsed_ms)]
        known += [self.windows.elapsed_ms[-1]] if len(self.windows) else []
        finite = [value for value in known if np.isfinite(value)]
        return float(max(finite)) if finite else float("nan")


def latest(steps: FloatArray) -> BoolArray:
    """Which entries stand, where a step that comes again takes the place of what was there from that step on.

    Example:
        >>> latest(np.array([0.0, 10.0, 20.0, 10.0, 20.0])).tolist()
        [True, False, False, True, True]
    """
    stands = np.ones(len(steps), dtype=np.bool_)
    if len(steps) > 1:
        stands[:-1] = steps[:-1] < np.minimum.accumulate(steps[::-1])[::-1][1:]
    return stands
