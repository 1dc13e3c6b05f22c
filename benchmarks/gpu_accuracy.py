"""Time to accuracy on unequal shares of one NVIDIA GPU: an example under each policy, one after the other.

    python -m benchmarks.gpu_accuracy cifar10 --data DIR --out RESULTS --policies cannikin,even --seeds 0,1

Every run goes on to the end of its schedule; the time to target is the training time, evaluation not counted, up to the
first evaluation at or above it. A run beyond --limit-s is given up, and the table says so. Flags that are not known
here are the example's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import launching

SHARES = "0.6,0.25,0.12"
TARGETS = {"cifar10": ("accuracy", 0.94), "ncf": ("hit_rate", 0.69)}
POLICIES = "cannikin,adaptdl,lb-bsp,even"


def run(options: argparse.Namespace, policy: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Do one run, and return its summary, with a note where it did not come to its end."""
    example = options.example
    name = f"{example}-{policy}-{seed}"
    summary = options.out / f"{name}.json"
    summary.unlink(missing_ok=True)
    lab_options = ["--mechanism", "mps", "--ranks", options.shares, "--policy", policy]
    script = launching.ROOT / "examples" / f"{example}.py"
    arguments = ["--data", str(options.data), "--seed", str(seed), "--json", str(summary), *settings]
    with (options.out / f"{name}.log").open("w") as log:
        note = launching.run_in_lab(lab_options, script, arguments, limit_s=options.limit_s, log=log)
    found = json.loads(summary.read_text()) if summary.exists() else {"epochs": []}
    return {**found, "example": example, "policy": policy, "seed": seed, "note": note}


def line(result: dict[str, Any]) -> str:
    """Return one run's line of the table."""
    metric, target = TARGETS[result["example"]]
    head = f"{result['example']:8} {result['policy']:9} seed {result['seed']}"
    epochs = result["epochs"]
    if not epochs:
        return f"{head}  {result['note'] or 'no summary'}"
    reached = next((epoch for epoch in epochs if epoch[metric] >= target), None)
    time_to = "not reached" if reached is None else f"{reached['train_s']:6.1f} s (epoch {reached['epoch']})"
    batches = "+".join(map(str, epochs[-1]["local_batches"]))
    return (
        f"{head}  to {target}: {time_to}; last {epochs[-1][metric]:.4f}, best {max(e[metric] for e in epochs):.4f}, "
        f"{epochs[-1]['train_s']:.1f} s in all, ends with {epochs[-1]['total_batch']} = {batches} {result['note']}"
    )


def main(argv: list[str]) -> None:
    """Run the policies in turn, seed by seed, and print the table last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_accuracy", description=__doc__)
    parser.add_argument("example", choices=TARGETS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--shares", default=SHARES)
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for each run")
    options, settings = parser.parse_known_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for seed in map(int, options.seeds.split(",")):
        for policy in options.policies.split(","):
            lines.append(line(run(options, policy, seed, settings)))
            print(lines[-1], flush=True)
    print("\n".join(["", f"shares {options.shares}", *lines]))


if __name__ == "__main__":
    main(sys.argv[1:])
