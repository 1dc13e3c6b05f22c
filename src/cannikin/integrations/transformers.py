"""Trains with Transformers' Trainer on ranks of unlike speed and memory: `HeteroTrainer` in place of `Trainer`.

    trainer = HeteroTrainer(model=model, args=args, train_dataset=data, local_bounds=[(1, 24), (1, 8)])

Trainer still makes model, optimizer, schedule, logs and checkpoints. Its train loader is ours: the total batch,
`per_device_train_batch_size` times the number of processes, stays fixed, and each process gets the plan's part of it.

What weights the ranks' gradients depends on the loss. Where the model divides it by `num_items_in_batch`, the count of
labels over all ranks and accumulated batches, the ranks' gradients only have to be added, and the result is exact for
sequences of any length. Where the loss is a mean over the rank's own batch, it counts by its samples. Trainer cannot
tell which of the two holds where forward accepts any keyword, so it is tried on two samples before training.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, get_last_checkpoint

from cannikin.core.cutting import Bounds
from cannikin.errors import BatchMatchError, InvalidInputError
from cannikin.integrations.pinned import refuse_other_total
from cannikin.runtime.engine import Engine
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.options import Options, check_names
from cannikin.runtime.parallel import attach
from cannikin.runtime.randomness import get_randomness, set_randomness

_FILE = "cannikin.pt"  # in a checkpoint's folder: what was learned, and progress
_MAX_RANKS = 16  # with more, logs have no local batches, as those of observers
_IGNORED = -100  # a label that counts for nothing, as Transformers' losses have it


class HeteroTrainer(Trainer):
    """A Trainer whose processes may have unequal batches; before another Trainer in a list of bases it is a mixin.

        class MyTrainer(HeteroTrainer, Seq2SeqTrainer): ...

    `engine` has the plan, the noise scale and progress once training has begun. On one process it is a plain Trainer.
    The DataLoader of a subclass's own `get_train_dataloader` is taken apart, as `HeteroDataLoader.like` does.

    Args:
        *args, **kwargs: those of Trainer, and keywords of `Options`, such as `run_dir` and `profiles`.
        local_batches, local_bounds: see `DrawOptions`.
        item_count: see `DataLoaderOptions`; for a loss that is a mean over the rank's own tokens.
        max_batch_size: refused.
    """

    engine: Engine | None = None

    def __init__(
        self,
        *args: Any,
        local_batches: Sequence[int] | None = None,
        local_bounds: Bounds | None = None,
        item_count: Callable[[Any], float] | None = None,
        max_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._options = {name: kwargs.pop(name) for name in Options.__annotations__ if name in kwargs}
        self._split: dict[str, Any] = {
            "local_batches": local_batches,
            "local_bounds": local_bounds,
            "item_count": item_count,
        }
        taken = inspect.signature(super().__init__).parameters
        if all(each.kind != each.VAR_KEYWORD for each in taken.values()):
            own = (*self._split, *Options.__annotations__)
            check_names(type(self).__name__, (*own, *taken), None, kwargs)
        super().__init__(*args, **kwargs)
        if max_batch_size is not None:
            raise InvalidInputError(
                f"max_batch_size={max_batch_size}: Trainer counts all steps, and the schedule, before it begins, so "
                "the total batch stays per_device_train_batch_size times the number of processes; leave it out, or "
                "write the loop with cannikin.integrations.accelerate, where a total may grow"
            )
        if self.args.world_size == 1:
            if any(option is not None for option in self._split.values()):
                warnings.warn(
                    "cannikin has nothing to split on one process: this is a plain Trainer; start several, by torchrun",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        self._refuse()
        self._batches: _Batches | None = None  # of the loader that the engine has
        self._saved: dict[str, Any] | None = None  # an engine's state, until there is one to take it
        self._counts_items = False  # the loss, so that Trainer must count them for every batch
        if type(self).get_train_dataloader is not HeteroTrainer.get_train_dataloader:
            self.get_train_dataloader = self._cut_loader_of_subclass  # type: ignore[method-assign]
        self.add_callback(_Moments(self))

    def _refuse(self) -> None:
        """Refuse what cannot be honoured."""
        args, accelerator = self.args, self.accelerator
        sizes = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled or self.is_model_parallel or sizes > 1
        reasons = {
            "DeepSpeed, FSDP, tensor and other model parallelism build no DDP module to attach to: train by plain DDP, "
            "without these settings": sharded,
            "auto_find_batch_size=True makes batches smaller on all ranks when one runs out of memory: leave it out, "
            "and say what each rank holds by local_bounds=": args.auto_find_batch_size,
            "split_batches=True makes per_device_train_batch_size the total over all ranks: leave it out of "
            "accelerator_config, and set that of one rank": accelerator.split_batches,
            "dispatch_batches=True lets the first rank read whole batches and deal out equal slices: leave it out of "
            "accelerator_config; every rank reads the samples that the plan gives it": accelerator.dispatch_batches,
            "train_sampling_strategy='batch_rebalance' cuts the ranks' batches by itself: choose another one": (
                args.train_sampling_strategy == "batch_rebalance"
            ),
            "the train dataset is an IterableDataset, and Trainer resumes by counting batches of equal size: use one "
            "with indices, or write the loop with cannikin.integrations.accelerate": (
                isinstance(self.train_dataset, IterableDataset)
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise InvalidInputError(f"HeteroTrainer cannot train so: {reason}")
        local, num_ranks = args.train_batch_size, args.world_size
        said, total = f"per_device_train_batch_size={local}", local * num_ranks
        refuse_other_total(self._split["local_batches"], said=said, total=total, num_ranks=num_ranks)

    # What Trainer calls, in this order.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and where it resumes take up what a HeteroTrainer saved there."""
        path = resume_from_checkpoint
        if self.args.world_size > 1 and path:
            last: Callable[[Any], str | None] = get_last_checkpoint
            folder = last(self.args.output_dir) if path is True else str(path)
            file = os.path.join(folder or "", _FILE)
            if os.path.exists(file):
                self._saved = torch.load(file, map_location="cpu", weights_only=True)
            elif self.args.process_index == 0:
                warnings.warn(
                    f"{folder} has no {_FILE}, so it was saved by another Trainer: the ranks' speeds are learned anew, "
                    "and an epoch that is underway goes on in an order of samples of ours, which may repeat some",
                    RuntimeWarning,
                    stacklevel=2,
                )
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        return output._replace(training_loss=output.metrics.get("train_loss", output.training_loss))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of whole batches, which are cut by the plan once there is a model to train on them."""
        if self.args.world_size == 1:
            return super().get_train_dataloader()
        if self._batches is not None and self._batches.model is self.model_wrapped:
            return _BatchLoader(self._batches)  # train() once more
        return self._cut(super().get_train_dataloader())

    def _cut_loader_of_subclass(self) -> DataLoader[Any]:
        """Return what a subclass's own `get_train_dataloader` does, as a loader that is cut by the plan."""
        if self._batches is not None and self._batches.model is self.model_wrapped:
            return _BatchLoader(self._batches)
        loader = type(self).get_train_dataloader(self)
        return loader if isinstance(loader, _BatchLoader) else self._cut(loader)  # it asks ours where it calls super()

    def _cut(self, given: DataLoader[Any]) -> DataLoader[Any]:
        local, seed = self.args.train_batch_size, self.args.data_seed
        if isinstance(given, DataLoader) and given.batch_size not in (None, local):
            raise InvalidInputError(
                f"get_train_dataloader() returns batches of {given.batch_size}, and per_device_train_batch_size="
                f"{local}, by which Trainer counts its steps: let the two agree"
            )
        loader = HeteroDataLoader.like(
            given,
            batch_size=local * self.args.world_size,
            drop_last=self.args.dataloader_drop_last,
            seed=self.args.seed if seed is None else seed,
            **self._split,
        )
        return _BatchLoader(_Batches(loader))

    def _begin(self, batches: _Batches) -> None:
        """Attach to what Trainer has built: model and optimizer are there, no batch has been asked for."""
        batches.finish()  # a pass that an error has left
        if self.model_wrapped is self.model:  # Accelerate has marked it as prepared, and leaves it as it is
            raise InvalidInputError(
                "the model is not under DDP: trainer.evaluate() or predict() has prepared it before train(), and "
                "Trainer then trains it without DDP, each process for itself; train first (eval_on_start=True in "
                "TrainingArguments evaluates before the first step), or evaluate a copy of the model by another Trainer"
            )
        if batches.model is None:
            given = {} if "weighting" in self._options else {"weighting": self._weighting(batches.loader)}
            model: Any = self.model_wrapped
            optimizer: Any = self.optimizer
            options: Any = {"grad_scaler": self.accelerator.scaler, **given, **self._options}
            self.engine = attach(model, optimizer.optimizer, loader=batches.loader, **options)
            batches.model, batches.ignores_padding = model, self.engine.weighting == "none"
            self._batches = batches
        if self._saved is not None and self.engine is not None:
            self.engine.load_state_dict(self._saved)
            self._saved = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Train on a batch; the loss that is returned is one whose plain mean over ranks is the mean over samples."""
        engine = self.engine
        if engine is None:
            plain: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return plain
        if "weighting" not in self._options:
            self._check_items(num_items_in_batch)
        counts_samples = engine.weighting != "none" and self._split["item_count"] is None
        if not counts_samples and len(engine.loop.queue):
            engine.use_batch()  # its samples may be packed into one row, and their number is not what weights it
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        except BatchMatchError as error:
            if counts_samples:
                error.add_note(
                    "cannikin: where the samples of a batch are packed into one row, pass item_count= to the trainer, "
                    "which counts the row's items, such as labels; a loss that is divided by num_items_in_batch needs "
                    "none"
                )
            raise
        if engine.weighting == "none":
            return loss
        share = engine.current_share
        return loss * (engine.world_size * share) if share else torch.zeros_like(loss)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what Trainer does; beside a training loss the plan and the noise, by the names of `trackers.SCALARS`."""
        if self.engine is not None and "loss" in logs:
            logs |= _numbers(self.engine)
        if self.engine is not None and "train_loss" in logs and self.args.logging_strategy == IntervalStrategy.NO:
            # Trainer has logged none over all ranks; at the end of train(), where each rank comes to this.
            own = torch.tensor(logs["train_loss"], dtype=torch.float64, device=self.args.device)
            logs["train_loss"] = float(self.accelerator.reduce(own, "mean"))
        super().log(logs, *args, **kwargs)

    # How the loss is made.

    def _weighting(self, loader: HeteroDataLoader) -> str:
        """Return "none" where the loss counts items over all ranks, so that gradients only need to be added."""
        self._counts_items = False
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func is not None):
            return "auto"
        states = get_randomness(self.args.device)
        batch = loader.collate_fn([loader.dataset[index] for index in range(min(2, len(loader.dataset)))])
        if isinstance(batch, Mapping) and isinstance(batch.get("labels"), torch.Tensor):
            self._counts_items = True
            ratio = self._loss_ratio(send_to_device(dict(batch), self.args.device))
        else:
            ratio = 1.0
        set_randomness(states, self.args.device, 0, {})
        if math.isclose(ratio, 1.0, rel_tol=0.01):
            return "auto"
        if not self.args.average_tokens_across_devices:
            raise InvalidInputError(
                "average_tokens_across_devices=False makes each rank's loss a mean over its own tokens, which no "
                "weight by samples makes right: leave it at True"
            )
        if not math.isclose(ratio, 2.0, rel_tol=0.01):
            warnings.warn(
                "a part of the loss is divided by num_items_in_batch and a part is not: that part, a mean over the "
                "rank's own batch, counts every rank alike, whatever the size of its batch",
                RuntimeWarning,
                stacklevel=2,
            )
        return "none"

    def _loss_ratio(self, inputs: dict[str, Any]) -> float:
        """Return the loss of these inputs as one of 8 items, over that as one of 16: 2 where it is divided by them."""
        model: Any = self.model
        was_training = model.training
        try:
            few, many = self._losses(inputs)
        except Exception as error:
            try:  # a model may have a loss in training only
                few, many = self._losses(inputs, trains=True)
            except Exception:
                error.add_note(
                    "cannikin: this was a trial before training, in eval mode, of how the loss is made; pass "
                    "weighting='none' where it is divided by num_items_in_batch, 'hook' where it is a mean over the "
                    "batch, and there is no trial"
                )
                raise error from None
        finally:
            model.train(was_training)
        if not (math.isfinite(few) and math.isfinite(many) and many):
            raise InvalidInputError(
                f"the loss of the dataset's first two samples is {few}, which does not tell how it is made: put "
                "samples with labels first, or pass weighting='none' where the loss is divided by num_items_in_batch, "
                "'hook' where it is a mean over the batch"
            )
        return few / many

    def _losses(self, inputs: dict[str, Any], *, trains: bool = False) -> tuple[float, float]:
        """Return these losses of the model in eval mode, or in training with the same randomness and no trace of it."""
        model: Any = self.model
        model.train(trains)
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if trains else []
        states = get_randomness(self.args.device)
        losses: list[float] = []
        try:
            with torch.no_grad(), self.compute_loss_context_manager():
                for number in (8, 16):
                    count = torch.tensor(number, device=self.args.device)
                    loss: Any = self.compute_loss(model, dict(inputs), num_items_in_batch=count)
                    losses.append(float(loss))
                    set_randomness(states, self.args.device, 0, {})
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        return losses[0], losses[1]

    def _check_items(self, num_items_in_batch: Any) -> None:
        if (num_items_in_batch is not None) != self._counts_items:
            now, then = ("has", "have none") if self._counts_items is False else ("has no", "have")
            raise BatchMatchError(
                f"this batch {now} labels that Trainer counts, but the dataset's first two samples, by which the "
                f"ranks' weights were chosen, {then}: make all batches alike, or pass weighting='none' where the loss "
                "is divided by num_items_in_batch, 'hook' where it is a mean over the batch"
            )


def _numbers(engine: Engine) -> dict[str, float]:
    """Return what every rank knows of the run without asking the others; nothing that is not finite."""
    plan = engine.plan
    found = {"cannikin/noise_scale": engine.noise_scale}
    if plan is not None and plan.predicted_step_s is not None:
        found["cannikin/predicted_step_ms"] = 1e3 * plan.predicted_step_s
    if plan is not None and len(plan.local_batches) <= _MAX_RANKS:
        found |= {f"cannikin/rank{rank}/local_batch": float(b) for rank, b in enumerate(plan.local_batches)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


class _Moments(TrainerCallback):
    """Moments of a training that Trainer tells callbacks of."""

    def __init__(self, trainer: HeteroTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Model and optimizer are built."""
        self._trainer._begin(train_dataloader.dataset)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """A pass begins; where it is resumed, Trainer cuts the loader's beginning off and does not tell its epoch."""
        train_dataloader.set_epoch(int(state.epoch))

    def on_epoch_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """A pass is over, and nobody asks the loader for its end.

        What Trainer has not logged when it ends it takes from its own rank, without a mean over ranks: so it logs now.
        """
        train_dataloader.dataset.finish()
        may_end = state.global_step >= state.max_steps or control.should_training_stop or control.should_evaluate
        control.should_log = control.should_log or (may_end and args.logging_strategy != IntervalStrategy.NO)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint has been written."""
        folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if args.should_save and self._trainer.engine is not None and os.path.isdir(folder):
            torch.save(self._trainer.engine.state_dict(), os.path.join(folder, _FILE))


class _Batches(Dataset[Any]):
    """The batches of a pass, one after another, under the numbers that they have in their epoch."""

    def __init__(self, loader: HeteroDataLoader) -> None:
        self.loader = loader
        self.model: Any = None  # that trains on them
        self.ignores_padding = False  # as labels, where these are counted
        self._pass: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader.dataset)

    def __getitem__(self, number: int) -> Any:
        if self._pass is None:
            if number:  # a pass that is resumed; with a fixed total its place is known
                place = {"epoch": self.loader.epoch, "position": number * self.loader.batch_size}
                self.loader.load_state_dict({**self.loader.state_dict(), **place})
            self._pass = iter(self.loader)
        batch = next(self._pass)
        if self.loader.is_padding and self.ignores_padding:
            for name in ("labels", "shift_labels"):
                if name in batch:
                    batch[name] = torch.full_like(batch[name], _IGNORED)
        return batch

    def finish(self) -> None:
        """End the pass."""
        if self._pass is not None:
            self.loader.finish()
            self._pass = None


class _Numbers(Sampler[list[int]]):
    """The numbers of an epoch's batches: `skip_first_batches`, by which Trainer resumes, leaves out the first ones."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[list[int]]:
        return iter([number] for number in range(self._length))

    def __len__(self) -> int:
        return self._length


class _BatchLoader(DataLoader[Any]):
    """A DataLoader as Trainer expects one, which it may count, cut off and build anew; its items are whole batches."""

    def __init__(self, batches: _Batches) -> None:
        super().__init__(batches, batch_sampler=_Numbers(len(batches.loader)), collate_fn=_only)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next pass begins."""
        batches: Any = self.dataset
        batches.loader.set_epoch(epoch)


def _only(batches: list[Any]) -> Any:
    return batches[0]
