"""Samples that are read in order: one stream that all ranks read alike and cut, or one of each rank's own.

Of a common stream every rank reads all samples, and takes its slice of each step. Ranks can only do so where they read
the same in the same order, which a number per step tells: `fingerprint` of its first sample, added up over ranks
beside the training and compared before any gradient leaves a rank.

Of streams of their own ranks take as many samples as the plan gives them; one whose stream has ended takes part with
padding until all have. A number also shows whether all ranks' own streams begin with the same samples, which is an
error.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from itertools import chain, islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from cannikin.core.cutting import EpochState
from cannikin.errors import InvalidInputError, StateError
from cannikin.runtime.passes import CutStep, Cutter, two_of

_VALUES = 1024  # of a tensor, spread over all of it
_LETTERS = 4096  # of a text
_PARTS = 64  # of a list
_DEPTH = 5  # of lists in lists
_DATASETS = 64  # that one is made of
_HEAD = 16  # samples by which streams are told apart: two classes in random order begin alike once in 65,536 times
_ROWS = 8  # of a dataset that stores them; there may be images in them


def fingerprint(sample: Any) -> int:
    """Return a number from 1 to 2^40 that stands for a sample, the same in every process.

    Of tensors and arrays on the host, and of images, it sees values spread over all of them. Of other objects it sees
    the attributes that are data: not those that begin with an underscore, nor objects in them, which may be the same on
    no two ranks. Entries of a dict such as `__url__` are left out: the same sample may lie in different places.

    Examples:
        >>> fingerprint(([1, 2], "a")) == fingerprint(([1, 2], "a")) != fingerprint(([1, 3], "a"))
        True
    """
    digest = hashlib.blake2b(digest_size=5)
    _tell(digest.update, sample, _DEPTH)
    return 1 + int.from_bytes(digest.digest(), "big")


def list_fingerprint(dataset: Any) -> int:
    """Return a number that stands for the lists in a dataset that have an entry per sample: files, labels, indices.

    So for the datasets that this one is made of: torch's, and those of Hugging Face, of which it reads a few rows as
    they are stored. Else no sample is loaded, which may be slow and may open files that workers should. Folders are
    left out of names. A list with places that are empty yet is a cache, which ranks may fill differently.

    Examples:
        >>> from torch.utils.data import Subset
        >>> even, odd = (Subset(range(10), range(first, 10, 2)) for first in (0, 1))
        >>> list_fingerprint(even) != list_fingerprint(odd)
        True
    """
    datasets, number = [dataset], 0
    for one in datasets:  # which grows
        if _is_stored(one):
            number = fingerprint((number, _without_folder(_stored_rows(one))))
            continue
        length = _length(one)
        for name, part in _held_by(one):
            if _is_dataset(part):
                if len(datasets) < _DATASETS and all(part is not other for other in datasets):
                    datasets.append(part)
            elif _is_list(part) and len(part) == length:
                entries = [_without_folder(entry) for entry in _entries(part)]
                if all(entry is not None for entry in entries):
                    number = fingerprint((number, name, entries))
    return number


def _held_by(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dataset itself, which may be a list, and what its attributes have, by their names."""
    yield "", dataset
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        yield name, value
        if isinstance(value, tuple):
            yield from ((name, part) for part in _thinned(value, _PARTS))
        elif isinstance(value, list | dict):
            parts = _thinned(value, _PARTS) if isinstance(value, list) else islice(value.values(), _PARTS)
            yield from ((name, part) for part in parts if _is_dataset(part))


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a stream; or the file that would tell is not open yet
        return None


def _is_dataset(part: Any) -> bool:
    return isinstance(part, Dataset) or _is_stored(part)


def _is_table(part: Any) -> bool:
    """Return whether this is a table of pandas, or a column of one."""
    return hasattr(type(part), "iloc") and hasattr(type(part), "to_numpy")


def _is_list(part: Any) -> bool:
    is_array = isinstance(part, torch.Tensor | np.ndarray) and part.ndim > 0
    return is_array or isinstance(part, list | range) or _is_table(part)


def _entries(part: Any) -> Any:
    """Return some entries of a list."""
    return _thinned(part.iloc, _PARTS, len(part)).to_numpy().tolist() if _is_table(part) else _thinned(part, _PARTS)


def _thinned(values: Any, most: int, length: int | None = None) -> Any:
    """Return some of the values, spread over all of them."""
    return values[:: max(1, -(-(len(values) if length is None else length) // most))]


def _is_stored(part: Any) -> bool:
    """Return whether this is a dataset with indices of Hugging Face, which is no torch Dataset."""
    has_fingerprint = isinstance(getattr(part, "__dict__", {}).get("_fingerprint"), str)
    return has_fingerprint and hasattr(type(part), "with_format") and hasattr(type(part), "__len__")


def _stored_rows(dataset: Any) -> Any:
    """Return some rows of a Hugging Face dataset as they are stored, which decodes and transforms nothing.

    Its `_fingerprint` would not do: it depends on the times of files, and is a random number after a `map` whose
    function cannot be hashed.
    """
    return dataset.with_format("arrow")[list(_thinned(range(len(dataset)), _ROWS))].to_pylist()


def _without_folder(entry: Any) -> Any:
    if isinstance(entry, tuple | list):
        return [_without_folder(part) for part in entry]
    if isinstance(entry, dict):
        return {name: _without_folder(part) for name, part in entry.items()}
    return PurePath(entry).name if isinstance(entry, str | PurePath) else entry


def _tell(note: Callable[[bytes], None], value: Any, depth: int) -> None:
    note(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        note(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.device.type == "cpu" and value.layout == torch.strided and value.numel():
            flat = value.detach().reshape(-1)
            note(flat[:: -(-len(flat) // _VALUES)].contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        note(f"{value.dtype}{value.shape}".encode())
        note(value.reshape(-1)[:: max(1, -(-value.size // _VALUES))].tobytes())
    elif isinstance(value, bytes | bytearray):
        note(b"%d" % len(value) + value[:_LETTERS])
    elif isinstance(value, str):
        note(value[:_LETTERS].encode(errors="replace"))
    elif value is None or isinstance(value, int | float | complex | np.generic):
        note(repr(value).encode())
    elif _has_bytes(value):
        content = np.frombuffer(_bytes_of(value), np.uint8)
        note(b"%d" % len(content) + _thinned(content, _VALUES).tobytes())
    elif depth > 0:
        for part in _parts(value):
            _tell(note, part, depth - 1)


def _has_bytes(value: Any) -> bool:
    """Return whether a value has its content in bytes, as images of PIL do."""
    return callable(getattr(type(value), "tobytes", None)) and not isinstance(value, torch.Tensor | np.ndarray)


def _bytes_of(value: Any) -> bytes:
    try:
        return bytes(value.tobytes())
    except Exception:  # a damaged image: whoever collates it decides what to do
        return b""


def _parts(value: Any) -> Iterable[Any]:
    """Return what a value consists of; nothing where that is not known."""
    if isinstance(value, Mapping):
        named = ((name, part) for name, part in value.items() if name == "__key__" or not str(name).startswith("__"))
        return [part for pair in islice(named, _PARTS) for part in pair]
    if isinstance(value, list | tuple):
        return [len(value), *value[:_PARTS]]
    if is_dataclass(value):
        return [getattr(value, field.name, None) for field in fields(value)]
    if isinstance(value, type) or callable(value):
        return ()
    public = sorted(item for item in getattr(value, "__dict__", {}).items() if not item[0].startswith("_"))
    return [_without_folder(part) for _, part in public[:_PARTS] if _is_data(part)]


def _is_data(part: Any) -> bool:
    return isinstance(part, torch.Tensor | np.ndarray) or _has_bytes(part) or not hasattr(part, "__dict__")


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
        reader: what is read, afresh in each pass.
        seed: of the random numbers that reading draws.
        generator: seeds the reader's workers.
        tagged: whether ranks compare what they have read.
    """

    def __init__(
        self, owner: Any, reader: Iterable[Any], *, seed: int, generator: torch.Generator | None, tagged: bool
    ) -> None:
        self._owner = owner
        self._reader = reader
        self._seed = seed
        self._generator = generator
        self.tagged = tagged
        self.begun: Any = None  # the state of a sampler at the start of the pass

    def steps(self, state: EpochState, cutter: Cutter) -> Iterator[tuple[CutStep, list[Any]]]:
        """Yield the steps from `state` to the end of the stream."""
        randomness: AbstractContextManager[None] = SharedRandomness(self._seed, state.epoch)
        if getattr(self._reader, "num_workers", 0):  # workers have generators of their own
            randomness = nullcontext()
        if self._generator is not None:
            self._generator.manual_seed(_mixed(self._seed, state.epoch))
        if self._owner is self._reader:
            self.begun = sampler_state(self._owner)
        with randomness:
            stream = _open(self._owner, self._reader, state.epoch)
            _skip(stream, state.position)
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
            if self.tagged:
                step = replace(step, entry=replace(step.entry, tag=fingerprint((len(chunk), chunk[0]))))
            first = step.start - position
            yield step, chunk[first : first + step.entry.local_batch] * step.copies or padding
            del chunk[: step.position - position]
            position = step.position


class OwnStream:
    """A stream of this rank's own: steps come with as many of its samples as the plan says; padding, once it has ended.

    The steps go on until nobody has samples, which the loader finds out when it hands them out.
    """

    tagged = False

    def __init__(self, owner: object, reader: Iterable[Any], *, rank: int, num_ranks: int) -> None:
        self._owner = owner
        self._reader = reader
        self._rank = rank
        self._num_ranks = num_ranks

    def steps(self, state: EpochState, cutter: Cutter) -> Iterator[tuple[CutStep, list[Any]]]:
        """Yield the steps from `state` on, without end."""
        shards = state.shards or (0,) * self._num_ranks
        if len(shards) != self._num_ranks:
            raise StateError(
                f"the saved state is of {len(shards)} ranks that each had a stream of its own, and these are "
                f"{self._num_ranks}: resume on as many, or leave the loader's state out to begin afresh"
            )
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
            step = cutter.take(shards, len(chunk))
            first += [fingerprint(sample) for sample in chunk[: 0 if is_told else _HEAD - len(first)]]
            if not is_told and min(step.shards) >= _HEAD:  # the same step on all ranks
                is_told = True
                step = replace(step, entry=replace(step.entry, head=_number_of(first)))
            yield step, chunk * step.copies or two_of(head)
            shards = step.shards


def _number_of(first: list[int]) -> int | None:
    """Return a number that stands for a stream's first samples; None where they are all alike, or too few."""
    return fingerprint(first) if len(first) == _HEAD and len(set(first)) > 1 else None


def _open(owner: object, reader: Iterable[Any], epoch: int) -> Iterator[Any]:
    set_epoch = getattr(owner, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    return iter(reader)


def _skip(stream: Iterator[Any], position: int) -> None:
    num_skipped = sum(1 for _ in islice(stream, position))
    if num_skipped < position:
        raise StateError(
            f"the stream ended after {num_skipped} samples, the saved state is at sample {position} of it: "
            "resume on the stream that was saved, or leave the loader's state out to begin afresh"
        )
