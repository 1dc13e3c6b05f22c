"""The agents' processes and everything that descends from them: started, watched, and gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from cannikin.lab.mechanism import Agent
from cannikin.lab.output import Outputs
from cannikin.lab.settings import FOLDER, Exit

__all__ = ["Interruption", "first_failure", "interruptible", "run_agents"]

_POLL_S = 0.1
_GRACE_S = 5.0  # for ranks to end by themselves, once told to
_LAST_WORDS_S = 0.5  # for the other ranks' messages, once one has failed


class Interruption:
    """The signal that asked the launcher to stop, if one has."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: only writes it down, so that no set-up is cut in half."""
        self.signal = self.signal or number


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Take note of SIGINT, SIGTERM and SIGHUP instead of dying from them."""
    interruption = Interruption()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, interruption.note)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_agents(
    agents: Sequence[Agent],
    script: Sequence[str],
    *,
    folder: Path,
    environment: dict[str, str],
    outputs: Outputs,
    errors: IO[bytes],
    interruption: Interruption,
) -> list[int]:
    """Run every agent to its end and return their exit statuses; one that fails, or a signal, ends them all.

    No process of the run survives the call, however it ends.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        for agent in agents:
            prefix = "[torchrun] " if len(agents) == 1 else f"[torchrun {agent.name}] "
            # A session of its own: an interrupt from the terminal comes to us alone, and we end them in order.
            process = subprocess.Popen(
                [*agent.command, *script],
                env={**environment, **agent.environment, FOLDER: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running.append(process)
            assert process.stdout is not None
            outputs.add(os.dup(process.stdout.fileno()), prefix, errors)
            process.stdout.close()
        while interruption.signal is None and not _settled(running):
            outputs.pump(_POLL_S)
        if interruption.signal is None and any(process.poll() for process in running):
            _wait(running, _LAST_WORDS_S, outputs)
        for process in running:
            if process.poll() is None:
                process.terminate()
        _wait(running, _GRACE_S, outputs)
    finally:
        _kill(running, folder)
        statuses = [process.wait() for process in running]
    return statuses


def _settled(running: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Whether one has failed, or all have ended."""
    statuses = [process.poll() for process in running]
    return any(statuses) or None not in statuses


def _wait(running: Sequence[subprocess.Popen[bytes]], limit_s: float, outputs: Outputs) -> None:
    end_s = time.monotonic() + limit_s
    while any(process.poll() is None for process in running) and time.monotonic() < end_s:
        outputs.pump(_POLL_S)
        time.sleep(_POLL_S / 10)  # where nothing is open any more


def _kill(running: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Kill what is left: the agents' sessions, and whatever else carries the run's mark, such as loader workers."""
    for process in running:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for _ in range(100):
        marked = _marked(folder)
        for pid in marked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not marked:
            return
        time.sleep(0.02)


def _marked(folder: Path) -> list[int]:
    """Processes whose environment names the run's folder; none are found where there is no /proc."""
    mark = f"{FOLDER}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def first_failure(exits: Sequence[Exit]) -> tuple[int, int] | None:
    """The rank whose failure came first, and the status to pass on: its own, or 128 and the number of its signal.

    A rank that a signal kills leaves no time. Others fail in its wake, so it comes first; but SIGABRT is how gloo ends
    when its peer is gone, and SIGTERM is the agent's own doing. Ranks that exit by themselves say when.
    """

    def order(item: Exit) -> tuple[int, float]:
        if item.at_s is not None:
            return 1, item.at_s
        quiet = {-signal.SIGABRT: 2, -signal.SIGTERM: 4}
        return quiet.get(item.status, 0 if item.status < 0 else 3), 0.0

    failed = [item for item in exits if item.status != 0]
    if not failed:
        return None
    first = min(failed, key=order)
    return first.rank, first.status if first.status > 0 else 128 - first.status
