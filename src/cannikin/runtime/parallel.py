"""`HeteroDataParallel`: DistributedDataParallel whose ranks may have unequal batches."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Unpack, overload

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cannikin.core.values import Plan
from cannikin.errors import InvalidInputError
from cannikin.runtime.compiling import not_compiled_itself
from cannikin.runtime.device import kind_of
from cannikin.runtime.drawing import Draws
from cannikin.runtime.engine import Engine
from cannikin.runtime.exchange import Exchange
from cannikin.runtime.options import DdpOptions, DrawOptions, OneOrMore, Options, check_model, check_names
from cannikin.runtime.sharded import sharded

_log = logging.getLogger("cannikin")


def ensure_process_group(device: torch.device) -> None:
    """Use the default process group; else make the one torchrun describes; else one of this process alone.

    CANNIKIN_BACKEND in the environment chooses its backend: ranks that share a GPU need gloo, since NCCL refuses them.
    """
    if dist.is_initialized():
        return
    backend = os.environ.get("CANNIKIN_BACKEND") or kind_of(device).backend
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _group_of(ddp_kwargs: dict[str, Any]) -> Any:
    """Return the group in which DDP will reduce gradients."""
    mesh = ddp_kwargs.get("device_mesh")
    if mesh is not None:
        return mesh.get_group(mesh_dim=0)
    group = ddp_kwargs.get("process_group")
    return dist.distributed_c10d._get_default_group() if group is None else group


class HeteroDataParallel(DistributedDataParallel):
    """DistributedDataParallel that learns each rank's speed and weights gradients of unequal batches right.

    `isinstance`, `no_sync`, `module` and `state_dict()` are DDP's own; what is added lives in `engine`. The gradient
    equals that of one process on the whole batch, for a loss that is a mean over the local batch.

    Args:
        module: the network, on its device.
        optimizer: what steps its parameters, or a list of several that step together (Muon and AdamW).
        **options: see `Options`; all other keywords are passed on to DDP.
    """

    def __init__(self, module: torch.nn.Module, optimizer: OneOrMore, **options: Unpack[DdpOptions]) -> None:
        check_model(module, optimizer, options.get("policy"))
        if isinstance(module, DistributedDataParallel):
            raise InvalidInputError(
                f"the module is a {type(module).__name__} already: give HeteroDataParallel the network itself, or keep "
                "the DistributedDataParallel and call cannikin.attach(ddp, optimizer)"
            )
        own = Options.__annotations__
        check_names("HeteroDataParallel", own, DistributedDataParallel, options)
        ensure_process_group(next(module.parameters()).device)
        ddp_kwargs: Any = {name: value for name, value in options.items() if name not in own}
        exchange = Exchange(_group_of(ddp_kwargs))  # looks out for ranks that DDP's constructor would wait for
        try:
            super().__init__(module, **ddp_kwargs)
        except RuntimeError as error:
            exchange.lookout.note_missing(error)
            raise
        ours: Any = {name: value for name, value in options.items() if name in own}
        self.engine = Engine(self, optimizer, exchange, **ours)
        if self.engine.rank == 0:
            _log.info("%s; %s", self.engine.weighting_reason, self.engine.lr_reason)

    @not_compiled_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run DDP's forward."""
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            self.engine.explain(error)
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Refuses to be copied or pickled: hooks, groups and a thread belong to this process and this model."""
        raise InvalidInputError(
            "a HeteroDataParallel can be neither copied nor pickled: copy model.module, as for an average of weights, "
            "and save model.state_dict() and model.engine.state_dict()"
        )

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before a loader is built."""
        return self.engine.plan

    @property
    def noise_scale(self) -> float:
        """Gradient noise scale in samples; NaN before it is known."""
        return self.engine.noise_scale

    @property
    def gain(self) -> float:
        """Initial-batch steps that one step at the plan's total batch is worth."""
        return self.engine.gain

    @property
    def progress(self) -> float:
        """Initial batches that training so far has been worth; a step over K batches that pile up counts K of them."""
        return self.engine.progress

    def epochs(self, num_epochs: float) -> Iterator[int]:
        """Pass over the data until progress equals `num_epochs` passes at the initial batch; yields the pass's number.

        A pass at a larger batch makes less progress, so there may be more passes than `num_epochs`; `range(num_epochs)`
        gives that many passes whatever they are worth.
        """
        return self.engine.epochs(num_epochs)

    def log(self, /, **metrics: Any) -> None:
        """Write what you measured, such as `model.log(accuracy=0.93)`, into the run log and to the observers.

        Rank 0's numbers count: elsewhere they are only checked, so that every rank may call it or rank 0 alone.

        Args:
            **metrics: real numbers, also as tensors and arrays without dimensions.

        Raises:
            InvalidInputError: something is not a number.
        """
        self.engine.log(**metrics)

    def batches(self, batch_size: int, **options: Unpack[DrawOptions]) -> Draws:
        """Return an endless iterator over `(local, total)`, how many samples to draw, for scripts without a DataLoader.

            for local, total in model.batches(batch_size=64):
                x, y = make_batch(local)

        It stands where a HeteroDataLoader would: the split adapts, progress counts, and `state_dict()` resumes.

        Args:
            batch_size: the *total* batch over all ranks at the start.
            **options: see `DrawOptions`.
        """
        return self.engine.batches(batch_size, **options)

    def use_batch(self, local: int | None = None, total: int | None = None) -> None:
        """Say what the next training forward holds, where that cannot be seen from its inputs.

        Without numbers it is the batch in hand: what the loader yielded and is not trained on yet, or, where all are,
        the last one once more. So graphs, two views of one batch and the second pass of SAM are weighted right, on a
        short last batch and at a change of the total too. A loop that looks ahead cannot go back to the last one.

        Args:
            local: samples of this rank, where the script has left some out or has a loader of its own.
            total: samples of all ranks together.
        """
        self.engine.use_batch(local, total)

    def skip_batch(self) -> None:
        """Leave out the batch in hand, on every rank: the loop does not train on it."""
        self.engine.skip_batch()

    @property
    def local_batch(self) -> int:
        """This rank's samples of the batch in hand: the one that a training forward now would be of; 0 in padding."""
        return self.engine.local_batch

    @property
    def total_batch(self) -> int:
        """All ranks' samples of the batch in hand, which may be fewer than the plan's at the end of an epoch."""
        return self.engine.total_batch

    def weighted_mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """Return the mean over all samples of a per-rank mean, such as the loss of the step in training.

            sum_i (b_i/B) x_i

        In an evaluation (`model.eval()`), whose samples are not this model's loader's, all ranks count alike; for ranks
        with unlike numbers of samples take `global_mean` of the samples' values. Every rank must call it, and waits for
        the others.
        """
        return self.engine.weighted_mean(value)

    def global_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over dimension 0 of all ranks' values together, such as a centre of features in a loss.

            sum_i sum_s x_is / sum_i b_i

        It has the gradient that one process on the whole batch would have. Every rank must call it, in forward or in
        the loss, and waits for the others.
        """
        return self.engine.global_mean(values)

    def all_gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of all ranks, one rank after another, and the numbers that this rank's own have there.

        Ranks may have different numbers of rows. The gradient is that of one process on the whole batch, where the loss
        is a mean over this rank's own rows against all columns, such as `cross_entropy(image @ texts.T, numbers)` after
        `texts, numbers = model.all_gather(text)`. Every rank must call it, in forward or in the loss, and waits for the
        others.
        """
        return self.engine.all_gather(rows)

    def micro_batches(self, batch: Any, num_parts: int | None = None) -> Iterator[Any]:
        """Cut a batch between samples and hold synchronisation back on all parts but the last.

        Take each part's own mean loss and call backward on it; step the optimizer once, after the loop. Parts are
        weighted by their size, and their number may differ between ranks. Under `weighting="none"` take its sum.

        Args:
            batch: tensors with as many samples in dimension 0 (`batch_dim`) as the batch in hand, and lists with one
                item per sample, in tuples, lists, dicts and dataclasses; what cannot be cut is refused.
            num_parts: how many; where left out, as many as this rank's memory asks for, as far as is known. There are
                fewer where a part would have no sample, or a single one, which BatchNorm cannot normalise.
        """
        return self.engine.micro_batches(batch, num_parts)


@overload
def attach(module: torch.nn.Module, optimizer: OneOrMore, **options: Unpack[Options]) -> Engine: ...
@overload
def attach(module: Sequence[torch.nn.Module], optimizer: OneOrMore, **options: Unpack[Options]) -> list[Engine]: ...
def attach(
    module: torch.nn.Module | Sequence[torch.nn.Module], optimizer: OneOrMore, **options: Unpack[Options]
) -> Engine | list[Engine]:
    """Make a module adaptive that is under DDP already, for instance by a framework, or under `fully_shard` (FSDP2).

    BatchNorm's running statistics become the weighted mean over ranks after every step, in place of rank 0's, which
    DDP gives to all, or of each rank's own under FSDP; other buffers stay as they are.

    Args:
        module: a DDP module, or one that `fully_shard` was called on after its parts; before its first training step
            and without a communication hook or custom collectives of its own; also as `torch.compile` returned it. With
            `follows`, a list of several that share the optimizer, such as a GAN's discriminators; there is an engine
            for each.
        optimizer: the one that steps its parameters, or a list of several that step together; also as a framework has
            wrapped it. Of a sharded module's parameters it is made after `fully_shard`.
        **options: see `Options`.
    """
    if isinstance(module, list | tuple):
        if options.get("follows") is None:
            raise InvalidInputError(
                f"attach() got {len(module)} modules, of which only one can have the loader: attach that one by "
                "itself, and the others with follows=, the engine of the first"
            )
        return [attach(each, optimizer, **options) for each in module]
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    return Engine(module if isinstance(module, DistributedDataParallel) else sharded(module), optimizer, **options)
