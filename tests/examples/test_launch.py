"""The launch scripts under the signals that their launchers send: they save, leave, and go on when started again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LAUNCH = ROOT / "examples" / "launch"
LIMIT_S = 100
SAVED = "leaves with status 143; in .* a snapshot was taken"

# Slurm's commands as far as the script uses them. A step's processes are a session; scancel signals all of them.
SLURM = {
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > "$FAKE/requeued"; else echo 127.0.0.1; fi',
    "srun": 'shift; SLURM_NODEID=0 setsid --wait bash -c \'echo $$ > "$FAKE/step"; exec "$@"\' step "$@"',
    "scancel": """
tree() { for child in $(cat /proc/$1/task/*/children); do tree $child; done; echo $1; }
kill -TERM $(tree "$(cat "$FAKE/step")")""",
}


class Started:
    """A launcher that runs, and what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    def wait_for(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Wait until it has printed something, behind so many letters; fail where it ends, or takes too long."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.printed()[after:], re.MULTILINE)) is None:
            assert time.monotonic() < deadline, f"not printed: {pattern}\n{self.printed()}"
            assert self.process.poll() is None, f"ended without {pattern}\n{self.printed()}"
            time.sleep(0.1)
        return found

    def printed(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def end(self) -> int:
        """Wait until it ends, and return its status."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"does not end:\n{self.printed()}")


@contextmanager
def started(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[Started]:
    """Start a launcher in a session of its own; nothing of it survives."""
    path = os.pathsep.join([environment.get("PATH", ""), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **environment, "PATH": path}
    with log.open("ab") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=given, stdout=file, stderr=file, start_new_session=True)
    try:
        yield Started(process, log)
    finally:
        for pid in _tree(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _tree(pid: int) -> list[int]:
    """A process and all that it started, which torchrun puts into sessions of their own."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [each for child in path.read_text().split() for each in _tree(int(child))]
    return found


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def newest(folder: Path) -> int:
    return max(int(name.split("-")[1]) for name in os.listdir(folder) if name.endswith(".snapshot"))


def test_the_slurm_script_saves_and_requeues_when_its_time_is_nearly_up(tmp_path):
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "FAKE": str(tmp_path), "PATH": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2", "SNAPSHOTS": str(tmp_path / "snapshots"),
        "MASTER_PORT": free_port(), "EPOCHS": "100000",
    }  # fmt: skip
    command = ["bash", str(LAUNCH / "requeue.sbatch")]
    with started(command, tmp_path / "first", environment) as job:
        job.wait_for("^epoch 1:")
        job.process.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@120 has it: to the script alone
        assert job.end() != 0
    assert (tmp_path / "requeued").read_text() == "7\n"
    printed = (tmp_path / "first").read_text()
    assert len(re.findall(SAVED, printed)) == 2
    assert newest(tmp_path / "snapshots") > 28, "more than an epoch"


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_pods_save_when_one_is_evicted_and_new_ones_go_on(tmp_path):
    job = list(pytest.importorskip("yaml").safe_load_all((LAUNCH / "job.yaml").read_text()))[1]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > 30, "torchrun gives its ranks 30 s"
    environment = {each["name"]: each["value"] for each in container["env"]}
    environment |= {"MASTER_ADDR": "127.0.0.1", "SNAPSHOTS": str(tmp_path / "snapshots")}
    port = free_port()
    command = [
        *container["command"],
        container["args"][0].replace("29500", port).replace("--epochs 90", "--epochs 1e5"),
    ]
    for attempt in range(2):
        pods = [{**environment, "JOB_COMPLETION_INDEX": str(index)} for index in range(job["completions"])]
        logs = [tmp_path / f"pod-{index}-{attempt}" for index in range(job["completions"])]
        with started(command, logs[0], pods[0]) as first, started(command, logs[1], pods[1]) as second:
            if attempt:
                assert first.wait_for(r"^rank 0 goes on from step (\d+)")[1] == str(newest(tmp_path / "snapshots"))
                return
            first.wait_for("^epoch 1:")
            second.process.send_signal(signal.SIGTERM)  # to a pod's first process, as the kubelet does
            assert (first.end() != 0, second.end() != 0) == (True, True)
        assert "another rank was told to end" in logs[0].read_text()


@pytest.mark.slow
@pytest.mark.timeout(6 * LIMIT_S)
def test_hosts_come_and_go_under_torchrun(tmp_path):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "SNAPSHOTS": str(tmp_path / "snapshots")}
    command = [str(LAUNCH / "elastic.sh"), "--epochs", "100000", "--every-s", "1"]
    with started(command, tmp_path / "stays", environment) as stays:
        stays.wait_for("^rank 0 of 1")
        stays.wait_for("^epoch 2:")
        with started(command, tmp_path / "joins", environment) as joins:
            joins.wait_for(r"^rank \d goes on from step")
            stays.wait_for(SAVED)  # told by its agent, which makes room
            stays.wait_for(r"^rank \d of 2")
        # Killed with its agent, without a word: the other's agent notices, and starts again alone.
        stays.wait_for(r"^rank 0 of 1 .*\nrank 0 goes on from step", after=len(stays.printed()))
