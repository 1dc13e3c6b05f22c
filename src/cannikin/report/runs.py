"""Which runs a command names: run directories, logs, and folders of run directories such as the demo leaves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from cannikin.errors import InvalidInputError
from cannikin.report.arrays import Metric, RunArrays
from cannikin.report.compare import Target
from cannikin.report.gather import read_arrays
from cannikin.runlog import RUNLOG_NAME

__all__ = ["Found", "empty_runs", "find_runs", "load_runs"]

_SUMMARY_NAME = "summary.json"  # that the demo leaves beside its runs
_METRIC = "accuracy"  # that it trains for


class _Task(msgspec.Struct):
    target: float


class _Result(msgspec.Struct):
    curve: list[tuple[float, float, float]] = []  # training seconds, samples, accuracy


class _Summary(msgspec.Struct):
    task: _Task
    policies: dict[str, _Result] = {}


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was named, and what the folder that holds it says of it.

    `target` and `curve` are the demo's: the accuracy to reach, and accuracies by the seconds spent training.
    """

    path: Path
    folder: Path
    target: Target | None = None
    curve: tuple[tuple[float, float, float], ...] = ()


def find_runs(path: Path) -> list[Found]:
    """The run at `path`, or the runs in the folders of `path`, which is then no run itself, without empty ones."""
    if not os.path.isdir(path):  # unlike Path.is_dir() it has an answer for every path
        return [_found(path, path.parent, _read_summary(_real(path).parent.parent))]
    if os.path.exists(path / RUNLOG_NAME):
        return [_found(path, path, _read_summary(_real(path).parent))]
    empty = empty_runs(path)
    folders = sorted(log.parent for log in path.glob(f"*/{RUNLOG_NAME}"))
    folders = [folder for folder in folders if folder not in empty] or folders
    if not folders:
        message = f"{path}: holds no {RUNLOG_NAME}, and neither do its folders: give the run_dir of a run"
        raise InvalidInputError(message)
    summary = _read_summary(path)
    order = [] if summary is None else list(summary.policies)
    folders.sort(key=lambda folder: order.index(folder.name) if folder.name in order else len(order))
    return [_found(folder, path, summary) for folder in folders]


def empty_runs(path: Path) -> list[Path]:
    """Runs in the folders of `path`, if it is no run itself, that ended before they began: their log is empty."""
    if os.path.exists(path / RUNLOG_NAME):
        return []
    return sorted(log.parent for log in path.glob(f"*/{RUNLOG_NAME}") if log.is_file() and not log.stat().st_size)


def _found(path: Path, folder: Path, summary: _Summary | None) -> Found:
    name = _real(path if os.path.isdir(path) else path.parent).name
    if summary is None or name not in summary.policies:
        return Found(path=path, folder=folder)
    target = Target(metric=_METRIC, value=summary.task.target)
    return Found(path=path, folder=folder, target=target, curve=tuple(summary.policies[name].curve))


def load_runs(found: list[Found]) -> list[RunArrays]:
    """Read them all, each under a name of its own."""
    names = _names([each.path for each in found])
    return [_with_curve(read_arrays(each.path, name), each.curve) for each, name in zip(found, names, strict=True)]


def _with_curve(run: RunArrays, curve: tuple[tuple[float, float, float], ...]) -> RunArrays:
    """The run with the demo's own measurement, which counts no time spent evaluating, in place of what it logged."""
    if not curve:
        return run
    seconds, samples, values = np.array(curve, dtype=np.float64).T
    metric = Metric(step=samples, elapsed_ms=seconds * 1e3, value=values)
    return replace(run, metrics={_METRIC: metric})


def _names(paths: list[Path]) -> list[str]:
    """The folders' names; with the folders above them, as far as it takes to tell them apart.

    Example:
        >>> _names([Path("x/a"), Path("x/b/runlog.jsonl")]), _names([Path("x/a"), Path("y/a")])
        (['a', 'b'], ['x/a', 'y/a'])
    """
    folders = [_real(path) if path.name != RUNLOG_NAME else _real(path).parent for path in paths]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = [_text("/".join(folder.parts[-depth:])) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({place})" for place, name in enumerate(names, 1)]


def _real(path: Path) -> Path:
    """Where a path leads; unlike Path.resolve() it has an answer for links that go round in a circle."""
    return Path(os.path.realpath(path))


def _text(name: str) -> str:
    """A file's name as text that can be written down: it may be any bytes."""
    return os.fsencode(name).decode(errors="replace")


def _read_summary(folder: Path) -> _Summary | None:
    try:
        return msgspec.json.decode((folder / _SUMMARY_NAME).read_bytes(), type=_Summary)
    except (OSError, ValueError, msgspec.DecodeError):
        return None  # another program's file of that name, or none
