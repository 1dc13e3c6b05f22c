"""Where a step's time goes on each rank: computing, communicating, waiting for slower ranks, loading data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cannikin.runlog import WindowRecord

__all__ = ["RankTimes", "rank_times"]


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """A rank's typical step, milliseconds.

    Args:
        compute_ms: forward, backward and optimizer.
        communication_ms: all-reduce that no computing of this rank hid, without the waiting.
        wait_ms: waiting for a slower rank.
        loading_ms: waiting for data.
    """

    compute_ms: float
    communication_ms: float
    wait_ms: float
    loading_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """All of it."""
        return sum(self.parts_ms)

    @property
    def parts_ms(self) -> tuple[float, float, float, float]:
        """Compute, communication, wait and loading."""
        return self.compute_ms, self.communication_ms, self.wait_ms, self.loading_ms

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """The same as shares of the step; all 0 where it took no time."""
        compute, communication, wait, loading = self.parts_ms
        whole = self.total_ms or 1.0
        return compute / whole, communication / whole, wait / whole, loading / whole


def rank_times(window: WindowRecord) -> list[RankTimes | None]:
    """Every rank's times in a window; None where nothing of a rank was measured.

    Example:
        >>> window = WindowRecord(first_step=0, num_steps=5, num_valid=5, total_batch=8, local_batches=(4, 4),
        ...                       before_ms=(10.0, None), backward_ms=(20.0, 20.0), done_ms=(50.0, 25.0),
        ...                       wait_ms=(25.0, 0.0))
        >>> rank_times(window)[0].parts_ms, rank_times(window)[1]
        ((30.0, 5.0, 25.0, 0.0), None)
    """
    size = len(window.local_batches)
    before, backward, done, wait, loader = (
        _padded(times, size)
        for times in (window.before_ms, window.backward_ms, window.done_ms, window.wait_ms, window.loader_ms)
    )
    found: list[RankTimes | None] = []
    for start, back, end, waited, load in zip(before, backward, done, wait, loader, strict=True):
        if start is None or back is None or end is None:
            found.append(None)
            continue
        loading, waiting = load or 0.0, waited or 0.0
        found.append(
            RankTimes(
                compute_ms=max(0.0, start - (loading if window.loader_inside else 0.0)) + back,
                communication_ms=max(0.0, end - back - waiting),
                wait_ms=waiting,
                loading_ms=loading,
            )
        )
    return found


def _padded(times: Sequence[float | None], size: int) -> Sequence[float | None]:
    """One entry a rank, None where the log has none."""
    return times if len(times) == size else (*times, *[None] * size)[:size]
