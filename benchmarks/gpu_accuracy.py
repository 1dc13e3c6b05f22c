"""Time to accuracy on ranks of one NVIDIA GPU: an example under each policy, and under fixed batches and rates.

    python -m benchmarks.gpu_accuracy cifar10 --data DIR --out RESULTS --seeds 0,1 --target 0.94 \\
        --fixed 512:0.3,1024:0.4,2048:0.6 --within 570

Under `--mechanism gpu` (the default) ranks spin in proportion to their samples, with NCCL between them; under `mps`
they have shares of the GPU, with gloo. `--device cpu` tries it out on ranks that sleep: add the example's `--quick`.

Policies start at the example's own batch, and even and lb-bsp stay there. `--fixed BATCH:RATE` are runs at another one
that stays: each is plain DDP (`even`), and with `--split-too` also ours (`cannikin`), which differs by the split alone.
All of them run with the first seed, and with further seeds only the one that was quickest to the target: the best fixed
batch and learning rate among those tried.

The time to target is the training time, evaluation not counted, up to the first evaluation at or above it; with
--target a run ends there. No run begins later than --within seconds, and one beyond --limit-s is given up. Every run's
summary is appended to RESULTS/results.jsonl at once. Flags that are not known here are the example's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import launching
from benchmarks.gpu import commit

TARGETS = {"cifar10": ("accuracy", 0.94), "ncf": ("hit_rate", 0.69)}
SAMPLE_MS = {"cifar10": 0.04, "ncf": 0.002}
RANKS = {"gpu": "1,0.5,0.25", "mps": "0.6,0.25,0.12", "portable": "1,0.5,0.25"}
POLICIES = "cannikin,adaptdl,lb-bsp,even"
SHORTEST_S = 30.0  # of time left, in which a run may begin


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run to do, whatever its seed: a policy, and where it is fixed a batch and a learning rate."""

    policy: str
    fixed: str = ""

    @property
    def name(self) -> str:
        """The run's name in tables and files."""
        return f"{self.policy}-{self.fixed.replace(':', 'x')}" if self.fixed else self.policy

    def flags(self) -> list[str]:
        """Return what the example is told."""
        if not self.fixed:
            return []
        batch, rate = self.fixed.split(":")
        return ["--batch-size", batch, "--lr", rate, "--max-batch-size", "0"]


def run(options: argparse.Namespace, entry: Entry, seed: int, settings: list[str]) -> dict[str, Any]:
    """Do one run, and return its summary, with a note where it did not come to its end."""
    example, mechanism = options.example, options.mechanism
    name = f"{example}-{entry.name}-{seed}"
    summary = options.out / f"{name}.json"
    summary.unlink(missing_ok=True)
    lab_options = ["--mechanism", mechanism, "--ranks", options.ranks, "--policy", entry.policy]
    if mechanism != "mps":
        lab_options += ["--sample-ms", str(options.sample_ms)]
    script = launching.ROOT / "examples" / f"{example}.py"
    arguments = ["--data", str(options.data), "--seed", str(seed), "--json", str(summary), *settings, *entry.flags()]
    # Examples take gloo where several ranks share a GPU, unless they are told.
    environment = {"CANNIKIN_BACKEND": "nccl"} if mechanism == "gpu" else {}
    limit_s = min(options.limit_s, options.until - time.time())
    with (options.out / f"{name}.log").open("w") as log:
        note = launching.run_in_lab(lab_options, script, arguments, limit_s=limit_s, log=log, environment=environment)
    found = json.loads(summary.read_text()) if summary.exists() else {"epochs": []}
    about = {"mechanism": mechanism, "ranks": options.ranks, "sample_ms": options.sample_ms, "commit": options.commit}
    return {**found, **about, "example": example, "entry": entry.name, "seed": seed, "note": note}


def reached(result: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first epoch at or above the target; None where there is none."""
    metric, target = TARGETS[result["example"]]
    return next((epoch for epoch in result["epochs"] if epoch[metric] >= target), None)


def line(result: dict[str, Any]) -> str:
    """Return one run's line of the table."""
    metric, target = TARGETS[result["example"]]
    head = f"{result['example']:8} {result['entry']:18} seed {result['seed']}"
    epochs, first = result["epochs"], reached(result)
    if not epochs:
        return f"{head}  {result['note'] or 'no summary'}"
    time_to = "not reached" if first is None else f"{first['train_s']:6.1f} s (epoch {first['epoch']})"
    batches = "+".join(map(str, epochs[-1]["local_batches"]))
    return (
        f"{head}  to {target}: {time_to}; last {epochs[-1][metric]:.4f}, best {max(e[metric] for e in epochs):.4f}, "
        f"{epochs[-1]['train_s']:.1f} s in all, ends with {epochs[-1]['total_batch']} = {batches} {result['note']}"
    )


def quickest(results: list[dict[str, Any]], entries: list[Entry]) -> list[Entry]:
    """Return the one of these entries that was first at the target; none where none was."""
    times = {result["entry"]: first["train_s"] for result in results if (first := reached(result)) is not None}
    found = [entry for entry in entries if entry.name in times]
    return sorted(found, key=lambda entry: times[entry.name])[:1]


def main(argv: list[str]) -> None:
    """Run the policies and the fixed settings in turn, seed by seed, and print the table last."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("example", choices=TARGETS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mechanism", choices=("gpu", "mps"), default="gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--policies", default=POLICIES, help="with commas between")
    parser.add_argument("--fixed", default="", metavar="BATCH:RATE,...", help="batches that stay, with their rates")
    parser.add_argument("--split-too", action="store_true", help="fixed batches also under our split")
    parser.add_argument("--seeds", default="0", help="with commas between")
    parser.add_argument("--ranks", help="speeds, or shares of the GPU")
    parser.add_argument("--sample-ms", type=float, help="what a rank of speed 1 spins per sample")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for each run")
    parser.add_argument("--within", type=float, default=36_000.0, metavar="S", help="seconds for all of them")
    options, settings = parser.parse_known_args(argv)
    options.mechanism = "portable" if options.device == "cpu" else options.mechanism
    options.ranks = options.ranks or RANKS[options.mechanism]
    options.sample_ms = options.sample_ms or SAMPLE_MS[options.example]
    options.until, options.commit = time.time() + options.within, commit()
    options.out.mkdir(parents=True, exist_ok=True)
    policies = [Entry(policy=policy) for policy in options.policies.split(",") if policy]
    split_by = ("even", "cannikin") if options.split_too else ("even",)
    fixed = {
        policy: [Entry(policy=policy, fixed=each) for each in options.fixed.split(",") if each] for policy in split_by
    }
    results: list[dict[str, Any]] = []
    for seed in map(int, options.seeds.split(",")):
        for entry in [*policies, *(entry for entries in fixed.values() for entry in entries)]:
            if time.time() + SHORTEST_S > options.until:
                continue
            results.append(run(options, entry, seed, settings))
            with (options.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
            print(line(results[-1]), flush=True)
        fixed = {policy: quickest(results, entries) for policy, entries in fixed.items()}
    about = f"{options.mechanism} {options.ranks}, {options.sample_ms} ms per sample, commit {options.commit}"
    print("\n".join(["", about, *(line(result) for result in results)]))


if __name__ == "__main__":
    main(sys.argv[1:])
