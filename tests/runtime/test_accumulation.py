"""Several batches for one step of the optimizer, and several optimizers for one model."""

from __future__ import annotations

from functools import partial

import accumulation_cases as cases
import pytest
from accumulation_cases import Growing, Piling
from ranks import run_ranks
from told import Raised, run_cases, values

LOOPS = {
    "under no_sync": Piling(),
    "each batch reduced": Piling(no_sync=False),
    "carried into the next pass": Piling(at_the_end="carried"),
    "a rest that is dropped": Piling(at_the_end="dropped", no_sync=False),
    "batches in parts": Piling(parts=2),
    "parts alone": Piling(num_batches=1, parts=2),
    "fetched together": Piling(fetched_together=True),
    "fetched together, each batch reduced": Piling(fetched_together=True, no_sync=False),
    "more from pass to pass": Piling(num_batches=1, grows=True),
}
CASES = {
    **{name: partial(cases.passes, loop=loop) for name, loop in LOOPS.items()},
    "drop_last": partial(cases.passes, loop=Piling(), num_samples=40, drop_last=True),
    "skipped steps": cases.passes_with_skipped_steps,
    "second forwards": cases.passes_with_second_forwards,
    "grown, no_sync": partial(cases.grown, loop=Piling()),
    "grown, reduced": partial(cases.grown, loop=Piling(no_sync=False)),
    "grown, fetched together": partial(cases.grown, loop=Piling(fetched_together=True)),
    "one cycle": partial(cases.schedule_to_the_goal, kind="one cycle"),
    "cosine": partial(cases.schedule_to_the_goal, kind="cosine"),
    "one cycle, drawn": cases.schedule_beyond_its_end,
    "totals, no_sync": partial(cases.weighed_totals, no_sync=True),
    "totals, reduced": partial(cases.weighed_totals, no_sync=False),
    "two rules": partial(cases.two_optimizers, policy=Growing([(3, 3), (6, 6)]), lr_rule=["linear", "sqrt"]),
    "two, measured": partial(cases.two_optimizers, policy="cannikin", lr_rule="auto", num_samples=360),
    "in turn": partial(cases.in_turn, order=[0, 1]),
    "in turn, twice": partial(cases.in_turn, order=[0, 1, 0, 1]),
    "in turn, the other first": partial(cases.in_turn, order=[1, 0]),
    "penalty, loss": partial(cases.penalty, weighting="loss", no_sync=False),
    "penalty, no_sync": partial(cases.penalty, weighting="hook", no_sync=True),
    "acting, synchronised": cases.acting,
    "acting, no_sync": partial(cases.acting, no_sync=True),
    "acting, parts": partial(cases.acting, parts=True),
    "acting, loss": partial(cases.acting, weighting="loss"),
    "joint": cases.joint,
    "unsynced backward": cases.unsynced_backward,
    "three rules": partial(cases.rules_that_do_not_match, lr_rule=["sqrt"] * 3),
}


@pytest.fixture(scope="module")
def told():
    """What every case said on both ranks, in one launch."""
    return run_ranks(run_cases, 2, CASES, timeout_s=90)


@pytest.mark.parametrize("name", LOOPS)
def test_epochs_makes_as_many_passes_as_asked_for_however_gradients_pile_up(told, name):
    for passed in values(told, name):
        assert passed.num_passes == 3
        assert passed.by_epoch == 3
        assert passed.by_step == passed.num_steps, "a schedule of steps counts the optimizer's"


def test_progress_counts_the_batches_whose_gradients_were_used(told):
    """Eight batches per pass: three groups, the last of two batches."""
    assert [(p.num_steps, p.progress) for p in values(told, "under no_sync")] == [(9, 24.0)] * 2
    assert [(p.num_steps, p.progress) for p in values(told, "a rest that is dropped")] == [(6, 18.0)] * 2
    assert [(p.num_steps, p.progress) for p in values(told, "more from pass to pass")] == [(8 + 4 + 3, 24.0)] * 2


def test_a_pass_that_drops_its_last_batch_is_a_whole_one(told):
    assert [(p.num_passes, p.by_epoch, p.progress) for p in values(told, "drop_last")] == [(3, 3, 18.0)] * 2


def test_steps_that_a_scaler_skips_cost_no_pass_more(told):
    assert values(told, "skipped steps") == [(2, 8.0)] * 2


def test_a_batch_that_is_trained_on_twice_for_one_step_counts_once(told):
    assert values(told, "second forwards") == [(2, 10.0)] * 2


@pytest.mark.parametrize("how", ["no_sync", "reduced", "fetched together"])
def test_a_step_over_several_batches_is_worth_the_gain_of_their_sum(told, how):
    """At phi = 30, 3 x 12 samples against 3 x 6: gain = 2 (30 + 18)/(30 + 36)."""
    one, other = values(told, f"grown, {how}")
    assert one == other
    gain = 2 * (30 + 18) / (30 + 36)
    assert {total for total, _, _ in one} == {6, 12}
    before = one[0][0]
    for total, rate, made in one:
        assert rate == pytest.approx(1.0 if total == 6 else gain)
        if total == before:  # else some of the group's batches were of the other total
            assert made == pytest.approx(3.0 if total == 6 else 3 * gain, rel=1e-9)
        before = total


@pytest.mark.parametrize("kind", ["one cycle", "cosine"])
def test_a_schedule_stops_at_the_goal_of_epochs(told, kind):
    for rates, taken, length in values(told, kind):
        falling = rates[rates.index(max(rates)) :]
        assert falling == sorted(falling, reverse=True), "no rate rises again"
        assert length - 1 <= taken <= length
        assert rates[-1] < 1e-3 * max(rates)


def test_a_schedule_with_an_end_stays_there_without_a_goal_and_says_so_where_training_goes_on(told):
    for rank, (rates, num_told, at_end, warned) in enumerate(values(told, "one cycle, drawn")):
        assert at_end > 59.5, "the last step went beyond the end"
        assert num_told == 0
        falling = rates[rates.index(max(rates)) :]
        assert falling == sorted(falling, reverse=True)
        assert rates[-1] == rates[-2] < 1e-3 * max(rates)
        assert ["has taken its total_steps=59" in text for text in warned] == [True] * (rank == 0)


@pytest.mark.parametrize("how", ["no_sync", "reduced"])
def test_totals_are_compared_by_their_noise_under_accumulation(told, how):
    """Which is then the best depends on the times."""
    (reasons, num_steps), _ = values(told, f"totals, {how}")  # rank 0 plans
    assert num_steps >= 20
    assert any("goodput" in reason or "the best in reach" in reason for reason in reasons), reasons


def test_several_optimizers_have_a_rule_each_and_one_progress(told):
    for stepped in values(told, "two rules"):
        assert {(round(a, 9), round(b, 9)) for a, b in stepped.inside} == {
            (1e-3, 1e-3),
            (2e-3, round(2**0.5 * 1e-3, 9)),
        }
        assert stepped.outside == (1e-3, 1e-3)
        gain = 2 * (30 + 6) / (30 + 12)
        num_grown = sum(a > 1.5e-3 for a, _ in stepped.inside)
        assert stepped.progress == pytest.approx(len(stepped.inside) - num_grown + gain * num_grown, rel=0.1)


@pytest.mark.parametrize("how", ["in turn", "in turn, the other first"])
def test_optimizers_that_step_in_turn_on_one_batch_make_the_progress_of_one_batch(told, how):
    assert values(told, how) == [(30, 3)] * 2


def test_two_rounds_of_optimizers_on_one_batch_count_twice_as_two_steps_of_one_do(told):
    assert [progress for progress, _ in values(told, "in turn, twice")] == [40, 40], "two passes of ten batches"


def test_the_noise_scale_is_known_where_adam_steps_a_part_of_the_parameters(told):
    one, other = values(told, "two, measured")
    assert (one.progress, other.progress) == (60, 60)
    assert one.noise_steps > 40  # rank 0 counts them


@pytest.mark.parametrize("how", ["loss", "no_sync"])
def test_a_penalty_on_inner_slopes_through_weighted_outputs_is_refused_on_every_rank(told, how):
    for answers in told:
        raised = answers[f"penalty, {how}"]
        assert isinstance(raised, Raised)
        assert "create_graph=True" in raised.text
        assert "without no_sync" in raised.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("joint", "steps 0 and 1, of which only the later one's forward was under no_sync"),
        ("unsynced backward", "turn synchronisation off before the batch's first forward"),
    ],
)
def test_a_backward_whose_gradients_would_have_no_weight_is_refused_on_every_rank(told, name, said):
    for answers in told:
        assert answers[name].kind == "BatchMatchError"
        assert said in answers[name].text


@pytest.mark.parametrize("how", ["no_sync", "parts", "loss"])
def test_a_distribution_beside_a_tensor_is_refused_where_outputs_are_weighted(told, how):
    for answers in told:
        raised = answers[f"acting, {how}"]
        assert raised.kind == "InvalidInputError"
        assert "a tuple with a Independent, whose tensors with a gradient are not seen" in raised.text


def test_a_distribution_beside_a_tensor_is_right_where_gradients_are_weighted_as_they_are_reduced(told):
    assert values(told, "acting, synchronised") == [4, 4]


def test_there_is_one_rule_for_all_optimizers_or_one_for_each(told):
    for answers in told:
        assert "3 rules for 2 optimizers" in answers["three rules"].text
