"""Scripts with code of their own that assumes equal batches: what they are told, and whether they are stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from parity_cases import Loaded, ScriptedPlanner, _Script, mlp, regression, sgd
from told import collecting_warnings, run_cases
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cannikin.runtime.parallel import HeteroDataParallel


class Gathering(nn.Module):
    """Gathers features in forward, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        every = [torch.zeros_like(out) for _ in range(dist.get_world_size())]
        dist.all_gather(every, out.detach())
        return out + 0.01 * torch.cat(every).mean()


class GatheringAtOnce(Gathering):
    """The same by torch's newest name, where it has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        every = out.new_zeros(dist.get_world_size() * len(out), *out.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(every, out.detach())
        return out + 0.01 * every.mean()


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def centred(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As DINO's centre."""
    out = model(x)
    total = out.detach().sum(dim=0)
    dist.all_reduce(total)
    return (out - total / (len(x) * dist.get_world_size())).square().mean()


def gathering(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    every = [torch.zeros_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(every, out.detach())
    return (out - torch.cat(every).mean(dim=0)).square().mean()


def centred_functionally(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    total = functional.all_reduce(out.detach().sum(dim=0), "sum", dist.group.WORLD)
    return (out - total / (len(x) * dist.get_world_size())).square().mean()


def gathering_functionally(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    return (out - gather(out.detach(), 0, dist.group.WORLD).mean(dim=0)).square().mean()


def gathering_scores(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A number per sample, as labels are."""
    out = model(x)
    scores = out.detach().mean(dim=1)
    every = [torch.zeros_like(scores) for _ in range(dist.get_world_size())]
    dist.all_gather(every, scores)
    return (out - torch.cat(every).mean()).square().mean()


class From:
    """A loss that is plain before a step, from 0 on."""

    def __init__(self, first: int, loss: Callable[..., torch.Tensor]) -> None:
        self.first, self.loss, self.num_steps = first, loss, 0

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return (self.loss if self.num_steps > self.first else plain)(model, x)


def by_ours(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """By our helpers, and what else is right: a number per rank, and the ranks' prototypes."""
    out = model(x)
    rows, _ = model.all_gather(out)
    model.weighted_mean(out.mean())
    dist.all_gather([torch.zeros(1) for _ in range(2)], out.detach().mean().reshape(1))
    dist.all_gather([torch.zeros(7, 3) for _ in range(2)], torch.zeros(7, 3))
    dist.all_gather([torch.zeros(2) for _ in range(2)], out.detach().sum().repeat(2))
    return (out - model.global_mean(out)).square().mean() + 0.01 * rows.mean()


def by_class(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gathers a number per class, of which there are as many as samples at first."""
    out = model(x)
    dist.all_gather([torch.zeros(9) for _ in range(2)], torch.zeros(9))
    return out.square().mean()


def padded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gathers unequal rows by hand, as it should be done: the largest number of rows first."""
    out = model(x)
    most = torch.tensor(len(out))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    rows = torch.zeros(int(most), 3)
    rows[: len(out)] = out.detach()
    dist.all_gather([torch.zeros_like(rows) for _ in range(2)], rows)
    return out.square().mean()


def train(
    rank: int,
    net: Callable[[], nn.Module] = mlp,
    loss: Callable[..., torch.Tensor] = plain,
    *,
    reduces_after: bool = False,
    second: str = "",
    first: tuple[int, int] = (6, 6),
    policy: Any = None,
    pinned: tuple[int, int] | None = None,
    num_batches: int = 30,
) -> tuple[list[str], str, bool]:
    """What was warned, what was raised, and whether a profile function is left behind."""
    torch.manual_seed(0)
    module = net()
    optimizer = sgd(module)
    feed = Loaded(num_batches=num_batches, keywords=() if pinned is None else (("local_batches", pinned),))
    model = HeteroDataParallel(module, optimizer, policy=policy or ScriptedPlanner([first, (9, 3), (4, 8)]))
    other = nn.Linear(6, 1)
    beside = DistributedDataParallel(other) if second in ("trains", "trains late", "piles up", "frozen") else None
    if second == "follows":
        beside = HeteroDataParallel(other, sgd(other), follows=model)
    raised, num_steps = "", 0
    with collecting_warnings() as warned:
        try:
            for x, _ in feed(_Script(), model, rank, 2, regression(torch.float32, 61)):
                num_steps += 1
                if beside is not None and second != "piles up" and num_steps > (25 if second == "trains late" else 0):
                    with torch.set_grad_enabled(second != "frozen"):
                        out = beside(x).mean()
                    if second != "frozen":
                        out.backward()
                optimizer.zero_grad()
                value = loss(model, x)
                value.backward()
                if reduces_after:
                    dist.all_reduce(value.detach())
                optimizer.step()
                if second == "piles up":
                    with beside.no_sync() if num_steps % 2 else nullcontext():
                        beside(x).mean().backward()
                    if num_steps % 2 == 0:
                        beside.zero_grad()
        except ValueError as error:
            raised = str(error)
    left = sys.getprofile() is not None
    del beside
    return [warning.text for warning in warned if "takes no" not in warning.text], raised, left


CASES: dict[str, Callable[[int], Any]] = {
    "nothing": train,
    "gather": lambda rank: train(rank, Gathering),
    "gather at once": lambda rank: train(rank, GatheringAtOnce),
    "gather, functional": lambda rank: train(rank, loss=gathering_functionally),
    "gather, a number per sample": lambda rank: train(rank, loss=gathering_scores),
    "gather, begun late": lambda rank: train(rank, loss=From(6, gathering)),
    "gather, a number per class": lambda rank: train(rank, loss=by_class, first=(9, 3)),
    "gather, unequal from the start": lambda rank: train(rank, Gathering, first=(9, 3)),
    "gather, even": lambda rank: train(rank, loss=centred, policy="even"),
    "gather, even, pinned": lambda rank: train(rank, Gathering, policy="even", pinned=(9, 3)),
    "sum": lambda rank: train(rank, loss=centred),
    "sum, functional": lambda rank: train(rank, loss=centred_functionally),
    "sum, begun late": lambda rank: train(rank, loss=From(5, centred)),
    "sum, even, pinned": lambda rank: train(rank, loss=centred, policy="even", pinned=(9, 3)),
    "ours": lambda rank: train(rank, loss=by_ours),
    "padded by hand": lambda rank: train(rank, loss=padded),
    "sum after backward": lambda rank: train(rank, reduces_after=True),
    "second, trains": lambda rank: train(rank, second="trains"),
    "second, trains late": lambda rank: train(rank, second="trains late", num_batches=40),
    "second, piles up": lambda rank: train(rank, second="piles up"),
    "second, trains, even, pinned": lambda rank: train(rank, second="trains", policy="even", pinned=(9, 3)),
    "second, frozen": lambda rank: train(rank, second="frozen"),
    "second, follows": lambda rank: train(rank, second="follows"),
}


def run(rank: int, world_size: int) -> dict[str, Any]:
    return run_cases(rank, world_size, CASES)
