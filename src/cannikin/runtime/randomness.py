"""The random generators of a process, as a snapshot keeps them: Python's, numpy's, torch's and the device's.

A snapshot has those of rank 0. What is right for another rank depends on the script. One that seeds all ranks alike may
rely on it, as where every rank draws the same size for a step; one that seeds them unlike relies on that. The restarted
script shows which: a generator that is alike on all ranks once the script has seeded it becomes rank 0's on all of
them. One that is not becomes rank 0's there, and on another rank begins anew, from a seed made of rank 0's state and
the rank's number. Neither goes back to the numbers of the run's beginning.

So a resumed run draws what an undisturbed one would have drawn: on rank 0, and on a rank whose generators are alike for
as long as it has drawn as many numbers as rank 0. Workers of a loader are seeded anew, as at the start of an epoch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def get_randomness(device: torch.device) -> dict[str, Any]:
    """Return the state of each generator in plain types and tensors, by name."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    found = {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_randomness(states: Mapping[str, Any], device: torch.device, rank: int, alike: Mapping[str, bool]) -> None:
    """Let each generator go on from rank 0's state, on other ranks too where all are `alike`; else from a new seed."""
    for name, state in states.items():
        if name == "cuda" and device.type != "cuda":
            continue
        if rank == 0 or alike.get(name, True):
            _set_state(name, state, device)
        else:
            _seed(name, digest(state, rank), device)


def digest(state: Any, *more: int) -> int:
    """Return a number below 2^62 that stands for a generator's state, and for other numbers."""
    made = hashlib.blake2b(digest_size=8)

    def note(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            made.update(part.contiguous().numpy().tobytes())
        elif isinstance(part, tuple):
            for value in part:
                note(value)
        else:
            made.update(repr(part).encode())

    note((state, *more))
    return int.from_bytes(made.digest(), "big") % 2**62


def _set_state(name: str, state: Any, device: torch.device) -> None:
    if name == "python":
        random.setstate(state)
    elif name == "numpy":
        kind, keys, *rest = state
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    elif name == "torch":
        torch.set_rng_state(state)
    elif name == "cuda":
        torch.cuda.set_rng_state(state, device)


def _seed(name: str, seed: int, device: torch.device) -> None:
    if name == "python":
        random.seed(seed)
    elif name == "numpy":
        np.random.seed(seed % 2**32)
    elif name == "torch":
        torch.default_generator.manual_seed(seed)  # of the host alone: torch.manual_seed would seed devices too
    elif name == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
