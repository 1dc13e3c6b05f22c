"""What ours settles on, on ranks that share one GPU, beside the best split that a search finds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu_steps import Images, step_seconds, train
from cannikin.core.policies import LbBspPlanner
from cannikin.core.values import Job, StepWindow
from cannikin.runlog import EventRecord, Record


def limit(total: int, steps: int, largest: int) -> dict[str, Any]:
    """Train from an even start, then measure our split beside plain DDP's, LB-BSP's and the best of a search."""
    job, n, rank = Images(min(total, largest)), dist.get_world_size(), dist.get_rank()
    model, optimizer, seconds, made = train(job, total, steps)
    plans = [plan.local_batches for plan in made]
    predicted = [plan.predicted_step_s or float("nan") for plan in made]
    settled = next(i for i in range(len(plans)) if len(set(plans[i:])) == 1)
    ours = plans[-1]
    fitted = model.engine.coordinator.planner.model().cluster if rank == 0 else None
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
        "plan_path": [(i, plans[i]) for i in range(len(plans)) if _new(plans, i)],
    }


def settling(total: int, runs: int, steps: int, rounds: int) -> dict[str, Any]:
    """Measure, over several runs, how good the split at step 30 is and what a change of batches costs.

    The splits are measured beside the best four of a search, and those four a second time as the control.
    """
    rank, at_30, costs = dist.get_rank(), [], []
    for _ in range(runs):
        job = Images(total)
        model, optimizer, seconds, made = train(job, total, steps)
        plans = [plan.local_batches for plan in made]
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


def sharing(total: int, steps: int, disturbed: int, start: int, rounds: int) -> dict[str, Any]:
    """Begin a second load on one rank's share in mid-run, and measure the splits that follow while it goes on.

    Beside them are measured splits around the last, and such as give the disturbed rank next to nothing.
    """
    rank, job = dist.get_rank(), Images(total)
    load, told = _Load(), _Changes()

    def disturb(step: int) -> None:
        if step == start and rank == disturbed:
            load.start()

    model, optimizer, seconds, made = train(job, total, steps, disturb, [told])
    plans = [plan.local_batches for plan in made]
    before, ended = plans[start - 1], plans[-1]
    spared = [_with(ended, disturbed, size) for size in (1, total // 48, total // 24)]
    tried = list(dict.fromkeys([before, *plans[start : start + 31], ended, *spared, *_around(ended, (0.02,), total)]))
    measured = dict(zip(tried, _interleaved(job, model, optimizer, rank, tried, rounds), strict=True))
    load.stop.set()
    best = min(tried, key=measured.__getitem__)
    over = {split: measured[split] / measured[best] for split in tried}
    after = np.array(seconds[start:])
    return {
        "disturbed_rank": disturbed,
        "before_ms": 1e3 * float(np.median(seconds[start - 50 : start])),
        "steps_ms": {f"{i} to {j}": 1e3 * float(np.median(after[i:j])) for i, j in ((0, 15), (15, 30), (30, 60))},
        "after_ms": 1e3 * float(np.median(seconds[-50:])),
        "best": best,
        "best_ms": 1e3 * measured[best],
        "over_best": [(i - start, plans[i], over[plans[i]]) for i in range(start, start + 31) if _new(plans, i)],
        "over_best_before_and_at_the_end": [(before, over[before]), (ended, over[ended])],
        "changes": told.changes[-5:],
        "plan_path": [(i, plans[i]) for i in range(len(plans)) if _new(plans, i)],
    }


class _Changes:
    """Keeps the changes of speed that rank 0 of a run reports: step, rank and factor."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, int, float]] = []

    def write(self, event: Record, /) -> None:
        if isinstance(event, EventRecord) and event.kind == "changed_speed":
            self.changes.append((event.step, event.data["rank"], event.data["factor"]))


class _Load(threading.Thread):
    """Matrix products without end on this rank's share, from `start()` until `stop` is set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()

    def run(self) -> None:
        stream = torch.cuda.Stream()
        matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(stream):
            while not self.stop.is_set():
                matrix @ matrix
                stream.synchronize()


def _with(split: tuple[int, ...], rank: int, size: int) -> tuple[int, ...]:
    """Return this split with another batch for one rank, the others in their proportions."""
    rest, total = sum(split) - split[rank], sum(split)
    others = [round(batch * (total - size) / rest) for batch in split]
    others[rank] = size
    others[(rank + 1) % len(split)] += total - sum(others)
    return tuple(others)


def _new(plans: Sequence[tuple[int, ...]], step: int) -> bool:
    return step == 0 or plans[step] != plans[step - 1]


def _lb_bsp(cluster: Any, total: int, n: int) -> tuple[tuple[int, ...], int]:
    """Return LB-BSP's last split on compute times of the fitted model, and its number of moves."""
    job = Job(num_ranks=n, batch_size=total)
    planner = LbBspPlanner(job)
    plan, moves = planner.decide(None, job, 0).plan, 0
    for moves in range(3000):
        batches = np.array([plan.local_batches])
        before, backward = (curve.at(batches) for curve in (cluster.forward, cluster.backward))
        window = StepWindow(
            first_step=moves,
            local_batches=batches,
            before_s=before,
            ready_s=backward[..., None],
            done_s=backward[..., None],
            local_sqnorm=np.full((1, n), np.nan),
            global_sqnorm=np.full(1, np.nan),
        )
        new = planner.decide(window, job, moves + 1).plan
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
    """Measure splits around ours, interleaved, then the best few again beside those that have a name."""
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
    """Return this split with these shares of the total moved from each rank to each other."""
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
    """Measure the median step time of each split, in random order within each round."""
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
