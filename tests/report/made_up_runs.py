"""Records of runs that never were, for the report's tests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from cannikin.report.numbers import RunArrays
from cannikin.report.read import read_run
from cannikin.runlog import (
    EventRecord,
    Header,
    JobInfo,
    ModelInfo,
    NoiseRecord,
    PlanRecord,
    RankInfo,
    Record,
    RunLogWriter,
    Timeline,
    WindowRecord,
)

__all__ = ["HOSTILE", "header", "plan", "read", "run", "window", "write"]

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&lt;\u2028%{x}\"'"


def header(num_ranks: int = 3, *, first_step: int = 0, text: str = "", **more: Any) -> Header:
    """A header, with `text` wherever a name may stand."""
    ranks = (RankInfo(name=text, host=text, device=text or "made up", memory_bytes=16 * 2**30),) * num_ranks
    return Header(
        **{
            "cannikin_version": text or "1",
            "started": text,
            "policy": text or "cannikin",
            "world_size": num_ranks,
            "first_step": first_step,
            "job": JobInfo(batch_size=16 * num_ranks, max_batch_size=128 * num_ranks, num_samples=1000),
            "ranks": ranks,
            "model": ModelInfo(name=text or "Made up", num_parameters=1000),
            **more,
        }
    )


def window(first_step: int, local_batches: tuple[int, ...] = (24, 16, 8), **more: Any) -> WindowRecord:
    """A window of ten steps of 30 ms in which b samples compute 6 + 0.75 b ms, with the timeline of one of them."""
    n = len(local_batches)
    before, backward = tuple(1.0 + 0.25 * b for b in local_batches), tuple(5.0 + 0.5 * b for b in local_batches)
    done = tuple(30.0 - time for time in before)
    values: dict[str, Any] = {
        "first_step": first_step,
        "num_steps": 10,
        "num_valid": 9,
        "total_batch": sum(local_batches),
        "local_batches": local_batches,
        "step_ms": 30.0,
        "before_ms": before,
        "backward_ms": backward,
        "done_ms": done,
        "wait_ms": tuple(0.75 * (max(local_batches) - b) for b in local_batches),
        "loader_ms": (0.3,) * n,
        "other_ms": (0.1,) * n,
        "elapsed_ms": 300.0 * (first_step / 10 + 1),
        "progress": (first_step + 10) / 100,
        "lr_factor": 1.5,
        "noise": NoiseRecord(noise_scale=90.0, low=60.0, high=None if first_step < 30 else 140.0),
        "timeline": Timeline(
            step=first_step + 3,
            local_batches=local_batches,
            before_ms=before,
            ready_ms=tuple((last / 2, last) for last in backward),
            done_ms=tuple((last - 5.0, last) for last in done),
        ),
    }
    return WindowRecord(**(values | more))


def plan(step: int, local_batches: tuple[int, ...] = (24, 16, 8), **more: Any) -> PlanRecord:
    """A plan that predicts 31 ms, and compared a few total batches."""
    total = sum(local_batches)
    values: dict[str, Any] = {
        "step": step,
        "first_step": step + 4,
        "total_batch": total,
        "local_batches": local_batches,
        "predicted_step_ms": 31.0,
        "even_speed": 0.75,
        "phase": "optperf",
        "reason": "made up",
        "candidate_totals": (total // 2, total, 2 * total, 4 * total),
        "candidate_goodputs": (700.0 + step, 900.0 + step, 800.0, None),
    }
    return PlanRecord(**(values | more))


def run(num_windows: int = 12, num_ranks: int = 3, text: str = "", *, ends: bool = True) -> list[Record]:
    """A whole run whose split changes once; with an evaluation after every second window."""
    first = (16,) * num_ranks
    then = tuple(24 - 16 * rank // max(num_ranks - 1, 1) for rank in range(num_ranks))
    records: list[Record] = [header(num_ranks, text=text)]
    for place in range(num_windows):
        batches = first if place < 4 else then
        records += [
            window(10 * place, batches),
            plan(10 * place + 10, batches if place < 3 else then, reason=text or "made up"),
        ]
        if place % 2:
            data: dict[str, Any] = {text or "accuracy": 0.5 + 0.04 * place}
            records.append(EventRecord(step=10 * place + 10, kind="eval", data=data, elapsed_ms=300.0 * (place + 1)))
    records.append(EventRecord(step=10 * num_windows, kind="changed_speed", text=text or "made up"))
    if ends:
        records.append(EventRecord(step=10 * num_windows, kind="end", text=text))
    return records


def write(records: list[Record], folder: Path) -> Path:
    """The same as a log; its folder."""
    with RunLogWriter(folder / "runlog.jsonl") as log:
        for record in records:
            log.write(record)
    return folder


def read(records: list[Record], name: str = "run") -> RunArrays:
    """What the report makes of a log with these records."""
    with tempfile.TemporaryDirectory() as folder:
        return read_run(write(records, Path(folder)), name)
