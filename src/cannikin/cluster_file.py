"""Reads a cluster file: the performance model of a cluster as people write it, in TOML and milliseconds.

    [comm]
    gamma = 0.15            # share of backward before the first bucket is ready
    overlapped_ms = 12.0    # T_o: all-reduce of every bucket but the last
    last_ms = 3.0           # T_u: all-reduce of the last bucket

    [[node]]
    name = "a100"           # optional, "node0" by position; may repeat
    count = 4               # optional: so many ranks alike, default 1
    forward_ms  = { fixed = 8.0, per_sample = 0.010 }                 # a = s + q b: forward and optimizer
    backward_ms = { fixed = 4.0, per_sample = 0.022, floor = 6.0 }    # P = max(floor, m + k b); floor optional on both
    min_batch = 1           # optional
    max_batch = 512         # optional: memory

Limits against slips of the pen: `MAX_RANKS`, `MAX_BATCH`, `MAX_NAME`, `TIMES_MS`.
"""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
import numpy as np

from cannikin.core.perf import Cluster, Curve
from cannikin.core.values import NO_MAX
from cannikin.errors import ClusterFileError
from cannikin.toml_files import key_at, limit, naming, read_toml

MAX_RANKS = 100_000  # counts expanded: as many as the solver is measured with
MAX_BATCH = 10**12  # samples, a local batch or a total
MAX_NAME = 64  # characters
TIMES_MS = (1e-12, 1e9)  # a time other than 0: from a femtosecond to eleven days

_Time = Annotated[
    float,
    limit(
        "a finite time in ms and not negative: 0, or from 1e-12 to 1e9",
        lambda time_ms: time_ms == 0 or TIMES_MS[0] <= time_ms <= TIMES_MS[1],
    ),
]
_Share = Annotated[float, limit("a share, from 0 to 1", lambda share: 0 <= share <= 1)]
_Name = Annotated[
    str, limit(f"1 to {MAX_NAME} printable characters", lambda name: name.isprintable() and 0 < len(name) <= MAX_NAME)
]
_Count = Annotated[int, limit(f"from 1 to {MAX_RANKS}", lambda count: 1 <= count <= MAX_RANKS)]
_Batch = Annotated[int, limit(f"from 1 to {MAX_BATCH}", lambda batch: 1 <= batch <= MAX_BATCH)]


class _CurveTable(msgspec.Struct, frozen=True):
    fixed: _Time
    per_sample: _Time
    floor: _Time = 0.0


class _NodeTable(msgspec.Struct, frozen=True):
    forward_ms: _CurveTable
    backward_ms: _CurveTable
    name: _Name | None = None
    count: _Count = 1
    min_batch: _Batch = 1
    max_batch: _Batch | None = None


class _CommTable(msgspec.Struct, frozen=True):
    gamma: _Share
    overlapped_ms: _Time
    last_ms: _Time


class _ClusterTable(msgspec.Struct, frozen=True):
    comm: _CommTable
    node: list[_NodeTable]


_CURVE_ADVICE = "write a table like { fixed = 8.0, per_sample = 0.01 }"
_NODE_ADVICE = "add at least one [[node]] with forward_ms and backward_ms"
_ADVICE = {
    "comm": "add a [comm] table with gamma, overlapped_ms and last_ms",
    "node": _NODE_ADVICE,
    "gamma": "give the share of backward before the first bucket is ready, 0 to 1",
    "overlapped_ms": "give the all-reduce time of every bucket but the last, in ms",
    "last_ms": "give the all-reduce time of the last bucket, in ms",
    "forward_ms": _CURVE_ADVICE,
    "backward_ms": _CURVE_ADVICE,
    "fixed": "give the time in ms that does not depend on the batch",
    "per_sample": "give the time in ms that each sample adds",
}


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Return the performance model that a cluster file describes, times in seconds, `count` ranks per node.

    Ranks come in file order. `Cluster.names` repeats a node's name for each of its ranks, and nodes may share a name.

    Raises:
        ClusterFileError: the file is unreadable, malformed or impossible; one line names file, key and limit.

    Example:
        >>> import pathlib, tempfile
        >>> text = '''
        ... comm = { gamma = 0.15, overlapped_ms = 12.0, last_ms = 3.0 }
        ... [[node]]
        ... count = 2
        ... forward_ms = { fixed = 8, per_sample = 0.010 }
        ... backward_ms = { fixed = 4, per_sample = 0.022, floor = 6 }
        ... '''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "cluster.toml")
        ...     _ = path.write_text(text)
        ...     cluster = load_cluster(path)
        >>> cluster.names, cluster.backward.floor_s.tolist()
        (('node0', 'node0'), [0.006, 0.006])
    """
    with naming(path):
        table = read_toml(path, _ClusterTable, _ADVICE)
        _check(table)
    return _build(table)


def _check(table: _ClusterTable) -> None:
    """Refuse what no cluster can be, though each value is within its limit."""
    if not table.node:
        raise ClusterFileError(f"node has no entry: {_NODE_ADVICE}")
    for position, node in enumerate(table.node):
        if not any(msgspec.structs.astuple(node.forward_ms) + msgspec.structs.astuple(node.backward_ms)):
            key = key_at("node", position, "forward_ms", name=node.name)
            raise ClusterFileError(f"{key} and backward_ms are all 0: a step takes some time")
        if node.max_batch is not None and node.max_batch < node.min_batch:
            key = key_at("node", position, "max_batch", name=node.name)
            wanted = f"from min_batch, {node.min_batch}, to {MAX_BATCH}"
            raise ClusterFileError(f"{key} is {node.max_batch}: it must be {wanted}")
    num_ranks = sum(node.count for node in table.node)
    if num_ranks > MAX_RANKS:
        raise ClusterFileError(f"the sum of node[].count is {num_ranks}: at most {MAX_RANKS} ranks fit a file")


def _build(table: _ClusterTable) -> Cluster:
    kinds = [(f"node{i}" if node.name is None else node.name, node) for i, node in enumerate(table.node)]
    names = [name for name, node in kinds for _ in range(node.count)]
    ranks = [node for _, node in kinds for _ in range(node.count)]
    return Cluster.two_point(
        forward=_curve([node.forward_ms for node in ranks]),
        backward=_curve([node.backward_ms for node in ranks]),
        gamma=table.comm.gamma,
        overlapped_s=table.comm.overlapped_ms / 1000,
        last_s=table.comm.last_ms / 1000,
        min_batch=[node.min_batch for node in ranks],
        max_batch=[NO_MAX if node.max_batch is None else node.max_batch for node in ranks],
        names=names,
    )


def _curve(tables: list[_CurveTable]) -> Curve:
    fixed_s, per_sample_s, floor_s = np.array([msgspec.structs.astuple(table) for table in tables]).T / 1000
    return Curve(fixed_s=fixed_s, per_sample_s=per_sample_s, floor_s=floor_s)
