"""Devices, clusters and workloads by name, from the data files beside this module, and a user's own cluster file:

    [link]
    bandwidth_gbit = 10.0         # between servers, as a ring all-reduce gets it
    latency_us = 50.0             # a hop of the ring
    local_bandwidth_gbit = 100.0  # within a server; optional, as is local_latency_us

    [[node]]
    device = "rtx6000"            # of `DEVICES`, or of a [device.NAME] table in this file
    count = 4                     # optional: so many ranks alike, default 1
    share = 0.5                   # optional: of the card that this job gets, default 1
    per_server = 4                # optional: ranks that sit in one server, default 1
    link_gbit = 1.0               # optional: this server's own link, where it is slower
    memory_gb = 12.0              # optional: where it is not the card's
    name = "old"                  # optional, default the device's name

    [device.mine]                 # optional: a device that is not in the catalogue
    like = "rtx6000"              # has that one's times,
    speed = 1.5                   # with the time a sample divided by this
    memory_gb = 48.0

A wrong file raises `ClusterFileError` with one line that names the file, the key and the limit.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cannikin.errors import ClusterFileError, InvalidInputError

__all__ = [
    "ClusterSpec",
    "DeviceSpec",
    "LinkSpec",
    "NodeSpec",
    "TimesSpec",
    "WorkloadSpec",
    "cluster_names",
    "known_devices",
    "load_cluster_spec",
    "load_workload",
    "workload_names",
]

_MAX_BYTES = 2**20
_MAX_RANKS = 4096
_DATA = resources.files("cannikin.sim") / "data"
_Table = TypeVar("_Table")


class TimesSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compute time of a workload on a device: (launch^p + (fixed + sample b)^p)^(1/p), p = `sharpness`."""

    launch_ms: float
    fixed_ms: float
    sample_us: float
    sharpness: float
    max_batch: int


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of GPU; one with `like` has that one's times, its samples `speed` times as fast."""

    memory_gb: float
    jitter: float = 0.03
    outliers: float = 0.005
    bucket_jitter: float = 0.08
    ready_skew: float = 1.0
    like: str = ""
    speed: float = 1.0
    times: dict[str, TimesSpec] = {}


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The links that the ring passes through, between servers and within one."""

    bandwidth_gbit: float
    latency_us: float = 50.0
    local_bandwidth_gbit: float = 100.0
    local_latency_us: float = 10.0


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ranks alike."""

    device: str
    count: int = 1
    share: float = 1.0
    per_server: int = 1
    link_gbit: float | None = None
    memory_gb: float | None = None
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
    """A workload as its file has it; see `data/workloads.toml` for what each key is and where it comes from."""

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
    """The catalogue's devices by name.

    >>> "rtx6000" in known_devices()
    True
    """
    return msgspec.toml.decode((_DATA / "devices.toml").read_bytes(), type=dict[str, DeviceSpec])


@cache
def _workloads() -> dict[str, WorkloadSpec]:
    return msgspec.toml.decode((_DATA / "workloads.toml").read_bytes(), type=dict[str, WorkloadSpec])


def workload_names() -> tuple[str, ...]:
    """The workloads there are.

    >>> workload_names()
    ('cifar10', 'imagenet', 'bert', 'deepspeech2', 'ncf')
    """
    return tuple(_workloads())


def cluster_names() -> tuple[str, ...]:
    """The clusters there are by name.

    >>> cluster_names()
    ('a', 'b', 'c')
    """
    names = (entry.name for entry in (_DATA / "clusters").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_workload(name: str) -> WorkloadSpec:
    """The workload of that name.

    >>> load_workload("ncf").batch_size
    64
    """
    if name not in _workloads():
        raise InvalidInputError(f"workload {name!r} is unknown: {_choose(name, workload_names())}")
    return _workloads()[name]


def load_cluster_spec(name_or_path: str | os.PathLike[str]) -> ClusterSpec:
    """A cluster by name, or from a file.

    >>> load_cluster_spec("b").num_ranks
    16
    """
    name = os.fspath(name_or_path)
    if name.lower() in cluster_names():
        source: Any = _DATA / "clusters" / f"{name.lower()}.toml"
    else:
        source = Path(name)
        if not name.endswith(".toml") and not source.exists():
            advice = _choose(name, cluster_names())
            raise InvalidInputError(f"cluster {name!r} is unknown: {advice}, or give a TOML file")
    try:
        spec = _convert(_parse(source), ClusterSpec)
        _check(spec)
    except ClusterFileError as error:
        raise ClusterFileError(f"{name}: {error}") from error
    return spec


def _choose(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"choose one of {', '.join(known)}"


def _parse(source: Any) -> Any:
    try:
        data = source.read_bytes()
    except (OSError, ValueError) as error:
        raise ClusterFileError(f"cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(data) > _MAX_BYTES:
        raise ClusterFileError(f"is larger than {_MAX_BYTES} bytes, the most a cluster file may have")
    try:
        return msgspec.toml.decode(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # malformed text or TOML
        raise ClusterFileError(f"is not TOML: {error}") from error


def _convert(document: Any, kind: type[_Table]) -> _Table:
    """The document as typed tables; what does not fit is named by its key."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").lstrip(".")
        if found := re.fullmatch(r"Object missing required field `(.*)`", what):
            raise ClusterFileError(f"{_joined(path, found[1])} is missing{_HINTS.get(found[1], '')}") from error
        if found := re.fullmatch(r"Object contains unknown field `(.*)`", what):
            known = _choose(found[1], _fields(path)).replace("choose one of", "known here are")
            raise ClusterFileError(f"{_joined(path, found[1])} is not a known key: {known}") from error
        raise ClusterFileError(f"{path or 'the file'}: {what[0].lower()}{what[1:]}") from error


_HINTS = {
    "link": ": add a [link] table with bandwidth_gbit",
    "node": ": add at least one [[node]] with a device",
    "device": ": name the kind of GPU",
    "bandwidth_gbit": ": give the speed of the links between servers",
}


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _fields(path: str) -> tuple[str, ...]:
    root = path.split("[")[0].split(".")[0]
    kinds: dict[str, Any] = {"": ClusterSpec, "link": LinkSpec, "node": NodeSpec, "device": DeviceSpec}
    fields: tuple[str, ...] = kinds.get(root, ClusterSpec).__struct_fields__
    return fields


def _check(spec: ClusterSpec) -> None:
    """Refuse what no cluster can be."""
    for key in ("bandwidth_gbit", "local_bandwidth_gbit"):
        _refuse_unless(_positive(getattr(spec.link, key)), f"link.{key}", getattr(spec.link, key), "above 0")
    for key in ("latency_us", "local_latency_us"):
        value = getattr(spec.link, key)
        _refuse_unless(math.isfinite(value) and value >= 0, f"link.{key}", value, "finite and not negative")
    for name, device in spec.device.items():
        _check_device(name, device)
    if not spec.node:
        raise ClusterFileError("node has no entry: add at least one [[node]] with a device")
    known = (*known_devices(), *spec.device)
    for position, node in enumerate(spec.node):
        key = f"node[{position}]"
        if node.device not in known:
            raise ClusterFileError(f"{key}.device {node.device!r} is unknown: {_choose(node.device, known)}")
        _refuse_unless(1 <= node.count <= _MAX_RANKS, f"{key}.count", node.count, f"from 1 to {_MAX_RANKS}")
        _refuse_unless(1 <= node.per_server <= _MAX_RANKS, f"{key}.per_server", node.per_server, "at least 1")
        _refuse_unless(0 < node.share <= 1, f"{key}.share", node.share, "above 0 and at most 1")
        for name in ("link_gbit", "memory_gb"):
            value = getattr(node, name)
            _refuse_unless(value is None or _positive(value), f"{key}.{name}", value, "above 0")
    _refuse_unless(spec.num_ranks <= _MAX_RANKS, "the sum of node[].count", spec.num_ranks, f"at most {_MAX_RANKS}")


def _check_device(name: str, device: DeviceSpec) -> None:
    if device.like not in known_devices():
        advice = _choose(device.like, tuple(known_devices()))
        raise ClusterFileError(f"device.{name}.like is {device.like!r}: {advice}")
    for key in ("speed", "memory_gb", "ready_skew"):
        _refuse_unless(_positive(getattr(device, key)), f"device.{name}.{key}", getattr(device, key), "above 0")
    for key in ("jitter", "outliers", "bucket_jitter"):
        value = getattr(device, key)
        _refuse_unless(0 <= value <= 0.5, f"device.{name}.{key}", value, "from 0 to 0.5")


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _refuse_unless(right: bool, key: str, value: Any, limit: str) -> None:
    if not right:
        raise ClusterFileError(f"{key} is {value}: it must be {limit}")
