"""What the demonstration shows: a bar a policy while it trains, one table at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from cannikin.demo.settings import Task

__all__ = ["Bars", "RankLines", "results_table"]


class RankLines:
    """A stream for the ranks' output: rank 0's JSON objects go to a callback, all other lines are passed on."""

    def __init__(self, on_object: Callable[[dict[str, Any]], None], on_line: Callable[[str], None]) -> None:
        self._on_object, self._on_line = on_object, on_line
        self._rest = b""

    def write(self, content: bytes) -> int:
        """Take some bytes, whole lines or not."""
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))
        return len(content)

    def flush(self) -> None:
        """Nothing is held back but an unfinished line."""

    def _take(self, line: str) -> None:
        text = line.removeprefix("[rank 0] ")
        if text.startswith("{"):
            self._on_object(json.loads(text))
        elif text.strip():
            self._on_line(line)


class Bars:
    """One bar a policy: how far its accuracy is on the way to the target."""

    def __init__(self, task: Task, policies: list[str], console: Console) -> None:
        self._target = task.target
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:10}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._bars = {policy: self._progress.add_task(policy, total=task.target, state="waits") for policy in policies}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, told: dict[str, Any]) -> None:
        """Take a `progress` or `result` object of rank 0."""
        if told["kind"] == "result":
            seconds = told["seconds_to_target"]
            state = f"{told['accuracy']:.1%} in {seconds:.1f} s" if seconds else f"{told['accuracy']:.1%}: given up"
            split = told["final_split"]
        else:
            state = f"{told['accuracy']:.1%} of {self._target:.0%} after {told['seconds']:.1f} s, step {told['steps']}"
            split = told["split"]
        state = f"{state}, {sum(split)} = {' + '.join(map(str, split))}"
        self._progress.update(self._bars[told["policy"]], completed=told["accuracy"], state=state)
        if not self._console.is_terminal and told["kind"] == "result":
            self._console.print(f"{told['policy']}: {state}", highlight=False)


def results_table(task: Task, speeds: tuple[float, ...], results: list[dict[str, Any]]) -> Table:
    """Every policy's figures, the fastest first."""
    ranks = ", ".join(f"{speed:g}" for speed in speeds)
    table = Table(
        title=f"{task.dataset} to {task.target:.0%} accuracy, {len(speeds)} ranks of speed {ranks}",
        caption=f"Device time of b samples at speed v: {task.fixed_ms:g} + {task.sample_ms:g} b/v ms. Seconds are of "
        f"training alone; all policies have the same network, data, seed {task.seed} and B0 = {task.batch_size}.",
    )
    for heading in ("policy", "time to target", "median step", "final split", "total batch", "accuracy"):
        table.add_column(heading, justify="left" if heading in ("policy", "total batch") else "right")
    for result in sorted(results, key=lambda r: (r["seconds_to_target"] is None, r["seconds_to_target"])):
        seconds = result["seconds_to_target"]
        table.add_row(
            result["policy"],
            f"{seconds:.1f} s" if seconds is not None else "not reached",
            f"{result['median_step_ms']:.0f} ms",
            "/".join(map(str, result["final_split"])),
            _path([total for _, total in result["total_batches"]]),
            f"{result['accuracy']:.1%}",
        )
    return table


def _path(totals: list[int]) -> str:
    """Total batches in turn, the middle ones left out where there are many."""
    shown = totals if len(totals) <= 5 else [*totals[:2], 0, *totals[-2:]]
    return " > ".join("..." if total == 0 else str(total) for total in shown)
