"""The quickstart's network, as every file in this folder starts it: alone, under torchrun, Slurm or Kubernetes.

torchrun --standalone --nproc-per-node=2 examples/launch/train.py
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import cannikin

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=float, default=5)
parser.add_argument("--run-dir", help="folder for the run log")
parser.add_argument("--snapshots", help="folder to save the run in, and to go on from after a restart")
parser.add_argument("--every-s", type=float, default=60.0, help="seconds between two snapshots")
options = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
model = cannikin.HeteroDataParallel(net, optimizer, run_dir=options.run_dir)
loader = cannikin.HeteroDataLoader(data, model=model, batch_size=64, max_batch_size=512)
print(f"rank {model.engine.rank} of {model.engine.world_size} on {socket.gethostname()}, {device}", flush=True)
if options.snapshots:
    snapshot = cannikin.Snapshot(options.snapshots, model, every_s=options.every_s)
    if snapshot.resumed_from is not None:
        print(f"rank {model.engine.rank} goes on from step {snapshot.resumed_from}", flush=True)

for epoch in model.epochs(options.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    mean = model.weighted_mean(loss)
    if model.engine.rank == 0:
        print(f"epoch {epoch}: loss {float(mean):.3f}, local batches {model.plan.local_batches}", flush=True)

dist.destroy_process_group()
