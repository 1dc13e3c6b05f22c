"""Starts the ranks of a launch, strikes them from outside, and sees to it that all of them end.

Ranks are forked from a process that has imported torch once, so that a restart costs tenths of a second; each is a real
process with a real gloo group and a real DDP.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.chaos import rank as ranks
from benchmarks.chaos.faults import GRACE_S, KINDS, LIMIT_S, SPEEDS, Chain, Fault
from cannikin.lab.mechanisms import MECHANISMS
from cannikin.lab.mechanisms.hosts import network_commands
from cannikin.runtime.snapshot_file import list_snapshots

_DISK_BYTES = 2**20
_APART = ("10.77.0.100", 29400)  # of the launcher's store, in a network with the ranks' hosts
_START_S = 90.0  # for the first step of all ranks
_LAUNCH_S = 240.0  # for a launch whose fault never comes
_POLL_S = 0.01
_MOMENT_S = 0.04  # a fault from outside comes up to so long after the step has begun

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.chaos.rank"])


def available() -> frozenset[str]:
    """Return what this machine has for faults: "hosts" (network namespaces) and "disk" (one that can be filled)."""
    has_hosts = MECHANISMS["hosts"].unavailable() is None and os.access("/run", os.W_OK)
    return frozenset((["hosts"] if has_hosts else []) + (["disk"] if os.geteuid() == 0 else []))


class Ground:
    """What chains run on, one after another: a folder, a small disk and one network per device.

    Args:
        undo: takes it all away.
        number: of this ground among those of this process.
        has: of `available()`.
    """

    def __init__(self, undo: ExitStack, number: int, has: frozenset[str]) -> None:
        self.folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="cannikin-chaos-")))
        self.state = self.folder / "state"
        self.state.mkdir()
        self._own_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._tag = f"cannikin-{os.getpid()}-{number}x"  # the lab sweeps such names once their process is gone
        if "disk" in has:
            _call(f"mount -t tmpfs -o size={_DISK_BYTES} tmpfs {self.state}")
            undo.callback(_call, f"umount -l {self.state}")
        if "hosts" in has:
            for command in network_commands(self._tag, len(SPEEDS)):
                if command[1:3] == ["netns", "add"]:
                    undo.callback(_call, f"ip netns del {command[3]}")
                _call(" ".join(command))
            _call(f"ip -n {self._tag}switch addr add {_APART[0]}/24 dev bridge")
            _call(f"ip -n {self._tag}switch link set lo up")  # a store connects to itself
            keeper = _context.Process(target=ranks.keep_store, args=(self.namespace("switch"), _APART))
            keeper.start()
            undo.callback(keeper.join)
            undo.callback(keeper.kill)

    def store(self, *, apart: bool) -> tuple[str, int]:
        """Return where ranks find each other: on this host, or on one that is apart from all of theirs."""
        return _APART if apart else ("127.0.0.1", self._own_store.port)

    def clear(self) -> None:
        """Forget the chain before."""
        _call(f"rm -rf {self.state}/* {self.folder}/launch*")

    def namespace(self, device: int | str) -> str:
        """Return the file of a device's network."""
        return f"/run/netns/{self._tag}{device}"

    def set_link(self, device: int, state: str) -> None:
        """Cut a device off, "down", or let it back, "up"."""
        _call(f"ip -n {self._tag}switch link set port{device} {state}")

    def fill_disk(self) -> None:
        """Leave no room for snapshots and logs."""
        with suppress(OSError), open(self.state / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free_disk(self) -> None:
        (self.state / "filler").unlink(missing_ok=True)

    def tear(self, chance: float) -> str:
        """Damage the newest snapshot, as a crash or a bad disk does; return what was done to it, "" without one."""
        files = list_snapshots(self.state / "snapshots")
        if not files:
            return ""
        newest = self.state / "snapshots" / str(files[0])
        content = bytearray(newest.read_bytes())
        place = int(chance * len(content))
        if place % 2:
            newest.write_bytes(content[:place])
            return f"cut at byte {place} of {len(content)}"
        content[place] ^= 1 << place % 8
        newest.write_bytes(content)
        return f"a bit of byte {place} of {len(content)} flipped"


def _call(command: str) -> None:
    """Run a command in a session of its own, so that the terminal's interrupt does not cut it short."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, start_new_session=True)
    if done.returncode and " del " not in command and "umount" not in command:
        raise RuntimeError(f"'{command}' said: {done.stderr.strip()}")


@dataclass(kw_only=True)
class Ended:
    """How a launch went.

    Args:
        start_s: when it was begun, on the clock that processes share.
        end_s, statuses: when each rank's process was gone, and its exit status; those that had to be killed have none.
        fault_s: when each fault from outside struck, by its number.
        hung, hung_at: ranks that had not ended in time, and where it was noticed.
        torn: what was done to the snapshot.
    """

    start_s: float
    end_s: list[float]
    statuses: list[int | None]
    fault_s: dict[int, float] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    hung_at: str = ""
    torn: str = ""


class _Outside:
    """The faults of a launch that are not the ranks' own doing: strikes, and what is taken back after a while."""

    def __init__(self, chain: Chain, number: int, ground: Ground, processes: Sequence[Any], ended: Ended) -> None:
        self._launch, self._ground, self._processes, self._ended = chain.launches[number], ground, processes, ended
        faults = self._launch.faults
        self._left = {n: fault for n, fault in enumerate(faults) if KINDS[fault.kind].place == "outside"}
        self._due_s: dict[int, float] = {}
        self._undo: list[tuple[float, Any]] = []
        self.silent: set[int] = set()  # ranks that will never end by themselves

    def look(self, steps: list[int]) -> None:
        """Strike where it is time."""
        now_s = time.monotonic()
        for number, fault in list(self._left.items()):
            if number not in self._due_s:
                if fault.kind == "kill while starting":
                    self._due_s[number] = self._ended.start_s + fault.length
                elif steps[fault.rank] >= max(1, fault.step):
                    self._due_s[number] = now_s + fault.chance * _MOMENT_S
            if now_s >= self._due_s.get(number, float("inf")):
                del self._left[number]
                self._ended.fault_s[number] = time.monotonic()
                self._strike(fault, now_s + fault.length)
        for undo in [undo for undo in self._undo if now_s >= undo[0]]:
            self._undo.remove(undo)
            undo[1]()

    def _strike(self, fault: Fault, until_s: float) -> None:
        device = self._launch.members[fault.rank]
        if fault.kind == "stop for a while":
            self._send(fault.rank, signal.SIGSTOP)
            self._undo.append((until_s, lambda: self._send(fault.rank, signal.SIGCONT)))
        elif fault.kind == "stop for ever":
            self._send(fault.rank, signal.SIGSTOP)
            self.silent.add(fault.rank)
        elif fault.kind.startswith("network lost"):
            self._ground.set_link(device, "down")
            until_s = float("inf") if KINDS[fault.kind].ends else until_s
            self._undo.append((until_s, lambda: self._ground.set_link(device, "up")))
        elif fault.kind == "disk full":
            self._ground.fill_disk()
            self._undo.append((until_s, self._ground.free_disk))
        elif fault.kind == "SIGTERM to one rank":
            self._send(fault.rank, signal.SIGTERM)
        elif fault.kind in ("SIGTERM to all ranks", "a rank joins", "another order of ranks"):
            for number in range(len(self._processes)):
                self._send(number, signal.SIGTERM)
        else:
            self._send(fault.rank, signal.SIGKILL)

    def _send(self, number: int, sent: int) -> None:
        with suppress(ProcessLookupError):
            if self._processes[number].is_alive():
                os.kill(self._processes[number].pid, sent)

    def end(self) -> None:
        """Take back what still holds."""
        for _, undo in self._undo:
            undo()


def run_launch(chain: Chain, number: int, ground: Ground, stopping: threading.Event) -> Ended:
    """Run one launch to its end; no process of it is left."""
    launch, folder = chain.launches[number], ground.folder / f"launch{number}"
    folder.mkdir()
    num_ranks = len(launch.members)
    steps = ranks.Steps(folder / "steps", num_ranks)
    for rank in range(num_ranks):
        steps[rank] = -1
    orders = [
        ranks.Order(
            chain=chain,
            number=number,
            rank=rank,
            folder=folder,
            state=ground.state,
            store=ground.store(apart=chain.has_hosts),
            namespace=ground.namespace(device) if chain.has_hosts else "",
        )
        for rank, device in enumerate(launch.members)
    ]
    ended = Ended(start_s=time.monotonic(), end_s=[0.0] * num_ranks, statuses=[None] * num_ranks)
    processes = [_context.Process(target=ranks.run, args=(order,)) for order in orders]
    outside = _Outside(chain, number, ground, processes, ended)
    try:
        for process in processes:
            process.start()
        _watch(launch.faults, processes, steps, outside, ended, stopping)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        outside.end()
    if launch.faults and launch.faults[-1].kind == "torn snapshot" and not stopping.is_set():
        ended.torn = ground.tear(launch.faults[-1].chance)
    return ended


def _watch(
    faults: Sequence[Fault],
    processes: Sequence[Any],
    steps: ranks.Steps,
    outside: _Outside,
    ended: Ended,
    stopping: threading.Event,
) -> None:
    """Wait for the end of every rank that can end; note who does not in time."""
    moved, moved_s, first_end_s = steps.tolist(), time.monotonic(), None
    while not stopping.is_set():
        left = [rank for rank, status in enumerate(ended.statuses) if status is None and rank not in outside.silent]
        if not left:
            return
        wait([processes[rank].sentinel for rank in left], timeout=_POLL_S)
        now_s = time.monotonic()
        for rank in left:
            if processes[rank].exitcode is not None:
                ended.statuses[rank], ended.end_s[rank] = processes[rank].exitcode, now_s
                first_end_s = first_end_s or now_s
        outside.look(steps.tolist())
        if (now := steps.tolist()) != moved:
            moved, moved_s = now, now_s
        deadly_s = ended.fault_s.get(len(faults) - 1, first_end_s) if faults else first_end_s
        starting = min(moved) < 1
        limit_s = (len(moved) + 2 if starting else 1) * LIMIT_S + GRACE_S  # torch connects to one rank after another
        patience_s = _START_S if starting else limit_s
        if deadly_s is not None and now_s > deadly_s + limit_s:
            ended.hung_at = "end"
        elif deadly_s is None and now_s > moved_s + patience_s:
            ended.hung_at = f"step {min(moved)}"
        elif now_s > ended.start_s + _LAUNCH_S:
            ended.hung_at = "launch"
        if ended.hung_at:
            ended.hung = [rank for rank, status in enumerate(ended.statuses) if status is None]
            ended.hung = [rank for rank in ended.hung if rank not in outside.silent]
            for rank in ended.hung:
                os.kill(processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)  # for their stacks
            return
