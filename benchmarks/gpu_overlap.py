"""Where overlap matters: clusters on which equal compute, LB-BSP's aim, is far from the best split.

    python -m benchmarks.gpu_overlap

By the performance model alone, with all-reduce times that were measured between three NCCL ranks on one H200. What
`benchmarks.gpu overlap` then really runs is chosen from this table: devices whose forward and backward differ in ratio.
A rank that spends most of its time in forward is late with its first bucket, one that spends it in backward has sent
most of its buckets when backward ends; equal compute treats them alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.gpu_tasks import recipe_of
from benchmarks.network_buckets import buckets
from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.policies.plans import inverse_batches
from cannikin.core.split import optimal_split
from cannikin.core.values import Job

# Bytes and seconds of an all-reduce, three ranks, NCCL over sockets between MPS clients of one H200.
MEASURED_BYTES, MEASURED_S = (4e3, 1e6, 44e6, 500e6), (0.13e-3, 0.82e-3, 21.6e-3, 229e-3)
SHARES = (0.1, 0.33, 0.6, 0.9)  # of forward in a rank's time


def buckets_of(net: nn.Module) -> tuple[list[float], list[float]]:
    """Return the bytes of DDP's buckets in the order they are sent, and the part of backward after which each is ready.

    The lab gives each layer with parameters the same part of backward, so that part is counted in layers.
    """
    parts = (list(part.parameters(recurse=False)) for part in net.modules())
    sizes, ready, _ = buckets([(sum(weight.numel() for weight in own), 1.0) for own in parts if own])
    return sizes, ready


def all_reduce_s(size: float) -> float:
    """Return how long an all-reduce of this many bytes takes."""
    return float(np.interp(size, MEASURED_BYTES, MEASURED_S))


def cluster_of(kind: str, speeds: Sequence[float], forward_shares: Sequence[float], sample_s: float) -> Cluster:
    """Return the model of ranks that only spin."""
    with torch.device("meta"):
        sizes, ready = buckets_of(recipe_of(kind, "cuda").network())
    times = [all_reduce_s(size) for size in sizes]
    tails = np.cumsum(times[::-1])[::-1]
    per_sample, share, zeros = sample_s / np.array(speeds), np.array(forward_shares), np.zeros(len(speeds))
    return Cluster(
        forward=Curve(fixed_s=zeros, per_sample_s=per_sample * share),
        backward=Curve(fixed_s=zeros, per_sample_s=per_sample * (1 - share)),
        gammas=ready,
        tails_s=tails,
        min_batch=[2] * len(speeds),  # BatchNorm refuses one sample
    )


def excess(cluster: Cluster, total: int) -> tuple[float, float, tuple[int, ...]]:
    """Return what equal compute and the even split take over the best split, and that split."""
    best = optimal_split(cluster, total)
    sample_s = cluster.forward.per_sample_s + cluster.backward.per_sample_s
    job = Job(num_ranks=cluster.num_ranks, batch_size=total)
    equal = step_time(cluster, inverse_batches(job, total, sample_s))
    even = step_time(cluster, np.full(cluster.num_ranks, total / cluster.num_ranks))
    return equal / best.step_s, even / best.step_s, best.local_batches


def main() -> None:
    """Print the cells where equal compute is furthest from the best."""
    print(f"{'network':12} {'B':>5} {'ms':>6} {'shares of forward':20} equal compute  even  best split")
    for kind, speeds in itertools.product(("resnet18", "resnet50"), ((1.0, 0.5, 0.25), (1.0, 1.0, 1.0))):
        recipe, rows = recipe_of(kind, "cuda"), []
        for total, shares in itertools.product(
            (recipe.totals[0], recipe.totals[1]), itertools.product(SHARES, repeat=3)
        ):
            cluster = cluster_of(kind, speeds, shares, recipe.sample_ms / 1e3)
            equal, even, split = excess(cluster, total)
            rows.append((equal, even, total, shares, split, step_time(cluster, split)))
        print(f"speeds {speeds}")
        for equal, even, total, shares, split, step_s in sorted(rows, reverse=True)[:5]:
            told = ", ".join(map(str, shares))
            print(f"{kind:12} {total:5d} {1e3 * step_s:6.1f} {told:20} {equal:13.3f} {even:5.2f}  {split}")


if __name__ == "__main__":
    main()
