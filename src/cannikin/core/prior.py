"""What devices' data sheets promise before anything has run: the first split where devices differ.

A weak prior, for a few steps only: what is measured takes its place after the first window. Its worth is that a card
with half of the memory does not begin with as many samples as its neighbour, and that the first steps of an uneven
cluster need not be its slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cannikin.core.values import FloatArray

# Training throughput per multiprocessor and clock, by compute capability, where a V100's is 1. Those of 7.0, 7.5 and
# 8.0 are means over four networks of public measurements on five GPUs (see `sim/data/devices.toml`); the others are
# geometric means of the data sheets' FP32 and tensor rates, which no measurement here has confirmed. A capability that
# is not listed counts as the next lower one.
_PER_MULTIPROCESSOR = {
    (3, 0): 0.4,
    (5, 0): 0.5,
    (6, 0): 0.6,
    (7, 0): 1.0,
    (7, 5): 0.75,
    (8, 0): 1.6,
    (8, 6): 1.2,
    (8, 9): 1.3,
    (9, 0): 2.8,
    (10, 0): 4.0,
    (12, 0): 1.3,
}
# Ratios of speed are drawn towards 1: data sheets say nothing of launches, loaders and what a network makes of a card.
# On the curves fitted to those measurements (`python -m benchmarks first_split`, 240 cases: 2 or 3 unlike GPUs, 4
# networks, 3 totals) the even split takes 1.44 times as long as the best one in the median, 2.09 times or more in the
# worst tenth; ratios to the power of 0.8 take 1.13 and 1.46, whole ratios 1.07 and 1.44. That whole ratios are a little
# better there says little: the throughputs above were taken from the same measurements.
_BELIEF = 0.8
_SAME_ROOM = 0.9  # memories within a tenth count as equal


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """What a rank's device says of itself; None where it does not.

    Args:
        capability: NVIDIA's compute capability, such as (9, 0).
        num_multiprocessors: that this process may use.
        clock_mhz: the highest clock.
        room_bytes: memory that is left for samples once the model, its gradients and the optimizer have theirs.
    """

    capability: tuple[int, int] | None = None
    num_multiprocessors: int | None = None
    clock_mhz: float | None = None
    room_bytes: float | None = None


def first_shares(sheets: Sequence[DataSheet]) -> FloatArray | None:
    """Return every rank's share of the first total batch, [n]; None where nothing tells one device from another.

        b_i ~ min(w_i, D r_i),   D = max_j w_j r_j^2,   w_i = speed_i^0.8,   r_i = room_i / largest room

    A rank gets samples in proportion to its speed, but no more per byte of its room than the rank that sets the pace.
    That is the fastest one among ranks with about as much room as the roomiest: the square passes over fast ones with
    little. Where a rank does not tell its speed, or its room, no rank is judged by it.

    Example:
        >>> large, small = DataSheet(room_bytes=21e9), DataSheet(room_bytes=7e9)
        >>> first_shares([large, large, small]).round(3).tolist()
        [0.429, 0.429, 0.143]
        >>> a100 = DataSheet(capability=(8, 0), num_multiprocessors=108, clock_mhz=1410, room_bytes=38e9)
        >>> t4 = DataSheet(capability=(7, 5), num_multiprocessors=40, clock_mhz=1590, room_bytes=14e9)
        >>> first_shares([a100, t4]).round(3).tolist()
        [0.787, 0.213]
        >>> first_shares([a100, a100]) is None
        True
    """
    if not sheets:
        return None
    speeds, rooms = _speeds(sheets), _rooms(sheets)
    if np.ptp(speeds) == 0 and np.ptp(rooms) == 0:
        return None
    pace = (speeds * rooms**2).max()
    shares = np.minimum(speeds, pace * rooms)
    result: FloatArray = shares / shares.sum()
    return result


def _speeds(sheets: Sequence[DataSheet]) -> FloatArray:
    """Return speeds as far as they are believed, the fastest 1, [n]; all 1 where some rank does not tell."""
    counts = [sheet.num_multiprocessors for sheet in sheets]
    capabilities = [sheet.capability for sheet in sheets]
    clocks = [sheet.clock_mhz for sheet in sheets]
    speeds = np.ones(len(sheets))
    if not all(counts):
        return speeds
    speeds *= np.array(counts, dtype=np.float64)
    if all(clocks):
        speeds *= np.array(clocks, dtype=np.float64)
    if all(capabilities):
        speeds *= [_per_multiprocessor(capability) for capability in capabilities if capability]
    believed: FloatArray = (speeds / speeds.max()) ** _BELIEF
    return believed


def _per_multiprocessor(capability: tuple[int, int]) -> float:
    known = [listed for listed in _PER_MULTIPROCESSOR if listed <= capability]
    return _PER_MULTIPROCESSOR[max(known, default=min(_PER_MULTIPROCESSOR))]


def _rooms(sheets: Sequence[DataSheet]) -> FloatArray:
    """Return rooms, the largest and those within a tenth of it 1, [n]; all 1 where some rank does not tell."""
    if any(sheet.room_bytes is None for sheet in sheets):
        return np.ones(len(sheets))
    rooms = np.array([sheet.room_bytes for sheet in sheets], dtype=np.float64)
    rooms = np.maximum(rooms, 1.0)
    rooms /= rooms.max()
    return np.where(rooms >= _SAME_ROOM, 1.0, rooms)
