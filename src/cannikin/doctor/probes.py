"""Looks at this machine and this environment, and writes down the facts; no look can hang."""

from __future__ import annotations

import os
import platform
import socket
import threading
from contextlib import suppress
from pathlib import Path

from cannikin._version import __version__
from cannikin.doctor.facts import Facts
from cannikin.doctor.torch_probes import ask_torch, measure_loopback
from cannikin.lab.mechanisms import MECHANISMS

_NAMES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
        *("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG"),
    }
)


def look(*, quick: bool = False) -> Facts:
    """Look at this machine and this environment; `quick` leaves the all-reduce between two processes out."""
    environment = relevant_environment(dict(os.environ))
    torch, torch_problem = ask_torch()
    hostname = socket.gethostname()
    can_reduce = torch is not None and "gloo" in torch.backends
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        hostname=hostname,
        cannikin=__version__,
        torch=torch,
        torch_problem=torch_problem,
        num_gpus=num_gpus(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        host_resolves=resolves(hostname),
        environment=environment,
        mechanisms={name: mechanism.unavailable() for name, mechanism in MECHANISMS.items()},
        loopback=measure_loopback() if can_reduce and not quick else None,
    )


def relevant_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that matter to a launch, and no others: the rest is nobody's business.

    Example:
        >>> relevant_environment({"RANK": "0", "CANNIKIN_POLICY": "even", "AWS_SECRET": "x"})
        {'RANK': '0', 'CANNIKIN_POLICY': 'even'}
    """
    return {_text(k): _text(v) for k, v in environment.items() if k in _NAMES or k.startswith("CANNIKIN_")}


def num_gpus(devices: Path = Path("/dev")) -> int:
    """Count the NVIDIA GPUs that this process may open, without asking the driver, which can hang."""
    return len(list(devices.glob("nvidia[0-9]*")))


def resolves(name: str, *, limit_s: float = 3.0) -> bool:
    """Return whether a name leads to an address; nothing is sent there, and a look-up that hangs is left behind."""
    found = []

    def look_up() -> None:
        with suppress(OSError, ValueError):
            found.append(socket.getaddrinfo(name, None))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(limit_s)
    return bool(found)


def _text(value: str) -> str:
    """Return a variable, which may be any bytes, as text that can be written down."""
    return os.fsencode(value).decode(errors="replace")
