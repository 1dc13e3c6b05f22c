"""What the ranks of `test_recording` run: trainings that say what they do, and evaluations of the user's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measuring_cases import FORWARD_S, FixedCostNet, Keeping
from told import collecting_warnings
from torch import nn
from torch.utils.data import DataLoader
from training_cases import Numbered, digits, fail_on_warnings, make_model, one_epoch, take_step

from cannikin.runlog import Record
from cannikin.runtime.batch_sampler import HeteroBatchSampler
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel

NUMBERS = {
    "whole": 3,
    "real": 0.25,
    "truth": True,
    "tensor": torch.tensor(0.5, requires_grad=True),
    "half": torch.tensor(1.5, dtype=torch.bfloat16),
    "numpy": np.float32(0.5),
    "array": np.array(7),
    "self": 1.0,
    "huge": 2**70,
}
NO_NUMBERS = {
    "nothing": None,
    "text": "0.93",
    "vector": torch.ones(2),
    "list": [0.5],
    "complex": 1j,
    "complex tensor": torch.tensor(1j),
    "rows": np.ones((2, 1)),
    "dates": np.datetime64("2020-01-01"),
}


def epochs_and_evaluations(rank: int) -> list[Record]:
    """Two passes that the loop asks for and one of its own, an evaluation before the loader and after each pass."""
    observer = Keeping()
    model, optimizer = make_model(observers=[observer])
    model.log(accuracy=0.1)
    loader = HeteroDataLoader(Numbered(60), model=model, batch_size=6)
    for _ in model.epochs(2):
        one_epoch(model, optimizer, loader)
        model.log(accuracy=0.5, loss=torch.tensor(2.0))
    one_epoch(model, optimizer, loader)
    if rank == 0:
        model.log(**NUMBERS)  # not a collective
    return observer.records


def refused_metrics(rank: int) -> dict[str, str]:
    model, _ = make_model()
    texts = {}
    for name, metrics in ({name: {name: value} for name, value in NO_NUMBERS.items()} | {"none at all": {}}).items():
        try:
            model.log(**metrics)
            texts[name] = ""
        except ValueError as error:
            texts[name] = str(error)
    return texts


def resumed_pass(rank: int) -> list[Record]:
    """From a saved place in the second epoch."""
    observer = Keeping()
    model, optimizer = make_model(observers=[observer])
    loader = HeteroDataLoader(Numbered(60), model=model, batch_size=6)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 18})
    one_epoch(model, optimizer, loader)
    return observer.records


def runs_in_one_folder(rank: int, folder: str) -> list[str]:
    """A pass, the next one by a resumed run, and a run that has nothing to do with either; what was warned of."""
    states: list[dict[str, Any]] = []
    for resumes in (False, True, False):
        model, optimizer = make_model(run_dir=folder)
        with collecting_warnings() as warned:
            loader = HeteroDataLoader(Numbered(60), model=model, batch_size=6)
            if resumes:
                model.engine.load_state_dict(states[0])
                loader.load_state_dict(states[1])
            one_epoch(model, optimizer, loader)
        model.log(accuracy=0.5)
        states = [model.engine.state_dict(), loader.state_dict()]
        dist.broadcast_object_list(states)  # rank 0's: it has learned
        model.engine.close()
    return [each.text for each in warned]


def sampler_passes(rank: int) -> list[Record]:
    observer = Keeping()
    model, optimizer = make_model(observers=[observer])
    data = Numbered(60)
    sampler = HeteroBatchSampler(data, model=model, batch_size=6)
    for _ in range(2):
        for batch in DataLoader(data, batch_sampler=sampler):
            take_step(model, optimizer, batch)
        model.log(accuracy=0.5)
    return observer.records


def closed(rank: int) -> list[Record]:
    """Training that goes on after it was said to be over."""
    observer = Keeping()
    model, optimizer = make_model(observers=[observer])
    loader = HeteroDataLoader(Numbered(60), model=model, batch_size=6)
    one_epoch(model, optimizer, loader)
    model.engine.close()
    model.engine.close()
    model.log(accuracy=0.5)
    one_epoch(model, optimizer, loader)
    return observer.records


class TwoBuckets(nn.Module):
    """Two layers of known size, slower on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 1000, bias=False), nn.Linear(1000, 1, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(features))


def buckets(rank: int) -> list[Record]:
    fail_on_warnings()
    observer = Keeping()
    net = TwoBuckets()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    model = HeteroDataParallel(net, optimizer, observers=[observer], bucket_cap_mb=0.001)
    loader = HeteroDataLoader(Numbered(120), model=model, batch_size=6)
    one_epoch(model, optimizer, loader)
    return observer.records


def free_total(rank: int, policy: str) -> list[Record]:
    """Many passes over a little data, in which the total batch may grow."""
    fail_on_warnings()
    torch.manual_seed(0)
    observer = Keeping()
    net = FixedCostNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer, policy=policy, observers=[observer])
    data: Any = torch.utils.data.Subset(digits(), range(240))
    loader = HeteroDataLoader(data, model=model, batch_size=12, max_batch_size=96)
    for _ in range(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return observer.records


def changed_speed(rank: int) -> list[Record]:
    """A rank becomes four times slower on the way."""
    observer = Keeping()
    model, optimizer = make_model(FORWARD_S[0], observers=[observer])
    loader = HeteroDataLoader(Numbered(600), model=model, batch_size=12)
    for number, batch in enumerate(loader):
        if number == 25 and rank == 1:
            model.module.sample_s = 4 * FORWARD_S[0]
        take_step(model, optimizer, batch)
    return observer.records
