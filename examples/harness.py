"""What the examples share, so that each of them is only its model, its data and its loop.

Flags made of the constants at the top of a script, the device of this rank, sums over ranks, and a log: one line an
epoch, a clock that runs only while we train, and a summary as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import cannikin

__all__ = ["Log", "Rows", "decay_groups", "join", "one_cycle", "settings", "start", "sum_over_ranks"]


def settings(doc: str, *, quick: dict[str, Any], **constants: Any) -> SimpleNamespace:
    """The script's constants, each of them a flag: `batch_size=256` is `--batch-size 256`.

    `quick` is what `--quick` puts in their place; a flag given on the command line beats both.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the data set")
    parser.add_argument("--quick", action="store_true", help="a reduced size that takes seconds on a CPU")
    parser.add_argument("--target", type=float, help="stop once the metric is there, and say how long it took")
    parser.add_argument("--run-dir", help="folder for cannikin's run log")
    parser.add_argument("--json", help="file for a summary of the run")
    for name, value in constants.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=argparse.SUPPRESS, help=f"default: {value}")
    given = vars(parser.parse_args())
    return SimpleNamespace(**{**constants, **(quick if given["quick"] else {}), **given})


def start(seed: int) -> torch.device:
    """This rank's device, with the process group made where the default would not do."""
    rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    torch.manual_seed(1000 * seed + rank)  # DDP gives every rank the weights of rank 0; dropout should differ
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    backend = os.environ.get("CANNIKIN_BACKEND")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        device = torch.device("cuda", local_rank % num_gpus)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 where autocast leaves float32
        if backend is None and num_local > num_gpus:
            backend = "gloo"  # NCCL refuses two ranks on one GPU
            if rank == 0:
                print(f"{num_local} ranks share {num_gpus} GPU: gloo carries the gradients", flush=True)
    if backend is not None and "RANK" in os.environ:
        dist.init_process_group(backend)
    return device  # HeteroDataParallel makes the process group where there is none yet


def join(device: torch.device) -> None:
    """Make the process group where there is none yet; alone, without torchrun, one of this process."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class Rows:
    """A dataset of row numbers: a batch is one tensor of them, and the script looks the rows up on its device.

    With the data in memory this is as cheap as loading gets: DataLoader calls `__getitems__` once a batch.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> int:
        return row

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows)

    @staticmethod
    def collate(rows: torch.Tensor) -> torch.Tensor:
        """The batch is one already."""
        return rows


def one_cycle(optimizer: torch.optim.Optimizer, model: Any, settings: SimpleNamespace, num_samples: int) -> Any:
    """A schedule of the learning rate: a straight line up for `settings.warmup` passes, then one down to (nearly) 0.

    It counts steps at B0. Driven by progress it neither stretches nor ends early when the batch grows.
    """
    steps = num_samples / settings.batch_size
    warmup, total = settings.warmup * steps, settings.epochs * steps

    def shape(step: float) -> float:
        return min((step + 1) / max(1.0, warmup), max(0.001, (total - step) / max(1.0, total - warmup)))

    return cannikin.by_progress(torch.optim.lr_scheduler.LambdaLR(optimizer, shape), model)


def decay_groups(net: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters for an optimizer: weight decay is for matrices and kernels, not for biases and norms."""
    decayed = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in net.parameters() if parameter.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def sum_over_ranks(*values: Any) -> list[float]:
    """Each value summed over all ranks; every rank must call it."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    sums = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


class Log:
    """One line an epoch on rank 0, the time to the target, and a summary as JSON.

        log = Log(model, loader, settings, metric="accuracy")
        for epoch in model.epochs(30):
            log.start()                        # training: the clock runs
            for batch in loader:
                ...
                log.step(loss)
            log.stop()
            if log.epoch(accuracy=evaluate()):     # evaluation: it does not
                break
        log.finish()

    Args:
        model, loader: what trains; the model, or what `attach` returned for it.
        settings: of `settings()`.
        metric: which of the values given to `epoch()` the target is for.
        lower_is_better: of that metric.
    """

    def __init__(
        self, model: Any, loader: Any, settings: SimpleNamespace, *, metric: str, lower_is_better: bool = False
    ) -> None:
        self._engine, self._loader, self._settings = getattr(model, "engine", model), loader, settings
        self._metric, self._sign = metric, -1 if lower_is_better else 1
        self._device = self._engine.device.torch_device
        self._began = 0.0
        self._train_s = 0.0
        self._wall_start = time.perf_counter()
        self._epochs: list[dict[str, Any]] = []
        self._seconds_to_target: float | None = None
        self._loss_sum: torch.Tensor | float = 0.0
        self._num_samples = 0

    def start(self) -> None:
        """The clock runs."""
        self._synchronize()
        self._loss_sum, self._num_samples = 0.0, 0
        self._began = time.perf_counter()

    def step(self, loss: torch.Tensor) -> None:
        """Count this step's loss, a mean over the local batch, in the epoch's; the device is not waited for."""
        if not self._loader.is_padding:  # a rank left without samples trains on two that count for nothing
            num_samples = self._engine.current_entry.local_batch
            self._loss_sum = self._loss_sum + loss.detach() * num_samples
            self._num_samples += num_samples

    def stop(self) -> None:
        """The clock stops, once the device has done what it was asked."""
        self._synchronize()
        self._train_s += time.perf_counter() - self._began

    def epoch(self, **values: float) -> bool:
        """Print the epoch's line; whether the target has been reached, the same on every rank."""
        loss_sum, num_samples = sum_over_ranks(self._loss_sum, self._num_samples)
        values = {"loss": loss_sum / num_samples, **values}
        plan, noise = self._engine.plan, self._engine.noise_scale
        passes = self._engine.progress * self._loader.batch_size / len(self._loader.dataset)
        previous_s = self._epochs[-1]["train_s"] if self._epochs else 0.0
        self._epochs.append(
            {
                "epoch": len(self._epochs),
                "progress": passes,
                "total_batch": plan.total_batch,
                "local_batches": list(plan.local_batches),
                "noise_scale": noise if math.isfinite(noise) else None,
                **values,
                "epoch_s": self._train_s - previous_s,
                "train_s": self._train_s,
            }
        )
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._say(
            f"epoch {len(self._epochs) - 1:3d}  progress {passes:6.2f}  batch {plan.total_batch:5d} = "
            f"{'+'.join(map(str, plan.local_batches))}  {shown}  {self._train_s - previous_s:.1f} s"
        )
        target = self._settings.target
        reached = target is not None and self._sign * values[self._metric] >= self._sign * target  # NaN never is
        if reached:
            self._seconds_to_target = self._train_s
            self._say(f"target {self._metric} {target} reached after {self._train_s:.1f} s of training")
        return reached

    def finish(self) -> None:
        """Write the summary, and part from the other ranks in good order."""
        found = [epoch[self._metric] for epoch in self._epochs]
        best = max(found, key=lambda value: self._sign * value, default=None)
        if self._settings.target is not None and self._seconds_to_target is None:
            self._say(f"target {self._metric} {self._settings.target} not reached: best {best}")
        if self._engine.rank == 0 and self._settings.json:
            summary = {
                "example": Path(sys.argv[0]).stem,
                "settings": vars(self._settings),
                "policy": str(self._engine.policy),
                "num_ranks": self._engine.world_size,
                "device": _device_name(self._device),
                "backend": dist.get_backend(),
                "torch": torch.__version__,
                "metric": self._metric,
                "best": best,
                "seconds_to_target": self._seconds_to_target,
                "train_s": self._train_s,
                "wall_s": time.perf_counter() - self._wall_start,
                "epochs": self._epochs,
            }
            Path(self._settings.json).write_text(json.dumps(summary, indent=1))
        dist.barrier()
        dist.destroy_process_group()

    def _say(self, line: str) -> None:
        if self._engine.rank == 0:
            print(line, flush=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
