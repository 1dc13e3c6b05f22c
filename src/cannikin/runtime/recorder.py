"""From decisions to observers: the run log and whatever else the user passed, on rank 0."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

from cannikin._version import __version__
from cannikin.core.planner import Decision
from cannikin.core.values import Job, StepWindow
from cannikin.errors import InvalidInputError, RunLogError
from cannikin.runlog import (
    RUNLOG_NAME,
    EventRecord,
    Header,
    ModelInfo,
    Observer,
    PlanRecord,
    RankInfo,
    Record,
    RunLogWriter,
    WindowRecord,
    decision_records,
    job_info,
    plan_record,
)
from cannikin.runlog.times import RecentPlans, rank_times, use_of
from cannikin.runlog.writer import set_aside
from cannikin.runtime.memory import MemoryGauge
from cannikin.runtime.waiting import BatchQueue
from cannikin.runtime.wire import Gathered
from cannikin.words import split, use

_logger = logging.getLogger("cannikin")
_SLOW_S, _SLOW_SHARE = 1.0, 0.05  # of the time that an observer may take before somebody hears of it
_TOLD_FROM = 30  # steps measured: by then the split has settled


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
        if active and _logger.isEnabledFor(logging.INFO):
            self._observers.append(LastWords())
        self._header: Header | None = None
        self._first_plan: PlanRecord | None = None
        self._waiting: list[Record] | None = []  # for the start
        self._first_step: int | None = None  # of a run that goes on from a saved state: steps taken before
        self._caps: dict[int, int] = {}  # by rank, of those whose memory did not hold a batch whole
        self._open_epoch: int | None = None  # whose last batch has not been handed out
        self._num_lost = 0  # steps so far whose gradient was not finite
        self._start_s = time.perf_counter()
        self._process = os.getpid()
        self._taken_s: dict[int, float] = {}  # by each observer
        self._slow: set[int] = set()  # those that were warned of

    @property
    def active(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._observers)

    @property
    def _elapsed_ms(self) -> float:
        return round((time.perf_counter() - self._start_s) * 1e3, 3)

    def begin(
        self,
        job: Job,
        policy: str,
        module: torch.nn.Module,
        ranks: Sequence[RankInfo],
        first: Decision | None = None,
        *,
        profile_key: str = "",
    ) -> None:
        """Say what runs, on what, and where `first`, the decision to begin with, is no even split, why."""
        if not self._observers:
            return
        if first is not None and max(first.plan.local_batches) - min(first.plan.local_batches) > 1:
            self._first_plan = plan_record(first, 0, elapsed_ms=0.0)
        parameters = list(module.parameters())
        self._header = Header(
            cannikin_version=__version__,
            torch_version=str(torch.__version__),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            policy=policy,
            world_size=job.num_ranks,
            job=job_info(job),
            ranks=tuple(ranks),
            model=ModelInfo(
                name=type(module).__name__,
                num_parameters=sum(p.numel() for p in parameters),
                profile_key=profile_key,
            ),
            precision=str(parameters[0].dtype).removeprefix("torch."),
        )

    def resume(self, num_steps: int) -> None:
        """Resume a run: `num_steps` is the step count of the saved state minus the steps taken in this process."""
        self._first_step = num_steps

    @property
    def steps_before(self) -> int:
        """Steps of the run that an earlier process took."""
        return self._first_step or 0

    def start(self) -> None:
        """Write the header, and the records that waited for it: training starts. Calling it twice does nothing."""
        if self._header is None or self._waiting is None:
            return
        news = ""
        if self._log is not None and self._log.holds_earlier_run and self._first_step is None:
            news = self._begin_anew(self._log)
        waiting, self._waiting = self._waiting, None
        if self._first_plan is not None and self._first_step is None:  # else the saved state's plan is in force
            waiting.insert(0, self._first_plan)
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
        gathered: Gathered,
        decision: Decision,
        *,
        progress: float | None,
        lr_factor: float,
        bucket_bytes: tuple[int, ...],
    ) -> None:
        """Write down a window and the plan that came of it."""
        if not self._observers:
            return
        window = gathered.window
        for record in decision_records(
            window,
            decision,
            num_lost_before=self._num_lost,
            loader_s=gathered.load_s,
            other_s=gathered.other_s,
            progress=progress,
            lr_factor=lr_factor,
            bucket_bytes=bucket_bytes,
            elapsed_ms=self._elapsed_ms,
        ):
            self._write(record)
        self._num_lost += window.num_nonfinite
        self._tell_of_parts(window)

    def _tell_of_parts(self, window: StepWindow) -> None:
        """Write down which ranks trained in parts: those with more samples than their memory holds."""
        for rank, cap in enumerate(window.max_batch.tolist()):
            over = window.local_batches[:, rank] > cap
            if not over.any() or self._caps.get(rank) == cap:
                continue
            self._caps[rank], first = cap, int(over.argmax())
            size = int(window.local_batches[first, rank])
            text = f"rank {rank} ran out of memory with {size} samples: trained in parts, at most {cap} from now on"
            data = {"rank": rank, "local_batch": size, "max_batch": cap}
            self.event(window.first_step + first, "out_of_memory", data, text)

    def event(self, step: int, kind: str, data: dict[str, Any], text: str = "") -> None:
        """Write down something else that happened."""
        if self._observers:
            self._write(EventRecord(step=step, kind=kind, text=text, data=data, elapsed_ms=self._elapsed_ms))

    def begin_pass(self, step: int, data: dict[str, Any], *, has_length: bool) -> None:
        """Write down that a pass over the data begins; where it has a length, a run that ends inside of it ends early.

        A loop over data without end has to be broken off, so nothing follows from that.
        """
        self.start()
        self.event(step, "epoch", data)
        self._open_epoch = data["epoch"] if has_length else None

    def end_pass(self) -> None:
        """Take note that the pass has handed out its last batch, or was ended in words."""
        self._open_epoch = None

    @property
    def why_early(self) -> str:
        """Why a run that ended now would have ended early; empty where it would have ended as it should."""
        return "" if self._open_epoch is None else f"in the middle of epoch {self._open_epoch}"

    def end(self, step: int, early: str = "") -> None:
        """Say that the run ended as it should, or why it ended early; write nothing more, and nothing twice."""
        if os.getpid() != self._process:
            return  # a fork, such as a worker of a loader, that exits
        self.start()
        if self._waiting is None:
            self.event(step, "end", {"early": True} if early else {}, early)
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
            start_s = time.perf_counter()
            try:
                observer.write(record)
            except Exception as error:
                self._observers.remove(observer)
                kind = type(observer).__name__
                text = f"observer {kind} failed and is left out from now on ({type(error).__name__}: {error})"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            else:
                self._warn_if_slow(observer, time.perf_counter() - start_s)

    def _warn_if_slow(self, observer: Observer, taken_s: float) -> None:
        """Say so once where an observer takes a good part of the training's time: all ranks wait for it."""
        key = id(observer)
        total_s = self._taken_s[key] = self._taken_s.get(key, 0.0) + taken_s
        run_s = time.perf_counter() - self._start_s
        if total_s > max(_SLOW_S, _SLOW_SHARE * run_s) and key not in self._slow:
            self._slow.add(key)
            warnings.warn(
                f"observer {type(observer).__name__} has taken {total_s:.1f} s of {run_s:.1f} s since the start, and "
                "all ranks wait for it: have it put records into a queue, and do its work in a thread of its own",
                RuntimeWarning,
                stacklevel=2,
            )


class LastWords:
    """Logs, when a run has ended, how much of the hardware its last split used: the median of its last windows.

    Says nothing of a run that was too short for its split to settle.
    """

    def __init__(self) -> None:
        self._split: tuple[int, ...] = ()
        self._uses: deque[float] = deque(maxlen=50)  # of the last windows, as long as they have this split
        self._even_speed: float | None = None
        self._plans = RecentPlans()
        self._num_steps = 0

    def write(self, event: Record, /) -> None:
        """Take a record of the run."""
        if isinstance(event, WindowRecord):
            self._take(event)
        elif isinstance(event, PlanRecord):
            self._plans.add(event)
        elif isinstance(event, EventRecord) and event.kind == "end" and self._uses and self._num_steps >= _TOLD_FROM:
            words, ended = use(median(self._uses), self._even_speed), event.ending
            _logger.info(
                "the run %s at step %d: its last split, %s, used %s", ended, event.step, split(self._split), words
            )

    def _take(self, window: WindowRecord) -> None:
        if window.local_batches != self._split:
            self._split, self._even_speed = window.local_batches, None
            self._uses.clear()
        self._num_steps += window.num_steps
        used, plan = use_of(window.local_batches, rank_times(window)), self._plans.of(window)
        self._uses += [] if used is None else [used]
        self._even_speed = self._even_speed if plan is None else plan.even_speed


def _moved(record: Record, num_steps: int) -> Record:
    """Return the record with its steps counted from so many steps earlier."""
    if not num_steps:
        return record
    names = ("step", "first_step")
    changes: dict[str, Any] = {name: getattr(record, name) + num_steps for name in names if hasattr(record, name)}
    if isinstance(record, WindowRecord) and record.timeline is not None:
        step = record.timeline.step + num_steps
        changes["timeline"] = msgspec.structs.replace(record.timeline, step=step)
    return msgspec.structs.replace(record, **changes)


def end_run(recorder: Recorder, queue: BatchQueue, memory: MemoryGauge, rank: int) -> None:
    """Say that a run has ended, when its engine is no longer used or the program comes to its end.

    Where an exception that nobody caught has ended the program, Python keeps it in `sys.last_value`: then the run has
    not ended as it should, and memory that ran out in backward, where no code of ours is around, is explained.

    `sys.exit(1)` leaves no trace there, nor does an exception that the program caught: Python keeps neither. What can
    be known is that a pass over the data was not over; then the run has ended early, whatever broke it off.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        recorder.end(queue.num_taken, recorder.why_early)
    elif (advice := memory.explain(error, rank)) is not None:
        print(advice, file=sys.stderr)


def check_metrics(metrics: dict[str, Any], *, read: bool) -> dict[str, int | float]:
    """Return metrics as plain numbers; without `read` they are only checked, which waits for no device."""
    if not metrics:
        raise InvalidInputError("log() was given nothing to write: name what you measured, as in log(accuracy=0.93)")
    for name, value in metrics.items():
        if not _is_number(value):
            shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            raise InvalidInputError(
                f"log({name}=...) was given a {type(value).__name__}{shape}: a metric is one real number; write its "
                "mean, or each part under a name of its own"
            )
    return {name: _plain(value) for name, value in metrics.items()} if read else {}


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, Real)


def _plain(value: Any) -> int | float:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.item()
    whole = isinstance(value, Integral) and -(2**63) <= int(value) < 2**63  # as JSON's readers have them
    return int(value) if whole else float(value)
