"""Replicas for `test_torchft`: each is a process of its own, with a manager and a lighthouse that the test has made."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore

from cannikin.errors import CannikinError
from cannikin.integrations.torchft import LiveDataLoader, LiveDataParallel

WORKER = {"num_workers": 1, "multiprocessing_context": "fork"}


@contextmanager
def manager_of(name: str, lighthouse: str, **options: Any) -> Iterator[Any]:
    import torchft

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=20)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=name,
        lighthouse_addr=lighthouse,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=limit,
        **{"use_async_quorum": False, **options},
    )
    try:
        yield manager
    finally:
        manager.shutdown()


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self._values = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self._values[index]


class Normalised(nn.Module):
    """BatchNorm, and a layer that only samples with a positive first value use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, 1)
        self.sometimes = nn.Linear(4, 1)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(self.norm(samples))
        chosen = samples[:, 0] > 0.5
        if chosen.any():
            output = output + chosen[:, None] * self.sometimes(samples)
        return output


def train_apart(rank: int, world_size: int, lighthouse: str) -> dict[str, Any]:
    """Train two epochs; in step 4 replica 1 is made to have trained apart, in step 6 both lose their connections."""
    dist.destroy_process_group()  # each replica is a world of its own
    module = Normalised(seed=rank)  # who is not first takes over the first one's weights
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    seen, refused = [], []
    with manager_of(f"replica {rank}", lighthouse) as manager:
        model = LiveDataParallel(module, optimizer, manager, name=f"replica {rank}")
        loader = LiveDataLoader(Samples(65), 8, model=model, **(WORKER if rank else {}))
        for epoch in loader.epochs(2):
            for indices, samples in loader:
                place, count = model.place, model.local_batch
                (model(samples) ** 2).mean().backward()
                if place.num_steps == 4 and rank == 1:
                    model.membership.place = replace(place, history=place.history + 1)
                    with torch.no_grad():
                        module.layer.weight.add_(1.0)
                if place.num_steps == 6 and not refused:
                    manager.report_error(RuntimeError("as if a member had been lost"))
                if model.step():
                    seen.append((epoch, place.num_steps, indices[:count].tolist()))
                else:
                    refused.append(place.num_steps)
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    return {"seen": seen, "refused": refused, "state": state, "history": model.place.history, "plan": model.plan}


def stop_and_resume(rank: int, world_size: int, lighthouse: str) -> list[int]:
    """Train three steps, save, and go on in a new replica, as when all were lost; the samples of the first epoch."""
    seen: list[int] = []
    states: list[Any] = []
    for name in ("first", "second"):
        module = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        with manager_of(name, lighthouse) as manager:
            model = LiveDataParallel(module, optimizer, manager)
            loader = LiveDataLoader(Samples(65), 8, model=model)
            for state in states:
                model.load_state_dict(state)
                assert torch.equal(module.weight, state["module"]["weight"])
            for _ in loader.epochs(1):
                for indices, samples in loader:
                    model(samples).mean().backward()
                    assert model.step()
                    seen += indices.tolist()
                    if model.place.num_steps == 3:
                        break
                if not states:
                    states.append(copy.deepcopy(model.state_dict()))
                    break
    return seen


def misuse(rank: int, world_size: int, lighthouse: str) -> dict[str, str]:
    """Return what each kind of misuse is answered with."""
    told: dict[str, str] = {}

    @contextmanager
    def noting(what: str) -> Iterator[None]:
        try:
            yield
        except CannikinError as error:
            told[what] = str(error)

    module = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with manager_of("async", lighthouse, use_async_quorum=True) as manager, noting("async quorum"):
        LiveDataParallel(module, optimizer, manager)
    with manager_of("synced", lighthouse) as manager, noting("SyncBatchNorm"):
        LiveDataParallel(nn.Sequential(module, nn.SyncBatchNorm(1)), optimizer, manager)
    with manager_of("one", lighthouse) as manager:
        model = LiveDataParallel(module, optimizer, manager)
        with noting("no loader"):
            model.meet()
        loader = LiveDataLoader(Samples(10), 4, model=model)
        with noting("no batch"):
            model(torch.zeros(2, 4))
        batches = iter(loader)
        _, samples = next(batches)
        with noting("no backward"):
            model.step()
        with noting("two forwards"):
            model(samples), model(samples)
        with noting("no step"):
            next(batches)
    return told
