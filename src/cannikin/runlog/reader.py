"""Reads a run log: at once, or bit by bit while it is being written."""

from __future__ import annotations

import itertools
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from cannikin.errors import InvalidInputError, RunLogError
from cannikin.runlog.records import (
    FORMAT,
    RUNLOG_NAME,
    VERSION,
    EventRecord,
    Header,
    PlanRecord,
    Record,
    WindowRecord,
)

_CHUNK_BYTES = 2**20
_MAX_HEADER_BYTES = 2**26  # a thousand times the header of 1,000 ranks


class _Tag(msgspec.Struct):
    type: str


class _Preamble(msgspec.Struct):
    format: str
    version: int
    cannikin_version: str = "unknown"


_KNOWN_TYPES = {str(kind.__struct_config__.tag) for kind in (Header, WindowRecord, PlanRecord, EventRecord)}


@dataclass(frozen=True, kw_only=True, eq=False)
class RunLog:
    """A run log as far as it has been written, each kind of record in the order of the file.

    `headers` has one entry, and one more for each resume. `num_unknown` lines are of types this version does not know,
    `num_unreadable` ones are damaged; `truncated` says that the log ends inside a line. `ended` says that the run ended
    as it should: else it ended early, was broken off, or goes on.
    """

    headers: tuple[Header, ...]
    windows: tuple[WindowRecord, ...]
    plans: tuple[PlanRecord, ...]
    events: tuple[EventRecord, ...]
    num_unknown: int
    num_unreadable: int
    truncated: bool
    ended: bool

    @property
    def header(self) -> Header:
        """The first header."""
        return self.headers[0]

    @property
    def last_step(self) -> int:
        """The highest step of which the log tells."""
        steps = [self.header.first_step]
        steps += [window.first_step + window.num_steps - 1 for window in self.windows]
        steps += [plan.step for plan in self.plans]
        return max([*steps, *(event.step for event in self.events)])


def run_inside(path: str | os.PathLike[str]) -> Path | None:
    """Return the first run directory in a folder that is none itself, as `cannikin demo` makes it; None without one."""
    if not os.path.isdir(path):
        return None
    return min((log.parent for log in Path(path).glob(f"*/{RUNLOG_NAME}")), default=None)


def log_path(path: str | os.PathLike[str]) -> Path:
    """Return the log that a path names: itself, or the one in a run directory."""
    return Path(path, RUNLOG_NAME) if os.path.isdir(path) else Path(path)


def refuse_overwriting(out: Path, path: str | os.PathLike[str]) -> None:
    """Refuse to write a file where the log is that `path` names."""
    log = log_path(path)
    if os.path.exists(out) and os.path.exists(log) and os.path.samefile(out, log):
        raise InvalidInputError(f"{out}: is the run's log, which is not to be overwritten: give another --out")


class RunLogReader:
    """Reads on from where it stopped, so that a log can be followed while it is being written.

    `num_unknown` and `num_unreadable` count the lines left out so far, and `truncated` says that part of a line has
    come that is not complete yet.

    Args:
        path: a log, or a run directory that holds one.

    Raises:
        RunLogError: the file is missing, is no run log, or has another version of the format; here or when polled.

    Example:
        >>> import tempfile
        >>> from cannikin.runlog import JobInfo, RunLogWriter
        >>> job = JobInfo(batch_size=64)
        >>> header = Header(cannikin_version="1", started="", policy="even", world_size=2, job=job)
        >>> with tempfile.TemporaryDirectory() as folder, RunLogWriter(Path(folder, "runlog.jsonl")) as log:
        ...     log.write(header)
        ...     with RunLogReader(folder) as reader:
        ...         print(len(reader.poll()), len(reader.poll()))
        ...         log.write(EventRecord(step=3, kind="changed_speed", text="hello"))
        ...         print([event.text for event in reader.poll()])
        1 0
        ['hello']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = log_path(path)
        self.num_unknown = 0
        self.num_unreadable = 0
        self._pieces: list[bytes] = []  # of a line that is not complete yet
        self._num_bytes = 0  # in these
        self._begun = False
        self._position = 0
        self._decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
        try:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer
        except (OSError, ValueError) as error:  # a null character in the path is a ValueError
            reason = getattr(error, "strerror", error)
            inside = run_inside(path)
            if inside is not None:
                raise RunLogError(f"{path}: has no run log itself: give a run in it, such as {inside}") from error
            raise RunLogError(f"{self.path}: cannot be read: {reason}; give a run directory or its log") from error
        self._closer = weakref.finalize(self, os.close, self._file)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise RunLogError(f"{self.path}: cannot be read: it is no ordinary file; give a run directory or its log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._closer()

    @property
    def truncated(self) -> bool:
        """Whether the bytes read so far end inside a line."""
        return bool(self._num_bytes)

    @property
    def replaced(self) -> bool:
        """Whether `path` leads to another file by now, or to less of this one than was read."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False  # deleted: what was read is all there is
        here = os.fstat(self._file)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or here.st_size < self._position

    def poll(self) -> list[Record]:
        """Return the records completed since the last call."""
        return list(self.records())

    def records(self) -> Iterator[Record]:
        """Yield the same records one by one, for logs that do not fit into memory."""
        end = self._end()  # as of now: a writer may be faster than its reader
        while self._position < end and (chunk := self._read()):
            lines = self._lines(chunk)
            if not self._begun:
                self._begin(lines)
            for line in lines:
                if (record := self._decoded(line)) is not None:
                    yield record

    def _end(self) -> int:
        size = os.fstat(self._file).st_size
        if size < self._position:
            raise RunLogError(f"{self.path}: became shorter while it was being read: open it again")
        return size

    def _read(self) -> bytes:
        try:
            chunk = os.read(self._file, _CHUNK_BYTES)
        except OSError as error:
            raise RunLogError(f"{self.path}: cannot be read: {error.strerror}") from error
        self._position += len(chunk)
        return chunk

    def _lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that this chunk completes, and keep what begins another; long ones are joined once."""
        if b"\n" not in chunk:
            self._pieces.append(chunk)
            self._num_bytes += len(chunk)
            return []
        *lines, rest = b"".join([*self._pieces, chunk]).split(b"\n")
        self._pieces, self._num_bytes = [rest], len(rest)
        return lines

    def _begin(self, lines: list[bytes]) -> None:
        """Refuse a file that does not begin like a run log, as soon as that shows."""
        if lines:
            check_first_line(lines[0], self.path)
            self._begun = True
        elif not self._pieces[0].startswith(b"{") or self._num_bytes > _MAX_HEADER_BYTES:
            raise RunLogError(_foreign(self.path))

    def _decoded(self, line: bytes) -> Record | None:
        """Return the record in a line; None, and count the line, where this version cannot read it."""
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        try:
            known = msgspec.json.decode(line, type=_Tag).type in _KNOWN_TYPES
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            known = True
        self.num_unreadable += known
        self.num_unknown += not known
        return None


def check_first_line(line: bytes, path: str | os.PathLike[str]) -> None:
    """Raise `RunLogError` unless the line is the header of a log that this version reads."""
    try:
        preamble = msgspec.json.decode(line, type=_Preamble)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunLogError(_foreign(path)) from error
    if preamble.format != FORMAT:
        raise RunLogError(_foreign(path))
    if preamble.version != VERSION:
        raise RunLogError(
            f"{os.fspath(path)}: is a log of version {preamble.version}, by cannikin {preamble.cannikin_version!r}, "
            f"and this one reads version {VERSION}: use the cannikin that wrote it, or a newer one"
        )
    try:
        msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunLogError(f"{os.fspath(path)}: has a damaged header: {error}") from error


def _foreign(path: str | os.PathLike[str]) -> str:
    return f"{os.fspath(path)}: is not a run log: its first line is not the header of one"


def read_runlog(path: str | os.PathLike[str]) -> RunLog:
    """Read a whole log, finished, broken off or still being written.

    Args:
        path: a log, or a run directory that holds one; `RunLogReader.records` gives the records of a long one in turn.

    Raises:
        RunLogError: the file is missing, is no run log, has no header yet, or has another version of the format.

    Example:
        >>> import tempfile
        >>> from cannikin.runlog import JobInfo, RunLogWriter
        >>> job = JobInfo(batch_size=64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "run", "runlog.jsonl")
        ...     with RunLogWriter(path) as log:
        ...         log.write(Header(cannikin_version="1", started="", policy="even", world_size=2, job=job))
        ...         log.write(EventRecord(step=3, kind="epoch", data={"epoch": 1}))
        ...     _ = path.write_bytes(path.read_bytes() + b'{"type":"ev')  # killed here
        ...     run = read_runlog(path)
        >>> run.header.policy, run.events[0].data, run.last_step, run.truncated
        ('even', {'epoch': 1}, 3, True)
    """
    with RunLogReader(path) as reader:
        records = list(reader.records())
    if not records:
        raise RunLogError(f"{reader.path}: has no header yet: the run has only just begun, or ended at once")
    return RunLog(
        headers=tuple(record for record in records if isinstance(record, Header)),
        windows=tuple(record for record in records if isinstance(record, WindowRecord)),
        plans=tuple(record for record in records if isinstance(record, PlanRecord)),
        events=tuple(record for record in records if isinstance(record, EventRecord)),
        num_unknown=reader.num_unknown,
        num_unreadable=reader.num_unreadable,
        truncated=reader.truncated,
        ended=_says_end(records),
    )


def _says_end(records: list[Record]) -> bool:
    """Return whether an event "end" that is not early follows the last header."""
    later = itertools.takewhile(lambda record: not isinstance(record, Header), reversed(records))
    return any(isinstance(record, EventRecord) and record.kind == "end" and not record.is_early for record in later)


@contextmanager
def numbers_only(path: str | os.PathLike[str]) -> Iterator[None]:
    """Refuse a log with whole numbers that are too large for a float, which no measurement is."""
    try:
        yield
    except OverflowError as error:
        raise RunLogError(f"{os.fspath(path)}: holds a number too large to be a measurement: {error}") from error
