"""One rank of one training run, of raw DDP, AdaptDL or cannikin: what `benchmarks.adaptdl_overhead` starts.

    python -m benchmarks.training_run {ddp,adaptdl,cannikin} RANK WIDTH LOCAL_BATCH NUM_TURNS FOLDER

The three differ in the wrapper and the loader, as in a user's script, and in nothing else: the samples of every step,
the initial weights and the optimizer are the same. Training goes in turns of a few steps. Before each it prints a line
and waits, asleep, for one on standard input: `go`, `profile` (go, under cProfile), `save` or `end`. A step is timed
from its batch to the next, loader included. On `save` rank 0 leaves `seconds.npy`, [turn, step], and `parameters.npy`
in FOLDER, at the end also `profile.pstats`.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from benchmarks.overhead import network

NUM_RANKS = 2
TURN = 10  # steps


class _Rows(Dataset[Any]):
    """As many samples as the run needs, of a few batches over and over; a batch is cut in one piece."""

    def __init__(self, total_batch: int, num_turns: int) -> None:
        torch.manual_seed(1)
        self.inputs = torch.randn(8 * total_batch, 256)
        self.labels = torch.randint(0, 10, (8 * total_batch,))
        self.num_samples = (num_turns * TURN + 1) * total_batch

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.tensor(indices) % len(self.inputs)
        return self.inputs[rows], self.labels[rows]


def _as_it_is(batch: Any) -> Any:
    return batch


def _raw(net: torch.nn.Module, optimizer: torch.optim.Optimizer, data: _Rows, total_batch: int) -> Any:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    sampler: Any = DistributedSampler(data, shuffle=False)
    loader: Any = DataLoader(data, batch_size=total_batch // NUM_RANKS, sampler=sampler, collate_fn=_as_it_is)
    return DistributedDataParallel(net), loader, (0,)


def _adaptdl(net: torch.nn.Module, optimizer: torch.optim.Optimizer, data: _Rows, total_batch: int) -> Any:
    import adaptdl.torch as adl

    model = adl.AdaptiveDataParallel(net, optimizer)
    # Without a call of autoscale_batch_size the batch stays as it is.
    loader = adl.AdaptiveDataLoader(data, batch_size=total_batch, shuffle=False, collate_fn=_as_it_is)
    return model, loader, adl.remaining_epochs_until(1)


def _cannikin(net: torch.nn.Module, optimizer: torch.optim.Optimizer, data: _Rows, total_batch: int) -> Any:
    import cannikin

    model = cannikin.HeteroDataParallel(net, optimizer, policy="even")
    loader = cannikin.HeteroDataLoader(data, model=model, batch_size=total_batch, shuffle=False, collate_fn=_as_it_is)
    return model, loader, (0,)


WRAP = {"ddp": _raw, "adaptdl": _adaptdl, "cannikin": _cannikin}


def _join(kind: str, rank: int, folder: Path) -> None:
    if kind == "adaptdl":
        import adaptdl.torch as adl

        adl.init_process_group("gloo")  # from ADAPTDL_* in the environment
    else:
        store = dist.FileStore(str(folder / "store"), NUM_RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)


class _Turns:
    """Waits for this training's turn, and keeps the figures."""

    def __init__(self, net: torch.nn.Module, folder: Path | None) -> None:
        self.net = net
        self.folder = folder  # None: this rank leaves nothing
        self.seconds: list[float] = []
        self.profiler = cProfile.Profile()

    def wait(self) -> bool:
        """Wait for the command to go on; return False at the end."""
        self.profiler.disable()
        while True:
            print("ready", flush=True)
            command = sys.stdin.readline().strip()
            if command == "save":
                self._save()
            else:
                break
        if command == "profile":
            self.profiler.enable()
        return command in ("go", "profile")

    def _save(self) -> None:
        if self.folder is not None:
            np.save(self.folder / "seconds.npy", np.reshape(self.seconds, (-1, TURN)))
            with torch.no_grad():
                parameters = torch.cat([parameter.flatten() for parameter in self.net.parameters()])
            np.save(self.folder / "parameters.npy", parameters.numpy())

    def end(self) -> None:
        """Leave the profile."""
        if self.folder is not None:
            self.profiler.dump_stats(self.folder / "profile.pstats")


def _train(model: Any, optimizer: Any, loader: Any, epochs: Iterable[int], turns: _Turns) -> None:
    start = 0.0
    for _ in epochs:
        for step, (inputs, labels) in enumerate(loader):
            if step:
                turns.seconds.append(time.perf_counter() - start)
            if step % TURN == 0 and not turns.wait():
                break
            start = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def main() -> None:
    """Train, and leave the figures in the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=WRAP)
    parser.add_argument("rank", type=int)
    parser.add_argument("width", type=int)
    parser.add_argument("local_batch", type=int)
    parser.add_argument("num_turns", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _join(options.kind, options.rank, options.folder)
    net = network(options.width)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    total_batch = options.local_batch * NUM_RANKS
    model, loader, epochs = WRAP[options.kind](net, optimizer, _Rows(total_batch, options.num_turns), total_batch)
    turns = _Turns(net, options.folder if options.rank == 0 else None)
    _train(model, optimizer, loader, epochs, turns)
    turns.end()
    dist.barrier()
    os._exit(0)  # AdaptDL's server thread and gloo's have no way to end


if __name__ == "__main__":
    main()
