"""From the core's values to the run log's records: which steps the medians and the timeline stand for, and a replay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.synthetic import measure, random_cluster
from cannikin.core.goodput import choose_total
from cannikin.core.perf import hardware_use, step_time
from cannikin.core.planner import Decision, Noise, SpeedChange
from cannikin.core.split import optimal_split
from cannikin.core.values import NO_MAX, Job, Plan, StepWindow
from cannikin.errors import InvalidInputError
from cannikin.runlog import (
    Header,
    JobInfo,
    PlanRecord,
    RunLogWriter,
    WindowRecord,
    decision_records,
    job_info,
    noise_record,
    plan_record,
    read_runlog,
    replay_window,
    window_record,
)
from cannikin.runlog.times import rank_times, use_of

HEADER = Header(cannikin_version="0.1.0", started="", policy="even", world_size=3, job=JobInfo(batch_size=64))


def made_window(local_batches, before_s, ready_s, done_s, valid=None) -> StepWindow:
    steps, ranks = np.shape(local_batches)
    return StepWindow(
        first_step=10,
        local_batches=np.array(local_batches),
        before_s=np.array(before_s, dtype=float),
        ready_s=np.array(ready_s, dtype=float),
        done_s=np.array(done_s, dtype=float),
        local_sqnorm=np.ones((steps, ranks)),
        global_sqnorm=np.ones(steps),
        valid=np.ones((steps, ranks), dtype=bool) if valid is None else np.array(valid),
    )


def random_window(seed: int, steps: int = 7, ranks: int = 3, buckets: int = 4) -> StepWindow:
    rng = np.random.default_rng(seed)
    ready_s = np.sort(rng.uniform(0.01, 0.05, (steps, ranks, buckets)), axis=-1)
    return made_window(
        rng.integers(1, 3, (steps, 1)) * np.arange(4, 4 + ranks),
        rng.uniform(0.01, 0.02, (steps, ranks)),
        ready_s,
        ready_s + rng.uniform(0.001, 0.02, ready_s.shape),
        rng.random((steps, ranks)) < 0.8,
    )


@pytest.mark.parametrize("seed", range(20))
def test_medians_are_those_of_the_valid_steps_with_the_usual_split(seed):
    window = random_window(seed)
    record = window_record(window, loader_s=window.before_s / 2, other_s=window.before_s / 4, bucket_bytes=(1, 2, 3, 4))
    same = (window.local_batches == record.local_batches).all(axis=1)
    assert window.valid[same].sum() >= window.valid[~same].sum()
    for rank in range(window.num_ranks):
        mine = same & window.valid[:, rank]
        for name, values_s in (
            ("before_ms", window.before_s),
            ("backward_ms", window.ready_s[..., -1]),
            ("done_ms", window.done_s.max(axis=-1)),
            ("loader_ms", window.before_s / 2),
        ):
            found = getattr(record, name)[rank]
            assert found == pytest.approx(np.median(values_s[mine, rank]) * 1000, abs=1e-4)
        other_s = window.before_s[window.valid[:, rank], rank] / 4  # now and then: its median would be 0
        assert record.other_ms[rank] == pytest.approx(other_s.mean() * 1000, abs=1e-4)
        assert record.wait_ms[rank] >= 0
    assert (record.num_steps, record.total_batch) == (7, sum(record.local_batches))
    assert record.num_valid == (window.valid.all(axis=1) & same).sum()
    assert record.timeline is None or record.timeline.bucket_bytes == (1, 2, 3, 4)


def test_the_slowest_rank_waits_for_nobody_and_the_step_is_what_the_median_rank_saw():
    window = made_window([[8, 8, 8]], [[0.01, 0.01, 0.01]], [[[0.02], [0.05], [0.03]]], [[[0.06], [0.06], [0.061]]])
    record = window_record(window)
    assert record.wait_ms == (30.0, 0.0, 21.0)
    assert record.step_ms == 70.0


def test_the_timeline_is_a_valid_step_of_median_duration():
    done_s = np.array([0.9, 0.03, 0.01, 0.02, 0.5])[:, None, None] * np.ones((1, 2, 1))
    valid = np.array([[True, False], [True, True], [True, True], [True, True], [True, True]])
    batches = [[8, 8], [8, 8], [8, 8], [8, 8], [4, 4]]
    record = window_record(made_window(batches, np.full((5, 2), 0.01), done_s / 2, done_s, valid))
    assert record.timeline.step == 13
    assert record.timeline.done_ms == ((20.0,), (20.0,))
    assert (record.num_valid, record.local_batches) == (3, (8, 8))


def test_a_short_last_step_that_alone_is_valid_does_not_stand_for_the_window():
    valid = np.array([[False, False], [False, False], [False, False], [True, True]])
    times = np.full((4, 2), 0.01)
    record = window_record(
        made_window([[8, 8]] * 3 + [[3, 2]], times, times[..., None], times[..., None] + 0.01, valid)
    )
    assert (record.total_batch, record.num_valid, record.step_ms) == (16, 0, None)


def test_a_window_without_a_valid_step_has_nulls_and_no_timeline():
    nothing = np.full((2, 2), np.nan)
    window = made_window(
        [[8, 8], [6, 10]], nothing, nothing[..., None], nothing[..., None], np.zeros((2, 2), dtype=bool)
    )
    record = window_record(window)
    assert (record.step_ms, record.before_ms, record.wait_ms) == (None, (None, None), (None, None))
    assert (record.timeline, record.num_valid, record.local_batches) == (None, 0, (6, 10))
    assert replay_window(record) is None


def test_a_window_without_steps_is_refused():
    with pytest.raises(InvalidInputError, match="window at step 10 has no steps"):
        window_record(random_window(0, steps=0))


@pytest.mark.parametrize("seed", range(4))
def test_a_replayed_window_is_the_timelines_step(tmp_path, seed):
    window, path = random_window(seed), tmp_path / "runlog.jsonl"
    with RunLogWriter(path) as log:
        log.write(HEADER)
        log.write(window_record(window))
    again = replay_window(read_runlog(path).windows[0])
    s = again.first_step - window.first_step
    assert again.local_batches.tolist() == window.local_batches[[s]].tolist()
    for name in ("before_s", "ready_s", "done_s"):
        np.testing.assert_allclose(getattr(again, name)[0], getattr(window, name)[s], atol=1e-7)
    assert again.valid.all()
    assert np.isnan(again.local_sqnorm).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_use_of_the_hardware_that_is_measured_is_the_models_where_nothing_scatters(seed):
    rng = np.random.default_rng(seed)
    cluster, total = random_cluster(rng)
    batches = optimal_split(cluster, total).local_batches
    record = window_record(measure(cluster, [batches] * 5, rng, noise=0.0, outliers=0.0))
    compute_s = cluster.forward.at(batches) + cluster.backward.at(batches)
    modelled = hardware_use(batches, compute_s, step_time(cluster, batches))
    assert use_of(record.local_batches, rank_times(record)) == pytest.approx(float(modelled), rel=1e-4)


def test_plans_jobs_and_noise_become_records():
    batches = {"total_batch": 64, "local_batches": (44, 20)}
    plan = Plan(first_step=14, **batches, predicted_step_s=0.0385, reason="y")
    known = Decision(plan=plan, phase="x")
    record = PlanRecord(step=11, first_step=14, **batches, predicted_step_ms=38.5, phase="x", reason="y")
    assert plan_record(known, 11) == record
    unknown = dataclasses.replace(known, plan=dataclasses.replace(plan, predicted_step_s=None))
    assert plan_record(unknown, 11).predicted_step_ms is None
    assert plan_record(known, 11).even_speed is None
    assert plan_record(dataclasses.replace(known, even_speed=0.123456), 11).even_speed == 0.1235
    assert plan_record(dataclasses.replace(known, even_speed=0.0), 11).even_speed == 0.0
    choice = choose_total(np.array([64, 128, 256]), np.array([0.1, 0.15, np.inf]), np.ones(3), 64)
    compared = plan_record(dataclasses.replace(known, choice=choice), 11)
    assert (compared.candidate_totals, compared.candidate_goodputs) == ((64, 128, 256), (640.0, 853.3333, None))
    job = Job(num_ranks=2, batch_size=64, max_batch_size=512, max_local=(NO_MAX, 48), num_samples=50_000)
    assert job_info(job) == JobInfo(
        batch_size=64, max_batch_size=512, min_local=(1, 1), max_local=(None, 48), num_samples=50_000
    )
    assert noise_record(Noise(signal_sqnorm=np.nan, noise_trace=np.nan)).high is None


def test_a_decision_becomes_its_window_what_happened_in_it_and_its_plan():
    window = random_window(0)
    window.global_sqnorm[[2, 4]] = np.inf
    plan = Plan(first_step=21, total_batch=64, local_batches=(30, 20, 14))
    changes = (SpeedChange(step=13, rank=2, factor=1.51), SpeedChange(step=15, rank=0, factor=0.5))
    noise = Noise(signal_sqnorm=0.5, noise_trace=20.0, limits=(10.0, 90.0), flags=("biased",))
    decision = Decision(plan=plan, noise=noise, changes=changes, phase="x")
    first, lost, *changed, last = decision_records(window, decision, num_lost_before=3, elapsed_ms=9.0, progress=2.5)
    assert first == window_record(window, noise=noise_record(noise), num_skipped=2, elapsed_ms=9.0, progress=2.5)
    assert (first.noise.noise_scale, first.noise.low, first.noise.flags) == (40.0, 10.0, ("biased",))
    assert (lost.step, lost.kind, lost.data) == (17, "nonfinite", {"count": 2})
    assert lost.text == "2 steps had a gradient that was not finite, 5 so far"
    assert [(event.step, event.kind, event.data) for event in changed] == [
        (13, "changed_speed", {"rank": 2, "factor": 1.51}),
        (15, "changed_speed", {"rank": 0, "factor": 0.5}),
    ]
    assert last == plan_record(decision, 17, elapsed_ms=9.0)
    quiet = list(decision_records(random_window(1), Decision(plan=plan), num_lost_before=3, elapsed_ms=9.0))
    assert [type(record) for record in quiet] == [WindowRecord, PlanRecord]
    assert quiet[0].noise is None
