"""How ranks talk to each other, beside the step instead of in it: on a group of their own.

What they tell each other at every window is in `wire`, and what they must agree on at the start in `binding`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cannikin.errors import DisagreementError
from cannikin.runtime.device import DEVICES
from cannikin.runtime.entry import PendingSum
from cannikin.runtime.lookout import Lookout

_log = logging.getLogger("cannikin")
_c10d: Any = dist.distributed_c10d

# A rank that cannot go on waits this long for the others to hear why; then it leaves, which they notice as well.
_REFUSAL = timedelta(seconds=60)

_LIMIT = timedelta(minutes=30)  # torch's default


class Exchange:
    """Gather floats from all ranks and broadcast whole numbers from rank 0, without waiting in between.

    The group is gloo's, whatever the gradients travel on: these tensors live on the host. It is not one of torch's
    registered ones, which have the same name, and old addresses in the store, when one is made after another is gone.
    """

    def __init__(self, group: Any) -> None:
        self.limit = limit = _timeout(group)
        store = _store(group)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        number = store.add(f"cannikin-models-{self.rank}", 1)  # the same on every rank: all make the same models
        store = _c10d.PrefixStore(f"cannikin-{number}", store)
        self.lookout = Lookout(store, self.rank, self.world_size, limit)
        when_gone(self, self.lookout.close)
        with self._naming_missing():
            self._group = _c10d.ProcessGroupGloo(store, self.rank, self.world_size, limit)
        self._gathering: tuple[Any, torch.Tensor] | None = None
        self._broadcasting: tuple[Any, torch.Tensor] | None = None
        self._summing: list[Any] = []

    def start_gather(self, values: torch.Tensor) -> None:
        """Begin to collect a vector of float64, as long on every rank."""
        out = torch.empty(self.world_size * len(values), dtype=torch.float64)
        work = self._group.allgather([list(out.chunk(self.world_size))], [values])
        self._gathering = (work, out)

    def finish_gather(self) -> torch.Tensor:
        """Return what all ranks sent, [n, length]."""
        assert self._gathering is not None
        (work, out), self._gathering = self._gathering, None
        self._finish(work)
        return out.view(self.world_size, -1)

    def start_broadcast(self, values: torch.Tensor) -> None:
        """Begin to send rank 0's vector of int64 to all; as long on every rank."""
        work = self._group.broadcast(values, 0)
        self._broadcasting = (work, values)

    def finish_broadcast(self) -> torch.Tensor:
        """Return rank 0's vector."""
        assert self._broadcasting is not None
        (work, values), self._broadcasting = self._broadcasting, None
        self._finish(work)
        return values

    def start_sum(self, *values: float) -> PendingSum:
        """Begin to sum numbers over ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        work = self._group.allreduce(total)
        self._summing = [*(other for other in self._summing if not other.is_completed()), work]
        return PendingSum(work, total, self.world_size, self._finish)

    def give_up(self) -> None:
        """Take part in the sum that others have begun with what is no number, so that all of them stop."""
        with suppress(RuntimeError):  # they are gone: this rank's own error is the one to be seen
            self.start_sum(math.nan, math.nan, math.nan).work.wait(_REFUSAL)

    def wait(self) -> None:
        """Let whatever is under way arrive; it stays to be finished. Nothing arrives once a rank has been lost."""
        if self.lookout.has_lost:
            return
        for pending in (self._gathering, self._broadcasting):
            if pending is not None:
                self._finish(pending[0])
        for work in self._summing:
            self._finish(work)
        self._summing.clear()

    def _finish(self, work: Any, limit: timedelta | None = None) -> None:
        """Wait for a collective, within `limit`, or else the group's own; an error names the rank that is missing."""
        with self.meeting():
            work.wait() if limit is None else work.wait(limit)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Let the others see that this rank waits for all in this block, and its error name the one that is missing."""
        self.lookout.is_meeting = True
        try:
            with self._naming_missing():
                yield
        finally:
            self.lookout.is_meeting = False

    @contextmanager
    def _naming_missing(self) -> Iterator[None]:
        """Let the error of a collective in this block name the rank that is missing."""
        try:
            yield
        except RuntimeError as error:
            self.lookout.name_missing(error)
            raise

    def destroy(self) -> None:
        """Give the group's threads and sockets back; a thread does, where ranks still wait for something in it."""
        pending = [work for work, _ in filter(None, (self._gathering, self._broadcasting))] + self._summing
        held, self._group = [self._group], None  # a group that nobody refers to waits for what is under way
        if not all(work.is_completed() for work in pending):
            threading.Thread(target=held.clear, daemon=True).start()

    def broadcast_now(self, values: torch.Tensor) -> torch.Tensor:
        """Return rank 0's vector, on every rank."""
        self.start_broadcast(values)
        return self.finish_broadcast()

    def check_agreement(
        self, settings: dict[str, Any], advice: str = "give every rank the same", *, beside: int = 0
    ) -> bool:
        """Raise the same error on every rank where they disagree on a setting, or where one of them refuses.

        Returns whether they also have the same number `beside`, on which they need not agree.
        """
        names = sorted(settings)
        mine = [_digest(settings[name]) for name in names] + [_digest(names), beside]
        refusals = self._refusals("", len(mine))
        if refusals:
            raise DisagreementError("; ".join(refusals))
        table = self._gather_now(torch.tensor(mine, dtype=torch.int64))
        *differing, _, differs_beside = (table != table[0]).any(dim=0).tolist()
        wrong = [name for name, differs in zip(names, differing, strict=True) if differs]
        if wrong:
            told = ", ".join(f"{name}={settings[name]!r}" for name in wrong)
            raise DisagreementError(f"ranks disagree on {', '.join(wrong)}; rank {self.rank} has {told}: {advice}")
        return not differs_beside

    def agrees(self, number: int) -> bool:
        """Return whether all ranks have the same number."""
        table = self._gather_now(torch.tensor([number]))
        return bool((table == table[0]).all())

    def refuse(self, error: Exception) -> None:
        """Tell the ranks in `check_agreement` why this one cannot go on, so that they raise too; the caller raises."""
        _log.error("rank %d: %s", self.rank, error)  # before waiting for ranks that may never come
        with suppress(RuntimeError):  # they are gone: this rank's own error is the one to be seen
            self._refusals(f"rank {self.rank} could not build its loader: {error}", 0)

    def _refusals(self, mine: str, num_settings: int) -> list[str]:
        """Return what ranks have against going on."""
        text = mine.encode()
        heads = self._gather_now(torch.tensor([len(text), num_settings]), _REFUSAL if mine else None)
        if not heads[:, 0].any():
            same = len(set(heads[:, 1].tolist())) == 1
            return [] if same else ["ranks pass different settings to the loader: run the same script on every rank"]
        return [told for told in self._gather_bytes(text, heads[:, 0].tolist()) if told]

    def gather_count(self, mine: int) -> list[int]:
        """Return a whole number of every rank, by rank, for which this waits."""
        counts: list[int] = self._gather_now(torch.tensor([mine]))[:, 0].tolist()
        return counts

    def gather_text(self, mine: str, limit: timedelta | None = None) -> list[str]:
        """Return a text of every rank, by rank, for which this waits `limit`, or else the group's own."""
        text = mine.encode()
        return self._gather_bytes(text, self._gather_now(torch.tensor([len(text)]), limit)[:, 0].tolist())

    def send(self, values: torch.Tensor, source: int, limit: timedelta) -> None:
        """Fill this tensor on every rank with what one rank has in it."""
        self._finish(self._group.broadcast(values, source), limit)

    def _gather_bytes(self, mine: bytes, lengths: list[int]) -> list[str]:
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        rows = zip(self._gather_now(padded), lengths, strict=True)
        return [bytes(row[:length].tolist()).decode() for row, length in rows]

    def _gather_now(self, values: torch.Tensor, limit: timedelta | None = None) -> torch.Tensor:
        """Return a vector of every rank, all of one length, [n, length]; within `limit`, or else the group's own."""
        rows = [torch.empty_like(values) for _ in range(self.world_size)]
        work = self._group.allgather([rows], [values])
        self._finish(work, limit)
        return torch.stack(rows)


_inherited: list[Any] = []  # from the process that this one was forked from, and not this one's to give back


def when_gone(owner: object, function: Callable[..., None], *args: Any, at_exit: bool = True) -> None:
    """Call a function once an object is gone, in this process alone.

    A loader's worker is a copy of its rank, and may collect a model that its rank had just let go of. To end the copy
    of a group there, whose threads are the rank's, is a segmentation fault; the copy is kept instead.
    """
    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:
            function(*args)
        else:
            _inherited.append((function, args))

    weakref.finalize(owner, end).atexit = at_exit


def pause_at_exit() -> None:
    """Leave gloo's threads a moment before the interpreter ends.

    One that drops the last all-reduce needs the GIL for it, and Python ends threads that ask for the GIL too late: the
    process aborts with "terminate called without an active exception" (plain DDP's too: 9 of 50 launches, none of 20
    with the pause).
    """
    atexit.unregister(_pause)  # however many models there are, once is enough
    atexit.register(_pause)


def _pause() -> None:
    time.sleep(0.05)


def _store(group: Any) -> Any:
    """Return what the ranks of a group can leave words in for each other."""
    try:
        return _c10d._get_process_group_store(group)
    except KeyError:  # a group that is not torch's own
        return _c10d.PrefixStore(str(dist.get_process_group_ranks(group)), _c10d._get_default_store())


def _timeout(group: Any) -> timedelta:
    """Return the time limit of the model's own group."""
    for kind in reversed(DEVICES):
        with suppress(RuntimeError, AttributeError):
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return timeout
    return _LIMIT


def _digest(value: Any) -> int:
    """Return a number that stands for a setting: itself, or a hash of its JSON form."""
    if isinstance(value, int) and abs(value) < 2**62:
        return value
    text = json.dumps(value, default=str, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
