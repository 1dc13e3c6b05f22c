"""Damaged states: each is refused with a StateError that changes nothing, or trains on as if nothing had been."""

from __future__ import annotations

import copy
import json
import math
import random
import warnings
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import Training
from cannikin.core.perf import Cluster, Curve
from cannikin.core.policies.cannikin import Controller
from cannikin.core.saved import number, table, whole
from cannikin.core.values import Job
from cannikin.errors import StateError
from cannikin.runtime.engine_state import read_engine_state

TRIO = Cluster(  # of ranks 1, 2 and 4 times as slow
    forward=Curve(fixed_s=np.full(3, 2e-3), per_sample_s=np.array([1e-4, 2e-4, 4e-4])),
    backward=Curve(fixed_s=np.full(3, 3e-3), per_sample_s=np.array([2e-4, 4e-4, 8e-4])),
    gammas=np.array([0.4, 1.0]),
    tails_s=np.array([5e-3, 1e-3]),
)
JOB = Job(num_ranks=3, batch_size=96, max_batch_size=384)
WRONG = [math.nan, math.inf, -math.inf, -1, 0, 2.5, 1e300, 1e-300, 10**400, -(10**9), None, "x", [], {}, True, [1] * 7]


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every entry of a state, by its path."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [p for key, part in inner for p in [(*path, key), *places(part, (*path, key))]]


def mutated(state: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The state with one to three entries changed, taken out or doubled."""
    state = copy.deepcopy(state)
    for _ in range(rng.randint(1, 3)):
        *path, last = rng.choice(places(state))
        parent = state
        for key in path:
            parent = parent[key]
        how = rng.random()
        if how < 0.75:
            parent[last] = copy.deepcopy(rng.choice(WRONG))
        elif how < 0.9 or isinstance(parent, dict):
            del parent[last]
        else:
            parent.append(copy.deepcopy(parent[last]))
    return state


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    training = Training(Controller(JOB), JOB, np.random.default_rng(0))
    training.run(TRIO, 60, sqnorms=(1.0, 400.0))
    return json.loads(json.dumps(training.planner.state_dict()))


def bad_end(state: dict[str, Any], seed: int, num_windows: int = 4) -> str | None:
    """What went wrong with a mutated state, if anything did."""
    planner = Controller(JOB)
    fresh = planner.state_dict()
    try:
        planner.load_state_dict(mutated(state, random.Random(seed)))
    except StateError:
        return None if planner.state_dict() == fresh else "half of a refused state was applied"
    except Exception as error:
        return f"loading: {type(error).__name__}: {error}"
    try:
        training = Training(planner, JOB, np.random.default_rng(seed))
        training.run(TRIO, 5 * num_windows, sqnorms=(1.0, 400.0))
    except Exception as error:
        return f"training: {type(error).__name__}: {error}"
    return None


def test_no_mutated_state_ends_badly(state: dict[str, Any]) -> None:
    """By hand 3,000 were tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = {seed: told for seed in (*range(100), 1555, 1673, 1808) if (told := bad_end(state, seed)) is not None}
    assert ends == {}


@pytest.mark.parametrize(
    "damage",
    [
        {"progress": math.nan},
        {"progress": math.inf},
        {"progress": -1e9},
        {"progress": "9"},
        {"optimizer_steps": math.nan},
        {"forgone": -1.0},
        {"num_steps": 2.5},
        {"num_steps": None},
        {"batch_size": 0},
        {"pass_steps": math.inf},
        {"policy": None},
        {"planner": 7},
    ],
)
def test_an_engines_state_with_numbers_that_cannot_be_is_refused(damage: dict[str, Any]) -> None:
    counts = {"progress": 9.0, "optimizer_steps": 9.0, "forgone": 0.0, "num_steps": 9, "batch_size": 4}
    good = {"version": 1, **counts, "pass_steps": None, "saved_s": 0.0, "policy": "even", "planner": {}}
    assert read_engine_state(good).progress.batches == 9.0
    with pytest.raises(StateError):
        read_engine_state({**good, **damage})
    for name in (*counts, "pass_steps", "saved_s", "policy", "planner"):
        with pytest.raises(StateError, match=name):
            read_engine_state({key: value for key, value in good.items() if key != name})


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e16, "3", None, True, [3]])
def test_a_number_that_cannot_be_is_refused_by_name(value: Any) -> None:
    with pytest.raises(StateError, match="saved progress="):
        number("progress", value)


def test_whole_numbers_may_be_saved_as_floats_and_fractions_are_refused() -> None:
    assert whole("num_steps", 3.0) == 3
    with pytest.raises(StateError, match="no whole number"):
        whole("num_steps", 2.5)


def test_tables_have_their_shape_and_gaps_only_where_they_may() -> None:
    assert np.isnan(table("gammas", [0.5, None], (2,), gaps=True)[1])
    for value in ([0.5, None], [0.5], [0.5, math.inf], "ab", [10**400, 1]):
        with pytest.raises(StateError):
            table("gammas", value, (2,))
