"""Reads a lab cluster from TOML, times in milliseconds. A key nobody knows is an error; all but `[[rank]]` is optional.

mechanism = "auto"      # or a name that `cannikin lab --help` lists
link = "1gbit"          # bandwidth of each rank; needs hosts
sample_ms = 1.0         # device time of one sample on a rank of speed 1, forward and backward
fixed_ms = 0.0          # device time of a step whatever the batch and the speed
forward_share = 0.333   # part of both that is forward

[[rank]]
name = "fast"           # for people
speed = 1.0             # half of it takes twice as long for a sample
count = 2               # ranks of this kind, default 1
forward_share = 0.4     # of this kind, where it is another one

[[slow]]                # in mid-run
rank = 1                # by number, from 0
factor = 0.5            # of its own speed
step = 100              # from its training forward of this number on
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import msgspec

from cannikin.lab.cluster import MAX_RANKS, LabCluster, Slowdown, parse_link
from cannikin.lab.mechanisms import AUTO, MECHANISMS
from cannikin.toml_files import limit, naming, read_toml

_Count = Annotated[int, limit(f"from 1 to {MAX_RANKS}", lambda count: 1 <= count <= MAX_RANKS)]

_MECHANISMS = (AUTO, *MECHANISMS)
_Mechanism = Annotated[str, limit(f"one of {', '.join(_MECHANISMS)}", lambda name: name in _MECHANISMS)]


class _RankTable(msgspec.Struct, frozen=True):
    speed: float
    name: str | None = None
    count: _Count = 1
    forward_share: float | None = None


class _LabTable(msgspec.Struct, frozen=True):
    rank: list[_RankTable]
    mechanism: _Mechanism = AUTO
    link: str | None = None
    sample_ms: float | None = None
    fixed_ms: float = 0.0
    forward_share: float = 1 / 3
    slow: list[Slowdown] = []


_ADVICE = {"rank": "add at least one [[rank]] with its speed"}


@dataclass(frozen=True, kw_only=True)
class LabFile:
    """A cluster and the mechanism to make it with."""

    cluster: LabCluster
    mechanism: str


def load_lab_file(path: str | os.PathLike[str]) -> LabFile:
    """Return what a file of the form above describes.

    Raises:
        ClusterFileError: the file is unreadable, malformed or impossible; one line names file, key and limit.
    """
    with naming(path):
        table = read_toml(path, _LabTable, _ADVICE)
        kinds = [(f"rank{i}" if rank.name is None else rank.name, rank) for i, rank in enumerate(table.rank)]
        cluster = LabCluster(
            speeds=tuple(rank.speed for _, rank in kinds for _ in range(rank.count)),
            names=tuple(name for name, rank in kinds for _ in range(rank.count)),
            sample_s=None if table.sample_ms is None else table.sample_ms / 1e3,
            fixed_s=table.fixed_ms / 1e3,
            forward_share=table.forward_share,
            forward_shares=tuple(rank.forward_share for _, rank in kinds for _ in range(rank.count)),
            link_bit_per_s=None if table.link is None else parse_link(table.link),
            slowdowns=tuple(table.slow),
        )
    return LabFile(cluster=cluster, mechanism=table.mechanism)
