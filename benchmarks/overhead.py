"""What cannikin adds to a DDP step on CPU ranks: `python -m benchmarks.overhead`.

Two ranks on gloo, one thread each. Raw DDP, a second raw DDP as control, DDP with torch's own `allreduce_hook` and ours
with an even plan take turns step by step, in random order within each round, on equal networks and the same batches.
torch's hook is what any hook in Python costs at least: DDP no longer folds the division into its copy of the gradient.
Reported are medians of paired differences within a round: whatever else the machine does falls on all of them. Where a
network's memory happens to lie is worth a percent in either direction for as long as a process lives: so the rounds are
of several launches, in which the networks are made in different orders. The loader is not part of it. Norms are taken
on every step of the first 60 and on one in four after that.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import numpy as np

LAUNCHES = 8  # paired differences have a spread of 5 ms: their median over all rounds is good to 0.3% of a step
ROUNDS = 240  # in each
WARM_UP = 60
KINDS = ("raw DDP", "second raw DDP", "torch's hook", "cannikin")
SHAPES = ((256, 2400), (512, 640), (1024, 120))  # width and local batch: about 50 ms per step each


class _Batches:
    """A source of batches that are made here: windows are gathered and planned as with a loader."""

    prefetch_depth = 0
    item_count = None


def network(width: int):  # type: ignore[no-untyped-def]
    """Return five linear layers, with the same weights on every call."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, width), torch.nn.ReLU()]
    for _ in range(3):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def _work(rank: int, world_size: int, store: str, width: int, local_batch: int, launch: int, out: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from cannikin import HeteroDataParallel
    from cannikin.core.values import Job

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    models, optimizers = {}, {}
    for kind in np.roll(KINDS, launch).tolist():
        net = network(width)
        optimizers[kind] = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        wrap = HeteroDataParallel(net, optimizers[kind], policy="even") if kind == "cannikin" else None
        models[kind] = wrap or DistributedDataParallel(net)
    models["torch's hook"].register_comm_hook(None, allreduce_hook)
    job = Job(num_ranks=world_size, batch_size=local_batch * world_size)
    models["cannikin"].engine.bind(_Batches(), job, {})
    batches = torch.randn(16, local_batch, 256)
    labels = torch.randint(0, 10, (16, local_batch))
    rng = np.random.default_rng(launch)  # the same order on both ranks
    seconds = np.zeros((WARM_UP + ROUNDS, len(KINDS)))
    for step in range(WARM_UP + ROUNDS):
        for k in rng.permutation(len(KINDS)):
            kind = KINDS[k]
            if kind == "cannikin":
                models[kind].use_batch(local_batch, local_batch * world_size)
            start = time.perf_counter()
            optimizers[kind].zero_grad()
            loss = torch.nn.functional.cross_entropy(models[kind](batches[step % 16]), labels[step % 16])
            loss.backward()
            optimizers[kind].step()
            seconds[step, k] = time.perf_counter() - start
        if rank == 0 and sys.stderr.isatty():
            print(f"\rround {step + 1} of {WARM_UP + ROUNDS}", end="", file=sys.stderr)
    if rank == 0:
        np.save(out, seconds[WARM_UP:])
    dist.barrier()
    os._exit(0)


def measure(width: int, local_batch: int, launch: int) -> np.ndarray:
    """Return the seconds of every step, [rounds, kind], on rank 0."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "seconds.npy")
        mp.spawn(_work, (2, os.path.join(folder, "store"), width, local_batch, launch, out), nprocs=2)
        seconds: np.ndarray = np.load(out)
        return seconds


def main() -> None:
    """Run, and print a table."""
    print(
        f"{LAUNCHES} launches of {ROUNDS} rounds in random order, 2 gloo ranks on CPU, one thread each\n"
        "wanted: at most 3% beyond the control"
    )
    heading = f"{'parameters':>10} {'batch':>6} {'raw DDP':>10} | paired difference:"
    print(f"{heading} {'control':>9} {'hook':>9} {'cannikin':>9} {'beyond':>8}   by launch")
    for width, local_batch in SHAPES:
        launches = [measure(width, local_batch, launch) for launch in range(LAUNCHES)]
        base, control, hook, ours = _paired(np.concatenate(launches))
        by_launch = " ".join(f"{_paired(seconds)[-1]:.2%}" for seconds in launches)
        parameters = sum(p.numel() for p in network(width).parameters())
        print(
            f"{parameters:10,} {local_batch:6d} {base * 1e3:7.2f} ms | {'':18} {control:9.2%} {hook:9.2%} {ours:9.2%} "
            f"{ours - control:8.2%}   {by_launch}",
            flush=True,
        )


def _paired(seconds: np.ndarray) -> tuple[float, ...]:
    """Return raw DDP's median seconds, and the medians of the others' differences within a round as shares of it."""
    base = float(np.median(seconds[:, 0]))
    return base, *(float(np.median(seconds[:, k] - seconds[:, 0])) / base for k in range(1, len(KINDS)))


if __name__ == "__main__":
    main()
