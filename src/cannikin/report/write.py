"""From paths of runs to the page about them: sentences, facts, figures and tables in their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cannikin.core.values import FloatArray
from cannikin.report.charts import compare_charts, prediction_words, run_charts
from cannikin.report.numbers import (
    Reached,
    RunArrays,
    Stretch,
    Target,
    early_rows,
    late_stretch,
    reached,
    stretch,
)
from cannikin.report.page import Item, Section, Table, make_page, plotly_source
from cannikin.report.read import find_runs, read_runs
from cannikin.runlog import PlanRecord, numbers_only, refuse_overwriting
from cannikin.runlog.predictions import PlanOutcome
from cannikin.runlog.times import ACTIVITIES, activity
from cannikin.whole_files import whole_file
from cannikin.words import amount, count, counted, duration, kinds, memory, percent, rank_name, split, use

_PAGE_NAME = "report.html"
_MOST_RANKS = 256
_BALANCED = 0.05  # of a step; less than this between the ranks' waiting is noise
_TRAINING_TIME = "Evaluations are over the time spent training, as it was logged (train_s): evaluation is not counted."


def write_report(paths: Sequence[Path], out: Path | None = None, target: Target | None = None) -> Path:
    """Write one HTML page about the runs at these paths, and return its place.

    Args:
        paths: run directories, logs, or folders of run directories.
        out: the page's file; else report.html beside what was named, or in the current folder where several were.
        target: a metric's goal, to say when it was reached; else the one that a run logged.
    """
    plotly_js = plotly_source()
    found = [run for path in paths for run in find_runs(path)]
    out = out or (found[0].folder if len(paths) == 1 else Path()) / _PAGE_NAME
    for each in found:
        refuse_overwriting(out, each.path)
    runs = read_runs(found)
    logged = (Target(metric=name, value=value) for run in runs for name, value in run.targets.items())
    goal = target or next(logged, None)
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    with numbers_only(", ".join(str(each.path) for each in found)):
        if len(runs) == 1:
            sections = [run_section(runs[0], title, goal)]
        else:
            sections = [comparison(runs, goal, title), *(run_section(run, run.name, folded=True) for run in runs)]
    out.parent.mkdir(parents=True, exist_ok=True)
    page = make_page(title, sections, plotly_js)
    with whole_file(out) as file:
        file.write(page)
    return out


# One run.


def run_section(run: RunArrays, title: str, target: Target | None = None, *, folded: bool = False) -> Section:
    """Return one run in full; with a target also when it was reached."""
    parts: dict[str, list[Item]] = {heading: [*figures] for heading, figures in run_charts(run).items()}
    parts["Batches"].append(_ranks(run))
    parts["Plans and events"] = [_plans(run), _events(run)]
    said = [*headline(run), *([] if target is None else [_target_words(run, target)])]
    return Section(title=title, sentences=said, facts=_facts(run), parts=parts, folded=folded)


def _target_words(run: RunArrays, target: Target) -> str:
    result = reached([run], target)
    if result is None:
        return f"The log holds no metric called {target.metric}."
    (time_ms,) = result.times_ms
    goal = f"{target.metric} {target.value:g}"
    return f"It did not reach {goal}." if time_ms is None else f"It reached {goal} after {duration(time_ms)}."


def _facts(run: RunArrays) -> list[tuple[str, str]]:
    """Return single numbers worth a glance, as far as they are known."""
    facts = [("time", duration(run.duration_ms)), ("steps", f"{run.last_step:,}")]
    late = late_stretch(run.windows)
    if late is not None:
        waiting = _known(activity(late.shares, "waiting"))
        noise = _known(run.windows.noise_scale)
        facts += [
            ("last step time", duration(late.step_ms)),
            *_prediction_facts(run),
            ("samples per second", amount(late.samples_per_s)),
            ("use of the hardware", percent(late.use)),
            ("waiting, mean of ranks", percent(float(waiting.mean()) if len(waiting) else float("nan"))),
            ("noise scale, samples", amount(float(noise[-1]) if len(noise) else float("nan"))),
        ]
    return [(name, value) for name, value in facts if value != "not known"]


def _prediction_facts(run: RunArrays) -> list[tuple[str, str]]:
    errors, optimum = run.predictions.before_it_ran, run.predictions.optimum
    return [
        ("prediction error before it ran", "not known" if errors is None else percent(errors.median)),
        ("prediction error against best", "not known" if optimum is None else percent(abs(optimum.error))),
    ]


def _known(values: FloatArray) -> FloatArray:
    return values[np.isfinite(values)]


def _ranks(run: RunArrays) -> Table:
    """Return where each rank runs, and what it came to take and do; without columns that are empty for all."""
    windows = run.windows
    late = late_stretch(windows)
    rows = []
    for rank in range(min(run.header.world_size, _MOST_RANKS)):
        info = run.header.rank(rank)
        first, last, spent = math.nan, math.nan, np.full(len(ACTIVITIES), np.nan)
        if late is not None and rank < len(late.shares):  # more ranks after a resume may not have been measured yet
            (first, last), spent = windows.local_batches[[0, -1], rank], late.shares[rank]
        rows.append(
            {
                "rank": f"{rank}",
                "name": info.name,
                "host": info.host,
                "device": info.device,
                "memory": memory(info.memory_bytes),
                "first batch": f"{first:,.0f}" if math.isfinite(first) else "",
                "last batch": f"{last:,.0f}" if math.isfinite(last) else "",
                "computing": percent(float(activity(spent, "optimizer and forward", "backward"))),
                "waiting": percent(float(activity(spent, "waiting"))),
            }
        )
    known = {title for row in rows for title, cell in row.items() if cell not in ("", "not known")}
    rows = [{title: cell for title, cell in row.items() if title in known} for row in rows]
    note = "Batches in samples; computing and waiting as shares of a rank's time under the last split."
    if run.header.world_size > _MOST_RANKS:
        note += f" The first {_MOST_RANKS} of {run.header.world_size:,} ranks."
    return Table(title="Ranks", rows=rows, note=note, folded=len(rows) > 16)


def _plans(run: RunArrays) -> Table:
    """Return every change of the split, with its reason."""
    changes, num_changes = run.plans.kept, run.plans.num_seen
    outcomes = {each.plan: each for each in run.predictions.outcomes}
    last = [run.last_plan] if run.last_plan is not None and run.last_plan not in changes else []
    rows = [
        {
            "from step": f"{plan.first_step:,}",
            "total batch": f"{plan.total_batch:,}",
            "split": split(plan.local_batches),
            "predicted step": "" if plan.predicted_step_ms is None else duration(plan.predicted_step_ms),
            **_measured(plan, outcomes.get(plan)),
            "phase": plan.phase,
            "reason": plan.reason,
        }
        for plan in [*changes, *last]
    ]
    times = "Once" if num_changes == 1 else f"{num_changes:,} times"
    note = (
        f"{times} a plan with another split was made; the last plan of all ends the table. Off by: what was predicted "
    )
    note += "when the plan was made, before any step had run its split, against the median of its steps."
    note = note + _left_out(num_changes - len(changes)) if rows else "The log holds no plan."
    return Table(title="Plans and their reasons", rows=rows, note=note, folded=len(rows) > 24)


def _measured(plan: PlanRecord, outcome: PlanOutcome | None) -> dict[str, str]:
    """Return what a plan's steps took, and how far off it was."""
    if outcome is None or outcome.measured_ms is None:
        return {"measured step": "", "off by": ""}
    off = "" if outcome.error is None else f"{outcome.error:+.1%}"
    if plan.predicted_step_ms is not None and outcome.is_new is not True:
        off = "not known: the log begins later" if outcome.is_new is None else "had run before"
    return {"measured step": duration(outcome.measured_ms), "off by": off}


def _events(run: RunArrays) -> Table:
    """Return what else happened; evaluations have figures of their own."""
    rows = [
        {
            "step": f"{event.step:,}",
            "kind": event.kind,
            "what happened": event.text or ", ".join(f"{name} {value}" for name, value in event.data.items()),
        }
        for event in run.events.kept
    ]
    note = _left_out(run.events.num_seen - len(rows)).lstrip()
    note = note if rows else "Nothing but steps, evaluations and epochs happened."
    return Table(title="Events", rows=rows, note=note, folded=len(rows) > 12)


def _left_out(number: int) -> str:
    return f" {number:,} in the middle are left out." if number else ""


# One run in sentences.


def _rank_name(run: RunArrays, rank: int) -> str:
    """Return a rank with what it runs on, as far as the log says."""
    info = run.header.rank(rank)
    return rank_name(rank, info.name or info.device)


def headline(run: RunArrays) -> list[str]:
    """Return the run in sentences: what ran, how it went, who held it up, how predictions did, where it ends."""
    said, late = [_what_ran(run)], late_stretch(run.windows)
    if late is None:
        said.append("No window of steps has been written yet, so there is nothing to draw.")
    else:
        early = stretch(run.windows, early_rows(run.windows))
        said += [
            _outcome(run, late),
            _gain(early, late),
            _use(late),
            _bottleneck(run, late),
            *prediction_words(run.predictions),
        ]
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


def _outcome(run: RunArrays, late: Stretch) -> str:
    spent = duration(run.duration_ms)
    said = (
        f"In {spent} it took {run.last_step:,} steps." if spent != "not known" else f"It took {run.last_step:,} steps."
    )
    said += f" At the end the total batch of {late.total_batch:,} is split {split(late.local_batches)}"
    if math.isfinite(late.step_ms):
        said += f", and a step takes {duration(late.step_ms)}"
    return f"{said}."


def _gain(early: Stretch, late: Stretch) -> str:
    """Return its speed against its own first windows, where the split has changed since."""
    ratio = late.samples_per_s / early.samples_per_s if early.samples_per_s > 0 else float("nan")
    if not math.isfinite(ratio) or early.local_batches == late.local_batches:
        return ""
    rates = f"That is {amount(late.samples_per_s)} samples per second instead of {amount(early.samples_per_s)}"
    first = f"its own first windows, which had {split(early.local_batches)}"
    if not 0.8 <= late.total_batch / early.total_batch <= 1.25:  # most of it then comes of the larger total batch
        return f"{rates} in {first}; the total batch was {early.total_batch:,} then."
    return f"{rates}: {ratio:.2f} times the speed of {first}." if ratio >= 1.02 else f"{rates} in {first}."


def _use(late: Stretch) -> str:
    """Return how much of the hardware the last split uses, and what DDP would, as far as a plan said so."""
    if not math.isfinite(late.use):
        return ""
    return f"It uses {use(late.use, late.even_speed if math.isfinite(late.even_speed) else None)}."


def _bottleneck(run: RunArrays, late: Stretch) -> str:
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
    if run.reader.num_unreadable:
        said.append(f"Damaged lines of the log that were left out: {run.reader.num_unreadable:,}.")
    if run.reader.num_unknown:
        said.append(f"Lines of kinds that this version does not know, and left out: {run.reader.num_unknown:,}.")
    return said


def _ending(run: RunArrays) -> str:
    if run.ended is not None:
        why = f": {run.ended.text}" if run.ended.text else ""
        how = "early" if run.ended.is_early else "as it should"
        return f"The run ended {how}, at step {run.last_step:,}{why}."
    cut = ", inside a line," if run.reader.truncated else ""
    return f"The run is still running or was killed: the log ends{cut} at step {run.last_step:,}."


# Several runs.


def comparison(runs: list[RunArrays], target: Target | None, title: str) -> Section:
    """Return several runs side by side."""
    result = None if target is None else reached(runs, target)
    said = compare_headline(runs, result)
    if target is not None and result is None:
        said.append(f"None of these logs holds the metric {target.metric}.")
    return Section(
        title=title,
        sentences=[*said, *([_TRAINING_TIME] if any(run.in_training_time for run in runs) else [])],
        facts=[],
        parts={"Side by side": [_runs(runs, result), *compare_charts(runs, result)]},
    )


def compare_headline(runs: list[RunArrays], result: Reached | None) -> list[str]:
    """Return who was first, in sentences."""
    said = [f"{len(runs)} runs side by side: {', '.join(run.name for run in runs)}."]
    if result is None:
        return said
    goal = f"{result.target.metric} {result.target.value:g}"
    known = sorted((time, run.name) for run, time in zip(runs, result.times_ms, strict=True) if time is not None)
    if not known:
        return [*said, f"None of them reached {goal}."]
    (best, first), others = known[0], known[1:]
    sentence = f"{first} reached {goal} first, in {duration(best)}"
    slower = [f"{name} in {duration(time)} ({time / best:.2f} times as long)" for time, name in others if best > 0]
    sentence += f"; {', '.join(slower)}." if slower else "."
    missed = [run.name for run, time in zip(runs, result.times_ms, strict=True) if time is None]
    return [*said, sentence, *([f"{', '.join(missed)} did not reach it."] if missed else [])]


def _runs(runs: list[RunArrays], result: Reached | None) -> Table:
    rows = []
    for place, run in enumerate(runs):
        late = late_stretch(run.windows)
        row = {
            "run": run.name,
            "policy": run.header.policy,
            "ranks": f"{run.header.world_size}",
            "steps": f"{run.last_step:,}",
            "time": duration(run.duration_ms),
        }
        if result is not None:
            time = result.times_ms[place]
            title = f"time to {result.target.metric} {result.target.value:g}"
            row[title] = "not reached" if time is None else duration(time)
        row["last step time"] = "not known" if late is None else duration(late.step_ms)
        row["use of the hardware"] = "not known" if late is None else percent(late.use)
        row["last total batch"] = "not known" if late is None else f"{late.total_batch:,}"
        row["last split"] = "not known" if late is None else split(late.local_batches)
        rows.append(row)
    return Table(title="Runs", rows=rows)
