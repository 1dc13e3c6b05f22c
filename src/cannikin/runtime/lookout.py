"""Looks out for ranks that do not come: a thread that says whom this rank waits for (`core.absence` has the words).

Every rank writes where it is into the store that its process group was made with, twice per second and beside the
training, which neither waits for it nor tells it anything: the thread reads what the step's hooks write down anyway.
A rank that has not moved for a while reads what the others wrote, and says so. It ends nothing: that is the group's
time limit's to do, or the user's.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from cannikin.core.absence import BEFORE, NOT_COME, Phase, Place, Sighting, awaited, lost, missing, parted, waiting
from cannikin.errors import InvalidInputError, RankLostError

if TYPE_CHECKING:  # a loop waits by way of `wire`, which has a lookout
    from cannikin.runtime.loop import Loop

_log = logging.getLogger("cannikin")

VARIABLE = "CANNIKIN_PATIENCE_S"
_PATIENCE_S = 30.0  # without a move, before a rank speaks
_BEAT_S = 0.5
_COLLECTIVE = ("onnection", "Timed out", "timed out", "timeout", "NCCL", "gloo", "ocket")  # in errors of torch's
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_COLLECTIVES = tuple(
    str(Path(dist.__file__).parent / name) for name in ("distributed_c10d.py", "_functional_collectives.py")
)
_is_ending = False  # this program comes to its end
_STANDARD = sysconfig.get_paths()["stdlib"]


def patience_s() -> float:
    """Return after how many seconds without a move a rank says whom it waits for; 0 is never."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else _PATIENCE_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidInputError(f"{VARIABLE}={text!r} must be a number of seconds of at least 0; 0 says nothing")
    return seconds


def place_of(loop: Loop, *, is_meeting: bool) -> Place:
    """Return how far a loop has come, from what its hooks have written down."""
    step = loop.step
    if step is None:
        return Place(-1, Phase.MEETING) if is_meeting else BEFORE
    number = step.entry.step
    if step.optimizer_end is not None:
        return Place(number, Phase.MEETING if is_meeting else Phase.AFTER)
    if step.optimizer_start is not None:
        return Place(number, Phase.OPTIMIZER, is_meeting=is_meeting)
    if step.backward_began:
        return Place(number, Phase.BACKWARD, sum(mark is not None for mark in step.ready), is_meeting)
    return Place(number, Phase.FORWARD, is_meeting=is_meeting)


class Lookout:
    """Says where this rank is, and speaks up where it waits for others.

    Args:
        store: what carries it, for these ranks alone.
        rank, world_size: of this rank among them.
        limit: the group's time limit.
    """

    def __init__(self, store: Any, rank: int, world_size: int, limit: timedelta) -> None:
        self.is_meeting = False  # this rank waits in what ranks exchange beside their gradients
        self._rank, self._world_size = rank, world_size
        self._limit_s = limit.total_seconds()
        self._patience_s = patience_s()
        self._beat_s = max(_BEAT_S, world_size / 200)  # hundreds of ranks share one store
        self._beat_s = min(self._beat_s, self._patience_s / 8) or _BEAT_S
        self._store = _connection_of_its_own(store)  # who waits for a key lets nobody else on its connection
        self._thread_id = threading.get_ident()
        self._loop: weakref.ref[Loop] | None = None
        self._closed = threading.Event()
        self._voice: threading.Thread | None = None
        self._reader: threading.Thread | None = None
        self._num_beats = 0
        self._place, self._moved_s = BEFORE, time.monotonic()
        self._said_s = 0.0  # how long this rank had been stuck when it last spoke
        self._waited_for: dict[str, set[int]] = {}  # ranks that did come after all, by the place they came from
        self._heard: dict[int, tuple[str, float]] = {}  # the last words of each rank, and when they changed
        self._read_s: float | None = None  # when reading began, while it goes on
        self._line, self._at_line_s, self._waits = "", time.monotonic(), False  # of the script, and since when
        self._parted: set[str] = set()  # lines at which this rank has spoken while others were at other ones
        self._wanted = False
        self._error: str | None = None
        self._lost: tuple[int, ...] = ()
        if world_size > 1 and self._patience_s > 0:
            self._tell()
            self._voice = threading.Thread(target=self._watch, name="cannikin-lookout", daemon=True)
            self._voice.start()

    def follow(self, loop: Loop) -> None:
        """Say how far this loop has come, until it is gone or `close`; before, a rank is before its first step."""
        if self._voice is None:
            return
        self._moved_s, self._loop = time.monotonic(), weakref.ref(loop)
        atexit.unregister(_note_ending)
        atexit.register(_note_ending)  # what is registered last is called first: before this lookout is closed

    def close(self) -> None:
        """Tell the others how this rank's program ends, or that it has let go of the model, and end the threads."""
        if self._voice is None or self._closed.is_set():
            return
        error = getattr(sys, "last_value", None)  # what nobody caught, where the program comes to its end by it
        if _is_of_collective(error) and self._error is None and (told := self.explain()) is not None:
            print(told, file=sys.stderr)
        self._closed.set()
        for thread in (self._voice, self._reader):
            if thread is not None and thread is not threading.current_thread():  # in which garbage may be collected
                thread.join(1.0)  # Python aborts where a thread comes out of torch while the interpreter ends
        loop = None if self._loop is None else self._loop()
        if loop is not None:  # it may have gone on since the last beat
            self._place = place_of(loop, is_meeting=self.is_meeting)
        end = "failed" if error is not None else "ended" if _is_ending else "let go"
        with suppress(RuntimeError):  # the store is gone, and with it those who might have read
            self._tell(end)

    @property
    def has_lost(self) -> bool:
        """Whether a collective has failed and the error has named a rank."""
        return self._error is not None

    def name_missing(self, error: RuntimeError) -> None:
        """Raise an error that names the rank by whose fault a collective has failed, where that can be told."""
        told = self.explain()
        if told is not None:
            raise RankLostError(f"{told}. torch says: {str(error).strip().splitlines()[0]}") from error

    def note_missing(self, error: BaseException) -> None:
        """Name that rank in a note of an error that is torch's to raise, as where DDP's forward sends buffers."""
        if _is_of_collective(error) and not isinstance(error, RankLostError) and (told := self.explain()) is not None:
            error.add_note(f"cannikin: {told}")

    def explain(self) -> str | None:
        """Return whom this rank has lost, after a collective of it has failed; None where that cannot be told.

        This takes a second or two: a rank that has died looks like one that has just not written yet.
        """
        if self._voice is None or self._error is not None:
            return self._error
        self._wanted = True
        deadline_s = time.monotonic() + 8 * self._beat_s
        while True:
            absent = self._missing(self._sightings(), silence_s=4 * self._beat_s)
            gone = {rank: told for rank, told in absent.items() if "alive" not in told}
            if gone or time.monotonic() > deadline_s:
                break
            time.sleep(self._beat_s / 4)
        at_fault = gone or absent  # who is alive and behind waits for those who are gone, as this rank does
        if at_fault and self._error is None:
            self._error, self._lost = lost(self._rank, self._place, at_fault), tuple(at_fault)
            with suppress(RuntimeError):  # the store is gone, and with it those who might have read
                self._tell()  # at once: this rank may be gone before its next beat, and would be blamed as well
            if self._rank == 0:
                time.sleep(2 * self._beat_s)  # the others read from it whom it has lost, as it may hold the store
        return self._error

    # The thread that speaks. It never waits for the store: writing a key does not.

    def _watch(self) -> None:
        while not self._closed.wait(self._beat_s):
            place, now_s = BEFORE, time.monotonic()
            if self._loop is not None:
                loop = self._loop()
                if loop is None:
                    return
                place = place_of(loop, is_meeting=self.is_meeting)
                del loop
            if place != self._place:
                self._move(place, now_s)
            try:
                self._tell()
            except RuntimeError:  # whoever held the store is gone: a collective's error will follow
                self._read_s = self._read_s or now_s
                return
            stuck_s = now_s - self._moved_s
            if self._wanted or stuck_s >= self._patience_s / 2:
                self._read()
            if stuck_s >= max(self._patience_s, 2 * self._said_s):
                self._speak(stuck_s)
            elif self._said_s and self._line not in self._parted:
                self._speak_of_lines(stuck_s)

    def _move(self, place: Place, now_s: float) -> None:
        if self._said_s:
            _log.info("rank %d goes on after %.0f s, %s", self._rank, now_s - self._moved_s, place)
            for rank, seen in self._sightings().items():
                self._waited_for.setdefault(seen.line, set()).add(rank)
        self._place, self._moved_s, self._said_s = place, now_s, 0.0
        if not self._wanted:
            self._heard.clear()

    def _tell(self, end: str = "") -> None:
        self._num_beats += 1
        now_s = time.monotonic()
        line, self._waits = _line(self._thread_id) if now_s - self._moved_s > self._patience_s / 4 else ("", False)
        if line != self._line:
            self._line, self._at_line_s = line, now_s
        place = self._place
        where = [place.step, place.phase, place.num_buckets, place.is_meeting]
        at_line = [line, now_s - self._at_line_s, self._waits]
        words = [self._num_beats, *where, end, *at_line, self._lost]
        self._store.set(self._key(self._rank), json.dumps(words))

    def _key(self, rank: int) -> str:
        return f"cannikin-lookout-{rank}"

    def _speak(self, stuck_s: float) -> None:
        others = self._sightings()
        absent = self._missing(others, silence_s=self._patience_s / 3)
        if absent:
            known = all("alive" in absent[r] and r in self._waited_for.get(others[r].line, ()) for r in absent)
            text = waiting(self._rank, self._place, stuck_s, absent, self._limit_s)
            _log.log(logging.INFO if known else logging.WARNING, "%s", text)
        elif told := awaited(self._rank, self._place, stuck_s, self._line, others):
            _log.warning("%s", told)
        else:
            _log.info("all ranks have been %s for %.0f s", self._place, stuck_s)
        self._said_s = stuck_s

    def _speak_of_lines(self, stuck_s: float) -> None:
        """Say, once per line, that ranks are as far in training as each other, and elsewhere in the script."""
        others = self._sightings()
        now_s = time.monotonic()
        if len(others) < self._world_size - 1 or self._missing(others, silence_s=self._patience_s / 3):
            return
        if any(seen.place != self._place for seen in others.values()):
            return
        own = Sighting(place=self._place, line=self._line, still_s=now_s - self._at_line_s, waits=self._waits)
        told = parted(self._rank, stuck_s, {**others, self._rank: own}, self._patience_s, self._limit_s)
        if told is not None:
            self._parted.add(self._line)
            _log.warning("%s", told)

    def _missing(self, others: dict[int, Sighting], silence_s: float) -> dict[int, str]:
        """Return whom this rank waits for; others may have lost this rank itself."""
        absent = missing(self._place, others, silence_s=silence_s)
        absent.pop(self._rank, None)
        return absent

    def _sightings(self) -> dict[int, Sighting]:
        """Return what has been heard of the other ranks; where the store does not answer, of who holds it."""
        now_s = time.monotonic()
        began_s = self._read_s
        found = {}
        for rank, (words, changed_s) in list(self._heard.items()):
            if not words:
                found[rank] = Sighting(place=NOT_COME, silent_s=now_s - changed_s)
                continue
            _, step, phase, num_buckets, is_meeting, end, line, still_s, waits, others = json.loads(words)
            place = Place(step, Phase(phase), num_buckets, is_meeting)
            silent_s = 0.0 if began_s is not None else now_s - changed_s
            at_line = {"line": line, "still_s": still_s, "waits": waits}
            found[rank] = Sighting(place=place, end=end, silent_s=silent_s, lost=tuple(others), **at_line)
        if began_s is not None and now_s - began_s > 2 * self._beat_s and self._rank != 0:
            # No answer: of all ranks only the one that holds the store is known to be out of reach.
            known = found.get(0, Sighting(place=BEFORE))
            found[0] = replace(known, silent_s=now_s - began_s)
        return found

    # The thread that reads, which may wait for a store whose holder has stopped.

    def _read(self) -> None:
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._listen, name="cannikin-listener", daemon=True)
            self._reader.start()

    def _listen(self) -> None:
        place = self._place
        with suppress(RuntimeError):
            self._read_s = time.monotonic()
            store = _connection_of_its_own(self._store)
            while place == self._place and not self._closed.wait(0.0):
                self._read_s = time.monotonic()
                for rank in range(self._world_size):
                    if rank != self._rank:
                        key = self._key(rank)  # a key that is not there would be waited for
                        self._hear(rank, store.get(key).decode() if store.check([key]) else "")
                self._read_s = None
                self._closed.wait(self._beat_s / 2)
            self._read_s = None  # also where this rank went on before anything was read

    def _hear(self, rank: int, words: str) -> None:
        if rank not in self._heard or self._heard[rank][0] != words:
            self._heard[rank] = words, time.monotonic()


def _connection_of_its_own(store: Any) -> Any:
    return store.clone() if hasattr(store, "clone") else store


def _note_ending() -> None:
    global _is_ending
    _is_ending = True


def _is_of_collective(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _COLLECTIVE)


def _line(thread_id: int) -> tuple[str, bool]:
    """Return the line of the script at which a thread is, and whether it waits there in a collective of torch's.

    Nothing is told where it cannot be: the thread goes on, and what was a frame may be another object once it is looked
    at.
    """
    try:
        return _line_at(_frame_of(thread_id))
    except (AttributeError, TypeError):
        return "", False


def _line_at(innermost: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line that is neither torch's nor Python's, and whether torch's collectives are inside."""
    frame = innermost
    waits = False
    while frame is not None:
        name = frame.f_code.co_filename
        waits = waits or name.startswith(_COLLECTIVES)
        standard = name.startswith(_STANDARD) and "-packages" not in name
        if not (standard or name.startswith((*_OURS, "<"))):
            break
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "", False
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})", waits


def _frame_of(thread_id: int) -> FrameType | None:
    """Return where a thread is.

    Python holds the lock on its list of threads meanwhile, and would collect garbage under it: a model that goes then
    ends threads, which need that lock, and all of them would wait for ever.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread_id)
    finally:
        if collects:
            gc.enable()
