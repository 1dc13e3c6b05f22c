"""What ours settles on, on ranks of one device, beside the best split that a search finds: jobs of `gpu_ranks`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu_overlap import cluster_of
from benchmarks.gpu_steps import Alone, Run, Split, agreed, agreed_split, by_turns, set_speed, train
from benchmarks.gpu_tasks import Task
from cannikin.core.perf import Cluster, hardware_use, step_time
from cannikin.core.planner import Decision
from cannikin.core.policies import LbBspPlanner, PaperPlanner
from cannikin.core.split import optimal_split
from cannikin.core.values import Job, Plan, StepWindow
from cannikin.runlog import EventRecord, Predictions, Record

AT = 30  # the step by which a run is to have settled
LATE = 60  # plan changes from here on are to be few
PAPER_EPOCH = 15  # steps of the paper's method, which plans once per epoch


def limit(
    kind: str,
    total: int,
    speeds: Sequence[float],
    sample_ms: float,
    forward_shares: Sequence[float],
    *,
    steps: int,
    lb_steps: int,
    paper_epochs: int,
    moved: Sequence[float],
    search_s: float,
    device: str,
    folder: str,
) -> dict[str, Any]:
    """Train under ours, then under others, and measure their splits beside plain DDP's and the best of a search.

    The others are LB-BSP and the paper's method, each where it has steps. The run log of ours stays in the folder, to
    find out why where it is not good.
    """
    task = Task(kind, largest=total, device=device)
    log, predictions = f"{folder}/run-{kind}-{total}-{'-'.join(map(str, speeds))}", Predictions()
    run = train(task, total, steps, run_dir=log, observers=[predictions])
    predicted = predictions.numbers()  # before the steps of the search
    named = {"even": _even(total), "ours": run.splits[-1], "ours at 30": _at(run, AT)}
    others = {}
    if lb_steps:
        lb = _train_lb_bsp(task, total, lb_steps)
        named["lb-bsp"], moves = lb.splits[-1], len(lb.first_steps) - 1
        others = {"lb_bsp_steps": len(lb.plans), "lb_bsp_moves": moves, "lb_bsp_settled": len(lb.plans) < lb_steps}
    if paper_epochs:
        job = Job(num_ranks=len(speeds), batch_size=total, num_samples=PAPER_EPOCH * total)
        paper = train(task, total, paper_epochs * PAPER_EPOCH, policy=PaperPlanner(job))
        named["paper"], others["paper_path"] = paper.splits[-1], paper.path()
    known = cluster_of(kind, speeds, forward_shares, sample_ms / 1e3)
    found = _search(task, run, named, _guesses(known, total, speeds), moved, search_s)
    alone, use = Alone(task), {}
    for name in ("even", "ours", "best"):
        split = found["splits"][name]
        use[name] = float(hardware_use(split, alone.measure(split).step_s, found["split_ms"][name] / 1e3))
    return {
        **found,
        "use": use,
        **others,
        **about(run),
        "predictions": predicted,
    }


def about(run: Run) -> dict[str, Any]:
    """Return a run's plans and the times of its last steps."""
    tail, last = run.seconds[-50:], run.plans[-1].predicted_step_s
    return {
        "steps": len(run.plans),
        "settled_at": run.first_steps[-1],
        "changes_after_60": sum(step > LATE for step in run.first_steps),
        "running_ms": 1e3 * float(np.median(tail)),
        "running_iqr_pct": _iqr_pct(tail),
        "predicted_ms": None if last is None else 1e3 * last,
        "plan_path": run.path(),
    }


def settling(
    kind: str,
    total: int,
    speeds: Sequence[float],
    sample_ms: float,
    forward_shares: Sequence[float],
    *,
    starts: int,
    steps: int,
    moved: Sequence[float],
    search_s: float,
    device: str,
) -> dict[str, Any]:
    """Measure how good the split at step 30 is in several runs from an even start; the best of a search beside it."""
    task = Task(kind, largest=total, device=device)
    runs = [train(task, total, steps) for _ in range(starts)]
    at_30 = {f"start {k}": _at(run, AT) for k, run in enumerate(runs)}
    first = runs[0]
    named = {"even": _even(total), **at_30, "ours": first.splits[-1]}
    known = cluster_of(kind, speeds, forward_shares, sample_ms / 1e3)
    found = _search(task, first, named, _guesses(known, total, speeds), moved, search_s)
    return {**found, "over_best_at_30": [found["over_best"][name] for name in at_30], "plan_path": first.path()}


def stability(kind: str, total: int, speeds: Sequence[float], *, steps: int, device: str) -> dict[str, Any]:
    """Train for long at one total, and return where plans went."""
    return about(train(Task(kind, largest=total, device=device), total, steps))


def noisy(
    kind: str,
    total: int,
    speeds: Sequence[float],
    *,
    sample_ms: float,
    steps: int,
    disturbed: int,
    start: int,
    slower: float,
    device: str,
) -> dict[str, Any]:
    """Train beside a neighbour who takes one rank's device away every other step, at random, from `start` on.

    The disturbed rank has 1/`slower` of its speed in those steps.
    """
    rng, rank, told = np.random.default_rng(3), dist.get_rank(), _Changes()

    def disturb(step: int) -> None:
        if step >= start and rank == disturbed:
            set_speed(speeds[rank] / (slower if rng.random() < 0.5 else 1.0), sample_ms)

    run = train(Task(kind, largest=total, device=device), total, steps, before=disturb, observers=[told])
    set_speed(speeds[rank], sample_ms)
    return {
        **about(run),
        "start": start,
        "before_ms": 1e3 * float(np.median(run.seconds[max(0, start - 50) : start])),
        "changes_under_load": sum(step > start for step in run.first_steps),
        "changes_of_speed": told.changes,
    }


def sharing(
    kind: str,
    total: int,
    speeds: Sequence[float],
    *,
    steps: int,
    disturbed: int,
    start: int,
    rounds: int,
    device: str,
) -> dict[str, Any]:
    """Begin a second load on one rank's share in mid-run, and measure the splits that follow while it goes on.

    Beside them are measured splits around the last, and some that give the disturbed rank next to nothing. For shares
    of a GPU by MPS: where ranks spin, such a load disturbs all of them.
    """
    rank, task = dist.get_rank(), Task(kind, largest=total, device=device)
    load, told = _Load(device), _Changes()

    def disturb(step: int) -> None:
        if step == start and rank == disturbed:
            load.start()

    run = train(task, total, steps, before=disturb, observers=[told])
    splits, seconds = run.splits, run.seconds
    last = min(len(splits), start + 31)
    before, ended = splits[start - 1], splits[-1]
    spared = [_with(ended, disturbed, size) for size in (2, max(2, total // 48), max(2, total // 24))]
    tried = list(dict.fromkeys([before, *splits[start:last], ended, *spared, *around(ended, (0.02,))]))
    medians = np.median(by_turns(task, run, tried, rounds), axis=0)
    measured = dict(zip(tried, medians.tolist(), strict=True))
    load.stop.set()
    best = min(tried, key=measured.__getitem__)
    over = {split: measured[split] / measured[best] for split in tried}
    after = seconds[start:]
    return {
        "disturbed_rank": disturbed,
        "before_ms": 1e3 * float(np.median(seconds[max(0, start - 50) : start])),
        "steps_ms": {f"{i} to {j}": 1e3 * float(np.median(after[i:j])) for i, j in ((0, 15), (15, 30), (30, 60))},
        "after_ms": 1e3 * float(np.median(seconds[-50:])),
        "best": best,
        "best_ms": 1e3 * measured[best],
        "over_best": [
            (step - start, splits[step], over[splits[step]]) for step in run.first_steps if start <= step < last
        ],
        "over_best_before_and_at_the_end": [(before, over[before]), (ended, over[ended])],
        "changes_of_speed": told.changes[-5:],
        "plan_path": run.path(),
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

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self._device = device

    def run(self) -> None:
        if self._device == "cpu":
            matrix = torch.randn(256, 256)
            while not self.stop.is_set():
                matrix @ matrix
            return
        stream = torch.cuda.Stream()
        matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(stream):
            while not self.stop.is_set():
                matrix @ matrix
                stream.synchronize()


class QuickLbBsp(LbBspPlanner):
    """LB-BSP that gets to where it stops within a benchmark's time.

    Its first moves are of 1/16 of the total, and halve whenever none of that size helps, down to its own 5 samples
    (1/400 of a large total). Windows stay short. So it ends where LB-BSP as it is would, as far as such moves can tell.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job, samples_moved=max(5, job.batch_size // 16))
        self._fewest = max(5, job.batch_size // 400)

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        before = self._plan
        decision = super().decide(window, job, step)
        was_in_force = window is not None and tuple(window.local_batches[-1].tolist()) == before.local_batches
        if was_in_force and decision.plan.local_batches == before.local_batches:
            self._samples_moved = max(self._fewest, self._samples_moved // 2)
        return replace(decision, settled=False)


def _train_lb_bsp(task: Task, total: int, steps: int) -> Run:
    """Train under LB-BSP until it has not moved for 35 steps."""
    planner = QuickLbBsp(Job(num_ranks=dist.get_world_size(), batch_size=total))

    def is_over(plans: list[Plan]) -> bool:
        return len(plans) >= 40 and len({plan.local_batches for plan in plans[-35:]}) == 1

    return train(task, total, steps, is_over=is_over, policy=planner)


def _search(
    task: Task, run: Run, named: dict[str, Split], guesses: list[Split], moved: Sequence[float], search_s: float
) -> dict[str, Any]:
    """Measure splits around ours and around what should be the best: all, the best of them, and those with the named.

    Args:
        task, run: what trained; its model takes the steps.
        named: splits to report, "ours" among them.
        guesses: splits that should be good.
        moved: shares of the total that are moved from rank to rank of ours, the first of them of other good splits too.
        search_s: seconds to spend, about.
    """
    device, ours = task.device, named["ours"]
    total = sum(ours)
    step_s = float(agreed(float(np.median(run.seconds[-50:])), device))
    planner: Any = run.engine.coordinator.planner
    learned = planner.model().cluster if dist.get_rank() == 0 else None
    optimum = agreed_split(ours if learned is None else optimal_split(learned, total).local_batches, device)
    centres, near = [ours], around(ours, moved)
    for split in (optimum, *guesses):
        if all(np.abs(np.subtract(split, centre)).max() > moved[0] * total for centre in centres):
            centres.append(split)
            near += around(split, moved[:1])
    tried = list(dict.fromkeys([*named.values(), optimum, *guesses, *near]))
    measure = _Measured(task, run)
    measure.more(tried, _rounds(0.25 * search_s, step_s, len(tried), least=3))
    best = measure.best(tried, 6)
    measure.more(best, _rounds(0.15 * search_s, step_s, len(best), least=3))
    # The control is our split under another name: what it differs by is what this measurement cannot tell.
    # The smallest of several medians is too small: beside it is reported the split that was picked before.
    picked = measure.best(best, 1)[0]
    distinct = list(dict.fromkeys([*named.values(), *measure.best(best, 3)]))
    final = [*distinct, ours]
    seconds = by_turns(task, run, final, _rounds(0.6 * search_s, step_s, len(final), least=8), seed=2)
    medians = np.median(seconds, axis=0)
    best_at = int(medians[:-1].argmin())
    rows = {**{name: distinct.index(split) for name, split in named.items()}, "best": best_at}
    rows |= {"picked": distinct.index(picked), "control": len(distinct)}
    return {
        "num_splits": len(tried),
        "steps_each": len(seconds),
        "splits": {name: final[k] for name, k in rows.items()},
        "split_ms": {name: 1e3 * float(medians[k]) for name, k in rows.items()},
        "iqr_pct": {name: _iqr_pct(seconds[:, k]) for name, k in rows.items()},
        "over_best": {name: float(medians[k] / medians[best_at]) for name, k in rows.items()},
        "control_over_ours": float(medians[-1] / medians[rows["ours"]]),
        "model_optimum": optimum,
        "modelled_ms": {name: 1e3 * step_time(learned, final[k]) for name, k in rows.items() if learned is not None},
    }


class _Measured:
    """All seconds measured of each split so far."""

    def __init__(self, task: Task, run: Run) -> None:
        self._task, self._run = task, run
        self._seconds: dict[Split, list[float]] = {}

    def more(self, splits: list[Split], rounds: int) -> None:
        """Measure these some more, but for a first round: new sizes are slow."""
        taken = by_turns(self._task, self._run, splits, rounds, seed=len(self._seconds))
        for split, seconds in zip(splits, taken.T.tolist(), strict=True):
            self._seconds.setdefault(split, []).extend(seconds if split in self._seconds else seconds[1:])

    def best(self, splits: list[Split], num_best: int) -> list[Split]:
        """Return the quickest of these."""
        return sorted(splits, key=lambda split: float(np.median(self._seconds[split])))[:num_best]


def _rounds(seconds: float, step_s: float, num_splits: int, *, least: int) -> int:
    """Return how many rounds of this many steps fit into the time; some in any case."""
    return max(least, min(60, round(seconds / (step_s * num_splits))))


def around(split: Split, shares: Sequence[float]) -> list[Split]:
    """Return this split with these shares of the total moved from each rank to each other."""
    splits = []
    for share, (i, j) in itertools.product(shares, itertools.permutations(range(len(split)), 2)):
        moved, count = list(split), max(1, round(share * sum(split)))
        moved[i], moved[j] = moved[i] + count, moved[j] - count
        if min(moved) >= 2:  # BatchNorm refuses one sample
            splits.append(tuple(moved))
    return splits


def _even(total: int) -> Split:
    n = dist.get_world_size()
    return tuple(total // n + (i < total % n) for i in range(n))


def _guesses(known: Cluster, total: int, speeds: Sequence[float]) -> list[Split]:
    """Return the best split by what is known of the ranks without their real work, and that in proportion to speeds."""
    batches = [max(2, int(total * speed / sum(speeds))) for speed in speeds]
    batches[int(np.argmax(batches))] += total - sum(batches)
    return [optimal_split(known, total).local_batches, tuple(batches)]


def _with(split: Split, rank: int, size: int) -> Split:
    """Return this split with another batch for one rank, the others in their proportions."""
    rest, total = sum(split) - split[rank], sum(split)
    others = [round(batch * (total - size) / rest) for batch in split]
    others[rank] = size
    others[(rank + 1) % len(split)] += total - sum(others)
    return tuple(others)


def _at(run: Run, step: int) -> Split:
    return run.splits[min(step, len(run.splits) - 1)]


def _iqr_pct(seconds: np.ndarray) -> float:
    """Return the distance between the quartiles as a part of the median, in per cent."""
    return float(100 * np.subtract(*np.percentile(seconds, [75, 25])) / np.median(seconds))


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "limit": limit,
    "settling": settling,
    "stability": stability,
    "noisy": noisy,
    "sharing": sharing,
}
