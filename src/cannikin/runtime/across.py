"""Numbers over the samples of all ranks inside a loss: global means, and all ranks' rows, with their gradients.

The loss of all ranks together is L = sum_i w_i L_i, where w_i is what this rank's gradient is multiplied by: b_i/B, or
1/n under weighting="none". A number that stems from every rank's samples stands in every L_i, so that rank j's samples
get a gradient from all of them, which its own weight will multiply:

    dL/dx_j = w_j (1/w_j sum_i w_i dL_i/dx_j)

What is in parentheses is what backward returns here: the weighted sum over ranks, divided by this rank's weight. So
a loss that is a mean over this rank's own rows, against all ranks' columns, has the gradient of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cannikin.runtime.weighting import weighted


class Together:
    """This rank's place among those that compute a loss together.

    Args:
        group: the ranks.
        weight: w_i; 0 where this rank's samples are padding, which counts nowhere.
        meeting: what to do each collective in, so that a rank that does not come is named.
    """

    def __init__(self, group: Any, weight: float, meeting: Callable[[], AbstractContextManager[None]]) -> None:
        self.group, self.weight, self.meeting = group, weight, meeting

    def sum_gradients(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return sum_i w_i dL_i / w_j; zeros where this rank has no weight."""
        total = weighted(gradient, self.weight)
        with self.meeting():
            dist.all_reduce(total, group=self.group)
        return total / self.weight if self.weight else torch.zeros_like(gradient)


class _Sum(torch.autograd.Function):
    """The sum of a tensor over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, together: Together) -> torch.Tensor:
        ctx.together = together
        total = tensor.clone()
        with together.meeting():
            dist.all_reduce(total, group=together.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.together.sum_gradients(gradients[0].contiguous()), None


# Since torch 2.13 the older name warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Gather(torch.autograd.Function):
    """The rows of all ranks, one rank after another; `sizes` are their numbers."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, together: Together, sizes: list[int], rank: int) -> torch.Tensor:
        ctx.together, ctx.sizes, ctx.rank = together, sizes, rank
        longest = max(sizes)
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: len(rows)] = rows
        every = rows.new_empty((len(sizes) * longest, *rows.shape[1:]))
        with together.meeting():
            _all_gather(every, padded, group=together.group)
        parts = every.view(len(sizes), longest, *rows.shape[1:])
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        total = ctx.together.sum_gradients(gradients[0].contiguous())
        start = sum(ctx.sizes[: ctx.rank])
        return total[start : start + ctx.sizes[ctx.rank]], None, None, None


def mean_over_ranks(values: torch.Tensor, together: Together) -> torch.Tensor:
    """Return the mean over dimension 0 of all ranks' values together, whatever the number of each one's rows."""
    values = values if together.weight else values[:0]  # backward goes through it all the same, on every rank
    total = values.sum(dim=0)
    own = torch.cat([total.reshape(-1), total.new_full((1,), len(values))])
    numbers: torch.Tensor = _Sum.apply(own, together)  # type: ignore[no-untyped-call]
    return (numbers[:-1] / numbers[-1].detach()).view(values.shape[1:])


def gather_rows(rows: torch.Tensor, together: Together, sizes: list[int], rank: int) -> torch.Tensor:
    """Return the rows of all ranks, one rank after another; `sizes` are their numbers, this rank's among them."""
    gathered: torch.Tensor = _Gather.apply(rows[: sizes[rank]], together, sizes, rank)  # type: ignore[no-untyped-call]
    return gathered
