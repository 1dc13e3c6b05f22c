"""What reduces gradients of a module under `fully_shard`: FSDP2's own reduce-scatters, which are measured on their way.

FSDP2 takes the mean over ranks, so that what a rank brings to it is multiplied by n times its weight:

    g = 1/n sum_i (n b_i/B) g_i

A module that was given to `fully_shard` is one group of parameters, here a layer: one all-gather before its forward,
mostly another before its backward, one reduce-scatter after it. `set_custom_all_gather` and `set_custom_reduce_scatter`
let us stand around these. A reduce-scatter's input is all of this rank's own gradient of the layer, its output this
rank's shard of the mean; on a 2-D mesh (HSDP) the shard is complete once the replicas have been summed as well, which
`set_all_reduce_hook` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard

from cannikin.errors import InvalidInputError
from cannikin.runtime.device import Device, carrier
from cannikin.runtime.hook import compare, dot, sample_of
from cannikin.runtime.passage import LayerHooks, Passage
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.update import AdamVariance, Variance
from cannikin.runtime.weighting import weighted_

_NEEDED = ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook")  # of torch 2.9
_UNDIVIDED = (torch.float32, torch.bfloat16)  # wide enough that FSDP divides no gradient before it is summed


def groups_of(part: FSDPModule) -> list[Any]:
    """Return the groups of parameters that FSDP made of a module: one, or none where its submodules have them all.

    They are torch's own and private. Nothing public tells whether the next backward reduces (`reduce_grads`,
    `all_reduce_grads`), which parameters a reduce-scatter carries (`fsdp_params`), and what somebody has set before us:
    `_all_gather_comm`, `_reduce_scatter_comm`, `_all_reduce_hook`, `gradient_divide_factor`, `offload_policy`. These
    are all that is read.
    """
    state: Any = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.12 there was one at most
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def sharded(module: object) -> torch.nn.Module:
    """Return a module that `fully_shard` was called on, last and as a whole; refuse whatever else is not DDP."""
    if isinstance(module, FullyShardedDataParallel):
        raise InvalidInputError(
            "attach() got FSDP1's FullyShardedDataParallel, whose collectives cannot be measured: shard the module by "
            "torch.distributed.fsdp.fully_shard"
        )
    if _is_replicated(module):
        raise InvalidInputError(
            "attach() got a module under the composable replicate(), which shows no rank's own gradient: wrap it in "
            "DistributedDataParallel instead"
        )
    if isinstance(module, torch.nn.Module) and isinstance(module, FSDPModule):
        return module
    if isinstance(module, torch.nn.Module) and any(isinstance(part, FSDPModule) for part in module.modules()):
        raise InvalidInputError(
            f"attach() got a {type(module).__name__} of which only parts are under fully_shard: call fully_shard on "
            "the whole module too, after its parts"
        )
    raise InvalidInputError(
        f"attach() got a {type(module).__name__}, neither a DistributedDataParallel nor a module under fully_shard: "
        "wrap the module first; a framework does so once it runs on several processes, for instance under torchrun"
    )


def _is_replicated(module: object) -> bool:
    """Return whether a module is under `replicate`, the older one or the one by FSDP; torch exports neither."""
    return any(kind.__module__.startswith("torch.distributed._composable.replicate") for kind in type(module).__mro__)


class Layout:
    """How a module's parameters lie on its ranks: all on one mesh, sharded, and perhaps replicated too (HSDP).

    Args:
        module: whole and sharded, as before its first forward.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # a forward without gradients leaves the outermost parameters whole
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not trained:
            raise InvalidInputError("the module has no parameter that is trained: attach() before all are frozen")
        for name, parameter in trained:
            _refuse_parameter(name, parameter)
        mesh: Any = trained[0][1].device_mesh  # type: ignore[attr-defined]
        if any(parameter.device_mesh != mesh for _, parameter in trained):  # type: ignore[attr-defined]
            raise InvalidInputError(
                "the module's parameters are sharded over several meshes, so that ranks share some gradients and not "
                "others: call fully_shard with one mesh for all of them"
            )
        shard_dim = mesh.ndim - 1
        self.num_replicas: int = mesh.size(0) if mesh.ndim == 2 else 1
        self.num_shards: int = mesh.size(shard_dim)
        self.shard: int = mesh.get_local_rank(shard_dim)
        self.group: Any = _whole_group(mesh)
        if self.num_shards == 1 and self.num_replicas > 1:
            raise InvalidInputError(
                f"the mesh has {self.num_replicas} replicas of one shard each, so nothing is sharded: use "
                "HeteroDataParallel, or DistributedDataParallel"
            )


def _refuse_parameter(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter whose gradient FSDP does not reduce by itself, or not on the device that computes."""
    if not isinstance(parameter, DTensor):
        raise InvalidInputError(
            f"{name} is not sharded (ignored_params of fully_shard), and no rank's gradient of it reaches the others: "
            "shard it, or freeze it by requires_grad_(False)"
        )
    *others, last = parameter.placements
    if not isinstance(last, Shard) or len(others) > 1 or not all(isinstance(other, Replicate) for other in others):
        raise InvalidInputError(
            f"{name} has placements {parameter.placements}, as under tensor parallel: cannikin can weight and measure "
            "fully_shard alone, on a mesh of one dimension, or of two for HSDP"
        )


def _whole_group(mesh: Any) -> Any:
    """Return the group of all of a mesh's ranks, in their order."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)


class FsdpReducer:
    """FSDP2's reduce-scatters of one module; see `hook.Reducer`.

    Norms are of whole gradients where this rank's own is whole: |g_i|^2 of a reduce-scatter's input. Adam's variance is
    sharded as the parameters are, so that preconditioned norms are of this rank's own shard alone, from which rank 0
    estimates the noise (`core.noise.whole_norms`).

    Args:
        module: see `sharded`; without custom collectives of its own.
        device: takes the marks.
        variance_of: for norms of the preconditioned gradient, the variance of these parameters' gradients.
    """

    num_first_steps = 1
    keeps_piles = runs_together = True

    def __init__(self, module: torch.nn.Module, device: Device, *, variance_of: AdamVariance | None = None) -> None:
        layout = self._layout = Layout(module)
        self.group: Any = layout.group
        self.step: StepInProgress | None = None
        self.unmatched = False
        self.bucket_bytes: list[int] = []  # there are none, and segments of backward are not layers
        self.name_missing: Callable[[RuntimeError], None] = lambda error: None
        self._num_ranks = layout.num_replicas * layout.num_shards
        self._mark, self._seconds, self._variance_of = device.mark, device.seconds, variance_of
        self._blocks = carrier(layout.group, device.torch_device) != "nccl"  # which runs beside compute
        self._previous: dict[int, torch.Tensor] | None = None
        self.ends_with_scatter = layout.num_replicas == 1 and layout.num_shards > 1
        self._layers = [_Layer(number, *found) for number, found in enumerate(_found_groups(module))]
        for layer in self._layers:
            _refuse_layer(layer)
        for layer in self._layers:
            self._stand_around(layer)
            LayerHooks(layer.number, layer.parts, lambda: None if self.step is None else self.step.passage)

    def _stand_around(self, layer: _Layer) -> None:
        """Have FSDP run a layer's collectives by way of this."""
        group, part = layer.group, layer.parts[0]
        part.set_custom_all_gather(_AllGather(self, layer, group._all_gather_comm))
        part.set_custom_reduce_scatter(_ReduceScatter(self, layer, group._reduce_scatter_comm))
        if not self.ends_with_scatter:
            part.set_all_reduce_hook(lambda shard: self._end_all_reduce(layer, shard))
        layer.own_hook = group._all_reduce_hook

    def syncs(self, module: Any) -> bool:
        return any(layer.group.reduce_grads for layer in self._layers)

    @contextmanager
    def no_sync(self, module: Any) -> Iterator[None]:
        synced = self.syncs(module)
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(synced)

    def compare_with_previous(self) -> None:
        self._previous = {}

    @property
    def compares(self) -> bool:
        return self._previous is not None

    def new_passage(self) -> Passage:
        return Passage(self._mark, self._seconds, len(self._layers), blocks=self._blocks)

    def sum_weighted(self, buffer: torch.Tensor, weight: float) -> dist.Work:
        work: dist.Work = dist.all_reduce(weighted_(buffer, weight), group=self.group, async_op=True)
        return work

    # What FSDP's collectives call.

    @contextmanager
    def gathering(self, layer: _Layer) -> Iterator[None]:
        """Take note of when an all-gather begins and ends, if it is one of the step in training."""
        passage = None if self.step is None else self.step.passage
        if passage is None or not passage.is_open:
            yield
            return
        start = self._mark()
        yield
        passage.gathered(layer.number, start, self._mark())

    def begin_copying(self, layer: _Layer) -> None:
        """Take note that this rank's gradient of a layer is whole, and about to be copied to where it is reduced."""
        _refuse_settings(layer)
        step = self.step
        is_again = step is not None and step.has_bucket(layer.number)
        self.unmatched = step is None or step.is_stale or (is_again and step.optimizer_start is not None)
        layer.is_weighted = not self.unmatched
        layer.is_measured = step is not None and not is_again
        if step is None:
            return
        if is_again:  # several forwards for one backward: neither part has the norm of both
            step.norms_missing = True
            return
        if not step.synced:
            step.make_room(len(self._layers))
            for frozen in (other.number for other in self._layers if not other.parameters()):
                step.ready[frozen] = step.done[frozen] = True
        step.ready[layer.number] = step.synced = True
        if step.passage is not None:
            step.passage.begin_reduction()

    def begin_reduction(self, layer: _Layer, gradient: torch.Tensor) -> None:
        """Take note that the gradient is about to be reduced, and give it its weight; of padding there is none."""
        step = self.step
        if layer.is_measured:
            layer.start = self._mark()
        if step is None or not layer.is_weighted:  # a backward that no batch of ours belongs to: plain FSDP
            return
        share = step.share()  # after the mark: it may wait for other ranks' numbers
        layer.factor = self._num_ranks * (share if step.weight is None else step.weight)
        is_nothing = (step.entry.is_padding or share == 0) and not step.keeps_earlier
        weighted_(gradient, 0.0 if is_nothing else layer.factor)

    def note_gradient(self, layer: _Layer, gradient: torch.Tensor, op: Any) -> None:
        """Take the norm of this rank's own gradient, once it is on its way."""
        step, layout = self.step, self._layout
        if step is None or not layer.is_measured:
            return
        layer.predivided = _predivided(gradient.dtype, op, self._num_ranks)
        layer.is_summed = op == dist.ReduceOp.SUM
        layer.variance = None
        if layout.num_replicas > 1 and not layer.group.all_reduce_grads:  # a sum of some ranks, that stays by itself
            step.norms_missing = True
        if not step.take_norms or step.norms_missing:
            return
        if self._variance_of is not None:
            layer.variance = layer.own_variance(self._variance_of, layout, gradient.numel() // layout.num_shards)
            if layer.variance is None:
                step.norms_missing = True
                return
        if step.entry.is_padding or step.uneven_items or step.share() == 0:
            return
        name, scale = "local_sqnorm", (layer.predivided / layer.factor) ** 2
        if layer.variance is not None and layout.num_shards > 1:
            name, scale = "shard_sqnorm", scale / layout.num_replicas
            gradient = gradient.view(layout.num_shards, -1)[layout.shard]
        step.noted[name, layer.number] = dot(gradient, gradient, layer.variance) * scale

    def end_reduction(self, layer: _Layer) -> None:
        """Take note that a layer's shard is being reduced, or has been, whichever the device's marks tell."""
        step = self.step
        if step is None or not layer.is_measured:
            return
        step.done[layer.number] = True
        if step.passage is not None:
            step.passage.reduced(layer.start, self._mark())

    def note_sum(self, layer: _Layer, shard: torch.Tensor) -> None:
        """Take the norm of this rank's shard of the mean over all ranks, once that is on its way."""
        step = self.step
        if step is None or not layer.is_measured:
            return
        if step.take_norms and not step.norms_missing:
            rest = self._num_ranks / layer.predivided if layer.is_summed else 1.0  # what FSDP still divides by
            scale = 1.0 / (rest**2 * self._layout.num_replicas)  # replicas have the same shards
            step.noted["global_sqnorm", layer.number] = dot(shard, shard, layer.variance) * scale
            if self._previous is not None:
                product = compare(self._previous, layer.number, shard, layer.variance)
                if product is not None:
                    step.noted["previous_dot", layer.number] = product
        elif layer.number == 0 and step.loss_scale is None:  # a GradScaler notices what is not finite
            step.sample = sample_of(shard)

    def _end_all_reduce(self, layer: _Layer, shard: torch.Tensor) -> None:
        """Finish with a shard once the replicas have been summed, or on one rank, where nothing is summed."""
        if self._layout.num_shards == 1:  # nothing was scattered
            self.begin_reduction(layer, shard)
            self.note_gradient(layer, shard, dist.ReduceOp.AVG)
        self.end_reduction(layer)
        self.note_sum(layer, shard)


def _found_groups(module: torch.nn.Module) -> list[tuple[list[Any], Any]]:
    """Return every group of parameters once, with the modules that have it, outermost modules first."""
    found: dict[int, tuple[list[Any], Any]] = {}
    for part in module.modules():
        groups = groups_of(part) if isinstance(part, FSDPModule) else []
        if len(groups) > 1:
            raise InvalidInputError(
                f"a {type(part).__name__} has parameters in {len(groups)} groups on several meshes "
                "(shard_placement_fn), and torch does not tell their collectives apart: call fully_shard with one mesh"
            )
        for group in groups:
            found.setdefault(id(group), ([], group))[0].append(part)
    return list(found.values())


def _refuse_layer(layer: _Layer) -> None:
    """Refuse what would make weights or times wrong."""
    group = layer.group
    if not all(hasattr(layer.parts[0], name) for name in _NEEDED):
        raise InvalidInputError(
            f"torch {torch.__version__} does not let anybody stand around FSDP's collectives ({_NEEDED[0]}): install "
            "torch 2.9 or newer"
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise InvalidInputError(
            "CPUOffloadPolicy copies shards to and fro in time that nobody can tell from compute: leave offload_policy "
            "out of fully_shard"
        )
    if isinstance(group._reduce_scatter_comm, _ReduceScatter):
        raise InvalidInputError(
            "attach() was called on this module before: use the engine that it returned then, or shard the module anew"
        )
    _refuse_settings(layer)


def _refuse_settings(layer: _Layer) -> None:
    """Refuse what the user may set at any time, and what would make the mean another one."""
    group = layer.group
    if group._all_reduce_hook is not layer.own_hook:
        raise InvalidInputError(
            "set_all_reduce_hook was called on this module, so that FSDP's own sum is not the whole one: use a mesh of "
            "two dimensions for replicas (HSDP)"
        )
    if group.gradient_divide_factor is not None:
        raise InvalidInputError(
            f"set_gradient_divide_factor({group.gradient_divide_factor}) was called on this module, and the mean over "
            'all samples is to be taken: leave it out; for a loss that is a sum, attach(..., weighting="none")'
        )


class _Layer:
    """A group of parameters that are gathered and reduced at once, and what is known of its reduction under way."""

    def __init__(self, number: int, parts: list[Any], group: Any) -> None:
        self.number, self.parts, self.group = number, parts, group
        self.own_hook: Any = None  # ours on its all-reduce, if any
        self.is_measured = False  # the reduction under way is one of the step in training
        self.is_weighted = False  # and, perhaps once more, of its batch
        self.factor = 1.0  # that its gradient was multiplied by, n times the weight
        self.start: Any = None  # of the reduction under way
        self.variance: Variance | None = None
        self.predivided, self.is_summed = 1.0, False  # what FSDP has divided the gradient by before it sums

    def parameters(self) -> list[Any]:
        """Return this rank's shards of the parameters that are trained."""
        return [held.sharded_param for held in self.group.fsdp_params if held.sharded_param.requires_grad]

    def own_variance(self, variance_of: AdamVariance, layout: Layout, size: int) -> Variance | None:
        """Return Adam's variance of this rank's shard, as it lies in a reduce-scatter; None while it says little."""
        parameters = self.parameters()
        sizes = [_padded_size(parameter, layout.num_shards) for parameter in parameters]
        if sum(sizes) != size:  # a parameter without a gradient is left out
            return None
        return variance_of(parameters, sizes)


def _padded_size(parameter: DTensor, num_shards: int) -> int:
    """Return how many elements each rank's shard has in a reduce-scatter, where all of them are as large."""
    placement: Any = parameter.placements[-1]
    length = int(parameter.shape[placement.dim])
    return parameter.numel() // length * -(-length // num_shards)


def _predivided(dtype: torch.dtype, op: Any, num_ranks: int) -> float:
    """Return what FSDP has divided a gradient by that it sums, so that half precision does not overflow.

    It is the power of two next to the root of the number of ranks; the sum is divided by the rest.

    Example:
        >>> [_predivided(torch.float16, dist.ReduceOp.SUM, ranks) for ranks in (1, 2, 3, 4, 8, 16)]
        [1.0, 2.0, 2.0, 2.0, 4.0, 4.0]
        >>> _predivided(torch.float32, dist.ReduceOp.SUM, 4), _predivided(torch.float16, dist.ReduceOp.AVG, 4)
        (1.0, 1.0)
    """
    factor = 1.0
    if op == dist.ReduceOp.SUM and dtype not in _UNDIVIDED:
        while num_ranks % factor == 0 and num_ranks / factor > factor:
            factor *= 2
    return factor


class _AllGather:
    """FSDP's all-gather of one layer, timed; `inner` is what ran it before."""

    def __init__(self, reducer: FsdpReducer, layer: _Layer, inner: Any) -> None:
        self._reducer, self._layer, self._inner = reducer, layer, inner
        self.allocate = inner.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._reducer.gathering(self._layer):
                return self._inner(*args, **kwargs)
        except RuntimeError as error:
            self._reducer.name_missing(error)
            raise


class _ReduceScatter:
    """FSDP's reduce-scatter of one layer, measured; `inner` is what ran it before."""

    def __init__(self, reducer: FsdpReducer, layer: _Layer, inner: Any) -> None:
        self._reducer, self._layer, self._inner = reducer, layer, inner
        self._has_input = False

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return memory, first for the input, which is asked for among the compute, then for the output."""
        self._has_input = not self._has_input
        if self._has_input:
            self._reducer.begin_copying(self._layer)
        room: torch.Tensor = self._inner.allocate(*args, **kwargs)
        return room

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        reducer, layer, self._has_input = self._reducer, self._layer, False
        reducer.begin_reduction(layer, input_tensor)
        try:
            work = self._inner(output_tensor, input_tensor, group, op, async_op)
        except RuntimeError as error:
            reducer.name_missing(error)
            raise
        if reducer.ends_with_scatter:
            reducer.end_reduction(layer)
        reducer.note_gradient(layer, input_tensor, op)
        if reducer.ends_with_scatter:
            reducer.note_sum(layer, output_tensor)
        return work
