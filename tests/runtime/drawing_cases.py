"""What the ranks of `test_drawing` run: loops that make their own samples, as many as they are told."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_cases import ScriptedPlanner, TinyNet, make_model

from cannikin.runtime.parallel import HeteroDataParallel, attach

SCRIPTS = {2: [(4, 2), (2, 4), (5, 4), (1, 5)], 3: [(2, 2, 2), (4, 1, 1), (1, 3, 5)]}


def samples(start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples by their numbers in the run: the same whoever makes them."""
    numbers = torch.arange(start, start + count, dtype=torch.float64)
    return torch.stack([torch.sin(numbers * k) for k in (1.0, 2.3, 3.7)], 1), torch.cos(numbers * 1.7)[:, None]


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    net = TinyNet().double()
    return net, torch.optim.SGD(net.parameters(), lr=0.05)


def like_nanogpt(rank: int) -> tuple[float, int, int]:
    """The shape of its train.py: a batch ahead, two micro-steps, and an evaluation on rank 0 that draws too.

    Returns the worst error of the gradient against one process, the splits seen, and the batches still waiting.
    """
    net, optimizer = fresh()
    model = HeteroDataParallel(net, optimizer, policy=ScriptedPlanner(SCRIPTS[2]), lr_rule="none")
    batches = model.batches(batch_size=6, max_batch_size=9)
    alone, _ = fresh()
    totals: list[int] = []
    splits: set[tuple[int, int]] = set()

    def get_batch() -> Any:
        local, total = next(batches)
        if model.training:
            totals.append(total)
            splits.add((local, total))
        return samples(batches.start, local)

    features, targets = get_batch()
    worst, position, num_used = 0.0, 0, 0
    for iteration in range(30):
        if iteration % 7 == 0 and rank == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(get_batch()[0])
            model.train()
        optimizer.zero_grad()
        alone.zero_grad()
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            loss = nn.functional.mse_loss(model(features), targets) / 2
            features, targets = get_batch()
            loss.backward()
            whole = samples(position, totals[num_used])
            (nn.functional.mse_loss(alone(whole[0]), whole[1]) / 2).backward()
            position, num_used = position + totals[num_used], num_used + 1
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            worst = max(worst, float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
        optimizer.step()
        alone.load_state_dict(net.state_dict())
    batches.close()
    return worst, len(splits), len(model.engine.loop.queue)


Ranges = list[tuple[int, int]]


def draw(rank: int, world_size: int, num_steps: int, state: dict[str, Any] | None) -> tuple[Ranges, dict[str, Any]]:
    """The numbers of this rank's samples in each step, as (first, one past the last), and the state at the end."""
    net, optimizer = fresh()
    engine = attach(ddp := DistributedDataParallel(net), optimizer, policy=ScriptedPlanner(SCRIPTS[world_size]))
    batches = engine.batches(batch_size=6, max_batch_size=9)
    if state is not None:
        batches.load_state_dict(state)
    seen: Ranges = []
    for local, _ in batches:
        features, targets = samples(batches.start, local)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(features), targets).backward()
        optimizer.step()
        seen.append((batches.start, batches.start + local))
        if len(seen) == num_steps:
            break
    return seen, batches.state_dict()


def slow_rank(rank: int) -> tuple[int, ...]:
    """The plan after 60 steps in which rank 1 takes six times as long for each sample."""
    model, optimizer = make_model()
    for number, (local, _) in enumerate(model.batches(batch_size=24)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(local, 3)), torch.randn(local, 1))
        time.sleep(local * (3e-4, 18e-4)[rank])
        loss.backward()
        optimizer.step()
        if number == 60:
            break
    return model.plan.local_batches


def bounded(rank: int) -> list[tuple[int, int]]:
    model, _ = make_model()
    batches = model.batches(6, local_batches=[5, 1])
    return [next(batches), next(iter(batches))]


def with_a_wrong_keyword(rank: int) -> None:
    make_model()[0].batches(batch_size=6, shuffle=True)


def with_a_loader_already(rank: int) -> None:
    model, _ = make_model()
    model.batches(batch_size=6)
    model.batches(batch_size=6)


def one_more_on_rank_0(rank: int, world_size: int) -> None:
    """Rank 0 draws once more than rank 1 and never trains on it."""
    model, optimizer = make_model(policy=ScriptedPlanner(SCRIPTS[2]))
    batches = model.batches(batch_size=6, max_batch_size=9)
    if rank == 0:
        next(batches)
    for local, _ in batches:
        nn.functional.mse_loss(model(torch.zeros(local, 3)), torch.zeros(local, 1)).backward()
        optimizer.step()


def state_loaded_too_late(rank: int) -> None:
    batches = make_model()[0].batches(batch_size=6)
    next(batches)
    batches.load_state_dict(batches.state_dict())
