"""`cannikin doctor`: what this machine and launch environment offer, and what will limit a run."""

from __future__ import annotations

from dataclasses import asdict

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cannikin.cli.printing import say
from cannikin.doctor.checks import Diagnosis, Finding, diagnose
from cannikin.doctor.probes import Facts, look
from cannikin.words import printable

_MOST_WIDTH = 110
_SUBJECT_WIDTH = 10
_STYLES = {"ok": "green", "note": "cyan", "warning": "bold yellow", "blocker": "bold red"}


@click.command("doctor", epilog="The exit status is 1 where training is impossible as things are, else 0.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
@click.option("--quick", is_flag=True, help="Without the all-reduce between two processes, which takes some seconds.")
def command(as_json: bool, quick: bool) -> int:
    """Look at this machine and launch environment, and say what will limit a run.

    Start it where a rank would start, in the same container, job and environment. It looks at what cannikin depends on:
    PyTorch and its backends, ranks against GPUs and cores, the variables of a launch, and what `cannikin lab` can make
    here. Nothing is changed, nothing is sent anywhere, and every look has a time limit.

    The machine itself is described by `python -m torch.utils.collect_env` and `nvidia-smi`.

    \b
      ok        as it should be
      note      worth knowing
      warning   will cost speed, or break a likely launch
      blocker   training is impossible
    """
    console = Console(stderr=True)
    with console.status("looking" if quick else "looking, and trying an all-reduce on this host"):
        facts = look(quick=quick)
    diagnosis = diagnose(facts)
    if as_json:
        click.echo(msgspec.json.encode(_as_json(facts, diagnosis)).decode())
    else:
        say(rendered(facts, diagnosis), max_width=_MOST_WIDTH)
    return 0 if diagnosis.possible else 1


def _as_json(facts: Facts, diagnosis: Diagnosis) -> dict[str, object]:
    findings = [{"area": area, **asdict(each)} for area, found in diagnosis.areas.items() for each in found]
    return {"possible": diagnosis.possible, "summary": diagnosis.summary, "findings": findings, "facts": facts}


def rendered(facts: Facts, diagnosis: Diagnosis) -> RenderableType:
    """Return one table per area, then the summary."""
    parts: list[RenderableType] = [Text(f"cannikin doctor on {facts.hostname}", style="bold")]
    for area, findings in diagnosis.areas.items():
        if findings:
            parts += ["", Text(area, style="bold"), _table(findings)]
    parts += ["", Text(printable(diagnosis.summary), style="bold" if diagnosis.possible else _STYLES["blocker"])]
    return Padding(Group(*parts), (0, 1))


def _table(findings: tuple[Finding, ...]) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(width=max(map(len, _STYLES)), no_wrap=True)
    table.add_column(width=_SUBJECT_WIDTH, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.subject), _words(finding))
    return table


def _words(finding: Finding) -> Text:
    text = Text(printable(finding.text))
    if finding.advice:
        text.append(
            f"\n{printable(finding.advice)}", style="yellow" if finding.level in {"warning", "blocker"} else "dim"
        )
    return text
