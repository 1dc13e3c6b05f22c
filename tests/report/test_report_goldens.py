"""The live view and the report's page say what the files in tests/goldens say."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path

import pytest
from live_records import END, HEADER, Clock, event, header, plan, run, window
from made_up_runs import run as made_up_run
from made_up_runs import write
from printed import printed, steady

import cannikin

BUSY = [*run(5), event(45, "eval", accuracy=0.931), event(47, "changed_speed", "rank 1 takes 1.60 times as long")]
DEVICES = ("NVIDIA H100 80GB HBM3",) * 5 + ("Tesla V100-SXM2-16GB",) * 3
BATCHES = (60,) * 4 + (61,) + (17,) * 3
MANY = [
    header(DEVICES),
    *(window(number, BATCHES, loader_ms=(4.0,) * 8) for number in range(3)),
    plan(30, (58,) * 5 + (20,) * 3, reason="a reason that takes more than a line, " * 4),
]


@pytest.mark.parametrize(("name", "columns"), [("live-80", 80), ("live-120", 120)])
def test_the_live_view_looks_as_its_golden(tmp_path, monkeypatch, golden, name, columns):
    monkeypatch.chdir(tmp_path)
    write([HEADER], tmp_path / "begun")
    write(BUSY, tmp_path / "busy")
    write(MANY, tmp_path / "many")
    golden(name, printed(*(f"watch {run} --once" for run in ("begun", "busy", "many")), columns=columns))


def test_without_a_terminal_the_lines_are_those_of_the_golden(golden):
    out, clock = io.StringIO(), Clock()
    view = cannikin.LiveView(out, clock=clock)
    for record in [*BUSY, *MANY, END]:
        view.write(record)
        clock.now += 5.0
    golden("live-lines", out.getvalue())


def test_the_reports_page_has_the_words_of_its_golden(tmp_path, monkeypatch, golden):
    pytest.importorskip("plotly", reason="needs plotly: pip install 'cannikin[report]'")
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write(made_up_run(), tmp_path / name)
    printed("report one", "report one two --target accuracy=0.7")
    golden("report-page", words(Path("one/report.html")))
    golden("report-pages", words(Path("report.html")).partition("\none\nMade up")[0] + "\n")  # then each run as above


def words(page: Path) -> str:
    """The text of a page without scripts and styles: one line per element, but the cells of a row in one."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"</t[dh]>\s*<t[dh]\b[^>]*>", " | ", text)
    lines = (html.unescape(line).strip() for line in re.sub(r"<[^>]+>", "\n", text).splitlines())
    return steady("".join(f"{line}\n" for line in lines if line))
