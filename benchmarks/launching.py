"""How benchmarks start ranks of the lab, and read back what those measured: a JSON object a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent


def run_in_lab(
    lab_options: list[str],
    script: Path,
    arguments: list[str],
    *,
    limit_s: float,
    log: IO[str] | None = None,
    environment: dict[str, str] | None = None,
) -> str:
    """Run a script on ranks of `cannikin lab`, and return "" where it ended well, else how it ended.

    Args:
        lab_options: of `cannikin lab`.
        script: and its `arguments`; it finds this package.
        limit_s: seconds after which it is given up.
        log: takes what it prints; where left out that is seen.
        environment: what to add to this process's own for it.
    """
    command = [sys.executable, "-m", "cannikin", "lab", *lab_options, "--", str(script), *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    inherited = {**os.environ, **(environment or {}), "PYTHONPATH": path}
    streams: dict[str, Any] = {} if log is None else {"stdout": log, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=inherited, **streams) as lab:
        try:
            status = lab.wait(limit_s)
        except subprocess.TimeoutExpired:
            lab.terminate()  # not killed, which would leave its ranks behind
            return f"given up after {limit_s:.0f} s"
    return f"ended with status {status}" if status else ""


def empty(out: Path) -> None:
    """Make room for results."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)


def read(out: Path) -> list[dict[str, Any]]:
    """Return the results; none where every launch failed."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
