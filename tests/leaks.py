"""What a test leaves behind: processes, threads, variables, open files and more, as two looks tell them apart.

Every test has two looks, so they read /proc and no more: 1.3 ms per test on a busy machine, 0.3% of the suite.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Look", "leaks", "look"]

# What may stay, and why. A process by a word of its command line, a hook by the beginning of its module's name; no
# thread: those of torch, which are not Python's, are not looked at.
_PROCESSES = {
    "multiprocessing.forkserver": "starts the ranks of all tests, and ends with this process",
    "multiprocessing.resource_tracker": "comes with the forkserver, and ends with it",
}
_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest's own, another in each phase of a test",
    "TORCHINDUCTOR_CACHE_DIR": "torch sets it, once, in whatever test first imports its compiler",
    "KMP_DUPLICATE_LIB_OK": "scikit-learn sets it, once, when it is imported",
    "KMP_INIT_AT_FORK": "scikit-learn sets it, once, when it is imported",
}
_HOOKS = {
    "torch.distributed": "prints the rank before an error, ever since the first process group",
}
_GRACE_S = 2.0  # for threads and processes that were told to end


@dataclass(frozen=True, kw_only=True)
class Look:
    """The state of this process, its children and its working directory at one moment."""

    processes: dict[int, str]
    threads: frozenset[threading.Thread]
    variables: dict[str, str]
    folder: str
    files: frozenset[str]
    descriptors: frozenset[tuple[str, str]]
    hooks: dict[str, Any]
    has_group: bool


def look(temporary: Path) -> Look:
    """Look at everything that a test might leave; of open files at those under `temporary`."""
    dist = sys.modules.get("torch.distributed")
    return Look(
        processes=dict(_children(os.getpid())),
        threads=frozenset(threading.enumerate()),
        variables=dict(os.environ),
        folder=os.getcwd(),
        files=frozenset(os.listdir()),
        descriptors=frozenset(_open_files(str(temporary))),
        hooks={
            "sys.excepthook": sys.excepthook,
            "threading.excepthook": threading.excepthook,
            "the handler of SIGINT": signal.getsignal(signal.SIGINT),
            "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        },
        has_group=dist is not None and dist.is_available() and dist.is_initialized(),
    )


def leaks(before: Look, temporary: Path, *, grace_s: float = _GRACE_S) -> list[str]:
    """One sentence per thing that is there now and was not before, and that does not go within the grace."""
    found = list(_differences(before, look(temporary)))
    deadline = time.monotonic() + grace_s
    while found and time.monotonic() < deadline:
        gc.collect()  # what only a cycle of references holds is no leak
        time.sleep(0.02)
        found = list(_differences(before, look(temporary)))
    return found


def _differences(before: Look, after: Look) -> Iterator[str]:
    for pid, command in after.processes.items():
        if pid not in before.processes and not any(word in command for word in _PROCESSES):
            yield f"process {pid} is left: {command or 'it has ended, but nobody waited for it'}"
    for thread in after.threads - before.threads:
        if thread.name == "tqdm_monitor":  # a progress bar of torch's compiler starts it, for good
            continue
        yield f"{'daemon ' * thread.daemon}thread {thread.name!r} still runs"
    for name in sorted((before.variables.keys() | after.variables.keys()) - _VARIABLES.keys()):
        was, now = before.variables.get(name), after.variables.get(name)
        if was != now:
            yield f"the environment's {name} was {was!r} and is {now!r}"
    if after.folder != before.folder:
        yield f"the working directory was {before.folder} and is {after.folder}"
    else:
        for name in sorted(after.files - before.files):
            if not name.startswith((".", "__pycache__")):  # caches of tools, an editor's files
                yield f"{name} is new in the working directory"
    for number, path in sorted(after.descriptors - before.descriptors):
        yield f"{path} is still open, as descriptor {number}"
    for name, hook in after.hooks.items():
        if hook is not before.hooks[name] and not hook.__module__.startswith(tuple(_HOOKS)):
            yield f"{name} was {before.hooks[name]!r} and is {hook!r}"
    if after.has_group and not before.has_group:
        yield "torch.distributed still has its process group"


def _children(parent: int) -> Iterator[tuple[int, str]]:
    """Pid and command line of each child; then of the forkserver's, which are ours too and have its command line."""
    tasks = f"/proc/{parent}/task"
    for task in _listed(tasks):
        for pid in map(int, _read(f"{tasks}/{task}/children").split()):
            command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            yield pid, command
            if "multiprocessing.forkserver" in command:
                yield from ((grandchild, "started by multiprocessing's server") for grandchild, _ in _children(pid))


def _open_files(under: str) -> Iterator[tuple[str, str]]:
    """Number and path of each open file below a folder."""
    for number in _listed("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the one that listed them
            continue
        if path.startswith(under):
            yield number, path


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # gone by now, or no Linux
        return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
