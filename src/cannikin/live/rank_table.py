"""The ranks of a live view: one row per rank, or one per kind of device where they are many.

The columns are laid out here and not by rich's `Table`, which alone takes 3.4 ms for eight ranks: training waits while
its own live view is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from cannikin.live.state import LiveState
from cannikin.runlog.times import RankTimes
from cannikin.words import amount, printable, rank_ranges

_TRACK_STYLE = "grey30"  # of the rest of a bar
_LOADING_SHOWS = 0.02  # share of a step from which loading has a column
_PACE_SHOWS = 96  # width from which there is room for the time per sample
_DEVICE = 1  # place of the column of devices
_BARS, _FEWEST_BARS = 18, 8  # cells for both bars, and where the terminal is narrow

# Parts of a step: name in `RankTimes`, heading, style.
_PARTS = (
    ("compute_ms", "comp", "green"),
    ("communication_ms", "comm", "blue"),
    ("wait_ms", "wait", "yellow"),
    ("loading_ms", "load", "magenta"),
)

Part = tuple[str, str]  # text and its style, in rich's words
Line = list[Part]


class Look(NamedTuple):
    """How to draw: cells of a line inside the frame; glyphs for the rest of a bar and for parts of a stacked bar."""

    width: int
    track: str
    parts: str


def cells(text: str) -> int:
    """Return the cells that a text takes on a terminal: not every letter takes one."""
    return len(text) if text.isascii() else cell_len(text)  # without the test a drawing takes a tenth longer


def bar(share: float, width: int, style: str, look: Look) -> Line:
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


def ranks_now(state: LiveState) -> list[RankNow]:
    """Return all ranks; the device is what people call it, "" where the log does not say."""
    if state.window is None:
        return []
    infos = () if state.header is None else state.header.ranks
    names = [(info.name or info.device or info.host).removeprefix("NVIDIA ") for info in infos]
    both = enumerate(zip(state.window.local_batches, state.times, strict=True))
    return [RankNow(rank, names[rank] if rank < len(names) else "", batch, times) for rank, (batch, times) in both]


class RankRow(NamedTuple):
    """One row: a rank, or several of one kind, for which the numbers are means over the ranks that were measured.

    `shares` are those of a step by the names of `RankTimes`; {} where no rank was measured.
    """

    ranks: str
    device: str
    batch: str
    mean_batch: float
    shares: dict[str, float]
    ms_per_sample: float | None


def rank_rows(ranks: Sequence[RankNow], max_rows: int) -> list[RankRow]:
    """Return one row per rank if these are few, else one per device; the rarest kinds may share the last row."""
    if len(ranks) <= max_rows:
        return [_row(rank.device, [rank]) for rank in ranks]
    kinds: dict[str, list[RankNow]] = {}
    for rank in ranks:
        kinds.setdefault(rank.device, []).append(rank)
    if len(kinds) <= max_rows:
        return [_row(device, members) for device, members in kinds.items()]
    by_size = sorted(kinds, key=lambda device: -len(kinds[device]))
    shown, others = by_size[: max_rows - 1], set(by_size[max_rows - 1 :])
    rest = _row(f"{len(others)} other kinds", [rank for rank in ranks if rank.device in others])
    return [*(_row(device, kinds[device]) for device in shown), rest]


def _row(device: str, members: Sequence[RankNow]) -> RankRow:
    batches = [rank.batch for rank in members]
    low, high = min(batches), max(batches)
    shares = [rank.times.shares for rank in members if rank.times is not None]
    paces = [pace for pace in (rank.ms_per_sample for rank in members) if pace is not None]
    return RankRow(
        ranks=rank_ranges([rank.rank for rank in members]),
        device=printable(device) + (f" ×{len(members)}" if len(members) > 1 else ""),
        batch=f"{low:,}" if low == high else f"{low:,}-{high:,}",
        mean_batch=fmean(batches),
        shares={part: fmean([each[part] for each in shares]) for part in shares[0]} if shares else {},
        ms_per_sample=fmean(paces) if paces else None,
    )


# The columns.


class _Column(NamedTuple):
    """A column of the ranks: its heading, and what a row has there.

    Text columns are as wide as their widest text, up to `most` cells. Bars share the remaining room by `weight`. The
    devices are cut, down to their heading, where the bars would have too little room.
    """

    heading: str
    text: Callable[[RankRow], str] = lambda row: ""
    style: str = ""
    heading_style: str = "dim"
    right: bool = False
    most: int = 10**6
    draw: Callable[[RankRow, int], Line] | None = None
    weight: int = 0


def _columns(rows: list[RankRow], look: Look) -> list[_Column]:
    """Return the columns of the ranks: a new one is a new entry here."""
    parts = [(*part, glyph) for part, glyph in zip(_PARTS, look.parts, strict=True)]
    if not any(row.shares.get("loading_ms", 0.0) >= _LOADING_SHOWS for row in rows):
        parts = [part for part in parts if part[0] != "loading_ms"]
    full = max(1.0, *(row.mean_batch for row in rows))  # the local batch whose bar is full; 0 where a rank only pads
    columns = [
        _Column("rank", lambda row: row.ranks, "bold", most=12),
        _Column("device", lambda row: row.device, most=36),
        _Column("batch", lambda row: row.batch, "bold", right=True),
        _Column("", draw=lambda row, size: bar(row.mean_batch / full, size, "cyan", look), weight=2),
        _Column("step", draw=lambda row, size: _step_bar(row, size, parts), weight=3),
        *(
            _Column(f"{glyph} {title}", partial(_share, name), style, style, right=True)
            for name, title, style, glyph in parts
        ),
        _Column(" ms/sample", lambda row: "" if row.ms_per_sample is None else amount(row.ms_per_sample), right=True),
    ]
    return columns if look.width >= _PACE_SHOWS else columns[:-1]


def _share(name: str, row: RankRow) -> str:
    return f"{row.shares[name]:.0%}" if row.shares else ""


def _step_bar(row: RankRow, size: int, parts: Sequence[tuple[str, str, str, str]]) -> Line:
    """Return where a step's time goes as one bar."""
    if not row.shares:
        return [("not measured".ljust(size)[:size], "dim")]
    lengths = stacked([row.shares[name] for name, *_ in parts], size)
    drawn = [(glyph * length, style) for (_, _, style, glyph), length in zip(parts, lengths, strict=True)]
    return [*drawn, (" " * (size - sum(lengths)), "")]


def rank_lines(rows: list[RankRow], look: Look) -> list[Line]:
    """Return a heading and one line per row: columns as wide as their content, bars as wide as the rest allows."""
    if not rows:
        return []
    columns = _columns(rows, look)
    texts = [[column.text(row) for row in rows] for column in columns]
    drawn = []
    for column, size, own in zip(columns, _sizes(columns, texts, look.width), texts, strict=True):
        heading = [_cell(column.heading, column.heading_style, size, column)]
        if column.draw:
            drawn.append([heading, *(column.draw(row, size) for row in rows)])
        else:
            drawn.append([heading, *([_cell(text, column.style, size, column)] for text in own)])
    return [_spaced(line) for line in zip(*drawn, strict=True)]


def _spaced(line: tuple[Line, ...]) -> Line:
    """Return the parts of all cells, with a blank after each cell but the last."""
    parts = [*line[0]]
    for cell in line[1:]:
        text, style = parts[-1]
        parts[-1:] = [(f"{text} ", style), *cell]
    return parts


def _sizes(columns: list[_Column], texts: list[list[str]], width: int) -> list[int]:
    """Return the cells of each column, with a blank between two of them."""
    sizes = [
        0 if column.draw else min(max(map(cells, (column.heading, *own))), column.most)
        for column, own in zip(columns, texts, strict=True)
    ]
    spare = width - sum(sizes) - (len(columns) - 1)
    missing = max(0, (_BARS if width >= 70 else _FEWEST_BARS) - spare)
    sizes[_DEVICE] -= min(missing, max(0, sizes[_DEVICE] - len(columns[_DEVICE].heading)))
    spare += missing  # where devices cannot give that much, the lines are cut at their ends
    weights = sum(column.weight for column in columns)
    for place, column in enumerate(columns):
        if column.draw:
            sizes[place] = spare * column.weight // weights
            spare, weights = spare - sizes[place], weights - column.weight
    return sizes


def _cell(text: str, style: str, size: int, column: _Column) -> Part:
    """Return a text in exactly `size` cells, the middle left out where it is too long: names differ at their ends."""
    used = cells(text)
    if used > size:
        kept = max(0, min(len(text), size) - 1)
        text = set_cell_size(text[: kept - kept // 2] + "…" + text[len(text) - kept // 2 :], size)
        used = size
    blanks = " " * (size - used)
    return (blanks + text if column.right else text + blanks), style
