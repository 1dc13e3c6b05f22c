"""The engine: it does what planners say, when they say it, and decides nothing itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cannikin.core.planner import Decision
from cannikin.core.policies import make_planner
from cannikin.core.policies.plans import make_plan
from cannikin.core.schedule import IN_FORCE, takes_norms
from cannikin.core.values import Job, StepWindow
from cannikin.errors import InvalidInputError
from cannikin.runlog import RUNLOG_NAME, RunLogWriter, read_runlog
from cannikin.sim.runs import find_machine, job_for, named_planner, simulate
from cannikin.sim.simulation import Simulation
from cannikin.sim.workload import find_workload

JOB = Job(num_ranks=3, batch_size=60, num_samples=3000)


class Script:
    """Keeps what it is shown, moves one sample from rank 0 to rank 2 with every plan, and has a phase of its own."""

    def __init__(self) -> None:
        self.windows: list[StepWindow] = []
        self.asked: list[int] = []

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        if window is not None:
            self.windows.append(window)
        self.asked.append(step)
        moved = min(len(self.windows), 15)
        return Decision(plan=make_plan(step, (20 - moved, 20, 20 + moved), reason="by script"), phase="a script's own")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take back."""


@pytest.fixture(scope="module")
def machine():
    return find_machine("a", "cifar10")


def test_the_planner_sees_every_window_of_the_runtimes_length_in_order(machine):
    planner = Script()
    Simulation(machine, planner, JOB).run(max_steps=200)
    step = 0
    for window in planner.windows:
        assert (window.first_step, window.num_steps) == (step, 5 if step < 40 else 10)
        step += window.num_steps
    assert step == 200


def test_a_plan_is_in_force_a_fixed_number_of_steps_after_its_window(machine):
    planner = Script()
    Simulation(machine, planner, JOB).run(max_steps=100)
    first = np.concatenate([window.local_batches[:, 0] for window in planner.windows])
    ends = np.cumsum([window.num_steps for window in planner.windows])
    changes = (np.flatnonzero(np.diff(first)) + 1).tolist()
    expected = [end + IN_FORCE for end in ends.tolist() if end + IN_FORCE < 100]
    assert changes == expected[: len(changes)]
    assert len(changes) >= len(expected) - 1
    assert planner.asked[1:] == (ends + IN_FORCE).tolist()


def test_the_first_step_never_counts_and_norms_come_in_the_steps_in_which_the_runtime_takes_them(machine):
    planner = Script()
    Simulation(replace(machine, new_size=0.0), planner, JOB, find_workload("cifar10")).run(max_steps=200)
    valid = np.concatenate([window.valid.all(axis=1) for window in planner.windows])
    taken = np.concatenate([np.isfinite(window.global_sqnorm) for window in planner.windows])
    assert np.flatnonzero(~valid).tolist() == [0]
    local = np.concatenate([~np.isnan(window.local_sqnorm) for window in planner.windows])
    expected = [step for step in range(200) if takes_norms(step)]
    assert expected[55:65] == [*range(55, 60), 63, 67, 71, 75, 79]
    assert np.flatnonzero(taken).tolist() == expected
    assert [np.flatnonzero(rank).tolist() for rank in local.T] == [expected] * 3


def test_a_planner_of_ones_own_is_logged_with_its_own_phase(machine, tmp_path):
    with RunLogWriter(tmp_path / RUNLOG_NAME) as log:
        simulation = Simulation(machine, Script(), JOB, observers=(log,))
        simulation.begin("script", {})
        simulation.run(max_steps=50)
    plans = read_runlog(tmp_path).plans
    assert len(plans) > 5
    assert {plan.phase for plan in plans} == {"a script's own"}


def test_a_planner_paced_by_epochs_sees_the_end_of_each_epoch_only(machine):
    planner = Script()
    run = Simulation(machine, planner, JOB, pace="epoch").run(max_epochs=8)
    assert len(planner.windows) == 8
    assert [window.first_step + window.num_steps for window in planner.windows] == [50 * k for k in range(1, 9)]
    assert [epoch.epoch for epoch in run.epochs] == list(range(1, 9))


def test_an_epoch_is_recorded_with_its_plan_though_its_last_batch_is_short(machine):
    job = Job(num_ranks=3, batch_size=60, num_samples=3010)
    run = Simulation(machine, make_planner("even", job), job, pace="epoch").run(max_epochs=2)
    assert [(epoch.total_batch, epoch.local_batches) for epoch in run.epochs] == [(60, (20, 20, 20))] * 2


def test_a_planner_paced_by_steps_plans_for_the_very_next_step(machine):
    job = replace(JOB, batch_size=96)
    steady = replace(machine, new_size=0.0)
    training = Simulation(steady, make_planner("lb-bsp", job), job, pace="step").run(max_steps=3)
    assert [step for step, _ in training.plans] == [0, 2, 3], "the first step of a run is not measured"
    assert all(plan.first_step == step for step, plan in training.plans)


def test_time_samples_and_epochs_add_up(machine):
    planner = Script()
    run = Simulation(machine, planner, JOB).run(max_steps=250)
    measured = np.concatenate([window.step_s[:, 0] for window in planner.windows])
    assert run.elapsed_s == pytest.approx(measured.sum())
    assert run.num_samples == 250 * 60
    assert len(run.epochs) == 5
    assert [epoch.step_s for epoch in run.epochs] == pytest.approx(measured.reshape(5, 50).mean(axis=1))


@pytest.mark.parametrize("policy", ["even", "cannikin", "lb-bsp", "lb-bsp@epoch", "adaptdl", "paper"])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(policy):
    machine, workload = find_machine("a", "deepspeech2"), find_workload("deepspeech2")
    first, again, other = (simulate(machine, workload, policy, seed=seed, max_epochs=2) for seed in (3, 3, 4))
    assert replace(first, planner_s=0.0, epochs=()) == replace(again, planner_s=0.0, epochs=())
    assert first.elapsed_s != other.elapsed_s


def test_the_planners_are_the_cores_own(machine):
    for policy in ("cannikin", "even", "lb-bsp", "adaptdl", "paper"):
        assert type(named_planner(policy, JOB)[0]) is type(make_planner(policy, JOB))
    with pytest.raises(InvalidInputError, match="policy 'ddp' is unknown: choose one of cannikin, even, lb-bsp"):
        named_planner("ddp", JOB)
    with pytest.raises(InvalidInputError, match="policy 'even@day' is unknown"):
        named_planner("even@day", JOB)


def test_uneven_ranks_train_faster_under_the_controller_than_evenly():
    machine, workload = find_machine("a", "bert"), find_workload("bert")
    job = job_for(machine, workload, batch_size=24, max_batch_size=24)
    even, ours = (simulate(machine, workload, policy, job=job, max_epochs=0.2) for policy in ("even", "cannikin"))
    assert ours.plan.local_batches[0] > ours.plan.local_batches[1] > ours.plan.local_batches[2]
    assert ours.elapsed_s < 0.8 * even.elapsed_s


def test_plans_stay_within_what_memory_holds():
    machine, workload = find_machine("a", "bert"), find_workload("bert")
    run = simulate(machine, workload, "cannikin", max_epochs=0.5)
    assert all((np.array(plan.local_batches) <= machine.max_batch).all() for _, plan in run.plans)
    assert run.plan.total_batch > 24


def test_long_chunks_make_the_progress_that_short_windows_make():
    machine, workload = find_machine("a", "deepspeech2"), find_workload("deepspeech2")
    job = job_for(machine, workload, batch_size=12, max_batch_size=12)
    steps = [
        Simulation(machine, make_planner("even", job), job, workload, pace=pace).run(max_epochs=100).num_steps
        for pace in ("window", "epoch")
    ]
    assert steps[0] == pytest.approx(steps[1], rel=0.001)


def test_a_total_batch_too_small_for_the_ranks_is_raised():
    job = job_for(find_machine("b", "deepspeech2"), find_workload("deepspeech2"))
    assert (job.batch_size, job.min_local) == (32, 2)


def test_a_run_that_never_reaches_its_target_stops_at_its_limit_and_says_so():
    machine, workload = find_machine("a", "ncf"), find_workload("ncf", 0.99)
    run = simulate(machine, workload, "even", max_epochs=0.02)
    assert not run.reached
    assert run.reason.startswith("stopped at its limit of 0.02 epochs with hit rate at 10 0.6242: target 0.99 not")
    assert run.num_samples == pytest.approx(0.02 * workload.spec.num_samples, abs=64)
    assert run.reason.endswith("which the measured run never reaches either")


def test_a_run_without_an_end_is_refused(machine):
    job = Job(num_ranks=3, batch_size=60)
    with pytest.raises(InvalidInputError, match="the run has no end: give max_steps"):
        Simulation(machine, Script(), job).run(max_epochs=3)
    with pytest.raises(InvalidInputError, match="the run has no end"):
        Simulation(machine, Script(), JOB).run(max_epochs=math.inf)


def test_the_run_log_reads_like_a_real_ones(tmp_path):
    machine, workload = find_machine("a", "deepspeech2"), find_workload("deepspeech2")
    with RunLogWriter(tmp_path / RUNLOG_NAME) as log:
        run = simulate(machine, workload, "cannikin", max_epochs=1, observers=(log,), tags={"cluster": "a"})
    read = read_runlog(tmp_path)
    (header,) = read.headers
    assert (header.policy, header.world_size, header.tags["cluster"]) == ("cannikin", 3, "a")
    assert [info.device for info in header.ranks] == list(machine.names)
    assert 0 <= run.num_steps - sum(window.num_steps for window in read.windows) < 10
    elapsed = [window.elapsed_ms for window in read.windows]
    assert elapsed == sorted(elapsed)
    assert read.plans[-1].local_batches == run.plan.local_batches
    assert read.events[-1].kind == "end"
    assert any(event.kind == "eval" for event in read.events)
    assert read.windows[-1].noise is not None


def test_first_steps_at_a_new_size_are_slow_and_are_not_measured(machine):
    planner, slow = Script(), replace(machine, new_size=2.0)
    run = Simulation(slow, planner, JOB).run(max_steps=40)
    usual = Simulation(machine, Script(), JOB).run(max_steps=40)
    assert run.elapsed_s > 1.1 * usual.elapsed_s
    for window in planner.windows[1:]:
        is_new = np.diff(window.local_batches[:, 0], prepend=window.local_batches[0, 0]) != 0
        assert not window.valid[is_new, 0].any()
        assert window.valid[~is_new, 1].all()


def test_plans_are_later_by_the_lag(machine):
    planner = Script()
    Simulation(machine, planner, JOB, lag=2).run(max_steps=20)
    assert planner.asked[1:] == [5 + IN_FORCE + 2, 10 + IN_FORCE + 2, 15 + IN_FORCE + 2, 20 + IN_FORCE + 2]
