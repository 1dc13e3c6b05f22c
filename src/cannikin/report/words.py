"""Numbers as people say them, and a run in a few sentences."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby

from cannikin.report.arrays import RunArrays
from cannikin.report.numbers import ACTIVITIES, Phase, early_rows, late_rows, phase, prediction_error

__all__ = [
    "amount",
    "duration",
    "ending",
    "headline",
    "memory",
    "percent",
    "rank_name",
    "runs_of",
    "split",
    "time_unit",
]

_BALANCED = 0.05  # of a step; less than this between the ranks' waiting is noise
_MOST_SPLIT = 8


def amount(value: float, digits: int = 3) -> str:
    """A number with this many digits, thousands apart.

    Example:
        >>> amount(1108.06), amount(0.01234), amount(46.9), amount(float("nan"))
        ('1,108', '0.0123', '46.9', 'not known')
    """
    if not math.isfinite(value):
        return "not known"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.0f}" if whole >= digits else f"{value:.{digits}g}"


def percent(share: float) -> str:
    """A share of 1.

    Example:
        >>> percent(0.0587), percent(0.34), percent(float("nan"))
        ('5.9%', '34%', 'not known')
    """
    if not math.isfinite(share):
        return "not known"
    return f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def duration(ms: float) -> str:
    """A time in the unit that suits it.

    Example:
        >>> duration(46.93), duration(20465.0), duration(396_000.0), duration(7.2e6)
        ('46.9 ms', '20.5 s', '6.6 min', '2 h')
    """
    if not math.isfinite(ms):
        return "not known"
    for limit, unit, scale in ((1e3, "ms", 1.0), (120e3, "s", 1e3), (7.2e6, "min", 60e3)):
        if ms < limit:
            return f"{amount(ms / scale)} {unit}"
    return f"{amount(ms / 3.6e6)} h"


def time_unit(longest_ms: float) -> tuple[str, float]:
    """The unit for an axis of times up to `longest_ms`, and milliseconds in it.

    Example:
        >>> time_unit(20465.0), time_unit(720_000.0)
        (('s', 1000.0), ('min', 60000.0))
    """
    for limit, unit, scale in ((600e3, "s", 1e3), (36e6, "min", 60e3)):
        if not longest_ms >= limit:
            return unit, scale
    return "h", 3.6e6


def _count(number: int) -> str:
    return f"{number:,}" if number < 1_000_000 else f"{amount(number / 1e6)} million"


def memory(num_bytes: int | None) -> str:
    """An amount of memory.

    Example:
        >>> memory(80 * 2**30), memory(None)
        ('80 GiB', 'not known')
    """
    return "not known" if num_bytes is None else f"{amount(num_bytes / 2**30)} GiB"


def split(local_batches: tuple[int, ...]) -> str:
    """A split, equal neighbours together, short where there are many ranks.

    Example:
        >>> split((30, 15, 7)), split((4,) * 16 + (2,)), split(tuple(range(1, 65)))
        ('30, 15, 7', '16 x 4, 2', '1, 2, 3, 4, 5, 6, 7, 8, ... (64 ranks, 1 to 64)')
    """
    parts = [_several(len(list(group)), f"{batch:,}") for batch, group in groupby(local_batches)]
    if len(parts) <= _MOST_SPLIT:
        return ", ".join(parts)
    low, high = min(local_batches), max(local_batches)
    return f"{', '.join(parts[:_MOST_SPLIT])}, ... ({len(local_batches)} ranks, {low:,} to {high:,})"


def _several(number: int, what: str) -> str:
    return what if number == 1 else f"{number} x {what}"


def runs_of(names: list[str]) -> str:
    """Names with how often each comes.

    Example:
        >>> runs_of(["a100", "a100", "v100"])
        '2 x a100, v100'
    """
    kinds = [_several(count, name) for name, count in Counter(names).items()]
    return ", ".join(kinds[:6]) + (f" and {len(kinds) - 6} kinds more" if len(kinds) > 6 else "")


def rank_name(run: RunArrays, rank: int) -> str:
    """A rank with what it runs on, as far as the log says."""
    ranks = run.header.ranks
    known = (ranks[rank].name or ranks[rank].device) if rank < len(ranks) else ""
    return f"rank {rank} ({known})" if known else f"rank {rank}"


def headline(run: RunArrays) -> list[str]:
    """The run in sentences: what ran, how it went, who held it up, where the log ends."""
    said = [_what_ran(run)]
    if len(run.windows):
        early, late = phase(run.windows, early_rows(run.windows)), phase(run.windows, late_rows(run.windows))
        said += [_outcome(run, late), _gain(early, late), _bottleneck(run, late)]
    else:
        said.append("No window of steps has been written yet, so there is nothing to draw.")
    return [sentence for sentence in (*said, *_damage(run), ending(run)) if sentence]


def _what_ran(run: RunArrays) -> str:
    header, job = run.header, run.header.job
    model = header.model.name or "A model"
    size = header.model.num_parameters
    parameters = f" ({_count(size)} parameters)" if size else ""
    devices = [rank.device or rank.name for rank in header.ranks]
    where = f": {runs_of(devices)}" if any(devices) else ""
    simulated = " in simulated time" if header.tags.get("simulated") == "yes" else ""
    total = f"a total batch of {job.batch_size:,}"
    if job.max_batch_size is not None and job.max_batch_size > job.batch_size:
        total = f"total batches from {job.batch_size:,} to {job.max_batch_size:,}"
    count = "1 rank" if header.world_size == 1 else f"{header.world_size} ranks"
    resumed = len(run.headers) - 1
    again = f" It was resumed {resumed} time{'s' if resumed > 1 else ''}." if resumed else ""
    how = f"under the policy {header.policy}, with {total}"
    return f"{model}{parameters} trained{simulated} on {count}{where}, {how}.{again}"


def _outcome(run: RunArrays, late: Phase) -> str:
    spent = duration(run.duration_ms)
    said = (
        f"In {spent} it took {run.last_step:,} steps." if spent != "not known" else f"It took {run.last_step:,} steps."
    )
    said += f" At the end the total batch of {late.total_batch:,} is split {split(late.local_batches)}"
    if math.isfinite(late.step_ms):
        said += f", and a step takes {duration(late.step_ms)}"
    error = prediction_error(run.windows)
    return f"{said}; predictions were {percent(error)} off (median)." if math.isfinite(error) else f"{said}."


def _gain(early: Phase, late: Phase) -> str:
    """Against its own first windows, where the split has changed since."""
    ratio = late.samples_per_s / early.samples_per_s if early.samples_per_s > 0 else float("nan")
    if not math.isfinite(ratio) or early.local_batches == late.local_batches:
        return ""
    rates = f"That is {amount(late.samples_per_s)} samples a second instead of {amount(early.samples_per_s)}"
    first = f"its own first windows, which had {split(early.local_batches)}"
    if not 0.8 <= late.total_batch / early.total_batch <= 1.25:  # most of it then comes of the larger total batch
        return f"{rates} in {first}; the total batch was {early.total_batch:,} then."
    return f"{rates}: {ratio:.2f} times the speed of {first}." if ratio >= 1.02 else f"{rates} in {first}."


def _bottleneck(run: RunArrays, late: Phase) -> str:
    if late.slowest is None or len(late.local_batches) < 2:
        return ""
    shares = dict(zip(ACTIVITIES, late.shares[late.slowest].tolist(), strict=True))
    computing = shares["optimizer and forward"] + shares["backward"]
    if shares["communication"] > computing:
        return (
            f"Communication is the bottleneck: even {rank_name(run, late.slowest)}, which waits least, spends "
            f"{percent(shares['communication'])} of its time on all-reduces that no computing hides."
        )
    if late.spread < _BALANCED:
        return f"The ranks are in balance: none waits more than {percent(late.spread)} of a step longer than another."
    loads = f" and loads data {percent(shares['loading'])}" if shares["loading"] > _BALANCED else ""
    return (
        f"{rank_name(run, late.slowest).capitalize()} is the bottleneck: it computes {percent(computing)} of the "
        f"time{loads}, while others wait for it up to {percent(late.spread)} of a step longer than it waits itself."
    )


def _damage(run: RunArrays) -> list[str]:
    said = []
    if run.num_redone:
        were = "window was" if run.num_redone == 1 else "windows were"
        said.append(f"{run.num_redone:,} {were} done again after a resume; the figures show what was done last.")
    if run.num_unreadable:
        said.append(f"Damaged lines of the log that were left out: {run.num_unreadable:,}.")
    if run.num_unknown:
        said.append(f"Lines of kinds that this version does not know, and left out: {run.num_unknown:,}.")
    return said


def ending(run: RunArrays) -> str:
    """Where the log ends."""
    if run.ended is not None:
        why = f": {run.ended.text}" if run.ended.text else ""
        return f"The run ended as it should, at step {run.last_step:,}{why}."
    cut = ", inside a line," if run.truncated else ""
    return f"The run is still running or was killed: the log ends{cut} at step {run.last_step:,}."
