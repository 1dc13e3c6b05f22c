"""Which device a rank has, and what is known of it: what was learned belongs to devices, not to the numbers of ranks.

After a restart ranks may be more or fewer, and in another order. `match_devices` finds each rank's device again among
those of a saved state, `find_origins` asks stored profiles too. What they find is an `Origin` per rank, with which
`Controller.load_state_dict` begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cannikin.core.learner import Learner
from cannikin.core.prior import DataSheet, first_shares
from cannikin.core.profiles import Profile, save_profiles
from cannikin.core.values import NO_MAX
from cannikin.errors import StateError

Origin = int | Profile | None
"""What is known of a rank's device: it was the saved rank of this number, or it has this profile, or nothing is."""

_DIFFERENT = 0.1  # in logarithms, of a device's time from what it was


@dataclass(frozen=True, kw_only=True)
class DeviceId:
    """What tells one device from another: its name, the host that it is in and, of GPUs, the vendor's UUID."""

    host: str = ""
    name: str = ""
    uuid: str = ""


def match_devices(saved: Sequence[DeviceId], present: Sequence[DeviceId]) -> list[int | None]:
    """Return for each present device the number of the saved one that it is; None where no name is the same.

    Devices are the same by name and UUID; else by name and host; else by name alone, which is how a replaced machine
    finds its predecessor; alike ones in the order of their ranks. Where more devices of one name are present than were
    saved, a number is returned again: these are of the same kind.

    Example:
        >>> saved = [DeviceId(host="a", name="T4"), DeviceId(host="b", name="A100"), DeviceId(host="c", name="T4")]
        >>> match_devices(saved, [DeviceId(host="c", name="T4"), DeviceId(host="d", name="T4"), DeviceId(name="L4")])
        [2, 0, None]
        >>> match_devices(saved, [DeviceId(host="b", name="A100"), DeviceId(host="d", name="A100")])
        [1, 1]
    """
    found: list[int | None] = [None] * len(present)
    keys: tuple[Callable[[DeviceId], Any], ...] = (
        lambda device: (device.name, device.uuid) if device.uuid else None,
        lambda device: (device.name, device.host),
        lambda device: device.name,
    )
    for key in keys:
        for now, device in enumerate(present):
            if found[now] is None and key(device) is not None:
                free = (was for was, old in enumerate(saved) if was not in found and key(old) == key(device))
                found[now] = next(free, None)
    kinds = {device.name: was for was, device in reversed(list(enumerate(saved)))}
    return [kinds.get(device.name) if was is None else was for was, device in zip(found, present, strict=True)]


def find_origins(
    state: dict[str, Any],
    saved: Sequence[DeviceId],
    present: Sequence[DeviceId],
    profiles: Sequence[Profile | None],
    *,
    saved_s: float,
) -> list[Origin]:
    """Return what is known of each rank's device, from a saved state and from stored profiles: the newer knows more.

    A device that the state has measured keeps its whole curve, unless this very device was stored later and then took
    a tenth more time or less: the profile takes its place. If the state knows only the kind, use the newer of state and
    profile; if not even that, the profile.

    Args:
        state: of a `Controller`.
        saved, present: the devices of the saved ranks and of the present ones.
        profiles: of the present devices, with `saved_s`, `host` and `uuid` beside what `Controller.profiles` returns.
        saved_s: when the state was saved, by the clock that stamps profiles.
    """
    measured = _profiles_of(state)
    if len(saved) != len(measured):
        raise StateError(f"the state names {len(saved)} devices of {len(measured)} ranks: it is damaged")
    origins: list[Origin] = []
    for was, device, profile in zip(match_devices(saved, present), present, profiles, strict=True):
        better = was is None
        if was is not None and profile is not None and _stored_s(profile) > saved_s:
            better = was in origins or (_is_of(profile, device) and _differ(measured[was], profile))
        origins.append(profile if better else was)
    return origins


def find_departed(
    state: dict[str, Any],
    saved: Sequence[DeviceId],
    present: Sequence[DeviceId],
    before: Mapping[str, Profile],
    *,
    saved_s: float,
) -> dict[str, Profile]:
    """Return what is known, by name, of devices that the run has had and that are not there now: they may come back.

    Args:
        state, saved, present, saved_s: as of `find_origins`.
        before: those that were not there either when the state was saved.
    """
    known = dict(before)
    for device, profile in reversed(list(zip(saved, _profiles_of(state), strict=True))):
        if profile is not None:
            known[device.name] = {**profile, "saved_s": saved_s, "host": device.host, "uuid": device.uuid}
    there = {device.name for device in present}
    return {name: profile for name, profile in known.items() if name not in there}


def _profiles_of(state: dict[str, Any]) -> list[Profile | None]:
    """Return what the saved state of a `Controller` knows of each rank's device."""
    learner = Learner(len(state["plan"]["local_batches"]))
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
