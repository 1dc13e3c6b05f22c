"""Findings about the launch: torchrun, Slurm, Kubernetes, variables that change a run; and about the lab."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from cannikin.core.planners import POLICIES
from cannikin.doctor.facts import Facts
from cannikin.doctor.findings import Finding, blocker, counted, note, ok, warning

__all__ = ["KNOWN_VARIABLES", "lab_findings", "launch_findings"]

KNOWN_VARIABLES = {
    "CANNIKIN_POLICY": "the policy of scripts that name none",
    "CANNIKIN_BACKEND": "the backend of the process group",
    "CANNIKIN_DEVICE": "what this rank's device is called in profiles and logs",
    "CANNIKIN_LAB_DIR": "set by cannikin lab",
    "CANNIKIN_LAB_HOST": "set by cannikin lab",
}
# Variable, values that slow a run down, how.
_SLOWING = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "computing and communication do not overlap"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is checked on all ranks first"),
    ("NCCL_P2P_DISABLE", ("1",), "GPUs of one host do not copy to one another directly"),
    ("NCCL_IB_DISABLE", ("1",), "InfiniBand is not used"),
    ("NCCL_SHM_DISABLE", ("1",), "ranks of one host talk through sockets"),
)


def launch_findings(facts: Facts) -> Iterator[Finding]:
    """What the environment says about ranks, and what else in it changes a run."""
    yield from _torchrun(facts)
    yield from _slurm(facts)
    yield from _kubernetes(facts)
    yield from _sharing(facts)
    yield from _own_variables(facts)
    for name, values, effect in _SLOWING:
        if facts.environment.get(name, "").upper() in values:
            yield warning(
                "variables",
                f"{name}={facts.environment[name]}: {effect}",
                "Unset it, unless you are looking for a fault.",
                limits=f"{name} is set",
            )


def _torchrun(facts: Facts) -> Iterator[Finding]:
    given = {name: facts.environment[name] for name in ("RANK", "WORLD_SIZE") if name in facts.environment}
    if not given:
        if "SLURM_JOB_ID" not in facts.environment:
            yield ok("torchrun", "not under it: a script started from here is one rank; torchrun starts several")
        return
    if len(given) == 1:
        (name,) = given
        yield warning(
            "torchrun",
            f"{name} is set, and {'WORLD_SIZE' if name == 'RANK' else 'RANK'} is not: each process trains alone",
            "Set both, or start the script with torchrun.",
            limits="ranks do not know of one another",
        )
        return
    rank, world = facts.count("RANK"), facts.count("WORLD_SIZE")
    if rank is None or world is None or rank >= world:
        yield blocker(
            "torchrun",
            f"RANK={given['RANK']} with WORLD_SIZE={given['WORLD_SIZE']} is no rank",
            "RANK must be from 0 to WORLD_SIZE - 1: start the script with torchrun, which sets both.",
        )
        return
    yield from _master(facts, rank, world)


def _master(facts: Facts, rank: int, world: int) -> Iterator[Finding]:
    address, port = facts.environment.get("MASTER_ADDR"), facts.environment.get("MASTER_PORT")
    if not address or not port:
        missing = "MASTER_ADDR" if not address else "MASTER_PORT"
        yield blocker(
            "torchrun",
            f"RANK and WORLD_SIZE are set, {missing} is not: ranks cannot find one another",
            f"Set {missing}, or start the script with torchrun, which does.",
        )
        return
    if not 0 < (facts.count("MASTER_PORT") or 0) < 2**16:
        yield blocker(
            "torchrun",
            f"MASTER_PORT={port} is no port: ranks cannot find one another",
            "Set MASTER_PORT to a free port of rank 0's host, such as 29500.",
        )
        return
    where = f"rank {rank} of {world}, to meet at {address}:{port}"
    if facts.master_resolves is False:
        yield blocker(
            "torchrun",
            f"{where}: that name leads to no address from here",
            "Give MASTER_ADDR a name or address that every host can look up.",
            limits=f"MASTER_ADDR={address} cannot be looked up",
        )
    elif facts.num_hosts > 1 and (address == "localhost" or address.startswith("127.")):
        yield warning(
            "torchrun",
            f"{where}, which on each of the {facts.num_hosts} hosts is that host itself",
            "Give MASTER_ADDR the address of rank 0's host.",
            limits="hosts do not find one another",
        )
    else:
        yield ok("torchrun", f"{where} (whether it can be reached was not tried)")


def _slurm(facts: Facts) -> Iterator[Finding]:
    if "SLURM_JOB_ID" not in facts.environment:
        return
    nodes, tasks = facts.num_hosts, facts.count("SLURM_NTASKS") or facts.num_hosts
    each = facts.count("SLURM_NTASKS_PER_NODE") or max(1, tasks // nodes)
    text = f"job {facts.environment['SLURM_JOB_ID']}: {counted(nodes, 'node')}, {counted(tasks, 'task')}"
    gpus = max(1, facts.num_visible)
    if "RANK" in facts.environment:
        yield ok("Slurm", text)
    elif each == 1:
        start = f"srun torchrun --nnodes={nodes} --nproc-per-node={gpus} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
        yield note(
            "Slurm", f"{text}, one a node: torchrun has to start the ranks", f"Start it with '{start} train.py'."
        )
    else:
        yield warning(
            "Slurm",
            f"{text}, {each} a node: RANK and WORLD_SIZE are not set, and SLURM_PROCID is not read",
            "Ask for one task a node and use torchrun, or export RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NTASKS, "
            "LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR and MASTER_PORT in each task.",
            limits="each Slurm task would train alone",
        )


def _kubernetes(facts: Facts) -> Iterator[Finding]:
    operator = [name for name in ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_RDZV_ENDPOINT") if name in facts.environment]
    if operator:
        yield ok("Kubernetes", f"torchrun takes {', '.join(operator)} from the training operator")
    elif "KUBERNETES_SERVICE_HOST" in facts.environment:
        text = "in a pod, and nothing of a training operator in the environment"
        yield note("Kubernetes", text, "For several pods give torchrun a headless service as --rdzv-endpoint.")


def _sharing(facts: Facts) -> Iterator[Finding]:
    """More ranks than GPUs: NCCL refuses two ranks on one."""
    ranks, gpus = facts.local_ranks, facts.num_visible
    if facts.torch is None or ranks is None or not facts.torch.devices or ranks <= gpus:
        return
    if facts.environment.get("CANNIKIN_BACKEND") == "gloo":
        yield note("ranks", f"{ranks} ranks share {gpus} GPUs, through gloo as CANNIKIN_BACKEND says")
        return
    yield warning(
        "ranks",
        f"{ranks} ranks on this host and {counted(gpus, 'GPU')}: NCCL refuses two ranks on one GPU",
        "Start one rank a GPU, or set CANNIKIN_BACKEND=gloo.",
        limits=f"{ranks} ranks for {counted(gpus, 'GPU')}",
    )


def _own_variables(facts: Facts) -> Iterator[Finding]:
    """What is set of ours; an unknown name is probably a typing error, and would be ignored."""
    for name in sorted(name for name in facts.environment if name.startswith("CANNIKIN_")):
        value = facts.environment[name]
        if name not in KNOWN_VARIABLES:
            near = get_close_matches(name, KNOWN_VARIABLES, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"There are {', '.join(KNOWN_VARIABLES)}."
            yield warning("variables", f"{name} is no variable of cannikin's, and is ignored", meant)
        elif name == "CANNIKIN_POLICY" and value.replace("_", "-") not in POLICIES:
            yield blocker(
                "variables",
                f"CANNIKIN_POLICY={value} is no policy",
                f"Set it to one of {', '.join(POLICIES)}, or unset it.",
            )
        else:
            yield note("variables", f"{name}={value}: {KNOWN_VARIABLES[name]}")


def lab_findings(facts: Facts) -> Iterator[Finding]:
    """Which clusters `cannikin lab` can make of this machine."""
    for name, missing in facts.mechanisms.items():
        yield ok(name, "can be had here") if missing is None else note(name, f"cannot be had here: {missing}")
