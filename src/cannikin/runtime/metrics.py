"""What users measure and `log()` writes down: real numbers, in whatever types they come."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from cannikin.errors import InvalidInputError

__all__ = ["check_metrics"]


def check_metrics(metrics: dict[str, Any], *, read: bool) -> dict[str, int | float]:
    """Metrics as plain numbers; without `read` they are only checked, which waits for no device."""
    if not metrics:
        raise InvalidInputError("log() was given nothing to write: name what you measured, as in log(accuracy=0.93)")
    for name, value in metrics.items():
        if not _is_number(value):
            shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            raise InvalidInputError(
                f"log({name}=...) was given a {type(value).__name__}{shape}: a metric is one real number; write its "
                "mean, or each part under a name of its own"
            )
    return {name: _plain(value) for name, value in metrics.items()} if read else {}


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, Real)


def _plain(value: Any) -> int | float:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.item()
    whole = isinstance(value, Integral) and -(2**63) <= int(value) < 2**63  # as JSON's readers have them
    return int(value) if whole else float(value)
