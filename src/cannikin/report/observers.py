"""Observers that pass a run's numbers on to trackers of experiments; the user opens and closes these, never we.

    model = cannikin.HeteroDataParallel(net, optimizer, observers=[cannikin.TensorBoardObserver(writer)])

Observers are asked on rank 0 only, so the other ranks may pass None instead of a writer or run. The names are those of
`cannikin.report.scalars`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from cannikin.errors import InvalidInputError
from cannikin.report.scalars import scalars, step_of
from cannikin.runlog import EventRecord, Header, PlanRecord, Record, WindowRecord

__all__ = ["ScalarObserver", "TensorBoardObserver"]


class _Throttled:
    """Turns records into scalars, leaving out windows that come sooner than `every_s` after the last one taken.

    A plan belongs to the window before it, and goes or stays with that one. The run's last window is always taken.
    """

    def __init__(self, every_s: float, max_ranks: int, clock: Callable[[], float]) -> None:
        self._every_s, self._max_ranks, self._clock = every_s, max_ranks, clock
        self._taken_at = -float("inf")
        self._left_out: WindowRecord | None = None
        self._header: Header | None = None

    def scalars(self, record: Record) -> dict[str, float]:
        """What to pass on of a record."""
        if isinstance(record, Header):
            self._header = record
        if isinstance(record, WindowRecord) and not self._takes_now():
            self._left_out = record
            return {}
        if isinstance(record, WindowRecord):
            self._left_out = None
        if isinstance(record, PlanRecord) and self._left_out is not None:
            return {}
        if isinstance(record, EventRecord) and record.kind == "end" and self._left_out is not None:
            record, self._left_out = self._left_out, None
        found = scalars(record, initial_batch=None if self._header is None else self._header.job.batch_size)
        if isinstance(record, WindowRecord) and len(record.local_batches) > self._max_ranks:
            return {name: value for name, value in found.items() if not name.startswith("cannikin/rank")}
        return found

    def _takes_now(self) -> bool:
        now = self._clock()
        if now - self._taken_at < self._every_s:
            return False
        self._taken_at = now
        return True


class TensorBoardObserver:
    """Adds a run's numbers to the user's `SummaryWriter`, by step.

    Args:
        writer: anything with `add_scalar(name, value, step)`; we never close it.
        every_s: least seconds between two windows that are passed on.
        max_ranks: with more ranks than this, the numbers of single ranks are left out.
        clock: seconds, for tests.

    Raises:
        InvalidInputError: the writer has no `add_scalar`.
    """

    def __init__(
        self, writer: Any, *, every_s: float = 15.0, max_ranks: int = 16, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise InvalidInputError(
                f"{type(writer).__name__} has no add_scalar(): give a SummaryWriter of torch.utils.tensorboard"
            )
        self._writer = writer
        self._source = _Throttled(every_s, max_ranks, clock)

    def write(self, event: Record, /) -> None:
        """Take a record of the run."""
        if self._writer is None:
            return
        step = step_of(event)
        for name, value in self._source.scalars(event).items():
            self._writer.add_scalar(name, value, step)


class ScalarObserver:
    """Logs a run's numbers with the user's own run of a tracker: W&B, MLflow, or anything that logs a dict at a step.

    A `log_metrics(dict, step)` (MLflow, Lightning's loggers) is used where there is one, else `log(dict, step)` (W&B).
    Steps never go back, which W&B would not take: what belongs to an earlier step is logged at the latest one.

    Args:
        run: such as what `wandb.init()` returned, or the module `mlflow` with a run open; we never close it.
        every_s: least seconds between two windows that are passed on: raise it for a tracker that waits for a server.
        max_ranks: with more ranks than this, the numbers of single ranks are left out.
        with_step: False passes no step, for a script that counts W&B's steps itself; `cannikin/step` is logged anyway.
        clock: seconds, for tests.

    Raises:
        InvalidInputError: the run has neither method.

    Example:
        >>> class Tracker:
        ...     def log(self, values, step):
        ...         print(step, values)
        >>> ScalarObserver(Tracker()).write(EventRecord(step=7, kind="eval", data={"accuracy": 0.5}))
        7 {'cannikin/eval/accuracy': 0.5}
    """

    def __init__(
        self,
        run: Any,
        *,
        every_s: float = 5.0,
        max_ranks: int = 16,
        with_step: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = None if run is None else _logger(run)
        self._by_name = self._log is not None and _takes_name(self._log, "step")
        self._with_step = with_step
        self._source = _Throttled(every_s, max_ranks, clock)
        self._step = 0

    def write(self, event: Record, /) -> None:
        """Take a record of the run."""
        if isinstance(event, Header):
            self._step = event.first_step  # a resumed run may go back
        self._step = max(self._step, step_of(event))
        values = self._source.scalars(event)
        if not values or self._log is None:
            return
        if not self._with_step:
            self._log(values)
        elif self._by_name:
            self._log(values, step=self._step)
        else:
            self._log(values, self._step)


def _logger(run: Any) -> Callable[..., Any]:
    for name in ("log_metrics", "log"):
        method = getattr(run, name, None)
        if callable(method):
            found: Callable[..., Any] = method
            return found
    raise InvalidInputError(
        f"{type(run).__name__} has neither log_metrics(dict, step) nor log(dict, step): give a run of W&B, the module "
        "mlflow, or an object with one of these"
    )


def _takes_name(method: Callable[..., Any], name: str) -> bool:
    """Whether an argument may be given by this name; said of what cannot be looked into, too."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        or (parameter.name == name and parameter.kind is not parameter.POSITIONAL_ONLY)
        for parameter in parameters
    )
