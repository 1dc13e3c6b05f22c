"""BatchNorm's running statistics when ranks see batches of different size.

DDP gives every rank the buffers of rank 0, whose batch may be the smallest. We leave each rank its own while it trains
and replace them by the weighted mean over ranks at the end of a window and of an epoch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RunningStatistics"]


class RunningStatistics:
    """The running means and variances of a module's BatchNorm layers, averaged over ranks as one small tensor."""

    def __init__(self, module: torch.nn.Module, group: Any) -> None:
        self._group = group
        kinds = torch.nn.modules.batchnorm._BatchNorm
        self._buffers = [
            buffer
            for layer in module.modules()
            if isinstance(layer, kinds) and not isinstance(layer, torch.nn.SyncBatchNorm)
            for buffer in (layer.running_mean, layer.running_var)
            if isinstance(buffer, torch.Tensor)
        ]

    def average(self, share: float) -> None:
        """Replace the statistics by their mean over ranks, each weighted by its share of the samples.

        Every rank must call it at the same step, with shares that sum to 1.
        """
        if not self._buffers:
            return
        flat = torch.cat([buffer.reshape(-1) for buffer in self._buffers])
        flat = flat * share if share > 0 else torch.zeros_like(flat)  # 0 x NaN is NaN
        dist.all_reduce(flat, group=self._group)
        start = 0
        for buffer in self._buffers:
            buffer.copy_(flat[start : start + buffer.numel()].view_as(buffer))
            start += buffer.numel()
