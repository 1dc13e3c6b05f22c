"""cannikin on ranks of one NVIDIA GPU: `python -m benchmarks gpu`, or `python -m benchmarks.gpu PART ... [options]`.

Ranks are `cannikin lab`'s: `--mechanism gpu` (the default) has real NCCL between ranks that spin in proportion to their
samples, `--mechanism mps` shares of the GPU and gloo, `--device cpu` small networks on ranks that sleep, to try a
benchmark out. Every result goes to --out as a line of JSON as soon as it is there, what fails is launched anew without
the job that failed, no job begins that would end after --within seconds, and a table comes last.

Parts, with the minutes that they are guessed to take on an H200 (each launch is 15 s of them):

    limit       even, LB-BSP really run, ours and the best found, on two shapes and two totals of each network:
                `limit --networks resnet18,neumf,resnet50,deepspeech2` 8, `--networks bert` 6, `--networks gpt2-small` 6
    settling    the split at step 30 of 42 starts, on 21 random shapes of 2, 3 and 4 ranks                         6
    overlap     as limit, beside the paper's method too, where devices differ in their ratio of forward to backward  4
    overhead    plain DDP beside ours with an even plan, and the hook's own time                                   4
    sharded     as limit and overhead, of 355 million parameters under fully_shard                                 9
    forms       no backend named, "nccl", "cpu:gloo,cuda:nccl": plans, and what was learned beside the truth       2
    gammas      each network on one rank at five sizes: where in backward the first bucket is ready, on its own    1.5
    record      every step's measurements as JSON, for work on the learner                                       1.5
    stability   plans of 300 steps where communication decides, and beside a neighbour who comes and goes          1
    sharing     a load that begins on one share in mid-run (mps)                                                   1

Time to accuracy is `python -m benchmarks.gpu_accuracy`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import launching
from benchmarks.gpu_splits import PAPER_EPOCH
from benchmarks.gpu_tasks import NETWORKS, recipe_of
from cannikin.lab.mechanisms import MECHANISMS

Job = dict[str, Any]

SPREAD, CLOSE = (1.0, 0.5, 0.25), (1.0, 0.8, 0.6)
SHARES = ((0.60, 0.25, 0.12), (0.40, 0.25, 0.15, 0.10))  # of the GPU, by MPS
FORMS = ("", "nccl", "cpu:gloo,cuda:nccl")
THIRD = 1 / 3
_NAMES = ("ours", "ours at 30", "lb-bsp", "paper", "even")
LAUNCHES = 3  # of the jobs of one launch, where some fail


@dataclass(frozen=True, kw_only=True)
class Bed:
    """What the benchmarks run on.

    Args:
        mechanism: of the lab.
        device: "cuda" or "cpu"; on a CPU everything is small and short.
        networks: those to measure.
    """

    mechanism: str
    device: str
    networks: Sequence[str] = NETWORKS

    @property
    def small(self) -> bool:
        """Whether this is only to try a benchmark out."""
        return self.device == "cpu"

    @property
    def backend(self) -> str:
        """What carries gradients between such ranks."""
        return "nccl" if self.mechanism == "gpu" else "gloo"

    def totals(self, kind: str) -> tuple[int, int]:
        """Return a total batch at which communication weighs, and one at which computation does."""
        return (24, 48) if self.small else recipe_of(kind, self.device).totals

    def steps(self, count: int) -> int:
        """Return this many steps, or a few."""
        return min(count, 45) if self.small else count

    def job(
        self,
        name: str,
        kind: str,
        speeds: Sequence[float],
        *,
        num_steps: float,
        further_s: float = 0.0,
        forward_shares: Sequence[float] = (),
        spins: bool = True,
        **keywords: Any,
    ) -> Job:
        """Make a job that takes about this many steps and seconds; without `spins`, ranks are as fast as they are."""
        recipe = recipe_of(kind, self.device)
        sample_ms = 2.0 if self.small else recipe.sample_ms
        step_s = 0.03 if self.small else recipe.step_ms / 1e3
        return {
            "name": name,
            "speeds": list(speeds),
            "sample_ms": sample_ms if spins else 0.0,
            "forward_shares": list(forward_shares or [THIRD] * len(speeds)),
            "expect_s": 3.0 + num_steps * step_s + further_s,
            "keywords": {"kind": kind, **keywords},
        }

    def limit(
        self,
        kind: str,
        total: int,
        speeds: Sequence[float],
        *,
        lb_steps: int = 120,
        paper_epochs: int = 0,
        **others: Any,
    ) -> Job:
        """Make a job that compares ours with the rest at one total."""
        recipe = recipe_of(kind, self.device)
        is_slow = recipe.step_ms > 100  # hundreds of steps would take minutes
        steps, search_s = self.steps(recipe.steps), self.search_s(kind)
        lb_steps = 0 if recipe.sharded else self.steps(min(90, lb_steps) if is_slow else lb_steps)
        return self.job(
            "limit",
            kind,
            speeds,
            num_steps=steps + lb_steps + PAPER_EPOCH * paper_epochs,
            further_s=1.5 * search_s,
            total=total,
            steps=steps,
            lb_steps=lb_steps,
            paper_epochs=paper_epochs,
            moved=[0.04] if is_slow else [0.02, 0.06],
            search_s=search_s,
            **others,
        )

    def search_s(self, kind: str) -> float:
        """Return the seconds to look for the best split of one cell."""
        return 1.0 if self.small else min(40.0, max(6.0, 0.09 * recipe_of(kind, self.device).step_ms))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Jobs for the same ranks, and the backend that they name."""

    jobs: list[Job]
    backend: str


def limit(bed: Bed) -> list[Launch]:
    """Two shapes and two totals of each network."""
    shapes: Iterable[tuple[float, ...]] = SHARES if bed.mechanism == "mps" else (SPREAD, CLOSE)
    cells = itertools.product(bed.networks, shapes, (0, 1))
    return _by_size([bed.limit(kind, bed.totals(kind)[k], speeds) for kind, speeds, k in cells], bed.backend)


def overlap(bed: Bed) -> list[Launch]:
    """Cells out of the table of `benchmarks.gpu_overlap`."""
    cells = [
        ("resnet18", SPREAD, (THIRD, THIRD, 0.9)),
        ("resnet18", (1.0, 1.0, 1.0), (0.9, THIRD, THIRD)),
        ("resnet50", SPREAD, (THIRD, THIRD, 0.6)),
        ("resnet50", SPREAD, (0.1, 0.1, 0.9)),
        ("resnet50", (1.0, 1.0, 1.0), (0.9, 0.1, 0.1)),
    ]
    jobs = [
        bed.limit(kind, bed.totals(kind)[1], speeds, forward_shares=shares, lb_steps=200, paper_epochs=6)
        for kind, speeds, shares in cells
    ]
    return [Launch(jobs=jobs, backend=bed.backend)]


def settling(bed: Bed) -> list[Launch]:
    """Random shapes that nothing was tuned on, two starts on each."""
    rng, launches = np.random.default_rng(2026), []
    order = ("resnet18", "neumf", "resnet50", "resnet18", "deepspeech2", "neumf", "resnet18")
    kinds = [kind for kind in order if kind in bed.networks] or list(bed.networks)
    for n in (2, 3, 4):
        jobs = []
        for kind in itertools.islice(itertools.cycle(kinds), 2 if bed.small else 7):
            speeds = np.round(rng.uniform(0.2, 1.0, n), 2).tolist()
            low, high = bed.totals(kind)
            total = round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
            search_s = 0.7 * bed.search_s(kind)
            jobs.append(
                bed.job(
                    "settling",
                    kind,
                    speeds,
                    num_steps=80,
                    further_s=1.5 * search_s,
                    total=total,
                    starts=2,
                    steps=40,
                    moved=[0.03],
                    search_s=search_s,
                )
            )
        launches.append(Launch(jobs=jobs, backend=bed.backend))
    return launches


def overhead(bed: Bed) -> list[Launch]:
    """ResNet-50 on three ranks, BERT-base on two: gradients in bfloat16, of less than 100 ms, and as they are."""
    rounds, few = 12 if bed.small else 160, ["raw", "control", "ours"]

    def compared(kind: str, num_ranks: int, local_batch: int, rounds: int, pace: float, **others: Any) -> Job:
        keywords = {"local_batch": local_batch, "variants": few, "rounds": rounds, **others}
        return bed.job("overhead", kind, (1.0,) * num_ranks, num_steps=pace * 3 * rounds, spins=False, **keywords)

    def hooked(kind: str, num_ranks: int, local_batch: int, pace: float) -> Job:
        steps = bed.steps(85)
        keywords = {"local_batch": local_batch, "steps": steps}
        return bed.job("hook", kind, (1.0,) * num_ranks, num_steps=pace * 2 * steps, spins=False, **keywords)

    # Steps of such ranks are guessed to take this part (`pace`) of a step of three that spin.
    three = [compared("resnet50", 3, 24, rounds, 0.8), hooked("resnet50", 3, 24, 0.8)]
    two = [
        compared("bert", 2, 8, rounds, 0.3, compressed=True),
        hooked("bert", 2, 8, 0.6),
        compared("bert", 2, 8, bed.steps(120), 0.6),
    ]
    return [Launch(jobs=jobs, backend=bed.backend) for jobs in (three, two)]


def sharded(bed: Bed) -> list[Launch]:
    """Two totals of a sharded network on unlike ranks, and an even plan beside plain `fully_shard`."""
    kind = "gpt2-medium-fsdp"
    keywords = {"local_batch": 8, "variants": ["raw", "control", "ours"], "rounds": 8 if bed.small else 70}
    even = bed.job("overhead", kind, (1.0,) * 3, num_steps=0.6 * 3 * keywords["rounds"], spins=False, **keywords)
    jobs = [*(bed.limit(kind, total, SPREAD) for total in bed.totals(kind)), even]
    return [Launch(jobs=jobs, backend=bed.backend)]


def forms(bed: Bed) -> list[Launch]:
    """Every way to name a backend."""

    def jobs() -> list[Job]:
        return [
            bed.job("truth", kind, SPREAD, num_steps=80, further_s=3.0, total=bed.totals(kind)[1], steps=bed.steps(60))
            for kind in ("chain", "resnet18")
        ]

    return [Launch(jobs=jobs(), backend=backend) for backend in (("", "gloo") if bed.small else FORMS)]


def gammas(bed: Bed) -> list[Launch]:
    """The paper's five networks on one rank that does not spin, from few samples to many."""
    jobs = []
    for kind, largest in (("resnet18", 512), ("resnet50", 64), ("bert", 64), ("deepspeech2", 64), ("neumf", 4096)):
        if kind in bed.networks:
            sizes = [2, 4] if bed.small else [max(1, largest >> k) for k in (6, 4, 3, 1, 0)]
            steps = 15 if bed.small else 30
            pace = 0.4 * len(sizes) * steps
            jobs.append(bed.job("gammas", kind, (1.0,), num_steps=pace, spins=False, sizes=sizes, steps=steps))
    return [Launch(jobs=jobs, backend=bed.backend)]


def record(bed: Bed) -> list[Launch]:
    """Three networks at totals where communication and computation both weigh."""
    steps = 60 if bed.small else 280
    jobs = [
        bed.job("record", kind, SPREAD, num_steps=steps + 20, total=24 if bed.small else total, steps=steps)
        for kind, total in (("resnet18", 768), ("resnet50", 80), ("deepspeech2", 160))
        if kind in bed.networks
    ]
    return [Launch(jobs=jobs, backend=bed.backend)]


def stability(bed: Bed) -> list[Launch]:
    """Totals so small that every split takes as long, and a neighbour at a larger one."""
    steps = bed.steps(300)
    quiet = [
        bed.job("stability", kind, SPREAD, num_steps=steps, total=24 if bed.small else total, steps=steps)
        for kind, total in (("resnet18", 192), ("resnet50", 32))
    ]
    total, start = bed.totals("resnet18")[1], 20 if bed.small else 100
    noisy = bed.job(
        "noisy", "resnet18", SPREAD, num_steps=steps, total=total, steps=steps, disturbed=0, start=start, slower=2.0
    )
    return [Launch(jobs=[*quiet, noisy], backend=bed.backend)]


def sharing(bed: Bed) -> list[Launch]:
    """A second load on the largest share."""
    steps, start = (45, 12) if bed.small else (240, 100)
    total = bed.totals("resnet18")[1]
    job = bed.job(
        "sharing",
        "resnet18",
        SHARES[0],
        num_steps=600,
        total=total,
        steps=steps,
        disturbed=0,
        start=start,
        rounds=bed.steps(25),
    )
    return [Launch(jobs=[job], backend=bed.backend)]


PARTS: dict[str, Callable[[Bed], list[Launch]]] = {
    "limit": limit,
    "settling": settling,
    "overlap": overlap,
    "overhead": overhead,
    "sharded": sharded,
    "forms": forms,
    "gammas": gammas,
    "record": record,
    "stability": stability,
    "sharing": sharing,
}
DEFAULT = {"gpu": ("overhead", "forms", "stability"), "mps": ("overhead", "sharing"), "portable": tuple(PARTS)}


def _by_size(jobs: list[Job], backend: str) -> list[Launch]:
    """Return one launch for the jobs of each number of ranks."""
    sizes = sorted({len(job["speeds"]) for job in jobs})
    return [Launch(jobs=[job for job in jobs if len(job["speeds"]) == n], backend=backend) for n in sizes]


def run(launch: Launch, bed: Bed, out: Path, until: float) -> None:
    """Run the jobs of a launch; where one fails, launch those behind it anew."""
    script, left = Path(__file__).with_name("gpu_ranks.py"), launch.jobs
    for _ in range(LAUNCHES):
        if not left or time.time() > until:
            break
        jobs = out.with_suffix(".jobs.json")
        jobs.write_text(json.dumps(left))
        speeds = ",".join(map(str, left[0]["speeds"]))
        lab_options = ["--mechanism", bed.mechanism, "--ranks", speeds]
        arguments = ["--out", str(out), "--jobs", str(jobs), "--device", bed.device, "--until", str(until)]
        arguments += ["--backend", launch.backend] if launch.backend else []
        note = launching.run_in_lab(lab_options, script, arguments, limit_s=until + 30 - time.time())
        jobs.unlink()
        told = {result["number"]: result for result in launching.read(out)}
        said_why = any("failed" in told[job["number"]] for job in left if job["number"] in told)
        left = [job for job in left if job["number"] not in told]
        if left and not said_why:
            _fail(out, left.pop(0), note or "ended without a result")
    for job in left:
        _fail(out, job, "passed over: the time was up, or too many launches had failed")


def _fail(out: Path, job: Job, why: str) -> None:
    with out.open("a") as file:
        file.write(json.dumps({**job, **job["keywords"], "job": job["name"], "failed": why}) + "\n")


def commit() -> str:
    """Return the commit that is measured, as far as git knows it."""
    command = ["git", "-C", str(launching.ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def table(results: list[dict[str, Any]]) -> str:
    """Return what was measured, a line per job, and what all jobs of a kind come to."""
    return "\n".join([*(_line(result) for result in results), *_totals(results)])


def _totals(results: list[dict[str, Any]]) -> list[str]:
    """Return a line for all cells of the limit, and one for all starts."""
    lines = []
    cells = [r for r in results if r["job"] == "limit" and "failed" not in r]
    if cells:
        over = {name: [r["over_best"][name] for r in cells if name in r["over_best"]] for name in _NAMES}
        worst = ", ".join(f"{name} {max(ratios):.3f}" for name, ratios in over.items() if ratios)
        control = max(abs(r["control_over_ours"] - 1) for r in cells)
        plans = [each["error"] for r in cells for each in r["predictions"]["plans"] if each["error"] is not None]
        optima = [r["predicted_ms"] / r["split_ms"]["best"] - 1 for r in cells if r["predicted_ms"] is not None]
        lines.append(
            f"{len(cells)} cells, at worst over the best: {worst}; control at worst {control:.1%}; "
            f"{len(plans)} plans predicted before they ran, off by: {_spread(plans)}; predicted against the best split "
            f"measured: {_spread(optima)}; changes after step 60: {[r['changes_after_60'] for r in cells]}"
        )
    starts = [x for r in results if r["job"] == "settling" and "failed" not in r for x in r["over_best_at_30"]]
    if starts:
        within = sum(over <= 1.03 for over in starts)
        lines.append(
            f"{len(starts)} starts: {within} ({within / len(starts):.0%}) within 3% at step 30, worst {max(starts):.3f}"
        )
    return lines


def _spread(errors: list[float]) -> str:
    return f"median {np.median(np.abs(errors)):.1%}, worst {np.abs(errors).max():.1%}" if errors else "none"


def _line(r: dict[str, Any]) -> str:
    head = f"{r['job']:9} {r.get('kind', ''):11} B={r.get('total', '-'):<5} {'/'.join(f'{v:g}' for v in r['speeds'])}"
    if "failed" in r:
        return f"{head}: FAILED, {r['failed']}"
    try:
        return f"{head}: {_WORDS[r['job']](r)}"
    except (KeyError, TypeError, ValueError) as error:  # one odd result must not cost the table
        return f"{head}: incomplete, {type(error).__name__} {error}"


def _limit_words(r: dict[str, Any]) -> str:
    over = "  ".join(f"{name} {ratio:.3f}" for name, ratio in r["over_best"].items() if name not in ("best", "control"))
    lb_bsp = ""
    if "lb-bsp" in r["over_best"]:
        settled = "settled" if r["lb_bsp_settled"] else "not settled"
        lb_bsp = f"; LB-BSP {settled} after {r['lb_bsp_moves']} moves in {r['lb_bsp_steps']} steps"
    plans = [each["error"] for each in r["predictions"]["plans"] if each["error"] is not None]
    optimum = "none" if r["predicted_ms"] is None else f"{r['predicted_ms'] / r['split_ms']['best'] - 1:+.1%}"
    return (
        f"best {r['split_ms']['best']:.1f} ms {tuple(r['splits']['best'])}; over it: {over}; "
        f"control {r['control_over_ours'] - 1:+.1%}, IQR {r['iqr_pct']['ours']:.1f}%; "
        f"use {r['use']['ours']:.0%} (even {r['use']['even']:.0%}, best {r['use']['best']:.0%}); predicted before a "
        f"plan ran, off by: {_spread(plans)}; against the best: {optimum}; "
        f"{r['changes_after_60']} changes after step 60 of {r['steps']}{lb_bsp}"
    )


def _settling_words(r: dict[str, Any]) -> str:
    over = " ".join(f"{ratio:.3f}" for ratio in r["over_best_at_30"])
    return (
        f"at step 30 {over} of the best, {r['split_ms']['best']:.1f} ms {tuple(r['splits']['best'])}; "
        f"even {r['over_best']['even']:.2f}; control {r['control_over_ours'] - 1:+.1%}"
    )


def _overhead_words(r: dict[str, Any]) -> str:
    raw, cells = r["raw_ms"], []
    for variant, apart in r["median_ms"].items():
        mean, young = r["mean_ms"][variant] / raw, r["young_median_ms"][variant] / raw
        if variant != "raw":
            told = f"{apart / raw:+.2%}, mean {mean:+.2%}, in the first 60 steps {young:+.2%}"
            cells.append(f"{variant} {apart:+.2f} +- {r['error_ms'][variant]:.2f} ms ({told})")
    sent = "bf16" if r["compressed"] else "fp32"
    return f"b={r['local_batch']}, {sent}: DDP {raw:.2f} ms (IQR {r['iqr_pct']:.1f}%); paired: {'; '.join(cells)}"


def _hook_words(r: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {us:.0f} us" for name, us in r["hook_us"].items())
    return f"per bucket of {r['buckets']}: {times}"


def _truth_words(r: dict[str, Any]) -> str:
    told = "; ".join(
        f"over {truth} " + ", ".join(f"{part} {' '.join(f'{x:.3f}' for x in xs)}" for part, xs in ratios.items())
        for truth, ratios in (("added", r["learned_over_added"]), ("alone", r["learned_over_alone"]))
    )
    return (
        f"backend {r['backend'] or 'not named'} ({r['carries']}): at step 30 {tuple(r['at_30'])}, at the end "
        f"{tuple(r['split'])}; learned {told}; communication over all-reduces alone {r['learned_over_all_reduce']:.3f}"
    )


def _gammas_words(r: dict[str, Any]) -> str:
    rows = (
        f"{row['size']}: {row['gamma']:.3f} +- {row['gamma_std']:.3f} ({row['before_share']:.2f})"
        for row in r["by_size"]
    )
    return f"{r['buckets']} buckets; gamma by local batch (part of a step before backward): {', '.join(rows)}"


def _stability_words(r: dict[str, Any]) -> str:
    load = f"; under load {r['changes_under_load']} changes" if "changes_under_load" in r else ""
    path = " ".join(f"{step}:{'/'.join(map(str, split))}" for step, split in r["plan_path"][-6:])
    return (
        f"{r['running_ms']:.1f} ms (IQR {r['running_iqr_pct']:.1f}%), {r['changes_after_60']} changes after step 60 of "
        f"{r['steps']}{load}; last plans {path}"
    )


_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "limit": _limit_words,
    "settling": _settling_words,
    "overhead": _overhead_words,
    "hook": _hook_words,
    "truth": _truth_words,
    "gammas": _gammas_words,
    "record": lambda r: f"{r['steps']} steps, {r['buckets']} buckets in {r['file']}",
    "stability": _stability_words,
    "noisy": _stability_words,
    "sharing": lambda r: json.dumps({name: r[name] for name in ("before_ms", "after_ms", "best_ms", "over_best")}),
}


def main(argv: list[str] | None = None) -> None:
    """Run the parts named, or those that fit into ten minutes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--mechanism", choices=("gpu", "mps"), default="gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="with commas between")
    parser.add_argument("--only", default="", help="numbers of jobs, with commas between, as the lines of --out have")
    parser.add_argument("--within", type=float, default=540.0, metavar="S", help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "cannikin-gpu.jsonl")
    options = parser.parse_args([] if argv is None else argv)
    mechanism = "portable" if options.device == "cpu" else options.mechanism
    missing = MECHANISMS[mechanism].unavailable()
    if missing is not None:
        print(f"gpu: skipped, {missing}")
        return
    until = time.time() + options.within
    launching.empty(options.out)
    bed = Bed(mechanism=mechanism, device=options.device, networks=options.networks.split(","))
    launches = [launch for part in options.parts or DEFAULT[mechanism] for launch in PARTS[part](bed)]
    version, wanted = commit(), {int(number) for number in options.only.split(",") if number}
    for number, job in enumerate(job for launch in launches for job in launch.jobs):
        job |= {"number": number, "commit": version, "mechanism": mechanism}
    for launch in launches:
        jobs = [job for job in launch.jobs if not wanted or job["number"] in wanted]
        run(Launch(jobs=jobs, backend=launch.backend), bed, options.out, until)
    results = launching.read(options.out)
    print(f"commit {version}, mechanism {mechanism}, device {options.device}\n{table(results)}")


if __name__ == "__main__":
    main(sys.argv[1:])
