"""An engine's part by script, for loaders without a training: `HeteroDataLoader(..., model=ScriptedFeed(script))`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from cannikin.core.policies.plans import make_plan
from cannikin.core.values import Job, Plan
from cannikin.runtime.entry import BatchEntry, BatchSource
from cannikin.runtime.waiting import BatchQueue

Script = Sequence[Sequence[int]]  # the local batches of each step, taken in turn


class ScriptedFeed:
    """An engine that plans by script and writes down what it is told."""

    def __init__(self, script: Script, rank: int = 0, has_batch_norm: bool = False) -> None:
        self.rank = rank
        self.world_size = len(script[0])
        self.next_step = 0
        self.has_batch_norm = has_batch_norm
        self.batch_dim = 0
        self.entries: list[BatchEntry] = []
        self.queue = BatchQueue()  # stays empty: every batch counts as trained on
        self.epochs_begun = self.epochs_ended = 0
        self.num_own_steps = 0  # that some rank has samples of, where each has a stream of its own
        self.gave_up = False
        self.alike = True  # whether ranks have the same samples
        self.job: Job | None = None
        self.settings: dict[str, int] = {}
        self._script = script

    def bind(self, source: BatchSource, job: Job, settings: dict[str, int]) -> ScriptedFeed:
        # Not the source itself: loaders with persistent workers are slow to stop (5 s each) as cyclic garbage.
        self.source, self.job, self.settings = weakref.ref(source), job, settings
        return self

    def plan_at(self, step: int) -> Plan:
        return make_plan(step, tuple(self._script[step % len(self._script)]), reason="by script")

    def hand_out(self, entry: BatchEntry, batch: object = None) -> bool:
        assert entry.step == self.next_step
        if entry.own and entry.is_padding and entry.step >= self.num_own_steps:
            return False
        self.entries.append(entry)
        self.next_step += 1
        return True

    def end_stream(self) -> None:
        pass

    def give_up(self) -> None:
        self.gave_up = True

    def begin_epoch(self, epoch: int, position: int, lists: int = 0) -> None:
        self.epochs_begun += 1
        self.lists = lists

    def between_steps(self, *, is_over: bool | None) -> float:
        return 0.0

    def complete_epoch(self) -> None:
        pass

    @property
    def place(self) -> None:
        """Every batch counts as trained on."""

    def settle_statistics(self) -> None:
        pass

    def refuse(self, error: Exception) -> None:
        pass

    def agrees(self, number: int) -> bool:
        return self.alike

    def pass_is_out(self) -> None:
        pass

    def end_epoch(self) -> None:
        self.epochs_ended += 1
