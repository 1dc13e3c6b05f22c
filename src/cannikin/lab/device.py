"""The device that a throttled rank pretends to be, and the pace that keeps real work from being faster than it.

forward of b samples    f (t_0 + t b / v(k))            f  forward share    t    device time of a sample
backward          (1 - f) (t_0 + t b / v(k))            t_0  fixed time     v(k) speed at training forward k
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cannikin.lab.cluster import LabCluster

__all__ = ["DEFAULT_SAMPLE_S", "Device", "Pace", "devices"]

DEFAULT_SAMPLE_S = 1e-3
# A shorter rest is left out: the next stretch, or the next step, is not late by it, and a sleep overshoots by as much.
_SHORTEST_SLEEP_S = 1e-4


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's device; `changes` are (training forward, factor on the speed) in order, the last reached one counts.

    Example:
        >>> device = Device(speed=0.5, sample_s=1e-3, fixed_s=0.0, forward_share=0.25, changes=[(100, 0.5)])
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
        """Seconds of forward and of backward of `num_samples`, in training forward number `forward`."""
        factor = next((factor for step, factor in reversed(self.changes) if step <= forward), 1.0)
        total_s = self.fixed_s + self.sample_s * num_samples / (self.speed * factor)
        return total_s * self.forward_share, total_s * (1 - self.forward_share)


def devices(cluster: LabCluster, default_sample_s: float = DEFAULT_SAMPLE_S) -> list[Device]:
    """The device of each rank of a cluster."""
    return [
        Device(
            speed=speed,
            sample_s=default_sample_s if cluster.sample_s is None else cluster.sample_s,
            fixed_s=cluster.fixed_s,
            forward_share=cluster.forward_share,
            changes=sorted((slow.step, slow.factor) for slow in cluster.slowdowns if slow.rank == rank),
        )
        for rank, speed in enumerate(cluster.speeds)
    ]


class Pace:
    """A stretch of time that lasts as long as the device would take: real work counts, and sleep fills the rest.

    Places in it are absolute, so that what one sleep overshoots the next one makes good.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock = clock
        self._sleep = sleep
        self._start_s = clock()
        self._end_s = self._start_s
        self.budget_s = 0.0
        self.slept_s = 0.0

    def reach(self, share: float = 1.0) -> None:
        """Sleep until this share of the budget has passed since the stretch began; at once where it has."""
        rest_s = self._start_s + self.budget_s * share - self._clock()
        if rest_s > _SHORTEST_SLEEP_S:
            before_s = self._clock()
            self._sleep(rest_s)
            self.slept_s += self._clock() - before_s
        self._end_s = self._clock()

    @property
    def work_s(self) -> float:
        """Time up to the last place reached that was not slept: real work."""
        return self._end_s - self._start_s - self.slept_s
