"""Trainings under Accelerate, each beside one process that trains on the whole batches.

By a launch of users' own, which writes what was found to FOLDER/told.pt:

    torchrun --standalone --nproc-per-node=2 accelerate_cases.py FOLDER CASE...
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training_cases import ScriptedPlanner

from cannikin.core.planner import Noise
from cannikin.integrations.accelerate import prepare
from cannikin.runtime.passes import epoch_order

LOCAL, TOTAL = 32, 64
UNEQUAL = {"local_batches": [48, 16]}


def samples(num_samples: int = 500) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 8, generator=generator)
    noise = torch.randn(num_samples, 3, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3] + noise).argmax(1))


def partly_labelled() -> TensorDataset:
    """Samples of which some have no label, so that ranks have unequal shares of those that count."""
    inputs, labels = samples().tensors
    return TensorDataset(inputs, labels.where(torch.arange(len(labels)) % 7 < 4, -100))


def count_labels(batch: Any) -> float:
    return float((batch[1] != -100).sum())


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """One that counts the steps of one process of as many, as scripts for Accelerate do: two per step of two ranks."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)


def fresh(**keywords: Any) -> Accelerator:
    """An accelerator that knows nothing of the case before."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    return Accelerator(cpu=True, **keywords)


class Run:
    """What a training under Accelerate did, step by step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.totals: list[int] = []
        self.factors: list[float] = []
        self.locals: set[int] = set()
        self.accuracy = math.nan
        self.num_updates = 0
        self.net: Any = None
        self.engine: Any = None


def train(
    accelerator: Accelerator,
    *,
    num_epochs: int = 2,
    clip: float | None = None,
    evaluate_at: int | None = None,
    max_steps: int | None = None,
    save_at: tuple[int, Path] | None = None,
    load: Path | None = None,
    slow_rank: float = 0.0,
    batch_s: float = 0.0,
    data: Any = None,
    shuffle: bool | None = True,
    scheduled: bool = True,
    **options: Any,
) -> Run:
    """Train as scripts for Accelerate do; only `prepare` is ours."""
    run, net = Run(), network()
    if batch_s:
        net.register_forward_pre_hook(lambda *_: time.sleep(batch_s))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batch_size = TOTAL if accelerator.split_batches else LOCAL
    loader: Any = DataLoader(samples() if data is None else data, batch_size=batch_size, shuffle=shuffle)
    held_out = DataLoader(samples(301), batch_size=50)
    model, optimizer, loader, held_out, scheduler = prepare(
        accelerator, net, optimizer, loader, held_out, schedule(optimizer) if scheduled else None, **options
    )
    step = 0
    if load is not None:
        accelerator.load_state(load)
        step = 11
    for _ in range(loader.epoch, num_epochs):
        model.train()
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                if slow_rank and accelerator.process_index == 1:
                    time.sleep(slow_rank * len(inputs))
                run.locals.add(loader.engine.local_batch)
                run.totals.append(loader.engine.total_batch)
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                run.factors.append(loader.engine.lr_scale)
                if accelerator.sync_gradients:
                    run.num_updates += 1
                    if clip is not None:
                        accelerator.clip_grad_norm_(model.parameters(), clip)
                run.rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                if scheduled:
                    scheduler.step()
                optimizer.zero_grad()
            run.losses.append(float(loader.engine.weighted_mean(loss)))
            step += 1
            if step == evaluate_at:
                run.accuracy = evaluate(accelerator, model, held_out)
            if save_at is not None and step == save_at[0]:
                accelerator.save_state(save_at[1])
            if step == max_steps:
                break
        if step == max_steps:
            break
    run.net, run.engine = net, loader.engine
    return run


def evaluate(accelerator: Accelerator, model: Any, held_out: Any) -> float:
    """The accuracy over all ranks, by Accelerate's own means."""
    model.eval()
    right: list[torch.Tensor] = []
    with torch.no_grad():
        for inputs, labels in held_out:
            right.append(accelerator.gather_for_metrics((model(inputs).argmax(1) == labels).float()))
    model.train()
    return float(torch.cat(right).mean())


def one_process(
    run: Run, *, accumulate: int = 1, clip: float | None = None, evaluate_at: int | None = None, bf16: bool = False,
    shuffle: bool = True, seed: int = 0, num_epochs: int = 2, scheduled: bool = True, data: Any = None,
) -> dict[str, float]:  # fmt: skip
    """Train one process on the whole batches of that run in the same order; the largest differences from it."""
    data, net = samples() if data is None else data, network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = schedule(optimizer)
    losses, rates, accuracy, step, num_updates = [], [], math.nan, 0, 0
    for epoch in range(num_epochs):
        order, position, since = epoch_order(len(data), seed=seed, epoch=epoch, shuffle=shuffle)[:].tolist(), 0, 0
        while position < len(order) and step < len(run.losses):
            inputs, labels = data[order[position : position + run.totals[step]]]
            position += run.totals[step]
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                outputs = net(inputs)
            loss = cross_entropy(outputs.float(), labels)
            (loss / accumulate).backward()
            losses.append(float(loss.detach()))
            rates.append(optimizer.param_groups[0]["lr"])
            since += 1
            if since % accumulate == 0 or position >= len(order):
                since, num_updates = 0, num_updates + 1
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                own = optimizer.param_groups[0]["lr"]
                optimizer.param_groups[0]["lr"] = own * run.factors[step]
                optimizer.step()
                optimizer.param_groups[0]["lr"] = own
                optimizer.zero_grad()
                if scheduled:
                    scheduler.step()
                    scheduler.step()
            step += 1
            if step == evaluate_at:
                held_out, wanted = samples(301).tensors
                accuracy = float((net(held_out).argmax(1) == wanted).float().mean())
    pairs = zip(net.parameters(), run.net.parameters(), strict=True)
    found = {
        "weights": max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs),
        "loss": max(abs(mine - theirs) for mine, theirs in zip(losses, run.losses, strict=True)),
        "rate": max(abs(mine - theirs) for mine, theirs in zip(rates, run.rates, strict=True)),
        "updates": num_updates - run.num_updates,
    }
    if evaluate_at is not None:
        found["accuracy"] = abs(accuracy - run.accuracy)
    return found


# Cases: each returns what rank 0 found. `folder` is for checkpoints.


def parity(folder: Path) -> dict[str, Any]:
    """Pinned unequal splits, with all that a loop may do."""
    accumulating = {"accumulate": 3}
    each_batch = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    return {
        "plain": one_process(train(fresh(), **UNEQUAL)),
        "clipped": one_process(train(fresh(), clip=0.05, **UNEQUAL), clip=0.05),
        "short last group": one_process(train(fresh(gradient_accumulation_steps=3), **UNEQUAL), **accumulating),
        "each batch in sync": one_process(
            train(fresh(gradient_accumulation_plugin=each_batch), **UNEQUAL), **accumulating
        ),
        "bf16": one_process(train(fresh(mixed_precision="bf16"), **UNEQUAL), bf16=True),
        "evaluated": one_process(train(fresh(), evaluate_at=3, **UNEQUAL), evaluate_at=3),
        "11 steps": one_process(train(fresh(), max_steps=11, **UNEQUAL)),
        "split batches": one_process(
            train(fresh(dataloader_config=DataLoaderConfiguration(split_batches=True)), scheduled=False, **UNEQUAL),
            scheduled=False,
        ),
        "seeded": one_process(train(fresh(dataloader_config=DataLoaderConfiguration(data_seed=7)), **UNEQUAL), seed=7),
        "in order": one_process(train(fresh(), shuffle=False, **UNEQUAL), shuffle=False),
        "counted labels": one_process(
            train(fresh(), data=partly_labelled(), item_count=count_labels, **UNEQUAL), data=partly_labelled()
        ),
        "stream, short last group": one_process(
            train(fresh(gradient_accumulation_steps=3), data=Stream(), shuffle=None, **UNEQUAL),
            shuffle=False,
            **accumulating,
        ),
    }


class Stream(IterableDataset):
    """The samples in order, without a length."""

    def __iter__(self) -> Any:
        return iter(samples())


def adaptive(folder: Path) -> dict[str, Any]:
    """A split that changes, within bounds, and a total that grows."""
    accelerator = fresh(gradient_accumulation_steps=2)
    bounded = train(accelerator, num_epochs=8, slow_rank=1e-3, local_bounds=[(8, 60), (4, 40)])
    # Nearly all of a batch's time is the same for every size, however busy the machine: growth pays.
    growth = {"num_epochs": 16, "max_batch_size": 256, "batch_s": 0.01}
    growing = train(fresh(), scheduled=False, **growth)
    piled = train(fresh(gradient_accumulation_steps=2), **growth)
    return {
        "bounded": one_process(bounded, accumulate=2, num_epochs=8),
        "locals": bounded.locals,
        "growing": one_process(growing, num_epochs=16, scheduled=False),
        "totals": growing.totals,
        "piled totals": piled.totals,
        "piled rates": piled.rates,
        "noise": {name: run.engine.noise_scale for name, run in (("grow", growing), ("piled", piled))},
        "progress": {name: run.engine.progress for name, run in (("grow", growing), ("piled", piled))},
        "bounded progress": bounded.engine.progress,
        "bounded noise": bounded.engine.noise_scale,
    }


class Noisy(ScriptedPlanner):
    """Plans by script, with so much noise that a step is worth as much as the samples in it."""

    noise = Noise(signal_sqnorm=1.0, noise_trace=1e9)


def called_seldom(folder: Path) -> dict[str, Any]:
    """A prepared scheduler that the loop steps after every epoch, or after every third batch of an epoch."""

    def rates(every: int | None, *, save: str = "", load: str = "", **given: Any) -> dict[str, Any]:
        accelerator, net = fresh(), network()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)  # of which a call is two
        loader: Any = DataLoader(samples(512), batch_size=LOCAL)
        model, optimizer, loader, scheduler = prepare(accelerator, net, optimizer, loader, scheduler, **given)
        found = []
        if load:
            accelerator.load_state(folder / load)
        for _ in range(loader.epoch, 6):
            for step, (inputs, labels) in enumerate(loader):
                accelerator.backward(0 * cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
                if every is not None and step % every == every - 1:
                    scheduler.step()
                    found.append(optimizer.param_groups[0]["lr"])
                if save and loader.epoch == 1 and step == 1:
                    accelerator.save_state(folder / save)
            if every is None:
                scheduler.step()
                found.append(optimizer.param_groups[0]["lr"])
        return {"rates": found, "updates": loader.engine.num_updates, "steps": loader.engine.elapsed("step")}

    might_grow = {"policy": Noisy([(40, 24)]), "max_batch_size": 128}
    found = {}
    for name, every in (("epoch", None), ("third batch", 3)):
        grows = {"policy": Noisy([(40, 24), *[(80, 48)] * 100]), "max_batch_size": 128}
        found[name] = {
            "fixed": rates(every, **UNEQUAL),
            "might grow": rates(every, **might_grow),
            "grows": rates(every, **grows, save=name),
            "resumed": rates(every, **grows, load=name),
        }
    return found


def saving(folder: Path) -> dict[str, Any]:
    """Save in the middle of the second epoch and train on; `resuming` must end with the same weights."""
    plain = train(fresh(), save_at=(11, folder / "plain"), **UNEQUAL)
    piled = train(fresh(gradient_accumulation_steps=3), save_at=(11, folder / "piled"), **UNEQUAL)
    torch.save([plain.net.state_dict(), piled.net.state_dict()], folder / "ends.pt")
    return {"losses": [plain.losses[11:], piled.losses[11:]], "rates": [plain.rates[11:], piled.rates[11:]]}


def saving_in_a_group(folder: Path) -> list[str]:
    """What is said of a state that is saved inside of a group of accumulated batches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(fresh(gradient_accumulation_steps=3), save_at=(10, folder / "in a group"), **UNEQUAL)
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


def resuming(folder: Path) -> dict[str, Any]:
    """Load what `saving` saved, in another process, and train to the end."""
    runs = [
        train(fresh(), load=folder / "plain", **UNEQUAL),
        train(fresh(gradient_accumulation_steps=3), load=folder / "piled", **UNEQUAL),
    ]
    ends = torch.load(folder / "ends.pt")
    gaps = [
        max(float((state[name] - run.net.state_dict()[name]).abs().max()) for name in state)
        for state, run in zip(ends, runs, strict=True)
    ]
    return {"gaps": gaps, "losses": [run.losses for run in runs], "rates": [run.rates for run in runs]}


def refusals(folder: Path) -> dict[str, str]:
    """What is refused, by a sentence."""
    loader = DataLoader(samples(), batch_size=LOCAL)

    def said(call: Callable[[], Any]) -> str:
        try:
            call()
        except ValueError as error:
            return str(error)
        return "nothing"

    def skip() -> None:
        net = network()
        accelerator = fresh()
        *_, prepared = prepare(accelerator, net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        next(iter(accelerator.skip_first_batches(prepared, 2)))

    def twice() -> None:
        net, accelerator = network(), fresh()
        dealt = accelerator.prepare(loader)
        prepare(accelerator, net, torch.optim.SGD(net.parameters(), lr=0.1), dealt)

    dispatching = DataLoaderConfiguration(dispatch_batches=True)
    return {
        "dispatch": said(lambda: prepare(fresh(dataloader_config=dispatching), network(), loader)),
        "skip": said(skip),
        "prepared before": said(twice),
        "another total": said(lambda: train(fresh(), local_batches=[24, 8])),
        "another total, split": said(
            lambda: train(fresh(dataloader_config=DataLoaderConfiguration(split_batches=True)), local_batches=[24, 8])
        ),
        "not whole": said(lambda: train(fresh(), local_batches=[48.0, 16.0])),
        "no model": said(lambda: prepare(fresh(), loader)),
    }


def run(rank: int, world_size: int, folder: Path, *names: str) -> dict[str, Any]:
    """Run the cases that are asked for, as one of several ranks; what each found here."""
    warnings.simplefilter("error", RuntimeWarning)
    # What torchrun says to Accelerate.
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    return {name: globals()[name](folder) for name in names}


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]), *sys.argv[2:])
    if os.environ["RANK"] == "0":
        torch.save(told, Path(sys.argv[1]) / "told.pt")
    torch.distributed.destroy_process_group()
