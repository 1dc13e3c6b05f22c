"""Steps of ranks on one device, timed: a run from its start, splits by turns, and what each rank does alone.

Nothing waits for the device within a run: an event marks the end of every step, and all are read at the end. On a CPU
the host's clock does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_tasks import Task
from benchmarks.sample_numbers import Numbers
from cannikin import Engine, HeteroDataLoader, HeteroDataParallel, attach
from cannikin.core.values import Plan
from cannikin.lab.cluster import LabDevice
from cannikin.lab.throttle import Throttle

Split = tuple[int, ...]


@cache  # before it is removed for the first time
def throttle_of_lab() -> Throttle | None:
    """Return what `cannikin lab` slows this process with; None where it does not."""
    owners = (getattr(hook, "__self__", None) for hook in _global_forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Throttle)), None)


def set_speed(
    speed: float, sample_ms: float, *, forward_share: float = 1 / 3, throttle: Throttle | None = None
) -> None:
    """Make this rank a device of this speed from its next training forward on; 0 ms leave it as fast as it is."""
    throttle = throttle_of_lab() if throttle is None else throttle
    if throttle is None:  # ranks of the mps mechanism, whose speed is their share
        return
    throttle.device = LabDevice(speed=speed, sample_s=sample_ms / 1e3, fixed_s=0.0, forward_share=forward_share)
    throttle.remove()
    if sample_ms > 0:
        throttle.install()


class Clock:
    """The moments at which steps ended."""

    def __init__(self, device: str) -> None:
        self._on_device = device == "cuda"
        self._moments: list[Any] = []

    def tick(self) -> None:
        """Note that all that has been asked for so far ends a step here."""
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def seconds(self) -> np.ndarray:
        """Return the time from each tick to the next."""
        if not self._on_device:
            return np.diff(self._moments)
        torch.cuda.synchronize()
        pairs = zip(self._moments[:-1], self._moments[1:], strict=True)
        return np.array([start.elapsed_time(end) / 1e3 for start, end in pairs])


def train_step(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
    """Train one step of this many samples; on a GPU, ask for it."""
    optimizer.zero_grad()
    task.loss(model, size).backward()
    optimizer.step()


def agreed(values: Any, device: str) -> Any:
    """Return rank 0's numbers on every rank: a number, or nested lists of one length everywhere."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(numbers, 0)
    return numbers.tolist()


def agreed_split(split: Split, device: str) -> Split:
    """Return rank 0's split on every rank."""
    return tuple(int(batch) for batch in agreed(split, device))


def gathered(values: Any, device: str) -> np.ndarray:
    """Return every rank's numbers, [n, ...]; by a sum, which every backend has for every device."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    table = torch.zeros(dist.get_world_size(), *own.shape, dtype=torch.float64, device=device)
    table[dist.get_rank()] = own
    dist.all_reduce(table)
    return table.cpu().numpy()


def bucket_bytes(engine: Engine) -> list[int]:
    """Return the sizes of the buckets that the last step's gradients were reduced in."""
    return list(engine._reducer.bucket_bytes)


def wrapped(task: Task, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Engine]:
    """Return a new network under ours, by DDP or `fully_shard`, and what steps it."""
    if task.recipe.sharded:
        net = task.sharded_network()
        optimizer = task.optimizer(net)
        return net, optimizer, attach(net, optimizer, **options)
    net = task.network()
    optimizer = task.optimizer(net)
    model = HeteroDataParallel(net, optimizer, **options)
    return model, optimizer, model.engine


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: the model as it ended, and each step's seconds and plan."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    engine: Engine
    seconds: np.ndarray
    plans: list[Plan]

    @property
    def splits(self) -> list[Split]:
        """The local batches of each step."""
        return [plan.local_batches for plan in self.plans]

    @property
    def first_steps(self) -> list[int]:
        """The steps at which another split came into force, and 0."""
        splits = self.splits
        return [step for step in range(len(splits)) if step == 0 or splits[step] != splits[step - 1]]

    def path(self) -> list[tuple[int, Split]]:
        """Return each split with the step at which it came into force."""
        return [(step, self.splits[step]) for step in self.first_steps]


def train(
    task: Task,
    total: int,
    steps: int,
    *,
    before: Callable[[int], object] = lambda step: None,
    is_over: Callable[[list[Plan]], bool] = lambda plans: False,
    **options: Any,
) -> Run:
    """Train from the start, on a model of its own.

    Args:
        task: the network and its data.
        total: the total batch, which stays.
        steps: to train, at most.
        before: called with each step's number.
        is_over: asked after each step with the plans so far; must answer alike on every rank.
        **options: of `HeteroDataParallel`.
    """
    model, optimizer, engine = wrapped(task, **options)
    loader = HeteroDataLoader(Numbers(total * steps), model=engine, batch_size=total, shuffle=False, collate_fn=len)
    clock, plans = Clock(task.device), []
    dist.barrier()
    clock.tick()
    for step, size in enumerate(loader):
        before(step)
        train_step(task, model, optimizer, size)
        clock.tick()
        assert engine.plan is not None, "a loader is bound"
        plans.append(engine.plan)
        if is_over(plans):
            break
    return Run(model=model, optimizer=optimizer, engine=engine, seconds=clock.seconds(), plans=plans)


def by_turns(task: Task, run: Run, splits: Sequence[Split], rounds: int, *, seed: int = 1) -> np.ndarray:
    """Return the seconds of steps of a run's model under each split, in random order within each round.

    [rounds, splits]; rank 0's.
    """
    rank, rng, clock = dist.get_rank(), np.random.default_rng(seed), Clock(task.device)
    orders = [rng.permutation(len(splits)) for _ in range(rounds)]
    clock.tick()
    for order in orders:
        for k in order.tolist():
            run.engine.use_batch(splits[k][rank], sum(splits[k]))
            train_step(task, run.model, run.optimizer, splits[k][rank])
            clock.tick()
    taken, seconds = clock.seconds().reshape(rounds, len(splits)), np.zeros((rounds, len(splits)))
    for row, order in enumerate(orders):
        seconds[row, order] = taken[row]
    return np.array(agreed(seconds.tolist(), task.device))  # every rank must choose the same


@dataclass(frozen=True, kw_only=True)
class AloneTimes:
    """Seconds of each rank's own work at its batch, without communication, [n]."""

    before_s: np.ndarray  # optimizer and forward
    backward_s: np.ndarray

    @property
    def step_s(self) -> np.ndarray:
        """Both together."""
        return self.before_s + self.backward_s


class Alone:
    """What each rank does alone: steps of plain DDP that never synchronises, on all ranks at once."""

    def __init__(self, task: Task) -> None:
        self._task = task
        if task.device == "cuda":
            torch.cuda.empty_cache()  # ranks share one GPU, and what the allocator keeps is nobody else's
        net = task.network()
        self._optimizer = task.optimizer(net)
        self._ddp = DistributedDataParallel(net, broadcast_buffers=False)

    def measure(self, split: Split, num_steps: int = 9) -> AloneTimes:
        """Return the medians of this many steps, after one to warm up."""
        size, clock = split[dist.get_rank()], Clock(self._task.device)
        dist.barrier()
        with self._ddp.no_sync():
            for _ in range(num_steps + 1):
                clock.tick()
                self._optimizer.step()  # of the step before: what comes before a backward, as the runtime counts it
                self._optimizer.zero_grad()
                loss = self._task.loss(self._ddp, size)
                clock.tick()
                loss.backward()
        clock.tick()
        parts = clock.seconds().reshape(-1, 2)[1:]
        before, backward = gathered(np.median(parts, axis=0).tolist(), self._task.device).T
        return AloneTimes(before_s=before, backward_s=backward)
