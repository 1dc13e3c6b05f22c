"""How soon the controller finds OptPerf on made-up noisy clusters, and its cost: `python -m benchmarks.controller`.

Every measured time has 10% lognormal noise, 2% are three times as long; see `benchmarks.synthetic` for the clusters.
"Hard" leaves out the clusters in which one rank's fixed cost alone decides the optimum. The delay is the steps between
the end of a window and the plan's being in force: 4 on CPU ranks whose loader cuts no batch ahead, 7 where it cuts 3.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from benchmarks.synthetic import Training, measure, random_cluster, slowed
from cannikin.core.perf import Cluster, step_time
from cannikin.core.policies.cannikin import Controller
from cannikin.core.split import optimal_split
from cannikin.core.values import Job

SEEDS = 300


def excess(cluster: Cluster, local_batches: tuple[int, ...]) -> float:
    """Return how much slower than OptPerf a split is, by the true times."""
    return step_time(cluster, local_batches) / optimal_split(cluster, sum(local_batches)).step_s - 1


def settle(seed: int, *, hard: bool, delay: int) -> tuple[float, float]:
    """Return the excess over OptPerf after 30 steps, and after 30 more with one rank's times doubled."""
    rng = np.random.default_rng(seed)
    cluster, total_batch = random_cluster(rng, hard=hard)
    job = Job(num_ranks=cluster.num_ranks, batch_size=total_batch)
    training = Training(Controller(job), job, rng, delay=delay)
    first = excess(cluster, training.run(cluster, 30).local_batches)
    changed = slowed(cluster, int(rng.integers(cluster.num_ranks)), 2.0)
    return first, excess(changed, training.run(changed, 30).local_batches)


def window_cost_ms(num_ranks: int) -> float:
    """Return the median CPU time of a decision on a window of 10 steps, with an adaptive total batch."""
    rng = np.random.default_rng(num_ranks)
    cluster, total_batch = random_cluster(rng)
    while cluster.num_ranks != num_ranks:
        cluster, total_batch = random_cluster(rng, max_ranks=num_ranks)
    job = Job(num_ranks=num_ranks, batch_size=total_batch, max_batch_size=8 * total_batch)
    controller = Controller(job)
    plan, costs = controller.decide(None, job, 0).plan, []
    for k in range(60):
        window = measure(cluster, [plan.local_batches] * 10, rng, first_step=10 * k, sqnorms=(1.0, 500.0))
        start = time.process_time()
        plan = controller.decide(window, job, 10 * k + 14).plan
        costs.append(time.process_time() - start)
    return float(np.median(costs)) * 1e3


def main() -> None:
    """Run, and print two tables."""
    rows = []
    for hard in (False, True):
        for delay in (0, 4, 7):
            results = []
            for seed in range(SEEDS):
                results.append(settle(seed, hard=hard, delay=delay))
                if sys.stderr.isatty():
                    print(f"\rhard={hard} delay={delay}: {seed + 1} of {SEEDS}", end="", file=sys.stderr)
            rows.append((hard, delay, np.array(results)))
    print(file=sys.stderr)
    print(f"share of {SEEDS} clusters (seeds 0 to {SEEDS - 1}) within 5% and 3% of OptPerf after 30 steps,")
    print("and after 30 more with all times of one rank doubled; wanted: 95% and 90%")
    print(f"{'clusters':10} {'delay':>5} | {'<= 5%':>6} {'<= 3%':>6} {'median':>7} {'p90':>6} | after the change")
    for hard, delay, results in rows:
        cells = []
        for values in results.T:
            shares = [(values <= limit).mean() for limit in (0.05, 0.03)]
            cells.append(f"{shares[0]:6.1%} {shares[1]:6.1%} {np.median(values):7.2%} {np.quantile(values, 0.9):6.2%}")
        print(f"{'hard' if hard else 'all':10} {delay:5d} | {cells[0]} | {cells[1]}")
    print("\nCPU time of one window (a decision, adaptive total), ms")
    for num_ranks in (2, 4, 8, 16):
        print(f"{num_ranks:3d} ranks {window_cost_ms(num_ranks):6.2f}")


if __name__ == "__main__":
    main()
