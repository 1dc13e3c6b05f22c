"""One rank of a training under fault: a real process in a real group, which writes down what it does and is struck.

What it writes, a JSON object per line: the samples of each step before it trains on them, what it loaded, the fault
that strikes it, how it ended. A step that is in a snapshot was begun by every rank, so lines are never missing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import mmap
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from benchmarks.chaos.faults import FIXED_S, KINDS, LIMIT_S, PATIENCE_S, SAMPLE_S, SPEEDS, Chain, Fault, Launch
from cannikin.core.policies.cannikin import Controller
from cannikin.lab.cluster import LabDevice
from cannikin.lab.throttle import Throttle
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel
from cannikin.runtime.snapshot import Snapshot

_NEW_NETWORK, _DIES_WITH_PARENT = 0x40000000, 1  # of setns and prctl
_SCALE = 2.0**8


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a process is to be: which rank, of which launch of which chain.

    Args:
        folder: of the launch, for what ranks write.
        state: for snapshots and the run log, over all launches.
        store: host and port of the store by which ranks find each other.
        namespace: file of this rank's network; "" for the machine's own.
    """

    chain: Chain
    number: int
    rank: int
    folder: Path
    state: Path
    store: tuple[str, int]
    namespace: str

    @property
    def launch(self) -> Launch:
        return self.chain.launches[self.number]

    @property
    def is_last(self) -> bool:
        return self.number == len(self.chain.launches) - 1


class Mark:
    """Where a snapshot was taken: in which launch, after how many of its steps; kept in the snapshot itself."""

    def __init__(self, launch: int) -> None:
        self._launch, self.num_steps = launch, 0
        self.loaded: list[int] | None = None

    def state_dict(self) -> dict[str, int]:
        return {"launch": self._launch, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = [state["launch"], state["num_steps"]]


class Diary:
    """What a rank writes down, as it happens: a line is in the file even where the process is killed after it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: str, **values: Any) -> None:
        """Write a line, with the moment on a clock that all processes share."""
        line = json.dumps({"what": what, "at_s": time.monotonic(), **values})
        os.write(self._file, f"{line}\n".encode())


class Steps:
    """How many steps each rank has begun, in memory that the launcher looks at."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        path.touch()
        os.truncate(path, 8 * num_ranks)
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * num_ranks)
        self._numbers = memoryview(self._memory).cast("q")

    def __getitem__(self, rank: int) -> int:
        return self._numbers[rank]

    def __setitem__(self, rank: int, step: int) -> None:
        self._numbers[rank] = step

    def tolist(self) -> list[int]:
        return self._numbers.tolist()


def sample(index: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features and target of a sample, or of several; a function of the number, in float64."""
    numbers = torch.as_tensor(index, dtype=torch.float64).unsqueeze(-1) + 1
    features = torch.sin(numbers * torch.arange(1.0, 9.0, dtype=torch.float64))
    return features, features.sum(-1, keepdim=True)


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, the same in every process and thread."""
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    own = torch.Generator().manual_seed(0)  # chains are judged in threads, which share torch's
    with torch.no_grad():
        for weight in net.parameters():
            weight.uniform_(-0.3, 0.3, generator=own)
    return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


def flat(net: nn.Module) -> torch.Tensor:
    """Return all weights of a model in a row."""
    return torch.cat([weight.detach().flatten() for weight in net.parameters()])


class Numbered(Dataset[Any]):
    """The samples; `visit` is called before one is read."""

    def __init__(self, length: int, visit: Callable[[str], None]) -> None:
        self._length, self._visit = length, visit

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        self._visit("loading")
        return (*sample(index), index)


class Batch(NamedTuple):
    """A batch, and what is written down of it once it is trained on."""

    features: torch.Tensor
    targets: torch.Tensor
    samples: list[int]
    epoch: int
    plan: tuple[int, ...]


class Fetching:
    """The batches of all passes, each fetched where the chain's loop does so; the last launch makes one pass.

    Args:
        loader, model: which they are for.
        fetch: one of `FETCHES`.
        is_last: whether the launch is the last one.
    """

    def __init__(self, loader: HeteroDataLoader, model: HeteroDataParallel, fetch: str, *, is_last: bool) -> None:
        self._fetch = fetch
        self._row = self._all(loader, model, is_last=is_last)
        self._ahead: list[Batch | None] = []

    @staticmethod
    def _all(loader: HeteroDataLoader, model: HeteroDataParallel, *, is_last: bool) -> Iterator[Batch]:
        num_batches = 0
        while not (is_last and num_batches):
            for features, targets, indices in loader:
                num_batches += 1
                plan = model.plan
                assert plan is not None
                samples = [] if loader.is_padding else indices.tolist()
                yield Batch(features, targets, samples, loader.epoch, plan.local_batches)

    def take(self) -> Batch | None:
        """Return the next batch; None where there is none."""
        return self._ahead.pop() if self._ahead else next(self._row, None)

    def look_ahead(self, place: str) -> None:
        """Fetch the next batch, if this is the place."""
        if place == self._fetch:
            self._ahead.append(next(self._row, None))


class Strikes:
    """The faults of this rank that happen inside of its process: what it visits strikes once the step has come."""

    def __init__(self, order: Order, diary: Diary, throttle: Throttle) -> None:
        self._diary, self._throttle = diary, throttle
        self._step = 0
        faults = enumerate(order.launch.faults)
        self._left = {n: f for n, f in faults if f.rank == order.rank and KINDS[f.kind].place != "outside"}
        self._bad: range = range(0)
        self._slow: range = range(0)
        self._own = throttle.device

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._step = step
        if self._slow and step == self._slow.stop:
            self._throttle.device = self._own
        self.visit("loop")

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, or NaN where that is the fault."""
        return loss * math.nan if self._step in self._bad else loss

    def visit(self, place: str) -> None:
        """Strike, where a fault of this place is due."""
        for number, fault in list(self._left.items()):
            if KINDS[fault.kind].place == place and self._step >= fault.step:
                del self._left[number]
                self._diary.note("fault", number=number)
                self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        steps = range(self._step, self._step + round(fault.length))
        if fault.kind == "stall in loading":
            time.sleep(fault.length)
        elif fault.kind == "slow spell":
            self._slow = steps
            slower = self._own.speed / (2 + 8 * fault.chance)
            self._throttle.device = LabDevice(
                speed=slower, sample_s=SAMPLE_S, fixed_s=FIXED_S, forward_share=self._own.forward_share
            )
        elif fault.kind == "NaN":
            self._bad = steps
        elif fault.kind == "exception":
            raise RuntimeError("the script of this rank has had enough")
        elif fault.kind == "kill of a loader's worker":
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(children[int(fault.chance * len(children))]), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def _set_hooks(net: nn.Module, strikes: Strikes) -> None:
    """Visit every place as training comes to it."""
    net[1].register_forward_pre_hook(lambda *_: strikes.visit("forward"))
    first = next(net.parameters())  # whose gradient comes last, after another bucket's
    first.register_hook(lambda _: strikes.visit("backward"))
    decide, replace = Controller.decide, os.replace

    def visiting(self: Controller, window: Any, job: Any, step: int) -> Any:
        if window is not None:
            strikes.visit("planning")
        return decide(self, window, job, step)

    def replacing(*args: Any, **kwargs: Any) -> None:
        strikes.visit("saving")
        replace(*args, **kwargs)

    Controller.decide = visiting  # type: ignore[method-assign]
    os.replace = replacing


def _join(order: Order) -> None:
    """Make the process group, by the launcher's store, as torchrun's agents have one."""
    limit = timedelta(seconds=LIMIT_S)
    server = dist.TCPStore(*order.store, is_master=False, timeout=limit)
    store = dist.PrefixStore(f"{order.chain.number}-{order.number}", server)
    num_ranks = len(order.launch.members)
    dist.init_process_group("gloo", store=store, rank=order.rank, world_size=num_ranks, timeout=limit)


def _train(order: Order, diary: Diary) -> None:
    chain, rank, members = order.chain, order.rank, order.launch.members
    device = LabDevice(speed=SPEEDS[members[rank]], sample_s=SAMPLE_S, fixed_s=FIXED_S, forward_share=1 / 3)
    throttle = Throttle(device, warn=lambda text: None)
    throttle.install()
    strikes = Strikes(order, diary, throttle)
    steps = Steps(order.folder / "steps", len(members))
    _join(order)
    diary.note("grouped")
    net, optimizer = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=10**9)
    _set_hooks(net, strikes)
    model = HeteroDataParallel(
        net, optimizer, grad_scaler=scaler, lr_rule="none", bucket_cap_mb=1e-3, run_dir=order.state / "run"
    )
    loader = HeteroDataLoader(
        Numbered(chain.num_samples, strikes.visit),
        model=model,
        batch_size=chain.batch_size,
        max_batch_size=chain.max_batch_size,
        seed=chain.number,
        num_workers=chain.num_workers,
        multiprocessing_context="fork" if chain.num_workers else None,
    )
    mark = Mark(order.number)
    snapshot = Snapshot(order.state / "snapshots", model, every_s=None, every_steps=chain.save_every, mark=mark)
    diary.note("loaded", mark=mark.loaded, weights=flat(net).tolist())
    batches = Fetching(loader, model, chain.fetch, is_last=order.is_last)
    while (batch := batches.take()) is not None:
        step = mark.num_steps
        diary.note("step", step=step, epoch=batch.epoch, samples=batch.samples, plan=batch.plan)
        steps[rank] = step
        strikes.begin(step)
        optimizer.zero_grad()
        loss = strikes.loss(nn.functional.mse_loss(model(batch.features), batch.targets))
        batches.look_ahead("forward|backward")
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        batches.look_ahead("backward|step")
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            diary.note("skipped", step=step)
        mark.num_steps = step + 1
        batches.look_ahead("after the step")
    snapshot.close()
    diary.note("weights", weights=flat(net).tolist())


def end_with_parent() -> ctypes.CDLL:
    """Have this process killed when the one that forked it ends, whatever ends that; return the C library."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    return libc


def _enter(libc: ctypes.CDLL, namespace: str) -> None:
    """Give this process a network of its own, before it has any thread."""
    with open(namespace) as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"this process may not enter {namespace}")


def keep_store(namespace: str, store: tuple[str, int]) -> None:
    """Keep a store in a network of its own until killed, as a launcher on a host apart does."""
    _enter(end_with_parent(), namespace)
    server = dist.TCPStore(*store, is_master=True, wait_for_workers=False)
    while server is not None:
        time.sleep(3600)


def _settle_in(order: Order) -> None:
    """Become a process of its own: it ends with the benchmark, has its own network and standard error."""
    libc = end_with_parent()
    errors = os.open(order.folder / f"rank{order.rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(errors, descriptor)
    os.environ["CANNIKIN_DEVICE"] = f"chaos-{order.launch.members[order.rank]}"
    os.environ["CANNIKIN_PATIENCE_S"] = str(PATIENCE_S)
    os.environ.pop("CANNIKIN_POLICY", None)
    if order.namespace:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        _enter(libc, order.namespace)
    torch.set_num_threads(1)
    warnings.simplefilter("always")
    faulthandler.register(signal.SIGUSR1)  # the launcher asks where a rank hangs


def run(order: Order) -> None:
    """Be one rank, in a process that was started for it; never returns."""
    diary, status = Diary(order.folder / f"rank{order.rank}.jsonl"), 0
    try:
        _settle_in(order)
        _train(order, diary)
        diary.note("end", error="")
        dist.barrier()
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/cannikin/" in frame.filename]
        where = [f"{Path(frame.filename).name}: {frame.name}" for frame in frames[-2:]]
        diary.note("end", error="".join(traceback.format_exception_only(error)).strip(), where=where)
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # torch's gloo threads now and then abort an orderly exit
