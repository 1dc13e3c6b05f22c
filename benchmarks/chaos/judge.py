"""What came of a chain: which samples count, what each fault cost, and whether the weights are right.

The lineage that survives is the work before the snapshot that each launch loaded, and everything after it in that
launch. Along it every epoch must have every sample once; what a launch did beyond the snapshot that the next one loaded
is done again and counts as neither lost nor repeated.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.faults import FIXED_S, KINDS, SAMPLE_S, SPEEDS, Chain, Fault
from benchmarks.chaos.launch import Ended
from benchmarks.chaos.rank import flat, network, sample
from cannikin.runtime.ending import EXIT_STATUS
from cannikin.runtime.passes import epoch_order

GOOD = 0.1  # a split is good whose device time is within this of the best one's
# How a message tells what to do; torch's "check the logs of the remote worker" does not say of which.
_REMEDY = re.compile(r"restart|resum|start again|snapshot", re.I)

_WAITS = re.compile(r"waits for (ranks? [\d, and]+)")  # what a rank says, long before it gives up

Line = dict[str, Any]
Step = tuple[int, list[int], bool]  # the epoch, the samples of all ranks, and whether the optimizer left it out


@dataclass(frozen=True, kw_only=True, eq=False)
class Told:
    """What the ranks of one launch wrote down, and what they printed, by rank."""

    diaries: list[list[Line]]
    ended: Ended
    printed: list[str]

    @property
    def mark(self) -> tuple[int, int] | None:
        """The launch and the number of its steps that the loaded snapshot holds."""
        marks = {tuple(line["mark"]) for diary in self.diaries for line in _of(diary, "loaded") if line["mark"]}
        assert len(marks) <= 1, f"ranks loaded different snapshots: {marks}"
        return next(iter(marks), None)

    @property
    def num_steps(self) -> int:
        """Steps that every rank began, so that all but the last were trained on."""
        return min(len(_of(diary, "step")) for diary in self.diaries)

    def step(self, number: int) -> Step:
        """Return one of the steps."""
        lines = [_of(diary, "step")[number] for diary in self.diaries]
        (epoch,) = {line["epoch"] for line in lines}
        skipped = any(line["step"] == number for line in _of(self.diaries[0], "skipped"))
        return epoch, [index for line in lines for index in line["samples"]], skipped


def read(folder: Path, ended: Ended) -> Told:
    """Read what ranks wrote; a line that a kill cut off is left out."""
    ranks = range(len(ended.statuses))
    diaries, printed = ([_text(folder / f"rank{rank}.{kind}") for rank in ranks] for kind in ("jsonl", "err"))
    parsed = [[json.loads(line) for line in text.split("\n")[:-1]] for text in diaries]
    return Told(diaries=parsed, ended=ended, printed=printed)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _of(diary: list[Line], what: str) -> list[Line]:
    return [line for line in diary if line["what"] == what]


def lineage(launches: list[Told], mark: tuple[int, int] | None = None) -> list[Step]:
    """Return the steps, in order, that the weights at a mark are made of; at the end of the last launch by default."""
    number, end = (len(launches) - 1, launches[-1].num_steps) if mark is None else mark
    parts: list[list[Step]] = []
    while True:
        parts.append([launches[number].step(step) for step in range(end)])
        mark = launches[number].mark
        if mark is None:
            return [step for part in reversed(parts) for step in part]
        number, end = mark


def count_samples(steps: list[Step], chain: Chain) -> dict[str, int]:
    """Return how many samples a lineage of whole epochs has, how many it lacks and how many it has too often."""
    seen: dict[int, Counter[int]] = {}
    for epoch, samples, _ in steps:
        seen.setdefault(epoch, Counter()).update(samples)
    epochs = range(max(seen) + 1)
    lost = sum(chain.num_samples - len(seen.get(epoch, ())) for epoch in epochs)
    repeated = sum(count - 1 for counter in seen.values() for count in counter.values())
    return {"samples": sum(map(Counter.total, seen.values())), "lost": lost, "repeated": repeated}


def undisturbed(chain: Chain, num_epochs: int, skipped: set[int]) -> list[Step]:
    """Return the steps of one process that nothing happens to, but for those steps that NaN makes it leave out."""
    steps: list[Step] = []
    for epoch in range(num_epochs):
        order = epoch_order(chain.num_samples, seed=chain.number, epoch=epoch, shuffle=True)
        for start in range(0, chain.num_samples, chain.batch_size):
            samples = [int(index) for index in order[start : start + chain.batch_size]]
            steps.append((epoch, samples, len(steps) in skipped))
    return steps


def weights_after(steps: list[Step]) -> torch.Tensor:
    """Train on these steps in this process, and return the weights."""
    net, optimizer = network()
    for _, samples, skipped in steps:
        if skipped:
            continue
        features, targets = sample(torch.tensor(samples))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(features), targets).backward()
        optimizer.step()
    return flat(net)


def judge_chain(chain: Chain, launches: list[Told]) -> Line:
    """Return what the whole chain shows: samples, and weights against the undisturbed run, or the committed steps."""
    steps = lineage(launches)
    counts = count_samples(steps, chain)
    fixed = chain.max_batch_size is None
    skipped = {number for number, step in enumerate(steps) if step[2]}
    reference = undisturbed(chain, steps[-1][0] + 1, skipped) if fixed else steps
    wanted = weights_after(reference)
    off = [_off(diary, "weights", wanted) for diary in launches[-1].diaries]
    loads = []  # what each launch began with
    for told in launches:
        before = weights_after([] if told.mark is None else lineage(launches, told.mark))
        loads.append(max((_off(diary, "loaded", before) for diary in told.diaries), default=0.0))
    return {
        **counts,
        "steps": len(steps),
        "epochs": steps[-1][0] + 1,
        "nan_steps": len(skipped),
        "against": "undisturbed" if fixed else "committed steps",
        "weights_off": max(off),
        "loads_off": loads,
    }


def _off(diary: list[Line], what: str, wanted: torch.Tensor) -> float:
    """Return how far a rank's weights are from those wanted, relative to the largest; 0 where it came to none."""
    lines = _of(diary, what)
    if not lines:
        return 0.0
    weights = torch.tensor(lines[-1]["weights"], dtype=torch.float64)
    return float((weights - wanted).abs().max() / wanted.abs().max())


# What each fault cost.


def judge_fault(chain: Chain, launches: list[Told], number: int, which: int) -> Line:
    """Return what one fault of a launch cost, as far as the chain has come; `struck` is whether it happened at all."""
    told, fault = launches[number], chain.launches[number].faults[which]
    at_s = _struck_s(told, fault, which)
    line: Line = {
        "kind": fault.kind,
        "rank": fault.rank,
        "ranks": len(told.diaries),
        "step": fault.step,
        "struck": at_s is not None,
    }
    if at_s is None:
        return line
    following = launches[number + 1] if number + 1 < len(launches) else None
    if not KINDS[fault.kind].ends:
        pause_s = 0.0 if fault.kind in ("slow spell", "NaN", "disk full") else fault.length
        line["go_on_s"] = _after(told, at_s + pause_s)
        return line
    line["hung"], line["hung_at"] = told.ended.hung, told.ended.hung_at
    line["torn"] = told.ended.torn
    line["messages"] = _messages(told, fault)
    ends_s = [end_s for rank, end_s in enumerate(told.ended.end_s) if end_s and rank not in _struck_ranks(told, fault)]
    line["end_s"] = max((end_s - at_s for end_s in ends_s), default=0.0)
    if following is not None and following.num_steps > 1:
        line["go_on_s"] = max(_of(diary, "step")[1]["at_s"] for diary in following.diaries) - at_s
        mark = following.mark
        line["steps_again"] = _steps_again(launches, number, mark)
        line |= settling(following, chain.launches[number + 1].members, chain.launches[number + 1].faults)
    return line


def _steps_again(launches: list[Told], number: int, mark: tuple[int, int] | None) -> int:
    """Return how many steps were trained on and are trained on once more, over all launches since the snapshot's."""
    first, kept = (0, 0) if mark is None else mark
    done = sum(max(0, told.num_steps - 1) for told in launches[first : number + 1])
    return max(0, done - kept)


def _struck_s(told: Told, fault: Fault, which: int) -> float | None:
    if KINDS[fault.kind].place == "outside":
        return told.ended.fault_s.get(which)
    lines = [line for line in _of(told.diaries[fault.rank], "fault") if line["number"] == which]
    return lines[0]["at_s"] if lines else None


def _struck_ranks(told: Told, fault: Fault) -> set[int]:
    """Return the ranks that the fault itself ended or silenced: nothing is asked of their last words."""
    if fault.kind in ("SIGTERM to all ranks", "a rank joins", "another order of ranks"):
        return set(range(len(told.diaries)))
    return {fault.rank}


def _after(told: Told, at_s: float) -> float | None:
    """Return the seconds from a moment until every rank has begun a step after it; None where none came."""
    begun = [[line["at_s"] for line in _of(diary, "step") if line["at_s"] > at_s] for diary in told.diaries]
    return max(steps[0] for steps in begun) - at_s if all(begun) else None


def _messages(told: Told, fault: Fault) -> list[Line]:
    """Return the last words of the ranks that the fault did not strike: whether they name its rank and a remedy.

    Left out are those of `init_process_group`, which the script calls before there is anything of ours, and of ranks
    that left in order, after a snapshot.
    """
    found = []
    for rank, diary in enumerate(told.diaries):
        if rank in _struck_ranks(told, fault) or rank in told.ended.hung or not _of(diary, "grouped"):
            continue
        if told.ended.statuses[rank] == EXIT_STATUS:
            continue
        printed = told.printed[rank]
        text = next((line["error"] for line in _of(diary, "end")), f"exit status {told.ended.statuses[rank]}")
        text = re.sub(r"\S*/\S+", "PATH", text)  # which may have any words in it
        found.append(
            {
                "rank": rank,
                "text": text,
                "where": next((line.get("where", []) for line in _of(diary, "end")), []),
                "names_rank": re.search(rf"\brank {fault.rank}\b", text) is not None,
                "names_remedy": _REMEDY.search(text) is not None,
                "warned": any(str(fault.rank) in re.findall(r"\d+", names) for names in _WAITS.findall(printed)),
            }
        )
    return found


def settling(told: Told, members: tuple[int, ...], faults: tuple[Fault, ...]) -> Line:
    """Return how far the first plan of a launch is from the best, and after how many steps one is good.

    `to_good` is None where the launch ended, or a slow spell began, before one was: then `to_good_beyond` has how many
    steps it was not.
    """
    plans = [line["plan"] for line in _of(told.diaries[0], "step")]
    slow = [fault.step for fault in faults if fault.kind == "slow spell"]
    plans = plans[: min([len(plans), *slow])]
    if not plans:
        return {}
    speeds = [SPEEDS[device] for device in members]
    excesses = [excess(plan, speeds) for plan in plans]
    good = next((step for step, value in enumerate(excesses) if value <= GOOD), None)
    return {"first_excess": excesses[0], "to_good": good, "to_good_beyond": None if good is not None else len(plans)}


def excess(local_batches: list[int], speeds: list[float]) -> float:
    """Return a split's device time over the least that a split of its total has, minus 1.

    Example:
        >>> excess([20, 10], [1.0, 0.5]), round(excess([15, 15], [1.0, 0.5]), 2)
        (0.0, 0.44)
    """

    def slowest_s(batches: list[int]) -> float:
        return max(FIXED_S + SAMPLE_S * size / speed for size, speed in zip(batches, speeds, strict=True))

    best = [0] * len(speeds)
    for _ in range(sum(local_batches)):  # each sample to the rank that is done with it first
        first = min(range(len(speeds)), key=lambda rank: (best[rank] + 1) / speeds[rank])
        best[first] += 1
    return slowest_s(local_batches) / slowest_s(best) - 1
