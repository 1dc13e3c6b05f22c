"""`cannikin trace`: steps of a run, rank by rank, as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import click

from cannikin.errors import InvalidInputError
from cannikin.runlog import RunLogReader, numbers_only, refuse_overwriting
from cannikin.trace.events import Event, trace_events
from cannikin.trace.steps import choose_steps, contents, parse_steps
from cannikin.whole_files import whole_file

_MOST_WINDOWS = 5_000  # whose step times are drawn one by one


@click.command("trace", epilog="A run or step that cannot be had exits with status 2 and one line on stderr.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--steps", metavar="N,N,...|LO:HI", help="Steps to draw; the first, the last and some between if left out."
)
@click.option("--out", metavar="FILE", help="Where to write; '-' is stdout. trace.json beside the log if left out.")
def command(run: Path, steps: str | None, out: str | None) -> None:
    """Write chosen steps of a run, on all ranks, as a Chrome trace: open it at ui.perfetto.dev.

    RUN is a run directory or its log, also of a run that is still going on or was killed.

    \b
      cannikin trace runs/today                  a few steps from first to last
      cannikin trace runs/today --steps 10,200   these, or the nearest that the log has
      cannikin trace runs/today --steps 100:400  all of these that the log has

    The log holds one step in full for each window of steps. Total batch, local batches, step times, plans and events
    are there for the whole run.
    """
    asked = None if steps is None else parse_steps(steps)
    with RunLogReader(run) as reader, numbers_only(reader.path):
        log = contents(reader.records())
    if log is None:
        raise InvalidInputError(f"{reader.path}: has no measured steps yet: the run ends before its first window does")
    try:
        choice = choose_steps(log, asked)
    except InvalidInputError as error:
        raise InvalidInputError(f"{reader.path}: {error}") from None
    for note in choice.notes:
        click.echo(f"cannikin: {note}", err=True)
    with RunLogReader(run) as reader, numbers_only(reader.path):
        events = trace_events(reader.records(), choice.steps, stride=-(-log.num_windows // _MOST_WINDOWS))
        if out == "-":
            _write(events, sys.stdout)
            return
        path = reader.path.with_name("trace.json") if out is None else Path(out)
        refuse_overwriting(path, reader.path)
        with whole_file(path) as file:
            _write(events, file)
    shown = ", ".join(map(str, choice.steps[:8])) + (" and more" if len(choice.steps) > 8 else "")
    click.echo(f"{click.format_filename(path)}: steps {shown}; open it at ui.perfetto.dev")


def _write(events: Iterable[Event], file: IO[str]) -> None:
    """Write one event per line."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for number, event in enumerate(events):
        file.write((",\n" if number else "\n") + json.dumps(event, allow_nan=False))
    file.write("\n]}\n")
    file.flush()
