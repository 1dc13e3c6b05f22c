"""Tells observers of a simulated run what the runtime would tell them of a real one, in simulated time."""

from __future__ import annotations

import math
from typing import Any

from cannikin._version import __version__
from cannikin.core.lr import LR_RULES
from cannikin.core.planner import Decision
from cannikin.core.values import Job, StepWindow
from cannikin.runlog import (
    EventRecord,
    Header,
    ModelInfo,
    Observer,
    RankInfo,
    Record,
    decision_records,
    job_info,
    plan_record,
)
from cannikin.sim.hardware import Machine
from cannikin.sim.workload import Workload

__all__ = ["Recorder"]


class Recorder:
    """Writes header, windows, plans and events to every observer."""

    def __init__(self, observers: tuple[Observer, ...], job: Job, workload: Workload | None) -> None:
        self._observers, self._job, self._workload = observers, job, workload

    def begin(self, machine: Machine, policy: str, first: Decision, tags: dict[str, str]) -> None:
        """Say what runs, on what, and the first plan."""
        model = ModelInfo()
        if self._workload is not None:
            spec = self._workload.spec
            sizes = tuple(int(size * 1e6) for size in spec.bucket_mb)
            model = ModelInfo(name=spec.title, num_parameters=int(spec.num_parameters), bucket_bytes=sizes)
        self._tell(
            Header(
                cannikin_version=__version__,
                started="",
                policy=policy,
                world_size=self._job.num_ranks,
                job=job_info(self._job),
                ranks=tuple(RankInfo(name=name, device=name) for name in machine.names),
                model=model,
                tags={"simulated": "yes", **tags},
            )
        )
        self._tell(plan_record(first, 0, elapsed_ms=0.0))

    def decided(self, window: StepWindow, decision: Decision, *, progress: float, elapsed_s: float) -> None:
        """Write down a window and the plan that came of it."""
        if not self._observers:
            return
        passes = factor = None
        if self._workload is not None:
            passes = progress / self._workload.epoch_progress
            initial, total = self._job.batch_size, decision.plan.total_batch
            gain = 1.0 if decision.noise is None else decision.noise.gain(total, initial)
            rule = LR_RULES[self._workload.spec.lr_rule]
            factor = rule(total, initial_batch=initial, gain=gain, progress=math.inf)
        # No gradient of a simulated run is ever lost.
        for record in decision_records(
            window, decision, num_lost_before=0, progress=passes, lr_factor=factor, elapsed_ms=elapsed_s * 1e3
        ):
            self._tell(record)

    def evaluated(self, step: int, metric: float, elapsed_s: float) -> None:
        """Write down the metric at an epoch's end."""
        if self._workload is not None:
            data: dict[str, Any] = {self._workload.spec.metric_name: metric}
            self._tell(EventRecord(step=step, kind="eval", data=data, elapsed_ms=elapsed_s * 1e3))

    def end(self, step: int, reason: str, elapsed_s: float) -> None:
        """Say that and why the run is over."""
        self._tell(EventRecord(step=step, kind="end", text=reason, elapsed_ms=elapsed_s * 1e3))

    def _tell(self, record: Record) -> None:
        for observer in self._observers:
            observer.write(record)
