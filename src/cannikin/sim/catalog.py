"""Devices, clusters and workloads by name, from the data files beside this module, and a user's own cluster file.

`docs/simulator.md` shows a cluster file. A wrong one raises `ClusterFileError` with one line that names the file, the
key and the limit.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from cannikin.errors import ClusterFileError, InvalidInputError
from cannikin.toml_files import limit, naming, nearest, read_toml

_MAX_RANKS = 4096
_DATA = resources.files("cannikin.sim") / "data"
_Positive = Annotated[float, limit("above 0, from 1e-9 to 1e9", lambda value: 1e-9 <= value <= 1e9)]
_Latency = Annotated[float, limit("finite and not negative, at most 1e9", lambda value: 0 <= value <= 1e9)]
_Share = Annotated[float, limit("above 0 and at most 1", lambda value: 0 < value <= 1)]
_Part = Annotated[float, limit("above 0 and below 1", lambda value: 0 < value < 1)]
_Scatter = Annotated[float, limit("from 0 to 0.5", lambda value: 0 <= value <= 0.5)]
_Count = Annotated[int, limit(f"from 1 to {_MAX_RANKS}", lambda value: 1 <= value <= _MAX_RANKS)]


class TimesSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compute time of a workload on a device: (launch^p + (fixed + sample b)^p)^(1/p), p = `sharpness`."""

    launch_ms: float
    fixed_ms: float
    sample_us: float
    sharpness: float
    max_batch: int


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of GPU; one with `like` has that device's times, with the time per sample divided by `speed`.

    `forward_share` is the part of its compute time before backward; that of the device it is like, or else of the
    workload, where left out.
    """

    memory_gb: _Positive
    forward_share: _Part | None = None
    jitter: _Scatter = 0.03
    outliers: _Scatter = 0.005
    bucket_jitter: _Scatter = 0.08
    ready_skew: _Positive = 1.0
    like: str = ""
    speed: _Positive = 1.0
    times: dict[str, TimesSpec] = {}


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The links that the ring passes through, between servers and within one."""

    bandwidth_gbit: _Positive
    latency_us: _Latency = 50.0
    local_bandwidth_gbit: _Positive = 100.0
    local_latency_us: _Latency = 10.0


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` ranks of one kind, `per_server` of them in each server, which has a link of its own where it is slower.

    The job gets a `share` of each card, and `memory_gb` where that is not the card's. `name` is for people.
    """

    device: str
    count: _Count = 1
    share: _Share = 1.0
    per_server: _Count = 1
    link_gbit: _Positive | None = None
    memory_gb: _Positive | None = None
    name: str = ""


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster as its file has it."""

    link: LinkSpec
    node: list[NodeSpec]
    device: dict[str, DeviceSpec] = {}

    @property
    def num_ranks(self) -> int:
        """n, counts expanded."""
        return sum(node.count for node in self.node)


class CurveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metric, |G|^2 and tr Sigma along the progress of a run at `initial_batch`."""

    initial_batch: int
    target_progress: float
    progress: list[float]
    metric: list[float]
    signal_sqnorm: list[float]
    noise_trace: list[float]


class WorkloadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload as its file has it; `data/workloads.toml` says what each key is and where it comes from."""

    title: str
    optimizer: str
    lr_rule: str
    batch_size: int
    max_batch_size: int
    num_samples: int
    num_parameters: float
    bucket_mb: list[float]
    ready_by_layers: list[float]
    ready_by_work: list[float]
    forward_share: float
    batch_norm: bool
    metric_name: str
    target: float
    higher_is_better: bool
    curve: CurveSpec


@cache
def known_devices() -> dict[str, DeviceSpec]:
    """Return the catalogue's devices by name."""
    return msgspec.toml.decode((_DATA / "devices.toml").read_bytes(), type=dict[str, DeviceSpec])


@cache
def _workloads() -> dict[str, WorkloadSpec]:
    return msgspec.toml.decode((_DATA / "workloads.toml").read_bytes(), type=dict[str, WorkloadSpec])


def workload_names() -> tuple[str, ...]:
    """Return the names of the workloads."""
    return tuple(_workloads())


def cluster_names() -> tuple[str, ...]:
    """Return the names of the paper's clusters: a, b, c."""
    names = (entry.name for entry in (_DATA / "clusters").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_workload(name: str) -> WorkloadSpec:
    """Return the workload of that name."""
    if name not in _workloads():
        raise InvalidInputError(f"workload {name!r} is unknown: {_choose(name, workload_names())}")
    return _workloads()[name]


_ADVICE = {
    "link": "add a [link] table with bandwidth_gbit",
    "node": "add at least one [[node]] with a device",
    "device": "name the kind of GPU",
    "bandwidth_gbit": "give the speed of the links between servers",
}


def load_cluster_spec(name_or_path: str | os.PathLike[str]) -> ClusterSpec:
    """Return a cluster by name, or from a file."""
    name = os.fspath(name_or_path)
    if name.lower() in cluster_names():
        ours = _DATA / "clusters" / f"{name.lower()}.toml"
        return msgspec.toml.decode(ours.read_bytes(), type=ClusterSpec)
    if not name.endswith(".toml") and not Path(name).exists():
        raise InvalidInputError(f"cluster {name!r} is unknown: {_choose(name, cluster_names())}, or give a TOML file")
    with naming(name):
        spec = read_toml(name, ClusterSpec, _ADVICE)
        _check(spec)
    return spec


def _choose(name: str, known: tuple[str, ...]) -> str:
    return f"{nearest(name, known)}choose one of {', '.join(known)}"


def _check(spec: ClusterSpec) -> None:
    """Refuse what no cluster can be, though each value is within its limit."""
    if not spec.node:
        raise ClusterFileError(f"node has no entry: {_ADVICE['node']}")
    for name, device in spec.device.items():
        if device.like not in known_devices():
            advice = _choose(device.like, tuple(known_devices()))
            raise ClusterFileError(f"device.{name}.like is {device.like!r}: {advice}")
    known = (*known_devices(), *spec.device)
    for position, node in enumerate(spec.node):
        if node.device not in known:
            advice = _choose(node.device, known)
            raise ClusterFileError(f"node[{position}].device {node.device!r} is unknown: {advice}")
    if spec.num_ranks > _MAX_RANKS:
        raise ClusterFileError(f"the sum of node[].count is {spec.num_ranks}: it must be at most {_MAX_RANKS}")
