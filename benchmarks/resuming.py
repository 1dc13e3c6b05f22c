"""How good the first plan is when a run resumes on other ranks of the lab: `python -m benchmarks resuming`.

Three ranks of speeds 0.68, 0.43 and 0.17 train and save what they have learned. Then a launch for each other set of
devices loads it: fewer, more, the same in another order, and one with a device that nobody knows. The first plan's
split is measured in turns with those around it and the best one by the lab's known costs; the quickest three are then
measured again beside it and the even one. `--mechanism gpu` does the same on one NVIDIA GPU over NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import launching
from benchmarks.lab_ranks import Split, Training, around, compare
from cannikin import Cluster, Curve, HeteroDataLoader, optimal_split, step_time
from cannikin.core.policies.plans import even_batches
from cannikin.core.values import Job

SPEEDS = (0.68, 0.43, 0.17)
CASES = {
    "2 of the 3": (0.68, 0.17),
    "the other 2": (0.43, 0.68),
    "4, one of a known kind": (0.68, 0.43, 0.17, 0.43),
    "another order": (0.17, 0.68, 0.43),
    "4, one unknown": (0.68, 0.43, 0.17, 0.3),
}
TOTAL, FIXED_MS, GRADIENT_KB = 512, 5.0, 64.0
STEPS, PASSES = 80, 5  # of the run that learns; of each round over all splits
LATER = 30  # steps after which the plan of a resumed run is told once more
STATE = "state.json"


def learn(folder: Path, device: str) -> dict[str, Any]:
    """Train from an even start, and save the engine's state."""
    training = _training(device)
    run = training.run(STEPS)
    if dist.get_rank() == 0:
        (folder / STATE).write_text(json.dumps(training.model.engine.state_dict()))
    return {"case": "learned", "plans": run.told()}


def resume(folder: Path, device: str, case: str, passes: int, sample_ms: float) -> dict[str, Any]:
    """Begin with the saved state, and measure the first plan's split beside others; then train on."""
    training, speeds = _training(device), CASES[case]
    training.model.engine.load_state_dict(json.loads((folder / STATE).read_text()))
    HeteroDataLoader(range(TOTAL), model=training.model, batch_size=TOTAL, collate_fn=len)
    plan, known = training.model.plan, costs(speeds, sample_ms)
    assert plan is not None
    best = optimal_split(known, TOTAL).local_batches
    even = even_batches(Job(num_ranks=len(speeds), batch_size=TOTAL), TOTAL)
    grid = list(dict.fromkeys([*around(plan.local_batches, TOTAL), best]))
    compared = compare(training, {"first": plan.local_batches, "even": even}, grid, passes)
    trained = _training(device)
    trained.model.engine.load_state_dict(json.loads((folder / STATE).read_text()))
    later = trained.run(LATER).splits()[-1]

    def over(split: Split) -> float:
        return step_time(known, split) / step_time(known, best)

    return {
        **compared,
        "case": case,
        "speeds": speeds,
        "reason": plan.reason,
        "later": later,
        "over_known": {"first": over(plan.local_batches), "even": over(even), "later": over(later)},
    }


def costs(speeds: tuple[float, ...], sample_ms: float) -> Cluster:
    """Return what the lab makes of these ranks, all-reduces apart, which it leaves to the machine."""
    zeros = [0.0] * len(speeds)
    per_sample_s = [sample_ms / 1e3 / speed for speed in speeds]
    return Cluster(
        forward=Curve(fixed_s=zeros, per_sample_s=zeros),
        backward=Curve(fixed_s=[FIXED_MS / 1e3] * len(speeds), per_sample_s=per_sample_s),
        gammas=[1.0],
        tails_s=[0.0],
    )


def _training(device: str) -> Training:
    return Training("cannikin", total=TOTAL, gradient_kb=GRADIENT_KB, host_ms=[0.0] * 8, device=device)


def run_rank(arguments: list[str]) -> None:
    """Do one launch's work on this rank, and leave its figures as a line of JSON."""
    out, case, device, passes, sample_ms = arguments
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=120))
    folder = Path(out).parent
    result = learn(folder, device) if case == "learned" else resume(folder, device, case, int(passes), float(sample_ms))
    if dist.get_rank() == 0:
        with Path(out).open("a") as file:
            file.write(json.dumps(result) + "\n")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an ordinary exit


def table(results: list[dict[str, Any]]) -> str:
    """Return what was measured as a table for people."""
    head = f"{'resumed on':<24} {'speeds':<24} {'first plan':<20} {'best found':<20} {'first':>7} {'even':>7}"
    rows = [f"{head} {'first*':>7} {'even*':>7}  plan after {LATER} steps*"]
    for r in results:
        if r["case"] != "learned":
            splits, ms, known = r["splits"], r["split_ms"], r["over_known"]
            names = [", ".join(map(str, values)) for values in (r["speeds"], splits["first"], splits["best"])]
            over = [ms["first"] / ms["best"], ms["even"] / ms["best"], known["first"], known["even"]]
            cells = " ".join(f"{value:7.3f}" for value in over)
            rows.append(f"{r['case']:<24} {names[0]:<24} {names[1]:<20} {names[2]:<20} {cells}  {known['later']:.3f}")
    return "\n".join([*rows, "Step times over the best split's: measured in turns; * by the lab's known costs."])


def main(argv: list[str] | None = None) -> None:
    """Learn once, and resume on each set of devices."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks resuming", description=__doc__)
    parser.add_argument("--mechanism", choices=("portable", "gpu"), default="portable")
    parser.add_argument("--passes", type=int, default=PASSES, help="steps of each split in each of three rounds")
    parser.add_argument("--sample-ms", type=float, default=0.25, help="of a device of speed 1; more on a busy machine")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "cannikin-resuming" / "results.jsonl")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds for each launch")
    options = parser.parse_args([] if argv is None else argv)
    launching.empty(options.out)
    device = "cuda" if options.mechanism == "gpu" else "cpu"
    for case, speeds in {"learned": SPEEDS, **CASES}.items():
        lab = ["--mechanism", options.mechanism, "--ranks", ",".join(map(str, speeds))]
        lab += ["--sample-ms", str(options.sample_ms), "--fixed-ms", str(FIXED_MS)]
        arguments = [str(options.out.resolve()), case, device, str(options.passes), str(options.sample_ms)]
        note = launching.run_in_lab(lab, Path(__file__), arguments, limit_s=options.limit_s)
        if note:
            print(f"{case}: {note}", file=sys.stderr)
    print(table(launching.read(options.out)))


if __name__ == "__main__":
    run_rank(sys.argv[1:]) if "RANK" in os.environ else main(sys.argv[1:])
