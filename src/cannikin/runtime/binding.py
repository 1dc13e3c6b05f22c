"""What happens once, when a loader is bound to a model: ranks agree, and somebody begins to plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cannikin.core import policies
from cannikin.core.planner import DevicePlanner, Planner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.prior import DataSheet
from cannikin.core.profiles import Profile
from cannikin.core.values import Job
from cannikin.errors import InvalidInputError
from cannikin.runlog import RankInfo
from cannikin.runtime.exchange import Exchange
from cannikin.runtime.loop import Loop, loops_of
from cannikin.runtime.memory import state_bytes


def policy_name(policy: str | Planner) -> str:
    """Return a policy as logs and messages say it."""
    return policy if isinstance(policy, str) else type(policy).__name__


def check_agreement(exchange: Exchange, job: Job, **settings: Any) -> None:
    """Raise the same error on every rank where they disagree on the job or on another setting."""
    low, high = job.bounds
    of_job = {
        "batch_size": job.batch_size,
        "max_batch_size": job.max_batch_size or 0,
        "local_bounds": [low.tolist(), high.tolist()],
        "num_samples": job.num_samples or 0,
    }
    exchange.check_agreement({**settings, **of_job})


def check_owner(optimizers: Sequence[torch.optim.Optimizer], loop: Loop) -> None:
    """Refuse an optimizer whose rates another engine scales already: both would, and neither could undo it."""
    owners = [owner for optimizer in optimizers for owner in loops_of(optimizer)]
    if any(owner is not loop and owner.coordinator.is_bound for owner in owners):
        raise InvalidInputError(
            "the optimizer belongs to another model with a loader, or to an earlier wrapper of this one: make a "
            "new optimizer for each HeteroDataParallel"
        )


def refuse_groups_beside(exchange: Exchange, group: Any, job: Job) -> None:
    """Refuse to plan for a group of ranks where all of them work with ranks of other groups, as in tensor parallel.

    Each group would plan for itself, and ranks that hold parts of one model would get different samples. All ranks of
    the group raise, or none.
    """
    low, high = job.bounds
    if (low == high).all() or exchange.world_size == dist.get_world_size():
        return
    if not all(exchange.gather_count(len(ranks_beside(group)))):
        return
    raise InvalidInputError(
        f"the model's process group has {exchange.world_size} of {dist.get_world_size()} ranks, and each of them is in "
        f"groups with ranks outside of it (rank {dist.get_rank()} with {ranks_beside(group)}), as in tensor, pipeline "
        "or context parallel: groups that plan on their own would give those ranks different batches; give the loader "
        "local_batches=, the same for every group"
    )


def ranks_beside(group: Any) -> list[int]:
    """Return the ranks outside of this group that this rank shares another group with, other than that of all ranks."""
    everybody, own = set(range(dist.get_world_size())), set(dist.get_process_group_ranks(group))
    # torch has no public list of a rank's groups; a group that this rank is not in may be listed too.
    known = [set(ranks) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()]
    beside = [ranks - own for ranks in known if dist.get_rank() in ranks and ranks != everybody]
    return sorted(set().union(*beside))


def give_loader(loader: Any, engine: object) -> None:
    """Bind a loader that was built before its model."""
    if not callable(getattr(loader, "bind", None)):
        raise InvalidInputError(
            f"loader is a {type(loader).__name__}: give a cannikin.HeteroDataLoader that was built without model="
        )
    loader.bind(engine)


def data_sheets(ranks: Sequence[RankInfo], module: torch.nn.Module) -> list[DataSheet]:
    """Return what is known of each rank's device before anything has run, with the room that this model leaves."""
    taken = state_bytes(module)
    return [
        DataSheet(
            capability=rank.capability,
            num_multiprocessors=rank.num_multiprocessors,
            clock_mhz=rank.clock_mhz,
            room_bytes=None if rank.memory_limit_bytes is None else rank.memory_limit_bytes - taken,
        )
        for rank in ranks
    ]


def make_planner(
    policy: str | Planner,
    job: Job,
    batch_norm: bool,
    sheets: list[DataSheet],
    profiles: list[Profile | None] | None,
) -> Planner:
    """Make the planner, with what stored profiles and the devices' data sheets know.

    Args:
        policy, job, batch_norm: what it is, and what for.
        sheets, profiles: what data sheets say of the ranks' devices, and what `share_profiles` does; None where a saved
            state is to say it.
    """
    planner = policies.make_planner(policy, job, batch_norm=batch_norm) if isinstance(policy, str) else policy
    if profiles is not None and isinstance(planner, DevicePlanner):
        planner.start_from(profiles)
    if isinstance(planner, Controller):
        planner.start_by(sheets)
    return planner
