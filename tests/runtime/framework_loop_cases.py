"""What the ranks of `test_framework_loops` run: loops as Lightning, Accelerate, Transformers and Ray write them."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from training_cases import Numbered, TinyNet, make_model, take_step

from cannikin.runtime.batch_sampler import HeteroBatchSampler
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel, attach
from cannikin.runtime.schedulers import by_progress

PINNED = [4, 2]


def weights_of(model: Any) -> list[float]:
    """All parameters in a row."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def validation(rank: int, *, who: str | None) -> list[float]:
    """Weights after an epoch with a validation before each step, which leaves "wrapper" or "network" in eval mode."""
    torch.manual_seed(0)
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(26), model=model, batch_size=6, local_batches=PINNED)
    for batch in loader:
        if who is not None:
            model.eval()
            with torch.no_grad():
                model(torch.zeros(5, 3))
            (model.module if who == "wrapper" else model).train()  # Lightning brings back the network alone
            if who == "network":
                model.module.eval()  # freezes BatchNorm
        take_step(model, optimizer, batch)
    return weights_of(model)


def ahead(batches: Iterable[Any], depth: int) -> Iterator[Any]:
    """Batches, of which the next ones are fetched before one is used: Lightning and Accelerate fetch 1."""
    waiting: deque[Any] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > depth:
            yield waiting.popleft()
    yield from waiting


def groups(batches: Iterable[Any], size: int) -> Iterator[Any]:
    """Batches, fetched a group at a time, as Transformers does for gradients that pile up."""
    batches = iter(batches)
    while group := list(islice(batches, size)):
        yield from group


@dataclass(kw_only=True)
class Looked:
    """What a loop that looks ahead saw on one rank."""

    places: list[tuple[int, int]]  # (epoch, position) of the loader's state after each step
    samples: list[int]  # trained on after the state of `SAVED` steps was saved
    resumed: list[int]  # trained on by a run that loaded it


SAVED = 6  # of 5 steps per epoch


def looking_ahead(rank: int, fetch: Callable[[Iterable[Any]], Iterator[Any]], **options: Any) -> Looked:
    """Two epochs of 26 samples as 6, 6, 6, 6, 2."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(26), model=model, batch_size=6, local_batches=PINNED, **options)
    looked, state = Looked(places=[], samples=[], resumed=[]), {}
    for _ in range(2):
        for batch in fetch(loader):
            take_step(model, optimizer, batch)
            now = loader.state_dict()
            looked.places.append((now["epoch"], now["position"]))
            if len(looked.places) == SAVED:
                state = now
            elif state:
                looked.samples += batch[2].tolist()
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(26), model=model, batch_size=6, local_batches=PINNED, **options)
    loader.load_state_dict(state)
    for batch in fetch(loader):
        take_step(model, optimizer, batch)
        looked.resumed += batch[2].tolist()
    return looked


def state_before_training(rank: int) -> list[tuple[int, int]]:
    """(epoch, position) with three batches fetched and none trained on; broken off then; set to another epoch."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(26), model=model, batch_size=6, local_batches=PINNED)
    batches, places = iter(loader), []

    def note() -> None:
        state = loader.state_dict()
        places.append((state["epoch"], state["position"]))

    fetched = [next(batches) for _ in range(3)]
    note()
    take_step(model, optimizer, fetched[0])
    note()
    loader.finish()
    note()
    loader.set_epoch(4)
    note()
    return places


def drawn_ahead(rank: int) -> list[int]:
    """Positions of the state where a script draws the next batch before it trains on the one before."""
    model, optimizer = make_model()
    draws, positions = model.batches(batch_size=6, local_batches=PINNED), []
    local, _ = next(draws)
    for _ in range(3):
        next_local, _ = next(draws)
        take_step(model, optimizer, (torch.ones(local, 3), torch.ones(local, 1), torch.zeros(local)))
        positions.append(draws.state_dict()["position"])
        local = next_local
    draws.close()
    return positions


def no_end(
    rank: int, *, num_workers: int = 0, limit: int | None = None, calls_finish: bool = False, drop_last: bool = False
) -> list[list[int]]:
    """Samples of three passes of a loop that counts batches and never asks for the end, with iterators kept."""
    model, optimizer = make_model()
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": True} if num_workers else {}
    options |= {"drop_last": drop_last, "local_batches": PINNED}
    loader = HeteroDataLoader(Numbered(26), model=model, batch_size=6, **options)
    kept, passes = [], []
    for _ in range(3):
        kept.append(iter(loader))
        samples = []
        for _ in range(limit or len(loader)):
            batch = next(kept[-1])
            take_step(model, optimizer, batch)
            samples += batch[2].tolist()
        if calls_finish:
            loader.finish()
        passes.append(samples)
    assert next(kept[-1], None) is None or not (calls_finish or limit is None)
    return passes


def pass_inside_of_a_pass(rank: int) -> int:
    """An inner loop in the middle of an outer one over the same loader."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(26), model=model, batch_size=6, local_batches=PINNED)
    for batch in loader:
        take_step(model, optimizer, batch)
        for inner in loader:
            return len(inner)
    return 0


def statistics(rank: int, *, depth: int, accumulates: bool = False, finishes: bool = False) -> list[float]:
    """BatchNorm's running mean after an epoch on data whose mean is the rank's number, as 18 and 6 samples.

    With `accumulates` the last two batches of eleven pile up, and no synchronised step comes for them.
    """
    net = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = HeteroDataParallel(net, optimizer)
    loader = HeteroDataLoader(Numbered(264), model=model, batch_size=24, local_batches=[18, 6])
    for number, (features, _, _) in enumerate(ahead(loader, depth), start=1):
        inputs = torch.full((len(features), 1), float(rank))
        if accumulates and number % 3:
            with model.no_sync():
                model(inputs).sum().backward()
            continue
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if finishes:
        loader.finish()
    return net[0].running_mean.tolist()


class Lookahead:
    """An optimizer around another one, whose groups are its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


def wrapped(rank: int, *, by: str) -> list[float]:
    """Weights after an epoch of an attached model, whose module or optimizer somebody has wrapped."""
    torch.manual_seed(0)
    net = TinyNet()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = nn.parallel.DistributedDataParallel(net)
    if by == "torch.compile":
        model = torch.compile(model, backend="eager")
    if by == "another optimizer":
        optimizer = Lookahead(optimizer)
    engine = attach(model, optimizer)
    loader = HeteroDataLoader(Numbered(26), model=engine, batch_size=6, local_batches=PINNED)
    for batch in loader:
        take_step(model, optimizer, batch)
    assert engine.progress > 4
    return weights_of(net)


def python_reducer(rank: int) -> None:
    """A model under a setting of the compiler by which no hook sees whole buckets."""
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        make_model()


def own_dataloader(rank: int, *, fetch: Callable[[Iterable[Any]], Iterator[Any]], num_workers: int = 0) -> list[int]:
    """Samples of two passes over a DataLoader of the script's own, however it fetches."""
    model, optimizer = make_model()
    data, options = Numbered(100), {"num_workers": num_workers, "prefetch_factor": 2} if num_workers else {}
    sampler = HeteroBatchSampler(
        data, model=model, batch_size=6, local_batches=PINNED, prefetch_depth=2 * num_workers, drop_last=True
    )
    samples = []
    for _ in range(2):
        for batch in fetch(DataLoader(data, batch_sampler=sampler, **options)):
            take_step(model, optimizer, batch)
            samples += batch[2].tolist()
    return samples


def prepared_by_accelerate(rank: int, *, even_batches: bool) -> list[int]:
    """Samples of a pass of 8 steps over a DataLoader with our batch sampler that Accelerate has prepared."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}  # as torchrun says
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29999"}  # nobody connects: there is a process group
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even_batches))
    net, data = TinyNet(), Numbered(48)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    engine = attach(model, optimizer)
    sampler = HeteroBatchSampler(data, model=engine, batch_size=6, local_batches=PINNED)
    samples = []
    for batch in accelerator.prepare(DataLoader(data, batch_sampler=sampler)):
        take_step(model, optimizer, batch)
        samples += batch[2].tolist()
    return samples


def optimizer_of_accelerate(rank: int) -> float:
    """Progress of an epoch with a model and an optimizer as `accelerator.prepare` returns them."""
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), TinyNet()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    engine = attach(model, optimizer)
    for batch in HeteroDataLoader(Numbered(24), model=engine, batch_size=6, local_batches=PINNED):
        take_step(model, optimizer, batch)
    return engine.progress


def read_scheduler(rank: int) -> tuple[list[float], bool, list[float], list[float]]:
    """What trainers read from a scheduler by progress: the last rates, its optimizer, the rates at first; a copy's."""
    model, optimizer = make_model(lr=0.05)
    scheduler = by_progress(torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), model)
    for batch in HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=PINNED):
        take_step(model, optimizer, batch)
        scheduler.step()
    same = scheduler.optimizer is optimizer
    return scheduler.get_last_lr(), same, scheduler.base_lrs, copy.copy(scheduler).get_last_lr()


class Watcher:
    """Notes the loader's place and the steps of the optimizer whenever nothing is half done."""

    def __init__(self, loader: HeteroDataLoader) -> None:
        self._loader, self.num_steps, self.rests = loader, 0, []

    def end_step(self) -> None:
        pass

    def rest(self) -> None:
        state = self._loader.state_dict()
        self.rests.append((self.num_steps, state["epoch"], state["position"]))


def rests(rank: int, *, fetch: Callable[[Iterable[Any]], Iterator[Any]]) -> list[tuple[int, int, int]]:
    """Steps of the optimizer, epoch and position at which a snapshot could be taken, in two epochs of five steps."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(30), model=model, batch_size=6, local_batches=PINNED)
    watcher = model.engine.loop.watcher = Watcher(loader)
    for _ in range(2):
        for batch in fetch(loader):
            take_step(model, optimizer, batch)
            watcher.num_steps += 1
    return watcher.rests


class Remembered:
    """A sampler that knows how often it was gone through, and orders by that."""

    def __init__(self) -> None:
        self.num_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return iter(range(26) if self.num_passes % 2 else range(25, -1, -1))

    def __len__(self) -> int:
        return 26

    def state_dict(self) -> dict[str, int]:
        return {"num_passes": self.num_passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_passes = state["num_passes"]


def looking_ahead_over_a_sampler(rank: int) -> Looked:
    return looking_ahead(rank, partial(ahead, depth=1), sampler=Remembered())
