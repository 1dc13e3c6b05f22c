"""Small made-up records for the tests of the live view and the observers."""

from __future__ import annotations

from typing import Any

from cannikin.runlog import (
    EventRecord,
    Header,
    JobInfo,
    ModelInfo,
    NoiseRecord,
    PlanRecord,
    RankInfo,
    Record,
    WindowRecord,
)

__all__ = ["END", "HEADER", "Clock", "event", "header", "plan", "run", "window"]


def header(devices: tuple[str, ...] = ("fast gpu", "slow gpu"), **changes: Any) -> Header:
    """A run on these devices, with an initial batch of 32 and 1,000 samples per epoch."""
    settings: dict[str, Any] = {
        "cannikin_version": "0",
        "started": "",
        "policy": "cannikin",
        "world_size": len(devices),
        "job": JobInfo(batch_size=32, max_batch_size=256, num_samples=1000),
        "ranks": tuple(RankInfo(device=device, host=f"node{rank}") for rank, device in enumerate(devices)),
        "model": ModelInfo(name="Net", num_parameters=38_282),
    }
    return Header(**{**settings, **changes})


def window(number: int, batches: tuple[int, ...] = (24, 8), **changes: Any) -> WindowRecord:
    """The window of steps 10 x number to 10 x number + 9, of 40 ms each; the last rank is the slowest."""
    n = len(batches)
    settings: dict[str, Any] = {
        "first_step": 10 * number,
        "num_steps": 10,
        "num_valid": 10,
        "total_batch": sum(batches),
        "local_batches": batches,
        "step_ms": 40.0,
        "before_ms": (10.0,) * n,
        "backward_ms": (*(10.0,) * (n - 1), 26.0),
        "done_ms": (30.0,) * n,
        "wait_ms": (*(16.0,) * (n - 1), 0.0),
        "elapsed_ms": 400.0 * (number + 1),
        "progress": 0.32 * (number + 1),
        "lr_factor": 1.25,
        "noise": NoiseRecord(signal_sqnorm=1.0, noise_trace=96.0, noise_scale=96.0, low=80.0, high=120.0),
    }
    return WindowRecord(**{**settings, **changes})


def plan(step: int, batches: tuple[int, ...] = (24, 8), **changes: Any) -> PlanRecord:
    """Decided at this step, in force four steps later."""
    settings: dict[str, Any] = {
        "step": step,
        "first_step": step + 4,
        "total_batch": sum(batches),
        "local_batches": batches,
        "predicted_step_ms": 32.0,
        "even_speed": 0.8,
        "phase": "optperf",
        "reason": "rank 1 finishes last with 8 samples (compute)",
    }
    return PlanRecord(**{**settings, **changes})


def event(step: int, kind: str, text: str = "", **data: Any) -> EventRecord:
    return EventRecord(step=step, kind=kind, text=text, data=data)


HEADER = header()
END = EventRecord(step=100, kind="end")


def run(num_windows: int) -> list[Record]:
    """A header, an epoch, then windows and plans by turns."""
    records: list[Record] = [HEADER, event(0, "epoch", epoch=0, position=0, goal=8.0)]
    for number in range(num_windows):
        records += [window(number), plan(10 * number + 10)]
    return records


class Clock:
    """Seconds as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
