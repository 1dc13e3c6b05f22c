"""Data for benchmarks whose samples are made on the device: what is measured is the step, not the loader."""

from __future__ import annotations

import torch


class Numbers(torch.utils.data.Dataset):
    """Sample numbers only."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices
