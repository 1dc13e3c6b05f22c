"""Runs a script on a lab cluster: has the mechanism make the cluster, runs torchrun on it, and cleans up."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from cannikin.errors import InvalidInputError
from cannikin.lab.cluster import LabCluster
from cannikin.lab.mechanisms import AUTO, Mechanism, choose
from cannikin.lab.processes import Outputs, interruptible, run_agents
from cannikin.lab.run_folder import exits, first_failure, write_settings
from cannikin.words import counted


def launch(
    cluster: LabCluster,
    script: Sequence[str],
    *,
    mechanism: str = AUTO,
    environment: Mapping[str, str] | None = None,
    out: IO[bytes] | None = None,
    err: IO[bytes] | None = None,
) -> int:
    """Run a script on every rank of a cluster and return the exit status: 0, or that of the rank that failed first.

    Args:
        cluster: what to make of this machine.
        script: a Python file, or `-m` and a module, and its arguments.
        mechanism: a name in `MECHANISMS`, or "auto" for the one that suits the cluster.
        environment: added to this process's own for the ranks.
        out, err: where the ranks' lines go, by default this process's own streams; the lab's own lines go to `err`.
    """
    out, err = out or sys.stdout.buffer, err or sys.stderr.buffer
    _check_script(script)
    chosen, reason = choose(cluster, mechanism)
    _say(err, _heading(chosen, reason, cluster))
    with interruptible() as interruption, ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="cannikin-lab-")))
        layout = chosen.set_up(cluster, folder, undo)
        write_settings(folder, layout.ranks)
        outputs = Outputs()
        undo.callback(outputs.close)
        _open_pipes(outputs, folder, cluster.num_ranks, out, err)
        statuses = run_agents(
            layout.agents,
            script,
            folder=folder,
            environment={
                **os.environ,
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                **(environment or {}),
            },
            outputs=outputs,
            errors=err,
            interruption=interruption,
        )
        noted = exits(folder)
    if interruption.signal is not None:
        _say(err, "interrupted")
        return 128 + interruption.signal
    if not any(statuses):
        return 0
    failure = first_failure(noted)
    if failure is None:
        status = next(status for status in statuses if status)
        _say(err, f"torchrun failed with exit status {status}")
        return status if status > 0 else 128 - status
    rank, status = failure
    _say(err, f"rank {rank} failed first, with exit status {status}")
    return status


def _check_script(script: Sequence[str]) -> None:
    if not script or (script[0] == "-m" and len(script) < 2):
        raise InvalidInputError("no script to run: write it after --, like: cannikin lab --ranks 1,0.5 -- train.py")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise InvalidInputError(f"{script[0]}: there is no such script")
    if find_spec("torch") is None:
        raise InvalidInputError("the lab needs PyTorch: pip install 'cannikin[torch]'")


def _heading(mechanism: Mechanism, reason: str, cluster: LabCluster) -> str:
    names = [f" ({name})" for name in cluster.names] or [""] * cluster.num_ranks
    speeds = ", ".join(f"{speed:g}{name}" for speed, name in zip(cluster.speeds, names, strict=True))
    ranks = f"{counted(cluster.num_ranks, 'rank')} of speed {speeds}"
    return f"{mechanism.name} mechanism ({reason}), {ranks}: {mechanism.words(cluster)}"


def _say(err: IO[bytes], text: str) -> None:
    err.write(f"cannikin lab: {text}\n".encode())
    err.flush()


def _open_pipes(outputs: Outputs, folder: Path, num_ranks: int, out: IO[bytes], err: IO[bytes]) -> None:
    """Make named pipes for the ranks' output, open for writing here too: so they have no end before we close them."""
    for rank in range(num_ranks):
        for name, stream in (("out", out), ("err", err)):
            path = folder / f"rank{rank}.{name}"
            os.mkfifo(path)
            outputs.add(os.open(path, os.O_RDWR | os.O_NONBLOCK), f"[rank {rank}] ", stream)
