"""Replicas that are killed and come back under torchft: seconds without a step, samples lost and repeated, weights.

    python -m benchmarks.torchft_churn                three replicas of speeds 1, 1/2, 1/4: the slowest is lost and
                                                      comes back, then the first one, whose plans all follow
    python -m benchmarks.torchft_churn --kills 20     20 kills of replicas at random, at random moments
    python -m benchmarks.torchft_churn --stop-s 30    the second one hangs for so long, beyond all time limits

It needs torchft. Every replica records what it trained on; what counts are the steps that led to the final weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torchft.coordination import LighthouseServer

from benchmarks.torchft_replica import Numbers, Setting, make_network, make_optimizer, train
from cannikin.runtime.passes import epoch_order

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.torchft_replica"])  # a replica starts at once: torch is imported already

SAMPLE_MS = {"a": 1.0, "b": 2.0, "c": 4.0}  # speeds 1, 1/2 and 1/4; on a busy machine slower ones are measured better
GOOD = 1.05  # a split is good where its slowest replica takes at most so much longer than the best split's


class Churn:
    """A lighthouse, and replicas that it kills and starts again.

    Args:
        out: an empty folder for what replicas record.
        sample_ms: how long each replica takes for a sample, by name.
        heartbeat_timeout_ms: after which the lighthouse takes a silent replica for dead.
        setting: further fields of `torchft_replica.Setting`.
    """

    def __init__(
        self, out: Path, sample_ms: dict[str, float], *, heartbeat_timeout_ms: int = 1000, **setting: int
    ) -> None:
        self.out = out
        self.sample_ms = sample_ms
        self._running: dict[str, Any] = {}
        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=10_000,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )
        address = f"http://127.0.0.1:{self._lighthouse.address().rpartition(':')[2]}"
        self.setting = Setting(out=str(out), lighthouse=address, **setting)

    def start(self, name: str) -> float:
        """Start a replica, and return when."""
        arguments = (name, self.sample_ms[name] / 1e3, self.setting)
        self._running[name] = _context.Process(target=train, args=arguments)
        self._running[name].start()
        return time.time()

    def kill(self, name: str) -> float:
        """Kill a replica as a lost machine would be, and return when."""
        process = self._running.pop(name)
        process.kill()
        killed_s = time.time()
        process.join()
        return killed_s

    def stop(self, name: str, seconds: float) -> None:
        """Stop a replica and all of its threads for so long, as a machine that hangs."""
        os.kill(self._running[name].pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self._running[name].pid, signal.SIGCONT)

    def wait_for(self, num_steps: int, num_members: int, *, limit_s: float) -> None:
        """Wait until a step from this one on has been committed by so many members."""
        until_s = time.monotonic() + limit_s
        while not any(
            step["step"] >= num_steps and len(step["plan"]) == num_members and step["committed"]
            for step in self.steps()
        ):
            self._check(until_s)
            time.sleep(0.05)

    def wait(self, *, limit_s: float) -> None:
        """Wait until all replicas have ended well."""
        until_s = time.monotonic() + limit_s
        while any(process.exitcode is None for process in self._running.values()):
            self._check(until_s)
            time.sleep(0.1)
        self._check(until_s)

    def _check(self, until_s: float) -> None:
        for name, process in self._running.items():
            if process.exitcode not in (None, 0):
                last = (self.out / f"{name}.log").read_text().splitlines()[-30:]
                raise RuntimeError("\n".join([f"replica {name} ended with status {process.exitcode}", *last]))
        if time.monotonic() > until_s:
            raise TimeoutError(f"replicas {', '.join(self._running)} took too long: see {self.out}")

    def close(self) -> None:
        """End whatever still runs."""
        for name in [*self._running]:
            self.kill(name)
        self._lighthouse.shutdown()

    def records(self) -> list[dict[str, Any]]:
        """Return all that replicas have recorded so far; a line that is being written is left out."""
        texts = [path.read_text() for path in sorted(self.out.glob("*.jsonl"))]
        return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> list[dict[str, Any]]:
        """Return all ended steps of all replicas."""
        return [record for record in self.records() if "step" in record]


@contextmanager
def churn(sample_ms: dict[str, float], **options: int) -> Iterator[Churn]:
    """Start these replicas; whatever happens, none survives."""
    with tempfile.TemporaryDirectory() as folder:
        running = Churn(Path(folder), sample_ms, **options)
        try:
            for name in sample_ms:
                running.start(name)
            yield running
        finally:
            running.close()


@dataclass(frozen=True, kw_only=True)
class Count:
    """What became of the samples and the weights.

    Args:
        num_steps: committed, on the way to the final weights.
        num_failed: attempts of single replicas that were not committed.
        lost, repeated: samples over all epochs.
        off: largest difference of a weight from one process on the same batches, over the largest weight.
    """

    num_steps: int
    num_failed: int
    lost: int
    repeated: int
    off: float


def count(running: Churn) -> Count:
    """Follow the steps that led to the final weights, count their samples, and train one process on the same ones."""
    num_samples = running.setting.num_samples
    records = running.records()
    ends = {record["final"] for record in records if "final" in record}
    assert len(ends) == 1, f"replicas ended with different histories: {ends}"
    by_end = {step["after"]: step for step in running.steps() if step["committed"]}
    parts: dict[tuple[int, str], dict[str, list[int]]] = {}
    for record in records:
        if "begun" in record:
            attempt = parts.setdefault((record["begun"], json.dumps(record["plan"])), {})
            attempt[record["name"]] = record["mine"]
    path, at = [], ends.pop()
    while at != 0:
        path.append(by_end[at])
        at = by_end[at]["before"]
    path.reverse()

    network, seen = make_network(), Counter[tuple[int, int]]()
    optimizer = make_optimizer(network)
    data = Numbers(num_samples)
    for step in path:
        attempt = parts[step["before"], json.dumps(step["plan"])]
        indices = [index for name in step["plan"] for index in attempt[name]]
        seen.update((step["epoch"], index) for index in indices)
        order = epoch_order(num_samples, seed=0, epoch=step["epoch"], shuffle=True)
        assert indices == order[step["position"] : step["position"] + len(indices)].tolist()
        _, samples, targets = zip(*(data[index] for index in indices), strict=True)
        loss = torch.nn.functional.mse_loss(network(torch.stack(samples)), torch.stack(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    num_epochs = 1 + max(step["epoch"] for step in path)
    saved = [torch.load(file) for file in sorted(running.out.glob("*.pt"))]
    largest = max(float(weight.abs().max()) for weight in network.state_dict().values())
    differences = [
        float((weights[name] - weight).abs().max())
        for weights in saved
        for name, weight in network.state_dict().items()
    ]
    return Count(
        num_steps=len(path),
        num_failed=sum(not step["committed"] for step in running.steps()),
        lost=num_epochs * num_samples - len(seen),
        repeated=sum(times - 1 for times in seen.values()),
        off=max(differences) / largest,
    )


def pause_s(running: Churn, when_s: float, until_s: float) -> float:
    """Return the longest time without a committed step, of those that began or ended between two moments."""
    ends = sorted(step["ended_s"] for step in running.steps() if step["committed"])
    gaps = [(end - begin, begin, end) for begin, end in pairwise(ends)]
    return max(gap for gap, begin, end in gaps if end >= when_s and begin <= until_s)


def best_s(sample_ms: list[float], total: int) -> float:
    """Return the time of the best split in whole numbers, in ms: the least T for which all samples have a place."""
    times = sorted({batch * each for each in sample_ms for batch in range(total + 1)})
    return next(t for t in times if sum(int(t / each + 1e-9) for each in sample_ms) >= total)


def settling(running: Churn, names: tuple[str, ...], when_s: float) -> list[str]:
    """Return how the plans of these members came to be good after a moment: steps, split, and time over the best."""
    steps = {s["step"]: s for s in running.steps() if s["committed"] and s["began_s"] >= when_s}
    told, last = [], None
    first = None
    for number in sorted(steps):
        plan = steps[number]["plan"]
        if tuple(plan) != names:
            if first is not None:
                break
            continue
        first = number if first is None else first
        if plan != last:
            sample_ms = [running.sample_ms[name] for name in names]
            slowest = max(batch * each for batch, each in zip(plan.values(), sample_ms, strict=True))
            over = slowest / best_s(sample_ms, sum(plan.values())) - 1
            told.append(f"{tuple(plan.values())} from step {number - first} on, {over:+.0%}")
            last = plan
    return told


def scenario(running: Churn) -> None:
    """Lose the slowest replica and have it back, then the first one, whose plans all follow; print what happened."""
    limit_s = 240.0
    running.wait_for(60, 3, limit_s=limit_s)
    for name in ("c", "a"):
        rest = tuple(each for each in "abc" if each != name)
        lost_s = running.kill(name)
        before = max(step["step"] for step in running.steps())
        running.wait_for(before + 40, 2, limit_s=limit_s)
        pause = pause_s(running, lost_s, lost_s + 1)
        print(f"{name} killed: {pause:.2f} s without a step; plans of {rest}: {settling(running, rest, lost_s)}")
        back_s = running.start(name)
        before = max(step["step"] for step in running.steps())
        running.wait_for(before + 1, 3, limit_s=limit_s)
        in_s = min(s["ended_s"] for s in running.steps() if s["ended_s"] > back_s and len(s["plan"]) == 3)
        before = max(step["step"] for step in running.steps())
        running.wait_for(before + 60, 3, limit_s=limit_s)
        pause = pause_s(running, in_s - 0.1, in_s)
        told = settling(running, ("a", "b", "c"), lost_s)
        print(f"{name} back {in_s - back_s:.1f} s after its start: {pause:.2f} s without a step; plans: {told}")


def hang(running: Churn, seconds: float) -> None:
    """Stop the second replica for so long; print how long the others were without a step, and when all are together."""
    running.wait_for(60, 3, limit_s=240.0)
    stopped_s = time.time()
    running.stop("b", seconds)
    woken_s = time.time()
    before = max(step["step"] for step in running.steps())
    running.wait_for(before + 1, 3, limit_s=240.0)
    together_s = min(s["ended_s"] for s in running.steps() if s["ended_s"] > woken_s and len(s["plan"]) == 3)
    pause = pause_s(running, stopped_s, woken_s)
    print(
        f"b stopped for {seconds:.0f} s: {pause:.2f} s without a step, together {together_s - woken_s:.1f} s after it"
    )


def at_random(running: Churn, num_kills: int, seed: int) -> None:
    """Kill replicas at random, never the last one, and start them again after a while; print the pauses."""
    chance = random.Random(seed)
    running.wait_for(5, 3, limit_s=120.0)
    pauses = []
    for _ in range(num_kills):
        time.sleep(chance.uniform(0.2, 3.0))
        name = chance.choice("abc")
        lost_s = running.kill(name)
        time.sleep(chance.uniform(0.0, 4.0))
        running.start(name)
        running.wait_for(1 + max(step["step"] for step in running.steps()), 3, limit_s=120.0)
        pauses.append(pause_s(running, lost_s, time.time()))
    print(f"{num_kills} kills: without a step for {median(pauses):.2f} s in the median, {max(pauses):.2f} s at most")


def main(arguments: list[str] | None = None) -> None:
    """Run one of the two, and count."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torchft_churn", description=__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--stop-s", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--heartbeat-timeout-ms", type=int, default=1000)
    parser.add_argument("--slower", type=float, default=1.0, help="how many times as long every sample takes")
    options = parser.parse_args(arguments or [])
    with churn(
        {name: options.slower * each for name, each in SAMPLE_MS.items()},
        heartbeat_timeout_ms=options.heartbeat_timeout_ms,
        num_epochs=options.epochs,
        num_workers=options.workers,
    ) as running:
        if options.stop_s:
            hang(running, options.stop_s)
        elif options.kills:
            at_random(running, options.kills, options.seed)
        else:
            scenario(running)
        running.wait(limit_s=300.0)
        print(count(running))


if __name__ == "__main__":
    main(sys.argv[1:])
