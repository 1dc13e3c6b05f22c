"""How soon plans are right, and how long they stay: `python -m benchmarks settling [--set held] [--starts 120]`.

Simulated ranks whose times are not lines: each kind of device has its own ratio of forward to backward, its own fixed
costs and floors, waves (kernels that suit some sizes, work that comes in multiples of a wave), noise of 1 to 5% with
outliers, and steps at a new size that take 1 to 2.9 times as long. The real planner runs by the real schedule, one step
late as on GPUs. "tune" is what the planner's constants were chosen on; "held" draws from other ranges and was looked at
only afterwards; "named" are cells that were seen to go wrong on a GPU.

A split is judged by its time without noise over a bound that no split can beat: a rank may take as many samples as the
largest batch that it finishes in time, whatever its times at smaller ones.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cannikin.core.policies.cannikin import Controller
from cannikin.core.values import FloatArray, IntArray, Job
from cannikin.sim.hardware import Machine, StepTimes
from cannikin.sim.simulation import RunResult, Simulation

STEPS = 300
SETS = {"tune": 0, "held": 1}
_MOST_WAVE = 0.08  # more than this above its line no size is


@dataclass(frozen=True, kw_only=True, eq=False)
class WavyMachine(Machine):
    """A machine whose times deviate from a smooth curve by a factor for each size, `waves` [n, size].

    `noisy` ranks, [n], are 1.4 times as slow in half of their steps, as beside a neighbour that comes and goes. The
    first steps take longer, 1 + `cold` exp(-step / `warms_in`) times: libraries are loaded, memory is found.
    """

    waves: FloatArray
    noisy: FloatArray
    cold: FloatArray
    warms_in: float

    def _factor(self, local_batches: Any) -> FloatArray:
        sizes = np.minimum(np.asarray(local_batches), self.waves.shape[1] - 1)
        factor: FloatArray = self.waves[np.arange(self.num_ranks), sizes]
        return factor

    def compute(self, local_batches: Any) -> tuple[FloatArray, FloatArray]:
        """Return forward and backward seconds without noise."""
        forward, backward = super().compute(local_batches)
        return forward * self._factor(local_batches), backward * self._factor(local_batches)

    def ready(self, local_batches: Any) -> FloatArray:
        """Return when each bucket is ready after the start of backward, without noise."""
        return super().ready(local_batches) * self._factor(local_batches)[..., None]

    def measure(
        self, local_batches: IntArray, first_step: int, rng: np.random.Generator, slowness: FloatArray | None = None
    ) -> StepTimes:
        """Return the times of steps with noise."""
        steps = first_step + np.arange(len(local_batches))[:, None]
        slower = 1.0 + self.cold * np.exp(-steps / self.warms_in)
        if self.noisy.any():
            slower = slower * (1.0 + 0.4 * self.noisy * (rng.random(local_batches.shape) < 0.5))
        return super().measure(local_batches, first_step, rng, slower if slowness is None else slowness * slower)

    def slowed(self, rank: int, factor: float) -> WavyMachine:
        """Return the same machine with every time of one rank multiplied."""
        times = np.ones(self.num_ranks)
        times[rank] = factor
        return replace(
            self, launch_s=self.launch_s * times, fixed_s=self.fixed_s * times, sample_s=self.sample_s * times
        )


def _waves(rng: np.random.Generator, top: int, widths: tuple[int, ...], deviation: float) -> FloatArray:
    """Draw one kind's factors for sizes 0 to `top`."""
    sizes = np.arange(1, top + 1)
    width, share = int(rng.choice(widths)), rng.uniform(0.0, 0.4)
    waves = np.minimum(share * (-(-sizes // width) * width / sizes - 1), _MOST_WAVE)
    levels, edge = np.zeros(top), 1.0
    while edge < top:  # kernels are chosen by size
        beyond = edge * np.exp(rng.uniform(0.05, 0.3))
        levels[(sizes >= edge) & (sizes < beyond)] = deviation * rng.standard_normal()
        edge = beyond
    odd = np.where(sizes % 8 == 0, 0.0, rng.uniform(0.0, 0.04) * (rng.random() < 0.5))
    return np.append(1.0, 1.0 + waves + np.clip(levels, -_MOST_WAVE, _MOST_WAVE) + odd)


def _cold(n: int, seed: list[int]) -> dict[str, Any]:
    """Draw how slow ranks are in their first steps: on an H200 up to 2.5 times in the first window, 1.3 in the next."""
    rng = np.random.default_rng(seed)
    return {"cold": rng.uniform(0.0, 2.0) * np.exp(0.4 * rng.standard_normal(n)), "warms_in": rng.uniform(1.0, 4.0)}


def draw(number: int, which: str) -> tuple[WavyMachine, Job, str]:
    """Draw a cluster, a job and what its communication is, from the ranges of a set."""
    held = which == "held"
    rng = np.random.default_rng([SETS[which], number])
    n = int(rng.choice([3, 5, 7, 12] if held else [2, 3, 4, 8]))
    kinds = rng.integers(0, int(rng.integers(2, min(n, 4) + 1)), n)
    kinds[:2] = 0, 1
    num_kinds = int(kinds.max()) + 1
    speed = 2 ** rng.uniform(0, 3.0 if held else 2.5, num_kinds)[kinds]
    total = round(n * np.exp(rng.uniform(*np.log([40, 400] if held else [24, 512]))))
    fair = total * speed / speed.sum()
    forward_share = rng.uniform(*([0.15, 0.5] if held else [0.2, 0.45]), num_kinds)[kinds]
    common = rng.uniform(0.05, 0.6)
    work_s = np.exp(rng.uniform(*np.log([0.01, 0.2])))
    parts = np.stack([forward_share, 1 - forward_share])
    shares = np.clip(common + 0.12 * rng.standard_normal((2, num_kinds)), 0.0, 0.8)[:, kinds]
    launch = np.where(rng.random(num_kinds) < 0.3, rng.uniform(0.3, 0.9, num_kinds), 0.0)[kinds]
    num_buckets = int(rng.integers(2, 7))
    ready = np.sort(rng.uniform(0.1, 0.9, num_buckets))
    ready[-1] = 1.0
    regime = ("compute", "mixed", "communication")[int(rng.choice(3, p=[0.4, 0.35, 0.25]))]
    weight = rng.uniform(*{"compute": (0.02, 0.3), "mixed": (0.5, 1.0), "communication": (1.5, 3.0)}[regime])
    times = rng.dirichlet(np.full(num_buckets, 5.0)) * weight * work_s
    widths = (12, 24, 48) if held else (8, 16, 32)
    tables = [_waves(rng, 4 * total, widths, rng.uniform(0.005, 0.03)) for _ in range(num_kinds)]
    machine = WavyMachine(
        names=tuple(f"kind{kind}" for kind in kinds.tolist()),
        launch_s=parts * work_s * launch,
        fixed_s=parts * work_s * shares,
        sample_s=parts * work_s * (1 - shares) / fair,
        sharpness=rng.uniform(3, 20, num_kinds)[kinds],
        ready_by_layers=np.tile(ready, (n, 1)),
        ready_by_work=np.tile(ready ** rng.uniform(0.8, 1.25), (n, 1)),
        bucket_s=times,
        max_batch=np.full(n, 4 * total),
        jitter=np.full(n, rng.uniform(0.01, 0.05)),
        bucket_jitter=np.full(n, 0.02),
        outliers=np.full(n, rng.uniform(0.0, 0.02)),
        drift=0.005,
        new_size=rng.uniform(0.0, 1.9),
        waves=np.stack(tables)[kinds],
        noisy=np.zeros(n),
        **_cold(n, [SETS[which], number, 1]),
    )
    return machine, Job(num_ranks=n, batch_size=total), regime


# ResNet-18 on shares of one H200 over gloo, and with spin kernels over NCCL: shares of the card and total batches.
NAMED = [((70, 20, 10), 512), ((70, 20, 10), 2048), ((45, 30, 15, 10), 640), ((45, 30, 15, 10), 2560)]
NAMED += [((57, 29, 14), 192), ((57, 29, 14), 768)]


def named(number: int) -> tuple[WavyMachine, Job, str]:
    """Return a start of one of the cells that were seen on a GPU: a floor of 7 ms, 24 ms of communication."""
    shares, total = NAMED[number % len(NAMED)]
    rng = np.random.default_rng([2, number])
    n, share = len(shares), np.array(shares) / 100
    parts = np.array([0.35, 0.65])[:, None] * np.ones(n)
    ready = np.array([0.35, 0.75, 1.0])
    tables = np.stack([_waves(rng, 4 * total, (16, 32), 0.025) for _ in shares])
    machine = WavyMachine(
        names=tuple(f"{share}%" for share in shares),
        launch_s=parts * 7e-3,
        fixed_s=parts * 3e-3,
        sample_s=parts * 13e-6 / share,
        sharpness=np.full(n, 6.0),
        ready_by_layers=np.tile(ready, (n, 1)),
        ready_by_work=np.tile(ready, (n, 1)),
        bucket_s=np.array([10e-3, 8e-3, 5e-3]),
        max_batch=np.full(n, 4 * total),
        jitter=np.full(n, 0.03),
        bucket_jitter=np.full(n, 0.03),
        outliers=np.full(n, 0.01),
        drift=0.005,
        new_size=1.9,
        waves=tables,
        noisy=np.zeros(n),
        **_cold(n, [2, number, 1]),
    )
    return machine, Job(num_ranks=n, batch_size=total), f"{'/'.join(map(str, shares))} B={total}"


class Truth:
    """Times of every size of every rank, and the least step time of a total batch."""

    def __init__(self, machine: Machine, top: int) -> None:
        sizes = np.arange(1, top + 1)[:, None] * np.ones(machine.num_ranks, dtype=np.int64)
        tails = machine.bucket_s[::-1].cumsum()[::-1]
        forward, _ = machine.compute(sizes)
        self._times = (forward[..., None] + machine.ready(sizes) + tails).max(axis=-1)
        self._reached = np.minimum.accumulate(self._times[::-1], axis=0)[::-1]

    def step_s(self, local_batches: tuple[int, ...]) -> float:
        """Return the step time of a split."""
        return float(self._times[np.array(local_batches) - 1, np.arange(len(local_batches))].max())

    def bound_s(self, total_batch: int) -> float:
        """Return a step time that no split of this total beats: the B smallest times, and one sample per rank."""
        least = np.partition(self._reached.ravel(), total_batch - 1)[total_batch - 1]
        return float(max(least, self._reached[0].max()))

    def excess(self, local_batches: tuple[int, ...]) -> float:
        """Return a split's step time over the bound, minus 1."""
        return self.step_s(local_batches) / self.bound_s(sum(local_batches)) - 1


def in_force(run: RunResult, step: int) -> tuple[int, ...]:
    """Return the local batches of a step of a run."""
    return [plan.local_batches for _, plan in run.plans if plan.first_step <= step][-1]


def changes(run: RunResult, begin: int, end: int) -> int:
    """Return how many plans of other batches took force in these steps."""
    batches = [in_force(run, step) for step in range(begin, end)]
    return sum(a != b for a, b in itertools.pairwise(batches))


def judge(machine: WavyMachine, job: Job, seed: int) -> dict[str, float]:
    """Return what one start shows: the columns of `table`."""
    total = job.batch_size
    truth = Truth(machine, 3 * total)
    controller = Controller(job)
    simulation = Simulation(machine, controller, job, seed=seed, lag=1)
    simulation.run(max_steps=100)
    row: dict[str, float] = {}
    for factor in (1.3, 2.0):
        batches = controller.batches_for(round(factor * total))
        assert batches is not None
        row[f"x{factor:g}"] = truth.excess(batches)
    run = simulation.run(max_steps=STEPS)
    row |= {f"at{step}": truth.excess(in_force(run, step)) for step in (30, 60, 299)}
    row["changes"] = changes(run, 60, STEPS)
    row["sizes"] = max(len({plan.local_batches[r] for _, plan in run.plans}) for r in range(job.num_ranks))
    row["time"] = run.elapsed_s / (STEPS * truth.bound_s(total)) - 1
    row |= _disturbed(machine, job, seed)
    return row


def _disturbed(machine: WavyMachine, job: Job, seed: int) -> dict[str, float]:
    """Return the excess 30 steps after a rank has become twice as slow, and changes in 100 steps beside a neighbour."""
    rank = seed % job.num_ranks
    slowed, noise = machine.slowed(rank, 2.0), np.eye(job.num_ranks)[rank]
    after = {}
    for name, other, steps in (("slowed", slowed, 30), ("noisy", replace(machine, noisy=noise), 100)):
        simulation = Simulation(machine, Controller(job), job, seed=seed + 1, lag=1)
        simulation.run(max_steps=80)
        simulation.machine = other
        run = simulation.run(max_steps=80 + steps)
        after[name] = (
            Truth(slowed, 3 * job.batch_size).excess(in_force(run, 109)) if other is slowed else changes(run, 80, 180)
        )
    return after


def table(rows: list[dict[str, float]], regimes: list[str]) -> str:
    """Return one line for every regime and one for all."""
    lines = [
        "                     |    at step 30     | step 60    | changes 60-300 | 300 steps | x1.3       | x2         "
        "| slowed     | noisy   | sizes",
        "                 num | <=3%   p95    mean | <=3%  p95  | <=2   mean     | over best | <=3%  p95  | <=3%  p95  "
        "| <=5%  p95  | changes | ",
    ]
    for regime in [*sorted(set(regimes)), "all"]:
        chosen = [row for row, name in zip(rows, regimes, strict=True) if regime in (name, "all")]
        column = {name: np.array([row[name] for row in chosen]) for name in chosen[0]}

        def cell(name: str, limit: float = 0.03, column: dict[str, FloatArray] = column) -> str:
            return f"{(column[name] <= limit).mean():4.0%} {np.quantile(column[name], 0.95):6.1%}"

        lines.append(
            f"{regime:16} {len(chosen):3d} | {cell('at30')} {column['at30'].mean():6.2%} | {cell('at60')} "
            f"| {(column['changes'] <= 2).mean():4.0%} {column['changes'].mean():7.2f}   "
            f"| {column['time'].mean():8.2%}  "
            f"| {cell('x1.3')} | {cell('x2')} | {cell('slowed', 0.05)} | {column['noisy'].mean():6.2f}  "
            f"| {column['sizes'].mean():4.1f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the starts of the sets, and print one table for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks settling")
    parser.add_argument("--set", choices=[*SETS, "named"], action="append")
    parser.add_argument("--starts", type=int, default=120)
    options = parser.parse_args(arguments or [])
    for which in options.set or [*SETS, "named"]:
        starts = [(named(k) if which == "named" else draw(k, which)) for k in range(options.starts)]
        rows = [judge(machine, job, seed) for seed, (machine, job, _) in enumerate(starts)]
        print(f"{which}: {len(rows)} starts")
        print(table(rows, [regime for _, _, regime in starts]))


if __name__ == "__main__":
    main()
