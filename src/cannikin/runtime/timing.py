"""Moments of a step on one rank: `perf_counter` on a CPU, CUDA events on a GPU, read late so that nothing waits.

Only durations on one rank are ever formed; clocks of different ranks are never compared.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CpuClock", "CudaClock", "make_clock"]


class Clock(Protocol):
    """Takes marks now and turns pairs of them into seconds later; `lag` says how many steps later at least."""

    lag: int

    def mark(self) -> Any:
        """This moment in the device's order of work."""

    def host_mark(self) -> Any:
        """This moment on the host, for callbacks that the device's order of work says nothing about."""

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks; called once both have certainly passed."""


class CpuClock:
    """The host's clock: on a CPU, work is done when the call returns."""

    lag = 0

    def mark(self) -> float:
        """Seconds on the host's clock."""
        return time.perf_counter()

    host_mark = mark

    def seconds(self, start: float, end: float) -> float:
        """Difference of two marks."""
        return end - start


class CudaClock:
    """Events on the current stream, placed on the host's clock by an anchor event of known host time.

    A mark is an event, or a host time where a callback runs on a host thread (gloo's continuation): an event recorded
    there would queue behind backward's kernels and read late.
    """

    lag = 1  # the host may be ahead of the device by most of a step

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # once, at construction
        self._anchor = self.mark()
        self._anchor_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """An event on the device's current stream."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def host_mark(self) -> float:
        """Seconds on the host's clock."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks, each an event or a host time."""
        return self._host_s(end) - self._host_s(start)

    def _host_s(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()  # returns at once where the event is `lag` steps old and the host not further ahead
        return self._anchor_s + float(self._anchor.elapsed_time(mark)) / 1e3


def make_clock(device: torch.device) -> Clock:
    """The clock for a module on this device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
