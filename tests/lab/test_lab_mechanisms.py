"""Which mechanism is used and why, the commands it runs, and which rank's failure counts."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from cannikin.errors import MechanismError
from cannikin.lab.cluster import LabCluster, Slowdown
from cannikin.lab.mechanisms import MECHANISMS, choose, hosts, mps
from cannikin.lab.mechanisms.hosts import CpuCgroup, find_cpu_cgroup, make_group
from cannikin.lab.mechanisms.portable import Portable
from cannikin.lab.run_folder import Exit, first_failure

THREE = LabCluster(speeds=(1.0, 0.5, 0.25))
LINKED = LabCluster(speeds=(1.0, 0.5), link_bit_per_s=1e9)


@pytest.fixture
def root_with_tools(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.sys, "platform", "linux")
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: f"/sbin/{tool}")


def test_every_mechanism_says_what_it_is_and_whether_this_machine_can_have_it():
    assert list(MECHANISMS) == [mechanism.name for mechanism in MECHANISMS.values()]
    for mechanism in MECHANISMS.values():
        assert 0 < len(mechanism.summary) <= 68, "it is one line of 80 columns in the help"
        assert mechanism.unavailable() is None or mechanism.missing(THREE) is not None


def test_without_a_link_the_portable_mechanism_is_used():
    mechanism, reason = choose(THREE)
    assert (mechanism.name, reason) == ("portable", "needs no privileges")


def test_a_link_asks_for_hosts(root_with_tools):
    cluster = LabCluster(speeds=(1.0, 0.5), link_bit_per_s=1e9, sample_s=1e-3)
    mechanism, reason = choose(cluster)
    assert (mechanism.name, reason) == ("hosts", "a link asks for it")


def test_the_portable_mechanism_refuses_a_link_and_names_the_one_that_has_it():
    with pytest.raises(MechanismError, match=r"portable .* cannot slow a link: use --mechanism hosts"):
        choose(LINKED, "portable")


def test_hosts_without_root_say_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts.sys, "platform", "linux")
    with pytest.raises(MechanismError, match="need root"):
        choose(LINKED)


def test_hosts_name_the_tool_that_is_missing(root_with_tools, monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(MechanismError, match="'tc' is not on the path: install iproute2"):
        choose(LINKED)


def test_hosts_change_no_speed_in_mid_run_by_quota(root_with_tools):
    cluster = LabCluster(speeds=(1.0, 0.5), slowdowns=(Slowdown(rank=0, factor=0.5, step=5),))
    with pytest.raises(MechanismError, match="give sample_ms too"):
        choose(cluster, "hosts")


def test_a_machine_without_a_gpu_has_no_mps(monkeypatch):
    monkeypatch.setattr(mps.shutil, "which", lambda tool: None)
    with pytest.raises(MechanismError, match="nvidia-cuda-mps-control is not on the path"):
        choose(THREE, "mps")


def test_the_portable_mechanism_starts_one_torchrun_with_the_shim(tmp_path):
    layout = Portable().set_up(THREE, tmp_path, ExitStack())
    (agent,) = layout.agents
    assert agent.command[1:] == [
        *("-m", "cannikin.lab.agent", "0", f"--log-dir={tmp_path}/torchrun", "--standalone", "--nproc-per-node=3"),
        *("-m", "cannikin.lab.rank"),
    ]
    assert [rank.device.speed for rank in layout.ranks] == [1.0, 0.5, 0.25]


def test_hosts_hang_on_a_bridge_in_a_namespace_of_its_own():
    commands = [" ".join(command) for command in hosts.network_commands("x-", 2)]
    assert commands[0] == "ip netns add x-switch"
    assert "ip -n x-switch link add port1 type veth peer name eth0 netns x-1" in commands
    assert "ip -n x-1 addr add 10.77.0.102/24 dev eth0" in commands
    touched = {command.split()[2] for command in commands if command.startswith("ip -n ")}
    assert touched == {"x-switch", "x-0", "x-1"}, "the machine's own network is left alone"


def test_hosts_addresses_sort_as_their_ranks_do():
    addresses = [hosts.address(rank) for rank in range(64)]
    assert sorted(addresses) == addresses


@pytest.mark.parametrize(("bit_per_s", "burst"), [(1e9, "500000b"), (1e7, "65536b")])
def test_a_link_is_shaped_with_bursts_of_a_few_milliseconds(bit_per_s, burst):
    words = hosts.shaping("x-0", "eth0", bit_per_s)
    assert words[:8] == ["tc", "-n", "x-0", "qdisc", "add", "dev", "eth0", "root"]
    assert words[words.index("rate") + 1] == f"{bit_per_s:.0f}bit"
    assert words[words.index("burst") + 1] == burst


MOUNTS_1 = """\
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
"""


def test_the_cpu_controller_is_found_by_either_version():
    assert find_cpu_cgroup(MOUNTS_1) == CpuCgroup(version=1, path=Path("/sys/fs/cgroup/cpu,cpuacct"))
    assert find_cpu_cgroup("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n") == CpuCgroup(
        version=2, path=Path("/sys/fs/cgroup")
    )
    assert find_cpu_cgroup("proc /proc proc rw 0 0\n") is None


def test_limits_are_those_of_the_version():
    assert CpuCgroup(version=2, path=Path("/x")).limits(0.25) == [("cpu.max", "2500 10000")]
    assert ("cpu.cfs_quota_us", "2500") in CpuCgroup(version=1, path=Path("/x")).limits(0.25)


def test_a_cpu_group_is_removed_in_the_end(tmp_path, monkeypatch):
    with ExitStack() as undo:
        join = make_group(CpuCgroup(version=1, path=tmp_path), "group", 0.5, undo)
        assert (tmp_path / "group" / "cpu.cfs_quota_us").read_text() == "5000"
        assert join == tmp_path / "group" / "cgroup.procs"
        for file in (tmp_path / "group").iterdir():  # a real group's files go with it
            file.unlink()
    assert not (tmp_path / "group").exists()


def test_a_controller_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(MechanismError, match=r"no cpu quota: .*give --sample-ms instead"):
        make_group(CpuCgroup(version=1, path=tmp_path / "none"), "group", 0.5, ExitStack())


# MPS, with a stand-in for NVIDIA's tool that writes down how it is called


@pytest.fixture
def control(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvidia-cuda-mps-control"
    tool.parent.mkdir()
    log = tmp_path / "calls"
    tool.write_text(f'#!/bin/sh\necho "$@ $(cat) $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return log


def test_mps_has_a_daemon_of_its_own_that_is_stopped_in_the_end(control, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with ExitStack() as undo:
        layout = mps.Mps().set_up(THREE, tmp_path, undo)
        assert control.read_text().split() == ["-d", "3", f"{tmp_path}/mps-pipe"]
    assert control.read_text().splitlines()[1].split() == ["quit", "-t", "5", "3", f"{tmp_path}/mps-pipe"]
    (agent,) = layout.agents
    assert agent.environment["CUDA_VISIBLE_DEVICES"] == "0", "the daemon numbers what it sees from 0"
    assert agent.environment["CANNIKIN_BACKEND"] == "gloo"
    assert agent.environment["CUDA_MPS_PIPE_DIRECTORY"] == f"{tmp_path}/mps-pipe"


def test_mps_gives_every_rank_the_same_device_and_its_own_share(control, tmp_path):
    with ExitStack() as undo:
        ranks = mps.Mps().set_up(THREE, tmp_path, undo).ranks
    assert [rank.environment["LOCAL_RANK"] for rank in ranks] == ["0", "0", "0"]
    assert [rank.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for rank in ranks] == ["57", "28", "14"]
    assert {rank.device for rank in ranks} == {None}


def test_a_daemon_that_does_not_start_is_an_error_with_its_words(control, tmp_path):
    tool = tmp_path / "bin" / "nvidia-cuda-mps-control"
    tool.write_text("#!/bin/sh\necho no device >&2\nexit 1\n")
    with ExitStack() as undo, pytest.raises(MechanismError, match="nvidia-cuda-mps-control -d failed: no device"):
        mps.Mps().set_up(THREE, tmp_path, undo)


# One GPU over NCCL


def test_ranks_that_share_a_gpu_over_nccl_are_hosts_to_nccl_and_spin(control, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with ExitStack() as undo:
        layout = MECHANISMS["gpu"].set_up(THREE, tmp_path, undo)
        assert control.read_text().split() == ["-d", "3", f"{tmp_path}/mps-pipe"]
    (agent,) = layout.agents
    assert {rank.environment["CUDA_DEVICE_MAX_CONNECTIONS"] for rank in layout.ranks} == {"32"}
    assert agent.environment["CUDA_MPS_PIPE_DIRECTORY"] == f"{tmp_path}/mps-pipe"
    assert "CANNIKIN_BACKEND" not in agent.environment
    assert len({rank.environment["NCCL_HOSTID"] for rank in layout.ranks}) == 3
    assert all("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in rank.environment for rank in layout.ranks)
    assert [(rank.spins, rank.device.speed) for rank in layout.ranks] == [(True, speed) for speed in THREE.speeds]


def test_ranks_share_a_gpu_by_turns_where_there_is_no_mps(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    with ExitStack() as undo:
        (agent,) = MECHANISMS["gpu"].set_up(THREE, tmp_path, undo).agents
    assert agent.environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert "by turns" in MECHANISMS["gpu"].words(THREE)


# Which rank failed first


def own(rank: int, status: int, at_s: float) -> Exit:
    return Exit(rank=rank, status=status, at_s=at_s)


def bereft(rank: int, at_s: float) -> Exit:
    return Exit(rank=rank, status=1, at_s=at_s, lost_peer=True)


def seen(rank: int, status: int) -> Exit:
    return Exit(rank=rank, status=status)


@pytest.mark.parametrize(
    ("exits", "expected"),
    [
        ([own(0, 0, 1.0), own(1, 0, 2.0)], None),
        ([own(0, 1, 5.2), own(1, 3, 5.1), seen(0, 1), seen(1, 3)], (1, 3)),
        ([own(0, 1, 5.2), seen(1, -9), seen(0, 1)], (1, 137)),  # the others fail in its wake
        ([seen(0, -6), own(1, 3, 5.1), seen(1, 3)], (1, 3)),  # gloo aborts where its peer is gone
        ([seen(0, -6), seen(1, -15)], (0, 134)),
        ([bereft(0, 5.1), seen(1, -6), seen(0, 1)], (1, 134)),  # what gloo aborts by itself, its peers outlive
        ([bereft(0, 5.1), own(1, 3, 5.2), seen(0, 1), seen(1, 3)], (1, 3)),
        ([bereft(0, 5.1), seen(0, 1)], (0, 1)),
        ([seen(0, -15), seen(1, 2)], (1, 2)),  # it never reached the script
        ([], None),
    ],
)
def test_the_failure_that_counts_is_the_first_one(exits, expected):
    assert first_failure(exits) == expected
