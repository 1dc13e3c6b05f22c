"""Takes a device's time on a GPU: kernels that spin on the current stream, in order with the rank's real work.

What they take is known, needs no host, and overlaps with other streams (NCCL's) as real work does. Real work comes on
top: it cannot be known before it has run, and nothing here waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# By the GPU's own clock of nanoseconds: a number of cycles lasts 1.3 to 1.9 times as long when other ranks keep the GPU
# busy (H200).
_SOURCE = """
extern "C" __global__ void spin(int microseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < 1000ull * microseconds);
}
"""
_SHORTEST_S = 2e-4  # a shorter rest is left to the next piece: a launch costs the host some 20 microseconds
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
        if rest_s > (_SHORTEST_S if share < 1.0 else 0.0):
            _spinner()(rest_s)
            self._spun_s += rest_s
        self._end = _event()

    @property
    def work_s(self) -> float:
        """The time between the ends of the stretch that was not spun."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3 - self._spun_s


@functools.cache
def _spinner() -> Callable[[float], None]:
    """Return what keeps the current stream busy for so many seconds; made on first use, when there is a GPU."""
    compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:  # before torch 2.8
        cycles_per_s = _clock_rate()
        return lambda seconds: _sleep(round(seconds * cycles_per_s))
    kernel = compile_kernel(_SOURCE, "spin")
    return lambda seconds: kernel(args=[round(seconds * 1e6)])


def _clock_rate() -> float:
    """Measure the GPU's cycles per second: it has gone up by the second look, and the fastest look was undisturbed."""
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
