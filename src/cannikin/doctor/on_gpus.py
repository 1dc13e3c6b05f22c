"""Findings about GPUs, their driver, and who else uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cannikin.doctor.facts import Facts, GpuFacts, TorchFacts
from cannikin.doctor.findings import Finding, counted, gib, note, ok, warning

__all__ = ["gpu_findings"]

_BUSY_SHARE = 0.05  # of a GPU's memory: less is what a driver or a desktop takes
_MOST_PROCESSES = 3


def gpu_findings(facts: Facts) -> Iterator[Finding]:
    """What there is to compute on, and whether torch can use it."""
    if facts.gpu_problem is not None:
        yield warning(
            "driver",
            f"nvidia-smi does not work: {facts.gpu_problem}",
            "Check the driver: nvidia-smi must list the GPUs before PyTorch can use them.",
            limits="the NVIDIA driver does not answer",
        )
    yield from _driver(facts)
    for gpu in facts.gpus:
        yield _gpu(gpu, facts.torch)
    if not facts.gpus and facts.torch is not None:
        yield from (ok(f"GPU {index}", name) for index, name in enumerate(facts.torch.devices))
    yield from _use(facts)
    yield from _kinds(facts)
    yield from _sharing(facts)


def _driver(facts: Facts) -> Iterator[Finding]:
    """It must support the CUDA that torch was built for; within one major version it may be older."""
    if facts.driver is None:
        return
    supports = f", up to CUDA {facts.driver_cuda}" if facts.driver_cuda else ""
    built = _numbers(facts.torch.cuda) if facts.torch is not None and facts.torch.cuda else None
    newest = _numbers(facts.driver_cuda) if facts.driver_cuda else None
    if built is None or newest is None or built <= newest:
        yield ok("driver", f"{facts.driver}{supports}")
    elif built[:1] > newest[:1]:
        yield warning(
            "driver",
            f"{facts.driver}{supports}, older than the CUDA {'.'.join(map(str, built))} of this PyTorch",
            f"Upgrade the driver, or install a PyTorch built for CUDA {newest[0]}.",
            limits="the driver is too old for this PyTorch",
        )
    else:
        yield note(
            "driver",
            f"{facts.driver}{supports}; this PyTorch is built for CUDA {'.'.join(map(str, built))}, which works within "
            "one major version",
        )


def _gpu(gpu: GpuFacts, torch: TorchFacts | None) -> Finding:
    parts = [gpu.name]
    if gpu.memory_bytes:
        free = f", {gib(gpu.free_bytes)} free" if gpu.free_bytes is not None else ""
        parts.append(f"{gib(gpu.memory_bytes)}{free}")
    if gpu.capability:
        parts.append(f"capability {gpu.capability[0]}.{gpu.capability[1]}")
    text, subject = ", ".join(parts), f"GPU {gpu.index}"
    if torch is not None and gpu.capability and not _supports(torch.architectures, gpu.capability):
        return warning(
            subject,
            f"{text}: this PyTorch has no kernels for it ({', '.join(torch.architectures)})",
            "Install a build of PyTorch that supports this GPU, or leave it out with CUDA_VISIBLE_DEVICES.",
            limits=f"GPU {gpu.index} has no kernels",
        )
    busy = [process for process in gpu.processes if _is_busy(process.memory_bytes, gpu.memory_bytes)]
    if busy:
        names = ", ".join(f"{process.name} (pid {process.pid})" for process in busy[:_MOST_PROCESSES])
        more = f" and {len(busy) - _MOST_PROCESSES} more" if len(busy) > _MOST_PROCESSES else ""
        return warning(
            subject,
            f"{text}; in use by {names}{more}",
            "The rank on it will be slower and hold less: cannikin adapts its batch, but a GPU of its own is better.",
            limits=f"GPU {gpu.index} is shared with other processes",
        )
    return ok(subject, text)


def _is_busy(used_bytes: int | None, memory_bytes: int | None) -> bool:
    return used_bytes is None or not memory_bytes or used_bytes > _BUSY_SHARE * memory_bytes


def _supports(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether one of them runs there: binaries within a major version, and PTX on whatever is newer."""
    if not architectures:
        return True
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        digits = digits.rstrip("af")  # sm_90a: for that generation alone
        if not digits.isdigit():
            return True
        version = int(digits[:-1] or 0), int(digits[-1])
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return False


def _use(facts: Facts) -> Iterator[Finding]:
    """Whether torch sees them."""
    torch, num_gpus = facts.torch, len(facts.gpus)
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if torch is None:
        return
    if not num_gpus and not torch.devices:
        yield note(
            "GPUs",
            "none: ranks compute on the CPU",
            limits=f"no GPU, so ranks share {counted(facts.cpu.usable, 'CPU core')}",
        )
    elif num_gpus and not torch.devices and not (torch.cuda or torch.hip):
        yield warning(
            "use",
            f"this PyTorch is a CPU build: it cannot use {counted(num_gpus, 'GPU')}",
            "Install a CUDA build, as pytorch.org/get-started says for this driver.",
            limits=f"{counted(num_gpus, 'GPU')} cannot be used by this PyTorch",
        )
    elif num_gpus and not torch.devices:
        reason = f"CUDA_VISIBLE_DEVICES={visible} hides them" if visible in {"", "-1"} else torch.problem or "unknown"
        yield warning(
            "use",
            f"PyTorch can use no GPU: {reason}",
            "Unset CUDA_VISIBLE_DEVICES, or see why torch.cuda.is_available() is False.",
            limits=f"{counted(num_gpus, 'GPU')} cannot be used",
        )
    elif visible is not None and len(torch.devices) != num_gpus:
        yield note("use", f"CUDA_VISIBLE_DEVICES={visible} leaves {len(torch.devices)} of {num_gpus} GPUs")


def _kinds(facts: Facts) -> Iterator[Finding]:
    devices = facts.torch.devices if facts.torch is not None else tuple(gpu.name for gpu in facts.gpus)
    kinds = Counter(devices)
    if len(kinds) > 1:
        listed = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        yield note(
            "kinds",
            f"unlike GPUs: {listed}",
            "An even split runs at the pace of the slowest; the default policy splits by speed.",
        )


def _sharing(facts: Facts) -> Iterator[Finding]:
    if any(gpu.mig for gpu in facts.gpus):
        yield note(
            "MIG",
            "on: each instance is a device of its own, and a process sees only one",
            "Start each rank with the CUDA_VISIBLE_DEVICES of its instance.",
        )
    if facts.mps:
        share = facts.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        yield note("MPS", "a daemon runs: processes share GPUs" + (f", this one has {share}%" if share else ""))
    if any(gpu.exclusive for gpu in facts.gpus) and not facts.mps:
        yield note("mode", "exclusive: a second process on a GPU is refused, so one rank a GPU")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
