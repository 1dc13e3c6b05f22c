"""The best split of the ground truth itself: what a person who tried every split by hand would find."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cannikin.core.values import FloatArray, IntArray, Job
from cannikin.errors import InvalidInputError
from cannikin.sim.hardware import Machine

_STEPS = 1000


def finish_s(machine: Machine, local_batches: npt.ArrayLike) -> FloatArray:
    """Return when each rank alone would let the step end, without noise, [..., n]; it grows with the rank's batch."""
    forward, _ = machine.compute(local_batches)
    tails = machine.bucket_s[::-1].cumsum()[::-1]
    longest: FloatArray = (forward[..., None] + machine.ready(local_batches) + tails).max(axis=-1)
    return longest


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
