"""Is the advice of `cannikin plan RUN` true? `python -m benchmarks advice`: ranks of the lab that really come and go.

For each shape of cluster a job trains on its ranks, and `cannikin plan RUN --without/--add` says what it would gain
with others. Then it trains on those others, and the gains in goodput are compared; all of it in several rounds. The
total batch stays, so goodput is throughput. Shapes with links need the lab's hosts (Linux, root).

Prints one row for each choice, and keeps every figure as JSON lines under --out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import launching
from cannikin.lab.mechanisms import MECHANISMS
from cannikin.runlog import read_runlog

TOTAL = 32
STEPS = 50
SETTLED = 25  # step from which times count
ROUNDS = 3
LAYERS = 3  # each a bucket: a rank wakes up for each of them, and a busy machine wakes it late


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Ranks by their speeds, which of them leave in turn, and the speeds of those that join in turn.

    `stored` are the ranks of an earlier run, whose profiles are used for ranks that join.
    """

    speeds: tuple[float, ...]
    without: tuple[int, ...] = ()
    add: tuple[float, ...] = ()
    stored: tuple[float, ...] = ()
    sample_ms: float = 40.0
    gradient_kb: float = 64
    link: str | None = None


SHAPES = {
    "spread": Shape(speeds=(1.0, 0.5, 0.25), without=(0, 1, 2), add=(1.0, 0.25)),
    "near": Shape(speeds=(1.0, 0.8, 0.7, 0.6), without=(0, 3), add=(1.0, 0.6), sample_ms=80.0),
    "slow links": Shape(
        speeds=(1.0, 0.5, 0.25), without=(0, 2), add=(1.0, 0.25), sample_ms=60.0, gradient_kb=4096, link="40mbit"
    ),
    "from a store": Shape(speeds=(0.5, 0.25), add=(1.0,), stored=(1.0, 0.5)),
}


def main(argv: list[str] | None = None) -> None:
    """Run the shapes named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks advice", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only this; all if left out")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "cannikin-advice.jsonl")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="each with all shapes")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for each launch")
    options = parser.parse_args([] if argv is None else argv)
    launching.empty(options.out)
    missing = MECHANISMS["hosts"].unavailable()
    for _, name in product(range(options.rounds), options.shape or SHAPES):
        shape = SHAPES[name]
        if shape.link is not None and missing is not None:
            print(f"advice: {name} is left out, since there are no slow links here ({missing})", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
            for row in measure(shape, Path(folder), limit_s=options.limit_s):
                print(json.dumps({"shape": name, **row}), file=out, flush=True)
    print(table(launching.read(options.out)))


def measure(shape: Shape, folder: Path, *, limit_s: float) -> Iterator[dict[str, Any]]:
    """Train on the shape's ranks, then on each choice's; yield what was told and what was found."""
    store = []
    if shape.stored:
        store = ["--profiles", str(folder / "profiles.json")]
        _train(shape, shape.stored, folder / "stored", limit_s, store)
    choices: dict[tuple[str, ...], tuple[float, ...]] = {}
    for rank in shape.without:
        choices["--without", str(rank)] = shape.speeds[:rank] + shape.speeds[rank + 1 :]
    for speed in shape.add:
        choices["--add", device_name(speed)] = (*shape.speeds, speed)
    base = folder / "base"
    _train(shape, shape.speeds, base, limit_s)
    for number, (choice, speeds) in enumerate(choices.items()):
        told, run = advice(base, [*choice, *store]), folder / f"choice{number}"
        _train(shape, speeds, run, limit_s)
        row = {"choice": " ".join(choice), "told": told, "base_ms": step_ms_of(base), "step_ms": step_ms_of(run)}
        yield {"speeds": shape.speeds, **row}


def device_name(speed: float) -> str:
    """Return what a rank of this speed calls its device."""
    return f"device of speed {speed:g}"


def _train(shape: Shape, speeds: tuple[float, ...], run: Path, limit_s: float, store: list[str] | None = None) -> None:
    """Train in the lab on ranks of these speeds, and write the log into `run`."""
    lab = ["--ranks", ",".join(map(str, speeds)), "--sample-ms", str(shape.sample_ms), "--fixed-ms", "5"]
    lab += [] if shape.link is None else ["--link", shape.link]
    names = json.dumps([device_name(speed) for speed in speeds])
    script = ["--run-dir", str(run), "--gradient-kb", str(shape.gradient_kb), "--devices", names, *(store or [])]
    with (run.parent / f"{run.name}.txt").open("w+") as printed:
        note = launching.run_in_lab(lab, Path(__file__), script, limit_s=limit_s, log=printed)
        if note:
            printed.seek(0)
            sys.exit(f"advice: ranks {speeds} {note}\n{printed.read()[-3000:]}")


def step_ms_of(run: Path) -> float:
    """Return the median step time of a run's windows, once it has settled."""
    windows = read_runlog(run).windows
    return median(window.step_ms for window in windows if window.step_ms and window.first_step >= SETTLED)


def advice(run: Path, options: list[str]) -> float:
    """Return the gain that `cannikin plan` promises."""
    command = [sys.executable, "-m", "cannikin", "plan", str(run), *options, "--json"]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    gain: float = answer["choices"][0]["gain"]
    return gain


def table(rows: list[dict[str, Any]]) -> str:
    """Return what was told and what was found in the median of the rounds, as a table for people."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        speeds = ", ".join(f"{speed:g}" for speed in row["speeds"])
        groups.setdefault((row["shape"], speeds, row["choice"]), []).append(row)
    lines = [
        "shape         ranks             choice                         told    found    off   found in each round"
    ]
    for (shape, speeds, choice), rounds in groups.items():
        gains = [row["base_ms"] / row["step_ms"] - 1 for row in rounds]
        told, found = median(row["told"] for row in rounds), median(gains)
        cells = f"{told:+8.1%} {found:+8.1%} {(1 + told) / (1 + found) - 1:+6.1%}"
        each = ", ".join(f"{gain:+.1%}" for gain in gains)
        lines.append(f"{shape:<13} {speeds:<17} {choice:<27} {cells}   {each}")
    return "\n".join(lines)


def train(arguments: list[str]) -> None:
    """Train as one rank of the lab."""
    parser = argparse.ArgumentParser()
    for name in ("--run-dir", "--gradient-kb", "--devices", "--profiles"):
        parser.add_argument(name)
    options = parser.parse_args(arguments)
    os.environ["CANNIKIN_DEVICE"] = json.loads(options.devices)[int(os.environ["RANK"])]

    import torch
    from torch import nn

    from benchmarks.lab_ranks import CLASSES, WIDTH, Scaled
    from benchmarks.sample_numbers import Numbers
    from cannikin import HeteroDataLoader, HeteroDataParallel

    torch.manual_seed(0)
    num_rows = max(1, round(float(options.gradient_kb) * 1024 / 4 / LAYERS / WIDTH) - WIDTH)
    net = nn.Sequential(*[Scaled(num_rows) for _ in range(LAYERS)], nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    bucket_mb = (num_rows + WIDTH) * WIDTH * 4 / 2**20  # a bucket for each layer
    model = HeteroDataParallel(
        net, optimizer, run_dir=options.run_dir, profiles=options.profiles, bucket_cap_mb=bucket_mb
    )
    loader = HeteroDataLoader(Numbers(TOTAL * STEPS), model=model, batch_size=TOTAL, shuffle=False, collate_fn=len)
    inputs, labels = torch.randn(TOTAL, WIDTH), torch.randint(0, CLASSES, (TOTAL,))
    for size in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[:size]), labels[:size]).backward()
        optimizer.step()


if __name__ == "__main__":
    train(sys.argv[1:])
