"""Whom a rank waits for: what ranks tell each other of where they are, and the sentences that follow from it.

A collective waits in silence until the group's time limit, half an hour by default, and its error names no rank. So
every rank says now and then where in its training it is; one that has not moved for a while compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        still_s: for how long it has been at that line.
        waits: whether it waits there in a collective of torch's.
    """

    place: Place
    line: str = field(default="", compare=False)
    end: str = ""
    silent_s: float = 0.0
    lost: tuple[int, ...] = ()
    still_s: float = 0.0
    waits: bool = False


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


def parted(rank: int, stuck_s: float, seen: Mapping[int, Sighting], patience_s: float, limit_s: float) -> str | None:
    """Return what a rank says where all ranks are at one place in training, and at different lines of the script.

    So they are where one hangs outside of the training while others wait for it in a collective of the script's own;
    but also while one evaluates for all. None where a rank has moved lately, which one that evaluates does; where this
    rank does not wait; and where nobody is seen to wait in a collective, as on a GPU, for twice as long.

    Args:
        rank, stuck_s: who speaks, and for how long it has not moved in its training.
        seen: every rank, this one too.
        patience_s: for how long no rank has left its line.
        limit_s: the group's time limit.
    """
    still_s = min(each.still_s for each in seen.values())
    waiting_there = [each for each, at in seen.items() if at.waits]
    if waiting_there and rank not in waiting_there:
        return None
    if len({at.line for at in seen.values()}) == 1 or not all(at.line and not at.end for at in seen.values()):
        return None
    if still_s < (patience_s if waiting_there else 2 * patience_s):
        return None
    by_line: dict[tuple[str, bool], list[int]] = {}
    for each, at in sorted(seen.items()):
        by_line.setdefault((at.line, at.waits), []).append(each)
    told = [f"{_ranks(ranks)} {_verb(len(ranks), waits)} in {line}" for (line, waits), ranks in by_line.items()]
    more = [f"and others in {len(told) - _NAMED} more lines"] if len(told) > _NAMED else []
    return (
        f"rank {rank} has been {seen[rank].place} for {stuck_s:.0f} s. So have all ranks, at different lines of the "
        f"script, which they have not left for {still_s:.0f} s: {', '.join([*told[:_NAMED], *more])}. All is well "
        "where one of them does what the others wait for, such as an evaluation or a checkpoint. Else one of them "
        "hangs, or some ranks have called what all ranks must call, such as weighted_mean() or a barrier. Ranks go on "
        f"waiting, up to the group's limit of {limit_s:.0f} s"
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


def _verb(count: int, waits: bool) -> str:
    if waits:
        return "wait" if count > 1 else "waits"
    return "are" if count > 1 else "is"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) > _NAMED:
        return f"ranks {', '.join(numbers[:_NAMED])} and {len(numbers) - _NAMED} more"
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
