"""Trainings under Lightning, as a script that Lightning's own launcher, or torchrun, starts on every rank.

    python lightning_cases.py FOLDER ranks             one process with whole batches, then two ranks with unequal ones
    torchrun ... lightning_cases.py FOLDER resumed     two ranks that go on from the checkpoints of the first

What each case found is written to FOLDER, a file per process.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.tuner import Tuner
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset, WeightedRandomSampler
from training_cases import NumberedStream, ScriptedController, ScriptedPlanner

from cannikin.integrations.lightning import CannikinStrategy, setup
from cannikin.runtime.passes import epoch_order

NUM_SAMPLES, TOTAL, PINNED = 500, 64, (48, 16)
CHANGING = ((40, 24), (20, 44), (50, 14))  # a plan per window
NUM_BATCHES = 8  # of an epoch; the last one has 52 samples
QUIET = dict.fromkeys(("enable_progress_bar", "logger", "enable_checkpointing", "enable_model_summary"), False)

Found = dict[str, Any]


def samples(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num_samples, 12, generator=generator)
    labels = (features[:, :3] + torch.randn(num_samples, 3, generator=generator)).argmax(1)
    return TensorDataset(features, labels)


class SameOrder(Sampler[int]):
    """The order of samples that the ranks train in, for one process."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(epoch_order(NUM_SAMPLES, seed=0, epoch=self.epoch, shuffle=True)[:].tolist())


def loader_for(*, alone: bool) -> DataLoader[Any]:
    """Whole batches in the ranks' order, or what a user has for one rank of DDP."""
    if alone:
        return DataLoader(samples(), TOTAL, sampler=SameOrder())
    return DataLoader(samples(), TOTAL // 2, shuffle=True)


def network(*, batch_norm: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(16) if batch_norm else torch.nn.Identity()
    return torch.nn.Sequential(torch.nn.Linear(12, 16), norm, torch.nn.Tanh(), torch.nn.Linear(16, 3))


def weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


class Net(L.LightningModule):
    """A small net that notes its batches, its logged losses, its learning rates and what a validation saw."""

    def __init__(self, *, batch_norm: bool = False, schedule: bool = False, lr: float = 0.2) -> None:
        super().__init__()
        self.net = network(batch_norm=batch_norm)
        self.schedule, self.lr = schedule, lr
        self.told: Found = {"sizes": [], "losses": [], "epoch_losses": [], "rates": [], "validated": []}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        features, labels = batch
        self.told["sizes"].append(len(labels))
        loss = cross_entropy(self.net(features), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        features, labels = batch
        self.log("validated", cross_entropy(self.net(features), labels), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        buffers = [each.double().flatten() for each in self.net.buffers()]
        self.told["validated"].append((self.global_step, torch.cat(buffers) if buffers else torch.zeros(0)))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.told["losses"].append(float(self.trainer.callback_metrics["loss_step"]))
        self.told["rates"].append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_start(self) -> None:
        if "loss_epoch" in self.trainer.callback_metrics:
            self.told["epoch_losses"].append(float(self.trainer.callback_metrics["loss_epoch"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if not self.schedule:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Telling(Net):
    """Logs its loss outside of its training step, too."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.last = super().training_step(batch, index)
        return self.last

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("before", self.last, on_step=True, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        super().on_train_batch_end(outputs, batch, index)
        self.log("after", 2 * self.last, on_step=True, on_epoch=True, sync_dist=True)
        self.told.setdefault("befores", []).append(float(self.trainer.callback_metrics["before"]))
        self.told.setdefault("afters", []).append(float(self.trainer.callback_metrics["after_step"]))

    def on_train_epoch_end(self) -> None:
        self.log("mean of ranks", 1.0 + 2 * self.global_rank, sync_dist=True)
        self.told.setdefault("means", []).append(float(self.trainer.callback_metrics["mean of ranks"]))


class Unlike(Net):
    """A net on ranks of speed 1 and 1/4, which logs by the epoch: else the faster one waits in forward."""

    sample_s = (1e-3, 4e-3)

    def __init__(self) -> None:
        super().__init__()
        self.net.register_forward_pre_hook(self._wait)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        features, labels = batch
        self.told["sizes"].append(len(labels))
        loss = cross_entropy(self.net(features), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None: ...

    def _wait(self, net: torch.nn.Module, inputs: Any) -> None:
        if self.training and self.trainer.world_size > 1:
            time.sleep(self.sample_s[self.global_rank] * len(inputs[0]))


def fit(
    net: L.LightningModule,
    loader: Any = None,
    *,
    alone: bool = False,
    strategy: Found | str | None = None,
    saved: Path | None = None,
    **settings: Any,
) -> Found:
    """Train, in one process or on two ranks, and tell what came of it."""
    settings = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, **QUIET, **settings}
    if not alone:
        strategy = {"local_batches": PINNED} if strategy is None else strategy
        strategy = CannikinStrategy(**strategy) if isinstance(strategy, dict) else strategy
        settings |= {"devices": 2, "strategy": strategy}
    trainer = L.Trainer(**settings)
    loader = loader_for(alone=alone) if loader is None else loader
    trainer.fit(net, loader, DataLoader(samples(40), 8), ckpt_path=saved)
    net.on_train_epoch_start()  # where the last epoch's loss is noted
    found = {**getattr(net, "told", {}), "weights": weights(net), "steps": trainer.global_step}
    if not alone:
        engine = trainer.strategy.engine
        found |= {"plan": engine.plan.local_batches, "noise_scale": engine.noise_scale, "progress": engine.progress}
        found["elapsed"] = engine.elapsed("step")
    return found


class SaveAt(L.Callback):
    """Saves a checkpoint after so many batches."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch, self.num_batches = path, batch, 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.num_batches += 1
        if self.num_batches == self.batch:
            trainer.save_checkpoint(self.path)


# What one process and two ranks do alike.

NO_GROWTH = {"policy": ScriptedPlanner(CHANGING), "max_batch_size": 96}  # a total that might grow, and does not

ALIKE: dict[str, Callable[..., Found]] = {
    "pinned": lambda **how: fit(Net(), **how),
    "adaptive": lambda **how: fit(Net(), **how, strategy={"policy": ScriptedPlanner(CHANGING)}, max_epochs=6),
    "learned": lambda **how: fit(Unlike(), **how, strategy={"local_bounds": (2, 60)}, max_epochs=8),
    "by_name": lambda **how: fit(Unlike(), **how, strategy="cannikin"),
    "accumulated": lambda **how: fit(Net(), **how, accumulate_grad_batches=3),
    "clipped": lambda **how: fit(Net(), **how, gradient_clip_val=0.1),
    "scheduled": lambda **how: fit(Net(schedule=True), **how),
    "bf16": lambda **how: fit(Net(lr=0.02), **how, precision="bf16-mixed"),
    "validated": lambda **how: fit(Net(), **how, val_check_interval=0.5),
    "seldom": lambda **how: fit(Seldom(), **how, strategy=NO_GROWTH, max_epochs=3),
    "seldom_accumulated": lambda **how: fit(Seldom(), **how, strategy=NO_GROWTH, accumulate_grad_batches=2),
    "telling": lambda **how: fit(Telling(), **how),
    "max_steps": lambda **how: fit(Net(), **how, max_steps=11, max_epochs=-1),
    "limited": lambda **how: fit(Net(), **how, limit_train_batches=5),
    "overfit": lambda **how: fit(Net(), **how, overfit_batches=2),
    "fabric": lambda **how: train_by_fabric(**how),
    "fabric_accumulated": lambda **how: train_by_fabric(**how, accumulate=3),
    "fabric_several": lambda **how: train_by_fabric(**how, several=True),
}


def train_by_fabric(
    *,
    alone: bool = False,
    accumulate: int = 1,
    several: bool = False,
    save: Path | None = None,
    saved: Path | None = None,
) -> Found:
    """Train two epochs by a loop of one's own; save after the 11th batch."""
    fabric = L.Fabric(accelerator="cpu", devices=1 if alone else 2, strategy="auto" if alone else "ddp")
    fabric.launch()
    net = network()
    parts = [net[0], net[1:]] if several else [net]
    optimizer: Any = [torch.optim.SGD(part.parameters(), lr=0.2, momentum=0.9) for part in parts]
    loader: Any = loader_for(alone=alone)
    if alone:
        model, *optimizer = fabric.setup(net, *optimizer)
        loader = fabric.setup_dataloaders(loader)
    else:
        given = optimizer if several else optimizer[0]
        model, optimizer, loader = setup(fabric, net, given, loader, local_batches=PINNED)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    state = {"model": model, "optimizer": optimizer, "loader": loader, "num_batches": 0}
    if saved is not None:
        fabric.load(saved, state)
    sizes = []
    while state["num_batches"] < 2 * NUM_BATCHES:
        if alone:
            loader.sampler.set_epoch(state["num_batches"] // NUM_BATCHES)
        for features, labels in loader:
            state["num_batches"] += 1
            sizes.append(len(labels))
            is_over = state["num_batches"] % accumulate == 0 or state["num_batches"] % NUM_BATCHES == 0
            with fabric.no_backward_sync(model, enabled=not is_over):
                fabric.backward(cross_entropy(model(features), labels) / accumulate)
            if is_over:
                for each in optimizers:
                    each.step()
                    each.zero_grad()
            if save is not None and state["num_batches"] == 11:
                fabric.save(save, state)
    return {"weights": weights(net), "sizes": sizes}


# What only ranks do.


class Kept(Logger):
    """A logger that keeps what it is told."""

    name, version = "kept", 0

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class _KeepsTotals:
    """Part of a progress bar that keeps its totals."""

    totals: tuple[Any, ...] = ()

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.is_enabled:
            self.totals = (*self.totals, self.train_progress_bar.total)


class Bar(_KeepsTotals, TQDMProgressBar): ...


class RichBar(_KeepsTotals, RichProgressBar): ...


def growing(script: Any = ((40, 24), (60, 36))) -> Found:
    return {"policy": ScriptedPlanner(script), "max_batch_size": 96}


def shown(bar: Any, **how: Any) -> Found:
    """What a progress bar and a logger are told."""
    logger = Kept()
    found = fit(Net(), **how, enable_progress_bar=True, callbacks=[bar], logger=logger, log_every_n_steps=1)
    return {**found, "totals": bar.totals, "rows": logger.rows}


class SlowNet(Net):
    """Steps so small that the gradient, and so its noise scale, stays where it is; the rate tells how many."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1 / (1 + steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Seldom(SlowNet):
    """One whose schedule takes a step at every third batch of an epoch."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        return {**found, "lr_scheduler": {**found["lr_scheduler"], "frequency": 3}}


class GrowsAfterAll:
    """Learns as `policy="cannikin"` does, and grows the total by script, whatever this machine's times are."""

    controller: ScriptedController | None = None

    def decide(self, window: Any, job: Any, step: int) -> Any:
        self.controller = self.controller or ScriptedController(job, [(40, 24), *[(60, 36)] * 1000])
        return self.controller.decide(window, job, step)

    def state_dict(self) -> Found:
        return {}

    def load_state_dict(self, state: Found) -> None: ...


def with_noise(num_batches: int) -> Found:
    return fit(SlowNet(), accumulate_grad_batches=num_batches, max_epochs=10, limit_val_batches=0)


class Sum(L.LightningModule):
    """Trains on streams of numbers, and notes which."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.told: Found = {"seen": [], "sizes": []}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        features, target, numbers = batch
        self.told["seen"] += numbers.tolist()
        self.told["sizes"].append(len(numbers))
        return (self.net(features) - target).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None: ...


class TurningStream(NumberedStream):
    """One whose every epoch begins at another sample."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return (self.data[(index + 30 * self.epoch) % len(self.data)] for index in range(len(self.data)))


def stream(kind: type[NumberedStream] = NumberedStream, **how: Any) -> Found:
    how = {"max_epochs": 1, **how}
    return fit(Sum(), DataLoader(kind(100), 16), strategy={"local_batches": (24, 8)}, **how)


def weighted(**how: Any) -> Found:
    generator = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler([1.0] * 250 + [0.0] * 250, 200, generator=generator)
    return fit(Net(), DataLoader(samples(), 32, sampler=sampler), use_distributed_sampler=False, **how)


# Trainings of three epochs that are resumed after the first one.
AFTER_EPOCHS: dict[str, Callable[..., Found]] = {
    "growing": lambda **how: fit(Net(), strategy=growing([(60, 36)]), max_epochs=3, **how),
    "growing_without_validation": lambda **how: fit(
        Net(), strategy=growing([(60, 36)]), max_epochs=3, limit_val_batches=0, **how
    ),
    "growing_limited": lambda **how: fit(
        Net(), strategy=growing([(60, 36)]), max_epochs=3, limit_train_batches=3, limit_val_batches=0, **how
    ),
    "stream": lambda **how: stream(TurningStream, max_epochs=3, **how),
    "sampler": lambda **how: weighted(max_epochs=3, **how),
    # At the last batch: 8 of an epoch whose total might grow and does not, 4 of the stream's.
    "last_of_growing": lambda **how: fit(Net(), strategy=growing([(40, 24)]), max_epochs=3, **how),
    "last_of_stream": lambda **how: stream(TurningStream, max_epochs=3, **how),
}
EVERY = {"last_of_growing": 8, "last_of_stream": 4}


def kept_after_epochs(name: str) -> Found:
    """One of these, which keeps a checkpoint of each epoch, where Lightning makes them unless it is told."""
    checkpoints = ModelCheckpoint(FOLDER / name, "{epoch}", save_top_k=-1, every_n_train_steps=EVERY.get(name))
    return AFTER_EPOCHS[name](callbacks=[checkpoints], enable_checkpointing=True)


def resumed_after_epochs(name: str) -> Found:
    """The same, from the checkpoint of its first epoch."""
    return AFTER_EPOCHS[name](saved=FOLDER / name / "epoch=0.ckpt")


class Events:
    """An observer that keeps the kinds of events, in order."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def write(self, event: Any) -> None:
        self.kinds.append(getattr(event, "kind", ""))


def searched() -> Found:
    """A training that looks for a learning rate first, and does not take it."""
    events, finder = Events(), LearningRateFinder(num_training_steps=12, update_attr=False)
    how = {"strategy": {"local_batches": PINNED, "observers": [events]}, "default_root_dir": FOLDER}
    found = fit(Net(), **how, callbacks=[finder])
    return {**found, "events": events.kinds}


def searched_by_tuner() -> Found:
    net = Net()
    how = {"devices": 2, "accelerator": "cpu", "strategy": CannikinStrategy(local_batches=PINNED), "max_epochs": 4}
    trainer = L.Trainer(**how, **QUIET, default_root_dir=FOLDER)
    finder = Tuner(trainer).lr_find(net, loader_for(alone=False), num_training=30)
    return {"suggested": finder.suggestion(), "rate": net.lr}


RANKS: dict[str, Callable[[], Found]] = {
    "batch_norm": lambda: fit(Net(batch_norm=True), val_check_interval=0.5),
    "batch_norm_growing": lambda: fit(Net(batch_norm=True), strategy=growing(), val_check_interval=3),
    "saved": lambda: fit(Net(), max_epochs=3, callbacks=[SaveAt(FOLDER / "pinned.ckpt", 11)]),
    "saved_scheduled": lambda: fit(Net(schedule=True), max_epochs=3, callbacks=[SaveAt(FOLDER / "scheduled.ckpt", 11)]),
    "saved_ahead": lambda: fit(
        Net(), strategy=growing([(60, 36)]), max_epochs=3, callbacks=[SaveAt(FOLDER / "ahead.ckpt", 8)]
    ),
    "saved_between_groups": lambda: fit(
        Net(), accumulate_grad_batches=3, callbacks=[SaveAt(FOLDER / "between.ckpt", 11)]
    ),
    "saved_in_groups": lambda: fit(
        Net(), accumulate_grad_batches=3, callbacks=[SaveAt(FOLDER / "in.ckpt", 12), SaveAt(FOLDER / "in.ckpt", 13)]
    ),
    "saved_in_groups_by_fabric": lambda: train_by_fabric(save=FOLDER / "in.ckpt", accumulate=3),
    "saved_by_fabric": lambda: train_by_fabric(save=FOLDER / "fabric.ckpt"),
    **{f"saved_{name}": partial(kept_after_epochs, name) for name in AFTER_EPOCHS},
    "shown": lambda: shown(Bar()),
    "shown_growing": lambda: shown(Bar(), strategy=growing(), max_epochs=3),
    "shown_by_rich": lambda: shown(RichBar(), strategy=growing(), max_epochs=3),
    "noise": lambda: with_noise(1),
    "noise_accumulated": lambda: with_noise(3),
    "growing_accumulated": lambda: fit(
        SlowNet(),
        strategy={"policy": GrowsAfterAll(), "max_batch_size": 96},
        accumulate_grad_batches=2,
        max_epochs=15,
        limit_val_batches=0,
        callbacks=[LearningRateMonitor()],
        logger=Kept(),
    ),
    "seldom_growing": lambda: fit(Seldom(), strategy=growing(), max_epochs=4),
    "searched": searched,
    "searched_by_tuner": searched_by_tuner,
    "stream": stream,
    "weighted": weighted,
    "other_total": lambda: fit(Net(), DataLoader(samples(), 7, shuffle=True), max_steps=2),
}

RESUMED: dict[str, Callable[[], Found]] = {
    "saved": lambda: fit(Net(), max_epochs=3, saved=FOLDER / "pinned.ckpt"),
    "saved_scheduled": lambda: fit(Net(schedule=True), max_epochs=3, saved=FOLDER / "scheduled.ckpt"),
    "saved_ahead": lambda: fit(Net(), strategy=growing([(60, 36)]), max_epochs=3, saved=FOLDER / "ahead.ckpt"),
    "saved_by_fabric": lambda: train_by_fabric(saved=FOLDER / "fabric.ckpt"),
    **{f"saved_{name}": partial(resumed_after_epochs, name) for name in AFTER_EPOCHS},
}


# What is refused.


class Manual(Net):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SecondOrder(Net):
    """Has an optimizer that runs the training step several times per batch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def set_up_before() -> Found:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = network()
    loader = fabric.setup_dataloaders(loader_for(alone=False))
    setup(fabric, net, torch.optim.SGD(net.parameters(), lr=0.2), loader)
    return {}


class ByLength(BatchSampler):
    """Cuts batches its own way."""


def by_length() -> DataLoader[Any]:
    return DataLoader(samples(), batch_sampler=ByLength(RandomSampler(samples()), 32, drop_last=False))


class OtherBatches(Net):
    """Gives batches of another size each time that it is asked for them."""

    batch_size = 8

    def train_dataloader(self) -> DataLoader[Any]:
        self.batch_size *= 2
        return DataLoader(samples(), self.batch_size)


def changed() -> Found:
    finder = LearningRateFinder(num_training_steps=5, update_attr=False)
    trainer = L.Trainer(
        devices=2, accelerator="cpu", strategy=CannikinStrategy(), callbacks=[finder], default_root_dir=FOLDER, **QUIET
    )
    trainer.fit(OtherBatches())
    return {}


REFUSED: dict[str, Callable[[], Any]] = {
    "manual": lambda: fit(Manual()),
    "second_order": lambda: fit(SecondOrder()),
    "set_up_before": set_up_before,
    "reloaded": lambda: fit(Net(), reload_dataloaders_every_n_epochs=1),
    "several": lambda: fit(Net(), [loader_for(alone=False), loader_for(alone=False)]),
    "changed": changed,
    "batch_sampler": lambda: fit(Net(), by_length(), use_distributed_sampler=False),
    "wrapped_sampler": lambda: fit(Net(), DataLoader(samples(), 32, sampler=WeightedRandomSampler([1.0] * 500, 500))),
    "no_loader": lambda: fit(Net(), [samples()[:32]]),
    "whole_batches": lambda: fit(Net(), DataLoader(samples(), batch_size=None), strategy={}),
    "estimated": lambda: fit(Net(schedule=True), strategy=growing()),
    "comm_hook": lambda: CannikinStrategy(ddp_comm_hook=print),
    "not_whole": lambda: fit(Net(), strategy={"local_batches": [48.0, 16.0]}),
    "misspelt": lambda: CannikinStrategy(max_batchsize=512),
}


def told_by(case: Callable[..., Any], **how: Any) -> Found:
    """What a case returned, or the error that ended it, with the warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = case(**how)
        except Exception as error:
            found = {"error": str(error), "trace": traceback.format_exc()}
    return {**found, "warnings": [str(each.message) for each in caught if each.category is RuntimeWarning]}


def main(folder: Path, role: str) -> None:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    if role == "resumed":
        told = {name: told_by(case) for name, case in RESUMED.items()}
    else:
        if "LOCAL_RANK" not in os.environ:  # before Lightning starts the other rank
            torch.save({name: told_by(case, alone=True) for name, case in ALIKE.items()}, folder / "alone.pt")
        told = {name: told_by(case) for name, case in {**ALIKE, **RANKS, **REFUSED}.items()}
        told |= {f"resumed_{name}": told_by(case) for name, case in RESUMED.items()}
    torch.save(told, folder / f"{role}{os.environ['LOCAL_RANK']}.pt")


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    main(FOLDER, sys.argv[2])
