"""`cannikin plan`: the best split of a total batch over the ranks of a cluster file (paper, section 3.3).

With `--batch-range` it shows step time, throughput and goodput (paper, section 2.2) over a range of total batches:

    efficiency(B) = (phi + B0) / (phi + B)      goodput(B) = B / T(B) * efficiency(B),      B0 = LO
"""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from cannikin.cli.plan_table import Fewer, Row, print_range, print_split
from cannikin.cluster_file import MAX_BATCH, load_cluster
from cannikin.core.goodput import efficiency, total_grid
from cannikin.core.perf import Cluster, step_time
from cannikin.core.policies.plans import even_batches
from cannikin.core.split import SplitSolver, alike, fewer_ranks
from cannikin.core.values import Job, Split
from cannikin.errors import InvalidInputError

_MAX_ROWS = 12
# Trying to leave ranks out solves once for every kind of rank; up to here that takes a second or two at worst.
_MAX_RANKS_TRIED = 1024
# A smaller gain than this is not worth a sentence.
_MIN_GAIN = 0.001


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
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise click.BadParameter(f"{value} samples: must be finite and not negative", ctx, param)
    return value


@click.command("plan", epilog="An impossible request or a malformed file exits with status 2 and one line on stderr.")
@click.argument("path", metavar="CLUSTER.toml", type=click.Path(path_type=Path))
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
@click.option("--without", multiple=True, metavar="NAME", help="One node of that name leaves; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
def command(
    path: Path,
    total_batch: int | None,
    batch_range: tuple[int, int] | None,
    noise_scale: float | None,
    without: tuple[str, ...],
    as_json: bool,
) -> None:
    """The fastest split of a total batch over the ranks of a cluster file.

    \b
    What limits a rank at the optimum:
      compute        its own forward and backward
      communication  the all-reduces that follow its first gradients
      floor          launching kernels: more samples would cost it nothing
      min_batch      it is slower than the rest even with its smallest batch
      max_batch      it could take more, but for its largest batch
    """
    if (total_batch is None) == (batch_range is None):
        raise click.UsageError("give exactly one of --batch and --batch-range")
    if noise_scale is not None and batch_range is None:
        raise click.UsageError("--noise-scale has a meaning only with --batch-range")
    cluster = _leave(load_cluster(path), without, path)
    heading = path.name + _left_words(without)
    if batch_range is not None:
        rows = _rows(cluster, batch_range, noise_scale, path)
        best = max(rows, key=lambda row: row.merit)
        fewer = _fewer(cluster, best.split)
        if as_json:
            _echo_json(_range_as_json(rows, best) | _fewer_as_json(cluster, fewer))
        else:
            print_range(heading, cluster, rows, best, noise_scale, fewer)
    elif total_batch is not None:
        split = _solve(SplitSolver(cluster), total_batch, path)
        even_s = _even_step_s(cluster, total_batch)
        fewer = _fewer(cluster, split)
        if as_json:
            _echo_json(_split_as_json(split, total_batch, even_s) | _fewer_as_json(cluster, fewer))
        else:
            print_split(heading, cluster, split, even_s, fewer)


def _echo_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, allow_nan=False))


def _leave(cluster: Cluster, names: tuple[str, ...], path: Path) -> Cluster:
    """Return the cluster after one rank of each of these names has left."""
    for position, name in enumerate(names):
        ranks = [rank for rank, label in enumerate(cluster.names) if label == name]
        if not ranks:
            known = list(dict.fromkeys(cluster.names))
            shown = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
            missing = "no more nodes have" if name in names[:position] else "no node has"
            raise InvalidInputError(f"{path}: --without {name}: {missing} that name; there are {shown}")
        if len(ranks) == cluster.num_ranks == 1:
            raise InvalidInputError(f"{path}: --without {name}: it is the only rank left; at least 1 must stay")
        if not alike(cluster, ranks):
            raise InvalidInputError(f"{path}: --without {name}: unlike nodes share that name; give each its own")
        cluster = cluster.without(ranks[-1])
    return cluster


def _left_words(names: tuple[str, ...]) -> str:
    counts = Counter(names)
    words = ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
    return f" without {words}" if words else ""


def _solve(solver: SplitSolver, total_batch: int, path: Path) -> Split:
    split = solver.split(total_batch)
    if not split.feasible:
        raise InvalidInputError(f"{path}: {split.reason}")
    # By the same sum as the even split's time, so that equal splits have equal times to the last digit.
    return replace(split, step_s=step_time(solver.cluster, split.local_batches))


def _even_step_s(cluster: Cluster, total_batch: int) -> float | None:
    """Return the step time of the even split; None where that breaks a bound."""
    even = np.array(even_batches(Job(num_ranks=cluster.num_ranks, batch_size=total_batch), total_batch))
    if (even < cluster.min_batch).any() or (even > cluster.max_batch).any():
        return None
    return step_time(cluster, even)


def _fewer(cluster: Cluster, split: Split) -> Fewer | None:
    """Return the ranks without which this total batch would be faster, and its split then, where that is worth it."""
    if not 1 < cluster.num_ranks <= _MAX_RANKS_TRIED:
        return None
    found = fewer_ranks(cluster, sum(split.local_batches))
    return found if found is not None and found[1].step_s <= split.step_s * (1 - _MIN_GAIN) else None


def _fewer_as_json(cluster: Cluster, fewer: Fewer | None) -> dict[str, Any]:
    if fewer is None:
        return {"faster_without": None}
    ranks, split = fewer
    names = [cluster.names[rank] for rank in ranks]
    step_ms = split.step_s * 1000
    return {
        "faster_without": {"ranks": ranks, "names": names, "step_ms": step_ms, "local_batches": split.local_batches}
    }


def _split_as_json(split: Split, total_batch: int, even_s: float | None) -> dict[str, Any]:
    return {
        "total_batch": total_batch,
        "step_ms": split.step_s * 1000,
        "local_batches": split.local_batches,
        "bottlenecks": split.bottlenecks,
        "even_step_ms": None if even_s is None else even_s * 1000,
        "speedup_over_even": None if even_s is None else even_s / split.step_s,
    }


def _rows(cluster: Cluster, batch_range: tuple[int, int], noise_scale: float | None, path: Path) -> list[Row]:
    solver = SplitSolver(cluster)
    for end in batch_range:  # refuse an impossible end before anything else: a range is not cut short unasked
        _solve(solver, end, path)
    return [_row(solver, total, batch_range[0], noise_scale, path) for total in _totals_between(*batch_range)]


def _row(solver: SplitSolver, total_batch: int, initial_batch: int, noise_scale: float | None, path: Path) -> Row:
    split = _solve(solver, total_batch, path)
    rate = total_batch / split.step_s
    if noise_scale is None:
        return Row(total_batch=total_batch, split=split, throughput_per_s=rate)
    # Only the ratio of noise to signal matters, so the signal may be 1.
    share = float(efficiency(total_batch, initial_batch=initial_batch, noise_trace=noise_scale, signal_sqnorm=1.0))
    return Row(
        total_batch=total_batch, split=split, throughput_per_s=rate, efficiency=share, goodput_per_s=rate * share
    )


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


def _range_as_json(rows: list[Row], best: Row) -> dict[str, Any]:
    listed = []
    for row in rows:
        entry = {
            "total_batch": row.total_batch,
            "step_ms": row.split.step_s * 1000,
            "local_batches": row.split.local_batches,
            "throughput_per_s": row.throughput_per_s,
        }
        if row.efficiency is not None:
            entry |= {"efficiency": row.efficiency, "goodput_per_s": row.goodput_per_s}
        listed.append(entry)
    return {"rows": listed, "best_total_batch": best.total_batch}
