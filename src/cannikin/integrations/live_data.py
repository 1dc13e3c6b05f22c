"""The data of replicas that come and go: each gets its slice of the next step, whoever the others are.

Nothing is agreed on ahead. A slice follows from the place in the data and the plan of the moment, which all members
know; what workers have loaded for another place or plan is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from cannikin.core.cutting import MAX_SEED, cut, least_local, num_steps, whole_number
from cannikin.core.membership import Membership, Place
from cannikin.runtime.passes import epoch_order, two_of
from cannikin.runtime.weighting import has_batch_norm

if TYPE_CHECKING:
    from cannikin.integrations.torchft import LiveDataParallel


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """A batch to be loaded: `count` samples from `start` on, in the order of an epoch; 0 are padding."""

    epoch: int
    start: int
    count: int


class LiveDataLoader:
    """Hands every member its part of each step, as the plan in force has it; every sample once per epoch.

    Args:
        dataset: with a length and indices, the same for every member.
        batch_size: B, over all members.
        model: what trains on it.
        shuffle, seed: how an epoch is ordered; the same for every member.
        options: what torch's DataLoader takes beside: `num_workers`, `collate_fn`, `pin_memory` and others.

    Workers load ahead for the plan and the members of the moment. Where these change, what was loaded is dropped.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        model: LiveDataParallel,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._model = model
        self._min_local = least_local(has_batch_norm(model.module))
        self._shuffle, self._seed = shuffle, whole_number("seed", seed, low=0, high=MAX_SEED)
        self._crew = model.membership = Membership(
            batch_size=whole_number("batch_size", batch_size, low=1),
            num_samples=len(dataset),
            min_local=self._min_local,
            seed=self._seed if shuffle else None,
        )
        self._orders: dict[int, Any] = {}
        self._asked: deque[_Slice] = deque()  # of the workers, and not yielded yet
        self._ahead = Place()  # the first step that they have not been asked for
        loader = DataLoader(dataset, batch_sampler=_Sampler(self), **options)
        self._is_loaded_alone = loader.num_workers == 0
        self._batches = iter(loader)  # workers start now, before the first meeting: the others need not wait for them

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._crew.place.epoch

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are left, beginning with the one that the others are in.

        After the last one the members meet once more: one whose last step failed takes over the others' weights.
        """
        while True:
            self._model.meet()
            if self.epoch >= num_epochs:
                return
            yield self.epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield this member's batches, from where training stands to the end of that epoch."""
        self._model.refuse_unfinished()
        self._model.meet()
        epoch = self.epoch
        while self.epoch == epoch:
            yield self._next()
            self._model.refuse_unfinished()
            if self.epoch == epoch:
                self._model.meet()  # one that was left behind may find itself in another epoch

    def __len__(self) -> int:
        """Steps that are left of the epoch, with the total batch of the moment."""
        total = sum(self._crew.local_batches) or self._crew.batch_size
        return num_steps(self._crew.num_samples - self._crew.place.position, total, min_local=self._min_local)

    def _next(self) -> Any:
        """Return this member's batch of the next step; what was loaded ahead for another cut is dropped."""
        began_s = time.perf_counter()
        rank = self._model.rank
        counts, wanted, _ = self._cut(self._crew.place, rank)
        if not self._asked or self._asked[0] != wanted:
            self._ahead = self._crew.place
        batch = next(self._batches)
        while self._asked.popleft() != wanted:
            batch = next(self._batches)
        load_s = time.perf_counter() - began_s
        self._model.hand_out(counts, rank, load_s, is_loaded_alone=self._is_loaded_alone)
        return batch

    def _cut(self, place: Place, rank: int) -> tuple[tuple[int, ...], _Slice, Place]:
        """Return the members' counts at this place, this one's slice, and the place that follows."""
        slices = cut(self._crew.local_batches, self._crew.num_samples - place.position, min_local=self._min_local)
        counts = tuple(count for _, count in slices)
        mine = _Slice(epoch=place.epoch, start=place.position + slices[rank][0], count=counts[rank])
        return counts, mine, place.after((), counts, self._crew.num_samples)

    def indices(self) -> Iterator[list[int]]:
        """Yield the samples of slice after slice, as workers ask for them."""
        while True:
            mine = _Slice(epoch=0, start=0, count=0)  # while it is not known who is there
            if self._crew.members:
                _, mine, self._ahead = self._cut(self._ahead, self._model.rank)
            self._asked.append(mine)
            order = self._order(mine.epoch)
            samples = order[mine.start : mine.start + mine.count].tolist() or order[:2].tolist()
            yield two_of(samples) if self._min_local > 1 else samples  # twice in a mean counts once

    def _order(self, epoch: int) -> Any:
        """Return the order of an epoch, kept for the epoch before and this one."""
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known == epoch - 1}
            self._orders[epoch] = epoch_order(
                self._crew.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle
            )
        return self._orders[epoch]


class _Sampler:
    """What torch's DataLoader takes for a batch sampler: it never ends, since plans do not."""

    def __init__(self, loader: LiveDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.indices()
