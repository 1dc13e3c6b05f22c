"""`HeteroBatchSampler`: this rank's indices of each step, for a DataLoader of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, Unpack

from torch.utils.data import Sampler

from cannikin.core.cutting import Bookmark, whole_number
from cannikin.errors import InvalidInputError
from cannikin.runtime.options import LoaderOptions, check_names, engine_of
from cannikin.runtime.passes import IndexSource, OverPasses, Passes, job_of, refusing

_NUM_GROWN = 2  # steps in a row after each of which more batches wait, before something must be wrong
_LOOK_AHEAD = 2  # batches that a loop may have fetched beside what workers have


class HeteroBatchSampler(OverPasses, Sampler[list[int]]):
    """This rank's indices of each step, for a DataLoader of your own: `DataLoader(data, batch_sampler=...)`.

        engine = cannikin.attach(ddp, optimizer)
        sampler = cannikin.HeteroBatchSampler(data, model=engine, batch_size=64, prefetch_depth=4)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)

    It tells the engine of a batch when it cuts the batch's indices, as it cannot see the batch come out of the
    DataLoader: training must take the batches in order and leave none out. For the same reason `state_dict()` counts
    batches that are cut, up to `prefetch_depth` more than were trained on: save between epochs, or with a DataLoader
    that keeps the sampler's state of each batch (torchdata's StatefulDataLoader), or use `HeteroDataLoader`, whose
    state counts what was trained on. Each `iter()` is a new pass, over the next epoch, and ends an older one.

    Args:
        data: the dataset, or its length.
        model: a HeteroDataParallel or the engine `attach` returned.
        batch_size: the *total* batch over all ranks at the start.
        prefetch_depth: the DataLoader's num_workers * prefetch_factor; a new plan waits for this many batches.
        **options: see `LoaderOptions`.
    """

    item_count: Callable[[Any], float] | None = None

    def __init__(
        self,
        data: Sized | int,
        *,
        model: object,
        batch_size: int,
        prefetch_depth: int = 0,
        **options: Unpack[LoaderOptions],
    ) -> None:
        engine = engine_of(model)
        with refusing(engine):
            own = ("model", "batch_size", "prefetch_depth", *LoaderOptions.__annotations__)
            check_names("HeteroBatchSampler", own, None, options)
            num_samples = whole_number("length of data", data if isinstance(data, int) else len(data), low=0)
            job = job_of(engine, num_samples, batch_size, options)
            self.prefetch_depth = whole_number("prefetch_depth", prefetch_depth, low=0)
            seed, drop_last = options.get("seed", 0), options.get("drop_last", False)
            shuffle = options.get("shuffle")
            shuffle = shuffle is None or bool(shuffle)
            self._bookmark = Bookmark(num_samples=num_samples, seed=seed, shuffle=shuffle)
            source, listed = (
                IndexSource(num_samples, seed=seed, shuffle=shuffle),
                None if isinstance(data, int) else data,
            )
            self._passes = Passes(engine, source, bookmark=self._bookmark, drop_last=drop_last, data=listed)
            self._pass: object = None
            self._num_taken = self._num_waiting = self._num_grown = 0  # as of the last batch that was cut
        self._feed = self._passes.bind(self, job)

    def __iter__(self) -> Iterator[list[int]]:
        if self._pass is not None:
            self._feed.end_epoch()
        this_pass = self._pass = object()
        self._passes.open()
        self._feed.between_steps(is_over=False)
        try:
            for step, indices in self._passes.steps():
                self._refuse_dealer()
                self._feed.hand_out(step.entry)
                is_last = self._passes.is_last(step)
                self._bookmark.advance(step.position, is_last=is_last, trail=step.trail)
                if is_last:
                    self._feed.pass_is_out()
                yield indices
                if self._pass is not this_pass:
                    raise InvalidInputError("this pass was ended by a later iter() over the sampler: use that one")
                self._feed.between_steps(is_over=self._bookmark.is_at_end)
            self._bookmark.finish()
        finally:
            if self._pass is this_pass:
                self._pass = None
                self._bookmark.end()
                self._feed.end_epoch()

    def _refuse_dealer(self) -> None:
        """Refuse to go on where more batches wait after each step: what is trained on is not what was cut for it."""
        queue = self._feed.queue
        if queue.num_taken == self._num_taken:
            return
        self._num_grown = self._num_grown + 1 if len(queue) > self._num_waiting else 0
        self._num_taken, self._num_waiting = queue.num_taken, len(queue)
        if self._num_grown >= _NUM_GROWN and self._num_waiting > self.prefetch_depth + _LOOK_AHEAD:
            raise InvalidInputError(
                f"{self._num_waiting} batches of this HeteroBatchSampler wait, and more after every step: something "
                "takes more of them than are trained on, as accelerator.prepare(dataloader) does, which deals out to "
                "all ranks what is this rank's own already; leave the DataLoader out of prepare(), or use prepare() of "
                "cannikin.integrations.accelerate"
            )

    @property
    def sampler(self) -> HeteroBatchSampler:
        """Itself: frameworks look for `set_epoch` on `batch_sampler.sampler`."""
        return self
