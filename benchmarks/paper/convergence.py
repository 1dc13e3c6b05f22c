"""Whole trainings: the overall figure, convergence curves, total batch by epoch, cluster C, and the planner's cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from cannikin.sim.catalog import load_cluster_spec
from cannikin.sim.hardware import build_machine
from cannikin.sim.runs import simulate
from cannikin.sim.workload import find_workload

_MOST_POINTS = 200  # of a curve that are kept


def train(cluster: str, workload: str, policy: str, seed: int, bandwidth_gbit: float | None = None) -> dict[str, Any]:
    """Train to the target, and return how long it took and how it went.

    Args:
        cluster, workload, policy: by name.
        seed: of all noise.
        bandwidth_gbit: between servers, where it is not the cluster's own.
    """
    found, spec = find_workload(workload), load_cluster_spec(cluster)
    if bandwidth_gbit is not None:
        spec = msgspec.structs.replace(spec, link=msgspec.structs.replace(spec.link, bandwidth_gbit=bandwidth_gbit))
    run = simulate(build_machine(spec, workload, found.spec), found, policy, seed=seed)
    stride = max(1, -(-len(run.epochs) // _MOST_POINTS))
    epochs = [replace(epoch, planner_s=0.0) for epoch in run.epochs][::stride]
    # The first epoch of a short run may hold no step after its first window: leave such epochs out.
    shares, before_s = [], 0.0
    for epoch in run.epochs:
        shares.append(epoch.planner_s / max(epoch.elapsed_s - before_s, 1e-9))
        before_s = epoch.elapsed_s
    return {
        "reached": run.reached,
        "reason": run.reason,
        "elapsed_s": run.elapsed_s,
        "num_steps": run.num_steps,
        "num_epochs": run.num_samples / found.spec.num_samples,
        "total_batch": run.plan.total_batch,
        "local_batches": list(run.plan.local_batches),
        "epochs": [[e.epoch, e.elapsed_s, e.metric, e.total_batch, e.step_s] for e in epochs],
        "measured": {
            "planner_share": run.planner_s / run.elapsed_s,
            "most_planner_share": max(shares, default=run.planner_s / run.elapsed_s),
            "window_ms": run.planner_s / max(run.num_steps / 10, 1) * 1e3,
        },
    }
