"""How verbs print what a person reads: colours only in a terminal, and nothing that stdout cannot take."""

from __future__ import annotations

import sys

import click
from rich.console import Console, RenderableType
from rich.measure import Measurement

_NO_LIMIT = 10_000


def say(*parts: RenderableType, min_width: int = 80, max_width: int = _NO_LIMIT) -> None:
    """Print parts below one another, as wide as the terminal within these limits.

    A narrower terminal wraps the lines itself: better than numbers cut short. What stdout's encoding lacks is written
    as escapes.
    """
    console = _console()
    console.width = min(max(console.width, min_width), max_width)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    text = "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding), nl=False)


def measured(*parts: RenderableType) -> Measurement:
    """Return the columns that it takes to cut nothing short (`minimum`), and to wrap nothing (`maximum`)."""
    console = _console()
    unlimited = console.options.update(max_width=_NO_LIMIT)
    sizes = [console.measure(part, options=unlimited) for part in parts]
    return Measurement(max(size.minimum for size in sizes), max(size.maximum for size in sizes))


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)
