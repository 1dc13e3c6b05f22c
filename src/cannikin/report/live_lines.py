"""Pieces of a text panel: coloured lines of exact width, bars and sparklines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from cannikin.words import printable

__all__ = [
    "ASCII",
    "COLOURED",
    "UNCOLOURED",
    "Glyphs",
    "Line",
    "bar",
    "fitted",
    "sparkline",
    "stacked",
    "wrapped",
]

Line = list[tuple[str, str]]  # text and its style, in rich's words


@dataclass(frozen=True, kw_only=True)
class Glyphs:
    """What lines are drawn with.

    Args:
        corners, across, down: the frame.
        filled: parts of a bar's cell, the last one full; `track` is what is left of the bar.
        parts: compute, communication, wait and loading in a stacked bar.
        levels: of a sparkline.
        dot, times, more: between words, before a factor, and where something is cut.
    """

    corners: str = "╭╮╰╯"
    across: str = "─"
    down: str = "│"
    filled: str = "╸━"
    track: str = "━"
    parts: str = "━━━━"
    levels: str = "▁▂▃▄▅▆▇█"
    dot: str = "·"
    times: str = "×"
    more: str = "…"


COLOURED = Glyphs()
UNCOLOURED = Glyphs(track="─", parts="█▓░▒")
ASCII = Glyphs(
    corners="++++",
    across="-",
    down="|",
    filled="#",
    track="-",
    parts="#=.~",
    levels="_.-=#",
    dot="|",
    times="x",
    more="...",
)


def fitted(line: Line, width: int, glyphs: Glyphs = COLOURED) -> Line:
    """The line in exactly `width` cells: cut with an ellipsis, or filled with blanks; nothing in it moves the cursor.

    Example:
        >>> fitted([("rank 0 ", ""), ("H100\\x1b[2J", "cyan")], 10)
        [('rank 0 ', ''), ('H1…', 'cyan')]
    """
    kept: Line = []
    room = width
    for text, style in line:
        shown = printable(text)
        if glyphs is ASCII:  # what the terminal cannot write would be an error
            shown = shown.encode("ascii", "replace").decode()
        size = cell_len(shown)
        if size > room:
            dots = glyphs.more[:room]
            kept.append((set_cell_size(shown, room - len(dots)) + dots, style))
            return kept
        kept.append((shown, style))
        room -= size
    if room:
        kept.append((" " * room, ""))
    return kept


def bar(share: float, width: int, glyphs: Glyphs = COLOURED) -> str:
    """A bar as long as a share of `width`, to a part of a cell, without what is left of it.

    Example:
        >>> bar(0.6, 4), bar(0.0, 4), bar(2.0, 4)
        ('━━╸', '', '━━━━')
    """
    steps = len(glyphs.filled)
    filled = round(min(max(share, 0.0), 1.0) * width * steps)
    whole, part = divmod(filled, steps)
    return glyphs.filled[-1] * whole + (glyphs.filled[part - 1] if part else "")


def stacked(shares: Sequence[float], width: int) -> list[int]:
    """Cells of each part of a bar, the largest remainders rounded up, `width` in all unless all shares are 0.

    Example:
        >>> stacked([0.5, 0.3, 0.2], 4), stacked([0, 0], 4)
        ([2, 1, 1], [0, 0])
    """
    whole = sum(shares)
    if not 0 < whole < math.inf:
        return [0] * len(shares)
    exact = [share / whole * width for share in shares]
    cells = [math.floor(size) for size in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])
    for i in by_remainder[: width - sum(cells)]:
        cells[i] += 1
    return cells


def sparkline(values: Sequence[float | None], width: int, glyphs: Glyphs = COLOURED) -> str:
    """The last `width` values as small bars between their extremes; blank where there is none.

    What changes by less than a quarter does not fill the height: noise is to look like noise.

    Example:
        >>> sparkline([1.0, None, 8.0, 4.0], 4), sparkline([50.0, 51.0, 50.0], 3)
        ('▁ █▄', '▁▁▁')
    """
    shown = values[-width:] if width > 0 else []
    known = [value for value in shown if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    top = len(glyphs.levels) - 1
    span = max(high - low, abs(high) / 4, 1e-12)
    shares = [None if value is None else min(1.0, max(0.0, (value - low) / span)) for value in shown]  # NaN becomes 0
    return "".join(" " if share is None else glyphs.levels[int(share * top)] for share in shares)


def wrapped(text: str, width: int, max_lines: int) -> list[str]:
    """The text in at most so many lines, broken between words; the last may be too long, and is cut when fitted.

    Example:
        >>> wrapped("rank 2 finishes last", 10, 2), wrapped("a b c d", 3, 2)
        (['rank 2', 'finishes last'], ['a b', 'c d'])
    """
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".lstrip()
        if len(joined) <= width or not lines[-1] or len(lines) == max_lines:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines
