"""Size of the run log of a long run, and what it costs to read: `python -m benchmarks.runlog_size [STEPS]`.

A made-up run of 3 ranks and 5 buckets under a free total batch: windows of 10 steps, each with its timeline, a noise
scale and a plan that compared 50 total batches. Every way to read is a process of its own; memory is its peak.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.synthetic import measure
from cannikin.core.goodput import choose_total, efficiency, total_grid
from cannikin.core.perf import Cluster, Curve
from cannikin.core.planner import Decision
from cannikin.core.policies.plans import make_plan
from cannikin.report.write import write_report
from cannikin.runlog import (
    RUNLOG_NAME,
    EventRecord,
    Header,
    JobInfo,
    ModelInfo,
    NoiseRecord,
    PlanRecord,
    RankInfo,
    RunLogReader,
    RunLogWriter,
    WindowRecord,
    plan_record,
    read_runlog,
    window_record,
)

STEPS = 1_000_000
WINDOW_STEPS = 10
STEPS_PER_EPOCH = 5_000
NUM_BUCKETS = 5
NUM_KINDS = 200  # windows and plans that differ, again and again: their numbers take as many digits as real ones
READINGS = ("one by one", "whole", "the whole report")
WANTED = "wanted for a whole report: at most 10 s and 500 MB"


def cluster() -> Cluster:
    """Return three ranks of speed 1, 1/2 and 1/4, and buckets that are ready at equal distances."""
    slower = np.array([1.0, 2.0, 4.0])
    return Cluster(
        forward=Curve(fixed_s=[0.004] * 3, per_sample_s=2e-4 * slower),
        backward=Curve(fixed_s=[0.004] * 3, per_sample_s=4e-4 * slower),
        gammas=np.linspace(0.2, 1.0, NUM_BUCKETS),
        tails_s=0.003 * np.arange(NUM_BUCKETS, 0, -1),
    )


def kinds() -> list[tuple[WindowRecord, PlanRecord]]:
    """Return some windows and the plans after them."""
    rng, grid, pairs = np.random.default_rng(0), total_grid(64, 4096), []
    truth = cluster()
    for _ in range(NUM_KINDS):
        batches = tuple(rng.integers(10, 200, 3).tolist())
        plan = make_plan(0, batches, predicted_step_s=rng.uniform(0.05, 0.2), reason=_reason(batches))
        window = measure(truth, [batches] * WINDOW_STEPS, rng, sqnorms=(1.0, 400.0))
        noise = NoiseRecord(**{name: rng.uniform(1, 100) for name in ("signal_sqnorm", "noise_trace", "low", "high")})
        noise = msgspec.structs.replace(noise, noise_scale=noise.noise_trace / noise.signal_sqnorm)
        shares = efficiency(grid, initial_batch=64, noise_trace=rng.uniform(100, 1000), signal_sqnorm=1.0)
        choice = choose_total(grid, 0.02 + 1e-4 * grid, shares, 64)
        record = window_record(
            window,
            loader_s=window.before_s / 50,
            other_s=window.before_s / 100,
            noise=noise,
            lr_factor=rng.uniform(1, 2),
            bucket_bytes=(26_214_400,) * NUM_BUCKETS,
        )
        pairs.append((record, plan_record(Decision(plan=plan, choice=choice, phase="optperf"), 0)))
    return pairs


def _reason(batches: tuple[int, ...]) -> str:
    return (
        f"kept: rank 2 finishes last with {batches[2]} samples (compute); total batch stays {sum(batches)}: 96 would "
        f"gain 1.4%, not more than 5%, noise scale {batches[0]}"
    )


def write_run(path: Path, num_steps: int) -> None:
    """Write the log of a run of this many steps that ended as it should."""
    pairs = kinds()
    job = JobInfo(batch_size=64, max_batch_size=4096, min_local=(1, 1, 1), max_local=(None,) * 3, num_samples=320_000)
    with RunLogWriter(path) as log:
        log.write(
            Header(
                cannikin_version="0",
                started="2025-03-01T12:00:00+00:00",
                policy="cannikin",
                world_size=3,
                job=job,
                ranks=tuple(RankInfo(host="host", device=f"device {rank}") for rank in range(3)),
                model=ModelInfo(name="Network", num_parameters=11_689_512),
            )
        )
        for first in range(0, num_steps, WINDOW_STEPS):
            window, plan = pairs[first // WINDOW_STEPS % NUM_KINDS]
            elapsed_ms, end = round(first * 98.7654, 3), first + WINDOW_STEPS
            if first % STEPS_PER_EPOCH == 0:
                epoch = first // STEPS_PER_EPOCH
                data = {"epoch": epoch, "position": 0, "goal": num_steps / STEPS_PER_EPOCH}
                log.write(EventRecord(step=first, kind="epoch", data=data, elapsed_ms=elapsed_ms))
                data = {"accuracy": 1 - math.exp(-first / num_steps)}
                log.write(EventRecord(step=first, kind="eval", data=data, elapsed_ms=elapsed_ms))
            progress = end * window.total_batch / 320_000
            log.write(msgspec.structs.replace(window, first_step=first, elapsed_ms=elapsed_ms, progress=progress))
            log.write(msgspec.structs.replace(plan, step=end, first_step=end + 4, elapsed_ms=elapsed_ms))
        log.write(EventRecord(step=num_steps, kind="end", elapsed_ms=num_steps * 98.7654))


def read(path: Path, reading: str) -> None:
    """Read in one of the ways, and print seconds, MB at the peak and MB before."""
    before = _peak_mb()
    start = time.perf_counter()
    if reading == "one by one":
        with RunLogReader(path) as reader:
            counts = Counter(type(record).__name__ for record in reader.records())
        assert counts["WindowRecord"] == counts["PlanRecord"]
    elif reading == "the whole report":
        assert write_report([path], path.with_name("report.html")).stat().st_size > 1e6
    else:
        run = read_runlog(path)
        assert len(run.windows) == len(run.plans)
    print(f"{time.perf_counter() - start} {_peak_mb()} {before}")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(num_steps: int = STEPS) -> None:
    """Write a log, read it in every way, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, RUNLOG_NAME)
        start = time.perf_counter()
        write_run(path, num_steps)
        num_records, size = 2 * num_steps // WINDOW_STEPS, path.stat().st_size
        print(
            f"{num_steps:,} steps in windows of {WINDOW_STEPS}, 3 ranks, {NUM_BUCKETS} buckets: {size / 1e6:.0f} MB, "
            f"{size / num_steps:.0f} bytes a step, {num_records:,} windows and plans, written in "
            f"{time.perf_counter() - start:.1f} s"
        )
        print(f"{'reading':20} {'seconds':>8} {'peak MB':>8}   {WANTED}")
        for reading in READINGS:
            command = [sys.executable, "-m", "benchmarks.runlog_size", "--read", str(path), reading]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds, peak_mb, before_mb = map(float, output.split())
            print(f"{reading:20} {seconds:8.1f} {peak_mb:8.0f}   of them {before_mb:.0f} before", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(Path(sys.argv[2]), sys.argv[3])
    else:
        main(*map(int, sys.argv[1:]))
