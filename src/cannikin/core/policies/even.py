"""Plain DDP as a policy: the same batch for every rank, from the first step to the last."""

from __future__ import annotations

from typing import Any

from cannikin.core.planner import Decision
from cannikin.core.policies.plans import ddp_batches, make_plan
from cannikin.core.values import Job, StepWindow


class EvenPlanner:
    """The planner behind `policy="even"`; a job whose ranks cannot hold equal batches raises `InfeasibleError`."""

    def __init__(self, job: Job) -> None:
        plan = make_plan(0, ddp_batches(job, job.batch_size), reason="even split, as plain DDP")
        self._decision = Decision(plan=plan, phase="even")

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        """Return the one decision there is."""
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back nothing."""
