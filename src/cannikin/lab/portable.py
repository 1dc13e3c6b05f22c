"""The mechanism that needs no privileges: one torchrun on this machine, ranks slowed by sleep."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from cannikin.lab.cluster import LabCluster
from cannikin.lab.device import DEFAULT_SAMPLE_S, devices
from cannikin.lab.mechanism import Agent, Layout, agent_command
from cannikin.lab.settings import RankSettings

__all__ = ["Portable"]


class Portable:
    """Ranks that sleep up to their device's time in forward and backward."""

    name = "portable"

    def missing(self, cluster: LabCluster) -> str | None:
        """A link cannot be slowed without privileges."""
        if cluster.link_bit_per_s is None:
            return None
        return "it cannot slow a link: use --mechanism hosts, as root on Linux, or leave --link out"

    def words(self, cluster: LabCluster) -> str:
        """Where speeds come from."""
        sample_s = DEFAULT_SAMPLE_S if cluster.sample_s is None else cluster.sample_s
        return f"ranks sleep up to {sample_s * 1e3:g} ms a sample over their speed"

    def set_up(self, cluster: LabCluster, folder: Path, undo: ExitStack) -> Layout:
        """Nothing has to be made."""
        command = agent_command("0", folder, "--standalone", f"--nproc-per-node={cluster.num_ranks}")
        ranks = [
            RankSettings(device=device, environment={"CANNIKIN_DEVICE": f"lab device of speed {device.speed:g}"})
            for device in devices(cluster)
        ]
        return Layout(agents=[Agent(name="0", command=command)], ranks=ranks)
