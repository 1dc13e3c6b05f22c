"""How large a local batch a GPU's memory holds, and what to say when it was too large.

Peak memory is read on the few steps whose local batch is larger than any before, so steady training pays nothing, and
nobody's statistics are reset.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np
import torch

from cannikin.core.values import NO_MAX
from cannikin.runtime.device import Memory

_HEADROOM = 0.9  # of the memory there is: fragments, libraries' workspaces and the unforeseen need the rest
_FIRST_STEPS = 2  # before the optimizer has its state, a step needs less than it will


def largest_batch(batches: list[int], peaks: list[int], limit: int) -> int:
    """The largest batch within the limit, by a line through peak memory against local batch; 0 samples are a point too.

    Never less than the largest batch seen, for that one went through.

    Example:
        >>> largest_batch([0, 32, 64], [1000, 4200, 7400], 20_000)
        170
        >>> largest_batch([0, 32, 64], [1000, 4200, 7400], 5000)
        64
    """
    if len(set(batches)) < 2:
        return NO_MAX
    slope, base = np.polyfit(batches, peaks, 1).tolist()
    if slope <= 0:
        return NO_MAX
    return max(int(round((_HEADROOM * limit - base) / slope, 6)), max(batches))  # 169.999999999 is 170


class MemoryGauge:
    """Learns from peak memory how large a local batch may become. `memory` is None where there is nothing to read."""

    def __init__(self, memory: Memory | None) -> None:
        self.max_batch = NO_MAX
        self.largest = 0  # the largest local batch that a step was finished with
        self._memory = memory
        self._num_steps = 0
        self._points: list[tuple[int, int]] = []
        self._before: tuple[int, int] | None = None  # allocated and peak before the step in hand

    def begin_step(self, local_batch: int) -> None:
        """A step with this local batch is about to begin."""
        self._num_steps += 1
        self._before = None
        if self._memory is not None and self._num_steps > _FIRST_STEPS and local_batch > self.largest:
            self._before = self._memory.allocated(), self._memory.peak()

    def end_step(self, local_batch: int) -> None:
        """It went through."""
        if self._num_steps > _FIRST_STEPS or self._memory is None:
            self.largest = max(self.largest, local_batch)
        if self._memory is None or self._before is None:
            return
        (allocated, peak_before), self._before = self._before, None
        peak = self._memory.peak()
        if peak > peak_before:  # else something other than this step needed more
            self._points = [*(self._points or [(0, allocated)]), (local_batch, peak)]
            batches, peaks = (list(column) for column in zip(*self._points, strict=True))
            self.max_batch = largest_batch(batches, peaks, self._memory.limit())

    def advice(self, rank: int, local_batch: int) -> str:
        """What to tell someone whose rank has run out of memory with this local batch."""
        fits = f"the largest that went through is {self.largest}" if self.largest else "none has gone through yet"
        bound = self.largest if 0 < self.largest < local_batch else max(1, local_batch // 2)
        return (
            f"cannikin: rank {rank} ran out of memory with a local batch of {local_batch} ({fits}). Bound it: "
            f"HeteroDataLoader(..., local_bounds=(1, {bound})), or one pair per rank; or cut the batch with "
            "model.micro_batches(batch)"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class _Advice:
    """An excepthook that has every owner alive explain an error, and then asks whoever handled it before."""

    def __init__(self, handle: Any) -> None:
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handle = handle

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        for owner in list(self.owners):
            owner.explain(error)
        self._handle(kind, error, trace)


def advise_when_uncaught(owner: Any) -> None:
    """Add `owner.explain(error)` to an error that ends the program: backward raises where no code of ours is around.

    The owner is not kept alive by this, and however many there are, one hook serves them.
    """
    hook: Any = sys.excepthook
    if not isinstance(hook, _Advice):
        sys.excepthook = hook = _Advice(hook)
    hook.owners.add(owner)
