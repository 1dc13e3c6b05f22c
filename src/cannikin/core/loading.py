"""Which ranks wait for their data, and how long their loaders need for a batch: the L_i(b) of `perf`.

Loading overlaps the step, so it shows only where it is the slower of the two. Three rules follow:

1. The whole interval of a rank that waits for its data is one observation of L_i, if the other ranks wait for this one.
   (A rank that waits for others in the all-reduce was not held up by its loader: to take a batch from a worker always
   costs a moment.)
2. Where the line L_i promises a wait and there is none, the line is wrong and is dropped.
3. Where the line promises next to no wait, a missing wait proves nothing: the split has taken the line into account.
   The line is then lowered a little in every window, since the loader may have become faster, until a wait confirms it
   or it no longer matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cannikin.core.perf import Curve
from cannikin.core.saved import LONG_S, table
from cannikin.core.values import BoolArray, StepWindow

_WAITS = 0.2  # a wait counts from this share of the interval, in most steps of a window: handing over may take 15%
_STILL_WAITS = 0.1  # a wait confirms a line that is known from this share of the interval
_NEAR = 0.05  # shares of the interval that differ by less are taken as equal
_APART = 1.25  # local batches with this ratio tell fixed from per-sample time
_FADE = 0.99  # factor per window on a line that no wait confirms
_IDLE = 0.8  # below this share of the interval a line no longer matters


def _is_last(window: StepWindow) -> BoolArray:
    """Return which ranks the others wait for in the all-reduce, or wait there no longer than for their data, [S, n]."""
    reducing_s = np.where(window.valid, window.done_s[..., -1] - window.ready_s[..., -1], np.inf)
    with np.errstate(invalid="ignore"):  # inf - inf, where no rank is valid
        slack_s = reducing_s - reducing_s.min(axis=1, keepdims=True)
    is_last: BoolArray = slack_s <= window.load_s + _NEAR * window.interval_s
    return is_last


class LoadHistory:
    """The last two local batches, far enough apart, and their intervals, of each rank whose loader is the limit."""

    def __init__(self, num_ranks: int) -> None:
        self._batches = np.zeros((2, num_ranks))  # the latest, and one other; 0 where there is none
        self._seconds = np.zeros((2, num_ranks))

    @property
    def known(self) -> BoolArray:
        """Ranks whose loader is, or was a short time ago, slower than the step, [n]."""
        known: BoolArray = self._batches[0] > 0
        return known

    def observe(self, window: StepWindow) -> None:
        """Take in one window, without the steps marked invalid."""
        if not window.load_s.any() and not self.known.any():
            return
        share = window.load_s / np.where(window.valid, window.interval_s, 1.0)
        late = window.valid & (share > np.where(self.known, _STILL_WAITS, _WAITS)) & _is_last(window)
        for rank in np.flatnonzero(window.valid.any(axis=0)).tolist():
            limited = late[:, rank].sum() > 0.5 * window.valid[:, rank].sum()
            steps = np.flatnonzero(late[:, rank] if limited else window.valid[:, rank])
            batch = window.local_batches[steps[-1], rank]
            steps = steps[window.local_batches[steps, rank] == batch]
            interval_s = float(np.median(window.interval_s[steps, rank]))
            if limited:
                self._add(rank, float(batch), interval_s)
            elif self.known[rank]:
                self._doubt(rank, self.curve().at(np.full(window.num_ranks, batch))[rank] / interval_s)

    def curve(self) -> Curve:
        """Return L_i: a line through both points of a rank, or through the origin and its only one; 0 without any."""
        (batch, other_batch), (seconds, other_seconds) = self._batches, self._seconds
        per_sample = np.divide(seconds, batch, out=np.zeros_like(batch), where=batch > 0)
        slope = np.divide(
            seconds - other_seconds, batch - other_batch, out=np.zeros_like(batch), where=batch != other_batch
        )
        fixed = seconds - slope * batch
        line = (other_batch > 0) & (slope > 0) & (fixed > 0)
        return Curve(fixed_s=np.where(line, fixed, 0.0), per_sample_s=np.where(line, slope, per_sample))

    def with_ranks(self, origins: Sequence[int | None]) -> LoadHistory:
        """Return a history of other ranks, each with the line of the rank that it was; see `Learner.with_ranks`."""
        other = LoadHistory(len(origins))
        for now, was in enumerate(origins):
            if was is not None:
                other._batches[:, now], other._seconds[:, now] = self._batches[:, was], self._seconds[:, was]
        return other

    def _add(self, rank: int, batch: float, interval_s: float) -> None:
        """Make this the rank's latest point, and keep whichever of the old ones is far enough from it."""
        for k in (0, 1):
            old = self._batches[k, rank]
            if old > 0 and max(batch / old, old / batch) >= _APART:
                self._batches[1, rank], self._seconds[1, rank] = old, self._seconds[k, rank]
                break
        else:
            self._batches[1, rank] = self._seconds[1, rank] = 0.0
        self._batches[0, rank], self._seconds[0, rank] = batch, interval_s

    def _doubt(self, rank: int, promised: float) -> None:
        """Lower or drop a line that promised loading of this share of the interval, where there was no wait."""
        if _IDLE <= promised <= 1 + _NEAR:
            self._seconds[:, rank] *= _FADE
        else:
            self._batches[:, rank] = self._seconds[:, rank] = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned, as plain lists."""
        return {"batches": self._batches.tolist(), "seconds": self._seconds.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        shape = self._batches.shape
        self._batches = table("batches", state["batches"], shape, high=1e12)
        self._seconds = table("seconds", state["seconds"], shape, high=LONG_S)
