"""Findings about Python, cannikin, torch and the optional packages."""

from __future__ import annotations

from collections.abc import Iterator

from cannikin.doctor.facts import Facts, TorchFacts
from cannikin.doctor.findings import Finding, blocker, note, ok, warning

__all__ = ["software_findings"]

_LEAST_TORCH = (2, 6)
_INSTALL = "pip install 'cannikin[torch]'"


def software_findings(facts: Facts) -> Iterator[Finding]:
    """What is installed, and whether it fits together."""
    yield ok("Python", f"{facts.python} on {facts.system}")
    yield ok("cannikin", facts.cannikin)
    if facts.torch is not None:
        yield _torch(facts.torch)
        yield _backends(facts, facts.torch)
    elif facts.torch_problem:
        yield blocker(
            "PyTorch",
            f"PyTorch cannot be imported: {facts.torch_problem}",
            f"Install it anew: {_INSTALL}.",
            limits="PyTorch cannot be imported",
        )
    else:
        yield blocker(
            "PyTorch", "PyTorch is not installed", f"Install it: {_INSTALL}; plan and simulate work without it."
        )
    yield from _extras(facts)


def _torch(torch: TorchFacts) -> Finding:
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU"
    text = f"{torch.version}, built for {build}"
    if not torch.distributed:
        return blocker(
            "PyTorch",
            f"{text}, without torch.distributed",
            "Install a build that has it, as the official ones for Linux do.",
            limits="this PyTorch has no torch.distributed",
        )
    numbers = tuple(int(part) for part in torch.version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        return warning("PyTorch", f"{text}: older than {least}", f"Upgrade: pip install 'torch>={least}'.")
    return ok("PyTorch", text)


def _backends(facts: Facts, torch: TorchFacts) -> Finding:
    names = ", ".join(torch.backends) or "none"
    asked = facts.environment.get("CANNIKIN_BACKEND", "")
    if asked and asked.partition(":")[0] not in {*torch.backends, "cpu", "cuda"}:
        return blocker(
            "backends",
            f"{names}; CANNIKIN_BACKEND asks for {asked}, which this PyTorch does not have",
            f"Unset CANNIKIN_BACKEND, or set it to one of: {names}.",
            limits=f"the backend {asked} is not there",
        )
    if "gloo" not in torch.backends:
        return blocker(
            "backends",
            f"{names}: no gloo, which carries cannikin's own messages whatever the gradients travel on",
            "Install a build of PyTorch that has gloo.",
            limits="this PyTorch has no gloo",
        )
    if torch.devices and "nccl" not in torch.backends:
        return warning(
            "backends",
            f"{names}: no NCCL for {len(torch.devices)} GPUs",
            "Set CANNIKIN_BACKEND=gloo, which is slower, or install a build with NCCL.",
            limits="all-reduces go through gloo",
        )
    return ok("backends", names)


def _extras(facts: Facts) -> Iterator[Finding]:
    have = [f"{name} {version}" for name, version in facts.extras.items() if version is not None]
    lack = [name for name, version in facts.extras.items() if version is None]
    if have:
        yield ok("extras", ", ".join(have))
    if lack:
        yield note(
            "extras",
            f"not installed: {', '.join(lack)}",
            f"'pip install {' '.join(lack)}' adds them, if you want them.",
        )
