"""`cannikin watch`: the live view over a run's log, from another terminal."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from cannikin.errors import RunLogError
from cannikin.live.panel import LivePanel, status_line
from cannikin.live.view import FollowedRun
from cannikin.runlog import numbers_only, run_inside

_POLL_S = 0.5
_LINE_S = 30.0  # between two lines where the output is no terminal


@click.command("watch")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print the present state and end.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds for a log to come."
)
def command(run: Path, once: bool, wait_s: float) -> None:
    """Show what a run is doing, from its log.

    RUN is the run_dir of the training script, or the runlog.jsonl in it. The run may be going on, may be over, or may
    be about to begin. Ends with the run, or on Ctrl-C, which does nothing to the run.
    """
    console = Console()
    try:
        with closing(FollowedRun(run)) as followed, numbers_only(run):
            _await_log(followed, run, 0.0 if once else wait_s)
            if once:
                console.print(LivePanel(followed.state), end="")
            elif console.is_terminal:
                _show(followed, console)
            else:
                _tell(followed)
    except KeyboardInterrupt:
        return


def _await_log(followed: FollowedRun, run: Path, wait_s: float) -> None:
    """Return once there is a header; say what is waited for, and give up in time."""
    deadline = time.monotonic() + wait_s
    followed.poll()
    if followed.state.header is None and wait_s > 0:
        inside = run_inside(run)
        hint = "" if inside is None else f"; a run is in {inside}"
        click.echo(f"waiting for the run log of {run} (at most {wait_s:g} s){hint}", err=True)
    while followed.state.header is None:
        if time.monotonic() >= deadline:
            there = "has no header yet" if run.exists() and not run.is_dir() else "has no run log"
            waited = f" after {wait_s:g} s" if wait_s > 0 else ""
            inside = run_inside(run)
            wanted = "the run_dir of a training script, or its runlog.jsonl"
            wanted = wanted if inside is None else f"a run in it: {inside}"
            raise RunLogError(f"{run}: {there}{waited}: give {wanted}")
        time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
        followed.poll()


def _show(followed: FollowedRun, console: Console) -> None:
    """Draw the panel again and again, in place."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(LivePanel(followed.state, followed.note), refresh=True)
            if followed.state.end is not None:
                return
            time.sleep(_POLL_S)
            followed.poll()


def _tell(followed: FollowedRun) -> None:
    """Print one line now and then."""
    printed_at = -_LINE_S
    while True:
        end = followed.state.end
        if end is not None or time.monotonic() - printed_at >= _LINE_S:
            printed_at = time.monotonic()
            parts = [status_line(followed.state), followed.note if end is None else end.ending]
            click.echo(", ".join(filter(None, parts)))
        if end is not None:
            return
        time.sleep(_POLL_S)
        followed.poll()
