"""A forward whose memory runs out is run once more, in parts, and no sample is lost.

The parts run without a graph, so they need little memory; backward runs each part anew, with a graph, and sums the
gradients of the parameters before DDP sees them. So a step in parts is one forward and one backward for DDP, for the
user's loss and for everybody else. It costs a forward more. Layers that mix samples, such as BatchNorm, see the parts,
as under `micro_batches`.

Only steps with a local batch larger than any that went through are watched, on devices whose memory can be read. What
runs out in the user's loss, in an ordinary backward or in the optimizer cannot be caught here.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from cannikin.core.values import NO_MAX
from cannikin.runtime.compiling import not_compiled, not_compiled_itself
from cannikin.runtime.memory import MemoryGauge, is_out_of_memory, missing_gradients, state_bytes
from cannikin.runtime.parted_batch import LEAST_PART, PartedBatch, UncutError, bytes_for_loss, cut_sizes
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.weighting import mixes_ranks

_CUT = 30  # after this many steps in parts, measure such steps too: plans have not lowered this rank's batch
_RUN = "_run_ddp_forward"  # DDP's method that calls the module, the only thing in DDP that runs it


def can_cut(ddp: torch.nn.Module) -> bool:
    """Return whether a rank may run its forward in parts while the others do not.

    Layers that talk to other ranks in forward cannot, and DDP's static graph must be the same in every step.
    """
    if not isinstance(ddp, DistributedDataParallel) or ddp.static_graph or ddp.mixed_precision is not None:
        return False
    return hasattr(ddp, _RUN) and not mixes_ranks(ddp.module)


class PartedForward:
    """Runs forwards that may be too large for a rank's memory, whole where it allows, else in parts.

    `gauge` learns what is too large and which part went through; warnings name the rank.
    """

    def __init__(self, gauge: MemoryGauge, device: torch.device, rank: int = 0) -> None:
        self._gauge, self._device, self._rank = gauge, device, rank
        self._differentiable: list[bool] = []  # which outputs have a gradient
        self._num_cut = 0  # steps that ran in parts
        self._told_max_batch = NO_MAX  # the bound that was last warned of

    def watch(self, ddp: Any, step: StepInProgress) -> None:
        """Have DDP's next forward, which is this step's, run its module by `run`, and later ones as ever.

        DDP prepares its reducer before and after the module runs; between the two nothing is shared with other ranks.
        """
        vars(ddp).pop(_RUN, None)  # still there where the last forward failed before it got so far
        run = getattr(ddp, _RUN)

        @not_compiled_itself
        def once(*args: Any, **kwargs: Any) -> Any:
            vars(ddp).pop(_RUN, None)
            size, all_used = step.entry.local_batch, not ddp.find_unused_parameters
            output, parts = self.run(ddp.module, run, args, kwargs, size, all_used=all_used)
            if parts:
                self._note(step, parts)
            return output

        vars(ddp)[_RUN] = once

    @not_compiled
    def _note(self, step: StepInProgress, parts: list[int]) -> None:
        """Take note of a batch that ran in parts of these sizes, and say so where it was found to be too large."""
        step.part_size = max(parts)
        self._num_cut += 1
        step.valid = step.valid and self._num_cut > _CUT
        if self._gauge.max_batch < self._told_max_batch:
            self._told_max_batch = self._gauge.max_batch
            warnings.warn(
                f"rank {self._rank} has not enough memory for a local batch of {step.entry.local_batch}: it trained on "
                f"it in {len(parts)} parts, and is given at most {self._gauge.max_batch} samples as soon as plans "
                "allow",
                RuntimeWarning,
                stacklevel=2,
            )

    @not_compiled_itself
    def run(
        self,
        net: torch.nn.Module,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        size: int,
        *,
        all_used: bool = False,
    ) -> tuple[Any, list[int]]:
        """Return the output of `run(*args, **kwargs)`, and the sizes of its parts; [] where it ran whole.

        Args:
            net: the module that `run` calls in the end.
            size: samples in dimension 0 of those inputs that are to be cut.
            all_used: whether every parameter must have a gradient, as under DDP that looks for no unused ones.
        """
        batch, known = self._begin(net, run, args, kwargs, size)
        if known is not None:
            return known
        output, error = None, None
        try:
            output = run(*args, **kwargs)
        except Exception as raised:
            if not is_out_of_memory(raised):
                raise
            error = raised
        if error is None and self._is_left_alone(batch, output, all_used=all_used):
            return output, []
        output = None
        parted = self._run_in_parts(batch, error, all_used=all_used)
        if parted is not None:
            error = None  # which holds this frame
            return parted
        if error is not None:
            raise error  # here, where it keeps its own cause
        return run(*args, **kwargs), []  # nothing has failed so far

    @not_compiled
    def _begin(
        self, net: torch.nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, size: int
    ) -> tuple[PartedBatch, tuple[Any, list[int]] | None]:
        """Return the batch, and what has come out where it is known to be too large, with the sizes of its parts."""
        gauge = self._gauge
        batch = PartedBatch(net, run, args, kwargs, size, self._device, gauge.allocated())
        if gauge.part is not None and size > gauge.max_batch:
            try:
                sizes = cut_sizes(size, gauge.part)
                return batch, (batch.run(sizes, self._differentiable), sizes)
            except Exception as raised:  # what was found out no longer holds: find out anew
                can_repeat = isinstance(raised, UncutError) or is_out_of_memory(raised)
                if not can_repeat or batch.is_changed():
                    raise
                traceback.clear_frames(raised.__traceback__)
        return batch, None

    @not_compiled
    def _is_left_alone(self, batch: PartedBatch, output: Any, *, all_used: bool) -> bool:
        """Return whether the output of the whole batch is to be used as it is: it leaves room, or cannot be cut.

        That is found out by a few samples while the output is there: a forward that talks to other ranks must not be
        run once more.
        """
        missing = missing_gradients(batch.net) + bytes_for_loss(pytree.tree_leaves(output))
        if batch.is_changed() or self._gauge.leaves_room(batch.size, batch.allocated_before, missing):
            return True
        try:
            with batch.with_copied_buffers():
                batch.rehearse(LEAST_PART, self._gauge, all_used=all_used)
        except Exception as error:
            return not is_out_of_memory(error)
        return False

    @not_compiled
    def _run_in_parts(
        self, batch: PartedBatch, error: Exception | None, *, all_used: bool
    ) -> tuple[Any, list[int]] | None:
        """Return the output of a batch that was too large, and the sizes of its parts; None where it cannot be cut.

        Then the error, if there was one, has a note that says why.
        """
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # they hold the activations
        batch.buffers_before.restore()
        try:
            sizes, held = self._try_parts(batch, all_used=all_used)
            result = batch.run(sizes, self._differentiable)
        except Exception as refusal:
            if error is not None:
                error.add_note(f"cannikin: running the batch in parts did not help ({refusal})")
            return None
        base = max(batch.allocated_before + missing_gradients(batch.net), state_bytes(batch.net))
        self._gauge.hold(batch.size, max(sizes), held_bytes=held, base_bytes=base)
        return result, sizes

    def _try_parts(self, batch: PartedBatch, *, all_used: bool) -> tuple[list[int], int]:
        """Return the sizes of the fewest parts whose largest goes through forward and backward, and what that held."""
        num_parts = 2
        while True:
            sizes = cut_sizes(batch.size, -(-batch.size // num_parts) + 1)
            self._gauge.release()
            try:
                self._differentiable, held = batch.rehearse(max(sizes), self._gauge, all_used=all_used)
                return sizes, held
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
            num_parts *= 2
