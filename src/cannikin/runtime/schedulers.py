"""Drives torch's schedulers of the learning rate by a model's progress, not by how often the script calls them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from cannikin.core.lr import Progress
from cannikin.errors import InvalidInputError
from cannikin.runtime.options import engine_of


class ProgressScheduler:
    """Steps a torch scheduler once per unit of progress; call `step()` after every optimizer step.

    One with an end of its own (OneCycleLR) stops there: the last step, or the last pass of `model.epochs(n)`, may make
    more progress than was missing.

    Args:
        scheduler, engine, unit: as of `by_progress`.
        count: how many of the scheduler's steps so many units stand for; None is one each.
    """

    def __init__(self, scheduler: Any, engine: Any, unit: str, *, count: Callable[[int], int] | None = None) -> None:
        self.scheduler = scheduler
        self._engine = engine
        self._unit = unit
        self._count = count
        self._taken = self._units()
        self._left_at = self._place
        self._resumed_from: Progress | None = engine.resumed_from
        self._num_beyond: int | None = 0  # units beyond the scheduler's end; None once that was said

    def _units(self, progress: Progress | None = None) -> int:
        units = math.floor(self._engine.elapsed(self._unit, progress) + 1e-9)
        return units if self._count is None else self._count(units)

    @property
    def _place(self) -> int | None:
        return getattr(self.scheduler, "last_epoch", None)

    def step(self) -> None:
        """Bring the scheduler up to the model's progress."""
        self._resume()
        self._catch_up(self._units())
        self._left_at = self._place

    def _resume(self) -> None:
        """Go on from where the scheduler was when the model's state was saved, where it has been put there by itself.

        A script that saves the torch scheduler's own state loads it apart from ours, before or after the model's. One
        that saves none leaves it at its beginning, from where it catches up.
        """
        resumed_from = self._engine.resumed_from
        if resumed_from is not self._resumed_from:
            self._resumed_from = resumed_from
            if self._place != self._left_at:
                self._taken = self._units(resumed_from)

    def _catch_up(self, units: int) -> None:
        if self._num_beyond and self._taken < units and self._engine.goal is None and self._engine.rank == 0:
            self._num_beyond = None
            warnings.warn(
                f"{type(self.scheduler).__name__} has taken its total_steps={self.scheduler.total_steps} and training "
                f"goes on, now at a progress of {units}: the learning rate stays at the last one; end the loop at "
                "`model.progress >= total_steps`, or make the schedule longer",
                RuntimeWarning,
                stacklevel=2,
            )
        while self._taken < units:
            self._taken += 1
            if self._is_at_end:
                self._num_beyond = None if self._num_beyond is None else self._num_beyond + 1
            else:
                self.scheduler.step()

    @property
    def _is_at_end(self) -> bool:
        """Whether the scheduler is at its last rate: OneCycleLR's next one is higher, and after that it raises."""
        length = getattr(self.scheduler, "total_steps", None)
        return isinstance(length, int) and self.scheduler.last_epoch >= length - 1

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and the units it has taken."""
        return {"scheduler": self.scheduler.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, or the scheduler's own state, of a run that had no other."""
        if "taken" in state:
            self.scheduler.load_state_dict(state["scheduler"])
            self._taken = int(state["taken"])
        else:
            self.scheduler.load_state_dict(state)
            self._taken = self._units()
        self._left_at, self._resumed_from = self._place, self._engine.resumed_from

    def __getattr__(self, name: str) -> Any:
        """Return what else a scheduler has, such as `get_last_lr()`, which trainers log, or `optimizer`."""
        if name == "scheduler":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def by_progress(scheduler: Any, model: Any, unit: str = "step") -> ProgressScheduler:
    """Drive any torch scheduler by the model's progress, so that a growing batch neither stretches nor cuts it.

    Args:
        scheduler: counts steps or epochs at the initial batch, as it would without cannikin.
        model: a HeteroDataParallel or the engine `attach` returned, with its loader built for `unit="epoch"`.
        unit: "step" or "epoch", what one `scheduler.step()` stands for: a step of the optimizer, over however many
            batches that pile up for it, or a pass over the data.
    """
    if unit not in ("step", "epoch"):
        raise InvalidInputError(f"unit={unit!r} is unknown: choose step or epoch")
    engine = engine_of(model)
    if unit == "epoch" and (engine.job is None or engine.job.num_samples is None):
        raise InvalidInputError('unit="epoch" needs a HeteroDataLoader of known length: build the loader first')
    return ProgressScheduler(scheduler, engine, unit)
