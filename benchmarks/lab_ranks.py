"""What each rank of `benchmarks.lab_limit` runs, under `cannikin lab`.

The network's gradient can be made as large as wanted at no cost in computation, so that the lab's device times and its
links decide how long a step takes, and not the machine's few cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.sample_numbers import Numbers
from cannikin import HeteroDataLoader, HeteroDataParallel, optimal_split
from cannikin.core.planner import Planner
from cannikin.core.policies import PaperPlanner
from cannikin.core.policies.plans import even_batches
from cannikin.core.values import Job
from cannikin.runlog import Predictions

Split = tuple[int, ...]

WIDTH, CLASSES, LAYERS = 32, 10, 8
ROUNDS = 3
LAST = 100  # steps at the end of a run that the share of real work is taken from
QUIET = 60  # steps without a move after which LB-BSP counts as settled
MOST_STEPS = 400  # of LB-BSP
PAPER_EPOCHS, PAPER_EPOCH = 8, 20  # of the paper's method, which plans once per epoch; steps in one
LATTICE = 8  # parts that the total batch is cut into for the grid of all splits
SHARES_MOVED = (0.01, 0.03, 0.08)  # of the total batch, between two ranks, for the grid around a split


class Scaled(nn.Module):
    """A small linear layer, times the mean of many rows of weights: a large gradient for little work."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.rows = nn.Parameter(torch.ones(num_rows, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(F.linear(x, self.weight) * self.rows.mean(0))


class Training:
    """A model under one policy, and steps of any local batch.

    Args:
        policy: of `HeteroDataParallel`.
        total: total batch.
        gradient_kb: size of the whole gradient; each layer is a bucket of its own.
        host_ms: what each rank's host takes between forward and backward, whatever the batch.
        device: where it trains.
    """

    def __init__(
        self, policy: str | Planner, *, total: int, gradient_kb: float, host_ms: list[float], device: str = "cpu"
    ) -> None:
        torch.manual_seed(0)
        num_rows = max(1, round(gradient_kb * 1024 / 4 / LAYERS / WIDTH) - WIDTH)
        net = nn.Sequential(*[Scaled(num_rows) for _ in range(LAYERS)], nn.Linear(WIDTH, CLASSES)).to(device)
        self.total, self.device = total, device
        self.inputs = torch.randn(total, WIDTH).to(device)
        self.labels = torch.randint(0, CLASSES, (total,)).to(device)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        bucket_mb = (num_rows + WIDTH) * WIDTH * 4 / 2**20
        self.predictions = Predictions()  # rank 0's
        self.model = HeteroDataParallel(
            net, self.optimizer, policy=policy, bucket_cap_mb=bucket_mb, observers=[self.predictions]
        )
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.host_s = host_ms[self.rank] / 1e3

    def step_seconds(self, size: int) -> float:
        """Train one step of this many samples, and return its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.inputs[:size]), self.labels[:size])
        if self.host_s:
            time.sleep(self.host_s)
        loss.backward()
        self.optimizer.step()
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def run(self, num_steps: int, *, quiet: int | None = None) -> Run:
        """Train from an even start for so many steps, or until no plan has changed for `quiet` of them."""
        data = Numbers(self.total * num_steps)
        loader = HeteroDataLoader(data, model=self.model, batch_size=self.total, shuffle=False, collate_fn=len)
        run = Run()
        for size in loader:
            cpu_s = time.process_time()
            run.seconds.append(self.step_seconds(size))
            run.cpu_s.append(time.process_time() - cpu_s)
            run.plans.append(self.model.plan)
            if quiet is not None and run.num_settled >= quiet:
                break
        return run

    def interleaved(self, splits: list[Split], passes: int) -> np.ndarray:
        """Return each split's median step time over passes with all splits in random order, [ROUNDS, splits]."""
        rng = np.random.default_rng(1)  # the same order on every rank
        seconds = np.zeros((ROUNDS, passes, len(splits)))
        for i, j in np.ndindex(ROUNDS, passes):
            if j == 0:
                _say(f"  round {i + 1} of {ROUNDS}")
            for k in rng.permutation(len(splits)):
                self.model.use_batch(splits[k][self.rank], self.total)
                seconds[i, j, k] = self.step_seconds(splits[k][self.rank])
        medians = torch.from_numpy(np.concatenate([np.median(seconds, axis=1), np.median(seconds, axis=(0, 1))[None]]))
        dist.broadcast(medians, 0)  # every rank must choose the same
        return medians.numpy()


class Run:
    """Steps of one policy: their times, the processor time this rank spent in each, and the plans in force."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []
        self.plans: list[Any] = []

    def splits(self) -> list[Split]:
        return [plan.local_batches for plan in self.plans]

    def changes(self) -> list[int]:
        """Return the steps at which another split came into force."""
        return [step for step, (a, b) in enumerate(itertools.pairwise(self.splits()), start=1) if a != b]

    @property
    def num_settled(self) -> int:
        """Steps since the last change."""
        return len(self.plans) - max([0, *self.changes()])

    def told(self) -> list[dict[str, Any]]:
        """Return each split with its first step and its plan's reason."""
        firsts = [0, *self.changes()]
        return [{"step": s, "split": self.plans[s].local_batches, "reason": self.plans[s].reason} for s in firsts]


def limit(total: int, steps: int, passes: int, **keywords: Any) -> dict[str, Any]:
    """Train ours, LB-BSP and the paper's method from an even start; measure their splits beside the best of a grid."""
    training = Training("cannikin", total=total, **keywords)
    _say(f"ours, {steps} steps")
    run = training.run(steps)
    ours, predictions = run.splits()[-1], training.predictions.numbers()
    _say(f"LB-BSP, at most {MOST_STEPS} steps")
    lb_bsp = Training("lb-bsp", total=total, **keywords).run(MOST_STEPS, quiet=QUIET)
    job = Job(num_ranks=training.num_ranks, batch_size=total, num_samples=PAPER_EPOCH * total)
    _say(f"the paper's method, {PAPER_EPOCHS} epochs of {PAPER_EPOCH} steps")
    paper = Training(PaperPlanner(job), total=total, **keywords).run(PAPER_EPOCHS * PAPER_EPOCH)
    named = {
        "ours": ours,
        "ours at step 30": run.splits()[30],
        "lb-bsp": lb_bsp.splits()[-1],
        "paper": paper.splits()[-1],
        "even": even_batches(job, total),
    }
    grid = sorted({*_lattice(total, training.num_ranks), *around(ours, total)})
    compared = compare(training, named, grid, passes)
    last = slice(-LAST, None)
    return {
        **compared,
        "changes": run.changes(),
        "plans": run.told(),
        "bottlenecks": _bottlenecks(training, total),
        "predicted_ms": 1e3 * (run.plans[-1].predicted_step_s or np.nan),
        "predictions": predictions,
        "work_share": _gathered(float(np.mean(run.cpu_s[last])) / float(np.mean(run.seconds[last]))),
        "lb_bsp_changes": lb_bsp.changes(),
        "lb_bsp_steps": len(lb_bsp.plans),
        "lb_bsp_settled": lb_bsp.num_settled >= QUIET,
        "paper_plans": paper.told(),
    }


def slowed(total: int, steps: int, change: int, passes: int, **keywords: Any) -> dict[str, Any]:
    """Train while the lab slows a rank at step `change`; measure the splits used since beside the best of a grid."""
    training = Training("cannikin", total=total, **keywords)
    _say(f"ours, {steps} steps, a rank changes at {change}")
    run = training.run(steps)
    splits = run.splits()
    since = {f"from step {s}": splits[s] for s in [change, *(s for s in run.changes() if s > change)]}
    named = {**since, "ours": splits[-1]}
    compared = compare(training, named, around(splits[-1], total), passes)
    best_ms = compared["split_ms"]["best"]
    over = {split: ms / best_ms for split, ms in zip(named.values(), compared["split_ms"].values(), strict=False)}
    late = [step for step in range(change, steps) if over[splits[step]] > 1.05]
    return {
        **compared,
        "change": change,
        "changes": run.changes(),
        "plans": run.told(),
        "back_after": late[-1] + 1 - change if late else 0,
        "before_ms": 1e3 * float(np.median(run.seconds[change - 50 : change])),
        "hit_ms": 1e3 * float(np.median(run.seconds[change : change + 5])),
        "after_ms": 1e3 * float(np.median(run.seconds[-50:])),
    }


def compare(training: Training, named: dict[str, Split], grid: list[Split], passes: int) -> dict[str, Any]:
    """Measure a grid of splits in turns, then the best three again beside those that have a name."""
    _say(f"{len(grid)} splits, {ROUNDS * passes} steps each")
    first = dict(zip(grid, training.interleaved(grid, passes)[-1].tolist(), strict=True))
    chosen = list(dict.fromkeys([*named.values(), *sorted(grid, key=first.__getitem__)[:3]]))
    _say(f"{len(chosen)} splits again, {ROUNDS * passes} steps each")
    again = dict(zip(chosen, (1e3 * training.interleaved(chosen, passes)).T.tolist(), strict=True))
    named = {**named, "best": min(chosen, key=lambda split: again[split][-1])}
    return {
        "total": training.total,
        "num_splits": len(grid),
        "steps_each": ROUNDS * passes,
        "splits": named,
        "split_ms": {name: again[split][-1] for name, split in named.items()},
        "round_ms": {name: again[split][:-1] for name, split in named.items()},
        "grid_ms": [[list(split), 1e3 * seconds] for split, seconds in first.items()],
        "again_ms": [[list(split), ms[-1]] for split, ms in again.items()],
    }


def _lattice(total: int, num_ranks: int) -> list[Split]:
    """Return all splits of the total batch in eighths that give every rank samples."""
    part = total // LATTICE
    eighths = (x for x in itertools.product(range(1, LATTICE), repeat=num_ranks) if sum(x) == LATTICE)
    return [(*(part * k for k in x[:-1]), total - part * sum(x[:-1])) for x in eighths]


def around(split: Split, total: int) -> list[Split]:
    """Return the split, and those that move a few of its samples from one rank to another."""
    splits = [split]
    for share, (i, j) in itertools.product(SHARES_MOVED, itertools.permutations(range(len(split)), 2)):
        moved, count = list(split), max(1, round(share * total))
        moved[i], moved[j] = moved[i] + count, moved[j] - count
        if min(moved) >= 1:
            splits.append(tuple(moved))
    return splits


def _bottlenecks(training: Training, total: int) -> list[str]:
    """Return what limits each rank at the optimum of the model that rank 0 has learned."""
    if training.rank != 0:
        return []
    cluster = training.model.engine.coordinator.planner.model().cluster
    return list(optimal_split(cluster, total).bottlenecks)


def _gathered(value: float) -> list[float]:
    """Return every rank's value."""
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return [float(v) for v in values]


def _say(phase: str) -> None:
    if dist.get_rank() == 0:
        print(phase, file=sys.stderr, flush=True)


def main() -> None:
    """Do the job named, and leave its figures as a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--about", default="{}", help="JSON: goes into the line as it is")
    parser.add_argument("job", choices=("limit", "slowed"))
    parser.add_argument("keywords", help="JSON: of the job's function")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    began = time.perf_counter()
    result = {"limit": limit, "slowed": slowed}[options.job](**json.loads(options.keywords))
    if dist.get_rank() == 0:
        line = {**json.loads(options.about), "job": options.job, **result, "took_s": time.perf_counter() - began}
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an ordinary exit: seen once in 15 launches, all figures written


if __name__ == "__main__":
    main()
