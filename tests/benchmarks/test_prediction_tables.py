"""Tables of the benchmarks that search for the best split: both measures of predictions."""

from __future__ import annotations

from typing import Any

from benchmarks import gpu, lab_limit
from cannikin.runlog import PlanRecord, Predictions, WindowRecord


def told(*plans: tuple[int, tuple[int, int], float, float]) -> dict[str, Any]:
    """The numbers of plans, each with its step, split, predicted and measured milliseconds."""
    predictions = Predictions()
    for step, batches, predicted_ms, measured_ms in plans:
        same: dict[str, Any] = {"first_step": step, "total_batch": sum(batches), "local_batches": batches}
        predictions.write(PlanRecord(step=step, predicted_step_ms=predicted_ms, phase="", reason="", **same))
        predictions.write(WindowRecord(num_steps=5, num_valid=5, step_ms=measured_ms, **same))
    return predictions.numbers()


PREDICTIONS = told((5, (6, 2), 44.0, 40.0), (10, (5, 3), 41.2, 40.0), (15, (6, 2), 40.0, 40.0))
RESULT: dict[str, Any] = {
    "job": "limit",
    "predictions": PREDICTIONS,
    "predicted_ms": 40.0,
    "splits": {"ours": (6, 2), "best": (5, 3)},
    "split_ms": {"ours": 40.0, "best": 38.0},
}


def test_the_labs_table_has_every_plan_that_was_predicted_before_it_ran_and_the_best_split():
    ranks = {"regime": "mixed", "ranks": "two", "total": 8, "num_splits": 2, "bottlenecks": ["compute"] * 2}
    lb_bsp = {"lb_bsp_changes": [4], "lb_bsp_settled": True, "lb_bsp_steps": 64}
    ours = {"work_share": [0.2, 0.2], "round_ms": {"ours": [40.0], "best": [38.0]}, "changes": [5, 10, 15]}
    paper = {"paper_plans": [{"step": 0, "split": [8, 8], "reason": ""}, {"step": 40, "split": [11, 5], "reason": ""}]}
    text = lab_limit.table([{**RESULT, **ranks, **lb_bsp, **paper, **ours}])
    assert "the paper's method (run for real): step 0: 8, 8; step 40: 11, 5" in text
    assert "off by: median 6.5%, worst 10.0%; by first step (steps): 5: +10.0% (5), 10: +3.0% (5)\n" in text
    assert "predicted at the end 40.0 ms, best split measured 38.0 ms: +5.3%" in text


def test_the_gpus_table_has_both_measures_for_a_cell_and_for_all():
    cell = {
        **RESULT,
        "speeds": [1.0, 0.5],
        "over_best": {"ours": 1.05, "ours at 30": 1.05, "lb-bsp": 1.1, "even": 1.5, "best": 1.0},
        "control_over_ours": 1.0,
        "iqr_pct": {"ours": 1.0},
        "use": {"ours": 0.9, "even": 0.5, "best": 0.9},
        "changes_after_60": 0,
        "steps": 20,
        "lb_bsp_settled": True,
        "lb_bsp_moves": 1,
        "lb_bsp_steps": 64,
    }
    line, totals = gpu.table([cell]).splitlines()
    assert "predicted before a plan ran, off by: median 6.5%, worst 10.0%; against the best: +5.3%" in line
    assert "2 plans predicted before they ran, off by: median 6.5%, worst 10.0%" in totals
    assert "against the best split measured: median 5.3%, worst 5.3%" in totals
