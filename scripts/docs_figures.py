"""Draws the figures of docs/assets from run logs: simulated runs with a fixed seed, made here, and read back.

make figures        # or: python -m scripts.docs_figures [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.drawing import Points, lines
from cannikin.runlog import RUNLOG_NAME, RunLog, RunLogWriter, read_runlog
from cannikin.sim.runs import find_machine, job_for, named_planner
from cannikin.sim.simulation import Simulation
from cannikin.sim.workload import find_workload

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
SEED = 0


def run(folder: Path, cluster: str, workload_name: str, policy: str, *, epochs: float, fixed: int | None) -> RunLog:
    """The log of a simulated run; `fixed` keeps the total batch there."""
    machine, workload = find_machine(cluster, workload_name), find_workload(workload_name)
    job = job_for(machine, workload, batch_size=fixed, max_batch_size=fixed)
    path = folder / f"{cluster}-{workload_name}-{policy}" / RUNLOG_NAME
    planner, _ = named_planner(policy, job, batch_norm=workload.spec.batch_norm)
    with RunLogWriter(path) as log:
        simulation = Simulation(machine, planner, job, workload, seed=SEED, pace="window", observers=(log,))
        simulation.begin(policy, {"workload": workload.name, "cluster": cluster, "seed": str(SEED)})
        simulation.run(max_epochs=epochs)
    return read_runlog(path)


def split_over_time(log: RunLog, last_step: int) -> dict[str, Points]:
    """Local batch of each rank against the step."""
    names = [rank.name for rank in log.header.ranks]
    steps = [(plan.first_step, plan.local_batches) for plan in log.plans if plan.first_step <= last_step]
    steps.append((last_step, steps[-1][1]))
    return {name: [(step, split[rank]) for step, split in steps] for rank, name in enumerate(names)}


def step_times(log: RunLog, last_step: int) -> Points:
    """Measured milliseconds per step, window by window."""
    return [
        (window.first_step + window.num_steps / 2, window.step_ms)
        for window in log.windows
        if window.step_ms is not None and window.first_step + window.num_steps / 2 <= last_step
    ]


def predictions(log: RunLog, last_step: int) -> Points:
    """Predicted milliseconds per step, by the plan in force."""
    known = [
        (plan.first_step, plan.predicted_step_ms)
        for plan in log.plans
        if plan.predicted_step_ms is not None and plan.first_step <= last_step
    ]
    return [*known, (last_step, known[-1][1])]


def noise_and_total(log: RunLog) -> dict[str, Points]:
    """Total batch, and the noise scale as far as it is known, against passes over the data."""
    total = [(window.progress, float(window.total_batch)) for window in log.windows if window.progress is not None]
    noise = [
        (window.progress, window.noise.noise_scale)
        for window in log.windows
        if window.progress is not None and window.noise is not None and window.noise.noise_scale is not None
    ]
    return {"total batch": total, "noise scale": noise}


def main(assets: Path) -> None:
    """Run, read, draw."""
    assets.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fixed = {
            policy: run(folder, "a", "imagenet", policy, epochs=0.011, fixed=128)
            for policy in ("even", "lb-bsp", "cannikin")
        }
        adaptive = run(folder, "b", "cifar10", "cannikin", epochs=400.0, fixed=None)
    where = "ResNet-50, B = 128, simulated cluster A"
    ours = fixed["cannikin"]
    split = split_over_time(ours, 60)
    figures = {
        "policies.svg": lines(
            f"Step time: {where}",
            "step",
            "ms per step",
            {("DDP (even)" if policy == "even" else policy): step_times(log, 100) for policy, log in fixed.items()},
        ),
        "split.svg": lines(f"The split: {where}", "step", "samples", split, stairs=tuple(split)),
        "prediction.svg": lines(
            f"Predicted and measured: {where}",
            "step",
            "ms per step",
            {"predicted": predictions(ours, 100), "measured": step_times(ours, 100)},
            stairs=("predicted",),
        ),
        "total-batch.svg": lines(
            "Total batch: ResNet-18 on CIFAR-10, simulated cluster B",
            "progress, passes at the initial batch",
            "samples",
            noise_and_total(adaptive),
        ),
    }
    for file_name, drawing in figures.items():
        (assets / file_name).write_text(drawing)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS)
