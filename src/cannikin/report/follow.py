"""Follows a run by its log, also before there is one and while it is being written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from cannikin.errors import RunLogError
from cannikin.report.live_state import LiveState
from cannikin.runlog import RunLogReader
from cannikin.words import clock as shown_time

__all__ = ["FollowedRun"]

_QUIET_S = 15.0  # without a record: a run that evaluates, or one that is no more


class FollowedRun:
    """A run's state, as far as its log tells.

    Where another log takes this one's place, as that of a new run in the same directory does, it is followed instead.

    Args:
        path: a log, or a run directory that holds one, now or later.
        clock: seconds, for tests.

    Raises:
        RunLogError: when polled, where the file is no run log or has another version of the format.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.state = LiveState()
        self._path, self._clock = path, clock
        self._reader: RunLogReader | None = None
        self._heard_at: float | None = None

    def poll(self) -> bool:
        """Take what is new; whether there was anything."""
        if self._reader is not None and self._reader.replaced:
            self._reader.close()
            self._reader, self.state, self._heard_at = None, LiveState(), None
        if self._reader is None:
            self._reader = self._opened()
        if self._reader is None:
            return False
        found = False
        for record in self._reader.records():
            self.state.take(record)
            found = True
        if found:
            self._heard_at = self._clock()
        return found

    def close(self) -> None:
        """Let go of the log; again is fine."""
        if self._reader is not None:
            self._reader.close()

    @property
    def has_begun(self) -> bool:
        """Whether there is a header."""
        return self.state.header is not None

    @property
    def note(self) -> str:
        """What to say of a run that has been quiet for long; "" otherwise."""
        if self._heard_at is None or self.state.end is not None:
            return ""
        quiet_s = self._clock() - self._heard_at
        return f"silent for {shown_time(quiet_s)}" if quiet_s >= _QUIET_S else ""

    def _opened(self) -> RunLogReader | None:
        try:
            return RunLogReader(self._path)
        except RunLogError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
