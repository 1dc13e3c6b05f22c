"""Runs a script on a lab cluster: has the mechanism make the cluster, runs torchrun on it, and cleans up.

The agents' processes and all that descend from them are started, watched and gone at the end. Their output is passed on
in whole lines, each with a prefix that says whose it is. torchrun's own `--tee` does not do: its TailLog writes
whatever a file has at the moment, so that lines of two ranks end up in one (a line written in two pieces came out as
`[default0]:{"half": [default1]:`), and each state of a progress bar becomes a line (torch 2.11).
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import msgspec

from cannikin.errors import InvalidInputError
from cannikin.lab.cluster import LabCluster
from cannikin.lab.mechanisms import AUTO, Mechanism, choose
from cannikin.lab.run_folder import FOLDER, Agent, exits, first_failure
from cannikin.words import counted

_POLL_S = 0.1
_GRACE_S = 5.0  # for ranks to end by themselves, once a signal has asked them to
_LAST_WORDS_S = 0.5  # for the other ranks' messages, once one has failed
_LONGEST_LINE = 65536  # bytes; a longer line is cut


def launch(
    cluster: LabCluster,
    script: Sequence[str],
    *,
    mechanism: str = AUTO,
    environment: Mapping[str, str] | None = None,
    out: IO[bytes] | None = None,
    err: IO[bytes] | None = None,
) -> int:
    """Run a script on every rank of a cluster and return the exit status: 0, or that of the rank that failed first.

    Args:
        cluster: what to make of this machine.
        script: a Python file, or `-m` and a module, and its arguments.
        mechanism: a name in `MECHANISMS`, or "auto" for the one that suits the cluster.
        environment: added to this process's own for the ranks.
        out, err: where the ranks' lines go, by default this process's own streams; the lab's own lines go to `err`.
    """
    out, err = out or sys.stdout.buffer, err or sys.stderr.buffer
    _check_script(script)
    chosen, reason = choose(cluster, mechanism)
    _say(err, _heading(chosen, reason, cluster))
    with _noting_signals() as signals, ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="cannikin-lab-")))
        layout = chosen.set_up(cluster, folder, undo)
        outputs = Outputs()
        undo.callback(outputs.close)
        for rank, settings in enumerate(layout.ranks):
            (folder / f"rank{rank}.settings").write_bytes(msgspec.json.encode(settings))
            _open_pipes(folder, rank, outputs, out, err)
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        everyone = {**os.environ, **threads, **(environment or {}), FOLDER: str(folder)}
        running: list[subprocess.Popen[bytes]] = []
        try:
            for number, agent in enumerate(layout.agents):
                prefix = "[torchrun] " if len(layout.agents) == 1 else f"[torchrun {number}] "
                running.append(_start(agent, script, everyone, outputs, prefix, err))
            _watch(running, outputs, signals)
        finally:
            _kill(running, folder)
            statuses = [process.wait() for process in running]
        failure = first_failure(exits(folder))
    if signals:
        _say(err, "interrupted")
        return 128 + signals[0]
    return _exit_status(statuses, failure, err)


def _check_script(script: Sequence[str]) -> None:
    if not script or (script[0] == "-m" and len(script) < 2):
        raise InvalidInputError("no script to run: write it after --, like: cannikin lab --ranks 1,0.5 -- train.py")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise InvalidInputError(f"{script[0]}: there is no such script")
    if find_spec("torch") is None:
        raise InvalidInputError("the lab needs PyTorch: pip install 'cannikin[torch]'")


def _heading(mechanism: Mechanism, reason: str, cluster: LabCluster) -> str:
    names = [f" ({name})" for name in cluster.names] or [""] * cluster.num_ranks
    speeds = ", ".join(f"{speed:g}{name}" for speed, name in zip(cluster.speeds, names, strict=True))
    ranks = f"{counted(cluster.num_ranks, 'rank')} of speed {speeds}"
    return f"{mechanism.name} mechanism ({reason}), {ranks}: {mechanism.words(cluster)}"


def _say(err: IO[bytes], text: str) -> None:
    err.write(f"cannikin lab: {text}\n".encode())
    err.flush()


def _open_pipes(folder: Path, rank: int, outputs: Outputs, out: IO[bytes], err: IO[bytes]) -> None:
    """Make the pipes that a rank's two streams come through."""
    for name, stream in (("out", out), ("err", err)):
        path = folder / f"rank{rank}.{name}"
        os.mkfifo(path)
        # Open for writing here too, so that the pipe has no end before we close it.
        outputs.add(os.open(path, os.O_RDWR | os.O_NONBLOCK), f"[rank {rank}] ", stream)


def _exit_status(statuses: Sequence[int], failure: tuple[int, int] | None, err: IO[bytes]) -> int:
    """Return the exit status of agents that ended so, and say which rank failed first, where one did."""
    if not any(statuses):
        return 0
    if failure is None:
        status = next(status for status in statuses if status)
        _say(err, f"torchrun failed with exit status {status}")
        return status if status > 0 else 128 - status
    rank, status = failure
    _say(err, f"rank {rank} failed first, with exit status {status}")
    return status


# Processes.


@contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Only take note of SIGINT, SIGTERM and SIGHUP, so that no set-up is cut in half; yield those that came."""
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    agent: Agent, script: Sequence[str], environment: dict[str, str], outputs: Outputs, prefix: str, err: IO[bytes]
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*agent.command, *script],
        env={**environment, **agent.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # an interrupt from the terminal comes to us alone, and we end them in order
    )
    assert process.stdout is not None
    outputs.add(os.dup(process.stdout.fileno()), prefix, err)
    process.stdout.close()
    return process


def _watch(running: Sequence[subprocess.Popen[bytes]], outputs: Outputs, signals: Sequence[int]) -> None:
    """Pass on output until all have ended; once one has failed or a signal has come, ask the others to end."""
    while not signals:
        statuses = [process.poll() for process in running]
        if any(statuses):
            _wait(running, _LAST_WORDS_S, outputs)
            break
        if None not in statuses:
            break
        outputs.pump(_POLL_S)
    for process in running:
        if process.poll() is None:
            process.terminate()
    _wait(running, _GRACE_S, outputs)


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
