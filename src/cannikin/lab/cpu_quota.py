"""Shares of a core for groups of processes: the Linux cpu controller, version 1 or 2, where it can be written."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cannikin.errors import MechanismError

__all__ = ["Controller", "core_shares", "find_controller", "make_group"]

_PERIOD_US = 10_000  # short beside a step, so that a step is slow and not stopped and fast by turns
_LEAST_QUOTA_US = 1_000  # the kernel's limit
_MOST_OF_CORES = 0.9


@dataclass(frozen=True, kw_only=True)
class Controller:
    """Where groups are made, and by which version's files."""

    version: int
    path: Path

    def limits(self, share: float) -> list[tuple[str, str]]:
        """(file, text) that give a group this share of one core."""
        quota_us = max(_LEAST_QUOTA_US, round(share * _PERIOD_US))
        if self.version == 1:
            return [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota_us))]
        return [("cpu.max", f"{quota_us} {_PERIOD_US}")]


def core_shares(speeds: tuple[float, ...], num_cores: int) -> list[float]:
    """Cores of each rank in proportion to its speed: at most one, and together nine tenths of all.

    Example:
        >>> core_shares((1.0, 0.5, 0.25), 2)
        [1.0, 0.5, 0.25]
        >>> core_shares((4.0, 4.0, 1.0), 2)
        [0.8, 0.8, 0.2]
    """
    unit = min(1 / max(speeds), _MOST_OF_CORES * num_cores / sum(speeds))
    return [speed * unit for speed in speeds]


def find_controller(mounts: str) -> Controller | None:
    """The cpu controller, from the text of /proc/mounts; version 1 first: where it is, it has the controller."""
    found = {}
    for line in mounts.splitlines():
        _, path, kind, options, *_ = line.split(" ")
        if kind == "cgroup" and "cpu" in options.split(","):
            found[1] = Controller(version=1, path=Path(path))
        if kind == "cgroup2" and 2 not in found:
            found[2] = Controller(version=2, path=Path(path))
    return found.get(1, found.get(2))


def make_group(controller: Controller, name: str, share: float, undo: ExitStack) -> Path:
    """Make a group with this share of a core; returns the file that a process joins it by."""
    group = controller.path / name
    try:
        if controller.version == 2:
            (controller.path / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        undo.callback(_remove, group)
        for file, text in controller.limits(share):
            (group / file).write_text(text)
    except OSError as error:
        raise MechanismError(
            f"no cpu quota: {error.filename or group}: {error.strerror}; give --sample-ms instead, "
            "which slows ranks without one"
        ) from error
    return group / "cgroup.procs"


def _remove(group: Path) -> None:
    """Remove a group; its processes have been killed, and take a moment to be gone."""
    for _ in range(100):
        try:
            os.rmdir(group)
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
