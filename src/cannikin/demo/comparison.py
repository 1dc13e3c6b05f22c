"""Runs the demonstration: launches the ranks, shows what they do, and leaves a run directory.

It shows one bar per policy, below them the live view of the policy that trains, and one table at the end.
"""

from __future__ import annotations

import io
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from cannikin.demo.tasks import Result, Task
from cannikin.errors import CannikinError, RunLogError
from cannikin.lab.cluster import LabCluster
from cannikin.lab.launch import launch
from cannikin.live.panel import LivePanel
from cannikin.live.view import FollowedRun
from cannikin.words import counted, split, split_sum

SUMMARY_NAME = "summary.json"
_REFRESHES_PER_S = 2  # the ranks need the processor

_INTERRUPTED = [128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]  # as shells say it


def run_demo(task: Task, *, policies: list[str], speeds: tuple[float, ...], out: Path, console: Console) -> int:
    """Train under every policy on ranks of these speeds, and compare; return 0, or the status where a signal ended it.

    Leaves a run log per policy and `summary.json` under `out`.
    """
    cluster = LabCluster(speeds=speeds, sample_s=task.sample_ms / 1e3, fixed_s=task.fixed_ms / 1e3)
    console.print(f"Training on {_goal(task)} on {_ranks(speeds)}.", highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    script = ["-m", "cannikin.demo.train", msgspec.json.encode(task).decode(), ",".join(policies), str(out)]
    with Bars(task, policies, console, out) as bars:

        def take(text: str) -> None:
            result = msgspec.json.decode(text, type=Result)
            bars.show(result)
            if result.is_done:
                results.append(result)

        lines: Any = RankLines(take, lambda line: print(line, file=sys.stderr))
        errors: Any = io.BytesIO()
        status = launch(cluster, script, mechanism="portable", out=lines, err=errors)
    messages = errors.getvalue().decode(errors="replace")
    if status in _INTERRUPTED:
        print("cannikin: interrupted", file=sys.stderr)
        return status
    if status != 0:
        sys.stderr.write(messages)
        raise CannikinError(f"the ranks ended with exit status {status}; their messages are above")
    # The lab warns where speeds are not as asked: such a comparison is worth little.
    sys.stderr.writelines(line for line in messages.splitlines(keepends=True) if "] cannikin lab:" in line)
    policies_told = {result.policy: msgspec.structs.asdict(result) for result in results}
    summary = msgspec.json.encode({"task": task, "speeds": speeds, "policies": policies_told})
    (out / SUMMARY_NAME).write_bytes(msgspec.json.format(summary, indent=2))
    console.print(results_table(task, speeds, results))
    return 0


class RankLines:
    """A stream for the ranks' output, which comes in whole lines: rank 0's JSON objects go to `on_object`."""

    def __init__(self, on_object: Callable[[str], None], on_line: Callable[[str], None]) -> None:
        self._on_object, self._on_line = on_object, on_line

    def write(self, content: bytes) -> None:
        for line in content.decode(errors="replace").split("\n"):
            text = line.removeprefix("[rank 0] ")
            if text.startswith("{"):
                self._on_object(text)
            elif text.strip():
                self._on_line(line)

    def flush(self) -> None:
        """Do nothing: no line is held back."""


class Bars(Progress):
    """One bar per policy: how far its accuracy is on the way to the target; below, what the ranks are doing.

    They are drawn on a terminal; any other console gets one line per policy. What the ranks are doing is read from the
    logs of the policies in `run_dir`.
    """

    def __init__(self, task: Task, policies: list[str], console: Console, run_dir: Path) -> None:
        self._followed = {policy: FollowedRun(run_dir / policy) for policy in policies}
        self._waiting = dict(self._followed)  # policies without a result, in the order they train
        columns = TextColumn("{task.description:10}"), BarColumn(bar_width=30), TextColumn("{task.fields[state]}")
        disable = not console.is_terminal
        super().__init__(*columns, console=console, refresh_per_second=_REFRESHES_PER_S, disable=disable)
        self.live.vertical_overflow = "crop"
        self._target = task.target
        self._bars = {policy: self.add_task(policy, total=task.target, state="waits") for policy in policies}

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bars, and the panel of the first policy that has no result yet, once it trains."""
        yield from super().get_renderables()
        for run in list(self._waiting.values())[:1]:
            with suppress(RunLogError):  # the folder held another log, which the training refuses with its own words
                run.poll()
            if run.state.header is not None:
                yield LivePanel(run.state)

    def stop(self) -> None:
        """Leave the bars as they are, without a panel."""
        self._waiting.clear()
        super().stop()
        for run in self._followed.values():  # rich's thread draws no more, so it reads no more
            run.close()

    def show(self, result: Result) -> None:
        """Show what has come of a policy."""
        state = f"{result.accuracy:.1%}"
        if result.is_done:
            seconds = result.seconds_to_target
            state += ": given up" if seconds is None else f" in {seconds:.1f} s"
            self._waiting.pop(result.policy, None)
        else:
            state += f" of {self._target:.0%} after {result.curve[-1][0]:.1f} s, step {result.steps}"
        state += f", {split_sum(result.final_split)}"
        self.update(self._bars[result.policy], completed=result.accuracy, state=state)
        if result.is_done and self.disable:
            self.console.print(f"{result.policy}: {state}", highlight=False)


def results_table(task: Task, speeds: tuple[float, ...], results: list[Result]) -> Table:
    """Return a table of every policy's figures, the fastest first."""
    table = Table(
        title=f"{_goal(task)}, {_ranks(speeds)}",
        caption=f"Device time of b samples at speed v: {task.fixed_ms:g} + {task.sample_ms:g} b/v ms. Seconds are of "
        f"training alone; all policies have the same network, data, seed {task.seed} and B0 = {task.batch_size}.",
    )
    for heading in ("policy", "time to target", "median step", "final split", "total batch", "accuracy"):
        table.add_column(heading, justify="left" if heading in ("policy", "total batch") else "right")
    for result in sorted(results, key=lambda result: result.seconds_to_target or math.inf):
        seconds = result.seconds_to_target
        table.add_row(
            result.policy,
            f"{seconds:.1f} s" if seconds is not None else "not reached",
            f"{result.median_step_ms:.0f} ms",
            split(result.final_split),
            _path([total for _, total in result.total_batches]),
            f"{result.accuracy:.1%}",
        )
    return table


def _goal(task: Task) -> str:
    return f"digits to {task.target:.0%} accuracy"


def _ranks(speeds: tuple[float, ...]) -> str:
    return f"{counted(len(speeds), 'rank')} of speed {', '.join(f'{speed:g}' for speed in speeds)}"


def _path(totals: list[int]) -> str:
    """Return total batches in turn, the middle ones left out where there are many."""
    shown = totals if len(totals) <= 5 else [*totals[:2], 0, *totals[-2:]]
    return " > ".join("..." if total == 0 else str(total) for total in shown)
