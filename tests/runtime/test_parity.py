"""Parity: ranks with uneven, changing batches end with the parameters of one process on the whole batches.

Real processes, gloo, CPU. The training scripts are in `parity_cases`; a launch runs many of them.
"""

from __future__ import annotations

import math
import shutil
from functools import cache

import parity_cases
import pytest
from parity_cases import (
    ALONE_CASES,
    CASES,
    COMPILE_CASES,
    INDUCTOR_CASES,
    MORE_CASES,
    RateNote,
    dtypes_of,
)
from ranks import RankError, run_ranks

# One launch serves many tests, and ranks want the cores: all in one process.

LIMITS = {"float32": 1e-5, "float64": 1e-12}


@cache
def errors_of(launch: str, world_size: int) -> dict[tuple[str, str], float | str]:
    """The worst error over ranks of each case and dtype in one launch; words where it raised."""
    names = {
        "cases": [*CASES],
        "more": [*MORE_CASES],
        "compiled": [*COMPILE_CASES],
        "inductor": [*INDUCTOR_CASES],
        "alone": [*ALONE_CASES],
    }[launch]
    worker = parity_cases.run_cases_alone if launch == "alone" else parity_cases.run_cases
    worst: dict[tuple[str, str], float | str] = {}
    try:
        answers = run_ranks(worker, world_size, names, timeout_s=100)
    except RankError as error:  # told to every case: the launch is not tried again
        return dict.fromkeys(pairs(names), str(error))
    for rank, errors in enumerate(answers):
        for key, error in errors.items():
            if isinstance(error, str):
                worst[key] = f"{worst.get(key, '')}rank {rank}: {error}\n"
            elif not isinstance(worst.get(key), str):
                worst[key] = max(error, worst.get(key, 0.0))
    return worst


def check(launch: str, world_size: int, name: str, dtype: str) -> None:
    error = errors_of(launch, world_size).get((name, dtype), "not reached: a case before it raised")
    assert not isinstance(error, str), error
    assert error <= LIMITS[dtype]


def pairs(*groups: object) -> list[tuple[str, str]]:
    return [(name, dtype) for group in groups for name in group for dtype in dtypes_of(name)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("name", "dtype"), pairs(CASES))
def test_unequal_ranks_end_with_the_parameters_of_one_process_on_the_whole_batches(world_size, name, dtype):
    check("cases", world_size, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), pairs(MORE_CASES))
def test_three_unequal_ranks_end_with_the_parameters_of_one_process_on_the_whole_batches(name, dtype):
    check("more", 3, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), pairs(COMPILE_CASES))
def test_compiled_models_on_unequal_ranks_equal_one_uncompiled_process(name, dtype):
    check("compiled", 2, name, dtype)


def test_dynamo_compiles_the_network_and_none_of_our_code():
    for graphs in run_ranks(parity_cases.graphs, 2):
        assert all(any("linear" in name for name in graph) for graph in graphs), graphs
        assert 1 <= len(graphs) <= 4, "one graph of fixed size, one of any, one of size 1"


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
@pytest.mark.parametrize(("name", "dtype"), pairs(INDUCTOR_CASES))
def test_a_model_compiled_by_inductor_on_unequal_ranks_equals_one_uncompiled_process(name, dtype):
    check("inductor", 2, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), pairs(ALONE_CASES))
def test_a_script_without_a_process_group_trains_as_without_us(name, dtype):
    check("alone", 1, name, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_models_trained_in_turn_do_not_disturb_each_other(world_size):
    for errors in run_ranks(parity_cases.two_models, world_size):
        assert all(error <= LIMITS[dtype] for dtype, error in errors.items()), errors


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_even_plan_gives_raw_ddps_parameters(world_size):
    for errors in run_ranks(parity_cases.even_and_raw, world_size):
        assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_compressed_gradient_is_right_to_the_precision_of_its_format(world_size):
    for errors in run_ranks(parity_cases.compressed, world_size):
        assert errors["fp16_compress_wrapper"] <= 2e-3
        assert errors["bf16_compress_wrapper"] <= 2e-2
        assert min(errors.values()) > 1e-6, "nothing was compressed"


def test_the_norms_measured_on_the_way_are_those_of_the_local_and_of_the_whole_batch():
    first, other = run_ranks(parity_cases.norms, 2)
    assert max(abs(error) for errors in (*first, *other) for error in errors) <= 1e-12


def rates_of(policy: str, optimizer: str) -> list[RateNote]:
    """The rates on all ranks, after checking that ranks agree and that the parameters follow from them."""
    (notes, error), *others = run_ranks(parity_cases.rates, 3, policy, optimizer)
    assert len(notes) == 40
    assert all([note.inside for note in other] == [note.inside for note in notes] for other, _ in others)
    assert max(error, *(error for _, error in others)) <= LIMITS["float64"]
    return notes


def factors(note: RateNote) -> list[float]:
    return [inside / outside for inside, outside in zip(note.inside, note.outside, strict=True)]


def test_adascale_multiplies_every_groups_rate_by_the_gain_within_the_step_only():
    notes = rates_of("scripted", "grouped")
    assert {note.total_batch for note in notes} == {12, 16, 24}
    for note in notes:
        assert note.outside == (0.1, 0.02), "outside of step the rates are the user's own"
        B, B0, phi = note.total_batch, 12, note.noise_scale
        gain = 1.0 if math.isnan(phi) else (phi / B0 + 1) / (phi / B + 1)
        assert factors(note) == pytest.approx([gain, gain], rel=1e-12)
    assert len({note.noise_scale for note in notes if note.total_batch != 12}) > 1, "the noise never changed"


def test_the_square_root_rule_multiplies_adamws_rate_by_the_root_of_the_batch_within_the_step_only():
    notes = rates_of("scripted", "adamw")
    assert {note.total_batch for note in notes} == {12, 16, 24}
    for note in notes:
        assert note.outside == (2e-3,)
        assert factors(note) == pytest.approx([math.sqrt(note.total_batch / 12)], rel=1e-12)


@pytest.mark.parametrize("optimizer", ["grouped", "adamw"])
def test_ranks_stay_together_while_the_real_policy_changes_batches_and_rates(optimizer):
    assert all(note.outside in ((0.1, 0.02), (2e-3,)) for note in rates_of("cannikin", optimizer))
