"""Notices code of the script's own that assumes equal batches, which cannot be mended here, and says what to do.

Two kinds: collectives in forward or loss (features of all ranks by `all_gather`, sums divided by the number of ranks),
and a second model that trains under plain DDP. Python tells us of calls while a profile function is set, which slows
every call down. So that is done in a few steps only: steps 0, 1, 2, 4, 8 and so on by powers of two, the first step of
each new plan, and those with a local batch that none has had before, as the last of a pass.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import typing_extensions
from torch.nn.parallel import DistributedDataParallel

from cannikin.core.values import Plan
from cannikin.errors import InvalidInputError
from cannikin.runtime.hook import DdpReducer

_FIRST_DDP_LOOK = 2  # look for a second model at this step, when it has usually trained, and at every power of two
_SINGLE_NUMBERS = 2  # entries of a vector that are a number or two per rank, whatever the local batch
_TORCH, _OURS = (os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
_WRAPPERS = (typing_extensions.__file__, contextlib.__file__)  # that torch's functions are decorated by
_OF_TORCH = tuple(
    os.path.join(_TORCH, *path)
    for path in (("nn", "modules"), ("nn", "parallel"), ("optim",), ("distributed", "tensor"))
)


def _codes(*names: str) -> dict[CodeType, str]:
    """Return the code of these functions, as far as this version of torch has them, plain and functional."""
    functions = [(name, getattr(module, name, None)) for module in (dist, functional) for name in names]
    return {inspect.unwrap(function).__code__: name for name, function in functions if function is not None}


_GATHERS = _codes(
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "gather",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_single_autograd",
)
_SUMS = _codes(
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
)
_SENT = ("tensor", "input_tensor", "input", "self")  # what these functions call what they send


class Notices:
    """Looks at the collectives that a script calls between the start of a forward and that of backward, and at DDP.

    Args:
        net: the network; a compiled one is not looked at, for the compiler would be slow under a profile function.
        rank: rank 0 warns; all raise.
        num_ranks: how many there are.
        may_differ: whether local batches may become unequal, also where none has been pinned so.
        seeks_models: whether to look for a second model under plain DDP.
    """

    def __init__(
        self, net: torch.nn.Module, rank: int, *, num_ranks: int, may_differ: bool, seeks_models: bool
    ) -> None:
        self._speaks, self._num_ranks, self._may_differ = rank == 0, num_ranks, may_differ
        self._net = weakref.ref(net)
        self._looks = num_ranks > 1
        self._seeks_models = num_ranks > 1 and seeks_models and rank == 0
        self._is_due = self._is_open = False  # in this step; at this moment
        self._split: tuple[int, ...] = ()  # that the plan in force says
        self._local_batch, self._is_unequal = 0, False
        self._knows_sizes = False  # the script has told ranks whole numbers, as one does that pads to the largest batch
        self._warned: set[str] = set()
        self._gathers: dict[str, set[int]] = {}  # lines that gather rows of the batch, and how many
        self._looked_at: set[int] = set()  # local batches

    def begin_step(self, num_taken: int, plan: Plan | None) -> None:
        """Look no more at the step before, perhaps at the one that begins, and now and then for a second model."""
        self._end()
        is_power = num_taken & (num_taken - 1) == 0
        split = () if plan is None else plan.local_batches
        self._is_due = is_power or split != self._split
        self._split = split
        if is_power and num_taken >= _FIRST_DDP_LOOK:  # where gradients pile up it has not trained by the first look
            self._seeks_models = self._seeks_models and not (self._may_differ and _warn_of_plain_ddp())

    def begin_forward(self, local_batch: int, total_batch: int) -> None:
        """Look at what is called from now on in the forward of a batch, if there is reason to."""
        if not self._looks or self._is_open or sys.getprofile() is not None:
            return
        surplus = abs(local_batch * self._num_ranks - total_batch)
        self._may_differ |= surplus >= self._num_ranks  # more than rounding: pinned so, under an even policy
        if not self._may_differ:
            return
        if self._is_due or local_batch not in self._looked_at:
            net = self._net()
            if net is None or _is_compiled(net):
                self._looks = False
                return
            self._looked_at.add(local_batch)
            self._local_batch, self._is_unequal, self._is_open = local_batch, surplus > 0, True
            self._knows_sizes = False
            sys.setprofile(self._see)

    def begin_backward(self) -> None:
        """Look no more; this may be on another thread, whose profile function is another one."""
        self._is_open = False

    def _end(self) -> None:
        self._is_open = False
        if sys.getprofile() == self._see:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._is_open:
            self._end()
        elif event == "call" and (frame.f_code in _GATHERS or frame.f_code in _SUMS):
            place, given = _place(frame.f_back), frame.f_locals
            sent = next((given[key] for key in _SENT if isinstance(given.get(key), torch.Tensor)), None)
            if place is None or sent is None:
                return
            samples = (self._local_batch, 2 * self._local_batch)  # rows of one view, or of two
            has_rows = sent.ndim > 1 or (sent.ndim == 1 and (len(sent) > _SINGLE_NUMBERS or place in self._gathers))
            if not sent.is_floating_point() and not (has_rows and len(sent) in samples):
                self._knows_sizes = True
            elif frame.f_code in _SUMS:
                self._warn_of_sum(place, _SUMS[frame.f_code])
            elif has_rows and not self._knows_sizes:
                # The rows of padding tell nothing.
                is_of_batch = place in self._gathers if self._local_batch == 0 else len(sent) in samples
                if is_of_batch:
                    self._note_gather(place, _GATHERS[frame.f_code], sent)

    def _warn_of_sum(self, place: str, name: str) -> None:
        self._warn(
            place,
            f"{place} calls {name} in forward or loss: with unequal batches a sum divided by the number of ranks, and "
            "a mean of their means, are not those of all samples; use model.global_mean(x), or "
            "model.weighted_mean(loss) for a number to be logged (docs/recipes/centres.md); where the loss is a local "
            'sum that is divided by the count of all ranks, pass weighting="none"',
        )

    def _note_gather(self, place: str, name: str, sent: torch.Tensor) -> None:
        """Warn of a gather of rows of the batch; raise where another rank has another number of these.

        A vector may be as long as the batch by chance, as one with an entry per class: it is certainly of the batch
        where it has had another length.
        """
        lengths = self._gathers.setdefault(place, set())
        is_certain = sent.ndim > 1 or bool(lengths - {len(sent)})
        lengths.add(len(sent))
        text = (
            f"{place} calls {name} on a tensor with {len(sent)} rows at a local batch of {self._local_batch}: local "
            "batches become unequal, and torch gathers equal shapes only; use `rows, numbers = model.all_gather(x)` "
            "(docs/recipes/contrastive.md), or pin equal batches by local_batches="
        )
        if self._is_unequal and is_certain:
            self._end()
            raise InvalidInputError(text)
        self._warn(place, text)

    def _warn(self, place: str, text: str) -> None:
        if self._speaks and place not in self._warned:
            self._warned.add(place)
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _place(frame: FrameType | None) -> str | None:
    """Return the line outside of torch that made a call; None where torch or we did it ourselves."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, *_WRAPPERS)):
        if frame.f_code.co_filename.startswith(_OF_TORCH):
            return None  # SyncBatchNorm, DDP, an optimizer
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_compiled(net: torch.nn.Module) -> bool:
    """Return whether the compiler has this network, or anything else, to do with."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return bool(utils is not None and utils.counters["frames"]) or any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in net.modules()
    )


def _warn_of_plain_ddp() -> bool:
    """Warn where a module trains under plain DDP beside ours; return whether one does."""
    other = next(_plain_ddps(), None)
    if other is not None:
        warnings.warn(
            f"a {type(other.module).__name__} under plain DistributedDataParallel trains beside a HeteroDataParallel: "
            "with unequal batches its gradient is the mean of the ranks' means, not that of all samples; wrap it by "
            "cannikin.HeteroDataParallel(module, its_optimizer, follows=the_first_model) (docs/recipes/gan.md), or, of "
            "a framework's DDP module, call cannikin.attach(ddp, its_optimizer, follows=the_first_engine); unless it "
            "has equal batches of its own",
            RuntimeWarning,
            stacklevel=2,
        )
    return other is not None


def _plain_ddps() -> Iterator[Any]:
    """Find DDP modules without our hook that have trained."""
    for found in gc.get_objects():
        # Not issubclass, which asks an abstract base class: 400 ms instead of 45 for 170,000 objects.
        if DistributedDataParallel in type(found).__mro__ and "module" in getattr(found, "_modules", {}):
            hooks = getattr(found, "_comm_hooks", ())
            ours = any(isinstance(state, DdpReducer) for _, state in hooks)
            trained = getattr(found, "_has_rebuilt_buckets", False) or any(
                p.grad is not None for p in found.module.parameters()
            )
            if not ours and found.training and trained and any(p.requires_grad for p in found.module.parameters()):
                yield found
