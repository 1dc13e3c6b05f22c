"""Notices by the gradients of a window that a training goes wrong: a loss that is a sum, or nothing finite any more.

The gradient of a mean over b samples has E|g_i|^2 = G + S/b, which does not grow with b. That of a sum has
b^2 G + b S: log|g_i|^2 then rises by 1 to 2 per unit of log b, over the ranks of any one step with unequal batches.
"""

from __future__ import annotations

import math

import numpy as np

from cannikin.core.values import StepWindow

_LEAST_SPREAD = 0.1  # standard deviation of log b_i over ranks: less says nothing
_LEAST_STEPS = 10
_SLOPE = 0.5  # between that of means, 0 at most, and that of sums, 1 at least
_LOST = 30  # steps in a row without a finite gradient, after which the user is warned


class SumLoss:
    """Notices a sum, which weighting by b_i/B makes wrong, by the slope of log|g_i|^2 over log b_i, step by step."""

    def __init__(self) -> None:
        self._slopes: list[float] = []
        self._is_done = False

    def observe(self, window: StepWindow) -> str | None:
        """Return a warning for the user, once, when the loss is a sum beyond doubt."""
        if self._is_done:
            return None
        norms, batches = window.local_sqnorm, window.local_batches
        usable = (np.isfinite(norms) & (norms > 0) & (batches > 0)).all(axis=1)
        x, y = np.log(batches[usable]), np.log(norms[usable])
        x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
        spread = (x * x).mean(axis=1)
        tells = spread > _LEAST_SPREAD**2
        self._slopes += ((x * y).mean(axis=1)[tells] / spread[tells]).tolist()
        num_steps = len(self._slopes)
        if num_steps < _LEAST_STEPS:
            return None
        slope, error = float(np.mean(self._slopes)), float(np.std(self._slopes)) / math.sqrt(num_steps - 1)
        if slope - 3 * error < _SLOPE:
            self._is_done = slope + 3 * error < _SLOPE
            return None
        self._is_done = True
        return (
            f"over {num_steps} steps ranks with larger local batches had larger gradients (|g_i|^2 as b_i to the power "
            f"{slope:.1f}): the loss seems to be a sum over the local batch, or divided by something that is not its "
            'size, and is weighted wrongly; take its mean, or pass HeteroDataParallel(..., weighting="none"), which '
            "averages over ranks as DDP does"
        )


class Divergence:
    """Counts steps without a finite gradient since the last good one; a GradScaler's search for its scale has few."""

    def __init__(self) -> None:
        self._num_lost = 0
        self._began = ""  # where the first of these steps was, in words

    def observe(self, window: StepWindow) -> str | None:
        """Return a warning for the user, once, when the training seems to be lost."""
        good = np.flatnonzero(window.valid.all(axis=1) & ~window.overflowed)
        lost = np.flatnonzero(window.overflowed)
        if len(good):
            self._num_lost, self._began = 0, ""
        later = lost[lost > good[-1]] if len(good) else lost
        if len(later) and not self._began:
            self._began = _began(window, int(later[0]))
        before, self._num_lost = self._num_lost, 0 if len(good) else self._num_lost + len(lost)
        if not before < _LOST <= self._num_lost:
            return None
        return (
            f"none of the last {self._num_lost} gradients was finite, up to step "
            f"{window.first_step + window.num_steps - 1}: the training has most likely diverged{self._began}; look for "
            "NaN in data and loss, lower the learning rate, and go on from a checkpoint of before"
        )


def _began(window: StepWindow, row: int) -> str:
    """Say at which step it began, and on which ranks if not on all; ranks' norms are not taken in every step."""
    ranks = np.flatnonzero(np.isinf(window.local_sqnorm[row])).tolist()
    where = ""
    if 0 < len(ranks) < window.num_ranks:
        names, whose = (f"rank {ranks[0]}", "its") if len(ranks) == 1 else (f"ranks {ranks}", "their")
        where = f", on {names} alone, so {whose} data and device come first"
    return f" (it began at step {window.first_step + row}{where})"
