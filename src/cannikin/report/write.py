"""From paths of runs to the page about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cannikin.errors import InvalidInputError
from cannikin.report.compare import Target
from cannikin.report.gather import numbers_only
from cannikin.report.page import make_page, plotly_source
from cannikin.report.runs import find_runs, load_runs
from cannikin.report.sections import comparison, run_section
from cannikin.runlog import RUNLOG_NAME

__all__ = ["write_report"]

_PAGE_NAME = "report.html"
_DEMO_NOTE = "Accuracies are over the time spent training, as the demo measured it: evaluation is not counted."


def write_report(paths: Sequence[Path], out: Path | None = None, target: Target | None = None) -> Path:
    """Write one HTML page about the runs at these paths, and return its place.

    Args:
        paths: run directories, logs, or folders of run directories.
        out: the page's file; else report.html beside what was named, or in the current folder where several were.
        target: a metric's goal, to say when it was reached; else what the runs' summary says.
    """
    plotly_js = plotly_source()
    found = [run for path in paths for run in find_runs(path)]
    out = out or (found[0].folder if len(paths) == 1 else Path()) / _PAGE_NAME
    _refuse_logs(out, [each.path for each in found])
    runs = load_runs(found)
    goal = target or next((each.target for each in found if each.target is not None), None)
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    with numbers_only(", ".join(str(each.path) for each in found)):
        if len(runs) == 1:
            sections = [run_section(runs[0], title, goal)]
        else:
            note = _DEMO_NOTE if any(each.curve for each in found) else ""
            sections = [comparison(runs, goal, title, note), *(run_section(run, run.name, folded=True) for run in runs)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(make_page(title, sections, plotly_js), encoding="utf-8")
    return out


def _refuse_logs(out: Path, paths: list[Path]) -> None:
    """The page must not take the place of what it is about."""
    logs = [path / RUNLOG_NAME if os.path.isdir(path) else path for path in paths]
    if os.path.exists(out) and any(os.path.exists(log) and os.path.samefile(out, log) for log in logs):
        raise InvalidInputError(f"{out}: is the run's log, which is not to be overwritten: give another --out")
