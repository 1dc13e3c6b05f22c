"""From public step-time traces to the simulator's device data, and how well curves predict batches held out.

`python -m benchmarks.trace_fits TRACES` wants the folder with `step-times/<model>/placements-<host>.csv` of the Sia
artifact (siasosp23/artifacts, adaptdl/sched/traces, commit aaf7a0d); one-GPU rows only, compute = step - sync. It
prints the `[device.times]` lines of `src/cannikin/sim/data/devices.toml`, then the held-out check: every second batch
size is fitted, the others are predicted. Without a folder it says so and does nothing.

    t(b) = (launch^p + (fixed + per_sample b)^p)^(1/p)        launching kernels, and the work once the device is full
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from cannikin.core.fit import fit_curves

HOSTS = {"t4": "aws", "rtx2080ti": "rtx", "rtx6000": "quad", "v100": "azure", "a100": "dgx-ext"}
MODELS = ("cifar10", "imagenet", "bert", "deepspeech2", "ncf")
SHARPNESS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def one_gpu(traces: Path, model: str, host: str) -> tuple[np.ndarray, np.ndarray]:
    """Return local batches and compute seconds on one GPU, by batch."""
    path = traces / "step-times" / model / f"placements-{host}.csv"
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["placement"] == "1"]
    points = sorted((int(row["local_bsz"]), float(row["step_time"]) - float(row["sync_time"])) for row in rows)
    batches, seconds = np.array(points).T
    return batches, seconds


def smooth(parameters: np.ndarray, batches: np.ndarray, sharpness: float) -> np.ndarray:
    """Return t(b), from the logarithms of launch, fixed and per-sample time."""
    launch, fixed, per_sample = np.exp(parameters)
    return (launch**sharpness + (fixed + per_sample * batches) ** sharpness) ** (1 / sharpness)


def fit_smooth(batches: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, float]:
    """Fit the curve of least relative error; return its parameters (logarithms) and sharpness."""
    slope = max(np.polyfit(batches, seconds, 1)[0], 1e-9)
    best, best_cost, best_sharpness = np.zeros(3), np.inf, SHARPNESS[0]
    for sharpness in SHARPNESS:
        for launch in (0.2, 0.6, 0.9):
            start = np.log([launch * seconds.min(), 0.3 * seconds.min(), slope])
            found = least_squares(
                lambda x, p=sharpness: smooth(x, batches, p) / seconds - 1, start, bounds=(np.log(1e-9), np.log(10.0))
            )
            if found.cost < best_cost - 1e-9:
                best, best_cost, best_sharpness = found.x, found.cost, sharpness
    return best, best_sharpness


def predictions(batches: np.ndarray, seconds: np.ndarray, wanted: np.ndarray) -> dict[str, np.ndarray]:
    """Return what each kind of curve, fitted to these points, predicts for other batches."""
    line, *_ = np.linalg.lstsq(np.stack([np.ones_like(batches), batches], 1) / seconds[:, None], np.ones(len(batches)))
    floored = fit_curves(batches[None], seconds[None], np.full((1, len(batches)), 20.0), 0.03).curve
    parameters, sharpness = fit_smooth(batches, seconds)
    return {
        "line": line[0] + line[1] * wanted,
        "floor and line": np.maximum(floored.floor_s, floored.fixed_s + floored.per_sample_s * wanted),
        "smooth curve": smooth(parameters, wanted, sharpness),
    }


def held_out(batches: np.ndarray, seconds: np.ndarray) -> dict[str, np.ndarray]:
    """Return relative errors on every second batch, by kind of curve, fitted to the others."""
    kept = np.arange(len(batches)) % 2 == 0
    predicted = predictions(batches[kept], seconds[kept], batches[~kept])
    return {name: np.abs(values / seconds[~kept] - 1) for name, values in predicted.items()}


def print_data(traces: Path) -> None:
    """Print the lines of devices.toml."""
    for device, host in HOSTS.items():
        print(f"[{device}]")
        for model in MODELS:
            batches, seconds = one_gpu(traces, model, host)
            parameters, sharpness = fit_smooth(batches, seconds)
            launch, fixed, per_sample = np.where(np.exp(parameters) < 2e-8, 0.0, np.exp(parameters))
            error = np.abs(smooth(parameters, batches, sharpness) / seconds - 1)
            print(
                f"{model} = {{ launch_ms = {launch * 1e3:.3g}, fixed_ms = {fixed * 1e3:.3g}, "
                f"sample_us = {per_sample * 1e6:.4g}, sharpness = {sharpness} }}"
                f"  # {len(batches)} batches to {batches[-1]:.0f}, error {error.mean():.1%}, at most {error.max():.1%}"
            )


def print_held_out(traces: Path) -> None:
    """Print the check, model by model and device by device."""
    print(f"\n{'':26}" + "".join(f"{name:>22}" for name in ("line", "floor and line", "smooth curve")))
    pooled: dict[str, list[np.ndarray]] = {}
    for model in MODELS:
        for device, host in HOSTS.items():
            errors = held_out(*one_gpu(traces, model, host))
            cells = [f"{e.mean():8.1%} (max {e.max():6.1%})" for e in errors.values()]
            print(f"{model:14}{device:12}" + "".join(f"{cell:>22}" for cell in cells))
            for name, error in errors.items():
                pooled.setdefault(name, []).append(error)
    medians = [f"median {np.median(np.concatenate(values)):.1%}" for values in pooled.values()]
    print(f"{'all':26}" + "".join(f"{cell:>22}" for cell in medians))


def main(arguments: list[str] | None = None) -> None:
    """Print both, if the arguments name the folder of traces."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or not Path(arguments[0], "step-times").is_dir():
        print("trace_fits needs the folder of the traces: python -m benchmarks.trace_fits TRACES", file=sys.stderr)
        return
    traces = Path(arguments[0])
    print_data(traces)
    print_held_out(traces)


if __name__ == "__main__":
    main()
