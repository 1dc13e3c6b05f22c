"""From paths to runs: which runs a path names, and each one's log read record by record into arrays.

A log of any length takes memory of a few numbers per window: of plans, events and timelines only some are kept.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cannikin.core.values import FloatArray
from cannikin.errors import InvalidInputError, RunLogError
from cannikin.report.numbers import ByRank, Ends, Metric, RunArrays, Spread, Windows, latest
from cannikin.runlog import (
    RUNLOG_NAME,
    EventRecord,
    Header,
    NoiseRecord,
    PlanRecord,
    Predictions,
    Record,
    RunLogReader,
    Timeline,
    WindowRecord,
    numbers_only,
)
from cannikin.runlog.times import (
    ACTIVITIES,
    MEASURED,
    RecentPlans,
    activities,
    longest_ns,
    measured_ms,
    numbers_of,
    rank_moments,
)

_COLUMNS = [field.name for field in fields(Windows) if field.type == "FloatArray"]  # one number per window
_CHUNK_WINDOWS = 1024
_MAX_COMPARED = 60
_MAX_LISTED = 100  # plans and events at each end of a table
_NUM_TIMELINES = 9
_ALWAYS = {"eval", "epoch"}  # events with a figure of their own, or too many to list
_TRAINING_TIME = "train_s"  # what an evaluation may log beside its metrics: seconds of training before it
_TARGET = "target_"  # before a metric's name: the value that it is to reach

# Which runs a path names.


class Found(NamedTuple):
    """A run that was named, and the folder for a page about it."""

    path: Path
    folder: Path


def find_runs(path: Path) -> list[Found]:
    """Return the run at `path`, or else the runs in its folders, without empty ones."""
    if not os.path.isdir(path):  # unlike Path.is_dir() it has an answer for every path
        return [Found(path=path, folder=path.parent)]
    if os.path.exists(path / RUNLOG_NAME):
        return [Found(path=path, folder=path)]
    empty = empty_runs(path)
    folders = sorted(log.parent for log in path.glob(f"*/{RUNLOG_NAME}"))
    folders = [folder for folder in folders if folder not in empty] or folders
    if not folders:
        message = f"{path}: holds no {RUNLOG_NAME}, and neither do its folders: give the run_dir of a run"
        raise InvalidInputError(message)
    return [Found(path=folder, folder=path) for folder in folders]


def empty_runs(path: Path) -> list[Path]:
    """Return runs in the folders of `path`, if it is no run itself, that ended before they began: with an empty log."""
    if os.path.exists(path / RUNLOG_NAME):
        return []
    return sorted(log.parent for log in path.glob(f"*/{RUNLOG_NAME}") if log.is_file() and not log.stat().st_size)


def read_runs(found: Sequence[Found]) -> list[RunArrays]:
    """Read them all, each under a name of its own; runs of one folder stand in the order in which they started."""
    names = _names([each.path for each in found])
    runs = [(each.folder, read_run(each.path, name)) for each, name in zip(found, names, strict=True)]
    folders = list(dict.fromkeys(folder for folder, _ in runs))
    runs.sort(key=lambda run: (folders.index(run[0]), run[1].headers[0].started))
    return [run for _, run in runs]


def _names(paths: list[Path]) -> list[str]:
    """Return the folders' names; with the folders above them, as far as it takes to tell them apart."""
    # Unlike Path.resolve(), realpath has an answer for links that go round in a circle; a file's name may be any bytes.
    places = [Path(os.path.realpath(path)) for path in paths]
    folders = [place.parent if path.name == RUNLOG_NAME else place for place, path in zip(places, paths, strict=True)]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = [os.fsencode("/".join(folder.parts[-depth:])).decode(errors="replace") for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({place})" for place, name in enumerate(names, 1)]


# One log.


def read_run(path: str | os.PathLike[str], name: str) -> RunArrays:
    """Read the run in this directory or log file.

    Raises:
        RunLogError: the file is missing, is no run log, has no header yet, or has another version of the format.
    """
    with RunLogReader(path) as reader, numbers_only(reader.path):
        run = _RunSoFar()
        for record in reader.records():
            run.take(record)
        return run.finish(name, reader)


class _RunSoFar:
    """What has been read of a log so far."""

    def __init__(self) -> None:
        self._headers: list[Header] = []
        self._windows = _Table()
        self._metrics: dict[str, list[tuple[int, float, float]]] = {}
        self._in_training_time = False
        self._recent = RecentPlans()
        self._changes: Ends[PlanRecord] = Ends(_MAX_LISTED)
        self._predictions = Predictions()
        self._compared: Spread[PlanRecord] = Spread(_MAX_COMPARED)
        self._events: Ends[EventRecord] = Ends(_MAX_LISTED)
        self._timelines: Ends[Timeline] = Ends(_NUM_TIMELINES)
        self._ended: EventRecord | None = None
        self._last_step = 0
        self._offset_ms, self._elapsed_ms = 0.0, math.nan

    def take(self, record: Record) -> None:
        self._predictions.write(record)
        if isinstance(record, WindowRecord):
            self._take_window(record)
        elif isinstance(record, PlanRecord):
            self._take_plan(record)
        elif isinstance(record, EventRecord):
            self._take_event(record)
        else:
            self._take_header(record)

    def _take_header(self, header: Header) -> None:
        self._headers.append(header)
        self._offset_ms = 0.0 if math.isnan(self._elapsed_ms) else self._elapsed_ms
        self._last_step = header.first_step
        self._ended = None
        self._recent.clear()

    def _take_window(self, window: WindowRecord) -> None:
        self._windows.add(window, self._at(window.elapsed_ms), self._recent.of(window))
        self._last_step = max(self._last_step, window.first_step + window.num_steps - 1)
        if window.timeline is not None:
            self._timelines.add(window.timeline)

    def _take_plan(self, plan: PlanRecord) -> None:
        before = self._recent.last
        if before is None or before.local_batches != plan.local_batches:
            self._changes.add(plan)
        self._recent.add(plan)
        self._last_step = max(self._last_step, plan.step)
        if plan.candidate_totals:
            self._compared.add(plan)

    def _take_event(self, event: EventRecord) -> None:
        elapsed_ms = self._at(event.elapsed_ms)
        self._last_step = max(self._last_step, event.step)
        if event.kind == "eval":
            numbers = numbers_of(event)
            if _TRAINING_TIME in numbers and len(numbers) > 1:
                elapsed_ms = numbers.pop(_TRAINING_TIME) * 1e3
                self._in_training_time = True
            for name, value in numbers.items():
                self._metrics.setdefault(name, []).append((event.step, elapsed_ms, value))
        elif event.kind not in _ALWAYS:
            self._events.add(event)
        if event.kind == "end":
            self._ended = event

    def _at(self, elapsed_ms: float | None) -> float:
        """Return a moment of this process on the clock of the whole run, or the last one known where there is none."""
        if elapsed_ms is not None:
            self._elapsed_ms = max(self._offset_ms + elapsed_ms, self._elapsed_ms)  # the first where that is NaN
        return self._elapsed_ms

    def finish(self, name: str, reader: RunLogReader) -> RunArrays:
        if not self._headers:
            raise RunLogError(f"{reader.path}: has no header yet: the run has only just begun, or ended at once")
        windows, num_redone = self._windows.finish()
        metrics = {key: _metric(rows) for key, rows in self._metrics.items()}
        goals = {key: metrics.pop(_TARGET + key) for key in list(metrics) if _TARGET + key in metrics}
        return RunArrays(
            name=name,
            headers=tuple(self._headers),
            windows=windows,
            num_redone=num_redone,
            metrics=metrics,
            targets={key: float(goal.value[-1]) for key, goal in goals.items()},
            in_training_time=self._in_training_time,
            plans=self._changes,
            predictions=self._predictions,
            last_plan=self._recent.last,
            compared=self._compared.kept,
            events=self._events,
            early=_typical(self._timelines.kept[:_NUM_TIMELINES]),
            late=_typical(self._timelines.kept[: -_NUM_TIMELINES - 1 : -1]),
            last_step=self._last_step,
            ended=self._ended,
            reader=reader,
        )


class _Table:
    """Windows as rows of numbers, turned into arrays one chunk at a time."""

    def __init__(self) -> None:
        self._rows: list[list[float | None]] = []
        self._num_ranks, self._by_rank = 0, list[float | None]()
        self._chunks: list[tuple[FloatArray, ByRank]] = []

    def add(self, window: WindowRecord, elapsed_ms: float, plan: PlanRecord | None) -> None:
        if len(self._rows) >= _CHUNK_WINDOWS or len(window.local_batches) != self._num_ranks:
            self._flush()
            self._num_ranks = len(window.local_batches)
        noise = window.noise or NoiseRecord()
        own = {
            "elapsed_ms": elapsed_ms,
            "predicted_ms": None if plan is None else plan.predicted_step_ms,
            "even_speed": None if plan is None else plan.even_speed,
            "noise_scale": noise.noise_scale,
            "noise_low": noise.low,
            "noise_high": noise.high,
        }
        self._rows.append([own[name] if name in own else getattr(window, name) for name in _COLUMNS])
        self._by_rank += chain(window.local_batches, *measured_ms(window))  # flat: lists of lists take numpy longer

    def finish(self) -> tuple[Windows, int]:
        """Return all windows that stand, and the number of the others."""
        self._flush()
        num_windows = sum(len(rows) for rows, _ in self._chunks)
        width = max((by_rank.shape[1] for _, by_rank in self._chunks), default=0)
        once = np.full((len(_COLUMNS), num_windows), np.nan)
        ranks = np.full((num_windows, width, 1 + len(ACTIVITIES)), np.nan, dtype=np.float32)
        place = 0
        for rows, by_rank in self._chunks:
            once[:, place : place + len(rows)] = rows.T
            ranks[place : place + len(rows), : by_rank.shape[1]] = by_rank
            place += len(rows)
        self._chunks.clear()
        stands = latest(once[_COLUMNS.index("first_step")])
        if not stands.all():
            once, ranks = once[:, stands], ranks[stands]
        columns: dict[str, FloatArray] = dict(zip(_COLUMNS, once, strict=True))
        return Windows(**columns, local_batches=ranks[..., 0], times_ms=ranks[..., 1:]), int((~stands).sum())

    def _flush(self) -> None:
        """Put local batches and activities of the rows so far, [W, n, 1 + A], into a chunk; None becomes NaN."""
        if self._rows:
            shape = (len(self._rows), 1 + len(MEASURED), self._num_ranks)
            by_rank = np.array(self._by_rank, dtype=np.float64).reshape(shape)
            both = np.concatenate([by_rank[:, 0, :, None], activities(by_rank[:, 1:])], axis=-1)
            with np.errstate(over="ignore"):  # what is beyond any time becomes infinite, which counts as not known
                self._chunks.append((np.array(self._rows, dtype=np.float64), both.astype(np.float32)))
        self._rows, self._by_rank = [], []


def _metric(rows: list[tuple[int, float, float]]) -> Metric:
    steps, elapsed_ms, value = np.array(rows, dtype=np.float64).T
    stands = latest(steps)
    return Metric(elapsed_ms[stands], value[stands])


def _typical(lines: Sequence[Timeline]) -> Timeline | None:
    """Return the middle one by duration of the timelines that can be drawn, before the first with another split."""
    drawable = []
    for line in takewhile(lambda line: line.local_batches == lines[0].local_batches, lines):
        ranks = rank_moments(line).values()
        complete = len(ranks) == len(line.local_batches) and len({len(rank.buckets) for rank in ranks}) == 1
        if complete and longest_ns(ranks) > 0:
            drawable.append((longest_ns(ranks), line.step, line))
    drawable.sort(key=lambda each: each[:2])
    return drawable[len(drawable) // 2][-1] if drawable else None
