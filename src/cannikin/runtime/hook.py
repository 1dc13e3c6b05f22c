"""The DDP communication hook: measure, weight, sum over ranks, measure again (paper, sections 4.3 and 4.4).

No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.
"""

from typing import Any

import torch
import torch.distributed as dist

from cannikin.runtime.step import StepInProgress
from cannikin.runtime.timing import Clock

__all__ = ["HookState", "share_of", "weighted_hook"]

Future = torch.futures.Future[torch.Tensor]


class HookState:
    """What the hook needs between buckets: the group to sum over, the clock, and the step in progress."""

    def __init__(self, group: Any, clock: Clock) -> None:
        self.group = group
        self.clock = clock
        self.step: StepInProgress | None = None
        self.item_sums: dict[int, Any] = {}  # step -> a call that waits for the number of items on all ranks


def weighted_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined,unused-ignore]
    """Sum the buckets of all ranks, each multiplied by its rank's weight; note the times and the squared norms.

    g = sum_i r_i g_i
    """
    step, clock = state.step, state.clock
    index, buffer = bucket.index(), bucket.buffer()
    if step is None:  # a backward that no batch of ours belongs to: plain DDP
        return _sum(state, buffer.div_(dist.get_world_size(state.group)))
    weight = share_of(state, step) if step.weight is None else step.weight
    step.make_room(index + 1)
    step.ready[index] = clock.mark()
    step.synced = True
    if (step.entry.is_padding or weight == 0) and not step.accumulated:
        buffer.zero_()  # not multiplied by 0: 0 x NaN is NaN
    else:
        if step.take_norms:
            step.local_sqnorms[index] = _sqnorm(buffer)
        if weight != 1.0:
            buffer.mul_(weight)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)

    def finish(future: Any) -> torch.Tensor:
        step.done[index] = clock.host_mark()
        result: torch.Tensor = future.value()[0]
        if step.take_norms:
            # A place for each bucket, no running sum: gloo ends two all-reduces at once, on two threads.
            step.global_sqnorms[index] = _sqnorm(result)
        return result

    result: Future = work.get_future().then(finish)
    return result


def share_of(state: HookState, step: StepInProgress) -> float:
    """This rank's part of the step's samples, or of its items, for whose sum over ranks this waits once."""
    entry = step.entry
    if entry.items is None:
        return entry.local_batch / entry.total_batch
    if step.item_total is None:
        step.item_total = float(state.item_sums.pop(entry.step)())
        by_samples, by_items = entry.local_batch * step.item_total, entry.items * entry.total_batch
        # The estimate counts samples: it would take a share of items for noise.
        step.take_norms = step.take_norms and abs(by_items - by_samples) < 0.01 * by_samples
    return entry.items / step.item_total if step.item_total > 0 else 0.0


def _sum(state: HookState, buffer: torch.Tensor) -> Future:
    result: Future = dist.all_reduce(buffer, group=state.group, async_op=True).get_future().then(lambda f: f.value()[0])
    return result


def _sqnorm(buffer: torch.Tensor) -> torch.Tensor:
    """|buffer|^2, in float32 at least."""
    if buffer.dtype in (torch.float16, torch.bfloat16):
        buffer = buffer.float()
    return torch.dot(buffer, buffer)
