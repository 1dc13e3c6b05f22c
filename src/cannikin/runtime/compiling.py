"""Keeps `torch.compile` from tracing the code around a module, which would break its graph at every line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Keep a compiler from a function and from all that it calls."""
    kept: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept


def not_compiled_itself(function: F) -> F:
    """Keep a compiler from a function, not from what it calls: in the end that is the module."""
    kept: F = torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]
    return kept
