"""The mechanism for a machine with an NVIDIA GPU: each rank has a share of its multiprocessors, by MPS.

All ranks are on one device, and NCCL does not survive limited shares of it: illegal accesses and hangs came within tens
of steps, in plain DDP too. So scripts have to use gloo: `HeteroDataParallel` takes it from CANNIKIN_BACKEND when it
makes the process group. LOCAL_RANK is 0 on every rank, as scripts choose their device by it.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

from cannikin.errors import MechanismError
from cannikin.lab.cluster import LabCluster
from cannikin.lab.run_folder import Agent, Layout, RankSettings, agent_command

CONTROL = "nvidia-cuda-mps-control"


class Mps:
    """Shares of one GPU in proportion to the speeds."""

    name = "mps"
    summary = "shares of one NVIDIA GPU"

    def unavailable(self) -> str | None:
        if shutil.which(CONTROL) is None:
            return f"{CONTROL} is not on the path: it comes with NVIDIA's driver"
        if not Path("/dev/nvidiactl").exists():
            return "there is no NVIDIA GPU here"
        return None

    def missing(self, cluster: LabCluster) -> str | None:
        if cluster.link_bit_per_s is not None:
            return "it cannot slow a link: use --mechanism hosts, or leave --link out"
        if cluster.slowdowns or cluster.sample_s is not None:
            return "a GPU's own time is what it takes: leave sample_ms and slow out, or use --mechanism portable"
        return self.unavailable()

    def words(self, cluster: LabCluster) -> str:
        shares = ", ".join(f"{share}%" for share in shares_percent(cluster.speeds))
        return f"ranks have {shares} of one GPU's multiprocessors, LOCAL_RANK is 0 and CANNIKIN_BACKEND gloo"

    def set_up(self, cluster: LabCluster, folder: Path, undo: ExitStack) -> Layout:
        environment = {**start_daemon(folder, undo), "CANNIKIN_BACKEND": "gloo"}
        command = agent_command("0", folder, "--standalone", f"--nproc-per-node={cluster.num_ranks}")
        ranks = [
            RankSettings(environment={"LOCAL_RANK": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)})
            for share in shares_percent(cluster.speeds)
        ]
        return Layout(agents=[Agent(command=command, environment=environment)], ranks=ranks)


def shares_percent(speeds: tuple[float, ...]) -> list[int]:
    """Return whole percents of one GPU: the speeds themselves where together they fit on it, else in proportion.

    Example:
        >>> shares_percent((0.6, 0.25, 0.12))
        [60, 25, 12]
        >>> shares_percent((1.0, 0.5, 0.25))
        [57, 28, 14]
    """
    whole = max(1.0, sum(speeds))
    return [max(1, math.floor(100 * speed / whole + 1e-9)) for speed in speeds]


def start_daemon(folder: Path, undo: ExitStack) -> dict[str, str]:
    """Start a daemon of the lab's own, which is stopped at the end, and return what its clients need to find it."""
    device = first_visible()
    directories = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps-pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log"),
    }
    for directory in directories.values():
        os.mkdir(directory)
    daemon = {**os.environ, **directories, "CUDA_VISIBLE_DEVICES": device}
    undo.callback(_control, daemon, "quit -t 5\n")
    started = _control(daemon, "", "-d")
    if started.returncode != 0:
        words = (started.stderr or started.stdout).strip().replace("\n", " ")
        raise MechanismError(f"{CONTROL} -d failed: {words or f'exit status {started.returncode}'}")
    # The daemon numbers the devices it sees from 0; a name stays what it is.
    seen = device if device.startswith(("GPU-", "MIG-")) else "0"
    return {**directories, "CUDA_VISIBLE_DEVICES": seen}


def first_visible() -> str:
    """Return the GPU that all ranks share, as CUDA_VISIBLE_DEVICES names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"


def _control(environment: dict[str, str], text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Call MPS's tool once; in a session of its own, so that the terminal's interrupt does not end the daemon."""
    return subprocess.run(
        [CONTROL, *options],
        input=text,
        capture_output=True,
        text=True,
        env=environment,
        timeout=30,
        check=False,
        start_new_session=True,
    )
