"""What the launcher tells the agents and the ranks, and what they answer, through files in the folder of the run.

rank1.settings          what the rank is to be
rank1.out, rank1.err    pipes for the rank's output
rank1.exit              the rank's exit status and when it ended, by its own account
agent0.exit             what an agent saw its ranks die of

An agent is one torchrun (`cannikin.lab.agent`), which starts one or more ranks (`cannikin.lab.rank`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cannikin.lab.cluster import LabDevice

FOLDER = "CANNIKIN_LAB_DIR"  # in the environment of every process of the run, which is found by it
HOST = "CANNIKIN_LAB_HOST"  # number of the agent, where each rank has one of its own


_PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def end_with_parent() -> None:
    """Have the system kill this process once its parent is gone, which may be killed before it can do so; on Linux."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without it
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One torchrun to start: its command without the script, and what to add to its environment."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is to be: the device it pretends to be, None for none, and what to change in its environment.

    `spins` is whether it takes the device's time on a GPU instead of sleeping.
    """

    device: LabDevice | None = None
    spins: bool = False
    environment: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The cluster as a mechanism has made it: the agents to start, and what each rank is to be."""

    agents: list[Agent]
    ranks: list[RankSettings]


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended: its own status (negative: a signal), and when on the machine's clock, None where not known.

    `lost_peer` is whether it ended because another rank was gone.
    """

    rank: int
    status: int
    at_s: float | None = None
    lost_peer: bool = False


def agent_command(name: str, folder: Path, *options: str) -> list[str]:
    """Return the command of an agent with these options of torchrun; its files go to the folder, the script follows."""
    torchrun = [f"--log-dir={folder / 'torchrun'}", *options]
    return [sys.executable, "-m", "cannikin.lab.agent", name, *torchrun, "-m", "cannikin.lab.rank"]


def note_exits(folder: Path, who: str, items: Sequence[Exit]) -> None:
    """Note how ranks ended, by the account of a rank or an agent; in one piece, as the process may be killed."""
    unfinished = folder / f"{who}.part"
    unfinished.write_bytes(msgspec.json.encode(items))
    os.replace(unfinished, folder / f"{who}.exit")


def exits(folder: Path) -> list[Exit]:
    """Return everything that ranks and agents have noted."""
    texts = [file.read_bytes() for file in sorted(folder.glob("*.exit"))]
    return [item for text in texts for item in msgspec.json.decode(text, type=list[Exit])]


def first_failure(exits: Sequence[Exit]) -> tuple[int, int] | None:
    """Return the rank that failed first, and the status to pass on: its own, or 128 and the number of its signal.

    A rank that a signal kills cannot note when. Other ranks fail in its wake, so it comes first; but SIGABRT is how
    gloo ends when its peer is gone, and SIGTERM is the agent's own doing. Ranks that exit by themselves note when, and
    whether that was for want of a peer, which then was first.
    """

    def order(item: Exit) -> tuple[int, float]:
        if item.at_s is not None:
            return 3 if item.lost_peer else 1, item.at_s
        quiet = {-signal.SIGABRT: 2, -signal.SIGTERM: 5}
        return quiet.get(item.status, 0 if item.status < 0 else 4), 0.0

    failed = [item for item in exits if item.status != 0]
    if not failed:
        return None
    first = min(failed, key=order)
    return first.rank, first.status if first.status > 0 else 128 - first.status
