"""What the ranks of `test_profiles` run: trainings that keep what they learn in a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from told import Warned, collecting_warnings
from training_cases import Numbered, TinyNet, make_model, one_epoch

from cannikin.runtime.device import Cpu
from cannikin.runtime.exchange import Exchange
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.profile_store import introduce, model_key

SAMPLE_S = (1e-3, 4e-3)  # of each rank, for a sample, in forward and again in backward
TOTAL = 12


@dataclass(frozen=True, kw_only=True)
class Told:
    """A training's splits, step by step; its first plan's reason, warnings, and what it learned of the cluster."""

    splits: list[tuple[int, ...]]
    reason: str
    warned: list[Warned]
    cluster: dict[str, Any] | None


def train(rank: int, world_size: int, path: str, num_samples: int) -> Told:
    """Each rank is a device of its own."""
    os.environ["CANNIKIN_DEVICE"] = f"card {rank}"
    model, optimizer = make_model(SAMPLE_S[rank], profiles=path)
    with collecting_warnings() as warned:
        loader = HeteroDataLoader(Numbered(num_samples), model=model, batch_size=TOTAL)
        reason = model.plan.reason
        splits = [step.plan for step in one_epoch(model, optimizer, loader)]
    cluster = model.engine.cluster()
    told = None if cluster is None else cluster.as_dict()
    return Told(splits=splits, reason=reason, warned=warned, cluster=told)


def learn_then_start_again(rank: int, world_size: int, folder: str) -> dict[str, Told]:
    """Two runs with one file; two with files that are none; and one that cannot write."""
    path = os.path.join(folder, "cards", "profiles.json")  # in a folder that is not there yet
    return {
        "first": train(rank, world_size, path, 25 * TOTAL),
        "second": train(rank, world_size, path, 2 * TOTAL),
        "foreign": train(rank, world_size, os.path.join(folder, "foreign.json"), 8 * TOTAL),
        "damaged": train(rank, world_size, os.path.join(folder, "damaged.json"), 8 * TOTAL),
        "no folder": train(rank, world_size, os.path.join(folder, "foreign.json", "profiles.json"), 8 * TOTAL),
    }


def tiny_key() -> str:
    return model_key(TinyNet(), scaled=False)


def names_of_the_ranks(rank: int, world_size: int) -> list[str]:
    """What the ranks call each other's devices, where rank 0's has a name of the user's own."""
    torch.set_num_threads(1)
    if rank == 0:
        os.environ["CANNIKIN_DEVICE"] = "card 0"
    exchange = Exchange(dist.group.WORLD)
    return [who.device for who in introduce(exchange, Cpu())]
