"""From paths of runs to the page about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cannikin.report.compare import Target
from cannikin.report.page import make_page, plotly_source
from cannikin.report.runs import find_runs, load_runs
from cannikin.report.sections import comparison, run_section

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
    runs = load_runs(found)
    goal = target or next((each.target for each in found if each.target is not None), None)
    if len(runs) == 1:
        title = f"Run {runs[0].name}"
        sections = [run_section(runs[0], title, goal)]
    else:
        title = f"{len(runs)} runs"
        note = _DEMO_NOTE if any(each.curve for each in found) else ""
        sections = [comparison(runs, goal, title, note), *(run_section(run, run.name, folded=True) for run in runs)]
    out = out or (found[0].folder if len(paths) == 1 else Path()) / _PAGE_NAME
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(make_page(title, sections, plotly_js), encoding="utf-8")
    return out
