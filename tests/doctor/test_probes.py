"""The probes: what they make of files and tools, and that none of them hangs or leaves a process behind."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from cannikin.doctor import gpus, host, loopback
from cannikin.doctor.asking import ask, ask_all, within
from cannikin.doctor.facts import Facts, GpuProcess, Interface
from cannikin.doctor.gather import relevant_environment

# Asking


def test_an_answer_is_what_a_command_prints():
    answer = ask([sys.executable, "-c", "print('hello')"], limit_s=30)
    assert (answer.text, answer.problem) == ("hello\n", None)


def test_a_command_that_fails_is_quoted_by_its_last_line():
    answer = ask([sys.executable, "-c", "import sys; sys.exit('first\\n  last  \\n')"], limit_s=30)
    assert answer.problem == "last"


def test_a_command_that_is_not_there_is_a_problem_and_no_error():
    assert "No such file" in (ask(["/none/such"], limit_s=5).problem or "")


def test_a_command_that_hangs_is_given_up_with_everything_it_started(tmp_path):
    mark = tmp_path / "pid"
    began = time.monotonic()
    answer = ask(["/bin/sh", "-c", f"sleep 60 & echo $! > {mark}; wait"], limit_s=1)
    assert answer.problem == "no answer within 1 s"
    assert time.monotonic() - began < 30
    for _ in range(100):
        if not _runs(int(mark.read_text())):
            return
        time.sleep(0.05)
    pytest.fail("what the command started runs on")


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_commands_run_side_by_side():
    meet = (
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\nwhile not os.path.exists(sys.argv[2]): time.sleep(.01)"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        first, second = f"{folder}/a", f"{folder}/b"
        commands = [[sys.executable, "-c", meet, *ends] for ends in ((first, second), (second, first))]
        assert [answer.problem for answer in ask_all(commands, limit_s=30)] == [None, None]


def test_a_probe_that_fails_or_hangs_leaves_the_default():
    assert within(5, lambda: 1, 0) == 1
    assert within(5, lambda: [][0], 7) == 7
    assert within(0.05, lambda: time.sleep(1) or 1, 7) == 7


# The host


def test_a_quota_of_version_2_is_the_least_of_the_groups_above(tmp_path):
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "job" / "step" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "job" / "memory.max").write_text(f"{2**31}\n")
    folders = host.cgroup_folders("0::/job/step\n", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n", "cpu")
    assert host.cpu_quota(folders) == 1.5
    assert host.memory_limit(folders) == 2**31


def test_a_quota_of_version_1_is_that_of_its_controller(tmp_path):
    group = tmp_path / "cpu" / "docker"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    mounts = f"cgroup {tmp_path}/cpu cgroup rw,cpu 0 0\ncgroup {tmp_path}/memory cgroup rw,memory 0 0\n"
    assert host.cpu_quota(host.cgroup_folders("2:memory:/\n1:cpu,cpuacct:/docker\n", mounts, "cpu")) == 0.5


def test_a_number_that_means_no_limit_is_none(tmp_path):
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host.memory_limit([(1, tmp_path)]) is None


def test_interfaces_that_are_up_have_their_speed_where_the_kernel_knows_it(tmp_path):
    for name, state, speed in (("eth0", "up", "10000"), ("eth1", "up", "-1"), ("eth2", "down", "1000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "operstate").write_text("unknown\n")
    expected = (Interface(name="eth0", speed_mbit=10_000), Interface(name="eth1"), Interface(name="lo"))
    assert host.interfaces(tmp_path) == expected


def test_adapters_that_are_not_active_do_not_count(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert host.infiniband(tmp_path) == ("mlx5_0, 100 Gb/sec (4X EDR)",)


def test_this_hosts_own_facts_are_possible():
    cpu, memory = host.cpu(), host.memory()
    assert 0 < cpu.usable <= cpu.num_cores
    assert memory.total_bytes is None or memory.total_bytes > 2**20
    soft, hard = host.open_files()
    assert 0 < soft <= hard


def test_a_name_that_leads_nowhere_does_not_resolve():
    assert host.resolves("127.0.0.1")
    assert not host.resolves("no such name")


# GPUs, with a stand-in for NVIDIA's tool

TOOL = """#!/bin/sh
case "$1" in
--query-gpu=*compute_cap*) {newer} ;;
--query-gpu=*) echo "0, GPU-a, NVIDIA A100, 550.54, 40960, 39000, Disabled, Default" ;;
--query-compute-apps=*) echo "GPU-a, 77, 1024, /opt/x, y/train" ; echo "GPU-a, 78, 30, nvidia-cuda-mps-server" ;;
*) echo "| NVIDIA-SMI 550.54    Driver Version: 550.54    CUDA Version: 12.4 |" ;;
esac
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    def write(text: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    return write


def test_the_driver_tells_gpus_processes_and_its_newest_cuda(tool):
    line = "0, GPU-a, NVIDIA A100, 550.54, 40960, 39000, Enabled, Exclusive_Process, 8.0"
    tool(TOOL.format(newer=f'echo "{line}"'))
    driver = gpus.ask_driver()
    assert (driver.version, driver.cuda, driver.problem) == ("550.54", "12.4", None)
    (gpu,) = driver.gpus
    assert (gpu.name, gpu.memory_bytes, gpu.capability) == ("NVIDIA A100", 40 * 2**30, (8, 0))
    assert gpu.mig
    assert gpu.exclusive
    assert gpu.processes == (GpuProcess(pid=77, name="train", memory_bytes=2**30),)


def test_an_older_driver_is_asked_for_less(tool):
    refusal = "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2"
    tool(TOOL.format(newer=refusal))
    (gpu,) = gpus.ask_driver().gpus
    assert (gpu.name, gpu.capability) == ("NVIDIA A100", None)


def test_a_driver_that_fails_is_quoted(tool):
    tool("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver.'\nexit 9\n")
    assert "could not communicate" in (gpus.ask_driver().problem or "")


def test_a_driver_that_hangs_is_given_up(tool, monkeypatch):
    monkeypatch.setattr(gpus, "_LIMIT_S", 0.3)
    tool("#!/bin/sh\nsleep 60\n")
    assert gpus.ask_driver().problem == "no answer within 0.3 s"


def test_memory_that_the_driver_does_not_tell_is_unknown():
    _, ((_, gpu),) = gpus.parse_gpus("0, GPU-a, GB10, 580.1, [N/A], [N/A], [N/A], Default, 12.1")
    assert (gpu.memory_bytes, gpu.free_bytes, gpu.capability) == (None, None, (12, 1))


def test_mps_is_seen_by_its_process(tmp_path):
    assert not gpus.mps_runs(tmp_path)
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "comm").write_text("nvidia-cuda-mps\n")
    assert gpus.mps_runs(tmp_path)


def test_no_secret_is_written_down():
    assert relevant_environment({"TOKEN": "x", "SLURM_JOB_ID": "1", "SLURM_PASSWORD": "y"}) == {"SLURM_JOB_ID": "1"}


def test_variables_are_text_whatever_bytes_they_hold():
    found = relevant_environment({"MASTER_ADDR": os.fsdecode(b"host\xff")})
    assert found == {"MASTER_ADDR": "host\ufffd"}


def test_a_number_of_any_length_is_no_count():
    assert Facts(environment={"RANK": "9" * 5000}).count("RANK") is None


def test_without_a_folder_for_temporary_files_commands_answer_and_the_all_reduce_says_why_not(monkeypatch):
    def refuse(*args, **keywords):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    assert ask([sys.executable, "-c", "print('hello')"], limit_s=30).text == "hello\n"
    assert "temporary" in (loopback.measure().problem or "")
