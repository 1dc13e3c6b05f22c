"""Reads saved states: every number is checked before anything is changed, since a damaged file must not be trained on.

Limits are what can have been measured or counted. Beyond them a run would overflow, plan what no rank can do, or take
no step at all without a word.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cannikin.core.values import FloatArray
from cannikin.errors import StateError

MANY = 1e15
"""More of anything than a run can count."""
LONG_S = 1e6
"""Longer than any step, seconds."""


def number(name: str, value: Any, low: float = 0.0, high: float = MANY) -> float:
    """Return a saved number as a float, or raise StateError.

    Example:
        >>> number("progress", 3)
        3.0
    """
    if type(value) not in (int, float) or not low <= value <= high:
        raise StateError(f"saved {name}={value!r:.200} cannot be: the state is damaged, or not of a run of cannikin")
    return float(value)


def whole(name: str, value: Any, low: int = 0, high: float = MANY) -> int:
    """Return a saved whole number, or raise StateError."""
    if not number(name, value, low, high).is_integer():
        raise StateError(f"saved {name}={value!r:.200} is no whole number: the state is damaged")
    return int(value)


def table(
    name: str, value: Any, shape: tuple[int, ...], low: float = 0.0, high: float = MANY, *, gaps: bool = False
) -> FloatArray:
    """Return a saved list of numbers as an array of this shape; `gaps` lets some be None, which is NaN."""
    try:
        found = np.array(value, dtype=np.float64).reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise StateError(f"saved {name}={value!r:.200} is no table of numbers of shape {shape}") from error
    fits = (low <= found) & (found <= high)
    if not (fits | np.isnan(found) if gaps else fits).all():
        raise StateError(f"saved {name}={value!r:.200} has numbers that cannot be, outside of {low:g} to {high:g}")
    return found


def whole_numbers(name: str, value: Any, low: int = 1, high: float = MANY) -> list[int]:
    """Return a saved list of whole numbers."""
    if not isinstance(value, list | tuple):
        raise StateError(f"saved {name}={value!r:.200} is no list: the state is damaged")
    return [whole(name, item, low, high) for item in value]
