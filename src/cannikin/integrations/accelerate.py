"""Trains with Hugging Face Accelerate on ranks of unlike speed and memory: `prepare` in place of `accelerator.prepare`.

    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

Accelerate still builds the DDP module, moves batches, accumulates, clips, scales losses and saves. Two things are ours:
the loader to train on, whose batches have the size that the plan gives this rank, and, where the total batch may grow,
the scheduler, which then counts progress instead of steps.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, send_to_device
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from cannikin.core.cutting import Bounds
from cannikin.errors import InvalidInputError
from cannikin.integrations.pinned import refuse_other_total
from cannikin.integrations.saving import LostGradients
from cannikin.runtime.engine import Engine
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.options import DrawOptions, Options, check_names
from cannikin.runtime.parallel import attach
from cannikin.runtime.schedulers import ProgressScheduler

_OF_LOADERS = (*DrawOptions.__annotations__, "item_count", "seed")
_OF_ENGINES = tuple(name for name in Options.__annotations__ if name not in ("follows", "loader"))
_WITHOUT_DDP = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    max_batch_size: int | None = None,
    local_batches: Sequence[int] | None = None,
    local_bounds: Bounds | None = None,
    item_count: Callable[[Any], float] | None = None,
    seed: int | None = None,
    **options: Unpack[Options],
) -> Any:
    """Prepare a model, its optimizer, loaders and schedulers as `accelerator.prepare` does, in the order given.

    The first DataLoader is the one to train on, and its `batch_size` is a process's at the start (with `split_batches`
    the total over all processes); `local_batches` have the same total. It becomes a `PreparedLoader`; Accelerate
    prepares all further loaders, which are for evaluation. On one process it prepares everything.

    Args:
        accelerator: of a run by DDP.
        *objects: one model, its optimizer or several that step together, a DataLoader, and whatever else there is.
        max_batch_size, local_batches, local_bounds: see `DrawOptions`.
        item_count: see `DataLoaderOptions`.
        seed: what orders the samples, along with the epoch. None is `data_seed` of the accelerator, or else the seed
            of the DataLoader's generator, or 0.
        **options: see `Options`.
    """
    check_names("prepare", (*_OF_LOADERS, *_OF_ENGINES), None, options)
    _check(accelerator, objects)
    if accelerator.num_processes == 1:
        warnings.warn(
            "cannikin has nothing to split on one process: Accelerate prepares everything by itself, and the loader "
            "has no engine; start several by torchrun or accelerate launch, with Accelerator(cpu=True) where there is "
            "no GPU",
            RuntimeWarning,
            stacklevel=2,
        )
        return accelerator.prepare(*objects)
    of_loader = next(place for place, each in enumerate(objects) if isinstance(each, DataLoader))
    _check_total(accelerator, objects[of_loader], local_batches)
    by_steps = [place for place, each in enumerate(objects) if _counts_steps(each, accelerator)]
    of_schedulers = [] if max_batch_size is None else by_steps  # with a fixed total steps are progress
    ours = (of_loader, *of_schedulers)
    prepared = list(accelerator.prepare(*(None if place in ours else each for place, each in enumerate(objects))))
    model: Any = next(each for each in prepared if isinstance(each, torch.nn.Module))
    optimizers = [each.optimizer for each in prepared if isinstance(each, AcceleratedOptimizer)]
    engine = attach(model, optimizers, **{"grad_scaler": accelerator.scaler, **options})
    prepared[of_loader] = loader = PreparedLoader.like(
        objects[of_loader],
        model=engine,
        batch_size=objects[of_loader].batch_size if accelerator.split_batches else None,
        max_batch_size=max_batch_size,
        local_batches=local_batches,
        local_bounds=local_bounds,
        item_count=item_count,
        **_seeded(accelerator.dataloader_config.data_seed if seed is None else seed),
    )
    loader.serve(accelerator, engine)
    num_steps = 1 if accelerator.split_batches else accelerator.num_processes
    for place in of_schedulers:
        prepared[place] = _CalledScheduler(_SeveralSteps(objects[place], num_steps), loader)
    lost = LostGradients("save where accelerator.sync_gradients is True, after optimizer.step()")
    accelerator.register_save_state_pre_hook(lambda *_: lost.check(engine))
    accelerator.register_for_checkpointing(engine, loader, *(prepared[place] for place in of_schedulers))
    return tuple(prepared)


class PreparedLoader(HeteroDataLoader, DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types
    """A `HeteroDataLoader` that moves batches to the device and tells Accelerate which one is a pass's last.

    So `accumulate` uses a last group of gradients that is short. `engine` has the plan, the noise scale and means over
    all ranks; `accelerator.save_state` and `load_state` keep the loader's place in the data.
    """

    engine: Engine

    def serve(self, accelerator: Accelerator, engine: Engine) -> None:
        """Take the accelerator that batches are for, and the engine of the model that trains on them."""
        self.engine = engine
        self.gradient_state = accelerator.gradient_state  # where Accelerate looks for loaders underway
        self._device = accelerator.device if accelerator.device_placement else None
        self._non_blocking = accelerator.non_blocking

    @property
    def batch_sampler(self) -> Any:
        """Refuse: `accelerate.skip_first_batches` would take the loader apart."""
        raise InvalidInputError(
            "the plan cuts this loader's batches, so skip_first_batches() cannot take it apart: accelerator.load_state "
            "has put it where training was; iterate over it as it is"
        )

    def __iter__(self) -> Iterator[Any]:
        return self._moved(super().__iter__())

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.begin()
        try:
            for batch, is_last in self._with_last(batches):
                self.end_of_dataloader = is_last
                if self._device is not None:
                    batch = send_to_device(batch, self._device, non_blocking=self._non_blocking)
                yield batch
        finally:
            self.end()

    def _with_last(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield each batch and whether it is the last; where only reading on tells, one is read ahead."""
        if self._num_samples is None or isinstance(self.dataset, IterableDataset):
            for batch, following in itertools.pairwise(itertools.chain(batches, [_END])):
                yield batch, following is _END
        else:
            for batch in batches:
                yield batch, self.is_last


_END = object()


class _SeveralSteps:
    """A scheduler that takes as many steps at once as Accelerate's does for each step of the optimizer."""

    def __init__(self, scheduler: LRScheduler, num_steps: int) -> None:
        self.scheduler, self._num_steps = scheduler, num_steps

    def step(self) -> None:
        """Take them, up to the end of a schedule that has one."""
        end = getattr(self.scheduler, "total_steps", None)  # OneCycleLR raises beyond it
        for _ in range(self._num_steps):
            if end is None or self.scheduler.last_epoch < end - 1:
                self.scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """Return the rates of the last step."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.scheduler.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """A call of a scheduler: how far training was, counted from any beginning."""

    updates: int  # steps of the optimizer
    steps: float  # what they were worth
    passes: float  # what training was worth in passes; NaN where the call was not at the end of one
    epoch: int

    def __sub__(self, other: _Moment) -> _Moment:
        return _Moment(
            updates=self.updates - other.updates,
            steps=self.steps - other.steps,
            passes=self.passes - other.passes,
            epoch=self.epoch - other.epoch,
        )


class _CalledScheduler(ProgressScheduler):
    """Steps a scheduler once per call while the total batch is the initial one, and later as progress asks for.

    Scripts call it after every step of the optimizer, after every k-th, or after every epoch. A call after a complete
    pass is worth that pass; another one, or after data without a length, what the optimizer's steps since the call
    before were worth on average.

    Args:
        scheduler: takes a step per call.
        loader: that the model trains on.
    """

    def __init__(self, scheduler: _SeveralSteps, loader: PreparedLoader) -> None:
        super().__init__(scheduler, loader.engine, "step")
        self._loader = loader
        self._worth = float(self._taken)  # of all calls so far
        self._last = self._now()

    def step(self) -> None:
        """Take as many steps as this call is worth, with what earlier ones have left over."""
        now = self._now()
        if not (self._loader.engine.loop.is_between_passes and self._loader.state_dict()["position"] == 0):
            now = replace(now, passes=math.nan)
        since = now - self._last
        if since.updates == 0:  # gradients pile up
            return
        per_pass = since.epoch > 0 and not math.isnan(since.passes)
        self._worth += since.passes / since.epoch if per_pass else since.steps / since.updates
        self._last = now
        self._catch_up(math.floor(self._worth + 1e-9))

    def _now(self) -> _Moment:
        engine = self._loader.engine
        has_length = engine.job is not None and engine.job.pass_steps is not None
        return _Moment(
            updates=engine.num_updates,
            steps=engine.elapsed("step"),
            passes=engine.elapsed("epoch") if has_length else math.nan,
            epoch=self._loader.epoch,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `ProgressScheduler` does, what all calls were worth, and what came after the last one."""
        since = asdict(self._now() - self._last)
        return {**super().state_dict(), "worth": self._worth, "since": since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back; engine and loader have taken theirs."""
        super().load_state_dict(state)
        self._worth = float(state.get("worth", self._taken))  # older states have neither
        since = _Moment(**state["since"]) if "since" in state else self._now() - self._now()
        self._last = self._now() - since


def _seeded(seed: int | None) -> Any:
    return {} if seed is None else {"seed": seed}


def _counts_steps(scheduler: object, accelerator: Accelerator) -> bool:
    """Return whether this is a scheduler that Accelerate would step once per process and step of the optimizer."""
    counts = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
    return counts and bool(accelerator.step_scheduler_with_optimizer)


def _check(accelerator: Accelerator, objects: Sequence[Any]) -> None:
    """Refuse what cannot be honoured, before anything is prepared."""
    parallel = accelerator.parallelism_config
    if accelerator.distributed_type in _WITHOUT_DDP or (parallel is not None and parallel.non_data_parallel_size > 1):
        raise InvalidInputError(
            f"Accelerate runs this model by {accelerator.distributed_type.value}, which builds no DDP module to attach "
            "to: choose plain multi-GPU or multi-CPU training in 'accelerate config', without DeepSpeed, FSDP, "
            "Megatron or tensor parallelism"
        )
    if accelerator.dispatch_batches:
        raise InvalidInputError(
            "dispatch_batches=True lets the first process read whole batches and deal out equal slices of them: leave "
            "it out; every process reads the samples that the plan gives it"
        )
    num_models, num_optimizers = (
        sum(isinstance(each, kind) for each in objects) for kind in (torch.nn.Module, torch.optim.Optimizer)
    )
    if num_models != 1 or num_optimizers == 0:
        raise InvalidInputError(
            f"prepare() got {num_models} models and {num_optimizers} optimizers: give it one model with its optimizer; "
            "a second model that trains on the same batches is prepared by accelerator.prepare and then attached, "
            "cannikin.attach(..., follows=loader.engine)"
        )
    loaders = [each for each in objects if isinstance(each, DataLoader)]
    if not loaders or isinstance(loaders[0], DataLoaderStateMixin):
        raise InvalidInputError(
            "prepare() needs the DataLoader to train on as it was before accelerator.prepare, which deals equal "
            "batches out: give it here, and do not prepare it before"
        )


def _check_total(accelerator: Accelerator, loader: DataLoader[Any], local_batches: Sequence[int] | None) -> None:
    """Refuse a pinned split of another total than the loader's, by whose length the script's schedule is written."""
    size, num_ranks = loader.batch_size, accelerator.num_processes
    if size is None:
        return  # refused where it is taken apart
    said, total = f"the DataLoader's batch_size={size}", size * num_ranks
    if accelerator.split_batches:
        said, total = f"{said} with split_batches=True", size
    refuse_other_total(local_batches, said=said, total=total, num_ranks=num_ranks)
