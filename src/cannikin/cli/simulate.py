"""`cannikin simulate`: what a cluster would do with a job, before anyone queues for it, under one policy or several.

With `--from-run` the cluster is fitted from a real run's log, and its splits are run again on it (`sim.replay`).
"""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np

from cannikin.cli.progress_bar import Progress
from cannikin.cli.simulate_table import print_replay, print_runs
from cannikin.core.records import Job
from cannikin.errors import InvalidInputError
from cannikin.runlog import RUNLOG_NAME, RunLogWriter, read_runlog
from cannikin.sim.engine import RunResult, Simulation
from cannikin.sim.hardware import Machine
from cannikin.sim.replay import compare, machine_from_log
from cannikin.sim.runs import find_machine, job_for, named_planner, simulate
from cannikin.sim.workload import Workload, find_workload

__all__ = ["command"]

_MAX_SEEDS = 100


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
    help="cannikin (default), even, lb-bsp, adaptdl, paper; P@epoch sees one window an epoch.",
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
        _replay(from_run, policies, seeds[0], steps, as_json)
        return
    if cluster is None or workload_name is None:
        raise click.UsageError("give CLUSTER and --workload, or --from-run")
    workload = find_workload(workload_name, target)
    machine = find_machine(cluster, workload_name)
    job = job_for(machine, workload, batch_size=batch_size, max_batch_size=max_batch_size)
    policies = policies or ("cannikin",)
    runs: dict[tuple[str, int], RunResult] = {}
    with Progress(len(policies) * len(seeds), quiet=as_json) as progress:
        for policy in policies:
            for seed in seeds:
                with ExitStack() as stack:
                    folder = None if run_dir is None else run_dir / f"{policy.replace('@', '-')}-seed{seed}"
                    observers = () if folder is None else (stack.enter_context(RunLogWriter(folder / RUNLOG_NAME)),)
                    runs[policy, seed] = simulate(
                        machine, workload, policy, job=job, seed=seed, max_epochs=max_epochs, observers=observers,
                        tags={"cluster": cluster}, on_progress=progress.start(f"{policy}, seed {seed}"),
                    )  # fmt: skip
    if as_json:
        click.echo(json.dumps(_as_json(cluster, workload, job, machine, runs), allow_nan=False))
    else:
        print_runs(f"{workload.spec.title} on {Path(cluster).name}", workload, machine, job, runs)


def _as_json(
    cluster: str, workload: Workload, job: Job, machine: Machine, runs: dict[tuple[str, int], RunResult]
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
        for (policy, seed), run in runs.items()
    ]
    facts = {"cluster": cluster, "workload": workload.name, "ranks": machine.names, "target": workload.target}
    return {**facts, "batch_size": job.batch_size, "max_batch_size": job.largest_total, "runs": listed}


def _replay(path: Path, policies: tuple[str, ...], seed: int, steps: int, as_json: bool) -> None:
    """Fit, run the log's splits again, and run policies on what was fitted."""
    log = read_runlog(path)
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
            raise InvalidInputError(f"{path}: the log does not say how long an epoch is, which {policy} needs")
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
        told = [
            {"policy": policy, "step_ms": step_s * 1e3, "local_batches": batches}
            for policy, (step_s, batches) in settled.items()
        ]
        click.echo(json.dumps({"splits": listed, "policies": told}, allow_nan=False))
    else:
        print_replay(str(path), rows, settled, steps)
