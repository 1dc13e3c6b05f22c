"""What the launcher tells the ranks and hears back, through files in a folder of the run.

settings.json           what each rank is to be
rank1.out, rank1.err    pipes for its output
rank1.exit              its exit status and when, by its own account
agent-0.json            what an agent saw its ranks die of
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from cannikin.lab.device import Device

__all__ = [
    "FOLDER",
    "HOST",
    "Exit",
    "RankSettings",
    "exits",
    "note_deaths",
    "note_exit",
    "read_settings",
    "write_settings",
]

FOLDER = "CANNIKIN_LAB_DIR"  # in the environment of every process of the run, which is found by it
HOST = "CANNIKIN_LAB_HOST"  # number of the agent, where each rank has one of its own


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is to be: the device it pretends to be, None for none, and what to change in its environment."""

    device: Device | None = None
    environment: dict[str, str] = {}


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended: its own status (negative: a signal), and when on the machine's clock, None where not known."""

    rank: int
    status: int
    at_s: float | None = None


def write_settings(folder: Path, ranks: list[RankSettings]) -> None:
    """Leave the ranks' settings in the folder."""
    (folder / "settings.json").write_bytes(msgspec.json.encode(ranks))


def read_settings(folder: Path, rank: int) -> RankSettings:
    """The settings of this rank."""
    ranks = msgspec.json.decode((folder / "settings.json").read_bytes(), type=list[RankSettings])
    return ranks[rank]


def note_exit(folder: Path, rank: int, status: int) -> None:
    """A rank is about to end with this status."""
    _write(folder / f"rank{rank}.exit", [Exit(rank=rank, status=status, at_s=time.monotonic())])


def note_deaths(folder: Path, agent: str, statuses: dict[int, int]) -> None:
    """An agent saw ranks end with these statuses, by rank."""
    _write(folder / f"agent-{agent}.json", [Exit(rank=rank, status=status) for rank, status in statuses.items()])


def exits(folder: Path) -> list[Exit]:
    """Everything that ranks and agents have noted."""
    files = sorted([*folder.glob("rank*.exit"), *folder.glob("agent-*.json")])
    return [item for file in files for item in msgspec.json.decode(file.read_bytes(), type=list[Exit])]


def _write(path: Path, items: list[Exit]) -> None:
    """At once, since the process may be killed at any time."""
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(msgspec.json.encode(items))
    os.replace(unfinished, path)
