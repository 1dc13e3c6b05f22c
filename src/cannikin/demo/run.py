"""Runs the demonstration: launches the ranks, shows what they do, and leaves a run directory."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from cannikin.demo.settings import Task, check_folder
from cannikin.demo.show import Bars, RankLines, results_table
from cannikin.errors import CannikinError
from cannikin.lab.cluster import LabCluster
from cannikin.lab.launch import launch

__all__ = ["SUMMARY_NAME", "run_demo"]

SUMMARY_NAME = "summary.json"


def run_demo(
    task: Task, *, policies: list[str], speeds: tuple[float, ...], data: Path | None, out: Path, console: Console
) -> list[dict[str, Any]]:
    """Train under every policy on ranks of these speeds; what came of each.

    Leaves a run log for each policy and `summary.json` under `out`.
    """
    check_folder(task.dataset, data)
    cluster = LabCluster(speeds=speeds, sample_s=task.sample_ms / 1e3, fixed_s=task.fixed_ms / 1e3)
    if task.dataset == "digits" and data is not None:
        console.print(f"--data {data} is not used: scikit-learn brings the digits.", highlight=False)
    ranks = ", ".join(f"{speed:g}" for speed in speeds)
    heading = f"Training on {task.dataset} to {task.target:.0%} accuracy on {len(speeds)} ranks of speed {ranks}."
    console.print(heading, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    script = ["-m", "cannikin.demo.train", "--task", msgspec.json.encode(task).decode()]
    script += ["--policies", ",".join(policies), "--run-dir", str(out)]
    script += ["--data", str(data)] if data is not None else []
    with Bars(task, policies, console, out) as bars:

        def take(told: dict[str, Any]) -> None:
            bars.update(told)
            if told.pop("kind") == "result":
                results.append(told)

        lines: Any = RankLines(take, lambda line: print(line, file=sys.stderr))
        errors: Any = io.BytesIO()
        status = launch(cluster, script, mechanism="portable", out=lines, err=errors)
    said = errors.getvalue().decode(errors="replace")
    if status != 0:
        sys.stderr.write(said)
        raise CannikinError(f"the ranks ended with exit status {status}; what they said is above")
    # The lab warns where speeds are not as asked: such a comparison is worth little.
    sys.stderr.writelines(line for line in said.splitlines(keepends=True) if "] cannikin lab:" in line)
    summary = {
        "task": msgspec.to_builtins(task),
        "speeds": speeds,
        "policies": {result["policy"]: result for result in results},
    }
    (out / SUMMARY_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2))
    console.print(results_table(task, speeds, results))
    return results
