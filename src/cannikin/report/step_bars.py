"""One step as bars: what each rank computes, and each gradient bucket's all-reduce (the paper's overlap figures)."""

from __future__ import annotations

from typing import NamedTuple

from cannikin.report.rank_steps import NS_PER_MS, longest_ns, rank_steps
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
    steps = rank_steps(line)
    end_ns = longest_ns(steps.values())
    moments = {}  # of each rank's buckets, on one clock
    bars = []
    for rank, step in steps.items():
        start_ns = end_ns - step.length_ns
        moments[rank] = [(start_ns + ready, start_ns + done) for ready, done in step.buckets]
        forward_ns, ready_ns = start_ns - step.before_ns, start_ns + step.backward_ns
        bars.append(_bar(rank, "compute", "optimizer and forward", None, forward_ns, start_ns))
        bars.append(_bar(rank, "compute", "backward", None, start_ns, ready_ns))
    all_ready_ns = [max(ready for ready, _ in buckets) for buckets in zip(*moments.values(), strict=True)]
    for rank, buckets in moments.items():
        bars += _link_bars(rank, buckets, all_ready_ns)
    return [bar for bar in bars if bar.length_ms > 0]


def _link_bars(rank: int, buckets: list[tuple[int, int]], all_ready_ns: list[int]) -> list[Bar]:
    """Waiting and all-reduces of one rank, whose buckets these are."""
    bars = []
    free = 0  # the rank is done with all buckets so far
    for bucket, (all_ready, (own_ready, end)) in enumerate(zip(all_ready_ns, buckets, strict=True)):
        start = min(all_ready, end)
        if end >= free:  # not overtaken by a later bucket
            begin = max(own_ready, free)
            start = min(max(all_ready, begin), end)
            bars.append(_bar(rank, "link", "waiting", bucket, begin, start))
        bars.append(_bar(rank, "link", "all-reduce", bucket, start, end))
        free = max(free, end)
    return bars


def _bar(rank: int, lane: str, kind: str, bucket: int | None, start_ns: int, end_ns: int) -> Bar:
    return Bar(rank, lane, kind, bucket, start_ns / NS_PER_MS, (end_ns - start_ns) / NS_PER_MS)
