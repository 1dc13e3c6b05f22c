"""Lines that stay at the end of a terminal's output, under whatever else the process prints.

The cursor always rests where the program's own output left it, and the footer is drawn below: no line of it is ever
above the cursor. So a program that writes within its line, as progress bars do, need not be noticed at all; only before
a line break the footer is erased, and drawn again after it. For that, `write` of the streams that lead to the terminal
is replaced while a footer is there. No thread, no hidden cursor, no scroll region: a process that is killed leaves a
terminal that works, with the last footer in it.

What other processes print to the same terminal overwrites the footer, until it is drawn again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

_ERASE_BELOW = "\x1b[J"
_MAX_REDRAWS_PER_S = 20  # after line breaks; a flood of prints goes without the footer until its next update


class Footer:
    """The footer of a terminal, to which `streams` lead too; `Footer.of` gives everybody the same one."""

    def __init__(self, terminal: TextIO, streams: list[TextIO], clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._clock = terminal, clock
        self._blocks: dict[object, list[str]] = {}
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._is_drawn = False
        self._at_line_start = True
        self._redraws: list[float] = []
        self._taps: list[tuple[TextIO, Any]] = []
        self._write: Callable[[str], Any] = terminal.write
        for stream in dict.fromkeys([terminal, *streams]):
            self._tap(stream)

    @classmethod
    def of(cls, terminal: TextIO, streams: list[TextIO]) -> Footer:
        """Return the footer that is on this terminal, or a new one."""
        for stream in (terminal, *streams):
            found = getattr(stream.write, "footer", None)
            if isinstance(found, cls) and found._process == os.getpid():
                return found
        return cls(terminal, streams)

    def show(self, owner: object, lines: list[str]) -> None:
        """Draw these lines as the part of this owner, below those of others."""
        with self._lock:
            self._blocks[owner] = lines
            self._draw()

    def leave(self, owner: object, *, keep: bool = False) -> None:
        """Take this owner's part away, or, with `keep`, leave it above as ordinary output; may be called again.

        With the last owner the streams become what they were.
        """
        with self._lock:
            lines = self._blocks.pop(owner, None)
            if os.getpid() != self._process:
                return
            with suppress(OSError, ValueError):  # the terminal may be gone, or the stream closed
                if lines is not None:
                    self._erase()
                if lines and keep:
                    self._write(("" if self._at_line_start else "\n") + "\n".join(lines) + "\n")
                    self._at_line_start = True
                if self._blocks:
                    self._draw()
                self._terminal.flush()
            if not self._blocks:
                self._untap()

    def _tap(self, stream: TextIO) -> None:
        """Notice what is written to this stream."""
        before = stream.write

        def write(text: str) -> Any:
            return self._pass_on(before, text)

        write.footer = self  # type: ignore[attr-defined]
        with suppress(AttributeError):  # of a stream that takes no attributes; its lines may overwrite the footer
            stream.write = write  # type: ignore[method-assign]
            self._taps.append((stream, write))

    def _untap(self) -> None:
        for stream, write in self._taps:
            if stream.__dict__.get("write") is write:
                del stream.write
        self._taps = []

    def _pass_on(self, write: Callable[[str], Any], text: str) -> Any:
        """Write for the program, with the footer out of the way."""
        if not self._blocks or os.getpid() != self._process:
            return write(text)
        with self._lock:
            breaks = "\n" in text
            if breaks:
                self._erase()
            written = write(text)
            if text:
                self._at_line_start = text.endswith("\n")
            if breaks and self._may_redraw():
                # What was just written may be on its way in another stream's buffer.
                for stream, _ in self._taps:
                    with suppress(OSError, ValueError):
                        stream.flush()
                self._draw()
            return written

    def _may_redraw(self) -> bool:
        now = self._clock()
        self._redraws = [at for at in self._redraws if now - at < 1.0]
        if len(self._redraws) >= _MAX_REDRAWS_PER_S:
            return False
        self._redraws.append(now)
        return True

    def _erase(self) -> None:
        if self._is_drawn:
            self._write(_ERASE_BELOW)
            self._terminal.flush()
            self._is_drawn = False

    def _draw(self) -> None:
        """Make room below the cursor, draw there, and come back; where the window is low, the upper lines only."""
        lines = [line for block in self._blocks.values() for line in block][: max(0, self.size[1] - 2)]
        if not lines:
            return
        room = "\x1bD" * len(lines) + f"\x1b[{len(lines)}A"  # index: down in the same column, scrolling at the end
        drawn = "".join(f"\r\n{line}\x1b[K" for line in lines)
        self._write(f"{_ERASE_BELOW}{room}\x1b7{drawn}\x1b8")
        self._terminal.flush()
        self._is_drawn = True

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now."""
        try:
            columns, lines = os.get_terminal_size(self._terminal.fileno())
        except (OSError, ValueError):
            columns = lines = 0
        return columns or 80, lines or 24
