"""Samples that are read in order: one stream that all ranks read alike and cut, or one of each rank's own.

Of a common stream every rank reads all samples, and takes its slice of each step. Ranks can only do so where they read
the same in the same order, which a number per step tells: `fingerprint` of its first sample, added up over ranks
beside the training and compared before any gradient leaves a rank.

Of streams of their own ranks take as many samples as the plan gives them; one whose stream has ended takes part with
padding until all have. A number also shows whether all ranks' own streams begin with the same samples, which is an
error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from cannikin.core.cutting import EpochState, Trail
from cannikin.errors import InvalidInputError, StateError
from cannikin.runtime.fingerprints import fingerprint
from cannikin.runtime.passes import CutStep, Cutter, two_of, warn_of_another_order

_HEAD = 16  # samples by which streams are told apart: two classes in random order begin alike once in 65,536 times


class SharedRandomness:
    """What reading in this process draws from the random generators of torch, Python and numpy, alike on all ranks.

    Inside of `with`, they go on from where the last reading left them; outside, the training has its own. A shuffle or
    an augmentation that uses them is thus the same on every rank, and in a pass that is resumed.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        mixed = _mixed(seed, epoch)
        self._other: list[Any] = [
            torch.Generator().manual_seed(mixed).get_state(),
            random.Random(mixed).getstate(),
            np.random.RandomState(mixed % 2**32).get_state(),
        ]

    def __enter__(self) -> None:
        self._change()

    def __exit__(self, *_: object) -> None:
        self._change()

    def _change(self) -> None:
        now = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
        torch.set_rng_state(self._other[0])
        random.setstate(self._other[1])
        np.random.set_state(self._other[2])
        self._other = now


def _mixed(seed: int, epoch: int) -> int:
    (mixed,) = np.random.SeedSequence([seed, epoch, 1]).generate_state(1, np.uint64).tolist()
    return int(mixed) % 2**63


def sampler_state(sampler: Any) -> Any:
    """Return what a sampler says of itself, or else the state of its own generator; None where it has neither."""
    if hasattr(sampler, "state_dict"):
        return sampler.state_dict()
    generator = getattr(sampler, "generator", None)
    return bytes(generator.get_state().tolist()).hex() if isinstance(generator, torch.Generator) else None


def restore_sampler(sampler: Any, state: Any) -> None:
    """Give a sampler back what `sampler_state` returned."""
    if hasattr(sampler, "load_state_dict"):
        sampler.load_state_dict(state)
        return
    generator = getattr(sampler, "generator", None)
    if not isinstance(generator, torch.Generator):
        return
    try:
        generator.set_state(torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8))
    except (RuntimeError, TypeError, ValueError) as error:
        raise StateError(
            f"the saved state of the sampler's generator is damaged ({error}): load an older one"
        ) from None


class CommonStream:
    """Samples that all ranks read alike: steps come with this rank's slice.

    Args:
        owner: whose `set_epoch` is called before a pass, where it has one.
        reader: what is read, afresh in each pass; the owner itself, where that is a sampler.
        count: returns the samples of an epoch as they are told at that moment; None where they are not.
        seed: of the random numbers that reading draws.
        generator: seeds the reader's workers.
        tagged: whether ranks compare what they have read.
    """

    def __init__(
        self,
        owner: Any,
        reader: Iterable[Any],
        count: Callable[[], int | None],
        *,
        seed: int,
        generator: torch.Generator | None = None,
        tagged: bool,
    ) -> None:
        self._owner = owner
        self._reader = reader
        self._count = count
        self.num_samples = count()
        self._is_sampler = owner is reader
        self._num_readers = 0 if self._is_sampler else _num_readers(reader)
        self._seed = seed
        self._generator = generator
        self.tagged = tagged
        self.begun: Any = None  # the state of a sampler at the start of the pass

    def measure(self, epoch: int | None = None) -> None:
        """Look again how long an epoch is; where it is given, this one."""
        if epoch is not None:
            _set_epoch(self._owner, epoch)
        self.num_samples = self._count()

    def steps(self, state: EpochState, cutter: Cutter) -> Iterator[tuple[CutStep, list[Any]]]:
        """Yield the steps from `state` to the end of the stream."""
        randomness: AbstractContextManager[None] = SharedRandomness(self._seed, state.epoch)
        if getattr(self._reader, "num_workers", 0):  # workers have generators of their own
            randomness = nullcontext()
        if self._generator is not None:
            self._generator.manual_seed(_mixed(self._seed, state.epoch))
        if self._is_sampler:
            self.begun = sampler_state(self._owner)
        with randomness:
            stream = _open(self._owner, self._reader, state.epoch)
            found = _skip(stream, state.position, state.trail.sample_at)
        self._compare(state, found, cutter.rank)
        self.num_samples = self._count()
        position = state.position
        chunk: list[Any] = []  # read and not handed out yet
        padding: list[Any] = []
        while True:
            with randomness:
                chunk += islice(stream, max(0, cutter.look() - len(chunk)))
            padding = padding or two_of(chunk[:2])
            step = cutter.cut(position, len(chunk))
            if step is None:
                return
            step = self._told(step, position, chunk)
            first = step.start - position
            mine = chunk[first : first + step.entry.local_batch] * step.copies or padding
            del chunk[: step.position - position]
            position = step.position
            # The end is where reading ends: whoever tells a length beforehand may be wrong.
            if self.num_samples is not None and self.num_samples - position < cutter.num_needed:
                with randomness:
                    chunk += islice(stream, max(0, cutter.num_needed - len(chunk)))
                step = replace(step, is_last=len(chunk) < cutter.num_needed)
            yield step, mine

    def _told(self, step: CutStep, position: int, chunk: list[Any]) -> CutStep:
        """Return the step with what ranks compare of it, and what a later launch does."""
        entry, known = step.entry, {"sample_at": position, "sample": 0}
        if self.tagged:
            known["sample"] = fingerprint(chunk[0])
            entry = replace(entry, tag=fingerprint((len(chunk), known["sample"])))
        if self._is_sampler:  # an index costs nothing to look at: orders that differ may begin alike
            last = step.position - 1
            known = {"sample_at": last, "sample": fingerprint(chunk[last - position])}
        return replace(
            step, entry=entry, is_last=False, trail=replace(step.trail, num_readers=self._num_readers, **known)
        )

    def _compare(self, place: EpochState, found: int, rank: int) -> None:
        """Warn where the samples before a saved place are not those that were handed out then."""
        trail = place.trail
        change = _other_readers(trail, self._num_readers)
        is_known = trail.sample and trail.sample_at < place.position
        if is_known and found != trail.sample:
            source, advice = "stream", "read the same samples in the same order"
            if self._is_sampler:
                source, advice = "sampler", "build the sampler as it was"
            what = f"sample {trail.sample_at} of the {source} is not the one of the saved state{change}"
            warn_of_another_order(rank, place, what, f"{advice}{', with as many workers' if change else ''}")
        elif change and not (is_known and trail.sample_at):  # where any order begins with the same sample
            _warn_of_readers(rank, place, change)


class OwnStream:
    """A stream of this rank's own: steps come with as many of its samples as the plan says; padding, once it has ended.

    The steps go on until nobody has samples, which the loader finds out when it hands them out.
    """

    tagged = False
    num_samples: int | None = None

    def __init__(self, owner: object, reader: Iterable[Any], *, rank: int, num_ranks: int) -> None:
        self._num_readers = _num_readers(reader)
        self._owner = owner
        self._reader = reader
        self._rank = rank
        self._num_ranks = num_ranks

    def measure(self, epoch: int | None = None) -> None:
        """Do nothing: nobody knows how long the others' streams are."""

    def steps(self, state: EpochState, cutter: Cutter) -> Iterator[tuple[CutStep, list[Any]]]:
        """Yield the steps from `state` on, without end."""
        shards = state.shards or (0,) * self._num_ranks
        if len(shards) != self._num_ranks:
            raise StateError(
                f"the saved state is of {len(shards)} ranks that each had a stream of its own, and these are "
                f"{self._num_ranks}: resume on as many, or leave the loader's state out to begin afresh"
            )
        change = _other_readers(state.trail, self._num_readers)
        if change:
            _warn_of_readers(self._rank, state, change)
        trail = Trail(num_readers=self._num_readers)
        stream = _open(self._owner, self._reader, state.epoch)
        head = list(islice(stream, 1))
        if not head:
            raise InvalidInputError(
                f"the stream of rank {self._rank} has no sample, and a rank needs one to take part in the others' "
                "steps: give every rank a part of the data (at least as many shards as ranks)"
            )
        stream = islice(chain(head, stream), shards[self._rank], None)
        is_told = any(shards)  # what streams begin with: a resumed pass does not begin
        first: list[int] = []
        while True:
            cutter.look()
            assert cutter.plan is not None
            chunk = list(islice(stream, cutter.plan.local_batches[self._rank]))
            step = replace(cutter.take(shards, len(chunk)), trail=trail)
            first += [fingerprint(sample) for sample in chunk[: 0 if is_told else _HEAD - len(first)]]
            if not is_told and min(step.shards) >= _HEAD:  # the same step on all ranks
                is_told = True
                step = replace(step, entry=replace(step.entry, head=_number_of(first)))
            yield step, chunk * step.copies or two_of(head)
            shards = step.shards


def _number_of(first: list[int]) -> int | None:
    """Return a number that stands for a stream's first samples; None where they are all alike, or too few."""
    return fingerprint(first) if len(first) == _HEAD and len(set(first)) > 1 else None


def _num_readers(reader: object) -> int:
    return max(1, getattr(reader, "num_workers", 0))


def _other_readers(trail: Trail, num_readers: int) -> str:
    """Return that a stream was read by another number of processes, in words; nothing where it was not."""
    if trail.num_readers in (0, num_readers):
        return ""
    return f" (num_workers: then {trail.num_readers} read, now {num_readers})"


def _warn_of_readers(rank: int, place: EpochState, change: str) -> None:
    what = f"the stream is not read as it was for the saved state{change}"
    advice = "read with as many workers; a stream of which each worker takes every n-th sample has one order for all"
    warn_of_another_order(rank, place, what, advice)


def _open(owner: object, reader: Iterable[Any], epoch: int) -> Iterator[Any]:
    _set_epoch(owner, epoch)
    return iter(reader)


def _set_epoch(owner: object, epoch: int) -> None:
    set_epoch = getattr(owner, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _skip(stream: Iterator[Any], position: int, at: int) -> int:
    """Read up to a place; return the fingerprint of the sample at another one before it, or 0."""
    found = num_skipped = 0
    for num_skipped, sample in enumerate(islice(stream, position), start=1):
        if num_skipped == at + 1:
            found = fingerprint(sample)
    if num_skipped < position:
        raise StateError(
            f"the stream ended after {num_skipped} samples, the saved state is at sample {position} of it: "
            "resume on the stream that was saved, or leave the loader's state out to begin afresh"
        )
    return found
