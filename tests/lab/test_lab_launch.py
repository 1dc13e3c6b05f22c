"""Real launches: torchrun, several ranks, real DDP; what they print, how they end, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 100

TRAIN = """
import json, os, sys, time
from statistics import median
import torch
import torch.distributed as dist
from torch import nn

assert __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(sys.argv[0]))
dist.init_process_group("gloo")
rank = dist.get_rank()
net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
x = torch.randn(16, 4)
forward_s, step_s = [], []
for _ in range(int(sys.argv[2])):
    optimizer.zero_grad()
    dist.barrier()
    start_s = time.perf_counter()
    output = ddp(x)
    forward_s.append(time.perf_counter() - start_s)
    output.square().mean().backward()
    step_s.append(time.perf_counter() - start_s)
    optimizer.step()
print("half", end=" ", flush=True)
time.sleep(0.2)
print("and half")
told = {
    "args": sys.argv[1:],
    "forward_s": median(forward_s[2:]),
    "step_s": median(step_s[2:]),
    "policy": os.environ.get("CANNIKIN_POLICY"),
    "threads": torch.get_num_threads(),
    "host": os.environ.get("CANNIKIN_LAB_HOST"),
    "interfaces": [name for _, name in __import__("socket").if_nameindex()],
}
print(json.dumps(told), file=sys.stderr)
"""

FAIL = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    sys.exit(3)
time.sleep(90)
"""

WAIT = """
import signal, subprocess, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that will not listen
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"], start_new_session=True)
dist.barrier()
print("waiting", child.pid, flush=True)
time.sleep(90)
"""


class Run:
    """One `cannikin lab`, with a folder of its own for what it makes."""

    def __init__(self, folder: Path, code: str, *args: str, script_args: tuple[str, ...] = ()) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(code)
        (folder / "made").mkdir()
        environment = {**os.environ, "TMPDIR": str(folder / "made")}
        environment.pop("OMP_NUM_THREADS", None)
        environment.pop("CANNIKIN_POLICY", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cannikin", "lab", *args, "--", str(script), *script_args],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, list[str], list[str]]:
        """Exit status and the lines of both streams, within the limit."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            out, err = self.process.communicate(timeout=20)
            pytest.fail(f"not done within {LIMIT_S} s:\n{out}\n{err}")
        return self.process.returncode, out.splitlines(), err.splitlines()

    def processes(self) -> list[str]:
        """Processes of this run."""
        mark, found = f"CANNIKIN_LAB_DIR={self.folder}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
        return found

    def left_over(self) -> list[str]:
        """Processes, files, namespaces and cpu groups of this run that are still there."""
        # torch's own cache stays, as it does without us.
        found = [str(path) for path in (self.folder / "made").iterdir() if not path.name.startswith("torchinductor_")]
        found += self.processes()
        names = Path("/run/netns").iterdir() if Path("/run/netns").exists() else ()
        groups = Path("/sys/fs/cgroup").glob("cpu*/cannikin-*")
        return found + [str(path) for path in (*names, *groups) if f"cannikin-{self.process.pid}-" in path.name]


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(code: str, *args: str, script_args: tuple[str, ...] = ()) -> Run:
        runs.append(Run(tmp_path, code, *args, script_args=script_args))
        return runs[-1]

    yield start
    for started in runs:
        started.process.terminate()  # not killed: it would leave its ranks behind
        started.process.communicate(timeout=30)


def told_by_ranks(lines: list[str]) -> list[dict]:
    """What each rank wrote about itself, by rank."""
    told = [line.split("] ", 1) for line in lines if line.startswith("[rank ") and line.endswith("}")]
    return [json.loads(text) for _, text in sorted(told)]


def test_a_script_runs_on_ranks_of_the_speeds_asked_for(run):
    started = run(
        TRAIN, "--ranks", "1.0,0.5,0.25", "--sample-ms", "2", "--policy", "lb-bsp", script_args=("--steps", "12")
    )
    status, out, err = started.finish()
    assert status == 0, err
    assert sorted(out) == [f"[rank {rank}] half and half" for rank in range(3)]
    assert err[0].startswith("cannikin lab: portable mechanism (needs no privileges), 3 ranks of speed 1, 0.5, 0.25")
    ranks = told_by_ranks(err)
    assert [rank["args"] for rank in ranks] == [["--steps", "12"]] * 3
    assert {(rank["policy"], rank["threads"]) for rank in ranks} == {("lb-bsp", 1)}
    fast, middle, slow = (rank["forward_s"] for rank in ranks)
    assert 1.5 < middle / fast < 2.5
    assert 1.5 < slow / middle < 2.5
    # All wait for the slowest: 16 samples at 2 ms and a quarter of the speed take it 128 ms.
    assert all(rank["step_s"] > 0.127 for rank in ranks)
    assert started.left_over() == []


def test_a_ranks_exit_status_is_passed_on_and_the_others_are_ended(run):
    started = run(FAIL, "--ranks", "1,1")
    status, _, err = started.finish()
    assert status == 3, err
    assert err[-1] == "cannikin lab: rank 1 failed first, with exit status 3"
    assert started.left_over() == []


def interrupt_once_it_waits(started: Run, number: signal.Signals) -> tuple[int, list[str]]:
    deadline_s = time.monotonic() + LIMIT_S
    while "waiting" not in (line := started.process.stdout.readline()):
        assert line, started.process.stderr.read()
        assert time.monotonic() < deadline_s
    assert started.left_over() != [], "there is something to clean up"
    started.process.send_signal(number)
    status, _, err = started.finish()
    return status, err


def test_an_interrupt_ends_everything_even_ranks_that_do_not_listen(run):
    started = run(WAIT, "--ranks", "1,1")
    status, err = interrupt_once_it_waits(started, signal.SIGINT)
    assert (status, err[-1]) == (130, "cannikin lab: interrupted")
    assert started.left_over() == []


@pytest.mark.skipif(sys.platform != "linux", reason="no other system ends children with their parent")
def test_ranks_end_with_a_launcher_that_is_killed(run):
    code = (
        "import time; import torch.distributed as dist; dist.init_process_group('gloo'); print('waiting', flush=True)"
    )
    started = run(code + "; time.sleep(90)", "--ranks", "1,1")
    while "waiting" not in (line := started.process.stdout.readline()):
        assert line, started.process.stderr.read()
    assert len(started.processes()) >= 3, "torchrun and two ranks"
    started.process.kill()
    started.process.wait()
    deadline_s = time.monotonic() + 20
    while (left := started.processes()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert left == []


def why_no_hosts() -> str | None:
    """Why this machine cannot set hosts apart, from trying it."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "iproute2 is not installed"
    name = f"cannikin-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
    return made.stderr.strip() if made.returncode else None


@pytest.fixture(scope="module")
def hosts_can_be_made():
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(f"no hosts apart here: {reason}")


def test_hosts_apart_have_their_own_network_and_their_ranks_in_order(run, hosts_can_be_made):
    started = run(TRAIN, "--ranks", "1.0,0.5", "--sample-ms", "2", "--link", "200mbit", script_args=("--steps", "8"))
    status, _, err = started.finish()
    assert status == 0, err
    assert "links of 200 Mbit/s by tc tbf" in err[0]
    ranks = told_by_ranks(err)
    assert [rank["host"] for rank in ranks] == ["0", "1"]
    assert [sorted(rank["interfaces"]) for rank in ranks] == [["eth0", "lo"]] * 2
    assert 1.5 < ranks[1]["forward_s"] / ranks[0]["forward_s"] < 2.5
    assert started.left_over() == []


def test_hosts_apart_are_gone_after_a_signal(run, hosts_can_be_made):
    started = run(WAIT, "--ranks", "1.0,0.5", "--mechanism", "hosts")
    status, err = interrupt_once_it_waits(started, signal.SIGTERM)
    assert (status, err[-1]) == (143, "cannikin lab: interrupted")
    assert started.left_over() == []
