"""The same training under Ray Train, on two or three workers: python examples/launch/ray_train.py --workers 2 3.

Ray restarts all workers where one is lost, and where a node comes or goes; training goes on from the last report.
"""

import argparse

import ray.train.torch
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from cannikin.integrations.ray import prepare


def train(options: dict) -> None:
    """Train on one worker, of which there may be another number after a restart."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    loader = DataLoader(data, batch_size=32, shuffle=True)  # of one worker, as under Ray's own DDP
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)

    model, loader, run = prepare(
        model, optimizer, loader, also_save={"scheduler": scheduler},
        local_bounds=(1, 60),  # what a worker's memory holds; local_batches=[60, 24, 12] pins the split
    )  # fmt: skip
    for epoch in range(loader.epoch, options["epochs"]):
        for step, (x, y) in enumerate(loader, 1):  # on the worker's device
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:  # what is lost at most, if a worker is
                run.report({"epoch": epoch, "loss": float(run.engine.weighted_mean(loss))})
        scheduler.step()
        loss = float(run.engine.weighted_mean(loss))
        numbers = {"local_batches": run.engine.plan.local_batches, "noise_scale": run.engine.noise_scale}
        run.report({"epoch": epoch, "loss": loss, **numbers})  # to Ray's own loggers


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs=2, default=(2, 3), help="the fewest and the most workers")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--storage", help="a folder or bucket that all nodes see; ~/ray_results by default")
    parser.add_argument("--name", default="digits", help="of the run: one of the same name goes on")
    options = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=tuple(options.workers), use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=100),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    print(trainer.fit().metrics)
