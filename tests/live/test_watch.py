"""`cannikin watch`: the live view over a log that is there, comes, grows, ends, or is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from live_records import END, HEADER, Clock, event, header, run, window
from live_screen import PtyProgram

from cannikin.cli import main
from cannikin.live.view import FollowedRun
from cannikin.runlog import RunLogWriter


def write_log(folder: Path, records) -> Path:
    with RunLogWriter(folder / "runlog.jsonl") as log:
        for record in records:
            log.write(record)
    return folder


def watch(*arguments: object):
    return CliRunner().invoke(main, ["watch", *map(str, arguments)])


@pytest.mark.parametrize("name", ["", "runlog.jsonl"])
def test_once_prints_the_present_state_also_where_there_is_no_terminal(tmp_path, name):
    result = watch(write_log(tmp_path, run(3)) / name, "--once")
    assert result.exit_code == 0
    assert "step 30" in result.stdout
    assert "fast gpu" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_a_run_that_has_ended_is_told_in_one_line_where_there_is_no_terminal(tmp_path):
    result = watch(write_log(tmp_path, [*run(3), END]))
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert line.startswith("cannikin: step 100, epoch 0")
    assert line.endswith("ended")


def test_a_run_that_has_ended_early_is_not_told_as_one_that_has_ended(tmp_path):
    early = event(100, "end", "in the middle of epoch 2", early=True)
    folder = write_log(tmp_path, [*run(3), early])
    assert watch(folder).stdout.splitlines()[-1].endswith("ended early")
    assert "· ended early" in watch(folder, "--once").stdout


def test_a_run_that_is_silent_for_long_is_said_to_be_where_there_is_no_terminal(tmp_path, monkeypatch):
    """As one that was killed is. Time is counted by the naps between two looks, and Ctrl-C comes after a minute."""
    clock = Clock()

    def nap(seconds):
        clock.now += seconds
        if clock.now > 60:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "sleep", nap)
    monkeypatch.setattr("cannikin.cli.watch.FollowedRun", lambda path: FollowedRun(path, clock))
    first, second, *_ = watch(write_log(tmp_path, run(3))).stdout.splitlines()
    assert "silent" not in first
    assert second.endswith("silent for 0:30")


def test_a_run_that_ended_before_its_first_window_waits_for_nothing(tmp_path):
    shown = watch(write_log(tmp_path, [HEADER, END]), "--once").stdout
    assert "no step was measured" in shown
    assert "waiting" not in shown


def test_in_a_folder_of_runs_one_of_them_is_named(tmp_path):
    for name in ("even", "cannikin"):
        write_log(tmp_path / name, run(3))
    result = watch(tmp_path, "--once")
    assert result.exit_code == 2
    assert result.stderr.endswith(f"has no run log: give a run in it: {tmp_path / 'cannikin'}\n")
    assert f"a run is in {tmp_path / 'cannikin'}" in watch(tmp_path, "--wait", "0.01").stderr.splitlines()[0]


def test_a_log_killed_inside_a_line_is_shown_as_far_as_it_goes(tmp_path):
    path = write_log(tmp_path, run(3)) / "runlog.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert "step 30" in watch(tmp_path, "--once").stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no run log: give the run_dir of a training script"),
        (b"", "has no header yet"),
        (b"PNG\x00\x01", "is not a run log"),
        (b'{"type":"header","format":"other","version":1}\n', "is not a run log"),
        (b'{"type":"header","format":"cannikin-runlog","version":9,"cannikin_version":"7"}\n', "is a log of version 9"),
        (b'{"type":"header","format":"cannikin-runlog","version":1}\n', "has a damaged header"),
    ],
    ids=["missing", "empty", "foreign", "other format", "newer", "damaged"],
)
@pytest.mark.parametrize("option", ["--once", "--wait=0"])
def test_what_is_no_log_is_one_line_and_exit_status_2(tmp_path, content, words, option):
    path = tmp_path / "runlog.jsonl"
    if content is not None:
        path.write_bytes(content)
    result = watch(path, option)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


def test_a_log_that_does_not_come_in_time_is_said_to_be_missing(tmp_path):
    result = watch(tmp_path / "run", "--wait", "0.2")
    waiting, missing = result.stderr.splitlines()
    assert result.exit_code == 2
    assert waiting.startswith("waiting for the run log of")
    assert "has no run log after 0.2 s" in missing


@pytest.mark.timeout(60)
def test_it_follows_a_log_that_comes_grows_and_ends(tmp_path):
    folder = tmp_path / "run"
    program = PtyProgram(["-m", "cannikin", "watch", str(folder)])
    program.until(lambda screen: "waiting for the run log" in screen.text)
    with RunLogWriter(folder / "runlog.jsonl") as log:
        log.write(HEADER)
        program.until(lambda screen: "waiting for the first steps" in screen.text)
        for record in run(2)[1:]:
            log.write(record)
        program.until(lambda screen: "step 20" in screen.text)
        log.write(window(2, (28, 4)))
        screen = program.until(lambda screen: "step 30" in screen.text)
        assert "step 20 ·" not in screen.text  # drawn in place
        assert program.process.poll() is None
        log.write(END)
    assert program.end() == 0
    assert "ended" in program.screen.text
    assert program.screen.text.count("╭─ cannikin") == 1
    assert not program.screen.is_cursor_hidden


@pytest.mark.timeout(60)
def test_ctrl_c_ends_the_watching_with_status_0_and_the_cursor_is_back(tmp_path):
    program = PtyProgram(["-m", "cannikin", "watch", str(write_log(tmp_path, run(2)))])
    program.until(lambda screen: "step 20" in screen.text)
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 0
    assert not program.screen.is_cursor_hidden
    assert "Traceback" not in program.screen.text


@pytest.mark.timeout(60)
def test_without_a_terminal_it_follows_in_lines(tmp_path):
    write_log(tmp_path, run(2))
    command = [sys.executable, "-m", "cannikin", "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        first = watching.stdout.readline()  # until then it may not have seen the log without its end
        with RunLogWriter(tmp_path / "runlog.jsonl", append=True) as log:
            log.write(header(first_step=20))
            log.write(END)
        rest, errors = watching.communicate(timeout=30)
    assert (watching.returncode, errors) == (0, "")
    lines = [first, *rest.splitlines()]
    assert [line.split(",")[0] for line in lines] == ["cannikin: step 20", "cannikin: step 100"]


def test_a_run_that_says_nothing_for_long_is_noted(tmp_path):
    clock = Clock()
    followed = FollowedRun(write_log(tmp_path, run(2)), clock)
    assert followed.poll()
    assert followed.note == ""
    clock.now = 42.0
    assert not followed.poll()
    assert followed.note == "silent for 0:42"
    followed.state.take(END)
    assert followed.note == ""
    followed.close()


@pytest.mark.parametrize("way", ["set aside", "begun again in its place"])
def test_a_log_that_takes_the_place_of_another_is_followed_instead(tmp_path, way):
    path = write_log(tmp_path, run(9)) / "runlog.jsonl"
    followed = FollowedRun(tmp_path)
    followed.poll()
    if way == "set aside":
        path.rename(tmp_path / "runlog-1.jsonl")
        assert not followed.poll()
        assert followed.state.step == 90  # nothing is there yet
        write_log(tmp_path, run(2))
    else:
        os.truncate(path, 0)
        with RunLogWriter(path) as log:
            for record in run(2):
                log.write(record)
    assert followed.poll()
    assert followed.state.step == 20
    followed.close()


def test_what_the_output_cannot_hold_is_a_question_mark(tmp_path):
    write_log(tmp_path, [*run(2), event(20, "eval", précision=0.5)])
    command = [sys.executable, "-m", "cannikin", "watch", "--once", str(tmp_path)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pr?cision 0.5" in done.stdout
    assert {len(line) for line in done.stdout.splitlines()} == {80}
