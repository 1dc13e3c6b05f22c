"""What happens once, when a loader is bound to a model: ranks agree, and somebody begins to plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from cannikin.core import policies
from cannikin.core.planner import DevicePlanner, Planner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.prior import DataSheet
from cannikin.core.values import Job
from cannikin.errors import InvalidInputError, StateError
from cannikin.runlog import RankInfo
from cannikin.runtime.loop import Loop
from cannikin.runtime.memory import state_bytes
from cannikin.runtime.profile_store import ProfileStore
from cannikin.runtime.wire import Exchange


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
    hooks = [hook for o in optimizers for hook in getattr(o, "_optimizer_step_pre_hooks", {}).values()]
    owners = [owner for hook in hooks if isinstance(owner := getattr(hook, "__self__", None), Loop)]
    if any(owner is not loop and owner.coordinator.is_bound for owner in owners):
        raise InvalidInputError(
            "the optimizer belongs to another model with a loader, or to an earlier wrapper of this one: make a "
            "new optimizer for each HeteroDataParallel"
        )


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
    restored: dict[str, Any] | None,
    store: ProfileStore | None,
    devices: list[str],
    sheets: list[DataSheet],
) -> Planner:
    """Make the planner, with what a saved state, else stored profiles, else the devices' data sheets know.

    `store` is None on ranks other than 0, and where the user keeps no profiles; `devices` has a name per rank.
    """
    planner = policies.make_planner(policy, job, batch_norm=batch_norm) if isinstance(policy, str) else policy
    if store is not None and not isinstance(planner, DevicePlanner):
        text = f"profiles= is ignored: policy {policy_name(policy)!r} learns no profiles"
        warnings.warn(text, RuntimeWarning, stacklevel=5)
    if restored is not None:
        planner.load_state_dict(restored)
    elif store is not None and isinstance(planner, DevicePlanner):
        try:
            planner.start_from(store.load(devices))
        except StateError as error:  # not worth a run: the ranks are learned afresh
            warnings.warn(f"stored profiles are left out: {error}", RuntimeWarning, stacklevel=5)
    if isinstance(planner, Controller):
        planner.start_by(sheets)
    return planner
