"""`cannikin report`: one HTML page of one run, or of several side by side."""

from __future__ import annotations

import math
from pathlib import Path

import click

from cannikin.report.compare import Target
from cannikin.report.page import make_page, plotly_source
from cannikin.report.runs import Found, find_runs, load_runs
from cannikin.report.sections import comparison, run_section

__all__ = ["command"]

_PAGE_NAME = "report.html"
_DEMO_NOTE = "Accuracies are over the time spent training, as the demo measured it: evaluation is not counted."


def _parse_target(ctx: click.Context, param: click.Parameter, value: str | None) -> Target | None:
    if value is None:
        return None
    name, _, number = value.rpartition("=")
    try:
        goal = float(number)
    except ValueError:
        goal = math.nan
    if not name.strip() or not math.isfinite(goal):
        raise click.BadParameter(f"{value!r} is not METRIC=VALUE, like accuracy=0.97", ctx, param)
    return Target(metric=name.strip(), value=goal)


@click.command("report")
@click.argument("paths", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The page's file.")
@click.option(
    "--target", callback=_parse_target, metavar="METRIC=VALUE", help="Say when it was reached, as in accuracy=0.97."
)
def command(paths: tuple[Path, ...], out: Path | None, target: Target | None) -> None:
    """Write one HTML page about RUN, which opens in any browser without a network.

    RUN is a run directory, its log, or a folder of run directories such as `cannikin demo` leaves; several runs are
    shown side by side. A run may still be going on, or have been killed: the page says where its log ends. The page is
    report.html in the run's directory, in the folder of runs, or, where several were named, in this folder.
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
    out = out or _place(paths, found) / _PAGE_NAME
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(make_page(title, sections, plotly_js), encoding="utf-8")
    click.echo(f"The report: {out}")


def _place(paths: tuple[Path, ...], found: list[Found]) -> Path:
    """Beside what was named, where that is one thing."""
    return found[0].folder if len(paths) == 1 else Path()
