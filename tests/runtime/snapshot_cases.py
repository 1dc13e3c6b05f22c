"""Small trainings with snapshots, as single ranks run them."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

import cannikin
from cannikin.errors import InvalidInputError, StateError
from cannikin.runtime import ending, snapshot_file
from cannikin.runtime import snapshot as snapshot_module

NUM_SAMPLES = 46


class StoppedError(Exception):
    """Stands for whatever ends a process between two snapshots."""


class Noisy(Dataset):
    """Sample i is i and some noise, from all three generators."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return index, index / NUM_SAMPLES + 0.1 * noise


class Failing(Noisy):
    """Whose samples cannot be read."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        raise StoppedError


class Recording:
    """One rank's training: what it has seen, and what it ends with."""

    def __init__(
        self,
        folder: str,
        *,
        seed: int = 0,
        workers: int = 0,
        policy: str = "even",
        run_dir: str | None = None,
        optimizer: str = "AdamW",
        batch_size: int = 8,
        drop_last: bool = False,
        num_samples: int = NUM_SAMPLES,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        make = getattr(torch.optim, optimizer)
        self.optimizer = make(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.model = cannikin.HeteroDataParallel(self.net, self.optimizer, policy=policy, run_dir=run_dir)
        # The rank was started by a server of multiprocessing's already: another would have to import torch first.
        own: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
        own |= {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        self.loader = cannikin.HeteroDataLoader(Noisy(num_samples), model=self.model, **own)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"every_s": None, "every_steps": 1, **options}
            self.snapshot = cannikin.Snapshot(folder, self.model, scheduler=self.scheduler, **options)
        self.warned = [str(warning.message) for warning in caught]
        self.progress = self.model.engine.progress
        self.seen: list[tuple[int, int]] = []  # epoch and index
        self.num_steps = 0

    def train(self, num_epochs: int, stop_after: int = -1) -> None:
        for epoch in range(self.loader.epoch, num_epochs):
            for index, x in self.loader:
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.optimizer.step()
                if not self.loader.is_padding:
                    self.seen += [(epoch, number) for number in index.tolist()]
                self.num_steps += 1
                self.snapshot.wait()  # for a disk that is as fast as the steps
                self.after_step()
                if self.num_steps == stop_after:
                    raise StoppedError
            self.scheduler.step()

    def after_step(self) -> None:
        """For subclasses."""

    def result(self) -> dict[str, Any]:
        weights = torch.cat([value.double().reshape(-1) for value in self.net.state_dict().values()])
        return {
            "resumed_from": self.snapshot.resumed_from,
            "seen": self.seen,
            "weights": weights.numpy(),
            "lr": self.scheduler.get_last_lr()[0],
            "warned": self.warned,
            "progress": self.progress,
        }


def run(rank: int, world_size: int, folder: str, num_epochs: int, stop_after: int, options: dict[str, Any]) -> Any:
    """Train; where told so, stop after some steps as if the process had been killed."""
    training = Recording(folder, **options)
    with contextlib.suppress(StoppedError):
        training.train(num_epochs, stop_after)
    training.snapshot.close()
    return training.result()


def seed_unlike(rank: int, world_size: int, folder: str, stop_after: int) -> Any:
    """Train with a seed per rank, and say what each generator draws next once the run has been resumed."""
    training = Recording(folder, seed=rank)
    fresh = draw()
    training.snapshot.end_step()
    drawn = draw()
    if stop_after:
        with contextlib.suppress(StoppedError):
            training.train(2, stop_after)
    training.snapshot.close()
    return fresh, drawn


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def told_to_end(rank: int, world_size: int, folder: str, whom: int, options: dict[str, Any]) -> Any:
    """Train for ever, and send one rank SIGTERM after its fifth step, or all its processes twice, as under Slurm."""

    class Told(Recording):
        def after_step(self) -> None:
            if self.num_steps == 5 and rank == whom:
                if options.get("workers"):
                    for _ in range(2):
                        os.killpg(os.getpgid(0), signal.SIGTERM)
                        time.sleep(0.2)  # or both would be one to a worker that is busy
                else:
                    os.kill(os.getpid(), signal.SIGTERM)

    if options.get("workers"):
        os.setpgid(0, 0)
    training = Told(folder, run_dir=folder, **options)
    try:
        training.train(1000)
    except SystemExit as end:
        return end.code, training.num_steps, training.result()
    return None


def told_to_end_on_a_bad_disk(rank: int, world_size: int, folder: str, is_gone: bool) -> Any:
    """Train until the disk fails, then send SIGTERM; return the status and what was said of the last snapshot."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Told(Recording):
        def after_step(self) -> None:
            if self.num_steps == 4 and rank == 0:
                os.fsync = fsync  # type: ignore[assignment]
                for name in names(Path(folder)) if is_gone else ():
                    os.unlink(os.path.join(folder, name))
            if self.num_steps == 5 and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cannikin").addHandler(handler)
    training = Told(folder, run_dir=folder)
    try:
        training.train(1000)
    except SystemExit as end:
        return end.code, [words for words in said if "SIGTERM" in words]
    return None


def own_folders(rank: int, world_size: int, folders: list[str], stop_after: int) -> Any:
    """Train with a folder per rank, as on hosts without shared storage."""
    return run(rank, world_size, folders[rank], 3, stop_after, {})


def accumulate(rank: int, world_size: int, folder: str) -> Any:
    """Step the optimizer after every third batch only, and return the steps at which snapshots were taken."""
    training = Recording(folder)
    taken: list[int] = []
    for index, (_, x) in enumerate(training.loader):
        training.model(x).square().mean().backward()
        if index % 3 == 2:
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.snapshot.wait()
        taken += [int(training.snapshot.last["step"])] if training.snapshot.last else []
    training.snapshot.close()
    return sorted(set(taken))


def two_models(rank: int, world_size: int, folder: str, is_second: bool) -> Any:
    """Save two models and an average of weights; say what is saved, and what a second start that names more loads."""
    training = Recording(folder + "-unused")
    training.snapshot.close()
    critic = torch.nn.Linear(1, 1)
    steps = torch.optim.SGD(critic.parameters(), lr=0.1)
    follower = cannikin.HeteroDataParallel(critic, steps, follows=training.model)
    average = torch.optim.swa_utils.AveragedModel(training.net)
    named = {"model_again": training.model, "optimizers": [training.optimizer], "critic": follower, "average": average}
    if is_second:
        named["more"] = torch.nn.Linear(1, 1)
        with contextlib.suppress(InvalidInputError):  # else it would stand in the optimizer's place
            cannikin.Snapshot(folder, training.model, every_s=None, optimizer=average)
            raise AssertionError("an object under the name of the model's own was not refused")
    with torch.no_grad():
        critic.weight.fill_(-1.0 if is_second else 7.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        snapshot = cannikin.Snapshot(folder, training.model, every_s=None, **named)
    snapshot.save()
    for _, x in training.loader:
        training.model(x).square().mean().backward()
        training.optimizer.step()
    snapshot.close()
    return sorted(snapshot.names), critic.weight.item(), [str(warning.message) for warning in caught]


def two_jobs(rank: int, world_size: int, folder: str) -> Any:
    """Begin where another job keeps its snapshots, and again while it is killed.

    Return what was refused, how long the second job waited for the first to be gone, and what it printed.
    """
    before = run(rank, world_size, folder, 1, 3, {})
    identity = names(Path(folder))[0].removesuffix(".snapshot").split("-")[-1]
    reading, writing = os.pipe()
    if (other := os.fork()) == 0:
        snapshot_file.SnapshotLock(Path(folder), identity).take()
        os.write(writing, b"1")
        time.sleep(50)
        os._exit(0)
    os.read(reading, 1)
    refused, printed = "", io.StringIO()
    snapshot_file._ENDING_S = 0.3
    try:
        Recording(folder)
    except InvalidInputError as error:
        refused = str(error)
    snapshot_file._ENDING_S = 15.0
    start_s = time.monotonic()
    threading.Timer(1.0, os.kill, (other, signal.SIGKILL)).start()
    with contextlib.redirect_stderr(printed):
        training = Recording(folder)
    waited_s = time.monotonic() - start_s
    os.waitpid(other, 0)
    training.snapshot.close()
    assert before["resumed_from"] is None
    return refused, waited_s, printed.getvalue(), os.listdir(folder)


def two_in_one_program(rank: int, world_size: int, folder: str) -> Any:
    """Build Snapshots of two models alike; return what was refused, and who hears SIGTERM once the first is closed.

    The last is of another dataset.
    """
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    first, refused = Recording(folder), []
    try:
        Recording(folder)
    except InvalidInputError as error:
        refused.append(str(error))
    first.train(1)
    second = Recording(folder + "-other")
    first.snapshot.close()
    os.kill(os.getpid(), signal.SIGTERM)
    status = None
    try:
        second.train(1)
    except SystemExit as end:
        status = end.code
    second.snapshot.close()
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        Recording(folder, num_samples=40)
    except StateError as error:
        refused.append(str(error))
    after = Recording(folder)
    after.snapshot.close()
    return refused, status, heard, after.snapshot.resumed_from


def other_optimizer_beside(rank: int, world_size: int, folder: str, optimizer: str) -> Any:
    """Name a second optimizer beside the model's own, train one epoch, and say what was refused."""
    training = Recording(folder + "-unused")
    training.snapshot.close()
    critic = torch.nn.Linear(1, 1)
    steps = getattr(torch.optim, optimizer)(
        critic.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer == "SGD" else {})
    )
    critic(torch.ones(1)).backward()
    steps.step()
    try:
        snapshot = cannikin.Snapshot(folder, training.model, every_s=None, critic=steps)
    except cannikin.errors.StateError as error:
        return str(error)
    training.train(1)
    snapshot.save()
    snapshot.close()
    return None


def stuck(rank: int, world_size: int, folder: str) -> Any:
    """Wait for something that never comes, after SIGTERM."""
    ending._PATIENCE_S = 0.5
    Recording(folder)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(50)


def fail_in_a_worker(rank: int, world_size: int) -> Any:
    """Let a program end by the error of a sample in a patient worker; return its status, None where it does not end."""
    program = multiprocessing.get_context("fork").Process(target=read_what_fails)
    program.start()
    program.join(30.0)
    status = program.exitcode
    program.kill()
    program.join()
    return status


def read_what_fails() -> None:
    patient = ending.PatientWorker(None)
    for _ in DataLoader(Failing(), num_workers=2, worker_init_fn=patient, multiprocessing_context="fork"):
        pass


def save_after(rank: int, world_size: int, folder: str) -> Any:
    """Ask for snapshots inside of a step, after its update and after a pass; the last one's step after each wait."""
    training = Recording(folder, every_steps=None)
    snapshot, steps = training.snapshot, []

    def wait() -> None:
        snapshot.wait()
        steps.append(None if snapshot.last is None else int(snapshot.last["step"]))

    for number, (_, x) in enumerate(training.loader):
        loss = training.model(x).square().mean()
        if number == 1:
            snapshot.save()
            wait()  # before the update there is nothing to be saved
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        if number == 3:
            snapshot.save()
            wait()
    wait()
    snapshot.save()
    wait()
    with contextlib.suppress(StoppedError):
        for _, x in training.loader:
            snapshot.save()
            training.model(x).square().mean().backward()
            training.optimizer.step()
            raise StoppedError
    snapshot.close()
    return steps, int(snapshot.last["step"]) if snapshot.last else None


def evaluate_for_long(rank: int, world_size: int, folder: str) -> Any:
    """Save after the epoch; SIGTERM comes in an evaluation, for which the weights are others."""
    ending._PATIENCE_S = 0.5
    training = Recording(folder, every_steps=None)
    training.train(1)
    training.snapshot.save()
    with torch.no_grad():
        for parameter in training.net.parameters():
            parameter.fill_(-1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(50)


def bad_disk(rank: int, world_size: int, folder: str, is_full: bool) -> Any:
    """Train on a disk that is full, or slow, and say which steps were saved and what was warned of.

    Then once more on one that is neither, after somebody has removed the folder.
    """
    good_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        time.sleep(0.5)

    os.fsync = fsync  # type: ignore[assignment]
    training = Recording(folder)
    training.snapshot.wait = lambda: None  # type: ignore[method-assign]  # steps are faster than this disk
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.train(2)
        training.snapshot._wait_for_disk()
    told = training.num_steps, names(Path(folder)), [str(warning.message) for warning in caught]
    os.fsync = good_fsync
    shutil.rmtree(Path(folder).parent)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.train(3)
        training.snapshot.save()
        training.snapshot.close()
    return told, (sorted(os.listdir(folder)), [str(warning.message) for warning in caught])


def not_come(rank: int, world_size: int, folder: str, limit_s: float) -> Any:
    """Build a Snapshot on rank 0 alone, in a group with a time limit; return the error."""
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    if rank == 1:
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        model = cannikin.HeteroDataParallel(net, torch.optim.AdamW(net.parameters()), policy="even")
        cannikin.HeteroDataLoader(Noisy(), model=model, batch_size=8)
        time.sleep(limit_s + 2.0)
        told = None
    else:
        try:
            told = Recording(os.path.join(folder, "run"))
        except cannikin.errors.DisagreementError as error:
            told = str(error)
    dist.destroy_process_group()
    return told


def refuse(rank: int, world_size: int, folder: str) -> Any:
    """Give a folder that cannot be one."""
    try:
        Recording(folder)
    except cannikin.errors.InvalidInputError as error:
        return str(error)
    return None


def names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(".snapshot"))


# Loops that fetch their next batch wherever they like.

NUM_BATCHES = 20  # of which a pass over the loader has 12
WHERE = ("before forward", "forward|backward", "backward|step", "step|step", "after step")


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A loop by where it fetches its next batch.

    Args:
        where: of `WHERE`; "step|step" is between the steps of two optimizers.
        source: "draws", "loader", "worker" or "stream".
        accumulate: batches per step of the optimizers.
        holds_back: whether all but the last of these are under `no_sync`.
        bad: the batch whose gradient is not finite, so that a GradScaler skips its step; -1 for none.
        again: whether each batch is trained on twice.
        stop: after so many batches the process ends.
        by_signal: by SIGTERM, as soon as that is obeyed.
    """

    where: str
    source: str = "loader"
    accumulate: int = 1
    holds_back: bool = False
    bad: int = -1
    again: bool = False
    stop: int = 7
    by_signal: bool = False

    def train(self, rank: int, world_size: int, folder: str, stop: int = -1) -> tuple[int, int, Any]:
        """Train on all batches, or until stopped; return the batches used before and in the end, and the weights."""
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (net[0], net[2])]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        model = cannikin.HeteroDataParallel(net, optimizers, policy="even", grad_scaler=scaler)
        batches, data = self._batches(model)
        done = Done()
        snapshot = cannikin.Snapshot(folder, model, every_s=None, every_steps=None if self.by_signal else 1, done=done)
        resumed_from = done.number
        fetched = [next(batches)]

        def fetch(where: str) -> None:
            if where == self.where:
                fetched.append(next(batches))

        def pass_over(x: torch.Tensor, *, is_end: bool) -> None:
            with model.no_sync() if self.holds_back and not is_end else contextlib.nullcontext():
                loss = model(x).square().mean() / self.accumulate
                fetch("forward|backward")
                scaler.scale(loss * (math.inf if done.number == self.bad else 1.0)).backward()
            fetch("backward|step")
            if is_end:
                scaler.step(optimizers[0])
                fetch("step|step")
                scaler.step(optimizers[1])
                scaler.update()
                net.zero_grad()

        with contextlib.suppress(StoppedError, SystemExit):
            while done.number < NUM_BATCHES:
                if done.number == stop:
                    if not self.by_signal:
                        raise StoppedError
                    if rank == world_size - 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                fetch("before forward")
                x = fetched.pop(0)
                if self.again:
                    pass_over(x, is_end=True)
                    model.use_batch()
                pass_over(x, is_end=(done.number + 1) % self.accumulate == 0)
                done.number += 1
                fetch("after step")
                snapshot.wait()
        snapshot.close()
        batches.close()
        if data is not None:
            data.close()
        return resumed_from, done.number, torch.cat([p.detach().flatten() for p in net.parameters()]).numpy()

    def _batches(self, model: Any) -> tuple[Iterator[torch.Tensor], Any]:
        if self.source == "draws":
            draws = model.batches(batch_size=8)
            return (made_of(range(draws.start, draws.start + local)) for local, _ in draws), draws
        own: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"} if self.source == "worker" else {}
        data = Streamed() if self.source == "stream" else [made_of([number])[0] for number in range(96)]
        loader = cannikin.HeteroDataLoader(data, model=model, batch_size=8, **own)
        return (x for _ in itertools.count() for x in loader), None


class Done:
    """Batches that a loop has trained on, as far as it knows; saved with it."""

    number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Streamed(IterableDataset):
    """The samples of the loops that look ahead, as a stream without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (made_of([number])[0] for number in range(96))


def made_of(numbers: Iterable[int]) -> torch.Tensor:
    """Return samples that are made of their numbers."""
    values = torch.tensor(list(numbers), dtype=torch.float64).unsqueeze(1)
    return torch.sin(values * torch.arange(1.0, 5.0, dtype=torch.float64))


PILING = tuple(where for where in WHERE if where != "step|step")  # which not every batch comes to
AHEAD = {
    **{f"{source}, {where}": Ahead(where=where, source=source) for source in ("draws", "loader") for where in WHERE},
    **{
        f"{source}, {WHERE[n]}": Ahead(where=WHERE[n], source=source) for source in ("worker", "stream") for n in (1, 2)
    },
    **{f"two pile up, {where}": Ahead(where=where, accumulate=2, source="draws") for where in PILING},
    **{f"two pile up unsynced, {where}": Ahead(where=where, accumulate=2, holds_back=True) for where in PILING},
    **{f"a skipped step, {where}": Ahead(where=where, bad=4) for where in WHERE},
    "the last step was skipped": Ahead(where="forward|backward", bad=6),
    "each batch twice": Ahead(where="after step", again=True),
    **{f"SIGTERM, {where}": Ahead(where=where, source="draws", by_signal=True) for where in WHERE},
    "SIGTERM, loader": Ahead(where="backward|step", by_signal=True),
}


def look_ahead(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Stop and resume each of these loops.

    Return by its name the batches used when it was stopped, resumed and at its end, and how far its weights are from
    those of a run that nothing has disturbed.
    """
    snapshot_module._LOOK_MS = 1
    told = {}
    undisturbed: dict[Ahead, Any] = {}
    for number, (name, loop) in enumerate(AHEAD.items()):
        plain = replace(loop, where="after step", source="loader" if loop.source == "worker" else loop.source)
        if plain not in undisturbed:
            _, _, undisturbed[plain] = plain.train(rank, world_size, os.path.join(folder, f"undisturbed {number}"))
        _, before, _ = loop.train(rank, world_size, os.path.join(folder, name), loop.stop)
        resumed_from, after, weights = loop.train(rank, world_size, os.path.join(folder, name))
        told[name] = (before, resumed_from, after, float(abs(weights - undisturbed[plain]).max()))
    return told


def follow(rank: int, world_size: int, folder: str, stop: int) -> list[tuple[int, float]]:
    """Stop and resume a loop whose second model takes a step for every other batch, and the first for each.

    Return after how many batches each of three runs began, and how far its second model's weights are from the first's.
    """

    def train(own: str, stop: int) -> tuple[int, torch.Tensor]:
        torch.manual_seed(0)
        nets = [torch.nn.Linear(4, 1).double() for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        first = cannikin.HeteroDataParallel(nets[0], optimizers[0], policy="even")
        data = [made_of([number])[0] for number in range(96)]
        loader = cannikin.HeteroDataLoader(data, model=first, batch_size=8)
        second = cannikin.HeteroDataParallel(nets[1], optimizers[1], follows=first)
        done = Done()
        snapshot = cannikin.Snapshot(
            os.path.join(folder, own), first, every_s=None, every_steps=1, second=second, done=done
        )
        begun = done.number
        for x in loader:
            optimizers[0].zero_grad()
            first(x).square().mean().backward()
            optimizers[0].step()
            (second(x).square().mean() / 2).backward()
            if done.number % 2 == 1:
                optimizers[1].step()
                optimizers[1].zero_grad()
            done.number += 1
            snapshot.wait()
            if done.number == stop:
                break
        snapshot.close()
        return begun, nets[1].weight.detach().flatten()

    runs = [train("whole", -1), train("parts", stop), train("parts", -1)]
    return [(begun, float((weight - runs[0][1]).abs().max())) for begun, weight in runs]


def late(rank: int, world_size: int, folder: str, is_sampler: bool) -> tuple[list[str], list[str], int]:
    """Wait for a moment that does not come; return what is warned of, what is said of SIGTERM, and the steps after it.

    A batch sampler under workers has one at the end of the pass; a loop that steps an optimizer of its own has none.
    """
    snapshot_module._LATE_S = 1e9 if is_sampler else 0.3
    net = torch.nn.Linear(4, 1).double()
    optimizer, other = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    model = cannikin.HeteroDataParallel(net, optimizer, policy="even")
    data, said = [made_of([number])[0] for number in range(96)], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cannikin").addHandler(handler)
    if is_sampler:
        sampler = cannikin.HeteroBatchSampler(data, model=model, batch_size=4, prefetch_depth=2)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=1, multiprocessing_context="fork")
    else:
        loader = cannikin.HeteroDataLoader(data, model=model, batch_size=4)
    num_after = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        snapshot = cannikin.Snapshot(folder, model, every_s=None, every_steps=2)
        with contextlib.suppress(SystemExit):
            for x in itertools.chain(loader, loader):
                model(x).square().mean().backward()
                (optimizer if is_sampler else other).step()
                time.sleep(0.05)
                if snapshot._ending.asked:
                    num_after += 1
                elif snapshot._loop.queue.num_taken == 12:
                    os.kill(os.getpid(), signal.SIGTERM)
        snapshot.close()
    return [str(warning.message) for warning in caught], [text for text in said if "SIGTERM" in text], num_after


def to_the_end(rank: int, world_size: int, folder: str) -> list[tuple[int | None, int]]:
    """Train to the goal twice, with one snapshot on the way; the step each was resumed from, and its steps."""
    told = []
    for _ in range(2):
        training = Recording(folder, every_steps=5)
        for _ in training.model.epochs(2):
            for _, x in training.loader:
                training.optimizer.zero_grad()
                training.model(x).square().mean().backward()
                training.optimizer.step()
                training.num_steps += 1
        training.snapshot._writer.shutdown()  # as where the program ends
        training.snapshot.close()
        told.append((training.snapshot.resumed_from, training.num_steps))
    return told
