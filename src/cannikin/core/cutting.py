"""Cuts an epoch into steps and a step into the ranks' slices, and knows where in an epoch a loader stands.

Everything here is whole-number arithmetic with the same result on every rank, so no rank asks another. An epoch is a
line of samples; each step takes the next B of them, and the ranks take contiguous slices of those in rank order. A
checkpoint therefore needs one number, the samples handed out so far, and fits any number of ranks and any plan.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from cannikin.core.values import NO_MAX, Job
from cannikin.errors import InvalidInputError, StateError

Bounds = tuple[int | None, int | None] | Sequence[tuple[int | None, int | None]]
"""`(low, high)` for all ranks or one such pair per rank; None leaves a side at its default."""

MAX_SEED = 2**63 - 1
"""Seeds travel between ranks as 64-bit integers."""


def least_local(has_batch_norm: bool) -> int:
    """Return the fewest samples that a rank should train on: BatchNorm cannot normalise a single one."""
    return 2 if has_batch_norm else 1


def cut(local_batches: Sequence[int], remaining: int, *, min_local: int = 1) -> tuple[tuple[int, int], ...]:
    """Return the next step's slices, one `(start, count)` per rank, counted from the first sample not handed out yet.

    With at least B samples left rank i gets its b_i. With fewer, R, they are split in proportion to the plan,

        q_i = R b_i / B,    rounded by largest remainders,

    but every rank gets at least `min_local` samples where R suffices, and where it does not, the ranks with the
    smallest local batches get none (a padding batch). Where a whole step would leave fewer than `min_local` samples
    for the last one, this step and the last one take half of the samples each.

    No rank gets more than its b_i, which may be all that its memory holds, with one exception: where every b_i is
    `min_local` and the samples come out odd, one rank gets one more. A sample that is the only one left stays alone.

    Args:
        local_batches: b_i of the plan in force.
        remaining: samples of the epoch not yet handed out, >= 0.
        min_local: fewest samples that a rank should train on (`least_local`).

    Examples:
        >>> cut([6, 2], 100)
        ((0, 6), (6, 2))
        >>> cut([6, 2], 4)
        ((0, 3), (3, 1))
        >>> cut([6, 2], 4, min_local=2)
        ((0, 2), (2, 2))
        >>> cut([6, 2], 3, min_local=2)
        ((0, 3), (3, 0))
        >>> cut([6, 2], 9, min_local=2)  # and then the other 4
        ((0, 3), (3, 2))
    """
    total = _next_total(local_batches, remaining, min_local)
    counts = list(local_batches) if total == sum(local_batches) else _resplit(local_batches, total, min_local)
    starts = np.cumsum([0, *counts]).tolist()
    return tuple(zip(starts[:-1], counts, strict=True))


def _next_total(local_batches: Sequence[int], remaining: int, min_local: int) -> int:
    """Return the samples of the next step: those of the plan, unless they leave too few for a step of their own."""
    total = sum(local_batches)
    rest = remaining - total
    if not 0 < rest < min_local or min(local_batches) < min_local:  # a plan below min_local is the user's wish
        return min(total, remaining)
    return remaining if remaining < 2 * min_local else -(-remaining // 2)


def _resplit(local_batches: Sequence[int], remaining: int, min_local: int) -> list[int]:
    """Return the counts of a short last batch."""
    by_size = sorted((i for i, size in enumerate(local_batches) if size), key=lambda i: (-local_batches[i], i))
    chosen = by_size[: remaining // min_local]
    counts = [0] * len(local_batches)
    if sum(local_batches[i] for i in chosen) < remaining:  # too few ranks reach min_local: fill the largest first
        enough = remaining >= min_local <= min(local_batches)
        for i in chosen if enough else by_size:
            counts[i] = min(local_batches[i], remaining - sum(counts))
        counts[by_size[0]] += remaining - sum(counts)  # better one too many than one alone on its rank
        return counts
    while True:  # ranks whose share is below the minimum get the minimum, the others share the rest
        rest = remaining - sum(counts)
        weight = sum(local_batches[i] for i in chosen)
        low = [i for i in chosen if rest * local_batches[i] < min(min_local, local_batches[i]) * weight]
        if not low:
            break
        chosen = [i for i in chosen if i not in low]
        for i in low:
            counts[i] = min(min_local, local_batches[i])
    for i in chosen:
        counts[i] = rest * local_batches[i] // weight
    by_remainder = sorted(chosen, key=lambda i: (-(rest * local_batches[i] % weight), i))
    for i in by_remainder[: remaining - sum(counts)]:
        counts[i] += 1
    return counts


def num_steps(remaining: int, total_batch: int, *, drop_last: bool = False, min_local: int = 1) -> int:
    """Return the number of steps that `remaining` samples make at a total batch of `total_batch`.

    `min_local` is as in `cut`, and at most the plan's smallest local batch: a rest below it that is too small to share
    a step's samples with joins that step.

    Examples:
        >>> num_steps(10, 4), num_steps(10, 4, drop_last=True)
        (3, 2)
        >>> num_steps(5, 2, min_local=2)
        2
    """
    whole, rest = divmod(remaining, total_batch)
    joins = whole > 0 and rest < min_local and total_batch + rest < 2 * min_local
    return whole if drop_last or rest == 0 or joins else whole + 1


def whole_number(name: str, value: object, *, low: int, high: int | None = None) -> int:
    """Return `value` as an int, or raise an error that names the argument and its limits."""
    limit = f"a whole number of at least {low}" + ("" if high is None else f" and at most {high}")
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # TypeError is the answer for what has no index
    except TypeError:
        raise InvalidInputError(f"{name}={value!r} must be {limit}") from None
    if number < low or (high is not None and number > high):
        raise InvalidInputError(f"{name}={number} must be {limit}")
    return number


def make_job(
    *,
    num_ranks: int,
    batch_size: int,
    max_batch_size: int | None = None,
    local_batches: Sequence[int] | None = None,
    local_bounds: Bounds | None = None,
    num_samples: int | None = None,
    drop_last: bool = False,
    has_batch_norm: bool = False,
) -> Job:
    """Make the job of a loader's arguments: what the planner may choose from.

    `max_batch_size` is cut to the length of an epoch, which no step can exceed.

    Examples:
        >>> make_job(num_ranks=2, batch_size=32, local_batches=[24, 8]).min_local
        (24, 8)
    """
    batch_size = whole_number("batch_size", batch_size, low=1)
    if batch_size < num_ranks:
        raise InvalidInputError(
            f"batch_size={batch_size} is below the {num_ranks} ranks: batch_size is the total over all ranks and each "
            "needs at least 1 sample; raise batch_size"
        )
    if local_batches is not None:
        if max_batch_size is not None or local_bounds is not None:
            other = "local_bounds" if max_batch_size is None else "max_batch_size"
            raise InvalidInputError(
                f"local_batches={local_batches} pins the split, so {other} has no use: leave it out"
            )
        low = high = _pinned(local_batches, num_ranks, batch_size)
    else:
        low, high = _bounds(local_bounds, num_ranks, default_low=least_local(has_batch_norm))
    if max_batch_size is not None:
        max_batch_size = whole_number("max_batch_size", max_batch_size, low=1)
        if num_samples is not None:
            max_batch_size = min(max_batch_size, max(batch_size, num_samples))
    if has_batch_norm and local_bounds is None and sum(low) > batch_size:
        raise InvalidInputError(
            f"batch_size={batch_size} is below {sum(low)}: it is the total over all ranks, and the model has "
            f"BatchNorm, so each of the {num_ranks} ranks needs at least 2 samples; raise batch_size, or set "
            "local_bounds=(1, None) if the model can take 1"
        )
    return Job(
        num_ranks=num_ranks,
        batch_size=batch_size,
        max_batch_size=max_batch_size,
        min_local=low,
        max_local=high,
        num_samples=num_samples,
        drop_last=drop_last,
    )


def whole_sizes(local_batches: Iterable[object]) -> tuple[int, ...]:
    """Return `local_batches` as whole numbers, or raise an error that names the one that is none.

    Example:
        >>> whole_sizes([48, 16])
        (48, 16)
    """
    if not isinstance(local_batches, Iterable):
        raise InvalidInputError(f"local_batches={local_batches!r} must be a list: give one size per rank")
    return tuple(whole_number(f"local_batches[{i}]", size, low=1) for i, size in enumerate(local_batches))


def _pinned(local_batches: Sequence[int], num_ranks: int, batch_size: int) -> tuple[int, ...]:
    sizes = whole_sizes(local_batches)
    if len(sizes) != num_ranks:
        count = f"{len(sizes)} sizes for {num_ranks} ranks"
        raise InvalidInputError(f"local_batches={list(sizes)} has {count}: give one per rank")
    if sum(sizes) != batch_size:
        raise InvalidInputError(
            f"local_batches={list(sizes)} sum to {sum(sizes)}, not batch_size={batch_size}: batch_size is the total "
            f"over all ranks; set batch_size={sum(sizes)} or change the local batches"
        )
    return sizes


def _bounds(bounds: Bounds | None, num_ranks: int, default_low: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    given: Any = [(None, None)] if bounds is None else bounds
    pairs: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if len(pairs) == 2 and not any(isinstance(pair, Sequence) for pair in pairs):
        pairs = [tuple(pairs)]
    pairs = pairs * num_ranks if len(pairs) == 1 else pairs
    if len(pairs) != num_ranks or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise InvalidInputError(
            f"local_bounds={bounds!r} must be (low, high), or one such pair for each of the {num_ranks} ranks"
        )
    low = [default_low if pair[0] is None else whole_number("low of local_bounds", pair[0], low=1) for pair in pairs]
    high = [NO_MAX if pair[1] is None else whole_number("high of local_bounds", pair[1], low=1) for pair in pairs]
    return tuple(low), tuple(high)


@dataclass(frozen=True, kw_only=True)
class Trail:
    """Numbers by which a later launch knows whether the samples before a place are those that were handed out.

    Args:
        lists: stands for the lists in the dataset when the pass began; 0 where it has none.
        num_readers: processes that read a stream; 0 where samples have indices.
        sample_at: the place of a sample that was handed out.
        sample: stands for that sample; 0 where nothing is known of any.
    """

    lists: int = 0
    num_readers: int = 0
    sample_at: int = 0
    sample: int = 0


NO_TRAIL = Trail()


@dataclass(frozen=True, kw_only=True)
class EpochState:
    """A place in the data: `position` samples of epoch `epoch` have been handed out, over all ranks.

    Where each rank has a stream of its own, `shards` counts the samples asked of each stream, including those that an
    ended stream no longer had. `is_last` is whether nothing of the epoch is left to hand out. `trail` tells what was
    handed out before.
    """

    epoch: int = 0
    position: int = 0
    shards: tuple[int, ...] = ()
    is_last: bool = False
    trail: Trail = NO_TRAIL


class Bookmark:
    """Which epoch the next pass begins, where in it, and what a checkpoint holds.

    A pass that is broken off abandons its epoch in this process. A checkpoint taken after it still holds its position,
    so that a run that its loop's `break` stopped misses nothing when it is resumed elsewhere. One taken at an epoch's
    last batch is at the beginning of the next epoch: `range(loader.epoch, n)` trains none twice.

    Examples:
        >>> mark = Bookmark(num_samples=10, seed=0, shuffle=True)
        >>> mark.begin().position
        0
        >>> mark.advance(4)
        >>> mark.end()
        >>> mark.state_dict()["position"], mark.epoch
        (4, 1)
    """

    def __init__(
        self, *, num_samples: int | None, seed: int, shuffle: bool, sharded: bool = False, is_fixed: bool = True
    ) -> None:
        self.is_fixed = is_fixed  # no epoch has more samples than num_samples
        self._identity = {
            "num_samples": -1 if num_samples is None else num_samples,
            "seed": whole_number("seed", seed, low=0, high=MAX_SEED),
            "shuffle": int(shuffle),
            **({"sharded": 1} if sharded else {}),
        }
        self.next = EpochState()
        self._saved = self.next
        self.is_set = False  # where the next pass begins was said since the last one
        self.underway = False

    @property
    def identity(self) -> dict[str, int]:
        """What this order of samples depends on, as plain numbers."""
        return dict(self._identity)

    @property
    def place(self) -> EpochState:
        """Where in the data the pass underway, or else the last one, has come to."""
        return self._saved

    @property
    def epoch(self) -> int:
        """The epoch underway; between passes, the epoch that the next pass begins."""
        return self._saved.epoch if self.underway else self.next.epoch

    def begin(self) -> EpochState:
        """Start the next pass, and return where it begins."""
        self._saved, self.underway, self.is_set = self.next, True, False
        self.next = EpochState(epoch=self._saved.epoch + 1)
        return self._saved

    @property
    def is_at_end(self) -> bool:
        """Whether the pass underway has handed out its last batch, as far as that is known."""
        return self.underway and self._saved.is_last

    def turn(self) -> None:
        """Forget the place in an abandoned epoch: the next pass is about to begin."""
        self._saved = self.next

    def advance(
        self, position: int, shards: tuple[int, ...] = (), *, is_last: bool = False, trail: Trail = NO_TRAIL
    ) -> None:
        """Note that `position` samples of the epoch have been handed out, `shards` of each rank's own stream."""
        self._saved = replace(self._saved, position=position, shards=shards, is_last=is_last, trail=trail)

    def finish(self) -> None:
        """Note that the pass came to the end of its epoch."""
        self._saved, self.underway = self.next, False

    def end(self) -> None:
        """Note that the pass is over, at its end or broken off."""
        self.underway = False

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass begin `epoch`; a loaded position in that same epoch is kept."""
        epoch = whole_number("epoch", epoch, low=0)
        if epoch != self.next.epoch:
            self.next = EpochState(epoch=epoch)
        if not self.underway:
            self._saved, self.is_set = self.next, True

    def leave_rest(self) -> None:
        """Let the next pass begin the epoch after the loaded one, of whose rest no step can be made."""
        self.next = self._saved = EpochState(epoch=self.next.epoch + 1)

    def state_dict(self, place: EpochState | None = None) -> dict[str, Any]:
        """Return the epoch, the samples handed out, and what this order of samples depends on, as plain numbers.

        `place` is where the oldest batch begins that was handed out and is not trained on yet, if there is one.
        """
        place = self._saved if place is None or self.is_set else place
        place = EpochState(epoch=place.epoch + 1) if place.is_last else place
        shards = {"shards": list(place.shards)} if place.shards else {}
        trail = {name: number for name, number in asdict(place.trail).items() if number and place.position}
        return {"epoch": place.epoch, "position": place.position, **shards, **trail, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, on any number of ranks."""
        if self.underway:
            raise StateError("a state cannot be loaded during a pass over the data: load it before the loop")
        if not isinstance(state, Mapping):
            raise StateError(f"{state!r:.200} is no state of a loader: load what loader.state_dict() returned")
        missing = sorted({"epoch", "position", *self._identity} - set(state))
        if missing:
            raise StateError(f"the loader's state lacks {', '.join(missing)}: load what loader.state_dict() returned")
        for name, own in self._identity.items():
            if state[name] != own:
                raise StateError(
                    f"the saved {name}={state[name]} is not this loader's {own}: the saved position is one in another "
                    f"order of samples; build the loader as it was, or begin afresh: leave its state out, or give a "
                    f"Snapshot another folder"
                )
        try:
            length = self._identity["num_samples"]
            epoch = whole_number("saved epoch", state["epoch"], low=0)
            high = length if length >= 0 and self.is_fixed else None
            position = whole_number("saved position", state["position"], low=0, high=high)
            shards = tuple(whole_number("saved shards", number, low=0) for number in state.get("shards", ()))
            told = {field.name for field in fields(Trail)} & set(state)  # states of older versions have none of it
            trail = Trail(**{name: whole_number(f"saved {name}", state[name], low=0) for name in told})
        except (InvalidInputError, TypeError) as error:
            raise StateError(f"{error}: the state is damaged or not of a loader") from None
        place = EpochState(epoch=epoch, position=position, shards=shards, trail=trail)
        self.next = self._saved = place if position else EpochState(epoch=epoch)
        self.is_set = True
