"""Time inside observability code a step, over 10,000 records: `python -m benchmarks.observability`.

What rank 0 does to tell its observers of a window and the plan after it, timed alone: the runtime's recorder makes two
records of what was measured and learned, and hands them to an observer. A window has 5 steps while the model is young,
then 10; the figures are for 5, the dearer. The planner and its windows are real, the times in them made up. The
observers' clock goes on by 50 ms per step, so that they leave out here what they leave out in a real run.

For information, then, real training: two models on two gloo ranks take turns in random order, one of them with a run
log and a live view, as in `benchmarks.overhead`.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import TensorDataset

from benchmarks.overhead import network
from benchmarks.synthetic import Training, measure
from cannikin import (
    HeteroDataLoader,
    HeteroDataParallel,
    LiveView,
    PrometheusObserver,
    ScalarObserver,
    TensorBoardObserver,
)
from cannikin.core.perf import Cluster, Curve
from cannikin.core.planner import Decision
from cannikin.core.policies.cannikin import Controller
from cannikin.core.values import Job
from cannikin.runlog import RUNLOG_NAME, Observer, RankInfo, Record, RunLogWriter
from cannikin.runtime.recorder import Recorder
from cannikin.runtime.wire import Gathered

NUM_RECORDS = 10_000  # half of them windows, half of them plans
WINDOW_STEPS = 5
STEP_S = 0.05
ROUNDS = 660  # of real training, the first 60 left out
NUM_WINDOWS = 60  # that the planner has seen; they are recorded again and again
WANTED_US = 250
SHAPES = ((3, 5), (16, 20))  # ranks and buckets


class Clock:
    """Seconds of a run that is not really trained."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and forgets what is written."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


class Tracker:
    """Stands for a run of a tracker: keeps the last values."""

    def log(self, values: dict[str, float], step: int) -> None:
        self.last = values, step


class Deaf:
    """An observer that ignores its records: only the recorder's cost remains."""

    def write(self, event: Record, /) -> None:
        """Take one record."""


def tensorboard(folder: Path, clock: Clock) -> Observer | None:
    """Return an observer, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return TensorBoardObserver(SummaryWriter(str(folder)), clock=clock)


# By name, each made from an empty folder and a clock. All that a user may pass belongs here.
OBSERVERS: dict[str, Callable[[Path, Clock], Observer | None]] = {
    "none": lambda folder, clock: Deaf(),
    "run log": lambda folder, clock: RunLogWriter(folder / RUNLOG_NAME),
    "live view": lambda folder, clock: LiveView(Terminal(), clock=clock),
    "one line at a time": lambda folder, clock: LiveView(io.StringIO(), clock=clock),
    "TensorBoard": tensorboard,
    "log(dict, step)": lambda folder, clock: ScalarObserver(Tracker(), clock=clock),
    "Prometheus": lambda folder, clock: PrometheusObserver(folder / "cannikin.prom", clock=clock),
}


def cluster(num_ranks: int, num_buckets: int) -> Cluster:
    """Return ranks whose speeds go from 1 down to 1/4."""
    slower = np.linspace(1.0, 4.0, num_ranks)
    return Cluster(
        forward=Curve(fixed_s=[0.004] * num_ranks, per_sample_s=2e-4 * slower),
        backward=Curve(fixed_s=[0.004] * num_ranks, per_sample_s=4e-4 * slower),
        gammas=np.linspace(0.2, 1.0, num_buckets),
        tails_s=0.003 * np.arange(num_buckets, 0, -1),
    )


class Told:
    """Pairs of a window and the decision that a planner made from it, again and again."""

    def __init__(self, num_ranks: int, num_buckets: int) -> None:
        rng, truth = np.random.default_rng(0), cluster(num_ranks, num_buckets)
        self.job = Job(num_ranks=num_ranks, batch_size=32 * num_ranks, max_batch_size=512 * num_ranks)
        self.bucket_bytes = (26_214_400,) * num_buckets
        self.pairs: list[tuple[Gathered, Decision]] = []
        training = Training(Controller(self.job), self.job, rng)
        for first in range(0, NUM_WINDOWS * WINDOW_STEPS, WINDOW_STEPS):
            batches = training.schedule.local_batches(first, WINDOW_STEPS)
            window = measure(truth, batches, rng, first_step=first, sqnorms=(1.0, 4000.0))
            gathered = Gathered(window=window, load_s=window.before_s / 50, other_s=window.before_s / 100, num_ahead=0)
            self.pairs.append((gathered, training.show(window)))
        assert training.decision.choice is not None, "the records are as large as they get"

    def seconds(self, observers: list[Any], clock: Clock) -> np.ndarray:
        """Return the seconds that each window and its plan cost, in a run with these observers."""
        recorder = Recorder(observers, None, active=True)
        ranks = [RankInfo(host="host", device="device")] * self.job.num_ranks
        recorder.begin(self.job, "cannikin", torch.nn.Linear(1, 1), ranks)
        recorder.start()
        costs = np.empty(NUM_RECORDS // 2)
        for k in range(len(costs)):
            gathered, decision = self.pairs[k % NUM_WINDOWS]
            clock.now += WINDOW_STEPS * STEP_S
            start = time.perf_counter()
            recorder.decided(gathered, decision, progress=0.1 * k, lr_factor=1.5, bucket_bytes=self.bucket_bytes)
            costs[k] = time.perf_counter() - start
        return costs


def main() -> None:
    """Run, and print a table."""
    print(
        f"{NUM_RECORDS:,} records, half of them windows of {WINDOW_STEPS} steps; wanted: {WANTED_US} us a step at most"
    )
    print(f"{'ranks':>5} {'buckets':>7} {'observer':18} {'us a step':>9} {'in 99%':>7} {'us a window':>11}")
    for num_ranks, num_buckets in SHAPES:
        told = Told(num_ranks, num_buckets)
        together = ["run log", "live view", "TensorBoard", "log(dict, step)", "Prometheus"]
        for name, names in {**{name: [name] for name in OBSERVERS}, "all but the lines": together}.items():
            clock = Clock()
            with tempfile.TemporaryDirectory() as folder:
                made = [OBSERVERS[each](Path(folder), clock) for each in names]
                observers = [observer for observer in made if observer is not None]
                if not observers:
                    continue
                costs = told.seconds(observers, clock) * 1e6
            step_us, most_us = costs.mean() / WINDOW_STEPS, np.quantile(costs, 0.99) / WINDOW_STEPS
            line = f"{num_ranks:5d} {num_buckets:7d} {name:18} {step_us:9.1f} {most_us:7.1f} {costs.mean():11.1f}"
            print(line, flush=True)
    print(interleaved())


def _work(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    loops = [_steps({}), _steps({"observers": [LiveView(Terminal())], "run_dir": f"{folder}/run"})]
    rng = np.random.default_rng(0)  # the same order on both ranks
    seconds = np.zeros((ROUNDS, 2))
    for turn in range(ROUNDS):
        for k in rng.permutation(2):
            start = time.perf_counter()
            next(loops[k])
            seconds[turn, k] = time.perf_counter() - start
    if rank == 0:
        np.save(f"{folder}/seconds.npy", seconds[60:])
    dist.barrier()
    os._exit(0)


def _steps(keywords: dict[str, Any]) -> Iterator[None]:
    """Train a network of half a million parameters without end."""
    net = network(512)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    model = HeteroDataParallel(net, optimizer, policy="even", **keywords)
    data = TensorDataset(torch.randn(16_384, 256), torch.randint(0, 10, (16_384,)))
    loader = HeteroDataLoader(data, model=model, batch_size=512)
    while True:
        for features, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            yield


def interleaved() -> str:
    """Say in a sentence what the run log and a live view add to a real step."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (2, folder), nprocs=2)
        seconds = np.load(f"{folder}/seconds.npy")
    base, apart = np.median(seconds[:, 0]), seconds[:, 1] - seconds[:, 0]
    inner = np.sort(apart)[len(apart) // 50 : -(len(apart) // 50)]
    low, high = np.quantile(apart, [0.25, 0.75])
    return (
        f"real training, {len(seconds)} interleaved pairs: {base * 1e3:.2f} ms per step without observers; a run log "
        f"and a live view add {np.median(apart) * 1e6:+.0f} us at the median, {inner.mean() * 1e6:+.0f} us on average "
        f"(without the outermost 2%; quartiles {low * 1e6:+.0f} and {high * 1e6:+.0f} us)"
    )


if __name__ == "__main__":
    main()
