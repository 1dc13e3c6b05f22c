"""Loops as frameworks write them: they validate in between, look ahead, and never ask for the end of a pass."""

from __future__ import annotations

from functools import partial

import framework_loop_cases as cases
import pytest
from ranks import run_ranks
from told import Raised, run_cases, values

CASES = {
    "no validation": partial(cases.validation, who=None),
    "validation that leaves the wrapper": partial(cases.validation, who="wrapper"),
    "validation that leaves the network": partial(cases.validation, who="network"),
    "plain loop": partial(cases.looking_ahead, fetch=iter),
    "one ahead": partial(cases.looking_ahead, fetch=partial(cases.ahead, depth=1)),
    "three ahead": partial(cases.looking_ahead, fetch=partial(cases.ahead, depth=3)),
    "three ahead, with workers": partial(cases.looking_ahead, fetch=partial(cases.ahead, depth=3), num_workers=1),
    "groups of four": partial(cases.looking_ahead, fetch=partial(cases.groups, size=4)),
    "one ahead, with a sampler": cases.looking_ahead_over_a_sampler,
    "rests of a plain loop": partial(cases.rests, fetch=iter),
    "rests one ahead": partial(cases.rests, fetch=partial(cases.ahead, depth=1)),
    "rests in groups of four": partial(cases.rests, fetch=partial(cases.groups, size=4)),
    "before training": cases.state_before_training,
    "drawn ahead": cases.drawn_ahead,
    "no end": cases.no_end,
    "no end, with workers": partial(cases.no_end, num_workers=1),
    "no end, finished": partial(cases.no_end, calls_finish=True),
    "no end, without the last batch": partial(cases.no_end, drop_last=True),
    "part of a pass, finished": partial(cases.no_end, calls_finish=True, limit=3),
    "part of a pass": partial(cases.no_end, limit=3),
    "inner loop": cases.pass_inside_of_a_pass,
    "statistics": partial(cases.statistics, depth=0),
    "statistics, one ahead": partial(cases.statistics, depth=1),
    "statistics, left over": partial(cases.statistics, depth=0, accumulates=True),
    "statistics, left over, one ahead": partial(cases.statistics, depth=1, accumulates=True, finishes=True),
    "wrapped by nobody": partial(cases.wrapped, by="nobody"),
    "wrapped by torch.compile": partial(cases.wrapped, by="torch.compile"),
    "wrapped by another optimizer": partial(cases.wrapped, by="another optimizer"),
    "scheduler": cases.read_scheduler,
    "python reducer": cases.python_reducer,
    "own DataLoader": partial(cases.own_dataloader, fetch=iter),
    "own DataLoader, one ahead": partial(cases.own_dataloader, fetch=partial(cases.ahead, depth=1)),
    "own DataLoader, groups of five": partial(cases.own_dataloader, fetch=partial(cases.groups, size=5)),
    "own DataLoader, with workers": partial(cases.own_dataloader, fetch=partial(cases.groups, size=5), num_workers=1),
    "prepared by Accelerate, even batches": partial(cases.prepared_by_accelerate, even_batches=True),
    "prepared by Accelerate": partial(cases.prepared_by_accelerate, even_batches=False),
    "optimizer of Accelerate": cases.optimizer_of_accelerate,
}


@pytest.fixture(scope="module")
def told():
    """What every case said on both ranks, in one launch."""
    return run_ranks(run_cases, 2, CASES, timeout_s=120)


@pytest.mark.parametrize("who", ["wrapper", "network"])
def test_a_step_is_a_training_step_where_wrapper_or_network_is_in_training_mode(told, who):
    assert values(told, f"validation that leaves the {who}") == values(told, "no validation")


@pytest.mark.parametrize(
    "loop",
    [
        "plain loop",
        "one ahead",
        "three ahead",
        "three ahead, with workers",
        "groups of four",
        "one ahead, with a sampler",
    ],
)
def test_a_state_counts_what_was_trained_on_however_far_the_loop_looks_ahead(told, loop):
    for looked in values(told, loop):
        places = [(0, 6), (0, 12), (0, 18), (0, 24), (1, 0), (1, 6), (1, 12), (1, 18), (1, 24), (2, 0)]
        assert looked.places == places
        assert looked.resumed == looked.samples


def test_a_state_counts_neither_what_waits_nor_what_was_broken_off_before_it_was_trained_on(told):
    assert values(told, "before training") == [[(0, 0), (0, 6), (0, 6), (4, 0)]] * 2


@pytest.mark.parametrize("loop", ["of a plain loop", "one ahead", "in groups of four"])
def test_a_snapshot_may_be_taken_between_the_steps_of_a_loop_that_looks_ahead(told, loop):
    for rests in values(told, f"rests {loop}"):
        assert len({num_steps for num_steps, _, _ in rests}) >= 4
        for num_steps, epoch, position in rests:
            assert epoch * 30 + position == 6 * num_steps, "what the state counts is in the weights"


def test_a_state_of_sizes_that_are_drawn_ahead_counts_what_was_trained_on(told):
    assert values(told, "drawn ahead") == [[6, 12, 18]] * 2


@pytest.mark.parametrize("loop", ["no end", "no end, with workers", "no end, finished"])
def test_passes_whose_end_nobody_asks_for_give_every_sample_once(told, loop):
    one, other = values(told, loop)
    assert len(one) == 3
    for first, second in zip(one, other, strict=True):
        assert sorted(first + second) == list(range(26))
    assert one[0] != one[1] != one[2], "each is an epoch of its own"


def test_passes_without_their_last_batch_have_an_end_that_nobody_need_ask_for(told):
    assert [[len(samples) for samples in passes] for passes in values(told, "no end, without the last batch")] == [
        [16, 16, 16],
        [8, 8, 8],
    ]


def test_a_pass_that_is_left_in_the_middle_is_over_once_finish_is_called(told):
    assert [[len(samples) for samples in passes] for passes in values(told, "part of a pass, finished")] == [
        [12, 12, 12],
        [6, 6, 6],
    ]


@pytest.mark.parametrize("loop", ["part of a pass", "inner loop"])
def test_a_pass_inside_of_another_is_refused_with_what_to_do(told, loop):
    for answers in told:
        assert isinstance(answers[loop], Raised)
        assert "call finish() of the loader first" in answers[loop].text


@pytest.mark.parametrize("loop", ["statistics, one ahead", "statistics, left over", "statistics, left over, one ahead"])
def test_batch_norms_statistics_are_the_weighted_mean_at_the_end_of_a_pass_however_it_is_looped_over(told, loop):
    one, other = values(told, loop)
    assert one == other
    assert one == pytest.approx(values(told, "statistics")[0], rel=0.2)


@pytest.mark.parametrize("by", ["torch.compile", "another optimizer"])
def test_what_somebody_has_wrapped_can_be_attached_to(told, by):
    for weights, plain in zip(values(told, f"wrapped by {by}"), values(told, "wrapped by nobody"), strict=True):
        assert weights == pytest.approx(plain, abs=1e-6)


def test_a_setting_of_the_compiler_that_hides_buckets_is_named(told):
    for answers in told:
        assert answers["python reducer"].kind == "InvalidInputError"
        assert 'optimize_ddp = "python_reducer"' in answers["python reducer"].text


@pytest.mark.parametrize("loop", ["", ", one ahead", ", groups of five", ", with workers"])
def test_a_dataloader_of_ones_own_may_be_fetched_from_in_any_way(told, loop):
    one, other = values(told, f"own DataLoader{loop}")
    assert (len(one), len(other)) == (2 * 64, 2 * 32)


@pytest.mark.parametrize("how", ["", ", even batches"])
def test_batches_that_accelerate_deals_out_once_more_are_refused(told, how):
    pytest.importorskip("accelerate")
    for answers in told:
        assert answers[f"prepared by Accelerate{how}"].kind == "InvalidInputError"
        assert "leave the DataLoader out of prepare()" in answers[f"prepared by Accelerate{how}"].text


def test_what_accelerate_has_prepared_can_be_attached_to(told):
    pytest.importorskip("accelerate")
    assert values(told, "optimizer of Accelerate") == [4.0, 4.0]


def test_what_trainers_read_from_a_scheduler_can_be_read_from_one_by_progress(told):
    assert values(told, "scheduler") == [([0.0125], True, [0.05], [0.0125])] * 2
