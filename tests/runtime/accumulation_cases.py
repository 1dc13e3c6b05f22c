"""What the ranks of `test_accumulation` run: loops in which several batches pile up for one step of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from framework_loop_cases import groups
from told import collecting_warnings
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from training_cases import Numbered, ScriptedPlanner, TinyNet, digits, digits_net, fail_on_warnings

from cannikin.core.planner import Noise
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel, attach
from cannikin.runtime.schedulers import by_progress


@dataclass(frozen=True, kw_only=True)
class Piling:
    """A loop that takes a step for every so many batches, in each pass one more where that number `grows`.

    `at_the_end` says what becomes of a last group that is not full: a "step", or its gradients are "carried" into the
    next pass, or "dropped". With `parts` each batch is cut by `micro_batches`. Where they are `fetched_together`, all
    batches of a group are fetched before the first is trained on, as Transformers does.
    """

    num_batches: int = 3
    grows: bool = False
    no_sync: bool = True
    at_the_end: str = "step"
    parts: int | None = None
    fetched_together: bool = False

    def __call__(self, model: Any, optimizer: Any, loader: Any, epoch: int) -> Iterator[None]:
        """Yields after every step of the optimizer."""
        # Of a group that is carried over, only the gradients are: a script counts the batches of a pass.
        piled, last, full = 0, len(loader) - 1, self.num_batches + epoch * self.grows
        if self.at_the_end != "carried":
            optimizer.zero_grad()
        for number, (features, targets, _) in enumerate(groups(loader, full if self.fetched_together else 1)):
            piled += 1
            steps = piled >= full or (number == last and self.at_the_end == "step")
            with nullcontext() if steps or not self.no_sync else model.no_sync():
                batch = (features, targets)
                for part, target in model.micro_batches(batch, self.parts) if self.parts else [batch]:
                    nn.functional.mse_loss(model(part), target).backward()
            if steps:
                optimizer.step()
                optimizer.zero_grad()
                piled = 0
                yield


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Passes that `epochs(3)` made, steps of the optimizer, and how often schedules by either were stepped."""

    num_passes: int
    num_steps: int
    by_epoch: int
    by_step: int
    progress: float


def passes(rank: int, loop: Piling, num_samples: int = 44, drop_last: bool = False) -> Passed:
    """Three times eight batches of 6, the last one short."""
    fail_on_warnings()
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer)
    loader = HeteroDataLoader(Numbered(num_samples), model=model, batch_size=6, drop_last=drop_last)
    epochs = by_progress(StepLR(optimizer, 1, gamma=1.0), model, unit="epoch")
    steps = by_progress(StepLR(optimizer, 1, gamma=1.0), model)
    num_passes = num_steps = 0
    for epoch in model.epochs(3):
        for _ in loop(model, optimizer, loader, epoch):
            num_steps += 1
            steps.step()
        epochs.step()
        num_passes += 1
        assert num_passes < 20
    return Passed(
        num_passes=num_passes,
        num_steps=num_steps,
        by_epoch=epochs.scheduler.last_epoch,
        by_step=steps.scheduler.last_epoch,
        progress=model.progress,
    )


def passes_with_skipped_steps(rank: int) -> tuple[int, float]:
    """Passes of `epochs(2)`, and progress, where a GradScaler skips two of ten steps."""
    fail_on_warnings()
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = HeteroDataParallel(net, optimizer, grad_scaler=scaler)
    loader = HeteroDataLoader(Numbered(30), model=model, batch_size=6)
    num_passes = 0
    for _ in model.epochs(2):
        for number, (features, targets, _) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features), targets)
            scaler.scale(loss * torch.inf if number == 3 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        num_passes += 1
    return num_passes, model.progress


def passes_with_second_forwards(rank: int) -> tuple[int, float]:
    """Passes of `epochs(2)`, and progress, where each batch is trained on twice before its step, as SAM does."""
    fail_on_warnings()
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer)
    loader = HeteroDataLoader(Numbered(30), model=model, batch_size=6)
    num_passes = 0
    for _ in model.epochs(2):
        for features, targets, _ in loader:
            nn.functional.mse_loss(model(features), targets).backward()
            optimizer.zero_grad()
            model.use_batch()
            nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        num_passes += 1
    return num_passes, model.progress


class Growing(ScriptedPlanner):
    """Doubles the total batch and knows the noise: phi = 30."""

    noise = Noise(signal_sqnorm=1.0, noise_trace=30.0)


def grown(rank: int, loop: Piling) -> list[tuple[int, float, float]]:
    """Total batch, rate inside of the step at a rate of 1, and progress that was made, in each step over 3 batches."""
    fail_on_warnings()
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = HeteroDataParallel(net, optimizer, policy=Growing([(3, 3), (6, 6), (6, 6)]))
    loader = HeteroDataLoader(Numbered(360), model=model, batch_size=6, max_batch_size=12)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    found, before = [], 0.0
    for _ in loop(model, optimizer, loader, 0):
        found.append((model.plan.total_batch, rates[-1], model.progress - before))
        before = model.progress
    return found


def schedule_to_the_goal(rank: int, kind: str) -> tuple[list[float], int, int]:
    """Rates after each step of `epochs(4)` while the total grows, the steps a schedule took and those it was made for.

    The last pass makes more progress than is missing.
    """
    fail_on_warnings()
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer, policy=Growing([(3, 3), (6, 6), (9, 9), (7, 7)]))
    loader = HeteroDataLoader(Numbered(100), model=model, batch_size=6, max_batch_size=18)
    length = 4 * len(loader)
    scheduler: Any = CosineAnnealingLR(optimizer, T_max=length)
    if kind == "one cycle":
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=length)
    scheduler = by_progress(scheduler, model)
    rates = []
    for _ in model.epochs(4):
        for features, targets, _ in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return rates, scheduler.scheduler.last_epoch, length


def schedule_beyond_its_end(rank: int) -> tuple[list[float], int, float, list[str]]:
    """Rates of OneCycleLR, warnings and progress when its end was reached, and all warnings where drawing goes on."""
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer, policy=Growing([(3, 3), (9, 9)]), lr_rule="none")
    scheduler = by_progress(OneCycleLR(optimizer, max_lr=0.1, total_steps=59), model)
    rates, at_end, num_told = [], 0.0, 0
    with collecting_warnings() as warned:
        for local, _ in model.batches(batch_size=6, max_batch_size=18):
            optimizer.zero_grad()
            model(torch.randn(local, 3)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if not at_end and model.progress >= 59:
                at_end, num_told = model.progress, len(warned)
            if model.progress >= 70:
                break
    return rates, num_told, at_end, [warning.text for warning in warned]


def weighed_totals(rank: int, no_sync: bool) -> tuple[set[str], int]:
    """What plans say under accumulation where the total may grow, and the steps that the noise scale rests on."""
    fail_on_warnings()
    torch.manual_seed(0)
    net = digits_net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer)
    loader = HeteroDataLoader(digits(), model=model, batch_size=12, max_batch_size=48)
    reasons = set()
    for number, (inputs, targets) in enumerate(chain(*[loader] * 5)):  # the total may soon leave a pass few steps
        with nullcontext() if number % 2 or not no_sync else model.no_sync():
            (nn.functional.cross_entropy(model(inputs), targets) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        reasons.add(model.plan.reason)
    noise = model.engine.coordinator.schedule.decision.noise
    assert noise is not None
    return reasons, noise.num_steps


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """Rates of both optimizers inside of each step, their own rates afterwards, progress and steps of the noise."""

    inside: list[tuple[float, float]]
    outside: tuple[float, float]
    progress: float
    noise_steps: int


def two_optimizers(rank: int, policy: Any, lr_rule: Any, num_samples: int = 60) -> Stepped:
    """One for the first layer and Adam for the second."""
    fail_on_warnings()
    net = TinyNet()
    first = torch.optim.SGD(net.first.parameters(), lr=1e-3)
    second = torch.optim.AdamW(net.second.parameters(), lr=1e-3)
    model = HeteroDataParallel(net, [first, second], policy=policy, lr_rule=lr_rule)
    largest = None if policy == "cannikin" else 12
    loader = HeteroDataLoader(Numbered(num_samples), model=model, batch_size=6, max_batch_size=largest)
    rates: list[float] = []
    for optimizer in (first, second):
        optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    for features, targets, _ in loader:
        first.zero_grad()
        second.zero_grad()
        nn.functional.mse_loss(model(features), targets).backward()
        first.step()
        second.step()
    noise = model.engine.coordinator.schedule.decision.noise
    return Stepped(
        inside=list(zip(rates[::2], rates[1::2], strict=True)),
        outside=(first.param_groups[0]["lr"], second.param_groups[0]["lr"]),
        progress=model.progress,
        noise_steps=0 if noise is None else noise.num_steps,
    )


def in_turn(rank: int, order: Sequence[int]) -> tuple[float, int]:
    """Progress and passes of `epochs(3)` where these of two Adams step on each batch, after a pass each."""
    fail_on_warnings()
    net = TinyNet()
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (net.first, net.second)]
    model = HeteroDataParallel(net, optimizers, policy=ScriptedPlanner([(4, 2)]))
    loader = HeteroDataLoader(Numbered(60), model=model, batch_size=6)
    num_passes = 0
    for _ in model.epochs(3):
        num_passes += 1
        for features, targets, _ in loader:
            for number, which in enumerate(order):
                if number:
                    model.use_batch()
                net.zero_grad()
                nn.functional.mse_loss(model(features), targets).backward()
                optimizers[which].step()
    return model.progress, num_passes


def penalty(rank: int, weighting: str, no_sync: bool) -> None:
    """A penalty on slopes by a parameter, through outputs whose gradients are weighted on their way in."""
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer, weighting=weighting)
    loader = HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=[4, 2])
    for features, _, _ in loader:
        with model.no_sync() if no_sync else nullcontext():
            (slope,) = torch.autograd.grad(model(features).sum(), net.first.weight, create_graph=True)
            slope.square().mean().backward()


def joint(rank: int) -> None:
    """One backward for two batches, of which the second one's forward alone is under no_sync."""
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer)
    batches = iter(HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=[4, 2]))
    (first, _, _), (second, _, _) = next(batches), next(batches)
    loss = model(first).square().mean()
    with model.no_sync():
        loss = loss + model(second).square().mean()
    loss.backward()


def unsynced_backward(rank: int) -> None:
    """Of a sharded module, which reduces where backward is outside of no_sync, wherever forward was."""
    net = fully_shard(TinyNet())
    engine = attach(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for features, _, _ in HeteroDataLoader(Numbered(24), model=engine, batch_size=6, local_batches=[4, 2]):
        loss = net(features).square().mean()
        net.set_requires_gradient_sync(False)
        loss.backward()


class Acting(nn.Module):
    """Returns a distribution beside a tensor, as an actor and its critic do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.value = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, features: torch.Tensor) -> tuple[Any, torch.Tensor]:
        means = torch.distributions.Normal(self.mean(features), torch.ones(1))
        return torch.distributions.Independent(means, 1), self.value(features)


def acting(rank: int, weighting: str = "auto", no_sync: bool = False, parts: bool = False) -> int:
    """Steps whose gradients were taken."""
    net = Acting()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer, weighting=weighting)
    num_steps = 0
    for features, targets, _ in HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=[4, 2]):
        batch = (features, targets)
        with model.no_sync() if no_sync else nullcontext():
            for part, target in model.micro_batches(batch, 2) if parts else [batch]:
                chosen, value = model(part)
                (value.square().mean() - chosen.log_prob(target).mean()).backward()
        num_steps += 1
    return num_steps


def rules_that_do_not_match(rank: int, lr_rule: Sequence[str]) -> None:
    net = TinyNet()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (net.first, net.second)]
    HeteroDataParallel(net, optimizers, lr_rule=lr_rule)
