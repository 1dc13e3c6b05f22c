"""The ways to make a cluster of unlike ranks out of this machine: one file each, registered in one dict.

A new mechanism is a file in this folder and its line in `MECHANISMS`. The command's options and help, the lab file and
`cannikin doctor` take everything they know about mechanisms from there.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from cannikin.errors import MechanismError
from cannikin.lab.cluster import LabCluster
from cannikin.lab.mechanisms.gpu import Gpu
from cannikin.lab.mechanisms.hosts import Hosts
from cannikin.lab.mechanisms.mps import Mps
from cannikin.lab.mechanisms.portable import Portable
from cannikin.lab.run_folder import Layout


class Mechanism(Protocol):
    """One way to make a cluster of unlike ranks out of this machine.

    Attributes:
        name: what users call it.
        summary: one line for `cannikin lab --help`, of at most 68 characters.
    """

    name: str
    summary: str

    def unavailable(self) -> str | None:
        """Return why this machine cannot have the mechanism at all, and what would help; None where it can."""

    def missing(self, cluster: LabCluster) -> str | None:
        """Return why the mechanism cannot make this cluster on this machine, and what would help; None where it can."""

    def words(self, cluster: LabCluster) -> str:
        """Say how speeds and links are made, for the line that tells the user which mechanism is used."""

    def set_up(self, cluster: LabCluster, folder: Path, undo: ExitStack) -> Layout:
        """Make the cluster; everything made is registered with `undo` before the next thing is.

        Raises:
            MechanismError: the machine refused, with its words.
        """


MECHANISMS: dict[str, Mechanism] = {
    Portable.name: Portable(),
    Hosts.name: Hosts(),
    Mps.name: Mps(),
    Gpu.name: Gpu(),
}
AUTO = "auto"  # in place of a name: the cluster decides


def choose(cluster: LabCluster, name: str = AUTO) -> tuple[Mechanism, str]:
    """Return the mechanism of this name, or the one that suits the cluster, and why.

    Raises:
        MechanismError: it cannot make this cluster on this machine.
    """
    reason = "as asked"
    if name == AUTO:
        name = "portable" if cluster.link_bit_per_s is None else "hosts"
        reason = "needs no privileges" if name == "portable" else "a link asks for it"
    mechanism = MECHANISMS[name]
    if (missing := mechanism.missing(cluster)) is not None:
        raise MechanismError(f"the {name} mechanism ({reason}) cannot make this cluster: {missing}")
    return mechanism, reason
