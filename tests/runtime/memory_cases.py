"""What the ranks of `test_memory` run: steps that ask for more memory than any machine has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from training_cases import Numbered, ScriptedPlanner, fail_on_warnings, take_step

from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel

TOO_MUCH = 2**50  # elements: beyond the addresses that a process has


class HungryNet(nn.Module):
    """Asks for too much memory as soon as its batch has not `usual` samples."""

    def __init__(self, usual: int) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.usual = usual

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if len(features) != self.usual:
            torch.empty(TOO_MUCH)
        return self.net(features)


def build(usual: int) -> tuple[HeteroDataParallel, Any, HeteroDataLoader]:
    fail_on_warnings()
    net = HungryNet(usual)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer, policy=ScriptedPlanner([(3, 3), (5, 2)]))
    return model, optimizer, HeteroDataLoader(Numbered(120), model=model, batch_size=6)


def out_of_memory_in_forward(rank: int) -> None:
    """At the second plan, on both ranks."""
    model, optimizer, loader = build(usual=3)
    for batch in loader:
        take_step(model, optimizer, batch)


def out_of_memory_at_once(rank: int) -> None:
    model, optimizer, loader = build(usual=0)
    for batch in loader:
        take_step(model, optimizer, batch)


def out_of_memory_caught_by_the_user(rank: int) -> tuple[str, ...]:
    """The notes of the error in the user's hands, which met it twice."""
    model, _, loader = build(usual=0)
    for features, _, _ in loader:
        for _ in range(2):
            try:
                model(features)
            except RuntimeError as error:
                model.engine.explain(error)
                caught = error
        return tuple(caught.__notes__)
    raise AssertionError("no batch")


def out_of_memory_in_evaluation(rank: int) -> None:
    """Which has nothing to do with the local batch."""
    model, optimizer, loader = build(usual=3)
    for batch in loader:
        take_step(model, optimizer, batch)
        model.eval()
        model(torch.zeros(9, 3))
