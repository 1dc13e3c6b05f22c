"""Takes a device's time on a GPU: kernels that spin on the current stream, in order with the rank's real work.

What they take is known, needs no host, and overlaps with other streams (NCCL's) as real work does. Real work comes on
top: it cannot be known before it has run, and nothing here waits for it.
"""

from __future__ import annotations

import functools

import torch

_LOOK_CYCLES = 20_000_000  # about 10 ms


class SpinPace:
    """A stretch in which a rank spins for its whole budget, besides its real work."""

    def __init__(self) -> None:
        self.budget_s = 0.0
        self._spun_s = 0.0
        self._start = self._end = _event()

    def reach(self, share: float = 1.0) -> None:
        """Spin up to this share of the budget."""
        rest_s = self.budget_s * share - self._spun_s
        if rest_s > 0:
            spin(rest_s)
            self._spun_s += rest_s
        self._end = _event()

    @property
    def work_s(self) -> float:
        """The time between the ends of the stretch that was not spun."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3 - self._spun_s


def spin(seconds: float) -> None:
    """Keep the current stream busy for this long."""
    _sleep(round(seconds * _cycles_per_second()))


@functools.cache
def _cycles_per_second() -> float:
    """Measure the GPU's clock, once: it has gone up by the second look, and the fastest look was not disturbed."""
    rates: list[float] = []
    for _ in range(5):
        start = _event()
        _sleep(_LOOK_CYCLES)
        end = _event()
        end.synchronize()
        rates.append(_LOOK_CYCLES / float(start.elapsed_time(end)) * 1e3)
    return max(rates)


def _sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
