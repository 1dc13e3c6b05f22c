"""Steps taken, each counted by what it is worth at the initial batch."""

from __future__ import annotations

from typing import Any

import torch

from cannikin.runtime.hostcopy import HostCopy

__all__ = ["Progress"]


class Progress:
    """The sum of the gains of the steps that the optimizer took; a step that GradScaler skipped does not count."""

    def __init__(self) -> None:
        self._total = 0.0
        self._uncertain: tuple[HostCopy, float] | None = None  # whether the last step was skipped, and its gain

    def advance(self, optimizer: torch.optim.Optimizer, gain: float) -> None:
        """The optimizer's step hooks have run, which a fused optimizer's do on a skipped step too."""
        self.settle()
        self._total += gain
        found_inf: Any = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor):
            self._uncertain = HostCopy([found_inf.clone().reshape(())]), gain

    def settle(self) -> float:
        """Take back the last step, should it have been skipped; progress so far."""
        if self._uncertain is not None:
            (found_inf, gain), self._uncertain = self._uncertain, None
            self._total -= gain * found_inf.read()[0]
        return self._total

    @property
    def total(self) -> float:
        """Progress so far; a skipped step of a fused optimizer may be counted until the next one."""
        return self._total

    @total.setter
    def total(self, value: float) -> None:
        self._total, self._uncertain = value, None
