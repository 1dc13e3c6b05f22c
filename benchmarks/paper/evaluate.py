"""`python -m benchmarks paper`: every figure and table of the paper's evaluation, in simulation, with one command."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.paper.cells import SECTIONS, Cell, all_cells, run_cells
from benchmarks.paper.report import write_report
from cannikin import words


def main(arguments: list[str] | None = None) -> None:
    """Run the command with these options, or with none."""
    try:
        command.main(arguments or [], prog_name="python -m benchmarks paper", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _parse_sections(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    sections = SECTIONS if value is None else tuple(part.strip() for part in value.split(","))
    unknown = [section for section in sections if section not in SECTIONS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is unknown: choose from {', '.join(SECTIONS)}", ctx, param)
    return sections


@click.command("paper")
@click.option("--out", type=click.Path(path_type=Path), default=Path("paper-evaluation"), help="Folder to write to.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, help="The first seed of all noise.")
@click.option("--num-seeds", type=click.IntRange(1, 20), default=1, help="Seeds to average over.")
@click.option("--only", "sections", callback=_parse_sections, metavar="S[,S...]", help=f"Of {', '.join(SECTIONS)}.")
@click.option("--jobs", type=click.IntRange(min=1), default=None, help="Processes; as many as cores where left out.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object as well.")
def command(out: Path, seed: int, num_seeds: int, sections: tuple[str, ...], jobs: int | None, as_json: bool) -> None:
    """Regenerate the paper's evaluation: paper.md, paper.json and plots, in a folder.

    The same seed gives the same paper.json. measured.json has the planner's CPU time, which differs from run to run.
    """
    cells = all_cells(sections, tuple(range(seed, seed + num_seeds)))
    start_s = time.perf_counter()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as progress:
        task = progress.add_task("evaluating", total=sum(cell.cost for cell in cells))

        def on_done(cell: Cell) -> None:
            progress.advance(task, cell.cost)

        results = run_cells(cells, num_processes=jobs or os.cpu_count() or 1, on_done=on_done)
    measured = _take_measured(results)
    text, plots = write_report(results, measured, _about(seed, num_seeds, len(cells), start_s))
    files = {"paper.md": text, **plots, "paper.json": _json(results), "measured.json": _json(measured)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"--out {out}: cannot be written: {error.strerror}") from error
    if as_json:
        click.echo(_json(results), nl=False)
    else:
        click.echo(
            f"{len(cells)} cells in {words.duration((time.perf_counter() - start_s) * 1e3)}: see {out / 'paper.md'}"
        )


def _about(seed: int, num_seeds: int, num_cells: int, start_s: float) -> list[str]:
    """Return what made the page: commit, versions, time, and the data that all of it follows from."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in (own, ended))
    data = resources.files("cannikin.sim") / "data"
    files = sorted(path for path in Path(str(data)).rglob("*.toml"))
    seeds = f"seed {seed}" if num_seeds == 1 else f"seeds {seed} to {seed + num_seeds - 1}"
    return [
        f"{datetime.now(UTC):%Y-%m-%d}, commit {_commit()}. `python -m benchmarks paper`, {seeds}: {num_cells} cells, "
        f"{cpu_s / 60:.1f} minutes of CPU time, {(time.perf_counter() - start_s) / 60:.1f} minutes on {os.cpu_count()} "
        f"cores. Python {platform.python_version()}, numpy {np.__version__}.",
        "",
        "All of it follows from these files (SHA-256), the code and the seed:",
        "",
        "```",
        *(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(str(data))}" for path in files),
        "```",
        "",
    ]


def _commit() -> str:
    """Return the commit that is checked out, and whether the sources differ from it."""
    here = Path(__file__).parent
    said = [
        subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False).stdout.strip()
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "../../src", "."])
    ]
    return (said[0] or "unknown") + (" with changes" if said[1] else "")


def _take_measured(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Remove what was measured rather than simulated from the results, and return it."""
    measured: dict[str, dict[str, Any]] = {}
    for section, cells in results.items():
        for key, cell in cells.items():
            if isinstance(cell, dict) and "measured" in cell:
                measured.setdefault(section, {})[key] = cell.pop("measured")
    return measured


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False) + "\n"
