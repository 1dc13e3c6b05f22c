"""Where the time of a sharded step goes: compute of each stretch between collectives, and the collectives themselves.

Ranks of a module under `fully_shard` wait for each other at every layer, so that the time of forward says nothing of a
rank's speed. A stretch of compute begins when a layer's parameters are there, and ends where the next ones are needed:

    forward     need, [all-gather], have, compute ...                of every layer
    backward    need, [all-gather], have, compute ..., end, [reduce-scatter]

Need and have are marks in the device's order of compute, so that waiting lies between the two whether the host waits
(gloo) or a stream does (NCCL, where the all-gather's own end says when there is something to have). `LayerHooks` takes
them around FSDP's own hooks:

    forward     a pre-hook before FSDP's, which waits for the all-gather, and one after it
    backward    hooks of the layer's outputs before and after FSDP's, which waits again, and hooks of its inputs, which
                come before FSDP reduces; for a layer whose inputs have no gradient, the end of backward
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cannikin.runtime.compiling import not_compiled


@dataclass(slots=True)
class _Stretch:
    """Compute from where it may begin, `have`, to where it has to wait, and the marks around its collectives.

    A bare one begins by itself, at the start of backward or after a reduction, and needs no layer.
    """

    is_bare: bool
    need: Any = None
    have: Any = None  # None where the end of the all-gather tells it
    end: Any = None
    gather: tuple[Any, Any] | None = None
    reduce: tuple[Any, Any] | None = None


@dataclass(slots=True)
class _Segment:
    """Stretches that nothing is waited for in between; seconds, NaN where there is no such collective."""

    compute_s: float
    gather_s: float = math.nan
    reduce_s: float = math.nan
    done_s: float = math.nan
    is_bare: bool = False  # so far


@dataclass(frozen=True, kw_only=True)
class Segments:
    """One step between its collectives, seconds; NaN where there is no such collective.

    Args:
        compute_s: this rank's own compute.
        gather_s, reduce_s: the all-gather that a segment waits for, and the reduce-scatter at its end.
        done_s: when each segment of backward was over, its reduce-scatter included, after the start of backward.
        num_forward: how many come before backward; the first comes before the first all-gather.
    """

    compute_s: list[float]
    gather_s: list[float]
    reduce_s: list[float]
    done_s: list[float]
    num_forward: int

    @property
    def before_s(self) -> float:
        """Compute before backward."""
        return sum(self.compute_s[: self.num_forward])

    @property
    def ready_s(self) -> list[float]:
        """When each segment of backward would be computed if nobody had to wait, after the start of backward."""
        return list(accumulate(self.compute_s[self.num_forward :]))


class Passage:
    """The stretches of one step on one rank, in their order.

    Args:
        mark, seconds: those of the device.
        num_layers: how many have collectives.
        blocks: whether a collective holds up what the host does after it, as gloo's do and NCCL's do not.
    """

    def __init__(
        self, mark: Callable[[], Any], seconds: Callable[[Any, Any], float], num_layers: int, *, blocks: bool
    ) -> None:
        self.most_segments, self.blocks = 3 * num_layers + 3, blocks
        self.in_forward = self._in_backward = False
        self._mark, self._seconds = mark, seconds
        self._stretches: list[_Stretch] = []
        self._first = self._num_forward = 0  # stretches before the last forward, and before the last backward
        self._ahead: dict[int, tuple[Any, Any]] = {}  # all-gathers of layers that are not needed yet
        self._waits_for: int | None = None  # a layer
        self._seen: set[int] = set()  # layers that were needed in this pass

    @property
    def is_open(self) -> bool:
        """Whether all-gathers now are this step's, and not an evaluation's."""
        return self.in_forward or self._in_backward

    def begin_forward(self) -> None:
        """Take note that forward begins; of several micro-batches the last one's layers count."""
        self._end()
        self.in_forward = True
        self._first = len(self._stretches)
        self._seen.clear()

    def end_forward(self) -> None:
        """Take note that forward is over: what is gathered now is not the step's, up to its backward."""
        self.in_forward = False

    def begin_backward(self) -> None:
        """Take note that backward begins."""
        self._begin()
        self._num_forward = len(self._stretches) - 1
        self._in_backward = True
        self._seen.clear()

    def end_backward(self) -> None:
        """Take note that nothing is left to compute, though some gradients may still have to be reduced."""
        self._end()
        self._in_backward = False

    def need(self, layer: int) -> None:
        """Take note that the compute so far is done, and this layer's parameters are needed."""
        if layer in self._seen:
            return
        self._seen.add(layer)
        need = self._end()
        self._stretches.append(_Stretch(is_bare=False, need=need, gather=self._ahead.pop(layer, None)))
        self._waits_for = layer

    def have(self) -> None:
        """Take note that they are there."""
        if self._waits_for is not None:
            if self.blocks or self._stretches[-1].gather is None:
                self._stretches[-1].have = self._mark()
            self._waits_for = None

    def gathered(self, layer: int, start: Any, end: Any) -> None:
        """Take note of an all-gather, which may run ahead."""
        if self._waits_for == layer:
            self._stretches[-1].gather = start, end
        else:
            self._ahead[layer] = start, end

    def end_layer(self) -> None:
        """Take note that a layer's gradients are there; of several such moments the last one counts."""
        self._stretches[-1].end = self._mark()

    def begin_reduction(self) -> None:
        """Take note that gradients may be copied to where they are reduced from, which counts as what follows."""
        if self._stretches:
            self._begin()

    def reduced(self, start: Any, end: Any) -> None:
        """Take note of the reduce-scatter of the gradients that were there last."""
        if len(self._stretches) > 1:
            self._stretches[-2].reduce = start, end
            if self.blocks:
                self._stretches[-1].have = end

    def _begin(self) -> None:
        self._stretches.append(_Stretch(is_bare=True, have=self._end()))

    def _end(self) -> Any:
        """End the last stretch unless it has ended; return this moment."""
        now = self._mark()
        if self._stretches and self._stretches[-1].end is None:
            self._stretches[-1].end = now
        return now

    def close(self, backward_start: Any, before_s: float) -> Segments | None:
        """Return durations instead of marks; None where some are missing.

        Args:
            backward_start: the mark.
            before_s: compute of the step before its first forward: the optimizer's.
        """
        stretches = self._stretches[:-1]  # after the last reduce-scatter comes the next step
        if any(stretch.end is None or (stretch.have is None and stretch.gather is None) for stretch in stretches):
            return None
        first = before_s + sum(self._compute_s(stretch) for stretch in stretches[: self._first])
        segments, num_forward = [_Segment(first)], 1
        for number in range(self._first, len(stretches)):
            if number == self._num_forward:
                num_forward = len(segments)
            self._add(segments, stretches[number], begins_backward=number == self._num_forward)
            last = stretches[number]
            end = last.end if last.reduce is None else last.reduce[1]
            segments[-1].done_s = self._seconds(backward_start, end)
        return Segments(
            compute_s=[segment.compute_s for segment in segments],
            gather_s=[segment.gather_s for segment in segments],
            reduce_s=[segment.reduce_s for segment in segments],
            done_s=[segment.done_s for segment in segments[num_forward:]],
            num_forward=num_forward,
        )

    def _add(self, segments: list[_Segment], stretch: _Stretch, *, begins_backward: bool) -> None:
        """Let a stretch be part of the last segment, or begin one: where ranks wait for each other."""
        if begins_backward or not math.isnan(segments[-1].reduce_s):
            segments.append(_Segment(0.0, is_bare=True))
        if stretch.gather is not None:
            if not segments[-1].is_bare:  # else the next layer's parameters are waited for at once
                segments.append(_Segment(0.0))
            segments[-1].gather_s = self._seconds(*stretch.gather)
        current = segments[-1]
        current.is_bare = current.is_bare and stretch.is_bare
        current.compute_s += self._compute_s(stretch)
        if stretch.reduce is not None:
            current.reduce_s = self._seconds(*stretch.reduce)

    def _compute_s(self, stretch: _Stretch) -> float:
        """Return the time from when the parameters are needed and there; copying them to their places is compute."""
        if stretch.have is None and stretch.gather is not None:
            starts = (stretch.need, stretch.gather[1])
            return max(0.0, min(self._seconds(start, stretch.end) for start in starts))
        return max(0.0, self._seconds(stretch.have, stretch.end))


class LayerHooks:
    """The hooks around one layer's forward and backward that tell a passage where it is.

    Args:
        layer: its number.
        parts: the modules that FSDP gathers for at once, one as a rule.
        passage: returns the one of the step in training, if any.
    """

    def __init__(self, layer: int, parts: list[Any], passage: Callable[[], Passage | None]) -> None:
        self._layer, self._passage = layer, passage
        self._outputs: list[torch.Tensor] = []  # of the forward under way
        for part in parts:
            part.register_forward_pre_hook(not_compiled(self._before_wait), prepend=True)
            part.register_forward_pre_hook(not_compiled(self._after_wait), with_kwargs=True)
            part.register_forward_hook(not_compiled(self._before_hooks), prepend=True)
            part.register_forward_hook(not_compiled(self._after_hooks))

    def _in_forward(self) -> Passage | None:
        passage = self._passage()
        return passage if passage is not None and passage.in_forward else None

    def _before_wait(self, module: Any, args: Any) -> None:
        passage = self._in_forward()
        if passage is not None:
            passage.need(self._layer)

    def _after_wait(self, module: Any, args: Any, kwargs: Any) -> None:
        passage = self._in_forward()
        if passage is None:
            return
        passage.have()
        for tensor in _with_gradient((args, kwargs)):
            _on_gradient(tensor, passage.end_layer)

    def _before_hooks(self, module: Any, args: Any, output: Any) -> None:
        passage = self._in_forward()
        if passage is None:
            return
        self._outputs = _with_gradient(output)
        for tensor in self._outputs:
            _on_gradient(tensor, partial(passage.need, self._layer))

    def _after_hooks(self, module: Any, args: Any, output: Any) -> None:
        outputs, self._outputs = self._outputs, []
        passage = self._in_forward()
        if passage is None:
            return
        for tensor in outputs:  # as they were before FSDP gave them another precision: behind its own hook
            _on_gradient(tensor, passage.have)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Have a function called when the backward that is under way has computed everything.

    FSDP does the same with what reduces layers whose inputs have no gradient; of several, the first is called first.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _with_gradient(values: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _on_gradient(tensor: Any, function: Callable[[], None]) -> None:
    tensor.register_hook(lambda gradient: function())
