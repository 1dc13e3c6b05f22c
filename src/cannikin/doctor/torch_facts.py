"""Asks torch about itself in a process of its own: whatever it initialises ends with that process.

python -m cannikin.doctor.torch_facts        prints `TorchFacts` as one line of JSON
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec

import msgspec

from cannikin.doctor.asking import ask
from cannikin.doctor.facts import TorchFacts

__all__ = ["ask_torch"]

_LIMIT_S = 60.0  # an import from a cold network disk


def ask_torch() -> tuple[TorchFacts | None, str | None]:
    """What torch says, or why it says nothing: "" where it is not installed."""
    if not _is_installed():
        return None, ""
    answer = ask([sys.executable, "-m", __name__], limit_s=_LIMIT_S)
    if answer.problem is not None:
        return None, answer.problem
    try:
        return msgspec.json.decode(answer.text.splitlines()[-1], type=TorchFacts), None
    except (IndexError, msgspec.DecodeError):
        return None, "it was imported, but did not say what it is"


def _is_installed() -> bool:
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # an import hook that hides it, or a half-imported module
        return False


def _look() -> TorchFacts:
    import torch
    import torch.distributed as dist

    distributed = dist.is_available()
    known = ("gloo", "nccl", "mpi", "ucc") if distributed else ()
    devices, problem = _devices()
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        distributed=distributed,
        backends=tuple(name for name in known if getattr(dist, f"is_{name}_available", bool)()),
        architectures=tuple(torch.cuda.get_arch_list()),
        devices=devices,
        problem=problem,
    )


def _devices() -> tuple[tuple[str, ...], str | None]:
    """Names of the GPUs, or why there are none."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return (), None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                return tuple(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())), None
        except Exception as error:
            return (), _first_line(error)
    return (), _first_line(said[0].message) if said else "torch.cuda.is_available() is False"


def _first_line(words: object) -> str:
    return next(iter(str(words).splitlines()), "unknown")


if __name__ == "__main__":
    print(msgspec.json.encode(_look()).decode())
