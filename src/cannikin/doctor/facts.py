"""What the probes found, as plain values; None is what could not be found out, or does not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CpuFacts", "Facts", "GpuFacts", "GpuProcess", "Interface", "LoopbackFacts", "MemoryFacts", "TorchFacts"]


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """A torch that can be imported, as a process of its own saw it.

    Args:
        version: such as "2.13.0+cpu".
        cuda, hip: version of CUDA or ROCm it was built for; None for a CPU build.
        distributed: whether it has torch.distributed.
        backends: of its process groups, such as ("gloo", "nccl").
        architectures: it was built for, such as "sm_80" or "compute_90".
        devices: names of the GPUs it can use, in its order.
        problem: why it can use no GPU, in its own words; None where it can, or was built for none.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    distributed: bool = True
    backends: tuple[str, ...] = ("gloo",)
    architectures: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """An NVIDIA GPU by the driver's account, whether or not this process may see it."""

    index: int
    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    mig: bool = False
    exclusive: bool = False
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CpuFacts:
    """Cores of the machine, those this process may use, and the share that its cgroup allows, in cores."""

    num_cores: int = 1
    num_allowed: int | None = None
    quota_cores: float | None = None
    name: str = ""

    @property
    def usable(self) -> float:
        """Cores' worth of time that this process can have."""
        return min(self.num_allowed or self.num_cores, self.quota_cores or float("inf"))


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """The machine's memory, the cgroup's limit on it, and the size of /dev/shm."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up; `speed_mbit` is None where the kernel does not say."""

    name: str
    speed_mbit: int | None = None
    virtual: bool = False


@dataclass(frozen=True, kw_only=True)
class LoopbackFacts:
    """A gloo all-reduce between two processes of this host: time of a small one, bytes a second of a large one."""

    latency_s: float | None = None
    bytes_per_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything the doctor knows.

    Args:
        torch_problem: why torch cannot be imported, "" where it is not installed; None where it can.
        extras: version of each optional package, None where it is not installed.
        driver: version of NVIDIA's driver; `driver_cuda` is the newest CUDA it supports.
        gpu_problem: why the driver could not be asked, in words; None where it could, or is not there.
        mps: whether an MPS daemon runs.
        open_files: soft and hard limit.
        infiniband: adapters, such as "mlx5_0 (100 Gb/sec)".
        host_resolves, master_resolves: whether this host's own name and MASTER_ADDR lead to an address; None if not
            tried.
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
    extras: Mapping[str, str | None] = field(default_factory=dict)
    driver: str | None = None
    driver_cuda: str | None = None
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str | None = None
    mps: bool = False
    cpu: CpuFacts = CpuFacts()
    memory: MemoryFacts = MemoryFacts()
    open_files: tuple[int, int] | None = None
    interfaces: tuple[Interface, ...] = ()
    infiniband: tuple[str, ...] = ()
    host_resolves: bool | None = None
    master_resolves: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    mechanisms: Mapping[str, str | None] = field(default_factory=dict)
    loopback: LoopbackFacts | None = None

    @property
    def num_visible(self) -> int:
        """GPUs that torch can use; by the driver's account where torch cannot be asked."""
        return len(self.gpus) if self.torch is None else len(self.torch.devices)

    @property
    def local_ranks(self) -> int | None:
        """Ranks that will run on this host, as far as the environment says; None where it does not."""
        for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
            if (count := self.count(name)) is not None and count > 0:
                return count
        tasks = self.count("SLURM_NTASKS")
        return max(1, tasks // self.num_hosts) if tasks else None

    @property
    def num_hosts(self) -> int:
        """Hosts of the launch, as far as the environment says; 1 where it does not."""
        if (nodes := self.count("SLURM_NNODES")) is not None:
            return max(1, nodes)
        world, local = self.count("WORLD_SIZE"), self.count("LOCAL_WORLD_SIZE")
        return max(1, world // local) if world and local else 1

    def count(self, name: str) -> int | None:
        """A variable that is a whole number; None where it is not set, or is something else."""
        text = self.environment.get(name, "").strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
