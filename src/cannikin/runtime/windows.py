"""Windows of steps between ranks: what one rank sends, and the `StepWindow` that rank 0 makes of it.

Per step a rank sends [valid, b_i, before, |g_i|^2, |g|^2, ready_1..J, done_1..J], as float64.
"""

from __future__ import annotations

import numpy as np
import torch

from cannikin.core.records import StepWindow
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.timing import Clock

__all__ = ["encode_steps", "merge_windows", "start_reading"]

_HEAD = 5


def start_reading(steps: list[StepInProgress]) -> torch.Tensor:
    """Begin to copy the norms of these steps to the host, [S, 2], NaN where not taken; nothing waits for it here."""
    norms = [norm for step in steps for norm in step.sqnorms()]
    device = next((norm.device for norm in norms if norm is not None), torch.device("cpu"))
    missing = torch.full((), torch.nan, device=device)
    # A norm that is not a number becomes infinite, for NaN says that none was taken.
    read = torch.stack([missing if n is None else n.float().nan_to_num(torch.inf, torch.inf) for n in norms])
    return read.to("cpu", non_blocking=True).view(-1, 2)


def encode_steps(steps: list[StepInProgress], norms: torch.Tensor, clock: Clock, grad_scale: float) -> torch.Tensor:
    """These steps as one vector; `grad_scale` is what a GradScaler multiplied the loss by."""
    num_buckets = max((len(step.ready) for step in steps), default=0)
    rows = np.full((len(steps), _HEAD + 2 * num_buckets), np.nan)
    for row, step, (local, total) in zip(rows, steps, norms.tolist(), strict=True):
        record = step.close(clock)
        valid = record.valid and len(record.ready_s) == num_buckets
        row[:_HEAD] = valid, step.entry.local_batch, record.before_s, local * step.norm_scale, total
        row[3:_HEAD] /= grad_scale**2
        if valid:
            row[_HEAD:] = [*record.ready_s, *record.done_s]
    return torch.from_numpy(rows.ravel())


def merge_windows(sent: torch.Tensor, first_step: int, num_steps: int) -> StepWindow:
    """All ranks' vectors, [n, S * (5 + 2 J)], as one window."""
    ranks = sent.shape[0]
    table = sent.numpy().reshape(ranks, num_steps, -1).swapaxes(0, 1)
    num_buckets = (table.shape[2] - _HEAD) // 2
    valid = table[..., 0] == 1
    return StepWindow(
        first_step=first_step,
        local_batches=np.maximum(table[..., 1], 1).astype(np.int64),
        before_s=np.where(valid, table[..., 2], 1.0),
        ready_s=np.where(valid[..., None], table[..., _HEAD : _HEAD + num_buckets], 1.0),
        done_s=np.where(valid[..., None], table[..., _HEAD + num_buckets :], 1.0),
        local_sqnorm=table[..., 3].copy(),
        global_sqnorm=table[:, 0, 4].copy(),
        valid=valid,
    )
