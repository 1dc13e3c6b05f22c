"""`cannikin trace`: the events keep the format's rules, tell what the log tells, and bad input is one line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cannikin.cli import main
from cannikin.core.values import StepWindow
from cannikin.errors import InvalidInputError
from cannikin.runlog import (
    EventRecord,
    Header,
    JobInfo,
    ModelInfo,
    PlanRecord,
    RankInfo,
    RunLogWriter,
    Timeline,
    WindowRecord,
    window_record,
)
from cannikin.trace.events import trace_events
from cannikin.trace.steps import Contents, choose_steps, contents, parse_steps

HEADER = Header(
    cannikin_version="0.1.0",
    started="2025-03-01T12:00:00+00:00",
    policy="cannikin",
    world_size=2,
    job=JobInfo(batch_size=64),
    ranks=(RankInfo(name="big", host="node0", device="A100"), RankInfo(host='<node "1">', device="T4\n")),
    model=ModelInfo(bucket_bytes=(1_000, 2_000)),
)


def timeline(step: int) -> Timeline:
    """Rank 1 is slow: rank 0 waits 4 ms for it, then 3 ms are all-reduce; buckets overlap on rank 0 only."""
    return Timeline(
        step=step,
        local_batches=(40, 24),
        before_ms=(10.0, 12.0),
        ready_ms=((5.0, 20.0), (6.0, 22.0)),
        done_ms=((21.0, 27.0), (19.0, 25.0)),
    )


def window(first_step: int, *, num_steps: int = 10, **fields) -> WindowRecord:
    values = {
        "num_valid": num_steps,
        "total_batch": 64,
        "local_batches": (40, 24),
        "step_ms": 37.0,
        "elapsed_ms": 1_000.0 + 50.0 * (first_step + num_steps),
        "timeline": timeline(first_step + num_steps // 2),
    }
    return WindowRecord(first_step=first_step, num_steps=num_steps, **(values | fields))


def plan(step: int, batches=(40, 24), **fields) -> PlanRecord:
    values = {
        "phase": "optperf",
        "reason": "rank 1 is slow",
        "elapsed_ms": 1_000.0 + 50 * step,
    }
    return PlanRecord(
        step=step, first_step=step + 4, total_batch=sum(batches), local_batches=batches, **(values | fields)
    )


RECORDS = (
    HEADER,
    window(0),
    plan(10),
    EventRecord(step=10, kind="eval", text="", data={"accuracy": 0.5}),
    window(10),
    plan(20),
    window(20, total_batch=96, local_batches=(60, 36)),
)


def ns(time_us: float) -> int:
    """As Perfetto's importer rounds."""
    return round(time_us * 1000)


def check_rules(events: list[dict]) -> None:
    """The rules of the Trace Event Format, as Perfetto's importer applies them."""
    threads, named = defaultdict(list), set()
    for event in json.loads(json.dumps(events, allow_nan=False)):
        assert event["ph"] in {"X", "C", "i", "M"}
        assert event["name"]
        assert event["pid"] > 0
        assert event["tid"] >= 0
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
        elif event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] == "t"
        elif event["name"].endswith("_name"):
            assert event["args"]["name"]
            named.add((event["pid"], event["tid"]))
    for thread, spans in threads.items():
        assert thread in named
        check_nesting(spans)


def check_nesting(spans: list[tuple[int, int]]) -> None:
    """On one thread a slice lies inside another or beside it."""
    open_ends: list[int] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{start} to {end} overlaps a slice that ends at {open_ends[-1]}"
        open_ends.append(end)


def test_the_check_of_nesting_sees_a_partial_overlap():
    check_nesting([(0, 10), (2, 5), (5, 10), (10, 12)])
    with pytest.raises(AssertionError, match="overlaps"):
        check_nesting([(0, 10), (5, 11)])


def slices(events: list[dict], pid: int, tid: int | None = None) -> dict[str, tuple[int, int]]:
    """Start and length of a process's slices, in ns."""
    return {
        event["name"]: (ns(event["ts"]), ns(event["dur"]))
        for event in events
        if event["ph"] == "X" and event["pid"] == pid and tid in (None, event["tid"])
    }


RANK_0, RANK_1, RUN = 1000, 1001, 999


# What is drawn


def test_a_log_becomes_events_that_keep_the_rules():
    check_rules(list(trace_events(RECORDS)))


def test_every_rank_is_a_process_named_by_rank_device_and_host():
    events = list(trace_events(RECORDS))
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {RUN: "run: cannikin", RANK_0: "rank 0: big, A100 on node0", RANK_1: 'rank 1: T4\n on <node "1">'}


def test_ranks_are_lined_up_by_the_end_of_the_last_all_reduce():
    events = list(trace_events([HEADER, window(0)]))
    ends = [sum(slices(events, pid)["step 5"]) for pid in (RANK_0, RANK_1)]
    assert ends[0] == ends[1] == sum(slices(events, RANK_0)["bucket 2 of 2"])


def test_a_step_is_divided_into_computing_waiting_and_the_all_reduce_that_nothing_hid():
    events = list(trace_events([HEADER, window(0)]))
    lengths = {name: length / 1e6 for name, (_, length) in slices(events, RANK_0, 1).items()}
    assert lengths == {"step 5": 37, "optimizer + forward": 10, "backward": 20, "waiting": 4, "all-reduce": 3}
    assert "waiting" not in slices(events, RANK_1), "the slowest rank waits for nobody"


def test_overlapping_buckets_are_on_threads_of_their_own_and_others_share_one():
    events = [event for event in trace_events([HEADER, window(0)]) if event["ph"] == "X"]
    lanes = {(e["pid"], e["name"]): e["tid"] for e in events if e["name"].startswith("bucket")}
    assert lanes[RANK_0, "bucket 1 of 2"] != lanes[RANK_0, "bucket 2 of 2"]
    assert lanes[RANK_1, "bucket 1 of 2"] == lanes[RANK_1, "bucket 2 of 2"]
    assert [e["args"] for e in events if e["name"] == "bucket 2 of 2"] == [{"bytes": 2_000}] * 2


def test_counters_have_a_value_wherever_it_changes():
    counted = defaultdict(list)
    for event in trace_events(RECORDS):
        if event["ph"] == "C":
            counted[event["pid"], event["name"]] += event["args"].items()
    assert counted[RUN, "total batch"] == [("samples", 64), ("samples", 96)]
    assert counted[RANK_1, "local batch"] == [("samples", 24), ("samples", 36)]
    assert counted[RUN, "step time"] == [("ms", 37.0)]


def test_plans_and_events_are_instants_with_their_reason():
    instants = [event for event in trace_events(RECORDS) if event["ph"] == "i"]
    assert [event["name"] for event in instants] == ["64 = 40 + 24", "eval", "kept"]
    assert instants[0]["args"]["reason"] == "rank 1 is slow"
    assert instants[0]["ts"] == 1_500_000
    assert instants[1]["args"] == {"step": 10, "accuracy": 0.5}


def test_a_step_lies_where_its_window_was_written():
    (start, length) = slices(list(trace_events([HEADER, window(100)])), RANK_0)["step 105"]
    assert (start + length) / 1e6 == pytest.approx(1_000 + 50 * 110 - 4 * 37)


def test_windows_without_a_clock_follow_one_another():
    records = [HEADER, window(0, elapsed_ms=None), window(10, elapsed_ms=None)]
    steps = slices(list(trace_events(records)), RANK_1)
    assert sum(steps["step 15"]) / 1e6 == pytest.approx(16 * 37)


def test_a_run_that_resumes_goes_on_where_it_ended_and_says_so():
    again = msgspec.structs.replace(HEADER, first_step=10)
    records = [*RECORDS, again, window(10, elapsed_ms=600.0)]
    events = list(trace_events(records))
    check_rules(events)
    assert [e["args"]["step"] for e in events if e["name"] == "the run resumes"] == [10]
    starts = [e["ts"] for e in events if e["name"] == "step 15" and e["pid"] == RANK_0]
    assert len(starts) == 2
    assert starts[1] > max(e["ts"] for e in trace_events(RECORDS))


def test_a_resume_on_more_ranks_has_a_process_for_each():
    more = msgspec.structs.replace(HEADER, world_size=3, ranks=())
    names = [e["args"]["name"] for e in trace_events([HEADER, more]) if e["name"] == "process_name"]
    assert names[-1] == "rank 2"


def test_a_long_log_keeps_every_change_and_thins_the_rest():
    windows = [window(10 * k, step_ms=30.0 + k, timeline=None) for k in range(100)]
    plans = [plan(10 * k, (40, 24) if k < 50 else (44, 20)) for k in range(100)]
    events = list(trace_events([HEADER, *windows, *plans], stride=10))
    assert sum(event["name"] == "step time" for event in events) == 10
    names = [event["name"] for event in events if event["ph"] == "i"]
    assert [name for name in names if name != "kept"] == ["64 = 40 + 24", "64 = 44 + 20"]
    assert names.count("kept") == 9


times = st.none() | st.floats(-5, 2_000)
rows = st.lists(times, min_size=3, max_size=3).map(tuple)
timelines = st.builds(
    Timeline,
    step=st.integers(0, 60),
    local_batches=st.just((3, 2)),
    before_ms=st.tuples(times, times),
    ready_ms=st.tuples(rows, rows),
    done_ms=st.tuples(rows, rows),
)
windows = st.builds(
    window,
    st.integers(0, 60),
    num_steps=st.integers(0, 9),
    step_ms=times,
    elapsed_ms=times,
    timeline=st.none() | timelines,
)
plans = st.builds(plan, st.integers(0, 60), elapsed_ms=times, predicted_step_ms=times)
events_ = st.builds(EventRecord, step=st.integers(0, 60), kind=st.text(max_size=3), elapsed_ms=times)


@settings(max_examples=200, deadline=None)
@given(records=st.lists(windows | plans | events_ | st.just(HEADER), max_size=8))
def test_whatever_a_log_holds_the_events_keep_the_rules(records):
    events = list(trace_events([HEADER, *records]))
    check_rules(events)
    parts = defaultdict(int)
    for event in events:
        if event["ph"] == "X" and event["tid"] == 1:
            parts[event["pid"]] += ns(event["dur"]) * (1 if event["name"].startswith("step") else -1)
    assert set(parts.values()) <= {0}, "the parts of a step add up to it"


# Which steps


LOG = Contents(first_step=0, last_step=99, timeline_steps=tuple(range(5, 100, 10)), num_windows=10)


def test_without_a_wish_the_first_the_last_and_some_between_are_drawn():
    steps = choose_steps(LOG).steps
    assert (steps[0], steps[-1]) == (5, 95)
    assert 4 <= len(steps) < 10
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 20


def test_a_range_has_both_of_its_ends():
    assert choose_steps(LOG, [(15, 35)]).steps == (15, 25, 35)


def test_a_range_without_a_timeline_has_the_nearest_and_says_so():
    choice = choose_steps(LOG, [(16, 19), (5, 5)])
    assert choice.steps == (5, 15)
    assert choice.notes == ("steps 16 to 19 have no timeline: step 15 is the nearest that has one",)


def test_a_range_that_goes_beyond_the_log_says_where_the_log_ends():
    choice = choose_steps(LOG, [(90, 500)])
    assert choice.steps == (95,)
    assert choice.notes == ("the log ends with step 99: there is no more up to 500",)


@pytest.mark.parametrize("asked", [(100, 100), (-1, -1), (200, 300)])
def test_a_step_outside_the_log_is_refused_with_the_range(asked):
    with pytest.raises(InvalidInputError, match="outside the log, which has steps 0 to 99"):
        choose_steps(LOG, [asked])


def test_more_steps_than_a_browser_draws_are_thinned_and_that_is_said():
    log = Contents(first_step=0, last_step=9_999, timeline_steps=tuple(range(10_000)), num_windows=10_000)
    choice = choose_steps(log, [(0, 9_999)])
    assert len(choice.steps) == len(set(choice.steps)) == 500
    assert "too many to draw" in choice.notes[-1]


def test_many_steps_without_a_timeline_are_told_in_few_lines():
    assert len(choose_steps(LOG, [(step, step) for step in range(16, 25)]).notes) == 5


def test_buckets_carry_the_bytes_that_a_real_run_says_in_its_timelines():
    """A real run knows its buckets only once it has begun: its header has none, each timeline has them."""
    measured = StepWindow(
        first_step=0,
        local_batches=np.array([[40, 24]]),
        before_s=np.array([[0.010, 0.012]]),
        ready_s=np.array([[[0.005, 0.020], [0.006, 0.022]]]),
        done_s=np.array([[[0.021, 0.027], [0.019, 0.025]]]),
        local_sqnorm=np.ones((1, 2)),
        global_sqnorm=np.ones(1),
    )
    written = window_record(measured, bucket_bytes=(3_000, 4_000))
    events = list(trace_events([msgspec.structs.replace(HEADER, model=ModelInfo(name="Net")), written]))
    sizes = [event["args"]["bytes"] for event in events if event["name"].startswith("bucket")]
    assert sizes == [3_000, 4_000, 3_000, 4_000]


def test_only_the_timelines_asked_for_are_kept():
    drawn = {event["name"] for event in trace_events(RECORDS, {15}) if event["name"].startswith("step ")}
    assert drawn - {"step time"} == {"step 15"}


def test_contents_are_those_of_the_log():
    assert contents(RECORDS) == Contents(first_step=0, last_step=29, timeline_steps=(5, 15, 25), num_windows=3)
    assert contents([HEADER]) is None


@pytest.mark.parametrize("text", ["", "ten", "1,", "5:", "1:2:3", "1.5"])
def test_what_is_no_step_is_refused(text):
    with pytest.raises(InvalidInputError, match="like 10,200 or 100:400"):
        parse_steps(text)


# The command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunLogWriter(tmp_path / "runlog.jsonl") as log:
        for record in RECORDS:
            log.write(record)
    return tmp_path


def trace(*args: object):
    return CliRunner().invoke(main, ["trace", *map(str, args)])


def test_the_file_goes_beside_the_log_and_is_named(run):
    result = trace(run)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{run / 'trace.json'}: steps 5, 15, 25; open it at ui.perfetto.dev\n"
    written = json.loads((run / "trace.json").read_text())
    assert written["displayTimeUnit"] == "ms"
    check_rules(written["traceEvents"])


def test_a_dash_writes_nothing_but_the_trace_to_stdout(run):
    result = trace(run / "runlog.jsonl", "--steps", "15", "--out", "-")
    steps = {event["name"] for event in json.loads(result.stdout)["traceEvents"] if event["name"].startswith("step ")}
    assert steps == {"step 15", "step time"}
    assert not (run / "trace.json").exists()


def test_a_step_without_a_timeline_is_answered_with_the_nearest_on_stderr(run):
    result = trace(run, "--steps", "13")
    assert result.exit_code == 0
    assert result.stderr == "cannikin: step 13 has no timeline: step 15 is the nearest that has one\n"
    assert "steps 15;" in result.stdout


def test_a_run_killed_at_any_byte_still_gives_a_trace_or_one_line(run):
    whole = (run / "runlog.jsonl").read_bytes()
    first_window_ends = whole.index(b"\n", whole.index(b"\n") + 1)
    for length in range(0, len(whole), 23):
        (run / "runlog.jsonl").write_bytes(whole[:length])
        result = trace(run, "--out", "-")
        if length > first_window_ends:
            check_rules(json.loads(result.stdout)["traceEvents"])
        else:
            assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), length


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        (b"", "has no measured steps yet"),
        (b"hello\n", "is not a run log"),
        (msgspec.json.encode(HEADER) + b"\n", "has no measured steps yet"),
        (msgspec.json.encode(HEADER).replace(b'"version":1', b'"version":9') + b"\n", "log of version 9"),
        (
            b"\n".join(map(msgspec.json.encode, (HEADER, window(0, timeline=None)))) + b"\n",
            "has no step's timeline",
        ),
    ],
    ids=["missing", "empty", "foreign", "header only", "newer", "no timeline"],
)
def test_a_bad_run_is_one_line_and_status_2(tmp_path, text, words):
    if text is not None:
        (tmp_path / "runlog.jsonl").write_bytes(text)
    result = trace(tmp_path)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"cannikin: {tmp_path / 'runlog.jsonl'}: ")
    assert words in line


@pytest.mark.parametrize(
    ("steps", "words"),
    [("30", "step 30 is outside the log, which has steps 0 to 29"), ("x", "like 10,200"), ("9:3", "ends before")],
)
def test_bad_steps_are_one_line_and_status_2(run, steps, words):
    result = trace(run, "--steps", steps)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert words in line


def test_the_log_itself_is_never_overwritten(run):
    before = (run / "runlog.jsonl").read_bytes()
    result = trace(run, "--out", run / "runlog.jsonl")
    assert result.exit_code == 2
    assert (run / "runlog.jsonl").read_bytes() == before


def test_a_place_that_cannot_be_written_is_status_1(run):
    result = trace(run, "--out", run / "none" / "trace.json")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


def test_a_trace_needs_no_torch(run):
    code = f"""
import sys
from cannikin.cli import main
try:
    main(["trace", {str(run)!r}])
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_a_header_that_tells_of_ranks_without_number_names_only_so_many():
    events = list(trace_events([msgspec.structs.replace(HEADER, world_size=10**12)]))
    assert 2 * 1_000 < len(events) < 10**6
