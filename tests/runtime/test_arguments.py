"""A model and an optimizer that do not belong together, and keywords that nobody takes, are refused at once."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from told import collecting_warnings
from training_cases import Numbered, TinyNet

import cannikin
from cannikin.core.policies.even import EvenPlanner
from cannikin.errors import InvalidInputError

pytestmark = pytest.mark.timeout(60)


def test_the_optimizer_of_another_model_is_refused():
    net, other = TinyNet(0.0), TinyNet(0.0)
    with pytest.raises(InvalidInputError, match=r"none of the model's parameters.*of the module that is wrapped"):
        cannikin.HeteroDataParallel(net, torch.optim.SGD(other.parameters(), lr=0.1))


def test_module_and_optimizer_the_wrong_way_round_are_told_so():
    net = TinyNet(0.0)
    with pytest.raises(InvalidInputError, match=r"a SGD, not a torch.nn.Module.*\(module, optimizer\)"):
        cannikin.HeteroDataParallel(torch.optim.SGD(net.parameters(), lr=0.1), net)
    with pytest.raises(InvalidInputError, match=r"the optimizer is a list"):
        cannikin.HeteroDataParallel(net, list(net.parameters()))


@pytest.mark.parametrize("policy", [object(), 5, EvenPlanner], ids=["an object", "a number", "a class"])
def test_what_cannot_plan_is_refused_as_a_policy(policy):
    net = TinyNet(0.0)
    with pytest.raises(InvalidInputError, match=r"is neither a name nor a planner: a planner has decide\(window, job"):
        cannikin.HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1), policy=policy)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_batch_size", "that is for HeteroDataLoader"),
        ("lr_rules", "did you mean lr_rule?"),
        ("find_unused", "did you mean find_unused_parameters?"),
        ("colour", "neither does DistributedDataParallel, which gets all other keywords"),
    ],
)
def test_a_keyword_of_the_model_that_nobody_takes_is_named_with_advice(name, advice):
    net = TinyNet(0.0)
    with pytest.raises(TypeError) as caught:
        cannikin.HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1), **{name: 1})
    assert str(caught.value) == f"HeteroDataParallel takes no {name}=: {advice}"


def parts_under_batch_norm(rank: int, world_size: int) -> dict[tuple[int, int], list[int]]:
    """The sizes of the parts, by the size of a batch and the number of parts that was asked for."""
    found = {}
    for size in (1, 3, 4, 7):
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        model = cannikin.HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = cannikin.HeteroDataLoader(torch.ones(size, 3), model=model, batch_size=size, local_bounds=(1, None))
        (batch,) = loader
        for num_parts in (2, 3, 50):
            found[size, num_parts] = [len(part) for part in model.micro_batches(batch, num_parts)]
    return found


def test_no_part_of_a_batch_is_a_single_sample_where_batch_norm_is_to_normalise_it():
    (found,) = run_ranks(parts_under_batch_norm, 1)
    for (size, num_parts), sizes in found.items():
        assert sum(sizes) == size
        assert min(sizes) >= min(2, size)
        assert len(sizes) == max(1, min(num_parts, size // 2))


def misspelt(rank: int, world_size: int) -> str:
    """What a loader says of `max_batch=`."""
    net = TinyNet(0.0)
    model = cannikin.HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError) as caught:
        cannikin.HeteroDataLoader(Numbered(60), model=model, batch_size=6, max_batch=12)
    return str(caught.value)


def test_a_keyword_of_the_loader_that_nobody_takes_is_named_with_advice():
    assert set(run_ranks(misspelt, 2)) == {"HeteroDataLoader takes no max_batch=: did you mean max_batch_size?"}


def warnings_of_a_loop(rank: int, world_size: int, stepped: str) -> list[str]:
    """What is warned of in 40 steps of this optimizer; of "neither", all gradients pile up."""
    net = TinyNet(0.0)
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name in ("ours", "another")}
    model = cannikin.HeteroDataParallel(net, optimizers["ours"])
    with collecting_warnings() as warned:
        for features, targets, _ in cannikin.HeteroDataLoader(Numbered(240), model=model, batch_size=6):
            if stepped != "neither":
                net.zero_grad()
            torch.nn.functional.mse_loss(model(features), targets).backward()
            if stepped != "neither":
                optimizers[stepped].step()
    return [warning.text for warning in warned]


def test_a_loop_that_steps_another_optimizer_is_told_so_once():
    for texts in run_ranks(warnings_of_a_loop, 2, "another"):
        (text,) = texts
        assert "30 gradients, and step() of the optimizer that HeteroDataParallel was given has not been called" in text
    assert run_ranks(warnings_of_a_loop, 2, "ours") == [[], []]
    assert run_ranks(warnings_of_a_loop, 2, "neither") == [[], []], "they may be meant for one step"
