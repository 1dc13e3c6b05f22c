"""One adapter per kind of device: its clock, its copies to the host, its memory, its name, and who carries its sums.

A kind that is not in `DEVICES` is refused: the host's clock would time it wrongly, and nobody would notice. Moments are
read late so that nothing waits for the device. Only durations on one rank are ever formed; clocks of different ranks
are never compared.
"""

from __future__ import annotations

import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from cannikin.errors import InvalidInputError


class HostCopy(Protocol):
    """Values of a device on their way to the host."""

    def read(self) -> list[float]:
        """Return the values; called a step later, so that it waits for nothing."""


class Memory(Protocol):
    """A device's memory as this process sees it, in bytes."""

    def allocated(self) -> int:
        """Return what tensors use now."""

    def peak(self) -> int:
        """Return the most that they ever used."""

    def peak_taken(self) -> int:
        """Return the most that was ever taken for them, with the gaps between them."""

    def limit(self) -> int:
        """Return what this process may take in all."""

    def release(self) -> None:
        """Give back what no tensor uses."""


class Device(Protocol):
    """What the runtime asks of the device that a model is on.

    Marks are moments in the device's order of work, turned into seconds `lag` steps later at least. `slow_at_new_sizes`
    is whether a step with a local batch never seen before takes longer, since kernels are chosen and memory is found.
    `memory` is None where there is nothing to learn from; `memory_bytes` is its size.
    """

    torch_device: torch.device
    backend: str  # torch's, that carries its collectives where the user names none
    lag: int
    slow_at_new_sizes: bool
    memory: Memory | None
    memory_bytes: int | None

    @property
    def name(self) -> str:
        """What tells one kind of device from another, such as "NVIDIA A100-SXM4-80GB" or a processor's name."""

    def data_sheet(self) -> dict[str, Any]:
        """Return what the device says of itself, by the names of `runlog.RankInfo`; {} where it says nothing."""

    def mark(self) -> Any:
        """Return this moment in the device's order of work."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks; called once both have certainly passed."""

    def end_marker(self, group: Any) -> Callable[[dist.Work], Callable[[], Any]] | None:
        """Return what takes an all-reduce of this group that has begun, and gives what is called once it has ended.

        That is called in the future's continuation, has backward's stream wait for the sum where torch does not, and
        returns a mark of the end. None where the work itself is the mark, since it knows how long it took.
        """

    def ends_s(self, start: Any, ready_s: list[float], ends: list[Any], ahead: tuple[Any, Any] | None) -> list[float]:
        """Return when all-reduces that became ready at these times ended, both after `start`.

        Called once an event that follows the last of them has passed. `ahead` is another sum that the first of them had
        to wait for: a mark of when it was ready, and its work.
        """

    def aside(self) -> AbstractContextManager[None]:
        """Return a context whose work follows that queued now, and comes before what is queued after it.

        For continuations, which torch runs on any of 32 streams: each would keep memory of its own for what is computed
        on it, with cuBLAS up to 32 MiB.
        """

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until the work queued now is done with it."""

    def copy(self, scalars: list[torch.Tensor]) -> HostCopy:
        """Begin to copy a few scalars to the host; nothing waits for it before `read`."""


class _OnHost:
    """Scalars that are on the host already."""

    def __init__(self, scalars: list[torch.Tensor]) -> None:
        self._scalars = scalars

    def read(self) -> list[float]:
        return [scalar.item() for scalar in self._scalars]


class Cpu:
    """The host itself: work is done when the call returns."""

    backend = "gloo"
    lag = 0
    slow_at_new_sizes = False
    memory: Memory | None = None
    memory_bytes: int | None = None

    def __init__(self, device: torch.device | None = None) -> None:
        self.torch_device = device or torch.device("cpu")

    @property
    def name(self) -> str:
        num_threads = torch.get_num_threads()
        return f"{_processor()}, {num_threads} thread{'s' if num_threads > 1 else ''}"

    def data_sheet(self) -> dict[str, Any]:
        """Return nothing: what else runs on a host decides its speed."""
        return {}

    def mark(self) -> float:
        """Return seconds on the host's clock."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the difference of two marks."""
        return end - start

    def end_marker(self, group: Any) -> Callable[[dist.Work], Callable[[], float]]:
        _known_carrier(group, self.torch_device)
        return lambda work: time.perf_counter

    def ends_s(
        self, start: float, ready_s: list[float], ends: list[float], ahead: tuple[Any, Any] | None
    ) -> list[float]:
        return [end - start for end in ends]

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hold(self, tensor: torch.Tensor) -> None:
        """Do nothing: work is done when the call returns."""

    def copy(self, scalars: list[torch.Tensor]) -> HostCopy:
        return _OnHost(scalars)


class Cuda:
    """An NVIDIA or AMD GPU: marks are events."""

    backend = "nccl"
    lag = 1  # the host may be ahead of the device by most of a step
    slow_at_new_sizes = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.memory: Memory | None = _CudaMemory(device)
        self.memory_bytes: int | None = torch.cuda.get_device_properties(device).total_memory
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # for marks that wait for a copy
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        """See `Device`; a share of a card (MPS) is a device of its own."""
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        return torch.cuda.get_device_name(self.torch_device) + (f", {share}% share" if share else "")

    def data_sheet(self) -> dict[str, Any]:
        """See `Device`; where the process has a share of a card (MPS), only that share's multiprocessors count."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        clock_khz = getattr(properties, "clock_rate", None)  # older versions of torch do not tell
        return {
            "capability": None if torch.version.hip else (properties.major, properties.minor),  # AMD numbers otherwise
            "num_multiprocessors": properties.multi_processor_count,
            "clock_mhz": clock_khz / 1e3 if clock_khz else None,
            "uuid": str(getattr(properties, "uuid", "")),
        }

    def mark(self) -> torch.cuda.Event:
        """Return an event on the device's current stream."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream())
        return event

    def _stream(self) -> torch.cuda.Stream:
        """Return the current stream; torch's own call takes 5 microseconds, half of all that a mark took."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw not in self._streams:
            self._streams[raw] = torch.cuda.current_stream(self.torch_device)
        return self._streams[raw]

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events."""
        for event in (start, end):
            event.synchronize()  # returns at once where it is `lag` steps old and the host not further ahead
        return float(start.elapsed_time(end)) / 1e3

    def end_marker(self, group: Any) -> Callable[[dist.Work], Callable[[], Any]] | None:
        """See `Device`; NCCL's continuation runs in the order of a stream, gloo's on a host thread of its own.

        An event of ours behind each of NCCL's kernels would cost more than all the rest of the hook: 0.4 ms of the
        GPU's time per bucket (H200, three ranks). NCCL's own events, in its own stream, cost nothing that was seen.
        """
        if _known_carrier(group, self.torch_device) != "nccl":
            return self._end_on_host
        return None if _knows_durations(group, self.torch_device) else lambda work: self.mark

    def _end_on_host(self, work: dist.Work) -> Callable[[], torch.cuda.Event]:
        """Return what is called when gloo has the sum on the host and has begun to copy it to the device.

        Its future knows nothing of that copy: nobody would wait for it, and the optimizer might read half of a sum. An
        event on backward's stream would queue behind backward's kernels and read late.
        """
        stream = self._stream()

        def end() -> torch.cuda.Event:
            with torch.cuda.stream(stream):
                work.synchronize()  # the stream waits, the host does not
            with torch.cuda.stream(self._beside):
                work.synchronize()
                return self.mark()

        return end

    def ends_s(self, start: Any, ready_s: list[float], ends: list[Any], ahead: tuple[Any, Any] | None) -> list[float]:
        """See `Device`; NCCL begins with one sum when it is ready and the one before has ended."""
        if not all(isinstance(end, dist.Work) for end in ends):
            return [self.seconds(start, end) for end in ends]
        free = -math.inf  # when NCCL was done with the sum before
        if ahead is not None:
            mark, work = ahead
            free = _duration_s(work) - self.seconds(mark, start)
        found: list[float] = []
        for ready, work in zip(ready_s, ends, strict=True):
            free = max(ready, free) + _duration_s(work)
            found.append(free)
        return found

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `Device`."""
        current = self._stream()
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            yield
        current.wait_stream(self._aside)

    def hold(self, tensor: torch.Tensor) -> None:
        """See `Device`; torch may run a continuation on a stream of its own."""
        tensor.record_stream(self._stream())

    def copy(self, scalars: list[torch.Tensor]) -> HostCopy:
        """See `Device`; in two kernels for all of them."""
        return _FromCuda(scalars) if scalars and scalars[0].is_cuda else _OnHost(scalars)


def _duration_s(work: Any) -> float:
    """Return what NCCL's own events say."""
    return float(work._get_duration()) / 1e3


class _FromCuda:
    """Scalars of a GPU, copied into pinned memory: a copy to any other would wait for the device here."""

    def __init__(self, scalars: list[torch.Tensor]) -> None:
        values = torch.stack(scalars).double()
        self._pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._pinned.copy_(values, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def read(self) -> list[float]:
        self._copied.synchronize()
        values: list[float] = self._pinned.tolist()
        return values


class _CudaMemory:
    """`torch.cuda`'s own statistics."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def peak_taken(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def limit(self) -> int:
        """Return what is free now and what torch has taken already, within a fraction that the user set."""
        free, total = torch.cuda.mem_get_info(self._device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(self._device)
        return int(min(free + torch.cuda.memory_reserved(self._device), fraction * total))

    def release(self) -> None:
        torch.cuda.empty_cache()


DEVICES: dict[str, type[Cpu] | type[Cuda]] = {"cpu": Cpu, "cuda": Cuda}


def find_device(device: torch.device) -> Device:
    """Return the adapter of the device that a model is on."""
    return kind_of(device)(device)


def name_of(device: Device) -> str:
    """Return what a device is called: CANNIKIN_DEVICE in the environment overrides its own name."""
    return os.environ.get("CANNIKIN_DEVICE") or device.name


def kind_of(device: torch.device) -> type[Cpu] | type[Cuda]:
    """Return the kind of adapter, which also knows the backend of a group that is to be made."""
    if device.type not in DEVICES:
        raise InvalidInputError(
            f"the model is on {str(device)!r}: cannikin can time {' and '.join(DEVICES)} devices only, and would "
            "measure this one wrongly; move the model to one of those"
        )
    return DEVICES[device.type]


def carrier(group: Any, device: torch.device) -> str:
    """Return the backend that carries this device's collectives over a group, whatever the group is called.

    A group that was made without naming a backend has one for each kind of device. One that torch did not make itself,
    such as torchft's, is asked for its own name.
    """
    try:
        backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    except (KeyError, ValueError):
        return str(group._get_backend(device).name())
    return str(backends.get(device.type, "none"))


def _known_carrier(group: Any, device: torch.device) -> str:
    """Return who carries gradients, and say what is not known of times where it is neither gloo nor NCCL."""
    name = carrier(group, device)
    if name not in ("gloo", "nccl"):
        warnings.warn(
            f"gradients on {device.type!r} are summed by {name!r}, which cannikin has never been tried with: forward "
            "and backward are measured as ever, but the end of a sum is read from the host's clock, so communication "
            "times, and splits that rest on them, may be wrong; use nccl or gloo where you can",
            RuntimeWarning,
            stacklevel=6,
        )
    return name


def _knows_durations(group: Any, device: torch.device) -> bool:
    """Have a group of NCCL time its work, and return whether it does; all ranks ask, by a sum of one number."""
    try:
        group._enable_collectives_timing()
        work = group.allreduce([torch.zeros(1, device=device)])
        work.wait()
        torch.cuda.synchronize(device)  # once, when the model is wrapped
        return float(work._get_duration()) >= 0.0
    except (AttributeError, RuntimeError):
        return False


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
