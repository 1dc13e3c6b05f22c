"""A simulated cluster fitted from a run log: of a simulated run here, of a real one in tests/runtime."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.paper.optimum import expected_s
from cannikin.core.values import Job
from cannikin.errors import RunLogError
from cannikin.runlog import RUNLOG_NAME, RunLogWriter, read_runlog
from cannikin.sim.replay import compare, machine_from_log
from cannikin.sim.runs import find_machine, named_planner
from cannikin.sim.simulation import Simulation


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A machine without drift, and the log of a run on it that moves samples about."""
    machine = replace(find_machine("a", "imagenet"), drift=0.0)
    job = Job(num_ranks=3, batch_size=96, max_local=tuple(machine.max_batch.tolist()))
    folder = tmp_path_factory.mktemp("run")
    planner, pace = named_planner("lb-bsp", job)
    with RunLogWriter(folder / RUNLOG_NAME) as log:
        simulation = Simulation(machine, planner, job, pace=pace, observers=(log,))
        simulation.begin("lb-bsp", {})
        simulation.run(max_steps=800)
    return machine, read_runlog(folder)


def test_the_logs_splits_take_as_long_again(logged):
    _, log = logged
    rows = compare(log, machine_from_log(log))
    assert len(rows) >= 3
    for row in rows:
        assert abs(row.error) < 0.1, row
    assert sum(row.num_windows for row in rows) == len(log.windows) - 1


def test_the_fit_finds_the_machines_own_times(logged):
    machine, log = logged
    fitted = machine_from_log(log)
    assert fitted.names == machine.names
    assert fitted.bucket_s == pytest.approx(machine.bucket_s, rel=0.05)
    split = np.array(log.windows[-1].local_batches)
    assert fitted.compute(split)[1] == pytest.approx(machine.compute(split)[1], rel=0.05)
    assert float(expected_s(fitted, split)) == pytest.approx(float(expected_s(machine, split)), rel=0.05)


def test_a_log_without_a_full_window_is_refused(tmp_path, logged):
    _, log = logged
    with pytest.raises(RunLogError, match="no window measured on all ranks after its first: train longer"):
        machine_from_log(replace(log, windows=log.windows[:1]))
