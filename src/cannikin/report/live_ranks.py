"""The ranks of a live view: one row each, or one a kind of device where they are many."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from rich.cells import cell_len, set_cell_size

from cannikin.report.live_lines import COLOURED, Glyphs, Line, bar, stacked
from cannikin.report.live_state import LiveState
from cannikin.report.rank_times import RankTimes
from cannikin.words import amount, printable, rank_ranges

__all__ = ["PART_STYLES", "TRACK_STYLE", "RankRow", "device_of", "extremes", "rank_lines", "rank_rows"]

TRACK_STYLE = "grey30"  # what is left of a bar
PART_STYLES = ("green", "blue", "yellow", "magenta")  # compute, communication, wait, loading
_PART_NAMES = ("comp", "comm", "wait", "load")
_PART_WIDTH = 7  # of a percentage and what is before it
_PACE_WIDTH = 11
_PACE_SHOWS = 96  # width from which there is room for the time a sample takes
_MIN_BARS, _FEWEST_BARS = 18, 8  # cells for both bars, and where the terminal is narrow
_MAX_DEVICE = 36
_LOADING_SHOWS = 0.02  # share of a step from which loading has a column


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One row: a rank, or several of one kind. `shares` and `ms_per_sample` are means over it; None where unknown."""

    ranks: tuple[int, ...]
    device: str
    batches: tuple[int, ...]
    shares: tuple[float, ...] | None
    ms_per_sample: float | None

    @property
    def batch(self) -> str:
        """Its local batch, or their range."""
        low, high = min(self.batches), max(self.batches)
        return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def rank_rows(state: LiveState, max_rows: int) -> list[RankRow]:
    """Rows of the window last measured: one a rank if these are few, else one a device, the commonest kinds alone."""
    if state.window is None:
        return []
    batches = state.window.local_batches
    singles = [
        RankRow(
            ranks=(rank,),
            device=device_of(state, rank),
            batches=(batch,),
            shares=None if (times := _time_of(state, rank)) is None else times.shares,
            ms_per_sample=None if times is None or batch < 1 else times.compute_ms / batch,
        )
        for rank, batch in enumerate(batches)
    ]
    if len(singles) <= max_rows:
        return singles
    kinds: dict[str, list[RankRow]] = {}
    for row in singles:
        kinds.setdefault(row.device, []).append(row)
    groups = [_joined(rows, device) for device, rows in kinds.items()]
    if len(groups) <= max_rows:
        return groups
    by_size = sorted(groups, key=lambda group: -len(group.ranks))
    rest = [singles[rank] for group in by_size[max_rows - 1 :] for rank in group.ranks]
    return [*by_size[: max_rows - 1], _joined(rest, f"{len(groups) - max_rows + 1} other kinds")]


def _joined(rows: list[RankRow], device: str) -> RankRow:
    known = [row.shares for row in rows if row.shares is not None]
    paces = [row.ms_per_sample for row in rows if row.ms_per_sample is not None]
    return RankRow(
        ranks=tuple(sorted(rank for row in rows for rank in row.ranks)),
        device=device,
        batches=tuple(batch for row in rows for batch in row.batches),
        shares=tuple(map(fmean, zip(*known, strict=True))) if known else None,
        ms_per_sample=fmean(paces) if paces else None,
    )


def _time_of(state: LiveState, rank: int) -> RankTimes | None:
    return state.times[rank] if rank < len(state.times) else None


def device_of(state: LiveState, rank: int) -> str:
    """What people call a rank's device; "" where the log does not say."""
    ranks = () if state.header is None else state.header.ranks
    if rank >= len(ranks):
        return ""
    return (ranks[rank].name or ranks[rank].device or ranks[rank].host).removeprefix("NVIDIA ")


def extremes(state: LiveState) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """The slowest and the fastest rank with their milliseconds a sample; None where fewer than two are known."""
    if state.window is None:
        return None
    batches = state.window.local_batches
    measured = [(rank, times) for rank, times in enumerate(state.times) if times is not None and batches[rank] > 0]
    paces = [(times.compute_ms / batches[rank], rank) for rank, times in measured]
    if len(paces) < 2:
        return None
    (slow, slowest), (fast, fastest) = max(paces), min(paces)
    return (slowest, slow), (fastest, fast)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Cells of each column; `parts` are those of a step that have a percentage."""

    name: int
    device: int
    batch: int
    batch_bar: int
    share_bar: int
    parts: range
    shows_pace: bool


def rank_lines(rows: list[RankRow], width: int, glyphs: Glyphs = COLOURED) -> list[Line]:
    """A heading and one line a row: who, local batch as a bar, where a step's time goes as a bar and in percent."""
    columns = _columns(rows, width, glyphs)
    most = max(1.0, *(fmean(row.batches) for row in rows))  # a rank that padding is for has 0
    return [_heading(columns, glyphs), *(_row_line(row, columns, most, glyphs) for row in rows)]


def _columns(rows: list[RankRow], width: int, glyphs: Glyphs) -> _Columns:
    """As wide as their content, the bars as wide as the rest allows."""
    shows_loading = any(row.shares is not None and row.shares[3] >= _LOADING_SHOWS for row in rows)
    parts = range(4 if shows_loading else 3)
    shows_pace = width >= _PACE_SHOWS
    name = min(max(4, *(len(rank_ranges(row.ranks)) for row in rows)), 12)
    batch = max(5, *(len(row.batch) for row in rows))
    fixed = name + batch + _PART_WIDTH * len(parts) + (_PACE_WIDTH if shows_pace else 0) + 4  # and 4 blanks
    min_bars = _MIN_BARS if width >= 70 else _FEWEST_BARS
    longest = max(cell_len(_device_label(row, glyphs)) for row in rows)
    device = max(6, min(longest, width - fixed - min_bars, _MAX_DEVICE))
    bars = max(min_bars, width - fixed - device)
    return _Columns(
        name=name,
        device=device,
        batch=batch,
        batch_bar=bars * 2 // 5,
        share_bar=bars - bars * 2 // 5,
        parts=parts,
        shows_pace=shows_pace,
    )


def _heading(columns: _Columns, glyphs: Glyphs) -> Line:
    line: Line = [
        (f"{'rank':<{columns.name}} {'device':<{columns.device}} ", "dim"),
        (f"{'batch':>{columns.batch}}{'':{columns.batch_bar + 2}}", "dim"),
        (f"{'step':<{columns.share_bar}}", "dim"),
    ]
    line += [(f"{glyphs.parts[i]} {_PART_NAMES[i]}".rjust(_PART_WIDTH), PART_STYLES[i]) for i in columns.parts]
    return line + ([("ms/sample".rjust(_PACE_WIDTH), "dim")] if columns.shows_pace else [])


def _row_line(row: RankRow, columns: _Columns, most: float, glyphs: Glyphs) -> Line:
    """One row; `most` is the local batch whose bar is full."""
    drawn = bar(fmean(row.batches) / most, columns.batch_bar, glyphs)
    line: Line = [
        (f"{_cut(rank_ranges(row.ranks), columns.name, glyphs):<{columns.name}} ", "bold"),
        (set_cell_size(_cut(_device_label(row, glyphs), columns.device, glyphs), columns.device) + " ", ""),
        (f"{row.batch:>{columns.batch}} ", "bold"),
        (drawn, "cyan"),
        (glyphs.track * (columns.batch_bar - len(drawn)), TRACK_STYLE),
        (" ", ""),
    ]
    line += _share_cells(row, columns.share_bar, columns.parts, glyphs)
    pace = "" if row.ms_per_sample is None else amount(row.ms_per_sample)
    return line + ([(pace.rjust(_PACE_WIDTH), "")] if columns.shows_pace else [])


def _share_cells(row: RankRow, width: int, parts: range, glyphs: Glyphs) -> Line:
    """The stacked bar of a row and its percentages."""
    if row.shares is None:
        return [("not measured".ljust(width)[:width], "dim"), (" " * (_PART_WIDTH * len(parts)), "")]
    cells = stacked([row.shares[i] for i in parts], width)
    line = [(glyphs.parts[i] * cells[i], PART_STYLES[i]) for i in parts]
    return line + [(f"{row.shares[i]:>{_PART_WIDTH}.0%}", PART_STYLES[i]) for i in parts]


def _device_label(row: RankRow, glyphs: Glyphs) -> str:
    count = f" {glyphs.times}{len(row.ranks)}" if len(row.ranks) > 1 else ""
    return printable(row.device) + count


def _cut(text: str, width: int, glyphs: Glyphs) -> str:
    """At most so many characters, the middle left out: names of devices differ at their ends."""
    if len(text) <= width:
        return text
    kept = max(0, width - len(glyphs.more))
    return text[: kept - kept // 2] + glyphs.more[:width] + text[len(text) - kept // 2 :]
