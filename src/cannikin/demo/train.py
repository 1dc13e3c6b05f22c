"""What every rank of the demonstration runs: `python -m cannikin.demo.train TASK POLICY,POLICY RUN_DIR`, TASK as JSON.

Rank 0 prints a `Result` as one line of JSON after each evaluation, and once a policy is done. Data and
network are small enough for two cores, and real enough to learn something.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from cannikin.demo.tasks import Result, Task
from cannikin.errors import InvalidInputError
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel


class Run:
    """One policy's training: seconds count while it trains, not while it evaluates."""

    def __init__(self, task: Task, policy: str, run_dir: Path) -> None:
        torch.manual_seed(task.seed)
        self.task, self.policy = task, policy
        data, self.images, self.labels = load_digits()
        net = make_network()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=task.momentum)
        self.model = HeteroDataParallel(net, self.optimizer, policy=policy, run_dir=run_dir / policy)
        self.loader = HeteroDataLoader(
            data,
            model=self.model,
            batch_size=task.batch_size,
            max_batch_size=task.max_batch_size,
            seed=task.seed,
        )
        self.most_samples = task.max_passes * len(data)
        self.seconds, self.accuracy, self.samples = 0.0, 0.0, 0
        self.step_seconds: list[float] = []
        self.totals: list[tuple[int, int]] = []
        self.curve: list[tuple[float, int, float]] = []

    def train(self) -> None:
        """Train until the target is reached or the passes are used up, and tell what came of it."""
        while not self._is_done():
            began = time.perf_counter()
            for images, labels in self.loader:
                self.optimizer.zero_grad()
                loss = functional.cross_entropy(self.model(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self._count(time.perf_counter() - began)
                if self.samples >= (len(self.curve) + 1) * self.task.samples_per_evaluation:
                    self._evaluate()
                    if self._is_done():
                        break
                began = time.perf_counter()
        self.model.engine.close()  # other policies follow in this process
        self._tell(is_done=True)

    def _is_done(self) -> bool:
        return self.accuracy >= self.task.target or self.model.progress * self.task.batch_size > self.most_samples

    def _count(self, seconds: float) -> None:
        """Count a step that was taken."""
        self.seconds += seconds
        self.step_seconds.append(seconds)
        entry, plan = self.model.engine.current_entry, self.model.plan
        assert entry is not None
        assert plan is not None
        self.samples += entry.total_batch
        if not self.totals or self.totals[-1][1] != plan.total_batch:
            self.totals.append((len(self.step_seconds), plan.total_batch))

    def _evaluate(self) -> None:
        """Have rank 0 measure the accuracy on the test set, for all ranks."""
        score = torch.zeros(1)
        if dist.get_rank() == 0:
            self.model.eval()
            with torch.no_grad():
                score[0] = (self.model.module(self.images).argmax(1) == self.labels).float().mean()
            self.model.train()  # type: ignore[no-untyped-call]
        dist.broadcast(score, 0)
        self.accuracy = float(score)
        self.curve.append((round(self.seconds, 3), self.samples, round(self.accuracy, 4)))
        self.model.log(
            accuracy=self.accuracy,
            target_accuracy=self.task.target,  # by these names the report knows the target and the time spent training
            train_s=round(self.seconds, 3),
        )
        self._tell(is_done=False)

    def _tell(self, *, is_done: bool) -> None:
        """Have rank 0 print what has come of it."""
        if dist.get_rank() != 0:
            return
        plan = self.model.plan
        assert plan is not None
        result = Result(
            policy=self.policy,
            is_done=is_done,
            seconds_to_target=round(self.seconds, 3) if self.accuracy >= self.task.target else None,
            median_step_ms=round(statistics.median(self.step_seconds) * 1e3, 2),
            accuracy=round(self.accuracy, 4),
            steps=len(self.step_seconds),
            samples=self.samples,
            final_split=plan.local_batches,
            total_batches=self.totals,
            curve=self.curve,
        )
        print(msgspec.json.encode(result).decode(), flush=True)


# Data and network.


def load_digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Return the training samples, and images and labels of the test set: every fifth of 1,797 digits of 8x8 pixels."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise InvalidInputError("the demonstration needs scikit-learn: pip install 'cannikin[demo]'") from error
    digits: Any = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), images[test], labels[test]


def make_network() -> nn.Module:
    """Make a small convolutional network; the seed set before decides its weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main() -> None:
    """Train under every policy named."""
    task, policies, run_dir = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for policy in policies.split(","):
        Run(msgspec.json.decode(task, type=Task), policy, Path(run_dir)).train()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
