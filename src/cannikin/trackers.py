"""A run's numbers for trackers of experiments: what they are called, and observers that pass them on.

    model = cannikin.HeteroDataParallel(net, optimizer, observers=[cannikin.TensorBoardObserver(writer)])

The names stay: `SCALARS` is the whole list, and docs/observers.md shows the same table. {rank} is a rank's number,
{name} a metric's. Prometheus has them as it wants them, all of them gauges, times in its base unit:

    cannikin/step_ms           cannikin_step_seconds
    cannikin/rank0/wait_ms     cannikin_rank_wait_seconds{rank="0",device="...",host="..."}
    cannikin/eval/accuracy     cannikin_eval{metric="accuracy"}

The user opens and closes writers and runs, never we. Observers are asked on rank 0 only, so the other ranks may pass
None instead of a writer or run.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cannikin.errors import InvalidInputError
from cannikin.runlog import EventRecord, Header, NoiseRecord, PlanRecord, Record, WindowRecord
from cannikin.runlog.times import RankTimes, numbers_of, rank_times, speed_of, step_of, use_of
from cannikin.whole_files import whole_file

if TYPE_CHECKING:
    from prometheus_client import Metric

_OUR_LABELS = ("rank", "device", "host", "metric")
_RANK_SCALAR = re.compile(r"cannikin/rank(\d+)/(\w+)")


class Scalar(NamedTuple):
    """What a name means, with its unit; "" where it is a plain number."""

    unit: str
    meaning: str


SCALARS = {
    "cannikin/step": Scalar("steps", "steps trained when the numbers beside it were measured"),
    "cannikin/step_ms": Scalar("ms", "measured time of a step, the median of a window"),
    "cannikin/predicted_step_ms": Scalar("ms", "time of a step that the last plan expects"),
    "cannikin/total_batch": Scalar("samples", "total batch B"),
    "cannikin/samples_per_s": Scalar("samples/s", "throughput, B over the time of a step"),
    "cannikin/goodput": Scalar("samples/s", "throughput times statistical efficiency"),
    "cannikin/use": Scalar("", "throughput over what all devices would do alone, 0 to 1"),
    "cannikin/even_speed": Scalar("", "predicted speed of DDP's even split over the plan's; 0 where it does not fit"),
    "cannikin/noise_scale": Scalar("samples", "gradient noise scale"),
    "cannikin/noise_scale_low": Scalar("samples", "lower confidence limit of the noise scale"),
    "cannikin/noise_scale_high": Scalar("samples", "upper confidence limit of the noise scale"),
    "cannikin/lr_factor": Scalar("", "factor on the learning rate"),
    "cannikin/progress": Scalar("passes", "passes over the data at the initial batch"),
    "cannikin/skipped_steps": Scalar("steps", "steps of the window that the optimizer did not take"),
    "cannikin/epoch": Scalar("", "number of the pass over the data, from 0"),
    "cannikin/rank{rank}/local_batch": Scalar("samples", "local batch of the rank"),
    "cannikin/rank{rank}/compute_ms": Scalar("ms", "forward, backward and optimizer"),
    "cannikin/rank{rank}/communication_ms": Scalar("ms", "all-reduce that no computing hid"),
    "cannikin/rank{rank}/wait_ms": Scalar("ms", "waiting for a slower rank"),
    "cannikin/rank{rank}/loading_ms": Scalar("ms", "waiting for data"),
    "cannikin/eval/{name}": Scalar("", "a metric of the user's own, by its name"),
}


def scalars(record: Record, *, initial_batch: int | None = None) -> dict[str, float]:
    """Return the finite numbers of a record, by the names of `SCALARS`; {} where it has none.

    Args:
        record: any.
        initial_batch: B0, the header's `job.batch_size`, without which there is no goodput.

    Example:
        >>> plan = PlanRecord(step=5, first_step=9, total_batch=8, local_batches=(6, 2),
        ...                   predicted_step_ms=12.5, phase="optperf", reason="")
        >>> scalars(plan)
        {'cannikin/predicted_step_ms': 12.5}
    """
    if isinstance(record, WindowRecord):
        times = rank_times(record)
        found = {**_run_scalars(record, initial_batch, times), **_rank_scalars(record, times)}
    elif isinstance(record, PlanRecord):
        found = {
            "cannikin/predicted_step_ms": record.predicted_step_ms,
            "cannikin/even_speed": record.even_speed,
        }
    elif isinstance(record, EventRecord) and record.kind == "eval":
        found = {f"cannikin/eval/{name}": value for name, value in numbers_of(record).items()}
    elif isinstance(record, EventRecord) and record.kind == "epoch":
        found = {"cannikin/epoch": numbers_of(record).get("epoch")}
    else:
        found = {}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _run_scalars(
    window: WindowRecord, initial_batch: int | None, times: list[RankTimes | None]
) -> dict[str, float | None]:
    noise, speed = window.noise or NoiseRecord(), speed_of(window, initial_batch)
    return {
        "cannikin/step": step_of(window),
        "cannikin/step_ms": window.step_ms,
        "cannikin/total_batch": window.total_batch,
        "cannikin/samples_per_s": speed.samples_per_s,
        "cannikin/goodput": speed.goodput,
        "cannikin/use": use_of(window.local_batches, times),
        "cannikin/noise_scale": noise.noise_scale,
        "cannikin/noise_scale_low": noise.low,
        "cannikin/noise_scale_high": noise.high,
        "cannikin/lr_factor": window.lr_factor,
        "cannikin/progress": window.progress,
        "cannikin/skipped_steps": window.num_skipped,
    }


def _rank_scalars(window: WindowRecord, times: list[RankTimes | None]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for rank, (batch, spent) in enumerate(zip(window.local_batches, times, strict=True)):
        found[f"cannikin/rank{rank}/local_batch"] = batch
        if spent is not None:
            found |= {f"cannikin/rank{rank}/{part}": part_ms for part, part_ms in spent._asdict().items()}
    return found


# Observers.


class _Throttled:
    """Turns records into scalars, and logs them at their steps with `_log`, which an observer has of its own.

    Windows that come sooner than `every_s` after the last one taken are left out. A plan belongs to the window before
    it, and goes or stays with that one. The run's last window is always taken.
    """

    def __init__(self, every_s: float, max_ranks: int, clock: Callable[[], float]) -> None:
        self._every_s, self._max_ranks, self._clock = every_s, max_ranks, clock
        self._taken_at = -float("inf")
        self._left_out: WindowRecord | None = None
        self._initial_batch: int | None = None
        self._latest_step = 0

    def write(self, event: Record, /) -> None:
        """Take a record of the run."""
        if isinstance(event, Header):
            self._initial_batch, self._latest_step = event.job.batch_size, event.first_step  # a resume may go back
        self._latest_step = max(self._latest_step, step_of(event))
        self._log(self._scalars(event), step_of(event))

    def _log(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _scalars(self, record: Record) -> dict[str, float]:
        if isinstance(record, WindowRecord):
            now = self._clock()
            if now - self._taken_at < self._every_s:
                self._left_out = record
                return {}
            self._taken_at, self._left_out = now, None
        elif self._left_out is not None and isinstance(record, PlanRecord):
            return {}
        elif self._left_out is not None and isinstance(record, EventRecord) and record.kind == "end":
            record, self._left_out = self._left_out, None
        found = scalars(record, initial_batch=self._initial_batch)
        if isinstance(record, WindowRecord) and len(record.local_batches) > self._max_ranks:
            return {name: value for name, value in found.items() if not name.startswith("cannikin/rank")}
        return found


class TensorBoardObserver(_Throttled):
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
        super().__init__(every_s, max_ranks, clock)
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise InvalidInputError(
                f"{type(writer).__name__} has no add_scalar(): give a SummaryWriter of torch.utils.tensorboard"
            )
        self._writer = writer

    def _log(self, values: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


class ScalarObserver(_Throttled):
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
        super().__init__(every_s, max_ranks, clock)
        self._method = getattr(run, "log_metrics", None) or getattr(run, "log", None)
        if run is not None and not callable(self._method):
            raise InvalidInputError(
                f"{type(run).__name__} has neither log_metrics(dict, step) nor log(dict, step): give a run of W&B, the "
                "module mlflow, or an object with one of these"
            )
        self._by_name = self._method is not None and _takes_step(self._method)
        self._with_step = with_step

    def _log(self, values: dict[str, float], step: int) -> None:
        if not values or self._method is None:
            return
        if not self._with_step:
            self._method(values)
        elif self._by_name:
            self._method(values, step=self._latest_step)
        else:
            self._method(values, self._latest_step)


def _takes_step(method: Callable[..., Any]) -> bool:
    """Return whether the step may be given by its name; True for what cannot be looked into, too."""
    try:
        inspect.signature(method).bind({}, step=0)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # a signature that Python does not know
    return True


class PrometheusObserver:
    """Keeps a file of a run's latest numbers for node_exporter's textfile collector; it is replaced as a whole.

    Args:
        path: the file, ending in .prom for node_exporter, in the folder its textfile collector reads.
        labels: put on every line; needed where several runs on one host are collected, which must differ.
        every_s: least seconds between two writes.
        clock: seconds, for tests.

    Raises:
        InvalidInputError: a label's name is none that Prometheus takes.
        ImportError: prometheus_client is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        labels: Mapping[str, str] | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            import prometheus_client  # noqa: F401
        except ModuleNotFoundError as error:
            advice = "PrometheusObserver needs prometheus_client: pip install 'cannikin[prometheus]'"
            raise ImportError(advice, name=error.name) from error
        for name in labels or {}:
            if not (name.isascii() and name.isidentifier()) or name.startswith("__") or name in _OUR_LABELS:
                raise InvalidInputError(
                    f"label {name!r}: use letters, digits and _, no digit first, and not rank, device, host or metric"
                )
        self.path = Path(path)
        self._labels = dict(labels or {})
        self._every_s, self._clock = every_s, clock
        self._written_at = -float("inf")
        self._header: Header | None = None
        self._latest: dict[str, float] = {}
        self._window: WindowRecord | None = None

    def write(self, event: Record, /) -> None:
        """Take a record of the run."""
        if isinstance(event, Header):
            self._header, self._latest, self._window = event, {}, None
        elif isinstance(event, WindowRecord):
            self._window = event  # taken apart only when it is written
        else:
            self._latest |= scalars(event)
        ended = isinstance(event, EventRecord) and event.kind == "end"
        now = self._clock()
        if ended or now - self._written_at >= self._every_s:
            from prometheus_client import generate_latest

            self._written_at = now
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = generate_latest(self).decode()
            with whole_file(self.path) as file:
                file.write(text)

    def collect(self) -> list[Metric]:
        """Return the latest numbers as prometheus_client collects them: the families, each in one piece."""
        from prometheus_client import Metric

        header, values = self._header, self._latest
        if self._window is not None:
            batch = None if header is None else header.job.batch_size
            values = {**scalars(self._window, initial_batch=batch), **values}
        families: dict[str, Metric] = {}
        if header is not None:
            info = {"policy": header.policy, "version": header.cannikin_version, "world_size": str(header.world_size)}
            families["cannikin_info"] = Metric("cannikin_info", "What runs; always 1", "gauge")
            families["cannikin_info"].add_sample("cannikin_info", {**self._labels, **info}, 1.0)
        for name, value in values.items():
            entry, own = _entry(name, header)
            family = entry.replace("{rank}", "").replace("/{name}", "").replace("/", "_").replace("_ms", "_seconds")
            if family not in families:
                families[family] = Metric(family, SCALARS[entry].meaning, "gauge")
            scaled = value * 1e-3 if entry.endswith("_ms") else value
            families[family].add_sample(family, {**self._labels, **own}, scaled)
        return list(families.values())


def _entry(name: str, header: Header | None) -> tuple[str, dict[str, str]]:
    """Return the entry of `SCALARS` that a name belongs to, and the labels that tell its lines apart."""
    found = _RANK_SCALAR.fullmatch(name)
    if found is None:
        metric = name.removeprefix("cannikin/eval/")
        return (name, {}) if metric == name else ("cannikin/eval/{name}", {"metric": metric})
    rank = int(found[1])
    own = {"rank": str(rank)}
    if header is not None and rank < len(header.ranks):
        own |= {"device": header.ranks[rank].device, "host": header.ranks[rank].host}
    return f"cannikin/rank{{rank}}/{found[2]}", own
