"""When plans take effect, what a planner that fails costs, and ranks that are not in step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import coordination_cases as cases
import pytest
import torch
from coordination_cases import NUM_STEPS, SCRIPT
from ranks import run_ranks
from told import Raised, run_cases, values

from cannikin.core.planner import Decision, Noise
from cannikin.core.schedule import Schedule
from cannikin.core.values import Job, Plan
from cannikin.errors import DisagreementError
from cannikin.runtime.device import Cpu
from cannikin.runtime.entry import BatchEntry
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.wire import (
    check_cuts,
    decode_decision,
    empty_decision,
    encode_decision,
    encode_steps,
    merge_windows,
    start_reading,
)

BOTH, ONE = (0, 1), (1,)

IN_FORCE = {
    "plain": cases.plain_loop,
    "ahead": cases.loop_that_looks_ahead,
    "workers": cases.loop_with_workers,
    "held": cases.planner_that_is_held,
    "rank 0 alone plans": cases.planners_of_other_ranks_rest,
    "no noise estimate": cases.grown_without_a_noise_estimate,
}
WRONG = {
    "three ranks": cases.plans_for_three_ranks,
    "an empty batch": cases.plans_with_an_empty_batch,
    "no plan": cases.no_plan_at_all,
}
WRONG_AT_FIRST = {
    "three ranks": cases.first_plan_for_three_ranks,
    "an empty batch": cases.first_plan_with_an_empty_batch,
}
# name -> (case, what the error of every rank names)
OUT_OF_STEP = {
    "the loader's state on one rank": (partial(cases.loader_state_on, ranks=ONE), "position"),
    "the engine's state on one rank": (partial(cases.engine_state_on, ranks=ONE), "local_batches, progress"),
    "the engine's state on rank 0": (partial(cases.engine_state_on, ranks=(0,)), "local_batches, progress"),
    "the engine's state on one rank, before the loader": (
        partial(cases.engine_state_on, ranks=ONE, before_the_loader=True),
        "progress",
    ),
    "the epoch set on one rank": (partial(cases.epoch_set_on, ranks=ONE), "epoch"),
    "a peek on one rank": (partial(cases.peek_on, ranks=ONE), "epoch, step"),
    "an optimizer's step left out": (partial(cases.optimizer_step_left_out_on, ranks=ONE), "progress"),
}
IN_STEP = {
    "the loader's state": partial(cases.loader_state_on, ranks=BOTH),
    "the engine's state": partial(cases.engine_state_on, ranks=BOTH),
    "the engine's state, before the loader": partial(cases.engine_state_on, ranks=BOTH, before_the_loader=True),
    "the epoch": partial(cases.epoch_set_on, ranks=BOTH),
}
CUT_APART = {"a state loaded in a pass": partial(cases.engine_state_in_the_middle_of_a_pass_on, ranks=ONE)}
PEEK = {"a peek on both ranks": partial(cases.peek_on, ranks=BOTH)}
OTHERS = {
    "legw": partial(cases.legw_rates, warmup_steps=10.0),
    "warm-up of another rule": cases.warmup_of_another_rule,
    "opaque, loss": partial(cases.train_opaque, weighting="loss", peeks=False),
    "opaque, loss, after a peek": partial(cases.train_opaque, weighting="loss", peeks=True),
    "opaque, hook": partial(cases.train_opaque, weighting="hook", peeks=False),
    "opaque, hook, after a peek": partial(cases.train_opaque, weighting="hook", peeks=True),
}


@pytest.fixture(scope="module")
def told():
    """What every case said on both ranks, in one launch."""
    return run_ranks(
        run_cases,
        2,
        {
            **IN_FORCE,
            **{f"wrong: {name}": case for name, case in WRONG.items()},
            **{f"wrong at first: {name}": case for name, case in WRONG_AT_FIRST.items()},
            **{name: case for name, (case, _) in OUT_OF_STEP.items()},
            **IN_STEP,
            **PEEK,
            **CUT_APART,
            **OTHERS,
        },
        timeout_s=100,
    )


def expected_plans(delay: int) -> list[tuple[int, ...]]:
    """The split of each step, where the plan of the window that ends before step w holds from step w + delay."""
    plans, window_start, number = [SCRIPT[0]] * NUM_STEPS, 0, 0
    job = Job(num_ranks=2, batch_size=6)
    schedule = Schedule(job, Decision(plan=Plan(first_step=0, total_batch=6, local_batches=(3, 3))))
    while (window_end := window_start + schedule.window_steps(window_start)) < NUM_STEPS:
        number += 1
        plans[window_end + delay :] = [SCRIPT[number % len(SCRIPT)]] * len(plans[window_end + delay :])
        window_start = window_end
    return plans


@pytest.mark.parametrize(
    ("loop", "delay"), [("plain", 4), ("ahead", 5), ("workers", 6)], ids=["plain", "one batch ahead", "two prefetched"]
)
def test_the_plan_of_a_window_is_in_force_a_fixed_number_of_steps_after_it(told, loop, delay):
    found = values(told, loop)
    if loop == "workers":
        assert {depth for depth, _ in found} == {2}
        found = [steps for _, steps in found]
    for rank, steps in enumerate(found):
        assert [step.plan for step in steps] == expected_plans(delay)
        assert [len(step.samples) for step in steps] == [plan[rank] for plan in expected_plans(delay)]


def test_the_planner_works_in_a_thread_beside_the_training_and_a_saved_state_waits_for_it(told):
    (let_go, threads, num_windows), (_, no_threads, _) = values(told, "held")
    assert let_go == [True], "the step went on while the planner was at work"
    assert len(threads) == 1
    assert threads[0].startswith("cannikin-planner")
    assert num_windows == 1, "the window that the planner was at is in the state"
    assert no_threads == []


def test_only_rank_0_learns_and_plans(told):
    (num_windows, steps), (num_others, other_steps) = values(told, "rank 0 alone plans")
    assert (num_windows, num_others) == (3, 0)
    assert [step.plan for step in steps] == [step.plan for step in other_steps]


@pytest.mark.parametrize("name", WRONG)
def test_a_planner_whose_plans_cannot_be_carried_out_costs_its_plans_and_a_warning_not_the_training(told, name):
    (steps, warned, reason), (other_steps, not_warned, _) = values(told, f"wrong: {name}")
    assert len(steps) == len(other_steps)
    assert sorted(sample for step in steps + other_steps for sample in step.samples) == list(range(180))
    assert len({step.plan for step in steps[14:]}) == 1, "the last good plan stays"
    assert [w.kind for w in warned] == ["RuntimeWarning"], "said once"
    assert "the planner failed" in warned[0].text
    assert "no longer adapt" in warned[0].text
    assert not_warned == []
    assert reason.startswith("kept: the planner failed")


@pytest.mark.parametrize("name", WRONG_AT_FIRST)
def test_a_first_plan_that_cannot_be_carried_out_is_refused_on_every_rank(told, name):
    for answers in told:
        raised = answers[f"wrong at first: {name}"]
        assert isinstance(raised, Raised)
        assert raised.kind == "InvalidInputError"
        assert "for 2 ranks: it must give each rank one, of at least 1" in raised.text


@pytest.mark.parametrize("name", OUT_OF_STEP)
def test_ranks_that_begin_a_pass_at_different_places_are_told_so_at_the_first_forward(told, name):
    for rank, answers in enumerate(told):
        raised = answers[name]
        assert isinstance(raised, Raised), raised
        assert raised.kind == "DisagreementError"
        assert f"ranks disagree on {OUT_OF_STEP[name][1]}; rank {rank} has" in raised.text
        assert "load the same saved state on every rank" in raised.text
        assert ("call optimizer.step() after the same batches" in raised.text) == ("left out" in name)


@pytest.mark.parametrize("name", IN_STEP)
def test_ranks_that_begin_a_pass_at_the_same_place_train(told, name):
    assert values(told, name) == [3, 3]


def test_ranks_that_cut_their_steps_differently_are_told_so_on_every_rank_within_a_window(told):
    for answers in told:
        raised = answers["a state loaded in a pass"]
        assert isinstance(raised, Raised)
        assert raised.kind == "DisagreementError"
        assert "ranks cut step 3 differently, into local batches [3, 4] of totals [6, 6]" in raised.text


def test_a_look_at_the_first_batch_on_every_rank_does_no_harm(told):
    steps = values(told, "a peek on both ranks")
    assert sorted(sample for rank in steps for step in rank for sample in step.samples) == list(range(120))
    assert [step.plan for step in steps[0]] == [step.plan for step in steps[1]]


def test_legw_warms_up_by_progress_and_longer_at_a_larger_batch(told):
    notes, others = values(told, "legw")
    assert notes == others
    assert {total for total, _, _ in notes} == {6, 12, 24}
    for progress, (total, inside, outside) in enumerate(notes):  # no noise scale is known: a step is worth 1
        scale = total / 6
        assert inside == pytest.approx(0.01 * math.sqrt(scale) * min(1.0, progress / (10 * scale)))
        assert outside == 0.01, "schedulers and logs see the user's own rate"
    assert notes[0][1] == 0.0
    assert all(inside < 0.02 for total, inside, _ in notes if total == 24), "its warm-up is four times as long"


def test_a_warm_up_that_the_rule_does_not_have_is_said_to_be_ignored(told):
    for warned in values(told, "warm-up of another rule"):
        assert [w.text for w in warned] == ["warmup_steps is ignored: lr_rule='linear', and only 'legw' warms up"]


@pytest.mark.parametrize("name", ["opaque, loss", "opaque, loss, after a peek"])
def test_an_output_that_cannot_be_seen_into_is_refused_where_its_loss_must_be_weighted(told, name):
    for answers in told:
        raised = answers[name]
        assert isinstance(raised, Raised), "its gradients would have the wrong weight"
        assert raised.kind == "InvalidInputError"
        assert "forward returned a Opaque in which no tensor" in raised.text


@pytest.mark.parametrize("name", ["opaque, hook", "opaque, hook, after a peek"])
def test_an_output_that_cannot_be_seen_into_is_a_warning_where_only_times_are_lost(told, name):
    for num_steps, warned in values(told, name):
        assert num_steps == 20
        assert [w.kind for w in warned] == ["RuntimeWarning"]
        assert "nothing adapts, and batches cannot accumulate; return tensors" in warned[0].text


# What rank 0 makes of the ranks' vectors, without ranks


def test_a_planner_that_lets_the_total_grow_and_gives_no_noise_estimate_is_told_so_once(told):
    on_rank_0, elsewhere = values(told, "no noise estimate")
    (warning,) = on_rank_0
    assert (
        "the planner GrowingPlanner lets the total batch grow to 8 from 6 and gives no noise estimate" in warning.text
    )
    assert elsewhere == []


def sent_by(steps: list[tuple[int, int]]) -> torch.Tensor:
    """A rank's vector of steps (b_i, B), of which nothing was measured; a total of 0 is not checked."""
    taken = [
        StepInProgress(BatchEntry(step=step, local_batch=local, total_batch=max(total, 1), whole=total > 0))
        for step, (local, total) in enumerate(steps)
    ]
    return encode_steps(taken, start_reading(taken, Cpu()), Cpu())


def test_what_ranks_need_of_a_decision_arrives_to_the_last_bit():
    plan = Plan(first_step=70, total_batch=6, local_batches=(4, 2), predicted_step_s=0.1 + 0.2, reason="a reason")
    noise = Noise(signal_sqnorm=1 / 3, noise_trace=2e300)
    sent = encode_decision(Decision(plan=plan, noise=noise, settled=False, phase="a phase of its own"))
    assert sent.shape == empty_decision(2).shape
    assert sent.dtype == empty_decision(2).dtype == torch.int64
    found = decode_decision(sent)
    assert found == Decision(plan=replace(plan, reason="as rank 0 planned"), noise=noise, settled=False)
    unknown = replace(plan, predicted_step_s=None)
    assert decode_decision(encode_decision(Decision(plan=unknown))).noise is None
    assert decode_decision(encode_decision(Decision(plan=unknown))).plan.predicted_step_s is None


def test_local_batches_that_add_up_make_a_window():
    sent = torch.stack([sent_by([(4, 6), (1, 1)]), sent_by([(2, 6), (0, 1)])])
    check_cuts(sent, 10, 2)
    report = merge_windows(sent, 10, 2)
    assert report.window.local_batches.tolist() == [[4, 2], [1, 1]]
    assert report.window.first_step == 10


@pytest.mark.parametrize(
    ("first", "second", "told_of"),
    [
        ([(4, 6), (4, 6)], [(2, 6), (3, 6)], r"step 11 .*\[4, 3\] of totals \[6, 6\]"),
        ([(4, 6), (4, 6)], [(2, 6), (2, 8)], r"step 11 .*\[4, 2\] of totals \[6, 8\]"),
        ([(4, 7), (4, 6)], [(2, 7), (2, 6)], r"step 10 .*\[4, 2\] of totals \[7, 7\]"),
    ],
    ids=["one rank took more", "ranks think of different totals", "samples are missing"],
)
def test_local_batches_that_do_not_add_up_are_refused(first, second, told_of):
    with pytest.raises(DisagreementError, match=told_of):
        check_cuts(torch.stack([sent_by(first), sent_by(second)]), 10, 2)


def test_batches_that_the_user_brings_along_are_not_checked():
    check_cuts(torch.stack([sent_by([(4, 0)]), sent_by([(3, 0)])]), 0, 1)
