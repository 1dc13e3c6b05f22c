"""`cannikin report`: which runs it takes, where the page goes, and bad input."""

from __future__ import annotations

import json
import os
import sys

import pytest
from click.testing import CliRunner
from made_up_runs import header, run, window, write

from cannikin.cli import main
from cannikin.report import page as page_module
from cannikin.runlog import EventRecord, NoiseRecord, Timeline

pytest.importorskip("plotly", reason="needs plotly: pip install 'cannikin[report]'")


def report(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_page_of_a_run_is_in_its_directory_and_its_path_is_said(tmp_path):
    folder = write(run(), tmp_path / "mine")
    done = report(folder)
    assert (done.exit_code, done.output) == (0, f"The report: {folder / 'report.html'}\n")
    page = (folder / "report.html").read_text()
    assert "Run mine" in page
    assert "Plotly" in page


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("accuracy=0.7", "It reached accuracy 0.7 after 1.8\u00a0s."),
        ("accuracy=0.99", "It did not reach accuracy 0.99."),
        ("loss=1", "The log holds no metric called loss."),
    ],
)
def test_a_run_alone_says_when_it_reached_the_target(tmp_path, target, said):
    folder = write(run(), tmp_path / "mine")
    assert report(folder, "--target", target).exit_code == 0
    assert said in (folder / "report.html").read_text()


def test_a_target_of_bytes_that_are_no_text_is_one_line(tmp_path):
    folder = write(run(), tmp_path / "mine")
    done = report(folder, "--target", os.fsdecode(b"\xff=1"))
    assert done.exit_code == 2
    assert "is not METRIC=VALUE, like accuracy=0.97" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "report.html").exists()


def test_a_folder_of_runs_becomes_one_page_of_all_of_them(tmp_path):
    for name in ("b", "a"):
        write(run(), tmp_path / name)
    done = report(tmp_path, "--target", "accuracy=0.8")
    assert done.exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "2 runs side by side: a, b." in page
    assert "time to accuracy 0.8" in page


def test_a_run_that_ended_before_it_began_does_not_keep_the_others_from_their_page(tmp_path):
    for name in ("b", "a"):
        write(run(), tmp_path / name)
    failed = tmp_path / "failed" / "runlog.jsonl"
    failed.parent.mkdir()
    failed.touch()
    done = report(tmp_path)
    assert done.exit_code == 0
    assert f"Left out: {failed.parent}, which ended before it began" in done.output
    assert "2 runs side by side: a, b." in (tmp_path / "report.html").read_text()
    assert "has no header yet" in report(failed.parent).output


def trained(folder, started, curve, **more):
    """A run that logs seconds of training beside its accuracy, as the demo does."""
    evaluations = [
        EventRecord(step=10 * place, kind="eval", data={"accuracy": value, "train_s": seconds, **more}, elapsed_ms=9e5)
        for place, (seconds, value) in enumerate(curve)
    ]
    return write([header(started=started), window(0), *evaluations], folder)


def test_a_run_may_log_its_target_and_the_time_it_trained_and_runs_stand_in_the_order_they_started(tmp_path):
    trained(tmp_path / "even", "2026-01-01T10:00:00+00:00", [(2.0, 0.5), (4.0, 0.98)], target_accuracy=0.97)
    trained(tmp_path / "cannikin", "2026-01-01T10:05:00+00:00", [(1.0, 0.5), (2.5, 0.98)], target_accuracy=0.97)
    assert report(tmp_path).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "2 runs side by side: even, cannikin." in page
    assert "evaluation is not counted" in page
    assert "cannikin reached accuracy 0.97 first, in 2.5\u00a0s; even in 4\u00a0s (1.60 times as long)." in page
    assert "Evaluation: target_accuracy" not in page
    assert "Evaluation: train_s" not in page
    assert "time spent training" in page


def test_a_target_that_is_asked_for_goes_before_the_one_that_was_logged(tmp_path):
    folder = trained(tmp_path / "mine", "", [(2.0, 0.5), (4.0, 0.98)], target_accuracy=0.97)
    assert report(folder).exit_code == 0
    assert "It reached accuracy 0.97 after 4\u00a0s." in (folder / "report.html").read_text()
    assert report(folder, "--target", "accuracy=0.99").exit_code == 0
    assert "It did not reach accuracy 0.99." in (folder / "report.html").read_text()


def test_several_runs_are_told_apart_and_their_page_goes_where_it_is_asked(tmp_path):
    one, two = write(run(), tmp_path / "x" / "same"), write(run(), tmp_path / "y" / "same")
    done = report(one, two / "runlog.jsonl", "--out", tmp_path / "new" / "page.html")
    assert done.exit_code == 0
    assert "x/same, y/same" in (tmp_path / "new" / "page.html").read_text()


@pytest.mark.parametrize("target", ["accuracy", "=0.9", "accuracy=", "accuracy=nan", "accuracy=high"])
def test_a_target_that_is_none_is_refused(tmp_path, target):
    done = report(write(run(), tmp_path / "run"), "--target", target)
    assert done.exit_code == 2
    assert "is not METRIC=VALUE" in done.output


def one_line(done):
    assert done.exit_code == 2, done.output
    assert done.output.startswith("cannikin: ")
    assert done.output.count("\n") == 1
    return done.output


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    newer = json.loads((write([header()], tmp_path / "new") / "runlog.jsonl").read_text()) | {"version": 99}
    cases = {
        "missing": (None, "cannot be read"),
        "empty": (b"", "no header yet"),
        "cut short": (b'{"type":"header","for', "no header yet"),
        "foreign": (b"hello\n", "not a run log"),
        "binary": (bytes(range(256)), "not a run log"),
        "other json": (b'{"a": 1}\n', "not a run log"),
        "newer": (json.dumps(newer).encode() + b"\n", "version 99"),
    }
    for name, (content, said) in cases.items():
        log = tmp_path / f"{name}.jsonl"
        if content is not None:
            log.write_bytes(content)
        assert said in one_line(report(log)), name
    (tmp_path / "nothing").mkdir()
    assert "holds no runlog.jsonl" in one_line(report(tmp_path / "nothing"))
    assert "holds a number too large" in one_line(report(_with_huge_number(tmp_path)))


def _with_huge_number(folder):
    log = write(run(), folder / "huge") / "runlog.jsonl"
    log.write_text(log.read_text().replace('"first_step":10,', f'"first_step":1{"0" * 400},'))
    return log


@pytest.mark.parametrize(
    ("verb", "name", "value"),
    [
        (["report"], "first_step", 10),
        (["report"], "candidate_totals", "[24"),
        (["trace"], "num_steps", 10),
        (["watch", "--once"], "num_parameters", 1000),
    ],
    ids=["report", "report of plans", "trace", "watch"],
)
def test_a_number_too_large_for_any_verb_is_one_line(tmp_path, verb, name, value):
    log = write(run(), tmp_path / "mine") / "runlog.jsonl"
    bracket = "[" * str(value).count("[")
    log.write_text(log.read_text().replace(f'"{name}":{value},', f'"{name}":{bracket}1{"0" * 400},'))
    done = CliRunner().invoke(main, [*verb, str(log)])
    assert "holds a number too large" in one_line(done)


def test_without_plotly_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert "pip install 'cannikin[report]'" in one_line(report(write(run(), tmp_path / "run")))


def test_a_log_cut_at_any_byte_is_reported_up_to_there_or_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "plotly_source", lambda: "")
    monkeypatch.setattr("cannikin.report.write.plotly_source", lambda: "")
    whole = (write(run(num_windows=4), tmp_path / "whole") / "runlog.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    cut = tmp_path / "cut.jsonl"
    out = tmp_path / "page.html"
    for size in [*range(0, len(whole), 97), first - 1, first, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        done = report(cut, "--out", out)
        if size < first:
            one_line(done)
        else:
            assert done.exit_code == 0, (size, done.output)
            assert "still running or was killed: the log ends" in out.read_text(), size


@pytest.mark.parametrize("name", ["runlog.jsonl", "link"])
def test_a_page_never_takes_the_place_of_the_log(tmp_path, name):
    folder = write(run(), tmp_path / "mine")
    (folder / "link").hardlink_to(folder / "runlog.jsonl")
    before = (folder / "runlog.jsonl").read_bytes()
    done = report(folder, "--out", folder / name)
    assert done.exit_code == 2
    assert "not to be overwritten" in done.output
    assert (folder / "runlog.jsonl").read_bytes() == before


def test_a_folder_whose_name_is_no_text_is_shown_by_what_can_be_read_of_it(tmp_path):
    try:
        folder = write(run(), tmp_path / os.fsdecode(b"mine\xff"))
    except OSError:
        pytest.skip("this file system takes no such name")
    assert report(folder).exit_code == 0
    assert "Run mine\ufffd" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["x" * 300, "circle"], ids=["too long", "a circle of links"])
def test_a_path_that_leads_nowhere_is_bad_input(tmp_path, name):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    done = report(tmp_path / name)
    assert done.exit_code == 2
    assert "cannot be read" in done.output


@pytest.mark.parametrize(
    "changes",
    [
        {"total_batch": 0},
        {"total_batch": -5, "step_ms": -1.0},
        {"before_ms": (1e308,) * 3},
        {"noise": NoiseRecord(noise_scale=5e-324, low=1e-320, high=1.7e308)},
        {"timeline": Timeline(step=3, local_batches=(1,), before_ms=(0.0,), ready_ms=((0.0,),), done_ms=((0.0,),))},
    ],
    ids=["no samples", "negative", "beyond any time", "beyond any scale", "a step of no time"],
)
def test_numbers_that_cannot_be_are_no_error(tmp_path, changes):
    folder = write([header(), window(0, **changes), window(10, **changes)], tmp_path / "mine")
    done = report(folder)
    assert (done.exit_code, done.exception) == (0, None)
