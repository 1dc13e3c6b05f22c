"""Which device a rank has, and what is known of it: what was learned belongs to devices, not to the numbers of ranks.

After a restart ranks may be more or fewer, and in another order. `match_devices` finds each rank's device again among
those of a saved state, `find_origins` asks stored profiles too. What they find is an `Origin` per rank, with which
`Controller.load_state_dict` begins.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cannikin.core.learner import Learner
from cannikin.core.prior import DataSheet, first_shares
from cannikin.core.profiles import Profile, save_profiles
from cannikin.core.values import NO_MAX
from cannikin.errors import StateError
from cannikin.words import counted

Origin = int | Profile | None
"""What is known of a rank's device: it was the saved rank of this number, or it has this profile, or nothing is."""

MOST_DEPARTED = 48
"""Devices that are remembered after they have left: on spot machines a run meets new ones for as long as it lives."""
_DIFFERENT = 0.1  # in logarithms, of a device's time from what it was


@dataclass(frozen=True, kw_only=True)
class DeviceId:
    """What tells one device from another: its name, the host that it is in and, of GPUs, the vendor's UUID."""

    host: str = ""
    name: str = ""
    uuid: str = ""


def match_devices(
    saved: Sequence[DeviceId], present: Sequence[DeviceId], departed: Sequence[DeviceId] = ()
) -> list[int | None]:
    """Return for each present device the number of the known one that it is; None where no name is the same.

    Devices are the same by name and UUID; else by name and host; else by name alone, which is how a replaced machine
    finds its predecessor; alike ones in the order of their ranks. Where more devices of one name are present than were
    saved, a number is returned again: these are of the same kind. A departed one is taken by name alone only where no
    saved one has the name.

    Args:
        saved: the devices of the saved ranks, numbered from 0.
        present: the devices of the present ranks.
        departed: devices that had left before the state was saved, newest first; their numbers follow the saved ones.

    Example:
        >>> saved = [DeviceId(host="a", name="T4"), DeviceId(host="b", name="A100"), DeviceId(host="c", name="T4")]
        >>> match_devices(saved, [DeviceId(host="c", name="T4"), DeviceId(host="d", name="T4"), DeviceId(name="L4")])
        [2, 0, None]
        >>> match_devices(saved, [DeviceId(host="b", name="A100"), DeviceId(host="d", name="A100")])
        [1, 1]
        >>> match_devices(saved[:1], [saved[2], saved[0], saved[1]], departed=saved[1:])
        [2, 0, 1]
    """
    known = [*saved, *departed]
    were_there, had_left = range(len(saved)), range(len(saved), len(known))
    found: list[int | None] = [None] * len(present)

    def claim(key: Callable[[DeviceId], Hashable], among: Sequence[int]) -> None:
        """Give each present device that has none yet the first free one with its key."""
        taken, free = set(found), defaultdict[Hashable, deque[int]](deque)
        for was in among:
            if was not in taken:
                free[key(known[was])].append(was)
        for now, device in enumerate(present):
            if found[now] is None and key(device) is not None and free[key(device)]:
                found[now] = free[key(device)].popleft()

    claim(lambda device: (device.name, device.uuid) if device.uuid else None, range(len(known)))
    claim(lambda device: (device.name, device.host), range(len(known)))
    for among in (were_there, had_left):
        claim(lambda device: device.name, among)
        kinds = {known[was].name: was for was in reversed(among)}
        found = [kinds.get(device.name) if was is None else was for was, device in zip(found, present, strict=True)]
    return found


def find_origins(
    state: dict[str, Any],
    saved: Sequence[DeviceId],
    present: Sequence[DeviceId],
    profiles: Sequence[Profile | None],
    *,
    saved_s: float,
    departed: Sequence[Profile] = (),
) -> list[Origin]:
    """Return what is known of each rank's device, from a saved state and from stored profiles: the newer knows more.

    A device that the state has measured keeps its whole curve, unless this very device was stored later and then took
    a tenth more time or less: the profile takes its place. If the state knows only the kind, use the newer of state and
    profile; if not even that, the profile. A device that had left when the state was saved counts as one that the state
    has measured, at the time at which it left.

    Args:
        state: of a `Controller`.
        saved, present: the devices of the saved ranks and of the present ones.
        profiles: of the present devices, with `saved_s`, `host` and `uuid` beside what `Controller.profiles` returns.
        saved_s: when the state was saved, by the clock that stamps profiles.
        departed: the devices that had left before, as `find_departed` returned them.
    """
    measured = [*_profiles_of(state, saved), *departed]
    measured_s = [saved_s] * len(saved) + [_stored_s(profile) for profile in departed]
    taken: set[int | None] = set()
    origins: list[Origin] = []
    matches = match_devices(saved, present, list(map(_device_of, departed)))
    for was, device, profile in zip(matches, present, profiles, strict=True):
        better = was is None
        if was is not None and profile is not None and _stored_s(profile) > measured_s[was]:
            better = was in taken or (_is_of(profile, device) and _differ(measured[was], profile))
        taken.add(was)
        own = was if was is None or was < len(saved) else measured[was]
        origins.append(profile if better else own)
    return origins


def find_departed(
    state: dict[str, Any],
    saved: Sequence[DeviceId],
    present: Sequence[DeviceId],
    before: Sequence[Profile],
    *,
    saved_s: float,
) -> list[Profile]:
    """Return what is known of devices that the run has had and that are not there now: they may come back.

    Each is a profile with `device`, its name, `host`, `uuid`, and `saved_s`, when it was last there; newest first, at
    most `MOST_DEPARTED`. Another device of the same name does not stand for one that has left: alike names hide unlike
    speeds, as where one of two cards is shared.

    Args:
        state, saved, present, saved_s: as of `find_origins`.
        before: those that were not there either when the state was saved, newest first.
    """
    known = [
        profile and {**profile, "saved_s": saved_s, "device": device.name, "host": device.host, "uuid": device.uuid}
        for device, profile in zip(saved, _profiles_of(state, saved), strict=True)
    ]
    known += before
    devices = [*saved, *map(_device_of, before)]
    matches = match_devices(saved, present, devices[len(saved) :])
    there = {was for was, now in zip(matches, present, strict=True) if was is not None and _is_same(devices[was], now)}
    return [profile for was, profile in enumerate(known) if profile and was not in there][:MOST_DEPARTED]


def _device_of(profile: Profile) -> DeviceId:
    """Return which device a profile of `find_departed` is of."""
    return DeviceId(host=profile["host"], name=profile["device"], uuid=profile["uuid"])


def _is_same(old: DeviceId, new: DeviceId) -> bool:
    """Return whether two devices of one name are the same one: by their UUIDs, else by their hosts."""
    return old.uuid == new.uuid if old.uuid and new.uuid else old.host == new.host


def _profiles_of(state: dict[str, Any], saved: Sequence[DeviceId]) -> list[Profile | None]:
    """Return what the saved state of a `Controller` knows of each rank's device."""
    learner = Learner(len(state["plan"]["local_batches"]))
    if len(saved) != learner.num_ranks:
        devices, ranks = counted(len(saved), "device"), counted(learner.num_ranks, "rank")
        raise StateError(f"the state names {devices} of {ranks}: it is damaged")
    learner.load_state_dict(state["learner"])
    return save_profiles(learner, np.full(learner.num_ranks, NO_MAX))


def _stored_s(profile: Profile) -> float:
    """Return when a profile was stored; one whose file does not say it is older than any state."""
    stored_s = profile.get("saved_s")
    return float(stored_s) if isinstance(stored_s, int | float) else 0.0


def _is_of(profile: Profile, device: DeviceId) -> bool:
    """Return whether a profile was measured on this very device, not on another one of its name."""
    name = "uuid" if device.uuid else "host"
    return bool(profile.get(name) == getattr(device, name))


def _differ(old: Profile | None, new: Profile) -> bool:
    """Return whether a device took another time, at the size that the newer profile knows best."""
    if old is None:
        return True
    most = int(np.argmax(new["steps"]))
    seconds = new["forward_s"][most] + new["backward_s"][most]
    points = np.argsort(old["batches"])
    times = np.array(old["forward_s"])[points] + np.array(old["backward_s"])[points]
    expected = np.interp(new["batches"][most], np.array(old["batches"])[points], times)
    return bool(abs(np.log(seconds / expected)) > _DIFFERENT)


def suppose_unknown(learner: Learner, unknown: Sequence[int], sheets: Sequence[DataSheet]) -> None:
    """Let the known device that resembles it most stand for each unknown one, with little weight.

    Where data sheets tell the devices apart, it is the one whose share of a first batch (`first_shares`) is nearest,
    and a batch takes the unknown one as long as one that is larger in proportion to its share takes the other. Else it
    is the one of middle speed. Where no device is known, nothing is supposed.

    Args:
        learner: whose ranks' histories are filled.
        unknown: ranks of which nothing is known.
        sheets: one per rank, or none.
    """
    tables = {rank: learner.history(rank) for rank in range(learner.num_ranks) if rank not in unknown}
    tables = {rank: table for rank, table in tables.items() if table.size}
    if not tables:
        return
    shares = first_shares(sheets)
    by_speed = sorted(tables, key=lambda rank: _seconds_per_sample(tables[rank]))
    for rank in unknown:
        like, ratio = by_speed[len(by_speed) // 2], 1.0
        if shares is not None:
            ratios = {known: float(shares[rank] / shares[known]) for known in tables}
            like = min(ratios, key=lambda known: abs(np.log(ratios[known])))
            ratio = ratios[like]
        batches, *others = tables[like]
        learner.fill(rank, np.stack([np.maximum(batches * ratio, 1.0), *others]))
        learner.doubt(rank)


def _seconds_per_sample(table: Any) -> float:
    """Return the time of forward and backward per sample at the size that a device has run most."""
    batches, forward_s, backward_s, steps = table
    most = steps.argmax()
    return float((forward_s[most] + backward_s[most]) / batches[most])
