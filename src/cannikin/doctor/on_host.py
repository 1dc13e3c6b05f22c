"""Findings about cores, threads, memory and limits of this host."""

from __future__ import annotations

from collections.abc import Iterator

from cannikin.doctor.facts import Facts
from cannikin.doctor.findings import Finding, counted, gib, note, ok, warning

__all__ = ["host_findings"]

_LEAST_SHM = 2**30  # a few workers' batches; a container has 64 MiB unless told otherwise
_LEAST_MEMORY = 2 * 2**30
_LEAST_FILES = 4096  # a worker keeps a descriptor for each tensor in flight
_FEW_FILES = 512


def host_findings(facts: Facts) -> Iterator[Finding]:
    """What ranks and loader workers of this host share."""
    yield _cpu(facts)
    yield from _threads(facts)
    yield from _memory(facts)
    yield from _shm(facts)
    yield from _files(facts)


def _cpu(facts: Facts) -> Finding:
    cpu = facts.cpu
    text = counted(cpu.num_cores, "core") + (f", {cpu.name}" if cpu.name else "")
    if cpu.usable >= cpu.num_cores:
        return ok("CPU", text)
    reasons = []
    if cpu.num_allowed is not None and cpu.num_allowed < cpu.num_cores:
        reasons.append(f"affinity allows {cpu.num_allowed}")
    if cpu.quota_cores is not None and cpu.quota_cores < cpu.num_cores:
        reasons.append(f"the cgroup's quota is {cpu.quota_cores:g}")
    return note(
        "CPU",
        f"{text}; {' and '.join(reasons)}",
        "Count loader workers and threads by what is allowed, not by what the machine has.",
        limits=f"{counted(cpu.usable, 'core')} of {cpu.num_cores} may be used",
    )


def _threads(facts: Facts) -> Iterator[Finding]:
    """Ranks x OMP_NUM_THREADS against the cores there are."""
    text, usable, ranks = facts.environment.get("OMP_NUM_THREADS"), facts.cpu.usable, facts.local_ranks
    fair = max(1, int(usable // (ranks or 1)))
    if text is None:
        if ranks is None or ranks == 1:
            yield ok("threads", "OMP_NUM_THREADS is not set; torchrun sets it to 1 where it starts several ranks")
            return
        yield warning(
            "threads",
            f"OMP_NUM_THREADS is not set: each of {ranks} ranks starts a thread for every core",
            f"Set OMP_NUM_THREADS={fair}.",
            limits=f"{ranks} ranks' threads fight for {counted(usable, 'core')}",
        )
        return
    count = facts.count("OMP_NUM_THREADS")
    if not count:
        yield warning("threads", f"OMP_NUM_THREADS={text} is no number of threads", f"Set OMP_NUM_THREADS={fair}.")
    elif ranks is not None and ranks * count > usable:
        yield warning(
            "threads",
            f"{ranks} ranks of {count} threads each on {counted(usable, 'core')}",
            f"Set OMP_NUM_THREADS={fair}." if count > fair else "Start fewer ranks, or allow more cores.",
            limits=f"{ranks * count} threads on {counted(usable, 'core')}",
        )
    else:
        yield ok("threads", f"OMP_NUM_THREADS={count}" + (f" for each of {ranks} ranks" if ranks else ""))


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory.total_bytes is None:
        return
    available = memory.available_bytes if memory.available_bytes is not None else memory.total_bytes
    text = f"{gib(memory.total_bytes)}, {gib(available)} available"
    limit = memory.limit_bytes
    if limit is not None and limit < memory.total_bytes:
        text, available = f"{text}; the cgroup allows {gib(limit)}", min(available, limit)
    if available < _LEAST_MEMORY:
        yield warning(
            "memory",
            text,
            "Free or allow some: each rank needs its model, its optimizer and its workers' batches in it.",
            limits=f"{gib(available)} of memory",
        )
    elif limit is not None and limit < memory.total_bytes:
        yield note("memory", text, "A run that goes above it is killed without a message.")
    else:
        yield ok("memory", text)


def _shm(facts: Facts) -> Iterator[Finding]:
    size = facts.memory.shm_bytes
    if size is None:
        return
    free = facts.memory.shm_free_bytes if facts.memory.shm_free_bytes is not None else size
    text = gib(size) + (f", {gib(free)} free" if free < 0.9 * size else "")
    if free >= _LEAST_SHM:
        yield ok("/dev/shm", text)
        return
    how = "docker run --shm-size=8g, or --ipc=host"
    if "KUBERNETES_SERVICE_HOST" in facts.environment:
        how = "mount an emptyDir of medium Memory there"
    yield warning(
        "/dev/shm",
        f"{text}: loader workers pass their batches through it, and die with a bus error when it is full",
        f"Make it larger ({how}), or use num_workers=0.",
        limits=f"{gib(free)} of /dev/shm for loader workers",
    )


def _files(facts: Facts) -> Iterator[Finding]:
    if facts.open_files is None:
        return
    soft, hard = facts.open_files
    if soft >= _LEAST_FILES:
        yield ok("open files", f"at most {soft:,}")
        return
    level = warning if soft < _FEW_FILES else note
    target = min(max(hard, soft), 65536)
    advice = f"If workers say 'too many open files': ulimit -n {target}."
    if target <= soft:
        advice = "If workers say 'too many open files': torch.multiprocessing.set_sharing_strategy('file_system')."
    yield level("open files", f"at most {soft:,}", advice)
