"""A clock for tests: time passes by work and by sleep, and only when told."""

from __future__ import annotations

__all__ = ["Clock"]


class Clock:
    """Call it for the time; `work` and `sleep` move it on."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def work(self, duration_s: float) -> None:
        self.now_s += duration_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now_s += duration_s
