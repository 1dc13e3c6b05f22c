"""The marks on forward's outputs: what they tell of the start of backward, and what they leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cannikin.runtime.weighting import mark_outputs


@pytest.mark.parametrize("scaled", [True, False])
def test_a_mark_is_heard_once_when_backward_begins_and_a_factor_of_one_changes_nothing(scaled):
    net, features = nn.Linear(3, 2), torch.ones(4, 3)
    heard = []
    output, num_marked = mark_outputs(net(features), lambda: heard.append("backward") or 1.0, scaled=scaled)
    assert (num_marked, heard) == (1, [])
    output.sum().backward()
    assert heard == ["backward"]
    assert net.bias.grad.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("scaled", [True, False])
def test_a_parameter_that_is_returned_keeps_no_hook(scaled):
    table = nn.Parameter(torch.ones(2))
    heard = []
    for _ in range(3):
        output, _ = mark_outputs({"table": table}, lambda: heard.append("backward") or 1.0, scaled=scaled)
        output["table"].sum().backward()
    assert heard == ["backward"] * 3
    assert not table._backward_hooks


def test_outputs_that_are_not_scaled_are_given_back_as_they_are():
    output = nn.Linear(3, 2)(torch.ones(4, 3))
    assert mark_outputs(output, lambda: 1.0, scaled=False)[0] is output
