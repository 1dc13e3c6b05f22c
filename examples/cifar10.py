"""ResNet-18 on CIFAR-10 with SGD and AdaScale, to 94% top-1.

    python examples/cifar10.py --data DIR --quick
    torchrun --standalone --nproc-per-node=2 examples/cifar10.py --data DIR --target 0.94

DIR holds cifar-10-batches-py, cifar-10-batches-bin or the WebP grids (see readers.py). The images live on the device as
bytes, and every batch is cropped and flipped there, all of it at once.
"""

import harness
import numpy as np
import readers
import torch
from torch import nn

import cannikin

settings = harness.settings(
    __doc__,
    epochs=30.0,  # passes at the initial batch that training is worth, whatever the batch grows to
    batch_size=256,  # B0: the total batch of all ranks at the start
    max_batch_size=2048,  # and what it may grow to; 0 keeps it
    lr=0.2,  # at its peak, for B0; AdaScale does the rest
    warmup=6.0,  # passes until the peak
    momentum=0.9,
    weight_decay=5e-4,
    label_smoothing=0.1,
    cutout=12,  # side of the square that is greyed out in every training image
    width=64,  # channels of the first stage; 64 is ResNet-18
    num_train=50_000,
    num_test=10_000,
    seed=0,
    quick={"epochs": 2.0, "warmup": 0.5, "batch_size": 32, "width": 8, "num_train": 512, "num_test": 256},
)
device = harness.start(settings.seed)

# The data: uint8, height x width x channels. That order of the channels is the one in which GPUs convolve fastest: a
# permuted view of it is what torch calls channels_last, so no copy is needed to get there.
train, test = readers.cifar10(settings.data, num_train=settings.num_train, num_test=settings.num_test)
labels, test_labels = (torch.tensor(part.labels, dtype=torch.long, device=device) for part in (train, test))
test_images = torch.tensor(test.images, device=device)
sides = ((0, 0), (4, 4), (4, 4), (0, 0))
padded = torch.tensor(np.pad(train.images, sides, mode="reflect"), device=device)
mean = torch.tensor([125.307, 122.950, 113.865], device=device)
std = torch.tensor([62.993, 62.089, 66.705], device=device)


def normalised(images):
    """Bytes [n, 32, 32, 3] as the network wants them, [n, 3, 32, 32] in channels_last."""
    return ((images - mean) / std).permute(0, 3, 1, 2)


def augmented(rows):
    """A random 32 x 32 crop of each padded image, half of them mirrored: one gather for the whole batch."""
    top, left = torch.randint(0, 9, (2, len(rows), 1), device=device)
    across = torch.arange(32, device=device).expand(len(rows), 32)
    mirrored = torch.where(torch.rand(len(rows), 1, device=device) < 0.5, 31 - across, across)
    return padded[rows[:, None, None], (top + across)[:, :, None], (left + mirrored)[:, None, :]]


def cut_out(images):
    """Grey, which is 0 once normalised, in a random square of each image."""
    corner = torch.randint(0, 32, (2, len(images), 1), device=device) - settings.cutout // 2
    offset = torch.arange(32, device=device) - corner
    down, across = (offset >= 0) & (offset < settings.cutout)
    return images.masked_fill(down[:, None, :, None] & across[:, None, None, :], 0.0)


class Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.around = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = nn.functional.relu(self.bn1(self.conv1(x)))
        return nn.functional.relu(self.bn2(self.conv2(y)) + self.around(x))


def resnet18(width):
    """ResNet-18 for small images: a 3x3 stem that keeps the 32 x 32, then four stages of two blocks."""
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


net = resnet18(settings.width).to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(
    net.parameters(),
    lr=settings.lr,
    momentum=settings.momentum,
    weight_decay=settings.weight_decay,
    nesterov=True,
)
# The rate follows the total batch by AdaScale's rule, because the optimizer is SGD (lr_rule).
model = cannikin.HeteroDataParallel(net, optimizer, run_dir=settings.run_dir)
loader = cannikin.HeteroDataLoader(
    harness.Rows(len(labels)),
    model=model,
    batch_size=settings.batch_size,
    max_batch_size=settings.max_batch_size or None,
    seed=settings.seed,
    collate_fn=harness.Rows.collate,
)
schedule = harness.one_cycle(optimizer, model, settings, len(labels))  # by progress
# bfloat16 needs no GradScaler. (cudnn.benchmark stays off: it would search anew at every new local batch.)
autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def accuracy():
    """Top-1 on the test images, of which every rank takes its part; no test-time augmentation."""
    net.eval()
    mine = slice(model.engine.rank, None, model.engine.world_size)
    num_right = 0
    for images, answers in zip(test_images[mine].split(500), test_labels[mine].split(500), strict=True):
        with autocast:
            num_right += (net(normalised(images)).argmax(1) == answers).sum()
    net.train()
    return harness.sum_over_ranks(num_right)[0] / len(test_labels)


log = harness.Log(model, loader, settings, metric="accuracy")
for _ in model.epochs(settings.epochs):
    log.start()
    for rows in loader:
        rows = rows.to(device)
        optimizer.zero_grad()
        with autocast:
            outputs = model(cut_out(normalised(augmented(rows))))
            loss = nn.functional.cross_entropy(outputs, labels[rows], label_smoothing=settings.label_smoothing)
        loss.backward()
        optimizer.step()
        schedule.step()
        log.step(loss)
    log.stop()
    if log.epoch(accuracy=accuracy()):
        break
log.finish()
