"""SIGTERM, heard at once and obeyed between steps.

A launcher that wants its machine back sends SIGTERM and waits, torchrun, Slurm and Kubernetes alike for 30 seconds by
default. A rank that hears it finishes its step, so that a snapshot can be taken. One that comes to no step, because it
waits for a rank that is gone or because training is over, leaves as it would have left without us.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from typing import Any

EXIT_STATUS = 128 + signal.SIGTERM
"""What a process ends with that SIGTERM has ended, 143."""

_PATIENCE_S = 10.0  # beyond a few steps' time, without any step

_log = logging.getLogger("cannikin")


class Ending:
    """Whether this process was asked to end; to be made in the main thread, and closed.

    Args:
        before_leaving: called in another thread where no step has come in time.

    Attributes:
        asked: whether SIGTERM has come.
        can_hear: False where Python lets nobody hear signals, which is outside of the main thread.
    """

    def __init__(self, before_leaving: Callable[[], None]) -> None:
        self.asked = False
        self._patience_s = _PATIENCE_S
        self._moved_s = time.monotonic()
        self._before_leaving = before_leaving
        self.can_hear = threading.current_thread() is threading.main_thread()
        if not self.can_hear:
            return
        self._previous = signal.signal(signal.SIGTERM, self._hear)
        # A handler of Python's waits while the main thread waits for other ranks; the number written here does not.
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="cannikin-ending", daemon=True).start()
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(own()))

    def step(self) -> None:
        """Take note that training has come to the end of a step."""
        self._moved_s = time.monotonic()

    def allow(self, step_s: float) -> None:
        """Wait longer for steps that take this long."""
        self._patience_s = _PATIENCE_S + 5 * step_s

    def _hear(self, number: int, frame: Any) -> None:
        self.asked = True
        if callable(self._previous):
            self._previous(number, frame)

    def _watch(self) -> None:
        """Wait for the signal, then for steps, in a thread."""
        heard = b""
        while signal.SIGTERM not in heard:
            heard = os.read(self._reading, 64)
            if not heard:
                os.close(self._reading)
                return
            if self._previous_fd >= 0:  # somebody else's, such as asyncio's
                with suppress(OSError):
                    os.write(self._previous_fd, heard)
        self.asked, self._moved_s = True, time.monotonic()
        while (left_s := self._moved_s + self._patience_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.5))
        if self.can_hear:
            _log.warning(
                "SIGTERM, and no step has ended for %.0f s: leaving without a new snapshot; call snapshot.save() "
                "before what takes long between two passes, such as an evaluation",
                self._patience_s,
            )
            with suppress(Exception):
                self._before_leaving()
            os._exit(EXIT_STATUS)

    def close(self) -> None:
        """Leave signals as they were, from the main thread; where another one listens since, once that is closed."""
        if not self.can_hear:
            return
        self.can_hear = False
        self._restore()

    def _restore(self) -> None:
        if signal.getsignal(signal.SIGTERM) != self._hear:
            return  # whoever listens since passes signals on to this one, and would put it back
        signal.set_wakeup_fd(self._previous_fd)
        signal.signal(signal.SIGTERM, self._previous)
        os.close(self._writing)  # ends the thread
        before = getattr(self._previous, "__self__", None)
        if isinstance(before, Ending) and not before.can_hear:
            before._restore()


def _forget(ending: Ending | None) -> None:
    """Let a child of this process die of SIGTERM, and not write into its parent's pipe."""
    if ending is not None and ending.can_hear:
        ending.close()


class PatientWorker:
    """Lets a worker of a DataLoader outlive SIGTERM, as `worker_init_fn`.

    Slurm sends it to every process of a rank, as torchrun does once it has got it itself, and a worker that dies takes
    the rank's last step with it. It ends with its rank, which it watches; and at SIGTERM where its rank's program comes
    to its end, as by an error: Python's multiprocessing sends it there, and then waits for the worker without a limit.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own
        self._is_over = RawValue("b", 0)  # in memory that the rank shares with its workers
        # multiprocessing calls this before it ends the workers, in programs as in processes that it has started.
        Finalize(self, setattr, (self._is_over, "value", 1), exitpriority=0)

    def __call__(self, worker: int) -> None:
        """Prepare this worker process."""
        if self._own is not None:
            self._own(worker)
        signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: Any) -> None:
        if self._is_over.value:
            os._exit(0)  # as under torch's own handler: the rank would raise for a worker with another status
