"""Wrong arguments answered before torch answers them in words of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import torch

from cannikin.errors import InvalidInputError

__all__ = ["check_model", "check_names"]

_LOADERS = ("batch_size", "max_batch_size", "local_batches", "local_bounds", "item_count", "shuffle", "seed")


def check_names(owner: Callable[..., Any], base: Callable[..., Any], given: Iterable[str]) -> None:
    """Refuse keywords that neither `owner` nor the torch class `base`, which gets what is left, takes.

    Example:
        >>> check_names(sorted, print, ["revers"])
        Traceback (most recent call last):
            ...
        TypeError: sorted takes no revers=: did you mean reverse?
    """
    own, others = (list(inspect.signature(taker).parameters) for taker in (owner, base))
    for name in given:
        if name in others:
            continue
        close = get_close_matches(name, own + others, 1)
        if name in _LOADERS:
            advice = "that is for HeteroDataLoader"
        else:
            advice = f"did you mean {close[0]}?" if close else f"nor does {base.__name__}, which gets what is left"
        raise TypeError(f"{owner.__name__} takes no {name}=: {advice}")


def check_model(module: object, optimizer: object) -> None:
    """Refuse a module and an optimizer that do not belong together: nothing would be trained, or measured."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidInputError(
            f"the model is a {type(module).__name__}, not a torch.nn.Module: the order is HeteroDataParallel(module, "
            "optimizer)"
        )
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise InvalidInputError(f"the optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer")
    own = {id(parameter) for parameter in module.parameters()}
    if not any(id(parameter) in own for group in groups for parameter in group["params"]):
        raise InvalidInputError(
            "the optimizer has none of the model's parameters: build it from module.parameters() of the module that "
            "is wrapped, and wrap that one"
        )
