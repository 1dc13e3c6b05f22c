"""One replica of `benchmarks.torchft_churn`: trains under torchft at a set speed, and records every step it takes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from torch.distributed import TCPStore

from cannikin.integrations.torchft import LiveDataLoader, LiveDataParallel


class Numbers(torch.utils.data.Dataset[Any]):
    """Samples that tell their own index, so that what was trained on can be counted."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        values = torch.randn(9, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return index, values[:8], values[:8].sin().sum() + values[8]


def make_network() -> torch.nn.Module:
    """Return the network, the same on every replica, in float64 so that sums in another order hardly differ."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1), torch.nn.Flatten(0)]
    return torch.nn.Sequential(*layers).double()


def make_optimizer(network: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, with a state of its own that who joins must take over."""
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


class _Sleep(torch.autograd.Function):
    """Takes a third of the time in forward and the rest in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return gradients[0], None


class Slow(torch.nn.Module):
    """A network that takes a set time per sample."""

    def __init__(self, network: torch.nn.Module, sample_s: float) -> None:
        super().__init__()
        self.network = network
        self.sample_s = sample_s

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        slept: torch.Tensor = _Sleep.apply(self.network(samples), self.sample_s * len(samples))
        return slept


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all replicas have in common: where to record, and what to train on for how long."""

    out: str
    lighthouse: str
    num_samples: int = 1000
    batch_size: int = 42
    num_epochs: int = 20
    num_workers: int = 0


def train(name: str, sample_s: float, setting: Setting) -> None:
    """Train to the end, and write one line when a step begins and one when it ends."""
    out = Path(setting.out)
    log = os.open(out / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    network = make_network()
    optimizer = make_optimizer(network)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=name,
        lighthouse_addr=setting.lighthouse,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
    )
    model = LiveDataParallel(Slow(network, sample_s), optimizer, manager, name=name)
    data = Numbers(setting.num_samples)
    # Forked, since this process is a fork server's, whose workers would import torch anew.
    workers = {"num_workers": setting.num_workers, "multiprocessing_context": "fork"} if setting.num_workers else {}
    loader = LiveDataLoader(data, setting.batch_size, model=model, **workers)
    with (out / f"{name}-{os.getpid()}.jsonl").open("w") as lines:

        def tell(**record: Any) -> None:
            lines.write(json.dumps({"name": name, **record}) + "\n")
            lines.flush()

        for _ in loader.epochs(setting.num_epochs):
            for indices, samples, targets in loader:
                place, plan, began_s = model.place, model.plan, time.time()
                mine = indices[: model.local_batch].tolist()  # padding counts for nothing
                tell(begun=place.history, plan=plan, mine=mine)
                torch.nn.functional.mse_loss(model(samples), targets).backward()
                committed = model.step()
                tell(
                    step=place.num_steps,
                    epoch=place.epoch,
                    position=place.position,
                    plan=plan,
                    before=place.history,
                    after=model.place.history,
                    committed=committed,
                    began_s=began_s,
                    ended_s=time.time(),
                    reason=model.reason,
                )
        tell(final=model.place.history)
    torch.save(network.state_dict(), out / f"{name}-{os.getpid()}.pt")
    manager.shutdown()
