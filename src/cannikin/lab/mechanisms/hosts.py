"""The mechanism that sets hosts apart: a network namespace and a torchrun for each rank, links shaped by `tc`.

The namespaces hang on a bridge in one more namespace, so that the machine's own network is neither touched nor in the
way; deleting the namespaces deletes everything. Speeds come from the throttle where the cluster gives device times, and
else from cpu quotas.

    host 0  eth0 --- port0  bridge  port1 --- eth0  host 1        tbf on both ends of every link
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from cannikin.errors import MechanismError
from cannikin.lab.cluster import LabCluster
from cannikin.lab.run_folder import HOST, Agent, Layout, RankSettings, agent_command
from cannikin.words import percent, short_count

_PREFIX = "cannikin-"  # of namespaces and cpu groups; the launcher's process id follows
_PORT = 29571
_PERIOD_US = 10_000  # of a cpu quota; short beside a step, so that a step is slow and not stopped and fast by turns
_LEAST_QUOTA_US = 1_000  # the kernel's limit
_MOST_OF_CORES = 0.9
_JOIN = 'echo $$ > "$1" && shift && exec "$@"'  # join a cpu group before the namespace hides it


class Hosts:
    """Hosts apart, each with a link of its own; speeds by device time where it is given, else by cpu quota."""

    name = "hosts"
    summary = "a network namespace and a torchrun for each rank; needs root"

    def unavailable(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "network namespaces are Linux's: use --mechanism portable, without --link"
        if os.geteuid() != 0:
            return "network namespaces need root: run as root, or use --mechanism portable, without --link"
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                return f"'{tool}' is not on the path: install iproute2, or use --mechanism portable, without --link"
        return None

    def missing(self, cluster: LabCluster) -> str | None:
        if (unavailable := self.unavailable()) is not None:
            return unavailable
        if cluster.sample_s is not None:
            return None
        if cluster.slowdowns or cluster.fixed_s:
            return "slow and fixed_ms need device times: give sample_ms too"
        if _by_quota(cluster) and find_cpu_cgroup(Path("/proc/mounts").read_text()) is None:
            return "there is no cpu controller to slow ranks by: give --sample-ms, which slows them without one"
        return None

    def words(self, cluster: LabCluster) -> str:
        speed = cluster.link_bit_per_s
        link = "" if speed is None else f", links of {short_count(speed)}bit/s by tc tbf"
        if cluster.sample_s is not None:
            sleep = f"ranks sleep up to {cluster.sample_s * 1e3:g} ms per sample over their speed"
            return f"a namespace per rank, {sleep}{link}"
        if not _by_quota(cluster):
            return f"a namespace per rank{link}"
        shares = ", ".join(percent(share) for share in core_shares(cluster.speeds, os.cpu_count() or 1))
        unfelt = "steps of a few ms hardly feel it: --sample-ms instead"
        return f"a namespace per rank, cpu quota {shares} of a core ({unfelt}){link}"

    def set_up(self, cluster: LabCluster, folder: Path, undo: ExitStack) -> Layout:
        cgroup = find_cpu_cgroup(Path("/proc/mounts").read_text())
        _sweep(cgroup)
        tag = f"{_PREFIX}{os.getpid()}-"
        for command in network_commands(tag, cluster.num_ranks):
            if command[1:3] == ["netns", "add"]:
                undo.callback(_call, ["ip", "netns", "del", command[3]], check=False)
            _call(command)
        if cluster.link_bit_per_s is not None:
            for rank in range(cluster.num_ranks):
                _call(shaping(f"{tag}{rank}", "eth0", cluster.link_bit_per_s))
                _call(shaping(f"{tag}switch", f"port{rank}", cluster.link_bit_per_s))
        groups: list[Path | None] = [None] * cluster.num_ranks
        if _by_quota(cluster) and cgroup is not None:
            shares = core_shares(cluster.speeds, os.cpu_count() or 1)
            groups = [make_group(cgroup, f"{tag}{rank}", share, undo) for rank, share in enumerate(shares)]
        throttled = cluster.sample_s is not None
        ranks = [RankSettings(device=device if throttled else None) for device in cluster.devices()]
        return Layout(agents=_agents(tag, groups, folder), ranks=ranks)


def _by_quota(cluster: LabCluster) -> bool:
    return cluster.sample_s is None and len(set(cluster.speeds)) > 1


def address(rank: int) -> str:
    """Return a host's address; all have one length, since torchrun numbers ranks by the addresses sorted as text."""
    return f"10.77.0.{101 + rank}"


def network_commands(tag: str, num_ranks: int) -> list[list[str]]:
    """Return the commands that make the hosts and the bridge between them, in order."""
    switch = f"{tag}switch"
    commands = [
        f"ip netns add {switch}",
        f"ip -n {switch} link add bridge type bridge",
        f"ip -n {switch} link set bridge up",
    ]
    for rank in range(num_ranks):
        host, port = f"{tag}{rank}", f"port{rank}"
        commands += [
            f"ip netns add {host}",
            f"ip -n {switch} link add {port} type veth peer name eth0 netns {host}",
            f"ip -n {switch} link set {port} master bridge up",
            f"ip -n {host} addr add {address(rank)}/24 dev eth0",
            f"ip -n {host} link set lo up",
            f"ip -n {host} link set eth0 up",
        ]
    return [command.split() for command in commands]


def shaping(namespace: str, device: str, bit_per_s: float) -> list[str]:
    """Return the command that limits a device's sending rate; bursts last 4 ms and have room for a packet of 64 KiB."""
    burst_bytes = max(65536, round(bit_per_s * 0.004 / 8))
    limits = f"rate {round(bit_per_s)}bit burst {burst_bytes}b latency 50ms"
    return f"tc -n {namespace} qdisc add dev {device} root tbf {limits}".split()


def _agents(tag: str, groups: Sequence[Path | None], folder: Path) -> list[Agent]:
    agents = []
    for rank, group in enumerate(groups):
        options = [
            f"--nnodes={len(groups)}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={address(0)}:{_PORT}",
            f"--rdzv-id={tag}lab",
            f"--rdzv-conf=is_host={int(rank == 0)}",  # left to itself, no agent finds that it is the host
            f"--local-addr={address(rank)}",
        ]
        command = ["ip", "netns", "exec", f"{tag}{rank}", *agent_command(str(rank), folder, *options)]
        if group is not None:
            command = ["sh", "-c", _JOIN, "sh", str(group), *command]
        environment = {
            HOST: str(rank),
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            # torch warns on every connection that the hosts have no names to look up.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        agents.append(Agent(command=command, environment=environment))
    return agents


def _sweep(cgroup: CpuCgroup | None) -> None:
    """Delete what a launcher that was killed left behind."""
    for line in _call(["ip", "netns", "list"]).splitlines():
        if (name := line.partition(" ")[0]) and _is_orphan(name):
            _call(["ip", "netns", "del", name], check=False)
    for group in cgroup.path.glob(f"{_PREFIX}*") if cgroup is not None else ():
        if _is_orphan(group.name):
            with suppress(OSError):
                group.rmdir()


def _is_orphan(name: str) -> bool:
    owner = name.removeprefix(_PREFIX).partition("-")[0]
    return name.startswith(_PREFIX) and owner.isdigit() and not Path(f"/proc/{owner}").exists()


def _call(command: list[str], *, check: bool = True) -> str:
    """Run one command of iproute2; in a session of its own, so that the terminal's interrupt does not cut it short."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, start_new_session=True)
    if check and done.returncode != 0:
        words = (done.stderr or done.stdout).strip().replace("\n", " ")
        raise MechanismError(f"hosts cannot be set apart here: '{' '.join(command)}' said: {words}")
    return done.stdout


# Shares of a core for groups of processes, where the Linux cpu controller (version 1 or 2) can be written.


@dataclass(frozen=True, kw_only=True)
class CpuCgroup:
    """Where cpu groups are made, and the version (1 or 2) whose files limit them."""

    version: int
    path: Path

    def limits(self, share: float) -> list[tuple[str, str]]:
        """Return (file, text) pairs that give a group this share of one core."""
        quota_us = max(_LEAST_QUOTA_US, round(share * _PERIOD_US))
        if self.version == 1:
            return [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota_us))]
        return [("cpu.max", f"{quota_us} {_PERIOD_US}")]


def core_shares(speeds: tuple[float, ...], num_cores: int) -> list[float]:
    """Return the cores of each rank in proportion to its speed: at most one, and together nine tenths of all.

    Example:
        >>> core_shares((1.0, 0.5, 0.25), 2)
        [1.0, 0.5, 0.25]
        >>> core_shares((4.0, 4.0, 1.0), 2)
        [0.8, 0.8, 0.2]
    """
    unit = min(1 / max(speeds), _MOST_OF_CORES * num_cores / sum(speeds))
    return [speed * unit for speed in speeds]


def find_cpu_cgroup(mounts: str) -> CpuCgroup | None:
    """Find where cpu groups are made in the text of /proc/mounts; where version 1 is mounted, it has the controller."""
    found = {}
    for line in mounts.splitlines():
        _, path, kind, options, *_ = line.split(" ")
        if kind == "cgroup" and "cpu" in options.split(","):
            found[1] = CpuCgroup(version=1, path=Path(path))
        if kind == "cgroup2" and 2 not in found:
            found[2] = CpuCgroup(version=2, path=Path(path))
    return found.get(1, found.get(2))


def make_group(cgroup: CpuCgroup, name: str, share: float, undo: ExitStack) -> Path:
    """Make a group with this share of a core; return the file by which a process joins it."""
    group = cgroup.path / name
    try:
        if cgroup.version == 2:
            (cgroup.path / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        undo.callback(_remove, group)
        for file, text in cgroup.limits(share):
            (group / file).write_text(text)
    except OSError as error:
        raise MechanismError(
            f"no cpu quota: {error.filename or group}: {error.strerror}; give --sample-ms instead, "
            "which slows ranks without one"
        ) from error
    return group / "cgroup.procs"


def _remove(group: Path) -> None:
    """Remove a group; its processes have been killed, and take a moment to be gone."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
        if not group.exists():
            return
        time.sleep(0.05)
