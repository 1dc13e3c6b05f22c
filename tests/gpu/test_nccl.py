"""Several ranks on one GPU over NCCL: made in every form that scripts use, measured right, and equal to one process."""

from __future__ import annotations

import nccl_cases
import parity_cases
import pytest
import torch
from ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SPEEDS = (1.0, 0.5, 0.25, 0.7)
NCCL_FORMS = ["nothing named", "nccl", "both", "eager"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", NCCL_FORMS)
def test_nccl_is_found_in_every_form_of_a_group(form, mps, tmp_path):
    for found in run_ranks(nccl_cases.carriers, 2, str(tmp_path), mps, form, timeout_s=100):
        assert found == ["nccl", "nccl", "nccl"]


def truth_of(form, world_size, mps, tmp_path):
    speeds = SPEEDS[:world_size]
    first, *_ = run_ranks(nccl_cases.learned, world_size, str(tmp_path), mps, form, speeds, 90, timeout_s=100)
    return first


def errors_of(learned: dict[str, object]) -> dict[str, float]:
    """The worst relative error of each quantity."""
    names = ("forward", "backward", "overlap", "communication", "step")
    return {name: max(abs(a / b - 1) for a, b in zip(*learned[name], strict=True)) for name in names}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("form", ["nothing named", "gloo"])
def test_what_is_learned_of_ranks_of_known_speed_is_true_within_5_percent(form, world_size, mps, tmp_path):
    learned = truth_of(form, world_size, mps, tmp_path)
    assert max(errors_of(learned).values()) <= 0.05, learned


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["nccl", "both", "eager"])
def test_every_form_of_a_group_is_measured_as_well(form, mps, tmp_path):
    learned = truth_of(form, 3, mps, tmp_path)
    assert max(errors_of(learned).values()) <= 0.05, learned


@pytest.mark.timeout(120)
def test_forward_is_true_where_batch_norm_statistics_are_summed_ahead_of_the_gradients(mps, tmp_path):
    settings = str(tmp_path), mps, "nothing named", SPEEDS[:3], 90, True
    learned, *_ = run_ranks(nccl_cases.learned, 3, *settings, timeout_s=100)
    errors = errors_of(learned)
    assert max(errors[name] for name in ("forward", "backward", "step")) <= 0.05, learned


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["nccl", "gloo"])
def test_norms_take_little_of_the_gpus_memory(form, mps, tmp_path):
    for num_bytes in run_ranks(nccl_cases.memory_beyond_ddp, 2, str(tmp_path), mps, form, timeout_s=100):
        assert num_bytes <= 256 * 2**20  # a workspace of cuBLAS for each of torch's streams would be 1 GiB


LAUNCHES = {
    "cases on 2": (2, [*parity_cases.CASES]),
    "cases on 3": (3, [*parity_cases.CASES, *parity_cases.MORE_CASES]),
    "cases on 4": (4, [*parity_cases.CASES]),
    "compiled on 2": (2, [*parity_cases.COMPILE_CASES, *parity_cases.INDUCTOR_CASES]),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_unequal_ranks_over_nccl_end_with_the_parameters_of_one_process(launch, mps, tmp_path):
    world_size, names = LAUNCHES[launch]
    wrong: dict[object, object] = {}
    for errors in run_ranks(nccl_cases.run_cases, world_size, str(tmp_path), mps, "nccl", names, timeout_s=280):
        limits = {key: {"float32": 1e-5, "float64": 1e-12}[key[1]] for key in errors}
        wrong |= {key: error for key, error in errors.items() if isinstance(error, str) or error > limits[key]}
        assert {name for name, _ in errors} == set(names), wrong
    assert not wrong
