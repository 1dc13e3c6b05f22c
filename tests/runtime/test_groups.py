"""Models over some of the ranks: alone they adapt, beside ranks that hold other parts of a model they keep a split."""

from __future__ import annotations

from functools import partial

import group_cases as cases
import pytest
from ranks import run_ranks
from told import run_cases, values

CASES = {
    "two pairs": partial(cases.alone, of="two pairs"),
    "one pair": partial(cases.alone, of="one pair"),
    "beside": cases.beside,  # makes a mesh, whose groups stay
    "process_group": partial(cases.in_a_mesh, by="process_group"),
    "device_mesh": partial(cases.in_a_mesh, by="device_mesh"),
    "process_group, pinned": partial(cases.in_a_mesh, by="process_group", local_batches=[6, 2]),
    "device_mesh, pinned": partial(cases.in_a_mesh, by="device_mesh", local_batches=[6, 2]),
    "tensor parallel": cases.tensor_parallel,
    "tensor parallel, pinned": partial(cases.tensor_parallel, local_batches=[6, 2]),
}


@pytest.fixture(scope="module")
def told():
    """What every case said on each of four ranks, in one launch."""
    return run_ranks(run_cases, 4, CASES, timeout_s=90)


@pytest.fixture(scope="module")
def whole():
    """What one process has learned that trains on the whole batches, in the same order: weights, and outputs."""
    (told,) = run_ranks(run_cases, 1, {"whole": cases.whole, "outputs": cases.whole_outputs}, timeout_s=60)
    return told


def test_ranks_beside_a_group_are_those_that_share_another_one(told):
    assert values(told, "beside") == [([], [], [1]), ([], [], [0]), ([], [], [3]), ([], [], [2])]


@pytest.mark.parametrize("case", ["two pairs", "process_group, pinned", "device_mesh, pinned"])
def test_a_model_over_some_of_the_ranks_is_one_process_on_the_whole_batch(told, whole, case):
    answers = values(told, case)
    column = [0, 0, 1, 1] if case == "two pairs" else [0, 1, 0, 1]
    for rank, (group_rank, group_size, _, weights) in enumerate(answers):
        assert (group_rank, group_size) == (rank % 2 if case == "two pairs" else rank // 2, 2)
        assert weights == pytest.approx(whole["whole"], abs=1e-6)
    for number in (0, 1):
        samples = [sample for one, answer in zip(column, answers, strict=True) if one == number for sample in answer[2]]
        assert sorted(samples) == sorted([*range(cases.NUM_SAMPLES)] * 2)


def test_ranks_without_a_model_are_not_asked(told, whole):
    one, other, *rest = values(told, "one pair")
    assert rest == [None, None]
    assert one[3] == other[3] == pytest.approx(whole["whole"], abs=1e-6)


def test_a_model_that_is_cut_over_ranks_trains_on_a_pinned_split_as_one_process(told, whole):
    for outputs in values(told, "tensor parallel, pinned"):
        assert outputs == pytest.approx(whole["outputs"], abs=1e-6)


@pytest.mark.parametrize("by", ["process_group", "device_mesh", "tensor parallel"])
def test_a_plan_that_adapts_beside_tensor_parallel_is_refused_on_every_rank(told, by):
    for rank, answers in enumerate(told):
        assert answers[by].kind == "InvalidInputError"
        assert "give the loader local_batches=" in answers[by].text
        assert f"rank {rank} with [{rank ^ 1}]" in answers[by].text
