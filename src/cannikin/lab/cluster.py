"""What a lab cluster is like: its ranks' speeds, the device that each rank pretends to be, the link between them.

forward of b samples    f (t_0 + t b / v(k))            f  forward share    t    device time of a sample
backward          (1 - f) (t_0 + t b / v(k))            t_0  fixed time     v(k) speed at training forward k
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import msgspec

from cannikin.errors import InvalidInputError

DEFAULT_SAMPLE_S = 1e-3
MAX_RANKS = 64  # processes on one machine
_SPEEDS = (1e-3, 1e3)
_LINK_BIT_PER_S = (1e5, 1e12)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """From its training forward number `step` on, a rank has `factor` times its own speed; the last one counts."""

    rank: int
    factor: float
    step: int

    def __post_init__(self) -> None:
        if self.rank < 0 or self.step < 0:
            raise InvalidInputError(f"slow: rank {self.rank} and step {self.step} must not be negative")
        if not _SPEEDS[0] <= self.factor <= _SPEEDS[1]:
            raise InvalidInputError(f"slow: factor {self.factor:g} must be from {_SPEEDS[0]:g} to {_SPEEDS[1]:g}")


class LabDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's device; `changes` are (training forward, factor on the speed) in order, the last one reached counts.

    Example:
        >>> device = LabDevice(speed=0.5, sample_s=1e-3, fixed_s=0.0, forward_share=0.25, changes=[(100, 0.5)])
        >>> device.times_s(num_samples=10, forward=0)
        (0.005, 0.015)
        >>> device.times_s(num_samples=10, forward=100)
        (0.01, 0.03)
    """

    speed: float
    sample_s: float
    fixed_s: float
    forward_share: float
    changes: list[tuple[int, float]] = []

    def times_s(self, *, num_samples: int, forward: int) -> tuple[float, float]:
        """Return the seconds of forward and of backward of `num_samples`, in training forward number `forward`."""
        factor = next((factor for step, factor in reversed(self.changes) if step <= forward), 1.0)
        total_s = self.fixed_s + self.sample_s * num_samples / (self.speed * factor)
        return total_s * self.forward_share, total_s * (1 - self.forward_share)


@dataclass(frozen=True, kw_only=True)
class LabCluster:
    """A cluster to be made on this machine.

    Args:
        speeds: v of each rank, relative to one another; a device of speed 1 takes `sample_s` for a sample.
        names: each rank's name, for people.
        sample_s: device time of one sample in forward and backward together; None leaves it to the mechanism.
        fixed_s: device time of a step that neither the batch nor the speed changes.
        forward_share: part of the device time that is forward.
        forward_shares: the same for each rank, where devices differ in it; None for the common one.
        link_bit_per_s: bandwidth of each rank's link, in each direction; None for what the machine gives.
        slowdowns: changes of speed in mid-run.
    """

    speeds: tuple[float, ...]
    names: tuple[str, ...] = ()
    sample_s: float | None = None
    fixed_s: float = 0.0
    forward_share: float = 1 / 3
    forward_shares: tuple[float | None, ...] = ()
    link_bit_per_s: float | None = None
    slowdowns: tuple[Slowdown, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.speeds) <= MAX_RANKS:
            raise InvalidInputError(f"{len(self.speeds)} ranks: a lab cluster has from 1 to {MAX_RANKS}")
        for rank, speed in enumerate(self.speeds):
            if not _SPEEDS[0] <= speed <= _SPEEDS[1]:
                raise InvalidInputError(f"speed {speed:g} of rank {rank} must be from {_SPEEDS[0]:g} to {_SPEEDS[1]:g}")
        if self.names and len(self.names) != len(self.speeds):
            raise InvalidInputError(f"{len(self.names)} names for {len(self.speeds)} ranks: give one each, or none")
        if self.sample_s is not None and not (0 < self.sample_s <= 100):
            raise InvalidInputError(f"sample_ms={self.sample_s * 1e3:g} must be above 0 and at most 100000")
        if not 0 <= self.fixed_s <= 100:
            raise InvalidInputError(f"fixed_ms={self.fixed_s * 1e3:g} must be from 0 to 100000")
        if len(self.forward_shares) not in (0, len(self.speeds)):
            raise InvalidInputError(f"{len(self.forward_shares)} forward_shares for {len(self.speeds)} ranks: one each")
        for share in (self.forward_share, *self.forward_shares):
            if share is not None and not 0 <= share <= 1:
                raise InvalidInputError(f"forward_share={share:g} must be from 0 to 1")
        if self.link_bit_per_s is not None and not _LINK_BIT_PER_S[0] <= self.link_bit_per_s <= _LINK_BIT_PER_S[1]:
            raise InvalidInputError(f"link of {self.link_bit_per_s:g} bit/s must be from 100kbit to 1000gbit")
        for slowdown in self.slowdowns:
            if slowdown.rank >= len(self.speeds):
                raise InvalidInputError(f"slow: there is no rank {slowdown.rank}, only 0 to {len(self.speeds) - 1}")

    @property
    def num_ranks(self) -> int:
        """The number of ranks, n."""
        return len(self.speeds)

    def devices(self) -> list[LabDevice]:
        """Return the device of each rank, with the default `sample_s` where the cluster has none."""
        own = self.forward_shares or (None,) * self.num_ranks
        return [
            LabDevice(
                speed=speed,
                sample_s=DEFAULT_SAMPLE_S if self.sample_s is None else self.sample_s,
                fixed_s=self.fixed_s,
                forward_share=self.forward_share if share is None else share,
                changes=sorted((slow.step, slow.factor) for slow in self.slowdowns if slow.rank == rank),
            )
            for rank, (speed, share) in enumerate(zip(self.speeds, own, strict=True))
        ]


def parse_speeds(text: str) -> tuple[float, ...]:
    """Read the speeds of ranks from a list with commas.

    Example:
        >>> parse_speeds("1.0,0.5,0.25")
        (1.0, 0.5, 0.25)
    """
    return tuple(_number(part, "ranks", "speeds with commas between, like 1.0,0.5,0.25") for part in text.split(","))


def parse_link(text: str) -> float:
    """Read a bandwidth as `tc` writes it, in bit/s.

    Example:
        >>> parse_link("1gbit"), parse_link("2.5 Mbit")
        (1000000000.0, 2500000.0)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmg]?)bit\s*", text.lower())
    if match is None:
        raise InvalidInputError(f"link {text!r}: write a number and kbit, mbit or gbit, like 400mbit or 1gbit")
    return _number(match[1], "link", "a number and kbit, mbit or gbit") * _UNITS[match[2]]


def parse_slowdown(text: str) -> Slowdown:
    """Read a change of speed, RANK:FACTOR@STEP.

    Example:
        >>> parse_slowdown("1:0.5@100")
        Slowdown(rank=1, factor=0.5, step=100)
    """
    match = re.fullmatch(r"(\d+):([^@]+)@(\d+)", text.strip())
    if match is None:
        raise InvalidInputError(f"slow {text!r}: write RANK:FACTOR@STEP, like 1:0.5@100 for half its speed from there")
    factor = _number(match[2], "slow", "RANK:FACTOR@STEP, like 1:0.5@100")
    return Slowdown(rank=int(match[1]), factor=factor, step=int(match[3]))


def _number(text: str, what: str, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidInputError(f"{what}: {text.strip()!r} is not a number: write {wanted}")
    return value
