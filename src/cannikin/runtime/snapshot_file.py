"""A snapshot as a file: the bytes of tensors in a row, what they belong to, and a checksum at the end.

    b"cannikin-snap 1\n", length of the skeleton, length of the file
    skeleton: everything but tensors, by torch.save, read with weights_only
    the tensors' bytes, each beginning at a multiple of 64
    SHA-256 of all of that

A file is written beside its place, brought to the disk, and renamed: it is there whole or not at all. It is believed
only where its checksum holds, before anything in it is looked at. Tensors do not go through torch.save, which would
keep other threads waiting while it copies them (it holds Python's lock); writing and hashing long rows of bytes do not.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import logging
import os
import re
import socket
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from cannikin.errors import InvalidInputError, StateError

_MAGIC = b"cannikin-snap 1\n"
_HEAD = struct.Struct("<16sQQ")
_DIGEST_BYTES = 32
_ALIGNMENT = 64
_CHUNK_BYTES = 2**24  # written, hashed and sent at a time
_NAME = re.compile(r"step-(\d{12})-([0-9a-f]{16})\.snapshot")
_PLAIN = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.device)
_ENDING_S = 15.0  # for a process on this host that is being ended
_LEASE_S = 120.0  # for a host that is gone: servers of NFS keep its locks for 90 s
_Number = torch.Size  # stands for a tensor, by its number: nothing else that torch.load takes is quicker, or as rare

_log = logging.getLogger("cannikin")


# Names


@dataclass(frozen=True, order=True)
class SnapshotName:
    """The name of a snapshot's file: how many steps it has, and of which model (`identity`, 16 hexadecimal digits).

    Example:
        >>> str(SnapshotName(12, "0123456789abcdef"))
        'step-000000000012-0123456789abcdef.snapshot'
    """

    step: int
    identity: str

    def __str__(self) -> str:
        return f"step-{self.step:012d}-{self.identity}.snapshot"


def list_snapshots(folder: Path) -> list[SnapshotName]:
    """Return the snapshots in a folder, newest first; none where there is no such folder."""
    try:
        matches = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    except OSError:
        return []
    return sorted((SnapshotName(int(match[1]), match[2]) for match in matches if match), reverse=True)


def file_id(path: Path) -> str:
    """Return what tells copies of a file apart, the same for every host that sees the same file in shared storage."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def newest_of(seen: Sequence[Mapping[SnapshotName, str]]) -> tuple[SnapshotName, int] | None:
    """Return the newest snapshot that some rank sees, and the first rank that sees it.

    Args:
        seen: the snapshots that each rank sees, each with its `file_id`.

    Example:
        >>> old, new = SnapshotName(1, "a"), SnapshotName(2, "a")
        >>> newest_of([{old: "1 7"}, {old: "1 7", new: "2 8"}])
        (SnapshotName(step=2, identity='a'), 1)
    """
    left = {name for names in seen for name in names}
    if not left:
        return None
    name = max(left)
    return name, next(rank for rank, names in enumerate(seen) if name in names)


def without(
    seen: Sequence[Mapping[SnapshotName, str]], refused: SnapshotName, owner: int | None
) -> list[dict[SnapshotName, str]]:
    """Return the snapshots that each rank sees but for one that cannot be used; another copy of it may be whole.

    Args:
        seen: see `newest_of`.
        refused: its name.
        owner: a rank that sees the file; None for all files of this name.

    Example:
        >>> new = SnapshotName(2, "a")
        >>> without([{new: "1 7"}, {new: "1 7"}, {new: "5 9"}], new, 0)
        [{}, {}, {SnapshotName(step=2, identity='a'): '5 9'}]
    """
    file = None if owner is None else seen[owner][refused]
    return [{name: own for name, own in names.items() if name != refused or own != (file or own)} for names in seen]


def superseded(present: Sequence[SnapshotName], good: Sequence[SnapshotName], keep: int) -> list[SnapshotName]:
    """Return the snapshots to remove: all of the newest one's model but the last `keep` that are known to be good.

    One of more steps than the newest is of a run that was resumed from an older one, which has gone another way since.

    Args:
        present: those in the folder.
        good: those that were loaded or written, oldest first.
        keep: how many stay.

    Example:
        >>> names = [SnapshotName(step, "a") for step in (4, 3, 2, 1)]
        >>> [name.step for name in superseded(names, [names[2], names[1]], keep=2)]
        [4, 1]
    """
    kept, identity = set(good[-keep:]), good[-1].identity
    return [name for name in present if name.identity == identity and name not in kept]


# Whose they are


class SnapshotLock:
    """Keeps other jobs from a folder's snapshots of one model, which both would remove; it ends with the process.

    A record lock, as run logs have it, rather than `flock`, which a loader's workers would inherit and hold after a
    kill. A job that was started again may come while the one before is still being ended, and waits for it. No such
    lock keeps a process from its own files, so that a process knows which ones it has.

    Args:
        folder: which exists.
        identity: of the model.
    """

    _taken: ClassVar[set[tuple[int, Path]]] = set()  # with the process: a fork of it has none of them

    def __init__(self, folder: Path, identity: str) -> None:
        self.path = folder / f".{identity}.lock"
        self._key = (os.getpid(), self.path.resolve())
        self._file: int | None = None
        self._can_lock = True

    @property
    def is_lost(self) -> bool:
        """Whether its file was removed, as with the folder: another job may have come since."""
        return self._can_lock and (self._file is None or not self._is_in_place(self._file))

    def take(self) -> str:
        """Take the lock; return what to warn of where the file system has none.

        Raises:
            InvalidInputError: another process keeps it, or another Snapshot of this one.
        """
        if self._key in self._taken:
            raise InvalidInputError(
                f"this program keeps the snapshots of a model like this one in {str(self.path.parent)!r} already, and "
                "each would remove the other's: give each a folder of its own, or close() the first Snapshot"
            )
        start_s, has_told = time.monotonic(), False
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(file, 1000, 0).decode(errors="replace").strip()
                os.close(file)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    self._can_lock = False
                    return f"{self.path.parent} cannot be locked ({error}): let no other job keep its snapshots there"
            else:
                if self._is_in_place(file):
                    os.ftruncate(file, 0)
                    os.pwrite(file, f"{self._own()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode(), 0)
                    self._file = file
                    self._taken.add(self._key)
                    return ""
                os.close(file)  # it was removed by who held it
                continue
            limit_s = _ENDING_S if holder.startswith(f"{socket.gethostname()} ") or not holder else _LEASE_S
            if time.monotonic() - start_s > limit_s:
                raise InvalidInputError(
                    f"another job keeps its snapshots of this model in {str(self.path.parent)!r} (process {holder}), "
                    "and each would remove the other's: give each job a folder of its own, or end that one; where it "
                    f"is gone and its host has kept the lock, remove {self.path.name} there"
                )
            if not has_told and time.monotonic() - start_s > 1.0:
                has_told = True
                _log.warning("waiting up to %.0f s for process %s, which has locked %s", limit_s, holder, self.path)
            time.sleep(0.1)

    def release(self) -> None:
        """Let others have it."""
        if self._file is not None:
            self._taken.discard(self._key)
            if self._is_in_place(self._file):  # else it is another job's, in a folder that was made again
                with suppress(OSError):
                    self.path.unlink()
            os.close(self._file)
            self._file = None

    def _is_in_place(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except OSError:
            return False

    def _own(self) -> str:
        return f"{socket.gethostname()} {os.getpid()}"


# States


def take_apart(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a nested state without its tensors, in whose places are their numbers, and the tensors.

    Refuses what could not be read back without running foreign code. Numbers of numpy become Python's, sizes of torch
    tuples.
    """
    tensors: list[torch.Tensor] = []
    numbers: dict[Any, int] = {}  # of tensors that share their memory, such as tied weights
    path: list[Any] = []

    def place(tensor: torch.Tensor) -> torch.Size:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise _foreign(tensor, path)
        key = (tensor.data_ptr() or len(tensors), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        number = numbers.setdefault(key, len(tensors))
        if number == len(tensors):
            tensors.append(tensor.detach())
        return _Number([number])

    def walk(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return place(part)
        if isinstance(part, np.generic):
            part = part.item()
        if type(part) in _PLAIN:
            return part
        if type(part) in (dict, OrderedDict, Counter):
            copy = type(part)()
            for key, value in part.items():
                path.append(key)
                copy[walk(key)] = walk(value)
                path.pop()
            if hasattr(part, "_metadata"):  # versions of modules, which a state_dict of torch carries
                copy._metadata = part._metadata
            return copy
        if type(part) in (list, tuple, set, torch.Size):
            kind = tuple if isinstance(part, torch.Size) else type(part)
            return kind(walk(value) for value in part)
        raise _foreign(part, path)

    return walk(tree), tensors


def _foreign(value: Any, path: Sequence[Any]) -> InvalidInputError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return InvalidInputError(
        f"the state {'/'.join(map(str, path))} is a {kind}, which a snapshot cannot hold: it holds tensors, numbers, "
        "texts, lists, tuples, sets and dicts; let state_dict() return those"
    )


def put_together(skeleton: Any, tensor_of: Callable[[int], torch.Tensor]) -> Any:
    """Return the state that `take_apart` was given, with a tensor for each number."""
    if isinstance(skeleton, _Number):
        return tensor_of(skeleton[0])
    if isinstance(skeleton, Mapping):
        pairs = {key: put_together(value, tensor_of) for key, value in skeleton.items()}
        copy = type(skeleton)(pairs)  # type: ignore[call-arg]
        if hasattr(skeleton, "_metadata"):
            copy._metadata = skeleton._metadata  # type: ignore[attr-defined]
        return copy
    if type(skeleton) in (list, tuple, set):
        return type(skeleton)(put_together(value, tensor_of) for value in skeleton)
    return skeleton


# Tensors in a row


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where tensors lie in a row of bytes, one entry per tensor."""

    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    starts: list[int]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layout:
        """Lay tensors out without gaps inside; a tensor keeps the order of its dimensions in memory."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        return cls(
            dtypes=[tensor.dtype for tensor in tensors],
            shapes=[tuple(tensor.shape) for tensor in tensors],
            strides=[_dense_stride(tensor) for tensor in tensors],
            starts=starts,
            num_bytes=end,
        )

    def view(self, number: int, row: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return a tensor as it lies in a row of bytes that has the first one's at `first`."""
        shape, dtype = self.shapes[number], self.dtypes[number]
        start, length = first + self.starts[number], int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return row[start : start + length].view(dtype).as_strided(shape, self.strides[number])


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    return tuple(stride)


class HostRow:
    """A row of bytes in host memory that tensors are copied to, one set after another.

    The memory is kept: to find it costs more than to copy. From a GPU the copies run on a stream of their own into
    pinned memory, and neither the host nor the training's kernels wait for them.
    """

    def __init__(self) -> None:
        self.layout = Layout.of([])
        self.row = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[Any] = []
        self._views: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._held: list[torch.Tensor] = []  # until they are copied

    def copy(self, tensors: Sequence[torch.Tensor], changing: Callable[[torch.Tensor], bool]) -> None:
        """Begin to copy these tensors; `before_update` must come before any but those that are `changing` changes."""
        kinds = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        if kinds != self._kinds:
            self._kinds, self.layout = kinds, Layout.of(tensors)
            pinned = any(tensor.is_cuda for tensor in tensors)
            self.row = torch.empty(self.layout.num_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._views = [self.layout.view(number, self.row) for number in range(len(tensors))]
        pairs = list(zip(self._views, tensors, strict=True))
        on_host = [(view, tensor) for view, tensor in pairs if not tensor.is_cuda]
        if on_host:
            torch._foreach_copy_([view for view, _ in on_host], [tensor for _, tensor in on_host])
        on_device = [(view, tensor.clone() if changing(tensor) else tensor) for view, tensor in pairs if tensor.is_cuda]
        if on_device:
            self._copy_beside(on_device)

    def _copy_beside(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        device = pairs[0][1].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for view, tensor in pairs:
                view.copy_(tensor, non_blocking=True)
        self._held = [tensor for _, tensor in pairs]
        self._copied = self._stream.record_event()

    def before_update(self) -> None:
        """Let the device finish the copies before what it is told from now on; the host does not wait."""
        copied = self._copied  # the thread that writes takes it away once it has passed
        if copied is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(copied)

    def wait(self) -> None:
        """Wait until all is copied."""
        if self._copied is not None:
            self._copied.synchronize()
        self._copied, self._held = None, []


# Files


def write_snapshot(path: Path, state: Mapping[str, Any], layout: Layout, row: torch.Tensor) -> int:
    """Write a snapshot atomically, and return its length in bytes.

    Args:
        path: its place, in a folder that exists.
        state: everything but tensors, as `take_apart` returned it.
        layout, row: the tensors.
    """
    skeleton = io.BytesIO()
    torch.save({"state": state, "layout": vars(layout)}, skeleton)
    text = skeleton.getvalue()
    text += bytes(-(_HEAD.size + len(text)) % _ALIGNMENT)
    length = _HEAD.size + len(text) + layout.num_bytes + _DIGEST_BYTES
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    digest = hashlib.sha256()
    try:
        # Not through a link that somebody has put there, nor over a file.
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb", buffering=0) as file:
            head = _HEAD.pack(_MAGIC, len(text), length)
            for part in (memoryview(head), memoryview(text), *map(_memory, pieces(row[: layout.num_bytes]))):
                _write_all(file, part)
                digest.update(part)
            _write_all(file, memoryview(digest.digest()))
            os.fsync(descriptor)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    sync_folder(path.parent)
    return length


def _write_all(file: io.FileIO, rest: memoryview) -> None:
    while rest:
        rest = rest[file.write(rest) :]


def _memory(row: torch.Tensor) -> memoryview:
    return memoryview(row.numpy())  # type: ignore[arg-type]


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk, where it can be asked for that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_chunks(path: Path, row: torch.Tensor) -> Iterator[torch.Tensor]:
    """Fill a row of bytes with a file's, and yield it piece by piece as it is filled; zeros where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            for piece in pieces(row):
                memory, filled = _memory(piece), 0
                while filled < len(memory):
                    count = file.readinto(memory[filled:])
                    if not count:
                        break
                    filled += count
                piece[filled:] = 0
                yield piece
    except OSError:
        row.zero_()
        yield from pieces(row)


def pieces(row: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a row of bytes in pieces to be sent one by one; an empty row has none."""
    return [row[start : start + _CHUNK_BYTES] for start in range(0, len(row), _CHUNK_BYTES)]


@dataclass(frozen=True, eq=False)
class OpenSnapshot:
    """A snapshot that has been read and checked; parts become tensors when they are asked for."""

    state: Mapping[str, Any]
    layout: Layout
    row: torch.Tensor
    first: int

    def part(self, skeleton: Any) -> Any:
        """Return a part of the state with its tensors, in memory of their own."""
        return put_together(skeleton, lambda number: self.layout.view(number, self.row, self.first).clone())


def open_snapshot(row: torch.Tensor) -> OpenSnapshot:
    """Return what the bytes of a file hold; raise `StateError` where they are not those that were written."""
    memory = _memory(row)
    if len(memory) < _HEAD.size + _DIGEST_BYTES:
        raise StateError(f"it has {len(memory)} bytes, fewer than any snapshot")
    magic, skeleton_bytes, length = _HEAD.unpack(memory[: _HEAD.size])
    if magic != _MAGIC:
        raise StateError("it is not a snapshot of this version of cannikin")
    if length != len(memory):
        raise StateError(f"it has {len(memory)} bytes of {length}")
    if hashlib.sha256(memory[:-_DIGEST_BYTES]).digest() != memory[-_DIGEST_BYTES:]:
        raise StateError("its checksum does not hold")
    first = _HEAD.size + skeleton_bytes
    try:
        read = torch.load(io.BytesIO(memory[_HEAD.size : first]), weights_only=True)
        return OpenSnapshot(read["state"], Layout(**read["layout"]), row, first)
    except Exception as error:  # whole, but of a version of torch or cannikin that writes other things
        raise StateError(f"this version of torch cannot read it ({type(error).__name__}: {error})") from error
