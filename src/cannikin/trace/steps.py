"""Which steps of a log a trace shows: those asked for that have a timeline, or the nearest that have one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cannikin.errors import InvalidInputError
from cannikin.runlog import Header, Record, WindowRecord

_NUM_BY_DEFAULT = 6
_MOST_STEPS = 500  # what a browser still draws smoothly with a few dozen ranks
_MOST_NOTES = 5


class Contents(NamedTuple):
    """What a log has: the range of its steps, those with a timeline (in order, each once), and how many windows."""

    first_step: int
    last_step: int
    timeline_steps: tuple[int, ...]
    num_windows: int


class Choice(NamedTuple):
    """The steps to draw, in order, and what to tell whoever asked for others."""

    steps: tuple[int, ...]
    notes: tuple[str, ...] = ()


def contents(records: Iterable[Record]) -> Contents | None:
    """Return what a log has, from its records one by one; None where no window has been written yet.

    Example:
        >>> from cannikin.runlog import EventRecord
        >>> window = WindowRecord(first_step=10, num_steps=5, num_valid=0, total_batch=2, local_batches=(1, 1))
        >>> contents([window, EventRecord(step=17, kind="end")])
        Contents(first_step=10, last_step=17, timeline_steps=(), num_windows=1)
    """
    first_step, last_step, timeline_steps, num_windows = None, 0, set(), 0
    for record in records:
        if isinstance(record, WindowRecord):
            num_windows += 1
            first_step = record.first_step if first_step is None else min(first_step, record.first_step)
            last_step = max(last_step, record.first_step + record.num_steps - 1)
            if record.timeline is not None:
                timeline_steps.add(record.timeline.step)
        elif not isinstance(record, Header):
            last_step = max(last_step, record.step)
    if first_step is None:
        return None
    return Contents(first_step, last_step, tuple(sorted(timeline_steps)), num_windows)


def parse_steps(text: str) -> list[tuple[int, int]]:
    """Return numbers and ranges of steps, with both ends of each range.

    Example:
        >>> parse_steps("10,100:400")
        [(10, 10), (100, 400)]
    """
    ranges = []
    for part in text.split(","):
        low, colon, high = part.partition(":")
        try:
            first = int(low)
            last = int(high) if colon else first
        except ValueError:
            raise InvalidInputError(f"{text!r} are no steps: write numbers or ranges, like 10,200 or 100:400") from None
        if last < first:
            raise InvalidInputError(f"{part.strip()!r} is no range of steps: it ends before it begins")
        ranges.append((first, last))
    return ranges


def choose_steps(log: Contents, asked: Sequence[tuple[int, int]] | None = None) -> Choice:
    """Return the timelines in the ranges asked for, or the nearest; if none is, the first, the last and some between.

    Raises:
        InvalidInputError: the log has no timeline, or a range is outside the log.

    Example:
        >>> log = Contents(first_step=0, last_step=40, timeline_steps=(3, 12, 33), num_windows=3)
        >>> choose_steps(log).steps
        (3, 12, 33)
        >>> choose_steps(log, [(10, 10)])
        Choice(steps=(12,), notes=('step 10 has no timeline: step 12 is the nearest that has one',))
    """
    have = log.timeline_steps
    if not have:
        raise InvalidInputError("the log has no step's timeline: no window had a step that counts on every rank")
    if asked is None:
        return Choice(steps=_spread(have, _NUM_BY_DEFAULT))
    chosen: set[int] = set()
    notes = []
    for low, high in asked:
        if high < log.first_step or low > log.last_step:
            covered = f"which has steps {log.first_step} to {log.last_step}"
            raise InvalidInputError(f"{_words(low, high)} outside the log, {covered}")
        inside = have[bisect_left(have, low) : bisect_left(have, high + 1)]
        if not inside:
            nearest = min(have, key=lambda step: max(low - step, step - high))
            inside = (nearest,)
            notes.append(f"{_words(low, high, 'has')} no timeline: step {nearest} is the nearest that has one")
        if high > log.last_step:
            notes.append(f"the log ends with step {log.last_step}: there is no more up to {high}")
        chosen.update(inside)
    if len(notes) > _MOST_NOTES:
        notes[_MOST_NOTES - 1 :] = [f"and {len(notes) - _MOST_NOTES + 1} more have none: the nearest are drawn"]
    if len(chosen) > _MOST_STEPS:
        notes.append(f"{len(chosen)} steps are too many to draw: {_MOST_STEPS} of them are")
    return Choice(steps=_spread(sorted(chosen), _MOST_STEPS), notes=tuple(notes))


def _words(low: int, high: int, verb: str = "is") -> str:
    if low == high:
        return f"step {low} {verb}"
    return f"steps {low} to {high} {'have' if verb == 'has' else 'are'}"


def _spread(steps: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the first, the last and as many in between as may be, evenly."""
    if len(steps) <= most:
        return tuple(steps)
    return tuple(steps[k * (len(steps) - 1) // (most - 1)] for k in range(most))
