"""Two ways to watch a run: `LiveView` as its observer, on rank 0's terminal, and `FollowedRun` by its log.

model = cannikin.HeteroDataParallel(net, optimizer, observers=[cannikin.LiveView()])
"""

from __future__ import annotations

import io
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, ConsoleDimensions

from cannikin.errors import RunLogError
from cannikin.live.footer import Footer
from cannikin.live.panel import LivePanel, status_line
from cannikin.live.state import LiveState
from cannikin.runlog import EventRecord, Record, RunLogReader
from cannikin.words import clock as shown_time
from cannikin.words import printable

_REFRESH_S = 0.5  # a panel is drawn at most this often,
_SHARE = 0.005  # and in at most this share of the time
_QUIET_S = 15.0  # without a record: a run that evaluates, or one that is no more


class LiveView:
    """Shows a run where its first process runs; pass it in `observers=`, on every rank, and rank 0 shows it.

    On a terminal a panel stays below whatever the script prints, its own progress bars included. Elsewhere (a file, a
    batch system's log) there is one line every `every_s` seconds, and one when a rank changes its speed. It is drawn
    when records come, at most twice per second and in at most half a percent of the time, by no thread. The panel
    stays as it is when the run ends, or at `close`; after an error it goes, so that the error is what is seen last.

    Args:
        stream: where to; where left out, standard error or standard output, whichever is a terminal, else standard
            error.
        every_s: seconds between two lines where there is no terminal.
        clock: seconds, for tests.

    Example:
        >>> from cannikin.runlog import Header, JobInfo, WindowRecord
        >>> view = LiveView(sys.stdout, clock=lambda: 0.0)
        >>> view.write(Header(cannikin_version="1", started="", policy="even", world_size=2, job=JobInfo(batch_size=8)))
        >>> view.write(WindowRecord(first_step=0, num_steps=5, num_valid=5, total_batch=8, local_batches=(4, 4),
        ...                         step_ms=20.0))
        cannikin: step 5, total batch 8 = 4+4, step 20 ms
    """

    def __init__(
        self, stream: TextIO | None = None, *, every_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = LiveState()
        self._stream, self._every_s, self._clock = stream, every_s, clock
        self._console: Console | None = None
        self._footer: Footer | None = None
        self._name = object()  # by which the footer knows its part; not the view, which may go before the footer
        self._drawn_at = self._said_at = -float("inf")
        self._wait_s = _REFRESH_S
        self._closed = False
        self._closer: weakref.finalize[..., LiveView] | None = None

    def write(self, event: Record, /) -> None:
        """Take a record of the run; the first is its header."""
        self.state.take(event)
        if self._closed:
            return
        ended = isinstance(event, EventRecord) and event.kind == "end"
        news = event.text if isinstance(event, EventRecord) and event.kind == "changed_speed" else ""
        if self._begin() is not None:
            self._draw(at_once=ended)
        else:
            self._say(news, at_once=ended)
        if ended:
            self.close()

    def close(self) -> None:
        """Leave what is shown as it is, and show nothing more; may be called again."""
        self._closed = True
        if self._footer is not None:
            if self.state.window is not None:
                self._draw(at_once=True)
            self._footer.leave(self._name, keep=True)
        if self._closer is not None:
            self._closer.detach()

    def _begin(self) -> Footer | None:
        """Look for a terminal, at the first record: only rank 0 gets one."""
        if self._console is None:
            standard = [stream for stream in (sys.stderr, sys.stdout) if stream is not None]
            terminals = [stream for stream in standard if _is_terminal(stream)]
            self._stream = self._stream or next(iter([*terminals, *standard]), io.StringIO())
            self._console = Console(file=self._stream, force_terminal=_is_terminal(self._stream))
            if _is_terminal(self._stream):
                self._footer = Footer.of(self._stream, terminals)
                # At exit without an end (an error, Ctrl-C) the footer goes, and what was printed last stays in sight.
                self._closer = weakref.finalize(self, self._footer.leave, self._name)
        return self._footer

    def _draw(self, *, at_once: bool) -> None:
        began = self._clock()
        if not at_once and began - self._drawn_at < self._wait_s:
            return
        assert self._console is not None
        assert self._footer is not None
        self._console.size = ConsoleDimensions(*self._footer.size)
        with self._console.capture() as captured:
            self._console.print(LivePanel(self.state), crop=False)  # the panel has its width
        self._footer.show(self._name, captured.get().rstrip("\n").split("\n"))
        self._drawn_at = self._clock()
        self._wait_s = max(_REFRESH_S, (self._drawn_at - began) / _SHARE)

    def _say(self, news: str, *, at_once: bool) -> None:
        now = self._clock()
        due = self.state.window is not None and (at_once or now - self._said_at >= self._every_s)
        if due:
            self._said_at = now
        if news:
            print(f"cannikin: step {self.state.step:,}, {printable(news)}", file=self._stream, flush=True)
        if due:
            print(status_line(self.state), file=self._stream, flush=True)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except (AttributeError, ValueError):  # no file at all, or a closed one
        return False


class FollowedRun:
    """A run's state, as far as its log tells, also before there is a log and while it is being written.

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
        """Take what is new, and return whether there was anything."""
        if self._reader is not None and self._reader.replaced:
            self._reader.close()
            self._reader, self.state, self._heard_at = None, LiveState(), None
        if self._reader is None:
            try:
                self._reader = RunLogReader(self._path)
            except RunLogError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    return False
                raise
        found = False
        for record in self._reader.records():
            self.state.take(record)
            self._heard_at, found = self._clock(), True
        return found

    def close(self) -> None:
        """Let go of the log; may be called again."""
        if self._reader is not None:
            self._reader.close()

    @property
    def note(self) -> str:
        """What to say of a run that has been quiet for long; "" otherwise."""
        if self._heard_at is None or self.state.end is not None:
            return ""
        quiet_s = self._clock() - self._heard_at
        return f"silent for {shown_time(quiet_s)}" if quiet_s >= _QUIET_S else ""
