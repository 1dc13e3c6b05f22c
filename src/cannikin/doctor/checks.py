"""From facts to findings, area by area, and the sentence that says what will limit a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from cannikin.doctor.probes import Facts, TorchFacts
from cannikin.words import counted, kinds

LEVELS = ("ok", "note", "warning", "blocker")
KNOWN_VARIABLES = {
    "CANNIKIN_POLICY": "the policy of scripts that name none",
    "CANNIKIN_BACKEND": "the backend of the process group",
    "CANNIKIN_DEVICE": "what this rank's device is called in profiles and logs",
    "CANNIKIN_PATIENCE_S": "after how long a rank says whom it waits for",
    "CANNIKIN_LAB_DIR": "set by cannikin lab",
    "CANNIKIN_LAB_HOST": "set by cannikin lab",
}
_LEAST_TORCH = (2, 6)
_INSTALL = "pip install 'cannikin[torch]'"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        level: "ok", "note" (worth knowing), "warning" (it will cost speed or samples, or break a likely launch) or
            "blocker" (training is impossible as things are).
        subject: what, in a word or two.
        text: what is so.
        advice: what to do about it, one sentence; "" where there is nothing to do.
        limits: how it will limit a run, a few words for the summary; "" where it will not.
    """

    level: str
    subject: str
    text: str
    advice: str = ""
    limits: str = ""


_ok, _note, _warning = (partial(Finding, level) for level in LEVELS[:3])


def _blocker(subject: str, text: str, advice: str, limits: str = "") -> Finding:
    return Finding("blocker", subject, text, advice, limits or text)


@dataclass(frozen=True)
class Diagnosis:
    """Findings by area, in the order they are shown."""

    areas: dict[str, tuple[Finding, ...]]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them."""
        return tuple(finding for findings in self.areas.values() for finding in findings)

    @property
    def possible(self) -> bool:
        """Whether training can begin at all."""
        return all(finding.level != "blocker" for finding in self.findings)

    @property
    def summary(self) -> str:
        """The sentence that says what limits a run, the worst first."""
        limiting = sorted((f for f in self.findings if f.limits), key=lambda finding: -LEVELS.index(finding.level))
        if not self.possible:
            blockers = "; ".join(finding.limits for finding in limiting if finding.level == "blocker")
            return f"Training is impossible as things are: {blockers}."
        if not limiting:
            return "Nothing here will limit a run beyond what its ranks can compute."
        return f"What will limit a run: {'; '.join(finding.limits for finding in limiting)}."


def diagnose(facts: Facts) -> Diagnosis:
    """Return what these facts mean for a run.

    Example:
        >>> diagnose(Facts(torch_problem="")).summary
        'Training is impossible as things are: PyTorch is not installed.'
    """
    areas = {"Software": _software, "GPUs": _gpus, "Host": _host, "Network": _loopback, "Launch": _launch, "Lab": _lab}
    return Diagnosis({area: tuple(find(facts)) for area, find in areas.items()})


# Software


def _software(facts: Facts) -> Iterator[Finding]:
    yield _ok("Python", f"{facts.python} on {facts.system}")
    yield _ok("cannikin", facts.cannikin)
    if facts.torch is not None:
        yield _torch(facts.torch)
        yield _backends(facts, facts.torch)
    elif facts.torch_problem:
        text = f"PyTorch does not work here: {facts.torch_problem}"
        advice = f"See python -m torch.utils.collect_env, or install it anew: {_INSTALL}."
        yield _blocker("PyTorch", text, advice, limits="PyTorch does not work here")
    else:
        advice = f"Install it: {_INSTALL}; plan and simulate work without it."
        yield _blocker("PyTorch", "PyTorch is not installed", advice)


def _torch(torch: TorchFacts) -> Finding:
    text = f"{torch.version}, built for {torch.build}"
    numbers = tuple(int(part) for part in torch.version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        return _warning("PyTorch", f"{text}: older than {least}", f"Upgrade: pip install 'torch>={least}'.")
    return _ok("PyTorch", text)


def _backends(facts: Facts, torch: TorchFacts) -> Finding:
    names = ", ".join(torch.backends) or "none"
    asked = facts.environment.get("CANNIKIN_BACKEND", "")
    if asked and asked.partition(":")[0] not in {*torch.backends, "cpu", "cuda"}:
        return _blocker(
            "backends",
            f"{names}; CANNIKIN_BACKEND asks for {asked}, which this PyTorch does not have",
            f"Unset CANNIKIN_BACKEND, or set it to one of: {names}.",
            limits=f"the backend {asked} is not there",
        )
    if "gloo" not in torch.backends:
        return _blocker(
            "backends",
            f"{names}: no gloo, which carries cannikin's own messages whatever the gradients travel on",
            "Install a build of PyTorch that has gloo.",
            limits="this PyTorch has no gloo",
        )
    if torch.devices and "nccl" not in torch.backends:
        return _warning(
            "backends",
            f"{names}: no NCCL for {counted(len(torch.devices), 'GPU')}",
            "Set CANNIKIN_BACKEND=gloo, which is slower, or install a build with NCCL.",
            limits="all-reduces go through gloo",
        )
    return _ok("backends", names)


# GPUs


def _gpus(facts: Facts) -> Iterator[Finding]:
    """Say which GPUs torch can use; without torch there is nothing to say."""
    if facts.torch is None:
        return
    if not facts.torch.devices:
        yield _no_gpu(facts, facts.torch)
        return
    if len(set(facts.torch.devices)) > 1:
        advice = "An even split runs at the pace of the slowest; the default policy splits by speed."
        yield _note("GPUs", f"unlike GPUs: {kinds(facts.torch.devices)}", advice)
    else:
        yield _ok("GPUs", kinds(facts.torch.devices))


def _no_gpu(facts: Facts, torch: TorchFacts) -> Finding:
    """Say that there is none, or that ranks would silently compute on the CPU although there are some."""
    if not facts.num_gpus:
        cores = counted(facts.num_cores, "CPU core")
        return _note("GPUs", "none: ranks compute on the CPU", limits=f"no GPU, so ranks share {cores}")
    gpus = counted(facts.num_gpus, "GPU")
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    hidden = f"CUDA_VISIBLE_DEVICES={visible} hides them" if visible in {"", "-1"} else None
    return _warning(
        "use",
        f"this PyTorch, built for {torch.build}, can use none of {gpus}: {hidden or 'ranks would compute on the CPU'}",
        "Unset CUDA_VISIBLE_DEVICES." if hidden else "See python -m torch.utils.collect_env and nvidia-smi.",
        limits=f"{gpus} cannot be used",
    )


# Host and loopback


def _host(facts: Facts) -> Iterator[Finding]:
    """Compare the threads of all ranks with the cores there are."""
    cores, ranks, given = counted(facts.num_cores, "core"), facts.local_ranks, facts.count("OMP_NUM_THREADS")
    if ranks is None:
        yield _ok("CPU", cores)
        return
    each = given or facts.num_cores  # what is not set, or is no number, means a thread for every core
    fair = max(1, facts.num_cores // ranks)
    text = f"{counted(ranks, 'rank')} of {counted(each, 'thread')} each on {cores}"
    if ranks * each <= facts.num_cores:
        yield _ok("threads", text)
        return
    yield _warning(
        "threads",
        text if given else f"{text}: OMP_NUM_THREADS is not set to a number",
        f"Set OMP_NUM_THREADS={fair}." if each > fair else "Start fewer ranks, or allow more cores.",
        limits=f"{ranks * each} threads on {cores}",
    )


def _loopback(facts: Facts) -> Iterator[Finding]:
    measured = facts.loopback
    if measured is None:
        return
    if measured.problem is not None:
        yield _warning(
            "gloo",
            f"two processes on this host did not all-reduce: {measured.problem}",
            "Try again on a quiet machine; if it stays, something forbids sockets on the loopback interface.",
            limits="two processes of this host did not all-reduce over gloo",
        )
        return
    yield _ok(
        "gloo",
        f"two processes on this host's loopback: {measured.latency_s * 1e6:.0f} microseconds per small all-reduce, "
        f"{measured.bytes_per_s / 1e9:.2g} GB/s in a large one; it says nothing of links between hosts",
    )


# Launch and lab


def _launch(facts: Facts) -> Iterator[Finding]:
    """Say what the environment tells of ranks and of cannikin's own variables."""
    yield _torchrun(facts)
    yield from _ranks_per_gpu(facts)
    yield from _own_variables(facts)


def _torchrun(facts: Facts) -> Finding:
    """Say which rank this is; one without both RANK and WORLD_SIZE silently trains alone."""
    given = {name: facts.environment[name] for name in ("RANK", "WORLD_SIZE") if name in facts.environment}
    if len(given) == 2:
        rank, world = facts.count("RANK"), facts.count("WORLD_SIZE")
        if rank is not None and world is not None and rank < world:
            return _ok("torchrun", f"rank {rank} of {world}")
        return _blocker(  # torch waits for such a rank without a word
            "torchrun",
            f"RANK={given['RANK']} with WORLD_SIZE={given['WORLD_SIZE']} is no rank",
            "RANK must be from 0 to WORLD_SIZE - 1: start the script with torchrun, which sets both.",
        )
    if given:
        (name,) = given
        return _warning(
            "torchrun",
            f"{name} is set, and {'WORLD_SIZE' if name == 'RANK' else 'RANK'} is not: each process trains alone",
            "Set both, or start the script with torchrun.",
            limits="ranks do not know of one another",
        )
    if "SLURM_JOB_ID" in facts.environment and (facts.local_ranks or 1) > 1:
        return _warning(
            "Slurm",
            f"{facts.local_ranks} tasks per node: RANK and WORLD_SIZE are not set, and SLURM_PROCID is not read",
            "Ask for one task per node and use torchrun, or export RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, "
            "LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR and MASTER_PORT in each task.",
            limits="each Slurm task would train alone",
        )
    return _ok("torchrun", "not under it: a script started from here is one rank; torchrun starts several")


def _ranks_per_gpu(facts: Facts) -> Iterator[Finding]:
    """Find more ranks than GPUs: NCCL refuses two ranks on one."""
    ranks, gpus = facts.local_ranks, 0 if facts.torch is None else len(facts.torch.devices)
    if not gpus or ranks is None or ranks <= gpus:
        return
    if facts.environment.get("CANNIKIN_BACKEND") == "gloo":
        yield _note("ranks", f"{ranks} ranks share {counted(gpus, 'GPU')}, through gloo as CANNIKIN_BACKEND says")
        return
    yield _warning(
        "ranks",
        f"{ranks} ranks on this host and {counted(gpus, 'GPU')}: NCCL refuses two ranks on one GPU",
        "Start one rank per GPU, or set CANNIKIN_BACKEND=gloo.",
        limits=f"{ranks} ranks for {counted(gpus, 'GPU')}",
    )


def _own_variables(facts: Facts) -> Iterator[Finding]:
    """Say which variables of ours are set; an unknown one is probably a typing error, and would be ignored."""
    for name in sorted(name for name in facts.environment if name.startswith("CANNIKIN_")):
        if name not in KNOWN_VARIABLES:
            near = get_close_matches(name, KNOWN_VARIABLES, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"There are {', '.join(KNOWN_VARIABLES)}."
            yield _warning("variables", f"{name} is no variable of cannikin's, and is ignored", meant)
        else:
            yield _note("variables", f"{name}={facts.environment[name]}: {KNOWN_VARIABLES[name]}")


def _lab(facts: Facts) -> Iterator[Finding]:
    """Say which clusters `cannikin lab` can make of this machine."""
    for name, missing in facts.mechanisms.items():
        yield _ok(name, "can be had here") if missing is None else _note(name, f"cannot be had here: {missing}")
