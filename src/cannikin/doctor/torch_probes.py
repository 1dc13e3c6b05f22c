"""Asks torch in processes of their own, for a limited time: what they initialise ends with them, and nothing hangs.

python -m cannikin.doctor.torch_probes                 prints `TorchFacts` as one line of JSON
python -m cannikin.doctor.torch_probes RANK FOLDER     one of the two ranks of an all-reduce; prints `LoopbackFacts`
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_IMPORT_LIMIT_S = 60.0  # from a cold network disk
_LOOPBACK_LIMIT_S = 20.0
_LARGE = 2**22  # numbers of float32 in a large all-reduce; a small one has a single one
# Variables of the surrounding launch: removed so that the probe does not join it.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG")


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """A torch that can be imported, as a process of its own saw it.

    Args:
        version: such as "2.13.0+cpu".
        build: what it was built for, such as "CUDA 12.8"; "CPU" where it was built for no GPU.
        backends: of its process groups, such as ("gloo", "nccl"); none where it has no torch.distributed.
        devices: names of the GPUs it can use, in its order.
        problem: why it can use no GPU, or its warning about one, in its own words; None where there is neither.
    """

    version: str
    build: str = "CPU"
    backends: tuple[str, ...] = ("gloo",)
    devices: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoopbackFacts:
    """A gloo all-reduce between two processes of this host: time of a small one, bytes per second of a large one."""

    latency_s: float | None = None
    bytes_per_s: float | None = None
    problem: str | None = None


def ask_torch() -> tuple[TorchFacts | None, str | None]:
    """Return what torch says, or why it says nothing: "" where it is not installed."""
    if not _is_installed():
        return None, ""
    try:
        return ask([[sys.executable, "-m", __name__]], TorchFacts, limit_s=_IMPORT_LIMIT_S), None
    except NoAnswerError as error:
        return None, str(error)


def measure_loopback() -> LoopbackFacts:
    """Measure time and bandwidth of a gloo all-reduce between two processes of this host, through loopback."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment |= {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        with tempfile.TemporaryDirectory(prefix="cannikin-doctor-") as folder:
            commands = [[sys.executable, "-m", __name__, str(rank), folder] for rank in range(2)]
            return ask(commands, LoopbackFacts, limit_s=_LOOPBACK_LIMIT_S, environment=environment)
    except NoAnswerError as error:
        return LoopbackFacts(problem=str(error))
    except OSError as error:
        return LoopbackFacts(problem=f"there is no folder for temporary files ({error.strerror})")


# Asking


class NoAnswerError(Exception):
    """Why a process gave no answer, in words for people."""


def ask(
    commands: Sequence[Sequence[str]], kind: type[T], *, limit_s: float, environment: Mapping[str, str] | None = None
) -> T:
    """Run commands side by side and return what the first prints, as JSON in its last line.

    After `limit_s` all are killed, with all that they started. One that hangs inside the kernel (a GPU that does not
    answer) cannot be killed at once: it is left to die by itself.

    Raises:
        NoAnswerError: one of them failed or took longer.
    """
    end_s = time.monotonic() + limit_s
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command, env=environment, text=True, errors="replace", start_new_session=True, **pipes
            )
            running.append(process)
        texts = [_text(process, end_s - time.monotonic()) for process in running]
        return msgspec.json.decode(texts[0].splitlines()[-1], type=kind)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {limit_s:g} s") from None
    except (IndexError, msgspec.DecodeError):
        raise NoAnswerError("it ended without a result") from None
    except OSError as error:
        raise NoAnswerError(f"{commands[0][0]}: {error.strerror}") from None
    finally:
        for process in running:
            _end(process)


def _text(process: subprocess.Popen[str], limit_s: float) -> str:
    """Return what a process prints; one that fails is quoted by its last line."""
    text, words = process.communicate(timeout=max(0.0, limit_s))
    if process.returncode != 0:
        lines = [line.strip() for line in (words or text).splitlines() if line.strip()]
        raise NoAnswerError(lines[-1] if lines else f"exit status {process.returncode}")
    return text


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process that still runs, and whatever it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1.0)  # closes its pipes


def _is_installed() -> bool:
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # an import hook that hides it, or a half-imported module
        return False


# In the processes that are asked


def _look_at_torch() -> TorchFacts:
    import torch
    import torch.distributed as dist

    known = ("gloo", "nccl", "mpi", "ucc") if dist.is_available() else ()
    cuda, rocm = torch.version.cuda, torch.version.hip
    devices, problem = _devices() if cuda or rocm else ((), None)
    return TorchFacts(
        version=str(torch.__version__),
        build=f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU",
        backends=tuple(name for name in known if getattr(dist, f"is_{name}_available", bool)()),
        devices=devices,
        problem=problem,
    )


def _devices() -> tuple[tuple[str, ...], str | None]:
    """Return names of the GPUs, and why there are none or what torch warns of, such as a GPU it has no kernels for."""
    import torch

    devices: tuple[str, ...] = ()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                devices = tuple(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
        except Exception as error:
            return (), _one_line(error)
    if warned:
        return devices, _one_line(warned[0].message)
    return devices, None if devices else "torch.cuda.is_available() is False"


def _one_line(words: object) -> str:
    """Return torch's words without their line breaks and the place in its source where they come from."""
    return " ".join(str(words).partition("(Triggered internally")[0].split()) or "unknown"


def _all_reduce(rank: int, folder: str) -> LoopbackFacts:
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=_LOOPBACK_LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    small, large = torch.zeros(1), torch.zeros(_LARGE)
    latency_s = _median_s(lambda: dist.all_reduce(small), num_times=50)
    large_s = _median_s(lambda: dist.all_reduce(large), num_times=5)
    dist.destroy_process_group()
    return LoopbackFacts(latency_s=latency_s, bytes_per_s=4 * _LARGE / large_s)


def _median_s(call: Callable[[], object], num_times: int) -> float:
    call()  # the first one takes longer
    return statistics.median(timeit.repeat(call, number=1, repeat=num_times))


if __name__ == "__main__":
    result = _all_reduce(int(sys.argv[1]), sys.argv[2]) if sys.argv[1:] else _look_at_torch()
    print(msgspec.json.encode(result).decode())
