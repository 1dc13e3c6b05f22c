"""From a run's log to Chrome trace events, which Perfetto opens: steps of all ranks, counters, plans and events.

One process per rank, and one for the run. A step's timeline of a rank, in its threads:

    compute        [                        step                          ]
                   [optimizer + forward][  backward  ][waiting][all-reduce]
    communication                           [all-reduce of bucket 1][bucket 2]      one more thread per overlap

Ranks are lined up by the end of the last all-reduce, which ends on all at once: their clocks are never compared. What
follows backward is divided as in the log (`WindowRecord.wait_ms`): the rank for which it is shortest waits for nobody,
so that much is all-reduce that no computing hid, and the rest is waiting for a slower rank.

Where a step lies in the run is known from the time its window was written, so to within a few steps. A log that resumes
goes on where it ended. Times are whole nanoseconds inside, so that slices of one thread nest exactly.

Format: the Trace Event Format, in microseconds; of it "X" (slices, which on one thread must nest), "C", "i" and "M".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from cannikin.runlog import EventRecord, Header, PlanRecord, Record, Timeline, WindowRecord
from cannikin.runlog.times import RankMoments, as_ns, finite, longest_ns, rank_moments
from cannikin.words import rank_name, split_sum

Event = dict[str, Any]

_FIRST_PID = 1000  # rank 0's: viewers take process 0 for the idle one
_RUN_PID = _FIRST_PID - 1
_PLANS, _EVENTS = 1, 2  # threads of the run
_COMPUTE, _FIRST_LANE = 1, 2  # threads of a rank
_MOST_RANKS = 100_000  # that are named: beyond them, the number of a damaged header is none of ranks


def trace_events(
    records: Iterable[Record], steps: Collection[int] | None = None, *, stride: int = 1
) -> Iterator[Event]:
    """Return the events of a log, in the order of its records.

    Args:
        records: a log from its first header on, resumes included.
        steps: of those that have a timeline, the ones to draw; all of them where left out.
        stride: of step times, and of plans that changed nothing, only every so many are kept, for very long logs.

    Example:
        >>> from cannikin.runlog import JobInfo
        >>> line = Timeline(step=2, local_batches=(3,), before_ms=(10.0,), ready_ms=((20.0,),), done_ms=((25.0,),))
        >>> header = Header(cannikin_version="1", started="", policy="even", world_size=1, job=JobInfo(batch_size=3))
        >>> window = WindowRecord(first_step=0, num_steps=3, num_valid=3, total_batch=3, local_batches=(3,),
        ...                       step_ms=35.0, elapsed_ms=200.0, timeline=line)
        >>> events = trace_events([header, window])
        >>> [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]  # doctest: +NORMALIZE_WHITESPACE
        [('step 2', 165000.0, 35000.0), ('optimizer + forward', 165000.0, 10000.0), ('backward', 175000.0, 20000.0),
         ('all-reduce', 195000.0, 5000.0), ('bucket 1 of 1', 195000.0, 5000.0)]
    """
    draw = _Drawing(stride, None if steps is None else frozenset(steps))
    for record in records:
        match record:
            case Header():
                yield from draw.header(record)
            case WindowRecord():
                yield from draw.window(record)
            case PlanRecord():
                yield from draw.plan(record)
            case EventRecord():
                yield from draw.event(record)


class _Drawing:
    """What has been drawn so far of one log."""

    def __init__(self, stride: int, steps: frozenset[int] | None) -> None:
        self._stride, self._steps = stride, steps
        self._clock = _RunClock()
        self._bucket_bytes: tuple[int, ...] = ()  # where the header says them, as a simulation's does
        self._named: set[tuple[int, int]] = set()  # processes (thread 0) and threads
        self._counted: dict[tuple[int, str], float] = {}
        self._num_headers = self._num_windows = self._num_kept = 0
        self._split: tuple[int, ...] = ()
        self._drawn_ns = 0  # end of the last step drawn

    def header(self, header: Header) -> Iterator[Event]:
        self._clock.resume(header.first_step)
        self._bucket_bytes = header.model.bucket_bytes
        yield from self._name_process(_RUN_PID, f"run: {header.policy}")
        for rank in range(min(header.world_size, _MOST_RANKS)):
            info = header.rank(rank)
            what = ", ".join(dict.fromkeys(word for word in (info.name, info.device) if word))
            name = rank_name(rank) + (f": {what}" if what else "") + (f" on {info.host}" if info.host else "")
            yield from self._name_process(_FIRST_PID + rank, name)
        self._num_headers += 1
        if self._num_headers > 1:
            args = {"step": header.first_step, "ranks": header.world_size, "started": header.started}
            yield from self._instant(_EVENTS, "the run resumes", self._clock.latest_ms, args)

    def window(self, window: WindowRecord) -> Iterator[Event]:
        self._clock.see(window)
        began_ms, pids = self._clock.began_ms, range(_FIRST_PID, _FIRST_PID + len(window.local_batches))
        yield from self._count(_RUN_PID, "total batch", "samples", began_ms, window.total_batch)
        for pid, batch in zip(pids, window.local_batches, strict=True):
            yield from self._count(pid, "local batch", "samples", began_ms, batch)
        if self._num_windows % self._stride == 0:
            yield from self._count(_RUN_PID, "step time", "ms", began_ms, window.step_ms)
        self._num_windows += 1
        line = window.timeline
        if line is not None and (self._steps is None or line.step in self._steps):
            yield from self._step(line)

    def plan(self, plan: PlanRecord) -> Iterator[Event]:
        time_ms = self._clock.at(plan.step, plan.elapsed_ms)
        kept, self._split = plan.local_batches == self._split, plan.local_batches
        self._num_kept += kept
        if kept and self._num_kept % self._stride:
            return
        args = {
            "reason": plan.reason,
            "phase": plan.phase,
            "decided at step": plan.step,
            "in force from step": plan.first_step,
            "predicted step ms": plan.predicted_step_ms,
            "local batches": list(plan.local_batches),
        }
        yield from self._instant(_PLANS, "kept" if kept else split_sum(plan.local_batches), time_ms, args)

    def event(self, event: EventRecord) -> Iterator[Event]:
        time_ms = self._clock.at(event.step, event.elapsed_ms)
        args = {"step": event.step, "text": event.text or None, **event.data}
        yield from self._instant(_EVENTS, event.kind, time_ms, args)

    def _step(self, line: Timeline) -> Iterator[Event]:
        """Draw one step on all ranks whose times are known, after the step drawn before it."""
        ranks = rank_moments(line)
        if not ranks:
            return
        end_ns = max(as_ns(self._clock.end_of(line.step)), self._drawn_ns + longest_ns(ranks.values()))
        self._drawn_ns = end_ns
        exposed_ns = end_ns - min(step.length_ns - step.backward_ns for step in ranks.values())  # the shortest tail
        for rank, step in ranks.items():
            pid, backward_ns = _FIRST_PID + rank, end_ns - step.length_ns
            begin_ns, tail_ns = backward_ns - step.before_ns, backward_ns + step.backward_ns
            args = {"step": line.step, "local batch": step.local_batch, "total batch": sum(line.local_batches)}
            parts = (
                ("optimizer + forward", begin_ns, backward_ns),
                ("backward", backward_ns, tail_ns),
                ("waiting", tail_ns, exposed_ns),
                ("all-reduce", exposed_ns, end_ns),
            )
            yield from self._name_thread(pid, _COMPUTE, "compute")
            yield _slice(pid, _COMPUTE, f"step {line.step}", begin_ns, end_ns, args)
            yield from (_slice(pid, _COMPUTE, name, start, end) for name, start, end in parts if end > start)
            yield from self._communicating(pid, step, end_ns, line.bucket_bytes or self._bucket_bytes)

    def _communicating(
        self, pid: int, step: RankMoments, end_ns: int, bucket_bytes: tuple[int, ...]
    ) -> Iterator[Event]:
        """Draw each bucket from when it was ready until it was reduced, on the first lane that is free."""
        start_ns = end_ns - step.length_ns
        free_ns: list[int] = []
        order = sorted(range(len(step.buckets)), key=lambda j: step.buckets[j])
        for j in order:
            ready_ns, done_ns = (start_ns + moment for moment in step.buckets[j])
            lane = next((k for k, free in enumerate(free_ns) if free <= ready_ns), len(free_ns))
            free_ns[lane : lane + 1] = [done_ns]
            yield from self._name_thread(pid, _FIRST_LANE + lane, "communication")
            args = {"bytes": bucket_bytes[j]} if j < len(bucket_bytes) else {}
            yield _slice(pid, _FIRST_LANE + lane, f"bucket {j + 1} of {len(order)}", ready_ns, done_ns, args)

    def _count(self, pid: int, name: str, unit: str, time_ms: float, value: float | None) -> Iterator[Event]:
        """Draw a counter, where its value changes."""
        number = finite(value)
        if number is not None and self._counted.get((pid, name)) != number:
            self._counted[pid, name] = number
            yield {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": _us(as_ns(time_ms)), "args": {unit: value}}

    def _instant(self, tid: int, name: str, time_ms: float, args: dict[str, Any]) -> Iterator[Event]:
        yield from self._name_thread(_RUN_PID, tid, "plans" if tid == _PLANS else "events")
        event = {"ph": "i", "s": "t", "pid": _RUN_PID, "tid": tid, "name": name or "event"}
        yield {**event, "ts": _us(as_ns(time_ms)), "args": _known(args)}

    def _name_process(self, pid: int, name: str) -> Iterator[Event]:
        yield from self._name("process", pid, 0, {"name": name, "sort_index": pid})

    def _name_thread(self, pid: int, tid: int, name: str) -> Iterator[Event]:
        yield from self._name_process(pid, rank_name(pid - _FIRST_PID))  # a rank that the header does not list
        yield from self._name("thread", pid, tid, {"name": name, "sort_index": tid})

    def _name(self, kind: str, pid: int, tid: int, words: dict[str, str | int]) -> Iterator[Event]:
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            for key, value in words.items():
                yield {"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_{key}", "ts": 0, "args": {key: value}}


def _slice(pid: int, tid: int, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None) -> Event:
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": _us(start_ns), "dur": _us(end_ns - start_ns)}
    return {**event, "args": _known(args)} if args else event


def _known(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in args.items() if value is not None}


def _us(time_ns: int) -> float:
    return time_ns / 1000


class _RunClock:
    """Places steps on the time of the run, in ms since it started; what is resumed follows what was before."""

    def __init__(self) -> None:
        self.latest_ms = 0.0
        self.began_ms = 0.0  # of the window last seen
        self._offset_ms = self._end_ms = self._pace_ms = 0.0
        self._last_step = -1

    def resume(self, first_step: int) -> None:
        """Take a header: times count from 0 again."""
        self._offset_ms = self._end_ms = self.latest_ms
        self._last_step = first_step - 1

    def see(self, window: WindowRecord) -> None:
        """Take a window that has ended; without a time of its own it took its steps' time."""
        num_steps = max(window.num_steps, 1)
        step_ms = finite(window.step_ms) or 0.0
        elapsed_ms = finite(window.elapsed_ms)
        before_ms = self._end_ms
        end_ms = before_ms + num_steps * step_ms if elapsed_ms is None else self._offset_ms + elapsed_ms
        self._end_ms = self._note(max(end_ms, before_ms))
        fits_ms = (self._end_ms - before_ms) / num_steps
        self._pace_ms = min(step_ms, fits_ms) if step_ms else fits_ms
        self._last_step = window.first_step + window.num_steps - 1
        self.began_ms = self._end_ms - num_steps * self._pace_ms

    def end_of(self, step: int) -> float:
        """Return when a step ended, by its distance from the end of the window last seen."""
        return self._note(max(self._end_ms + (step - self._last_step) * self._pace_ms, self._offset_ms))

    def at(self, step: int, elapsed_ms: float | None) -> float:
        """Return when something was written down."""
        elapsed_ms = finite(elapsed_ms)
        return self.end_of(step) if elapsed_ms is None else self._note(self._offset_ms + elapsed_ms)

    def _note(self, time_ms: float) -> float:
        self.latest_ms = max(self.latest_ms, time_ms)
        return time_ms
