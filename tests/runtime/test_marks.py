"""The marks on forward's outputs: what they tell of the start of backward, and what they leave alone."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import nn

from cannikin.runtime.weighting import scale_outputs, watch_outputs


class Heard:
    """How often backward was said to begin."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


def test_a_watched_output_tells_of_its_backward_and_stays_as_it_is():
    net, heard = nn.Linear(3, 2), Heard()
    output = net(torch.ones(4, 3))
    assert len(watch_outputs(output, heard)) == 1
    assert heard.count == 0
    output.sum().backward()
    assert heard.count == 1
    assert net.bias.grad.tolist() == [4.0, 4.0]


def test_a_view_that_the_loss_changes_in_place_is_heard_of():
    heard = Heard()
    output = nn.Linear(3, 1)(torch.ones(4, 3)).squeeze(-1)
    watch_outputs({"logits": output}, heard)
    output /= 2
    output.sum().backward()
    assert heard.count == 1


def test_to_ask_for_the_gradient_of_an_output_is_no_backward():
    heard = Heard()
    output = nn.Linear(3, 2)(torch.ones(4, 3))
    watch_outputs(output, heard)
    loss = output.square().sum()
    torch.autograd.grad(loss, output, retain_graph=True)
    assert heard.count == 0
    loss.backward()
    assert heard.count == 1


def test_an_output_that_outlives_its_step_is_watched_no_longer():
    parameter, heard = nn.Parameter(torch.ones(2)), Heard()
    for output in (parameter, parameter * 2):
        for _ in range(3):
            for handle in watch_outputs(output, heard):
                handle.remove()
        output.sum().backward()
    assert heard.count == 0


def test_a_watched_output_can_be_saved_without_a_warning():
    output = nn.Linear(3, 2)(torch.ones(4, 3))
    watch_outputs(output, Heard())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(output, io.BytesIO())


def test_outputs_are_scaled_on_their_way_back():
    net = nn.Linear(3, 2)
    output, num_marked = scale_outputs([net(torch.ones(4, 3))], lambda: 0.5)
    assert num_marked == 1
    output[0].sum().backward()
    assert net.bias.grad.tolist() == [2.0, 2.0]


def test_one_output_may_be_changed_in_place_but_not_one_of_two_that_share_memory():
    hidden = nn.Linear(3, 2)(torch.ones(4, 3))
    (alone,), _ = scale_outputs((hidden,), lambda: 0.5)
    alone.mul_(2)
    (whole, _), _ = scale_outputs((hidden, hidden[:, 0]), lambda: 0.5)
    with pytest.raises(RuntimeError, match="modified inplace"):
        whole.mul_(2)
