"""Lightning's Trainer and Fabric with a batch of its own for every rank: cannikin's plans under Lightning's loops.

    import cannikin.integrations.lightning
    trainer = L.Trainer(strategy="cannikin", devices=2)

or, with settings, `strategy=CannikinStrategy(local_batches=[48, 16])`. LightningModule, DataModule and DataLoader stay
as they are. The strategy is Lightning's DDP and a few things more, each in a method that Lightning calls anyway:

    setup                       the DDP module and its optimizer exist: an engine is attached to them
    process_dataloader          the training DataLoader is taken apart, and a HeteroDataLoader stands in its place
    training_step, reduce       a mean over ranks that is logged in a step is the mean over samples
    save_ and load_checkpoint   what was learned, and the place in the data, are saved with the rest

Lightning reads a loader's length once. A fixed total batch gives one, and with it all that Lightning does by steps; a
total that grows gives none, and Lightning then asks for every batch one step ahead, so as to know which is the last.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from cannikin.core.cutting import Bounds, num_steps
from cannikin.core.lr import LrRule
from cannikin.core.planner import Planner
from cannikin.core.values import Plan
from cannikin.errors import InvalidInputError
from cannikin.integrations.pinned import pinned_total
from cannikin.integrations.saving import LostGradients
from cannikin.runlog import Observer
from cannikin.runtime.engine import Engine
from cannikin.runtime.loader import HeteroDataLoader, Order
from cannikin.runtime.options import DrawOptions, Options, check_names
from cannikin.runtime.parallel import attach
from cannikin.runtime.schedulers import ProgressScheduler
from cannikin.trackers import ScalarObserver

_KEY, _PLACE_KEY = "cannikin", "cannikin_loader"  # of a checkpoint; the first is the strategy's name, too
_OF_LOADERS = (*DrawOptions.__annotations__, "seed", "item_count", "sharded")
_OF_ENGINES = tuple(name for name in Options.__annotations__ if name not in ("follows", "loader", "grad_scaler"))
_OWN = (*_OF_LOADERS, *_OF_ENGINES)
_OF_DDP_STRATEGY = inspect.signature(DDPStrategy).parameters
_COMM_HOOK = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class CannikinStrategy(DDPStrategy):
    """Lightning's DDP with unequal local batches, pinned or adapted to the ranks' speeds.

        trainer = L.Trainer(strategy=CannikinStrategy(max_batch_size=512, local_bounds=(2, 256)), devices=2)

    `batch_size` of the training DataLoader is a rank's on average, as under DDP: the total batch is that times the
    number of ranks, or the sum of `local_batches`. Loaders for validation, test and prediction are left to Lightning.
    A keyword that is None is as one that is left out.

    Args:
        max_batch_size, local_batches, local_bounds, seed, item_count, sharded: as of `HeteroDataLoader`.
        policy, weighting, lr_rule, warmup_steps, comm_wrapper, observers, run_dir, profiles, batch_dim: see `Options`.
        **options: all other keywords are DDPStrategy's, such as `find_unused_parameters` and `process_group_backend`.
    """

    def __init__(
        self,
        *,
        max_batch_size: int | None = None,
        local_batches: Sequence[int] | None = None,
        local_bounds: Bounds | None = None,
        seed: int | None = None,
        item_count: Callable[[Any], float] | None = None,
        sharded: bool | None = None,
        policy: str | Planner | None = None,
        weighting: str | None = None,
        lr_rule: str | LrRule | Sequence[str | LrRule] | None = None,
        warmup_steps: float | None = None,
        comm_wrapper: Callable[..., Any] | None = None,
        observers: Sequence[Observer] | None = None,
        run_dir: str | Path | None = None,
        profiles: str | Path | None = None,
        batch_dim: int | None = None,
        **options: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _OWN and value is not None}
        check_names("CannikinStrategy", (*_OWN, *_OF_DDP_STRATEGY), DistributedDataParallel, options)
        for name in _COMM_HOOK:
            if options.get(name) is not None:
                raise InvalidInputError(
                    f"{name}=: DDP has one communication hook, which weights gradients here; to compress them pass "
                    "comm_wrapper=fp16_compress_wrapper or bf16_compress_wrapper"
                )
        super().__init__(**options)
        self._loader_options, self._engine_options = _parted(given)
        self._saved: dict[str, Any] | None = None  # a checkpoint's state, until there is an engine to take it
        self._saved_place: dict[str, Any] | None = None  # and its loader's
        self._begun: tuple[dict[str, Any], dict[str, Any]] | None = None  # states of engine and loader before any step
        self._has_loader = False  # in the set-up of training data that Lightning is at
        self._in_step = self._in_fit = self._warned = False
        self._lost = LostGradients(
            "save after a multiple of accumulate_grad_batches or at the epoch's end, and validate there, where "
            "ModelCheckpoint saves, too"
        )
        self._shown: Plan | None = None  # the plan that the progress bar's total was last computed for
        self.engine: Engine | None = None
        self.loader: TrainLoader | None = None

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the module as DDPStrategy does, and attach an engine to it where it is to be trained."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._saved = self._saved_place = None
            super().setup(trainer)
            return
        self._refuse(trainer)
        self.engine = self.loader = self._shown = self._begun = None
        super().setup(trainer)
        scaler = getattr(self.precision_plugin, "scaler", None)
        observers = [*self._engine_options.get("observers", ()), ScalarObserver(_Loggers(trainer), with_step=False)]
        options = {**self._engine_options, "observers": observers}
        assert isinstance(self.model, DistributedDataParallel)
        if isinstance(self.optimizers[0], torch.optim.LBFGS):
            raise InvalidInputError(
                "configure_optimizers() returns LBFGS, which runs training_step several times per batch, and each run "
                "would take a batch of the plan's: choose an optimizer that runs it once, or train by strategy='ddp'"
            )
        self.engine = attach(self.model, self.optimizers[0], grad_scaler=scaler, **options)
        saved, self._saved = self._saved, None
        if saved is not None:
            self.engine.load_state_dict(saved)
        if self._loader_options.get("max_batch_size") is not None and trainer.max_steps == -1:
            self._schedule_by_progress(self.engine, trainer)
        if self.loader is not None:  # configure_optimizers() has asked how many steps there will be
            self._bind(self.loader, self.engine)
        self._in_fit = True

    def _bind(self, loader: TrainLoader, engine: Engine) -> None:
        """Let the engine train on the loader, and keep the states to which a search of learning rates goes back.

        A saved place is taken here, since Lightning gives it neither to a loader that it has made before this nor,
        where an epoch was complete, to any. The beginning of an epoch has no place beside its number, which is
        Lightning's, and fits other data, too.
        """
        loader.bind(engine)
        place, self._saved_place = self._saved_place, None
        if place is not None and (place["position"] or "sampler" in place):
            loader.load_state_dict(place)
        self._begun = engine.state_dict(), loader.state_dict()

    def _schedule_by_progress(self, engine: Engine, trainer: pl.Trainer) -> None:
        """Let schedulers that count steps count those that training is worth at the initial batch.

        Not so where `max_steps` says how many there will be, which schedules are then written for. Which steps a
        `frequency` asks for is counted in progress, too, so Lightning has to call after each.
        """
        for each in self.lr_scheduler_configs:
            if each.interval == "step" and not each.reduce_on_plateau:
                count = None if each.frequency == 1 else partial(self._num_calls, engine, trainer, each.frequency)
                each.scheduler = ProgressScheduler(each.scheduler, engine, "step", count=count)  # type: ignore[assignment]
                each.frequency = 1

    def _num_calls(self, engine: Engine, trainer: pl.Trainer, frequency: int, steps: int) -> int:
        """Return how often Lightning would step a scheduler within so many steps at the initial batch.

        It does so at every `frequency`-th batch of an epoch, as far as the optimizer steps there.
        """
        num_piled, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
        every = math.lcm(frequency, num_piled) // num_piled
        length = None if engine.job is None else engine.job.pass_steps
        if length is None:
            return steps // every
        num_batches = min(length, limit) if isinstance(limit, int) else int(length * limit)
        pass_steps = max(1, math.ceil(num_batches / num_piled))
        num_passes, rest = divmod(steps, pass_steps)
        return num_passes * (pass_steps // every) + rest // every

    def _refuse(self, trainer: pl.Trainer) -> None:
        """Refuse what cannot be honoured."""
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            raise InvalidInputError(
                "automatic_optimization=False: Lightning then runs backward inside of DDP's forward, where gradients "
                "cannot be weighted; use automatic optimization, or Fabric with cannikin.integrations.lightning.setup, "
                "which takes several optimizers, too"
            )
        if getattr(trainer, "reload_dataloaders_every_n_epochs", 0):  # set, but not declared
            raise InvalidInputError(
                "reload_dataloaders_every_n_epochs: one loader feeds the model from the first step to the last; leave "
                "it at 0, and let the dataset change what its indices stand for"
            )

    def process_dataloader(self, dataloader: object) -> object:
        """Put a loader of unequal batches in the place of the training DataLoader, and leave others alone."""
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.training:
            return super().process_dataloader(dataloader)
        if self._has_loader:
            raise InvalidInputError(
                "several training DataLoaders: a step has one batch, which the plan cuts; put the datasets into one "
                "(ConcatDataset, StackDataset) or into one collate_fn"
            )
        self._has_loader = True
        loader = _like(dataloader, self.world_size, self.global_rank, self._loader_options)
        if self.loader is None:
            next_epoch = partial(_next_epoch, self.lightning_module.trainer)
            self.loader = TrainLoader(loader, grows=_grows(loader, self._loader_options), next_epoch=next_epoch)
            if self.engine is not None:
                self._bind(self.loader, self.engine)
        elif (loader.batch_size, sized_len(loader)) != (self.loader.batch_size, self.loader.length):
            raise InvalidInputError(
                f"the training DataLoader has a total batch of {loader.batch_size} samples when it is set up again, "
                f"and had {self.loader.batch_size}, or its data has another length: one loader feeds the model from "
                "the first step to the last; give the same one each time"
            )
        return self.loader

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; by this name Lightning says that it sets training data up, maybe once more."""
        if name == "train_dataloader()":
            self._has_loader = False
        super().barrier(name)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, in which means over ranks are means over samples."""
        self._in_step = self.engine is not None
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._in_step = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ranks; from a training step to the end of its batch means are weighted by local batches.

        So `self.log(..., sync_dist=True)` logs what one process with the whole batch would. At the end of an epoch
        Lightning divides sums by counts of samples, whose mean must not be rounded down to an integer.
        """
        averages = isinstance(tensor, torch.Tensor) and str(reduce_op).lower() in ("mean", "avg")
        if averages and not tensor.is_floating_point():
            tensor = tensor.double()
        if averages and self._is_in_batch and group is None and self.engine is not None:
            if self._in_step:
                self._warn_of_waiting()
            return self.engine.weighted_mean(tensor)
        return super().reduce(tensor, group, reduce_op)

    @property
    def _is_in_batch(self) -> bool:
        """Whether a training batch is underway, from its step to the end of `on_train_batch_end`."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        return self._in_step or (trainer.training and bool(progress.started > progress.completed))

    def _warn_of_waiting(self) -> None:
        """Say once that ranks wait for each other in forward, where the wait counts as the faster one's computing."""
        adapts = self._loader_options.get("local_batches") is None and self._engine_options.get("policy") != "even"
        if self._warned or not adapts or self.global_rank != 0:
            return
        self._warned = True
        warnings.warn(
            "self.log(..., sync_dist=True) in training_step makes every rank wait for the slowest in each step, so "
            "that their speeds cannot be told apart: log with on_step=False, on_epoch=True, or without sync_dist",
            RuntimeWarning,
            stacklevel=2,
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the progress bar how many batches the epoch has under the plan in force, where that changes."""
        super().on_train_batch_start(batch, batch_idx)
        if self.engine is None or self.loader is None or not self.loader.grows:
            return
        plan = self.engine.plan
        if plan is None or (plan is self._shown and batch_idx):
            return
        self._shown = plan
        assert self.lightning_module is not None
        _show_total(self.lightning_module.trainer, batch_idx + self.loader.num_left(plan.total_batch))

    def on_train_end(self) -> None:
        """End the last pass; a search of learning rates, which comes here too, goes on to train."""
        super().on_train_end()
        if self.loader is not None:
            self.loader.finish()

    def teardown(self) -> None:
        """Say in the run log that the training is over, unless an error has ended it."""
        if self._in_fit and self.engine is not None:
            self.engine.close()
        self._in_fit = False
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Say in a note what to do, where a step ran out of memory or lost a rank."""
        super().on_exception(exception)
        self._in_fit = False
        if self.engine is not None:
            self.engine.explain(exception)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save what was learned, and the place in the data, with the rest."""
        if self.engine is not None and self.loader is not None:
            self._lost.check(self.engine)
            checkpoint[_KEY], checkpoint[_PLACE_KEY] = self.engine.state_dict(), self.loader.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, of which the engine that is not there yet will have its part.

        In a fit it is one of `Tuner.lr_find`: made before there was a loader, of the state before the first step.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        saved, place = checkpoint.get(_KEY), checkpoint.get(_PLACE_KEY)
        if not self._in_fit:
            self._saved, self._saved_place = saved, place
        elif self.engine is not None and self.loader is not None:
            if saved is None or place is None:
                assert self._begun is not None
                saved, place = self.broadcast(self._begun)  # what rank 0 knew, as a checkpoint has it
            self.engine.load_state_dict(saved)
            self.loader.load_state_dict(place)
        return checkpoint


StrategyRegistry.register(_KEY, CannikinStrategy, description="DDP with unequal local batches", override=True)


class TrainLoader:
    """A HeteroDataLoader as Lightning reads one: of a length that holds for every epoch, or of none.

    Lightning reads the first batch of a loader without a length before it says which epoch it trains, and may begin the
    pass once more after that. So what it says during a pass is kept until the next one begins, and where that is over
    the same epoch, it goes on at the first batch that was not trained on.

    Args:
        loader: whose batches they are, without a model yet.
        grows: whether the total batch may.
        next_epoch: what a pass begins where Lightning has not said so.
    """

    def __init__(self, loader: HeteroDataLoader, *, grows: bool, next_epoch: Callable[[], int]) -> None:
        self.loader = loader
        self._next_epoch = next_epoch
        self._told: int | None = None  # the epoch, since the last pass began
        self._is_bound = self._is_underway = False
        self.length = sized_len(loader)  # of a whole epoch, while it has no model
        self.grows = grows and self.length is not None

    def bind(self, engine: Engine) -> None:
        """Give the loader the engine that trains on it."""
        self.loader.bind(engine)
        self._is_bound = True

    def __iter__(self) -> Iterator[Any]:
        if not self._is_bound:
            raise InvalidInputError(
                "trainer.estimated_stepping_batches, with a total batch that may grow or data without a length: the "
                "number of steps is not known beforehand; set max_steps with max_epochs=-1, leave max_batch_size out, "
                "or write the number of steps at the initial batch"
            )
        told = self._told
        state = self.state_dict() if self._is_underway and self.loader.epoch == told else None
        self.finish()
        if state is not None:
            self.load_state_dict(state)
        self.loader.set_epoch(self._next_epoch() if told is None else told)
        self._is_underway = True
        yield from self.loader
        self._is_underway = False

    @property
    def sampler(self) -> Order:
        """The order of samples, to which Lightning says which epoch it trains."""
        return _TrainOrder(self, sized_len(self.loader.sampler))

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next pass begins."""
        self._told = epoch
        if not self._is_underway:
            self.loader.set_epoch(epoch)

    def finish(self) -> None:
        """End the pass underway: Lightning counts batches, and does not ask for the end."""
        self.loader.finish()
        self._told, self._is_underway = None, False

    def __len__(self) -> int:
        if self.grows or self.length is None:
            raise TypeError("the total batch may grow, or the data has no length: the number of batches is not known")
        return self.length

    def num_left(self, total_batch: int) -> int:
        """Return the batches of this epoch that have not been trained on, at this total batch."""
        remaining = len(self.loader.sampler) - self.loader.state_dict()["position"]
        return num_steps(remaining, total_batch, drop_last=self.loader.drop_last)

    def state_dict(self) -> dict[str, Any]:
        """Return where in the data training is."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.loader.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        """Return what a DataLoader would say of itself: its dataset, its sampler, its settings."""
        if name == "loader":  # not there yet, as in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)


class _TrainOrder(Order):
    """The order of a `TrainLoader`.

    Args:
        train_loader: whose order it is.
        num_samples: samples of an epoch on all ranks, None where that is not known.
    """

    def __init__(self, train_loader: TrainLoader, num_samples: int | None) -> None:
        super().__init__(train_loader.loader, num_samples)
        self._train_loader = train_loader

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next pass begins."""
        self._train_loader.set_epoch(epoch)


def _next_epoch(trainer: pl.Trainer) -> int:
    """Return the epoch that Lightning will train next, by its counts, also where they come from a checkpoint.

    One that was saved after the last batch of an epoch, or in the validation after it, counts that epoch as underway.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress
    is_over = batch.is_last_batch and batch.current.processed == batch.current.ready
    return int(epochs.processed + (is_over and epochs.started > epochs.processed))


def _show_total(trainer: pl.Trainer, num_batches: int) -> None:
    """Give one of Lightning's progress bars the number of batches of this epoch."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.train_progress_bar.total = num_batches
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.update(bar.train_progress_bar_id, total=num_batches)


class _Loggers:
    """The loggers of a Trainer as one: they get the run's numbers every few seconds, at the optimizer's step."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def log_metrics(self, metrics: dict[str, float]) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=self._trainer.global_step)


def _parted(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part the keywords of loaders from those of engines."""
    loader = {name: options[name] for name in _OF_LOADERS if name in options}
    return loader, {name: options[name] for name in _OF_ENGINES if name in options}


def _grows(loader: HeteroDataLoader, options: Mapping[str, Any]) -> bool:
    """Return whether the total batch may grow."""
    largest = options.get("max_batch_size")
    return largest is not None and largest > loader.batch_size


def _like(given: object, num_ranks: int, rank: int, options: Mapping[str, Any]) -> HeteroDataLoader:
    """Return a loader of unequal batches in the place of one of Lightning's users, without a model yet."""
    if not isinstance(given, DataLoader):
        raise InvalidInputError(
            f"the training data comes from a {type(given).__name__}: give a torch.utils.data.DataLoader, of which the "
            "plan can cut batches of any size"
        )
    sampler = given.sampler
    if isinstance(sampler, DistributedSampler) and type(sampler) is not DistributedSampler:
        raise InvalidInputError(
            f"the training sampler is a {type(sampler).__name__}: where Lightning has put it around yours, pass "
            "Trainer(use_distributed_sampler=False), and your sampler gives the order over all ranks"
        )
    options = dict(options)
    seeds_workers = os.environ.get("PL_SEED_WORKERS", "0") != "0" and not isinstance(given.dataset, IterableDataset)
    if seeds_workers and given.worker_init_fn is None:  # seed_everything(workers=True)
        options["worker_init_fn"] = partial(pl_worker_init_function, rank=rank)
    pinned, total = options.get("local_batches"), None
    if pinned is not None:
        total = pinned_total(pinned, loaders=given.batch_size, num_ranks=num_ranks, rank=rank)
    elif given.batch_size is not None:
        total = given.batch_size * num_ranks
    return HeteroDataLoader.like(given, batch_size=total, **options)


# Fabric.


class FabricLoader:
    """A HeteroDataLoader whose batches are on Fabric's device; `engine` is the model's.

    Args:
        fabric: whose device it is.
        loader: whose batches they are.
        engine: the adaptive side of the model.
    """

    def __init__(self, fabric: Fabric, loader: HeteroDataLoader, engine: Engine) -> None:
        self.loader = loader
        self.engine = engine
        self._fabric = fabric
        self._lost = LostGradients("save where no_backward_sync is off, after optimizer.step()")

    def __iter__(self) -> Iterator[Any]:
        return map(self._fabric.to_device, self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Return what the HeteroDataLoader says of itself: its dataset, its sampler, its settings."""
        if name == "loader":  # not there yet, as in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return where in the data training is, and what was learned, as `fabric.save` takes it."""
        self._lost.check(self.engine)
        return {"loader": self.loader.state_dict(), "engine": self.engine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, as `fabric.load` does."""
        self.engine.load_state_dict(state["engine"])
        self.loader.load_state_dict(state["loader"])


def setup(
    fabric: Fabric,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loader: Any,
    **options: Any,
) -> tuple[Any, Any, FabricLoader]:
    """Set a model, its optimizer and its training loader up, in place of `fabric.setup` and `fabric.setup_dataloaders`.

        model, optimizer, loader = cannikin.integrations.lightning.setup(fabric, net, optimizer, loader)

    Put the loader into `fabric.save` and `fabric.load`: its state has the place in the data and all that was learned.

    Args:
        fabric: with `strategy="ddp"`, launched.
        module: the network.
        optimizer: of its parameters; or several that step together, of which a list comes back.
        loader: the training DataLoader as it is for one process; its batch_size is a rank's on average.
        **options: as of `CannikinStrategy`, without those of DDP.
    """
    check_names("setup", _OWN, None, options)
    if not isinstance(loader, DataLoader):
        raise InvalidInputError(
            f"setup() got a {type(loader).__name__} to train on: give it the torch DataLoader as it was before "
            "fabric.setup_dataloaders, which deals equal batches out; loaders for evaluation go through that one"
        )
    given = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    model, *optimizers = fabric.setup(module, *given)
    ddp = next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)
    if ddp is None:
        raise InvalidInputError(
            f"Fabric's {type(fabric.strategy).__name__} makes no DistributedDataParallel: pass Fabric(strategy='ddp')"
        )
    of_loader, of_engine = _parted(options)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    engine = attach(ddp, optimizers, grad_scaler=scaler, **of_engine)
    ours = _like(loader, engine.world_size, engine.rank, of_loader)
    ours.bind(engine)
    returned = optimizers if isinstance(optimizer, Sequence) else optimizers[0]
    return model, returned, FabricLoader(fabric, ours, engine)
