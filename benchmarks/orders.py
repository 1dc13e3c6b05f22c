"""Orders of samples by position against stored ones, in memory, time and quality: `python -m benchmarks.orders`.

**Cost.** Each in a process of its own: the sampler of a training on one rank gives its first batch of 4,096 indices,
then the next 50; a stored order is made and cut here. Memory is what the process's peak has grown by since before the
order was made. A time is the calling thread's, which on an idle machine is the wall clock's.

**Quality.** Chi-squared in standard deviations above its mean, where a random order has 0 +- 1, the mean of six seeds.
Displacement: (order[i] - i) mod n in 64 bins. Neighbours and strides: (order[i + lag] - order[i]) mod n in 4,096 bins,
with a lag of 1 and of the root of n, which is the network's own. Pairs: (order[i], order[i + 1]) in 64 x 64 bins.
"""

from __future__ import annotations

import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cannikin.core.ordering import IndexOrder
from cannikin.runtime.batch_sampler import HeteroBatchSampler
from cannikin.runtime.parallel import HeteroDataParallel
from cannikin.runtime.passes import epoch_order

TOTAL = 4096
NUM_SEEDS = 6
Order = npt.NDArray[np.int64]


def main() -> int:
    """Measure and print; the status is always 0."""
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, {platform.machine()}"
    )
    print("\n| samples | order | first batch | each batch after | memory |\n|---|---|---|---|---|")
    for num_samples, stored in ((10**7, True), (10**7, False), (10**10, False)):
        with get_context("spawn").Pool(1) as pool:
            first_s, later_s, grown_bytes = pool.apply(cost, (num_samples, stored))
        kind = "stored" if stored else "by position"
        times = f"{first_s * 1e3:.1f} ms | {later_s * 1e3:.2f} ms"
        print(f"| {num_samples:.0e} | {kind} | {times} | {grown_bytes / 2**20:.1f} MiB |", flush=True)
    print("\n| samples | order | displacement | neighbours | stride | pairs |\n|---|---|---|---|---|---|")
    for num_samples in (100_003, 2**20 + 1, 2_000_003):
        makers: dict[str, Callable[[int], Order]] = {
            f"{rounds} rounds": lambda seed, n=num_samples, k=rounds: IndexOrder(n, seed=seed, num_rounds=k)[:]
            for rounds in (2, 3, 4, 5, 6, 8)
        }
        makers["torch.randperm"] = lambda seed, n=num_samples: randperm(n, seed)
        for name, make in makers.items():
            scores = np.mean([quality(make(seed)) for seed in range(NUM_SEEDS)], axis=0)
            print(f"| {num_samples:,} | {name} | " + " | ".join(f"{score:.1f}" for score in scores) + " |", flush=True)
    return 0


def cost(num_samples: int, stored: bool) -> tuple[float, float, int]:
    """Return the seconds to the first batch, to each of the next 50, and by how much the peak of memory has grown."""
    net = torch.nn.Linear(2, 2)
    model = HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    epoch_order(8, seed=0, epoch=0, shuffle=True)
    before = peak_bytes()
    start_s = time.thread_time()
    batches = (
        stored_batches(num_samples) if stored else iter(HeteroBatchSampler(num_samples, model=model, batch_size=TOTAL))
    )
    next(batches)
    first_s = time.thread_time() - start_s
    start_s = time.thread_time()
    for _ in range(50):
        next(batches)
    return first_s, (time.thread_time() - start_s) / 50, peak_bytes() - before


def stored_batches(num_samples: int) -> Iterator[list[int]]:
    """Cut batches from an order that is in memory whole."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(0))
    for start in range(0, num_samples, TOTAL):
        yield order[start : start + TOTAL].tolist()


def peak_bytes() -> int:
    """Return the peak of this process's memory so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def randperm(num_samples: int, seed: int) -> Order:
    """Return a stored order."""
    order: Any = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).numpy()
    return order


def quality(order: Order) -> list[float]:
    """Return how far the order is from a random one, four times."""
    n = len(order)
    bins = order * 64 // n
    root = math.isqrt(n - 1) + 1
    return [
        excess((order - np.arange(n)) % n * 64 // n, 64),
        excess((order[1:] - order[:-1]) % n * 4096 // n, 4096),
        max(excess((order[lag:] - order[:-lag]) % n * 4096 // n, 4096) for lag in (root, -(-n // root))),
        excess(bins[:-1] * 64 + bins[1:], 64 * 64),
    ]


def excess(values: Order, num_bins: int) -> float:
    """Return chi-squared of values that should fall into every bin alike, in standard deviations above its mean."""
    mean = len(values) / num_bins
    squares = (np.bincount(values, minlength=num_bins) - mean) ** 2
    return float((squares.sum() / mean - (num_bins - 1)) / math.sqrt(2 * (num_bins - 1)))


if __name__ == "__main__":
    sys.exit(main())
