"""The live view: what it looks like, how often it is drawn, and what becomes of the script's own output."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from live_records import END, HEADER, Clock, event, header, plan, run, window
from live_screen import PtyProgram, Terminal
from rich.cells import cell_len
from rich.console import Console

import cannikin
from cannikin.live.panel import LivePanel, status_line
from cannikin.live.state import LiveState
from cannikin.live.view import LiveView
from cannikin.runlog import JobInfo, ModelInfo, NoiseRecord


def state_after(records):
    state = LiveState()
    for record in records:
        state.take(record)
    return state


def panel(records, width=80, **options):
    console = Console(width=width, height=40, file=io.StringIO(), **options)
    console.print(LivePanel(state_after(records)), end="")
    return console.file.getvalue()


# What it looks like


def test_it_says_what_the_ranks_do_and_what_the_plan_is():
    text = panel([*run(5), event(45, "eval", accuracy=0.931), event(47, "changed_speed", "rank 1 takes 1.60 times")])
    for words in (
        "2 ranks · Net, 38.3 k parameters",
        "step 50 · 0:02",
        "epoch 0  1.60 of 8 passes",
        "20%  0:08 left",
        "fast gpu",
        "50%    10%    40%",  # the fast rank's computing, communication and waiting
        "90%    10%     0%",
        "40 ms, predicted 32 ms (+25.0%); ranks wait 20% of it",
        "32 (32 to 256)",
        "800 samples/s, goodput 800/s (100% efficient)",
        "96 (80 to 120) · learning rate ×1.25",
        "rank 1 (slow gpu): 4.5 ms/sample, 5.4× rank 0",
        "accuracy 0.931",
        "rank 1 finishes last with 8 samples (compute)",
        "rank 1 takes 1.60 times",
    ):
        assert words in text


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64, 1000])
def test_every_line_is_as_wide_as_the_terminal(width, num_ranks):
    devices = tuple(
        ("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", "华为昇腾")[rank % 3] for rank in range(num_ranks)
    )
    batches = tuple(range(1, num_ranks + 1))
    long = plan(10, batches, reason="a long reason, " * 30)
    console = Console(width=width, height=40, file=io.StringIO())
    drawn = console.render_lines(LivePanel(state_after([header(devices), window(0, batches), long])), pad=False)
    assert {sum(segment.cell_length for segment in line) for line in drawn} == {width}
    assert len(drawn) <= 24


@pytest.mark.parametrize("width", [24, 40, 80])
@pytest.mark.parametrize("name", ["Net", "模型" * 9])
def test_the_title_is_cut_to_the_width_also_where_letters_are_wide(width, name):
    state = state_after([header(model=ModelInfo(name=name)), window(123_456, elapsed_ms=1e9)])
    console = Console(width=width, height=40, file=io.StringIO())
    console.print(LivePanel(state, "silent for 1:02:03"), end="")
    lines = console.file.getvalue().splitlines()
    assert {cell_len(line) for line in lines} == {width}
    assert lines[0].endswith("─╮")


@pytest.mark.parametrize("batches", [(1, 0), (0, 0)])
def test_a_rank_that_only_pads_has_no_time_a_sample(batches):
    text = panel([header(), window(0, batches)], width=120)
    assert "slow gpu" in text
    assert "slowest" not in text


def test_many_ranks_are_put_together_by_device_and_the_slowest_is_named():
    devices = ("h100",) * 40 + ("v100",) * 24
    batches = (30,) * 39 + (31,) + (8,) * 24
    text = panel([header(devices), window(0, batches), plan(10, batches)])
    assert "0-39  h100 ×40 30-31" in text
    assert "40-63 v100 ×24     8" in text
    assert "rank 63 (v100): 4.5 ms/sample" in text


def test_more_kinds_than_rows_leave_the_rare_ones_together():
    devices = tuple(f"device {rank}" for rank in range(20)) + ("common",) * 5
    text = panel([header(devices), window(0, (4,) * 25)])
    assert "common ×5" in text
    assert "other kinds" in text


def test_a_low_terminal_gets_fewer_rows():
    devices = tuple("abcdefgh")
    console = Console(width=80, height=20, file=io.StringIO())
    console.print(LivePanel(state_after([header(devices), window(0, (4,) * 8)])))
    assert console.file.getvalue().count("\n") <= 19


def test_a_plan_that_is_not_in_force_yet_is_announced():
    assert "from step 14 on 40 = 28 + 12" in panel([HEADER, window(0), plan(10, (28, 12))])


def test_loading_has_a_column_only_where_there_is_some():
    assert "load" not in panel([HEADER, window(0)])
    assert "load" in panel([HEADER, window(0, loader_ms=(4.0, 1.0))])


@pytest.mark.parametrize(
    "records",
    [
        [],
        [HEADER],
        [header(ranks=())],
        [HEADER, window(0, step_ms=None, before_ms=(), backward_ms=(), done_ms=(), wait_ms=(), noise=None)],
        [HEADER, window(0, before_ms=(None, 3.0), progress=None, elapsed_ms=None, lr_factor=None)],
        [HEADER, window(0, noise=NoiseRecord(low=3.0)), plan(10, predicted_step_ms=None)],
        [header(job=JobInfo(batch_size=32)), event(0, "epoch", epoch=2), window(0, step_ms=0.0)],
        [header(("cpu",)), window(0, (32,), wait_ms=(0.0,))],
    ],
)
def test_what_is_not_known_is_left_out(records):
    assert panel(records).startswith("╭─ cannikin")
    assert "None" not in panel(records)
    assert "nan" not in panel(records) + status_line(state_after(records))


def test_names_from_a_log_cannot_command_the_terminal():
    evil = "\x1b[2J\x07gpu"
    text = panel([header((evil, evil)), window(0), plan(10, reason=evil), event(3, "note", evil)])
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\x1b" not in status_line(state_after([HEADER, window(0), event(9, "eval", **{evil: 1.0})]))


def test_without_colours_the_parts_of_a_step_still_differ():
    assert "░" in panel(run(2), no_color=True)
    console = Console(width=80, file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    console.print(LivePanel(state_after(run(2))))
    console.file.flush()
    assert "####" in console.file.buffer.getvalue().decode("ascii")


# On a terminal


def on_terminal(monkeypatch):
    """The standard streams become one terminal; in the test itself, since pytest sets its own before."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def shown(terminal):
    return terminal.screen.lines


def tell(view, records):
    for record in records:
        view.write(record)


def test_the_panel_stays_below_what_the_script_prints(monkeypatch):
    terminal = on_terminal(monkeypatch)
    view = LiveView()
    tell(view, run(1))
    print("one")
    print("two", end="")
    tell(view, [window(1)])
    print(" and a half")
    lines = shown(terminal)
    assert lines[:3] == ["one", "two and a half", ""]  # the cursor is in the empty line
    assert lines[3].startswith("╭─ cannikin")
    assert sum(line.startswith("╭") for line in lines) == 1


def test_loggers_made_before_the_view_are_noticed_too(monkeypatch):
    terminal = on_terminal(monkeypatch)
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    tell(LiveView(), run(1))
    logger.info("first")
    logger.info("second")
    assert shown(terminal)[:2] == ["first", "second"]


def test_a_bar_that_is_drawn_again_and_again_is_left_alone(monkeypatch):
    terminal = on_terminal(monkeypatch)
    clock = Clock()
    view = LiveView(clock=clock)
    tell(view, run(1))
    for percent in range(0, 101, 10):
        terminal.write(f"\r{percent}% |{'#' * (percent // 10):10}|")
        clock.now += 1
        tell(view, [window(percent)])
    terminal.write("\n")
    assert shown(terminal)[0] == "100% |##########|"
    assert shown(terminal)[2].startswith("╭─ cannikin")


def test_a_flood_of_lines_is_not_slowed_by_redrawing(monkeypatch):
    terminal = on_terminal(monkeypatch)
    tell(LiveView(), run(1))
    for number in range(2000):
        print("line", number)
    assert terminal.getvalue().count("╭─") <= 50
    assert shown(terminal)[:2000] == [f"line {number}" for number in range(2000)]


def test_the_last_panel_stays_when_the_run_ends(monkeypatch):
    terminal = on_terminal(monkeypatch)
    view = LiveView()
    tell(view, [*run(2), END])
    print("after")
    lines = shown(terminal)
    assert lines[0].startswith("╭─ cannikin")
    assert "ended" in lines[0]
    assert lines[-2].startswith("╰")
    assert lines[-1] == "after"
    assert "write" not in terminal.__dict__


def test_closing_is_final_and_may_be_repeated(monkeypatch):
    terminal = on_terminal(monkeypatch)
    view = LiveView()
    tell(view, run(1))
    view.close()
    view.close()
    before = terminal.getvalue()
    tell(view, [window(1), END])
    assert terminal.getvalue() == before
    assert "write" not in terminal.__dict__


def test_a_view_that_is_let_go_of_leaves_the_terminal_as_it_was(monkeypatch):
    terminal = on_terminal(monkeypatch)
    view = LiveView()
    tell(view, run(1))
    assert "write" in terminal.__dict__
    del view
    print("after")
    assert shown(terminal) == ["after"]
    assert "write" not in terminal.__dict__


def test_two_views_stand_one_below_the_other(monkeypatch):
    terminal = on_terminal(monkeypatch)
    first, second = LiveView(), LiveView()
    tell(first, run(1))
    tell(second, run(1))
    print("hello")
    assert [line[:3] for line in shown(terminal) if line.startswith(("h", "╭"))] == ["hel", "╭─ ", "╭─ "]
    tell(first, [END])
    print("more")
    assert shown(terminal)[0] == "hello"
    assert shown(terminal)[-1].startswith("╰")
    second.close()
    print("after")
    assert shown(terminal)[-1] == "after"
    assert "write" not in terminal.__dict__


def test_it_is_drawn_at_most_twice_a_second(monkeypatch):
    terminal = on_terminal(monkeypatch)
    clock = Clock()
    view = LiveView(clock=clock)
    for number in range(101):  # ten seconds of a window each 0.1 s
        tell(view, [window(number)] if number else run(1))
        clock.now += 0.1
    assert 15 <= terminal.getvalue().count("╭─") <= 21


def test_a_panel_that_takes_long_is_drawn_more_rarely(monkeypatch):
    terminal = on_terminal(monkeypatch)
    clock = Clock()
    view = LiveView(clock=clock)
    write = terminal.write

    def slow_write(text):
        clock.now += 0.02 if "╭─" in text else 0.0
        return write(text)

    terminal.write = slow_write
    tell(view, run(1))
    for number in range(100):
        clock.now += 0.1
        tell(view, [window(number)])
    assert terminal.getvalue().count("╭─") <= 4  # 20 ms each is half a percent of 4 s


def test_a_dumb_terminal_gets_lines(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    tell(LiveView(), run(1))
    assert terminal.getvalue().startswith("cannikin: step 10, epoch 0")


# Elsewhere


def test_without_a_terminal_there_is_a_line_now_and_then():
    out, clock = io.StringIO(), Clock()
    view = LiveView(out, clock=clock)
    tell(view, run(1))
    for number in range(1, 100):
        clock.now += 1.0
        tell(view, [window(number), plan(10 * number + 10)])
    lines = out.getvalue().splitlines()
    assert len(lines) == 4  # after 0, 30, 60 and 90 s
    assert lines[1] == (
        "cannikin: step 310, epoch 0, 100%, 0:00 left, total batch 32 = 24+8, step 40 ms (predicted 32), waiting 20%, "
        "use 56% (DDP 45%), noise scale 96, learning rate x1.25"
    )


def test_a_change_of_speed_and_the_end_are_told_at_once():
    out = io.StringIO()
    view = LiveView(out, clock=Clock())
    tell(view, [*run(1), event(7, "changed_speed", "rank 1 takes 1.60 times as long"), event(9, "note", "x"), END])
    assert [line[:40] for line in out.getvalue().splitlines()] == [
        "cannikin: step 10, epoch 0, 4%, total ba",
        "cannikin: step 10, rank 1 takes 1.60 tim",
        "cannikin: step 100, epoch 0, 4%, total b",
    ]


def test_it_is_a_public_name():
    assert cannikin.LiveView is LiveView


# A script on a real terminal

SCRIPT = """
import sys
sys.path.insert(0, "tests")
from live_records import run
import cannikin

view = cannikin.LiveView()
for record in run(3):
    view.write(record)
print("printed")
{end}
"""


@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        ("raise ValueError('the loss is gone')", 1, "ValueError: the loss is gone"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()", -2, "KeyboardInterrupt"),
        ("raise SystemExit(3)", 3, "printed"),
    ],
)
@pytest.mark.timeout(60)
def test_after_an_error_or_ctrl_c_the_terminal_is_as_it_was_and_the_error_is_seen_last(end, status, last):
    program = PtyProgram(["-c", SCRIPT.format(end=end)])
    assert program.end() == status
    assert "╭─" in program.output
    assert program.screen.lines[0] == "printed"
    assert program.screen.lines[-1].startswith(last)
    assert "╭─" not in program.screen.text
    assert not program.screen.is_cursor_hidden


@pytest.mark.timeout(60)
def test_the_panel_is_as_wide_as_the_terminal_it_is_on():
    program = PtyProgram(["-c", SCRIPT.format(end="view.close()")], columns=70)
    assert program.end() == 0
    assert {len(line) for line in program.screen.lines[1:]} == {70}
