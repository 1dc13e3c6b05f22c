"""What the ranks of `test_sharded_measuring` run: norms, noise and times under `fully_shard`, and what is refused."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adam_cases import AdamNoise, settled_adam, true_adam_noise
from parity_cases import WIDTH, fresh, regression, split_of
from sharded_cases import Net, shard, whole
from torch import nn
from torch.distributed._composable.replicate import replicate as old_replicate
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import TensorDataset
from training_cases import (
    NoiseFound,
    Numbered,
    Script,
    ScriptedController,
    ScriptedPlanner,
    _Slow,
    digits,
    digits_net,
    fail_on_warnings,
    true_noise,
)

import cannikin
from cannikin.core.planner import Decision
from cannikin.core.values import Job, StepWindow
from cannikin.runtime.memory import MemoryGauge
from cannikin.runtime.sharded import _NEEDED, groups_of

# Norms.


class KeepingPlanner(ScriptedPlanner):
    """Keeps every window it is shown."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.windows: list[StepWindow] = []

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        if window is not None:
            self.windows.append(window)
        return super().decide(window, job, step)


@dataclass(frozen=True, kw_only=True)
class NormsFound:
    """|g_i|^2 of this rank and |g|^2 by step, computed beside the training; and on rank 0 those of the windows."""

    local: list[float]
    total: list[float]
    recorded_local: list[list[float]]
    recorded_total: list[float]


def measure_norms(rank: int, num_replicas: int, dtype: torch.dtype = torch.float64) -> NormsFound:
    """With weights that never change, so that an unsharded copy can compute the same."""
    fail_on_warnings()
    world_size = dist.get_world_size()
    alone = fresh(Net, dtype)
    net = shard(fresh(Net, dtype), num_replicas=num_replicas)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    planner = KeepingPlanner([tuple(split_of(17, world_size, number)) for number in range(3)])
    engine = cannikin.attach(net, optimizer, policy=planner)
    data = regression(dtype, 170)
    loader = cannikin.HeteroDataLoader(data, model=engine, batch_size=17)
    local, total = [], []
    for x, y in (batch for _ in range(4) for batch in loader):
        mean = torch.autograd.grad(nn.functional.mse_loss(alone(x), y), [*alone.parameters()])
        local.append(sum(float(g.square().sum()) for g in mean))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        total.append(sum(float(whole(p.grad).square().sum()) for p in net.parameters()))
        optimizer.step()
    return NormsFound(
        local=local,
        total=total,
        recorded_local=[row for window in planner.windows for row in window.local_sqnorm.tolist()],
        recorded_total=[norm for window in planner.windows for norm in window.global_sqnorm.tolist()],
    )


# Noise.


def measure_noise(rank: int, seed: int, script: Script, kind: str, num_epochs: int) -> AdamNoise | None:
    """The noise scale that was found with the weights held still, and the one of every sample's own gradient."""
    fail_on_warnings()
    alone = digits_net(seed)
    net = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net[2], net):
        fully_shard(part, mesh=mesh)
    total = sum(script[0])
    if kind == "sgd":
        noise, signal = true_noise(alone)
        optimizer, true = torch.optim.SGD(net.parameters(), lr=0.0), noise / signal
    else:
        settled = settled_adam(alone, total, seed)
        optimizer, true = torch.optim.AdamW(net.parameters(), lr=0.0), true_adam_noise(alone, settled)
        for parameter, own in zip(alone.parameters(), net.parameters(), strict=True):
            optimizer.state[own] = {
                name: value if value.ndim == 0 else distribute_tensor(value, mesh, own.placements)
                for name, value in settled.state[parameter].items()
            }
    policy = ScriptedController(Job(num_ranks=len(script[0]), batch_size=total), script)
    engine = cannikin.attach(net, optimizer, policy=policy)
    loader = cannikin.HeteroDataLoader(digits(), model=engine, batch_size=total, seed=seed)
    splits = set()
    for inputs, targets in (batch for _ in range(num_epochs) for batch in loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        splits.add(engine.plan.local_batches)
    noise = engine.coordinator.schedule.decision.noise
    if rank != 0:
        return None
    found = NoiseFound(noise_scale=noise.noise_scale, limits=noise.limits, splits=splits, num_steps=noise.num_steps)
    return AdamNoise(found=found, true=true)


# Times.


class SlowBlock(nn.Module):
    """A block that takes a time per sample."""

    def __init__(self, sample_s: float, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.sample_s = nn.Linear(width, width), sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_Slow.apply(self.linear(x), self.sample_s))


def slow_net(samples_s: list[float], **options: Any) -> Any:
    """Blocks under `fully_shard` which take these times per sample, forward and again backward; a head."""
    torch.manual_seed(0)
    net = nn.Sequential(*(SlowBlock(sample_s) for sample_s in samples_s), nn.Linear(WIDTH, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in list(net)[:-1]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class TimesFound:
    """The last window of rank 0."""

    window: StepWindow | None
    wall_s: float = math.nan


def measure_times(rank: int, **options: Any) -> TimesFound:
    """Rank 1 is three times as slow per sample, and both have as many."""
    fail_on_warnings()
    net = slow_net([1e-3 * (1 + 2 * rank), 2e-3 * (1 + 2 * rank)], **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    planner = KeepingPlanner([(4, 4)])
    engine = cannikin.attach(net, optimizer, policy=planner)
    loader = cannikin.HeteroDataLoader(regression(torch.float32, 240), model=engine, batch_size=8)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return TimesFound(window=planner.windows[-1] if rank == 0 else None)


def settle(rank: int, samples_s: list[list[float]], total: int, num_steps: int) -> list[int]:
    """The split that the adaptive planner comes to; each rank's blocks take these times per sample."""
    fail_on_warnings()
    net = slow_net(samples_s[rank])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = cannikin.attach(net, optimizer)
    loader = cannikin.HeteroDataLoader(regression(torch.float32, total * num_steps), model=engine, batch_size=total)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return list(engine.plan.local_batches)


# One rank alone.


@dataclass(frozen=True, kw_only=True)
class AloneFound:
    """Products of gradients of steps that follow each other, as recorded and as computed beside the training."""

    num_dots: int
    products: list[float]
    expected: list[float]


def train_alone(rank: int) -> AloneFound:
    fail_on_warnings()
    net = shard(fresh(Net, torch.float64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    planner = KeepingPlanner([(8,)])
    engine = cannikin.attach(net, optimizer, policy=planner)
    data = regression(torch.float64, 160)
    loader = cannikin.HeteroDataLoader(data, model=engine, batch_size=8, max_batch_size=16)
    gradients = []
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        gradients.append(torch.cat([whole(p.grad).flatten() for p in net.parameters()]))
        optimizer.step()
    recorded = [dot for window in planner.windows for dot in window.previous_dot.tolist()]
    taken = [number for number, dot in enumerate(recorded) if not math.isnan(dot)]
    return AloneFound(
        num_dots=len(taken),
        products=[recorded[number] for number in taken],
        expected=[float(gradients[number] @ gradients[number - 1]) for number in taken],
    )


# What is read of torch, and what is refused.


def missing_names(rank: int) -> list[str]:
    """What we read of torch that is no longer there."""
    net = sharded()
    (group,) = groups_of(net)
    names = (
        *("reduce_grads", "all_reduce_grads", "fsdp_params", "offload_policy", "gradient_divide_factor"),
        *("_all_reduce_hook", "_all_gather_comm", "_reduce_scatter_comm"),
    )
    missing = [name for name in names if not hasattr(group, name)]
    missing += [name for name in _NEEDED if not hasattr(net, name)]
    same = [held.sharded_param for held in group.fsdp_params] == list(net.parameters())
    return missing if same else [*missing, "fsdp_params[].sharded_param"]


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


def composable() -> nn.Module:
    return old_replicate(nn.Linear(4, 4))


def replicated_by_fsdp() -> nn.Module:
    return replicate(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def sharded_in_part() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0])
    return net


def sharded(**options: Any) -> nn.Module:
    return fully_shard(nn.Linear(4, 4), **options)


def with_ignored() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return fully_shard(net, ignored_params={net[0].weight})


def on_two_meshes() -> nn.Module:
    net, size = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), dist.get_world_size()
    fully_shard(net[0], mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard")))
    return fully_shard(net, mesh=init_device_mesh("cpu", (size,)))


def replicas_of_one_shard() -> nn.Module:
    return sharded(mesh=init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")))


def divided() -> nn.Module:
    net = sharded()
    net.set_gradient_divide_factor(1.0)
    return net


def hooked() -> nn.Module:
    net = sharded()
    net.set_all_reduce_hook(lambda output: None)
    return net


def attached() -> nn.Module:
    net = sharded()
    cannikin.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return net


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What to attach to, and the words of the refusal."""

    make: Callable[[], nn.Module] = sharded
    words: str
    keywords: dict[str, Any] = field(default_factory=dict)


REFUSALS = {
    "a plain module": Refusal(make=partial(nn.Linear, 4, 4), words="neither a DistributedDataParallel nor a module"),
    "FSDP1": Refusal(make=fsdp1, words="FSDP1's FullyShardedDataParallel"),
    "the older replicate": Refusal(make=composable, words="composable replicate"),
    "replicate by FSDP": Refusal(make=replicated_by_fsdp, words="composable replicate"),
    "a module sharded in part": Refusal(make=sharded_in_part, words="only parts are under fully_shard"),
    "CPU offload": Refusal(
        make=partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)), words="leave offload_policy out"
    ),
    "parameters left out": Refusal(make=with_ignored, words="0.weight is not sharded"),
    "several meshes": Refusal(make=on_two_meshes, words="sharded over several meshes"),
    "nothing sharded": Refusal(make=replicas_of_one_shard, words="replicas of one shard each"),
    "a divisor of the user's own": Refusal(make=divided, words="set_gradient_divide_factor"),
    "a sum of the user's own": Refusal(make=hooked, words="set_all_reduce_hook was called"),
    "a module attached before": Refusal(make=attached, words="attach() was called on this module before"),
    "compressed buckets": Refusal(words="comm_wrapper= is for DDP", keywords={"comm_wrapper": lambda hook: hook}),
}


def refuse(rank: int, name: str) -> None:
    case = REFUSALS[name]
    net = case.make()
    cannikin.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), **case.keywords)


def set_late(rank: int, name: str) -> None:
    """Train a step after something was set that attach() would have refused."""
    net = sharded()
    engine = cannikin.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    LATE[name](net)
    engine.use_batch(2 + rank, 5)
    net(torch.ones(2 + rank, 4)).mean().backward()


LATE: dict[str, Callable[[Any], None]] = {
    "set_gradient_divide_factor": lambda net: net.set_gradient_divide_factor(1.0),
    "set_all_reduce_hook was called": lambda net: net.set_all_reduce_hook(lambda output: None),
}


def train_in_eval_mode(rank: int, *, is_half: bool) -> None:
    """All of a step, or the second of two batches whose gradients pile up, in eval mode; batches are told."""
    net = sharded()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = cannikin.attach(net, optimizer)
    for is_first in (True, False):
        engine.use_batch(2 + rank, 5)
        net.train(is_first and is_half)
        net(torch.ones(2 + rank, 4)).mean().backward()
    optimizer.step()


class WithUnused(nn.Module):
    """A network of which one layer is never used, on a rank that takes this long per sample."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.used, self.unused, self.last, self.sample_s = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1), sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(len(x) * self.sample_s)
        return self.last(self.used(x))


def adapt_with_an_unused_layer(rank: int) -> tuple[int, ...]:
    """Train 40 steps, with one sharded layer that brings no gradient; the split at the end."""
    net = WithUnused((1e-3, 4e-3)[rank])
    for part in (net.used, net.unused, net):
        fully_shard(part)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = cannikin.attach(net, optimizer)
    loader = cannikin.HeteroDataLoader(TensorDataset(torch.ones(480, 4)), model=engine, batch_size=12)
    for (x,) in loader:
        net(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.plan is not None
    return engine.plan.local_batches


# Checkpoints.


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one launch trained on: the samples' numbers, by step; the weights at its end; the first and last plans."""

    seen: list[list[int]]
    weights: list[list[float]]
    first: tuple[int, ...]
    last: tuple[int, ...]


def train_part(rank: int, folder: str, samples_s: list[float], stop_at: int | None) -> Part:
    """Train an epoch as far as step `stop_at`, where all is saved, and some steps further, which are lost.

    A launch that finds something saved goes on from there, to the end of the epoch.
    """
    fail_on_warnings()
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
    torch.manual_seed(7)
    blocks = [SlowBlock(samples_s[rank], 3) for _ in range(2)]
    net = nn.Sequential(*blocks, nn.Linear(3, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*blocks, net):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine = cannikin.attach(net, optimizer)
    loader = cannikin.HeteroDataLoader(Numbered(900), model=engine, batch_size=18)
    ours = Path(folder, "cannikin.pt")
    if ours.exists():
        model_state, optimizer_state = get_state_dict(net, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        saved = torch.load(ours, weights_only=True)
        engine.load_state_dict(saved["engine"])
        loader.load_state_dict(saved["loader"])
    first, seen, weights = (
        engine.plan.local_batches,
        [],
        [whole(p.detach()).flatten().tolist() for p in net.parameters()],
    )
    for step, (features, target, numbers) in enumerate(loader):
        if step == stop_at:
            model_state, optimizer_state = get_state_dict(net, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
            weights = weights_of(net)
            if rank == 0:
                torch.save({"engine": engine.state_dict(), "loader": loader.state_dict()}, ours)
        if stop_at is not None and step == stop_at + 3:
            break
        optimizer.zero_grad()
        nn.functional.mse_loss(net(features), target).backward()
        optimizer.step()
        seen.append([] if loader.is_padding else numbers.tolist())
    return Part(seen=seen, weights=weights, first=first, last=engine.plan.local_batches)


def weights_of(net: nn.Module) -> list[list[float]]:
    return [whole(parameter.detach()).flatten().tolist() for parameter in net.parameters()]


def snapshot(rank: int) -> None:
    net = sharded()
    engine = cannikin.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    cannikin.HeteroDataLoader(Numbered(60), model=engine, batch_size=6)
    cannikin.Snapshot("snapshots", engine)


# Memory and BatchNorm.


@dataclass
class FakeMemory:
    """A device whose peak grows by 100 bytes with every sample of the largest batch so far."""

    limit_bytes: int
    most_samples: int = 0

    def allocated(self) -> int:
        return 1000

    def peak(self) -> int:
        return 1000 + 100 * self.most_samples

    def peak_taken(self) -> int:
        return self.peak()

    def limit(self) -> int:
        return self.limit_bytes

    def release(self) -> None:
        pass


def settle_in_little_memory(rank: int) -> list[int]:
    """The split of 16 samples where the fast rank has room for 10 at most."""
    fail_on_warnings()
    net = slow_net([1e-3 * (1 + 3 * rank)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = cannikin.attach(net, optimizer)
    memory = FakeMemory(limit_bytes=1_000_000 if rank else 2300)
    engine.loop.memory = MemoryGauge(memory)
    loader = cannikin.HeteroDataLoader(regression(torch.float32, 16 * 50), model=engine, batch_size=16)
    for x, y in loader:
        optimizer.zero_grad()
        output = net(x)
        memory.most_samples = max(memory.most_samples, len(x))
        nn.functional.mse_loss(output, y).backward()
        optimizer.step()
    return list(engine.plan.local_batches)


def average_statistics(rank: int) -> list[float]:
    """BatchNorm's running statistics after some steps with unequal batches."""
    fail_on_warnings()
    net = shard(fresh(partial(Net, normed=True), torch.float32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    engine = cannikin.attach(net, optimizer)
    loader = cannikin.HeteroDataLoader(regression(torch.float32, 60), model=engine, batch_size=12, local_batches=[9, 3])
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return [*net.norm.running_mean.tolist(), *net.norm.running_var.tolist()]
