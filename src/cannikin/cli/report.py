"""`cannikin report`: one HTML page of one run, or of several side by side."""

from __future__ import annotations

import math
from pathlib import Path

import click

from cannikin.report.numbers import Target
from cannikin.report.read import empty_runs
from cannikin.report.write import write_report


def _parse_target(ctx: click.Context, param: click.Parameter, value: str | None) -> Target | None:
    if value is None:
        return None
    name, _, number = value.rpartition("=")
    try:
        goal = float(number)
    except ValueError:
        goal = math.nan
    if not name.strip() or not name.isprintable() or not math.isfinite(goal):
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
    click.echo(f"The report: {click.format_filename(write_report(paths, out, target))}")
    for run in (run for path in paths for run in empty_runs(path)):
        click.echo(f"Left out: {click.format_filename(run)}, which ended before it began (its log is empty)", err=True)
