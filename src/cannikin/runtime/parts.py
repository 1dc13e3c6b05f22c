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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cannikin.errors import InvalidInputError
from cannikin.runtime.memory import MemoryGauge, is_out_of_memory, missing_gradients, state_bytes
from cannikin.runtime.weighting import has_batch_norm

_RUN = "_run_ddp_forward"  # DDP's method that calls the module, the only thing in DDP that runs it
_LEAST_PART = 2  # a single sample may be broadcast where it should not, and BatchNorm cannot normalise it
_COPIES = 3  # of the whole batch's outputs that there are in backward: themselves, their gradients, and a loss's own

Gradients = list[torch.Tensor | None]
F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Keep a compiler from a function and from all that it calls, where it would trace what is around the module."""
    kept: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept


def not_compiled_itself(function: F) -> F:
    """Keep a compiler from a function, not from what it calls: in the end that is the module."""
    kept: F = torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]
    return kept


def can_cut(ddp: torch.nn.Module) -> bool:
    """Return whether a rank may run its forward in parts while the others do not.

    Layers that talk to other ranks in forward cannot, and DDP's static graph must be the same in every step.
    """
    if not isinstance(ddp, DistributedDataParallel) or ddp.static_graph or ddp.mixed_precision is not None:
        return False
    mixes_ranks = any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in ddp.module.modules())
    return hasattr(ddp, _RUN) and not mixes_ranks


def watch_forward(ddp: Any, run_watched: Callable[..., Any]) -> None:
    """Have DDP's next forward run the module by `run_watched(run, args, kwargs)`, and later ones as ever.

    DDP prepares its reducer before and after the module runs; between the two nothing is shared with other ranks.
    """
    vars(ddp).pop(_RUN, None)  # still there where the last forward failed before it got so far
    run = getattr(ddp, _RUN)

    @not_compiled_itself
    def once(*args: Any, **kwargs: Any) -> Any:
        vars(ddp).pop(_RUN, None)
        return run_watched(run, args, kwargs)

    vars(ddp)[_RUN] = once


def cut_sizes(size: int, most: int) -> list[int]:
    """Return the sizes of as few parts of at most `most` samples as can be, which are not all equal.

    Parts of unequal sizes show which outputs have one row per sample.

    Example:
        >>> cut_sizes(384, 200), cut_sizes(9, 4), cut_sizes(12, 4)
        ([193, 191], [4, 3, 2], [4, 3, 3, 2])
    """
    for num_parts in range(max(2, -(-size // most)), size + 1):
        ends = [round(size * part / num_parts) for part in range(num_parts + 1)]
        sizes = [end - start for start, end in pairwise(ends)]
        if len(set(sizes)) == 1 and sizes[0] < most:
            sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
        if len(set(sizes)) > 1 and min(sizes) >= _LEAST_PART:
            return sizes
    raise _UncutError(f"{size} samples cannot be cut into unequal parts of {_LEAST_PART} to {most}")


class _UncutError(InvalidInputError):
    """Says why a batch cannot be run in parts."""


class PartedForward:
    """Runs forwards that may be too large for a rank's memory, whole where it allows, else in parts.

    `gauge` learns what is too large and which part went through.
    """

    def __init__(self, gauge: MemoryGauge, device: torch.device) -> None:
        self._gauge, self._device = gauge, device
        self._differentiable: list[bool] = []  # which outputs have a gradient

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
    ) -> tuple[_Batch, tuple[Any, list[int]] | None]:
        """Return the batch, and what has come out where it is known to be too large, with the sizes of its parts."""
        gauge = self._gauge
        batch = _Batch(net, run, args, kwargs, size, self._device, gauge.allocated())
        if gauge.part is not None and size > gauge.max_batch:
            try:
                sizes = cut_sizes(size, gauge.part)
                return batch, (batch.run(sizes, self._differentiable), sizes)
            except Exception as raised:  # what was found out no longer holds: find out anew
                can_repeat = isinstance(raised, _UncutError) or is_out_of_memory(raised)
                if not can_repeat or batch.is_changed():
                    raise
                traceback.clear_frames(raised.__traceback__)
        return batch, None

    @not_compiled
    def _is_left_alone(self, batch: _Batch, output: Any, *, all_used: bool) -> bool:
        """Return whether the output of the whole batch is to be used as it is: it leaves room, or cannot be cut.

        That is found out by a few samples while the output is there: a forward that talks to other ranks must not be
        run once more.
        """
        missing = missing_gradients(batch.net) + _for_loss(pytree.tree_leaves(output))
        if batch.is_changed() or self._gauge.leaves_room(batch.size, batch.allocated_before, missing):
            return True
        try:
            with batch.with_copied_buffers():
                batch.rehearse(_LEAST_PART, self._gauge, all_used=all_used)
        except Exception as error:
            return not is_out_of_memory(error)
        return False

    @not_compiled
    def _run_in_parts(self, batch: _Batch, error: Exception | None, *, all_used: bool) -> tuple[Any, list[int]] | None:
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

    def _try_parts(self, batch: _Batch, *, all_used: bool) -> tuple[list[int], int]:
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """Samples `start` to `end` of a batch, and what else decided their outputs when they ran."""

    start: int
    end: int
    random: list[torch.Tensor]
    buffers: _Buffers

    def halves(self) -> tuple[_Part, _Part]:
        """Return this part in two."""
        middle = (self.start + self.end) // 2
        return replace(self, end=middle), replace(self, start=middle)


class _Batch:
    """The inputs of one forward, which can be run in parts; `run` as in `PartedForward`.

    Once it has run, autograd keeps the inputs, as it does for any function: it lets them go after backward, and refuses
    a backward whose inputs or parameters have been changed meanwhile.
    """

    def __init__(
        self,
        net: torch.nn.Module,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        size: int,
        device: torch.device,
        allocated_bytes: int,
    ) -> None:
        self.net, self.size, self.allocated_before, self.buffers_before = net, size, allocated_bytes, _Buffers(net)
        self._run, self._device = run, device
        self._leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._tensors = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self._versions = self._versions_now()
        self._has_list = any(_has_list(value, size) for value in (*args, *kwargs.values()))
        self._cut = [isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (size,) for leaf in self._leaves]
        self._wanted = [i for i in self._tensors if self._leaves[i].requires_grad]
        self._parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
        kinds = {"cpu", device.type}
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._parts: list[_Part] = []
        self._repeatable = False

    def _versions_now(self) -> list[int]:
        tensors = (self._leaves[i] for i in self._tensors)
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    def is_changed(self) -> bool:
        """Return whether forward has changed an input in place: it would once more in another run."""
        return self._versions_now() != self._versions

    def _refuse_changed(self) -> None:
        if self.is_changed():
            raise _UncutError("forward changes its inputs in place")

    def rehearse(self, size: int, gauge: MemoryGauge, *, all_used: bool) -> tuple[list[bool], int]:
        """Run the first samples forward and backward to no effect; which outputs have a gradient, and bytes held.

        Beside it there is what there will be in earnest: sums of gradients, and for the whole batch the outputs, their
        gradients and what the loss keeps of them.
        """
        if not any(self._cut):
            raise _UncutError(f"no input has {self.size} samples in dimension 0")
        if self._has_list:
            raise _UncutError(f"an input is a list of {self.size} values, which is not cut")
        beside = [torch.empty_like(parameter) for parameter in self._parameters]
        before = gauge.allocated()
        with torch.enable_grad(), self._as_at(self._part(0, size)), _Silence():  # type: ignore[no-untyped-call]
            args, kwargs, wanted = self._inputs(0, size)
            outputs = pytree.tree_leaves(self.net(*args, **kwargs))
            held = gauge.allocated() - before + _for_loss(outputs)
            marked = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            rows = [leaf for leaf in marked if leaf.shape[:1] == (size,)]
            beside += [leaf.new_empty((self.size, *leaf.shape[1:])) for leaf in rows for _ in range(_COPIES)]
            if marked:
                zeros = [torch.zeros_like(leaf) for leaf in marked]
                found = self._grad(marked, wanted, zeros)
                if all_used and any(gradient is None for gradient in found[len(wanted) :]):
                    raise _UncutError(
                        "some parameter has no gradient that autograd finds, as under torch.utils.checkpoint with "
                        "use_reentrant=True"
                    )
            self._refuse_traces()
        return [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in outputs], held

    @contextmanager
    def with_copied_buffers(self) -> Iterator[None]:
        """Give the module copies of its buffers, and then back what it had: a graph may need those as they are."""
        had = [(layer, dict(layer._buffers)) for layer in self.net.modules()]
        for layer, buffers in had:
            layer._buffers.update({name: None if b is None else b.detach().clone() for name, b in buffers.items()})
        try:
            yield
        finally:
            for layer, buffers in had:
                layer._buffers.clear()
                layer._buffers.update(buffers)

    def run(self, sizes: Sequence[int], differentiable: Sequence[bool]) -> Any:
        """Return the output of the whole batch, of parts of these sizes; backward runs the parts anew.

        `differentiable` has an entry per leaf of the output.
        """
        joined, self._parts = _Joined(self.size), []
        try:
            with torch.no_grad(), self._in_autocast():
                for start, end in pairwise(accumulate(sizes, initial=0)):
                    self._parts.append(self._part(start, end))
                    args, kwargs, _ = self._inputs(start, end)
                    joined.add(self._run(*args, **kwargs), start, end)
            flags = joined.of_tensors(differentiable)
            self._refuse_changed()
        except Exception:
            self.buffers_before.restore()
            raise
        first, last = self._parts[0], self._part(0, 0)
        drew = any(not torch.equal(*states) for states in zip(first.random, last.random, strict=True))
        self._repeatable = not drew and first.buffers.are_so() and not has_batch_norm(self.net)
        # Nodes of parameters have no order among themselves, nodes of views do; and DDP's buckets follow that order.
        views = [parameter.view_as(parameter) for parameter in self._parameters]
        inputs, tensors = [self._leaves[i] for i in self._wanted], [self._leaves[i] for i in self._tensors]
        outputs = _RunAnew.apply(self, joined.tensors, flags, tensors, *inputs, *views)  # type: ignore[no-untyped-call]
        self._give([None] * len(tensors))
        return joined.output(outputs)

    def _give(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Put these in the places of the inputs' tensors."""
        for i, tensor in zip(self._tensors, tensors, strict=True):
            self._leaves[i] = tensor

    def gradients(self, gradients: Gradients, tensors: Sequence[torch.Tensor]) -> Gradients:
        """Return the gradients of inputs and parameters, in the order of `run`.

        Args:
            gradients: of the outputs.
            tensors: those of the inputs.
        """
        self._give(tensors)
        try:
            return self._summed(gradients)
        finally:
            self._give([None] * len(tensors))

    def _summed(self, gradients: Gradients) -> Gradients:
        """Return the sum over parts, of which one that is too large is halved."""
        sums: Gradients = [None] * (len(self._wanted) + len(self._parameters))
        parts = self._parts[::-1]
        while parts:
            part = parts.pop()
            try:
                found = self._differentiate(gradients, part)
            except Exception as error:
                can_halve = self._repeatable and part.end - part.start >= 2 * _LEAST_PART
                if not can_halve or not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
                parts += part.halves()
                continue
            for i, gradient in enumerate(found):
                before, found[i] = sums[i], None  # one after another: all of them twice may be too much
                if gradient is not None:
                    sums[i] = gradient if before is None else before + gradient
        return sums

    def _differentiate(self, gradients: Gradients, part: _Part) -> Gradients:
        """Run a part forward and backward; its gradients, as in `gradients`."""
        start, end = part.start, part.end
        with torch.enable_grad(), self._as_at(part):
            args, kwargs, wanted = self._inputs(start, end)
            outputs = [x for x in pytree.tree_leaves(self.net(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            pairs = [
                (output, gradient[start:end])
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            found: Gradients = [None] * (len(wanted) + len(self._parameters))
            if pairs:
                marked, given = zip(*pairs, strict=True)
                found = self._grad(marked, wanted, given)
        for place, i in enumerate(self._wanted):
            gradient = found[place]
            if self._cut[i] and gradient is not None:
                whole = torch.zeros_like(self._leaves[i])
                whole[start:end] = gradient
                found[place] = whole
        return found

    def _grad(
        self, outputs: Sequence[torch.Tensor], wanted: list[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> Gradients:
        """Return the gradients of these inputs and of the parameters; the user's hooks are left to see their sum."""
        hooks: list[tuple[Any, Any]] = [(p, p._backward_hooks) for p in self._parameters if p._backward_hooks]
        for parameter, _ in hooks:
            parameter._backward_hooks = None
        try:
            return list(torch.autograd.grad(outputs, [*wanted, *self._parameters], given, allow_unused=True))
        finally:
            for parameter, own in hooks:
                parameter._backward_hooks = own

    def _refuse_traces(self) -> None:
        """Refuse a module whose forward leaves more than its outputs: what parts leave so has no graph."""
        self._refuse_changed()
        for name, layer in self.net.named_modules():
            for kept, value in vars(layer).items():
                # A weight made of parameters, as by weight_norm and pruning, is made anew in every forward.
                made = any(parameter.startswith(f"{kept}_") for parameter in layer._parameters)
                leaves = () if made else pytree.tree_leaves(value)
                if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves):
                    raise _UncutError(f"forward keeps a tensor with a graph in {kept!r} of {name or 'the module'}")

    def _inputs(self, start: int, end: int) -> tuple[Any, Any, list[torch.Tensor]]:
        """Return the arguments of a part, and those tensors of them whose gradient is wanted."""
        leaves = [leaf[start:end] if cut else leaf for leaf, cut in zip(self._leaves, self._cut, strict=True)]
        for i in self._wanted:
            leaves[i] = leaves[i].detach().requires_grad_()
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs, [leaves[i] for i in self._wanted]

    def _part(self, start: int, end: int) -> _Part:
        """Return a part that runs now."""
        random = [torch.get_rng_state()]
        if self._device.type == "cuda":
            random.append(torch.cuda.get_rng_state(self._device))
        return _Part(start=start, end=end, random=random, buffers=_Buffers(self.net))

    @contextmanager
    def _as_at(self, part: _Part) -> Iterator[None]:
        """Give the module the random numbers, buffers and precision that a part had, and take them back."""
        now = _Buffers(self.net)
        with torch.random.fork_rng([self._device] * (len(part.random) - 1)), self._in_autocast():
            part.buffers.restore()
            torch.set_rng_state(part.random[0])
            for state in part.random[1:]:
                torch.cuda.set_rng_state(state, self._device)
            try:
                yield
            finally:
                now.restore()

    @contextmanager
    def _in_autocast(self) -> Iterator[None]:
        """Be in the precision of forward, with no cache: what was cast without a graph must not be used with one."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


class _Silence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to talk to other ranks, which do not run their forward once more."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise _UncutError("forward talks to other ranks")
        return func(*args, **(kwargs or {}))


class _RunAnew(torch.autograd.Function):
    """Returns the outputs of a batch that ran in parts, and in backward asks it for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: _Batch,
        outputs: list[torch.Tensor],
        differentiable: list[bool],
        tensors: list[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.batch, ctx.num_tensors = batch, len(tensors)
        ctx.save_for_backward(*tensors, *inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for out, has in zip(outputs, differentiable, strict=True) if not has))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors[: ctx.num_tensors]
        return (None, None, None, None, *ctx.batch.gradients(list(gradients), tensors))


class _Joined:
    """The outputs of parts, put together row by row."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._first: list[Any] = []
        self._structure: Any = None
        self.tensors: list[torch.Tensor] = []

    def add(self, output: Any, start: int, end: int) -> None:
        """Take the output of the part from `start` to `end`."""
        leaves, structure = pytree.tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if tensor.shape[:1] != (end - start,):
                shape = tuple(tensor.shape)
                raise _UncutError(f"an output of shape {shape} has not one row for each of {end - start} samples")
        if self._structure is None:
            self._first, self._structure = leaves, structure
            self.tensors = [tensor.new_empty((self._size, *tensor.shape[1:])) for tensor in tensors]
        alike = structure == self._structure and len(tensors) == len(self.tensors)
        alike = alike and all(
            mine.shape[1:] == whole.shape[1:] for mine, whole in zip(tensors, self.tensors, strict=True)
        )
        rest = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if not alike or rest != [leaf for leaf in self._first if not isinstance(leaf, torch.Tensor)]:
            raise _UncutError("the outputs of parts of different sizes differ in more than their rows")
        for whole, mine in zip(self.tensors, tensors, strict=True):
            whole[start:end] = mine

    def of_tensors(self, flags: Sequence[bool]) -> list[bool]:
        """Return, of one flag per leaf, those of tensors."""
        if len(flags) != len(self._first):
            raise _UncutError(f"forward returned {len(self._first)} values, and {len(flags)} when it was tried")
        return [flag for leaf, flag in zip(self._first, flags, strict=True) if isinstance(leaf, torch.Tensor)]

    def output(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output with these tensors in it."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._first]
        return pytree.tree_unflatten(leaves, self._structure)


def _for_loss(outputs: list[Any]) -> int:
    """Return the bytes that a loss will need beside these outputs: what it keeps of them, and their gradients."""
    tensors = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return (_COPIES - 1) * sum(tensor.nbytes for tensor in tensors)


def _has_list(value: Any, size: int) -> bool:
    """Return whether there is a list of this length in an input: it may have one value per sample."""
    if isinstance(value, list | tuple):
        return len(value) == size or any(_has_list(part, size) for part in value)
    return isinstance(value, dict) and any(_has_list(part, size) for part in value.values())


class _Buffers:
    """A module's buffers as they were at one moment."""

    def __init__(self, net: torch.nn.Module) -> None:
        self._kept = [
            (layer, name, buffer, buffer.detach().clone())
            for layer in net.modules()
            for name, buffer in layer._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Make them so again; those that are so are not touched, since a graph may need them."""
        with torch.no_grad():
            for layer, name, buffer, kept in self._kept:
                layer._buffers[name] = buffer
                if not torch.equal(buffer, kept):
                    buffer.copy_(kept)

    def are_so(self) -> bool:
        """Return whether nothing has changed since."""
        return all(
            layer._buffers[name] is buffer and torch.equal(buffer, kept) for layer, name, buffer, kept in self._kept
        )
