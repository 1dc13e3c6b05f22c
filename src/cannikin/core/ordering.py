"""Random orders that are computed by position, in no memory: a permutation of 10^10 samples costs a few numbers.

A Feistel network on pairs. A number below a*b is a pair (l, r) with l < a and r < b, and each round adds a random
function of one half to the other,

    l <- l + f_k(r) mod a,    r <- r + f_{k+1}(l) mod b,    in turn,

which can be undone, so that any functions f make it a permutation of the a*b pairs (Black and Rogaway, 2002). With a
and b near the root of n there are at most a - 1 pairs too many; a number that lands on one of those takes the rounds
again until it is below n, which keeps it a permutation. f is the last part of SplitMix64 of its input plus the round's
key, which has every bit of the result depend on every bit of the input.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_STORED = 2**20
"""Up to so many samples an order is stored, in 8 MB at most: exactly random."""

_HALF = np.uint64(32)  # bits
_NUM_ROUNDS = 8  # 4 can be told from a random order, 5 could not (benchmarks/reports): some to spare


class IndexOrder:
    """An order of the numbers below `num_samples`, which slices as an array does.

    Args:
        num_samples: n, at least 1.
        seed: what shuffles them, with the epoch; None keeps them in order.
        epoch: gives every pass an order of its own.

    Examples:
        >>> IndexOrder(10**10, seed=None)[5:8].tolist()
        [5, 6, 7]
        >>> sorted(IndexOrder(9, seed=0, epoch=3)[:].tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """

    def __init__(self, num_samples: int, *, seed: int | None, epoch: int = 0, num_rounds: int = _NUM_ROUNDS) -> None:
        self._num_samples = num_samples
        self._a = np.uint64(math.isqrt(max(num_samples - 1, 0)) + 1)
        self._b = np.uint64(-(-num_samples // int(self._a)))
        # Not seed + epoch, as DistributedSampler has it: there run 1 sees in epoch 0 what run 0 sees in epoch 1.
        sequence = np.random.SeedSequence([seed or 0, epoch, num_samples])
        self._keys = sequence.generate_state(0 if seed is None else num_rounds, np.uint64)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, part: slice) -> npt.NDArray[np.int64]:
        """Return the samples at these positions, in int64."""
        found = np.arange(*part.indices(self._num_samples), dtype=np.uint64)
        if len(self._keys):
            left = np.arange(len(found))  # those that have not landed below n yet
            while len(left):
                found[left] = self._permuted(found[left])
                left = left[found[left] >= self._num_samples]
        return found.astype(np.int64)

    def tolist(self) -> list[int]:
        """Return the whole order, as a list; for tests and small ones."""
        whole: list[int] = self[:].tolist()
        return whole

    def _permuted(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return where the rounds take these numbers below a*b."""
        left, right = numbers // self._b, numbers % self._b
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _added(right, _mixed(left + key), self._b)
            else:
                left = _added(left, _mixed(right + key), self._a)
        permuted: npt.NDArray[np.uint64] = left * self._b + right
        return permuted


def _added(half: Any, random: Any, size: np.uint64) -> Any:
    """Return a half plus a random number below its size, mod its size, without a division, which would take longest.

    The upper 32 bits of `random` as a fraction, times the size, is that number; sizes are below 2^32.
    """
    half = half + ((random >> _HALF) * size >> _HALF)
    return half - size * (half >= size)


def _mixed(numbers: npt.NDArray[np.uint64]) -> Any:
    """Return 64 bits that each depend on all bits of a number: the last part of SplitMix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
