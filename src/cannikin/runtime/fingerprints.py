"""Numbers that stand for a sample, or for what a dataset lists, the same in every process: ranks compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_VALUES = 1024  # of a tensor, spread over all of it
_LETTERS = 4096  # of a text
_PARTS = 64  # of a list
_DEPTH = 5  # of lists in lists
_DATASETS = 64  # that one is made of
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


def list_fingerprint(dataset: Any, among: Container[str] | None = None) -> int:
    """Return a number that stands for the lists in a dataset that have an entry per sample: files, labels, indices.

    So for the datasets that this one is made of: torch's, and those of Hugging Face, of which it reads a few rows as
    they are stored. Else no sample is loaded, which may be slow and may open files that workers should. Folders are
    left out of names. A list with places that are empty yet is a cache, which ranks may fill differently.

    `among` has the names (`list_names`) of those that count, where not all do.

    Examples:
        >>> from torch.utils.data import Subset
        >>> even, odd = (Subset(range(10), range(first, 10, 2)) for first in (0, 1))
        >>> list_fingerprint(even) != list_fingerprint(odd)
        True
    """
    number = 0
    for name, entries in _lists(dataset):
        if among is None or name in among:
            number = fingerprint((number, name, entries))
    return number


def list_names(dataset: Any) -> frozenset[str]:
    """Return the names of the lists that `list_fingerprint` sees; a cache that fills up later is not among them."""
    return frozenset(name for name, _ in _lists(dataset))


def _lists(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the lists in a dataset by their names, each with some of its entries."""
    datasets, paths = [dataset], [""]
    for path, one in zip(paths, datasets, strict=True):  # which grow
        if _is_stored(one):
            yield path, _without_folder(_stored_rows(one))
            continue
        length = length_of(one)
        for name, part in _held_by(one):
            if _is_dataset(part):
                if len(datasets) < _DATASETS and all(part is not other for other in datasets):
                    datasets.append(part)
                    paths.append(f"{path}.{name}")
            elif _is_list(part) and len(part) == length:
                entries = [_without_folder(entry) for entry in _entries(part)]
                if all(entry is not None for entry in entries):
                    yield f"{path}.{name}", entries


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


def length_of(dataset: Any) -> int | None:
    """Return the length of a dataset; None where it cannot be known."""
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
