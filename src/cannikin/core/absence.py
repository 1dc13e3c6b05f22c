"""Whom a rank waits for: what ranks tell each other of where they are, and the sentences that follow from it.

A collective waits in silence until the group's time limit, half an hour by default, and its error names no rank. So
every rank says now and then where in its training it is; one that has not moved for a while compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

RESTART = "start again from the last checkpoint, which also fits other ranks (docs/hosts.md)"
_NAMED = 3  # ranks in one sentence


class Phase(IntEnum):
    """Where in a step a rank is, in the order in which that happens."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    AFTER = 3
    MEETING = 4  # in what ranks exchange between two steps


_WORDS = {
    Phase.FORWARD: "in the forward pass of step {}",
    Phase.BACKWARD: "in the backward pass of step {}",
    Phase.OPTIMIZER: "in the optimizer's step {}",
    Phase.AFTER: "after step {}",
    Phase.MEETING: "between step {} and the next",
}


@dataclass(frozen=True, order=True)
class Place:
    """How far a rank has come; of two places, the later one is the larger.

    Args:
        step: number of the step in training; -1 before the first one.
        phase: where in it.
        num_buckets: buckets of gradients that backward has begun to reduce.
        is_meeting: whether it is in something that all ranks do together there, such as a mean over them.

    Example:
        >>> max(Place(30, Phase.AFTER), Place(31, Phase.BACKWARD, 2), Place(31, Phase.BACKWARD, 1))
        Place(step=31, phase=<Phase.BACKWARD: 1>, num_buckets=2, is_meeting=False)
        >>> str(Place(30, Phase.AFTER))
        'after step 30'
    """

    step: int
    phase: Phase
    num_buckets: int = 0
    is_meeting: bool = False

    def __str__(self) -> str:
        if self.step < 0:
            return "before its first step"
        return _WORDS[self.phase].format(self.step) + (", where all ranks meet" if self.is_meeting else "")


BEFORE = Place(-1, Phase.AFTER)
NOT_COME = Place(-2, Phase.AFTER)  # of a rank that has not begun to make its model


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What is known of one rank.

    Args:
        place: where it was when it was last heard of.
        line: the line of the script in which it is, where it has been there for a while.
        end: "ended" or "failed" where its program has come to its end, "let go" where it has only let go of the model,
            as between two models of a sweep, else "".
        silent_s: for how long it has not been heard of.
        lost: the ranks by whose fault its program ends.
    """

    place: Place
    line: str = field(default="", compare=False)
    end: str = ""
    silent_s: float = 0.0
    lost: tuple[int, ...] = ()


def missing(place: Place, others: Mapping[int, Sighting], silence_s: float) -> dict[int, str]:
    """Return which of the other ranks one at this place waits for, each with what is known of it.

    Those are ranks that are not heard of any more, and ranks that are not as far.

    Example:
        >>> missing(Place(31, Phase.BACKWARD), {2: Sighting(place=Place(30, Phase.AFTER), silent_s=12.0)}, 10.0)
        {2: 'it has not been heard of for 12 s, when it was after step 30: its process or its host has stopped'}
    """
    absent = {rank: told for rank, seen in others.items() if (told := _told(place, seen, silence_s)) is not None}
    for other, seen in others.items():
        for rank in seen.lost:
            absent.setdefault(rank, f"rank {other} has lost it as well")
    return dict(sorted(absent.items()))


def _told(place: Place, seen: Sighting, silence_s: float) -> str | None:
    if seen.lost or seen.end == "let go":
        return None  # it ends as this one does, or has done all that it had to do
    if seen.end == "failed":
        return f"its program has ended with an error {seen.place}"
    if seen.end:
        return f"its program has ended {seen.place}" if seen.place < place else None
    if seen.place == NOT_COME:
        not_come = "it has not come to its model: its program has ended, or is still at something before"
        return not_come if seen.silent_s >= silence_s else None
    if seen.silent_s >= silence_s:
        gone = "its process or its host has stopped"
        return f"it has not been heard of for {seen.silent_s:.0f} s, when it was {seen.place}: {gone}"
    return f"it is alive and {seen.place}{_in(seen.line)}" if seen.place < place else None


def _in(line: str) -> str:
    return f", in {line}" if line else ""


def waiting(rank: int, place: Place, stuck_s: float, absent: Mapping[int, str], limit_s: float) -> str:
    """Return what a rank says that waits for others."""
    told = _each(absent)
    return (
        f"rank {rank} has been {place} for {stuck_s:.0f} s and waits for {_ranks(absent)} ({told}). It goes on "
        f"waiting, up to the group's limit of {limit_s:.0f} s; if nobody comes, end the job and {RESTART}"
    )


def awaited(rank: int, place: Place, stuck_s: float, line: str, others: Mapping[int, Sighting]) -> str | None:
    """Return what a rank says for which others wait; None where nobody does."""
    ahead = {other: seen.place for other, seen in sorted(others.items()) if not seen.end and seen.place > place}
    if not ahead:
        return None
    told = ", ".join(f"rank {other} is {where}" for other, where in ahead.items())
    return (
        f"rank {rank} has been {place} for {stuck_s:.0f} s{_in(line)}, and others wait for it or have gone on without "
        f"it: {told}. All ranks must train on every batch that the loader hands them"
    )


def lost(rank: int, place: Place, absent: Mapping[int, str]) -> str:
    """Return what the error says that ends a rank whose collective has failed."""
    told, those = _each(absent), "that rank" if len(absent) == 1 else "those ranks"
    return (
        f"rank {rank}, {place}, has lost {_ranks(absent)} ({told}). The cause is in the output of {those}: look "
        f"there first, then {RESTART}"
    )


def _each(absent: Mapping[int, str]) -> str:
    told = [f"rank {other}: {what}" for other, what in absent.items()]
    more = [f"and {len(told) - _NAMED} more"] if len(told) > _NAMED else []
    return "; ".join([*told[:_NAMED], *more])


def _ranks(absent: Mapping[int, str]) -> str:
    numbers = [str(rank) for rank in absent]
    if len(numbers) > _NAMED:
        return f"ranks {', '.join(numbers[:_NAMED])} and {len(numbers) - _NAMED} more"
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
