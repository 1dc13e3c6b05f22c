"""A forward that memory does not hold is run in parts: same gradients, no sample lost, and the plan learns of it.

Memory is made up here (`parts_cases.MadeUpMemory`); `tests/gpu` has the real one.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import parts_cases as cases
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from parts_cases import gradients, make_net, parted
from ranks import run_ranks
from told import run_cases, values
from torch import nn

from cannikin.runtime.parted_batch import cut_sizes
from cannikin.runtime.parts import can_cut

INPUTS = torch.sin(torch.arange(30 * 3, dtype=torch.float64)).view(30, 3)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """One in which rows count unequally."""
    return (outputs.square().sum(dim=-1) * torch.arange(1.0, len(outputs) + 1)).mean()


def in_parts(net: nn.Module, sizes: list[int]) -> torch.Tensor:
    return torch.cat([net(part) for part in INPUTS.split(sizes)])


@given(st.integers(5, 2000), st.integers(3, 2000))
def test_parts_have_every_sample_and_are_small_enough_and_not_all_equal(size, most):
    assume((size, most) != (6, 3))  # the only one that has no such parts
    sizes = cut_sizes(size, most)
    assert sum(sizes) == size
    assert max(sizes) <= most
    assert min(sizes) >= 2
    assert len(set(sizes)) > 1


def test_a_batch_that_fits_runs_whole_and_as_it_is():
    net, forward = parted(make_net(), capacity=30)
    output, sizes = forward.run(net, net, (INPUTS,), {}, 30)
    assert sizes == []
    assert net.sizes == [30]
    assert forward._gauge.part is None
    assert torch.equal(output, net.net(INPUTS))


@pytest.mark.parametrize("capacity", [29, 17, 9, 5])
def test_gradients_of_parts_are_those_of_the_whole(capacity):
    net, forward = parted(make_net(), capacity)
    output, sizes = forward.run(net, net, (INPUTS,), {}, 30)
    assert max(sizes) <= capacity
    loss_of(output).backward()
    ours = gradients(net)
    net.zero_grad()
    whole = net.net(INPUTS)
    loss_of(whole).backward()
    assert torch.equal(output, whole)
    for mine, theirs in zip(ours, gradients(net), strict=True):
        assert (mine is None) == (theirs is None), "a parameter that is not used has no gradient"
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer", ["dropout", "batch norm", "both"])
@pytest.mark.parametrize("known", [True, False], ids=["part known", "found out"])
def test_parts_are_to_chance_and_batch_statistics_what_micro_batches_are(layer, known):
    extra = {"dropout": [nn.Dropout(0.4)], "batch norm": [nn.BatchNorm1d(8)], "both": [nn.BatchNorm1d(8), nn.Dropout()]}
    net, forward = parted(make_net(*extra[layer]), 16, part=16 if known else None)
    reference = make_net(*extra[layer])
    attempt = None
    if not known:  # the attempt that fails draws numbers of its own
        attempt = make_net(*extra[layer])
    torch.manual_seed(7)
    output, sizes = forward.run(net, net, (INPUTS,), {}, 30)
    loss_of(output).backward()
    after = torch.rand(1)
    torch.manual_seed(7)
    if attempt is not None:
        attempt(INPUTS)
    expected = in_parts(reference, sizes)
    loss_of(expected).backward()
    assert torch.equal(torch.rand(1), after), "backward draws no numbers that others would have drawn"
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients(net), gradients(reference), strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    for mine, theirs in zip(net.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


class Replacing(nn.Module):
    """Has a buffer that is replaced, not written to, and that decides what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return features * self.weight * self.count


def test_buffers_are_in_backward_what_they_were_in_each_parts_forward():
    net, forward = parted(Replacing(), 16)
    output, sizes = forward.run(net, net, (INPUTS,), {}, 30)
    loss_of(output).backward()
    reference = Replacing()
    loss_of(in_parts(reference, sizes)).backward()
    assert net.net.count == reference.count == 2
    torch.testing.assert_close(net.net.weight.grad, reference.weight.grad, rtol=1e-12, atol=1e-12)


class Pair(NamedTuple):
    scores: torch.Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, features: torch.Tensor, *, mask: torch.Tensor, table: torch.Tensor) -> Pair:
        scores = self.net(features * mask[:, None]) + table.sum()
        return Pair(scores, {"best": scores.argmax(-1), "seen": scores.detach() * 2, "name": "net", "none": None})


def test_nested_outputs_and_inputs_are_put_together_again():
    net, forward = parted(Nested(), 12)
    features, table = INPUTS.clone().requires_grad_(), torch.ones(4, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(30) % 2
    output, sizes = forward.run(net, net, (features,), {"mask": mask, "table": table}, 30)
    assert len(sizes) > 2
    expected = net.net(features, mask=mask, table=table)
    assert type(output) is Pair
    torch.testing.assert_close(output.scores, expected.scores)
    assert torch.equal(output.rest["best"], expected.rest["best"])
    assert not output.rest["seen"].requires_grad
    assert (output.rest["name"], output.rest["none"]) == ("net", None)
    (loss_of(output.scores)).backward()
    ours, features.grad, table_gradient, table.grad = features.grad, None, table.grad, None
    loss_of(expected.scores).backward()
    torch.testing.assert_close(ours, features.grad)
    torch.testing.assert_close(table_gradient, table.grad)


class Returning(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.net, self.what = nn.Linear(3, 2, dtype=torch.float64), what

    def forward(self, features: torch.Tensor) -> Any:
        rows = self.net(features)
        answers = {
            "a mean": lambda: rows.mean(),
            "all pairs": lambda: rows @ rows.T,
            "a sum in a dict": lambda: {"rows": rows, "loss": rows.sum().reshape(1)},
            "a list per sample": lambda: list(rows),
            "a size": lambda: (rows, len(rows)),
        }
        return answers[self.what]()


def test_refused_parts_leave_buffers_as_one_forward_leaves_them():
    net, forward = parted(nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64), Returning("a mean")), 30, end=3300)
    forward.run(net, net, (INPUTS,), {}, 30)
    assert net.net[0].num_batches_tracked == 1


@pytest.mark.parametrize("what", ["a mean", "all pairs", "a sum in a dict", "a list per sample", "a size"])
def test_outputs_that_are_not_one_row_per_sample_leave_the_first_error_as_it_was(what):
    net, forward = parted(Returning(what), 16)
    with pytest.raises(torch.OutOfMemoryError, match="Made up") as caught:
        forward.run(net, net, (INPUTS,), {}, 30)
    (note,) = caught.value.__notes__
    assert "running the batch in parts did not help" in note
    assert forward._gauge.part is None


class Leaving(nn.Module):
    """Does more in forward than to return outputs."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.net, self.what, self.losses = nn.Linear(3, 2, dtype=torch.float64), what, []

    def forward(self, features: torch.Tensor, names: Any = None) -> torch.Tensor:
        if self.what == "changes its inputs":
            features.mul_(2.0)
        rows = self.net(features)
        if self.what == "keeps a tensor":
            self.losses = [rows.square().mean()]
        return rows


@pytest.mark.parametrize(
    ("what", "inputs", "said"),
    [
        ("changes its inputs", (INPUTS.clone(),), "forward changes its inputs in place"),
        ("keeps a tensor", (INPUTS,), "forward keeps a tensor with a graph in 'losses' of net"),
        ("takes a list", (INPUTS, ["name"] * 30), "an input is a list of 30 values"),
    ],
)
def test_forwards_that_cannot_be_repeated_or_cut_unnoticed_are_not_run_in_parts(what, inputs, said):
    net, forward = parted(Leaving(what), 16)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        forward.run(net, net, inputs, {}, 30)
    assert said in caught.value.__notes__[0]


def test_a_forward_that_changes_its_inputs_and_leaves_little_room_runs_once():
    net, forward = parted(Leaving("changes its inputs"), 30, end=3300)
    inputs = INPUTS.clone()
    _, sizes = forward.run(net, net, (inputs,), {}, 30)
    assert sizes == []
    assert torch.equal(inputs, 2 * INPUTS)


class Wrapping(nn.Module):
    """Raises an error of its own about memory, for a reason."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory") from KeyError("the reason")


def test_an_error_keeps_its_cause():
    net, forward = parted(Wrapping(), 30)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        forward.run(net, net, (INPUTS,), {}, 30)
    assert isinstance(caught.value.__cause__, KeyError)


def test_hooks_on_parameters_see_the_gradient_once_and_whole():
    net, forward = parted(nn.Linear(3, 2, dtype=torch.float64), 16)
    seen: list[torch.Tensor] = []
    handle = net.net.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 0.5)
    output, _ = forward.run(net, net, (INPUTS,), {}, 30)
    loss_of(output).backward()
    ours = net.net.weight.grad
    handle.remove()
    net.zero_grad()
    loss_of(net.net(INPUTS)).backward()
    assert len(seen) == 1
    torch.testing.assert_close(ours, 0.5 * net.net.weight.grad, rtol=1e-12, atol=1e-12)
    assert not net.net.weight._backward_hooks


@pytest.mark.parametrize("what", ["inputs", "parameters"])
def test_backward_refuses_what_was_changed_since_forward(what):
    net, forward = parted(nn.Linear(3, 2, dtype=torch.float64), 16)
    inputs = INPUTS.clone()
    output, _ = forward.run(net, net, (inputs,), {}, 30)
    with torch.no_grad():
        (inputs if what == "inputs" else net.net.weight).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(output).backward()


def test_a_loss_that_is_kept_does_not_keep_the_inputs():
    net, forward = parted(make_net(), 16)
    inputs = INPUTS.clone()
    alive = weakref.ref(inputs)
    output, _ = forward.run(net, net, (inputs,), {}, 30)
    loss = loss_of(output)
    loss.backward(retain_graph=True)
    first = net.net.layers[0].weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(net.net.layers[0].weight.grad, 2 * first)
    del inputs, output
    assert alive() is None


class Growing(nn.Module):
    """Returns more in later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.num_outputs = nn.Linear(3, 2, dtype=torch.float64), 1

    def forward(self, features: torch.Tensor) -> list[torch.Tensor]:
        return [self.net(features) for _ in range(self.num_outputs)]


def test_what_is_known_of_the_parts_is_found_out_anew_where_it_no_longer_holds():
    net, forward = parted(Growing(), 16)
    forward.run(net, net, (INPUTS,), {}, 30)
    forward._gauge._by_failures = 20
    net.net.num_outputs = 2
    outputs, sizes = forward.run(net, net, (INPUTS,), {}, 30)
    assert (len(outputs), len(sizes)) == (2, 2)
    assert all(output.requires_grad for output in outputs)
    smaller, forward = parted(make_net(), 6, part=10)
    output, sizes = forward.run(smaller, smaller, (INPUTS,), {}, 30)
    loss_of(output).backward()
    assert max(sizes) <= 10, "without a graph more fit, and parts that run out in backward are halved"


def test_a_batch_of_which_not_even_two_samples_fit_leaves_the_first_error_as_it_was():
    net, forward = parted(make_net(), 1)
    with pytest.raises(torch.OutOfMemoryError, match="Made up"):
        forward.run(net, net, (INPUTS,), {}, 30)


def test_inputs_without_samples_in_dimension_0_cannot_be_cut():
    net, forward = parted(make_net(), 16)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        forward.run(net, net, (INPUTS,), {}, 31)
    assert "no input has 31 samples" in caught.value.__notes__[0]


def test_errors_other_than_lack_of_memory_pass():
    net, forward = parted(make_net(), 30)
    with pytest.raises(RuntimeError, match="shapes"):
        forward.run(net, net, (INPUTS[:, :2],), {}, 30)
    assert net.sizes == [30]


def test_a_forward_that_leaves_too_little_for_backward_is_run_in_parts():
    net, forward = parted(make_net(), 30, end=3500)
    output, sizes = forward.run(net, net, (INPUTS,), {}, 30)
    assert sizes == [16, 14], "30 samples hold 3000 bytes, and backward needs a quarter more and the gradients"
    loss_of(output).backward()
    assert forward._gauge.part == 16
    assert 16 <= forward._gauge.max_batch < 30


def test_where_such_a_forward_cannot_be_cut_it_runs_whole():
    net, forward = parted(Returning("a mean"), 30, end=3500)
    output, sizes = forward.run(net, net, (INPUTS,), {}, 30)
    assert sizes == []
    assert output.requires_grad
    assert forward._gauge.part is None


def test_a_part_that_runs_out_in_backward_is_halved_where_halves_repeat_it():
    net, forward = parted(make_net(), 30, part=16)
    net.backward_capacity = 4
    output, _ = forward.run(net, net, (INPUTS,), {}, 30)
    loss_of(output).backward()
    ours = gradients(net)
    net.zero_grad()
    loss_of(net.net(INPUTS)).backward()
    for mine, theirs in zip(ours, gradients(net), strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    dropout, forward = parted(make_net(nn.Dropout()), 30, part=16)
    dropout.backward_capacity = 4
    output, _ = forward.run(dropout, dropout, (INPUTS,), {}, 30)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(output).backward()


def test_what_a_part_held_says_how_large_a_batch_may_be():
    net, forward = parted(make_net(), 20, end=6000)
    forward.run(net, net, (INPUTS,), {}, 30)
    assert sum(p.nbytes for p in net.parameters()) == 448, "of which a step keeps 4 copies"
    # A sample holds 100 bytes and its loss twice its outputs' 16; backward needs a quarter more, fragments a tenth.
    assert forward._gauge.max_batch == int((0.9 * 6000 - 4 * 448) / (1.25 * 132)) == 21


def test_under_autocast_parts_are_cast_as_the_whole_is_and_nothing_stays_cached():
    net, forward = parted(make_net().float(), 16)
    inputs = INPUTS.float()
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = forward.run(net, net, (inputs,), {}, 30)
        assert output.dtype == torch.bfloat16
        again = net.net(inputs)  # weights cast without a graph would have no gradient
        loss_of(again.float()).backward()
        expected = gradients(net)
        net.zero_grad()
    loss_of(output.float()).backward()
    for mine, theirs in zip(gradients(net), expected, strict=True):
        if theirs is not None:
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


def test_gradients_come_in_the_order_that_ddp_expects_its_buckets_in():
    net, forward = parted(nn.Sequential(*[nn.Linear(3, 3, dtype=torch.float64) for _ in range(20)]), 16)
    order: list[int] = []
    for number, parameter in enumerate(net.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    output, _ = forward.run(net, net, (INPUTS,), {}, 30)
    loss_of(output).backward()
    assert order == list(range(40))[::-1]


# On several ranks


@pytest.fixture(scope="module")
def trained():
    runs = {
        "model": partial(cases.train_with_little_memory, attached=False),
        "attached": partial(cases.train_with_little_memory, attached=True),
        "unused": partial(cases.train_with_little_memory, attached=False, find_unused_parameters=True),
        "views": partial(cases.train_with_little_memory, attached=False, gradient_as_bucket_view=True),
        "loss": partial(cases.train_with_little_memory, attached=False, weighting="loss"),
        "compiled": partial(cases.train_with_little_memory, attached=False, compiled=True),
        "never enough": partial(cases.train_in_parts_for_good),
        "hidden": cases.train_checkpointed,
    }
    return run_ranks(run_cases, 3, runs, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["model", "attached", "unused", "views", "loss", "compiled"])
def test_a_rank_that_runs_out_of_memory_trains_on_and_no_sample_is_lost(trained, way):
    told = values(trained, way)
    assert sorted(number for rank in told for number in rank.seen) == list(range(600))
    alone = cases.train_alone()
    for rank in told:
        for ours, theirs in zip(rank.weights[: len(alone)], alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["model", "attached"])
def test_the_plan_learns_what_the_rank_holds_and_says_so(trained, way):
    told = values(trained, way)
    plans = told[0].plans
    assert plans[0] == (8, 8, 8)
    assert plans[-1][2] <= 7
    assert any("memory holds rank 2 to" in reason for reason in told[0].reasons)
    first = told[2].sizes[0]
    assert first == 8, "tried whole once"
    assert told[2].sizes.count(8) == 1
    assert not any(told[2].valid[: plans.index(plans[-1])][:5]), "steps in parts are not measured"
    (event,) = told[0].events
    assert (event["rank"], event["local_batch"]) == (2, 8)
    assert event["max_batch"] <= 7
    assert event["text"].startswith("rank 2 ran out of memory with 8 samples: trained in parts, at most")
    (warned,) = told[2].warned
    assert "rank 2 has not enough memory for a local batch of 8: it trained on it in 2 parts" in warned
    assert told[0].warned == told[1].warned == []


@pytest.mark.timeout(120)
def test_dynamo_is_given_the_network_and_nothing_of_what_runs_it_in_parts(trained):
    for told in values(trained, "compiled"):
        assert told.graphs
        assert all(any("linear" in name for name in graph) for graph in told.graphs), told.graphs


@pytest.mark.timeout(120)
def test_where_all_ranks_together_hold_too_little_the_run_goes_on_in_parts(trained):
    told = values(trained, "never enough")
    assert sorted(number for rank in told for number in rank.seen) == list(range(1200))
    assert {sum(plan) for plan in told[0].plans} == {24}
    assert told[1].valid[-1], "in the end they are measured as they are"
    alone = cases.train_alone(1200)
    for ours, theirs in zip(told[0].weights, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.timeout(120)
def test_parameters_that_checkpointing_hides_from_autograd_are_not_trained_without_them(trained):
    for told in (rank["hidden"] for rank in trained):
        assert told.kind == "OutOfMemoryError"
        assert "some parameter has no gradient that autograd finds" in told.notes[0]


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.num_sums = nn.Linear(3, 2, dtype=torch.float64), 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        rows = self.net(features)
        self.count += 1
        total = rows.detach().sum()
        dist.all_reduce(total)
        self.num_sums += 1
        return rows - total


def talk(rank: int, **memory: int) -> tuple[Any, int, float]:
    net, forward = parted(Talking(), **memory)
    try:
        told: Any = forward.run(net, net, (INPUTS,), {}, 30)[1]
    except torch.OutOfMemoryError as error:
        told = error.__notes__[0]
    return told, net.net.num_sums, float(net.net.count)


def test_a_forward_that_talks_to_other_ranks_does_so_once():
    runs = {"too large": partial(talk, capacity=16), "barely": partial(talk, capacity=30, end=3300)}
    (told,) = run_ranks(run_cases, 1, runs)
    said, num_sums, _ = told["too large"]
    assert "forward talks to other ranks" in said
    assert num_sums == 1
    assert told["barely"] == ([], 1, 1.0)


def made_ddp(rank: int, **options: Any) -> bool:
    synced = options.pop("synced", False)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), **options)
    if synced:
        ddp.module[1] = nn.SyncBatchNorm(3)  # which DDP takes on GPUs only
    return can_cut(ddp)


def test_layers_that_talk_to_other_ranks_and_static_graphs_are_not_cut():
    runs = {
        "plain": made_ddp,
        "synced": partial(made_ddp, synced=True),
        "static": partial(made_ddp, static_graph=True),
    }
    (told,) = run_ranks(run_cases, 1, runs)
    assert told == {"plain": True, "synced": False, "static": False}


def test_a_compiled_network_is_run_in_parts_as_well():
    net, forward = parted(torch.compile(make_net(), backend="aot_eager"), 16)
    output, sizes = forward.run(net, net, (INPUTS,), {}, 30)
    assert len(sizes) == 2
    loss_of(output).backward()
    reference = make_net()
    loss_of(reference(INPUTS)).backward()
    for mine, theirs in zip(gradients(net), gradients(reference), strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
