"""What each rank of the GPU benchmarks runs, under torchrun; `benchmarks.gpu` launches it on shares of one GPU.

All timing is by the host's clock around steps that end in `torch.cuda.synchronize()`, the same for every variant.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_splits import limit, settling, sharing
from benchmarks.gpu_steps import Images, Tokens, sgd, step_seconds
from cannikin import HeteroDataParallel
from cannikin.core.values import Job

WARM_UP = 20


class _Made:
    """A source of batches that are made here."""

    prefetch_depth = 0
    item_count = None


def overhead(
    kind: str,
    local_batch: int,
    rounds: int,
    variants: Sequence[str] = ("raw", "control", "torch hook", "no buffers", "ours"),
) -> dict[str, Any]:
    """Measure ours with an even plan and plain DDP, in random order within each round, with three more to compare.

    A second plain DDP is the control. torch's own `allreduce_hook` shows what a hook in Python costs at all, and DDP
    without its broadcast of buffers what ours saves by averaging BatchNorm's statistics once a window instead.
    """
    job: Any = Images(local_batch) if kind == "resnet18" else Tokens(local_batch)
    n = dist.get_world_size()
    models, optimizers = {}, {}
    for variant in variants:
        net = job.network()
        optimizers[variant] = sgd(net)
        if variant == "ours":
            models[variant] = HeteroDataParallel(net, optimizers[variant], policy="even")
        else:
            models[variant] = DistributedDataParallel(net, broadcast_buffers=variant != "no buffers")
    if "torch hook" in models:
        models["torch hook"].register_comm_hook(None, allreduce_hook)
    models["ours"].engine.bind(_Made(), Job(num_ranks=n, batch_size=local_batch * n), {})
    rng = np.random.default_rng(0)  # the same order on every rank
    seconds = np.zeros((WARM_UP + rounds, len(variants)))
    for step in range(WARM_UP + rounds):
        for k in rng.permutation(len(variants)):
            variant = variants[k]
            if variant == "ours":
                models[variant].use_batch(local_batch, local_batch * n)
            dist.barrier()
            seconds[step, k] = step_seconds(job, models[variant], optimizers[variant], local_batch)
    taken = seconds[WARM_UP:]
    raw = float(np.median(taken[:, 0]))
    apart = taken - taken[:, :1]
    return {
        "model": kind,
        "local_batch": local_batch,
        "ranks": n,
        "rounds": rounds,
        "raw_ms": raw * 1e3,
        "spread_pct": 100 * float(np.subtract(*np.percentile(taken[:, 0], [75, 25]))) / raw,
        "median_ms": {v: 1e3 * float(np.median(apart[:, k])) for k, v in enumerate(variants)},
        "mean_ms": {v: 1e3 * _middle_mean(apart[:, k]) for k, v in enumerate(variants)},
    }


def _middle_mean(values: np.ndarray) -> float:
    """Return the mean without the outermost 2% on each side; a median misses norms and plans, which few steps have."""
    cut = len(values) // 50
    return float(np.sort(values)[cut : len(values) - cut].mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", required=True, help="JSON: a list of [function, keywords]")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    torch.backends.cudnn.benchmark = False  # local batches change: no search for kernels at each new size
    dist.init_process_group(os.environ.get("CANNIKIN_BACKEND", "nccl"))
    functions = {"overhead": overhead, "limit": limit, "settling": settling, "sharing": sharing}
    for name, keywords in json.loads(options.jobs):
        began = time.perf_counter()
        result = functions[name](**keywords)
        if dist.get_rank() == 0:
            result = {"job": name, **result, "took_s": time.perf_counter() - began}
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(name, keywords, f"{result['took_s']:.0f} s", flush=True)
        torch.cuda.empty_cache()
        dist.barrier()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
