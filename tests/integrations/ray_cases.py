"""What runs under a real Ray: small trainings that write down each step, and the fates of their workers.

Started by `test_ray.py` as a program of its own, `python ray_cases.py NAME FOLDER`, with which Ray's threads and
processes end. Every worker writes what it trains on into FOLDER; `train_alone` says what one process makes of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_SAMPLES, TOTAL, PINNED = 500, 48, (28, 12, 8)
SPEEDS = {"fast": 1.0, "middle": 0.5, "slow": 0.25}
BOUNDS = {"fast": (1, 48), "middle": (1, 48), "slow": (1, 6)}  # a little less than the slow one's best share


class Recorded(Dataset):
    """Sample i is some features, a label, and the number i itself."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.features = torch.randn(NUM_SAMPLES, 8, generator=generator)
        self.labels = (self.features @ torch.randn(8, 3, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.features[index], self.labels[index], index


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A network, its optimizer and a schedule, the same whenever they are made."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)


# Inside of a worker


@contextlib.contextmanager
def lab_device(speed: float | None, sample_ms: float = 1.0) -> Iterator[None]:
    """Let this worker have a device of the lab's; None for the machine's own."""
    from cannikin.lab.cluster import LabDevice
    from cannikin.lab.throttle import Throttle

    if speed is None:
        yield
        return
    throttle = Throttle(LabDevice(speed=speed, sample_s=sample_ms / 1e3, fixed_s=0.0, forward_share=1 / 3))
    os.environ["CANNIKIN_DEVICE"] = f"lab device of speed {speed:g}"
    throttle.install()
    yield
    throttle.remove()
    del os.environ["CANNIKIN_DEVICE"]


def train(config: dict[str, Any]) -> None:
    """Train as the configuration says, and write down every step; the weights at the end are rank 0's."""
    import ray.train.torch

    from cannikin.integrations.ray import prepare

    begun_s = time.time()
    net, optimizer, scheduler = make_parts()
    model: Any = net
    loader: Any = DataLoader(Recorded(), batch_size=TOTAL // 3, shuffle=True)
    if config.get("ray_prepares", True):
        model = ray.train.torch.prepare_model(net, parallel_strategy_kwargs=config.get("ddp"))
        loader = ray.train.torch.prepare_data_loader(loader)
    options = config.get("options", {})
    model, loader, run = prepare(model, optimizer, loader, also_save={"scheduler": scheduler}, **options)
    group, step, refused = config.get("accumulate", 1), run.resumed_from or 0, ""
    path = Path(config["folder"], f"{config['name']}-{time.time():.3f}-{run.engine.rank}.jsonl")
    with open(path, "w", buffering=1) as log:
        device = os.environ.get("CANNIKIN_DEVICE")
        who = {"rank": run.engine.rank, "num_ranks": run.engine.world_size, "pid": os.getpid(), "device": device}
        print(json.dumps({**who, "first": step, "s": begun_s}), file=log)
        for epoch in range(loader.epoch, config["epochs"]):
            left = len(loader)
            for x, y, indices in loader:
                step, left = step + 1, left - 1
                is_due = step % group == 0 or left == 0
                with contextlib.nullcontext() if is_due else model.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=config.get("bf16", False)):
                        loss = nn.functional.cross_entropy(model(x), y)
                    (loss / group).backward()
                if is_due:
                    if "clip" in config:
                        nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                elif step == 1:
                    refused = refusal(run)
                mean = float(run.engine.weighted_mean(loss))
                line = {
                    "step": step,
                    "epoch": epoch,
                    "indices": [] if loader.is_padding else indices.tolist(),
                    "is_due": is_due,
                    "loss": mean,
                    "rate": scheduler.get_last_lr()[0],
                    "plan": run.engine.plan.local_batches,
                    "s": time.time(),
                    "refused": refused,
                }
                print(json.dumps(line), file=log)
                if step % config.get("evaluate_every", step + 1) == 0:
                    model.eval()
                    with torch.no_grad():
                        model(x)
                    model.train()
                if step % config.get("report_every", step + 1) == 0:
                    run.report({"loss": mean, "step": step})
                if step == config.get("stop_at"):
                    return
            enough = torch.tensor(float(Path(config["folder"], "enough").exists()))
            torch.distributed.all_reduce(enough)
            if enough > 0:
                break
        if config.get("reports"):
            run.report({"loss": mean, "step": step})
    if run.engine.rank == 0:
        torch.save(model.module.state_dict(), Path(config["folder"], f"{config['name']}.pt"))


def refusal(run: Any) -> str:
    """What a report says in the middle of gradients that pile up."""
    from cannikin.errors import InvalidInputError

    try:
        run.report({})
    except InvalidInputError as error:
        return str(error)
    return ""


def train_several(config: dict[str, Any]) -> None:
    """Train one thing after another on the same workers, each rank at its speed."""
    import ray.train

    for each in config["several"]:
        speeds = each.get("speeds")
        with lab_device(None if speeds is None else speeds[ray.train.get_context().get_world_rank()]):
            train({**each, "folder": config["folder"]})


def train_by_label(config: dict[str, Any]) -> None:
    """Train with the device that this worker's node is labelled with."""
    import ray

    with lab_device(SPEEDS[ray.get_runtime_context().get_node_labels()["speed"]], config["sample_ms"]):
        train(config)


# Outside


def read_runs(folder: Path, name: str) -> list[dict[int, tuple[dict[str, Any], list[dict[str, Any]]]]]:
    """Per start of the workers, in order: rank -> (the first line, one line per step)."""
    logs = [path.read_text().splitlines() for path in folder.glob(f"{name}-[0-9]*.jsonl")]
    parsed = [[json.loads(line) for line in lines if line.endswith("}")] for lines in logs]
    runs: list[dict[int, Any]] = []
    for first, *steps in sorted((lines for lines in parsed if lines), key=lambda lines: lines[0]["s"]):
        if not runs or len(runs[-1]) == runs[-1][min(runs[-1])][0]["num_ranks"]:
            runs.append({})
        runs[-1][first["rank"]] = first, steps
    return runs


def committed(runs: list[dict[int, Any]]) -> list[dict[str, Any]]:
    """The steps that count, in order, with all ranks' samples: what came after a checkpoint is taken again."""
    steps: list[dict[str, Any]] = []
    for ranks in runs:
        del steps[ranks[0][0]["first"] :]
        for lines in zip(*(ranks[rank][1] for rank in sorted(ranks)), strict=False):
            assert {line["step"] for line in lines} == {len(steps) + 1}
            steps.append({**lines[0], "indices": sorted(index for line in lines for index in line["indices"])})
    return steps


def train_alone(steps: list[dict[str, Any]], config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses of one process on the same batches."""
    data = Recorded()
    net, optimizer, scheduler = make_parts()
    losses = []
    for step in steps:
        with torch.autocast("cpu", torch.bfloat16, enabled=config.get("bf16", False)):
            loss = nn.functional.cross_entropy(net(data.features[step["indices"]]), data.labels[step["indices"]])
        (loss / config.get("accumulate", 1)).backward()
        losses.append(loss.item())
        if step["is_due"]:
            if "clip" in config:
                nn.utils.clip_grad_norm_(net.parameters(), config["clip"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            assert abs(step["rate"] - scheduler.get_last_lr()[0]) < 1e-12
    return net.state_dict(), losses


def fit(function: Callable[..., None], config: dict[str, Any], name: str, **scaling: Any) -> Any:
    """Run the function on Ray's workers, three unless told otherwise."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(**{"num_workers": 3, **scaling}),
        run_config=RunConfig(
            storage_path=str(Path(config["folder"], "storage")), name=name, failure_config=FailureConfig(max_failures=5)
        ),
    )
    return trainer.fit()


# DDP then never rebuilds its buckets: a sum over three ranks is rounded in the order of an element's place in them.
LASTING = {"find_unused_parameters": True}
SEVERAL: list[dict[str, Any]] = [
    {"name": "adaptive", "epochs": 5, "speeds": (1.0, 0.5, 0.25)},
    {"name": "bare", "epochs": 2, "ray_prepares": False, "options": {"local_batches": PINNED}},
    {"name": "accumulate", "epochs": 2, "accumulate": 3, "clip": 0.2, "options": {"local_batches": PINNED}},
    {"name": "bf16", "epochs": 1, "bf16": True, "options": {"local_batches": PINNED}},
    {
        "name": "pinned",
        "epochs": 2,
        "evaluate_every": 7,
        "reports": True,
        "ddp": LASTING,
        "options": {"local_batches": PINNED},
    },
]

ONE: dict[str, Any] = {"name": "one", "epochs": 1}


def several(folder: Path) -> None:
    """Trainings without faults; one that stops in mid-epoch, and goes on in a run of its own; and one of one worker."""
    with one_node():
        result = fit(train_several, {"several": SEVERAL, "folder": str(folder)}, "several")
        resumed = {**SEVERAL[-1], "name": "resumed", "folder": str(folder)}
        fit(train, {**resumed, "report_every": 16, "stop_at": 16}, "resumed")
        fit(train, resumed, "resumed")
        fit(train, {**ONE, "folder": str(folder)}, "one", num_workers=1)
    (folder / "result.json").write_text(json.dumps(result.metrics))


def faults(folder: Path) -> None:
    """An elastic run on three unlike nodes: a worker is killed, a node is lost, and a node of its kind comes back."""
    config = {
        "name": "faults",
        "epochs": 500,
        "sample_ms": 4.0,
        "report_every": 10,
        "options": {"local_bounds": BOUNDS, "label": "speed"},
        "folder": str(folder),
    }
    scaling = {"num_workers": (2, 3), "elastic_resize_monitor_interval_s": 5.0}
    # Ray wants nodes to be added in the main thread.
    with three_nodes() as (cluster, nodes, add_node), ThreadPoolExecutor(1) as beside:
        running = beside.submit(fit, train_by_label, config, "faults", **scaling)
        try:
            ranks = wait_for_steps(folder, num_runs=1, num_steps=45)
            note(folder, "a worker is killed")
            os.kill(ranks[1][0]["pid"], signal.SIGKILL)
            wait_for_steps(folder, num_runs=2, num_steps=25)
            note(folder, "a node is lost")
            cluster.remove_node(nodes["slow"], allow_graceful=False)
            wait_for_steps(folder, num_runs=3, num_steps=25)
            add_node("slow")
            note(folder, "a node comes back")
            wait_for_steps(folder, num_runs=4, num_steps=25)
        finally:
            (folder / "enough").touch()
        running.result()


def note(folder: Path, what: str) -> None:
    """Write down when something was done to the workers."""
    with open(folder / "fates.jsonl", "a") as file:
        print(json.dumps({"what": what, "s": time.time()}), file=file)


def wait_for_steps(folder: Path, *, num_runs: int, num_steps: int) -> dict[int, Any]:
    """Wait until the workers, in their so manieth start, have taken so many steps; the ranks of that start."""
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s:
        runs = read_runs(folder, "faults")
        if len(runs) >= num_runs and all(len(steps) >= num_steps for _, steps in runs[-1].values()):
            return runs[-1]
        time.sleep(0.3)
    raise TimeoutError(f"start {num_runs} of the workers has not come to {num_steps} steps")


@contextlib.contextmanager
def three_nodes() -> Iterator[tuple[Any, dict[str, Any], Callable[[str], Any]]]:
    """Three nodes of a worker each, labelled by their speed, and one for what is not training."""
    import ray
    from ray.cluster_utils import Cluster

    settings = {"object_store_memory": 80 << 20, "include_dashboard": False}
    with temporary_folder():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **settings})
        add = lambda speed: cluster.add_node(num_cpus=1, labels={"speed": speed}, **settings)  # noqa: E731
        try:
            nodes = {speed: add(speed) for speed in SPEEDS}
            ray.init(address=cluster.address)
            yield cluster, nodes, add
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextlib.contextmanager
def one_node() -> Iterator[None]:
    """A Ray of this machine with three processors, which leaves nothing behind."""
    import ray

    with temporary_folder():
        ray.init(num_cpus=3, object_store_memory=80 << 20, include_dashboard=False)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def temporary_folder() -> Iterator[None]:
    """Let Ray keep its files in a folder with a short name, which names of sockets need, and which goes with it."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    os.environ["RAY_TMPDIR"] = folder
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    {"several": several, "faults": faults}[sys.argv[1]](Path(sys.argv[2]))
