"""What the adapters of frameworks add to a step on an even split: `python -m benchmarks adapters`.

Two ranks on gloo, one thread each. A bare DDP loop, Lightning, Accelerate and Transformers' Trainer each train the same
network with their own DDP, with it once more as the control, and with ours under `policy="even"`. Each of these is a
whole training of its own, whose first steps are not counted; a round has one of each, in random order. Reported is the
median step, and its ratio to the framework's own DDP in the same round: median and middle half over rounds. Processor
time per step is reported too: other work on the machine disturbs it less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = 8
WARM_UP = 70  # steps; gradients' norms are taken on each of the first 60, and then on one in four
STEPS = 60
WIDTH, LOCAL_BATCH = 1024, 120  # about 50 ms per step
PLAIN, CONTROL, OURS = "its own DDP", "its own DDP again", "ours"


class Clock:
    """Wall and processor time at the end of every step."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def mark(self, *_: Any, **__: Any) -> None:
        """Take note of the end of a step; a framework may call this with arguments of its own."""
        self._marks.append((time.perf_counter(), time.process_time()))

    def median_ms(self) -> list[float]:
        """Return the median step in milliseconds of wall and of processor time, without the first steps."""
        medians: list[float] = (np.median(np.diff(self._marks[WARM_UP:], axis=0), axis=0) * 1e3).tolist()
        return medians


def _parts() -> tuple[Any, Any, Any]:
    """Return a network, its optimizer and a loader of one rank's batches."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from benchmarks.overhead import network

    torch.manual_seed(0)
    num_samples = 2 * LOCAL_BATCH * (WARM_UP + STEPS + 1)
    data = TensorDataset(torch.randn(num_samples, 256), torch.randint(0, 10, (num_samples,)))
    net = network(WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    return net, optimizer, DataLoader(data, batch_size=LOCAL_BATCH, shuffle=True)


def _loop(kind: str, clock: Clock) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data.distributed import DistributedSampler

    import cannikin

    net, optimizer, loader = _parts()
    loader = torch.utils.data.DataLoader(loader.dataset, LOCAL_BATCH, sampler=DistributedSampler(loader.dataset))
    model = torch.nn.parallel.DistributedDataParallel(net)
    if kind == OURS:
        engine = cannikin.attach(model, optimizer, policy="even")
        loader = cannikin.HeteroDataLoader.like(loader, model=engine)
    for inputs, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        clock.mark()


def _lightning(kind: str, clock: Clock) -> None:
    import lightning
    from torch.nn.functional import cross_entropy

    from cannikin.integrations.lightning import CannikinStrategy

    net, optimizer, loader = _parts()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Any:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            clock.mark()

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CannikinStrategy(policy="even") if kind == OURS else "ddp",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)


def _accelerate(kind: str, clock: Clock) -> None:
    from accelerate import Accelerator
    from torch.nn.functional import cross_entropy

    from cannikin.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    ours = partial(prepare, accelerator, policy="even")
    model, optimizer, loader = (ours if kind == OURS else accelerator.prepare)(*_parts())
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(inputs), labels))
        optimizer.step()
        clock.mark()


def _transformers(kind: str, clock: Clock) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from cannikin.integrations.transformers import HeteroTrainer

    net, optimizer, loader = _parts()

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: Any, labels: Any) -> Any:
            outputs = self.net(inputs)
            return {"loss": cross_entropy(outputs, labels), "logits": outputs}

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.mark()

    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"inputs": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=LOCAL_BATCH,
            num_train_epochs=1,
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            ddp_find_unused_parameters=False,
        )
        trainer, options = (HeteroTrainer, {"policy": "even"}) if kind == OURS else (Trainer, {})
        trainer(
            Classifier(),
            args,
            train_dataset=loader.dataset,
            data_collator=collate,
            optimizers=(optimizer, None),
            callbacks=[Marks()],
            **options,
        ).train()


FRAMEWORKS: dict[str, Callable[[str, Clock], None]] = {
    "bare loop": _loop,
    "Lightning": _lightning,
    "Accelerate": _accelerate,
    "Transformers": _transformers,
}


def train(rounds: int, names: list[str], out: Path) -> None:
    """Train as one of two ranks; write down every round's medians on rank 0."""
    import logging

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # frameworks have advice for many a setting
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rng = np.random.default_rng(0)  # the same order on both ranks
    cells = [(name, kind) for name in names for kind in (PLAIN, CONTROL, OURS)]
    for number in range(rounds):
        found = {}
        for name, kind in rng.permutation(cells).tolist():
            clock = Clock()
            dist.barrier()
            FRAMEWORKS[name](kind, clock)
            found[f"{name}, {kind}"] = clock.median_ms()
        if dist.get_rank() == 0:
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            with out.open("a") as file:
                print(json.dumps(found), file=file)
    dist.barrier()
    os._exit(0)


def table(rows: list[dict[str, list[float]]], names: list[str]) -> str:
    """Return the medians over rounds as a table, and their ratios to the framework's own DDP in the same round."""
    lines = [f"{'':14} {'':18} {'step, ms':>9} {'ratio':>6}  middle half    {'processor, ms':>13} {'ratio':>6}"]
    for name in names:
        plain = np.array([row[f"{name}, {PLAIN}"] for row in rows])
        for kind in (PLAIN, CONTROL, OURS):
            times = np.array([row[f"{name}, {kind}"] for row in rows])
            wall_ms, processor_ms = np.median(times, axis=0)
            low, (wall, processor), high = np.quantile(times / plain, (0.25, 0.5, 0.75), axis=0)
            spread = f"{low[0]:.3f} to {high[0]:.3f}"
            lines.append(
                f"{name:14} {kind:18} {wall_ms:9.1f} {wall:6.3f}  {spread} {processor_ms:13.1f} {processor:6.3f}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks adapters", description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append", help="only this; all if left out")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args([] if argv is None else argv)
    names = options.framework or list(FRAMEWORKS)
    if options.out is not None:
        train(options.rounds, names, options.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        chosen = [word for name in names for word in ("--framework", name)]
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "benchmarks.adapters"]
        arguments = ["--rounds", str(options.rounds), "--out", str(out), *chosen]
        subprocess.run(
            [sys.executable, "-m", *command, *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        print(table([json.loads(line) for line in out.read_text().splitlines()], names))


if __name__ == "__main__":
    main(sys.argv[1:])
