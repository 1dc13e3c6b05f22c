"""Hosts that are lost and come back under torchrun's elastic agent: `python -m benchmarks returning`.

Three agents on this machine, one rank each, of 1, 2 and 4 ms per sample, train with a snapshot every two seconds. A
rank is killed, then an agent with its rank; the agent is started again; then it gets SIGTERM. For each: seconds from
the last step before it to the first after it, steps that were taken again, and along the run that survives the samples
of its epochs that are missing or come twice. The weights of the last snapshot are compared with those of one process
that takes the same steps on the samples that are in them.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import cannikin
from benchmarks.launching import ROOT
from cannikin.runtime.snapshot_file import list_snapshots, open_snapshot, read_chunks

NUM_SAMPLES, TOTAL, EVERY_S = 433, 42, 2.0
SAMPLE_MS = {"a": 1.0, "b": 2.0, "c": 4.0}
NUM_STEPS = 25  # between two faults
LIMIT_S = 300.0


class Numbered(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Sample i is i, some numbers and what they add up to."""

    def __len__(self) -> int:
        """Return how many there are."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return one of them, always the same."""
        x = torch.randn(16, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return index, x, x.sum(0, keepdim=True)


def make_net() -> torch.nn.Module:
    """Return the network, always the same."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()


def make_optimizer(net: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, with a state that matters."""
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


# What each rank runs.


def train(folder: Path) -> None:
    """Train until somebody ends it, and note every step."""
    net = make_net()
    optimizer = make_optimizer(net)
    model = cannikin.HeteroDataParallel(net, optimizer)
    loader = cannikin.HeteroDataLoader(Numbered(), model=model, batch_size=TOTAL)
    snapshot = cannikin.Snapshot(folder / "snapshots", model, every_s=EVERY_S)
    started = [time.time()]
    dist.broadcast_object_list(started)
    step, sample_s = snapshot.resumed_from or 0, SAMPLE_MS[os.environ["HOST"]] / 1e3
    with (folder / f"seen-{started[0]:.3f}-{dist.get_rank()}").open("w") as log:
        while True:
            epoch = loader.epoch
            for index, x, y in loader:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                time.sleep(sample_s * len(index))
                loss.backward()
                optimizer.step()
                seen = [] if loader.is_padding else index.tolist()
                plan = model.plan.local_batches if model.plan is not None else ()
                noted = {"step": step, "time": time.time(), "epoch": epoch, "seen": seen, "plan": plan}
                json.dump({**noted, "host": os.environ["HOST"]}, log)
                log.write("\n")
                log.flush()
                step += 1


# What starts and ends them.


class Agent:
    """A torchrun of one rank, as on a host of its own."""

    def __init__(self, host: str, folder: Path, port: int) -> None:
        environment = {**os.environ, "HOST": host, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        options = ["--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=returning", "--rdzv-conf=last_call_timeout=5"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(Path(__file__)), str(folder)]
        with (folder / f"log-{host}").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def ranks(self) -> list[int]:
        """Return the processes that it has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()] if children.exists() else []

    def kill(self, *, with_agent: bool) -> None:
        """Kill its rank, and itself before that."""
        ranks = self.ranks()
        if with_agent:
            self.process.kill()
            self.process.wait()
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Measure and print; the status is always 0."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, port = Path(temporary), 20000 + os.getpid() % 10000
        agents = {"a": Agent("a", folder, port)}
        wait_for_port(port)  # the first has the rendezvous, and stays
        agents |= {host: Agent(host, folder, port) for host in "bc"}
        faults: list[tuple[str, Callable[[], Any], int]] = [
            ("a rank is killed", lambda: agents["b"].kill(with_agent=False), 3),
            ("an agent and its rank are killed", lambda: agents["c"].kill(with_agent=True), 2),
            ("an agent joins", lambda: agents.update(c=Agent("c", folder, port)), 3),
            ("an agent gets SIGTERM", lambda: agents["c"].process.terminate(), 2),
        ]
        try:
            wait_for_steps(folder, 1, 3)
            for number, (_, fault, num_ranks) in enumerate(faults):
                fault()
                wait_for_steps(folder, number + 2, num_ranks)
            for agent in agents.values():
                agent.process.terminate()
            for agent in agents.values():
                agent.process.wait(60)
        finally:
            for agent in agents.values():
                agent.kill(with_agent=True)
        show([name for name, _, _ in faults], read_runs(folder), folder)
    return 0


def wait_for_port(port: int) -> None:
    """Wait until somebody listens there."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)


def wait_for_steps(folder: Path, num_runs: int, num_ranks: int) -> None:
    """Wait until there have been so many runs, and the last has been at it for some steps and two snapshots' time."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        runs = read_runs(folder)
        if len(runs) >= num_runs and len(runs[-1]["ranks"]) == num_ranks and len(runs[-1]["steps"]) >= NUM_STEPS:
            first, *_, last = runs[-1]["steps"]
            if time_of(runs[-1], last) - time_of(runs[-1], first) > 2 * EVERY_S + 1.0:
                return
        time.sleep(0.5)
    logs = "\n".join(path.read_text()[-3000:] for path in folder.glob("log-*"))
    raise SystemExit(f"no run {num_runs} on {num_ranks} ranks within {LIMIT_S:.0f} s\n{logs}")


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return every run that has begun, in order: what each rank noted, and steps that all ranks have noted."""
    found: dict[str, list[dict[int, Any]]] = {}
    for path in sorted(folder.glob("seen-*")):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found.setdefault(path.name.split("-")[1], []).append({line["step"]: line for line in lines})
    runs = [{"ranks": ranks, "steps": sorted(set.intersection(*map(set, ranks)))} for ranks in found.values()]
    return [run for run in runs if run["steps"]]


def excess(run: dict[str, Any], step: int) -> float:
    """Return by how much the known times of a step's split exceed the best split's."""
    ms_of = [SAMPLE_MS[noted[step]["host"]] for noted in run["ranks"]]
    taken_ms = max(batch * ms for batch, ms in zip(run["ranks"][0][step]["plan"], ms_of, strict=True))
    best_ms = min(
        t for ms in ms_of for t in (ms * k for k in range(TOTAL + 1)) if sum(t // ms for ms in ms_of) >= TOTAL
    )
    return taken_ms / best_ms - 1


def show(faults: list[str], runs: list[dict[str, Any]], folder: Path) -> None:
    """Print what each fault has cost, and compare the end with one process."""
    load = os.getloadavg()[1]
    print(f"Python {platform.python_version()}, torch {torch.__version__}, gloo; load of this machine {load:.0f}\n")
    print("| | ranks before, after | seconds without a step | steps taken again | first split after | over the best |")
    print("|---|---|---|---|---|---|")
    assert len(runs) == len(faults) + 1, f"{len(runs)} runs"
    for name, before, after in zip(faults, runs, runs[1:], strict=False):
        last, first = before["steps"][-1], after["steps"][0]
        gap_s = time_of(after, first) - time_of(before, last)
        print(
            f"| {name} | {len(before['ranks'])}, {len(after['ranks'])} | {gap_s:.1f} | {last + 1 - first} | "
            f"{', '.join(map(str, after['ranks'][0][first]['plan']))} | {excess(after, first):+.0%} |"
        )
    name = list_snapshots(folder / "snapshots")[0]
    ends = [run["steps"][0] for run in runs[1:]] + [name.step]
    kept = [(run, step) for run, end in zip(runs, ends, strict=True) for step in range(run["steps"][0], end)]
    steps = [[i for rank in run["ranks"] for i in rank[step]["seen"]] for run, step in kept]
    epochs = [run["ranks"][0][step]["epoch"] for run, step in kept]
    times = Counter((epoch, index) for epoch, step in zip(epochs, steps, strict=True) for index in step)
    whole = range(max(epochs))
    lost = sum((epoch, index) not in times for epoch in whole for index in range(NUM_SAMPLES))
    print(
        f"\n{len(steps)} steps in {max(epochs)} whole epochs and a part: {sum(times.values())} samples, lost {lost}, ",
        end="",
    )
    print(f"repeated {sum(count - 1 for count in times.values())}")
    path = folder / "snapshots" / str(name)
    row = torch.empty(path.stat().st_size, dtype=torch.uint8)
    list(read_chunks(path, row))
    opened = open_snapshot(row)
    saved, alone = opened.part(opened.state["objects"]["model"]), take_alone(steps).state_dict()
    error = max(float((saved[key] - alone[key]).abs().max() / alone[key].abs().max()) for key in alone)
    print(f"weights of the last snapshot (step {name.step}) against one process on these samples: {error:.1e} at most")


def time_of(run: dict[str, Any], step: int) -> float:
    """Return when the last rank had taken a step."""
    return max(float(rank[step]["time"]) for rank in run["ranks"])


def take_alone(steps: list[list[int]]) -> torch.nn.Module:
    """Return the network after one process has taken these steps."""
    net, data = make_net(), Numbered()
    optimizer = make_optimizer(net)
    for step in steps:
        _, x, y = (
            torch.stack(list(part)) if isinstance(part[0], torch.Tensor) else part
            for part in zip(*map(data.__getitem__, step), strict=True)
        )
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net


if __name__ == "__main__":
    train(Path(sys.argv[1]))
