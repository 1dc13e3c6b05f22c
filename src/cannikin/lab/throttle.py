"""Makes a rank as slow as its device: torch's public hooks around forward and backward, with sleep between real work.

On a GPU the device spins instead (`spin`).

Forward ends no earlier than the device's would. In backward every layer with parameters takes the same part of the
device's time, and its gradients appear when that part has passed: buckets become ready one after another as on a real
device, and all-reduces overlap with the backward of earlier layers. A rank sleeps and does not spin, so that ranks
leave the cores to one another. Only the rank's own work counts against the device's time: backward is over before DDP
waits for other ranks.

Hooks used: the global forward (pre-)hooks, which see every module; a tensor hook on each output, for the moment
backward begins; a tensor hook on each parameter, which runs before DDP hears of its gradient. No full backward hook:
those break modules that work in place.

Under `fully_shard` ranks meet before and after every sharded part, and a sharded parameter's hooks never run: there
each part takes its share of the device's time by itself, between the two (`_ShardedRoot`).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from cannikin.lab.cluster import LabDevice
from cannikin.words import percent

# A shorter rest is left out: the next stretch, or the next step, is not late by it, and a sleep overshoots by as much.
_SHORTEST_SLEEP_S = 1e-4
# Real work is judged over these training forwards; before them DDP rebuilds buckets and allocators warm up.
_JUDGED = range(5, 25)
_MOST_WORK = 1 / 3


class Stretch(Protocol):
    """A stretch of a rank's work that is to last as long as its device would take, `budget_s`."""

    budget_s: float

    def reach(self, share: float = 1.0) -> None:
        """Let this share of the budget pass."""

    @property
    def work_s(self) -> float:
        """The time of real work in it, asked many steps later."""


class Pace:
    """A stretch of time that lasts as long as the device would take: real work counts, and sleep fills the rest.

    Places in the stretch are absolute, so that what one sleep overshoots the next one makes good.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._start_s = clock()
        self._end_s = self._start_s
        self.budget_s = 0.0
        self.slept_s = 0.0

    def reach(self, share: float = 1.0) -> None:
        """Sleep until this share of the budget has passed since the stretch began; not at all if it already has."""
        rest_s = self._start_s + self.budget_s * share - self._clock()
        if rest_s > _SHORTEST_SLEEP_S:
            before_s = self._clock()
            self._sleep(rest_s)
            self.slept_s += self._clock() - before_s
        self._end_s = self._clock()

    @property
    def work_s(self) -> float:
        """The time of real work, not slept, up to the last place reached."""
        return self._end_s - self._start_s - self.slept_s


class Throttle:
    """Slows the training steps of whatever outermost modules the process runs; evaluation keeps its speed.

    `device` may be replaced in mid-run.
    """

    def __init__(
        self,
        device: LabDevice,
        *,
        make_pace: Callable[[], Stretch] = Pace,
        warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self.device = device
        self._pace = make_pace
        self._warn = warn
        self._outermost: torch.nn.Module | None = None
        self._forward: Stretch | None = None
        self._roots: weakref.WeakKeyDictionary[torch.nn.Module, _Root] = weakref.WeakKeyDictionary()
        self._sharded: weakref.WeakKeyDictionary[torch.nn.Module, _ShardedRoot] = weakref.WeakKeyDictionary()
        self._inner: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules inside the roots
        self._num_forwards = 0
        self._judged: list[Stretch] = []
        self._handles: list[Any] = []

    def install(self) -> None:
        """Begin to slow this process."""
        self._handles = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Slow nothing from now on: hooks on parameters wait for a forward."""
        for handle in self._handles:
            handle.remove()
            # torch leaves it in this table, and warns of a global hook whenever something is compiled.
            torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles = []

    def _before_module(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # inside a compiled module, which has these hooks itself
            return
        if self._outermost is None:
            self._outermost = module
            if self._is_training(module) and not self._slows_parts(module):
                self._forward = self._pace()
        elif self._forward is not None and module is _inside(self._outermost):
            self._forward = self._pace()  # DDP may have waited for other ranks' buffers, which is not this rank's work

    def _after_module(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._outermost:
            return
        pace, self._outermost, self._forward = self._forward, None, None
        output, kwargs = rest[-1], rest[0] if len(rest) == 2 else {}
        if pace is None or output is None:  # not a training forward, or it raised
            return
        forward_s, backward_s = self._times_s((args, kwargs))
        self._root(module).expect(output, backward_s)
        pace.budget_s = forward_s
        pace.reach()
        self._judge(pace)
        self._num_forwards += 1

    def _times_s(self, inputs: Any) -> tuple[float, float]:
        """Return what the device takes for forward and for backward of these inputs."""
        num_samples = next((len(tensor) for tensor in _tensors(inputs) if tensor.ndim > 0), 1)
        return self.device.times_s(num_samples=num_samples, forward=self._num_forwards)

    def _slows_parts(self, module: torch.nn.Module) -> bool:
        """Return whether the module's sharded parts slow themselves; hooks on them are set at its first forward."""
        if not isinstance(module, FSDPModule):
            return False
        if module not in self._sharded:
            self._sharded[module] = _ShardedRoot(module, self._begin_sharded, self._pace, self._judge)
            self._inner.update(part for part in module.modules() if part is not module)
        return True

    def _begin_sharded(self, module: torch.nn.Module, inputs: Any) -> tuple[float, float]:
        """Return the times of a forward of a sharded module that begins; none where it is not slowed."""
        if not self._handles or not self._is_training(module):
            return 0.0, 0.0
        times_s = self._times_s(inputs)
        self._num_forwards += 1
        return times_s

    def _is_training(self, module: torch.nn.Module) -> bool:
        # Loss functions have no parameters; a checkpointed part of a root is called once more in backward, on its own.
        return (
            torch.is_grad_enabled()
            and _inside(module).training
            and module not in self._inner
            and any(parameter.requires_grad for parameter in module.parameters())
        )

    def _root(self, module: torch.nn.Module) -> _Root:
        if module not in self._roots:
            self._roots[module] = _Root(module, self._pace, self._judge)
            self._inner.update(part for part in module.modules() if part is not module)
        return self._roots[module]

    def _judge(self, pace: Stretch) -> None:
        """Warn once if real work takes so much of the device's time that speeds are not as asked."""
        if self._num_forwards in _JUDGED:
            self._judged.append(pace)
        elif self._num_forwards == _JUDGED.stop and self._judged:
            budget_s = sum(pace.budget_s for pace in self._judged)
            share = sum(pace.work_s for pace in self._judged) / budget_s if budget_s > 0 else 0.0
            self._judged = []
            if share > _MOST_WORK:
                sample_ms = self.device.sample_s * 1e3
                self._warn(
                    f"cannikin lab: real work takes {percent(share)} of this rank's device time, more than a third: "
                    f"speeds may be off; raise --sample-ms from {sample_ms:.3g} to about "
                    f"{sample_ms * share / _MOST_WORK:.2g}"
                )


class _Root:
    """One outermost module in training: its layers, and its backward while it happens."""

    def __init__(
        self, module: torch.nn.Module, make_pace: Callable[[], Stretch], judge: Callable[[Stretch], None]
    ) -> None:
        self._make_pace, self._judge = make_pace, judge
        self._pace: Stretch | None = None
        self._arrived: set[int] = set()  # layers whose gradient has appeared
        self._begun: set[int] = set()  # forwards that this backward goes through
        self._num_expected = 0  # forwards so far
        parts = (part.parameters(recurse=False) for part in module.modules())
        layers = [layer for part in parts if (layer := [weight for weight in part if weight.requires_grad])]
        self._num_layers = len(layers)  # in the first backward; later, as many as the backward before reached
        for number, layer in enumerate(layers):
            for parameter in layer:
                _hook(parameter, self._arrival_of(number))

    def expect(self, output: Any, backward_s: float) -> None:
        """Expect the backward of this output of a training forward; it is to last `backward_s`."""
        self._close()
        self._num_expected += 1
        number = self._num_expected

        def begin(gradient: torch.Tensor) -> None:
            if self._pace is None or len(self._arrived) >= self._num_layers:
                self._close()
                self._pace = self._make_pace()
            if number not in self._begun:
                self._begun.add(number)
                self._pace.budget_s += backward_s

        for tensor in _tensors(output):
            if tensor.requires_grad:
                _hook(tensor, begin)

    def _arrival_of(self, layer: int) -> Callable[[torch.Tensor], None]:
        def arrive(gradient: torch.Tensor) -> None:
            if self._pace is None:  # a backward that went through no output
                return
            self._arrived.add(layer)
            self._pace.reach(min(1.0, len(self._arrived) / self._num_layers))

        return arrive

    def _close(self) -> None:
        """End the last backward; the next one is expected to reach as many layers."""
        if self._pace is not None and self._arrived:
            self._judge(self._pace)
            self._num_layers = len(self._arrived)
        self._pace = None
        self._arrived = set()
        self._begun = set()


class _ShardedRoot:
    """One outermost module under `fully_shard`: what each of its sharded parts takes, as its share of all layers.

    A part begins once its parameters are there (a hook set after `fully_shard`'s runs after it), and ends before they
    are given back; its backward ends before its gradients are reduced, where its input's gradient is there. The root's
    own layers take their time at the end of forward and at the start of backward. In backward real work comes on top.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        begin: Callable[[torch.nn.Module, Any], tuple[float, float]],
        make_pace: Callable[[], Stretch],
        judge: Callable[[Stretch], None],
    ) -> None:
        self._begin, self._make_pace, self._judge = begin, make_pace, judge
        self._forward_s = self._backward_s = 0.0
        self._paces: dict[torch.nn.Module, Stretch] = {}
        counts = _layers_by_part(module)
        self._shares = {part: count / sum(counts.values()) for part, count in counts.items()}
        module.register_forward_pre_hook(self._before_root, with_kwargs=True)
        module.register_forward_hook(self._after_root, prepend=True)
        for part in self._shares:
            if part is not module:
                part.register_forward_pre_hook(self._before_part, with_kwargs=True)
                part.register_forward_hook(self._after_part, prepend=True)

    def _before_root(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._forward_s, self._backward_s = self._begin(module, (args, kwargs))

    def _after_root(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        backward_s = self._backward_s * self._shares.get(module, 0.0)
        if backward_s > 0:
            rest = self._rest_once(backward_s)
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    _hook(tensor, rest)
        self._rest(self._forward_s * self._shares.get(module, 0.0))

    def _before_part(self, part: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._forward_s == 0:
            return None
        self._paces[part] = self._make_pace()
        rest = self._rest_once(self._backward_s * self._shares[part])
        return _marked(args, rest), {name: _marked(value, rest) for name, value in kwargs.items()}

    def _after_part(self, part: torch.nn.Module, args: Any, output: Any) -> None:
        pace = self._paces.pop(part, None)
        if pace is not None:
            pace.budget_s = self._forward_s * self._shares[part]
            pace.reach()
            self._judge(pace)

    def _rest(self, seconds: float) -> None:
        pace = self._make_pace()
        pace.budget_s = seconds
        pace.reach()

    def _rest_once(self, seconds: float) -> Callable[[torch.Tensor], None]:
        """Return what rests at the first of several gradients that appear together."""
        waiting = [seconds]

        def rest(gradient: torch.Tensor) -> None:
            if waiting:
                self._rest(waiting.pop())

        return rest


def _layers_by_part(module: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """Return how many modules with parameters of their own belong to each sharded part, the nearest around them."""
    counts: dict[torch.nn.Module, int] = {}

    def count(inner: torch.nn.Module, part: torch.nn.Module) -> None:
        part = inner if isinstance(inner, FSDPModule) else part
        if any(weight.requires_grad for weight in inner.parameters(recurse=False)):
            counts[part] = counts.get(part, 0) + 1
        for child in inner.children():
            count(child, part)

    count(module, module)
    return counts


class _Mark(torch.autograd.Function):
    """The identity, whose backward calls `rest` first."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rest: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.rest = rest
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.rest(gradients[0])
        return gradients[0], None


def _marked(value: Any, rest: Callable[[torch.Tensor], None]) -> Any:
    """Return an input, or a tuple of them, with `rest` to be called where its gradient has been computed."""
    if isinstance(value, tuple):
        return tuple(_marked(part, rest) for part in value)
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return _Mark.apply(value, rest)  # type: ignore[no-untyped-call]
    return value


def _hook(tensor: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
    """Have `call` called with the tensor's gradient; a model saved whole leaves the hook behind without a warning."""
    left_behind: Any = torch.utils.hooks.unserializable_hook
    register: Any = tensor.register_hook
    register(left_behind(call))


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module in DDP, or the module itself."""
    inside: torch.nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inside


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))
