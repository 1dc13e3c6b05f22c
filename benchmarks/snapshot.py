"""What a snapshot costs the training: `python -m benchmarks snapshot`, or under torchrun `-m benchmarks.snapshot`.

Rounds of steps with a snapshot in them and rounds without one take turns, in random order within each pair. A round
begins and ends when all ranks' devices are idle, and is long enough for the snapshot to be written in it. The
difference of a pair is all that a snapshot costs: the copy on the step's path, and what the thread that writes takes
from the training. Goal: below 1% at one per minute, 0.6 s, for a model of 100 million parameters under AdamW.

The same in processor time, for machines that are busy with other work: the training thread's own, and that of all
threads. Then the copy and the writing alone, the first snapshot, which has to find host memory, and how long a
restarted script takes to load one.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import cannikin

WIDTH = 1024
PER_BLOCK = 8 * WIDTH**2  # parameters, but for biases


class Block(torch.nn.Module):
    """What makes up most of a transformer's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block makes of x to x."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print on rank 0; the status is always 0."""
    parser = argparse.ArgumentParser(prog="benchmarks snapshot", description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--batch", type=int, default=0, help="total batch; 8 per rank on the host, 1024 on a GPU")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--alone", type=int, default=7, help="snapshots with no training beside them")
    parser.add_argument("--round-s", type=float, default=20.0, help="seconds of a round, about")
    parser.add_argument("--folder", type=Path, help="where snapshots are written; a temporary folder where left out")
    options = parser.parse_args([] if arguments is None else arguments)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    blocks = [Block() for _ in range(round(options.parameters / PER_BLOCK))]
    net = torch.nn.Sequential(*blocks).to(device)
    with tempfile.TemporaryDirectory() as temporary:
        measure(net, options, options.folder or Path(temporary))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(net: torch.nn.Module, options: argparse.Namespace, folder: Path) -> None:
    """Train in rounds, and print what snapshots have cost."""
    training = Training(net, options)
    snapshot = cannikin.Snapshot(folder, training.model, every_s=None)
    training.steps(3)
    step_s = min(timed(lambda: training.steps(2))["wall"] for _ in range(3)) / 2
    number = int(agreed(max(4.0, options.round_s / step_s)))
    snapshot.save()
    training.steps(2)
    snapshot.wait()
    first = dict(snapshot.last or {})
    alone = [take_alone(snapshot) for _ in range(options.alone)]
    costs, told = [], []
    for order in np.random.default_rng(0).integers(2, size=options.pairs).tolist():
        took: dict[bool, dict[str, float]] = {}
        for with_snapshot in (bool(order), not order):
            if with_snapshot:
                snapshot.save()
            took[with_snapshot] = timed(lambda: training.steps(number))
            late = timed(snapshot.wait)
            if with_snapshot:
                told.append({**(snapshot.last or {}), "late_s": late["wall"], "round_s": took[True]["wall"]})
        costs.append({kind: took[True][kind] - took[False][kind] for kind in took[True]})
    snapshot.close()
    if training.model.engine.rank == 0:
        show_alone(net, training.model.engine.world_size, step_s, first, alone)
        if told:
            show_rounds(told, costs)
    again = Training(net, options)
    load_s = timed(lambda: cannikin.Snapshot(folder, again.model, every_s=None).close())["wall"]
    if again.model.engine.rank == 0:
        print(f"loading it again: {load_s:.2f} s", flush=True)


def take_alone(snapshot: cannikin.Snapshot) -> dict[str, float]:
    """Take a snapshot with no training beside it, and return the seconds of the copy and of the writing."""
    snapshot.save()
    clocks = time.perf_counter, time.thread_time, time.process_time
    start = [clock() for clock in clocks]
    snapshot.rest()
    copied = [clock() for clock in clocks]
    snapshot.wait()
    written = [clock() for clock in clocks]
    return {
        "copy": copied[0] - start[0],
        "copy, processor": copied[1] - start[1],
        "writing": written[0] - copied[0],
        "writing, processor": (written[2] - start[2]) - (written[1] - start[1]),
    }


class Training:
    """A model, and steps of it on made-up samples."""

    def __init__(self, net: torch.nn.Module, options: argparse.Namespace) -> None:
        self._device = next(net.parameters()).device
        self._optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
        self.model = cannikin.HeteroDataParallel(net, self._optimizer, policy="even", gradient_as_bucket_view=True)
        each = 1024 if self._device.type == "cuda" else 8
        self._batches = self.model.batches(options.batch or each * self.model.engine.world_size)

    def steps(self, number: int) -> None:
        """Take so many steps."""
        for _ in range(number):
            local, _ = next(self._batches)
            self._optimizer.zero_grad()
            self.model(torch.randn(local, WIDTH, device=self._device)).square().mean().backward()
            self._optimizer.step()


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Return how long something takes, from when devices are idle until they are again, on the slowest rank."""
    settle()
    clocks = {"wall": time.perf_counter, "training thread": time.thread_time, "all threads": time.process_time}
    start_s = {name: clock() for name, clock in clocks.items()}
    work()
    settle()
    return {name: agreed(clock() - start_s[name]) for name, clock in clocks.items()}


def settle() -> None:
    """Wait for all ranks and their devices."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def agreed(value: float) -> float:
    """Return the largest value of all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)


def show_alone(
    net: torch.nn.Module, n: int, step_s: float, first: dict[str, float], alone: list[dict[str, float]]
) -> None:
    """Print what snapshots take by themselves."""
    device = next(net.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    size, length = sum(parameter.numel() for parameter in net.parameters()), first["num_bytes"]
    print(f"{name}, {n} ranks, {dist.get_backend()}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{size / 1e6:.1f} M parameters, AdamW: {length / 2**30:.2f} GiB; {step_s * 1e3:.1f} ms per step")
    print(f"first snapshot: {first['stalled_s']:.3f} s on the step's path, {first['write_s']:.2f} s to write\n")
    print("| a snapshot by itself | s, median | least | at one per minute |\n|---|---|---|---|")
    for kind in alone[0]:
        each = [one[kind] for one in alone]
        print(f"| {kind} | {np.median(each):.3f} | {min(each):.3f} | {np.median(each) / 60:.2%} |")
    load = os.getloadavg()[0]
    print(f"\nload of this machine: {load:.0f}", flush=True)


def show_rounds(told: list[dict[str, float]], costs: list[dict[str, float]]) -> None:
    """Print what rounds with snapshots take beyond those without."""
    print("\n| pair | copy on the step's path, s | writing, s | round with, s | without, s |\n|---|---|---|---|---|")
    for number, (one, cost) in enumerate(zip(told, costs, strict=True)):
        late = f" ({one['late_s']:.1f} after the round)" if one["late_s"] > 0.1 else ""
        copy = f"{one['stalled_s']:.3f} | {one['write_s']:.2f}{late}"
        print(f"| {number} | {copy} | {one['round_s']:.2f} | {one['round_s'] - cost['wall']:.2f} |")
    copy_s = np.median([one["stalled_s"] for one in told])
    print("\n| cost of a snapshot by | s, mean | median | at one per minute; goal: below 1% |\n|---|---|---|---|")
    for kind in costs[0]:
        each = np.array([cost[kind] for cost in costs])
        error = each.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else np.nan
        share = f"{each.mean() / 60:.2%} +- {error / 60:.2%}"
        print(f"| {kind} | {each.mean():.2f} +- {error:.2f} | {np.median(each):.2f} | {share} |")
    print(f"| the copy alone, wall | | {copy_s:.3f} | {copy_s / 60:.2%} |", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
