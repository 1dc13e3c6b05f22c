"""What a script has said twice: a batch size per process, as its framework has it, and the list `local_batches`.

Where the two make different totals, one of them is not what the user wants. Frameworks whose schedules are written for
their own total refuse; under the others the list holds, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from cannikin.core.cutting import whole_sizes
from cannikin.errors import InvalidInputError


def refuse_other_total(local_batches: Sequence[int] | None, *, said: str, total: int, num_ranks: int) -> None:
    """Refuse a list whose sum is not the total that the framework's own setting, `said`, makes on all ranks."""
    sizes = None if local_batches is None else whole_sizes(local_batches)
    if sizes is not None and len(sizes) == num_ranks and sum(sizes) != total:  # another length is refused with the job
        raise InvalidInputError(
            f"local_batches={list(sizes)} sum to {sum(sizes)}, and {said} on {num_ranks} processes makes {total}: let "
            "the two agree"
        )


def pinned_total(local_batches: Sequence[int], *, loaders: int | None, num_ranks: int, rank: int) -> int:
    """Return the sum of the list; warn on rank 0 where the DataLoader's batch size on all ranks makes another."""
    sizes = whole_sizes(local_batches)
    if loaders is not None and loaders * num_ranks != sum(sizes) and rank == 0:
        warnings.warn(
            f"the DataLoader's batch_size={loaders} is ignored: local_batches={list(sizes)} says how many samples each "
            f"rank gets, {sum(sizes)} together, not {loaders * num_ranks}",
            RuntimeWarning,
            stacklevel=3,
        )
    return sum(sizes)
