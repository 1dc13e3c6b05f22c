"""A batch whose forward runs in parts without a graph, and whose backward runs each part anew, with one.

For autograd the whole is one node: backward sums the parts' gradients before DDP sees them. What cannot be run so, such
as a forward that talks to other ranks or keeps tensors with a graph, is refused with the reason.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cannikin.errors import InvalidInputError
from cannikin.runtime.memory import MemoryGauge, is_out_of_memory
from cannikin.runtime.weighting import has_batch_norm

LEAST_PART = 2  # a single sample may be broadcast where it should not, and BatchNorm cannot normalise it
_COPIES = 3  # of the whole batch's outputs that there are in backward: themselves, their gradients, and a loss's own

Gradients = list[torch.Tensor | None]


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
        if len(set(sizes)) > 1 and min(sizes) >= LEAST_PART:
            return sizes
    raise UncutError(f"{size} samples cannot be cut into unequal parts of {LEAST_PART} to {most}")


class UncutError(InvalidInputError):
    """Says why a batch cannot be run in parts."""


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


class PartedBatch:
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
            raise UncutError("forward changes its inputs in place")

    def rehearse(self, size: int, gauge: MemoryGauge, *, all_used: bool) -> tuple[list[bool], int]:
        """Run the first samples forward and backward to no effect; which outputs have a gradient, and bytes held.

        Meanwhile hold memory of the size that the real step needs: sums of gradients, and for the whole batch its
        outputs, their gradients and what the loss keeps of them.
        """
        if not any(self._cut):
            raise UncutError(f"no input has {self.size} samples in dimension 0")
        if self._has_list:
            raise UncutError(f"an input is a list of {self.size} values, which is not cut")
        beside = [torch.empty_like(parameter) for parameter in self._parameters]
        before = gauge.allocated()
        with torch.enable_grad(), self._as_at(self._part(0, size)), _Silence():  # type: ignore[no-untyped-call]
            args, kwargs, wanted = self._inputs(0, size)
            outputs = pytree.tree_leaves(self.net(*args, **kwargs))
            held = gauge.allocated() - before + bytes_for_loss(outputs)
            marked = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            rows = [leaf for leaf in marked if leaf.shape[:1] == (size,)]
            beside += [leaf.new_empty((self.size, *leaf.shape[1:])) for leaf in rows for _ in range(_COPIES)]
            if marked:
                zeros = [torch.zeros_like(leaf) for leaf in marked]
                found = self._grad(marked, wanted, zeros)
                if all_used and any(gradient is None for gradient in found[len(wanted) :]):
                    raise UncutError(
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
                can_halve = self._repeatable and part.end - part.start >= 2 * LEAST_PART
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
                    raise UncutError(f"forward keeps a tensor with a graph in {kept!r} of {name or 'the module'}")

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
            raise UncutError("forward talks to other ranks")
        return func(*args, **(kwargs or {}))


class _RunAnew(torch.autograd.Function):
    """Returns the outputs of a batch that ran in parts, and in backward asks it for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: PartedBatch,
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
                raise UncutError(f"an output of shape {shape} has not one row for each of {end - start} samples")
        if self._structure is None:
            self._first, self._structure = leaves, structure
            self.tensors = [tensor.new_empty((self._size, *tensor.shape[1:])) for tensor in tensors]
        alike = structure == self._structure and len(tensors) == len(self.tensors)
        alike = alike and all(
            mine.shape[1:] == whole.shape[1:] for mine, whole in zip(tensors, self.tensors, strict=True)
        )
        rest = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if not alike or rest != [leaf for leaf in self._first if not isinstance(leaf, torch.Tensor)]:
            raise UncutError("the outputs of parts of different sizes differ in more than their rows")
        for whole, mine in zip(self.tensors, tensors, strict=True):
            whole[start:end] = mine

    def of_tensors(self, flags: Sequence[bool]) -> list[bool]:
        """Return, of one flag per leaf, those of tensors."""
        if len(flags) != len(self._first):
            raise UncutError(f"forward returned {len(self._first)} values, and {len(flags)} when it was tried")
        return [flag for leaf, flag in zip(self._first, flags, strict=True) if isinstance(leaf, torch.Tensor)]

    def output(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output with these tensors in it."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._first]
        return pytree.tree_unflatten(leaves, self._structure)


def bytes_for_loss(outputs: list[Any]) -> int:
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
