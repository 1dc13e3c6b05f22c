"""The learning rate follows the total batch: applied in the optimizer's public step hooks, and undone after each step.

So schedulers, logging and checkpoints see the user's own rate.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from cannikin.core.lr import LR_RULES
from cannikin.errors import InvalidInputError

__all__ = ["RateScaler", "choose_rule"]

_ADAM_FAMILY = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam")


def choose_rule(lr_rule: str, optimizer: torch.optim.Optimizer, warmup_steps: float = 0.0) -> tuple[str, str]:
    """The rule in force and a sentence that says why; `warmup_steps` is LEGW's alone."""
    if warmup_steps < 0:
        raise InvalidInputError(f"warmup_steps={warmup_steps} must not be negative")
    if warmup_steps and lr_rule != "legw":
        warnings.warn(f"warmup_steps is ignored: lr_rule={lr_rule!r}, and only 'legw' warms up", stacklevel=4)
    if lr_rule != "auto":
        if lr_rule not in LR_RULES:
            raise InvalidInputError(f"lr_rule={lr_rule!r} is unknown: choose one of auto, {', '.join(LR_RULES)}")
        return lr_rule, f"lr_rule={lr_rule!r} as asked"
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        return "adascale", "lr_rule='adascale', because the optimizer is SGD"
    if kind in _ADAM_FAMILY:
        return "sqrt", f"lr_rule='sqrt', because the optimizer is {kind}"
    return "none", f"lr_rule='none': no rule is known for {kind}; pass lr_rule= to choose one"


class RateScaler:
    """Multiplies every group's rate for the time of one optimizer step; rates may be numbers or tensors."""

    def __init__(self) -> None:
        self._saved: list[tuple[dict[str, Any], Any]] = []

    def apply(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Scale, after undoing what a step that raised has left behind."""
        self.undo()
        if factor == 1.0:
            return
        scaled: set[int] = set()  # groups may share one tensor: torch gives them its default as it is
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                if id(rate) not in scaled:
                    self._saved.append((group, rate.clone()))
                    rate.mul_(factor)
                    scaled.add(id(rate))
            else:
                self._saved.append((group, rate))
                group["lr"] = rate * factor

    def undo(self) -> None:
        """Give every group its own rate back."""
        for group, rate in self._saved:
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._saved.clear()
