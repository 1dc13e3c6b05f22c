"""What the doctor makes of facts: machines nobody has at hand, described in a few lines each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cannikin.doctor.diagnosis import Diagnosis, diagnose
from cannikin.doctor.facts import (
    CpuFacts,
    Facts,
    GpuFacts,
    GpuProcess,
    Interface,
    LoopbackFacts,
    MemoryFacts,
    TorchFacts,
)
from cannikin.doctor.findings import LEVELS, Finding
from cannikin.doctor.on_launch import KNOWN_VARIABLES

SOURCE = Path(__file__).parents[2] / "src" / "cannikin"
GIB = 2**30

CPU_TORCH = TorchFacts(version="2.13.0+cpu")
CUDA_TORCH = TorchFacts(
    version="2.11.0", cuda="12.8", backends=("gloo", "nccl"), architectures=("sm_75", "sm_80", "sm_90", "compute_90")
)
LAPTOP = Facts(
    torch=CPU_TORCH,
    extras={"plotly": None, "scikit-learn": "1.9"},
    cpu=CpuFacts(num_cores=8, num_allowed=8),
    memory=MemoryFacts(total_bytes=16 * GIB, available_bytes=9 * GIB, shm_bytes=8 * GIB, shm_free_bytes=8 * GIB),
    open_files=(1024, 4096),
    interfaces=(Interface(name="lo", virtual=True), Interface(name="wlan0")),
    host_resolves=True,
    mechanisms={"portable": None, "hosts": "network namespaces need root"},
)


def gpu(index: int, name: str, capability=(8, 0), **facts) -> GpuFacts:
    values = {"memory_bytes": 40 * GIB, "free_bytes": 39 * GIB} | facts
    return GpuFacts(index=index, name=name, capability=capability, **values)


MIXED_BOX = replace(
    LAPTOP,
    torch=replace(CUDA_TORCH, devices=("A100", "A100", "T4")),
    gpus=(gpu(0, "A100"), gpu(1, "A100"), gpu(2, "T4", (7, 5), memory_bytes=15 * GIB, free_bytes=14 * GIB)),
    driver="570.1",
    driver_cuda="12.8",
    open_files=(65536, 65536),
)


def under(facts: Facts, **environment: str) -> Facts:
    return replace(facts, environment={**facts.environment, **environment})


def find(diagnosis: Diagnosis, subject: str) -> Finding:
    """The worst finding about a subject."""
    found = [finding for finding in diagnosis.findings if finding.subject == subject]
    assert found, f"nothing about {subject} in {[finding.subject for finding in diagnosis.findings]}"
    return max(found, key=lambda finding: LEVELS.index(finding.level))


def levels(facts: Facts) -> set[str]:
    return {finding.level for finding in diagnose(facts).findings}


# Whole machines


def test_a_laptop_without_a_gpu_can_train_and_is_told_on_what():
    diagnosis = diagnose(LAPTOP)
    assert diagnosis.possible
    assert levels(LAPTOP) == {"ok", "note"}
    assert diagnosis.summary == "What will limit a run: no GPU, so ranks share 8 CPU cores."


def test_a_mixed_box_is_what_cannikin_is_for():
    diagnosis = diagnose(MIXED_BOX)
    assert levels(MIXED_BOX) == {"ok", "note"}
    assert find(diagnosis, "kinds").text == "unlike GPUs: 2 x A100, 1 x T4"
    assert find(diagnosis, "GPU 2").text == "T4, 15 GiB, 14 GiB free, capability 7.5"
    assert diagnosis.summary == "Nothing here will limit a run beyond what its ranks can compute."


def test_without_torch_training_is_impossible_and_the_line_that_installs_it_is_there():
    diagnosis = diagnose(replace(LAPTOP, torch=None, torch_problem=""))
    assert not diagnosis.possible
    assert "pip install 'cannikin[torch]'" in find(diagnosis, "PyTorch").advice
    assert diagnosis.summary == "Training is impossible as things are: PyTorch is not installed."


def test_a_torch_that_cannot_be_imported_is_quoted():
    diagnosis = diagnose(replace(LAPTOP, torch=None, torch_problem="ImportError: libcudnn.so.9: not found"))
    assert find(diagnosis, "PyTorch").level == "blocker"
    assert "libcudnn.so.9" in find(diagnosis, "PyTorch").text


# Software


def test_an_old_torch_is_a_warning_with_the_version_to_get():
    finding = find(diagnose(replace(LAPTOP, torch=TorchFacts(version="2.4.1+cpu"))), "PyTorch")
    assert finding.level == "warning"
    assert "torch>=2.6" in finding.advice


@pytest.mark.parametrize(
    "torch",
    [replace(CPU_TORCH, distributed=False, backends=()), replace(CPU_TORCH, backends=("mpi",))],
    ids=["no distributed", "no gloo"],
)
def test_without_process_groups_training_is_impossible(torch):
    assert not diagnose(replace(LAPTOP, torch=torch)).possible


def test_a_backend_that_is_asked_for_and_not_there_stops_a_run():
    diagnosis = diagnose(under(LAPTOP, CANNIKIN_BACKEND="nccl"))
    assert not diagnosis.possible
    assert "CANNIKIN_BACKEND asks for nccl" in find(diagnosis, "backends").text


# GPUs


@pytest.mark.parametrize(
    ("driver_cuda", "level"), [("12.8", "ok"), ("13.0", "ok"), ("12.4", "note"), ("11.8", "warning")]
)
def test_a_driver_may_be_older_than_torchs_cuda_only_within_a_major_version(driver_cuda, level):
    assert find(diagnose(replace(MIXED_BOX, driver_cuda=driver_cuda)), "driver").level == level


def test_gpus_that_a_cpu_build_cannot_use_are_a_warning():
    diagnosis = diagnose(replace(MIXED_BOX, torch=CPU_TORCH))
    assert find(diagnosis, "use").level == "warning"
    assert "3 GPUs cannot be used by this PyTorch" in diagnosis.summary


def test_gpus_that_torch_cannot_use_come_with_its_reason():
    torch = replace(CUDA_TORCH, devices=(), problem="CUDA initialization: driver too old")
    assert "driver too old" in find(diagnose(replace(MIXED_BOX, torch=torch)), "use").text
    hidden = under(replace(MIXED_BOX, torch=torch), CUDA_VISIBLE_DEVICES="")
    assert "CUDA_VISIBLE_DEVICES= hides them" in find(diagnose(hidden), "use").text


def test_gpus_left_out_on_purpose_are_only_noted():
    torch = replace(CUDA_TORCH, devices=("A100",))
    finding = find(diagnose(under(replace(MIXED_BOX, torch=torch), CUDA_VISIBLE_DEVICES="0")), "use")
    assert (finding.level, finding.text) == ("note", "CUDA_VISIBLE_DEVICES=0 leaves 1 of 3 GPUs")


@pytest.mark.parametrize(
    ("capability", "level"), [((7, 0), "warning"), ((7, 5), "ok"), ((8, 6), "ok"), ((9, 0), "ok"), ((12, 0), "ok")]
)
def test_a_gpu_without_kernels_in_this_torch_is_named(capability, level):
    box = replace(MIXED_BOX, gpus=(gpu(0, "card", capability),), torch=replace(CUDA_TORCH, devices=("card",)))
    assert find(diagnose(box), "GPU 0").level == level


def test_a_newer_gpu_needs_ptx():
    torch = replace(CUDA_TORCH, devices=("card",), architectures=("sm_80", "sm_90"))
    box = replace(MIXED_BOX, gpus=(gpu(0, "card", (10, 0)),), torch=torch)
    assert find(diagnose(box), "GPU 0").level == "warning"


def test_another_process_on_a_gpu_is_named_but_a_desktop_is_not():
    busy = gpu(0, "A100", processes=(GpuProcess(pid=7, name="other", memory_bytes=9 * GIB),))
    quiet = gpu(1, "A100", processes=(GpuProcess(pid=8, name="Xorg", memory_bytes=GIB // 10),))
    diagnosis = diagnose(replace(MIXED_BOX, gpus=(busy, quiet)))
    assert "in use by other (pid 7)" in find(diagnosis, "GPU 0").text
    assert find(diagnosis, "GPU 1").level == "ok"


def test_mig_mps_and_exclusive_mode_are_told():
    box = replace(MIXED_BOX, gpus=(gpu(0, "A100", mig=True, exclusive=True),))
    assert find(diagnose(box), "MIG").level == "note"
    assert "one rank a GPU" in find(diagnose(box), "mode").text
    shared = diagnose(under(replace(box, mps=True), CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="30"))
    assert "this one has 30%" in find(shared, "MPS").text
    assert "mode" not in {finding.subject for finding in shared.findings}


def test_a_driver_that_does_not_answer_is_a_warning_with_its_words():
    diagnosis = diagnose(replace(LAPTOP, gpu_problem="no answer within 10 s"))
    assert "no answer within 10 s" in find(diagnosis, "driver").text


# Host


def test_eight_ranks_without_omp_num_threads_fight_for_the_cores():
    finding = find(diagnose(under(MIXED_BOX, LOCAL_WORLD_SIZE="8")), "threads")
    assert (finding.level, finding.advice) == ("warning", "Set OMP_NUM_THREADS=1.")


@pytest.mark.parametrize(
    ("threads", "ranks", "level"),
    [("2", "4", "ok"), ("4", "4", "warning"), ("many", "4", "warning"), ("0", "1", "warning")],
)
def test_threads_of_all_ranks_must_fit_the_cores(threads, ranks, level):
    facts = under(LAPTOP, OMP_NUM_THREADS=threads, LOCAL_WORLD_SIZE=ranks)
    assert find(diagnose(facts), "threads").level == level


def test_a_quota_counts_more_than_the_cores_of_the_machine():
    cpu = CpuFacts(num_cores=64, num_allowed=64, quota_cores=1.5)
    diagnosis = diagnose(replace(LAPTOP, cpu=cpu))
    assert "the cgroup's quota is 1.5" in find(diagnosis, "CPU").text
    assert "ranks share 1.5 CPU cores" in diagnosis.summary
    threads = find(diagnose(under(replace(LAPTOP, cpu=cpu), OMP_NUM_THREADS="2", LOCAL_WORLD_SIZE="1")), "threads")
    assert threads.level == "warning"


def test_a_tiny_dev_shm_is_a_warning_that_knows_where_it_is():
    tiny = replace(LAPTOP, memory=replace(LAPTOP.memory, shm_bytes=2**26, shm_free_bytes=2**26))
    finding = find(diagnose(tiny), "/dev/shm")
    assert finding.level == "warning"
    assert "--shm-size" in finding.advice
    assert "emptyDir" in find(diagnose(under(tiny, KUBERNETES_SERVICE_HOST="10.0.0.1")), "/dev/shm").advice
    assert "64 MiB of /dev/shm" in diagnose(tiny).summary


def test_a_full_dev_shm_is_as_bad_as_a_small_one():
    full = replace(LAPTOP, memory=replace(LAPTOP.memory, shm_free_bytes=2**20))
    assert find(diagnose(full), "/dev/shm").level == "warning"


@pytest.mark.parametrize(("limit", "level"), [(None, "ok"), (8 * GIB, "note"), (GIB, "warning"), (32 * GIB, "ok")])
def test_a_memory_limit_below_the_machines_is_told(limit, level):
    facts = replace(LAPTOP, memory=replace(LAPTOP.memory, limit_bytes=limit))
    assert find(diagnose(facts), "memory").level == level


@pytest.mark.parametrize(
    ("limits", "level"), [((65536, 65536), "ok"), ((1024, 65536), "note"), ((256, 256), "warning")]
)
def test_few_open_files_are_told(limits, level):
    assert find(diagnose(replace(LAPTOP, open_files=limits)), "open files").level == level


# Network


def test_a_slow_link_counts_only_between_hosts():
    wired = replace(MIXED_BOX, interfaces=(Interface(name="lo"), Interface(name="eth0", speed_mbit=1000)))
    assert find(diagnose(wired), "eth0").level == "ok"
    several = under(wired, WORLD_SIZE="6", LOCAL_WORLD_SIZE="3", RANK="0", MASTER_ADDR="node0", MASTER_PORT="29500")
    finding = find(diagnose(several), "eth0")
    assert finding.level == "warning"
    assert "takes it 0.8 s" in finding.text
    faster = replace(several, interfaces=(*several.interfaces, Interface(name="ib0", speed_mbit=100_000)))
    assert find(diagnose(faster), "eth0").level == "ok"
    assert find(diagnose(faster), "choice").level == "note"


@pytest.mark.parametrize(
    ("variable", "value", "is_wrong"),
    [
        ("GLOO_SOCKET_IFNAME", "wlan0", False),
        ("GLOO_SOCKET_IFNAME", "eth7", True),
        ("GLOO_SOCKET_IFNAME", "wl", True),
        ("NCCL_SOCKET_IFNAME", "wl", False),
        ("NCCL_SOCKET_IFNAME", "^docker", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
    ],
)
def test_an_interface_that_is_not_there_is_a_warning(variable, value, is_wrong):
    diagnosis = diagnose(under(LAPTOP, **{variable: value}))
    assert any(f.subject == "choice" and f.level == "warning" for f in diagnosis.findings) == is_wrong


def test_a_host_that_does_not_know_its_own_name_is_told_what_to_write():
    assert "/etc/hosts" in find(diagnose(replace(LAPTOP, host_resolves=False)), "own name").advice


def test_what_gloo_reaches_is_said_to_be_loopback():
    good = diagnose(replace(LAPTOP, loopback=LoopbackFacts(latency_s=2e-4, bytes_per_s=1.2e9)))
    assert "loopback: 200 microseconds a small all-reduce, 1.2 GB/s" in find(good, "gloo").text
    bad = diagnose(replace(LAPTOP, loopback=LoopbackFacts(problem="no answer within 20 s")))
    assert find(bad, "gloo").level == "warning"
    assert bad.possible


# Launch

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_a_rank_under_torchrun_is_told_where_it_meets_the_others():
    finding = find(diagnose(under(MIXED_BOX, **TORCHRUN)), "torchrun")
    assert finding.level == "ok"
    assert finding.text.startswith("rank 1 of 3, to meet at node0:29500")


@pytest.mark.parametrize(
    ("changes", "resolves", "words"),
    [
        ({"RANK": "3"}, True, "is no rank"),
        ({"RANK": "one"}, True, "is no rank"),
        ({"MASTER_ADDR": ""}, None, "MASTER_ADDR is not"),
        ({"MASTER_PORT": ""}, True, "MASTER_PORT is not"),
        ({"MASTER_PORT": "http"}, True, "MASTER_PORT=http is no port"),
        ({"MASTER_PORT": "70000"}, True, "MASTER_PORT=70000 is no port"),
        ({}, False, "leads to no address"),
    ],
)
def test_ranks_that_cannot_meet_cannot_train(changes, resolves, words):
    facts = under(MIXED_BOX, **(TORCHRUN | changes))
    diagnosis = diagnose(replace(facts, master_resolves=resolves))
    assert not diagnosis.possible
    assert words in find(diagnosis, "torchrun").text


def test_a_rank_without_a_world_size_would_train_alone():
    finding = find(diagnose(under(LAPTOP, RANK="0")), "torchrun")
    assert (finding.level, finding.limits) == ("warning", "ranks do not know of one another")


def test_localhost_is_no_meeting_place_of_several_hosts():
    facts = under(MIXED_BOX, **(TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "6"}))
    assert find(diagnose(facts), "torchrun").level == "warning"


def test_more_ranks_than_gpus_need_gloo():
    crowded = under(MIXED_BOX, **(TORCHRUN | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}))
    assert "CANNIKIN_BACKEND=gloo" in find(diagnose(crowded), "ranks").advice
    assert find(diagnose(under(crowded, CANNIKIN_BACKEND="gloo")), "ranks").level == "note"


SLURM = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}


def test_a_slurm_job_of_one_task_a_node_is_told_the_torchrun_that_starts_its_ranks():
    facts = under(MIXED_BOX, **SLURM, SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="1")
    finding = find(diagnose(facts), "Slurm")
    assert finding.level == "note"
    assert "torchrun --nnodes=2 --nproc-per-node=3" in finding.advice


def test_slurm_tasks_that_are_ranks_need_torchs_variables():
    facts = under(MIXED_BOX, **SLURM, SLURM_NTASKS="6", SLURM_NTASKS_PER_NODE="3")
    assert find(diagnose(facts), "Slurm").level == "warning"
    exported = under(facts, RANK="0", WORLD_SIZE="6", MASTER_ADDR="node0", MASTER_PORT="1")
    assert find(diagnose(exported), "Slurm").level == "ok"


def test_slurm_says_how_many_ranks_share_the_cores():
    facts = under(MIXED_BOX, **SLURM, SLURM_NTASKS="16")
    assert "each of 8 ranks" in find(diagnose(facts), "threads").text


def test_a_pod_with_and_without_a_training_operator():
    pod = under(LAPTOP, KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert find(diagnose(pod), "Kubernetes").level == "note"
    assert find(diagnose(under(pod, PET_NNODES="2")), "Kubernetes").level == "ok"


# Variables


def test_a_misspelt_variable_is_named_with_what_was_meant():
    finding = find(diagnose(under(LAPTOP, CANNIKIN_POLICE="even")), "variables")
    assert finding.level == "warning"
    assert finding.advice == "Did you mean CANNIKIN_POLICY?"


def test_a_policy_that_does_not_exist_stops_a_run():
    assert not diagnose(under(LAPTOP, CANNIKIN_POLICY="luck")).possible
    assert diagnose(under(LAPTOP, CANNIKIN_POLICY="lb_bsp")).possible


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE"])
def test_a_variable_that_slows_a_run_is_a_warning(name):
    assert find(diagnose(under(MIXED_BOX, **{name: "1"})), "variables").level == "warning"
    assert "variables" not in {f.subject for f in diagnose(under(MIXED_BOX, **{name: "0"})).findings}


def test_every_variable_that_the_source_reads_is_known():
    read = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"\bCANNIKIN_[A-Z_]+\b", path.read_text())}
    assert read == set(KNOWN_VARIABLES)


def test_mechanisms_of_the_lab_say_why_they_cannot_be_had():
    diagnosis = diagnose(LAPTOP)
    assert find(diagnosis, "portable").level == "ok"
    assert find(diagnosis, "hosts").text == "cannot be had here: network namespaces need root"


# Laws

values = st.sampled_from(["", "0", "1", "3", "64", "-1", "x", "localhost", "even", "gloo", "2.5", "^eth", "eth0,lo"])
names = st.sampled_from(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "SLURM_JOB_ID"),
        *("SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "CANNIKIN_POLICY", "CANNIKIN_X"),
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CANNIKIN_BACKEND", "KUBERNETES_SERVICE_HOST"),
        "CUDA_VISIBLE_DEVICES",
    )
)


@settings(max_examples=300, deadline=None)
@given(
    facts=st.sampled_from([LAPTOP, MIXED_BOX, Facts(), replace(LAPTOP, torch=None, torch_problem="")]),
    environment=st.dictionaries(names, values, max_size=6),
)
def test_whatever_the_environment_every_warning_has_advice_and_the_summary_is_one_sentence(facts, environment):
    diagnosis = diagnose(under(facts, **environment))
    for finding in diagnosis.findings:
        assert finding.level in LEVELS
        assert "\n" not in finding.text + finding.advice
        if finding.level in {"warning", "blocker"}:
            assert finding.advice.endswith((".", "?"))
    assert diagnosis.summary.endswith(".")
    assert diagnosis.possible == (not diagnosis.summary.startswith("Training is impossible"))
