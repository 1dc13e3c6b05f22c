"""What the demonstration trains on: chosen once, the same for every policy, and never by who wins.

The ranks' devices take `fixed_ms + sample_ms * b / speed` for a step of b samples: a rank sleeps up to that in forward
and backward (`cannikin lab`), so three of them fit on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

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
    sample_ms: float
    fixed_ms: float
    lr: float
    momentum: float = 0.9
    seed: int = 0


TASKS = {
    "digits": Task(
        dataset="digits",
        batch_size=48,
        max_batch_size=384,
        target=0.97,
        max_passes=60,
        samples_per_evaluation=1440,
        sample_ms=1.0,
        fixed_ms=10.0,
        lr=0.01,
    ),
    "fashion-mnist": Task(
        dataset="fashion-mnist",
        batch_size=96,
        max_batch_size=1536,
        target=0.85,
        max_passes=5,
        samples_per_evaluation=9600,
        sample_ms=1.0,
        fixed_ms=10.0,
        lr=0.01,
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
