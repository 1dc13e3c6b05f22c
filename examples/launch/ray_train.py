"""The same training under Ray Train, which restarts all workers where one is lost: python examples/launch/ray_train.py.

Not run by our tests: Ray is not installed where they run. What is certain without it: workers of Ray Train find the
process group made, with as many ranks as `num_workers`, and run the function outside of the main thread, so that
SIGTERM takes no snapshot there (a warning says so). Snapshots by the clock are taken and found as everywhere.
"""

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import cannikin


def train(options: dict) -> None:
    """Train on one worker, of which there may be another number after a restart."""
    device = ray.train.torch.get_device()
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = cannikin.HeteroDataParallel(net, optimizer)  # in place of ray.train.torch.prepare_model
    loader = cannikin.HeteroDataLoader(data, model=model, batch_size=64)  # and of prepare_data_loader
    cannikin.Snapshot(options["snapshots"], model)
    for epoch in model.epochs(options["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        ray.train.report({"epoch": epoch, "loss": float(model.weighted_mean(loss))})


if __name__ == "__main__":
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"snapshots": "/shared/run-1", "epochs": 90},  # storage that all nodes see
        scaling_config=ScalingConfig(num_workers=3, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
    )
    trainer.fit()
