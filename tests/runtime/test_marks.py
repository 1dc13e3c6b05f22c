"""The marks on forward's outputs: what they tell of the start of backward, and what they leave alone."""

from __future__ import annotations

import io
import warnings
from collections import UserDict
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cannikin.runtime.weighting import find_hidden, scale_outputs, watch_outputs


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Named(dict[str, Any]):
    """A dict that pytree does not know."""


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


@pytest.mark.parametrize("kind", [Named, UserDict])
def test_mappings_of_any_class_are_marked_and_keep_it(kind):
    net, given = nn.Linear(3, 2), torch.ones(4, 3)
    inner = kind(out=net(given), name="inner")
    output, num_marked = scale_outputs((given, kind(inner=inner)), lambda: 0.5)
    assert num_marked == 1
    assert type(output[1]) is type(output[1]["inner"]) is kind
    assert output[1]["inner"]["name"] == "inner"
    output[1]["inner"]["out"].sum().backward()
    assert net.bias.grad.tolist() == [2.0, 2.0]
    assert find_hidden(output) is None


@pytest.mark.parametrize("hide", [Slotted, MappingProxyType, lambda held: SimpleNamespace(held={"value": held})])
def test_an_object_that_holds_a_tensor_out_of_sight_is_found(hide):
    out = nn.Linear(3, 2)(torch.ones(4, 3))
    held = {"out": out} if hide is MappingProxyType else out
    hidden = hide(held)
    assert find_hidden((out, [{"more": Named(last=hidden)}])) is hidden
    assert find_hidden((out, hide({"out": out.detach()} if hide is MappingProxyType else out.detach()))) is None


def test_modules_and_what_objects_keep_in_lists_are_not_looked_into():
    out = nn.Linear(3, 2)(torch.ones(4, 3))
    net = nn.Linear(3, 2)
    net.left = out
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=out)])
    assert find_hidden((out, SimpleNamespace(net=net), cache, None, "name", 1.0)) is None
