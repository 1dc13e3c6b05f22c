"""What a person reads of `cannikin plan`: tables that fit 80 columns, plain text where stdout is no terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cannikin import words
from cannikin.cli.printing import measured, say
from cannikin.core.perf import Cluster
from cannikin.core.split import alike
from cannikin.core.values import Split

Fewer = tuple[tuple[int, ...], Split]  # ranks to leave out, and the split over the others
_MIN_WIDTH = 80
_MIN_NODE_WIDTH = 12
# What each bottleneck means for the rank that finishes last.
_MEANINGS = {
    "compute": "its own forward and backward take that long",
    "communication": "the all-reduces after its first gradients take that long",
    "floor": "launching its kernels takes that long, whatever the batch",
    "min_batch": "slower than the rest even with its smallest batch",
    "max_batch": "it has its largest batch",
    "loading": "its loader needs that long for a batch",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One total batch of a range; efficiency and goodput are None without a noise scale."""

    total_batch: int
    split: Split
    throughput_per_s: float
    efficiency: float | None = None
    goodput_per_s: float | None = None

    @property
    def merit(self) -> float:
        """What the best row has most of."""
        return self.throughput_per_s if self.goodput_per_s is None else self.goodput_per_s


def print_split(heading: str, cluster: Cluster, split: Split, even_s: float | None, fewer: Fewer | None) -> None:
    """Print one row for each run of ranks that are alike, then what the split gains."""
    total_batch = sum(split.local_batches)
    rows = []
    for first, last, name, batch, finish_s, kind in _runs(cluster, split):
        ranks, node = (f"{first}", name) if first == last else (f"{first}-{last}", f"{name} x{last - first + 1}")
        rows.append([ranks, node, f"{batch:,}", f"{batch / total_batch:.1%}", _ms(finish_s, like_s=split.step_s), kind])
    table = _table(
        ["rank", "node", "local batch", "share", "time", "bottleneck"], rows, left=("rank", "node", "bottleneck")
    )
    _say(
        _heading(f"{heading}: total batch {total_batch:,} on {words.counted(cluster.num_ranks, 'rank')}"),
        table,
        _summary(cluster, split, total_batch, even_s),
        *_advice(cluster, split, fewer, "It"),
    )


def _runs(cluster: Cluster, split: Split) -> Iterator[tuple[int, int, str, int, float, str]]:
    """Yield first and last rank, name, local batch, time and bottleneck of each run of ranks that have these alike."""
    finish_s = cluster.finish_s(split.local_batches).tolist()
    ranks = zip(cluster.names, split.local_batches, finish_s, split.bottlenecks, strict=True)
    first = 0
    for (name, batch, time_s, kind), run in groupby(ranks):
        length = len(list(run))
        yield first, first + length - 1, name, batch, time_s, kind
        first += length


def _summary(cluster: Cluster, split: Split, total_batch: int, even_s: float | None) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("step time", Text(_ms(split.step_s), style="bold"))
    last = int(cluster.finish_s(split.local_batches).argmax())
    grid.add_row("slowest", f"rank {last} ({cluster.names[last]}): {_MEANINGS[split.bottlenecks[last]]}")
    size = total_batch / cluster.num_ranks
    each = f"{size:,.0f}" if size == int(size) else f"{int(size):,} or {int(size) + 1:,}"
    if even_s is None:
        grid.add_row("even split", f"not possible: {each} samples per rank break min_batch or max_batch")
    else:
        grid.add_row("even split", f"{_ms(even_s)}, with {each} samples per rank")
        grid.add_row("speed-up", Text(f"{even_s / split.step_s:.2f}x over the even split", style="bold green"))
    return Padding(grid, (0, 0, 0, 1))


def _advice(cluster: Cluster, split: Split, fewer: Fewer | None, what: str) -> Iterator[RenderableType]:
    """Yield a sentence where fewer ranks would be faster."""
    if fewer is None:
        return
    ranks, smaller = fewer
    name = cluster.names[ranks[0]]
    who = words.rank_name(ranks[0], name) if len(ranks) == 1 else f"the {len(ranks)} ranks of {name}"
    gain = 1 - smaller.step_s / split.step_s
    hint = f" (--without {shlex.quote(name)}{f', {len(ranks)} times' if len(ranks) > 1 else ''})"
    if not alike(cluster, [rank for rank, label in enumerate(cluster.names) if label == name]):
        hint = ""
    text = f"{what} would be faster without {who}: {_ms(smaller.step_s)} per step, {gain:.1%} less{hint}."
    yield Padding(Text(text, style="yellow"), (1, 0, 0, 1))


def print_range(
    heading: str, cluster: Cluster, rows: list[Row], best: Row, noise_scale: float | None, fewer: Fewer | None
) -> None:
    """Print one row per total batch, the best one marked."""
    headers = [
        "total batch",
        "step time",
        "samples/s",
        *(["efficiency", "goodput/s"] if noise_scale is not None else []),
    ]
    lines = []
    for row in rows:
        step = _ms(row.split.step_s, like_s=rows[0].split.step_s)
        cells = [f"{row.total_batch:,}", step, words.figures(row.throughput_per_s)]
        if row.efficiency is not None and row.goodput_per_s is not None:
            cells += [f"{row.efficiency:.1%}", words.figures(row.goodput_per_s)]
        lines.append([*cells, "best of these" if row is best else ""])
    table = _table([*headers, ""], lines, left=("",))
    table.rows[rows.index(best)].style = "bold green"
    noise = "" if noise_scale is None else f", noise scale {noise_scale:,.12g}"
    _say(
        _heading(f"{heading}: {words.counted(cluster.num_ranks, 'rank')}{noise}"),
        table,
        *_range_notes(rows, best, noise_scale),
        *_advice(cluster, best.split, fewer, f"A total batch of {best.total_batch:,}"),
    )


def _range_notes(rows: list[Row], best: Row, noise_scale: float | None) -> Iterator[RenderableType]:
    if noise_scale is None:
        note = "Samples/s alone says nothing of what a sample is worth: --noise-scale adds goodput."
    elif best is rows[-1] and len(rows) > 1:
        note = f"The best is the end of the range: look beyond {best.total_batch:,}."
    else:
        note = f"Goodput/s counts samples at their worth in a batch of {rows[0].total_batch:,}."
    yield Padding(Text(f"{note} See a row's split with --batch."), (0, 0, 0, 1))


def _heading(text: str) -> RenderableType:
    return Padding(Text(text, style="bold"), (0, 0, 0, 1))


def _table(headers: list[str], rows: list[list[str]], left: tuple[str, ...]) -> Table:
    """Return a table that folds long node names where it must and cuts nothing short."""
    table = Table(box=box.SIMPLE_HEAD)
    for header, *cells in zip(headers, *rows, strict=True):
        width = max(map(len, (header, *cells)))
        width = min(width, _MIN_NODE_WIDTH) if header == "node" else width
        table.add_column(header, justify="left" if header in left else "right", min_width=width, overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    return table


def _ms(seconds: float, like_s: float | None = None) -> str:
    return f"{words.figures(seconds * 1000, None if like_s is None else like_s * 1000)} ms"


def _say(*parts: RenderableType) -> None:
    """Print them in 80 columns or more, and no number cut short."""
    say(*parts, min_width=max(_MIN_WIDTH, measured(*parts).minimum))
