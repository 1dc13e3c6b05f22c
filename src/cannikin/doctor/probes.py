"""Looks at this machine and this environment, and writes down the facts as plain values; no look can hang.

Torch is asked in processes of their own, for a limited time: what they initialise ends with them.

python -m cannikin.doctor.probes           prints `TorchFacts` as one line of JSON
python -m cannikin.doctor.probes FOLDER    has two ranks all-reduce; prints `LoopbackFacts`
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import msgspec

from cannikin._version import __version__
from cannikin.lab.mechanisms import MECHANISMS

T = TypeVar("T")

_IMPORT_LIMIT_S = 60.0  # from a cold network disk
_LOOPBACK_LIMIT_S = 20.0
_LARGE = 2**22  # numbers of float32 in a large all-reduce; a small one has a single one
# Variables of the surrounding launch: removed so that the probe does not join it.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG")
_NAMES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
        *("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
    }
)


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """A torch that can be imported, as a process of its own saw it.

    Args:
        version: such as "2.13.0+cpu".
        build: what it was built for, such as "CUDA 12.8"; "CPU" where it was built for no GPU.
        backends: of its process groups, such as ("gloo", "nccl"); none where it has no torch.distributed.
        devices: names of the GPUs it can use, in its order.
    """

    version: str
    build: str = "CPU"
    backends: tuple[str, ...] = ("gloo",)
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoopbackFacts:
    """A gloo all-reduce between two processes of this host: time of a small one, bytes per second of a large one."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    problem: str | None = None


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


# Asking torch


def ask_torch() -> tuple[TorchFacts | None, str | None]:
    """Return what torch says, or why it says nothing: "" where it is not installed."""
    if find_spec("torch") is None:
        return None, ""
    try:
        return ask([sys.executable, "-m", __name__], TorchFacts, limit_s=_IMPORT_LIMIT_S), None
    except NoAnswerError as error:
        return None, str(error)


def measure_loopback() -> LoopbackFacts:
    """Measure time and bandwidth of a gloo all-reduce between two processes of this host, through loopback."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment |= {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        with tempfile.TemporaryDirectory(prefix="cannikin-doctor-") as folder:
            command = [sys.executable, "-m", __name__, folder]
            return ask(command, LoopbackFacts, limit_s=_LOOPBACK_LIMIT_S, environment=environment)
    except NoAnswerError as error:
        return LoopbackFacts(problem=str(error))
    except OSError as error:
        return LoopbackFacts(problem=f"there is no folder for temporary files ({error.strerror})")


class NoAnswerError(Exception):
    """Why a process gave no answer, in words for people."""


def ask(command: Sequence[str], kind: type[T], *, limit_s: float, environment: Mapping[str, str] | None = None) -> T:
    """Run a command and return what it prints, as JSON in its last line.

    After `limit_s` it is killed, with all that it started. A command that hangs inside the kernel (a GPU that does not
    answer) cannot be killed at once: it is left to die by itself.

    Raises:
        NoAnswerError: it failed, which is quoted by its last line, or took longer.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, words = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {limit_s:g} s") from None
    finally:
        if process.poll() is None:
            with suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=1.0)  # closes its pipes
    if process.returncode != 0:
        lines = [line.strip() for line in (words or text).splitlines() if line.strip()]
        raise NoAnswerError(lines[-1] if lines else f"exit status {process.returncode}")
    try:
        return msgspec.json.decode(text.splitlines()[-1], type=kind)
    except (IndexError, msgspec.DecodeError):
        raise NoAnswerError("it ended without a result") from None


# In the processes that are asked


def _look_at_torch() -> TorchFacts:
    import torch
    import torch.distributed as dist

    known = ("gloo", "nccl", "mpi", "ucc") if dist.is_available() else ()
    cuda, rocm = torch.version.cuda, torch.version.hip
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchFacts(
        version=str(torch.__version__),
        build=f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU",
        backends=tuple(name for name in known if getattr(dist, f"is_{name}_available", bool)()),
        devices=tuple(torch.cuda.get_device_name(k) for k in range(num_devices)),
    )


def _all_reduces(folder: str) -> LoopbackFacts:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        (latency_s, large_s), _ = pool.map(_all_reduce_s, range(2), [folder] * 2)
    return LoopbackFacts(latency_s=latency_s, bytes_per_s=4 * _LARGE / large_s)


def _all_reduce_s(rank: int, folder: str) -> tuple[float, float]:
    """Return the seconds of a small and a large all-reduce with the other rank."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=_LOOPBACK_LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    small, large = torch.zeros(1), torch.zeros(_LARGE)
    small_s = _median_s(lambda: dist.all_reduce(small), num_times=50)
    large_s = _median_s(lambda: dist.all_reduce(large), num_times=5)
    dist.destroy_process_group()
    return small_s, large_s


def _median_s(call: Callable[[], object], num_times: int) -> float:
    call()  # the first one takes longer
    return statistics.median(timeit.repeat(call, number=1, repeat=num_times))


if __name__ == "__main__":
    result = _all_reduces(sys.argv[1]) if sys.argv[1:] else _look_at_torch()
    print(msgspec.json.encode(result).decode())
