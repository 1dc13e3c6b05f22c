"""What an engine saves, and what a later run can use of it: on other devices, for another job, under another policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cannikin.core import policies
from cannikin.core.devices import DeviceId, find_departed, find_origins
from cannikin.core.lr import Progress
from cannikin.core.planner import NoisePlanner, Planner
from cannikin.core.policies import plans
from cannikin.core.policies.cannikin import Controller
from cannikin.core.profiles import Profile
from cannikin.core.saved import number, whole
from cannikin.core.values import Job
from cannikin.errors import StateError
from cannikin.runlog import RankInfo
from cannikin.words import counted


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
            there = counted(num_saved, "rank")
            return f"on {there}, and policy={own!r} has no use on {num_ranks} for what it learned there"
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
    with plans.restoring("controller"):
        origins = find_origins(
            state["planner"],
            _devices_of(state),
            [device_id(rank) for rank in ranks],
            profiles or [None] * len(ranks),
            saved_s=float(state["saved_s"]),
            departed=_departed_of(state),
        )
    planner.load_state_dict(state["planner"], origins)


def _devices_of(state: dict[str, Any]) -> list[DeviceId]:
    return [DeviceId(**saved) for saved in state["devices"]]


def _departed_of(state: dict[str, Any]) -> list[Profile]:
    departed: dict[str, Profile] | list[Profile] = state["departed"]
    if isinstance(departed, dict):  # older states have one by name
        return [{**profile, "device": name} for name, profile in departed.items()]
    return departed


def departed_devices(planner: Planner, state: dict[str, Any], ranks: Sequence[RankInfo]) -> list[Profile]:
    """Return what a saved state knows of devices that no rank has now; nothing for planners of others."""
    if not isinstance(planner, Controller):
        return []
    with plans.restoring("controller"):
        present, saved_s = [device_id(rank) for rank in ranks], float(state["saved_s"])
        return find_departed(state["planner"], _devices_of(state), present, _departed_of(state), saved_s=saved_s)


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
