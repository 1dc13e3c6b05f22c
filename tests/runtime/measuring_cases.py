"""What the ranks of `test_measuring` run: trainings whose times, events and steps are known beforehand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from told import Warned, collecting_warnings
from torch import nn
from training_cases import (
    Numbered,
    ScriptedPlanner,
    Step,
    TinyNet,
    digits,
    fail_on_warnings,
    make_model,
    one_epoch,
    take_step,
)

from cannikin.core.planner import Decision
from cannikin.core.values import Job, StepWindow
from cannikin.runlog import Record
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel

FORWARD_S = (1e-3, 4e-3)  # of each rank, for a sample, in forward and again in backward
LOAD_S = (1e-3, 5e-3)  # of each rank, for a sample, in the dataset
EVALUATION_S = 0.05


class Keeping:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, event: Record) -> None:
        self.records.append(event)


class SlowData(Numbered):
    """Takes a time for each sample."""

    def __init__(self, length: int, sample_s: float) -> None:
        super().__init__(length)
        self.sample_s = sample_s

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.sample_s)
        return super().__getitem__(index)


# Two ranks


def slow_data(rank: int, sample_s: Sequence[float], policy: str) -> tuple[list[Step], list[Record]]:
    """A loader without workers, whose dataset is slower on one rank; an evaluation now and then."""
    observer = Keeping()
    model, optimizer = make_model(policy=policy, observers=[observer])
    loader = HeteroDataLoader(SlowData(360, sample_s[rank]), model=model, batch_size=12)

    def evaluate(step: int) -> None:
        if step % 5 == 3:
            time.sleep(EVALUATION_S)

    steps = one_epoch(model, optimizer, loader, evaluate if policy == "even" else None)
    return steps, observer.records


def loop_of_micro_batches(rank: int, num_parts: Sequence[int | None]) -> tuple[list[Step], list[Record]]:
    observer = Keeping()
    model, optimizer = make_model(FORWARD_S[rank], observers=[observer])
    loader = HeteroDataLoader(Numbered(360), model=model, batch_size=12)
    steps = []
    for batch in loader:
        optimizer.zero_grad()
        for features, targets, _ in model.micro_batches(batch, num_parts[rank]):
            nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
        steps.append(Step(samples=batch[2].tolist(), plan=model.plan.local_batches))
    return steps, observer.records


def bad_gradients(rank: int, policy: str, bad_steps: Sequence[int]) -> list[Record]:
    """Rank 1's gradient is not a number at these steps, in which the script takes no step."""
    observer = Keeping()
    model, optimizer = make_model(policy=policy, observers=[observer])
    loader = HeteroDataLoader(Numbered(240), model=model, batch_size=6)
    for number, (features, targets, _) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        (loss * torch.nan if rank == 1 and number in bad_steps else loss).backward()
        if number not in bad_steps:
            optimizer.step()
    return observer.records


class WindowsKept(ScriptedPlanner):
    """Two splits in turn, and the windows it was shown."""

    def __init__(self) -> None:
        super().__init__([(4, 2), (2, 4)])
        self.windows: list[StepWindow] = []

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        if window is not None:
            self.windows.append(window)
        return super().decide(window, job, step)


def steps_that_count(rank: int, *, chooses_kernels: bool) -> list[list[tuple[int, bool]]]:
    """Each rank's local batch at every step, and whether rank 0 was told that the step counts."""
    planner = WindowsKept()
    model, optimizer = make_model(policy=planner)
    model.engine.device.slow_at_new_sizes = chooses_kernels  # as on a GPU
    one_epoch(model, optimizer, HeteroDataLoader(Numbered(300), model=model, batch_size=6))
    batches, valid = (
        np.concatenate([getattr(window, name) for window in planner.windows]).T.tolist() if planner.windows else []
        for name in ("local_batches", "valid")
    )
    return [list(zip(*both, strict=True)) for both in zip(batches, valid, strict=True)]


# One rank alone


@dataclass(frozen=True, kw_only=True)
class Alone:
    """How a training by one process went."""

    totals: list[int]
    noise_scale: float
    flags: tuple[str, ...]
    reason: str


class FixedCostNet(nn.Module):
    """Takes as long for few samples as for many, so that a larger batch costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(2e-3)
        return self.net(inputs)


def train_alone(rank: int, max_batch_size: int | None) -> Alone:
    fail_on_warnings()
    torch.manual_seed(0)
    net = FixedCostNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = HeteroDataParallel(net, optimizer)
    loader = HeteroDataLoader(digits(), model=model, batch_size=12, max_batch_size=max_batch_size)
    totals, reasons = [], []
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        totals.append(model.plan.total_batch)
        reasons.append(model.plan.reason)
    noise = model.engine.coordinator.schedule.decision.noise
    flags = () if noise is None else noise.flags
    return Alone(totals=totals, noise_scale=model.noise_scale, flags=flags, reason=reasons[-1])


def progress_with_skipped_steps(rank: int, *, fused: bool) -> tuple[list[float], list[bool]]:
    """Progress after every step, and whether the parameters moved; step 3's loss is infinite."""
    fail_on_warnings()
    net = TinyNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = HeteroDataParallel(net, optimizer, grad_scaler=scaler)
    loader = HeteroDataLoader(Numbered(48), model=model, batch_size=6)
    progress, moved = [], []
    for number, (features, targets, _) in enumerate(loader):
        before = net.first.weight.clone()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        scaler.scale(loss * torch.inf if number == 3 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        progress.append(model.engine.state_dict()["progress"])
        moved.append(not torch.equal(before, net.first.weight))
    return progress, moved


def failing_observer(rank: int) -> tuple[int, list[Warned]]:
    class Failing(Keeping):
        def write(self, event: Record) -> None:
            raise OSError("no space left")

    model, optimizer = make_model(observers=[Failing()])
    with collecting_warnings() as warned:
        loader = HeteroDataLoader(Numbered(72), model=model, batch_size=6)
        num_steps = 0
        for batch in loader:
            take_step(model, optimizer, batch)
            num_steps += 1
    return num_steps, warned
