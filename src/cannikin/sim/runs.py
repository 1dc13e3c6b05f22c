"""Turns names into runs: a policy on a cluster with a workload, as on the command line.

A policy is one of the core's by name, which sees every window as in the runtime. `NAME@step` is the same planner that
plans in every step: so does LB-BSP in its own paper, at iteration boundaries. `NAME@epoch` sees one window per epoch:
so does LB-BSP as the Cannikin paper runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cannikin.core.cutting import least_local
from cannikin.core.planner import Planner
from cannikin.core.policies import POLICIES, make_planner
from cannikin.core.values import Job
from cannikin.errors import InvalidInputError
from cannikin.runlog import Observer
from cannikin.sim.catalog import load_cluster_spec
from cannikin.sim.hardware import Machine, build_machine
from cannikin.sim.simulation import RunResult, Simulation
from cannikin.sim.workload import Workload, find_workload
from cannikin.toml_files import nearest

EPOCH_FACTOR = 20.0  # a run without an end stops after this many times the epochs that the measured run had


def find_machine(cluster: str, workload: str) -> Machine:
    """Return a cluster, by name or file, that runs a workload."""
    return build_machine(load_cluster_spec(cluster), workload, find_workload(workload).spec)


def job_for(
    machine: Machine, workload: Workload, *, batch_size: int | None = None, max_batch_size: int | None = None
) -> Job:
    """Return the job that trains a workload on a machine, within what its ranks' memories hold.

    The paper's total batch is raised where it does not give every rank its least (`least_local`). Without
    `max_batch_size` the workload's own is the largest total; equal to `batch_size` it keeps the total fixed.
    """
    spec = workload.spec
    least = least_local(spec.batch_norm)
    initial = max(spec.batch_size, least * machine.num_ranks) if batch_size is None else batch_size
    largest = max(spec.max_batch_size, initial) if max_batch_size is None else max_batch_size
    return Job(
        num_ranks=machine.num_ranks,
        batch_size=initial,
        max_batch_size=largest,
        min_local=least,
        max_local=tuple(machine.max_batch.tolist()),
        num_samples=spec.num_samples,
    )


def named_planner(policy: str, job: Job, *, batch_norm: bool = False) -> tuple[Planner, str]:
    """Return the planner of a policy's name, and its pace."""
    name, _, pace = policy.partition("@")
    name = name.replace("_", "-")
    if name not in POLICIES or pace not in ("", "step", "window", "epoch"):
        hint = nearest(name, tuple(POLICIES)) if name not in POLICIES else ""
        raise InvalidInputError(
            f"policy {policy!r} is unknown: {hint}choose one of {', '.join(POLICIES)}; "
            "with @epoch behind it, it sees one window per epoch, with @step every step"
        )
    # Plain DDP learns nothing from windows, and steps are simulated more quickly without them.
    return make_planner(name, job, batch_norm=batch_norm), "epoch" if name == "even" else pace or "window"


def simulate(
    machine: Machine,
    workload: Workload,
    policy: str,
    *,
    job: Job | None = None,
    seed: int = 0,
    max_epochs: float | None = None,
    observers: tuple[Observer, ...] = (),
    tags: dict[str, str] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> RunResult:
    """Train a workload on a machine under a policy until its target or a limit.

    Args:
        machine, workload: from `find_machine` and `find_workload`.
        policy: a name that `named_planner` knows.
        job: what the planner may choose from; `job_for` where left out.
        max_epochs: passes over the data after which the run stops; 20 times those of the measured run where left out.
        seed, observers, on_progress: as in `Simulation`.
        tags: what else the header holds.

    Example:
        >>> machine, workload = find_machine("a", "bert"), find_workload("bert")
        >>> simulate(machine, workload, "cannikin", max_epochs=0.01).reached
        False
    """
    job = job or job_for(machine, workload)
    if max_epochs is None:
        max_epochs = math.ceil(EPOCH_FACTOR * workload.spec.curve.progress[-1] / workload.epoch_progress)
    planner, pace = named_planner(policy, job, batch_norm=workload.spec.batch_norm)
    simulation = Simulation(
        machine, planner, job, workload, seed=seed, pace=pace, observers=observers, on_progress=on_progress
    )
    simulation.begin(policy, {"workload": workload.name, "seed": str(seed), **(tags or {})})
    return simulation.run(max_epochs=max_epochs)
