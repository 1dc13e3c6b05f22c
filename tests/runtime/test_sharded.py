"""Modules under `fully_shard`: unequal ranks equal one process, and what they measure of themselves is true."""

from __future__ import annotations

from functools import cache

import pytest
import sharded_cases
from ranks import RankError, run_ranks
from sharded_cases import ALL_CASES, dtypes_of

# One launch serves many tests, and ranks want the cores: all in one process.

LIMITS = {"float32": 1e-5, "float64": 1e-12}
BFLOAT16_LIMIT = 2e-2  # gradients are rounded to 8 bits on each rank before they are summed; unweighted ones: 0.1


@cache
def errors_of(group: str, world_size: int) -> dict[tuple[str, str], float | str]:
    """The worst error over ranks of each case and dtype in one launch; words where it raised."""
    keys = [(name, dtype) for name, case in ALL_CASES[group].items() for dtype in dtypes_of(case)]
    try:
        answers = run_ranks(sharded_cases.run_cases, world_size, group, timeout_s=100)
    except RankError as error:  # told to every case: the launch is not tried again
        return dict.fromkeys(keys, str(error))
    worst: dict[tuple[str, str], float | str] = {}
    for key in keys:
        found = [answer.get(key, "not reached: a case before it raised") for answer in answers]
        words = [word for word in found if isinstance(word, str)]
        worst[key] = "\n".join(words) if words else max(found)
    return worst


def check(group: str, world_size: int, name: str, dtype: str) -> None:
    error = errors_of(group, world_size)[name, dtype]
    assert not isinstance(error, str), error
    rounded = "mp_policy" in ALL_CASES[group][name].options
    assert error <= (BFLOAT16_LIMIT if rounded else LIMITS[dtype])


def pairs(group: str) -> list[tuple[str, str]]:
    return [(name, dtype) for name, case in ALL_CASES[group].items() for dtype in dtypes_of(case)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("name", "dtype"), pairs("cases"))
def test_unequal_ranks_of_a_sharded_module_equal_one_process_on_the_whole_batches(world_size, name, dtype):
    check("cases", world_size, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), pairs("more"))
def test_three_unequal_ranks_of_a_sharded_module_equal_one_process(name, dtype):
    check("more", 3, name, dtype)


@pytest.mark.parametrize(("name", "dtype"), pairs("replicated"))
def test_two_replicas_of_two_shards_equal_one_process(name, dtype):
    check("replicated", 4, name, dtype)
