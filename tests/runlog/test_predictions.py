"""Predictions that were made before their split had run, beside what was then measured."""

from __future__ import annotations

import pytest

from cannikin.core.policies.cannikin import Controller
from cannikin.core.values import Job
from cannikin.runlog import (
    EventRecord,
    Header,
    JobInfo,
    PlanRecord,
    Predictions,
    Record,
    RunLogWriter,
    WindowRecord,
    read_predictions,
)
from cannikin.sim.runs import find_machine
from cannikin.sim.simulation import Simulation
from cannikin.sim.workload import find_workload


def header(first_step: int = 0) -> Header:
    job = JobInfo(batch_size=32)
    return Header(cannikin_version="1", started="", policy="cannikin", world_size=2, first_step=first_step, job=job)


def plan(step: int, batches: tuple[int, ...], predicted_ms: float | None, first_step: int | None = None) -> PlanRecord:
    return PlanRecord(
        step=step,
        first_step=step + 4 if first_step is None else first_step,
        total_batch=sum(batches),
        local_batches=batches,
        predicted_step_ms=predicted_ms,
        phase="optperf",
        reason="",
    )


def window(first_step: int, batches: tuple[int, ...], step_ms: float | None, num_valid: int = 5) -> WindowRecord:
    return WindowRecord(
        first_step=first_step,
        num_steps=5,
        num_valid=num_valid,
        total_batch=sum(batches),
        local_batches=batches,
        step_ms=step_ms,
    )


EVEN, NEW, NEWER = (16, 16), (24, 8), (22, 10)


def of(*records: Record) -> Predictions:
    predictions = Predictions()
    for record in records:
        predictions.write(record)
    return predictions


def errors(*records: Record) -> list[float | None]:
    return [each.error for each in of(*records).outcomes]


def test_a_plan_is_judged_by_what_it_promised_before_it_ran_and_not_by_what_it_says_later():
    told = of(
        header(),
        window(0, EVEN, 60.0),
        plan(5, NEW, 44.0),
        window(5, EVEN, 60.0),
        window(10, NEW, 40.0),
        plan(15, NEW, 40.1, first_step=9),
        window(15, NEW, 40.0),
    )
    (outcome,) = told.outcomes
    assert (outcome.plan.first_step, outcome.plan.predicted_step_ms) == (9, 44.0)
    assert (outcome.measured_ms, outcome.num_steps, outcome.is_new) == (40.0, 10, True)
    assert outcome.error == pytest.approx(0.1)


def test_what_was_measured_is_the_median_of_all_steps_of_the_plan_and_of_no_other():
    records = [
        plan(0, NEW, 40.0, first_step=0),
        window(0, NEW, 90.0, num_valid=2),  # a slow start
        window(5, NEW, 40.0, num_valid=5),
        window(10, NEW, 42.0, num_valid=5),
        window(15, NEW, None, num_valid=0),
        plan(20, NEWER, 30.0),
        window(20, NEWER, 30.0),
    ]
    first, second = of(*records).outcomes
    assert (first.measured_ms, first.num_steps) == (42.0, 12)
    assert (second.measured_ms, second.num_steps) == (30.0, 5)


def test_the_median_lies_between_two_windows_of_equal_weight():
    (outcome,) = of(plan(0, NEW, 40.0), window(4, NEW, 40.0), window(9, NEW, 44.0)).outcomes
    assert outcome.measured_ms == 42.0


def test_a_plan_that_goes_back_to_a_split_that_ran_does_not_count():
    back = [
        window(0, EVEN, 60.0),
        plan(5, NEW, 40.0),
        window(9, NEW, 40.0),
        plan(14, EVEN, 30.0),
        window(18, EVEN, 60.0),
        plan(23, NEW, 20.0),
        window(27, NEW, 41.0),
    ]
    told = of(header(), *back)
    assert [each.is_new for each in told.outcomes] == [True, False, False]
    assert [each.error for each in told.outcomes] == [0.0, None, None]
    assert told.outcomes[0].measured_ms == 40.0  # the second stay is not the first one's
    assert told.before_it_ran == (0.0, 0.0, 1)


def test_a_split_that_ran_so_shortly_that_no_window_has_it_does_not_count_later():
    assert errors(plan(0, NEW, 40.0), plan(2, NEWER, 41.0), plan(4, NEW, 10.0), window(8, NEW, 40.0)) == [None] * 3


def test_plans_without_a_prediction_and_those_of_a_step_or_two_do_not_count():
    assert errors(plan(0, NEW, None), window(4, NEW, 40.0)) == [None]
    assert errors(plan(0, NEW, 50.0), window(4, NEW, 40.0, num_valid=2)) == [None]
    assert errors(plan(0, NEW, 50.0), window(4, NEW, 40.0, num_valid=3)) == [0.25]
    assert of(plan(0, NEW, None), window(4, NEW, 40.0)).before_it_ran is None


def test_a_record_that_comes_after_the_plan_is_in_force_is_no_prediction():
    assert errors(plan(20, NEW, 40.0, first_step=9), window(20, NEW, 40.0)) == [None]


def test_another_total_batch_makes_a_new_split():
    assert errors(header(), window(0, EVEN, 60.0), plan(5, (32, 32), 66.0), window(9, (32, 32), 60.0)) == [
        pytest.approx(0.1)
    ]


def test_a_log_that_begins_in_mid_run_says_that_it_does_not_know_what_ran_before():
    told = of(header(first_step=400), window(400, EVEN, 60.0), plan(405, NEW, 44.0), window(409, NEW, 40.0))
    assert [each.is_new for each in told.outcomes] == [None]
    assert told.before_it_ran is None


def test_after_a_resume_in_the_same_log_what_ran_before_is_known():
    before = [header(), window(0, EVEN, 60.0), plan(5, NEW, 44.0), window(9, NEW, 40.0)]
    told = of(*before, header(first_step=14), window(14, NEW, 80.0), plan(19, NEWER, 90.0), window(23, NEWER, 75.0))
    assert [(each.measured_ms, each.is_new) for each in told.outcomes] == [(40.0, True), (75.0, True)]
    again = of(*before, header(first_step=5), plan(5, NEW, 40.0), window(9, NEW, 40.0))
    assert [each.is_new for each in again.outcomes] == [True, False]


# The paper's measure


def test_the_papers_measure_compares_the_last_prediction_with_the_best_split_that_ran():
    records = [
        window(0, EVEN, 60.0),
        plan(5, NEW, 44.0),
        window(9, NEW, 40.0),
        plan(14, NEWER, 41.0),
        window(18, NEWER, 42.0),
        window(23, (32, 32), 39.0),  # another total batch
        window(28, (23, 9), 30.0, num_valid=2),  # two steps
    ]
    optimum = of(*records).optimum
    assert optimum is not None
    assert (optimum.total_batch, optimum.predicted_ms, optimum.best_ms, optimum.num_splits) == (32, 41.0, 40.0, 3)
    assert optimum.error == pytest.approx(0.025)


def test_what_ran_before_a_rank_changed_its_speed_is_not_the_best_any_more():
    records = [plan(0, NEW, 40.0), window(4, NEW, 40.0), EventRecord(step=8, kind="changed_speed")]
    assert of(*records).optimum is None
    optimum = of(*records, plan(9, NEWER, 80.0), window(13, NEWER, 82.0)).optimum
    assert optimum is not None
    assert (optimum.best_ms, optimum.num_splits) == (82.0, 1)


# Whole runs


def test_a_simulated_run_tells_the_same_while_it_runs_and_from_its_log(tmp_path):
    machine = find_machine("a", "imagenet")
    job = Job(num_ranks=machine.num_ranks, batch_size=128, max_batch_size=512)
    told, path = Predictions(), tmp_path / "runlog.jsonl"
    with RunLogWriter(path) as log:
        simulation = Simulation(
            machine, Controller(job), job, workload=find_workload("imagenet"), seed=0, observers=(told, log)
        )
        simulation.begin("cannikin", {})
        simulation.run(max_steps=300)
    errors, numbers = told.before_it_ran, told.numbers()
    assert errors is not None
    assert errors.num_plans >= 3
    assert 0.0 < errors.median <= errors.worst < 0.2
    assert read_predictions(path).numbers() == numbers
    assert numbers["before_it_ran"] == {"median": errors.median, "worst": errors.worst, "num_plans": errors.num_plans}
    assert numbers["plans"][0]["predicted_ms"] is None  # the even start
    assert {sum(row["local_batches"]) for row in numbers["plans"]} > {128}  # the total batch grew
