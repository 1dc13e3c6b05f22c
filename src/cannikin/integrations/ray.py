"""Trains under Ray Train with unequal batches, from inside of `train_loop_per_worker`.

    prepare       attaches to the model that Ray has wrapped, and gives its DataLoader unequal batches
    RayRun        reports to Ray with a checkpoint of everything, which a restart on any number of workers finds

Ray restarts all workers when one is lost, and when an elastic run gets or loses a node. It then starts the function
again; `prepare` loads the last checkpoint there. What was learned belongs to devices, so that the first plan is the
best one for the workers that are there.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import ray
import ray.train
import ray.train.torch
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cannikin.core.cutting import Bounds
from cannikin.errors import InvalidInputError
from cannikin.integrations.pinned import pinned_total
from cannikin.runtime.engine import Engine
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.options import OneOrMore, Options
from cannikin.runtime.parallel import attach, ensure_process_group
from cannikin.runtime.run_state import RunState
from cannikin.runtime.snapshot_file import put_together, take_apart

FILE = "cannikin.pt"
"""The name of our file in a checkpoint of Ray's: `torch.load(file)["objects"]["model"]` has the weights."""

_Value = TypeVar("_Value")


def prepare(
    model: torch.nn.Module,
    optimizer: OneOrMore,
    data_loader: DataLoader[Any],
    *,
    batch_size: int | None = None,
    max_batch_size: int | None = None,
    local_batches: Sequence[int] | Mapping[str, int] | None = None,
    local_bounds: Bounds | Mapping[str, tuple[int | None, int | None]] | None = None,
    label: str = "ray.io/accelerator-type",
    item_count: Callable[[Any], float] | None = None,
    also_save: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> tuple[DistributedDataParallel, RayDataLoader, RayRun]:
    """Give each worker a share of every batch by its speed; returns the model, the loader and the run.

        model = ray.train.torch.prepare_model(net)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(data, batch_size=32, shuffle=True)
        model, loader, run = prepare(model, optimizer, loader, local_bounds=(1, 128))

    Call it on every worker, once the optimizer is built. A checkpoint that `run.report` has made is loaded here, on any
    number of workers: count epochs from `loader.epoch`, or by `run.engine.epochs(n)`.

    Args:
        model: what `ray.train.torch.prepare_model` returned, or a module, which is then given to it.
        optimizer: what steps its parameters, or a list of several that step together.
        data_loader: over the whole dataset, whether or not `ray.train.torch.prepare_data_loader` has prepared it;
            `HeteroDataLoader.like` says what cannot be kept.
        batch_size: the *total* batch over all workers at the start. None is the sum of `local_batches` where the split
            is pinned; in a run that goes on, the total that it had; else the loader's `batch_size`, which under Ray is
            that of one worker, times the number of workers.
        max_batch_size, local_batches, local_bounds: see `DrawOptions`. The last two also by a label of the node that a
            worker is on, such as `{"A100": (1, 256), "T4": (1, 32)}`: which rank is where is Ray's choice, and another
            one after a restart.
        label: its name; Ray itself labels nodes with the type of their accelerators.
        item_count: see `DataLoaderOptions`.
        also_save: what else checkpoints are to hold, by name, such as `{"scheduler": scheduler}`: objects with
            `state_dict()` and `load_state_dict()`.
        **options: see `Options`.
    """
    if not isinstance(data_loader, DataLoader):
        raise InvalidInputError(
            f"prepare() got a {type(data_loader).__name__} to train on, and takes a torch DataLoader: the rows of Ray "
            "Data are dealt out to the workers in equal parts already; give a DataLoader over data that each worker "
            "can read at any index, or keep Ray's own DDP for these"
        )
    ddp = _wrapped(model)
    engine = attach(ddp, optimizer, **options)
    saved = _last_checkpoint(engine)
    if isinstance(local_batches, Mapping):
        local_batches = _by_label(local_batches, label, engine)
    if isinstance(local_bounds, Mapping):
        local_bounds = _by_label(local_bounds, label, engine)
    if batch_size is None and local_batches is not None:
        batch_size = pinned_total(
            local_batches, loaders=data_loader.batch_size, num_ranks=engine.world_size, rank=engine.rank
        )
    elif batch_size is None and saved is not None:
        batch_size = saved["objects"]["engine"]["batch_size"]
    loader = RayDataLoader.like(
        data_loader,
        model=engine,
        batch_size=batch_size,
        max_batch_size=max_batch_size,
        local_batches=local_batches,
        local_bounds=local_bounds,
        item_count=item_count,
    )
    return ddp, loader, RayRun(engine, also_save or {}, saved)


def _wrapped(model: Any) -> Any:
    """Return the model as a DDP module, also where Ray makes none: for a single worker."""
    if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):  # the first is of torch.compile
        return model
    model = ray.train.torch.prepare_model(model)
    if isinstance(model, DistributedDataParallel):
        return model
    ensure_process_group(next(model.parameters()).device)
    return DistributedDataParallel(model)


def _by_label(values: Mapping[str, _Value], label: str, engine: Engine) -> list[_Value]:
    """Return one value per rank, by what the label of its node says; every rank must ask, and gets the same answer."""
    names = engine.exchange.gather_text(str(ray.get_runtime_context().get_node_labels().get(label, "")))
    for rank, name in enumerate(names):
        if name not in values:
            says = f"{label}={name}" if name else f"no label {label!r}"
            raise InvalidInputError(
                f"rank {rank} is on a node with {says}, and there are values for {', '.join(values)} only: give one "
                "for each kind of node, or name another label, prepare(..., label=...)"
            )
    return [values[name] for name in names]


def _last_checkpoint(engine: Engine) -> dict[str, Any] | None:
    """Return what `run.report` has saved last, on every worker; None at the start of a run."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        path = os.path.join(folder, FILE)
        if not os.path.exists(path):
            if engine.rank == 0:
                warnings.warn(
                    f"the checkpoint {checkpoint.path} has no {FILE}: the place in the data and what was learned begin "
                    "afresh; report with run.report(metrics, checkpoint=...), which adds that file to your own",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return None
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


class RayDataLoader(HeteroDataLoader):
    """A HeteroDataLoader whose batches are on this worker's device, as those of `prepare_data_loader` are."""

    def __iter__(self) -> Iterator[Any]:
        device = ray.train.torch.get_device()
        return (_moved(batch, device) for batch in super().__iter__())


def _moved(batch: Any, device: torch.device) -> Any:
    """Return nested tensors on a device; what is none stays as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _moved(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(part, device) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(part, device) for part in batch)
    return batch


class RayRun:
    """The run of which this worker is a part: its engine, and its checkpoints in Ray's storage. Made by `prepare`.

    Attributes:
        engine: has the plan, the noise scale, `epochs`, `weighted_mean` and more.
        resumed_from: steps that training had taken when the loaded checkpoint was made; None at the start of a run.
    """

    def __init__(self, engine: Engine, also_save: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
        self.engine = engine
        self.resumed_from: int | None = None
        self._state = RunState(engine, also_save)
        take_apart(self._state.state_dict())  # refuses what cannot be saved now, not at the first report
        if saved is not None:
            self._state.load(saved, "the checkpoint")
            self.resumed_from = int(saved["objects"]["engine"]["num_steps"])
        engine.loop.watcher = self

    def end_step(self) -> None:
        """See `StepWatcher`: random numbers go on from the checkpoint once the first pass has begun."""
        self._state.go_on()

    def rest(self) -> None:
        """See `StepWatcher`: nothing is due, since checkpoints are made where the script reports."""

    def end_training(self) -> None:
        """See `StepWatcher`: the script reports at the end, too."""

    def report(
        self, metrics: dict[str, Any], *, checkpoint: ray.train.Checkpoint | None = None, **options: Any
    ) -> None:
        """Report metrics to Ray, with a checkpoint of everything that the run goes on from if it is restarted.

        Call it on every worker after the same step, between `optimizer.step()` and the next batch or after an epoch.
        Ray waits there for all workers. Rank 0 saves: the module, its optimizers, what was learned, the place in the
        data, the GradScaler, `also_save`, and its random generators.

        Args:
            metrics: plain values; of those Ray keeps rank 0's. `run.engine.weighted_mean(loss)` is over all samples.
            checkpoint: one of your own in a local folder, to which our file is added.
            **options: what else `ray.train.report` takes.
        """
        if half_done := self.engine.loop.half_done:
            raise InvalidInputError(
                "run.report() while a batch is half used: a checkpoint would lose gradients that have not been "
                "stepped; call it after optimizer.step(), in a loop that accumulates after the last batch of a group; "
                f"still to come: {half_done}"
            )
        if self.engine.rank == 0:
            if checkpoint is None:
                checkpoint = ray.train.Checkpoint.from_directory(tempfile.mkdtemp())
                options["delete_local_checkpoint_after_upload"] = True
            skeleton, tensors = take_apart(self._state.state_dict())
            torch.save(put_together(skeleton, tensors.__getitem__), os.path.join(checkpoint.path, FILE))
        ray.train.report(metrics, checkpoint=checkpoint, **options)
