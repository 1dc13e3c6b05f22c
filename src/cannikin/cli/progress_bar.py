"""The bar that long verbs show on stderr."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

__all__ = ["Progress"]


class Progress:
    """A bar over several runs on stderr, where that is a terminal and nobody asked for quiet."""

    def __init__(self, num_runs: int, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task("simulating", total=num_runs)
        self._num_started = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def start(self, description: str) -> Callable[[float], None]:
        """Begin the next run; what is returned takes the share of it that is done."""
        before = self._num_started
        self._num_started += 1
        self._bar.update(self._task, completed=before, description=description)
        return lambda share: self._bar.update(self._task, completed=before + share)
