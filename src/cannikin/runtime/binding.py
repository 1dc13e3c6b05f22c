"""What happens once, when a loader is bound to a model: what ranks must agree on, and who plans."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from cannikin.core.planners import make_planner
from cannikin.core.records import Job, Planner
from cannikin.errors import InvalidInputError, StateError
from cannikin.runlog import RankInfo
from cannikin.runtime.profiles import ProfileStore
from cannikin.runtime.tracking import StepTracker

__all__ = ["check_owner", "planner_for", "policy_name", "settings_of"]


def policy_name(policy: str | Planner) -> str:
    """A policy as logs and messages say it."""
    return policy if isinstance(policy, str) else type(policy).__name__


def settings_of(job: Job, **choices: Any) -> dict[str, Any]:
    """What ranks must agree on beside the loader's own settings: the job, and what the engine chose."""
    low, high = job.bounds
    return {
        **choices,
        "batch_size": job.batch_size,
        "max_batch_size": job.max_batch_size or 0,
        "local_bounds": [low.tolist(), high.tolist()],
        "num_samples": job.num_samples or 0,
    }


def check_owner(optimizer: torch.optim.Optimizer, tracker: StepTracker) -> None:
    """Refuse an optimizer whose rates another engine scales already: both would, and neither could undo it."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    owners = [owner for hook in hooks if isinstance(owner := getattr(hook, "__self__", None), StepTracker)]
    if any(owner is not tracker and owner.bound for owner in owners):
        raise InvalidInputError(
            "the optimizer belongs to another model with a loader, or to an earlier wrapper of this one: make a "
            "new optimizer for each HeteroDataParallel"
        )


def planner_for(
    policy: str | Planner,
    job: Job,
    *,
    batch_norm: bool,
    restored: dict[str, Any] | None,
    store: ProfileStore | None,
    ranks: Sequence[RankInfo],
) -> Any:
    """The planner, with what a saved state or else stored profiles know; `store` is None on ranks other than 0."""
    planner: Any = policy
    if isinstance(policy, str):
        planner = make_planner(policy, job, batch_norm=batch_norm)
    if store is not None and not hasattr(planner, "profiles"):
        text = f"profiles= is ignored: policy {policy_name(policy)!r} learns no profiles"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    if restored is not None:
        planner.load_state_dict(restored)
    elif store is not None and hasattr(planner, "start_from"):
        try:
            planner.start_from(store.load([rank.device for rank in ranks]))
        except StateError as error:  # not worth a run: the ranks are learned afresh
            warnings.warn(f"stored profiles are left out: {error}", RuntimeWarning, stacklevel=4)
    return planner
