"""What ours costs beside plain DDP at an even plan, and what its hook costs in Python: jobs of `gpu_ranks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_steps import Clock, train_step, wrapped
from benchmarks.gpu_tasks import Task
from cannikin import Engine
from cannikin.core.schedule import takes_norms
from cannikin.core.values import Job

WARM_UP = 5  # rounds
YOUNG = 60  # steps: so long norms are taken in every one


class MadeHere:
    """A source of batches that are made here, for `Engine.bind`."""

    prefetch_depth = 0
    item_count = None
    epoch = 0


def overhead(
    kind: str,
    local_batch: int,
    *,
    rounds: int,
    device: str,
    variants: Sequence[str] = ("raw", "control", "default", "torch hook", "ours"),
    compressed: bool = False,
) -> dict[str, Any]:
    """Measure ours with an even plan beside DDP that broadcasts no buffers either, in random order within each round.

    A second plain DDP is the control, DDP as it is by default broadcasts buffers, and torch's own `allreduce_hook`
    shows what a hook in Python costs at all. Where `compressed`, all of them send gradients as bfloat16. A sharded
    network is beside plain `fully_shard`.
    """
    task, n = Task(kind, largest=local_batch, device=device), dist.get_world_size()
    models: dict[str, Any] = {}
    optimizers = {}
    for variant in variants:
        if variant == "ours":
            options = {"comm_wrapper": bf16_compress_wrapper} if compressed else {}
            models[variant], optimizers[variant], engine = _bound(task, local_batch, **options)
            continue
        net = task.sharded_network() if task.recipe.sharded else task.network()
        optimizers[variant] = task.optimizer(net)
        if task.recipe.sharded:
            models[variant] = net
            continue
        models[variant] = DistributedDataParallel(net, broadcast_buffers=variant == "default")
        if compressed:
            models[variant].register_comm_hook(None, _as_bfloat16)
        elif variant == "torch hook":
            models[variant].register_comm_hook(None, allreduce_hook)
    rng, clock = np.random.default_rng(0), Clock(device)  # the same order on every rank
    orders = [rng.permutation(len(variants)) for _ in range(rounds)]
    dist.barrier()
    clock.tick()
    for order in orders:
        for k in order.tolist():
            variant = variants[k]
            if variant == "ours":
                engine.use_batch(local_batch, local_batch * n)
            train_step(task, models[variant], optimizers[variant], local_batch)
            clock.tick()
    taken, seconds = clock.seconds().reshape(rounds, -1), np.zeros((rounds, len(variants)))
    for row, order in enumerate(orders):
        seconds[row, order] = taken[row]
    apart = {variant: seconds[:, k] - seconds[:, 0] for k, variant in enumerate(variants)}
    steady = slice(YOUNG if rounds > YOUNG + WARM_UP else WARM_UP, None)
    raw = float(np.median(seconds[steady, 0]))
    return {
        "model": kind,
        "local_batch": local_batch,
        "rounds": rounds,
        "compressed": compressed,
        "raw_ms": 1e3 * raw,
        "iqr_pct": 100 * float(np.subtract(*np.percentile(seconds[steady, 0], [75, 25]))) / raw,
        "young_median_ms": {variant: 1e3 * float(np.median(ms[WARM_UP:YOUNG])) for variant, ms in apart.items()},
        "median_ms": {variant: 1e3 * float(np.median(ms[steady])) for variant, ms in apart.items()},
        "mean_ms": {variant: 1e3 * _middle_mean(ms[steady]) for variant, ms in apart.items()},
        "error_ms": {variant: 1e3 * _error(ms[steady]) for variant, ms in apart.items()},
    }


def _as_bfloat16(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
    # DDP refuses torch's own, by its name, where there is no CUDA; gloo carries bf16 well.
    return bf16_compress_hook(state, bucket)


def hook(kind: str, local_batch: int, *, steps: int, device: str) -> dict[str, Any]:
    """Measure the host's time in our hook and in torch's own, per bucket.

    Over NCCL that is all of it, what follows an all-reduce included; gloo calls that on a thread of its own.
    """
    task, n = Task(kind, largest=local_batch, device=device), dist.get_world_size()
    ours, torchs = _Timed(), _Timed()
    model, optimizer, engine = _bound(task, local_batch, comm_wrapper=ours.around)
    plain = task.network()
    plain_optimizer = task.optimizer(plain)
    ddp = DistributedDataParallel(plain, broadcast_buffers=False)
    ddp.register_comm_hook(None, torchs.around(allreduce_hook))
    for step in range(steps):
        engine.use_batch(local_batch, local_batch * n)
        ours.begin("norms" if takes_norms(step) else "no norms")
        train_step(task, model, optimizer, local_batch)
        torchs.begin("torch")
        train_step(task, ddp, plain_optimizer, local_batch)
    return {
        "model": kind,
        "local_batch": local_batch,
        "buckets": ours.most_buckets,
        "hook_us": {**ours.medians_us(), **torchs.medians_us()},
    }


class _Timed:
    """The seconds that a hook took, by the kind of step."""

    def __init__(self) -> None:
        self._kind = ""
        self._seconds: dict[str, list[list[float]]] = {}

    def begin(self, kind: str) -> None:
        """Count calls from now on as one more step of this kind."""
        self._kind = kind
        self._seconds.setdefault(kind, []).append([])

    def around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook with a clock around it."""

        def timed(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
            start = time.perf_counter()
            future = hook(state, bucket)
            self._seconds[self._kind][-1].append(time.perf_counter() - start)
            return future

        return timed

    @property
    def most_buckets(self) -> int:
        return max(len(step) for steps in self._seconds.values() for step in steps)

    def medians_us(self) -> dict[str, float]:
        """Return the median over steps of the time per bucket, in microseconds."""
        return {
            kind: 1e6 * float(np.median([np.mean(step) for step in steps])) for kind, steps in self._seconds.items()
        }


def _bound(task: Task, local_batch: int, **options: Any) -> tuple[Any, Any, Engine]:
    """Return ours with an even plan, for batches that are made here; see `wrapped`."""
    n = dist.get_world_size()
    model, optimizer, engine = wrapped(task, policy="even", **options)
    engine.bind(MadeHere(), Job(num_ranks=n, batch_size=local_batch * n), {})
    return model, optimizer, engine


def _middle_mean(values: np.ndarray) -> float:
    """Return the mean without the outermost 2% on each side; a median misses norms and plans, which few steps have."""
    cut = len(values) // 50
    return float(np.sort(values)[cut : len(values) - cut].mean())


def _error(values: np.ndarray) -> float:
    """Return the standard error of the median of these, by the distance of their quartiles."""
    return float(np.subtract(*np.percentile(values, [75, 25])) / 1.349 * np.sqrt(np.pi / 2 / len(values)))


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"overhead": overhead, "hook": hook}
