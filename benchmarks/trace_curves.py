"""From public convergence traces to the simulator's workload data: `python -m benchmarks.trace_curves TRACES`.

TRACES holds `convergence/<model>/validation-<batch>.csv` of AdaptDL's OSDI'21 artifact (petuum/adaptdl, branch
osdi21-artifact, commit c793c70, Apache-2.0). Of each model's run at its smallest batch, B0, it prints a few epochs of
progress (B0-steps), metric, |G|^2 and tr Sigma (B0 times the variance at B0), and the first epoch at the paper's
target: the `[workload.curve]` lines of `src/cannikin/sim/data/workloads.toml`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

# Model: B0, the paper's target, epochs to keep (from 1; the one that reaches the target is added).
CURVES = {
    "cifar10": (128, 0.94, (1, 2, 3, 5, 8, 12, 20, 30, 40, 50, 60, 80, 100)),
    "imagenet": (200, 0.75, (1, 2, 3, 5, 10, 20, 30, 31, 40, 50, 60, 61, 90)),
    "bert": (12, 88.0, (1, 2)),
    "deepspeech2": (20, -40.0, (1, 2, 3, 4, 5, 6, 8, 10, 12, 17, 20, 25, 30, 40)),
    "ncf": (256, 0.69, (1, 2, 3, 4, 6, 8, 10)),
}


def print_curve(traces: Path, model: str) -> None:
    """Print the lines of one model."""
    initial, target, epochs = CURVES[model]
    with Path(traces, "convergence", model, f"validation-{initial}.csv").open() as file:
        table = np.array([[float(value) for value in row.values()] for row in csv.DictReader(file)])
    metric = table[:, 2] * np.sign(target)
    hit = int(np.flatnonzero(metric >= target)[0])
    rows = table[sorted({*(epoch - 1 for epoch in epochs), hit})]
    print(f"# {model}: the target is first reached in epoch {hit + 1}")
    print(f"target_progress = {table[hit, 0]:.0f}")
    for name, values in (
        ("progress", rows[:, 0]),
        ("metric", rows[:, 2]),
        ("signal_sqnorm", rows[:, 3]),
        ("noise_trace", rows[:, 4] * initial),
    ):
        print(f"{name} = [{', '.join(f'{value:.4g}' if name != 'progress' else f'{value:.0f}' for value in values)}]")


def main(arguments: list[str] | None = None) -> None:
    """Print all, if the arguments name the folder of traces."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or not Path(arguments[0], "convergence").is_dir():
        print("trace_curves needs the folder of the traces: python -m benchmarks.trace_curves TRACES", file=sys.stderr)
        return
    for model in CURVES:
        print_curve(Path(arguments[0]), model)


if __name__ == "__main__":
    main()
