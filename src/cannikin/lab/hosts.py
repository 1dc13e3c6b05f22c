"""The mechanism that sets hosts apart: a network namespace and a torchrun for each rank, links shaped by `tc`.

The namespaces hang on a bridge in a namespace of its own, so that the machine's network is not touched and nothing of
it is in the way; deleting the namespaces deletes all of it.

    host 0  eth0 --- port0  bridge  port1 --- eth0  host 1        tbf on both ends of every link
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from cannikin.errors import MechanismError
from cannikin.lab.cluster import LabCluster
from cannikin.lab.cpu_quota import Controller, core_shares, find_controller, make_group
from cannikin.lab.device import devices
from cannikin.lab.mechanism import Agent, Layout, agent_command
from cannikin.lab.settings import HOST, RankSettings

__all__ = ["Hosts", "address", "network_commands", "shaping"]

_PREFIX = "cannikin-"  # of namespaces and cpu groups; the launcher's process id follows
_PORT = 29571
_JOIN = 'echo $$ > "$1" && shift && exec "$@"'  # join a cpu group before the namespace hides it


class Hosts:
    """Hosts apart, each with a link of its own; speeds by device time where it is given, else by cpu quota."""

    name = "hosts"

    def missing(self, cluster: LabCluster) -> str | None:
        """Linux, root, iproute2, and a cpu controller where speeds come from it."""
        if not sys.platform.startswith("linux"):
            return "network namespaces are Linux's: use --mechanism portable, without --link"
        if os.geteuid() != 0:
            return "network namespaces need root: run as root, or use --mechanism portable, without --link"
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                return f"'{tool}' is not on the path: install iproute2, or use --mechanism portable, without --link"
        if cluster.sample_s is not None:
            return None
        if cluster.slowdowns or cluster.fixed_s:
            return "slow and fixed_ms need device times: give sample_ms too"
        if _by_quota(cluster) and find_controller(Path("/proc/mounts").read_text()) is None:
            return "there is no cpu controller to slow ranks by: give --sample-ms, which slows them without one"
        return None

    def words(self, cluster: LabCluster) -> str:
        """Where speeds and links come from."""
        link = "" if cluster.link_bit_per_s is None else f", links of {cluster.link_bit_per_s / 1e6:g} Mbit/s by tc tbf"
        if cluster.sample_s is not None:
            return (
                f"a namespace a rank, ranks sleep up to {cluster.sample_s * 1e3:g} ms a sample over their speed{link}"
            )
        if not _by_quota(cluster):
            return f"a namespace a rank{link}"
        shares = ", ".join(f"{share:.0%}" for share in core_shares(cluster.speeds, os.cpu_count() or 1))
        unfelt = "steps of a few ms hardly feel it: --sample-ms instead"
        return f"a namespace a rank, cpu quota {shares} of a core ({unfelt}){link}"

    def set_up(self, cluster: LabCluster, folder: Path, undo: ExitStack) -> Layout:
        """Make namespaces, links and cpu groups."""
        controller = find_controller(Path("/proc/mounts").read_text())
        _sweep(controller)
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
        if _by_quota(cluster) and controller is not None:
            shares = core_shares(cluster.speeds, os.cpu_count() or 1)
            groups = [make_group(controller, f"{tag}{rank}", share, undo) for rank, share in enumerate(shares)]
        throttled = cluster.sample_s is not None
        ranks = [RankSettings(device=device if throttled else None) for device in devices(cluster)]
        return Layout(agents=_agents(tag, groups, folder), ranks=ranks)


def _by_quota(cluster: LabCluster) -> bool:
    return cluster.sample_s is None and len(set(cluster.speeds)) > 1


def address(rank: int) -> str:
    """A host's address; all of one length, since torchrun numbers ranks by addresses in the order of text."""
    return f"10.77.0.{101 + rank}"


def network_commands(tag: str, num_ranks: int) -> list[list[str]]:
    """What makes the hosts and the bridge between them, in order."""
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
    """What limits the rate at which a device sends; bursts are of 4 ms, and a packet of 64 KiB has to fit."""
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
            # The hosts have no names to look up, of which torch warns on every connection.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        agents.append(Agent(name=str(rank), command=command, environment=environment))
    return agents


def _sweep(controller: Controller | None) -> None:
    """Delete what a launcher that was killed left behind."""
    for line in _call(["ip", "netns", "list"]).splitlines():
        if (name := line.partition(" ")[0]) and _is_orphan(name):
            _call(["ip", "netns", "del", name], check=False)
    for group in controller.path.glob(f"{_PREFIX}*") if controller is not None else ():
        if _is_orphan(group.name):
            with suppress(OSError):
                group.rmdir()


def _is_orphan(name: str) -> bool:
    owner = name.removeprefix(_PREFIX).partition("-")[0]
    return name.startswith(_PREFIX) and owner.isdigit() and not Path(f"/proc/{owner}").exists()


def _call(command: list[str], *, check: bool = True) -> str:
    """One command of iproute2; in a session of its own, so that the terminal's interrupt does not cut it short."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, start_new_session=True)
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip().replace("\n", " ")
        raise MechanismError(f"hosts cannot be set apart here: '{' '.join(command)}' said: {said}")
    return done.stdout
