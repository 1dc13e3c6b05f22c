"""`cannikin lab`: runs any torchrun script on a cluster of unlike ranks, made on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from cannikin.core.policies import POLICIES
from cannikin.lab.cluster import LabCluster, parse_link, parse_slowdown, parse_speeds
from cannikin.lab.lab_file import load_lab_file
from cannikin.lab.launch import launch
from cannikin.lab.mechanisms import AUTO, MECHANISMS

_MECHANISMS = "\n".join(f"  {name:<10}{mechanism.summary}" for name, mechanism in MECHANISMS.items())
_HELP = f"""Run a torchrun script on a cluster of unlike ranks, made on this machine.

\b
  cannikin lab --ranks 1.0,0.5,0.25 -- train.py --epochs 3
  cannikin lab cluster.toml --policy even -- train.py --epochs 3

\b
Mechanisms:
{_MECHANISMS}
  {AUTO:<10}hosts if there is a link to slow, else portable
"""


@click.command(
    "lab",
    help=_HELP,
    options_metavar="[OPTIONS]",
    epilog="The exit status is that of the rank that failed first; 2 is bad input or a mechanism that cannot be had.",
)
@click.argument("arguments", nargs=-1, metavar="[CLUSTER.toml] -- SCRIPT [ARGS]...")
@click.option("--ranks", metavar="V,V,...", help="Speeds of the ranks, instead of a file: 1.0,0.5,0.25.")
@click.option(
    "--sample-ms", type=float, metavar="MS", help="Device time of one sample at speed 1; 1 if portable or gpu."
)
@click.option("--fixed-ms", type=float, metavar="MS", help="Device time of a step, whatever the batch and the speed.")
@click.option("--forward-share", type=float, metavar="F", help="Part of device time that is forward; a third.")
@click.option("--slow", multiple=True, metavar="RANK:FACTOR@STEP", help="A rank changes speed; may be repeated.")
@click.option("--link", metavar="RATE", help="Bandwidth of each rank, like 400mbit or 1gbit; needs hosts.")
@click.option("--mechanism", type=click.Choice([AUTO, *MECHANISMS]), help="How to make the cluster.")
@click.option("--policy", type=click.Choice(POLICIES), help="Sets CANNIKIN_POLICY, to compare a script unedited.")
def command(
    arguments: tuple[str, ...],
    ranks: str | None,
    sample_ms: float | None,
    fixed_ms: float | None,
    forward_share: float | None,
    slow: tuple[str, ...],
    link: str | None,
    mechanism: str | None,
    policy: str | None,
) -> int:
    """Run the script and return its exit status."""
    cluster, named, script = _described(arguments, ranks)
    changes = {
        "sample_s": None if sample_ms is None else sample_ms / 1e3,
        "fixed_s": None if fixed_ms is None else fixed_ms / 1e3,
        "forward_share": forward_share,
        "link_bit_per_s": None if link is None else parse_link(link),
        "slowdowns": tuple(parse_slowdown(text) for text in slow) or None,
    }
    cluster = replace(cluster, **{key: value for key, value in changes.items() if value is not None})  # type: ignore[arg-type]
    environment = {} if policy is None else {"CANNIKIN_POLICY": policy}
    return launch(cluster, script, mechanism=mechanism or named, environment=environment)


def _described(arguments: tuple[str, ...], ranks: str | None) -> tuple[LabCluster, str, tuple[str, ...]]:
    """Return the cluster, the mechanism its file names, and the script: with --ranks, that is all arguments."""
    is_file = bool(arguments) and Path(arguments[0]).suffix == ".toml"
    if ranks is not None and is_file:
        raise click.UsageError(f"give either --ranks or {arguments[0]}, not both")
    if ranks is not None:
        return LabCluster(speeds=parse_speeds(ranks)), AUTO, arguments
    if not is_file:
        raise click.UsageError("say what the cluster is: --ranks 1.0,0.5,0.25 or a file ending in .toml")
    described = load_lab_file(arguments[0])
    return described.cluster, described.mechanism, arguments[1:]
