"""The numbers of a run under names that stay: what every tracker of experiments gets, and what the names mean.

`SCALARS` is the whole list; docs/observers.md shows the same table. {rank} is a rank's number, {name} a metric's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cannikin.runlog import EventRecord, Header, PlanRecord, Record, WindowRecord
from cannikin.runlog.times import efficiency_of, numbers_of, rank_times, samples_per_s


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """What a name means, with its unit; "" where it is a plain number."""

    unit: str
    meaning: str


SCALARS = {
    "cannikin/step": Scalar(unit="steps", meaning="steps trained when the numbers beside it were measured"),
    "cannikin/step_ms": Scalar(unit="ms", meaning="measured time of a step, the median of a window"),
    "cannikin/predicted_step_ms": Scalar(unit="ms", meaning="time of a step that the last plan expects"),
    "cannikin/total_batch": Scalar(unit="samples", meaning="total batch B"),
    "cannikin/samples_per_s": Scalar(unit="samples/s", meaning="throughput, B over the time of a step"),
    "cannikin/goodput": Scalar(unit="samples/s", meaning="throughput times statistical efficiency"),
    "cannikin/noise_scale": Scalar(unit="samples", meaning="gradient noise scale"),
    "cannikin/noise_scale_low": Scalar(unit="samples", meaning="lower confidence limit of the noise scale"),
    "cannikin/noise_scale_high": Scalar(unit="samples", meaning="upper confidence limit of the noise scale"),
    "cannikin/lr_factor": Scalar(unit="", meaning="factor on the learning rate"),
    "cannikin/progress": Scalar(unit="passes", meaning="passes over the data at the initial batch"),
    "cannikin/skipped_steps": Scalar(unit="steps", meaning="steps of the window that the optimizer did not take"),
    "cannikin/epoch": Scalar(unit="", meaning="number of the pass over the data, from 0"),
    "cannikin/rank{rank}/local_batch": Scalar(unit="samples", meaning="local batch of the rank"),
    "cannikin/rank{rank}/compute_ms": Scalar(unit="ms", meaning="forward, backward and optimizer"),
    "cannikin/rank{rank}/communication_ms": Scalar(unit="ms", meaning="all-reduce that no computing hid"),
    "cannikin/rank{rank}/wait_ms": Scalar(unit="ms", meaning="waiting for a slower rank"),
    "cannikin/rank{rank}/loading_ms": Scalar(unit="ms", meaning="waiting for data"),
    "cannikin/eval/{name}": Scalar(unit="", meaning="a metric of the user's own, by its name"),
}


def scalars(record: Record, *, initial_batch: int | None = None) -> dict[str, float]:
    """Return the finite numbers of a record, by the names of `SCALARS`; {} where it has none.

    Args:
        record: any.
        initial_batch: B0, the header's `job.batch_size`, without which there is no goodput.

    Example:
        >>> plan = PlanRecord(step=5, first_step=9, total_batch=8, local_batches=(6, 2),
        ...                   predicted_step_ms=12.5, phase="optperf", reason="")
        >>> scalars(plan)
        {'cannikin/predicted_step_ms': 12.5}
    """
    if isinstance(record, WindowRecord):
        found = {**_run_scalars(record, initial_batch), **_rank_scalars(record)}
    elif isinstance(record, PlanRecord):
        found = {"cannikin/predicted_step_ms": record.predicted_step_ms}
    elif isinstance(record, EventRecord):
        found = _event_scalars(record)
    else:
        found = {}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def step_of(record: Record) -> int:
    """Return the step a record's numbers belong to: a window's are known at its end."""
    if isinstance(record, Header):
        return record.first_step
    return record.first_step + record.num_steps if isinstance(record, WindowRecord) else record.step


def _run_scalars(window: WindowRecord, initial_batch: int | None) -> dict[str, float | None]:
    noise, pace = window.noise, samples_per_s(window)
    share = None if initial_batch is None else efficiency_of(window, initial_batch)
    return {
        "cannikin/step": step_of(window),
        "cannikin/step_ms": window.step_ms,
        "cannikin/total_batch": window.total_batch,
        "cannikin/samples_per_s": pace,
        "cannikin/goodput": None if pace is None or share is None else pace * share,
        "cannikin/noise_scale": None if noise is None else noise.noise_scale,
        "cannikin/noise_scale_low": None if noise is None else noise.low,
        "cannikin/noise_scale_high": None if noise is None else noise.high,
        "cannikin/lr_factor": window.lr_factor,
        "cannikin/progress": window.progress,
        "cannikin/skipped_steps": window.num_skipped,
    }


def _rank_scalars(window: WindowRecord) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for rank, (batch, times) in enumerate(zip(window.local_batches, rank_times(window), strict=True)):
        found[f"cannikin/rank{rank}/local_batch"] = batch
        if times is not None:
            found |= {f"cannikin/rank{rank}/{part}": part_ms for part, part_ms in times._asdict().items()}
    return found


def _event_scalars(event: EventRecord) -> dict[str, float | None]:
    numbers = numbers_of(event)
    if event.kind == "eval":
        return {f"cannikin/eval/{name}": value for name, value in numbers.items()}
    return {"cannikin/epoch": numbers["epoch"]} if event.kind == "epoch" and "epoch" in numbers else {}
