"""What to keep of a stream of unknown length: its ends, an even spread of it, and typical timelines."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from cannikin.report.rank_steps import longest_ns, rank_steps
from cannikin.runlog import Timeline

__all__ = ["Ends", "Spread", "Timelines"]

T = TypeVar("T")
_NUM_TIMELINES = 9


class Ends(Generic[T]):
    """The first and the last `size` of a stream.

    Example:
        >>> ends = Ends[int](2)
        >>> for number in range(9):
        ...     ends.add(number)
        >>> ends.kept, ends.num_seen
        ((0, 1, 7, 8), 9)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._first: list[T] = []
        self._last: deque[T] = deque(maxlen=size)
        self.num_seen = 0

    def add(self, value: T) -> None:
        """Take one more."""
        self.num_seen += 1
        if len(self._first) < self._size:
            self._first.append(value)
        else:
            self._last.append(value)

    @property
    def kept(self) -> tuple[T, ...]:
        """Those kept, in order."""
        return (*self._first, *self._last)


class Spread(Generic[T]):
    """At most `size` of a stream, evenly spaced, the first and the last among them.

    Example:
        >>> spread = Spread[int](4)
        >>> for number in range(100):
        ...     spread.add(number)
        >>> spread.kept
        (0, 64, 99)
    """

    def __init__(self, size: int) -> None:
        self._size, self._stride, self._num_seen = size, 1, 0
        self._kept: list[T] = []
        self._last: list[T] = []

    def add(self, value: T) -> None:
        """Take one more."""
        self._last = [value]
        if self._num_seen % self._stride == 0:
            if len(self._kept) == self._size - 1:
                self._kept, self._stride = self._kept[::2], self._stride * 2
            if self._num_seen % self._stride == 0:
                self._kept.append(value)
        self._num_seen += 1

    @property
    def kept(self) -> tuple[T, ...]:
        """Those kept, in order."""
        return tuple(self._kept) if self._kept[-1:] == self._last else (*self._kept, *self._last)


class Timelines:
    """Of the first and of the last timelines those that can be drawn and are typical: the middle one by duration."""

    def __init__(self) -> None:
        self._first: list[Timeline] = []
        self._first_goes_on = True
        self._last: deque[Timeline] = deque(maxlen=_NUM_TIMELINES)

    def add(self, line: Timeline) -> None:
        """Take one more."""
        self._last.append(line)
        if self._first_goes_on:
            alike = not self._first or self._first[0].local_batches == line.local_batches
            self._first += [line] if alike else []
            self._first_goes_on = alike and len(self._first) < _NUM_TIMELINES

    @property
    def early(self) -> Timeline | None:
        """A typical step of the first split."""
        return _typical(self._first)

    @property
    def late(self) -> Timeline | None:
        """A typical step of the last split."""
        return _typical([line for line in self._last if line.local_batches == self._last[-1].local_batches])


def _typical(lines: list[Timeline]) -> Timeline | None:
    drawable = sorted(filter(_is_drawable, lines), key=lambda line: longest_ns(rank_steps(line).values()))
    return drawable[len(drawable) // 2] if drawable else None


def _is_drawable(line: Timeline) -> bool:
    """Whether all of its times are there, for all ranks and buckets alike, and it took any."""
    steps = rank_steps(line)
    return (
        0 < len(steps) == len(line.local_batches)
        and len({len(step.buckets) for step in steps.values()}) == 1
        and longest_ns(steps.values()) > 0
    )
