"""`cannikin plan`: the best split of a total batch over the ranks of a cluster file or a run (paper, section 3.3).

With `--batch-range` it shows step time, throughput and goodput (paper, section 2.2) over a range of total batches:

    efficiency(B) = (phi + B0) / (phi + B)      goodput(B) = B / T(B) * efficiency(B),      B0 = LO

Programs get the answer as it is; people get tables that fit 80 columns.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import click
import msgspec
from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cannikin import words
from cannikin.cli.outlooks import advise, is_run, parse_add, rank_numbers, read_run
from cannikin.cli.printing import measured, say
from cannikin.cluster_file import MAX_BATCH, load_cluster
from cannikin.core.goodput import efficiency, total_grid
from cannikin.core.perf import Cluster, even_step_time, hardware_use, step_time
from cannikin.core.split import SplitSolver, alike, fewer_ranks
from cannikin.core.values import Split
from cannikin.errors import InvalidInputError
from cannikin.toml_files import naming

_MAX_ROWS = 12
_MIN_NODE_WIDTH = 12
# Trying to leave ranks out solves once for every kind of rank; up to here that takes a second or two at worst.
_MAX_RANKS_TRIED = 1024
# A smaller gain than this is not worth a sentence.
_MIN_GAIN = 0.001
# What each bottleneck means for the rank that finishes last.
_MEANINGS = {
    "compute": "its own forward and backward take that long",
    "communication": "the all-reduces after its first gradients take that long",
    "floor": "launching its kernels takes that long, whatever the batch",
    "min_batch": "slower than the rest even with its smallest batch",
    "max_batch": "it has its largest batch",
    "loading": "its loader needs that long for a batch",
}


class Fewer(msgspec.Struct, frozen=True):
    """The ranks without which a total batch would be faster, and its split then."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    step_ms: float
    local_batches: tuple[int, ...]


class Planned(msgspec.Struct, frozen=True):
    """The answer for one total batch; the even split has no time where it breaks a bound.

    `use` is the throughput over the sum of what the devices would do alone, `even_use` the even split's over the same.
    """

    total_batch: int
    step_ms: float
    local_batches: tuple[int, ...]
    bottlenecks: tuple[str, ...]
    even_step_ms: float | None
    speedup_over_even: float | None
    use: float
    even_use: float | None
    faster_without: Fewer | None


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One total batch of a range; efficiency and goodput are None without a noise scale."""

    total_batch: int
    step_ms: float
    local_batches: tuple[int, ...]
    throughput_per_s: float
    efficiency: float | None = None
    goodput_per_s: float | None = None


class Compared(msgspec.Struct, frozen=True):
    """The answer for a range of total batches; `faster_without` is about the best one."""

    rows: list[Row]
    best_total_batch: int
    faster_without: Fewer | None


def _parse_batch(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    with suppress(ValueError):
        if 1 <= int(value) <= MAX_BATCH:
            return int(value)
    raise click.BadParameter(f"{value!r} is not a whole number from 1 to {MAX_BATCH}", ctx, param)


def _parse_range(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    with suppress(ValueError):
        low, high = (int(end) for end in value.split(":"))
        if 1 <= low <= high <= MAX_BATCH:
            return low, high
    raise click.BadParameter(f"{value!r} is not LO:HI, whole numbers with 1 <= LO <= HI <= {MAX_BATCH}", ctx, param)


def _check_noise_scale(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"{value} samples: must be finite and not negative", ctx, param)
    return value


@click.command("plan", epilog="An impossible request or a malformed file exits with status 2 and one line on stderr.")
@click.argument("path", metavar="CLUSTER.toml|RUN", type=click.Path(path_type=Path))
@click.option("--batch", "total_batch", callback=_parse_batch, metavar="B", help="Total batch, in samples.")
@click.option(
    "--batch-range", callback=_parse_range, metavar="LO:HI", help="Compare total batches from LO to HI instead."
)
@click.option(
    "--noise-scale",
    type=float,
    metavar="PHI",
    callback=_check_noise_scale,
    help="Gradient noise scale, in samples: adds efficiency and goodput, with LO as the initial batch.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="NAME|RANK",
    help="One node of that name leaves, or that rank of a run; may be repeated.",
)
@click.option(
    "--add", multiple=True, callback=parse_add, metavar="DEVICE[=N]",
    help="N ranks on that device join a run: one of its devices, or of --profiles; may be repeated.",
)  # fmt: skip
@click.option(
    "--profiles", type=click.Path(path_type=Path), metavar="PATH", help="A profile store that knows other devices."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
def command(
    path: Path,
    total_batch: int | None,
    batch_range: tuple[int, int] | None,
    noise_scale: float | None,
    without: tuple[str, ...],
    add: tuple[tuple[str, int], ...],
    profiles: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest split of a total batch over the ranks of a cluster file, or what other ranks would do for a run.

    Of a run directory, or its log, the cluster is what the run has learned. Without --batch and --batch-range it says
    what the job would gain from one more of each device, and lose without each rank, or with --add and --without.

    \b
    What limits a rank at the optimum:
      compute        its own forward and backward
      communication  the all-reduces that follow its first gradients
      floor          launching kernels: more samples would cost it nothing
      min_batch      it is slower than the rest even with its smallest batch
      max_batch      it could take more, but for its largest batch
    """
    if noise_scale is not None and batch_range is None:
        raise click.UsageError("--noise-scale has a meaning only with --batch-range")
    if is_run(path):
        if total_batch is None and batch_range is None:
            advise(path, without, add, profiles, as_json=as_json)
            return
    elif add or profiles is not None:
        raise click.UsageError("--add and --profiles are for runs: in a cluster file, write another [[node]]")
    if (total_batch is None) == (batch_range is None):
        raise click.UsageError("give exactly one of --batch and --batch-range")
    if is_run(path):
        cluster = read_run(path, profiles).changed(rank_numbers(without), add).cluster()
    else:
        cluster = load_cluster(path)
    with naming(path):
        cluster = cluster if is_run(path) else _leave(cluster, without)
        answer: Planned | Compared
        if batch_range is not None:
            answer = _compare(cluster, *batch_range, noise_scale)
        else:
            assert total_batch is not None
            answer = _plan(cluster, total_batch)
    left = ", ".join(name if count == 1 else f"{count} {name}" for name, count in Counter(without).items())
    heading = f"{path.name} without {left}" if left else path.name
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(answer), allow_nan=False))
    elif isinstance(answer, Planned):
        _print_split(heading, cluster, answer)
    else:
        _print_range(heading, cluster, answer, noise_scale)


# The answer.


def _leave(cluster: Cluster, names: tuple[str, ...]) -> Cluster:
    """Return the cluster after one rank of each of these names has left."""
    for position, name in enumerate(names):
        ranks = _ranks_of(cluster, name)
        if not ranks:
            known = list(dict.fromkeys(cluster.names))
            shown = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
            missing = "no more nodes have" if name in names[:position] else "no node has"
            raise InvalidInputError(f"--without {name}: {missing} that name; there are {shown}")
        if cluster.num_ranks == 1:
            raise InvalidInputError(f"--without {name}: it is the only rank left; at least 1 must stay")
        if not alike(cluster, ranks):
            raise InvalidInputError(f"--without {name}: unlike nodes share that name; give each its own")
        cluster = cluster.without(ranks[-1])
    return cluster


def _ranks_of(cluster: Cluster, name: str) -> list[int]:
    return [rank for rank, label in enumerate(cluster.names) if label == name]


def _plan(cluster: Cluster, total_batch: int) -> Planned:
    split = _solve(SplitSolver(cluster), total_batch)
    compute_s = cluster.forward.at(split.local_batches) + cluster.backward.at(split.local_batches)
    use = float(hardware_use(split.local_batches, compute_s, split.step_s))
    even_s = even_step_time(cluster, total_batch)
    fits = even_s < math.inf
    return Planned(
        total_batch=total_batch,
        step_ms=split.step_s * 1000,
        local_batches=split.local_batches,
        bottlenecks=split.bottlenecks,
        even_step_ms=even_s * 1000 if fits else None,
        speedup_over_even=even_s / split.step_s if fits else None,
        use=use,
        even_use=use * split.step_s / even_s if fits else None,
        faster_without=_fewer(cluster, total_batch, split.step_s * 1000),
    )


def _compare(cluster: Cluster, low: int, high: int, noise_scale: float | None) -> Compared:
    solver = SplitSolver(cluster)
    for end in (low, high):  # refuse an impossible end before anything else: a range is not cut short unasked
        _solve(solver, end)
    rows = [_row(solver, total, low, noise_scale) for total in _totals_between(low, high)]
    best = max(rows, key=lambda row: row.throughput_per_s if row.goodput_per_s is None else row.goodput_per_s)
    fewer = _fewer(cluster, best.total_batch, best.step_ms)
    return Compared(rows=rows, best_total_batch=best.total_batch, faster_without=fewer)


def _row(solver: SplitSolver, total_batch: int, initial_batch: int, noise_scale: float | None) -> Row:
    split = _solve(solver, total_batch)
    rate, share = total_batch / split.step_s, None
    if noise_scale is not None:  # only the ratio of noise to signal matters, so the signal may be 1
        share = float(efficiency(total_batch, initial_batch=initial_batch, noise_trace=noise_scale, signal_sqnorm=1.0))
    return Row(
        total_batch=total_batch,
        step_ms=split.step_s * 1000,
        local_batches=split.local_batches,
        throughput_per_s=rate,
        efficiency=share,
        goodput_per_s=None if share is None else rate * share,
    )


def _solve(solver: SplitSolver, total_batch: int) -> Split:
    split = solver.split(total_batch)
    if not split.feasible:
        raise InvalidInputError(split.reason)
    # By the same sum as the even split's time, so that equal splits have equal times to the last digit.
    return replace(split, step_s=step_time(solver.cluster, split.local_batches))


def _fewer(cluster: Cluster, total_batch: int, step_ms: float) -> Fewer | None:
    """Return the ranks without which this total batch would be faster, where that is worth a sentence."""
    found = fewer_ranks(cluster, total_batch) if 1 < cluster.num_ranks <= _MAX_RANKS_TRIED else None
    if found is None or found[1].step_s * 1000 > step_ms * (1 - _MIN_GAIN):
        return None
    ranks, split = found
    names = tuple(cluster.names[rank] for rank in ranks)
    return Fewer(ranks=ranks, names=names, step_ms=split.step_s * 1000, local_batches=split.local_batches)


def _totals_between(low: int, high: int) -> list[int]:
    """Return at most 12 total batches from low to high, every doubling of low among them where they fit.

    >>> _totals_between(5, 100)
    [5, 7, 10, 14, 20, 28, 40, 57, 80, 100]
    """
    doublings = math.log2(high / low)
    if not 1 <= doublings <= _MAX_ROWS - 1:
        return [int(total) for total in total_grid(low, high, _MAX_ROWS)]
    per_doubling = int((_MAX_ROWS - 1) / doublings)
    whole = math.ceil(doublings)
    beyond = total_grid(low, low * 2**whole, whole * per_doubling + 1)
    return [*(int(total) for total in beyond if total < high), high]


# What a person reads.


def _print_split(heading: str, cluster: Cluster, plan: Planned) -> None:
    """Print one row for each run of ranks that are alike, then what the split gains."""
    finish_ms = cluster.finish_s(plan.local_batches) * 1000
    facts = zip(cluster.names, plan.local_batches, finish_ms.tolist(), plan.bottlenecks, strict=True)
    rows, first = [], 0
    for (name, batch, time_ms, kind), run in groupby(facts):
        number = len(list(run))
        ranks, node = (f"{first}-{first + number - 1}", f"{name} x{number}") if number > 1 else (f"{first}", name)
        rows.append([ranks, node, f"{batch:,}", f"{batch / plan.total_batch:.1%}", _ms(time_ms, plan.step_ms), kind])
        first += number
    headers = ("rank", "node", "local batch", "share", "time", "bottleneck")
    summary = Table.grid(padding=(0, 2))
    summary.add_row("step time", Text(_ms(plan.step_ms), style="bold"))
    last = int(finish_ms.argmax())
    summary.add_row("slowest", f"rank {last} ({cluster.names[last]}): {_MEANINGS[plan.bottlenecks[last]]}")
    least, more = divmod(plan.total_batch, cluster.num_ranks)
    each = f"{least:,} or {least + 1:,} samples per rank" if more else f"{least:,} samples per rank"
    if plan.even_step_ms is None:
        summary.add_row("even split", f"not possible: {each} break min_batch or max_batch")
    else:
        summary.add_row("even split", f"{_ms(plan.even_step_ms)}, with {each}")
        summary.add_row("speed-up", Text(f"{plan.speedup_over_even:.2f}x over the even split", style="bold green"))
    summary.add_row("use", words.use(plan.use, plan.step_ms / (plan.even_step_ms or math.inf)))
    _say(
        f"{heading}: total batch {plan.total_batch:,} on {words.counted(cluster.num_ranks, 'rank')}",
        _table(headers, rows, left=("rank", "node", "bottleneck")),
        summary,
        *_advice(cluster, plan.step_ms, plan.faster_without, "It"),
    )


def _print_range(heading: str, cluster: Cluster, answer: Compared, noise_scale: float | None) -> None:
    """Print one row per total batch, the best one marked."""
    rows = answer.rows
    best = next(row for row in rows if row.total_batch == answer.best_total_batch)
    headers = ["total batch", "step time", "samples/s"]
    headers += [] if noise_scale is None else ["efficiency", "goodput/s"]
    lines = []
    for row in rows:
        cells = [f"{row.total_batch:,}", _ms(row.step_ms, rows[0].step_ms), words.figures(row.throughput_per_s)]
        if row.efficiency is not None and row.goodput_per_s is not None:
            cells += [f"{row.efficiency:.1%}", words.figures(row.goodput_per_s)]
        lines.append([*cells, "best of these" if row is best else ""])
    table = _table([*headers, ""], lines, left=("",))
    table.rows[rows.index(best)].style = "bold green"
    if noise_scale is None:
        note = "Samples/s alone says nothing of what a sample is worth: --noise-scale adds goodput."
    elif best is rows[-1] and len(rows) > 1:
        note = f"The best is the end of the range: look beyond {best.total_batch:,}."
    else:
        note = f"Goodput/s counts samples at their worth in a batch of {rows[0].total_batch:,}."
    noise = "" if noise_scale is None else f", noise scale {noise_scale:,.12g}"
    _say(
        f"{heading}: {words.counted(cluster.num_ranks, 'rank')}{noise}",
        table,
        Text(f"{note} See a row's split with --batch."),
        *_advice(cluster, best.step_ms, answer.faster_without, f"A total batch of {best.total_batch:,}"),
    )


def _advice(cluster: Cluster, step_ms: float, fewer: Fewer | None, what: str) -> Iterator[RenderableType]:
    """Yield a sentence where fewer ranks would be faster."""
    if fewer is None:
        return
    number, name = len(fewer.ranks), fewer.names[0]
    who = words.rank_name(fewer.ranks[0], name) if number == 1 else f"the {number} ranks of {name}"
    hint = f" (--without {shlex.quote(name)}{f', {number} times' if number > 1 else ''})"
    if not alike(cluster, _ranks_of(cluster, name)):
        hint = ""
    gain = 1 - fewer.step_ms / step_ms
    yield ""
    yield Text(f"{what} would be faster without {who}: {_ms(fewer.step_ms)} per step, {gain:.1%} less{hint}.", "yellow")


def _table(headers: Sequence[str], rows: list[list[str]], left: tuple[str, ...]) -> Table:
    """Return a table that folds long node names where it must and cuts nothing short."""
    table = Table(box=box.SIMPLE_HEAD)
    for header, *cells in zip(headers, *rows, strict=True):
        width = max(map(len, (header, *cells)))
        width = min(width, _MIN_NODE_WIDTH) if header == "node" else width
        table.add_column(header, justify="left" if header in left else "right", min_width=width, overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    return table


def _ms(time_ms: float, like_ms: float | None = None) -> str:
    return f"{words.figures(time_ms, like_ms)} ms"


def _say(heading: str, table: Table, *parts: RenderableType) -> None:
    """Print them in 80 columns or more, and no number cut short."""
    indented = [Padding(part, (0, 0, 0, 1)) for part in (Text(heading, style="bold"), *parts)]
    say(indented[0], table, *indented[1:], min_width=max(80, measured(*indented, table).minimum))
