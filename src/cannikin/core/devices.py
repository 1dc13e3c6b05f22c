"""Which device a rank has, and what is known of it: what was learned belongs to devices, not to the numbers of ranks.

After a restart ranks may be more or fewer, and in another order. `match_devices` finds each rank's device again among
those of a saved state; what it found is an `Origin` per rank, which `Controller.load_state_dict` begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cannikin.core.learner import Learner
from cannikin.core.prior import DataSheet, first_shares
from cannikin.core.profiles import Profile

Origin = int | Profile | None
"""What is known of a rank's device: it was the saved rank of this number, or it has this profile, or nothing is."""


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


def _seconds_per_sample(table: Any) -> float:
    """Return the time of forward and backward per sample at the size that a device has run most."""
    batches, forward_s, backward_s, steps = table
    most = steps.argmax()
    return float((forward_s[most] + backward_s[most]) / batches[most])
