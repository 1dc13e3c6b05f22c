"""A terminal as tests see one: what its screen shows after a program's output, and a program run on a real pty."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["PtyProgram", "Screen", "Terminal"]

_TOKEN = re.compile(r"\x1b\[[?]?([0-9;]*)([A-Za-z])|\x1b([78D])|\r|\n|[^\x1b\r\n]+")
_UNFINISHED = re.compile(r"(\r|\x1b(\[[?0-9;]*)?)\Z")


class Screen:
    """Understands what our views use, and raises where it does not."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.history: list[str] = []
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._saved = (0, 0)
        self.is_cursor_hidden = False

    @property
    def lines(self) -> list[str]:
        """Everything that can be seen or scrolled to, without the blank lines at the end."""
        shown = [*self.history, *("".join(row).rstrip() for row in self._cells)]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def text(self) -> str:
        """The same as one text."""
        return "\n".join(self.lines)

    def feed(self, output: str) -> Screen:
        """Take output; a newline is a newline alone, as a program writes it."""
        end = 0
        for token in _TOKEN.finditer(output):
            assert token.start() == end, f"not understood: {output[end : end + 20]!r}"
            end = token.end()
            self._take(token)
        assert end == len(output), f"not understood: {output[end : end + 20]!r}"
        return self

    def _take(self, token: re.Match[str]) -> None:
        text, number, code, short = token[0], token[1], token[2], token[3]
        if text == "\r":
            self._column = 0
        elif text == "\n":
            self._down()
            self._column = 0
        elif short == "D":
            self._down()
        elif short == "7":
            self._saved = (self._row, self._column)
        elif short == "8":
            self._row, self._column = self._saved
        elif code == "A":
            self._row = max(0, self._row - int(number or 1))
        elif code == "J":
            self._clear(self._row, self._column)
        elif code == "K":
            assert number in ("", "0", "2"), text
            self._cells[self._row][0 if number == "2" else self._column :] = []
            self._cells[self._row] += [" "] * (self.columns - len(self._cells[self._row]))
        elif code in ("h", "l"):
            self.is_cursor_hidden = code == "l"
        elif code is None:
            self._print(text)
        else:
            assert code == "m", f"not understood: {text!r}"

    def _print(self, text: str) -> None:
        for character in text:
            if self._column == self.columns:
                self._down()
                self._column = 0
            self._cells[self._row][self._column] = character
            self._column += 1

    def _down(self) -> None:
        if self._row < self.rows - 1:
            self._row += 1
        else:
            self.history.append("".join(self._cells.pop(0)).rstrip())
            self._cells.append([" "] * self.columns)

    def _clear(self, row: int, column: int) -> None:
        self._cells[row][column:] = [" "] * (self.columns - column)
        for below in range(row + 1, self.rows):
            self._cells[below] = [" "] * self.columns


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and keeps what is written."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> Screen:
        """What it shows by now."""
        return Screen(rows=40).feed(self.getvalue())


class PtyProgram:
    """A Python program with a terminal of its own; `until` waits for what it shows, within a hard limit."""

    def __init__(self, arguments: list[str], *, columns: int = 100, rows: int = 40) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            cwd=Path(__file__).parent.parent.parent,
        )
        os.close(slave)
        self._output = b""
        self._size = (columns, rows)

    @property
    def output(self) -> str:
        """All that it has written so far."""
        return self._output.decode(errors="ignore")

    @property
    def screen(self) -> Screen:
        """What it shows by now; a read may have ended inside a sequence, of which the rest is yet to come."""
        whole = _UNFINISHED.sub("", self.output)
        return Screen(*self._size).feed(whole.replace("\r\n", "\n"))  # the pty writes \r\n for \n

    def until(self, condition: Callable[[Screen], bool], timeout_s: float = 20.0) -> Screen:
        """Read until the screen is as wanted."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            is_open = self._read(0.1)
            if condition(self.screen):
                return self.screen
            if not is_open:
                break
        self.kill()
        raise AssertionError(f"not shown: {self.screen.text}")

    def end(self, timeout_s: float = 20.0) -> int:
        """Read to the end; the exit status."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._read(0.1):
            pass
        try:
            return self.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        finally:
            self.kill()

    def kill(self) -> None:
        """Leave nothing behind; again is fine."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def _read(self, timeout_s: float) -> bool:
        """Whether there may be more."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: the other end is closed
            return False
        self._output += data
        return bool(data)
