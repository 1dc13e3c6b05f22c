"""What the demonstration trains on, chosen once for all policies and never by who wins, and what its ranks answer.

The ranks' devices take `fixed_ms + sample_ms * b / speed` for a step of b samples: a rank sleeps up to that in forward
and backward (`cannikin lab`), so three of them fit on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cannikin.errors import InvalidInputError

FASHION_MNIST_FILES = ("images.npy.xz", "train-images-idx3-ubyte.gz")  # a compact form, and the original one
DEFAULT_POLICIES = ("even", "adaptdl", "lb-bsp", "cannikin")
SPEEDS = (1.0, 0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set, and how it is trained on.

    Args:
        dataset: its name.
        batch_size: the total batch to begin with, B0; `max_batch_size` bounds it for policies that change it.
        target: accuracy on the test set at which a policy is done.
        max_passes: passes over the data, counted at the initial batch, after which it is given up.
        samples_per_evaluation: samples trained on between two evaluations, which are off the clock.
        sample_ms, fixed_ms: the device, at speed 1.
        lr, momentum: SGD's; AdaScale follows the total batch.
    """

    dataset: str
    batch_size: int
    max_batch_size: int
    target: float
    max_passes: float
    samples_per_evaluation: int
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
    last_steps_ms: float
    accuracy: float
    steps: int
    samples: int
    final_split: tuple[int, ...]
    total_batches: list[tuple[int, int]]
    curve: list[tuple[float, int, float]]


TASKS = {
    "digits": Task(
        dataset="digits",
        batch_size=48,
        max_batch_size=384,
        target=0.97,
        max_passes=60,
        samples_per_evaluation=1440,
    ),
    "fashion-mnist": Task(
        dataset="fashion-mnist",
        batch_size=96,
        max_batch_size=1536,
        target=0.85,
        max_passes=5,
        samples_per_evaluation=9600,
    ),
}


def check_folder(dataset: str, folder: Path | None) -> None:
    """Refuse a data set that is not in its folder, before any rank is started."""
    if dataset == "digits":
        return
    if folder is None:
        raise InvalidInputError(f"{dataset} is not part of this package: say where it is with --data DIR")
    if not any((folder / name).exists() for name in FASHION_MNIST_FILES):
        wanted = " nor ".join(FASHION_MNIST_FILES)
        raise InvalidInputError(f"{folder} has neither {wanted}: is it Fashion-MNIST's folder?")


def quick(task: Task) -> Task:
    """Return the task at a lower target, on devices twice as fast: to see that it works, not who is faster."""
    return replace(task, target=task.target - 0.07, sample_ms=task.sample_ms / 2, fixed_ms=task.fixed_ms / 2)
