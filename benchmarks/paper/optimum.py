"""Splits of the ground truth itself: the best one, which a person who tried all would find, and where LB-BSP ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cannikin.core.policies.lb_bsp import LbBspPlanner
from cannikin.core.values import FloatArray, IntArray, Job, StepWindow
from cannikin.errors import InvalidInputError
from cannikin.sim.hardware import Machine

_STEPS = 1000


def finish_s(machine: Machine, local_batches: npt.ArrayLike) -> FloatArray:
    """Return when each rank alone would let the step end, without noise, [..., n]; it grows with the rank's batch."""
    longest: FloatArray = _ends_s(machine, local_batches).max(axis=-1)
    return longest


def _ends_s(machine: Machine, local_batches: npt.ArrayLike) -> FloatArray:
    """Return when each rank's buckets alone would let the step end, a + share P + C_j, [..., n, J]."""
    forward, _ = machine.compute(local_batches)
    tails = machine.bucket_s[::-1].cumsum()[::-1]
    return forward[..., None] + machine.ready(local_batches) + tails


def expected_s(machine: Machine, local_batches: npt.ArrayLike) -> FloatArray:
    """Return step seconds without noise, [...]: max over ranks and buckets of a + share P + C_j."""
    longest: FloatArray = finish_s(machine, local_batches).max(axis=-1)
    return longest


def best_split(machine: Machine, job: Job, total_batch: int) -> IntArray:
    """Return the local batches with the least step time without noise, whole and within the bounds.

    A rank's time grows with its batch, so of all the times that single ranks' batches take, the optimum takes the
    smallest ones, as many as there are samples: no model and no solver is needed, only every time there is.
    """
    low, high = job.bounds
    if not low.sum() <= total_batch <= sum(high.tolist()):
        raise InvalidInputError(f"total_batch={total_batch} is outside what the ranks can hold")
    high = np.minimum(high, total_batch)
    batches = np.arange(1, int(high.max()) + 1)
    times = np.maximum.accumulate(finish_s(machine, np.tile(batches[:, None], (1, machine.num_ranks))), axis=0)
    extra = (batches[:, None] > low) & (batches[:, None] <= high)
    missing = total_batch - int(low.sum())
    split = low.copy()
    if missing:
        ranks = np.broadcast_to(np.arange(machine.num_ranks), times.shape)[extra]
        chosen = np.argsort(times[extra], kind="stable")[:missing]
        split += np.bincount(ranks[chosen], minlength=machine.num_ranks)
    return split


def settled_step_s(machine: Machine, local_batches: IntArray, seed: int) -> float:
    """Return the median duration of many noisy steps with this split."""
    times = machine.measure(np.tile(local_batches, (_STEPS, 1)), 0, np.random.default_rng(seed))
    return float(np.median(times.step_s))


def taken_s(machine: Machine, splits: IntArray, first_step: int = 0) -> float:
    """Return the mean duration of steps with these splits, [S, n], with the noise and the drift that steps have.

    The same steps have the same noise, whatever their splits.
    """
    measured = machine.measure(splits, first_step, np.random.default_rng(0))
    return float(measured.step_s.mean())


def bottleneck(machine: Machine, local_batches: IntArray) -> str:
    """Return what decides a split's step time: "compute", "communication", or "mixed" where ranks differ in it.

    A rank is compute-bound where its last bucket decides when it would let the step end, and communication-bound where
    an earlier one does (the paper's section 3.2). Only ranks count that end within 1% of the step: others wait anyway.
    """
    ends = _ends_s(machine, local_batches)
    longest = ends.max(axis=-1)
    is_last = (ends[..., -1] >= longest * (1 - 1e-9))[longest >= 0.99 * longest.max()]
    return "compute" if is_last.all() else "mixed" if is_last.any() else "communication"


def even_limit(machine: Machine, job: Job) -> int:
    """Return the largest total that DDP holds: the same batch on every rank, within the smallest memory."""
    return min(job.largest_total, machine.num_ranks * int(machine.max_batch.min()))


def equal_split(machine: Machine, job: Job, total_batch: int) -> IntArray:
    """Return the split of equal compute times, LB-BSP's goal, to the sample: what it costs is not its step of 5."""
    return best_split(replace(machine, bucket_s=np.zeros_like(machine.bucket_s)), job, total_batch)


def lb_bsp_split(machine: Machine, job: Job, total_batch: int, samples_moved: int = 5) -> IntArray:
    """Return where LB-BSP ends at a fixed total: its own planner, shown steps without noise until it stays."""
    fixed = replace(job, batch_size=total_batch, max_batch_size=None)
    planner, batches = LbBspPlanner(fixed, samples_moved=samples_moved), None
    split = planner.decide(None, fixed, 0).plan.local_batches
    while split != batches:
        batches = split
        split = planner.decide(_quiet_window(machine, np.array(batches)), fixed, 0).plan.local_batches
    return np.array(split)


def _quiet_window(machine: Machine, local_batches: IntArray) -> StepWindow:
    """Return one step of a split as it is measured without noise; what LB-BSP does not look at is missing."""
    forward, _ = machine.compute(local_batches)
    ready = machine.ready(local_batches)[None]
    return StepWindow(
        first_step=0,
        local_batches=local_batches[None],
        before_s=forward[None],
        ready_s=ready,
        done_s=ready,
        local_sqnorm=np.full((1, machine.num_ranks), np.nan),
        global_sqnorm=np.full(1, np.nan),
    )
