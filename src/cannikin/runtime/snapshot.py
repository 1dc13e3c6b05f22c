"""Snapshots: a run that is killed, or told to end, goes on where it was, on as many ranks as there are then.

Rank 0 takes them by itself, between steps: all ranks have the same weights there, and the loader's place is a number.
Ranks talk when a run starts, about which snapshot to load, and about once per second on whether one of them was told to
end; that sum is not waited for in the step that starts it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from cannikin.core.cutting import whole_number
from cannikin.errors import DisagreementError, InvalidInputError, StateError
from cannikin.runtime.ending import EXIT_STATUS, Ending
from cannikin.runtime.entry import PendingSum
from cannikin.runtime.options import engine_of
from cannikin.runtime.profile_store import model_key
from cannikin.runtime.run_state import RunState
from cannikin.runtime.snapshot_file import (
    HostRow,
    OpenSnapshot,
    SnapshotLock,
    SnapshotName,
    file_id,
    list_snapshots,
    newest_of,
    open_snapshot,
    pieces,
    read_chunks,
    superseded,
    take_apart,
    without,
    write_snapshot,
)

_LIMIT = timedelta(seconds=300)  # for one rank to wait for another at the start: datasets may take long to open
_LAST_WORD = timedelta(seconds=60)  # for others to wait for rank 0's last snapshot
_LOOK_MS = 1000  # about how often ranks ask each other whether one was told to end
_LATE_S = 10.0  # after which it is said what a snapshot waits for

_log = logging.getLogger("cannikin")


def next_gap(gap: int, elapsed_ms: float) -> int:
    """Return how many steps to take before ranks look again, when the last `gap` steps took this long.

    At most twice as many as before: the first steps may tell nothing.

    Examples:
        >>> next_gap(1, 100), next_gap(10, 1000), next_gap(10, 60_000), next_gap(1, 0)
        (2, 10, 1, 2)
    """
    return max(1, min(2 * gap, int(_LOOK_MS * gap / max(elapsed_ms, 1e-3))))


def is_due(every: float | None, since: float) -> bool:
    """Return whether as many seconds, or steps, have passed as should lie between two snapshots."""
    return every is not None and since >= every


def _restarts_fail(environment: Mapping[str, str], torch_version: str) -> bool:
    """Return whether torchrun is to start ranks again and they would not find each other: tried with torch 2.13."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shares = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # always without --rdzv-backend
    version = tuple(int(part) for part in torch_version.split(".")[:2])
    return shares and restarts.isdigit() and int(restarts) > 0 and version >= (2, 13)


class Snapshot:
    """Saves a run in the background, and loads what was saved when the script is started again.

        model = cannikin.HeteroDataParallel(net, optimizer)
        loader = cannikin.HeteroDataLoader(data, model=model, batch_size=64)
        cannikin.Snapshot("snapshots", model, scheduler=scheduler)
        for epoch in range(loader.epoch, 90):
            for x, y in loader:
                ...

    Build it on every rank, once all that it saves is built, before the loop. If the folder has a snapshot of this
    model, it is loaded here, on any number of ranks, and the loop goes on with the next sample: count epochs from
    `loader.epoch`, or by `model.epochs(n)`. From then on a snapshot is taken at the end of a step every `every_s`
    seconds, and one soon after SIGTERM has come to any rank; every rank then ends with status 143.

    Close it, or build it in a `with`, where the program goes on with something else after this training.

    A snapshot holds what the model knows (the module, its optimizers, what the engine has learned, the loader's place,
    the GradScaler), the random generators of rank 0 (see `cannikin.runtime.randomness`), and whatever else is named. It
    is rank 0's: what a named object has on other ranks alone is not kept.

    Where one is loaded, rank 0 says so on stderr. While a job lives, another one with the same model is refused the
    folder: each would remove the other's snapshots.

    The folder should be on storage that every host sees that may come to have rank 0. Whichever rank sees the newest
    snapshot sends it to the others, so it is enough that one does. A file that is damaged, or of another model
    or optimizer, is named in a warning, and the one before is loaded.

    Snapshots are taken where no batch is half used: when the loop comes for its next batch or, where it does so in the
    midst of a step, when that batch's forward begins. They wait while gradients pile up, in this model or one that
    follows it; with a `HeteroBatchSampler` under workers, or in a loop that looks ahead over one, until the epoch is
    over. Where one waits for more than 10 s, a warning says for what. The last one is taken at the end of
    `model.epochs()`; after another loop over epochs, `save()` asks for it.

    Args:
        folder: where snapshots are kept; rank 0 makes it.
        model: the HeteroDataParallel, or the engine `cannikin.attach` returned, with its loader built.
        every_s: seconds between two snapshots; None leaves them to `every_steps` and SIGTERM.
        every_steps: steps between two snapshots.
        keep: how many to keep, at least 2.
        **objects: what else to save, by names that stay the same: schedulers, averages of weights, a second
            HeteroDataParallel with its optimizers, or lists of these; each with `state_dict()`, of tensors and plain
            values, and `load_state_dict()`. What the model knows already may be named again.

    Attributes:
        resumed_from: steps that training had taken when the loaded snapshot was; None where there was none.
        last: what the last snapshot that is safely on the disk was, and what it took; None before.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: object,
        *,
        every_s: float | None = 60.0,
        every_steps: int | None = None,
        keep: int = 2,
        **objects: Any,
    ) -> None:
        engine = engine_of(model)
        self._engine, self._loop, self._exchange = engine, engine.loop, engine.exchange
        self._folder, self._keep = Path(folder), whole_number("keep", keep, low=2)
        if every_s is not None and not (isinstance(every_s, Real) and every_s > 0):
            raise InvalidInputError(f"every_s={every_s!r} must be a number above 0, or None for none by the clock")
        self._every_s = every_s
        self._every_steps = None if every_steps is None else whole_number("every_steps", every_steps, low=1)
        if not engine.coordinator.is_bound:
            raise InvalidInputError("the model has no loader yet, whose place a Snapshot saves: build the loader first")
        if self._loop.watcher is not None:
            raise InvalidInputError("this model has a Snapshot already: name all that is to be saved in one")
        self._run = RunState(engine, objects)
        self._objects = self._run.parts
        self._identity = _identity(self._objects["model"], engine.parts()["optimizer"])
        self._host = HostRow()
        self._writer = ThreadPoolExecutor(1, "cannikin-snapshot")
        self._writing: Future[None] | None = None
        self._good: list[SnapshotName] = []  # loaded or written by this process, oldest first
        self.resumed_from: int | None = None
        self.last: dict[str, float] | None = None
        take_apart(self._run.state_dict())  # refuses what cannot be saved now, not in an hour
        self._lock = SnapshotLock(self._folder, self._identity)
        try:
            self._load_newest()
        except BaseException:
            self._lock.release()
            raise
        self._ending = Ending(self._wait_for_disk)
        self._must_end = False
        self._look: PendingSum | None = None
        self._gap, self._until_look, self._looked_s = 1, 0, time.monotonic()
        self._wanted = self._has_warned = self._has_told_why = self._has_told_end = False
        self._waits_since_s: float | None = None  # a snapshot, or the end
        self._rested_s, self._longest_s = time.monotonic(), 0.0  # between two moments at which one could be taken
        self._restart_clock()
        self._hooks = [
            part.register_step_pre_hook(lambda *_: self._host.before_update())
            for part in self._objects.values()
            if isinstance(part, torch.optim.Optimizer)
        ]
        self._loop.watcher = self
        loader = self._objects["loader"]
        keep_workers = getattr(loader, "keep_workers", None)
        if keep_workers is not None and self._ending.can_hear:
            keep_workers()
        self._waits_for_passes = bool(getattr(loader, "prefetch_depth", 0) and keep_workers is None)
        self._warn_of_limits()

    def _warn_of_limits(self) -> None:
        if self._exchange.rank != 0:
            return
        if self._waits_for_passes:
            warnings.warn(
                "snapshots are taken between epochs only, also at SIGTERM: a HeteroBatchSampler under workers does not "
                "know which of the batches it has cut are trained on; use HeteroDataLoader, which does",
                RuntimeWarning,
                stacklevel=3,
            )
        if _restarts_fail(os.environ, torch.__version__):
            warnings.warn(
                "torchrun --max-restarts: with torch 2.13 ranks that were started again do not find each other while "
                "they share the launcher's store (pytorch#135712); use --standalone or --rdzv-backend=c10d, with "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment (docs/hosts.md)",
                RuntimeWarning,
                stacklevel=3,
            )
        if not self._ending.can_hear:
            warnings.warn(
                "SIGTERM takes no snapshot here: Python lets only the main thread hear signals; snapshots by the clock "
                "are taken all the same",
                RuntimeWarning,
                stacklevel=3,
            )

    @property
    def names(self) -> list[str]:
        """What is saved, by name."""
        return list(self._objects)

    # Loading.

    def _load_newest(self) -> None:
        """Load the newest snapshot that is whole and of this model, the same on every rank."""
        seen, has_refused = self._ask_who_sees_what(), False
        while (found := newest_of(seen)) is not None:
            name, owner = found
            try:
                if name.identity != self._identity:
                    raise StateError("it is of another model or optimizer, or of other names or shapes of parameters")
                opened = open_snapshot(self._receive(name, owner))
            except StateError as error:
                # Another rank's file of this name may be whole, but not of another model.
                seen = without(seen, name, owner if name.identity == self._identity else None)
                has_refused = True
                self._warn(f"snapshot {self._folder / str(name)}, as rank {owner} sees it, is left out: {error}")
            else:
                self._load(opened, name)
                return
        if has_refused:
            self._warn(f"no snapshot in {self._folder} can be used: training begins afresh")

    @contextmanager
    def _within_limit(self) -> Iterator[None]:
        """Say who waited for what where ranks do not meet in time, or one of them is gone."""
        limit = min(_LIMIT, self._exchange.limit)  # a group of gloo's never waits longer
        try:
            yield
        except RuntimeError as error:
            raise DisagreementError(
                f"rank {self._exchange.rank} could not agree with the other ranks on a snapshot in "
                f"{str(self._folder)!r} within {limit.total_seconds():.0f} s: build the Snapshot on every rank, and "
                f"look for the error of the one that has not come ({error})"
            ) from error

    def _ask_who_sees_what(self) -> list[dict[SnapshotName, str]]:
        """Return the snapshots that each rank sees, with what tells the files of one name from each other.

        Raises the same error on every rank where none can be written.
        """
        problem = ""
        if self._exchange.rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                if not os.access(self._folder, os.W_OK):
                    raise PermissionError("it may not be written to")
                if unlocked := self._lock.take():
                    self._warn(unlocked)
                for unfinished in self._folder.glob(f".step-*-{self._identity}.*.part"):  # of a run that was killed
                    unfinished.unlink()
            except OSError as error:
                problem = (
                    f"rank 0 cannot keep snapshots in {str(self._folder)!r} ({error}): give a folder that it can write"
                )
            except InvalidInputError as error:
                problem = str(error)
        mine = [[name.step, name.identity, file_id(self._folder / str(name))] for name in list_snapshots(self._folder)]
        with self._within_limit():
            told = [json.loads(text) for text in self._exchange.gather_text(json.dumps([problem, mine]), _LIMIT)]
        if told[0][0]:
            raise InvalidInputError(told[0][0])
        return [{SnapshotName(step, identity): file for step, identity, file in files} for _, files in told]

    def _receive(self, name: SnapshotName, owner: int) -> torch.Tensor:
        """Return the bytes of a file that one rank sees, on every rank; none where it cannot read it after all."""
        path, is_owner = self._folder / str(name), self._exchange.rank == owner
        length = torch.zeros(1, dtype=torch.int64)
        if is_owner:
            with suppress(OSError):
                length[0] = path.stat().st_size
        with self._within_limit():
            self._exchange.send(length, owner, _LIMIT)
            row = torch.empty(int(length), dtype=torch.uint8)
            for piece in read_chunks(path, row) if is_owner else pieces(row):
                self._exchange.send(piece, owner, _LIMIT)
        return row

    def _load(self, opened: OpenSnapshot, name: SnapshotName) -> None:
        self._run.load(opened.state, f"snapshot {name}", opened.part)
        self.resumed_from = name.step
        self._good.append(name)
        if self._exchange.rank == 0:
            saved_s = opened.state.get("about", {}).get("saved_at_s")
            saved = "" if saved_s is None else f", saved {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(saved_s))}"
            # Printed, as a folder that is another run's is otherwise seen by nothing but a rate that nobody has set.
            print(
                f"cannikin: training goes on from step {name.step} of snapshot {self._folder / str(name)}{saved}; "
                "another folder begins afresh",
                file=sys.stderr,
                flush=True,
            )

    def _warn(self, text: str) -> None:
        if self._exchange.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    # Between steps, on every rank.

    def end_step(self) -> None:
        """See `StepWatcher`: ranks tell each other, about once per second, whether one of them was told to end."""
        self._run.go_on()
        self._ending.step()
        self._ask_whether_to_end()
        self._tell_why_late()

    def _ask_whether_to_end(self) -> None:
        if self._exchange.world_size == 1:
            self._must_end = self._ending.asked
            return
        if self._look is not None:
            told, elapsed_ms = self._look.values()
            elapsed_ms /= self._exchange.world_size
            self._must_end, self._look = told > 0, None
            self._ending.allow(elapsed_ms / 1e3 / self._gap)
            self._gap = next_gap(self._gap, elapsed_ms)
            self._until_look = self._gap - 1
        elif self._until_look > 0:
            self._until_look -= 1
        if self._until_look == 0 and self._look is None and not self._must_end:
            now_s = time.monotonic()
            elapsed_ms, self._looked_s = (now_s - self._looked_s) * 1e3, now_s
            # Whole numbers add up to the same on every rank, in whatever order.
            self._look = self._exchange.start_sum(float(self._ending.asked), float(round(elapsed_ms)))

    def rest(self) -> None:
        """See `StepWatcher`: take a snapshot, if one is due."""
        now_s = time.monotonic()
        self._longest_s, self._rested_s = max(self._longest_s, now_s - self._rested_s), now_s
        self._waits_since_s = None
        if self._must_end:
            self._leave()
        if self._exchange.rank == 0 and self._is_due() and not self._is_busy():
            self._take()

    def _tell_why_late(self) -> None:
        """Say once what a snapshot waits for, where it waits longer than a loop has taken to come to rest before."""
        now_s, is_due = time.monotonic(), self._exchange.rank == 0 and self._is_due()
        if not (self._must_end or is_due):
            self._waits_since_s = None
            return
        self._waits_since_s = now_s if self._waits_since_s is None else self._waits_since_s
        waited_s, what = now_s - self._waits_since_s, self._loop.half_done
        what = f"the end of this pass: {what}" if what and self._waits_for_passes else what
        if not what:
            return
        if self._must_end:
            if not self._has_told_end and (self._waits_for_passes or waited_s > _LATE_S):
                self._has_told_end = True
                _log.warning("SIGTERM, and training goes on until a snapshot can be taken, which waits for %s", what)
        elif not (self._has_told_why or self._waits_for_passes) and waited_s > _LATE_S + 2 * self._longest_s:
            self._has_told_why = True
            self._warn(f"a snapshot has been due for {waited_s:.0f} s, and waits for {what}")

    def _is_due(self) -> bool:
        since_s, since_steps = time.monotonic() - self._taken_s, self._loop.queue.num_taken - self._taken_step
        return self._wanted or is_due(self._every_s, since_s) or is_due(self._every_steps, since_steps)

    def _is_busy(self) -> bool:
        """Return whether the snapshot before is still being written: a slow disk gets fewer snapshots."""
        if self._writing is None or self._writing.done():
            return False
        waited_s = time.monotonic() - self._taken_s
        if waited_s > 2 * max(self._every_s or 0.0, 30.0) and not self._has_warned:
            self._has_warned = True
            self._warn(f"a snapshot has been written to {self._folder} for {waited_s:.0f} s: the next one waits for it")
        return True

    def save(self) -> None:
        """Have a snapshot taken, whatever the clock says; any rank may ask, rank 0 counts.

        Inside of the loop it is taken at the end of this step, and after a pass at once: call it when all that belongs
        to the epoch, such as `scheduler.step()`, is done.
        """
        self._wanted = True
        if self._loop.is_between_passes:
            self._take_wanted()

    def end_training(self) -> None:
        """See `StepWatcher`: take a last snapshot, so that nothing is trained again where the job is started again."""
        if self._loop.queue.num_taken > self._taken_step:
            self.save()

    # Saving, on rank 0.

    def _restart_clock(self) -> None:
        self._taken_s, self._taken_step, self._wanted = time.monotonic(), self._loop.queue.num_taken, False

    def _take(self) -> SnapshotName | None:
        """Copy everything to the host, and have a thread write it; return its name, None where it cannot be saved."""
        self._restart_clock()
        start_s = time.perf_counter()
        try:
            state = self._run.state_dict()
            skeleton, tensors = take_apart(state)
        except InvalidInputError as error:
            self._warn(f"no snapshot was taken: {error}")
            return None
        modules = [part for part in self._objects.values() if isinstance(part, torch.nn.Module)]
        buffers = {buffer.data_ptr() for module in modules for buffer in module.buffers()}  # that forward may change
        self._host.copy(tensors, lambda tensor: tensor.data_ptr() in buffers)
        name = SnapshotName(int(state["objects"]["engine"]["num_steps"]), self._identity)
        self._writing = self._writer.submit(self._write, name, skeleton, time.perf_counter() - start_s)
        return name

    def _write(self, name: SnapshotName, skeleton: Any, stalled_s: float) -> None:
        """Write what was copied, and remove what it supersedes, in a thread."""
        start_s = time.perf_counter()
        self._host.wait()
        try:
            if self._lock.is_lost or not self._folder.is_dir():
                self._make_folder_again()
            num_bytes = write_snapshot(self._folder / str(name), skeleton, self._host.layout, self._host.row)
        except (OSError, InvalidInputError) as error:
            self._warn(f"snapshot {self._folder / str(name)} could not be written ({error}): training goes on")
            return
        self._good = [*(good for good in self._good if good != name), name][-self._keep :]
        for old in superseded(list_snapshots(self._folder), self._good, self._keep):
            with suppress(OSError):
                (self._folder / str(old)).unlink()
        write_s = time.perf_counter() - start_s
        self.last = {"step": name.step, "stalled_s": stalled_s, "write_s": write_s, "num_bytes": num_bytes}

    def _make_folder_again(self) -> None:
        """Make the folder where somebody has removed it, or what it was on: else nothing would be saved any more."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock.release()
        self._lock.take()
        self._warn(f"{self._folder}, or its lock, was removed while training went on, and is made again")

    def _take_wanted(self) -> None:
        """Take the snapshot that `save` asked for, where no step is half done."""
        if self._wanted and self._exchange.rank == 0 and self._loop.has_stepped:
            self._wait_for_disk()
            self._take()

    def wait(self) -> None:
        """Wait until the snapshot that `save` has asked for, or that is being written, is on the disk.

        One that was asked for before the optimizer's step is not waited for: it is taken at the end of this step.
        """
        self._take_wanted()
        self._wait_for_disk()

    def _wait_for_disk(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _leave(self) -> None:
        """Take a last snapshot and end, on every rank."""
        self._ending.allow(float("inf"))
        newest, is_new = None, False
        if self._exchange.rank == 0:
            self._wait_for_disk()
            taken = self._take()
            self._wait_for_disk()
            newest = next((name for name in reversed(self._good) if (self._folder / str(name)).exists()), None)
            is_new = newest is not None and newest == taken
        told = self._hear_last_word(0.0 if newest is None else newest.step + 1.0, float(is_new))
        who = "this rank" if self._ending.asked else "another rank"
        _log.warning("%s was told to end (SIGTERM): rank %d leaves with status %d; in %s %s",
                     who, self._exchange.rank, EXIT_STATUS, self._folder, told)  # fmt: skip
        self._engine.close(f"SIGTERM told it to end, and {told}")
        self.close()
        raise SystemExit(EXIT_STATUS)

    def _hear_last_word(self, newest: float, is_new: float) -> str:
        """Return what has become of the last snapshot, as rank 0 tells the others, which wait for it.

        Launchers end all ranks once one has ended.
        """
        try:
            last = self._exchange.start_sum(newest, is_new)
            last.work.wait(_LAST_WORD)
        except RuntimeError:
            return "rank 0, which is gone, may have taken a snapshot or not"
        newest, is_new = last.totals.tolist()[:2]
        if is_new:
            return "a snapshot was taken"
        older = "there is none at all" if not newest else f"the newest is of step {newest - 1:.0f}"
        return f"no snapshot could be taken now: {older}"

    def close(self) -> None:
        """Wait for the snapshot that was asked for or is being written, and take no more; signals are as before."""
        if self._loop.watcher is not self:
            return
        if sys.exc_info()[0] is None:  # else a batch may be neither in the weights nor in the loader's state
            self._take_wanted()
        self._loop.watcher = None
        for hook in self._hooks:
            hook.remove()
        self._writer.shutdown()
        self._lock.release()
        self._ending.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identity(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return what tells the files of one model and its optimizers from those of others, as 16 hexadecimal digits."""
    kinds = [[type(each).__name__, *(len(group["params"]) for group in each.param_groups)] for each in optimizers]
    text = json.dumps([model_key(module, scaled=False), kinds])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
