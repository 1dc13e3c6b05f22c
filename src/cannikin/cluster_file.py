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

A wrong file raises `ClusterFileError` with one line that names the file, the key and the limit. Nothing is guessed, and
a key nobody knows is an error. Limits against slips of the pen: `MAX_BYTES`, `MAX_RANKS`, `MAX_BATCH`, `TIMES_MS`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from cannikin.core.perf import Cluster, Curve
from cannikin.core.records import NO_MAX
from cannikin.errors import ClusterFileError

__all__ = ["MAX_BATCH", "MAX_BYTES", "MAX_RANKS", "TIMES_MS", "load_cluster"]

MAX_BYTES = 2**20  # the largest file
MAX_RANKS = 100_000  # counts expanded: as many as the solver is measured with
MAX_BATCH = 10**12  # samples, a local batch or a total
MAX_NAME = 64  # characters
TIMES_MS = (1e-12, 1e9)  # a time other than 0: from a femtosecond to eleven days


class _CurveTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    fixed: float
    per_sample: float
    floor: float = 0.0


class _NodeTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    forward_ms: _CurveTable
    backward_ms: _CurveTable
    name: str | None = None
    count: int = 1
    min_batch: int = 1
    max_batch: int | None = None


class _CommTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    gamma: float
    overlapped_ms: float
    last_ms: float


class _ClusterTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    comm: _CommTable
    node: list[_NodeTable]


_WANTED = {
    "float": "must be a number",
    "int": "must be a whole number",
    "str": 'must be text in quotes, like "a100"',
    "array": "write [[node]], in double brackets, once for each kind of node",
    "object": "must be a table",
}  # by the type msgspec expected
_CURVE_ADVICE = "must be a table like { fixed = 8.0, per_sample = 0.01 }"
_TIME_LIMIT = "must be a finite time in ms and not negative: 0, or from 1e-12 to 1e9"
# What a required key is for.
_MEANINGS = {
    "comm": "add a [comm] table with gamma, overlapped_ms and last_ms",
    "node": "add at least one [[node]] with forward_ms and backward_ms",
    "gamma": "give the share of backward before the first bucket is ready, 0 to 1",
    "overlapped_ms": "give the all-reduce time of every bucket but the last, in ms",
    "last_ms": "give the all-reduce time of the last bucket, in ms",
    "forward_ms": _CURVE_ADVICE,
    "backward_ms": _CURVE_ADVICE,
    "fixed": "give the time in ms that does not depend on the batch",
    "per_sample": "give the time in ms that each sample adds",
}


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The performance model that a cluster file describes, times in seconds, one rank for each of every node's `count`.

    Ranks come in file order. `Cluster.names` repeats a node's name for each of its ranks, and nodes may share a name.

    Args:
        path: a TOML file in UTF-8, as the module's docstring shows it; a byte order mark and CRLF are fine.

    Raises:
        ClusterFileError: the file is unreadable, malformed or impossible.

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
    try:
        table = _convert(_parse(_read(path)))
        _check(table)
    except ClusterFileError as error:
        raise ClusterFileError(_one_line(f"{os.fspath(path)}: {error}")) from error.__cause__
    return _build(table)


def _read(path: str | os.PathLike[str]) -> str:
    """The file's text."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        raise ClusterFileError(f"cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(data) > MAX_BYTES:
        raise ClusterFileError(f"is larger than {MAX_BYTES} bytes, the most a cluster file may have")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ClusterFileError(f"is not UTF-8 text: line {line} has byte 0x{data[error.start]:02x}") from error


def _parse(text: str) -> dict[str, Any]:
    """The TOML document."""
    try:
        document: dict[str, Any] = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ClusterFileError(f"is not TOML: {error}") from error
    except ValueError as error:  # Python refuses to read an integer of thousands of digits
        line = next((i for i, line in enumerate(text.splitlines(), 1) if re.search(r"[\d_]{4000}", line)), "?")
        raise ClusterFileError(f"line {line} has a number of thousands of digits: times end at 1e9 ms") from error
    except RecursionError as error:
        raise ClusterFileError("is not a cluster file: brackets are nested too deeply") from error
    if not document:
        raise ClusterFileError("is empty: it needs a [comm] table and at least one [[node]]")
    return document


def _convert(document: dict[str, Any]) -> _ClusterTable:
    """The document as typed tables, every key known and none missing."""
    try:
        return msgspec.convert(document, _ClusterTable)
    except msgspec.ValidationError as error:
        try:
            advice = _advice(str(error), document)
        except (LookupError, TypeError):  # a key that reads like a part of msgspec's message
            advice = str(error)
        raise ClusterFileError(advice) from error


def _advice(message: str, document: dict[str, Any]) -> str:
    """msgspec's finding in words that name the key and say what to write there."""
    what, _, path = message.partition(" - at `$")
    path = path.removesuffix("`").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what, re.DOTALL):
        return f"{_label(path, missing[1], document)} is missing: {_MEANINGS[missing[1]]}"
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        return f"{_label(path, unknown[1], document)} is not a known key: {_known(path, unknown[1])}"
    advice = _TIME_LIMIT if what == "Number out of range" else what
    if wanted := re.match(r"Expected `(\w+)", what):
        curve = wanted[1] == "object" and path.endswith("_ms")
        advice = _CURVE_ADVICE if curve else _WANTED.get(wanted[1], what)
    return f"{_label(path, '', document)} is {_shown(_value_at(path, document))}: {advice}"


def _label(path: str, key: str, document: dict[str, Any]) -> str:
    """A key as a message names it, with the node's name where it has one."""
    full = ".".join(part for part in (path, _short(key)) if part)
    if at := re.match(r"node\[(\d+)\]", full):
        node = document["node"][int(at[1])]
        name = node.get("name") if isinstance(node, dict) else None
        if isinstance(name, str) and name:
            return f'{full} (node "{_short(name)}")'
    return full or '""'


def _known(path: str, key: str) -> str:
    """The keys that may stand where `key` was found, the nearest one first."""
    tables = {"": _ClusterTable, "comm": _CommTable}
    names = tables.get(path, _NodeTable if path.endswith("]") else _CurveTable).__struct_fields__
    near = difflib.get_close_matches(key, names, n=1)
    return (f"did you mean {near[0]}? " if near else "") + "known here are " + ", ".join(names)


def _value_at(path: str, document: dict[str, Any]) -> Any:
    """The value at a path such as `node[1].backward_ms.fixed`."""
    value: Any = document
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        value = value[name] if name else value[int(index)]
    return value


def _shown(value: Any) -> str:
    """A value as the file has it, cut short."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"
    return repr(value) if isinstance(value, float) else _short(json.dumps(value, default=str, ensure_ascii=False))


def _short(text: str) -> str:
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 3] + "..."


def _one_line(text: str) -> str:
    """The text with every character that would break the line or move the cursor escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _check(table: _ClusterTable) -> None:
    """Refuse values that no cluster can have."""
    _refuse_unless(0 <= table.comm.gamma <= 1, "comm.gamma", table.comm.gamma, "must be a share, from 0 to 1")
    _check_time("comm.overlapped_ms", table.comm.overlapped_ms)
    _check_time("comm.last_ms", table.comm.last_ms)
    if not table.node:
        raise ClusterFileError("node has no entry: add at least one [[node]] with forward_ms and backward_ms")
    for position, node in enumerate(table.node):
        _check_node(f"node[{position}].", f' (node "{_short(node.name)}")' if node.name else "", node)
    ranks = sum(node.count for node in table.node)
    _refuse_unless(ranks <= MAX_RANKS, "the sum of node[].count", ranks, f"at most {MAX_RANKS} ranks fit a file")


def _check_node(prefix: str, suffix: str, node: _NodeTable) -> None:
    def refuse_unless(right: bool, key: str, limit: str) -> None:
        _refuse_unless(right, prefix + key + suffix, getattr(node, key), limit)

    if node.name is not None:
        plain = node.name.isprintable() and 0 < len(node.name) <= MAX_NAME
        _refuse_unless(plain, f"{prefix}name", node.name, f"must have 1 to {MAX_NAME} printable characters")
    refuse_unless(1 <= node.count <= MAX_RANKS, "count", f"must be from 1 to {MAX_RANKS}")
    for key, value in _times(node):
        _check_time(prefix + key + suffix, value)
    if not any(value for _, value in _times(node)):
        raise ClusterFileError(f"{prefix}forward_ms{suffix} and backward_ms are all 0: a step takes some time")
    refuse_unless(1 <= node.min_batch <= MAX_BATCH, "min_batch", f"must be from 1 to {MAX_BATCH}")
    if node.max_batch is not None:
        right = node.min_batch <= node.max_batch <= MAX_BATCH
        refuse_unless(right, "max_batch", f"must be from min_batch, {node.min_batch}, to {MAX_BATCH}")


def _times(node: _NodeTable) -> Iterator[tuple[str, float]]:
    for curve in ("forward_ms", "backward_ms"):
        for key in _CurveTable.__struct_fields__:
            yield f"{curve}.{key}", getattr(getattr(node, curve), key)


def _check_time(key: str, value_ms: float) -> None:
    _refuse_unless(value_ms == 0 or TIMES_MS[0] <= value_ms <= TIMES_MS[1], key, value_ms, _TIME_LIMIT)


def _refuse_unless(right: bool, key: str, value: Any, limit: str) -> None:
    if not right:
        raise ClusterFileError(f"{key} is {_shown(value)}: {limit}")


def _build(table: _ClusterTable) -> Cluster:
    counts = [node.count for node in table.node]

    def each(values: list[Any]) -> Any:
        return np.repeat(values, counts)

    def curve(tables: list[_CurveTable]) -> Curve:
        return Curve(
            fixed_s=each([t.fixed for t in tables]) / 1000,
            per_sample_s=each([t.per_sample for t in tables]) / 1000,
            floor_s=each([t.floor for t in tables]) / 1000,
        )

    names = [f"node{i}" if node.name is None else node.name for i, node in enumerate(table.node)]
    return Cluster.two_point(
        forward=curve([node.forward_ms for node in table.node]),
        backward=curve([node.backward_ms for node in table.node]),
        gamma=table.comm.gamma,
        overlapped_s=table.comm.overlapped_ms / 1000,
        last_s=table.comm.last_ms / 1000,
        min_batch=each([node.min_batch for node in table.node]),
        max_batch=each([NO_MAX if node.max_batch is None else node.max_batch for node in table.node]),
        names=[name for name, count in zip(names, counts, strict=True) for _ in range(count)],
    )
