"""How good first splits by data sheets are: `python -m benchmarks first_split`.

Every 2 and every 3 unlike GPUs of the five that were measured in public (`sim/data/devices.toml`), four networks, three
totals: the longest compute time of a rank, without noise or communication, over that of the best split. Memory is left
out. NCF is too, for which the traced V100 needs ten times as long as the others.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from benchmarks.paper.optimum import best_split, even_limit, expected_s
from cannikin.core.policies.plans import even_batches, inverse_batches
from cannikin.core.prior import DataSheet, first_shares
from cannikin.core.values import FloatArray
from cannikin.sim.catalog import ClusterSpec, LinkSpec, NodeSpec
from cannikin.sim.hardware import build_machine
from cannikin.sim.runs import job_for
from cannikin.sim.workload import find_workload

SHEETS = {
    "a100": DataSheet(capability=(8, 0), num_multiprocessors=108, clock_mhz=1410),
    "v100": DataSheet(capability=(7, 0), num_multiprocessors=80, clock_mhz=1530),
    "rtx6000": DataSheet(capability=(7, 5), num_multiprocessors=72, clock_mhz=1770),
    "rtx2080ti": DataSheet(capability=(7, 5), num_multiprocessors=68, clock_mhz=1545),
    "t4": DataSheet(capability=(7, 5), num_multiprocessors=40, clock_mhz=1590),
}
NETWORKS = ("cifar10", "imagenet", "bert", "deepspeech2")
PARTS = (0.25, 0.5, 1.0)  # of the total that DDP holds
BELIEF = 0.8  # the power to which `first_shares` takes ratios of speed


def over_best(names: tuple[str, ...], network: str, part: float) -> dict[str, float]:
    """Return the time of three first splits over the best one's."""
    spec = ClusterSpec(link=LinkSpec(bandwidth_gbit=10.0), node=[NodeSpec(device=name) for name in names])
    workload = find_workload(network)
    machine = build_machine(spec, network, workload.spec)
    machine = replace(machine, bucket_s=np.zeros_like(machine.bucket_s))
    whole = job_for(machine, workload)
    total = max(whole.batch_size, round(part * even_limit(machine, whole)))
    believed = first_shares([SHEETS[name] for name in names])
    assert believed is not None
    job = replace(whole, batch_size=total, max_batch_size=None)
    splits = {
        "even": even_batches(job, total),
        f"by data sheets, power {BELIEF}": inverse_batches(job, total, 1.0 / believed),
        "by data sheets, power 1": inverse_batches(job, total, believed ** (-1.0 / BELIEF)),
    }
    best_s = float(expected_s(machine, best_split(machine, job, total)))
    return {name: float(expected_s(machine, np.array(split))) / best_s for name, split in splits.items()}


def all_cases() -> dict[str, FloatArray]:
    """Return the times of every case over the best, by split."""
    chosen = [names for num in (2, 3) for names in itertools.combinations(SHEETS, num)]
    cases = [over_best(*case) for case in itertools.product(chosen, NETWORKS, PARTS)]
    return {name: np.array([case[name] for case in cases]) for name in cases[0]}


def main() -> None:
    """Print how far each first split is from the best one."""
    found = all_cases()
    print(f"{len(next(iter(found.values())))} cases; time over the best split's: median, worst tenth from")
    for name, times in found.items():
        print(f"  {name:28} {np.median(times):.2f}  {np.quantile(times, 0.9):.2f}")


if __name__ == "__main__":
    main()
