"""Reads a lab cluster from TOML, times in milliseconds. A key nobody knows is an error; all but `[[rank]]` is optional.

mechanism = "auto"      # portable, hosts or mps
link = "1gbit"          # bandwidth of each rank; needs hosts
sample_ms = 1.0         # device time of one sample on a rank of speed 1, forward and backward
fixed_ms = 0.0          # device time of a step whatever the batch and the speed
forward_share = 0.333   # part of both that is forward

[[rank]]
name = "fast"           # for people
speed = 1.0             # half of it takes twice as long for a sample
count = 2               # so many alike, default 1

[[slow]]                # in mid-run
rank = 1                # by number, from 0
factor = 0.5            # of its own speed
step = 100              # from its training forward of this number on
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import msgspec

from cannikin.errors import ClusterFileError, InvalidInputError
from cannikin.lab.cluster import MAX_RANKS, MECHANISMS, LabCluster, Slowdown, parse_link

__all__ = ["LabFile", "load_lab_file"]

_MAX_BYTES = 2**20


class _RankTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    speed: float
    name: str | None = None
    count: int = 1


class _SlowTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    rank: int
    factor: float
    step: int


class _LabTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    rank: list[_RankTable]
    mechanism: str = "auto"
    link: str | None = None
    sample_ms: float | None = None
    fixed_ms: float = 0.0
    forward_share: float = 1 / 3
    slow: list[_SlowTable] = []


_KNOWN = {"": _LabTable, "rank": _RankTable, "slow": _SlowTable}  # by the array that a key was found in


@dataclass(frozen=True, kw_only=True)
class LabFile:
    """A cluster and the mechanism to make it with."""

    cluster: LabCluster
    mechanism: str


def load_lab_file(path: str | os.PathLike[str]) -> LabFile:
    """What a file of the form above describes.

    Raises:
        ClusterFileError: the file is unreadable, malformed or impossible; one line names file, key and limit.
    """
    try:
        return _build(_convert(_read(path)))
    except InvalidInputError as error:
        line = "".join(c if c.isprintable() else " " for c in f"{os.fspath(path)}: {error}")
        raise ClusterFileError(line) from error


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        raise ClusterFileError(f"cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(data) > _MAX_BYTES:
        raise ClusterFileError(f"is larger than {_MAX_BYTES} bytes, the most a lab cluster may have")
    return data


def _convert(data: bytes) -> _LabTable:
    try:
        return msgspec.toml.decode(data, type=_LabTable)
    except msgspec.ValidationError as error:
        raise ClusterFileError(_advice(str(error))) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ClusterFileError(f"is not TOML: {error}") from error


def _advice(message: str) -> str:
    """msgspec's finding, which names the key and what it wanted, with the keys that are known there."""
    found = re.fullmatch(r"Object (missing required|contains unknown) field `(.*?)`(?: - at `\$\.?(.*)`)?", message)
    if found is None:
        return message
    kind, key, place = found[1], found[2], found[3] or ""
    name = f"{place}.{key}" if place else key
    if kind == "missing required":
        return f"{name} is missing: " + (
            "add at least one [[rank]] with its speed" if key == "rank" else "it is needed"
        )
    known = ", ".join(_KNOWN[re.sub(r"\[.*", "", place)].__struct_fields__)
    return f"{name} is not a known key: known here are {known}"


def _build(table: _LabTable) -> LabFile:
    if table.mechanism not in MECHANISMS:
        raise ClusterFileError(f"mechanism is {table.mechanism!r}: choose one of {', '.join(MECHANISMS)}")
    for position, rank in enumerate(table.rank):
        if not 1 <= rank.count <= MAX_RANKS:
            raise ClusterFileError(f"rank[{position}].count is {rank.count}: must be from 1 to {MAX_RANKS}")
    kinds = [(f"rank{i}" if rank.name is None else rank.name, rank) for i, rank in enumerate(table.rank)]
    cluster = LabCluster(
        speeds=tuple(rank.speed for _, rank in kinds for _ in range(rank.count)),
        names=tuple(name for name, rank in kinds for _ in range(rank.count)),
        sample_s=None if table.sample_ms is None else table.sample_ms / 1e3,
        fixed_s=table.fixed_ms / 1e3,
        forward_share=table.forward_share,
        link_bit_per_s=None if table.link is None else parse_link(table.link),
        slowdowns=tuple(Slowdown(rank=slow.rank, factor=slow.factor, step=slow.step) for slow in table.slow),
    )
    return LabFile(cluster=cluster, mechanism=table.mechanism)
