"""Cuts a batch into parts along its samples, whatever it is made of, joins parts, and refuses what it cannot cut.

Tensors and arrays are cut in the dimension that counts samples. Dicts, dataclasses and tuples of those are cut field by
field. A list with one item per sample, such as images of unlike sizes or strings, is cut between its items.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from cannikin.errors import InvalidInputError

_KEPT = (str, bytes, int, float, complex, bool, np.generic, type(None))  # of the whole batch, where they stand alone
Place = tuple[Any, ...]
"""Names of fields, from the batch to one of its parts."""


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch that stand alone, or are fields of it."""
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    fields = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    yield from (field for field in fields if isinstance(field, torch.Tensor))


class Slicer:
    """Cuts the batches of one model, which are all built alike.

    A list of two tensors may be inputs and targets, or two samples; which, is plain unless there are as many samples as
    fields. So what was plain once is remembered.

    Args:
        dim: the dimension of tensors that counts samples.
        caller: who cuts, as messages name it.
    """

    def __init__(self, dim: int = 0, caller: str = "micro_batches()") -> None:
        self._dim = dim
        self._caller = caller
        self._has_items: dict[Place, bool] = {}  # by place in the batch: whether a list has one item per sample

    def num_samples(self, batch: Any, expected: int = 0, *, certain: bool = False) -> int:
        """Return how many samples a batch has: as many as expected, or if that is not certain, as many as it looks.

        Where it is certain and nothing is expected, they are as many as its first tensor has.
        """
        sizes = _sizes(batch, self._dim)
        candidates = (expected or sizes[0],) if certain and sizes else (expected, *sizes)
        for size in candidates if sizes else ():
            found: dict[Place, bool] = {}
            if size > 0 and self._can_cut(batch, size, (), found):
                self._has_items.update(found)
                return size
        reason = self._reason(batch, sizes, expected if certain and expected else None)
        raise InvalidInputError(f"{self._caller} cannot cut this batch: {reason}")

    def cut(self, batch: Any, start: int, end: int) -> Any:
        """Return samples `start` to `end` of a batch, after `num_samples`."""
        return self._cut(batch, slice(start, end), ())

    def join(self, parts: Sequence[Any]) -> Any:
        """Return one batch of parts that were cut from batches built alike; refuse what each batch has one of."""
        return self._join(parts, ())

    def _can_cut(self, node: Any, size: int, place: Place, found: dict[Place, bool]) -> bool:
        """Return whether every field has this many samples; note in `found` which lists plainly have one per item."""
        if isinstance(node, torch.Tensor | np.ndarray):
            return node.ndim == 0 or node.shape[self._dim_of(node)] == size
        if isinstance(node, _KEPT):
            return True
        fields = _fields(node)
        if fields is None:
            return False
        as_fields = all(self._can_cut(field, size, (*place, name), found) for name, field in fields)
        if not _is_list(node):
            return as_fields
        as_items = len(node) == size
        as_fields = as_fields and not (node and all(isinstance(item, _KEPT) for item in node))
        if as_fields != as_items:
            found[place] = as_items
        return as_fields or as_items

    def _cut(self, node: Any, part: slice, place: Place) -> Any:
        if isinstance(node, torch.Tensor | np.ndarray):
            return node if node.ndim == 0 else node[(slice(None),) * self._dim_of(node) + (part,)]
        if isinstance(node, _KEPT):
            return node
        if _is_list(node) and self._has_items.get(place, False):
            return type(node)(node[part])
        return _rebuilt(node, [self._cut(field, part, (*place, name)) for name, field in _fields(node) or ()])

    def _join(self, nodes: Sequence[Any], place: Place) -> Any:
        node = nodes[0]
        if isinstance(node, torch.Tensor) and node.ndim:
            return torch.cat(list(nodes), dim=self._dim_of(node))
        if isinstance(node, np.ndarray) and node.ndim:
            return np.concatenate(nodes, axis=self._dim_of(node))
        if isinstance(node, (torch.Tensor, np.ndarray, *_KEPT)):
            other = next((each for each in nodes if each is not node and each != node), node)
            if other is not node:
                raise InvalidInputError(
                    f"{self._caller} cannot make one batch of samples whose batches had {node!r} and {other!r} in the "
                    "same place: give it one per sample, or do without"
                )
            return node
        if _is_list(node) and self._has_items.get(place, False):
            return type(node)(item for each in nodes for item in each)
        columns = zip(*([value for _, value in _fields(each) or ()] for each in nodes), strict=True)
        names = [name for name, _ in _fields(node) or ()]
        return _rebuilt(node, [self._join(column, (*place, name)) for name, column in zip(names, columns, strict=True)])

    def _dim_of(self, node: Any) -> int:
        """Return the dimension of samples; a vector has one number per sample."""
        return self._dim if node.ndim > self._dim else 0

    def _reason(self, batch: Any, sizes: list[int], expected: int | None) -> str:
        """Say what is in the way."""
        strange = next((leaf for leaf in pytree.tree_leaves(batch) if not _is_known(leaf)), None)
        if strange is not None:
            return (
                f"it has a {type(strange).__name__} in it; give tensors, or lists with one item per sample, also in "
                "dicts and dataclasses"
            )
        if not sizes:
            return "it has no tensor and no list in it"
        said = "" if expected is None else f", where the batch in hand has {expected}"
        return (
            f"its tensors and lists have {', '.join(map(str, sizes))} samples in dimension {self._dim}{said}; pass "
            "what is not one per sample beside the batch, and give batch_dim= to the model where samples are elsewhere"
        )


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray, *_KEPT)) or _fields(leaf) is not None


def _is_list(node: Any) -> bool:
    """Return whether something is a list or a tuple without names."""
    return isinstance(node, list | tuple) and not hasattr(node, "_fields")


def _fields(node: Any) -> list[tuple[Any, Any]] | None:
    """Return the fields of a dict, a dataclass, a list or a tuple, with their names; None of anything else."""
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node) if field.init]
    return None


def _rebuilt(node: Any, values: Sequence[Any]) -> Any:
    """Return the same kind of thing with these fields."""
    if isinstance(node, Mapping):
        rebuilt: Any = copy.copy(node)
        rebuilt.update(zip(node.keys(), values, strict=True))
        return rebuilt
    if isinstance(node, list | tuple):
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    return dataclasses.replace(
        node, **{name: value for (name, _), value in zip(_fields(node) or (), values, strict=True)}
    )


def _sizes(batch: Any, dim: int) -> list[int]:
    """Return how many samples a batch may have, the likeliest first: what its tensors say, then its lists."""
    nodes, tensors, lists = [batch], [], []
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, torch.Tensor | np.ndarray):
            tensors += [node.shape[dim if node.ndim > dim else 0]] if node.ndim else []
        elif not isinstance(node, _KEPT):
            lists += [len(node)] if _is_list(node) else []
            nodes += [value for _, value in _fields(node) or ()]
    if _is_list(batch) and (tensors or lists[1:]):
        del lists[0]  # the outermost is one of fields, as a rule
    return list(dict.fromkeys(tensors + lists))
