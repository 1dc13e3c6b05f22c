"""Asks NVIDIA's driver about GPUs through `nvidia-smi`, which makes no CUDA context and can be given up on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cannikin.doctor.asking import Answer, ask
from cannikin.doctor.facts import GpuFacts, GpuProcess

__all__ = ["Driver", "ask_driver", "mps_runs", "parse_gpus", "parse_processes"]

_LIMIT_S = 10.0
_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free", "mig.mode.current", "compute_mode")
_NEWER_FIELDS = (*_FIELDS, "compute_cap")  # drivers of 2021 and later
_PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")
_FORMAT = "--format=csv,noheader,nounits"


@dataclass(frozen=True, kw_only=True)
class Driver:
    """What the driver said; all empty where there is none."""

    version: str | None = None
    cuda: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    problem: str | None = None


def ask_driver() -> Driver:
    """The driver, its GPUs, and the processes on them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Driver(problem=None if not Path("/dev/nvidiactl").exists() else "it is not on the path")
    listed = _query(tool, "gpu", _NEWER_FIELDS)
    if listed.problem is not None and "not a valid field" in f"{listed.problem}{listed.text}":
        listed = _query(tool, "gpu", _FIELDS)
    if listed.problem is not None:
        return Driver(problem=listed.problem)
    version, gpus = parse_gpus(listed.text)
    processes = parse_processes(_query(tool, "compute-apps", _PROCESS_FIELDS).text)
    # What it prints for people is the only place of the newest CUDA that the driver supports.
    cuda = re.search(r"CUDA[\w ]*Version *: *(\d+\.\d+)", ask([tool], limit_s=_LIMIT_S).text)
    return Driver(
        version=version,
        cuda=cuda.group(1) if cuda else None,
        gpus=tuple(replace(gpu, processes=tuple(processes.get(uuid, ()))) for uuid, gpu in gpus),
    )


def parse_gpus(text: str) -> tuple[str | None, list[tuple[str, GpuFacts]]]:
    """The driver's version, and (uuid, GPU) of each line.

    Example:
        >>> line = "0, GPU-1, NVIDIA T4, 550.54, 15360, 15000, [N/A], Default, 7.5"
        >>> version, ((uuid, gpu),) = parse_gpus(line)
        >>> version, uuid, gpu.name, gpu.capability, gpu.mig
        ('550.54', 'GPU-1', 'NVIDIA T4', (7, 5), False)
    """
    version, found = None, []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < len(_FIELDS) or not cells[0].isdigit():
            continue
        index, uuid, name, version, total, free, mig, mode, *rest = cells
        gpu = GpuFacts(
            index=int(index),
            name=name,
            memory_bytes=_mib(total),
            free_bytes=_mib(free),
            capability=_capability(rest),
            mig=mig.lower() == "enabled",
            exclusive=mode.lower() == "exclusive_process",
        )
        found.append((uuid, gpu))
    return version, found


def parse_processes(text: str) -> dict[str, list[GpuProcess]]:
    """Processes by the uuid of their GPU; MPS's own server is none of them.

    Example:
        >>> parse_processes("GPU-1, 4242, 1024, /usr/bin/python3")["GPU-1"][0].name
        'python3'
    """
    found: dict[str, list[GpuProcess]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", 3)]
        if len(cells) < 4 or not cells[1].isdigit() or "nvidia-cuda-mps" in cells[3]:
            continue
        uuid, pid, used, name = cells
        found.setdefault(uuid, []).append(GpuProcess(pid=int(pid), name=Path(name).name, memory_bytes=_mib(used)))
    return found


def mps_runs(root: Path = Path("/proc")) -> bool:
    """Whether a process of MPS runs."""
    for folder in root.glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "comm").read_bytes().startswith(b"nvidia-cuda-mps"):
                return True
    return False


def _query(tool: str, what: str, fields: Iterable[str]) -> Answer:
    return ask([tool, f"--query-{what}={','.join(fields)}", _FORMAT], limit_s=_LIMIT_S)


def _mib(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def _capability(cells: list[str]) -> tuple[int, int] | None:
    major, _, minor = (cells[0] if cells else "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
