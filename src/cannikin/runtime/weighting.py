"""Where a rank's weight b_i/B is applied, and the marks that forward leaves on its outputs.

    "hook"   what a rank brings to the sum over ranks is multiplied by b_i/B: DDP's buckets, or under fully_shard the
             gradient of each layer
    "loss"   the gradient of every output is multiplied by n b_i/B, and the hook divides by n: right where backward
             itself mixes ranks (SyncBatchNorm)
    "none"   the hook averages as DDP does, for losses that are sums over the local batch, or that the model divides by
             the global count itself

All but "none" assume a loss that is a mean over the local batch.

BatchNorm's running statistics are weighted too. DDP gives every rank the buffers of rank 0, whose batch may be the
smallest; we make statistics the weighted mean over ranks after every step, beside its backward, so that ranks that
evaluate, save or stop at any step do it with one model. All other buffers stay DDP's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from cannikin.errors import InvalidInputError
from cannikin.runtime.step import StepInProgress

_DEPTH = 4  # levels of attributes: a mixture's component, its base, its mean
WEIGHTINGS = ("auto", "hook", "loss", "none")


def network(wrapped: torch.nn.Module) -> torch.nn.Module:
    """Return the network that a DDP module holds, or the module itself, which `fully_shard` changes in place."""
    return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped


def choose_weighting(weighting: str, wrapped: torch.nn.Module) -> tuple[str, str]:
    """Return the weighting in force, and a sentence that says why."""
    if weighting not in WEIGHTINGS:
        raise InvalidInputError(f"weighting={weighting!r} is unknown: choose one of {', '.join(WEIGHTINGS)}")
    if weighting != "auto":
        return weighting, f"weighting={weighting!r} as asked"
    if mixes_ranks(network(wrapped)):
        return "loss", "weighting='loss', because SyncBatchNorm mixes ranks in backward"
    return "hook", "weighting='hook': gradients are weighted by local over total batch where they are reduced"


def refuse_sparse(module: torch.nn.Module) -> None:
    """Refuse sparse gradients, which come in buckets of their own that the hook cannot weight."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            name = name or type(part).__name__
            raise InvalidInputError(f"{name} has sparse gradients, which cannot be weighted: pass it sparse=False")


def is_inward(weighting: str, *, accumulating: bool) -> bool:
    """Return whether gradients are weighted where they enter the network, at forward's outputs."""
    return weighting == "loss" or (weighting == "hook" and accumulating)


def weigh(step: StepInProgress, weighting: str, world_size: int, *, accumulating: bool) -> None:
    """Set what the hook multiplies by, which is less where the gradient of forward's outputs is weighted instead.

    Gradients that pile up under no_sync may stem from different splits, so they are weighted on their way in.
    """
    inward = is_inward(weighting, accumulating=accumulating)
    step.weight = None if weighting == "hook" and not inward else 1.0 / world_size
    scale = world_size * step.entry.local_batch / step.entry.total_batch
    # Without weighting the gradient is this rank's part of a sum, and as large as the share.
    step.norm_scale = 1.0 / scale**2 if (inward or weighting == "none") and scale > 0 else 1.0


def weighted(tensor: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a tensor times a weight. At weight 0 it is zeros, whatever was in it: 0 x NaN is NaN.

    Example:
        >>> weighted(torch.tensor([1.0, float("nan")]), 0.0)
        tensor([0., 0.])
    """
    if weight:
        return tensor * weight
    return torch.zeros_like(tensor, dtype=torch.result_type(tensor, 1.0))  # a product's: ranks must not differ


def weighted_(tensor: torch.Tensor, weight: float) -> torch.Tensor:
    """Multiply a tensor by a weight as `weighted` does, but in place, and return it."""
    if weight == 1.0:
        return tensor
    return tensor.mul_(weight) if weight else tensor.zero_()


class _Scale(torch.autograd.Function):
    """A gradient times a factor, whose own gradient passes unchanged.

    So a penalty on gradients is weighted once: its second-order gradient enters a network whose first-order gradients
    have been scaled already. With a factor s on the outputs and 1/s on the inputs, the slope is g = 1/s J' (s v), and
    the gradient of a penalty on it comes out times s, as that of any other loss.
    """

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        return weighted(gradient, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Mark(torch.autograd.Function):
    """Identity that calls back at the start of backward and scales the gradient that passes.

    A function, not a tensor hook: where outputs feed each other, hooks on both would scale twice.
    """

    @staticmethod
    def forward(ctx: Any, callback: Any, tensor: torch.Tensor, alone: bool) -> torch.Tensor:
        ctx.callback = callback
        # Autograd refuses in-place changes of a view that a function made, as it should where outputs share memory: a
        # change of one would not be seen in the gradient of another.
        return tensor.detach() if alone else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        (gradient,) = gradients
        scale = ctx.callback()
        if scale == 1.0:
            return None, gradient, None
        return None, _Scale.apply(gradient, scale), None  # type: ignore[no-untyped-call]


def scale_inputs(inputs: Any, callback: Any) -> Any:
    """Undo, in the gradient that leaves the network by its inputs, what is done to that of its outputs.

    What made the inputs, such as a GAN's generator, has a weight of its own. None where no input has a gradient.
    """
    return _scaled(inputs, callback, alone=True) if _with_gradient(inputs) else None


def refuse_inner_slopes() -> None:
    """Refuse a graph of gradients by something inside of the network, which cannot be freed of the weight on them."""
    if torch.is_grad_enabled():
        raise InvalidInputError(
            "create_graph=True, as in a gradient penalty, through outputs whose gradients are weighted, and not by an "
            "input of forward: accumulate without no_sync and micro_batches, and use weighting='hook', not 'loss'"
        )


def scale_outputs(output: Any, callback: Any) -> tuple[Any, int]:
    """Pass every tensor of an output that has a gradient through a mark; the output, and how many those were.

    Args:
        output: what forward returned: a tensor, or tensors in lists, tuples, mappings, dataclasses and what pytree
            knows.
        callback: called at each marked output's backward; returns the factor on its gradient.
    """
    tensors = _with_gradient(output)
    num_storages = len({_storage(tensor) for tensor in tensors})
    return _scaled(output, callback, num_storages == len(tensors)), len(tensors)


def _scaled(value: Any, callback: Any, alone: bool) -> Any:
    def mark(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _Mark.apply(callback, leaf, alone) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]
        if not _with_gradient(leaf):
            return leaf
        marked = copy.copy(leaf)
        for name in _field_names(leaf):  # DDP looks into these too
            object.__setattr__(marked, name, _scaled(getattr(leaf, name), callback, alone))
        for key, part in _items(leaf):
            marked[key] = _scaled(part, callback, alone)
            if getattr(marked, "__dict__", {}).get(key) is part:  # a dict whose items are attributes too
                vars(marked)[key] = marked[key]
        return marked

    return pytree.tree_map(mark, value)


def _field_names(leaf: Any) -> list[str]:
    """Return the names of a dataclass's fields; of anything else none."""
    return [part.name for part in fields(leaf)] if is_dataclass(leaf) and not isinstance(leaf, type) else []


def _items(leaf: Any) -> list[tuple[Any, Any]]:
    """Return the items of a mapping that can be changed, of classes that pytree does not know; else none."""
    return [*leaf.items()] if isinstance(leaf, MutableMapping) else []


def find_hidden(output: Any) -> object | None:
    """Return an object in an output that holds a tensor with a gradient where no mark comes to it, as a distribution.

    It is looked for in attributes and mappings, not in lists that an object holds: so Transformers keeps the keys and
    values that its models return beside their outputs, and no loss is made of these.
    """
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            continue
        parts = [getattr(leaf, name) for name in _field_names(leaf)] + [part for _, part in _items(leaf)]
        found = find_hidden(parts) if parts else leaf if _hides_gradient(leaf, _DEPTH) else None
        if found is not None:
            return found
    return None


def _hides_gradient(value: Any, depth: int) -> bool:
    """Return whether an object's attributes, so many levels down, lead to a tensor that has a history."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    if depth == 0 or isinstance(value, torch.nn.Module | type | str | float | None):
        return False
    held = [*value.values()] if isinstance(value, Mapping) else [*getattr(value, "__dict__", {}).values()]
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        held += [getattr(value, name, None) for name in ([names] if isinstance(names, str) else names)]
    return any(_hides_gradient(part, depth - 1) for part in held)


def watch_outputs(output: Any, callback: Any) -> list[Any]:
    """Have `callback(...)` called when backward comes to any tensor of an output; handles to `remove()` in the end.

    Autograd's nodes are watched, not the tensors: a tensor's hook also runs where its gradient is only asked for, and
    is lost with a view that is changed in place, for which its base is watched.
    """
    handles = []
    for tensor in _with_gradient(output):
        base = tensor._base
        node = tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn
        # A parameter that is returned as it is has no node.
        watch: Any = tensor.register_hook if node is None else node.register_prehook
        handles.append(watch(callback))
    return handles


class ParameterGradients:
    """Tells a backward that brings parameters their gradients from one that only asks for others'.

    `torch.autograd.grad` by inputs, as in a gradient penalty or an attack, passes forward's outputs too.
    """

    def __init__(self) -> None:
        self._module: torch.nn.Module | None = None  # None: its parameters are not in the graph of its outputs
        self._ids: list[int] = []
        self._nodes: list[Any] = []  # what adds to each parameter's gradient
        self._has_looked = False

    def find(self, module: torch.nn.Module, output: Any) -> None:
        """Look, after the first forward that trains, whether parameters are to be found in the graph of its outputs.

        Under `fully_shard`, or where all layers are in reentrant checkpoints, none are: then every backward counts.
        Where all parameters are frozen, as while an attack is sought, none does.
        """
        if self._has_looked:
            return
        nodes = [tensor.grad_fn for tensor in _with_gradient(output)]
        trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        self._has_looked = bool(nodes and trained)
        self._module = module if nodes and (not trained or _leads_to(trained, nodes)) else None

    def come(self) -> bool:
        """Return whether the backward under way brings gradients of parameters."""
        if self._module is None or any(map(_will_run, self._nodes)):
            return True
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        if [id(parameter) for parameter in trained] == self._ids:
            return False
        self._ids = [id(parameter) for parameter in trained]
        self._nodes = [get_gradient_edge(parameter).node for parameter in trained]
        return any(map(_will_run, self._nodes))


def _will_run(node: Any) -> bool:
    """Return whether the backward under way comes to this node; one whose gradient it returns is not added to."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch says that a leaf is asked for
        return False


def _leads_to(parameters: set[int], nodes: list[Any]) -> bool:
    """Return whether one of these parameters, by id, is a leaf of the graph behind these nodes."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in parameters:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def has_tensors(output: Any) -> bool:
    """Return whether any tensor can be found in an output."""
    return bool(_tensors(output))


def _with_gradient(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output that have a gradient."""
    return [tensor for tensor in _tensors(output) if tensor.requires_grad]


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        else:
            found += [tensor for name in _field_names(leaf) for tensor in _tensors(getattr(leaf, name))]
            found += [tensor for _, part in _items(leaf) for tensor in _tensors(part)]
    return found


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, or a number of its own where it has none to ask for."""
    with suppress(RuntimeError):
        return tensor.untyped_storage().data_ptr()
    return id(tensor)


def mixes_ranks(module: torch.nn.Module) -> bool:
    """Return whether SyncBatchNorm normalises by the statistics of all ranks."""
    return any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())


def has_batch_norm(module: torch.nn.Module) -> bool:
    """Return whether ranks normalise by statistics of their own batch."""
    return bool(_layers(module))


def _layers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers whose statistics are each rank's own, which SyncBatchNorm's are not, by name."""
    kinds, synced = torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm
    return {n: m for n, m in module.named_modules() if isinstance(m, kinds) and not isinstance(m, synced)}


def running_statistics(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the running means and variances that a training forward changes on each rank by itself."""
    return _running([*_layers(module).values()])


def _running(layers: list[torch.nn.Module]) -> list[torch.Tensor]:
    return [
        buffer.data  # written to while autograd keeps the buffer for backward, which does not use its values
        for layer in layers
        if layer.training
        for buffer in (layer.running_mean, layer.running_var)
        if isinstance(buffer, torch.Tensor)
    ]


def is_training(wrapped: torch.nn.Module) -> bool:
    """Return whether a module is in training mode, by its own flag or by that of the network in it.

    Frameworks that put the wrapper into eval mode may bring back only the network (Lightning after a validation), and
    users freeze BatchNorm by `model.module.eval()`.
    """
    return bool(wrapped.training or network(wrapped).training)


def trains(wrapped: torch.nn.Module) -> bool:
    """Return whether a forward of a module now is one of a training step."""
    return is_training(wrapped) and torch.is_grad_enabled()


def joins(wrapped: Any) -> bool:
    """Return whether a rank may end before others, by DDP's `join()`, which stands in for DDP's collectives only."""
    return network(wrapped) is not wrapped and bool(wrapped._join_config.enable)


class RunningStatistics:
    """The running means and variances of a module's BatchNorm layers, averaged over ranks as one small tensor.

    DDP leaves them alone from now on, and keeps on giving every rank all other buffers of rank 0; FSDP leaves all
    buffers to their ranks. Every rank must start averages at the same forwards, with shares that sum to 1.
    """

    def __init__(self, wrapped: Any, group: Any, sum_weighted: Callable[[torch.Tensor, float], dist.Work]) -> None:
        layers = _layers(network(wrapped))
        self._layers = [*layers.values()]
        self._sum_weighted = sum_weighted  # begins to sum a tensor times a weight over the ranks of the group
        self._is_alone = dist.get_world_size(group) == 1
        self._changed: list[torch.Tensor] = []  # by forwards since the last average
        self._coming: tuple[dist.Work, list[torch.Tensor]] | None = None
        self._flat = torch.empty(0)
        self._parts: list[torch.Tensor] = []  # of the flat tensor, shaped like what has changed
        if layers and isinstance(wrapped, DistributedDataParallel):
            wrapped.parameters_to_ignore.update(
                f"{layer}.{name}".lstrip(".") for layer in layers for name, _ in layers[layer].named_buffers()
            )
            wrapped._assign_modules_buffers()  # type: ignore[no-untyped-call]

    def note_forward(self) -> None:
        """Take note of what a training forward has changed. Layers that are frozen by eval() stay as they are."""
        if not self._is_alone:
            self._changed = _running(self._layers)

    def start_average(self, share: float) -> dist.Work | None:
        """Begin to make what has changed its mean over ranks, each weighted by its share of the samples.

        Returns what the sums of gradients have to wait for, if anything.
        """
        changed, self._changed = self._changed, []
        if not changed:
            return None
        self._make_room(changed)
        torch._foreach_copy_(self._parts, changed)
        work = self._sum_weighted(self._flat, share)
        self._coming = work, changed
        return work

    def _make_room(self, changed: list[torch.Tensor]) -> None:
        """Have a part for each tensor; they are the same in nearly every step, so it is kept."""
        fits = len(self._parts) == len(changed) and all(
            part.shape == tensor.shape for part, tensor in zip(self._parts, changed, strict=True)
        )
        kind = changed[0].dtype, changed[0].device
        if not fits or (self._flat.dtype, self._flat.device) != kind:
            self._flat = torch.cat([tensor.reshape(-1) for tensor in changed])
            pieces = torch.split(self._flat, [tensor.numel() for tensor in changed])
            self._parts = [piece.view_as(tensor) for piece, tensor in zip(pieces, changed, strict=True)]

    def finish_average(self) -> None:
        """Take the mean that has been started, if any: it came beside the gradients, so this seldom waits."""
        if self._coming is None:
            return
        (work, changed), self._coming = self._coming, None
        work.wait()
        torch._foreach_copy_(changed, self._parts)
