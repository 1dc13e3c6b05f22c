"""What the demonstration trains on, chosen once for all policies and never by who wins, and what its ranks answer.

The ranks' devices take `fixed_ms + sample_ms * b / speed` for a step of b samples: a rank sleeps up to that in forward
and backward (`cannikin lab`), so three of them fit on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

DEFAULT_POLICIES = ("even", "adaptdl", "lb-bsp", "cannikin")
SPEEDS = (1.0, 0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Task:
    """How the digits are trained on.

    Args:
        batch_size: the total batch to begin with, B0; `max_batch_size` bounds it for policies that change it.
        target: accuracy on the test set at which a policy is done.
        max_passes: passes over the data, counted at the initial batch, after which it is given up.
        samples_per_evaluation: samples trained on between two evaluations, which are off the clock.
        sample_ms, fixed_ms: the device, at speed 1.
        lr, momentum: SGD's; AdaScale follows the total batch.
    """

    batch_size: int = 48
    max_batch_size: int = 384
    target: float = 0.97
    max_passes: float = 60
    samples_per_evaluation: int = 1440
    sample_ms: float = 1.0
    fixed_ms: float = 10.0
    lr: float = 0.01
    momentum: float = 0.9
    seed: int = 0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a policy, or has come of it so far; seconds are of training alone.

    `total_batches` has (step, total batch from there on), `curve` (seconds, samples, accuracy) of each evaluation.
    """

    policy: str
    is_done: bool
    seconds_to_target: float | None
    median_step_ms: float
    accuracy: float
    steps: int
    samples: int
    final_split: tuple[int, ...]
    total_batches: list[tuple[int, int]]
    curve: list[tuple[float, int, float]]


def quick(task: Task) -> Task:
    """Return the task at a lower target, on devices twice as fast: to see that it works, not who is faster."""
    return replace(task, target=task.target - 0.07, sample_ms=task.sample_ms / 2, fixed_ms=task.fixed_ms / 2)
