"""What happens once, when a loader is bound to a model: ranks agree, and somebody begins to plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cannikin.core import policies
from cannikin.core.devices import DeviceId, find_departed, find_origins
from cannikin.core.lr import Progress
from cannikin.core.planner import DevicePlanner, NoisePlanner, Planner
from cannikin.core.policies import plans
from cannikin.core.policies.cannikin import Controller
from cannikin.core.prior import DataSheet
from cannikin.core.profiles import Profile
from cannikin.core.saved import number, whole
from cannikin.core.values import Job
from cannikin.errors import InvalidInputError, StateError
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


def saved_policy(policy: str | Planner) -> str:
    """Return a policy as a saved state says it: by one name, however it was given."""
    if isinstance(policy, str):
        return policy.replace("_", "-")
    return "cannikin" if isinstance(policy, Controller) else type(policy).__name__


def why_afresh(policy: str | Planner, state: dict[str, Any], num_ranks: int) -> str:
    """Return why a policy has no use for what a saved state's planner has learned; empty where it has."""
    own, saved = saved_policy(policy), state["policy"]
    if saved != own and {saved, own} & {*policies.POLICIES}:
        return f"under {saved!r}, and policy={own!r} has no use for what that one learns"
    if own in policies.POLICIES and own != "cannikin" and (plan := state["planner"].get("plan")) is not None:
        with plans.restoring("planner"):
            num_saved = len(plan["local_batches"])
        if num_saved != num_ranks:
            return f"on {num_saved} ranks, and policy={own!r} has no use on {num_ranks} for what it learned there"
    return ""


def begin_afresh(planner: Planner, state: dict[str, Any], why: str) -> str:
    """Let a planner take of another one's state what is of the training, the noise; return what to warn of."""
    kept = "progress"
    noise = state["planner"].get("noise")
    if isinstance(planner, NoisePlanner) and isinstance(noise, dict):
        planner.start_with_noise(noise)
        kept = "progress and the noise scale"
    return (
        f"the saved state is of a run {why}: the policy begins afresh, with batch_size as the total batch; {kept}, and "
        "what is saved beside the engine, such as weights and the place in the data, are taken as they are"
    )


def restore_planner(
    planner: Planner, state: dict[str, Any], ranks: Sequence[RankInfo], profiles: list[Profile | None] | None
) -> None:
    """Let a planner take what an engine saved: ours finds each rank's device again, others go by rank number."""
    if not isinstance(planner, Controller):
        planner.load_state_dict(state["planner"])
        return
    stored = profiles or [None] * len(ranks)
    with plans.restoring("controller"):
        departed = state["departed"]
        origins = find_origins(
            state["planner"],
            _devices_of(state),
            [device_id(rank) for rank in ranks],
            [departed.get(rank.device) if found is None else found for rank, found in zip(ranks, stored, strict=True)],
            saved_s=float(state["saved_s"]),
        )
    planner.load_state_dict(state["planner"], origins)


def _devices_of(state: dict[str, Any]) -> list[DeviceId]:
    return [DeviceId(**saved) for saved in state["devices"]]


def departed_devices(planner: Planner, state: dict[str, Any], ranks: Sequence[RankInfo]) -> dict[str, Profile]:
    """Return what a saved state knows of devices that no rank has now, by name; nothing for planners of others."""
    if not isinstance(planner, Controller):
        return {}
    with plans.restoring("controller"):
        present, saved_s = [device_id(rank) for rank in ranks], float(state["saved_s"])
        return find_departed(state["planner"], _devices_of(state), present, state["departed"], saved_s=saved_s)


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What an engine saves beside its planner's state."""

    progress: Progress
    num_steps: int


def read_engine_state(state: dict[str, Any]) -> EngineState:
    """Return what `Engine.state_dict` saved, checked; raise StateError where it is damaged."""
    with plans.restoring("cannikin engine"):
        progress = Progress(
            batches=number("progress", state["progress"]),
            steps=number("optimizer_steps", state["optimizer_steps"]),
            forgone=number("forgone", state["forgone"]),
        )
        if state["planner"] is not None:  # else it had no loader, or follows another engine
            whole("batch_size", state["batch_size"], 1)
        if state["pass_steps"] is not None:
            whole("pass_steps", state["pass_steps"], 1)
        number("saved_s", state["saved_s"])
        if not isinstance(state["policy"], str):
            raise StateError(f"saved policy={state['policy']!r:.200} is no name: load what state_dict() returned")
        if not isinstance(state["planner"], dict | None):
            raise StateError(f"saved planner={state['planner']!r:.200} is no state: load what state_dict() returned")
        return EngineState(progress=progress, num_steps=whole("num_steps", state["num_steps"]))


def batch_ratio(state: dict[str, Any], job: Job) -> float:
    """Return how many of this job's initial batches make one of those in which an engine saved its progress.

    By batches per pass where these are known, so that whole passes stay whole.
    """
    before, now = state["pass_steps"], job.pass_steps
    if before and now:
        return float(now / before)
    return float(state["batch_size"] / job.batch_size)


def device_id(rank: RankInfo) -> DeviceId:
    """Return what tells a rank's device from others."""
    return DeviceId(host=rank.host, name=rank.device, uuid=rank.uuid)
