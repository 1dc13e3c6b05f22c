"""What a run measures and learns, beside what is known by other means: jobs of `gpu_ranks`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu_overhead import MadeHere
from benchmarks.gpu_splits import AT, about
from benchmarks.gpu_steps import Alone, Clock, Run, Split, bucket_bytes, gathered, train, train_step
from benchmarks.gpu_tasks import Task
from cannikin import HeteroDataParallel
from cannikin.core.planner import Decision
from cannikin.core.policies.plans import even_batches, make_plan
from cannikin.core.values import Job, StepWindow

EVERY = 20  # steps of a constant split in a record


def truth(
    kind: str,
    total: int,
    speeds: Sequence[float],
    *,
    sample_ms: float,
    forward_shares: Sequence[float],
    steps: int,
    device: str,
) -> dict[str, Any]:
    """Compare what a run has learned of its ranks with what was added to them and with what each takes alone.

    What was added is in the chain of plain layers all there is but launches. Communication is compared with all-reduces
    of the same buckets one after the other, with nothing else going on: those of a run share the GPU with its kernels.
    """
    task = Task(kind, largest=total, device=device)
    run = train(task, total, steps)
    split, share = run.splits[-1], np.array(forward_shares)
    added_s = sample_ms / 1e3 * np.array(split) / np.array(speeds)
    alone = Alone(task).measure(split)
    reduce_s = _all_reduce_s(run, device)
    learned = _learned(run, split)
    if not learned:
        return about(run)
    known = {
        "added_ms": {"forward": 1e3 * added_s * share, "backward": 1e3 * added_s * (1 - share)},
        "alone_ms": {"forward": 1e3 * alone.before_s, "backward": 1e3 * alone.backward_s},
    }
    return {
        **about(run),
        "at_30": run.splits[min(AT, len(run.splits) - 1)],
        "split": split,
        "bucket_mb": [size / 1e6 for size in bucket_bytes(run.engine)],
        "learned_ms": learned,
        **{name: {part: ms.tolist() for part, ms in parts.items()} for name, parts in known.items()},
        "all_reduce_ms": (1e3 * reduce_s).tolist(),
        "learned_over_added": _ratios(learned, known["added_ms"]),
        "learned_over_alone": _ratios(learned, known["alone_ms"]),
        "learned_over_all_reduce": float(learned["communication"] / (1e3 * reduce_s.sum())),
    }


def _ratios(learned: dict[str, Any], known: dict[str, np.ndarray]) -> dict[str, list[float]]:
    return {part: (np.array(learned[part]) / ms).tolist() for part, ms in known.items()}


def _learned(run: Run, split: Split) -> dict[str, Any]:
    """Return the times of rank 0's model at this split, in milliseconds; nothing elsewhere."""
    planner: Any = run.engine.coordinator.planner
    cluster = planner.model().cluster if dist.get_rank() == 0 else None
    if cluster is None:
        return {}
    return {
        "forward": (1e3 * cluster.forward.at(split)).tolist(),
        "backward": (1e3 * cluster.backward.at(split)).tolist(),
        "communication": 1e3 * float(cluster.tails_s[0]),
        "tails": (1e3 * cluster.tails_s).tolist(),
        "gammas": cluster.gammas.tolist(),
    }


def _all_reduce_s(run: Run, device: str, rounds: int = 15) -> np.ndarray:
    """Return the seconds of an all-reduce of each of the run's buckets, with nothing else going on."""
    sizes = bucket_bytes(run.engine)
    buckets = [torch.zeros(size // 4, device=device) for size in sizes]
    clock = Clock(device)
    dist.barrier()
    clock.tick()
    for _ in range(rounds + 3):
        for bucket in buckets:
            dist.all_reduce(bucket)
            clock.tick()
    return np.median(clock.seconds().reshape(-1, len(sizes))[3:], axis=0)


class _Recorder:
    """A planner that keeps every window and plans nothing: steps have the batches that `use_batch` says."""

    def __init__(self, job: Job) -> None:
        self.windows: list[StepWindow] = []
        self._plan = make_plan(0, even_batches(job, job.batch_size), reason="nothing is planned: this is a record")

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        """Keep the window; windows stay short."""
        if window is not None:
            self.windows.append(window)
        return Decision(plan=self._plan, settled=False)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def record(kind: str, total: int, speeds: Sequence[float], *, steps: int, folder: str, device: str) -> dict[str, Any]:
    """Keep what was measured of every step: half of them under a new random split each, half under constant ones.

    Constant splits change every 20 steps, and come back: even, by speed, a third of the way, and those again. Writes
    `record-KIND.json` into the folder: per step and rank local batch, seconds of forward (`before`), of each bucket's
    readiness and end after backward began, seconds of the step by an event at its end, whether the measurement counted
    and whether the batch was new to the rank.
    """
    task = Task(kind, largest=total, device=device)
    splits = scripted(total, speeds, steps, np.random.default_rng(7))
    windows, seconds, sizes = _recorded(task, splits)
    wall = gathered(seconds.tolist(), device).T
    if dist.get_rank() != 0:
        return {}
    rows = _rows(windows, splits, wall)
    path = Path(folder) / f"record-{kind}.json"
    head = {"kind": kind, "total": total, "speeds": list(speeds), "bucket_bytes": sizes}
    path.write_text(_compact({**head, "steps": rows}))
    return {"file": path.name, "steps": len(rows), "buckets": len(sizes)}


def _recorded(task: Task, splits: list[Split]) -> tuple[list[StepWindow], np.ndarray, list[int]]:
    """Take a step with each split; return the windows that rank 0 saw, this rank's seconds and the buckets' bytes."""
    rank, largest = dist.get_rank(), max(sum(split) for split in splits)
    job = Job(num_ranks=dist.get_world_size(), batch_size=largest)
    planner = _Recorder(job)
    net = task.network()
    optimizer = task.optimizer(net)
    model = HeteroDataParallel(net, optimizer, policy=planner)
    model.engine.bind(MadeHere(), job, {})
    clock = Clock(task.device)
    clock.tick()
    for split in [*splits, *([splits[-1]] * 20)]:  # the last window's way to rank 0 takes some steps more
        model.use_batch(split[rank], sum(split))
        train_step(task, model, optimizer, split[rank])
        clock.tick()
    assert isinstance(model.engine.coordinator.planner, _Recorder)  # it is done with its windows
    return planner.windows, clock.seconds()[: len(splits)], bucket_bytes(model.engine)


def gammas(kind: str, sizes: Sequence[int], *, steps: int, device: str) -> dict[str, Any]:
    """Measure one rank alone, as fast as it is, at local batches of these sizes, so many steps each.

    gamma is the part of backward after which the first bucket is ready. The spread is between steps; the first fifth of
    the steps at a size do not count.
    """
    splits = [(size,) for size in sizes for _ in range(steps)]
    windows, _, buckets = _recorded(Task(kind, largest=max(sizes), device=device), splits)
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for window, s in ((seen, s) for seen in windows for s in range(seen.num_steps)):
        step = window.first_step + s
        if step < len(splits) and step % steps >= steps // 5 and window.valid[s, 0]:
            ready_s, before_s = window.ready_s[s, 0], float(window.before_s[s, 0])
            whole_s = float(ready_s[-1])
            found[splits[step][0]].append((float(ready_s[0]) / whole_s, before_s / (before_s + whole_s)))
    rows = [
        {
            "size": size,
            "steps": len(pairs),
            "gamma": float(np.mean([gamma for gamma, _ in pairs])),
            "gamma_std": float(np.std([gamma for gamma, _ in pairs])),
            "before_share": float(np.median([share for _, share in pairs])),
        }
        for size, pairs in found.items()
        if pairs
    ]
    return {"buckets": len(buckets), "by_size": rows}


def scripted(total: int, speeds: Sequence[float], steps: int, rng: np.random.Generator) -> list[Split]:
    """Return the splits of a record: a new random one per step, then constant ones."""
    n, share = len(speeds), np.array(speeds) / sum(speeds)
    random = [_whole(total, rng.dirichlet(np.full(n, 3.0))) for _ in range(steps // 2)]
    between = [np.full(n, 1 / n), share, (2 / 3) / n + share / 3, share, np.full(n, 1 / n), 1.2 * share - 0.2 / n]
    constant = [_whole(total, between[(step // EVERY) % len(between)]) for step in range(steps - len(random))]
    return [*random, *constant]


def _whole(total: int, shares: np.ndarray) -> Split:
    """Return these shares of the total as whole batches of at least 2."""
    batches = np.maximum(2, np.floor(total * np.clip(shares, 0, None)).astype(int))
    batches[batches.argmax()] += total - batches.sum()
    return tuple(batches.tolist())


def _rows(windows: list[StepWindow], splits: list[Split], wall: np.ndarray) -> list[dict[str, Any]]:
    """Return a row per step that was measured."""
    seen: list[set[int]] = [set() for _ in splits[0]]
    new = []
    for split in splits:
        new.append([batch not in sizes for batch, sizes in zip(split, seen, strict=True)])
        for batch, sizes in zip(split, seen, strict=True):
            sizes.add(batch)
    rows = []
    for window in windows:
        for s in range(window.num_steps):
            step = window.first_step + s
            if step < len(splits):
                rows.append(
                    {
                        "step": step,
                        "local_batch": window.local_batches[s].tolist(),
                        "new": new[step],
                        "valid": window.valid[s].tolist(),
                        "before_s": _short(window.before_s[s]),
                        "ready_s": _short(window.ready_s[s]),
                        "done_s": _short(window.done_s[s]),
                        "wall_s": _short(wall[step]),
                    }
                )
    return rows


def _short(seconds: np.ndarray) -> Any:
    return np.round(seconds, 7).tolist()


def _compact(value: dict[str, Any]) -> str:
    """Return JSON with a step per line."""
    steps = ",\n".join(json.dumps(row) for row in value["steps"])
    head = json.dumps({key: item for key, item in value.items() if key != "steps"})
    return f'{head[:-1]}, "steps": [\n{steps}\n]}}\n'


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"truth": truth, "record": record, "gammas": gammas}
