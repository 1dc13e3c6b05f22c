"""Looks at this machine and this environment, and writes down the facts as plain values; no look can hang."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cannikin._version import __version__
from cannikin.doctor.torch_probes import LoopbackFacts, TorchFacts, ask_torch, measure_loopback
from cannikin.lab.mechanisms import MECHANISMS

_NAMES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
        *("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything the doctor knows; None is what could not be found out, or does not exist.

    Args:
        torch_problem: why torch does not work, "" where it is not installed; None where it does.
        num_gpus: NVIDIA GPUs that this process may open, whether or not torch can use them.
        num_cores: cores that this process may use.
        environment: the variables that matter to a launch, by name.
        mechanisms: why each mechanism of the lab cannot be had here, None where it can.
        loopback: None where it was not tried.
    """

    python: str = "3.11"
    system: str = "Linux"
    hostname: str = "host"
    cannikin: str = "0"
    torch: TorchFacts | None = None
    torch_problem: str | None = None
    num_gpus: int = 0
    num_cores: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    mechanisms: Mapping[str, str | None] = field(default_factory=dict)
    loopback: LoopbackFacts | None = None

    @property
    def local_ranks(self) -> int | None:
        """Ranks that will run on this host, as far as the environment says; None where it does not."""
        for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
            if count := self.count(name):
                return count
        tasks = self.count("SLURM_NTASKS")
        return max(1, tasks // (self.count("SLURM_NNODES") or 1)) if tasks else None

    def count(self, name: str) -> int | None:
        """Return a variable that is a whole number; None where it is not set, or is something else."""
        text = self.environment.get(name, "").strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def look(*, quick: bool = False) -> Facts:
    """Look at this machine and this environment; `quick` leaves the all-reduce between two processes out."""
    torch, torch_problem = ask_torch()
    can_reduce = torch is not None and "gloo" in torch.backends
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        hostname=socket.gethostname(),
        cannikin=__version__,
        torch=torch,
        torch_problem=torch_problem,
        num_gpus=num_gpus(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        environment=relevant_environment(dict(os.environ)),
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


def _text(value: str) -> str:
    """Return a variable, which may be any bytes, as text that can be written down."""
    return os.fsencode(value).decode(errors="replace")
