"""The policies by name: one per file, and a line in `POLICIES`.

All implement `planner.Planner`, so a comparison changes one word and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from cannikin.core.planner import Planner
from cannikin.core.policies.adaptdl import AdaptdlPlanner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.policies.even import EvenPlanner
from cannikin.core.policies.lb_bsp import LbBspPlanner
from cannikin.core.policies.paper import PaperPlanner
from cannikin.core.values import Job
from cannikin.errors import InvalidInputError

# By name, a function that makes the planner from a job and from whether the model has BatchNorm.
POLICIES: dict[str, Callable[[Job, bool], Planner]] = {
    "cannikin": lambda job, batch_norm: Controller(job, batch_norm=batch_norm),
    "even": lambda job, batch_norm: EvenPlanner(job),
    "lb-bsp": lambda job, batch_norm: LbBspPlanner(job),
    "adaptdl": lambda job, batch_norm: AdaptdlPlanner(job, batch_norm=batch_norm),
    "paper": lambda job, batch_norm: PaperPlanner(job),
}


def make_planner(policy: str, job: Job, *, batch_norm: bool = False) -> Planner:
    """Make the planner of that name; `batch_norm` says whether ranks normalise by statistics of their own batch.

    Example:
        >>> job = Job(num_ranks=3, batch_size=8)
        >>> make_planner("even", job).decide(None, job, 0).plan.local_batches
        (3, 3, 2)
    """
    make = POLICIES.get(str(policy).replace("_", "-"))
    if make is None:
        raise InvalidInputError(f"policy={policy!r} is unknown: choose one of {', '.join(POLICIES)}, or pass a Planner")
    return make(job, batch_norm)
