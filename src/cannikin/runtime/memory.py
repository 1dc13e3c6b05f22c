"""How large a local batch a rank's memory holds, and what to tell someone whose rank has run out of it."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from cannikin.core.values import NO_MAX
from cannikin.runtime.device import Memory

_HEADROOM = 0.9  # of the memory there is: fragments, libraries' workspaces and the unforeseen need the rest
# What backward needs beside the parameters' gradients, as a share of what forward holds: at least, and to be safe.
_BACKWARD_LEAST, _BACKWARD = 0.1, 0.25
# Copies of the trainable parameters that a step keeps beside them: gradients, DDP's buckets, and an optimizer's state.
_COPIES = 3
# What the host's allocator says, the driver where torch's own allocator was not asked, and a library with no workspace.
_TEXTS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_FIRST_STEPS = 2  # before the optimizer has its state, a step needs less than it will


def largest_batch(batches: list[int], peaks: list[int], limit: int) -> int:
    """Return the largest batch within the limit, by a line through peak memory against local batch.

    No samples are a point too. It is never less than the largest batch seen, for that one went through.

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
    """Learns from peak memory how large a local batch may become, and says what to do when one was too large.

    Peak memory is read on the few steps whose local batch is larger than any before, so steady training pays nothing,
    and nobody's statistics are reset.

    Args:
        memory: None where there is nothing to read.
        later_bytes: what will come to the parameters after the first step began, such as the optimizer's state.
    """

    def __init__(self, memory: Memory | None, *, later_bytes: int = 0) -> None:
        self.in_hand: int | None = None  # samples that go through the network at once in the step in training
        self.largest = 0  # the largest local batch that a step was finished with
        self.part: int | None = None  # once a batch was too large: samples that go through at once all the same
        self._memory = memory
        self._later_bytes = later_bytes
        self._num_steps = 0
        self._points: list[tuple[int, int]] = []
        self._before: tuple[int, int] | None = None  # allocated and peak before the step in hand
        self._waste = 1.0  # what is taken for tensors over what they use, in the first step: later much lies idle
        self._by_first = self._by_peaks = self._by_failures = NO_MAX

    @property
    def max_batch(self) -> int:
        """The largest local batch that memory holds, as far as is known; never less than one that went through."""
        by_steps = self._by_peaks if self._by_peaks < NO_MAX else self._by_first
        return max(self.largest, min(by_steps, self._by_failures))

    def is_new(self, local_batch: int) -> bool:
        """Return whether nothing as large has gone through, on a device whose memory can be read."""
        return self._memory is not None and local_batch > self.largest

    def begin_step(self, local_batch: int) -> None:
        """Take note that a step with this local batch is about to begin."""
        self.in_hand = local_batch
        self._num_steps += 1
        self._before = None
        if self._memory is not None and local_batch > self.largest:
            self._before = self._memory.allocated(), self._memory.peak()

    def end_step(self, local_batch: int) -> None:
        """Take note that the step went through."""
        self.in_hand = None
        if self._num_steps > _FIRST_STEPS or self._memory is None:
            self.largest = max(self.largest, local_batch)
        if self._memory is None or self._before is None:
            return
        (allocated, peak_before), self._before = self._before, None
        peak = self._memory.peak()
        if peak <= peak_before:  # something other than this step needed more
            return
        if self._num_steps > _FIRST_STEPS:
            self._points = [*(self._points or [(0, allocated)]), (local_batch, peak)]
            batches, peaks = (list(column) for column in zip(*self._points, strict=True))
            self._by_peaks = largest_batch(batches, peaks, round(self._memory.limit() / self._waste))
        elif self._num_steps == 1:
            self._waste = max(1.0, self._memory.peak_taken() / peak)
            fits = self._fits((peak - allocated) / local_batch, allocated + self._later_bytes)
            self._by_first = max(local_batch, fits)

    # In a forward that may be too large (`parts`).

    def allocated(self) -> int:
        """Return what tensors use now; 0 where that cannot be read."""
        return 0 if self._memory is None else self._memory.allocated()

    def release(self) -> None:
        """Give back what no tensor uses."""
        if self._memory is not None:
            self._memory.release()

    def leaves_room(self, local_batch: int, before_bytes: int, missing_bytes: int) -> bool:
        """Return whether backward may go through, now that forward has: a run that fits barely is left alone.

        Before a step has gone through, all that is known is that backward needs gradients that are not there yet, and
        something for the gradients of activations: a tenth of what forward holds at least.

        Args:
            local_batch: samples in forward.
            before_bytes: what was allocated before forward.
            missing_bytes: of gradients.
        """
        if self._memory is None or self._by_peaks < NO_MAX:  # which plans keep to
            return True
        if self._by_first < NO_MAX:
            return local_batch <= self._by_first
        allocated = self._memory.allocated()
        return allocated + missing_bytes + _BACKWARD_LEAST * (allocated - before_bytes) <= self._memory.limit()

    def hold(self, local_batch: int, part: int, *, held_bytes: int, base_bytes: int) -> None:
        """Take note that this local batch is too large, and that `part` of its samples went through at once.

        What that part held says what others would; the bound is never below the part, nor as large as what failed.

        Args:
            held_bytes: what forward of the part held for backward.
            base_bytes: what there is beside, gradients included.
        """
        self.part, self._before = part, None
        self._by_failures = max(part, min(self._fits((1 + _BACKWARD) * held_bytes / part, base_bytes), local_batch - 1))

    def _fits(self, sample_bytes: float, base_bytes: float) -> int:
        """Return the samples that there is room for, with some to spare, if each needs so much."""
        assert self._memory is not None, "nothing is known of a memory that cannot be read"
        room = _HEADROOM * self._memory.limit() / self._waste - base_bytes
        return int(round(room / sample_bytes, 6)) if sample_bytes > 0 else NO_MAX

    def advice(self, rank: int, local_batch: int) -> str:
        """Return what to tell someone whose rank has run out of memory with this local batch."""
        fits = f"the largest that went through is {self.largest}" if self.largest else "none has gone through yet"
        bound = self.largest if 0 < self.largest < local_batch else max(1, local_batch // 2)
        first = "" if self.largest else ". The first split knows devices by their data sheets alone"
        return (
            f"cannikin: rank {rank} ran out of memory with a local batch of {local_batch} ({fits}). Bound it: "
            f"HeteroDataLoader(..., local_bounds=(1, {bound})), or one pair per rank; or cut the batch with "
            f"model.micro_batches(batch){first}"
        )

    def explain(self, error: BaseException, rank: int) -> str | None:
        """Add the advice to an error of a training step that ran out of memory; return it unless it was there."""
        if self.in_hand is None or not is_out_of_memory(error):
            return None
        advice = self.advice(rank, self.in_hand)
        if advice in getattr(error, "__notes__", ()):
            return None
        error.add_note(advice)
        return advice


def state_bytes(module: torch.nn.Module) -> int:
    """Return about what a model takes beside its activations: its parameters, and what comes to them."""
    return sum(_own_bytes(p) for p in module.parameters()) + later_bytes(module)


def later_bytes(module: torch.nn.Module) -> int:
    """Return about what comes to a model's parameters in training: gradients, buckets, the optimizer's state."""
    return sum(_COPIES * _own_bytes(p) for p in module.parameters() if p.requires_grad)


def _own_bytes(parameter: torch.Tensor) -> int:
    """Return what this rank has of a parameter, of a sharded one its shard."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.nbytes


def missing_gradients(module: torch.nn.Module) -> int:
    """Return the bytes of the gradients that backward has to make room for."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad and p.grad is None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was not enough memory, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
