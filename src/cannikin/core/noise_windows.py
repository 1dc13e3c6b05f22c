"""From windows of steps to the noise scale: what every planner with a `NoiseTracker` feeds it."""

from __future__ import annotations

import numpy as np

from cannikin.core.noise_tracker import NoiseTracker
from cannikin.core.records import StepWindow

__all__ = ["observe_noise"]


def observe_noise(tracker: NoiseTracker, window: StepWindow) -> None:
    """Feed the tracker every step whose norms were taken on all ranks, and those with an infinite one to count.

    Of the latter the optimizer mostly takes no step (GradScaler), so their times are not valid. One rank alone is
    compared with itself one step before, where both steps are in the window: flagged as biased.
    """
    previous = -2
    for s in np.flatnonzero(window.overflowed | window.valid.all(axis=1)).tolist():
        if np.isnan(window.local_sqnorm[s]).all():
            continue
        # A negative norm is no norm: counted as skipped, like one that is not finite.
        local = np.where(window.local_sqnorm[s] >= 0, window.local_sqnorm[s], np.nan)
        if window.num_ranks > 1:
            tracker.update(window.local_batches[s], local, float(window.global_sqnorm[s]))
        else:
            dot = float(window.previous_dot[s])
            known = previous == s - 1 and not np.isnan(dot)
            tracker.update_single(int(window.local_batches[s, 0]), float(local[0]), dot if known else None)
        previous = s
