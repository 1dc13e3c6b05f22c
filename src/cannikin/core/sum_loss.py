"""Notices a loss that is a sum over the local batch, which weighting by b_i/B makes wrong.

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


class SumLoss:
    """Averages the slope of log|g_i|^2 over log b_i, step by step."""

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
