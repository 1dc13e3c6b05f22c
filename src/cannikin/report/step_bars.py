"""One step as bars: what each rank computes, and each gradient bucket's all-reduce (the paper's overlap figures).

Ranks' clocks differ, so they are lined up by the end of the last all-reduce, which is one moment for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cannikin.core.records import FloatArray
from cannikin.runlog import Timeline

__all__ = ["Bar", "step_bars"]


class Bar(NamedTuple):
    """Something that a rank did from `start_ms` for `length_ms`; computing and communication are lanes of their own."""

    rank: int
    lane: str
    kind: str
    bucket: int | None
    start_ms: float
    length_ms: float


def step_bars(line: Timeline) -> list[Bar]:
    """The bars of a timeline without gaps in its numbers, 0 ms where the first rank begins.

    An all-reduce begins when the last rank has its bucket ready and the rank is done with the bucket before; what lies
    between a rank's own readiness and that moment is waiting. In a lane no bar covers another, unless all-reduces
    finished in another order than they began.

    Example:
        >>> line = Timeline(step=12, local_batches=(24, 8), before_ms=(10.0, 12.0), ready_ms=((20.0,), (26.0,)),
        ...                 done_ms=((33.0,), (31.0,)))
        >>> [(bar.rank, bar.kind, bar.start_ms, bar.length_ms) for bar in step_bars(line) if bar.lane == "link"]
        [(0, 'waiting', 30.0, 8.0), (0, 'all-reduce', 38.0, 5.0), (1, 'all-reduce', 38.0, 5.0)]
    """
    before, ready, done = (np.array(times, dtype=np.float64) for times in (line.before_ms, line.ready_ms, line.done_ms))
    ends = done.max(axis=1)
    backward_starts = (before + ends).max() - ends
    ready, done = ready + backward_starts[:, None], done + backward_starts[:, None]
    bars = []
    for rank in range(len(before)):
        start, last_ready = float(backward_starts[rank]), float(ready[rank].max())
        bars.append(
            Bar(rank, "compute", "optimizer and forward", None, start - float(before[rank]), float(before[rank]))
        )
        bars.append(Bar(rank, "compute", "backward", None, start, last_ready - start))
        bars += _link_bars(rank, ready, done[rank])
    return [bar for bar in bars if bar.length_ms > 0]


def _link_bars(rank: int, ready: FloatArray, done: FloatArray) -> list[Bar]:
    """Waiting and all-reduces of one rank; `ready` is [n, J] and `done` [J], on one clock."""
    bars = []
    free = -np.inf  # the rank is done with all buckets so far
    for bucket, (all_ready, own_ready, end) in enumerate(zip(ready.max(axis=0), ready[rank], done, strict=True)):
        if end >= free:
            begin = max(float(own_ready), free)
            start = min(max(float(all_ready), begin), float(end))
            bars.append(Bar(rank, "link", "waiting", bucket, min(begin, start), start - min(begin, start)))
        else:  # overtaken by a later bucket
            start = min(float(all_ready), float(end))
        bars.append(Bar(rank, "link", "all-reduce", bucket, start, float(end) - start))
        free = max(free, float(end))
    return bars
