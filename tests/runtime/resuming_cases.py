"""What the ranks of `test_resuming` run: one training, and many that begin with what it saved."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training_cases import Numbered, make_model, one_epoch, take_step

from cannikin import Snapshot
from cannikin.runtime.loader import HeteroDataLoader

SAMPLE_S = (1e-3, 2e-3, 4e-3)  # of each card, for a sample, in forward and again in backward
TOTAL, NUM_STEPS = 28, 25
STATE, PROFILES = "state.json", "profiles.json"


@dataclass(frozen=True, kw_only=True)
class Begun:
    """How a run began: its first local batches, why (as rank 0 tells it), and its progress."""

    local_batches: tuple[int, ...]
    reason: str
    progress: float


def begin(
    card: str, state: dict[str, Any], *, before: bool = True, profiles: str | None = None, **loader: Any
) -> Begun:
    """Build a model and a loader on this rank's card, and load the state before the loader is built or after it."""
    os.environ["CANNIKIN_DEVICE"] = card
    model, _ = make_model(**({} if profiles is None else {"profiles": profiles}))
    if before:
        model.engine.load_state_dict(state)
    HeteroDataLoader(Numbered(NUM_STEPS * TOTAL), model=model, **{"batch_size": TOTAL, **loader})
    if not before:
        model.engine.load_state_dict(state)
    plan = model.plan
    return Begun(local_batches=plan.local_batches, reason=plan.reason, progress=model.engine.progress)


def learn(rank: int, folder: str) -> dict[str, Any]:
    """Train, each rank on a card of its own, and save what was learned; return the state, on all ranks."""
    os.environ["CANNIKIN_DEVICE"] = f"card {rank}"
    model, optimizer = make_model(SAMPLE_S[rank], profiles=os.path.join(folder, PROFILES))
    loader = HeteroDataLoader(Numbered(NUM_STEPS * TOTAL), model=model, batch_size=TOTAL)
    one_epoch(model, optimizer, loader)
    states = [model.engine.state_dict()]
    dist.broadcast_object_list(states)
    if rank == 0:
        Path(folder, STATE).write_text(json.dumps(states[0]))
    return json.loads(json.dumps(states[0]))


def rates_of_three_starts(rank: int, world_size: int, folder: str, kind: str) -> list[list[float]]:
    """The rates of two steps in each of three starts: as it is, with another one in the script, and changed after."""
    told = []
    for start, lr in enumerate((0.1, 0.03, 0.1)):
        model, optimizer = make_model(lr=lr)
        loader = HeteroDataLoader(Numbered(100), model=model, batch_size=8)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if kind == "LambdaLR":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.5**steps)
        snapshot = Snapshot(folder, model, scheduler=scheduler)
        if start == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
            scheduler.base_lrs = [rate * 0.1 for rate in scheduler.base_lrs]
        rates = []
        for batch in itertools.islice(loader, 2):
            rates.append(optimizer.param_groups[0]["lr"])
            take_step(model, optimizer, batch)
            scheduler.step()
        loader.finish()
        snapshot.save()
        snapshot.wait()
        snapshot.close()
        told.append(rates)
    return told


def three_ranks(rank: int, world_size: int, folder: str) -> dict[str, Begun]:
    state = learn(rank, folder)
    moved, own = f"card {(rank + 1) % 3}", f"card {rank}"
    return {
        "same": begin(own, state),
        "moved": begin(moved, state),
        "moved, loaded late": begin(moved, state, before=False),
        "smaller batch": begin(own, state, batch_size=14),
        "smaller batch, loaded late": begin(own, state, batch_size=14, before=False),
        "bounded": begin(own, state, local_bounds=(1, 13)),
    }


def two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Begun]:
    state = json.loads(Path(folder, STATE).read_text())
    profiles = os.path.join(folder, PROFILES)
    forgetful = state | {"devices": [device | {"name": "another"} for device in state["devices"]]}
    return {
        "fewer": begin(("card 2", "card 0")[rank], state),
        "of a kind": begin("card 1", state),
        "other devices": begin(("card 2", "card 0")[rank], forgetful),
        "other devices, profiles": begin(("card 2", "card 0")[rank], forgetful, profiles=profiles),
        "other devices, profiles, loaded late": begin(
            ("card 2", "card 0")[rank], forgetful, profiles=profiles, before=False
        ),
    }
