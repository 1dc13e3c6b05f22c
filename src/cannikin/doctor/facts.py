"""What the probes found, as plain values; None is what could not be found out, or does not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """A torch that can be imported, as a process of its own saw it.

    Args:
        version: such as "2.13.0+cpu".
        build: what it was built for, such as "CUDA 12.8"; "CPU" where it was built for no GPU.
        backends: of its process groups, such as ("gloo", "nccl"); none where it has no torch.distributed.
        devices: names of the GPUs it can use, in its order.
        problem: why it can use no GPU, or its warning about one, in its own words; None where it said nothing.
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


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything the doctor knows.

    Args:
        torch_problem: why torch cannot be imported, "" where it is not installed; None where it can.
        num_gpus: NVIDIA GPUs that this process may open, whether or not torch can use them.
        num_cores: cores that this process may use.
        host_resolves: whether this host's own name leads to an address; None if not tried.
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
    host_resolves: bool | None = None
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
