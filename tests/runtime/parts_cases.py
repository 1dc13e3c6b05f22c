"""Networks that run out of a made-up memory, and what the ranks of `test_parts` run with them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_cases import Kept, Numbered

from cannikin.runtime.device import Cpu
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.memory import MemoryGauge
from cannikin.runtime.parallel import HeteroDataParallel, attach
from cannikin.runtime.parts import PartedForward
from cannikin.runtime.passes import epoch_order


@dataclass
class MadeUpMemory:
    """Holds `per_sample` bytes for each sample whose graph a network keeps; what a network used last stays in use."""

    end: int = 10**9
    per_sample: int = 100
    in_use: int = 0

    def allocated(self) -> int:
        return self.in_use

    def peak(self) -> int:
        return self.in_use

    def peak_taken(self) -> int:
        return self.in_use

    def limit(self) -> int:
        return self.end

    def release(self) -> None:
        self.in_use = 0


class Limited(nn.Module):
    """A network that runs out of memory where more than `capacity` samples have a graph."""

    def __init__(self, net: nn.Module, memory: MadeUpMemory, capacity: int) -> None:
        super().__init__()
        self.net, self.memory, self.capacity = net, memory, capacity
        self.sizes: list[int] = []  # of every forward that was begun with a graph
        self.backward_capacity = 10**9

    def forward(self, features: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and self.training:
            self.sizes.append(len(features))
            self.memory.in_use = self.memory.per_sample * len(features)
            outputs = self.net(features, *rest, **named)  # what comes before memory runs out leaves its traces
            if len(features) > self.capacity:
                raise torch.OutOfMemoryError("CUDA out of memory. Made up.")
            if len(features) > self.backward_capacity:
                outputs.register_hook(_run_out)
            return outputs
        return self.net(features, *rest, **named)


def _run_out(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Made up, in backward.")


def parted(
    net: nn.Module, capacity: int, *, part: int | None = None, end: int = 10**9
) -> tuple[Limited, PartedForward]:
    """The network with so much memory, and what runs it; `part` is what an earlier step has found out."""
    limited = Limited(net, MadeUpMemory(end=end), capacity)
    gauge = MemoryGauge(limited.memory)
    forward = PartedForward(gauge, torch.device("cpu"))
    if part is not None:
        gauge.hold(part + 1, part, held_bytes=0, base_bytes=0)
        forward._differentiable = [True]
    return limited, forward


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


class Sizes(nn.Module):
    """A small network in which the order of samples, dropout and batch statistics may matter."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), *extra, nn.Tanh(), nn.Linear(8, 2))
        self.unused = nn.Linear(2, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)


def make_net(*extra: nn.Module) -> Sizes:
    torch.manual_seed(0)
    return Sizes(*extra).double()


# On several ranks


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank of a training has to tell."""

    weights: list[Any]
    seen: list[int]
    plans: list[tuple[int, ...]]
    reasons: list[str]
    warned: list[str]
    sizes: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    valid: list[bool] = field(default_factory=list)
    graphs: list[list[str]] = field(default_factory=list)


class Line(nn.Module):
    """Two layers in double precision, so that ranks and one process agree to the last digits, and one without use."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.unused = nn.Linear(2, 2) if unused else nn.Identity()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.net(features.double())


def train_with_little_memory(
    rank: int,
    attached: bool,
    capacity: int = 7,
    num_samples: int = 600,
    everywhere: bool = False,
    compiled: bool = False,
    **ddp: Any,
) -> Trained:
    """24 samples per step on 3 ranks, the last of which has memory for `capacity` of them."""
    told = Kept()
    net = Limited(Line("find_unused_parameters" in ddp), MadeUpMemory(), capacity if rank == 2 or everywhere else 10**9)
    Cpu.memory = net.memory
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    if attached:
        ddp = nn.parallel.DistributedDataParallel(net)
        engine = attach(ddp, optimizer, observers=[told], lr_rule="none")
        model: Any = ddp
    else:
        model = HeteroDataParallel(net, optimizer, observers=[told], lr_rule="none", **ddp)
        engine = model.engine
    loop = engine.loop
    loader = HeteroDataLoader(Numbered(num_samples), model=engine if attached else model, batch_size=24)
    trained = Trained(weights=[], seen=[], plans=[], reasons=[], warned=[], sizes=net.sizes)
    call = torch.compile(model, backend=partial(_note_graph, trained.graphs)) if compiled else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for features, targets, indices in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(call(features), targets.double()).backward()
            trained.valid.append(loop.step.valid)
            optimizer.step()
            trained.seen.extend([] if loader.is_padding else indices.tolist())
            trained.plans.append(engine.plan.local_batches)
            trained.reasons.append(engine.plan.reason)
    trained.weights.extend(p.detach().numpy().copy() for p in net.parameters())
    trained.warned.extend(str(warning.message) for warning in caught)
    trained.events.extend(
        {"text": event.text, **event.data} for event in told.records if getattr(event, "kind", "") == "out_of_memory"
    )
    Cpu.memory = None
    assert "_run_ddp_forward" not in vars(model), "DDP is left as it was"
    assert all(name.startswith("module.net.") for name in model.state_dict())
    return trained


def _note_graph(graphs: list[list[str]], module: torch.fx.GraphModule, _: Any) -> Any:
    """A compiler that compiles nothing and writes down what it was given."""
    graphs.append([str(node.target) for node in module.graph.nodes if node.op.startswith("call")])
    return module.forward


def train_alone(num_samples: int = 600) -> list[Any]:
    """The same steps in one process: 24 samples at a time, in the order of the loader's epoch."""
    net = Line()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    dataset = Numbered(num_samples)
    order = epoch_order(num_samples, seed=0, epoch=0, shuffle=True).tolist()
    for start in range(0, num_samples, 24):
        rows = [dataset[i] for i in order[start : start + 24]]
        features, targets = (torch.stack([torch.as_tensor(row[k]) for row in rows]) for k in (0, 1))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(features), targets.double()).backward()
        optimizer.step()
    return [p.detach().numpy() for p in net.parameters()]


def train_in_parts_for_good(rank: int) -> Trained:
    """Every rank holds 5 samples of the 24: whatever the plan, somebody trains in parts."""
    return train_with_little_memory(rank, attached=False, capacity=5, num_samples=1200, everywhere=True)


class Checkpointed(nn.Module):
    """Runs its first layer under a checkpoint that autograd does not see through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = features.detach().requires_grad_()
        return self.last(checkpoint(self.first, features, use_reentrant=True))


def train_checkpointed(rank: int) -> None:
    """One step of a network that fits nowhere."""
    net = Limited(Checkpointed(), MadeUpMemory(), 7)
    Cpu.memory = net.memory
    try:
        model = HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.05))
        features, _, _ = next(iter(HeteroDataLoader(Numbered(60), model=model, batch_size=24)))
        model(features).sum().backward()
    finally:
        Cpu.memory = None
