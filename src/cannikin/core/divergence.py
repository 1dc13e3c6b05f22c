"""Notices a training whose gradients are not finite any more, and where that began."""

from __future__ import annotations

import numpy as np

from cannikin.core.values import StepWindow

_LOST = 30  # steps in a row without a finite gradient, after which the user is warned


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
