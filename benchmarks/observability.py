"""Time inside observability code a step, over 10,000 records: `python -m benchmarks.observability`.

What rank 0 does to tell its observers of a window and the plan after it, timed alone: the runtime's recorder makes two
records of what was measured and learned, and hands them to an observer. A window has 5 steps while the model is young,
then 10; the figures are for 5, the dearer. The planner and its windows are real, the times in them made up.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.synthetic import measure
from cannikin.core.controller import Controller
from cannikin.core.perf import Cluster, Curve
from cannikin.core.records import Job, Plan
from cannikin.runlog import RUNLOG_NAME, Observer, RankInfo, Record, RunLogWriter
from cannikin.runtime.recording import Recorder
from cannikin.runtime.windows import Report

NUM_RECORDS = 10_000  # half of them windows, half of them plans
WINDOW_STEPS = 5
NUM_WINDOWS = 60  # that the planner has seen, and that are told of again and again
WANTED_US = 250
SHAPES = ((3, 5), (16, 20))  # ranks and buckets


class Deaf:
    """An observer that does nothing with what it is told: what remains is the recorder."""

    def write(self, event: Record, /) -> None:
        """Take one record."""


# By name, each made from an empty folder. All that a user may pass belongs here.
OBSERVERS: dict[str, Callable[[Path], Observer]] = {
    "none": lambda folder: Deaf(),
    "run log": lambda folder: RunLogWriter(folder / RUNLOG_NAME),
}


def cluster(num_ranks: int, num_buckets: int) -> Cluster:
    """Ranks whose speeds go from 1 down to 1/4."""
    slower = np.linspace(1.0, 4.0, num_ranks)
    return Cluster(
        forward=Curve(fixed_s=[0.004] * num_ranks, per_sample_s=2e-4 * slower),
        backward=Curve(fixed_s=[0.004] * num_ranks, per_sample_s=4e-4 * slower),
        gammas=np.linspace(0.2, 1.0, num_buckets),
        tails_s=0.003 * np.arange(num_buckets, 0, -1),
    )


class Told:
    """A planner that has learned, and what it learned from: (window, plan) again and again."""

    def __init__(self, num_ranks: int, num_buckets: int) -> None:
        rng, truth = np.random.default_rng(0), cluster(num_ranks, num_buckets)
        self.job = Job(num_ranks=num_ranks, batch_size=32 * num_ranks, max_batch_size=512 * num_ranks)
        self.planner = Controller(self.job)
        self.bucket_bytes = (26_214_400,) * num_buckets
        self.pairs: list[tuple[Report, Plan]] = []
        plan = self.planner.plan(0)
        for first in range(0, NUM_WINDOWS * WINDOW_STEPS, WINDOW_STEPS):
            window = measure(truth, [plan] * WINDOW_STEPS, rng, first_step=first, sqnorms=(1.0, 4000.0))
            self.planner.observe(window)
            plan = self.planner.plan(first + WINDOW_STEPS)
            report = Report(window=window, load_s=window.before_s / 50, other_s=window.before_s / 100, num_ahead=0)
            self.pairs.append((report, plan))
        assert self.planner.choice is not None, "the records are as large as they get"

    def seconds(self, observer: Any) -> np.ndarray:
        """What each window and its plan cost, in a run told to this observer."""
        recorder = Recorder([observer], None, active=True)
        ranks = [RankInfo(host="host", device="device")] * self.job.num_ranks
        recorder.begin(self.job, "cannikin", torch.nn.Linear(1, 1), ranks)
        costs = np.empty(NUM_RECORDS // 2)
        for k in range(len(costs)):
            report, plan = self.pairs[k % NUM_WINDOWS]
            start = time.perf_counter()
            recorder.decided(
                self.planner, report, plan, progress=0.1 * k, lr_factor=1.5, bucket_bytes=self.bucket_bytes
            )
            costs[k] = time.perf_counter() - start
        return costs


def main() -> None:
    """Run, and print a table."""
    print(
        f"{NUM_RECORDS:,} records, half of them windows of {WINDOW_STEPS} steps; wanted: {WANTED_US} us a step at most"
    )
    print(f"{'ranks':>5} {'buckets':>7} {'observer':16} {'us a step':>9} {'in 99%':>7} {'us a window':>11}")
    for num_ranks, num_buckets in SHAPES:
        told = Told(num_ranks, num_buckets)
        for name, make in OBSERVERS.items():
            with tempfile.TemporaryDirectory() as folder:
                costs = told.seconds(make(Path(folder))) * 1e6
            step_us, most_us = costs.mean() / WINDOW_STEPS, np.quantile(costs, 0.99) / WINDOW_STEPS
            line = f"{num_ranks:5d} {num_buckets:7d} {name:16} {step_us:9.1f} {most_us:7.1f} {costs.mean():11.1f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
