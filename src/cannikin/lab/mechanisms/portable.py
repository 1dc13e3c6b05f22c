"""The mechanism that needs no privileges: one torchrun on this machine, ranks slowed by sleep."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from cannikin.lab.cluster import DEFAULT_SAMPLE_S, LabCluster
from cannikin.lab.run_folder import Agent, Layout, RankSettings, agent_command


class Portable:
    """Ranks that sleep up to their device's time in forward and backward."""

    name = "portable"
    summary = "ranks sleep up to their device's time; needs no privileges"

    def unavailable(self) -> str | None:
        return None  # every machine can have it

    def missing(self, cluster: LabCluster) -> str | None:
        if cluster.link_bit_per_s is None:
            return None
        return "it cannot slow a link: use --mechanism hosts, as root on Linux, or leave --link out"

    def words(self, cluster: LabCluster) -> str:
        sample_s = DEFAULT_SAMPLE_S if cluster.sample_s is None else cluster.sample_s
        return f"ranks sleep up to {sample_s * 1e3:g} ms per sample over their speed"

    def set_up(self, cluster: LabCluster, folder: Path, undo: ExitStack) -> Layout:
        command = agent_command("0", folder, "--standalone", f"--nproc-per-node={cluster.num_ranks}")
        ranks = [
            RankSettings(device=device, environment={"CANNIKIN_DEVICE": f"lab device of speed {device.speed:g}"})
            for device in cluster.devices()
        ]
        return Layout(agents=[Agent(command=command)], ranks=ranks)
