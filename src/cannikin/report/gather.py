"""Reads a run's log record by record into arrays: a log of any length, in memory of a few numbers a window."""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cannikin.core.records import BoolArray, FloatArray
from cannikin.errors import RunLogError
from cannikin.report.arrays import WINDOW_COLUMNS, ByRank, Metric, RunArrays, Windows, latest
from cannikin.report.keeping import Ends, Spread, Timelines
from cannikin.report.window import before_ms, padded, predicted_ms
from cannikin.runlog import EventRecord, Header, PlanRecord, Record, RunLogReader, WindowRecord

__all__ = ["gather", "numbers_only", "read_arrays"]

_RANK_COLUMNS = ("local_batches", "before_ms", "backward_ms", "done_ms", "wait_ms", "loader_ms", "other_ms")
_CHUNK_WINDOWS = 1024
_MAX_COMPARED = 60
_MAX_LISTED = 100  # plans and events at each end of a table
_ALWAYS = {"eval", "epoch"}  # events with a figure of their own, or too many to list


def read_arrays(path: str | os.PathLike[str], name: str) -> RunArrays:
    """The run in this directory or log file.

    Raises:
        RunLogError: the file is missing, is no run log, has no header yet, or has another version of the format.
    """
    with RunLogReader(path) as reader, numbers_only(reader.path):
        gathered = _Gathered(reader.path)
        gathered.take_all(reader.records())
        return gathered.finish(
            name,
            truncated=reader.truncated,
            num_unreadable=reader.num_unreadable,
            num_unknown=reader.num_unknown,
        )


def gather(records: Iterable[Record], name: str = "run") -> RunArrays:
    """The same from records in memory, of which the first is a header."""
    gathered = _Gathered(Path("records"))
    gathered.take_all(records)
    return gathered.finish(name, truncated=False, num_unreadable=0, num_unknown=0)


@contextmanager
def numbers_only(path: str | os.PathLike[str]) -> Iterator[None]:
    """Refuse a log with whole numbers beyond any that are measured, which JSON can hold and a float cannot."""
    try:
        yield
    except OverflowError as error:
        raise RunLogError(f"{os.fspath(path)}: holds a number too large to be a measurement: {error}") from error


class _Gathered:
    """What has been read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._headers: list[Header] = []
        self._windows = _Table()
        self._metrics: dict[str, list[tuple[int, float | None, float]]] = {}
        self._recent: deque[PlanRecord] = deque(maxlen=4)  # a plan is in force at most a few windows later
        self._changes: Ends[PlanRecord] = Ends(_MAX_LISTED)
        self._compared: Spread[PlanRecord] = Spread(_MAX_COMPARED)
        self._events: Ends[EventRecord] = Ends(_MAX_LISTED)
        self._timelines = Timelines()
        self._ended: EventRecord | None = None
        self._last_step = 0
        self._offset_ms, self._elapsed_ms = 0.0, math.nan

    def take_all(self, records: Iterable[Record]) -> None:
        for record in records:
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
        self._windows.add(window, self._at(window.elapsed_ms), predicted_ms(window, self._recent))
        self._last_step = max(self._last_step, window.first_step + window.num_steps - 1)
        if window.timeline is not None:
            self._timelines.add(window.timeline)

    def _take_plan(self, plan: PlanRecord) -> None:
        if not self._recent or self._recent[-1].local_batches != plan.local_batches:
            self._changes.add(plan)
        self._recent.append(plan)
        self._last_step = max(self._last_step, plan.step)
        if plan.candidate_totals:
            self._compared.add(plan)

    def _take_event(self, event: EventRecord) -> None:
        elapsed_ms = self._at(event.elapsed_ms)
        self._last_step = max(self._last_step, event.step)
        if event.kind == "eval":
            for name, value in event.data.items():
                if isinstance(value, int | float):
                    self._metrics.setdefault(name, []).append((event.step, elapsed_ms, value))
        elif event.kind not in _ALWAYS:
            self._events.add(event)
        if event.kind == "end":
            self._ended = event

    def _at(self, elapsed_ms: float | None) -> float:
        """A moment of the present process, on the clock of the whole run; where it is not told, the last one known."""
        if elapsed_ms is not None:
            self._elapsed_ms = max(self._offset_ms + elapsed_ms, self._elapsed_ms)  # the first where that is NaN
        return self._elapsed_ms

    def finish(self, name: str, *, truncated: bool, num_unreadable: int, num_unknown: int) -> RunArrays:
        if not self._headers:
            raise RunLogError(f"{self._path}: has no header yet: the run has only just begun, or ended at once")
        windows, num_redone = self._windows.finish()
        return RunArrays(
            name=name,
            headers=tuple(self._headers),
            windows=windows,
            num_redone=num_redone,
            metrics={key: _metric(rows) for key, rows in self._metrics.items()},
            plans=self._changes.kept,
            num_changes=self._changes.num_seen,
            last_plan=self._recent[-1] if self._recent else None,
            compared=self._compared.kept,
            events=self._events.kept,
            num_events=self._events.num_seen,
            early=self._timelines.early,
            late=self._timelines.late,
            last_step=self._last_step,
            ended=self._ended,
            truncated=truncated,
            num_unreadable=num_unreadable,
            num_unknown=num_unknown,
        )


class _Table:
    """Windows as rows of numbers, turned into arrays a chunk at a time."""

    def __init__(self) -> None:
        self._rows: list[tuple[float | None, ...]] = []
        self._by_rank: list[tuple[float | None, ...]] = []
        self._num_ranks = 0
        self._chunks: list[tuple[FloatArray, ByRank]] = []

    def add(self, window: WindowRecord, elapsed_ms: float, predicted_step_ms: float | None) -> None:
        n, noise = len(window.local_batches), window.noise
        if n != self._num_ranks or len(self._rows) >= _CHUNK_WINDOWS:
            self._flush()
            self._num_ranks = n
        limits = (None, None, None) if noise is None else (noise.noise_scale, noise.low, noise.high)
        self._rows.append(
            (
                *(window.first_step, window.num_steps, window.total_batch, window.step_ms, elapsed_ms),
                *(window.progress, window.lr_factor, window.num_skipped),
                *limits,
                predicted_step_ms,
            )
        )
        columns = (window.backward_ms, window.done_ms, window.wait_ms, window.loader_ms, window.other_ms)
        times = (before_ms(window), *(padded(column, n) for column in columns))
        self._by_rank.append((*window.local_batches, *itertools.chain.from_iterable(times)))

    def finish(self) -> tuple[Windows, int]:
        """All windows that stand, and the number of the others."""
        self._flush()
        width = max((by_rank.shape[2] for _, by_rank in self._chunks), default=0)
        num_windows = sum(len(rows) for rows, _ in self._chunks)
        once = np.full((len(WINDOW_COLUMNS), num_windows), np.nan)
        ranks = np.full((len(_RANK_COLUMNS), num_windows, width), np.nan, dtype=np.float32)
        place = 0
        for rows, by_rank in self._chunks:
            once[:, place : place + len(rows)] = rows.T
            ranks[:, place : place + len(rows), : by_rank.shape[2]] = by_rank.swapaxes(0, 1)
            place += len(rows)
        self._chunks.clear()
        stands: BoolArray = latest(once[0])
        if not stands.all():
            once, ranks = once[:, stands], ranks[:, stands]
        columns: dict[str, Any] = {**dict(zip(WINDOW_COLUMNS, once, strict=True))}
        columns |= dict(zip(_RANK_COLUMNS, ranks, strict=True))
        return Windows(**columns), int((~stands).sum())

    def _flush(self) -> None:
        if self._rows:
            with np.errstate(over="ignore"):  # what is beyond any time becomes infinite, which counts as not known
                by_rank = np.array(self._by_rank, dtype=np.float32)  # None becomes NaN
            shape = (len(self._rows), len(_RANK_COLUMNS), self._num_ranks)
            self._chunks.append((np.array(self._rows, dtype=np.float64), by_rank.reshape(shape)))
        self._rows, self._by_rank = [], []


def _metric(rows: list[tuple[int, float | None, float]]) -> Metric:
    table = np.array(rows, dtype=np.float64)
    table = table[latest(table[:, 0])]
    return Metric(step=table[:, 0], elapsed_ms=table[:, 1], value=table[:, 2])
