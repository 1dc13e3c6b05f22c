"""Writes a run log, one whole line at a time; what goes wrong with the log never stops the training."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import warnings
import weakref
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from cannikin.errors import RunLogError
from cannikin.runlog.reader import check_first_line
from cannikin.runlog.records import FORMAT, EventRecord, Header, Record
from cannikin.words import counted

_BEGINNING = b'{"type":"header","format":"%b"' % FORMAT.encode()


class RunLogWriter:
    """Appends records to a log, an observer like any other: the first record must be a `Header`.

    Each record is one write of a whole line: others can read it at once, and a kill between two writes leaves no half
    line. (A kill inside a write may leave one, since the kernel then stops at a page's end. Readers skip such a line,
    and a resumed run ends it.) If the log cannot be written (a full disk, a folder without permission), the writer
    warns once and drops all further records: training goes on. A record that JSON cannot hold is left out, also with
    one warning. Nothing is written after `close`.

    Args:
        path: the file; missing folders are made.
        append: whether to go on with an existing log, as a resumed run does: it gets the new header and an event
            "resume". A missing log is begun.

    Raises:
        RunLogError: there is a log already and `append` is not set; what is there is no run log of this version; or
            another process is writing it.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        self.path = Path(path)
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._begun = self._resumes = self._warned = False
        self._size = 0  # of the file before this run's first record
        self._closer: Any = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o666)
            self._closer = weakref.finalize(self, os.close, self._file)
            self._take_over(append)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            self._give_up(error)
        except RunLogError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether records are no longer written: after `close`, or after the file could not be written."""
        return self._closer is None or not self._closer.alive

    def close(self) -> None:
        """Write nothing more; a second call does nothing."""
        if self._closer is not None:
            self._closer()

    @property
    def holds_earlier_run(self) -> bool:
        """Whether the log holds records, and none of this run yet."""
        return self._resumes and not self._begun

    def write(self, event: Record, /) -> None:
        """Append one record."""
        if self.closed:
            return
        if not self._begun and not isinstance(event, Header):
            raise RunLogError(f"{self.path}: the first record is of type {type(event).__name__}: a log needs a Header")
        if not self._begun and os.fstat(self._file).st_size != self._size:  # locks keep out other processes only
            self._give_up(OSError(errno.EBUSY, "another model of this process writes it; give each its own run_dir"))
            return
        events: list[Record] = [event]
        if isinstance(event, Header) and self._resumes and not self._begun:
            text = f"resumed at step {event.first_step} on {counted(event.world_size, 'rank')}"
            data: dict[str, Any] = {"world_size": event.world_size, "started": event.started}
            events.append(EventRecord(step=event.first_step, kind="resume", text=text, data=data, elapsed_ms=0.0))
        try:
            lines = b"".join(self._encoder.encode(record) + b"\n" for record in events)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self._warn(f"a record of type {type(event).__name__} cannot be written as JSON and is left out: {error}")
            return
        self._begun = True
        try:
            self._append(lines)
        except OSError as error:
            self._give_up(error)

    def _take_over(self, append: bool) -> None:
        """Claim the file, and make sure that what it holds may be added to."""
        self._lock()
        if not (size := os.fstat(self._file).st_size):
            return
        first, newline, _ = _head(self._file).partition(b"\n")
        if not newline and (first.startswith(_BEGINNING) or _BEGINNING.startswith(first)):
            os.truncate(self._file, 0)  # broken off inside its header: it holds no record
            return
        if not append:
            raise RunLogError(f"{self.path}: exists: append to it to resume that run, or choose another run directory")
        check_first_line(first, self.path)
        self._resumes = True
        if os.pread(self._file, 1, size - 1) != b"\n":
            self._append(b"\n")  # ends the line that was cut short, which readers skip

    def _lock(self) -> None:
        """Keep other processes from writing the same log; the lock ends with the process, however it ends.

        A record lock rather than `flock`, which the data loader's workers would inherit and hold after a kill.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                message = f"{self.path}: another process is writing it: choose another run directory"
                raise RunLogError(message) from error
            # Some file systems have no locks: go on without one.

    def _append(self, data: bytes) -> None:
        while data:  # once, unless the disk fills up or a signal comes in between
            data = data[os.write(self._file, data) :]

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._warn(f"the log cannot be written, training goes on without it: {error.strerror or error}")

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{self.path}: {message}", RuntimeWarning, stacklevel=4)


def set_aside(path: Path) -> Path:
    """Rename a log that nobody writes to the next free name, such as runlog-1.jsonl, and return the new path."""
    names = (path.with_stem(f"{path.stem}-{k}") for k in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def _head(file: int) -> bytes:
    """Return the file's beginning, up to the end of its first line or a little further."""
    chunks: list[bytes] = []
    size, chunk = 0, b""
    while b"\n" not in chunk and (chunk := os.pread(file, 2**20, size)):
        chunks.append(chunk)
        size += len(chunk)
        if not chunks[0].startswith(_BEGINNING[: len(chunks[0])]):
            break
    return b"".join(chunks)


def _plain(value: Any) -> Any:
    """Return numpy's numbers and arrays as Python's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is neither a number nor text")
