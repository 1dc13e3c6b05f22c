"""Output of several processes in one stream: whole lines, each with a prefix that says whose it is."""

from __future__ import annotations

import os
import selectors
from contextlib import suppress
from typing import IO

__all__ = ["Lines", "Outputs"]

_LONGEST = 65536  # a line beyond it is cut


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
        """The lines that these bytes complete."""
        *whole, self._held = (self._held + data).split(b"\n")
        if len(self._held) > _LONGEST:
            whole.append(self._held)
            self._held = b""
        return b"".join(self._shown(line) for line in whole)

    def rest(self) -> bytes:
        """The last line, where it has no end."""
        held, self._held = self._held, b""
        return self._shown(held) if held else b""

    def _shown(self, line: bytes) -> bytes:
        """What a terminal would be left with: of a progress bar, which returns to the line's start, its last state."""
        return self._prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n"


class Outputs:
    """Reads many descriptors and writes their lines to the streams they belong to."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, descriptor: int, prefix: str, stream: IO[bytes]) -> None:
        """Pass on what comes from this descriptor, which is closed in the end."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, (Lines(prefix), stream))

    def pump(self, timeout_s: float) -> bool:
        """Pass on what there is, after waiting for it at most so long; whether there was anything."""
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
        """Pass on what is left, and close every descriptor."""
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
