"""Gathers the facts: every probe has a limit of its own, and one that fails leaves its facts unknown."""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata

from cannikin._version import __version__
from cannikin.doctor import host
from cannikin.doctor.asking import within
from cannikin.doctor.facts import CpuFacts, Facts, MemoryFacts
from cannikin.doctor.gpus import ask_driver, mps_runs
from cannikin.doctor.loopback import measure
from cannikin.doctor.torch_facts import ask_torch
from cannikin.lab.mechanisms import MECHANISMS

__all__ = ["gather", "relevant_environment"]

_LIMIT_S = 3.0  # of a look at the system
_EXTRAS = ("plotly", "tensorboard", "scikit-learn")
_PREFIXES = ("CANNIKIN_", "PET_", "CUDA_MPS_")
_NAMES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
        *("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "KUBERNETES_SERVICE_HOST"),
        *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"),
    }
)


def gather(*, quick: bool = False) -> Facts:
    """Look at this machine and this environment; `quick` leaves the all-reduce between two processes out."""
    environment = relevant_environment(dict(os.environ))
    driver = ask_driver()
    torch, torch_problem = ask_torch()
    hostname = socket.gethostname()
    master = environment.get("MASTER_ADDR")
    can_reduce = torch is not None and torch.distributed and "gloo" in torch.backends
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        hostname=hostname,
        cannikin=__version__,
        torch=torch,
        torch_problem=torch_problem,
        extras={name: _version(name) for name in _EXTRAS},
        driver=driver.version,
        driver_cuda=driver.cuda,
        gpus=driver.gpus,
        gpu_problem=driver.problem,
        mps=within(_LIMIT_S, mps_runs, False),
        cpu=within(_LIMIT_S, host.cpu, CpuFacts(num_cores=os.cpu_count() or 1)),
        memory=within(_LIMIT_S, host.memory, MemoryFacts()),
        open_files=within(_LIMIT_S, host.open_files, None),
        interfaces=within(_LIMIT_S, host.interfaces, ()),
        infiniband=within(_LIMIT_S, host.infiniband, ()),
        host_resolves=within(_LIMIT_S, lambda: host.resolves(hostname), False),
        master_resolves=None if not master else within(_LIMIT_S, lambda: host.resolves(master), False),
        environment=environment,
        mechanisms={name: mechanism.unavailable() for name, mechanism in MECHANISMS.items()},
        loopback=measure() if can_reduce and not quick else None,
    )


def relevant_environment(environment: dict[str, str]) -> dict[str, str]:
    """The variables that matter to a launch, and no others: the rest is nobody's business.

    Example:
        >>> relevant_environment({"RANK": "0", "CANNIKIN_POLICY": "even", "AWS_SECRET": "x"})
        {'RANK': '0', 'CANNIKIN_POLICY': 'even'}
    """
    return {_text(k): _text(v) for k, v in environment.items() if k in _NAMES or k.startswith(_PREFIXES)}


def _text(value: str) -> str:
    """A variable as text that can be written down: it may be any bytes."""
    return os.fsencode(value).decode(errors="replace")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
