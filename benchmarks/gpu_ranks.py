"""What each rank of the GPU benchmarks runs, under torchrun; `benchmarks.gpu` launches it on shares of one GPU.

All timing is by the host's clock around steps that end in `torch.cuda.synchronize()`, the same for every variant.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_models import ResNet18, SmallGpt
from benchmarks.sample_numbers import Numbers
from cannikin import HeteroDataLoader, HeteroDataParallel
from cannikin.core.planners import LbBspPlanner
from cannikin.core.records import Job, StepWindow

WARM_UP = 20


class Images:
    """Batches of any size out of one pool on the device, and a step on them."""

    def __init__(self, largest: int) -> None:
        self.images = torch.randn(largest, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 10, (largest,), device="cuda")

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return ResNet18().cuda().to(memory_format=torch.channels_last)

    def loss(self, model: nn.Module, size: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(self.images[:size]), self.labels[:size])


class Tokens:
    """The same for a GPT-2-small-sized transformer on sequences of 256 tokens."""

    def __init__(self, largest: int) -> None:
        self.tokens = torch.randint(0, 50257, (largest, 257), device="cuda")

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return SmallGpt().cuda()

    def loss(self, model: nn.Module, size: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(self.tokens[:size, :-1])
            return F.cross_entropy(logits.flatten(0, 1), self.tokens[:size, 1:].flatten())


def step_seconds(job: Any, model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> float:
    """One training step of this many samples."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.zero_grad()
    job.loss(model, size).backward()
    optimizer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)


class _Made:
    """A source of batches that are made here."""

    prefetch_depth = 0
    item_count = None


def overhead(
    kind: str,
    local_batch: int,
    rounds: int,
    variants: Sequence[str] = ("raw", "control", "torch hook", "no buffers", "ours"),
) -> dict[str, Any]:
    """Ours with an even plan against plain DDP, in random order within each round, with three more to compare.

    A second plain DDP is the control. torch's own `allreduce_hook` shows what a hook in Python costs at all, and DDP
    without its broadcast of buffers what ours saves by averaging BatchNorm's statistics once a window instead.
    """
    job: Any = Images(local_batch) if kind == "resnet18" else Tokens(local_batch)
    n = dist.get_world_size()
    models, optimizers = {}, {}
    for variant in variants:
        net = job.network()
        optimizers[variant] = sgd(net)
        if variant == "ours":
            models[variant] = HeteroDataParallel(net, optimizers[variant], policy="even")
        else:
            models[variant] = DistributedDataParallel(net, broadcast_buffers=variant != "no buffers")
    if "torch hook" in models:
        models["torch hook"].register_comm_hook(None, allreduce_hook)
    models["ours"].engine.bind(_Made(), Job(num_ranks=n, batch_size=local_batch * n), {})
    rng = np.random.default_rng(0)  # the same order on every rank
    seconds = np.zeros((WARM_UP + rounds, len(variants)))
    for step in range(WARM_UP + rounds):
        for k in rng.permutation(len(variants)):
            variant = variants[k]
            if variant == "ours":
                models[variant].use_batch(local_batch, local_batch * n)
            dist.barrier()
            seconds[step, k] = step_seconds(job, models[variant], optimizers[variant], local_batch)
    taken = seconds[WARM_UP:]
    raw = float(np.median(taken[:, 0]))
    apart = taken - taken[:, :1]
    return {
        "model": kind,
        "local_batch": local_batch,
        "ranks": n,
        "rounds": rounds,
        "raw_ms": raw * 1e3,
        "spread_pct": 100 * float(np.subtract(*np.percentile(taken[:, 0], [75, 25]))) / raw,
        "median_ms": {v: 1e3 * float(np.median(apart[:, k])) for k, v in enumerate(variants)},
        "mean_ms": {v: 1e3 * _middle_mean(apart[:, k]) for k, v in enumerate(variants)},
    }


def _middle_mean(values: np.ndarray) -> float:
    """Mean without the outermost 2% on each side: norms and plans fall on some steps only, so a median misses them."""
    cut = len(values) // 50
    return float(np.sort(values)[cut : len(values) - cut].mean())


def limit(total: int, steps: int, largest: int) -> dict[str, Any]:
    """Ours from an even start, then its split beside plain DDP's, LB-BSP's and the best that a search finds."""
    job, n, rank = Images(min(total, largest)), dist.get_world_size(), dist.get_rank()
    net = job.network()
    optimizer = sgd(net)
    model = HeteroDataParallel(net, optimizer)
    loader = HeteroDataLoader(Numbers(total * steps), model=model, batch_size=total, shuffle=False, collate_fn=len)
    seconds, plans, predicted = [], [], []
    for size in loader:
        seconds.append(step_seconds(job, model, optimizer, size))
        plans.append(model.plan.local_batches)
        predicted.append(model.plan.predicted_step_s or float("nan"))
    settled = next(i for i in range(len(plans)) if len(set(plans[i:])) == 1)
    ours = plans[-1]
    coordinator = model.engine.coordinator
    fitted = coordinator.planner.learner.model(*coordinator.job.bounds).cluster if rank == 0 else None
    lb_bsp, lb_windows = _lb_bsp(fitted, total, n) if rank == 0 else (ours, 0)
    lb_bsp = _from_first(lb_bsp)
    even = tuple(total // n + (i < total % n) for i in range(n))
    named = {"even": even, "lb-bsp": lb_bsp, "ours": ours, "ours at step 30": plans[30]}
    measured = _search(job, model, optimizer, rank, total, named)
    tail = np.array(seconds[-100:])
    return {
        "total": total,
        **measured,
        "settled_at": settled,
        "lb_bsp_windows": lb_windows,
        "predicted_ms": 1e3 * float(np.median(predicted[-100:])),
        "running_ms": 1e3 * float(np.median(tail)),
        "prediction_error_pct": 100 * abs(float(np.median(predicted[-100:])) / float(np.median(tail)) - 1),
        "plan_path": [(i, plans[i]) for i in range(len(plans)) if i == 0 or plans[i] != plans[i - 1]],
    }


def _lb_bsp(cluster: Any, total: int, n: int) -> tuple[tuple[int, ...], int]:
    """Where LB-BSP's own planner ends on compute times of the fitted model, and after how many moves."""
    planner = LbBspPlanner(Job(num_ranks=n, batch_size=total))
    plan, moves = planner.plan(0), 0
    for moves in range(3000):
        batches = np.array([plan.local_batches])
        before, backward = (curve.at(batches) for curve in (cluster.forward, cluster.backward))
        planner.observe(
            StepWindow(
                first_step=moves,
                local_batches=batches,
                before_s=before,
                ready_s=backward[..., None],
                done_s=backward[..., None],
                local_sqnorm=np.full((1, n), np.nan),
                global_sqnorm=np.full(1, np.nan),
            )
        )
        new = planner.plan(moves + 1)
        if new.local_batches == plan.local_batches:
            break
        plan = new
    return plan.local_batches, moves


def _from_first(split: tuple[int, ...]) -> tuple[int, ...]:
    values = torch.tensor(split)
    dist.broadcast(values, 0)
    return tuple(values.tolist())


def _search(
    job: Any,
    model: Any,
    optimizer: Any,
    rank: int,
    total: int,
    named: dict[str, tuple[int, ...]],
) -> dict[str, Any]:
    """Step times of splits around ours, interleaved; the best few again beside those that have a name."""
    tried = sorted({*named.values(), *_around(named["ours"], (0.01, 0.03, 0.08), len(job.images))})
    first = dict(zip(tried, _interleaved(job, model, optimizer, rank, tried, 10), strict=True))
    chosen = list(dict.fromkeys([*named.values(), *sorted(tried, key=first.__getitem__)[:4]]))
    again = dict(zip(chosen, _interleaved(job, model, optimizer, rank, chosen, 60), strict=True))
    best = min(chosen, key=again.__getitem__)
    return {
        "num_candidates": len(tried),
        "splits": {**named, "best": best},
        "split_ms": {name: 1e3 * again[split] for name, split in {**named, "best": best}.items()},
    }


def _around(split: tuple[int, ...], shares: Sequence[float], most: int) -> list[tuple[int, ...]]:
    """This split with these shares of the total moved from each rank to each other."""
    splits = []
    for share, (i, j) in itertools.product(shares, itertools.permutations(range(len(split)), 2)):
        moved = list(split)
        moved[i] += max(1, round(share * sum(split)))
        moved[j] -= max(1, round(share * sum(split)))
        if min(moved) >= 1 and max(moved) <= most:
            splits.append(tuple(moved))
    return splits


def _interleaved(
    job: Any, model: Any, optimizer: Any, rank: int, splits: list[tuple[int, ...]], rounds: int
) -> list[float]:
    """Median step time of each split, in random order within each round."""
    rng = np.random.default_rng(1)
    seconds = np.zeros((rounds, len(splits)))
    for r in range(rounds):
        for k in rng.permutation(len(splits)):
            split = splits[k]
            model.use_batch(split[rank], sum(split))
            seconds[r, k] = step_seconds(job, model, optimizer, split[rank])
    medians = torch.from_numpy(np.median(seconds, axis=0))
    dist.broadcast(medians, 0)  # every rank must choose the same
    chosen: list[float] = medians.tolist()
    return chosen


def settling(total: int, runs: int, steps: int, rounds: int) -> dict[str, Any]:
    """How good the split in force at step 30 is, run after run from an even start, and what a change of batches costs.

    The splits are measured beside the best four of a search, and those four a second time as the control.
    """
    rank, at_30, costs = dist.get_rank(), [], []
    for _ in range(runs):
        job = Images(total)
        net = job.network()
        optimizer = sgd(net)
        model = HeteroDataParallel(net, optimizer)
        loader = HeteroDataLoader(Numbers(total * steps), model=model, batch_size=total, shuffle=False, collate_fn=len)
        seconds, plans = [], []
        for size in loader:
            seconds.append(step_seconds(job, model, optimizer, size))
            plans.append(model.plan.local_batches)
        usual = float(np.median(seconds[15:]))
        costs += [seconds[i] / usual - 1 for i in range(1, steps) if plans[i] != plans[i - 1]]
        at_30.append(plans[30])
    middle = sorted(at_30)[runs // 2]
    tried = sorted({*at_30, *_around(middle, (0.02, 0.05), total)})
    first = dict(zip(tried, _interleaved(job, model, optimizer, rank, tried, 15), strict=True))
    best = sorted(tried, key=first.__getitem__)[:4]
    measured = [*best, *best, *at_30]
    again = _interleaved(job, model, optimizer, rank, measured, rounds)
    best_s = min((x + y) / 2 for x, y in zip(again[:4], again[4:8], strict=True))
    return {
        "total": total,
        "best_ms": 1e3 * best_s,
        "best": best,
        "at_30": at_30,
        "excess_at_30": [seconds / best_s - 1 for seconds in again[8:]],
        "control": [x / y - 1 for x, y in zip(again[:4], again[4:8], strict=True)],
        "cost_of_a_change": float(np.median(costs)),
    }


def sharing(total: int, steps: int, disturbed: int, start: int) -> dict[str, Any]:
    """A second load begins on one rank's share in mid-run."""
    job, rank = Images(total), dist.get_rank()
    net = job.network()
    optimizer = sgd(net)
    model = HeteroDataParallel(net, optimizer)
    loader = HeteroDataLoader(Numbers(total * steps), model=model, batch_size=total, shuffle=False, collate_fn=len)
    stop = threading.Event()

    def load() -> None:
        stream = torch.cuda.Stream()
        matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(stream):
            while not stop.is_set():
                matrix @ matrix
                stream.synchronize()

    seconds, plans = [], []
    for step, size in enumerate(loader):
        if step == start and rank == disturbed:
            threading.Thread(target=load, daemon=True).start()
        seconds.append(step_seconds(job, model, optimizer, size))
        plans.append(model.plan.local_batches)
    stop.set()
    changes = model.engine.coordinator.planner.learner.changes if rank == 0 else []
    before = float(np.median(seconds[start - 50 : start]))
    hit = float(np.median(seconds[start + 1 : start + 6]))
    after = float(np.median(seconds[-50:]))
    goal = 1.05 * after
    medians = [float(np.median(seconds[i : i + 5])) for i in range(start, len(seconds) - 5)]
    answered = next((i for i, value in enumerate(medians) if all(v <= goal for v in medians[i : i + 10])), -1)
    return {
        "disturbed_rank": disturbed,
        "before_ms": before * 1e3,
        "hit_ms": hit * 1e3,
        "after_ms": after * 1e3,
        "split_before": plans[start - 1],
        "split_after": plans[-1],
        "answered_after_steps": answered,
        "changes": changes[-5:],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", required=True, help="JSON: a list of [function, keywords]")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    torch.backends.cudnn.benchmark = False  # local batches change: no search for kernels at each new size
    dist.init_process_group(os.environ.get("CANNIKIN_BACKEND", "nccl"))
    functions = {"overhead": overhead, "limit": limit, "settling": settling, "sharing": sharing}
    for name, keywords in json.loads(options.jobs):
        began = time.perf_counter()
        result = functions[name](**keywords)
        if dist.get_rank() == 0:
            result = {"job": name, **result, "took_s": time.perf_counter() - began}
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(name, keywords, f"{result['took_s']:.0f} s", flush=True)
        torch.cuda.empty_cache()
        dist.barrier()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
