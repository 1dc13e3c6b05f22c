"""What a live view knows after some records, and where a step's time goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_records import HEADER, event, header, plan, run, window

from cannikin.live.panel import sparkline
from cannikin.live.rank_table import stacked
from cannikin.live.state import LiveState
from cannikin.runlog import JobInfo, NoiseRecord
from cannikin.runlog.times import rank_times, use_of
from cannikin.words import clock


def after(*records):
    state = LiveState()
    for record in records:
        state.take(record)
    return state


# Where a step's time goes


def test_a_step_is_computing_communication_and_waiting():
    fast, slow = rank_times(window(0))
    assert fast == (20.0, 4.0, 16.0, 0.0)
    assert slow == (36.0, 4.0, 0.0, 0.0)
    assert tuple(slow.shares.values()) == pytest.approx((0.9, 0.1, 0.0, 0.0))


def test_loading_that_holds_up_the_computing_is_counted_once():
    alone, _ = rank_times(window(0, loader_ms=(6.0, 2.0), loader_inside=True))
    assert alone == (14.0, 4.0, 16.0, 6.0)
    assert alone.total_ms == 40.0


def test_loading_beside_the_computing_comes_on_top_where_the_loop_waits_for_it():
    beside, _ = rank_times(window(0, loader_ms=(30.0, 2.0)))
    assert beside == (20.0, 4.0, 16.0, 30.0)


def test_a_rank_that_was_not_measured_has_no_times():
    none, slow = rank_times(window(0, before_ms=(None, 10.0)))
    assert none is None
    assert slow is not None
    assert rank_times(window(0, before_ms=())) == [None, None]


# How much of the hardware it uses


def test_use_is_every_ranks_computing_share_in_the_mean_that_its_samples_weigh():
    assert use_of((24, 8), rank_times(window(0))) == pytest.approx(32 / (24 / 0.5 + 8 / 0.9))


def test_waiting_for_data_is_no_use_whether_it_holds_up_the_computing_or_not():
    shares = 14 / 40, 36 / 42
    inside = window(0, before_ms=(10.0, 12.0), loader_ms=(6.0, 2.0), loader_inside=True)
    assert use_of((24, 8), rank_times(inside)) == pytest.approx(32 / (24 / shares[0] + 8 / shares[1]))
    beside = window(0, loader_ms=(40.0, 40.0))
    assert use_of((24, 8), rank_times(beside)) == pytest.approx(32 / (24 / 0.25 + 8 / 0.45))


def test_an_evaluation_between_steps_does_not_count():
    assert use_of((24, 8), rank_times(window(0, other_ms=(900.0, 0.0)))) == use_of((24, 8), rank_times(window(0)))


def test_one_rank_alone_uses_all_but_what_its_all_reduce_takes():
    alone = window(0, (8,), before_ms=(10.0,), backward_ms=(29.0,), done_ms=(30.0,), wait_ms=(0.0,))
    assert use_of((8,), rank_times(alone)) == pytest.approx(39 / 40)


@pytest.mark.parametrize("batches", [(24, 8), (0, 0)])
def test_the_use_is_not_known_where_a_rank_with_samples_was_not_measured(batches):
    assert use_of(batches, rank_times(window(0, batches, before_ms=(None, 10.0)))) is None


def test_what_ddp_would_use_comes_from_the_plan_made_for_the_split_before_the_window():
    state = after(HEADER, plan(10, even_speed=0.5), window(2), plan(30, even_speed=0.9))
    assert state.even_speed == 0.5
    assert after(HEADER, window(0)).even_speed is None
    assert after(HEADER).use is None


milliseconds = st.floats(0, 1e6)


@given(before=milliseconds, backward=milliseconds, tail=milliseconds, waited=st.floats(0, 1), loaded=st.floats(0, 1))
def test_the_shares_are_those_of_a_whole(before, backward, tail, waited, loaded):
    (times,) = rank_times(
        window(
            0,
            (4,),
            before_ms=(before,),
            backward_ms=(backward,),
            done_ms=(backward + tail,),
            wait_ms=(waited * tail,),
            loader_ms=(loaded * before,),
            loader_inside=True,
        )
    )
    assert all(share >= 0 for share in times.shares.values())
    assert sum(times.shares.values()) == pytest.approx(1.0 if times.total_ms > 0 else 0.0)
    assert times.total_ms == pytest.approx(before + backward + tail, abs=1e-6)


# The fold


def test_the_prediction_is_the_one_made_before_the_window_for_its_own_split():
    state = after(HEADER, plan(10, predicted_step_ms=37.0), plan(20, (28, 12), predicted_step_ms=50.0), window(2))
    assert state.predicted_ms == 37.0
    state.take(plan(30, predicted_step_ms=39.5))
    assert state.predicted_ms == 37.0
    state.take(window(3))
    assert state.predicted_ms == 39.5


def test_a_split_that_no_plan_was_for_has_no_prediction():
    assert after(HEADER, plan(10), window(2, (16, 16))).predicted_ms is None


def test_progress_and_time_left_follow_the_goal():
    state = after(*run(5))
    assert state.step == 50
    assert state.goal_share == pytest.approx(1.6 / 8)
    assert state.left_s == pytest.approx((8 - 1.6) / 0.32 * 0.4)


def test_without_a_goal_it_is_the_pass_that_is_shown():
    state = after(HEADER, event(10, "epoch", epoch=3, position=200), window(0), window(1), window(2))
    assert state.goal_share is None
    assert state.pass_share == pytest.approx((200 + 2 * 320) / 1000)  # the first window was before it
    assert state.left_s == pytest.approx(160 / 640 * 0.8)


def test_a_new_pass_begins_at_nothing():
    state = after(HEADER, event(0, "epoch", epoch=0, position=0), window(0), event(10, "epoch", epoch=1, position=0))
    assert state.current_pass.epoch == 1
    assert state.pass_share == 0.0


def test_nothing_is_said_of_the_end_where_nothing_is_known_of_it():
    unknown = header(job=JobInfo(batch_size=32))
    for records in ([], [HEADER], [HEADER, window(0)], [unknown, event(0, "epoch", epoch=0), window(0), window(1)]):
        state = after(*records)
        assert (state.goal_share, state.pass_share, state.left_s) == (None, None, None)


def test_goodput_is_throughput_times_efficiency():
    state = after(HEADER, window(0, (96, 32)))
    assert state.speed.samples_per_s == pytest.approx(3200)
    assert state.speed.efficiency == pytest.approx((96 + 32) / (96 + 128))
    assert state.speed.goodput == pytest.approx(3200 * 128 / 224)


def test_where_batches_pile_up_a_sample_is_worth_what_it_is_in_all_of_them():
    noise = NoiseRecord(signal_sqnorm=1.0, noise_trace=96.0, noise_scale=96.0, num_batches=4)
    state = after(HEADER, window(0, (96, 32), noise=noise))
    assert state.speed.efficiency == pytest.approx((96 + 4 * 32) / (96 + 4 * 128))


@pytest.mark.parametrize("noise", [None, NoiseRecord(), NoiseRecord(signal_sqnorm=1.0)])
def test_without_the_noise_there_is_no_goodput(noise):
    assert after(HEADER, window(0, noise=noise)).speed.goodput is None


def test_a_noise_that_drowns_the_signal_makes_every_sample_count():
    noise = NoiseRecord(signal_sqnorm=0.0, noise_trace=3.0)
    assert after(HEADER, window(0, (96, 32), noise=noise)).speed.efficiency == 1.0


def test_the_last_evaluation_and_events_are_kept():
    slower = [event(step, "changed_speed", f"rank 1 takes {step} times as long") for step in range(5)]
    state = after(HEADER, *slower, event(7, "eval", accuracy=0.5, note="text", best=True))
    assert [kept.step for kept in state.events] == [2, 3, 4]
    assert (state.metrics, state.metrics_step) == ({"accuracy": 0.5, "best": 1.0}, 7)


def test_a_resumed_run_begins_again_at_its_own_step():
    state = after(*run(5), event(50, "end"), header(("a", "b", "c"), first_step=20))
    assert state.step == 20
    assert state.end is None
    assert state.window is None
    assert not state.points


# Damaged logs


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([1.7e308, -1.7e308], "▁▁"), ([-5.0, -5.0], "▁▁"), ([0.0, 1e308], "▁█")],
    ids=["beyond any span", "below zero", "large"],
)
def test_a_sparkline_takes_any_numbers(values, drawn):
    assert sparkline(values, 2) == drawn


@pytest.mark.parametrize("seconds", [-5.0, 1.7e308, float("inf"), float("nan")])
def test_a_time_that_is_none_has_a_few_characters_too(seconds):
    assert len(clock(seconds)) < 16


def test_shares_of_what_took_no_time_or_any_have_no_cells():
    assert stacked([float("nan"), 1.0], 4) == stacked([1.7e308, 1.7e308], 4) == [0, 0]
