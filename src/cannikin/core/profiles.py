"""Profiles: what a run has learned of each rank's device, in plain numbers, for a later run to start from.

A profile is a dict that JSON can hold, with lists of one entry per local batch that was measured:

    batches, forward_s, backward_s, steps    local batch, the two mean times at it, and the steps behind these
    noise                                    relative scatter of one step's time
    shared                                   num_ranks, and per bucket gammas (of this rank) and tails_s; or None
    max_batch                                the largest local batch that its memory holds, where that is known; or None

`shared` depends on the model's buckets and on the network as well as on the device: it is used only where every rank's
profile has it, from runs with as many ranks and as many buckets as this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cannikin.core.learner import Learner
from cannikin.core.values import NO_MAX, BoolArray, FloatArray, IntArray
from cannikin.errors import StateError

Profile = dict[str, Any]

_COLUMNS = ("batches", "forward_s", "backward_s", "steps")
# What can have been measured: beyond it models overflow, or plan what no rank can do.
_TIME_S = (1e-9, 1e6)
_LIMITS = {
    "batches": (1.0, 1e12),
    "forward_s": _TIME_S,
    "backward_s": _TIME_S,
    "steps": (1e-9, 1e12),
    "noise": (0.0, 100.0),
    "num_ranks": (1.0, 1e6),
    "gammas": (0.0, 1.0),
    "tails_s": (0.0, 1e6),
}


def save_profiles(learner: Learner, max_batch: IntArray) -> list[Profile | None]:
    """Return one profile per rank; None where nothing was measured."""
    buckets, n = learner.buckets(), learner.num_ranks
    saved: list[Profile | None] = []
    for rank in range(n):
        columns = dict(zip(_COLUMNS, learner.history(rank).tolist(), strict=True))
        shared = None
        if buckets is not None:
            gammas, tails_s = buckets
            shared = {"num_ranks": n, "gammas": gammas[rank].tolist(), "tails_s": tails_s.tolist()}
        cap = int(max_batch[rank])
        profile = {**columns, "noise": learner.noise, "shared": shared, "max_batch": cap if cap < NO_MAX else None}
        saved.append(profile if columns["batches"] else None)
    return saved


def check_profile(profile: Any, whose: str) -> None:
    """Raise StateError where a profile is damaged; `whose` is how the message names it."""
    _table(profile, whose)
    _numbers(profile, "noise", whose, shape=())
    _shared(profile, whose)
    _cap(profile, whose)


def profile_caps(profiles: Sequence[Profile | None]) -> IntArray:
    """Return the largest local batch that each device's memory held, as far as its profile knows it, [n]."""
    return np.array([_cap(profile, f"rank {rank}") for rank, profile in enumerate(profiles)], dtype=np.int64)


def load_profiles(learner: Learner, profiles: list[Profile | None]) -> BoolArray:
    """Fill the histories of these ranks, and return which have a profile; a damaged profile changes nothing."""
    if len(profiles) != learner.num_ranks:
        raise StateError(f"{len(profiles)} profiles for {learner.num_ranks} ranks: give one per rank, None if unknown")
    known = np.array([profile is not None for profile in profiles])
    tables = {rank: _table(profiles[rank], f"rank {rank}") for rank in np.flatnonzero(known).tolist()}
    noises = [float(_numbers(profiles[rank], "noise", f"rank {rank}", shape=())) for rank in tables]
    shared = [_shared(profiles[rank], f"rank {rank}") for rank in tables]
    for rank, table in tables.items():
        learner.fill(rank, table)
    if noises and learner.noise == 0.0:  # else this run has measured it
        learner.noise = float(np.median(noises))
    parts = [part for part in shared if part is not None and part[0] == learner.num_ranks]
    if len(parts) == learner.num_ranks and len({len(tails) for _, _, tails in parts}) == 1:
        learner.fill_buckets(np.stack([gammas for _, gammas, _ in parts]), np.median([t for _, _, t in parts], axis=0))
    return known


def _table(profile: Any, whose: str) -> FloatArray:
    """Return the lists of a profile, checked, [4, K]."""
    first = _numbers(profile, "batches", whose)
    table = np.stack([_numbers(profile, name, whose, shape=first.shape) for name in _COLUMNS])
    if table.ndim != 2 or not table.size:
        raise StateError(f"the profile of {whose} has impossible entries, {table.tolist()!r:.200}: delete it")
    return table


def _shared(profile: Any, whose: str) -> tuple[int, FloatArray, FloatArray] | None:
    """Return the number of ranks, overlap ratios and tails of a profile, checked."""
    shared = profile.get("shared")
    if shared is None:
        return None
    tails = _numbers(shared, "tails_s", whose)
    gammas = _numbers(shared, "gammas", whose, shape=tails.shape)
    if tails.ndim != 1 or not tails.size or (np.diff(tails) > 0).any() or (gammas > 1).any() or gammas[-1] != 1:
        raise StateError(f"the profile of {whose} has impossible buckets, {shared!r:.200}: delete it")
    return int(_numbers(shared, "num_ranks", whose, shape=())), gammas, tails


def _cap(profile: Any, whose: str) -> int:
    """Return the largest local batch that the device's memory held, checked; `NO_MAX` where it is not known."""
    cap = profile.get("max_batch") if isinstance(profile, dict) else None
    if cap is None:
        return NO_MAX
    if type(cap) is not int or not 1 <= cap <= NO_MAX:
        raise StateError(f"the profile of {whose} has max_batch={cap!r:.200}, which cannot be: delete it")
    return cap


def _numbers(saved: Any, name: str, whose: str, shape: tuple[int, ...] | None = None) -> FloatArray:
    """Return an entry of a profile as numbers, or refuse those that cannot have been measured."""
    try:
        numbers: npt.NDArray[np.float64] = np.array(saved[name], dtype=np.float64)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateError(f"the profile of {whose} has no numbers under {name!r}: delete it") from error
    low, high = _LIMITS[name]
    if not ((low <= numbers) & (numbers <= high)).all() or (shape is not None and numbers.shape != shape):
        raise StateError(f"the profile of {whose} has {name}={saved[name]!r:.200}, which cannot be: delete it")
    return numbers
