"""Which samples each rank trains on, for scripts that keep their own DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import Sampler

from cannikin.errors import InvalidInputError
from cannikin.runtime.cutting import Bookmark, Bounds, make_job, whole_number
from cannikin.runtime.passes import (
    IndexSource,
    Passes,
    bind_settings,
    check_length,
    feed_has_batch_norm,
    feed_of,
    refusing,
)

__all__ = ["HeteroBatchSampler"]


class HeteroBatchSampler(Sampler[list[int]]):
    """This rank's indices of each step, for a DataLoader of your own: `DataLoader(data, batch_sampler=...)`.

        engine = cannikin.attach(ddp, optimizer)
        sampler = cannikin.HeteroBatchSampler(data, model=engine, batch_size=64, prefetch_depth=4)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)

    It tells the engine of a batch when it cuts the batch's indices, as it cannot see the batch come out of the
    DataLoader: training must take the batches in order and leave none out. For the same reason `state_dict()` counts
    batches that are cut, up to `prefetch_depth` more than were trained on: save between epochs, or with a DataLoader
    that keeps the sampler's state of each batch (torchdata's StatefulDataLoader), or use `HeteroDataLoader`, whose
    state counts what it yielded. Each `iter()` is a new pass, over the next epoch, and ends an older one.

    Args:
        data: the dataset, or its length.
        model: a HeteroDataParallel or the engine `attach` returned.
        batch_size, max_batch_size, local_batches, local_bounds, shuffle, seed, drop_last: as in `HeteroDataLoader`.
        prefetch_depth: the DataLoader's num_workers * prefetch_factor; a new plan waits for this many batches.
    """

    item_count: Callable[[object], float] | None = None

    def __init__(
        self,
        data: Sized | int,
        *,
        model: object,
        batch_size: int,
        max_batch_size: int | None = None,
        local_batches: Sequence[int] | None = None,
        local_bounds: Bounds | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        prefetch_depth: int = 0,
    ) -> None:
        self._feed = feed_of(model)
        with refusing(self._feed):
            num_samples = whole_number("length of data", data if isinstance(data, int) else len(data), low=0)
            job = make_job(
                num_ranks=self._feed.world_size,
                batch_size=batch_size,
                max_batch_size=max_batch_size,
                local_batches=local_batches,
                local_bounds=local_bounds,
                num_samples=num_samples,
                has_batch_norm=feed_has_batch_norm(self._feed),
            )
            check_length(num_samples, job.batch_size, drop_last=drop_last)
            self.prefetch_depth = whole_number("prefetch_depth", prefetch_depth, low=0)
            bookmark = Bookmark(num_samples=num_samples, seed=seed, shuffle=shuffle)
            source = IndexSource(num_samples, seed=seed, shuffle=shuffle)
            self._passes = Passes(self._feed, source, bookmark=bookmark, num_samples=num_samples, drop_last=drop_last)
            self._pass: object = None
        self._feed.bind(self, job, bind_settings(self, bookmark, drop_last=drop_last))

    def __iter__(self) -> Iterator[list[int]]:
        if self._pass is not None:
            self._feed.end_epoch()
        this_pass = self._pass = object()
        place = self._passes.bookmark.next
        self._feed.begin_epoch(place.epoch, place.position)
        try:
            for step, indices in self._passes.steps():
                self._feed.hand_out(step.entry)
                self._passes.bookmark.advance(step.position)
                yield indices
                if self._pass is not this_pass:
                    raise InvalidInputError("this pass was ended by a later iter() over the sampler: use that one")
            self._passes.bookmark.finish()
        finally:
            if self._pass is this_pass:
                self._pass = None
                self._passes.bookmark.end()
                self._feed.end_epoch()

    def __len__(self) -> int:
        """Steps of this pass, or between passes of the next, under the current plan."""
        return len(self._passes)

    @property
    def sampler(self) -> HeteroBatchSampler:
        """Itself: frameworks look for `set_epoch` on `batch_sampler.sampler`."""
        return self

    @property
    def epoch(self) -> int:
        """The epoch underway; between passes the one that the next `iter()` begins."""
        return self._passes.bookmark.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next `iter()` begins."""
        self._passes.bookmark.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where in the data the passes are, counting batches that are cut; plain numbers, the same on every rank."""
        return self._passes.bookmark.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, on any number of ranks; the next `iter()` resumes there."""
        self._passes.bookmark.load_state_dict(state)
