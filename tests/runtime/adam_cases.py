"""What the ranks of `test_adam` run: norms and noise of the gradient as Adam sees it, divided by the root of v."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from training_cases import NoiseFound, Script, ScriptedController, ScriptedPlanner, digits, digits_net, fail_on_warnings

from cannikin.core.planner import Decision
from cannikin.core.values import Job, StepWindow
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel

BETA = 0.95
NUM_STEPS = 30


class KeepingPlanner(ScriptedPlanner):
    """Keeps the norms of every window it is shown."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.local_sqnorms: list[list[float]] = []
        self.global_sqnorms: list[float] = []

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        if window is not None:
            self.local_sqnorms += window.local_sqnorm.tolist()
            self.global_sqnorms += window.global_sqnorm.tolist()
        return super().decide(window, job, step)


class ConvNet(nn.Module):
    """A weight whose elements lie in memory in another order than their indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(36, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.conv(images)).flatten(1))


@dataclass(frozen=True, kw_only=True)
class NormCase:
    """A training with one of Adam's kin; its state may be loaded from elsewhere, with elements in index order."""

    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    weighting: str = "hook"
    reload_at: int | None = None


@dataclass(frozen=True, kw_only=True)
class NormsFound:
    """|g_i|^2 of this rank and |g|^2 by step, computed beside the training; and on rank 0 those of the records."""

    local: list[float]
    total: list[float]
    recorded_local: list[list[float]]
    recorded_total: list[float]
    least: float  # of v, in means of v


def measure_norms(rank: int, case: NormCase) -> NormsFound:
    fail_on_warnings()
    torch.manual_seed(0)
    net = ConvNet().double().to(memory_format=torch.channels_last)
    assert not net.conv.weight.is_contiguous()
    data = TensorDataset(torch.randn(600, 3, 5, 5).double(), torch.randn(600, 2).double())
    optimizer = case.kind(net.parameters(), lr=1e-2, betas=(0.9, BETA))
    planner = KeepingPlanner([(8, 4), (3, 9), (6, 6)])
    model = HeteroDataParallel(net, optimizer, policy=planner, weighting=case.weighting)
    loader = HeteroDataLoader(data, model=model, batch_size=12)
    local, total, least = [], [], math.inf
    for number, (images, targets) in enumerate(loader):
        if number == case.reload_at:
            optimizer.load_state_dict(in_index_order(optimizer.state_dict()))
        own = torch.autograd.grad(nn.functional.mse_loss(net(images), targets), list(net.parameters()))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(images), targets).backward()
        whole = [p.grad for p in net.parameters()]
        local.append(preconditioned_sqnorm(optimizer, net, own))
        total.append(preconditioned_sqnorm(optimizer, net, whole))
        if number >= 30:
            variance = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in net.parameters()])
            least = min(least, float(variance.min() / variance.mean()))
        optimizer.step()
    return NormsFound(
        local=local,
        total=total,
        recorded_local=planner.local_sqnorms,
        recorded_total=planner.global_sqnorms,
        least=least,
    )


def preconditioned_sqnorm(optimizer: Any, net: nn.Module, gradients: Any) -> float:
    """sum(g^2/v), with v from before the step, corrected for its start at 0; NaN before there is one."""
    sqnorm = 0.0
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        state = optimizer.state.get(parameter)
        if not state:
            return math.nan
        variance = state["exp_avg_sq"] / (1 - BETA ** float(state["step"]))
        sqnorm += float((gradient**2 / variance).sum())
    return sqnorm


def in_index_order(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as one gets it from a model that was never in channels_last."""
    copied = copy.deepcopy(state)
    for entry in copied["state"].values():
        entry.update({name: entry[name].contiguous() for name in ("exp_avg", "exp_avg_sq")})
    return copied


@dataclass(frozen=True, kw_only=True)
class AdamNoise:
    """The noise scale that was found with the weights held still, and the one of every sample's own gradient."""

    found: NoiseFound
    true: float


def measure_adam_noise(rank: int, seed: int, script: Script, num_epochs: int) -> AdamNoise | None:
    fail_on_warnings()
    net = digits_net(seed)
    total = sum(script[0])
    optimizer = settled_adam(net, total, seed)
    policy = ScriptedController(Job(num_ranks=len(script[0]), batch_size=total), script)
    model = HeteroDataParallel(net, optimizer, policy=policy)
    loader = HeteroDataLoader(digits(), model=model, batch_size=total, seed=seed)
    splits = set()
    for _ in range(num_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            splits.add(model.plan.local_batches)
    noise = model.engine.coordinator.schedule.decision.noise
    if rank != 0:
        return None
    assert noise is not None
    found = NoiseFound(noise_scale=noise.noise_scale, limits=noise.limits, splits=splits, num_steps=noise.num_steps)
    return AdamNoise(found=found, true=true_adam_noise(net, optimizer))


def settled_adam(net: nn.Module, total: int, seed: int) -> torch.optim.Optimizer:
    """AdamW with a rate of 0 whose v is the mean of many steps: while v is young, so is the noise scale over it."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.0)
    inputs, targets = digits().tensors
    order = torch.Generator().manual_seed(seed)
    for _ in range(250):
        chosen = torch.randperm(len(inputs), generator=order)[:total]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return optimizer


def true_adam_noise(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """S/G of every sample's own gradient over the root of the optimizer's v, in float64.

    S = sum_k |h_k - mean h|^2 / (N - 1)        G = |mean h|^2 - S / N        h = g / sqrt(v)
    """
    inputs, targets = digits().tensors
    rows = []
    for sample, target in zip(inputs, targets, strict=True):
        loss = nn.functional.cross_entropy(net(sample[None]), target[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
    states = [optimizer.state[p] for p in net.parameters()]
    variance = torch.cat([(s["exp_avg_sq"] / (1 - 0.999 ** float(s["step"]))).flatten() for s in states]).double()
    table = torch.stack(rows).double() / variance.clamp(min=1e-4 * float(variance.mean())).sqrt()
    mean = table.mean(dim=0)
    noise = float((table - mean).square().sum() / (len(table) - 1))
    return noise / (float(mean.square().sum()) - noise / len(table))
