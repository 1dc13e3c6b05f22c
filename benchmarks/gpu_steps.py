"""Models on made-up data that ranks on one GPU train, and their steps, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.gpu_models import ResNet18, SmallGpt
from benchmarks.sample_numbers import Numbers
from cannikin import HeteroDataLoader, HeteroDataParallel
from cannikin.runlog import Observer


class Images:
    """Batches of any size out of one pool on the device, and a step on them."""

    def __init__(self, largest: int) -> None:
        self.images = torch.randn(largest, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 10, (largest,), device="cuda")

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return ResNet18().cuda().to(memory_format=torch.channels_last)

    def loss(self, model: nn.Module, size: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(self.images[:size]), self.labels[:size])


class Tokens:
    """The same for a GPT-2-small-sized transformer on sequences of 256 tokens."""

    def __init__(self, largest: int) -> None:
        self.tokens = torch.randint(0, 50257, (largest, 257), device="cuda")

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return SmallGpt().cuda()

    def loss(self, model: nn.Module, size: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(self.tokens[:size, :-1])
            return F.cross_entropy(logits.flatten(0, 1), self.tokens[:size, 1:].flatten())


def step_seconds(job: Any, model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> float:
    """Train one step of this many samples, and return its seconds."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.zero_grad()
    job.loss(model, size).backward()
    optimizer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)


def train(
    job: Any,
    total: int,
    steps: int,
    before: Callable[[int], object] = lambda step: None,
    observers: Sequence[Observer] = (),
) -> tuple[Any, Any, list[float], list[Any]]:
    """Train from an even start; return model, optimizer, and each step's seconds and plan. `before` gets each step."""
    net = job.network()
    optimizer = sgd(net)
    model = HeteroDataParallel(net, optimizer, observers=observers)
    loader = HeteroDataLoader(Numbers(total * steps), model=model, batch_size=total, shuffle=False, collate_fn=len)
    seconds, plans = [], []
    for step, size in enumerate(loader):
        before(step)
        seconds.append(step_seconds(job, model, optimizer, size))
        plans.append(model.plan)
    return model, optimizer, seconds, plans
