"""How cannikin says numbers, durations, sizes, splits and names to people: the one place for all that is printed.

Programs get plain numbers (JSON, run logs); what a person reads goes through these functions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

_MOST_PARTS = 8  # of a split that are listed one by one
_MOST_KINDS = 6
_MOST_DIGITS = 1e15  # a damaged log may hold more than this, which is no measurement
_LONGEST_S = 1e10  # some centuries: beyond them a damaged log holds no duration


# Numbers.


def amount(value: float, digits: int = 3) -> str:
    """Return a number with about this many digits, thousands apart.

    >>> amount(12345.6), amount(46.93), amount(0.01234), amount(2.0), amount(float("nan"))
    ('12,346', '46.9', '0.0123', '2', 'not known')
    """
    if not math.isfinite(value):
        return "not known"
    size = abs(value)
    if size >= _MOST_DIGITS:
        return f"{value:.{digits}g}"
    if size >= 10 ** (digits - 1) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{digits - len(str(int(size)))}f}" if size >= 10 else f"{value:.{digits}g}"


def figures(value: float, like: float | None = None) -> str:
    """Return a positive number with the decimals that show four figures of it, or of `like`: for columns of a table.

    >>> figures(12.3456), figures(9.87654, like=12.3), figures(12345.6)
    ('12.35', '9.88', '12,346')
    """
    decimals = 3 - math.floor(math.log10(value if like is None else like))
    return f"{value:,.{min(max(decimals, 0), 15)}f}"


def percent(share: float) -> str:
    """Return a share of 1 in percent.

    >>> percent(0.0587), percent(0.34), percent(float("nan"))
    ('5.9%', '34%', 'not known')
    """
    if not math.isfinite(share):
        return "not known"
    return f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def use(share: float, even_speed: float | None = None) -> str:
    """Return how much of what the hardware can do is used, and what DDP would use with its even split.

    >>> use(0.94, 0.55), use(0.94, 1.0), use(0.94, 0.0)[33:], use(0.94)
    ('94% of what the hardware can do; DDP would use 52%', '94% of what the hardware can do; DDP would use as much', \
"DDP's even split does not fit", '94% of what the hardware can do')
    """
    said = f"{percent(share)} of what the hardware can do"
    if even_speed is None:
        return said
    if even_speed == 0:
        return f"{said}; DDP's even split does not fit"
    even = percent(share * even_speed)
    return f"{said}; DDP would use {'as much' if even == percent(share) else even}"


def count(number: int) -> str:
    """Return how many, for a sentence.

    >>> count(25_557), count(25_557_032)
    ('25,557', '25.6 million')
    """
    return f"{number:,}" if number < 1_000_000 else f"{amount(number / 1e6)} million"


def short_count(number: float) -> str:
    """Return how many, where there is little room or a unit follows.

    >>> short_count(570), short_count(38_282), short_count(25_557_032), short_count(2.5e9) + "bit/s"
    ('570', '38.3 k', '25.6 M', '2.5 Gbit/s')
    """
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(round(number))


def counted(number: float, noun: str) -> str:
    """Return how many, with the noun in the right number.

    >>> counted(1, "GPU"), counted(2.5, "core"), counted(1024, "rank")
    ('1 GPU', '2.5 cores', '1,024 ranks')
    """
    return f"{number:,.12g} {noun}{'' if number == 1 else 's'}"


# Times and sizes.


def duration(ms: float, decimals: int | None = None) -> str:
    """Return a time in the unit that suits it, with three digits or, for columns of a table, with these decimals.

    >>> duration(46.93), duration(20465.0), duration(396_000.0), duration(7.2e6)
    ('46.9 ms', '20.5 s', '6.6 min', '2 h')
    >>> duration(42_000, decimals=1), duration(4e6, decimals=1)
    ('42.0 s', '66.7 min')
    """
    if not math.isfinite(ms):
        return "not known"
    units = ((1e3, "ms", 1.0), (120e3, "s", 1e3), (7.2e6, "min", 60e3), (math.inf, "h", 3.6e6))
    unit, scale = next((unit, scale) for limit, unit, scale in units if ms < limit)
    return f"{amount(ms / scale) if decimals is None else format(ms / scale, f'.{decimals}f')} {unit}"


def clock(seconds: float) -> str:
    """Return a time as a clock shows it, for lines that are drawn again and again.

    >>> clock(42.4), clock(3723), clock(200_000)
    ('0:42', '1:02:03', '2 d 7 h')
    """
    whole = round(min(max(0.0, seconds), _LONGEST_S))
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def memory(num_bytes: float | None) -> str:
    """Return an amount of memory.

    >>> memory(64 * 2**20), memory(40 * 2**30), memory(1.5 * 2**30), memory(None)
    ('64 MiB', '40 GiB', '1.5 GiB', 'not known')
    """
    if num_bytes is None:
        return "not known"
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    size = num_bytes / 2**30
    return f"{size:,.0f} GiB" if size >= 10 or size == int(size) else f"{size:.1f} GiB"


# Splits, ranks and other names.


def split(local_batches: Sequence[int], most_parts: int = _MOST_PARTS) -> str:
    """Return a split, equal neighbours together, short where it has more than this many parts.

    >>> split((30, 15, 7)), split((4,) * 16 + (2,)), split(range(1, 65))
    ('30, 15, 7', '16 x 4, 2', '1, 2, 3, 4, 5, 6, 7, 8, ... (64 ranks, 1 to 64)')
    """
    parts = [_several(len(list(group)), f"{batch:,}") for batch, group in groupby(local_batches)]
    if len(parts) <= most_parts:
        return ", ".join(parts)
    return f"{', '.join(parts[:most_parts])}, ... {_range(local_batches)}"


def split_sum(local_batches: Sequence[int], plus: str = " + ") -> str:
    """Return a total batch as the sum of its split, short where there are many ranks.

    >>> split_sum((30, 15, 7)), split_sum((4, 4), plus="+"), split_sum(range(1, 65))
    ('52 = 30 + 15 + 7', '8 = 4+4', '2,080 (64 ranks, 1 to 64)')
    """
    total = f"{sum(local_batches):,}"
    if len(local_batches) > _MOST_PARTS:
        return f"{total} {_range(local_batches)}"
    return f"{total} = {plus.join(map(str, local_batches))}" if len(local_batches) > 1 else total


def _range(local_batches: Sequence[int]) -> str:
    return f"({len(local_batches)} ranks, {min(local_batches):,} to {max(local_batches):,})"


def kinds(names: Sequence[str]) -> str:
    """Return names with how often each comes.

    >>> kinds(["a100", "a100", "v100"])
    '2 x a100, v100'
    """
    shown = [_several(times, name) for name, times in Counter(names).items()]
    more = len(shown) - _MOST_KINDS
    return ", ".join(shown[:_MOST_KINDS]) + (f" and {more} kinds more" if more > 0 else "")


def _several(number: int, what: str) -> str:
    return what if number == 1 else f"{number} x {what}"


def rank_name(rank: int, device: str = "") -> str:
    """Return a rank with what it runs on, where that is known.

    >>> rank_name(2, "A100"), rank_name(2)
    ('rank 2 (A100)', 'rank 2')
    """
    return f"rank {rank} ({device})" if device else f"rank {rank}"


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return rank numbers, runs of them together.

    >>> rank_ranges([0, 1, 2, 5, 8, 9])
    '0-2,5,8-9'
    """
    groups = groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


# Text from others.


def printable(text: str) -> str:
    """Return text of others with blanks for what could break a line, move a cursor or change a terminal.

    >>> printable("a\x1b[2Jb")
    'a [2Jb'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def escaped(text: str) -> str:
    r"""Return the text with escapes for characters that cannot be printed, where it matters which ones they were.

    >>> print(escaped("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
