"""The keywords of models and loaders, each written, typed and documented once; and wrong ones answered with advice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch

from cannikin.core.cutting import Bounds
from cannikin.core.lr import LrRule
from cannikin.core.planner import Planner
from cannikin.errors import InvalidInputError
from cannikin.runlog import Observer

if TYPE_CHECKING:  # an engine has these keywords
    from cannikin.runtime.engine import Engine

OneOrMore = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""What steps a model: an optimizer, or several that step together."""


class Options(TypedDict, total=False):
    """The keywords of `HeteroDataParallel`, `attach` and `Engine`, all optional.

    Args:
        policy: who plans: a name in `core.policies.POLICIES`, "cannikin" by default, or a `Planner`; CANNIKIN_POLICY in
            the environment overrides the default.
        weighting: where a rank's weight is applied: "auto" (the default), "hook", "loss" or "none" (see `weighting`).
        lr_rule: how learning rates follow the total batch: "auto" (the default, by the optimizer), a name in
            `core.lr.LR_RULES`, or an `LrRule`; a list of these for several optimizers, one each.
        warmup_steps: length of LEGW's warm-up at the initial batch, 0 by default.
        follows: another model, or its engine, whose batches, plan and learning-rate factors this one shares, such as a
            GAN's generator; this one then has no loader, and may run and step any number of times per batch.
        loader: a `HeteroDataLoader` that was built before the model, without `model=`.
        grad_scaler: the `torch.amp.GradScaler` in use, if any.
        comm_wrapper: DDP's `fp16_compress_wrapper` or `bf16_compress_wrapper`.
        observers: told of every window, plan and event, on rank 0.
        run_dir: folder for the run log, `runlog.jsonl`; None, the default, writes nothing.
        profiles: file of what earlier runs learned about devices, to start from and to add to; None for neither.
        batch_dim: the dimension of forward's inputs that counts samples, 0 by default; 1 where time is the first.
    """

    policy: str | Planner | None
    weighting: str
    lr_rule: str | LrRule | Sequence[str | LrRule]
    warmup_steps: float
    follows: Any
    loader: Any
    grad_scaler: Any
    comm_wrapper: Any
    observers: Sequence[Observer]
    run_dir: str | Path | None
    profiles: str | Path | None
    batch_dim: int


class DdpOptions(Options, total=False):
    """The keywords of `HeteroDataParallel`: those of `Options`, and what DistributedDataParallel takes."""

    device_ids: Any
    output_device: Any
    dim: int
    broadcast_buffers: bool
    init_sync: bool
    process_group: Any
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    delay_all_reduce_named_params: Any
    param_to_hook_all_reduce: Any
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    forward_sync_buffers: bool


class DrawOptions(TypedDict, total=False):
    """The keywords of `batches()` beside `batch_size`, which loaders have too.

    Args:
        max_batch_size: the largest total batch, never more than the dataset; None, the default, keeps the total at
            `batch_size`.
        local_batches: one local batch per rank, together `batch_size`: pins the split, and nothing adapts.
        local_bounds: `(low, high)` of every local batch, or one pair per rank; None for a side leaves it open. The
            default is 1 at least, 2 with BatchNorm in the model.
    """

    max_batch_size: int | None
    local_batches: Sequence[int] | None
    local_bounds: Bounds | None


class LoaderOptions(DrawOptions, total=False):
    """The keywords that `HeteroDataLoader` and `HeteroBatchSampler` share beside `model`, `batch_size` and DrawOptions.

    Args:
        shuffle: None, the default, is True, and False for an iterable dataset, whose order is its own.
        seed: what orders the samples, along with the epoch; 0 by default.
        drop_last: leave out a last batch shorter than the total batch; False by default.
    """

    shuffle: bool | None
    seed: int
    drop_last: bool


class DataLoaderOptions(LoaderOptions, total=False):
    """The keywords of `HeteroDataLoader`: those of `LoaderOptions`, its own, and what torch's DataLoader takes.

    Args:
        item_count: `item_count(batch)` is the batch's weight in items, such as tokens, where the loss is a mean over
            those; None, the default, weights by samples.
        sampler: gives the order of samples over *all* ranks, as indices: a Sampler or another iterable, the same on
            every rank, which is checked. None, the default, orders them by `shuffle` and `seed`.
        sharded: of an iterable dataset, whether each rank's stream is a part of the data of its own. None, the default,
            is True where the dataset says so (`split_dataset_by_node`, `split_by_node`), else one stream that all ranks
            read alike, which is checked; False does not check.
    """

    item_count: Callable[[Any], float] | None
    sharded: bool | None
    num_workers: int
    collate_fn: Any
    pin_memory: bool
    timeout: float
    worker_init_fn: Any
    multiprocessing_context: Any
    generator: Any
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    sampler: Any
    batch_sampler: Any


def check_names(owner: str, own: Iterable[str], base: Callable[..., Any] | None, given: Iterable[str]) -> None:
    """Refuse keywords that are neither `owner`'s own nor taken by the torch class `base`, which gets all others."""
    known = [*own, *(() if base is None else inspect.signature(base).parameters)]
    for name in given:
        if name in known:
            continue
        close = get_close_matches(name, known, 1)
        advice = "its keywords are " + ", ".join(known)
        if owner != "HeteroDataLoader" and name in ("batch_size", *LoaderOptions.__annotations__, "item_count"):
            advice = "that is for HeteroDataLoader"
        elif close:
            advice = f"did you mean {close[0]}?"
        elif base is not None:
            advice = f"neither does {base.__name__}, which gets all other keywords"
        raise TypeError(f"{owner} takes no {name}=: {advice}")


def _inside(optimizer: Any) -> Any:
    """Return the optimizer inside of a wrapper, as Accelerate and Fabric make them, which calls its `step()`."""
    inner = getattr(optimizer, "optimizer", None)
    is_wrapped = isinstance(inner, torch.optim.Optimizer) and inner.param_groups is optimizer.param_groups
    return _inside(inner) if is_wrapped else optimizer


def check_model(module: object, optimizer: object, policy: object) -> list[torch.optim.Optimizer]:
    """Refuse a module and optimizers that do not belong together, and a policy that cannot plan; the optimizers."""
    plans = callable(getattr(policy, "decide", None)) and not isinstance(policy, type)
    if not isinstance(policy, str | None) and not plans:
        raise InvalidInputError(
            f"policy={policy!r} is neither a name nor a planner: a planner has decide(window, job, step), which "
            "returns a Decision (cannikin.core.planner.Planner)"
        )
    if not isinstance(module, torch.nn.Module):
        raise InvalidInputError(
            f"the model is a {type(module).__name__}, not a torch.nn.Module: the order is HeteroDataParallel(module, "
            "optimizer)"
        )
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers: list[Any] = [_inside(each) for each in given]
    if not optimizers:
        raise InvalidInputError("the list of optimizers is empty: give the one that steps the model, or all of them")
    own = {id(parameter) for parameter in module.parameters()}
    for each in optimizers:
        groups = getattr(each, "param_groups", None)
        if groups is None:
            what = f"a {type(each).__name__}" if len(optimizers) == 1 else f"a list with a {type(each).__name__} in it"
            raise InvalidInputError(f"the optimizer is {what}: give a torch.optim.Optimizer, or a list of these")
        if not any(id(parameter) in own for group in groups for parameter in group["params"]):
            raise InvalidInputError(
                "the optimizer has none of the model's parameters: build it from module.parameters() of the module "
                "that is wrapped, and wrap that one; where it has float32 copies of them, as float16 by hand does, use "
                "torch.autocast and a GradScaler instead"
            )
    return optimizers


def unwrapped(model: object) -> object:
    """Return the engine of a HeteroDataParallel, and anything else as it is."""
    return getattr(model, "engine", model)


def engine_of(model: object) -> Engine:
    """Return the engine of a HeteroDataParallel, or the engine itself."""
    engine = unwrapped(model)
    if not hasattr(engine, "bind"):
        raise InvalidInputError(
            f"model is a {type(model).__name__}, which has no cannikin engine: pass the cannikin.HeteroDataParallel "
            "that trains on this data, or what cannikin.attach(ddp, optimizer) returned"
        )
    return cast("Engine", engine)
