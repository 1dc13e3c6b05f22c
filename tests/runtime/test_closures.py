"""Training inside `optimizer.step(closure)`, as Lightning does it, is weighted, measured and adapted like any other."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

import cannikin
from cannikin.errors import InvalidInputError

pytestmark = pytest.mark.timeout(60)


def train(rank: int, world_size: int, by_closure: bool) -> tuple[list[float], list[float], bool, float]:
    """Weights at the end, rates seen in closures, whether steps were measured, and progress."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(0, 3, (256,)))
    net = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = cannikin.HeteroDataParallel(net, optimizer)
    loader = cannikin.HeteroDataLoader(data, model=model, batch_size=16, local_batches=[12, 4])
    rates = []
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            rates.append(optimizer.param_groups[0]["lr"])
            return loss

        if by_closure:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()
    measured = "measured yet" not in model.plan.reason
    return net.weight.flatten().tolist(), rates, measured, model.progress


def test_a_closure_gives_the_weights_and_the_measurements_of_the_plain_loop():
    plain, within = (run_ranks(train, 2, by_closure) for by_closure in (False, True))
    for (weights, _, _, progress), (same_weights, rates, measured, same_progress) in zip(plain, within, strict=True):
        assert same_weights == pytest.approx(weights, abs=1e-6)
        assert (same_progress, set(rates)) == (progress, {0.1})
        assert measured


def test_attaching_to_what_is_no_ddp_says_what_to_do():
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    said = "got a Linear, neither a DistributedDataParallel nor a module under fully_shard: wrap the module first"
    with pytest.raises(InvalidInputError, match=said):
        cannikin.attach(net, optimizer)
