"""Small trainings whose ranks must have one and the same model at every step, also in what is no parameter."""

from __future__ import annotations

import torch
from told import collecting_warnings, run_cases
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel, attach

SHARES = [9, 3]


class Tracking(nn.Module):
    """Has BatchNorm and buffers of its own: a running centre, as DINO's or a codebook, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen, self.head = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.frozen.running_mean.fill_(0.1)
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.frozen(self.norm(x)))
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(y.mean(0), alpha=0.1)
                self.count += len(x)
        return y


def build(rank: int, *, attached: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, HeteroDataLoader]:
    torch.manual_seed(0)
    net = Tracking()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if attached:
        model = DistributedDataParallel(net)
        engine = attach(model, optimizer)
    else:
        model = HeteroDataParallel(net, optimizer)
        engine = model.engine
    data = torch.utils.data.TensorDataset(torch.randn(120, 3) ** 2, torch.randn(120, 2))
    return model, optimizer, HeteroDataLoader(data, model=engine, batch_size=12, local_batches=SHARES)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def statistics(net: nn.Module) -> list[float]:
    return [*net.norm.running_mean.tolist(), *net.norm.running_var.tolist(), float(net.norm.num_batches_tracked)]


def statistics_at_each_step(rank: int, *, attached: bool) -> list[list[float]]:
    """BatchNorm's statistics after each step, and once a step was left out by break."""
    model, optimizer, loader = build(rank, attached=attached)
    found = []
    for x, y in loader:
        train(model, optimizer, x, y)
        found.append(statistics(model.module))
        if len(found) == 7:
            break
    return found


def statistics_and_their_truth(rank: int) -> tuple[list[float], list[float]]:
    """The running mean after one step, and the same of one process: the mean of the whole batch's features."""
    model, optimizer, loader = build(rank)
    whole = []
    for x, y in loader:
        train(model, optimizer, x, y)
        every = [torch.empty(size, 3) for size in SHARES]
        torch.distributed.all_gather_object(every, x)
        whole = torch.cat(every)
        break
    return model.module.norm.running_mean.tolist(), (0.1 * whole.mean(0)).tolist()


def other_buffers(rank: int, *, attached: bool) -> tuple[list[list[float]], list[list[float]]]:
    """The centre and the count that each forward begins with, and what they are after it."""
    model, optimizer, loader = build(rank, attached=attached)
    before, after = [], []
    model.module.register_forward_pre_hook(
        lambda net, _: before.append([*net.centre.tolist(), float(net.count)]), prepend=True
    )
    for x, y in loader:
        train(model, optimizer, x, y)
        after.append([*model.module.centre.tolist(), float(model.module.count)])
    return before, after


def plateau(rank: int) -> tuple[list[float], list[float]]:
    """Learning rates and parameters of a training that every rank validates in mid-epoch, with a rate by that loss."""
    model, optimizer, loader = build(rank)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)
    x_valid, y_valid = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)) ** 2, torch.zeros(64, 2)
    rates = []
    for _ in range(3):
        for index, (x, y) in enumerate(loader):
            train(model, optimizer, x, y)
            if index % 3 == 1:
                model.eval()
                with torch.no_grad():
                    scheduler.step(float((model.module(x_valid) - y_valid).square().mean()))
                model.train()
                rates.append(optimizer.param_groups[0]["lr"])
    return rates, [value for p in model.parameters() for value in p.flatten().tolist()]


def rank_0_alone_evaluates(rank: int) -> list[float]:
    """What is left after an epoch in which rank 0 alone calls the model in eval mode now and then."""
    model, optimizer, loader = build(rank)
    for index, (x, y) in enumerate(loader):
        train(model, optimizer, x, y)
        if rank == 0 and index % 4 == 2:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    return statistics(model.module)


def two_forwards_and_frozen(rank: int) -> tuple[list[float], list[float]]:
    """Statistics after steps of two forwards before one backward, and those of a layer in eval mode."""
    model, optimizer, loader = build(rank)
    model.module.frozen.eval()
    for x, y in loader:
        optimizer.zero_grad()
        first, second = model(x), model(x + 1)
        ((first - y).square().mean() + second.square().mean()).backward()
        optimizer.step()
    return statistics(model.module), model.module.frozen.running_mean.tolist()


def accumulation(rank: int) -> list[float]:
    """Statistics after a pass that ends under no_sync, and in which ranks cut batches into unequal numbers of parts."""
    model, _, loader = build(rank)
    for batch in loader:
        with model.no_sync():
            for x, y in model.micro_batches(batch, num_parts=3 - 2 * rank):
                (model(x) - y).square().mean().backward()
    return statistics(model.module)[:-1]


def lone_last_samples(rank: int) -> list[tuple[list[int], float]]:
    """The totals of a pass, and its progress in steps, of datasets that leave one sample beyond whole batches."""
    found = []
    for length in (25, 13):
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = HeteroDataParallel(net, optimizer)
        data = torch.utils.data.TensorDataset(torch.randn(length, 3), torch.randn(length, 2))
        totals = []
        for x, y in HeteroDataLoader(data, model=model, batch_size=12, local_batches=SHARES):
            train(model, optimizer, x, y)
            totals.append(model.total_batch)
        found.append((totals, model.progress))
    return found


def warnings_of(rank: int, reduction: str, **keywords: str) -> list[str]:
    """What is said of a loss with this reduction."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    model = HeteroDataParallel(net, optimizer, **keywords)
    data = torch.utils.data.TensorDataset(torch.randn(480, 4), torch.randn(480, 2))
    loader = HeteroDataLoader(data, model=model, batch_size=12, local_batches=SHARES)
    with collecting_warnings() as warned:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y, reduction=reduction).backward()
            optimizer.step()
    return [one.text for one in warned]


CASES = {
    "a sum": lambda rank: warnings_of(rank, "sum"),
    "a sum, not weighted": lambda rank: warnings_of(rank, "sum", weighting="none"),
    "a mean": lambda rank: warnings_of(rank, "mean"),
    "at each step, wrapped": lambda rank: statistics_at_each_step(rank, attached=False),
    "at each step, attached": lambda rank: statistics_at_each_step(rank, attached=True),
    "truth": statistics_and_their_truth,
    "other buffers, wrapped": lambda rank: other_buffers(rank, attached=False),
    "other buffers, attached": lambda rank: other_buffers(rank, attached=True),
    "plateau": plateau,
    "rank 0 alone": rank_0_alone_evaluates,
    "two forwards": two_forwards_and_frozen,
    "accumulation": accumulation,
    "lone last samples": lone_last_samples,
}


def run(rank: int, world_size: int) -> dict[str, object]:
    return run_cases(rank, world_size, CASES)
