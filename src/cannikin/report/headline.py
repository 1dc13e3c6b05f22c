"""A run in a few sentences: what ran, how it went, who held it up, where the log ends."""

from __future__ import annotations

import math

from cannikin.report.arrays import RunArrays
from cannikin.report.numbers import Phase, early_rows, late_rows, phase, prediction_error
from cannikin.report.rank_times import ACTIVITIES
from cannikin.words import amount, count, counted, duration, kinds, percent, rank_name, split

__all__ = ["headline"]

_BALANCED = 0.05  # of a step; less than this between the ranks' waiting is noise


def _rank_name(run: RunArrays, rank: int) -> str:
    """A rank with what it runs on, as far as the log says."""
    ranks = run.header.ranks
    known = (ranks[rank].name or ranks[rank].device) if rank < len(ranks) else ""
    return rank_name(rank, known)


def headline(run: RunArrays) -> list[str]:
    """The run in sentences: what ran, how it went, who held it up, where the log ends."""
    said = [_what_ran(run)]
    if len(run.windows):
        early, late = phase(run.windows, early_rows(run.windows)), phase(run.windows, late_rows(run.windows))
        said += [_outcome(run, late), _gain(early, late), _bottleneck(run, late)]
    else:
        said.append("No window of steps has been written yet, so there is nothing to draw.")
    return [sentence for sentence in (*said, *_damage(run), _ending(run)) if sentence]


def _what_ran(run: RunArrays) -> str:
    header, job = run.header, run.header.job
    model = header.model.name or "A model"
    size = header.model.num_parameters
    parameters = f" ({count(size)} parameters)" if size else ""
    devices = [rank.device or rank.name for rank in header.ranks]
    where = f": {kinds(devices)}" if any(devices) else ""
    simulated = " in simulated time" if header.tags.get("simulated") == "yes" else ""
    total = f"a total batch of {job.batch_size:,}"
    if job.max_batch_size is not None and job.max_batch_size > job.batch_size:
        total = f"total batches from {job.batch_size:,} to {job.max_batch_size:,}"
    resumed = len(run.headers) - 1
    again = f" It was resumed {counted(resumed, 'time')}." if resumed else ""
    how = f"under the policy {header.policy}, with {total}"
    return f"{model}{parameters} trained{simulated} on {counted(header.world_size, 'rank')}{where}, {how}.{again}"


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
            f"Communication is the bottleneck: even {_rank_name(run, late.slowest)}, which waits least, spends "
            f"{percent(shares['communication'])} of its time on all-reduces that no computing hides."
        )
    if late.spread < _BALANCED:
        return f"The ranks are in balance: none waits more than {percent(late.spread)} of a step longer than another."
    loads = f" and loads data {percent(shares['loading'])}" if shares["loading"] > _BALANCED else ""
    return (
        f"{_rank_name(run, late.slowest).capitalize()} is the bottleneck: it computes {percent(computing)} of the "
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


def _ending(run: RunArrays) -> str:
    """Where the log ends."""
    if run.ended is not None:
        why = f": {run.ended.text}" if run.ended.text else ""
        return f"The run ended as it should, at step {run.last_step:,}{why}."
    cut = ", inside a line," if run.truncated else ""
    return f"The run is still running or was killed: the log ends{cut} at step {run.last_step:,}."
