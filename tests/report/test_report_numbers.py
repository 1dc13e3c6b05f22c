"""What the report makes of records: arrays, shares, bars and fewer points."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_up_runs import header, plan, read, run, window

from cannikin.report.numbers import (
    column_means,
    early_rows,
    late_rows,
    latest,
    mean_shares,
    stretch,
    thin,
    timeline_bars,
    window_uses,
)
from cannikin.runlog import EventRecord, Timeline
from cannikin.runlog.times import ACTIVITIES, rank_times, use_of

FINITE = st.floats(-1e6, 1e6)

# Fewer points


@given(arrays(np.float64, st.tuples(st.integers(0, 400), st.integers(1, 3)), elements=FINITE), st.integers(1, 20))
def test_thinning_keeps_ends_order_and_the_peaks_of_every_column(values, most_bins):
    rows = thin(values, most_bins)
    assert (np.diff(rows) > 0).all()
    assert len(rows) <= max(4 * most_bins, most_bins * (2 + 2 * values.shape[1]))
    if len(values):
        assert {0, len(values) - 1} <= set(rows.tolist())
        assert (values[rows].max(axis=0) == values.max(axis=0)).all()
        assert (values[rows].min(axis=0) == values.min(axis=0)).all()


def test_thinning_looks_past_what_is_not_known():
    values = np.full(1000, np.nan)
    values[500] = 7.0
    assert 500 in thin(values, 3)


def test_columns_of_a_map_are_means_over_equal_stretches_of_steps():
    windows = read([header(), *(window(10 * place, (place + 1, 1, 1)) for place in range(8))]).windows
    edges, means = column_means(windows, windows.local_batches, 4)
    assert edges.tolist() == [0, 20, 40, 60, 80]
    assert means[:, 0].tolist() == [1.5, 3.5, 5.5, 7.5]


# Shares of time


@given(
    arrays(np.float64, (5, 3, 6), elements=st.floats(0, 1e4)),
    arrays(np.float64, 5, elements=st.integers(1, 50).map(float)),
)
def test_shares_of_a_rank_add_up_to_one(times, num_steps):
    shares = mean_shares(times, num_steps)
    sums = shares.sum(axis=1)
    assert np.isclose(sums[np.isfinite(sums)], 1.0).all()
    assert (shares[np.isfinite(shares)] >= 0).all()


def test_activities_add_up_to_the_step_and_what_is_between_steps():
    record = window(0)
    whole = np.sum([record.before_ms, record.done_ms, record.loader_ms, record.other_ms], axis=0)
    assert np.allclose(read([header(), record]).windows.times_ms.sum(axis=-1), whole)


def test_the_rank_that_waits_least_is_the_one_others_wait_for():
    found = stretch(read([header(), window(0), window(10)]).windows, np.array([0, 1]))
    assert found.slowest == 0
    assert found.shares[0, ACTIVITIES.index("waiting")] == 0


def test_a_rank_that_measured_nothing_has_no_shares_and_spoils_no_others():
    silent = dict.fromkeys(("before_ms", "backward_ms", "done_ms", "wait_ms"), (None, 1.0, 2.0))
    found = stretch(read([header(), window(0, **silent)]).windows, np.array([0]))
    assert np.isnan(found.shares[0]).all()
    assert np.isfinite(found.shares[1:]).all()
    assert found.slowest in (1, 2)


def test_windows_use_what_their_records_say_whatever_happened_between_their_steps():
    records = [window(0), window(10, (16, 16, 16), other_ms=(90.0, 0.0, 0.0)), window(20, (30, 18))]
    windows = read([header(), *records[:2], header(2, first_step=20), records[2]]).windows
    uses = window_uses(windows.local_batches, windows.times_ms)
    assert uses == pytest.approx([use_of(record.local_batches, rank_times(record)) for record in records], rel=1e-5)


def test_a_rank_that_measured_nothing_leaves_the_use_unknown():
    found = stretch(read([header(), window(0, before_ms=(None, 1.0, 2.0))]).windows, np.array([0]))
    assert np.isnan(found.use)


def test_early_and_late_are_the_stretches_of_the_first_and_of_the_last_split():
    windows = read(run(num_windows=12)).windows
    assert early_rows(windows).tolist() == [0, 1, 2, 3]
    assert late_rows(windows).tolist() == list(range(4, 12))


# Predictions


def test_a_window_is_compared_with_what_was_said_of_its_split_before_it():
    records = [
        header(),
        plan(0, (16, 16, 16), predicted_step_ms=45.0),
        plan(10, (24, 16, 8), predicted_step_ms=33.0),
        window(10, (16, 16, 16), step_ms=50.0),
        window(20, (24, 16, 8), step_ms=30.0),
        plan(30, (24, 16, 8), predicted_step_ms=30.5),  # knows the window it comes after
        window(30, (9, 9, 9), step_ms=20.0),
    ]
    windows = read(records).windows
    assert windows.predicted_ms[:2].tolist() == [45.0, 33.0]
    assert np.isnan(windows.predicted_ms[2])


# Resumes


@given(st.lists(st.integers(0, 30).map(float), max_size=30))
def test_what_stands_after_resumes_is_increasing_and_ends_with_the_last(steps):
    stands = latest(np.array(steps))
    kept = np.array(steps)[stands]
    assert (np.diff(kept) > 0).all()
    assert not steps or stands[-1]


def test_a_resume_takes_the_place_of_the_steps_it_does_again_and_its_clock_goes_on():
    records = [header(), *(window(10 * place) for place in range(4))]
    records += [
        header(2, first_step=20),
        window(20, (30, 18), elapsed_ms=300.0),
        window(30, (30, 18), elapsed_ms=600.0),
    ]
    found = read(records)
    assert found.windows.first_step.tolist() == [0, 10, 20, 30]
    assert found.windows.elapsed_ms.tolist() == [300, 600, 1500, 1800]  # 1,200 ms had passed
    assert found.num_redone == 2
    assert np.isnan(found.windows.local_batches[3, 2])
    assert found.header.world_size == 2


def test_an_end_before_a_resume_is_no_end():
    over = EventRecord(step=10, kind="end")
    assert read([header(), over]).ended == over
    assert read([header(), over, header(first_step=10)]).ended is None


# The bars of a step

TIMES = st.floats(0.0, 50.0)


@st.composite
def timelines(draw):
    num_ranks, num_buckets = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def increasing():
        return tuple(sorted(draw(st.lists(st.floats(0.1, 50.0), min_size=num_buckets, max_size=num_buckets))))

    ready = tuple(increasing() for _ in range(num_ranks))
    done = tuple(tuple(r + draw(TIMES) for r in row) for row in ready)
    before = tuple(draw(TIMES) for _ in range(num_ranks))
    return Timeline(step=0, local_batches=(1,) * num_ranks, before_ms=before, ready_ms=ready, done_ms=done)


@given(timelines())
def test_all_ranks_end_their_step_together_and_none_begins_before_zero(line):
    bars = timeline_bars(line)
    ends = {
        rank: max(bar.start_ms + bar.length_ms for bar in bars if bar.rank == rank) for rank in {b.rank for b in bars}
    }
    longest = max(b + max(done) for b, done in zip(line.before_ms, line.done_ms, strict=True))
    assert np.allclose(list(ends.values()), longest)
    assert all(bar.start_ms >= -1e-9 and bar.length_ms > 0 for bar in bars)


@given(timelines())
def test_bars_of_a_lane_cover_one_another_only_where_all_reduces_overtook(line):
    in_order = all(tuple(sorted(done)) == done for done in line.done_ms)
    bars = timeline_bars(line)
    for rank in range(len(line.local_batches)):
        for lane in ("compute", "link"):
            own = sorted((bar for bar in bars if (bar.rank, bar.lane) == (rank, lane)), key=lambda bar: bar.start_ms)
            clear = all(a.start_ms + a.length_ms <= b.start_ms + 1e-6 for a, b in pairwise(own))
            assert clear or not in_order


@given(timelines())
def test_the_last_rank_to_be_ready_never_waits_for_a_bucket(line):
    ends = [max(done) for done in line.done_ms]
    ready = np.array(line.ready_ms) - np.array(ends)[:, None]
    waits = {(bar.rank, bar.bucket) for bar in timeline_bars(line) if bar.kind == "waiting" and bar.length_ms > 1e-6}
    assert not waits & {(int(rank), bucket) for bucket, rank in enumerate(ready.argmax(axis=0))}
