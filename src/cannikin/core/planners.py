"""The policies by name, and the two simplest baselines: plain DDP's even split and LB-BSP.

All implement `records.Planner`, so a comparison changes one word and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cannikin.core.adaptdl import AdaptdlPlanner
from cannikin.core.controller import Controller
from cannikin.core.paper import PaperPlanner
from cannikin.core.plans import (
    compute_seconds,
    even_batches,
    held_by_memory,
    load_plan,
    make_plan,
    restoring,
    save_plan,
    within_bounds,
)
from cannikin.core.records import FloatArray, Job, Plan, Planner, StepWindow
from cannikin.errors import InvalidInputError

__all__ = ["POLICIES", "EvenPlanner", "LbBspPlanner", "make_planner"]

POLICIES = ("cannikin", "even", "lb-bsp", "adaptdl", "paper")


def make_planner(policy: str, job: Job, *, batch_norm: bool = False) -> Planner:
    """The planner of that name; `batch_norm` says whether ranks normalise by statistics of their own batch.

    Example:
        >>> make_planner("even", Job(num_ranks=3, batch_size=8)).plan(0).local_batches
        (3, 3, 2)
    """
    match str(policy).replace("_", "-"):
        case "cannikin":
            return Controller(job, batch_norm=batch_norm)
        case "even":
            return EvenPlanner(job)
        case "lb-bsp":
            return LbBspPlanner(job)
        case "adaptdl":
            return AdaptdlPlanner(job, batch_norm=batch_norm)
        case "paper":
            return PaperPlanner(job)
    raise InvalidInputError(f"policy={policy!r} is unknown: choose one of {', '.join(POLICIES)}, or pass a Planner")


class EvenPlanner:
    """Plain DDP: the same batch for every rank, for ever."""

    def __init__(self, job: Job) -> None:
        self._plan = make_plan(0, even_batches(job, job.batch_size), phase="even", reason="even split, as plain DDP")

    def observe(self, window: StepWindow) -> None:
        """Nothing is learned."""

    def plan(self, step: int) -> Plan:
        """The one plan there is."""
        return self._plan

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take back."""


class LbBspPlanner:
    """LB-BSP (SoCC'20): every window, move 5 samples from the slowest rank to the fastest, while that helps.

    It looks at compute times only, not at communication, and keeps the total batch. A move helps where the fastest
    rank, with 5 samples more at its present time a sample, still finishes before the slowest does now.
    """

    def __init__(self, job: Job, *, samples_moved: int = 5) -> None:
        self.job = job
        self._own_job = job
        self._samples_moved = samples_moved
        reason = "even split to start with"
        self._plan = make_plan(0, even_batches(job, job.batch_size), phase="lb-bsp", reason=reason)
        self._compute_s: FloatArray | None = None

    def observe(self, window: StepWindow) -> None:
        """Keep each rank's compute time, once the plan made last is in force."""
        self.job = self._own_job.limited(window.max_batch, self._plan.total_batch)
        measured = compute_seconds(window)
        if measured is not None and tuple(measured[0].tolist()) == self._plan.local_batches:
            self._compute_s = measured[1]

    def plan(self, step: int) -> Plan:
        """One move, or the plan in force."""
        if (held := within_bounds(self._plan, self.job, step)) is not self._plan:
            self._plan, self._compute_s = held, None
        if self._compute_s is None:
            return self._plan
        compute_s, self._compute_s = self._compute_s, None
        slow, fast = int(compute_s.argmax()), int(compute_s.argmin())
        batches = np.array(self._plan.local_batches)
        low, high = self.job.bounds
        moved = int(min(self._samples_moved, batches[slow] - low[slow], high[fast] - batches[fast]))
        after_s = compute_s[fast] * (batches[fast] + moved) / batches[fast]
        if slow != fast and moved > 0 and after_s < compute_s[slow]:
            batches[slow] -= moved
            batches[fast] += moved
            reason = f"{moved} samples from rank {slow}, the slowest, to rank {fast}, the fastest"
            split = tuple(batches.tolist())
            reason = "; ".join([reason, *held_by_memory(self._own_job, self.job, split)])
            self._plan = make_plan(step, split, phase="lb-bsp", reason=reason)
        return self._plan

    def state_dict(self) -> dict[str, Any]:
        """The plan in force, and the times not yet acted upon."""
        times = None if self._compute_s is None else self._compute_s.tolist()
        return {"plan": save_plan(self._plan), "compute_s": times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        with restoring("LB-BSP planner"):
            self._plan = load_plan(state["plan"], self._own_job)
            self._compute_s = None if state["compute_s"] is None else np.asarray(state["compute_s"], dtype=np.float64)
