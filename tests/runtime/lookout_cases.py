"""Trainings in which a rank stops, dies, sleeps or evaluates for long: what every other rank says of it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel

PATIENCE_S, LIMIT_S = 2.0, 6.0
AT_STEP = 12


class Words(logging.Handler):
    """Keeps what the library says, from warnings on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Slow(torch.utils.data.Dataset):
    """Sleeps before one sample of one rank."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.sleeps = False

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.sleeps:
            self.sleeps = False
            time.sleep(self.seconds)
        return torch.ones(4)


class Fatal(nn.Linear):
    """Kills its process in DDP's constructor, which asks every module this."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


def train(
    rank: int, world_size: int, port: int, fault: Callable[[int, Any], None], steps: int = 24, *, after: bool = False
) -> dict[str, Any]:
    """Train with a fault before one step's backward; what was said, the error, and how long after the fault it came.

    With `after`, it comes after the step, and the model has a buffer, which DDP's next forward sends to all ranks.
    """
    words, pids = _meet(rank, world_size, port)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    if after:
        net.register_buffer("scale", torch.ones(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer)
    data = Slow(1.6 * PATIENCE_S)
    loader = HeteroDataLoader(data, model=model, batch_size=6)
    fault_s, error = time.monotonic(), None
    try:
        for step, x in enumerate(loader):
            loss = model(x).square().mean()
            if after:
                loss.backward()
                optimizer.step()
            if step == AT_STEP:
                fault_s = time.monotonic()
                fault(rank, data)
            if not after:
                loss.backward()
                optimizer.step()
            if step == steps:
                break
    except RuntimeError as caught:
        error = "\n".join([str(caught), *getattr(caught, "__notes__", ())])
    took_s = time.monotonic() - fault_s
    time.sleep(0.5)  # the others come to their end too
    for pid in pids if error is not None else ():
        if pid != os.getpid() and is_stopped(pid):
            os.kill(pid, signal.SIGKILL)
    if error is not None:
        dist.destroy_process_group()  # nobody will come to a last barrier
    return {"said": words.said, "error": error, "took_s": took_s}


def _meet(rank: int, world_size: int, port: int) -> tuple[Words, list[Any]]:
    """Make a group with a short limit; what will be said, and the ranks' processes."""
    os.environ["CANNIKIN_PATIENCE_S"] = str(PATIENCE_S)
    words = Words()
    logging.getLogger("cannikin").addHandler(words)
    dist.destroy_process_group()
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    return words, pids


def make_a_model(rank: int, world_size: int, port: int, fault: Callable[[int], nn.Module]) -> dict[str, Any]:
    """Make a model out of what the fault leaves; what was said, and the error."""
    words, _ = _meet(rank, world_size, port)
    error = None
    net = fault(rank)
    try:
        HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.01))
    except RuntimeError as caught:
        error = "\n".join([str(caught), *getattr(caught, "__notes__", ())])
        dist.destroy_process_group()
    return {"said": words.said, "error": error}


def take_means(rank: int, world_size: int, port: int, meet: Callable[[Any, torch.Tensor], Any]) -> dict[str, Any]:
    """Train for a few steps, after each of which all ranks meet, the last one too late; what was said, the error."""
    words, _ = _meet(rank, world_size, port)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer)
    error = None
    try:
        for step, x in enumerate(HeteroDataLoader(torch.ones(60, 4), model=model, batch_size=6)):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if step == AT_STEP // 2 and rank == 1:
                time.sleep(LIMIT_S + 4.0)  # alive, but elsewhere
                break
            meet(model, x)
    except RuntimeError as caught:
        error = str(caught)
    dist.destroy_process_group()
    return {"said": words.said, "error": error}


def of_a_number(model: HeteroDataParallel, x: torch.Tensor) -> None:
    model.weighted_mean(1.0)


def of_a_tensor(model: HeteroDataParallel, x: torch.Tensor) -> None:
    model.global_mean(x)


def die_before_the_model(who: int, rank: int) -> nn.Module:
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.Linear(4, 2)


def die_in_ddps_constructor(who: int, rank: int) -> nn.Module:
    return (Fatal if rank == who else nn.Linear)(4, 2)


def come_late(who: int, rank: int) -> nn.Module:
    if rank == who:
        time.sleep(1.6 * PATIENCE_S)
    return nn.Linear(4, 2)


def is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def stop(who: int, rank: int, data: Slow) -> None:
    if rank == who:
        os.kill(os.getpid(), signal.SIGSTOP)


def die(who: int, rank: int, data: Slow) -> None:
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)


def hang_elsewhere(who: int, rank: int, data: Slow) -> None:
    """One rank hangs outside of the training, where the others wait for it."""
    if rank == who:
        time.sleep(LIMIT_S + 2.0)
    else:
        dist.barrier()


def evaluate_and_sleep_in_data(who: int, rank: int, data: Slow) -> None:
    """All ranks are long at something else, and none waits; then one sleeps over its next sample."""
    time.sleep(2 * PATIENCE_S)
    data.sleeps = rank == who


def descriptors_and_threads(rank: int, world_size: int, num_models: int) -> list[tuple[int, int]]:
    """How many this process has after each model of a sweep, trained for three steps and left to the collector.

    Threads may take a moment to end.
    """
    counts: list[tuple[int, int]] = []
    for _ in range(num_models):
        _train_and_let_go()
        gc.collect()
        deadline_s = time.monotonic() + 5.0
        count = _count()
        while len(counts) > 1 and has_grown(counts[1], count) and time.monotonic() < deadline_s:
            time.sleep(0.1)
            count = _count()
        counts.append(count)
    return counts


def has_grown(before: tuple[int, int], after: tuple[int, int]) -> bool:
    return any(now > then for then, now in zip(before, after, strict=True))


def _train_and_let_go() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer)
    for x in HeteroDataLoader(torch.ones(18, 4), model=model, batch_size=6):
        model(x).square().mean().backward()
        optimizer.step()


def _count() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def status_of_a_child_that_collects_a_model(rank: int, world_size: int) -> int:
    """Let go of a model, and have a copy of this process, such as a loader's worker is, collect it."""
    gc.collect()
    gc.disable()
    _train_and_let_go()
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gc.enable()
    return status
