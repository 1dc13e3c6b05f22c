"""The ranks of a live view: one row per rank, or one per kind of device where they are many.

The columns are laid out here and not by rich's `Table`, which alone takes 3.4 ms for eight ranks: training waits while
its own live view is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from cannikin.live.state import LiveState
from cannikin.runlog.times import RankTimes
from cannikin.words import amount, printable, rank_ranges

_TRACK_STYLE = "grey30"  # of the rest of a bar
_LOADING_SHOWS = 0.02  # share of a step from which loading has a column
_PACE_SHOWS = 96  # width from which there is room for the time per sample
_BARS, _FEWEST_BARS = 18, 8  # cells for both bars, and where the terminal is narrow

Part = tuple[str, str]  # text and its style, in rich's words
Line = list[Part]


class Look(NamedTuple):
    """How to draw: cells of a line inside the frame, and whether colours tell things apart."""

    width: int
    coloured: bool

    @property
    def track(self) -> str:
        """The rest of a bar."""
        return "━" if self.coloured else "─"

    @property
    def parts(self) -> str:
        """Computing, communication, waiting and loading in a stacked bar."""
        return "━━━━" if self.coloured else "█▓░▒"


def bar(share: float, width: int, style: str, look: Look) -> list[Part]:
    """Return a bar as long as a share of `width`, to half a cell, and its track."""
    whole, half = divmod(round(min(max(share, 0.0), 1.0) * width * 2), 2)
    return [("━" * whole + "╸" * half, style), (look.track * (width - whole - half), _TRACK_STYLE)]


def stacked(shares: Sequence[float], width: int) -> list[int]:
    """Return the cells of each part of a bar, the largest remainders rounded up: `width` in all, 0 for no shares.

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


class RankNow(NamedTuple):
    """A rank in the window last measured; `times` is None where nothing of it was measured."""

    rank: int
    device: str
    batch: int
    times: RankTimes | None

    @property
    def ms_per_sample(self) -> float | None:
        """Time that it computes per sample."""
        return None if self.times is None or self.batch < 1 else self.times.compute_ms / self.batch


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One row: a rank, or several of one kind."""

    device: str
    members: tuple[RankNow, ...]

    def mean(self, value: Callable[[RankNow], float | None]) -> float | None:
        """Return the mean of a value over the ranks of the row that know it; None where none does."""
        known = [found for found in map(value, self.members) if found is not None]
        return fmean(known) if known else None

    @cached_property
    def shares(self) -> dict[str, float]:
        """Mean shares of a step by the names of `RankTimes`; {} where no rank was measured."""
        known = [rank.times.shares for rank in self.members if rank.times is not None]
        return {part: fmean(shares[part] for shares in known) for part in known[0]} if known else {}

    @property
    def ranks(self) -> str:
        """Their numbers."""
        return rank_ranges([member.rank for member in self.members])

    @property
    def label(self) -> str:
        """The device, and how many there are."""
        return printable(self.device) + (f" ×{len(self.members)}" if len(self.members) > 1 else "")

    @property
    def batch(self) -> str:
        """Its local batch, or their range."""
        low, high = (end(member.batch for member in self.members) for end in (min, max))
        return f"{low:,}" if low == high else f"{low:,}-{high:,}"

    @property
    def mean_batch(self) -> float:
        """The mean of their local batches."""
        return fmean(member.batch for member in self.members)


def rank_rows(state: LiveState, max_rows: int) -> list[RankRow]:
    """Return one row per rank if these are few, else one per device; the rarest kinds may share the last row."""
    ranks = _ranks_now(state)
    if len(ranks) <= max_rows:
        return [RankRow(device=rank.device, members=(rank,)) for rank in ranks]
    kinds: dict[str, list[RankNow]] = {}
    for rank in ranks:
        kinds.setdefault(rank.device, []).append(rank)
    groups = [RankRow(device=device, members=tuple(members)) for device, members in kinds.items()]
    if len(groups) <= max_rows:
        return groups
    by_size = sorted(groups, key=lambda group: -len(group.members))
    rest = sorted((rank for group in by_size[max_rows - 1 :] for rank in group.members), key=lambda rank: rank.rank)
    return [
        *by_size[: max_rows - 1],
        RankRow(device=f"{len(groups) - max_rows + 1} other kinds", members=tuple(rest)),
    ]


def _ranks_now(state: LiveState) -> list[RankNow]:
    if state.window is None:
        return []
    both = zip(state.window.local_batches, state.times, strict=True)
    return [RankNow(rank, device_of(state, rank), batch, times) for rank, (batch, times) in enumerate(both)]


def device_of(state: LiveState, rank: int) -> str:
    """Return what people call a rank's device; "" where the log does not say."""
    ranks = () if state.header is None else state.header.ranks
    if rank >= len(ranks):
        return ""
    return (ranks[rank].name or ranks[rank].device or ranks[rank].host).removeprefix("NVIDIA ")


def slowest_and_fastest(state: LiveState) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """Return both ranks with their milliseconds per sample; None where fewer than two are known."""
    ranks = _ranks_now(state)
    paces = [(rank.ms_per_sample, rank.rank) for rank in ranks if rank.ms_per_sample is not None]
    if len(paces) < 2:
        return None
    (slow, slowest), (fast, fastest) = max(paces), min(paces)
    return (slowest, slow), (fastest, fast)


# The columns.


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the ranks: its heading, and what a row has there.

    Args:
        text: what a row says.
        draw: instead of text, a bar of as many cells as it is given; bars share the room that is left by `weight`.
        style, heading_style: in rich's words.
        right: whether text stands at the right.
        least, most: cells.
        gives_way: whether it is cut, down to `least`, where the bars would have too little room.
        shows: whether there is room for it, and something to say.
    """

    heading: str
    text: Callable[[RankRow], str] = lambda row: ""
    draw: Callable[[RankRow, int], list[Part]] | None = None
    style: str = ""
    heading_style: str = "dim"
    right: bool = False
    least: int = 0
    most: int = 10**6
    weight: int = 0
    gives_way: bool = False
    shows: bool = True


def _columns(rows: list[RankRow], look: Look) -> list[_Column]:
    """Return the columns of the ranks: a new one is a new entry here."""
    parts = [_TimePart(*part, glyph) for part, glyph in zip(_TIME_PARTS, look.parts, strict=True)]
    if not any(row.shares.get("loading_ms", 0.0) >= _LOADING_SHOWS for row in rows):
        parts = [part for part in parts if part.name != "loading_ms"]
    full = max(1.0, *(row.mean_batch for row in rows))  # the local batch whose bar is full; 0 where a rank only pads
    return [
        _Column(heading="rank", text=lambda row: row.ranks, style="bold", least=4, most=12),
        _Column(heading="device", text=lambda row: row.label, least=6, most=36, gives_way=True),
        _Column(heading="batch", text=lambda row: row.batch, style="bold", right=True),
        _Column(heading="", draw=lambda row, size: bar(row.mean_batch / full, size, "cyan", look), weight=2),
        _Column(heading="step", draw=lambda row, size: _step_bar(row, size, parts), weight=3),
        *(part.column for part in parts),
        _Column(
            heading="ms/sample",
            text=lambda row: _known(row.mean(lambda rank: rank.ms_per_sample)),
            right=True,
            least=10,
            shows=look.width >= _PACE_SHOWS,
        ),
    ]


# Of a step: name in `RankTimes`, heading, style.
_TIME_PARTS = (
    ("compute_ms", "comp", "green"),
    ("communication_ms", "comm", "blue"),
    ("wait_ms", "wait", "yellow"),
    ("loading_ms", "load", "magenta"),
)


class _TimePart(NamedTuple):
    """A part of a step, with a share of the stacked bar and a percentage."""

    name: str
    heading: str
    style: str
    glyph: str

    @property
    def column(self) -> _Column:
        """The percentages."""
        return _Column(
            heading=f"{self.glyph} {self.heading}",
            text=lambda row: f"{row.shares[self.name]:.0%}" if row.shares else "",
            style=self.style,
            heading_style=self.style,
            right=True,
        )


def _known(value: float | None) -> str:
    return "" if value is None else amount(value)


def _step_bar(row: RankRow, size: int, parts: list[_TimePart]) -> list[Part]:
    """Return where a step's time goes as one bar."""
    if not row.shares:
        return [("not measured".ljust(size)[:size], "dim")]
    cells = stacked([row.shares[part.name] for part in parts], size)
    drawn = [(part.glyph * num, part.style) for part, num in zip(parts, cells, strict=True)]
    return [*drawn, (" " * (size - sum(cells)), "")]


def rank_lines(rows: list[RankRow], look: Look) -> list[Line]:
    """Return a heading and one line per row: columns as wide as their content, bars as wide as the rest allows."""
    if not rows:
        return []
    columns = [column for column in _columns(rows, look) if column.shows]
    texts = [[column.text(row) for row in rows] for column in columns]
    sized = list(zip(columns, _sizes(columns, texts, look.width), texts, strict=True))
    lines = [[[_cell(column.heading, column.heading_style, size, column)] for column, size, _ in sized]]
    for number, row in enumerate(rows):
        lines.append(
            [
                column.draw(row, size) if column.draw else [_cell(cells[number], column.style, size, column)]
                for column, size, cells in sized
            ]
        )
    return [_spaced(line) for line in lines]


def _spaced(cells: list[list[Part]]) -> Line:
    """Return the parts of all cells, with a blank after each cell but the last."""
    parts = [*cells[0]]
    for cell in cells[1:]:
        text, style = parts[-1]
        parts[-1:] = [(f"{text} ", style), *cell]
    return parts


def _sizes(columns: list[_Column], texts: list[list[str]], width: int) -> list[int]:
    """Return the cells of each column, with a blank between two of them."""
    sizes = [
        0 if column.draw else min(max(column.least, *map(cell_len, (column.heading, *cells))), column.most)
        for column, cells in zip(columns, texts, strict=True)
    ]
    spare = width - sum(sizes) - (len(columns) - 1)
    missing = max(0, (_BARS if width >= 70 else _FEWEST_BARS) - spare)
    for place, column in enumerate(columns):
        if column.gives_way:
            given = min(missing, max(0, sizes[place] - column.least))
            sizes[place], spare, missing = sizes[place] - given, spare + given, missing - given
    spare += missing  # there is less room than a view needs: the lines are cut at their ends
    weights = sum(column.weight for column in columns)
    for place, column in enumerate(columns):
        if column.draw:
            sizes[place] = spare * column.weight // weights
            spare, weights = spare - sizes[place], weights - column.weight
    return sizes


def _cell(text: str, style: str, size: int, column: _Column) -> Part:
    """Return a text in exactly `size` cells, the middle left out where it is too long: names differ at their ends."""
    if cell_len(text) > size:
        kept = max(0, min(len(text), size) - 1)
        text = set_cell_size(text[: kept - kept // 2] + "…" + text[len(text) - kept // 2 :], size)
    blanks = " " * (size - cell_len(text))
    return (blanks + text if column.right else text + blanks), style
