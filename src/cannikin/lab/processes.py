"""The agents' processes and all that descend from them: started, watched, their output passed on, gone at the end.

Output is passed on in whole lines, each with a prefix that says whose it is. torchrun's own `--tee` does not do: its
TailLog writes whatever a file has at the moment, so that lines of two ranks end up in one (a line written in two pieces
came out as `[default0]:{"half": [default1]:`), and each state of a progress bar becomes a line (torch 2.11).
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from cannikin.lab.run_folder import FOLDER, Agent

_POLL_S = 0.1
_GRACE_S = 5.0  # for ranks to end by themselves, once told to
_LAST_WORDS_S = 0.5  # for the other ranks' messages, once one has failed
_LONGEST_LINE = 65536  # bytes; a longer line is cut


class Interruption:
    """The signal that asked the launcher to stop, if one has."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: only write it down, so that no set-up is cut in half."""
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
    """Run every agent to its end and return their exit statuses; an agent that fails, or a signal, ends them all.

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
    """Tell whether one has failed, or all have ended."""
    statuses = [process.poll() for process in running]
    return any(statuses) or None not in statuses


def _wait(running: Sequence[subprocess.Popen[bytes]], limit_s: float, outputs: Outputs) -> None:
    end_s = time.monotonic() + limit_s
    while any(process.poll() is None for process in running) and time.monotonic() < end_s:
        outputs.pump(_POLL_S)
        time.sleep(_POLL_S / 10)  # pump does not wait once every stream is closed


def _kill(running: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Kill the processes left: the agents' sessions, and all others with the run's mark, such as loader workers."""
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
    """Return the processes whose environment names the run's folder; none where there is no /proc."""
    mark = f"{FOLDER}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


# Output.


class Lines:
    """Cuts a stream of bytes into whole lines with a prefix.

    Example:
        >>> lines = Lines("[rank 1] ")
        >>> lines.feed(b"epoch 1\\nep"), lines.feed(b"och 2\\n"), lines.rest()
        (b'[rank 1] epoch 1\\n', b'[rank 1] epoch 2\\n', b'')
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that these bytes complete."""
        *whole, self._held = (self._held + data).split(b"\n")
        if len(self._held) > _LONGEST_LINE:
            whole.append(self._held)
            self._held = b""
        return b"".join(self._shown(line) for line in whole)

    def rest(self) -> bytes:
        """Return the last line, where it has no end."""
        held, self._held = self._held, b""
        return self._shown(held) if held else b""

    def _shown(self, line: bytes) -> bytes:
        """Return what a terminal would show in the end: the last state of a progress bar that overwrites itself."""
        return self._prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"


class Outputs:
    """Reads many descriptors and writes their lines to the streams they belong to."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, descriptor: int, prefix: str, stream: IO[bytes]) -> None:
        """Pass on what comes from this descriptor, and close it in the end."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, (Lines(prefix), stream))

    def pump(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for output and pass it on; return whether there was any."""
        if not self._selector.get_map():
            return False
        found = False
        for key, _ in self._selector.select(timeout_s):
            lines, stream = key.data
            data = b""
            with suppress(BlockingIOError):
                data = os.read(key.fd, 65536)
                if not data:  # every writer is gone
                    self._finish(key.fd, lines, stream)
            if data:
                found = True
                _write(stream, lines.feed(data))
        return found

    def close(self) -> None:
        """Pass on the remaining output, and close every descriptor."""
        while self.pump(0):
            pass
        for key in list(self._selector.get_map().values()):
            self._finish(key.fd, *key.data)
        self._selector.close()

    def _finish(self, descriptor: int, lines: Lines, stream: IO[bytes]) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _write(stream, lines.rest())


def _write(stream: IO[bytes], data: bytes) -> None:
    if data:
        stream.write(data)
        stream.flush()
