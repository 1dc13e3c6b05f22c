"""Where a rank's weight b_i/B is applied, and the marks that forward leaves on its outputs.

    "hook"   the communication hook multiplies buckets by b_i/B
    "loss"   the gradient of every output is multiplied by n b_i/B, and the hook divides by n: right where backward
             itself mixes ranks (SyncBatchNorm)
    "none"   the hook averages as DDP does, for models that normalise by the global count themselves

All but "none" assume a loss that is a mean over the local batch.
"""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cannikin.errors import InvalidInputError
from cannikin.runtime.step import StepInProgress

__all__ = ["WEIGHTINGS", "choose_weighting", "has_batch_norm", "mark_outputs", "weigh"]

WEIGHTINGS = ("auto", "hook", "loss", "none")


def choose_weighting(weighting: str, module: torch.nn.Module) -> tuple[str, str]:
    """The weighting in force, and a sentence that says why."""
    if weighting not in WEIGHTINGS:
        raise InvalidInputError(f"weighting={weighting!r} is unknown: choose one of {', '.join(WEIGHTINGS)}")
    if weighting != "auto":
        return weighting, f"weighting={weighting!r} as asked"
    if any(isinstance(m, torch.nn.SyncBatchNorm) for m in module.modules()):
        return "loss", "weighting='loss', because SyncBatchNorm mixes ranks in backward"
    return "hook", "weighting='hook': buckets are weighted by local over total batch"


def has_batch_norm(module: torch.nn.Module) -> bool:
    """Whether ranks normalise by statistics of their own batch."""
    kinds = (torch.nn.modules.batchnorm._BatchNorm,)
    return any(isinstance(m, kinds) and not isinstance(m, torch.nn.SyncBatchNorm) for m in module.modules())


def weigh(step: StepInProgress, weighting: str, world_size: int, *, accumulating: bool) -> bool:
    """Set what the hook multiplies by; return whether the gradient of forward's outputs is to be weighted instead.

    Gradients that pile up under no_sync may stem from different splits, so they are weighted on their way in.
    """
    inward = weighting == "loss" or (weighting == "hook" and accumulating)
    step.weight = None if weighting == "hook" and not inward else 1.0 / world_size
    step.take_norms = step.take_norms and not accumulating
    scale = world_size * step.entry.local_batch / step.entry.total_batch
    step.norm_scale = 1.0 / scale**2 if inward and scale > 0 else 1.0
    return inward


class _Mark(torch.autograd.Function):
    """Identity that calls back at the start of backward and scales the gradient that passes.

    A function, not a tensor hook: where outputs feed each other, hooks on both would scale twice.
    """

    @staticmethod
    def forward(ctx: Any, callback: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.callback = callback
        return tensor.detach()  # not view_as: autograd refuses in-place changes of a view that a function made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        (gradient,) = gradients
        scale = ctx.callback()
        if scale == 0.0:
            return None, torch.zeros_like(gradient)  # not multiplied by 0: 0 x NaN is NaN
        return None, gradient if scale == 1.0 else gradient * scale


def mark_outputs(output: Any, callback: Any, *, scaled: bool = True) -> tuple[Any, int]:
    """Mark every tensor of an output that has a gradient; the output, and how many those were.

    Args:
        output: what forward returned: a tensor, or tensors in lists, tuples, dicts, dataclasses and what pytree knows.
        callback: called at each marked output's backward; returns the factor on its gradient.
        scaled: whether that factor is ever other than 1. A hook will do where it is not, and costs half as much.
    """
    num_marked = 0

    def note(gradient: torch.Tensor) -> None:
        callback()

    def mark(value: Any) -> Any:
        nonlocal num_marked
        if isinstance(value, torch.Tensor) and value.requires_grad:
            num_marked += 1
            if scaled or value.grad_fn is None:  # a parameter would keep the hook for ever
                return _Mark.apply(callback, value)  # type: ignore[no-untyped-call]
            value.register_hook(note)  # type: ignore[no-untyped-call]
            return value
        if is_dataclass(value) and not isinstance(value, type):  # DDP looks into these too
            marked = copy.copy(value)
            for part in fields(value):
                object.__setattr__(marked, part.name, pytree.tree_map(mark, getattr(value, part.name)))
            return marked
        return value

    marked = mark(output) if isinstance(output, torch.Tensor) else pytree.tree_map(mark, output)
    return marked, num_marked
