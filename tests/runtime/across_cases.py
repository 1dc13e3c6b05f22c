"""Losses that see the samples of all ranks: contrastive ones and centres, by unequal ranks and by one process."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parity_cases import Case, Loaded, Run, Told, _Script, fresh, regression
from torch import nn

from cannikin.runtime.parallel import HeteroDataParallel

cross_entropy = nn.functional.cross_entropy


class Towers(nn.Module):
    """Two encoders, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.normalize(self.left(x)), nn.functional.normalize(self.right(y))


def all_rows(model: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a script writes as model.all_gather(rows), and one process as the rows that it has."""
    return model.all_gather(rows) if isinstance(model, HeteroDataParallel) else (rows, torch.arange(len(rows)))


def clip_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Each rank's own rows against all ranks' columns, both ways."""
    left, right = model(*batch)
    every_left, numbers = all_rows(model, left)
    every_right, _ = all_rows(model, right)
    return (cross_entropy(5 * left @ every_right.T, numbers) + cross_entropy(5 * right @ every_left.T, numbers)) / 2


def clip_sum(model: nn.Module, batch: Any) -> torch.Tensor:
    """The same as a sum, of which DDP takes the mean over ranks."""
    loss = 0.1 * len(batch[0]) * clip_loss(model, batch)
    return loss if isinstance(model, HeteroDataParallel) else loss / dist.get_world_size()


class GatheringTowers(Towers):
    """Gathers in its forward, by the engine that it is given, as MoCo's builder does."""

    engine: Any = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = super().forward(x, y)
        every, numbers = (right, torch.arange(len(x))) if self.engine is None else self.engine.all_gather(right)
        return cross_entropy(5 * left @ every.T, numbers)


def loss_inside(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(model, HeteroDataParallel):
        model.module.engine = model.engine
    return model(*batch)


class Projected(nn.Module):
    """One encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def simclr_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Two views in two forwards; negatives are both views of all ranks' samples."""
    x, _ = batch
    one, two = (nn.functional.normalize(model(view)) for view in (x, 1.1 * x + 0.1))
    (every_one, numbers), (every_two, _) = all_rows(model, one), all_rows(model, two)
    own = 1e9 * nn.functional.one_hot(numbers, len(every_one)).to(x.dtype)
    losses = []
    for anchor, same, other in ((one, every_one, every_two), (two, every_two, every_one)):
        logits = torch.cat([anchor @ other.T, anchor @ same.T - own], dim=1) / 0.5
        losses.append(cross_entropy(logits, numbers))
    return sum(losses) / 2


def centred_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Distances from the centre of all samples, which the gradient flows through."""
    x, y = batch
    out = model(x)
    centre = model.global_mean(out) if isinstance(model, HeteroDataParallel) else out.mean(dim=0)
    return ((out - centre) ** 2).mean() + ((out[:, :3] - y) ** 2 * (1 + centre.square().sum())).mean()


def dino_loop(run: Run) -> None:
    """A centre of the teacher's outputs, kept by a running average without gradient, as DINO's loss has it."""
    centre = torch.zeros(4, dtype=torch.float64)
    teacher = fresh(Projected, torch.float64)
    for x, _ in run.batches:
        run.optimizer.zero_grad()
        student = run.model(x)
        with torch.no_grad():
            taught = torch.softmax((teacher(x) - centre) / 0.4, dim=-1)
        loss = -(taught * torch.log_softmax(student, dim=-1)).sum(dim=-1).mean()
        with torch.no_grad():
            outputs = teacher(x)
            mean = run.model.global_mean(outputs) if run.ranked else outputs.mean(dim=0)
            centre = 0.9 * centre + 0.1 * mean
        run.notes.append(centre)
        loss.backward()
        run.optimizer.step()


def towers_apart(model: nn.Module, batch: Any) -> torch.Tensor:
    """Another, frozen tower's rows are gathered before the model's forward."""
    x, y = batch
    texts, numbers = all_rows(model, nn.functional.normalize(torch.cat([y, y[:, :1]], dim=1)))
    return cross_entropy(5 * nn.functional.normalize(model(x)) @ texts.T, numbers)


def taught_loop(run: Run) -> None:
    """The teacher's centre comes before the student's forward."""
    centre = torch.zeros(4, dtype=torch.float64)
    teacher = fresh(Projected, torch.float64)
    for x, _ in run.batches:
        run.optimizer.zero_grad()
        with torch.no_grad():
            outputs = teacher(x)
            centre = 0.5 * centre + 0.5 * (run.model.global_mean(outputs) if run.ranked else outputs.mean(dim=0))
        run.notes.append(centre)
        (run.model(x) - outputs + centre).square().mean().backward()
        run.optimizer.step()


def taught_ahead(run: Run) -> None:
    run.batches = itertools.islice(run.batches, Loaded.num_batches - 1)  # the feed itself ends by break
    taught_loop(run)


CASES = {
    "clip": Case(net=Towers, loss=clip_loss),
    "clip, loss weighting": Case(net=Towers, loss=clip_loss, keywords={"weighting": "loss"}),
    "clip, a sum": Case(net=Towers, loss=clip_sum, keywords={"weighting": "none"}),
    "clip, loader": Case(net=Towers, loss=clip_loss, feed=Loaded(totals=(12, 16, 14))),
    "clip, a rank with zero samples": Case(net=Towers, loss=clip_loss, feed=Told(idle=True)),
    "clip, gathered in forward": Case(net=GatheringTowers, loss=loss_inside, feed=Loaded(totals=(12, 16, 14))),
    "simclr": Case(net=Projected, loss=simclr_loss, feed=Loaded(totals=(12, 16, 14))),
    "a centre with gradient": Case(net=Projected, loss=centred_loss),
    "a centre with gradient, loader": Case(net=Projected, loss=centred_loss, feed=Loaded(totals=(12, 16, 14))),
    "a centre with gradient, a rank with zero samples": Case(net=Projected, loss=centred_loss, feed=Told(idle=True)),
    "dino": Case(net=Projected, loop=dino_loop, feed=Loaded(totals=(12, 16, 14))),
    "gathered before forward": Case(net=Projected, loss=towers_apart, feed=Loaded()),
    "a teacher's centre before forward": Case(net=Projected, loop=taught_loop, feed=Loaded()),
    "a teacher's centre before forward, looking ahead": Case(net=Projected, loop=taught_ahead, feed=Loaded(ahead=True)),
}


def errors(rank: int, world_size: int) -> dict[str, Any]:
    from told import run_cases

    return run_cases(
        rank,
        world_size,
        {name: lambda rank, case=case: case.error(torch.float64, rank, 3) for name, case in CASES.items()}
        | {"evaluation": evaluation, "evaluation after steps": partial(evaluation, after_steps=3), "parts": parts},
    )


def evaluation(rank: int, *, after_steps: int = 0) -> tuple[list[float], list[int], list[int], float]:
    """In eval mode: the mean of 1, 2, 2, 3, 3, 3, the rows of all ranks and of this one, and the mean of 1, 2, 3."""
    net = nn.Linear(6, 3)
    model = HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for x, y in Told(num_batches=after_steps, idle=True)(_Script(), model, rank, 3, regression(torch.float32)):
        ((model(x) - y) ** 2).mean().backward()
    model.eval()
    rows = torch.full((rank + 1, 1), rank + 1.0)
    every, numbers = model.all_gather(rows)
    mean = float(model.weighted_mean(rank + 1.0))
    return model.global_mean(rows).tolist(), every.flatten().tolist(), numbers.tolist(), mean


def parts(rank: int) -> str:
    """What is said where ranks could not meet."""
    net = nn.Linear(6, 2)
    model = HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in Told(num_batches=1)(_Script(), model, rank, 3, regression(torch.float32)):
        for x, _ in model.micro_batches(batch, num_parts=2):
            try:
                model.all_gather(model(x))
            except ValueError as error:
                return str(error)
    return ""
