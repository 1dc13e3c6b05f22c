"""LB-BSP (SoCC'20) as a policy: move samples from the slowest rank to the fastest.

Its own paper balances at iteration boundaries, which the simulator has as `lb-bsp@step`. Between real ranks a plan can
change once per window, of 5 or 10 steps: `lb-bsp`. The Cannikin paper moves once per epoch: `lb-bsp@epoch`. The step of
5 samples is the Cannikin paper's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cannikin.core.planner import Decision
from cannikin.core.policies import plans
from cannikin.core.values import FloatArray, Job, Plan, StepWindow


class LbBspPlanner:
    """The planner behind `policy="lb-bsp"`: with every window, 5 samples move, while that helps.

    It looks at compute times only, not at communication, and keeps the total batch. A move helps where the fastest
    rank, with 5 samples more at its present time per sample, still finishes before the slowest does now. The split to
    start with is even, or as even as the bounds allow.
    """

    def __init__(self, job: Job, *, samples_moved: int = 5) -> None:
        self._job = job
        self._samples_moved = samples_moved
        self._plan = plans.make_plan(0, plans.even_batches(job, job.batch_size), reason="even split to start with")

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        """Make one move where the plan made last is in force, or keep that plan."""
        measured = None if window is None else plans.compute_seconds(window)
        fitted = plans.within_bounds(self._plan, job, step)
        if fitted is not self._plan:
            self._plan = fitted
        elif measured is not None and tuple(measured[0].tolist()) == self._plan.local_batches:
            self._plan = self._moved(measured[1], job, step)
        return Decision(plan=self._plan, phase="lb-bsp")

    def _moved(self, compute_s: FloatArray, job: Job, step: int) -> Plan:
        """Return the plan with one move, or the plan itself where a move does not help."""
        slow, fast = int(compute_s.argmax()), int(compute_s.argmin())
        batches = np.array(self._plan.local_batches)
        low, high = job.bounds
        moved = int(min(self._samples_moved, batches[slow] - low[slow], high[fast] - batches[fast]))
        after_s = compute_s[fast] * (batches[fast] + moved) / batches[fast]
        if slow == fast or moved <= 0 or after_s >= compute_s[slow]:
            return self._plan
        batches[slow] -= moved
        batches[fast] += moved
        reason = f"{moved} samples from rank {slow}, the slowest, to rank {fast}, the fastest"
        return plans.make_plan(step, tuple(batches.tolist()), reason=reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan in force."""
        return {"plan": plans.save_plan(self._plan)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        with plans.restoring("LB-BSP planner"):
            self._plan = plans.resumed_plan(state["plan"], self._job)
