"""Files that are there whole or not at all, however the writing of them ends."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_MOST_NAME = 100  # characters of the file's name in that of the unfinished one: file systems take 255 bytes


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Open a text file that takes the place of `path` once all of it is written.

    Until then it is beside it, under a name that nobody can guess or put a link at. Where the writing fails, what was
    there before stays and the unfinished file goes. A link at `path` stays one, to the new content, and a file keeps
    its permissions; a pipe or a device is written to as it is.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole_file(Path(folder, "page.html")) as file:
        ...         _ = file.write("all of it")
        ...     print(os.listdir(folder), Path(folder, "page.html").read_text())
        ['page.html'] all of it
    """
    place = Path(os.path.realpath(path))
    mode = place.stat().st_mode if place.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        with place.open("w", encoding="utf-8") as file:
            yield file
        return
    unfinished = place.with_name(f"{place.name[:_MOST_NAME]}.{secrets.token_hex(8)}.part")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            yield file
        if mode is not None:
            os.chmod(unfinished, stat.S_IMODE(mode))
        os.replace(unfinished, place)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
