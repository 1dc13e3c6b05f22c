"""The DDP communication hook: measure, weight, sum over ranks, measure again (paper, sections 4.3 and 4.4).

No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cannikin.runtime.step import StepInProgress
from cannikin.runtime.timing import Clock

__all__ = ["HookState", "share_of", "weighted_hook"]

Future = torch.futures.Future[torch.Tensor]

_HALVES = (torch.float16, torch.bfloat16)  # sums of many numbers do not fit into these


class HookState:
    """What the hook needs between buckets.

    Args:
        group: the ranks to sum over.
        clock: takes the marks.
        inverse_variance: for norms of the preconditioned gradient, 1/v of these parameters as one flat tensor.
    """

    def __init__(
        self,
        group: Any,
        clock: Clock,
        inverse_variance: Callable[[Sequence[torch.Tensor]], torch.Tensor | None] | None = None,
    ) -> None:
        self.group = group
        self.clock = clock
        self.inverse_variance = inverse_variance
        self.step: StepInProgress | None = None
        self.bucket_bytes: list[int] = []  # what the last step's all-reduces carried
        self.unmatched = False  # the gradients are of a forward that no batch belongs to
        self.item_sums: dict[int, Any] = {}  # step -> a call that waits for the number of items on all ranks
        self.previous: dict[int, torch.Tensor] | None = None  # the last step's buckets, where one rank is alone
        # NCCL's continuation runs in the order of a stream, gloo's on a host thread of its own.
        self.reads_sum = dist.get_rank(group) == 0  # all ranks have the same sum: rank 0 measures it for them
        self.mark_done = clock.mark if dist.get_backend(group) == "nccl" else clock.host_mark
        self._options = dist.AllreduceOptions()  # of a sum

    def all_reduce(self, buffer: torch.Tensor) -> Any:
        """Begin to sum a buffer over ranks: `dist.all_reduce` without what Python does around it in every step."""
        if buffer.is_complex():
            return dist.all_reduce(buffer, group=self.group, async_op=True)
        return self.group.allreduce([buffer], self._options)


def weighted_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined,unused-ignore]
    """Sum the buckets of all ranks, each multiplied by its rank's weight; note the times and the squared norms.

    g = sum_i r_i g_i
    """
    step, clock = state.step, state.clock
    index, buffer, is_last = bucket.index(), bucket.buffer(), bucket.is_last()
    state.unmatched = step is None or step.has_bucket(index)
    if step is None or state.unmatched:  # a backward that no batch of ours belongs to: plain DDP
        return _sum(state, buffer.div_(dist.get_world_size(state.group)))
    del state.bucket_bytes[index:]  # buckets come in order; DDP makes others after the first steps
    state.bucket_bytes.append(buffer.nbytes)
    weight = share_of(state, step) if step.weight is None else step.weight
    step.make_room(index + 1)
    step.ready[index] = clock.mark()
    step.synced = True
    take_norms, scale = step.take_norms, None
    if take_norms and state.inverse_variance is not None:
        scale = state.inverse_variance(bucket.parameters())
        take_norms = scale is not None
    if (step.entry.is_padding or weight == 0) and not step.accumulated:
        buffer.zero_()  # not multiplied by 0: 0 x NaN is NaN
    else:
        if take_norms:
            step.local_sqnorms[index] = _dot(buffer, buffer, scale)
        if weight != 1.0:
            buffer.mul_(weight)
    work = state.all_reduce(buffer)

    def finish(future: Any) -> torch.Tensor:
        step.done[index] = state.mark_done()
        result: torch.Tensor = future.value()[0]
        if not state.reads_sum:
            return result
        if take_norms:
            if scale is not None and scale.is_cuda:  # torch may run this on a stream of its own
                scale.record_stream(torch.cuda.current_stream(scale.device))
            # A place for each bucket, no running sum: gloo ends two all-reduces at once, on two threads.
            step.global_sqnorms[index] = _dot(result, result, scale)
            if state.previous is not None:
                step.previous_dots[index] = _compare(state.previous, index, result, scale)
        elif is_last and step.loss_scale is None:  # a GradScaler notices by itself what is not finite
            step.sample = _sample(result)
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
    result: Future = state.all_reduce(buffer).get_future().then(lambda future: future.value()[0])
    return result


def _dot(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """sum(left * right * scale), in float32 at least."""
    if left.dtype in _HALVES:
        left, right = left.float(), right.float()
    return torch.dot(left, right) if scale is None else torch.dot(left * right, scale.to(left.dtype))


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """A sum over 64 stretches of it: not finite where one of them is not, and as good as free.

    Of the last bucket, which has the first layers: what is not finite anywhere in backward comes down to them.
    """
    size = gradient.numel()
    if size > 64 * 16:
        gradient = gradient.as_strided((64, 16), (size // 64, 1), gradient.storage_offset())
    return gradient.sum(dtype=torch.float32 if gradient.dtype in _HALVES else None)


def _compare(
    previous: dict[int, torch.Tensor], index: int, bucket: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor | None:
    """g . g' with the bucket of the step before, which this one takes the place of."""
    before = previous.get(index)
    if before is None or before.shape != bucket.shape or before.dtype != bucket.dtype:  # DDP has rebuilt its buckets
        previous[index] = bucket.clone()
        return None
    dot = _dot(before, bucket, scale)
    before.copy_(bucket)
    return dot
