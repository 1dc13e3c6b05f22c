"""Simulated clusters beyond the catalogue's: other networks, other ratios of forward to backward, a sweep of speeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from cannikin.sim.catalog import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec, load_cluster_spec
from cannikin.sim.hardware import Machine, build_machine
from cannikin.sim.workload import find_workload

EQUAL = "equal"  # 16 ranks like an RTX 6000, each in a server of its own, at 10 Gbit/s
ONE_SHARE = 1 / 3  # of forward, on every device: backward has two products for each of forward's
# The least share of forward that was measured anywhere, and the largest (.40) with an optimizer's step on top.
SHARE_RANGE = (0.19, 0.45)
NUM_DRAWS = 10
_SWEEP_RANKS = 16


def machine_at(
    cluster: str, workload: str, bandwidth_gbit: float | None = None, new_size: float | None = None
) -> Machine:
    """Return a cluster that runs a workload.

    Args:
        cluster: by name, or `EQUAL` for 16 ranks like an RTX 6000.
        workload: by name.
        bandwidth_gbit: between servers, where it is not the cluster's own.
        new_size: what the first step at a new batch size takes, over a step, where it is not the simulator's 1.34.
    """
    machine = unlike_ranks(workload, 1.0) if cluster == EQUAL else _catalogued(cluster, workload, bandwidth_gbit)
    return machine if new_size is None else replace(machine, new_size=new_size - 1.0)


def _catalogued(cluster: str, workload: str, bandwidth_gbit: float | None) -> Machine:
    spec = load_cluster_spec(cluster)
    if bandwidth_gbit is not None:
        spec = msgspec.structs.replace(spec, link=msgspec.structs.replace(spec.link, bandwidth_gbit=bandwidth_gbit))
    return build_machine(spec, workload, find_workload(workload).spec)


def with_forward_shares(machine: Machine, shares: npt.ArrayLike) -> Machine:
    """Return the same machine with this part of each rank's compute time before backward, [n] or one for all."""
    forward = np.broadcast_to(np.asarray(shares, dtype=np.float64), (machine.num_ranks,))
    parts = np.stack([forward, 1 - forward])
    return replace(
        machine,
        launch_s=parts * machine.launch_s.sum(axis=0),
        fixed_s=parts * machine.fixed_s.sum(axis=0),
        sample_s=parts * machine.sample_s.sum(axis=0),
    )


def drawn_shares(machine: Machine, seed: int) -> Iterator[Machine]:
    """Return the machine with shares of forward drawn for each kind of device from the whole range, draw by draw.

    There is none where all devices are of one kind.
    """
    kinds, kind_of = np.unique(machine.names, return_inverse=True)
    if len(kinds) == 1:
        return
    for draw in range(NUM_DRAWS):
        shares = np.random.default_rng([seed, draw]).uniform(*SHARE_RANGE, len(kinds))
        yield with_forward_shares(machine, shares[kind_of])


def unlike_ranks(workload: str, slowest: float) -> Machine:
    """Return 16 ranks like an RTX 6000 whose times per sample grow evenly up to `slowest` times the first one's."""
    factors = np.linspace(1.0, slowest, _SWEEP_RANKS).tolist()
    kinds = {f"k{rank}": DeviceSpec(memory_gb=24.0, like="rtx6000", speed=1 / f) for rank, f in enumerate(factors)}
    nodes = [NodeSpec(device=kind) for kind in kinds]
    spec = ClusterSpec(link=LinkSpec(bandwidth_gbit=10.0), node=nodes, device=kinds)
    return build_machine(spec, workload, find_workload(workload).spec)
