"""What reduces gradients: DDP with our communication hook, which measures, weights, sums over ranks, measures again.

(Paper, sections 4.3 and 4.4.) The training loop, the planner and the loader know only `Reducer`. `sharded` has the
other one, for modules under `fully_shard`.

No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cannikin.errors import InvalidInputError
from cannikin.runtime.device import Device, carrier
from cannikin.runtime.passage import Passage
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.update import Variance
from cannikin.runtime.weighting import weighted_

Future = torch.futures.Future[torch.Tensor]
VarianceOf = Callable[[Sequence[torch.Tensor]], Variance | None]

_HALVES = (torch.float16, torch.bfloat16)  # sums of many numbers do not fit into these
_PREMULTIPLIED = (torch.float32, torch.float64)


class Reducer(Protocol):
    """Reduces the gradients of one module, weighted, and writes into the step in progress what it saw.

    Of each reduction a step gets the moments at which it was ready and done (`ready`, `done`), and the squared norms
    of this rank's gradient and of the sum (`noted`, by the columns of `wire`).
    """

    group: Any  # the ranks to sum over
    num_first_steps: int  # first steps whose times do not count: DDP rebuilds its buckets after them
    step: StepInProgress | None  # gradients from now on are this step's
    unmatched: bool  # the last gradients were of a forward that no batch belongs to
    bucket_bytes: list[int]  # what the last step's reductions carried
    name_missing: Callable[[RuntimeError], None]  # raises a better error where it can
    keeps_piles: bool  # gradients that pile up are out of the optimizer's sight, and of zero_grad's
    runs_together: bool  # forward has collectives: every rank must run as many, whatever its memory

    def syncs(self, module: Any) -> bool:
        """Return whether the module's next backward reduces, rather than piling gradients up (`no_sync`)."""

    def no_sync(self, module: Any) -> AbstractContextManager[None]:
        """Return a context in which the module's gradients pile up instead of being reduced."""

    def new_passage(self) -> Passage | None:
        """Return what the next step notes its layers in, where ranks wait for each other at every one of them."""

    def sum_weighted(self, buffer: torch.Tensor, weight: float) -> dist.Work:
        """Begin to sum a buffer times this rank's weight over the ranks of the group; see `weighted` for 0."""

    def compare_with_previous(self) -> None:
        """Also take the product with the gradient of the step before: all that one rank alone can learn noise from."""

    @property
    def compares(self) -> bool:
        """Whether that product is taken, for which norms must be taken in every step."""


class DdpReducer:
    """DDP's buckets, each multiplied by this rank's weight and summed.

        g = sum_i r_i g_i

    It is the hook's state, which DDP's C++ side keeps, so it must not hold the module: neither would ever be freed.

    Args:
        ddp: the module, without a communication hook so far.
        device: takes the marks.
        comm_wrapper: one of DDP's that compress (`fp16_compress_wrapper`), or None.
        variance_of: for norms of the preconditioned gradient, the variance of these parameters' gradients.
    """

    keeps_piles = runs_together = False

    def __init__(
        self,
        ddp: DistributedDataParallel,
        device: Device,
        *,
        comm_wrapper: Any = None,
        variance_of: VarianceOf | None = None,
    ) -> None:
        self.group: Any = ddp.process_group
        self.num_first_steps = 2 if ddp.static_graph else 1
        self.step: StepInProgress | None = None
        self.unmatched = False
        self.bucket_bytes: list[int] = []
        self.name_missing: Callable[[RuntimeError], None] = lambda error: None  # raises a better error where it can
        self._world_size = dist.get_world_size(self.group)
        self._mark, self._end_of = device.mark, device.end_marker(self.group)
        self._hold, self._aside = device.hold, device.aside
        self._variance_of = variance_of
        self._previous: dict[int, torch.Tensor] | None = None  # the last step's buckets, where one rank is alone
        self._rank = dist.get_rank(self.group)
        self._options = dist.AllreduceOptions()  # of a sum
        self._by_nccl = carrier(self.group, device.torch_device) == "nccl"
        self._register(ddp, comm_wrapper)

    def _register(self, ddp: Any, comm_wrapper: Any) -> None:
        if getattr(ddp, "_use_python_reducer", False):
            raise InvalidInputError(
                'torch._dynamo.config.optimize_ddp = "python_reducer" reduces gradient by gradient in compiled code, '
                "where they cannot be weighted: leave optimize_ddp as it is, or set it to True, before DDP is made"
            )
        hook = DdpReducer._reduce if comm_wrapper is None else comm_wrapper(DdpReducer._reduce)

        def cannikin_hook(state, bucket):  # type: ignore[no-untyped-def]
            # DDP refuses a bf16 wrapper, by its name, where there is no CUDA; gloo carries bf16 well.
            return hook(state, bucket)

        try:
            ddp.register_comm_hook(self, cannikin_hook)
        except RuntimeError as error:
            raise InvalidInputError(
                "this DDP module has a communication hook already, and takes only one: "
                "pass a compression wrapper as comm_wrapper= instead of registering it"
            ) from error

    def syncs(self, module: Any) -> bool:
        return bool(module.require_backward_grad_sync)

    def no_sync(self, module: Any) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = module.no_sync()
        return context

    def new_passage(self) -> None:
        return None

    def compare_with_previous(self) -> None:
        self._previous = {}

    @property
    def compares(self) -> bool:
        return self._previous is not None

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined,unused-ignore]
        """Sum the buckets of all ranks, each multiplied by its rank's weight; note the times and the squared norms."""
        step = self.step
        index, buffer, is_last = bucket.index(), bucket.buffer(), bucket.is_last()
        self.unmatched = step is None or step.is_stale or step.has_bucket(index)
        if step is None or self.unmatched:  # a backward that no batch of ours belongs to: plain DDP
            return self._mean(buffer)
        del self.bucket_bytes[index:]  # buckets come in order; DDP makes others after the first steps
        self.bucket_bytes.append(buffer.nbytes)
        step.make_room(index + 1)
        step.ready[index] = self._mark()
        step.synced = True
        share = step.share()  # after the mark: it may wait for other ranks' numbers, and stops where they do not fit
        weight = share if step.weight is None else step.weight
        take_norms, variance = step.take_norms, None
        if take_norms and self._variance_of is not None:
            variance = self._variance_of(bucket.parameters())
            take_norms = variance is not None
            step.norms_missing = step.norms_missing or not take_norms
        if step.entry.is_padding and not step.keeps_earlier:
            weight = 0.0
        if weight and take_norms and not step.uneven_items:
            step.noted["local_sqnorm", index] = dot(buffer, buffer, variance)
        try:
            work = self.sum_weighted(buffer, weight)
        except RuntimeError as error:
            self.name_missing(error)
            raise
        mark_end = None if self._end_of is None else self._end_of(work)
        if mark_end is None:
            step.done[index] = work
        reads_sum = index % self._world_size == self._rank  # all ranks have the same sum: they share the reading

        def finish(future: Any) -> torch.Tensor:
            try:
                if mark_end is not None:
                    step.done[index] = mark_end()
                result: torch.Tensor = future.value()[0]
            except RuntimeError as error:
                self.name_missing(error)
                raise
            if reads_sum and take_norms:
                self._note_sum(step, index, result, variance)
            elif reads_sum and is_last and step.loss_scale is None:  # a GradScaler notices what is not finite
                with self._aside():
                    step.sample = sample_of(result)
            return result

        result: Future = work.get_future().then(finish)
        return result

    def _note_sum(self, step: StepInProgress, index: int, result: torch.Tensor, variance: Variance | None) -> None:
        """Note the squared norm of a bucket's sum, beside the training."""
        with self._aside():
            if variance is not None:
                self._hold(variance.of_elements)
            # A place for each bucket, no running sum: gloo ends two all-reduces at once, on two threads.
            step.noted["global_sqnorm", index] = dot(result, result, variance)
            if self._previous is not None:
                product = compare(self._previous, index, result, variance)
                if product is not None:
                    step.noted["previous_dot", index] = product

    def sum_weighted(self, buffer: torch.Tensor, weight: float) -> dist.Work:
        """Begin to sum a buffer times this rank's weight: `dist.all_reduce` without what Python does around it.

        NCCL multiplies on its way, which saves a pass over every bucket; it would round the weight itself to a half.
        """
        multiplies = self._by_nccl and buffer.dtype in _PREMULTIPLIED  # on every rank, whatever its weight
        if not (multiplies and weight):
            weighted_(buffer, weight)
            weight = 1.0
        if multiplies:
            options = dist.AllreduceOptions()
            options.reduceOp = dist._make_nccl_premul_sum(weight)  # type: ignore[attr-defined]
            work: dist.Work = self.group.allreduce([buffer], options)
            return work
        if buffer.is_complex():
            work = dist.all_reduce(buffer, group=self.group, async_op=True)
        else:
            work = self.group.allreduce([buffer], self._options)
        return work

    def _mean(self, buffer: torch.Tensor) -> Future:
        """Take the mean over ranks, as plain DDP does."""
        work = self.sum_weighted(buffer, 1 / self._world_size)
        mark_end = None if self._end_of is None else self._end_of(work)

        def finish(future: Any) -> torch.Tensor:
            if mark_end is not None:
                mark_end()
            result: torch.Tensor = future.value()[0]
            return result

        result: Future = work.get_future().then(finish)
        return result


def dot(left: torch.Tensor, right: torch.Tensor, variance: Variance | None) -> torch.Tensor:
    """Return sum(left * right / variance), in float32 at least."""
    if left.dtype in _HALVES:
        left, right = left.float(), right.float()
    if variance is None:
        return torch.dot(left, right)
    return torch.dot(left / variance.of_elements.to(left.dtype), right) * variance.common


def sample_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sum over 64 stretches of it: not finite where one of them is not, and as good as free.

    Of the last bucket, which has the first layers: what is not finite anywhere in backward comes down to them.
    """
    size = gradient.numel()
    if size > 64 * 16:
        gradient = gradient.as_strided((64, 16), (size // 64, 1), gradient.storage_offset())
    return gradient.sum(dtype=torch.float32 if gradient.dtype in _HALVES else None)


def compare(
    previous: dict[int, torch.Tensor], index: int, bucket: torch.Tensor, variance: Variance | None
) -> torch.Tensor | None:
    """Return g . g' with the bucket of the step before, which this one takes the place of."""
    before = previous.get(index)
    if before is None or before.shape != bucket.shape or before.dtype != bucket.dtype:  # DDP has rebuilt its buckets
        previous[index] = bucket.clone()
        return None
    product = dot(before, bucket, variance)
    before.copy_(bucket)
    return product
