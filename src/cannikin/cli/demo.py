"""`cannikin demo`: the comparison, on this machine, in a few minutes."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click
from rich.console import Console

from cannikin.core.policies import POLICIES
from cannikin.demo.comparison import SUMMARY_NAME, run_demo
from cannikin.demo.tasks import DEFAULT_POLICIES, SPEEDS, Task, quick
from cannikin.errors import CannikinError
from cannikin.lab.cluster import parse_speeds
from cannikin.report.write import write_report


@click.command("demo")
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICIES), help="May be repeated.")
@click.option("--ranks", metavar="V,V,...", help="Speeds of the ranks; 1,0.5,0.25 where left out.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--quick", "is_quick", is_flag=True, help="A lower target on faster ranks: half a minute.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Run directory; a new one in runs/.")
def command(policies: tuple[str, ...], ranks: str | None, seed: int, is_quick: bool, out: Path | None) -> int:
    """Train a small network on ranks of different speed, under one policy after another, and compare.

    The ranks are real processes with real DDP between them; each sleeps up to the time that a device of its speed would
    take. Nothing is downloaded. The exit status is 0 whoever wins.
    """
    task = quick(Task(seed=seed)) if is_quick else Task(seed=seed)
    speeds = SPEEDS if ranks is None else parse_speeds(ranks)
    if out is None:
        out = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    console = Console()
    chosen = list(dict.fromkeys(policies)) or list(DEFAULT_POLICIES)
    status = run_demo(task, policies=chosen, speeds=speeds, out=out, console=console)
    if status:
        return status
    console.print(f"Run logs and {SUMMARY_NAME}: {out}", highlight=False, soft_wrap=True)
    try:
        outcome = f"The report: {write_report([out])}"
    except CannikinError as error:
        outcome = f"No report: {error}"
    console.print(outcome, highlight=False, soft_wrap=True)
    return 0
