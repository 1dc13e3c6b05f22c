"""From decisions to observers: the run log and whatever else the user passed, on rank 0."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from cannikin._version import __version__
from cannikin.core.records import Job, Plan
from cannikin.errors import RunLogError
from cannikin.runlog import (
    RUNLOG_NAME,
    Decisions,
    EventRecord,
    Header,
    ModelInfo,
    Observer,
    RankInfo,
    Record,
    RunLogWriter,
    WindowRecord,
    job_info,
)
from cannikin.runlog.writer import set_aside
from cannikin.runtime.matching import BatchQueue
from cannikin.runtime.windows import Report

__all__ = ["Recorder", "end_unless_broken"]


class Recorder:
    """Writes header, windows, plans and events to every observer; on ranks other than 0 it does nothing.

    Observers get the header first, when training starts: what is written before, such as an evaluation of the untrained
    model, waits for it. By then it is known whether the run goes on from a saved state, and then its log does too, with
    steps numbered from that state's on. A log of another run in the same folder is set aside under another name.
    """

    def __init__(self, observers: Sequence[Observer], run_dir: str | Path | None, *, active: bool) -> None:
        self._observers = list(observers) if active else []
        self._log: RunLogWriter | None = None
        if run_dir is not None and active:
            self._log = RunLogWriter(Path(run_dir) / RUNLOG_NAME, append=True)
            self._observers.append(self._log)
        self._header: Header | None = None
        self._waiting: list[Record] | None = []  # for the start
        self._first_step: int | None = None  # of a run that goes on from a saved state: steps taken before
        self._decisions = Decisions()
        self._start_s = time.perf_counter()
        self._process = os.getpid()

    @property
    def active(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._observers)

    @property
    def _elapsed_ms(self) -> float:
        return round((time.perf_counter() - self._start_s) * 1e3, 3)

    def begin(self, job: Job, policy: str, module: torch.nn.Module, ranks: Sequence[RankInfo]) -> None:
        """Say what runs, on what."""
        if not self._observers:
            return
        parameters = list(module.parameters())
        self._header = Header(
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

    def resume(self, num_steps: int) -> None:
        """The run goes on from a state that was saved after so many steps more than this process has taken."""
        self._first_step = num_steps

    @property
    def steps_before(self) -> int:
        """Steps of the run that an earlier process took."""
        return self._first_step or 0

    def start(self) -> None:
        """Training starts: tell the header, and what has waited for it; again is fine."""
        if self._header is None or self._waiting is None:
            return
        news = ""
        if self._log is not None and self._log.holds_earlier_run and self._first_step is None:
            news = self._begin_anew(self._log)
        waiting, self._waiting = self._waiting, None
        for record in (self._header, *waiting):
            self._write(record)
        if news:  # last of all: a program may turn warnings into errors
            warnings.warn(news, RuntimeWarning, stacklevel=4)

    def _begin_anew(self, log: RunLogWriter) -> str:
        """Begin a log in the place of another run's; what to tell the user."""
        log.close()
        self._observers.remove(log)
        self._log = None
        try:
            aside = set_aside(log.path)
            self._log = RunLogWriter(log.path)
        except (OSError, RunLogError) as error:
            return f"{log.path} holds another run's log and cannot be set aside, so this run writes none: {error}"
        self._observers.append(self._log)
        return f"{log.path} held another run's log, which is now {aside.name}: to go on with that run, load its state"

    def decided(
        self,
        planner: Any,
        report: Report,
        plan: Plan,
        *,
        progress: float | None,
        lr_factor: float,
        bucket_bytes: tuple[int, ...],
    ) -> None:
        """Write down a window and the plan that came of it."""
        if not self._observers:
            return
        for record in self._decisions.records(
            planner,
            report.window,
            plan,
            loader_s=report.load_s,
            other_s=report.other_s,
            progress=progress,
            lr_factor=lr_factor,
            bucket_bytes=bucket_bytes,
            elapsed_ms=self._elapsed_ms,
        ):
            self._write(record)

    def skip_changes(self, planner: Any) -> None:
        """See `Decisions`."""
        self._decisions.skip_changes(planner)

    def event(self, step: int, kind: str, data: dict[str, Any]) -> None:
        """Write down something else that happened."""
        if self._observers:
            self._write(EventRecord(step=step, kind=kind, data=data, elapsed_ms=self._elapsed_ms))

    def end(self, step: int) -> None:
        """The run ended as it should: say so, and write nothing more; again is fine."""
        if os.getpid() != self._process:
            return  # a fork, such as a worker of a loader, that exits
        self.start()
        if self._waiting is None:
            self.event(step, "end", {})
        self._observers = []
        if self._log is not None:
            self._log.close()

    def _write(self, record: Record) -> None:
        """Tell every observer; one that fails is told no more, and training goes on."""
        if self._waiting is not None:
            self._waiting.append(record)
            return
        record = _moved(record, self.steps_before)
        for observer in list(self._observers):
            try:
                observer.write(record)
            except Exception as error:
                self._observers.remove(observer)
                kind = type(observer).__name__
                text = f"observer {kind} failed and is left out from now on ({type(error).__name__}: {error})"
                warnings.warn(text, RuntimeWarning, stacklevel=2)


def _moved(record: Record, num_steps: int) -> Record:
    """The record with its steps counted from so many steps earlier."""
    if not num_steps:
        return record
    names = ("step", "first_step")
    changes: dict[str, Any] = {name: getattr(record, name) + num_steps for name in names if hasattr(record, name)}
    if isinstance(record, WindowRecord) and record.timeline is not None:
        step = record.timeline.step + num_steps
        changes["timeline"] = msgspec.structs.replace(record.timeline, step=step)
    return msgspec.structs.replace(record, **changes)


def end_unless_broken(recorder: Recorder, queue: BatchQueue) -> None:
    """Say that a run has ended, when its engine is no longer used or the program comes to its end.

    Not where an exception that nobody caught has ended the program: Python keeps that one in `sys.last_value`. One that
    the program caught leaves no trace there: such a run counts as ended.
    """
    if getattr(sys, "last_value", None) is None:
        recorder.end(queue.num_taken)
