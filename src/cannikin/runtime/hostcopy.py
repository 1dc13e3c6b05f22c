"""Device values on their way to the host, so that reading them a step later waits for nothing."""

from __future__ import annotations

import torch

__all__ = ["HostCopy"]


class HostCopy:
    """A copy of a small tensor; nothing waits for it before `read`."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            # Into pinned memory: a copy to any other would wait for the device here.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> torch.Tensor:
        """The values on the host; call it a step later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
