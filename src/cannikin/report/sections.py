"""What the page says of one run, and of several: sentences, facts, figures and tables in their order."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from cannikin.core.records import FloatArray
from cannikin.report.arrays import RunArrays
from cannikin.report.by_rank import step_timeline, utilisation
from cannikin.report.charts import run_charts
from cannikin.report.compare import Target, compare_charts, compare_headline, compare_table, reached
from cannikin.report.headline import headline
from cannikin.report.numbers import late_rows, phase, prediction_error
from cannikin.report.page import Item, Section, Table
from cannikin.report.rank_times import ACTIVITIES
from cannikin.runlog import EventRecord, RankInfo
from cannikin.words import amount, duration, memory, percent, split

__all__ = ["comparison", "run_section"]

_MOST_RANKS = 256


def run_section(run: RunArrays, title: str, target: Target | None = None, *, folded: bool = False) -> Section:
    """One run in full; with a target also when it was reached."""
    charts = run_charts(run)
    batches, times, *others = charts
    parts: dict[str, list[Item]] = {
        batches: [*charts[batches], _ranks(run)],
        times: [step_timeline(run), utilisation(run), *charts[times]],
        **{heading: [*charts[heading]] for heading in others},
        "Plans and events": [_plans(run), _events(run)],
    }
    said = [*headline(run), *([] if target is None else [_target_words(run, target)])]
    return Section(title=title, sentences=said, facts=_facts(run), parts=parts, folded=folded)


def _target_words(run: RunArrays, target: Target) -> str:
    result = reached([run], target)
    if result is None:
        return f"The log holds no metric called {target.metric}."
    (time_ms,) = result.times_ms
    goal = f"{target.metric} {target.value:g}"
    return f"It did not reach {goal}." if time_ms is None else f"It reached {goal} after {duration(time_ms)}."


def comparison(runs: list[RunArrays], target: Target | None, title: str, note: str = "") -> Section:
    """Several runs side by side; `note` says what else should be known of them."""
    result = None if target is None else reached(runs, target)
    titles, rows = compare_table(runs, result)
    said = compare_headline(runs, result)
    if target is not None and result is None:
        said.append(f"None of these logs holds the metric {target.metric}.")
    return Section(
        title=title,
        sentences=[*said, *([note] if note else [])],
        facts=[],
        parts={"Side by side": [Table(title="Runs", titles=titles, rows=rows), *compare_charts(runs, result)]},
    )


def _facts(run: RunArrays) -> list[tuple[str, str]]:
    """Single numbers worth a glance, as far as they are known."""
    facts = [("time", duration(run.duration_ms)), ("steps", f"{run.last_step:,}")]
    if len(run.windows):
        late = phase(run.windows, late_rows(run.windows))
        waiting = _known(late.shares[:, ACTIVITIES.index("waiting")])
        noise = _known(run.windows.noise_scale)
        facts += [
            ("last step time", duration(late.step_ms)),
            ("prediction error", percent(prediction_error(run.windows))),
            ("samples a second", amount(late.samples_per_s)),
            ("waiting, mean of ranks", percent(float(waiting.mean()) if len(waiting) else float("nan"))),
            ("noise scale, samples", amount(float(noise[-1]) if len(noise) else float("nan"))),
        ]
    return [(name, value) for name, value in facts if value != "not known"]


def _known(values: FloatArray) -> FloatArray:
    return values[np.isfinite(values)]


def _ranks(run: RunArrays) -> Table:
    """Where each rank runs, and what it came to take and do."""
    titles = ["rank", "name", "host", "device", "memory", "first batch", "last batch", "computing", "waiting"]
    windows, ranks = run.windows, run.header.ranks
    first, last, shares = None, None, None
    if len(windows):
        first, last = windows.local_batches[0], windows.local_batches[-1]
        shares = phase(windows, late_rows(windows)).shares
    rows = []
    for rank in range(min(run.header.world_size, _MOST_RANKS)):
        info = ranks[rank] if rank < len(ranks) else RankInfo()
        row = [f"{rank}", info.name, info.host, info.device, memory(info.memory_bytes)]
        known = rank < windows.num_ranks  # a run that resumes on more ranks may not have measured them yet
        row += [_batch(batches[rank]) if known and batches is not None else "" for batches in (first, last)]
        spent = shares[rank].tolist() if known and shares is not None else [float("nan")] * len(ACTIVITIES)
        rows.append([*row, percent(spent[0] + spent[1]), percent(spent[ACTIVITIES.index("waiting")])])
    note = "Batches in samples; computing and waiting as shares of a rank's time under the last split."
    if run.header.world_size > _MOST_RANKS:
        note += f" The first {_MOST_RANKS} of {run.header.world_size:,} ranks."
    return _without_empty(Table(title="Ranks", titles=titles, rows=rows, note=note, folded=len(rows) > 16))


def _batch(batch: float) -> str:
    return f"{batch:,.0f}" if math.isfinite(batch) else ""


def _without_empty(table: Table) -> Table:
    """The table less the columns that say nothing of anyone."""
    kept = [
        place
        for place in range(len(table.titles))
        if not table.rows or any(row[place] not in ("", "not known") for row in table.rows)
    ]
    rows = [[row[place] for place in kept] for row in table.rows]
    return replace(table, titles=[table.titles[place] for place in kept], rows=rows)


def _plans(run: RunArrays) -> Table:
    """Every change of the split, with its reason."""
    shown = list(run.plans)
    if run.last_plan is not None and run.last_plan not in shown:
        shown.append(run.last_plan)
    rows = [
        [
            f"{plan.first_step:,}",
            f"{plan.total_batch:,}",
            split(plan.local_batches),
            "" if plan.predicted_step_ms is None else duration(plan.predicted_step_ms),
            plan.phase,
            plan.reason,
        ]
        for plan in shown
    ]
    left_out = run.num_changes - len(run.plans)
    note = f"{_times(run.num_changes)} a plan with another split was made; the last plan of all ends the table."
    note += f" {left_out:,} in the middle are left out." if left_out else ""
    titles = ["from step", "total batch", "split", "predicted step", "phase", "reason"]
    if not rows:
        note = "The log holds no plan."
    return Table(title="Plans and their reasons", titles=titles, rows=rows, note=note, folded=len(rows) > 24)


def _times(number: int) -> str:
    return "Once" if number == 1 else f"{number:,} times"


def _events(run: RunArrays) -> Table:
    """What else happened; evaluations have figures of their own."""
    rows = [[f"{event.step:,}", event.kind, event.text or _data(event)] for event in run.events]
    left_out = run.num_events - len(run.events)
    note = f"{left_out:,} in the middle are left out." if left_out else ""
    note = note if rows else "Nothing but steps, evaluations and epochs happened."
    return Table(title="Events", titles=["step", "kind", "what happened"], rows=rows, note=note, folded=len(rows) > 12)


def _data(event: EventRecord) -> str:
    return ", ".join(f"{name} {value}" for name, value in event.data.items())
