"""What ranks read from iterable datasets: the same stream, or not; and streams of their own."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from told import collecting_warnings, run_cases
from torch.utils.data import IterableDataset, get_worker_info

import cannikin

LENGTH = 48


class Numbers(IterableDataset):
    """Numbers in some order, each as a sample of one number and, where `noise` is, a random one."""

    def __init__(self, numbers: Any, *, noise: bool = False, fails_at: int | None = None) -> None:
        self.numbers, self.noise, self.fails_at = numbers, noise, fails_at

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        numbers = self.numbers() if callable(self.numbers) else self.numbers
        for number in list(numbers)[first::step]:
            if number == self.fails_at:
                raise OSError("the file is damaged")
            yield torch.tensor([number, float(torch.randn(())) if self.noise else 0.0], dtype=torch.float64)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x[:, 0]).square()


class Run:
    """A model with its loader; what it was given, and its gradients at fixed weights."""

    def __init__(self, data: torch.utils.data.Dataset, *, total: int = 8, policy: str = "even", **options: Any) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        self.model = cannikin.HeteroDataParallel(net, optimizer, policy=policy)
        self.loader = cannikin.HeteroDataLoader(data, model=self.model, batch_size=total, **options)
        self.optimizer = optimizer
        self.samples: list[list[int]] = []
        self.gradients: list[float] = []
        self.totals: list[int] = []

    def train(self, num_steps: int | None = None) -> Run:
        for step, batch in enumerate(self.loader):
            self.optimizer.zero_grad()
            self.model(batch).mean().backward()
            self.totals.append(self.model.total_batch)
            self.optimizer.step()
            self.samples.append([] if self.loader.is_padding else batch[:, 0].int().tolist())
            self.gradients.append(float(self.model.module.weight.grad))
            if step + 1 == num_steps:
                break
        return self


def told_samples(run: Run) -> tuple[list[list[int]], list[float]]:
    return run.samples, run.gradients


def told_totals(run: Run) -> tuple[list[list[int]], list[float], list[int]]:
    return run.samples, run.gradients, run.totals


def by_process() -> list[int]:
    """An order seeded by the process, as webdataset's shuffle is."""
    numbers = list(range(LENGTH))
    random.Random(os.getpid()).shuffle(numbers)
    return sorted(numbers, key=lambda number: number != dist.get_rank())  # by chance one pair in 48 would begin alike


def by_python() -> list[int]:
    """An order by Python's own generator, which ranks seed differently."""
    numbers = list(range(LENGTH))
    random.shuffle(numbers)
    return numbers


def split_by_rank(rank: int) -> Any:
    return told_samples(Run(Numbers(range(rank, LENGTH, dist.get_world_size()))).train())


def split_from_the_middle_on(rank: int) -> Any:
    same, own = list(range(24)), list(range(24 + rank, LENGTH, 2))
    return told_samples(Run(Numbers(same + own)).train())


def shuffled_by_process(rank: int) -> Any:
    return told_samples(Run(Numbers(by_process)).train())


def shuffled_by_process_and_not_checked(rank: int) -> Any:
    return told_samples(Run(Numbers(by_process), sharded=False).train())


def shuffled_and_augmented(rank: int, num_workers: int = 0) -> Any:
    random.seed(rank)
    torch.manual_seed(rank)
    run = Run(Numbers(by_python, noise=True), num_workers=num_workers)
    run.train().train()
    return run.samples, float(torch.rand(())), random.random()


def shuffled_and_augmented_by_workers(rank: int) -> Any:
    return shuffled_and_augmented(rank, 2)


def unequal(rank: int, num_workers: int = 0) -> Any:
    return told_samples(Run(Numbers(range(LENGTH - 16 * rank)), num_workers=num_workers).train())


def empty_on_one_rank(rank: int) -> Any:
    return told_samples(Run(Numbers(range(LENGTH * rank))).train())


def unequal_in_the_last_batch(rank: int) -> Any:
    return told_samples(Run(Numbers(range(LENGTH - 3 * rank))).train())


def unequal_with_workers(rank: int) -> Any:
    return unequal(rank, 2)


def unequal_under_no_weighting(rank: int) -> Any:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = cannikin.HeteroDataParallel(net, optimizer, weighting="none")
    for batch in cannikin.HeteroDataLoader(Numbers(range(LENGTH - 16 * rank)), model=model, batch_size=8):
        model(batch).mean().backward()
        optimizer.step()


def damaged_on_one_rank(rank: int) -> Any:
    return told_samples(Run(Numbers(range(LENGTH), fails_at=20 if rank else None)).train())


def uncounted_on_one_rank(rank: int) -> Any:
    """A loader of indices, whose items one rank fails to count."""

    def count(batch: Any) -> float:
        if rank and 20 in batch[:, 0].tolist():
            raise OSError("no such count")
        return float(len(batch))

    data = list(torch.arange(float(LENGTH), dtype=torch.float64)[:, None])
    return told_samples(Run(data, item_count=count, shuffle=False).train())


def own_streams(rank: int, **options: Any) -> Any:
    data = Numbers(range(100 * rank, 100 * rank + (13, 30)[rank]))
    return told_totals(Run(data, sharded=True, local_batches=[6, 2], **options).train())


def progress_of_own_streams(rank: int) -> Any:
    data = Numbers(range(100 * rank, 100 * rank + (8, 80)[rank]))
    return Run(data, sharded=True, local_batches=[4, 4]).train().model.progress


def own_streams_of_tokens(rank: int) -> Any:
    return own_streams(rank, item_count=lambda batch: float(batch[:, 0].sum()) + 1)


def own_streams_resumed(rank: int) -> Any:
    data = Numbers(range(100 * rank, 100 * rank + (13, 30)[rank]))
    first = Run(data, sharded=True, local_batches=[6, 2]).train(4)
    state = first.loader.state_dict()
    second = Run(data, sharded=True, local_batches=[4, 4])
    second.loader.load_state_dict(state)
    return state, first.samples, second.train().samples, second.train().samples


def own_streams_that_begin_so(numbers: Any) -> Any:
    """What is warned of where each rank draws these numbers, twice."""
    with collecting_warnings() as warned:
        Run(Numbers(numbers), sharded=True, local_batches=[6, 2]).train().train()
    return _told_of_streams(warned)


def _told_of_streams(warned: Any) -> list[str]:
    return [warning.text for warning in warned if "streams" in warning.text]


def own_streams_alike(rank: int) -> Any:
    return own_streams_that_begin_so(range(LENGTH))


def own_streams_of_one_number(rank: int) -> Any:
    return own_streams_that_begin_so([7] * LENGTH)


def own_streams_that_differ_late(rank: int) -> Any:
    return own_streams_that_begin_so([*range(15), 50 + rank, *range(15, LENGTH)])


def own_batches_alike(rank: int) -> Any:
    """As where a generator has a loader without a split inside."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = cannikin.HeteroDataParallel(net, optimizer, policy="even")
    plain = torch.utils.data.DataLoader(Numbers(range(LENGTH)), batch_size=4)
    with collecting_warnings() as warned:
        for batch in cannikin.HeteroDataLoader.like(iter(list(plain)), model=model):
            model(batch).mean().backward()
            optimizer.step()
    return _told_of_streams(warned)


def own_stream_without_samples(rank: int) -> Any:
    return told_samples(Run(Numbers(range(LENGTH if rank else 0)), sharded=True).train())


class Sized(torch.utils.data.Dataset):
    """The numbers from 0 on, each as a sample."""

    def __init__(self, files: list[int]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.files[index], 0.0], dtype=torch.float64)


def sampler_by_rank(rank: int) -> Any:
    order = random.Random(rank).sample(range(LENGTH), LENGTH)
    return told_samples(Run(Sized(list(range(LENGTH))), sampler=order).train())


def sampler_of_all(rank: int) -> Any:
    torch.manual_seed(rank)
    sampler = torch.utils.data.RandomSampler(range(LENGTH))
    return told_samples(Run(Sized(list(range(LENGTH))), sampler=sampler, num_workers=1).train())[0]


def dataset_by_rank(rank: int) -> Any:
    with collecting_warnings() as warned:
        Run(Sized(list(range(rank, LENGTH, 2))))
    return warned


def lists_shuffled_by_epoch(rank: int, own: bool = False) -> Any:
    """What is warned of where the script shuffles a list anew before each pass but the first."""
    with collecting_warnings() as warned:
        run = Run(Sized(list(range(LENGTH))))
        for epoch in range(3):
            if epoch:
                random.Random(rank if own else epoch).shuffle(run.loader.dataset.files)
            run.train()
    return [warning.text for warning in warned if "lists" in warning.text], run.samples[-LENGTH // 8 :]


def lists_shuffled_by_rank(rank: int) -> Any:
    return lists_shuffled_by_epoch(rank, own=True)


def loader_first(rank: int, attached: bool = False) -> Any:
    loader = cannikin.HeteroDataLoader(Sized(list(range(LENGTH))), batch_size=8, shuffle=False)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    if attached:
        model: Any = torch.nn.parallel.DistributedDataParallel(net)
        cannikin.attach(model, optimizer, loader=loader)
    else:
        model = cannikin.HeteroDataParallel(net, optimizer, loader=loader)
    seen: list[int] = []
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()
        seen += batch[:, 0].int().tolist()
    return seen


def attached_after(rank: int) -> Any:
    return loader_first(rank, attached=True)


def plain_loader(rank: int) -> Any:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    cannikin.HeteroDataParallel(net, optimizer, loader=torch.utils.data.DataLoader(Sized([1, 2])))


CASES = {
    case.__name__: case
    for case in (
        split_by_rank,
        split_from_the_middle_on,
        shuffled_by_process,
        shuffled_by_process_and_not_checked,
        shuffled_and_augmented,
        shuffled_and_augmented_by_workers,
        unequal,
        empty_on_one_rank,
        unequal_in_the_last_batch,
        unequal_with_workers,
        unequal_under_no_weighting,
        damaged_on_one_rank,
        uncounted_on_one_rank,
        own_streams,
        progress_of_own_streams,
        own_streams_of_tokens,
        own_streams_resumed,
        own_streams_alike,
        own_streams_of_one_number,
        own_streams_that_differ_late,
        own_batches_alike,
        own_stream_without_samples,
        sampler_by_rank,
        sampler_of_all,
        dataset_by_rank,
        lists_shuffled_by_epoch,
        lists_shuffled_by_rank,
        loader_first,
        attached_after,
        plain_loader,
    )
}


def run_streams(rank: int, world_size: int, names: list[str] | None = None) -> dict[str, Any]:
    return run_cases(rank, world_size, {name: CASES[name] for name in names or CASES})
