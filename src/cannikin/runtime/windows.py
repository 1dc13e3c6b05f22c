"""Windows of steps between ranks: what one rank sends, and the `StepWindow` that rank 0 makes of it.

A rank sends [batches cut ahead, largest batch its memory holds] and for each step [valid, b_i, B, before, load, other,
|g_i|^2, |g|^2, g . g', ready_1..J, done_1..J], as float64; g' is the gradient of the step before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import median

import numpy as np
import torch

from cannikin.core.records import NO_MAX, FloatArray, StepWindow
from cannikin.errors import DisagreementError
from cannikin.runtime.hostcopy import HostCopy
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.timing import Clock

__all__ = ["Report", "check_cuts", "encode_steps", "merge_windows", "start_reading"]

_TOP = 2  # numbers before the steps
_HEAD = 9  # numbers of a step before its buckets


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """What rank 0 makes of all ranks' vectors.

    Args:
        window: for the planner.
        load_s: waiting for data, [S, n]; the window has it too where loading goes on beside the training.
        other_s: the user's own work between steps beyond what is usual, [S, n].
        num_ahead: batches that some rank has cut beyond the one in training.
    """

    window: StepWindow
    load_s: FloatArray
    other_s: FloatArray
    num_ahead: int


def start_reading(steps: list[StepInProgress]) -> HostCopy:
    """Begin to copy all that these steps measured on their device to the host, in two kernels for all of it."""
    return HostCopy([tensor for step in steps for tensor in (*chain(*step.norms()), *_scales(step))])


def _scales(step: StepInProgress) -> list[torch.Tensor]:
    """What a GradScaler multiplied the loss of this step by, and that of the next one; [] where there is none."""
    return [scale for scale in (step.loss_scale, step.next_scale) if scale is not None]


def _read_norms(step: StepInProgress, values: Iterator[float]) -> list[float]:
    """|g_i|^2, |g|^2 and g . g' of a step: NaN where not taken, infinite where the gradient was not finite.

    A GradScaler that lowers its scale after a step has found that in it; else the norms tell, or the sample.
    """
    *norms, sample = ([next(values) for _ in kind] for kind in step.norms())
    scale, after = [next(values) for _ in _scales(step)] or (1.0, 1.0)
    sums = [_unscaled(sum(kind), scale) if kind else math.nan for kind in norms]
    if after < scale or not math.isfinite(sum(sample)):
        sums[1] = math.inf
    return [sums[0] * step.norm_scale, *sums[1:]]


def _unscaled(norm: float, scale: float) -> float:
    """Infinite where it is not a number, and where the scale has fallen to 0, as in a run that has diverged."""
    return norm / scale**2 if scale and math.isfinite(norm) else math.inf


def encode_steps(
    steps: list[StepInProgress],
    measured: HostCopy,
    clock: Clock,
    *,
    num_ahead: int = 0,
    max_batch: int = NO_MAX,
) -> torch.Tensor:
    """These steps as one vector.

    What lies between steps every time (zeroing gradients, copying the batch to the device, clipping) is part of
    `before`: its median over the window, so that an evaluation now and then is not.
    """
    records = [step.close(clock) for step in steps]
    gaps = [record.other_s for record in records if record.valid]
    usual = median(gaps) if gaps else 0.0
    num_buckets = max([1, *(len(step.ready) for step in steps)])  # 1 where gradients only piled up, under no_sync
    values = iter(measured.read())
    numbers: list[float] = [num_ahead, max_batch]
    for step, record in zip(steps, records, strict=True):
        entry = step.entry
        valid = record.valid and len(record.ready_s) == num_buckets
        # Totals are compared between ranks; a batch of the user's own (use_batch) is not ours to check.
        numbers += valid, entry.local_batch, entry.total_batch if entry.checked else 0
        numbers += record.before_s + usual, record.load_s, max(0.0, record.other_s - usual)
        numbers += _read_norms(step, values)
        numbers += [*record.ready_s, *record.done_s] if valid else [math.nan] * (2 * num_buckets)
    return torch.tensor(numbers, dtype=torch.float64)


def merge_windows(sent: torch.Tensor, first_step: int, num_steps: int, *, loaded_alone: bool = False) -> Report:
    """All ranks' vectors, [n, 2 + S * (9 + 2 J)], as one window; `loaded_alone` as in `BatchEntry`."""
    top, table = sent[:, :_TOP].numpy(), _by_step(sent, num_steps)
    num_buckets = (table.shape[2] - _HEAD) // 2
    valid = table[..., 0] == 1
    load_s, other_s = (np.where(valid, table[..., column], 0.0) for column in (4, 5))
    window = StepWindow(
        first_step=first_step,
        local_batches=np.maximum(table[..., 1], 1).astype(np.int64),
        before_s=np.where(valid, table[..., 3], 1.0),
        ready_s=np.where(valid[..., None], table[..., _HEAD : _HEAD + num_buckets], 1.0),
        done_s=np.where(valid[..., None], table[..., _HEAD + num_buckets :], 1.0),
        local_sqnorm=table[..., 6].copy(),
        global_sqnorm=table[:, 0, 7].copy(),
        valid=valid,
        load_s=np.zeros_like(load_s) if loaded_alone else load_s,
        max_batch=top[:, 1].astype(np.int64),
        previous_dot=table[:, 0, 8].copy(),
    )
    return Report(window=window, load_s=load_s, other_s=other_s, num_ahead=int(top[:, 0].max()))


def check_cuts(sent: torch.Tensor, first_step: int, num_steps: int) -> None:
    """Raise `DisagreementError` where ranks cut a step differently: some samples would be seen twice, others never.

    Every step's local batches must add up to the total that each rank took it for.
    """
    table = _by_step(sent, num_steps)
    batches, totals = table[..., 1], table[..., 2]
    wrong = (totals > 0).all(axis=1) & (totals != batches.sum(axis=1, keepdims=True)).any(axis=1)
    if wrong.any():
        step = int(wrong.argmax())
        cut, total = batches[step].astype(int).tolist(), totals[step].astype(int).tolist()
        raise DisagreementError(
            f"ranks cut step {first_step + step} differently, into local batches {cut} of totals {total}: take "
            "batches from the loader in the same order on every rank, none ahead of the others"
        )


def _by_step(sent: torch.Tensor, num_steps: int) -> FloatArray:
    """What ranks sent of each step, [S, n, 9 + 2 J]."""
    table: FloatArray = sent[:, _TOP:].numpy().reshape(len(sent), num_steps, -1).swapaxes(0, 1)
    return table
