"""Loops that users write: resumed, accumulating, evaluating on the training data, cutting batches themselves."""

from __future__ import annotations

from functools import partial

import loop_cases as cases
import pytest
import torch
from ranks import run_ranks
from told import Raised, run_cases, values
from torch import nn

from cannikin.core.lr import LR_RULES, rule_name
from cannikin.errors import InvalidInputError
from cannikin.runtime.device import Cpu
from cannikin.runtime.update import AdamVariance, Rates, Update, choose_rule

CASES = {
    "resumed before the loader": partial(cases.resumed, before_the_loader=True),
    "resumed after the loader": partial(cases.resumed, before_the_loader=False),
    "long accumulation": cases.long_accumulation,
    "own batch": cases.batch_of_the_users_own,
    "evaluation": cases.evaluation_on_the_training_data,
    "eval mode": cases.training_in_eval_mode,
    "gradient in eval mode": cases.gradient_in_eval_mode,
    "network called itself": cases.network_called_itself,
    "two models": cases.optimizer_of_two_models,
    "pinned": cases.pinned_under_a_planner,
    "copied": cases.copied,
    "scaler off": cases.scaler_that_is_off,
    "parts": cases.largest_forward,
    "item sums": cases.item_sums_left_over,
    "attached": cases.attached_policy,
    "profiles": partial(cases.profiles_of_a_policy_without, path="profiles-of-nobody.json"),
    "attached, by epochs": cases.epochs_of_an_attached_model,
    "attached, passes": cases.passes_and_mean_of_an_attached_model,
    "attached, statistics": partial(cases.running_means, attached=True),
    "wrapped, statistics": partial(cases.running_means, attached=False),
    "resumed schedule of steps": partial(cases.resumed_schedules, unit="step"),
    "resumed schedule of passes": partial(cases.resumed_schedules, unit="epoch"),
    "dropped loader": cases.dropped_loader,
    "resumed passes": cases.numbers_of_resumed_passes,
}


@pytest.fixture(scope="module")
def told():
    """What every case said on both ranks, in one launch."""
    return run_ranks(run_cases, 2, CASES, timeout_s=60)


@pytest.mark.parametrize("when", ["before", "after"])
def test_ranks_that_resume_at_a_larger_batch_take_the_same_steps(told, when):
    one, other = values(told, f"resumed {when} the loader")
    assert one == other
    gain, rates, _ = one
    assert gain > 1.2
    assert rates == pytest.approx([0.01 * gain] * 3)


def test_whole_windows_may_pass_without_a_synchronised_backward(told):
    assert values(told, "long accumulation") == [3, 3]


def test_use_batch_takes_the_place_of_what_the_loader_said_as_the_error_advises(told):
    for num_left, matched in values(told, "own batch"):
        assert num_left == 0
        assert all(held == taken for held, taken in matched)
        assert len({held for held, _ in matched}) > 2, "the plans changed meanwhile"


def test_an_evaluation_on_the_training_data_leaves_no_batch_behind(told):
    for num_waiting, steps in values(told, "evaluation"):
        assert num_waiting == 40, "they wait until the next pass"
        assert len({step.plan for step in steps}) > 2


def test_training_in_eval_mode_is_refused_since_its_gradient_is_not_weighted(told):
    for answers in told:
        assert answers["eval mode"].kind == "BatchMatchError"
        assert "model.train()" in answers["eval mode"].text
    assert values(told, "gradient in eval mode") == [4, 4]


def test_training_the_network_in_the_wrapped_model_is_refused_since_no_gradient_is_averaged(told):
    for answers in told:
        assert answers["network called itself"].kind == "BatchMatchError"
        text = answers["network called itself"].text
        assert "no training forward of the wrapped model has taken the loader's batch" in text
        assert "model(x), not the network in it" in text


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("two models", "new optimizer for each"),
        ("pinned", r"\(3, 3\), outside of the loader's local_batches .* \[4, 2\]"),
        ("copied", "copy model.module"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused_on_every_rank(told, case, text):
    for answers in told:
        assert isinstance(answers[case], Raised)
        with pytest.raises(InvalidInputError, match=text):
            raise InvalidInputError(answers[case].text)


def test_norms_are_taken_under_a_scaler_that_is_off(told):
    one, other = values(told, "scaler off")
    assert one == other
    assert one == one, "a number"


def test_memory_is_learned_from_what_goes_through_the_network_at_once(told):
    assert values(told, "parts") == [[2] * 4, [1] * 4]


def test_no_sum_of_items_is_under_way_once_the_iterator_has_ended(told):
    waited_s, _ = values(told, "item sums")
    assert waited_s > 0.2


@pytest.mark.parametrize("betas", [(0.9, 0.9), (0.9, 0.999)], ids=["of its own", "the same"])
def test_a_param_group_may_be_added_to_adam_later(betas):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(first.parameters())
    variance = AdamVariance([optimizer])

    def step():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        variance.count_step()

    for _ in range(30):
        step()
    assert variance(list(first.parameters())) is not None
    optimizer.add_param_group({"params": list(second.parameters()), "betas": betas})
    step()
    for layer in (first, second):
        found = variance(list(layer.parameters()))
        assert torch.allclose(found.of_elements / found.common, torch.ones(6))


def test_parameters_that_adam_has_never_had_a_gradient_of_count_nowhere():
    """The rare words of an embedding: divided by next to nothing, the first sight of one would outweigh all others."""
    words = nn.Embedding(100, 4)
    optimizer = torch.optim.Adam(words.parameters(), lr=1e-3)
    variance = AdamVariance([optimizer])
    for _ in range(40):
        words(torch.arange(10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        variance.count_step()
    found = variance(list(words.parameters()))
    sqnorms = (torch.ones(400) / found.of_elements * found.common).view(100, 4)
    assert torch.allclose(sqnorms[:10], torch.ones(10, 4))
    assert (sqnorms[10:] == 0).all()


def test_an_optimizer_that_is_an_adam_by_name_only_has_no_variance():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    variance = AdamVariance([optimizer])
    for parameter in net.parameters():
        optimizer.state[parameter]["exp_avg_sq"] = torch.ones_like(parameter)  # and counts its steps elsewhere
    for _ in range(30):
        variance.count_step()
    assert variance(list(net.parameters())) is None


def test_groups_that_share_one_tensor_as_their_rate_are_scaled_once_and_get_it_back():
    nets = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": list(net.parameters())} for net in nets]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.5), foreach=False)
    rates = Rates(optimizer, LR_RULES["none"])
    for _ in range(2):
        rates.scale(2.0)
        assert [float(group["lr"]) for group in optimizer.param_groups] == [1.0, 1.0]
        rates.give_back()
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]


class MyAdamW(torch.optim.AdamW):
    """An optimizer that somebody has derived from torch's."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, MyAdamW])
def test_a_subclass_of_adam_has_adams_rule_and_adams_noise_scale(kind):
    net = nn.Linear(2, 2)
    optimizer = kind(net.parameters())
    rule, reason = choose_rule("auto", optimizer)
    assert (rule_name(rule), kind.__name__ in reason) == ("sqrt", True)
    assert Update([optimizer], [rule], Cpu(), net.parameters()).variance is not None


def test_adamax_keeps_no_variance_to_divide_by():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adamax(net.parameters())
    assert rule_name(choose_rule("auto", optimizer)[0]) == "sqrt"
    assert Update([optimizer], [LR_RULES["sqrt"]], Cpu(), net.parameters()).variance is None


def test_a_rule_of_the_users_own_scales_the_rate():
    def twice_the_root(total_batch, /, *, initial_batch, gain, progress):
        return 2 * (total_batch / initial_batch) ** 0.5

    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    rule, reason = choose_rule(twice_the_root, optimizer)
    assert rule is twice_the_root
    assert "twice_the_root" in reason
    with pytest.raises(InvalidInputError, match="lr_rule=7 is neither a name nor a callable LrRule"):
        choose_rule(7, optimizer)
    with pytest.raises(InvalidInputError, match="lr_rule='quadratic' is unknown: choose one of auto, adascale"):
        choose_rule("quadratic", optimizer)


def test_the_environment_chooses_the_policy_of_an_attached_model_too(told):
    assert values(told, "attached") == ["even", "even"]


def test_a_schedule_of_epochs_follows_an_attached_model(told):
    assert values(told, "attached, by epochs") == [[1, 2], [1, 2]]


def test_an_attached_model_counts_passes_by_progress_and_averages_by_samples(told):
    assert values(told, "attached, passes") == [([0, 1], pytest.approx(2 / 6))] * 2


@pytest.mark.parametrize("model", ["attached", "wrapped"])
def test_batch_norms_statistics_are_the_weighted_mean_over_ranks_whoever_wraps_the_model(told, model):
    (one,), (other,) = values(told, f"{model}, statistics")
    assert one == other
    assert one == pytest.approx(0.25, abs=0.02), "with rank 0's broadcast at every forward it would be 0.125"


def test_a_loader_that_is_dropped_goes_at_once(told):
    assert values(told, "dropped loader") == [(True, True)] * 2


def test_resumed_passes_keep_their_numbers(told):
    assert values(told, "resumed passes") == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(("unit", "right", "afresh"), [
    ("steps", [9, 10, 11, 12], [1, 2, 3, 4]),
    ("passes", [2, 2, 2, 3], [0, 0, 0, 1]),
])  # fmt: skip
def test_a_resumed_schedule_goes_on_from_where_it_was_whatever_of_it_was_saved_and_in_any_order(
    told, unit, right, afresh
):
    for found in values(told, f"resumed schedule of {unit}"):
        wrapped_on_purpose = found.pop("engine wrap")
        assert wrapped_on_purpose == afresh
        assert all(places == right for places in found.values()), found


def test_profiles_under_a_policy_that_learns_none_are_ignored_with_a_word(told):
    (warned,), others = values(told, "profiles")
    assert "profiles= is ignored: policy 'even'" in warned.text
    assert others == []
