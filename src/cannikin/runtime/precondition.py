"""The noise scale that Adam sees: that of the gradient divided by the root of its running variance v (math.md, 5).

v must be from before this step: with the step's own gradient in it both norms come out too small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["InverseVariance", "is_adam"]

_ADAM_FAMILY = ("Adam", "AdamW", "NAdam", "RAdam")
_FIRST_STEPS = 30  # v of a few gradients says little: a parameter seldom used would outweigh all others
_FLOOR = 1e-4  # least v, in means of v: parameters without a gradient must not count infinitely


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer divides by the root of `exp_avg_sq`."""
    return any(kind.__name__ in _ADAM_FAMILY for kind in type(optimizer).__mro__)


class InverseVariance:
    """1/v of a bucket's parameters, out of an Adam optimizer's own state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._decays: dict[int, float] = {}
        self._num_steps = 0

    def count_step(self) -> None:
        """The optimizer has taken a step."""
        self._num_steps += 1

    def __call__(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """1/v of these parameters in a row, corrected for its start at 0; None while it says little."""
        state = self._optimizer.state
        if self._num_steps < _FIRST_STEPS or any("exp_avg_sq" not in state.get(p, {}) for p in parameters):
            return None
        variance = torch.cat([_flat(state[p]["exp_avg_sq"], p) for p in parameters])
        variance = variance.to(torch.promote_types(variance.dtype, torch.float32))
        variance /= 1 - self._decay(parameters[0]) ** state[parameters[0]]["step"]
        return variance.clamp_(min=_FLOOR * variance.mean()).clamp_(min=1e-30).reciprocal_()

    def _decay(self, parameter: torch.Tensor) -> float:
        if id(parameter) not in self._decays:  # at first, and after add_param_group
            groups = self._optimizer.param_groups
            self._decays = {id(p): float(group["betas"][1]) for group in groups for p in group["params"]}
        return self._decays[id(parameter)]


def _flat(variance: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements in the order that the parameter's have in memory, which is the order they have in a bucket."""
    if variance.stride() != parameter.stride():  # a loaded state may have another order, such as that of the indices
        variance = torch.empty_like(parameter, dtype=variance.dtype).copy_(variance)
    return variance.detach().as_strided((variance.numel(),), (1,), variance.storage_offset())
