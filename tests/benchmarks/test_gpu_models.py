"""The networks of the GPU benchmarks have the sizes that their reports state."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_models import Bert, Chain, NeuMf, ResNet18, ResNet50, SmallGpt, Speech
from benchmarks.gpu_tasks import RECIPES, Task


@pytest.mark.parametrize(
    ("network", "num_parameters"),
    [
        (ResNet18, 11_173_962),  # published for 32x32 images and 10 classes
        (ResNet50, 25_557_032),  # published
        (Bert, 108_893_186),  # bert-base-uncased with a span head and without the pooler
        (SmallGpt, 124_475_904),  # GPT-2's 124,439,808 and 47 rows of padding to the vocabulary
        (NeuMf, 5_179_791),  # the paper gives 5.2 million
        (Speech, 52_425_741),  # the paper gives DeepSpeech2 52 million
        (Chain, 16_793_600),
    ],
)
def test_a_network_has_its_published_number_of_parameters(network, num_parameters):
    with torch.device("meta"):
        net = network()
    assert sum(parameter.numel() for parameter in net.parameters()) == num_parameters


@pytest.mark.parametrize("kind", RECIPES)
def test_every_task_trains_a_step_in_its_small_size(kind):
    task = Task(kind, largest=4, device="cpu")
    net = task.network()
    optimizer = task.optimizer(net)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = task.loss(net, 3)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert losses[0] != losses[1]
