"""The best fixed total batch of a policy that does not choose one: what a person who tried many would train with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.paper.optimum import even_limit, expected_s, lb_bsp_split
from cannikin.core.goodput import total_grid
from cannikin.core.policies.plans import even_batches
from cannikin.core.values import Job
from cannikin.sim.hardware import Machine
from cannikin.sim.workload import Workload

# By how many samples LB-BSP moves at a total: as published, and by as much as lets it arrive at a large total in time.
Moves = Callable[[int], int]
_PLACES = 2000  # of the progress at which a step's worth is looked up


def published_moves(total_batch: int) -> int:
    """Return the 5 samples of the Cannikin paper's LB-BSP, whatever the total."""
    return 5


def larger_moves(total_batch: int) -> int:
    """Return a 64th of the total, and not less than the published 5 samples.

    >>> larger_moves(64), larger_moves(32768)
    (5, 512)
    """
    return max(5, total_batch // 64)


def steps_to_target(workload: Workload, total_batch: int) -> float:
    """Return how many steps of this total reach the target, by the simulator's own rule of what a step is worth."""
    ends = np.linspace(0.0, workload.target_progress, _PLACES + 1)
    middles = (ends[1:] + ends[:-1]) / 2
    return float((np.diff(ends) / workload.gains(np.full(_PLACES, total_batch), middles)).sum())


def best_totals(
    machine: Machine, workload: Workload, job: Job, policy: str, num: int, moves: Moves = published_moves
) -> list[int]:
    """Return the `num` fixed totals with the least time to the target without noise, the best first.

    Candidates are 50 totals from the initial one to the largest that the policy can begin with: for DDP the same batch
    has to fit into every memory; LB-BSP starts as evenly as memory allows, so that all memories together are the limit.
    It moves `moves(total)` samples.
    """
    found = []
    limit = even_limit(machine, job) if policy == "even" else job.largest_total
    for total in total_grid(job.batch_size, limit).tolist():
        if policy == "even":
            split = np.array(even_batches(job, total))
        else:
            split = lb_bsp_split(machine, job, total, moves(total))
        found.append((steps_to_target(workload, total) * float(expected_s(machine, split)), total))
    return [total for _, total in sorted(found)[:num]]
