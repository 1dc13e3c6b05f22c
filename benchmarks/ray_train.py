"""Step times under Ray Train, with Ray's own DDP and with ours, in turns on the same three workers.

    python -m benchmarks.ray_train

It needs Ray. Workers have lab devices of speed 1, 1/2 and 1/4, and then of equal speed, where a second model under
Ray's own DDP is the control. Every model stays alive, and each trains for a few steps in turn.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cannikin
from cannikin.integrations.ray import prepare
from cannikin.lab.cluster import LabDevice
from cannikin.lab.throttle import Throttle

RAY, CONTROL, OURS, EVEN = "Ray's DDP", "Ray's DDP again", "ours", "ours, even split"
BARE = "HeteroDataParallel, even split"  # without what is Ray's
UNLIKE = {"speeds": (1.0, 0.5, 0.25), "kinds": (RAY, OURS), "warm_up": 60, "rounds": 8, "steps": 25}
ALIKE = {"speeds": (1.0, 1.0, 1.0), "kinds": (RAY, CONTROL, EVEN, BARE), "warm_up": 30, "rounds": 30, "steps": 15}
SAMPLE_MS, LOCAL_BATCH = 2.0, 16


def steps_of(kind: str) -> Iterator[Any]:
    """Train for ever, one step at a time, and yield the plan; None where there is none."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4800, 64), torch.randint(0, 10, (4800,)))
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if kind == BARE:
        model = cannikin.HeteroDataParallel(net, optimizer, policy="even")
        loader = cannikin.HeteroDataLoader(data, batch_size=3 * LOCAL_BATCH, model=model)
        yield from _train(model, optimizer, loader)
    model = ray.train.torch.prepare_model(net)
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=LOCAL_BATCH, shuffle=True))
    run = None
    if kind in (OURS, EVEN):
        model, loader, run = prepare(model, optimizer, loader, policy="even" if kind == EVEN else "cannikin")
    for _ in _train(model, optimizer, loader):
        yield run and run.engine.plan.local_batches


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Iterator[None]:
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            yield


def measure(config: dict[str, Any]) -> None:
    """Train each kind in turn on this worker, and write down milliseconds per step of every round."""
    rank = ray.train.get_context().get_world_rank()
    device = LabDevice(speed=config["speeds"][rank], sample_s=SAMPLE_MS / 1e3, fixed_s=0.0, forward_share=1 / 3)
    Throttle(device).install()
    trained = {kind: steps_of(kind) for kind in config["kinds"]}
    found: dict[str, Any] = {kind: [] for kind in trained}
    plans: dict[str, Any] = {}

    def take(kind: str, num_steps: int) -> float:
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(num_steps):
            plans[kind] = next(trained[kind])
        return (time.perf_counter() - start_s) / num_steps * 1e3

    for kind in trained:
        take(kind, config["warm_up"])
    for number in range(config["rounds"]):
        for kind in config["kinds"][:: 1 if number % 2 == 0 else -1]:
            found[kind].append(take(kind, config["steps"]))
    if rank == 0:
        Path(config["told"]).write_text(json.dumps({"ms": found, "plans": plans}))


def main() -> None:
    """Print the medians of all rounds, and of their ratios to Ray's own DDP in the same round."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    ray.init(num_cpus=3, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        for name, config in {"unlike": UNLIKE, "alike": ALIKE}.items():
            trainer = ray.train.torch.TorchTrainer(
                measure,
                train_loop_config={**config, "told": f"{folder}/told.json"},
                scaling_config=ScalingConfig(num_workers=3),
                run_config=RunConfig(name=name, storage_path=os.path.join(folder, "storage")),
            )
            trainer.fit()
            told = json.loads(Path(folder, "told.json").read_text())
            for kind, times in told["ms"].items():
                ratios = np.array(times) / np.array(told["ms"][RAY])
                spread = f"{np.quantile(ratios, 0.25):.3f} to {np.quantile(ratios, 0.75):.3f}"
                ratio = f"{np.median(ratios):.3f} of {RAY} (middle half {spread})"
                print(f"{name}: {kind}: {np.median(times):.1f} ms per step, {ratio}, plan {told['plans'][kind]}")
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
