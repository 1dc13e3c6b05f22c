"""The demonstration: what it shows, what it leaves behind, what it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from rich.console import Console

from cannikin.cli import main
from cannikin.demo.comparison import Bars, RankLines, results_table
from cannikin.demo.tasks import DEFAULT_POLICIES, SPEEDS, Result, Task, quick
from cannikin.runlog import Header, JobInfo, RankInfo, RunLogWriter, WindowRecord, read_runlog

RESULT = Result(
    policy="even",
    is_done=True,
    seconds_to_target=12.0,
    median_step_ms=80.0,
    accuracy=0.975,
    steps=150,
    samples=7200,
    final_split=(16, 16, 16),
    total_batches=[(1, 48)],
    curve=[],
)


def shown(*renderables: object) -> str:
    out = io.StringIO()
    Console(width=100, file=out).print(*renderables)
    return out.getvalue()


def test_rank_0s_objects_are_taken_and_all_other_lines_passed_on():
    objects, lines = [], []
    stream = RankLines(objects.append, lines.append)
    for piece in (b'[rank 0] {"a": 1}\n[rank 1] hello\n', b'\n[rank 0] {"b": 2}\n'):
        stream.write(piece)
    assert [json.loads(text) for text in objects] == [{"a": 1}, {"b": 2}]
    assert lines == ["[rank 1] hello"]


def test_the_table_has_the_fastest_first_and_says_what_the_ranks_were():
    slow = RESULT
    totals = [(1, 48), (30, 96), (60, 120)]
    fast = replace(RESULT, policy="cannikin", seconds_to_target=5.0, total_batches=totals)
    never = replace(RESULT, policy="adaptdl", seconds_to_target=None)
    text = shown(results_table(Task(), SPEEDS, [never, slow, fast]))
    assert text.index("cannikin") < text.index("even") < text.index("adaptdl")
    assert "3 ranks of speed 1, 0.5, 0.25" in text
    assert "48 > 96 > 120" in text
    assert "not reached" in text


def test_without_a_terminal_there_is_one_line_per_policy(capsys, tmp_path):
    console = Console(width=200, force_terminal=False)
    with Bars(Task(), ["even"], console, tmp_path) as bars:
        bars.show(replace(RESULT, is_done=False, accuracy=0.5, curve=[(1.0, 72, 0.5)]))
        bars.show(RESULT)
    assert capsys.readouterr().out.splitlines() == ["even: 97.5% in 12.0 s, 48 = 16 + 16 + 16"]


def test_quick_lowers_the_target_and_nothing_of_the_training():
    task, small = Task(), quick(Task())
    assert small.target < task.target
    assert (small.lr, small.batch_size, small.seed) == (task.lr, task.batch_size, task.seed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "best"], "'best' is not one of"),
        (["--ranks", "1,0"], "speed"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2_and_leaves_nothing_behind(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(120)
def test_it_trains_for_real_and_leaves_run_logs_and_a_summary(tmp_path: Path):
    command = [sys.executable, "-m", "cannikin", "demo", "--quick", "--ranks", "1,0.25", "--out", str(tmp_path / "run")]
    command += [word for policy in ("even", "cannikin") for word in ("--policy", policy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert list(summary["policies"]) == ["even", "cannikin"]
    for policy, result in summary["policies"].items():
        assert result["accuracy"] >= summary["task"]["target"]
        assert result["seconds_to_target"] > 0
        assert result["median_step_ms"] > 0
        log = read_runlog(tmp_path / "run" / policy)
        assert log.header.policy == policy
        assert [rank.device for rank in log.header.ranks] == ["lab device of speed 1", "lab device of speed 0.25"]
        told = [event.data for event in log.events if event.kind == "eval"]
        curve = [(round(data["accuracy"], 4), data["train_s"]) for data in told]
        assert curve == [(accuracy, seconds) for seconds, _, accuracy in result["curve"]]
        assert log.events[-1].kind == "end"
        assert log.events[-1].elapsed_ms / 1e3 >= result["seconds_to_target"]
    fast, slow = summary["policies"]["cannikin"]["final_split"]
    assert fast > slow
    assert summary["policies"]["even"]["final_split"] == [24, 24]
    assert done.stdout.splitlines()[-1] == f"The report: {tmp_path / 'run' / 'report.html'}"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "even" in page
    assert "cannikin" in page


@pytest.mark.parametrize("status", [129, 130, 143])
def test_a_demonstration_that_a_signal_ends_says_so_by_its_status(status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cannikin.demo.comparison.launch", lambda *args, **keywords: status)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--quick", "--out", str(tmp_path / "out")])
    assert ended.value.code == status
    assert "interrupted" in capsys.readouterr().err


def test_the_default_is_all_four():
    assert DEFAULT_POLICIES == ("even", "adaptdl", "lb-bsp", "cannikin")


# The panel of the policy that trains


def write_log(folder: Path, device: str) -> None:
    with RunLogWriter(folder / "runlog.jsonl") as log:
        log.write(
            Header(
                cannikin_version="0",
                started="",
                policy="even",
                world_size=1,
                job=JobInfo(batch_size=48),
                ranks=(RankInfo(device=device),),
            )
        )
        log.write(
            WindowRecord(
                first_step=0,
                num_steps=5,
                num_valid=5,
                total_batch=48,
                local_batches=(48,),
                step_ms=80.0,
                before_ms=(20.0,),
                backward_ms=(40.0,),
                done_ms=(60.0,),
            )
        )


def test_on_a_terminal_the_ranks_of_the_policy_that_trains_are_shown_below_the_bars(tmp_path):
    write_log(tmp_path / "even", "first device")
    console = Console(width=100, height=40, file=io.StringIO(), force_terminal=True)
    with Bars(Task(), ["even", "cannikin"], console, tmp_path):
        assert "first device" in console.file.getvalue()


def test_a_policy_that_is_done_keeps_its_bar_and_the_next_ones_panel_comes(tmp_path):
    write_log(tmp_path / "even", "first device")
    write_log(tmp_path / "cannikin", "second device")
    console = Console(width=100, height=40, file=io.StringIO(), force_terminal=True)
    with Bars(Task(), ["even", "cannikin"], console, tmp_path) as bars:
        bars.show(RESULT)
        drawn = shown(bars.get_renderable())
        assert "97.5% in 12.0 s" in drawn
        assert "second device" in drawn
        bars.show(replace(RESULT, policy="cannikin"))
        length = len(console.file.getvalue())
    assert "device" not in console.file.getvalue()[length:]


def test_before_the_first_steps_and_with_a_foreign_log_there_are_only_bars(tmp_path):
    console = Console(width=100, height=40, file=io.StringIO(), force_terminal=True)
    (tmp_path / "cannikin").mkdir()
    (tmp_path / "cannikin" / "runlog.jsonl").write_text("something else\n")
    for policy in ("even", "cannikin"):
        with Bars(Task(), [policy], console, tmp_path) as bars:
            assert "step time" not in shown(bars.get_renderable())
