"""The cluster that a run has learned, out of its log, whatever its policy was.

The log has, window by window, each rank's median times at its local batch and one step in full. A rank's history is the
median over its windows at each local batch; a single window far off the others' line, as when another program takes
the machine for a second, is left out. Histories go through the planner's own learner, which fits the curves;
communication is the median over the full steps. Where a rank has changed its speed, as events of the log say, the
windows at its present speed count, and others only if these have seen too few local batches.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from cannikin.core.advice import LearnedCluster, learned_ranks
from cannikin.core.fit import bucket_times
from cannikin.core.learner import Learner, ModelFit
from cannikin.core.planner import Noise
from cannikin.core.values import NO_MAX, FloatArray, IntArray, StepWindow
from cannikin.errors import RunLogError
from cannikin.runlog.convert import replay_window
from cannikin.runlog.records import LEAST_MS, MOST, EventRecord, Header, NoiseRecord, Record, WindowRecord

_RECENT = 50  # windows with one local batch, or with full steps, that count
_MOST_SIZES = 8  # local batches of one rank that are looked at
_CHANGED = 0.1  # speeds that differ by less (in logarithms) are one
_APART = 1.2  # a ratio of local batches from which a curve can be told
_OFF = 0.15  # a single window this far (in relative terms) from the others' line is left out


@dataclass
class _Measured:
    """What a log says of the ranks that its last header names."""

    header: Header
    # Of each rank, by the number of changes of its speed until then and by local batch: forward and backward, seconds.
    times: defaultdict[tuple[int, int, int], deque[tuple[float, float, int]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_RECENT))
    )
    levels: dict[int, list[float]] = field(default_factory=dict)  # log times after each change, of each rank
    recent: deque[WindowRecord] = field(default_factory=lambda: deque(maxlen=_RECENT))
    caps: dict[int, int] = field(default_factory=dict)  # local batches that memory holds, by rank
    noise: NoiseRecord | None = None

    def add(self, record: WindowRecord) -> None:
        """Take in a window."""
        self.noise = record.noise or self.noise
        batches = record.local_batches
        if len(batches) != self.header.world_size or not all(1 <= batch < MOST for batch in batches):
            return
        self.recent.append(record)
        rows = zip(batches, record.before_ms, record.backward_ms, strict=False)
        for rank, (batch, before_ms, backward_ms) in enumerate(rows):
            seconds = [ms / 1e3 for ms in (before_ms, backward_ms) if ms is not None and LEAST_MS < ms < MOST]
            if len(seconds) == 2:
                level = len(self.levels.get(rank, ()))
                self.times[rank, level, batch].append((seconds[0], seconds[1], record.num_valid))

    def note(self, event: EventRecord) -> None:
        """Take in what an event says of a rank."""
        rank, factor, most = (event.data.get(name) for name in ("rank", "factor", "max_batch"))
        if not isinstance(rank, int):
            return
        if event.kind == "out_of_memory" and isinstance(most, int):
            self.caps[rank] = most
        if event.kind == "changed_speed" and isinstance(factor, float) and 0 < factor < math.inf:
            before = self.levels.setdefault(rank, [])
            before.append((before[-1] if before else 0.0) + math.log(factor))

    def history(self, rank: int) -> FloatArray:
        """Return a rank's local batches, the times of forward and backward at each, and steps, [4, K]."""
        levels = [0.0, *self.levels.get(rank, ())]
        away = [levels[-1] - level for level in levels]  # log of the factor that makes times of then times of now
        points = [(level, batch, times) for (r, level, batch), times in self.times.items() if r == rank]
        now = [point for point in points if abs(away[point[0]]) < _CHANGED]
        sizes = [batch for _, batch, _ in now]
        if not now or max(sizes) < _APART * min(sizes):
            now = points
        merged: defaultdict[int, list[tuple[float, float, int]]] = defaultdict(list)
        for level, batch, times in now:
            factor = math.exp(away[level]) if abs(away[level]) >= _CHANGED else 1.0
            merged[batch] += [(before_s * factor, backward_s * factor, steps) for before_s, backward_s, steps in times]
        return _without_strays({batch: merged[batch] for batch in sorted(merged)})


def learned_cluster(records: Iterable[Record]) -> LearnedCluster:
    """Return the cluster and the job as the last run of a log has learned them.

    A run that was resumed on the same ranks is one run.

    Raises:
        RunLogError: the log is too short, or too much of it is damaged, to have learned anything.
    """
    measured: _Measured | None = None
    for record in records:
        if isinstance(record, Header):
            if measured is None or not _same_ranks(measured.header, record):
                measured = _Measured(record)
            measured.header = record
        elif measured is not None and isinstance(record, WindowRecord):
            measured.add(record)
        elif measured is not None and isinstance(record, EventRecord):
            measured.note(record)
    if measured is None:
        raise RunLogError("the run log has no header yet: the run has only just begun, or ended at once")
    return _learn(measured)


def _same_ranks(before: Header, after: Header) -> bool:
    """Return whether two headers name the same devices in the same order; what these say of themselves may differ."""
    devices = [[(rank.name, rank.host, rank.device, rank.uuid) for rank in each.ranks] for each in (before, after)]
    return devices[0] == devices[1] and before.world_size == after.world_size


def _learn(measured: _Measured) -> LearnedCluster:
    header, num_ranks = measured.header, measured.header.world_size
    histories = [measured.history(rank) for rank in range(num_ranks)] if measured.recent else []
    full = [window for record in measured.recent if (window := replay_window(record)) is not None]
    full = [window for window in full if window.num_ranks == num_ranks and window.valid.all()]
    if not full or not all(history.size for history in histories):
        raise RunLogError("the run log has no window measured on all ranks, so nothing was learned: train longer")
    learner = Learner(num_ranks)
    for rank, history in enumerate(histories):
        learner.fill(rank, history)
    learner.fill_buckets(*_buckets(full))
    for record in measured.recent:
        if (window := _with_loading(record)) is not None:
            learner.loading.observe(window)
    model = learner.model(*_bounds(header, measured.caps))
    assert model.cluster is not None  # every rank has been measured
    info = [header.rank(rank) for rank in range(num_ranks)]
    return LearnedCluster(
        ranks=learned_ranks(learner, model, [(rank.device or rank.name, rank.host) for rank in info]),
        tails_s=model.cluster.tails_s,
        batch_size=header.job.batch_size,
        max_batch_size=header.job.max_batch_size,
        local_batches=measured.recent[-1].local_batches,
        noise=None if measured.noise is None else _noise(measured.noise),
        slowdown=_slowdown(measured.recent, model),
    )


def _without_strays(times: dict[int, list[tuple[float, float, int]]]) -> FloatArray:
    """Return the median at each local batch, without single windows far off the line of the others, [4, K]."""
    windows = np.array([len(rows) for rows in times.values()])
    columns = [[b, *np.median([row[:2] for row in rows], axis=0), sum(r[2] for r in rows)] for b, rows in times.items()]
    table = np.array(columns, dtype=np.float64).reshape(-1, 4).T
    stray = np.zeros(table.shape[1], dtype=np.bool_)
    for seconds in table[1:3]:
        stray |= np.abs(1 - _line(table[0], seconds, np.minimum(windows, 5)) / seconds) > _OFF
    stray &= (windows == 1) & (table.shape[1] > 2)
    table, windows = table[:, ~stray], windows[~stray]
    kept = np.sort(np.argsort(-windows, kind="stable")[:_MOST_SIZES])
    table[3] = np.maximum(table[3], 1.0)
    return table[:, kept]


def _line(batches: FloatArray, seconds: FloatArray, weights: IntArray) -> FloatArray:
    """Return the heights of the line through two of the points that has the least sum of relative errors, [K]."""
    best, least = seconds, math.inf
    for i, j in combinations(range(len(batches)), 2):
        slope = (seconds[j] - seconds[i]) / (batches[j] - batches[i])
        line = seconds[i] + max(slope, 0.0) * (batches - batches[i])
        error = float((weights * np.abs(1 - line / seconds)).sum())
        if error < least:
            best, least = line, error
    return best


def _buckets(windows: Sequence[StepWindow]) -> tuple[FloatArray, FloatArray]:
    """Return overlap ratios, [n, J], and tails, [J], medians over full steps with as many buckets as the last."""
    alike = [window for window in windows if window.num_buckets == windows[-1].num_buckets]
    ready = np.concatenate([window.ready_s for window in alike])
    gammas = np.median(ready / ready[..., -1:], axis=0).clip(0.0, 1.0)
    each_s = np.median(np.concatenate([bucket_times(window) for window in alike]), axis=0)
    return gammas, each_s[::-1].cumsum()[::-1]


def _with_loading(record: WindowRecord) -> StepWindow | None:
    """Return the full step of a record with the ranks' usual waits for data; None where these are not known."""
    window = replay_window(record)
    waits = record.loader_ms
    if window is None or record.loader_inside or len(waits) != window.num_ranks or None in waits:
        return None
    return replace(window, load_s=np.array([waits], dtype=np.float64) / 1e3)


def _bounds(header: Header, caps: dict[int, int]) -> tuple[IntArray, IntArray]:
    """Return the bounds of each rank's local batch: the job's, and what its memory was found to hold."""
    job = header.job
    low, high = np.ones(header.world_size, dtype=np.int64), np.full(header.world_size, NO_MAX)
    for rank in range(header.world_size):
        given = job.max_local[rank] if rank < len(job.max_local) else None
        low[rank] = job.min_local[rank] if rank < len(job.min_local) else 1
        high[rank] = min(NO_MAX if given is None else given, caps.get(rank, NO_MAX))
    return low, np.maximum(low, high)


def _noise(record: NoiseRecord) -> Noise:
    """Return the noise of a record, in which what is not finite is None."""
    signal, trace = (math.nan if x is None else x for x in (record.signal_sqnorm, record.noise_trace))
    limits = record.low or 0.0, math.inf if record.high is None else record.high
    return Noise(
        signal_sqnorm=signal,
        noise_trace=trace,
        limits=limits,
        flags=record.flags,
        num_batches=record.num_batches,
    )


def _slowdown(records: Iterable[WindowRecord], model: ModelFit) -> float:
    """Return how much longer these windows' steps took than the model says, in the median."""
    ratios = []
    for record in records:
        if record.step_ms is not None and LEAST_MS < record.step_ms < MOST:
            waits_ms = (
                0.0 if record.loader_inside else float(np.median([ms or 0.0 for ms in record.loader_ms] or [0.0]))
            )
            ratios.append((record.step_ms + waits_ms) / 1e3 / model.step_s(record.local_batches))
    return float(np.median(ratios)) if ratios else 1.0
