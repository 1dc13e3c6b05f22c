"""Looks at this host through the operating system: cores, memory, limits, interfaces, names."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cannikin.doctor.facts import CpuFacts, Interface, MemoryFacts

__all__ = [
    "cgroup_folders",
    "cpu",
    "cpu_quota",
    "infiniband",
    "interfaces",
    "memory",
    "memory_limit",
    "open_files",
    "resolves",
]

_NO_LIMIT = 2**60  # version 1 writes a number where there is none
_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def cpu() -> CpuFacts:
    """Cores, and how many of them this process may have."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return CpuFacts(
        num_cores=os.cpu_count() or 1,
        num_allowed=allowed,
        quota_cores=cpu_quota(_folders("cpu")),
        name=_processor(),
    )


def memory() -> MemoryFacts:
    """Memory, its limit, and shared memory."""
    sizes = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            sizes[name] = int(rest.split()[0]) * 1024
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return MemoryFacts(
        total_bytes=sizes.get("MemTotal"),
        available_bytes=sizes.get("MemAvailable"),
        limit_bytes=memory_limit(_folders("memory")),
        shm_bytes=None if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free_bytes=None if shm is None else shm.f_bavail * shm.f_frsize,
    )


def open_files() -> tuple[int, int]:
    """Soft and hard limit on open files; what has no limit has a billion."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return (10**9 if soft == unlimited else soft), (10**9 if hard == unlimited else hard)


def interfaces(root: Path = _NET) -> tuple[Interface, ...]:
    """Interfaces that are up, by name; none where the system does not tell."""
    found = []
    for folder in sorted(root.glob("*")):
        if _text(folder / "operstate") not in {"up", "unknown"}:
            continue
        speed = _text(folder / "speed")
        speed_mbit = int(speed) if speed.isdigit() and int(speed) > 0 else None  # -1, or an error: not known
        found.append(
            Interface(name=folder.name, speed_mbit=speed_mbit, virtual="/virtual/" in os.path.realpath(folder))
        )
    return tuple(found)


def infiniband(root: Path = _INFINIBAND) -> tuple[str, ...]:
    """Active ports of InfiniBand and RoCE adapters, with their rate."""
    ports = sorted(root.glob("*/ports/*"))
    return tuple(f"{port.parts[-3]}, {_text(port / 'rate')}" for port in ports if "ACTIVE" in _text(port / "state"))


def resolves(name: str) -> bool:
    """Whether a name leads to an address; nothing is sent there."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def cgroup_folders(own: str, mounts: str, controller: str) -> list[tuple[int, Path]]:
    """(version, folder) of this process's group and those above it, from /proc/self/cgroup and /proc/mounts.

    Inside a container the group's own path may not exist under the mount: the mount itself is then its group.

    Example:
        >>> cgroup_folders("0::/job/step", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0", "cpu")[0]
        (2, PosixPath('/sys/fs/cgroup/job/step'))
    """
    found = []
    for line in mounts.splitlines():
        _, mount, kind, options, *_ = line.split(" ")
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version is None or (version == 1 and controller not in options.split(",")):
            continue
        path = Path(_own_path(own, controller if version == 1 else "").lstrip("/"))
        found += [(version, Path(mount, part)) for part in (path, *path.parents)]
    return list(dict.fromkeys(found))


def cpu_quota(folders: list[tuple[int, Path]]) -> float | None:
    """The least quota of these groups, in cores."""
    quotas = []
    for version, folder in folders:
        if version == 1:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        else:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(folders: list[tuple[int, Path]]) -> int | None:
    """The least limit of these groups, in bytes."""
    texts = (_text(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")) for version, folder in folders)
    return min((int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT), default=None)


def _folders(controller: str) -> list[tuple[int, Path]]:
    own, mounts = _text(Path("/proc/self/cgroup")), _text(Path("/proc/mounts"))
    return cgroup_folders(own, mounts, controller)


def _own_path(own: str, controller: str) -> str:
    """This process's group in the hierarchy of a controller; "" is version 2's."""
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _processor() -> str:
    return next(_model_names(), platform.processor() or platform.machine())


def _model_names() -> Iterator[str]:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            yield line.partition(":")[2].strip()


def _text(path: Path) -> str:
    """A small file of the kernel's, "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
