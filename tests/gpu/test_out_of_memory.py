"""On a GPU: a rank whose memory is a third of the others' trains on, whether the first split knows of it or not."""

from __future__ import annotations

import warnings
from typing import Any

import nccl_cases
import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

from cannikin.runtime.passes import epoch_order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOTAL, NUM_STEPS = 6000, 30  # 2000 samples hold about 1.4 GB for backward
LARGE, SMALL = 3 * 2**30, 2**30


class Numbers(torch.utils.data.Dataset):
    """Sample i is its number."""

    def __len__(self) -> int:
        return TOTAL * NUM_STEPS

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(9):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    layers += [nn.Dropout(0.5)] if kind == "dropout" else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).cuda()


def prepare() -> tuple[torch.Tensor, torch.Tensor]:
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(997, 3, 32, 32, generator=generator)
    return images.cuda(), torch.randint(0, 10, (997,), generator=generator).cuda()


class Kept:
    """An observer that keeps what it is told of memory."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def write(self, record: Any) -> None:
        if getattr(record, "kind", "") == "out_of_memory":
            self.told.append(record.text)


def train(
    rank: int, world_size: int, folder: str, mps: dict[str, str], form: str, when: str, kind: str
) -> dict[str, Any]:
    """30 steps, in which rank 2 may take a third of what others may; set before or after the ranks have met."""
    from cannikin import HeteroDataLoader, HeteroDataParallel

    nccl_cases.begin(rank, world_size, folder, mps, form)
    images, labels = prepare()

    def limit(num_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)

    limit(SMALL if rank == 2 and when == "before" else LARGE)
    net, kept = network(kind), Kept()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = HeteroDataParallel(net, optimizer, observers=[kept], lr_rule="none")
    loader = HeteroDataLoader(Numbers(), model=model, batch_size=TOTAL, collate_fn=torch.tensor)
    if rank == 2 and when == "after":
        torch.cuda.empty_cache()
        limit(SMALL)
    seen: list[int] = []
    plans: list[tuple[int, ...]] = []
    reason = model.plan.reason
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for numbers in loader:
            plans.append(model.plan.local_batches)
            places = (numbers % 997).cuda()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[places]), labels[places]).backward()
            optimizer.step()
            seen += numbers.tolist()
    return {
        "parameters": [p.detach().cpu().numpy() for p in net.parameters()],
        "seen": seen,
        "plans": plans,
        "reason": reason,
        "warned": [str(warning.message) for warning in caught if "memory" in str(warning.message)],
        "told": kept.told,
        "cap": model.engine.loop.memory.max_batch,
    }


def parameters_of_one() -> list[np.ndarray]:
    images, labels = prepare()
    net = network("plain")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    order = epoch_order(TOTAL * NUM_STEPS, seed=0, epoch=0, shuffle=True)
    for numbers in order.split(TOTAL):
        places = (numbers % 997).cuda()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[places]), labels[places]).backward()
        optimizer.step()
    parameters = [p.detach().cpu().numpy() for p in net.parameters()]
    del net, optimizer, images
    torch.cuda.empty_cache()
    return parameters


def check_samples_and_parameters(told: list[dict[str, Any]]) -> None:
    assert sorted(number for rank in told for number in rank["seen"]) == list(range(TOTAL * NUM_STEPS))
    alone = parameters_of_one()
    for rank in told:
        for ours, theirs in zip(rank["parameters"], alone, strict=True):
            assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("form", ["gloo", "nccl"])
def test_a_rank_with_a_third_of_the_memory_begins_with_a_third_of_the_samples(form, mps, tmp_path):
    told = run_ranks(train, 3, str(tmp_path), mps, form, "before", "plain", timeout_s=180)
    large, _, small = told[0]["plans"][0]
    assert 0.25 * large < small < 0.37 * large
    assert told[0]["reason"].startswith("first split by the devices' data sheets")
    assert [rank["warned"] for rank in told] == [[], [], []], "nobody ran out"
    check_samples_and_parameters(told)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("form", ["gloo", "nccl"])
def test_a_rank_that_loses_two_thirds_of_its_memory_unseen_trains_on_with_every_sample(form, mps, tmp_path):
    told = run_ranks(train, 3, str(tmp_path), mps, form, "after", "plain", timeout_s=180)
    assert told[0]["plans"][0] == (2000, 2000, 2000)
    assert told[0]["plans"][-1][2] < 2000
    assert told[0]["told"][0].startswith("rank 2 ran out of memory with 2000 samples: trained in parts, at most")
    assert "rank 2 has not enough memory for a local batch of 2000" in told[2]["warned"][0]
    assert told[0]["warned"] == told[1]["warned"] == []
    check_samples_and_parameters(told)


@pytest.mark.timeout(200)
def test_with_dropout_ranks_stay_together_though_one_of_them_runs_in_parts(mps, tmp_path):
    told = run_ranks(train, 3, str(tmp_path), mps, "gloo", "after", "dropout", timeout_s=180)
    assert told[2]["warned"]
    assert sorted(number for rank in told for number in rank["seen"]) == list(range(TOTAL * NUM_STEPS))
    for rank in told[1:]:
        for ours, theirs in zip(rank["parameters"], told[0]["parameters"], strict=True):
            assert np.isfinite(ours).all()
            assert np.array_equal(ours, theirs)
