"""Simulator and reality: half of a real training's windows, run again on a simulated cluster fitted from the others."""

from __future__ import annotations

from ranks import run_ranks
from training_cases import Numbered, make_model, one_epoch

from cannikin.runlog import read_runlog
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.sim.replay import compare, machine_from_log

SAMPLE_S = (1e-3, 2e-3, 4e-3)  # of each rank, for a sample, in forward and again in backward


def train_with_a_log(rank: int, world_size: int, folder: str) -> int:
    """Six epochs of 30 steps on ranks of unlike speed, with the controller moving samples; steps taken."""
    model, optimizer = make_model(SAMPLE_S[rank], policy="cannikin", run_dir=folder)
    loader = HeteroDataLoader(Numbered(720), model=model, batch_size=24)
    return sum(len(one_epoch(model, optimizer, loader)) for _ in range(6))


def test_a_real_runs_steps_take_as_long_in_the_simulator(tmp_path):
    steps = run_ranks(train_with_a_log, 3, str(tmp_path), timeout_s=100)
    assert steps == [180] * 3
    log = read_runlog(tmp_path)
    fitted, others = slice(0, None, 2), slice(1, None, 2)
    machine = machine_from_log(log, fitted)
    before = {row.local_batches: row.measured_s for row in compare(log, machine, fitted)}
    rows = [row for row in compare(log, machine, others) if row.local_batches in before]
    num_windows = sum(row.num_windows for row in rows)
    assert num_windows >= 6
    # The same split takes longer where other programs want the cores: by how much, its windows on both sides tell.
    errors = [max(0.0, abs(row.error) - abs(before[row.local_batches] / row.measured_s - 1)) for row in rows]
    mean = sum(error * row.num_windows for error, row in zip(errors, rows, strict=True)) / num_windows
    assert mean < 0.1, rows
