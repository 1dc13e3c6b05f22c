"""From decisions to observers: the run log and whatever else the user passed, on rank 0."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from cannikin._version import __version__
from cannikin.core.records import Job
from cannikin.runlog import (
    RUNLOG_NAME,
    EventRecord,
    Header,
    ModelInfo,
    Observer,
    RankInfo,
    Record,
    RunLogWriter,
    job_info,
    noise_record,
    plan_record,
    window_record,
)
from cannikin.runtime.messages import Decision
from cannikin.runtime.windows import Report

__all__ = ["Recorder"]


class Recorder:
    """Writes header, windows, plans and events to every observer; on ranks other than 0 it does nothing."""

    def __init__(self, observers: Sequence[Observer], run_dir: str | Path | None, *, active: bool) -> None:
        self._observers = list(observers) if active else []
        if run_dir is not None and active:
            self._observers.append(RunLogWriter(Path(run_dir) / RUNLOG_NAME))
        self._start_s = time.perf_counter()
        self._num_changes = 0

    def begin(self, job: Job, policy: str, module: torch.nn.Module, ranks: Sequence[RankInfo]) -> None:
        """Say what runs, on what."""
        if not self._observers:
            return
        parameters = list(module.parameters())
        self._write(
            Header(
                cannikin_version=__version__,
                torch_version=str(torch.__version__),
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                policy=policy,
                world_size=job.num_ranks,
                job=job_info(job),
                ranks=tuple(ranks),
                model=ModelInfo(name=type(module).__name__, num_parameters=sum(p.numel() for p in parameters)),
                precision=str(parameters[0].dtype).removeprefix("torch."),
            )
        )

    def decided(self, decision: Decision, report: Report, planner: Any, *, progress: float, lr_factor: float) -> None:
        """Write down a window and the plan that came of it."""
        if not self._observers:
            return
        window = report.window
        tracker = getattr(planner, "noise", None)
        noise = noise_record(tracker) if tracker is not None and tracker.num_steps > 0 else None
        elapsed_ms = (time.perf_counter() - self._start_s) * 1e3
        self._write(
            window_record(
                window,
                loader_s=report.load_s,
                other_s=report.other_s,
                noise=noise,
                progress=progress,
                lr_factor=lr_factor,
                num_skipped=window.num_nonfinite,
                elapsed_ms=elapsed_ms,
            )
        )
        step = window.first_step + window.num_steps
        if window.num_nonfinite:
            text = f"{window.num_nonfinite} steps had a gradient that was not finite, {decision.num_nonfinite} so far"
            self._write(EventRecord(step=step, kind="nonfinite", text=text, data={"count": window.num_nonfinite}))
        for changed_step, rank, factor in self._new_changes(planner):
            text = f"rank {rank} takes {factor:.2f} times as long"
            data: dict[str, bool | int | float | str | None] = {"rank": rank, "factor": factor}
            self._write(EventRecord(step=changed_step, kind="changed_speed", text=text, data=data))
        self._write(plan_record(decision.plan, step, elapsed_ms=elapsed_ms))

    def skip_changes(self, planner: Any) -> None:
        """What the planner knows already, from a run that this one resumes, is no event of this run."""
        self._num_changes = getattr(getattr(planner, "learner", None), "num_changes", 0)

    def _new_changes(self, planner: Any) -> list[tuple[int, int, float]]:
        learner = getattr(planner, "learner", None)
        if learner is None:
            return []
        num_new, self._num_changes = learner.num_changes - self._num_changes, learner.num_changes
        return list(learner.changes[len(learner.changes) - num_new :])

    def _write(self, record: Record) -> None:
        """Tell every observer; one that fails is told no more, and training goes on."""
        for observer in list(self._observers):
            try:
                observer.write(record)
            except Exception as error:
                self._observers.remove(observer)
                kind = type(observer).__name__
                text = f"observer {kind} failed and is left out from now on ({type(error).__name__}: {error})"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
