"""Time inside each observer, microseconds a step of training: `python -m benchmarks observers`.

10,000 records, a window of 10 steps and the plan after it by turns, of ranks of three kinds. The observers' clock goes
on by 50 ms a step, so that what they leave out in a real run of such steps is left out here; the time is measured by
the real one. A longer step means more drawing a step, and less of it.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cannikin.report.live import LiveView
from cannikin.report.observers import ScalarObserver, TensorBoardObserver
from cannikin.report.prometheus import PrometheusObserver
from cannikin.runlog import Header, JobInfo, NoiseRecord, PlanRecord, RankInfo, Record, WindowRecord

NUM_RECORDS = 10_000
STEPS_PER_WINDOW = 10
STEP_S = 0.05
DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB")


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


class Clock:
    """Seconds of a run that is not really trained."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def made_records(num_ranks: int, num_records: int = NUM_RECORDS) -> list[Record]:
    """A header, then windows and plans by turns."""
    rng = np.random.default_rng(0)
    ranks = tuple(
        RankInfo(device=DEVICES[i * len(DEVICES) // num_ranks], host=f"node{i // 8}") for i in range(num_ranks)
    )
    job = JobInfo(batch_size=64 * num_ranks, max_batch_size=1024 * num_ranks, num_samples=1_281_167)
    records: list[Record] = [
        Header(cannikin_version="0", started="", policy="cannikin", world_size=num_ranks, job=job, ranks=ranks)
    ]
    for number in range(num_records // 2):
        first = number * STEPS_PER_WINDOW
        batches = tuple(rng.integers(50, 80, num_ranks).tolist())
        before, backward, wait, loader = (tuple(rng.uniform(1, 10, num_ranks).round(4).tolist()) for _ in range(4))
        records.append(
            WindowRecord(
                first_step=first,
                num_steps=STEPS_PER_WINDOW,
                num_valid=STEPS_PER_WINDOW,
                total_batch=sum(batches),
                local_batches=batches,
                step_ms=STEP_S * 1e3,
                before_ms=before,
                backward_ms=backward,
                done_ms=tuple(b + w + 2.0 for b, w in zip(backward, wait, strict=True)),
                wait_ms=wait,
                loader_ms=loader,
                elapsed_ms=(first + STEPS_PER_WINDOW) * STEP_S * 1e3,
                progress=first / 1e4,
                lr_factor=1.5,
                noise=NoiseRecord(signal_sqnorm=0.1, noise_trace=90.0, noise_scale=900.0, low=700.0, high=1200.0),
            )
        )
        records.append(
            PlanRecord(
                step=first + STEPS_PER_WINDOW,
                first_step=first + STEPS_PER_WINDOW + 4,
                total_batch=sum(batches),
                local_batches=batches,
                micro_batches=(1,) * num_ranks,
                predicted_step_ms=51.0,
                phase="optperf",
                reason="kept: rank1 finishes last with 26 samples (compute); total batch stays 91: 95 would gain 0.3%",
            )
        )
    return records


@contextmanager
def made_observers(clock: Clock) -> Iterator[dict[str, Any]]:
    """Every observer of ours, by name; TensorBoard's where it is installed."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        observers: dict[str, Any] = {
            "live view, terminal": LiveView(Terminal(), clock=clock),
            "live view, lines": LiveView(nowhere, clock=clock),
            "scalars": ScalarObserver(Tracker(), clock=clock),
            "Prometheus": PrometheusObserver(Path(folder, "run.prom"), clock=clock),
        }
        writer = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(folder)
            observers["TensorBoard"] = TensorBoardObserver(writer, clock=clock)
        except ImportError:
            pass
        yield observers
        if writer is not None:
            writer.close()


def costs(num_ranks: int = 8, num_records: int = NUM_RECORDS) -> dict[str, float]:
    """Microseconds a step inside each observer, by its name."""
    records = made_records(num_ranks, num_records)
    num_steps = (len(records) - 1) // 2 * STEPS_PER_WINDOW
    found = {}
    clock = Clock()
    with made_observers(clock) as observers:
        for name, observer in observers.items():
            spent = clock.now = 0.0
            for record in records:
                if isinstance(record, WindowRecord):
                    clock.now += STEPS_PER_WINDOW * STEP_S
                began = time.perf_counter()
                observer.write(record)
                spent += time.perf_counter() - began
            found[name] = spent / num_steps * 1e6
    return found


def main() -> None:
    """A table for 8 and for 64 ranks."""
    tables = {num_ranks: costs(num_ranks) for num_ranks in (8, 64)}
    print(f"{'microseconds a step':22}" + "".join(f"{num_ranks:>9} ranks" for num_ranks in tables))
    for name in tables[8]:
        print(f"{name:22}" + "".join(f"{table[name]:15.1f}" for table in tables.values()))
    print(f"{'together':22}" + "".join(f"{sum(table.values()):15.1f}" for table in tables.values()))


if __name__ == "__main__":
    main()
