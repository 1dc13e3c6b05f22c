"""A list of local batches beside the batch size that a framework's script has: what holds, and what is said."""

from __future__ import annotations

import pytest

from cannikin.errors import InvalidInputError
from cannikin.integrations.pinned import pinned_total, refuse_other_total

SAID = {"said": "batch_size=32", "total": 64, "num_ranks": 2}


def test_a_list_of_another_total_than_the_loaders_holds_and_rank_0_says_so():
    with pytest.warns(RuntimeWarning, match=r"batch_size=32 is ignored: .*\[24, 8\] says .* 32 together, not 64"):
        assert pinned_total([24, 8], loaders=32, num_ranks=2, rank=0) == 32
    assert pinned_total([24, 8], loaders=32, num_ranks=2, rank=1) == 32


def test_a_list_of_the_loaders_total_is_no_news():
    assert pinned_total([48, 16], loaders=32, num_ranks=2, rank=0) == 64
    assert pinned_total([48, 16], loaders=None, num_ranks=2, rank=0) == 64  # of whole batches: refused elsewhere


def test_where_schedules_are_written_for_the_frameworks_total_another_one_is_refused():
    refuse_other_total(None, **SAID)
    refuse_other_total([48, 16], **SAID)
    with pytest.raises(InvalidInputError, match=r"\[24, 8\] sum to 32, and batch_size=32 on 2 processes makes 64"):
        refuse_other_total([24, 8], **SAID)


@pytest.mark.parametrize("sizes", [[48.0, 16.0], ["48", 16], [True, 63]])
def test_a_size_that_is_no_whole_number_is_named(sizes):
    with pytest.raises(InvalidInputError, match=r"local_batches\[0\]=.* must be a whole number"):
        refuse_other_total(sizes, **SAID)
    with pytest.raises(InvalidInputError, match=r"local_batches\[0\]=.* must be a whole number"):
        pinned_total(sizes, loaders=32, num_ranks=2, rank=0)
