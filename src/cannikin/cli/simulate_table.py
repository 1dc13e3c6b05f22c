"""The tables of `cannikin simulate`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import click
import numpy as np
from rich import box
from rich.table import Table

from cannikin.cli.printing import measured, say
from cannikin.core.records import Job
from cannikin.sim.engine import RunResult
from cannikin.sim.hardware import Machine
from cannikin.sim.replay import Comparison
from cannikin.sim.workload import Workload

__all__ = ["duration", "print_replay", "print_runs"]

_MAX_SPLITS = 20
_MOST_WIDTH = 140


def print_runs(
    heading: str, workload: Workload, machine: Machine, job: Job, runs: dict[tuple[str, int], RunResult]
) -> None:
    """One row a policy, seeds averaged; then how each policy splits the batch, and whatever did not end well."""
    totals = f"B0 {job.batch_size:,}" + (f" to {job.largest_total:,}" if job.largest_total > job.batch_size else "")
    click.echo(f" {heading}: {machine.num_ranks} ranks, {totals}")
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("policy", "time to target", "against first", "epochs", "steps", "step time", "last total"):
        table.add_column(header, justify="left" if header == "policy" else "right")
    base = None
    for policy, group in _by_policy(runs):
        reached = all(run.reached for run in group)
        elapsed_s = float(np.mean([run.elapsed_s for run in group]))
        base = elapsed_s if base is None else base
        num_steps = float(np.mean([run.num_steps for run in group]))
        num_samples = float(np.mean([run.num_samples for run in group]))
        table.add_row(
            policy,
            duration(elapsed_s) if reached else f"> {duration(elapsed_s)}",
            f"{elapsed_s / base - 1:+.1%}",
            f"{num_samples / workload.spec.num_samples:.1f}",
            f"{num_steps:,.0f}",
            f"{elapsed_s / num_steps * 1e3:.1f} ms",
            f"{group[0].plan.total_batch:,}",
        )
    _say_table(table)
    for policy, group in _by_policy(runs):
        click.echo(f" {policy}: last split {_split(machine, group[0].plan.local_batches)}")
    for (policy, seed), run in runs.items():
        if not run.reached:
            click.echo(f" {policy}, seed {seed}: {run.reason}")


def print_replay(
    path: str, rows: list[Comparison], settled: dict[str, tuple[float, tuple[int, ...]]], steps: int
) -> None:
    """Measured against simulated steps, split by split; then what policies would do."""
    click.echo(f" {path}: steps as measured, and on a simulated cluster fitted from them")
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("local batches", "windows", "measured", "simulated", "error"):
        table.add_column(header, justify="left" if header == "local batches" else "right", overflow="fold")
    for row in rows[:_MAX_SPLITS]:
        times = (f"{row.measured_s * 1e3:.2f} ms", f"{row.simulated_s * 1e3:.2f} ms")
        table.add_row(_listed(row.local_batches), str(row.num_windows), *times, f"{row.error:+.1%}")
    _say_table(table)
    if len(rows) > _MAX_SPLITS:
        click.echo(f" and {len(rows) - _MAX_SPLITS} splits more: --json has them all")
    for policy, (step_s, batches) in settled.items():
        click.echo(f" {policy} after {steps} steps: {step_s * 1e3:.2f} ms with {_listed(batches)}")


def _say_table(table: Table) -> None:
    """Print a table, if need be wider than the terminal."""
    say(table, min_width=min(measured(table).maximum, _MOST_WIDTH))


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, as people say them.

    >>> duration(42.0), duration(4000.0), duration(40000.0)
    ('42.0 s', '66.7 min', '11.1 h')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _by_policy(runs: dict[tuple[str, int], RunResult]) -> Iterator[tuple[str, list[RunResult]]]:
    for policy, group in groupby(runs.items(), key=lambda item: item[0][0]):
        yield policy, [run for _, run in group]


def _split(machine: Machine, batches: tuple[int, ...]) -> str:
    """Local batches by kind of rank, in rank order."""
    parts = []
    for name, group in groupby(zip(machine.names, batches, strict=True), key=lambda pair: pair[0]):
        parts.append(f"{name} {_listed(tuple(batch for _, batch in group))}")
    return "; ".join(parts)


def _listed(batches: tuple[int, ...]) -> str:
    if len(set(batches)) == 1 and len(batches) > 1:
        return f"{batches[0]} x{len(batches)}"
    return ", ".join(map(str, batches))
