"""What a mechanism is: it makes the cluster out of this machine and says how to start torchrun there."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cannikin.lab.cluster import LabCluster
from cannikin.lab.settings import RankSettings

__all__ = ["Agent", "Layout", "Mechanism", "agent_command"]


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One torchrun to start: its command without the script, and what to add to its environment."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The cluster as made: the agents to start, and what each rank is told."""

    agents: list[Agent]
    ranks: list[RankSettings]


class Mechanism(Protocol):
    """One way to make a cluster of unlike ranks out of this machine."""

    name: str

    def missing(self, cluster: LabCluster) -> str | None:
        """Why this machine or this mechanism cannot make the cluster, and what would help; None where it can."""

    def words(self, cluster: LabCluster) -> str:
        """How speeds and links are made, for the line that says which mechanism is used."""

    def set_up(self, cluster: LabCluster, folder: Path, undo: ExitStack) -> Layout:
        """Make the cluster; everything made is registered with `undo` before the next thing is.

        Raises:
            MechanismError: the machine refused, with its words.
        """


def agent_command(name: str, folder: Path, *options: str) -> list[str]:
    """The command of an agent with these options of torchrun, whose files go to the folder; the script follows it."""
    torchrun = [f"--log-dir={folder / 'torchrun'}", *options]
    return [sys.executable, "-m", "cannikin.lab.agent", name, *torchrun, "-m", "cannikin.lab.rank"]
