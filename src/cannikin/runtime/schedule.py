"""Learning-rate schedules driven by progress, not steps, so that a growing batch neither stretches nor cuts them."""

from __future__ import annotations

import math
from typing import Any

from cannikin.errors import InvalidInputError

__all__ = ["ProgressScheduler", "by_progress"]


class ProgressScheduler:
    """Steps a torch scheduler once for every unit of progress; call `step()` after every optimizer step."""

    def __init__(self, scheduler: Any, model: Any, unit_steps: float) -> None:
        self.scheduler = scheduler
        self._model = model
        self._unit_steps = unit_steps
        self._taken = math.floor(model.progress / unit_steps)

    def step(self) -> None:
        """Bring the scheduler up to the model's progress."""
        units = math.floor(self._model.progress / self._unit_steps + 1e-9)
        while self._taken < units:
            self.scheduler.step()
            self._taken += 1

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state and the units it has taken."""
        return {"scheduler": self.scheduler.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.scheduler.load_state_dict(state["scheduler"])
        self._taken = int(state["taken"])


def by_progress(scheduler: Any, model: Any, unit: str = "step") -> ProgressScheduler:
    """Drive any torch scheduler by the model's progress.

    Args:
        scheduler: counts steps or epochs at the initial batch, as it would without cannikin.
        model: a HeteroDataParallel or the engine `attach` returned, with its loader built for `unit="epoch"`.
        unit: "step" or "epoch", what one `scheduler.step()` stands for.
    """
    if unit == "step":
        return ProgressScheduler(scheduler, model, 1.0)
    if unit != "epoch":
        raise InvalidInputError(f"unit={unit!r} is unknown: choose step or epoch")
    coordinator = getattr(model, "engine", model).coordinator
    if coordinator is None or coordinator.job.num_samples is None:
        raise InvalidInputError('unit="epoch" needs a HeteroDataLoader of known length: build the loader first')
    return ProgressScheduler(scheduler, model, coordinator.job.num_samples / coordinator.job.batch_size)
