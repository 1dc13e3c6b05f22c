"""The mechanism for one NVIDIA GPU and real NCCL: ranks share the GPU, and spin kernels make them as slow as asked.

NCCL refuses two ranks on one GPU of one host. A host id per rank lets it take each for a host of its own, so that it
carries the gradients over sockets. Every rank may use the whole GPU: under MPS kernels of all ranks run side by side
(without MPS they take turns, in slices of about 2 ms). A rank spins on its own stream in proportion to its samples, so
its speed is known, and overlaps with NCCL's kernels as real work does.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from cannikin.lab.cluster import DEFAULT_SAMPLE_S, LabCluster
from cannikin.lab.mechanisms.mps import CONTROL, first_visible, start_daemon
from cannikin.lab.run_folder import Agent, Layout, RankSettings, agent_command

_CONNECTIONS = 96  # that MPS was seen to have for all ranks together: 3 x 32 are no problem, 4 x 32 are


class Gpu:
    """GPUs of any speed, made of one."""

    name = "gpu"
    summary = "ranks share one NVIDIA GPU over NCCL, and spin in proportion"

    def unavailable(self) -> str | None:
        if not Path("/dev/nvidiactl").exists():
            return "there is no NVIDIA GPU here: use --mechanism portable"
        return None

    def missing(self, cluster: LabCluster) -> str | None:
        if cluster.link_bit_per_s is not None:
            return "it cannot slow a link: use --mechanism hosts, or leave --link out"
        return self.unavailable()

    def words(self, cluster: LabCluster) -> str:
        sample_s = DEFAULT_SAMPLE_S if cluster.sample_s is None else cluster.sample_s
        shared = "side by side by MPS" if _has_mps() else "by turns: there is no MPS here"
        spin = f"each spins {sample_s * 1e3:g} ms per sample over its speed, besides its real work"
        return f"ranks share one GPU, {shared}; {spin}; LOCAL_RANK is 0, and NCCL takes each for a host"

    def set_up(self, cluster: LabCluster, folder: Path, undo: ExitStack) -> Layout:
        visible = start_daemon(folder, undo) if _has_mps() else {"CUDA_VISIBLE_DEVICES": first_visible()}
        command = agent_command("0", folder, "--standalone", f"--nproc-per-node={cluster.num_ranks}")
        ranks = [
            RankSettings(
                device=device,
                spins=True,
                environment={
                    "LOCAL_RANK": "0",
                    "CANNIKIN_DEVICE": f"lab GPU of speed {device.speed:g}",
                    **as_host(rank, cluster.num_ranks),
                },
            )
            for rank, device in enumerate(cluster.devices())
        ]
        return Layout(agents=[Agent(command=command, environment=visible)], ranks=ranks)


def as_host(rank: int, num_ranks: int) -> dict[str, str]:
    """Return the environment in which NCCL takes a rank for a host of its own, and its kernels do not wait in line."""
    return {
        "NCCL_HOSTID": f"cannikin-lab-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        # With few, a rank's kernels queue behind its own NCCL kernel that waits, and a fast rank looks slow. With more
        # than MPS has for all, the last rank is told that the GPU is out of memory.
        "CUDA_DEVICE_MAX_CONNECTIONS": str(min(32, _CONNECTIONS // num_ranks)),
    }


def _has_mps() -> bool:
    return shutil.which(CONTROL) is not None
