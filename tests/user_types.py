"""What mypy says of users' code, checked by `make lint`: an ignored error that is none is an error itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import cannikin
from cannikin.core.planner import Decision
from cannikin.core.values import Job, Plan, StepWindow


class Mine:
    """A planner as `Planner` asks for."""

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        return Decision(plan=Plan(first_step=step, total_batch=4, local_batches=(3, 1)))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Stale:
    """A planner of an earlier version."""

    def observe(self, window: StepWindow) -> None:
        pass

    def plan(self, step: int) -> Plan:
        return Plan(first_step=step, total_batch=4, local_batches=(3, 1))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def twice(total_batch: float, /, *, initial_batch: float, gain: float, progress: float) -> float:
    """A rule as `LrRule` asks for."""
    return 2.0


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, ddp: DistributedDataParallel) -> None:
    """Options are known by name and type wherever they are taken."""
    model = cannikin.HeteroDataParallel(net, optimizer, policy=Mine(), lr_rule=twice, bucket_cap_mb=1.0)
    cannikin.HeteroDataParallel(net, optimizer, policy=Stale())  # type: ignore[arg-type]
    cannikin.HeteroDataParallel(net, optimizer, polcy="even")  # type: ignore[call-arg]
    cannikin.attach(ddp, optimizer, weighting="loss", run_dir="run")
    cannikin.attach(ddp, optimizer, weighting=3)  # type: ignore[call-overload]
    cannikin.Engine(ddp, optimizer, lr_rule=len)  # type: ignore[arg-type]
    cannikin.HeteroDataLoader([1], model=model, batch_size=4, local_bounds=(1, 3), num_workers=2)
    cannikin.HeteroDataLoader([1], model=model, batch_size=4, max_batch_size="8")  # type: ignore[arg-type]
    cannikin.HeteroBatchSampler([1], model=model, batch_size=4, local_batches=[3, 1])
    cannikin.HeteroBatchSampler([1], model=model, batch_size=4, num_workers=2)  # type: ignore[call-arg]
