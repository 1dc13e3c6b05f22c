"""What the ranks of `test_sharded` run: scripts under `fully_shard`, beside one process on the whole batches."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import parity_cases
import torch
import torch.distributed as dist
from parity_cases import (
    DTYPES,
    NUM_STEPS,
    WIDTH,
    Case,
    Loaded,
    Run,
    Shared,
    Told,
    accumulating_loop,
    adamw,
    both,
    clipping_loop,
    evaluating_loop,
    fresh,
    mean_loss_loop,
    num_tokens,
    ragged_accumulating_loop,
    ragged_loop,
    reducing_loop,
    sequences,
    token_loss,
    twofold_loss,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import cannikin

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A residual block; sizes that no number of ranks divides."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.wide, self.narrow, self.checkpointed = nn.Linear(7, 13), nn.Linear(13, 7), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.checkpointed else self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    """Blocks between a first and a last layer, which the outermost group has."""

    def __init__(self, *, checkpointed: bool = False, normed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 7), nn.Linear(7, 3)
        self.norm = nn.BatchNorm1d(7) if normed else nn.Identity()
        self.blocks = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Aside(Net):
    """A network that returns features: its loss uses the last layer's weight, and what forward has left on the network.

    So gradients enter it by other ways than forward's outputs, as with fused losses and auxiliary ones of experts.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        self.left = x.square().mean()
        return x


def aside_loss(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    features, net = model(x), getattr(model, "module", model)
    penalty = 0.05 * net.last.weight.square().sum()
    return ((nn.functional.linear(features, net.last.weight, net.last.bias) - y) ** 2).mean() + net.left + penalty


def shard(net: Net, *, num_replicas: int = 1, compiled: str | None = None, **options: Any) -> Net:
    """`fully_shard` for each block, then for the whole; on a 2-D mesh where there are replicas."""
    world_size = dist.get_world_size()
    if num_replicas > 1:
        options["mesh"] = init_device_mesh(
            parity_cases.DEVICE, (num_replicas, world_size // num_replicas), mesh_dim_names=("replicate", "shard")
        )
    else:
        options["mesh"] = init_device_mesh(parity_cases.DEVICE, (world_size,))
    for block in net.blocks:
        if compiled:
            block.compile(backend=compiled)
        fully_shard(block, **options)
    return fully_shard(net, **options)


class Model:
    """A sharded module and its engine, under the names that HeteroDataParallel has."""

    def __init__(self, module: Any, engine: cannikin.Engine) -> None:
        self.module, self.engine = module, engine
        self.use_batch, self.weighted_mean = engine.use_batch, engine.weighted_mean
        self.micro_batches, self.parameters = engine.micro_batches, module.parameters
        self.train, self.eval = module.train, module.eval

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)


@dataclass(frozen=True, kw_only=True)
class ShardedCase(Case):
    """One script; `options` are those of `shard`."""

    net: Callable[[], nn.Module] = Net
    options: dict[str, Any] = field(default_factory=dict)

    def _ranked(self, dtype: torch.dtype, data: TensorDataset, script: Any, rank: int, world_size: int) -> list[Any]:
        torch._dynamo.reset()
        net = shard(fresh(self.net, dtype), **self.options)
        optimizer = self.optimizer(net)
        keywords = {"lr_rule": "none", **self.keywords}
        if isinstance(self.feed, Loaded):
            keywords.setdefault("policy", self.feed.planner(world_size))
        model = Model(net, cannikin.attach(net, optimizer, **keywords))
        run = Run(
            model, optimizer, self.loss, self.feed(script, model, rank, world_size, data), None, rank, ranked=True
        )
        self.loop(run)
        return [whole(value.detach()) for value in (*net.parameters(), *net.buffers(), *run.notes)]

    def alone(self, dtype: torch.dtype, data: TensorDataset, script: Any) -> list[Any]:
        net = fresh(self.net, dtype)
        model = InBfloat16(net) if self.options.get("mp_policy") is BFLOAT16 else net
        run = Run(model, self.optimizer(net), self.loss, self.feed.whole(data, script), None, 0, ranked=False)
        self.loop(run)
        return [value.detach() for value in (*net.parameters(), *net.buffers(), *run.notes)]


class InBfloat16(nn.Module):
    """What FSDP makes of a network under `BFLOAT16`, in one process: computed on rounded copies of its parameters."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        for block in net.blocks:
            block.checkpointed = False  # backward would come to it when the copies are gone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = {name: p.bfloat16() for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, rounded, (x.bfloat16(),))


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def scattering_loop(run: Run) -> None:
    """Gradients of three batches pile up in shards, and replicas sum them once."""
    for index, batch in enumerate(run.batches):
        last = index % 3 == 2
        if run.ranked:
            run.model.module.set_requires_all_reduce(last)
        (run.loss(run.model, batch) / 3).backward()
        if last:
            run.optimizer.step()
            run.optimizer.zero_grad()


def checkpointed_loss(model: Any, batch: Any) -> torch.Tensor:
    """The whole network runs once more in backward."""
    x, y = batch
    return ((checkpoint(model, x, use_reentrant=False) - y) ** 2).mean()


TOKENS: dict[str, Any] = {"loss": token_loss, "data": sequences}
THRICE = Told(num_batches=3 * NUM_STEPS)

# On any number of ranks.
CASES = {
    "sgd with momentum": ShardedCase(),
    "adamw": ShardedCase(optimizer=adamw),
    "a loader, a changing split and a last short step": ShardedCase(feed=Loaded()),
    "accumulation": ShardedCase(loop=accumulating_loop, feed=THRICE, optimizer=adamw),
    "ranks without samples": ShardedCase(feed=Told(idle=True, poisoned=True)),
    "micro-batches, other numbers on other ranks": ShardedCase(loop=ragged_loop),
}
# On three.
MORE_CASES = {
    "bfloat16": ShardedCase(options={"mp_policy": BFLOAT16}),
    "bfloat16, adamw, accumulation": ShardedCase(
        options={"mp_policy": BFLOAT16}, loop=accumulating_loop, feed=THRICE, optimizer=adamw
    ),
    "a loss beside the outputs": ShardedCase(net=Aside, loss=aside_loss),
    "a loss beside the outputs, ranks without samples": ShardedCase(net=Aside, loss=aside_loss, feed=Told(idle=True)),
    "the whole checkpointed": ShardedCase(loss=checkpointed_loss, feed=Loaded()),
    "weighted at the outputs": ShardedCase(keywords={"weighting": "loss"}),
    "two optimizers": ShardedCase(optimizer=both),
    "tokens": ShardedCase(feed=Told(items=True), **TOKENS),
    "ranks without tokens": ShardedCase(feed=Told(items=True, tokenless=True), **TOKENS),
    "tokens by the loader, in micro-batches": ShardedCase(
        feed=Loaded(keywords=(("item_count", num_tokens),)), loop=ragged_loop, **TOKENS
    ),
    "gradients that pile up though reduced": ShardedCase(loop=reducing_loop, feed=THRICE),
    "accumulation of micro-batches": ShardedCase(loop=ragged_accumulating_loop, feed=THRICE),
    "two forwards for one backward": ShardedCase(loss=twofold_loss),
    "two forwards, the first unsynced": ShardedCase(loop=Shared(unsynced=0)),
    "two forwards, the second unsynced": ShardedCase(loop=Shared(unsynced=1)),
    "clipping": ShardedCase(loop=clipping_loop),
    "weighted mean of losses": ShardedCase(loop=mean_loss_loop),
    "evaluation in between": ShardedCase(loop=evaluating_loop, feed=Loaded()),
    "activation checkpointing": ShardedCase(net=partial(Net, checkpointed=True), optimizer=adamw),
    "not resharded after forward": ShardedCase(options={"reshard_after_forward": False}),
    "blocks compiled": ShardedCase(options={"compiled": "aot_eager"}),
    "blocks checkpointed, compiled, in bfloat16": ShardedCase(
        net=partial(Net, checkpointed=True), options={"compiled": "aot_eager", "mp_policy": BFLOAT16}, optimizer=adamw
    ),
}
# Two replicas of two shards each.
_REPLICATED = {
    **CASES,
    "bfloat16": MORE_CASES["bfloat16"],
    "activation checkpointing": MORE_CASES["activation checkpointing"],
    "accumulation in shards": ShardedCase(loop=scattering_loop, feed=THRICE),
    "a loss beside the outputs": MORE_CASES["a loss beside the outputs"],
}
REPLICATED_CASES = {
    name: ShardedCase(**{**vars(case), "options": {**case.options, "num_replicas": 2}})
    for name, case in _REPLICATED.items()
}
ALL_CASES = {"cases": CASES, "more": MORE_CASES, "replicated": REPLICATED_CASES}


def dtypes_of(case: ShardedCase) -> tuple[str, ...]:
    if "mp_policy" in case.options:
        return ("float32",)
    return ("float32", "float64") if case in list(CASES.values())[:3] else ("float64",)


def run_cases(rank: int, world_size: int, group: str) -> dict[tuple[str, str], float | str]:
    """The error of each case and dtype. One that raises is the last: ranks may then be out of step."""
    errors: dict[tuple[str, str], float | str] = {}
    for name, case in ALL_CASES[group].items():
        for dtype in dtypes_of(case):
            try:
                errors[name, dtype] = case.error(DTYPES[dtype], rank, world_size)
            except Exception:
                errors[name, dtype] = traceback.format_exc()
                dist.destroy_process_group()
                return errors
    return errors
