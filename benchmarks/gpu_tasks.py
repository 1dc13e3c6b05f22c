"""What ranks on one GPU train: each network on made-up data, at its real size or, on a CPU, at a very small one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.gpu_models import Bert, Chain, NeuMf, ResNet18, ResNet50, SmallGpt, Speech

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A network, samples of its inputs and answers, and how a benchmark treats it.

    Args:
        network: makes it.
        inputs, answers: make this many samples.
        loss: a mean over the samples, of what the network returns and the answers.
        images: convolutions, which are fastest in channels_last.
        adam: trained by AdamW instead of SGD with momentum.
        sharded: trained under `fully_shard`, one part per layer, in bfloat16, instead of DDP.
        totals: two total batches: in the first communication weighs more, in the second computation.
        sample_ms: what a rank of speed 1 spins per sample, so that real work is the smaller part of its time.
        steps: that a run of ours takes in a benchmark: fewer where gradients are large and steps long.
        step_ms: what a step is guessed to take on three ranks of one H200, only to know what fits into a time limit.
    """

    network: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    answers: Callable[[int], torch.Tensor]
    loss: Loss
    images: bool = False
    adam: bool = False
    sharded: bool = False
    totals: tuple[int, int]
    sample_ms: float
    steps: int = 150
    step_ms: float


def _classes(outputs: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), answers.flatten())


def _resnet18(small: bool) -> Recipe:
    side = 8 if small else 32
    return Recipe(
        network=lambda: ResNet18(width=4 if small else 64),
        inputs=lambda n: torch.randn(n, 3, side, side),
        answers=lambda n: torch.randint(0, 10, (n,)),
        loss=_classes,
        images=True,
        totals=(384, 1536),
        sample_ms=0.04,
        step_ms=40.0,
    )


def _resnet50(small: bool) -> Recipe:
    side = 32 if small else 224
    return Recipe(
        network=lambda: ResNet50(num_classes=10, width=2) if small else ResNet50(),
        inputs=lambda n: torch.randn(n, 3, side, side),
        answers=lambda n: torch.randint(0, 10, (n,)),
        loss=_classes,
        images=True,
        totals=(48, 112),
        sample_ms=0.8,
        step_ms=85.0,
        steps=120,
    )


def _bert(small: bool) -> Recipe:
    tokens, vocabulary = (40, 100) if small else (384, 30522)
    return Recipe(
        network=lambda: Bert(vocabulary, 16, 2, 64) if small else Bert(),
        inputs=lambda n: torch.randint(0, vocabulary, (n, tokens)),
        answers=lambda n: torch.randint(0, tokens, (n, 2)),
        loss=_classes,
        adam=True,
        totals=(48, 144),
        sample_ms=1.5,
        step_ms=280.0,
        steps=75,
    )


def _speech(small: bool) -> Recipe:
    frames = 16 if small else 128
    return Recipe(
        network=lambda: Speech(hidden=16, layers=2) if small else Speech(),
        inputs=lambda n: torch.randn(n, 1, 161, frames),
        answers=lambda n: torch.randint(0, 29, (n, frames // 2)),
        loss=_classes,
        totals=(96, 256),
        sample_ms=0.5,
        step_ms=140.0,
        steps=90,
    )


def _neumf(small: bool) -> Recipe:
    users, items = (50, 50) if small else (6040, 3706)
    return Recipe(
        network=lambda: NeuMf(users, items, 8 if small else 98),
        inputs=lambda n: torch.stack([torch.randint(0, users, (n,)), torch.randint(0, items, (n,))], 1),
        answers=lambda n: torch.randint(0, 2, (n,)).float(),
        loss=F.binary_cross_entropy_with_logits,
        adam=True,
        totals=(2048, 8192),
        sample_ms=0.01,
        step_ms=30.0,
        steps=200,
    )


def _gpt2(small: bool) -> Recipe:
    tokens, vocabulary = (16, 100) if small else (256, 50257)
    return Recipe(
        network=lambda: SmallGpt(vocabulary, 16, 2, 32) if small else SmallGpt(),
        inputs=lambda n: torch.randint(0, vocabulary, (n, tokens)),
        answers=lambda n: torch.randint(0, vocabulary, (n, tokens)),
        loss=_classes,
        adam=True,
        totals=(48, 144),
        sample_ms=1.5,
        step_ms=280.0,
        steps=75,
    )


def _gpt_fsdp(small: bool) -> Recipe:
    tokens, vocabulary = (16, 100) if small else (256, 50257)
    return Recipe(
        network=lambda: SmallGpt(vocabulary, 16, 4, 32) if small else SmallGpt(50304, 1024, 24),
        inputs=lambda n: torch.randint(0, vocabulary, (n, tokens)),
        answers=lambda n: torch.randint(0, vocabulary, (n, tokens)),
        loss=_classes,
        adam=True,
        sharded=True,
        totals=(96, 240),  # three ranks of one GPU hold the unsharded copies that `Alone` makes, too
        sample_ms=4.0,
        step_ms=1000.0,
        steps=45,
    )


def _chain(small: bool) -> Recipe:
    width = 16 if small else 1024
    return Recipe(
        network=lambda: Chain(width, 4 if small else 16),
        inputs=lambda n: torch.randn(n, width),
        answers=lambda n: torch.randint(0, width, (n,)),
        loss=_classes,
        totals=(192, 768),
        sample_ms=0.1,
        step_ms=50.0,
    )


RECIPES = {
    "resnet18": _resnet18,
    "neumf": _neumf,
    "resnet50": _resnet50,
    "deepspeech2": _speech,
    "bert": _bert,
    "gpt2-small": _gpt2,
    "gpt2-medium-fsdp": _gpt_fsdp,
    "chain": _chain,
}
NETWORKS = tuple(kind for kind in RECIPES if kind not in ("chain", "gpt2-medium-fsdp"))  # those under DDP of reports


def recipe_of(kind: str, device: str) -> Recipe:
    """Return a recipe, the small one on a CPU."""
    return RECIPES[kind](device == "cpu")


class Task:
    """Batches of any size out of one pool on the device, and the loss of a network on them.

    Args:
        kind: a name of `RECIPES`.
        largest: samples in the pool.
        device: "cuda" or "cpu".
    """

    def __init__(self, kind: str, *, largest: int, device: str) -> None:
        self.recipe, self.device, self.largest = recipe_of(kind, device), device, largest
        torch.manual_seed(0)
        with torch.device(device):
            self.inputs, self.answers = self.recipe.inputs(largest), self.recipe.answers(largest)
        if self.recipe.images:
            self.inputs = self.inputs.to(memory_format=torch.channels_last)

    def network(self) -> nn.Module:
        """Return a new network, the same at every call."""
        torch.manual_seed(0)
        with torch.device(self.device):
            net = self.recipe.network()
        return net.to(memory_format=torch.channels_last) if self.recipe.images else net

    def sharded_network(self) -> nn.Module:
        """Return a new network under `fully_shard`, one part per layer, that computes in bfloat16 on a GPU."""
        net: Any = self.network()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": policy} if self.device == "cuda" else {}
        for layer in net.layers:
            fully_shard(layer, **options)
        return fully_shard(net, **options)

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """Return what steps it."""
        if self.recipe.adam:
            return torch.optim.AdamW(net.parameters(), lr=1e-5, fused=self.device == "cuda")
        return torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)

    def loss(self, model: nn.Module, size: int) -> torch.Tensor:
        """Return the loss of this many samples, in bfloat16 where the device is good at it."""
        halves = self.device == "cuda" and not isinstance(model, FSDPModule)  # which has a policy of its own
        with torch.autocast(self.device, torch.bfloat16, enabled=halves):
            return self.recipe.loss(model(self.inputs[:size]), self.answers[:size])
