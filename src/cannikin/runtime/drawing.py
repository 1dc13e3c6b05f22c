"""Sizes to draw, for scripts without a DataLoader: an endless row of batches whose samples the script makes itself.

Language models that cut crops out of one long file, environments of reinforcement learning and synthetic data have no
epochs and no order to store. All they need is how many samples are this rank's in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from cannikin.core.cutting import Bookmark, least_local
from cannikin.runtime.options import DrawOptions, check_names
from cannikin.runtime.passes import Cutter, job_of, refusing

if TYPE_CHECKING:
    from cannikin.runtime.engine import Engine


class Draw(NamedTuple):
    """How many samples to draw for one step.

    Args:
        local: b_i, on this rank.
        total: B, on all ranks together.
    """

    local: int
    total: int


class Draws:
    """An endless iterator over the sizes of batches, which `model.batches()` returns.

        batches = model.batches(batch_size=64)
        for local, total in batches:
            x, y = make_batch(local)
            ...

    `next(batches)` by hand is the same. Each draw is one training forward and backward, on every rank; a loop may draw
    ahead. In eval mode (`model.eval()`) a draw is for an evaluation: it says the same sizes, on any rank alone, and
    counts for nothing.

    Args:
        engine: of the model, not bound yet.
        batch_size: the *total* batch over all ranks at the start.
        **options: see `DrawOptions`.
    """

    item_count: Callable[[Any], float] | None = None
    prefetch_depth = 0
    epoch = 0  # it never ends

    def __init__(self, engine: Engine, batch_size: int, **options: Unpack[DrawOptions]) -> None:
        with refusing(engine):
            check_names("batches", ("batch_size", *DrawOptions.__annotations__), None, options)
            job = job_of(engine, None, batch_size, options)
            self._bookmark = Bookmark(num_samples=None, seed=0, shuffle=False)
            self._engine = engine
            self._cutter: Cutter | None = None
            self._start = 0
        self._feed = engine.bind(self, job, {"draws": 1})

    def __iter__(self) -> Iterator[Draw]:
        try:
            while True:
                yield next(self)
        finally:
            self.close()

    def __next__(self) -> Draw:
        plan = self._engine.plan
        if not self._engine.is_training and plan is not None:
            return Draw(plan.local_batches[self._engine.rank], plan.total_batch)
        cutter = self._cutter or self._begin()
        self._feed.between_steps(is_over=False)
        step = cutter.cut(cutter.position, cutter.look())
        assert step is not None, "there is no end"
        self._feed.hand_out(replace(step.entry, place=self._bookmark.place))
        self._bookmark.advance(step.position)
        self._start = step.start
        return Draw(step.entry.local_batch, step.entry.total_batch)

    def _begin(self) -> Cutter:
        """Begin to draw where the last state was saved, or at 0."""
        place = self._bookmark.begin()
        self._feed.begin_epoch(place.epoch, place.position)
        min_local = least_local(self._engine.has_batch_norm)
        self._cutter = Cutter(self._feed, self._engine.rank, drop_last=False, min_local=min_local)
        self._cutter.position = place.position
        return self._cutter

    @property
    def start(self) -> int:
        """Number, in the whole run, of the first sample of this rank's in the last draw, counted from 0.

        Ranks' samples have consecutive numbers, whatever the split: seeds or positions of samples made from them stay
        the same on another number of ranks, and after a resume.
        """
        return self._start

    def state_dict(self) -> dict[str, Any]:
        """Return how many samples have been drawn and trained on, in plain numbers, the same on every rank."""
        return self._bookmark.state_dict(self._feed.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, before the first draw and on any number of ranks."""
        self._bookmark.load_state_dict(state)

    def settle_place(self) -> None:
        """Do nothing: there is always another step."""

    def close(self) -> None:
        """Let what is under way between ranks arrive, at the end of training; a later draw goes on from here."""
        self._feed.end_epoch()
