"""The throttle on real modules, by a clock that only moves when told."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from clock import Clock
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cannikin.lab.cluster import LabDevice
from cannikin.lab.throttle import Pace, Throttle

# 10 samples take 0.1 s forward and 0.3 s backward.
DEVICE = LabDevice(speed=1.0, sample_s=0.04, fixed_s=0.0, forward_share=0.25)
FORWARD_S, BACKWARD_S = 0.1, 0.3


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def throttle(clock):
    made = Throttle(DEVICE, make_pace=lambda: Pace(clock, clock.sleep), warn=pytest.fail)
    made.install()
    yield made
    made.remove()


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)]
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 2))


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 40).reshape(10, 4)


def test_forward_lasts_as_long_as_the_device_takes(throttle, clock):
    network()(inputs())
    assert clock.sleeps == pytest.approx([FORWARD_S])


def test_in_backward_gradients_appear_layer_by_layer_as_time_passes(throttle, clock):
    net = network()
    appeared = {}

    def note(number):
        def at(parameter):
            appeared[number] = clock.now_s

        return at

    for number in (0, 2, 4):
        net[number].weight.register_post_accumulate_grad_hook(note(number))  # DDP hears of it after these
    output = net(inputs())
    start_s = clock.now_s
    output.sum().backward()
    assert [appeared[number] - start_s for number in (4, 2, 0)] == pytest.approx([0.1, 0.2, 0.3])


def test_real_work_counts_and_sleep_fills_the_rest(throttle, clock):
    net = network()
    net[2].register_forward_hook(lambda *_: clock.work(0.06))
    net(inputs())
    assert clock.sleeps == pytest.approx([FORWARD_S - 0.06])


def test_gradients_are_those_of_the_script_alone_where_it_works_in_place(clock):
    plain, slowed = network(), network()

    def train(net):
        output = net(inputs())
        output += 1
        output.relu_().square().sum().backward()
        return [parameter.grad for parameter in net.parameters()]

    expected = train(plain)
    throttle = Throttle(DEVICE, make_pace=lambda: Pace(clock, clock.sleep))
    throttle.install()
    try:
        found = train(slowed)
    finally:
        throttle.remove()
    assert sum(clock.sleeps) == pytest.approx(FORWARD_S + BACKWARD_S)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_evaluation_and_losses_keep_their_speed(throttle, clock):
    net = network()
    with torch.no_grad():
        net(inputs())
    net.eval()
    output = net(inputs())
    nn.CrossEntropyLoss()(output, torch.zeros(10, dtype=torch.long))
    assert clock.sleeps == []


def test_a_checkpointed_part_is_not_slowed_twice(throttle, clock):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = nn.Linear(4, 4), network()

        def forward(self, x):
            return checkpoint(self.rest, self.first(x), use_reentrant=False)

    Checkpointed()(inputs()).sum().backward()
    assert sum(clock.sleeps) == pytest.approx(FORWARD_S + BACKWARD_S)


def test_layers_that_backward_does_not_reach_take_no_time_from_the_others_after_the_first_step(throttle, clock):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = network(), nn.Linear(1, 1)

        def forward(self, x):
            return self.used(x)

    net = Partly()
    for _ in range(2):
        clock.sleeps.clear()
        net(inputs()).sum().backward()
    assert sum(clock.sleeps) == pytest.approx(FORWARD_S + BACKWARD_S)


def test_one_backward_through_two_forwards_takes_the_time_of_both(throttle, clock):
    net = network()
    for _ in range(2):
        clock.sleeps.clear()
        (net(inputs()).sum() + net(inputs()).sum()).backward()
        assert sum(clock.sleeps) == pytest.approx(2 * (FORWARD_S + BACKWARD_S))


def test_a_forward_that_raises_slows_nothing_and_the_next_is_as_ever(throttle, clock):
    net = network()
    with pytest.raises(RuntimeError):
        net(torch.zeros(10, 5))
    assert clock.sleeps == []
    net(inputs()).sum().backward()
    assert sum(clock.sleeps) == pytest.approx(FORWARD_S + BACKWARD_S)


def test_samples_are_counted_and_outputs_found_wherever_they_are(throttle, clock):
    @dataclass
    class Output:
        scores: dict[str, list[torch.Tensor]]

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, scale, *, batch):
            return Output(scores={"scores": [self.net(batch["x"]) * scale]})

    Nested()(2.0, batch={"x": inputs()}).scores["scores"][0].sum().backward()
    assert sum(clock.sleeps) == pytest.approx(FORWARD_S + BACKWARD_S)


def test_speed_changes_at_the_training_forward_that_was_named(clock):
    throttle = Throttle(
        LabDevice(speed=1.0, sample_s=0.04, fixed_s=0.0, forward_share=0.25, changes=[(2, 0.5)]),
        make_pace=lambda: Pace(clock, clock.sleep),
    )
    throttle.install()
    net = network()
    try:
        for _ in range(4):
            with torch.no_grad():
                net(inputs())  # not counted
            net(inputs())
    finally:
        throttle.remove()
    assert clock.sleeps == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_waiting_for_other_ranks_before_forward_is_not_work(throttle, clock, alone):
    ddp = DistributedDataParallel(network())
    ddp.register_forward_pre_hook(lambda *_: clock.work(5.0))  # where DDP waits for rank 0's buffers
    ddp(inputs()).sum().backward()
    del ddp  # before its group: else it joins gloo's threads under the GIL, for which one of them may be waiting
    assert sum(clock.sleeps) == pytest.approx(FORWARD_S + BACKWARD_S)


def test_too_much_real_work_is_told_once_with_advice(clock):
    told = []
    throttle = Throttle(DEVICE, make_pace=lambda: Pace(clock, clock.sleep), warn=told.append)
    throttle.install()
    net = network()
    net[2].register_forward_hook(lambda *_: clock.work(0.2))  # of 0.4
    try:
        for _ in range(60):
            net(inputs()).sum().backward()
    finally:
        throttle.remove()
    (line,) = told
    assert "real work takes 50%" in line
    assert "raise --sample-ms from 40 to about 60" in line


def test_a_model_in_training_can_be_copied_and_saved_whole(throttle, tmp_path):
    net = network()
    net(inputs()).sum().backward()
    copy.deepcopy(net)
    torch.save(net, tmp_path / "net.pt")  # a warning would fail the test


def test_nothing_is_slowed_once_it_is_removed(throttle, clock):
    net = network()
    net(inputs()).sum().backward()
    throttle.remove()
    assert not torch.nn.modules.module._has_any_global_hook()
    clock.sleeps.clear()
    net(inputs()).sum().backward()
    assert clock.sleeps == []


class Blocks(nn.Module):
    """A part of two layers and one of one, and a layer of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return x


def test_each_sharded_part_takes_its_share_between_its_collectives(throttle, clock, alone):
    net = Blocks()
    for part in net.parts:
        fully_shard(part)
    fully_shard(net)
    net(inputs()).sum().backward()  # hooks are set at the first forward
    clock.sleeps.clear()
    output = net(inputs())
    assert clock.sleeps == pytest.approx([FORWARD_S / 2, FORWARD_S / 4, FORWARD_S / 4])  # parts, then the root's own
    clock.sleeps.clear()
    output.sum().backward()
    assert clock.sleeps == pytest.approx([BACKWARD_S / 4, BACKWARD_S / 4, BACKWARD_S / 2])
    throttle.remove()
    clock.sleeps.clear()
    net(inputs()).sum().backward()
    assert not clock.sleeps
