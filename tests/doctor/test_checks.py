"""What the doctor makes of facts: machines nobody has at hand, described in a few lines each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cannikin.doctor.checks import KNOWN_VARIABLES, LEVELS, Diagnosis, Finding, diagnose
from cannikin.doctor.probes import Facts, LoopbackFacts, TorchFacts

SOURCE = Path(__file__).parents[2] / "src" / "cannikin"

CPU_TORCH = TorchFacts(version="2.13.0+cpu")
CUDA_TORCH = TorchFacts(version="2.11.0", build="CUDA 12.8", backends=("gloo", "nccl"))
LAPTOP = Facts(
    torch=CPU_TORCH,
    num_cores=8,
    mechanisms={"portable": None, "hosts": "network namespaces need root"},
)
MIXED_BOX = replace(LAPTOP, torch=replace(CUDA_TORCH, devices=("A100", "A100", "T4")), num_gpus=3)


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
    assert find(diagnosis, "GPUs").text == "unlike GPUs: 2 x A100, T4"
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


@pytest.mark.parametrize("backends", [(), ("mpi",)], ids=["no distributed", "no gloo"])
def test_without_process_groups_training_is_impossible(backends):
    assert not diagnose(replace(LAPTOP, torch=replace(CPU_TORCH, backends=backends))).possible


def test_a_backend_that_is_asked_for_and_not_there_stops_a_run():
    diagnosis = diagnose(under(LAPTOP, CANNIKIN_BACKEND="nccl"))
    assert not diagnosis.possible
    assert "CANNIKIN_BACKEND asks for nccl" in find(diagnosis, "backends").text


# GPUs


def test_gpus_that_torch_cannot_use_are_a_warning():
    diagnosis = diagnose(replace(MIXED_BOX, torch=CPU_TORCH))
    assert find(diagnosis, "use").level == "warning"
    assert "built for CPU, can use none of 3 GPUs" in find(diagnosis, "use").text
    assert "3 GPUs cannot be used" in diagnosis.summary


def test_gpus_that_are_hidden_from_torch_come_with_that_reason():
    hidden = under(replace(MIXED_BOX, torch=CUDA_TORCH), CUDA_VISIBLE_DEVICES="")
    assert "CUDA_VISIBLE_DEVICES= hides them" in find(diagnose(hidden), "use").text


# Host and loopback


def test_eight_ranks_without_omp_num_threads_fight_for_the_cores():
    finding = find(diagnose(under(MIXED_BOX, LOCAL_WORLD_SIZE="8")), "threads")
    assert (finding.level, finding.advice) == ("warning", "Set OMP_NUM_THREADS=1.")


@pytest.mark.parametrize(
    ("threads", "ranks", "level"),
    [("2", "4", "ok"), ("4", "4", "warning"), ("many", "4", "warning"), ("0", "2", "warning"), ("1", "16", "warning")],
)
def test_threads_of_all_ranks_must_fit_the_cores(threads, ranks, level):
    facts = under(LAPTOP, OMP_NUM_THREADS=threads, LOCAL_WORLD_SIZE=ranks)
    assert find(diagnose(facts), "threads").level == level


def test_what_gloo_reaches_is_said_to_be_loopback():
    good = diagnose(replace(LAPTOP, loopback=LoopbackFacts(latency_s=2e-4, bytes_per_s=1.2e9)))
    assert "loopback: 200 microseconds per small all-reduce, 1.2 GB/s" in find(good, "gloo").text
    bad = diagnose(replace(LAPTOP, loopback=LoopbackFacts(problem="no answer within 20 s")))
    assert find(bad, "gloo").level == "warning"
    assert bad.possible
    assert "two processes of this host did not all-reduce over gloo" in bad.summary, "which a busy machine does as well"


# Launch

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}


def test_a_rank_under_torchrun_is_told_which_it_is():
    finding = find(diagnose(under(MIXED_BOX, **TORCHRUN)), "torchrun")
    assert (finding.level, finding.text) == ("ok", "rank 1 of 3")


@pytest.mark.parametrize("rank", ["3", "one"])
def test_a_rank_that_is_none_of_the_world_cannot_train(rank):
    diagnosis = diagnose(under(MIXED_BOX, **(TORCHRUN | {"RANK": rank})))
    assert not diagnosis.possible
    assert "is no rank" in find(diagnosis, "torchrun").text


def test_a_rank_without_a_world_size_would_train_alone():
    finding = find(diagnose(under(LAPTOP, RANK="0")), "torchrun")
    assert (finding.level, finding.limits) == ("warning", "ranks do not know of one another")


def test_more_ranks_than_gpus_need_gloo():
    crowded = under(MIXED_BOX, **(TORCHRUN | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}))
    assert "CANNIKIN_BACKEND=gloo" in find(diagnose(crowded), "ranks").advice
    assert find(diagnose(under(crowded, CANNIKIN_BACKEND="gloo")), "ranks").level == "note"


SLURM = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2"}


def test_slurm_tasks_that_are_ranks_need_torchs_variables():
    facts = under(MIXED_BOX, **SLURM, SLURM_NTASKS="6", SLURM_NTASKS_PER_NODE="3")
    assert find(diagnose(facts), "Slurm").level == "warning"
    exported = under(facts, RANK="0", WORLD_SIZE="6")
    assert find(diagnose(exported), "torchrun").level == "ok"


def test_slurm_tasks_that_start_torchrun_are_no_ranks():
    facts = under(MIXED_BOX, **SLURM, SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="1")
    assert find(diagnose(facts), "torchrun").level == "ok"


def test_slurm_says_how_many_ranks_share_the_cores():
    facts = under(MIXED_BOX, **SLURM, SLURM_NTASKS="16")
    assert "8 ranks of 8 threads each" in find(diagnose(facts), "threads").text


# Variables and the lab


def test_a_misspelt_variable_is_named_with_what_was_meant():
    finding = find(diagnose(under(LAPTOP, CANNIKIN_POLICE="even")), "variables")
    assert finding.level == "warning"
    assert finding.advice == "Did you mean CANNIKIN_POLICY?"


def test_every_variable_that_the_source_reads_is_known():
    read = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"\bCANNIKIN_[A-Z_]+\b", path.read_text())}
    assert read == set(KNOWN_VARIABLES)


def test_mechanisms_of_the_lab_say_why_they_cannot_be_had():
    diagnosis = diagnose(LAPTOP)
    assert find(diagnosis, "portable").level == "ok"
    assert find(diagnosis, "hosts").text == "cannot be had here: network namespaces need root"


# Laws

values = st.sampled_from(["", "0", "1", "3", "64", "-1", "x", "localhost", "even", "gloo", "2.5"])
names = st.sampled_from(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "SLURM_JOB_ID"),
        *("SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "CANNIKIN_POLICY", "CANNIKIN_X"),
        *("CANNIKIN_BACKEND", "CUDA_VISIBLE_DEVICES"),
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
