"""Small tensors between the ranks, on a group of their own, beside the step instead of in it. Nothing is pickled."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cannikin.errors import DisagreementError

_log = logging.getLogger("cannikin")

# A rank that cannot go on waits this long for the others to hear why; then it leaves, which they notice as well.
_REFUSAL = timedelta(seconds=60)


class Exchange:
    """Gather floats from all ranks and broadcast whole numbers from rank 0, without waiting in between.

    The group is gloo's, whatever the gradients travel on: these tensors live on the host.
    """

    def __init__(self, group: Any) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.world_size = len(ranks)
        self._group = dist.new_group(ranks, timeout=_timeout(group), backend="gloo", use_local_synchronization=True)
        self._source = ranks[0]
        self._gathering: tuple[Any, torch.Tensor] | None = None
        self._broadcasting: tuple[Any, torch.Tensor] | None = None
        self._summing: list[Any] = []

    def start_gather(self, values: torch.Tensor) -> None:
        """Begin to collect a vector of float64, as long on every rank."""
        out = torch.empty(self.world_size * len(values), dtype=torch.float64)
        work = dist.all_gather(list(out.chunk(self.world_size)), values, group=self._group, async_op=True)
        self._gathering = (work, out)

    def finish_gather(self) -> torch.Tensor:
        """What all ranks sent, [n, length]."""
        assert self._gathering is not None
        (work, out), self._gathering = self._gathering, None
        work.wait()
        return out.view(self.world_size, -1)

    def start_broadcast(self, values: torch.Tensor) -> None:
        """Begin to send rank 0's vector of int64 to all; as long on every rank."""
        work = dist.broadcast(values, src=self._source, group=self._group, async_op=True)
        self._broadcasting = (work, values)

    def finish_broadcast(self) -> torch.Tensor:
        """Rank 0's vector."""
        assert self._broadcasting is not None
        (work, values), self._broadcasting = self._broadcasting, None
        work.wait()
        return values

    def start_sum(self, value: float) -> Callable[[], float]:
        """Begin to sum a number over ranks; call the result to wait for it."""
        total = torch.tensor([value], dtype=torch.float64)
        work = dist.all_reduce(total, group=self._group, async_op=True)
        self._summing = [*(other for other in self._summing if not other.is_completed()), work]

        def finish() -> float:
            work.wait()
            return float(total)

        return finish

    def wait(self) -> None:
        """Let whatever is under way arrive; it stays to be finished."""
        for pending in (self._gathering, self._broadcasting):
            if pending is not None:
                pending[0].wait()
        for work in self._summing:
            work.wait()
        self._summing.clear()

    def broadcast_now(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's vector, on every rank."""
        self.start_broadcast(values)
        return self.finish_broadcast()

    def check_agreement(self, settings: dict[str, Any], advice: str = "give every rank the same") -> None:
        """Raise the same error on every rank where they disagree on a setting, or where one of them refuses."""
        names = sorted(settings)
        mine = [_digest(settings[name]) for name in names] + [_digest(names)]
        refusals = self._refusals("", len(mine))
        if refusals:
            raise DisagreementError("; ".join(refusals))
        table = self._gather_now(torch.tensor(mine, dtype=torch.int64))
        differing = (table != table[0]).any(dim=0)[:-1].tolist()
        wrong = [name for name, differs in zip(names, differing, strict=True) if differs]
        if wrong:
            told = ", ".join(f"{name}={settings[name]!r}" for name in wrong)
            raise DisagreementError(f"ranks disagree on {', '.join(wrong)}; rank {self.rank} has {told}: {advice}")

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

    def gather_text(self, mine: str) -> list[str]:
        """A text of every rank, by rank."""
        text = mine.encode()
        return self._gather_bytes(text, self._gather_now(torch.tensor([len(text)]))[:, 0].tolist())

    def _gather_bytes(self, mine: bytes, lengths: list[int]) -> list[str]:
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        rows = zip(self._gather_now(padded), lengths, strict=True)
        return [bytes(row[:length].tolist()).decode() for row, length in rows]

    def _gather_now(self, values: torch.Tensor, limit: timedelta | None = None) -> torch.Tensor:
        """A vector as long on every rank, from all of them, [n, length]; within `limit`, or else the group's own."""
        rows = [torch.empty_like(values) for _ in range(self.world_size)]
        work = dist.all_gather(rows, values, group=self._group, async_op=True)
        work.wait() if limit is None else work.wait(limit)
        return torch.stack(rows)


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


def _timeout(group: Any) -> timedelta | None:
    """The time limit of the model's own group: a new group would have torch's default, half an hour."""
    for kind in ("cuda", "cpu"):
        with suppress(RuntimeError, AttributeError):
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return timeout
    return None


def _digest(value: Any) -> int:
    """A number that stands for a setting: itself, or a hash of its JSON form."""
    if isinstance(value, int) and abs(value) < 2**62:
        return value
    text = json.dumps(value, default=str, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
