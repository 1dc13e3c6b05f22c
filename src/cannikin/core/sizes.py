"""Which local batches each rank has run, and what a new one costs.

A GPU chooses kernels and asks for memory when it sees a size for the first time, and a compiler may compile: that step
takes longer, on an H200 up to 2.9 times as long. All ranks wait for it. The excess over the usual step is learned from
the intervals of first steps, which do not count as measurements of the rank's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cannikin.core.saved import number, whole, whole_numbers
from cannikin.core.values import FloatArray, StepWindow
from cannikin.errors import StateError

_PRIOR_STEPS = 1.0  # what a new size costs before any was seen, in usual steps; it weighs as much as one observation
_MOST_STEPS = 20.0  # a change is never seen to cost more: the first compilation says little of the next
_MEMORY = 8  # observations
_KNOWN = 0.1  # share of that cost where every rank has run its size before


class SizeHistory:
    """The sizes that ranks have run, and the cost of a new one in steps."""

    def __init__(self, num_ranks: int) -> None:
        self.cost_steps = _PRIOR_STEPS
        self._num_seen = 1
        self._sizes: list[set[int]] = [set() for _ in range(num_ranks)]
        self._first: tuple[list[int], float] | None = None  # a split whose usual step is not known yet, and its first

    @property
    def num_sizes(self) -> list[int]:
        """Number of different local batches that each rank has run."""
        return [len(sizes) for sizes in self._sizes]

    @property
    def largest(self) -> list[int]:
        """The largest local batch that each rank has run; 0 where it has run none."""
        return [max(sizes, default=0) for sizes in self._sizes]

    def change_steps(self, local_batches: tuple[int, ...]) -> float:
        """Return what a change to these local batches costs, in usual steps."""
        known = all(batch in sizes for batch, sizes in zip(local_batches, self._sizes, strict=True))
        return self.cost_steps * (_KNOWN if known else 1.0)

    def with_ranks(self, origins: Sequence[int | None]) -> SizeHistory:
        """Return a history of other ranks, each with the sizes of the rank that it was; see `Learner.with_ranks`."""
        other = SizeHistory(len(origins))
        other.cost_steps, other._num_seen = self.cost_steps, self._num_seen
        first = {was: now for now, was in reversed(list(enumerate(origins)))}
        for now, was in enumerate(origins):
            if was is not None and first[was] == now:  # another device of the same kind has run none of them
                other._sizes[now] = set(self._sizes[was])
        if list(origins) == list(range(len(self._sizes))):
            other._first = self._first
        return other

    def observe(self, window: StepWindow) -> None:
        """Take in one window, with the steps marked invalid: these are the slow ones."""
        intervals = _intervals(window)
        rows = window.local_batches.tolist()
        begin = 0
        while begin < len(rows):
            end = next((s for s in range(begin, len(rows)) if rows[s] != rows[begin]), len(rows))
            self._observe_run(rows[begin], intervals[begin:end])
            begin = end

    def _observe_run(self, batches: list[int], intervals: FloatArray) -> None:
        """Take in steps of one split that follow each other."""
        is_start = not any(self._sizes)
        if self._first is not None and self._first[0] != batches:
            self._first = None  # it did not last
        is_new = [batch not in sizes for batch, sizes in zip(batches, self._sizes, strict=True)]
        for batch, sizes in zip(batches, self._sizes, strict=True):
            sizes.add(batch)
        if any(is_new) and not is_start and np.isfinite(intervals[0]):
            self._first, intervals = (batches, float(intervals[0])), intervals[1:]
        usual = intervals[np.isfinite(intervals)]
        if self._first is not None and len(usual) >= 2:
            excess = float(np.clip(self._first[1] / np.median(usual) - 1.0, 0.0, _MOST_STEPS))
            self._num_seen = min(self._num_seen + 1, _MEMORY)
            self.cost_steps += (excess - self.cost_steps) / self._num_seen
            self._first = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned, as plain lists and numbers."""
        sizes = [sorted(each) for each in self._sizes]
        first = None if self._first is None else list(self._first)
        return {"cost_steps": self.cost_steps, "num_seen": self._num_seen, "sizes": sizes, "first": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.cost_steps = number("cost_steps", state["cost_steps"])
        self._num_seen = whole("num_seen", state["num_seen"])
        if len(state["sizes"]) != len(self._sizes):
            raise StateError(f"sizes of {len(state['sizes'])} ranks loaded into a history of {len(self._sizes)}")
        self._sizes = [set(whole_numbers("sizes", sizes)) for sizes in state["sizes"]]
        first = state["first"]
        if first is not None and len(first[0]) != len(self._sizes):
            raise StateError(f"saved first={first!r:.200} is not of {len(self._sizes)} ranks: the state is damaged")
        self._first = None if first is None else (whole_numbers("first", first[0]), number("first", first[1]))


def _intervals(window: StepWindow) -> FloatArray:
    """Return how long each step took, as most ranks saw it, [S]; NaN where none saw a possible time."""
    seen = np.where(np.isfinite(window.interval_s) & (window.interval_s > 0), window.interval_s, np.nan)
    intervals = np.full(window.num_steps, np.nan)
    some = ~np.isnan(seen).all(axis=1)
    intervals[some] = np.nanmedian(seen[some], axis=1)
    return intervals
