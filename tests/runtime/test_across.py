"""Contrastive losses and centres over the samples of all ranks have the gradient of one process."""

from __future__ import annotations

import across_cases
import pytest
from ranks import run_ranks
from told import values


@pytest.fixture(scope="module")
def told():
    return run_ranks(across_cases.errors, 3, timeout_s=100)


@pytest.mark.parametrize("name", across_cases.CASES)
def test_a_loss_over_all_ranks_samples_trains_as_one_process_does(told, name):
    assert max(values(told, name)) <= 1e-12


@pytest.mark.parametrize("case", ["evaluation", "evaluation after steps"])
def test_in_an_evaluation_every_row_and_every_rank_counts_alike(told, case):
    for rank, (mean, every, numbers, mean_of_ranks) in enumerate(values(told, case)):
        assert mean_of_ranks == pytest.approx(2.0)
        assert mean == [pytest.approx(14 / 6)]
        assert every == [1, 2, 2, 3, 3, 3]
        assert numbers == [[0], [1, 2], [3, 4, 5]][rank]


def test_a_gather_among_micro_batches_is_refused_since_ranks_could_not_meet(told):
    assert all("call them on the whole batch" in text for text in values(told, "parts"))
