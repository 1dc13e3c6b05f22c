"""What a command prints, for golden files: the same on every machine, at a fixed width and without colours."""

from __future__ import annotations

import re
import shlex

from click.testing import CliRunner

from cannikin._version import __version__
from cannikin.cli import main

__all__ = ["printed", "steady"]


def printed(*commands: str, columns: int = 80) -> str:
    """Run commands one after another in this folder; return each with both its streams, and its status if not 0."""
    environment = {"COLUMNS": str(columns), "LINES": "40", "NO_COLOR": "1", "FORCE_COLOR": None}
    parts = []
    for command in commands:
        done = CliRunner(env=environment).invoke(main, shlex.split(command))
        assert isinstance(done.exception, SystemExit | None), done.exc_info
        status = f"(exit status {done.exit_code})\n" if done.exit_code else ""
        parts.append(f"$ cannikin {command}\n{steady(done.output)}{status}")
    return "\n".join(parts)


def steady(text: str) -> str:
    """Keep ten digits of each long number, on which all machines agree; one key of JSON per line; no version."""
    text = re.sub(r"\d+\.\d{9,}(e[+-]?\d+)?", lambda number: f"{float(number[0]):.10g}", text)
    text = re.sub(r', (?="\w+": |\{)', ",\n ", text)
    return text.replace(__version__, "VERSION")
