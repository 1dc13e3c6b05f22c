"""Device values on their way to the host, so that reading them a step later waits for nothing."""

from __future__ import annotations

import torch

__all__ = ["HostCopy"]


class HostCopy:
    """A copy of a few scalars; nothing waits for it before `read`. On the host itself there is nothing to copy."""

    def __init__(self, scalars: list[torch.Tensor]) -> None:
        self._scalars, self._copied = scalars, None
        if scalars and scalars[0].is_cuda:
            values = torch.stack(scalars).double()
            # Into pinned memory: a copy to any other would wait for the device here.
            self._pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._pinned.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[float]:
        """The values on the host; call it a step later."""
        if self._copied is None:
            return [scalar.item() for scalar in self._scalars]
        self._copied.synchronize()
        values: list[float] = self._pinned.tolist()
        return values
