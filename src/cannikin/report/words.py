"""Numbers as people say them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby

__all__ = ["amount", "count", "duration", "memory", "percent", "runs_of", "split", "time_unit"]

_MOST_SPLIT = 8


def amount(value: float, digits: int = 3) -> str:
    """A number with this many digits, thousands apart.

    Example:
        >>> amount(1108.06), amount(0.01234), amount(46.9), amount(float("nan"))
        ('1,108', '0.0123', '46.9', 'not known')
    """
    if not math.isfinite(value):
        return "not known"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.0f}" if whole >= digits else f"{value:.{digits}g}"


def percent(share: float) -> str:
    """A share of 1.

    Example:
        >>> percent(0.0587), percent(0.34), percent(float("nan"))
        ('5.9%', '34%', 'not known')
    """
    if not math.isfinite(share):
        return "not known"
    return f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def duration(ms: float) -> str:
    """A time in the unit that suits it.

    Example:
        >>> duration(46.93), duration(20465.0), duration(396_000.0), duration(7.2e6)
        ('46.9 ms', '20.5 s', '6.6 min', '2 h')
    """
    if not math.isfinite(ms):
        return "not known"
    for limit, unit, scale in ((1e3, "ms", 1.0), (120e3, "s", 1e3), (7.2e6, "min", 60e3)):
        if ms < limit:
            return f"{amount(ms / scale)} {unit}"
    return f"{amount(ms / 3.6e6)} h"


def time_unit(longest_ms: float) -> tuple[str, float]:
    """The unit for an axis of times up to `longest_ms`, and milliseconds in it.

    Example:
        >>> time_unit(20465.0), time_unit(720_000.0)
        (('s', 1000.0), ('min', 60000.0))
    """
    for limit, unit, scale in ((600e3, "s", 1e3), (36e6, "min", 60e3)):
        if not longest_ms >= limit:
            return unit, scale
    return "h", 3.6e6


def count(number: int) -> str:
    """How many.

    Example:
        >>> count(25_557), count(25_557_032)
        ('25,557', '25.6 million')
    """
    return f"{number:,}" if number < 1_000_000 else f"{amount(number / 1e6)} million"


def memory(num_bytes: int | None) -> str:
    """An amount of memory.

    Example:
        >>> memory(80 * 2**30), memory(None)
        ('80 GiB', 'not known')
    """
    return "not known" if num_bytes is None else f"{amount(num_bytes / 2**30)} GiB"


def split(local_batches: tuple[int, ...]) -> str:
    """A split, equal neighbours together, short where there are many ranks.

    Example:
        >>> split((30, 15, 7)), split((4,) * 16 + (2,)), split(tuple(range(1, 65)))
        ('30, 15, 7', '16 x 4, 2', '1, 2, 3, 4, 5, 6, 7, 8, ... (64 ranks, 1 to 64)')
    """
    parts = [_several(len(list(group)), f"{batch:,}") for batch, group in groupby(local_batches)]
    if len(parts) <= _MOST_SPLIT:
        return ", ".join(parts)
    low, high = min(local_batches), max(local_batches)
    return f"{', '.join(parts[:_MOST_SPLIT])}, ... ({len(local_batches)} ranks, {low:,} to {high:,})"


def _several(number: int, what: str) -> str:
    return what if number == 1 else f"{number} x {what}"


def runs_of(names: list[str]) -> str:
    """Names with how often each comes.

    Example:
        >>> runs_of(["a100", "a100", "v100"])
        '2 x a100, v100'
    """
    kinds = [_several(count, name) for name, count in Counter(names).items()]
    return ", ".join(kinds[:6]) + (f" and {len(kinds) - 6} kinds more" if len(kinds) > 6 else "")
