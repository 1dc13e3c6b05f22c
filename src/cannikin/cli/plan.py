"""`cannikin plan`: the best split of a total batch over the ranks of a cluster file (paper, section 3.3).

With `--batch-range` it shows step time, throughput and goodput (paper, section 2.2) over a range of total batches:

    efficiency(B) = (phi + B0) / (phi + B)      goodput(B) = B / T(B) * efficiency(B),      B0 = LO
"""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from cannikin.cli.plan_table import alike, print_range, print_split
from cannikin.cluster_file import MAX_BATCH, load_cluster
from cannikin.core.goodput import efficiency
from cannikin.core.perf import Cluster, step_time
from cannikin.core.records import Split
from cannikin.core.split import SplitSolver
from cannikin.errors import InvalidInputError

__all__ = ["Row", "command"]

_MAX_ROWS = 12


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
        if as_json:
            _echo_json(_range_as_json(rows))
        else:
            print_range(heading, cluster, rows, noise_scale)
    elif total_batch is not None:
        split = _solve(SplitSolver(cluster), total_batch, path)
        even_s = _even_step_s(cluster, total_batch)
        if as_json:
            _echo_json(_split_as_json(split, total_batch, even_s))
        else:
            print_split(heading, cluster, split, even_s)


def _echo_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, allow_nan=False))


def _leave(cluster: Cluster, names: tuple[str, ...], path: Path) -> Cluster:
    """The cluster after one rank of each of these names has left."""
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
    """Step time with B // n samples a rank, one more on the first B mod n; None where that breaks a bound."""
    size, more = divmod(total_batch, cluster.num_ranks)
    even = size + (np.arange(cluster.num_ranks) < more)
    if (even < cluster.min_batch).any() or (even > cluster.max_batch).any():
        return None
    return step_time(cluster, even)


def _split_as_json(split: Split, total_batch: int, even_s: float | None) -> dict[str, Any]:
    return {
        "total_batch": total_batch,
        "step_ms": split.step_s * 1000,
        "local_batches": split.local_batches,
        "bottlenecks": split.bottlenecks,
        "even_step_ms": None if even_s is None else even_s * 1000,
        "speedup_over_even": None if even_s is None else even_s / split.step_s,
    }


@dataclass(frozen=True, kw_only=True)
class Row:
    """One total batch of a range; efficiency and goodput are None without a noise scale."""

    total_batch: int
    split: Split
    throughput_per_s: float
    efficiency: float | None
    goodput_per_s: float | None

    @property
    def merit(self) -> float:
        return self.throughput_per_s if self.goodput_per_s is None else self.goodput_per_s


def _rows(cluster: Cluster, batch_range: tuple[int, int], noise_scale: float | None, path: Path) -> list[Row]:
    solver = SplitSolver(cluster)
    for end in batch_range:  # refuse an impossible end before anything else: a range is not cut short unasked
        _solve(solver, end, path)
    rows = []
    for total_batch in _grid(*batch_range):
        split = _solve(solver, total_batch, path)
        rate = total_batch / split.step_s
        worth = _worth(total_batch, batch_range[0], noise_scale)
        goodput = None if worth is None else rate * worth
        rows.append(
            Row(total_batch=total_batch, split=split, throughput_per_s=rate, efficiency=worth, goodput_per_s=goodput)
        )
    return rows


def _worth(total_batch: int, initial_batch: int, noise_scale: float | None) -> float | None:
    """Statistical efficiency; only the ratio of noise to signal matters, so the signal may be 1."""
    if noise_scale is None:
        return None
    return float(efficiency(total_batch, initial_batch=initial_batch, noise_trace=noise_scale, signal_sqnorm=1.0))


def _grid(low: int, high: int) -> list[int]:
    """At most `_MAX_ROWS` total batches from low to high, every doubling of low among them where they fit."""
    doublings = math.log2(high / low)
    if doublings > _MAX_ROWS - 1:
        return sorted({round(value) for value in np.geomspace(low, high, _MAX_ROWS)})
    per_doubling = int((_MAX_ROWS - 1) / doublings) if doublings else 1
    steps = range(int(doublings * per_doubling) + 1)
    return sorted({*(min(high, round(low * 2 ** (step / per_doubling))) for step in steps), high})


def _range_as_json(rows: list[Row]) -> dict[str, Any]:
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
    return {"rows": listed, "best_total_batch": max(rows, key=lambda row: row.merit).total_batch}
