"""Where ranks meet layer by layer: time of the split and of a decision, and how near plans come to the best split:
`python -m benchmarks layer_split`.

A time is the calling thread's, which on an idle machine is the wall clock's. Clusters are those of `layered`: speeds
over an 8x range, fixed costs of forward and of backward drawn apart, communication of 0.7 of the computing; "unlike"
ranks differ in every layer by the factor given, up and down. Every second of the clusters that are trained on is
unlike, by a factor of 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.layered import fsdp_layers, measure_layers, random_layered
from benchmarks.synthetic import Training
from cannikin.core.perf import Cluster, Curve, step_time
from cannikin.core.policies.cannikin import Controller
from cannikin.core.split import optimal_split, solver_for
from cannikin.core.values import Job

NUM_INSTANCES, NUM_TRAINED, NOISE = 3, 30, 0.03


def main() -> int:
    """Measure and print; the status is always 0, since a slow machine is no fault."""
    print("| ranks x layers | collectives | unlike | split, s | 50 totals, s | decision, s | equal computing |")
    print("|---|---|---|---|---|---|---|")
    for num_ranks, num_layers in ((4, 12), (16, 50)):
        for ahead in (False, True):
            for factor in (1.0, 1.1, 2.0):
                rows = np.array([_timed(num_ranks, num_layers, ahead, factor, seed) for seed in range(NUM_INSTANCES)])
                seconds = " | ".join(
                    f"{np.median(column):.2f} (at most {column.max():.2f})" for column in rows[:, :3].T
                )
                where = "beside" if ahead else "block"
                off = f"{rows[:, 3].min():.1%} to {rows[:, 3].max():.1%} off"
                print(f"| {num_ranks} x {num_layers} | {where} | {factor} | {seconds} | {off} |", flush=True)
    off, predicted = np.array([_trained(seed) for seed in range(NUM_TRAINED)]).T
    print(
        f"\nAt step 30 of {NUM_TRAINED} clusters, {NOISE:.0%} noise: {np.median(off):.1%} above the best split in the"
    )
    print(
        f"median, {off.max():.1%} at worst; predicted step time {np.median(np.abs(predicted)):.1%} off in the median,"
    )
    print(f"{np.abs(predicted).max():.1%} at worst.")
    return 0


def _timed(num_ranks: int, num_layers: int, ahead: bool, factor: float, seed: int) -> tuple[float, float, float, float]:
    """Return the seconds of a split, of 50 totals and of a decision, and what equal computing loses."""
    cluster, total = _cluster(np.random.default_rng(seed), num_ranks, num_layers, ahead, factor)
    solver = solver_for(cluster)
    split_s, split = _clocked(lambda: solver.split(total))
    totals_s, _ = _clocked(lambda: solver.step_times(np.unique(np.geomspace(total / 2, 2 * total, 50).round())))
    equal = optimal_split(replace(cluster, layers=None), total).local_batches
    job = Job(num_ranks=num_ranks, batch_size=total, max_batch_size=8 * total)
    training = Training(Controller(job), job, np.random.default_rng(seed))
    norms = (1.0, 50.0 * total)
    training.run(cluster, 20, noise=NOISE, sqnorms=norms)
    decisions_s = []
    for _ in range(3):
        batches = training.schedule.local_batches(training.step, training.schedule.window_steps(training.step))
        window = measure_layers(cluster, batches, training.rng, noise=NOISE, first_step=training.step, sqnorms=norms)
        decisions_s.append(_clocked(lambda measured=window: training.show(measured))[0])
    return split_s, totals_s, max(decisions_s), step_time(cluster, equal) / split.step_s - 1


def _clocked(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


def _cluster(
    rng: np.random.Generator, num_ranks: int, num_layers: int, ahead: bool, factor: float
) -> tuple[Cluster, int]:
    speed, total = 2 ** rng.uniform(0, 3, num_ranks), 32 * num_ranks
    share = total * speed / speed.sum()
    forward, backward = (
        Curve(fixed_s=rng.uniform(0, 1, num_ranks) * cost / speed * share, per_sample_s=cost / speed)
        for cost in (0.003, 0.006)
    )
    compute_s = float((forward.at(share) + backward.at(share)).mean())
    cost = rng.uniform(0.5, 2, num_layers) * factor ** rng.uniform(-1, 1, (num_ranks, num_layers))
    gather_s = rng.dirichlet(np.full(num_layers, 5.0)) * 0.7 * compute_s / 3
    layers = fsdp_layers(cost, cost, gather_s, ahead=ahead)
    return Cluster(forward=forward, backward=backward, gammas=[1.0], tails_s=[0.0], layers=layers), total


def _trained(seed: int) -> tuple[float, float]:
    """Return how far the plan after 30 steps is from the best split, and its prediction from the truth."""
    rng = np.random.default_rng(seed)
    cluster, total = random_layered(rng, unlike=bool(seed % 2))
    job = Job(num_ranks=cluster.num_ranks, batch_size=total)
    plan = Training(Controller(job), job, rng, delay=4).run(cluster, 30, noise=NOISE)
    step_s = step_time(cluster, plan.local_batches)
    predicted_s = np.nan if plan.predicted_step_s is None else plan.predicted_step_s
    return step_s / optimal_split(cluster, total).step_s - 1, predicted_s / step_s - 1


if __name__ == "__main__":
    main()
