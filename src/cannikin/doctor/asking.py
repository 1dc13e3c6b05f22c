"""Asking other processes and slow corners of the system, for a limited time: nothing here can hang."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, TypeVar

__all__ = ["Answer", "ask", "ask_all", "within"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command printed; `problem` says why there is no answer to rely on, None where there is."""

    text: str = ""
    problem: str | None = None


def ask(command: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run one command, as `ask_all` does."""
    return ask_all([command], limit_s=limit_s, environment=environment)[0]


def ask_all(
    commands: Sequence[Sequence[str]], *, limit_s: float, environment: Mapping[str, str] | None = None
) -> list[Answer]:
    """Run commands side by side and read what they print; all are gone after `limit_s`.

    One that hangs inside the kernel (a GPU that does not answer) cannot be killed at once: it is left to die by itself.
    """
    end_s = time.monotonic() + limit_s
    running: list[subprocess.Popen[bytes]] = []
    with ExitStack() as files:
        outputs = [(_open(files), _open(files)) for _ in commands]
        try:
            for command, (out, err) in zip(commands, outputs, strict=True):
                running.append(_start(command, out, err, environment))
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end_s - time.monotonic()))
        except OSError as error:
            return [Answer(problem=f"{commands[0][0]}: {error.strerror}")] * len(commands)
        finally:
            for process in running:
                _end(process)
        return [
            _answer(process.returncode, _read(out), _read(err), limit_s)
            for process, (out, err) in zip(running, outputs, strict=True)
        ]


def within(limit_s: float, probe: Callable[[], T], default: T) -> T:
    """What a probe returns, or the default where it fails or takes longer; a probe that hangs is left behind."""
    found: list[T] = []

    def look() -> None:
        with suppress(OSError, ValueError, ArithmeticError, LookupError):
            found.append(probe())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else default


def _open(files: ExitStack) -> IO[bytes]:
    """A file for what a command prints: in memory where that can be had, for a container may have no folder for it."""
    with suppress(OSError, AttributeError):
        return files.enter_context(open(os.memfd_create("answer"), "w+b"))
    return files.enter_context(tempfile.TemporaryFile())


def _start(
    command: Sequence[str], out: IO[bytes], err: IO[bytes], environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=None if environment is None else dict(environment),
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and whatever it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _answer(status: int | None, text: str, words: str, limit_s: float) -> Answer:
    if status is None or status == -signal.SIGKILL:
        return Answer(text=text, problem=f"no answer within {limit_s:g} s")
    if status != 0:
        lines = [line.strip() for line in (words or text).splitlines() if line.strip()]
        return Answer(text=text, problem=lines[-1] if lines else f"exit status {status}")
    return Answer(text=text)
