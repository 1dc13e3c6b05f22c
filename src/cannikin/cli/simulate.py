"""`cannikin simulate`: what a cluster would do with a job, before anyone queues for it, under one policy or several.

With `--from-run` the cluster is fitted from a real run's log, and its splits are run again on it (`sim.replay`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby, product
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cannikin import words
from cannikin.cli.printing import measured, say
from cannikin.core.policies import POLICIES
from cannikin.core.values import Job
from cannikin.errors import InfeasibleError, InvalidInputError
from cannikin.runlog import RUNLOG_NAME, RunLog, RunLogWriter, numbers_only, read_runlog
from cannikin.sim.hardware import Machine
from cannikin.sim.replay import Comparison, compare, machine_from_log
from cannikin.sim.runs import find_machine, job_for, named_planner, simulate
from cannikin.sim.simulation import RunResult, Simulation
from cannikin.sim.workload import Workload, find_workload
from cannikin.toml_files import naming

_MAX_SEEDS = 100
_MAX_SPLITS = 20  # of a log that the table shows
_MOST_PARTS = 32  # of a split: people compare them rank by rank
_MOST_WIDTH = 140
_POLICIES = ", ".join(f"{name} (default)" if name == "cannikin" else name for name in POLICIES)


def _parse_seeds(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    with suppress(ValueError):
        seeds = tuple(int(part) for part in value.split(","))
        if all(0 <= seed < 2**32 for seed in seeds) and len(set(seeds)) == len(seeds) <= _MAX_SEEDS:
            return seeds
    raise click.BadParameter(f"{value!r} is not a list of different whole numbers from 0, like 0,1,2", ctx, param)


def _parse_policies(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    names = tuple(part.strip() for part in value.split(",")) if value is not None else ()
    for name in names:  # an unknown one is refused before anything runs
        named_planner(name, Job(num_ranks=1, batch_size=1))
    if len(set(names)) != len(names):
        raise click.BadParameter(f"{value!r} names a policy twice", ctx, param)
    return names


_EPILOG = """Clusters: a, b, c (the paper's), or a TOML file with [link] and [[node]] tables. Devices: a100, v100,
rtx6000, rtx2080ti, t4, a5000, a4000, p4000. Workloads: cifar10, imagenet, bert, deepspeech2, ncf."""


@click.command("simulate", epilog=_EPILOG)
@click.argument("cluster", required=False)
@click.option("--workload", "workload_name", metavar="W", help="What is trained.")
@click.option(
    "--policy", "policies", callback=_parse_policies, metavar="P[,P...]",
    help=f"{_POLICIES}; P@epoch sees one window per epoch, P@step every step.",
)  # fmt: skip
@click.option(
    "--seeds", "--seed", "seeds", default="0", callback=_parse_seeds, metavar="N[,N...]", help="One run each."
)
@click.option("--batch-size", type=click.IntRange(min=1), metavar="B0", help="Total batch at the start.")
@click.option("--max-batch-size", type=click.IntRange(min=1), metavar="B", help="Largest total; B0 keeps it fixed.")
@click.option("--target", type=float, help="Metric that ends a run; the paper's where left out.")
@click.option("--max-epochs", type=click.FloatRange(min=0, min_open=True), help="Passes after which a run stops.")
@click.option("--from-run", type=click.Path(path_type=Path), metavar="RUN", help="Fit the cluster from this run's log.")
@click.option("--steps", type=click.IntRange(min=1), default=500, help="Steps of a policy with --from-run.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Write a run log for each run, in folders here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
def command(
    cluster: str | None,
    workload_name: str | None,
    policies: tuple[str, ...],
    seeds: tuple[int, ...],
    batch_size: int | None,
    max_batch_size: int | None,
    target: float | None,
    max_epochs: float | None,
    from_run: Path | None,
    steps: int,
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Train WORKLOAD on CLUSTER in simulated time, under one policy or several.

    CLUSTER is a name or a TOML file. Times to the target, steps, epochs and splits come out; with --run-dir also run
    logs as the runtime writes them. The planners are the runtime's own.
    """
    if from_run is not None:
        if cluster is not None or workload_name is not None:
            raise click.UsageError("--from-run takes cluster and job from the log: leave CLUSTER and --workload out")
        log = read_runlog(from_run)
        with numbers_only(from_run), naming(from_run):
            _replay(from_run, log, policies, seeds[0], steps, as_json)
        return
    if cluster is None or workload_name is None:
        raise click.UsageError("give CLUSTER and --workload, or --from-run")
    workload = find_workload(workload_name, target)
    machine = find_machine(cluster, workload_name)
    job = job_for(machine, workload, batch_size=batch_size, max_batch_size=max_batch_size)

    def run(policy: str, seed: int, on_progress: Callable[[float], None]) -> RunResult:
        with ExitStack() as stack:
            folder = None if run_dir is None else run_dir / f"{policy.replace('@', '-')}-seed{seed}"
            observers = () if folder is None else (stack.enter_context(RunLogWriter(folder / RUNLOG_NAME)),)
            return simulate(
                machine, workload, policy, job=job, seed=seed, max_epochs=max_epochs, observers=observers,
                tags={"cluster": cluster}, on_progress=on_progress,
            )  # fmt: skip

    runs, infeasible = _run_all(run, policies or ("cannikin",), seeds, quiet=as_json)
    if as_json:
        found = _as_json(cluster, workload, job, machine, runs)
        click.echo(json.dumps({**found, "infeasible": infeasible}, allow_nan=False))
    else:
        _print_runs(f"{workload.spec.title} on {Path(cluster).name}", workload, machine, job, runs)
        for policy, why in infeasible.items():
            click.echo(f" {policy}: infeasible: {why}")


def _run_all(
    run: Callable[[str, int, Callable[[float], None]], RunResult],
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    quiet: bool,
) -> tuple[dict[str, dict[int, RunResult]], dict[str, str]]:
    """Return the runs of each policy by seed, and the policies without a split of the initial total, with the reason.

    Raises:
        InvalidInputError: no policy has one.
    """
    runs: dict[str, dict[int, RunResult]] = {policy: {} for policy in policies}
    infeasible: dict[str, str] = {}
    with _bar(quiet=quiet) as bar:
        task = bar.add_task("", total=len(policies) * len(seeds))
        for number, (policy, seed) in enumerate(product(policies, seeds)):

            def show(share: float, num_done: int = number) -> None:
                bar.update(task, completed=num_done + share)

            bar.update(task, completed=number, description=f"{policy}, seed {seed}")
            try:
                runs[policy][seed] = run(policy, seed, show)
            except InfeasibleError as error:  # the others may have a split
                infeasible[policy] = str(error)
    if infeasible.keys() == runs.keys():
        raise InvalidInputError("; ".join(f"{policy}: {why}" for policy, why in infeasible.items()))
    return {policy: by_seed for policy, by_seed in runs.items() if by_seed}, infeasible


def _bar(*, quiet: bool) -> Progress:
    """Return a bar on stderr, which shows where that is a terminal and nobody asked for quiet."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def _as_json(
    cluster: str, workload: Workload, job: Job, machine: Machine, runs: dict[str, dict[int, RunResult]]
) -> dict[str, Any]:
    listed = [
        {
            "policy": policy,
            "seed": seed,
            "reached": run.reached,
            "reason": run.reason,
            "elapsed_s": run.elapsed_s,
            "num_steps": run.num_steps,
            "num_epochs": run.num_samples / workload.spec.num_samples,
            "step_ms": run.elapsed_s / run.num_steps * 1e3,
            "total_batch": run.plan.total_batch,
            "local_batches": run.plan.local_batches,
            "epochs": [
                {
                    "epoch": epoch.epoch,
                    "elapsed_s": epoch.elapsed_s,
                    "metric": epoch.metric,
                    "total_batch": epoch.total_batch,
                    "step_ms": epoch.step_s * 1e3,
                }
                for epoch in run.epochs
            ],
        }
        for policy, by_seed in runs.items()
        for seed, run in by_seed.items()
    ]
    facts = {"cluster": cluster, "workload": workload.name, "ranks": machine.names, "target": workload.target}
    return {**facts, "batch_size": job.batch_size, "max_batch_size": job.largest_total, "runs": listed}


def _replay(path: Path, log: RunLog, policies: tuple[str, ...], seed: int, steps: int, as_json: bool) -> None:
    """Fit, run the log's splits again, and run policies on what was fitted."""
    machine = machine_from_log(log)
    rows = compare(log, machine, seed=seed)
    info = log.headers[-1].job
    job = Job(
        num_ranks=machine.num_ranks,
        batch_size=info.batch_size,
        min_local=info.min_local or 1,
        max_local=tuple(machine.max_batch.tolist()),
        num_samples=info.num_samples,
    )
    settled: dict[str, tuple[float, tuple[int, ...]]] = {}
    for policy in policies:
        planner, pace = named_planner(policy, job)
        if pace == "epoch" and not job.num_samples:
            raise InvalidInputError(f"the log does not say how long an epoch is, which {policy} needs")
        run = Simulation(machine, planner, job, seed=seed, pace=pace).run(max_steps=steps)
        times = machine.measure(np.tile(np.array(run.plan.local_batches), (400, 1)), 0, np.random.default_rng(seed))
        settled[policy] = float(np.median(times.step_s)), run.plan.local_batches
    if as_json:
        listed = [
            {
                "local_batches": row.local_batches,
                "num_windows": row.num_windows,
                "measured_ms": row.measured_s * 1e3,
                "simulated_ms": row.simulated_s * 1e3,
                "error": row.error,
            }
            for row in rows
        ]
        planned = [
            {"policy": policy, "step_ms": step_s * 1e3, "local_batches": batches}
            for policy, (step_s, batches) in settled.items()
        ]
        click.echo(json.dumps({"splits": listed, "policies": planned}, allow_nan=False))
    else:
        _print_replay(str(path), rows, settled, steps)


def _print_runs(
    heading: str, workload: Workload, machine: Machine, job: Job, runs: dict[str, dict[int, RunResult]]
) -> None:
    """Print one row per policy, seeds averaged; then each policy's last split, and whatever did not end well."""
    totals = f"B0 {job.batch_size:,}" + (f" to {job.largest_total:,}" if job.largest_total > job.batch_size else "")
    click.echo(f" {heading}: {words.counted(machine.num_ranks, 'rank')}, {totals}")
    table = _table("policy", "time to target", "against first", "epochs", "steps", "step time", "last total")
    base = None
    for policy, by_seed in runs.items():
        group = by_seed.values()
        elapsed_s = float(np.mean([run.elapsed_s for run in group]))
        base = elapsed_s if base is None else base
        took = words.duration(elapsed_s * 1e3, decimals=1)
        num_steps = float(np.mean([run.num_steps for run in group]))
        num_samples = float(np.mean([run.num_samples for run in group]))
        table.add_row(
            policy,
            took if all(run.reached for run in group) else f"> {took}",
            f"{elapsed_s / base - 1:+.1%}",
            f"{num_samples / workload.spec.num_samples:.1f}",
            f"{num_steps:,.0f}",
            f"{elapsed_s / num_steps * 1e3:.1f} ms",
            f"{next(iter(group)).plan.total_batch:,}",
        )
    _say_table(table)
    for policy, by_seed in runs.items():
        first = next(iter(by_seed.values()))
        click.echo(f" {policy}: last split {_by_kind(machine, first.plan.local_batches)}")
    for policy, by_seed in runs.items():
        for seed, run in by_seed.items():
            if not run.reached:
                click.echo(f" {policy}, seed {seed}: {run.reason}")


def _print_replay(
    path: str, rows: list[Comparison], settled: dict[str, tuple[float, tuple[int, ...]]], steps: int
) -> None:
    """Print measured against simulated steps, split by split; then what policies would do."""
    click.echo(f" {path}: steps as measured, and on a simulated cluster fitted from them")
    table = _table("local batches", "windows", "measured", "simulated", "error")
    for row in rows[:_MAX_SPLITS]:
        times = (f"{row.measured_s * 1e3:.2f} ms", f"{row.simulated_s * 1e3:.2f} ms")
        table.add_row(words.split(row.local_batches, _MOST_PARTS), str(row.num_windows), *times, f"{row.error:+.1%}")
    _say_table(table)
    if len(rows) > _MAX_SPLITS:
        click.echo(f" and {len(rows) - _MAX_SPLITS} splits more: --json has them all")
    for policy, (step_s, batches) in settled.items():
        click.echo(f" {policy} after {steps} steps: {step_s * 1e3:.2f} ms with {words.split(batches, _MOST_PARTS)}")


def _table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for header in headers:
        table.add_column(header, justify="left" if header == headers[0] else "right", overflow="fold")
    return table


def _say_table(table: Table) -> None:
    """Print a table, if need be wider than the terminal."""
    say(table, min_width=min(measured(table).maximum, _MOST_WIDTH))


def _by_kind(machine: Machine, batches: tuple[int, ...]) -> str:
    """Return local batches by kind of rank, in rank order."""
    pairs = zip(machine.names, batches, strict=True)
    kinds = groupby(pairs, key=lambda pair: pair[0])
    return "; ".join(f"{name} {words.split([batch for _, batch in group], _MOST_PARTS)}" for name, group in kinds)
