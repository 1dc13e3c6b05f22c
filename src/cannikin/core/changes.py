"""When a rank changed its speed: a clipped two-sided CUSUM of standardised residuals, carried from window to window."""

from __future__ import annotations

import numpy as np

from cannikin.core.records import FloatArray, IntArray

__all__ = ["find_changes"]

_DRIFT, _ALARM, _CLIP = 0.5, 9.0, 3.0  # in standard deviations: four steps of a doubled time


def find_changes(residuals: FloatArray, scatter: FloatArray, cusum: FloatArray) -> tuple[IntArray, FloatArray]:
    """The step of a window at which each rank's speed changed, its length where it did not; and the sums after it.

    Args:
        residuals: log time over what was promised, of forward and of backward, [2, S, n]; NaN where nothing was.
        scatter: what counts as a standard deviation of each rank, [n].
        cusum: the sums before this window, of slower and of faster, [2, n]; 0 in the beginning and after a change.

    Example:
        >>> slower = np.full((2, 6, 1), 0.7)
        >>> slower[:, :2] = 0.0
        >>> find_changes(slower, np.array([0.05]), np.zeros((2, 1)))[0].tolist()
        [2]
    """
    steps, num_ranks = residuals.shape[1:]
    sums, changed = cusum.copy(), np.full(num_ranks, steps)
    # Each component is clipped by itself: a lone outlier in one of them is no change of speed.
    scores = np.clip(np.nan_to_num(residuals) / scatter, -_CLIP, _CLIP).mean(axis=0)
    began = np.zeros((2, num_ranks), dtype=np.int64)
    for s in range(steps):
        seen = ~np.isnan(residuals[0, s])
        for sign, side in ((1.0, 0), (-1.0, 1)):
            began[side] = np.where(sums[side] == 0, s, began[side])
            grown = np.maximum(0.0, sums[side] + sign * scores[s] - _DRIFT)
            sums[side] = np.where(seen, grown, sums[side])
            alarm = (sums[side] > _ALARM) & (changed == steps)
            changed = np.where(alarm, began[side], changed)
    sums[:, changed < steps] = 0.0
    return changed, sums
