"""The run log: what is written is read again, whatever became of the writer, the disk or the last line."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cannikin.errors import RunLogError
from cannikin.runlog import (
    RUNLOG_NAME,
    EventRecord,
    Header,
    JobInfo,
    ModelInfo,
    NoiseRecord,
    Observer,
    PlanRecord,
    RankInfo,
    RunLogReader,
    RunLogWriter,
    Timeline,
    WindowRecord,
    read_runlog,
)

HEADER = Header(
    cannikin_version="0.1.0",
    torch_version="2.13.0",
    started="2025-03-01T12:00:00+00:00",
    policy="cannikin",
    world_size=2,
    job=JobInfo(batch_size=64, max_batch_size=512, min_local=(1, 1), max_local=(None, 48), num_samples=50_000),
    ranks=(RankInfo(name="a100", host="node0", device="cuda:0"), RankInfo(host="node1", device="cpu")),
    model=ModelInfo(name="ResNet-18", num_parameters=11_689_512, bucket_bytes=(1_000, 2_000)),
    precision="float32",
    tags={"seed": "0"},
)
TIMELINE = Timeline(
    step=12,
    local_batches=(40, 24),
    before_ms=(10.0, 12.0),
    ready_ms=((5.0, 20.0), (6.0, 23.0)),
    done_ms=((15.0, 30.0), (13.0, 28.0)),
    bucket_bytes=(1_000, 2_000),
)
WINDOW = WindowRecord(
    first_step=10,
    num_steps=5,
    num_valid=4,
    total_batch=64,
    local_batches=(40, 24),
    step_ms=40.0,
    before_ms=(10.0, 12.0),
    backward_ms=(20.0, None),
    done_ms=(30.0, 28.0),
    wait_ms=(5.0, 0.0),
    noise=NoiseRecord(signal_sqnorm=0.1, noise_trace=20.0, noise_scale=200.0, low=150.0, high=None),
    progress=0.5,
    lr_factor=1.0,
    timeline=TIMELINE,
)
PLAN = PlanRecord(
    step=11,
    first_step=14,
    total_batch=64,
    local_batches=(44, 20),
    predicted_step_ms=38.5,
    phase="optperf",
    reason="rank 1 is slow",
    candidate_totals=(64, 128, 256),
    candidate_goodputs=(640.0, 700.5, None),
    even_speed=0.75,
)
EVENT = EventRecord(
    step=20, kind="eval", text="größer, 'quoted'\nand broken", data={"accuracy": 0.5, "ok": True, "n": 3}
)
ALL = (HEADER, WINDOW, PLAN, EVENT)


def line(record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / RUNLOG_NAME


@pytest.fixture
def written(path: Path) -> Path:
    """A log with one record of each kind."""
    with RunLogWriter(path) as log:
        for record in ALL:
            log.write(record)
    return path


# What is written is read again


def test_a_plan_of_before_even_speed_was_written_is_read_without_it(path):
    older = {name: value for name, value in json.loads(line(PLAN)).items() if name != "even_speed"}
    path.write_bytes(line(HEADER) + json.dumps(older).encode() + b"\n")
    (found,) = read_runlog(path).plans
    assert found == msgspec.structs.replace(PLAN, even_speed=None)


def test_every_kind_of_record_comes_back_as_it_was(written):
    run = read_runlog(written)
    assert (run.headers, run.windows, run.plans, run.events) == ((HEADER,), (WINDOW,), (PLAN,), (EVENT,))
    assert (run.header, run.last_step, run.truncated) == (HEADER, 20, False)
    assert (run.num_unknown, run.num_unreadable) == (0, 0)


def test_the_file_is_one_plain_json_object_a_line_with_its_type_first(written):
    objects = [json.loads(text) for text in written.read_text().split("\n")[:-1]]
    assert [next(iter(each.items())) for each in objects] == [
        ("type", "header"),
        ("type", "window"),
        ("type", "plan"),
        ("type", "event"),
    ]
    assert (objects[0]["format"], objects[0]["version"]) == ("cannikin-runlog", 1)


def test_a_run_directory_stands_for_the_log_in_it(written):
    assert read_runlog(written.parent).header == HEADER


reals = st.none() | st.floats()
rows = st.lists(reals, max_size=3).map(tuple)
counts = st.integers(0, 2**53)


def finite(value):
    """What a value should be after reading: NaN and infinity are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return tuple(finite(each) for each in value)
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: finite(getattr(value, name)) for name in value.__struct_fields__})
    return value


timelines = st.builds(Timeline, before_ms=rows, ready_ms=st.tuples(rows, rows), done_ms=st.tuples(rows, rows))
noises = st.builds(NoiseRecord, signal_sqnorm=reals, noise_trace=reals, noise_scale=reals, low=reals, high=reals)
windows = st.builds(
    WindowRecord,
    first_step=counts,
    step_ms=reals,
    progress=reals,
    before_ms=rows,
    wait_ms=rows,
    other_ms=rows,
    noise=st.none() | noises,
    timeline=st.none() | timelines,
)
text = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | text | st.none()
events = st.builds(EventRecord, step=counts, kind=text, text=text, data=st.dictionaries(text, values, max_size=3))
plans = st.builds(PlanRecord, step=counts, predicted_step_ms=reals, reason=text)
headers = st.builds(Header, policy=text, tags=st.dictionaries(text, text, max_size=3), ranks=st.just(HEADER.ranks))


@settings(max_examples=150, deadline=None)
@given(header=headers, records=st.lists(windows | plans | events, max_size=4))
def test_any_values_round_trip_except_that_nan_and_infinity_become_null(tmp_path_factory, header, records):
    path = tmp_path_factory.mktemp("run") / RUNLOG_NAME
    with RunLogWriter(path) as log, RunLogReader(path) as reader:
        for record in [header, *records]:
            log.write(record)
        assert reader.poll() == [finite(record) for record in [header, *records]]
    assert not any(word in path.read_bytes() for word in (b":NaN", b":Infinity", b":-Infinity"))


def test_numpy_numbers_are_numbers(path):
    with RunLogWriter(path) as log:
        log.write(HEADER)
        log.write(EventRecord(step=np.int64(3), kind="eval", data={"loss": np.float32(0.5), "bad": np.float64("nan")}))
    assert read_runlog(path).events == (EventRecord(step=3, kind="eval", data={"loss": 0.5, "bad": None}),)


# Broken off, foreign, newer


@pytest.mark.parametrize("last", [WINDOW, PLAN, EVENT])
def test_a_log_cut_at_any_byte_of_its_last_line_gives_all_before_it(path, last):
    whole = line(HEADER) + line(PLAN)
    for length in range(len(line(last))):
        path.write_bytes(whole + line(last)[:length])
        run = read_runlog(path)
        assert (run.plans, run.windows, run.events) == ((PLAN,), (), ())
        assert run.truncated == (length > 0)
        assert run.num_unreadable == 0


def test_a_header_cut_at_any_byte_is_said_to_be_missing(path):
    for length in range(len(line(HEADER))):
        path.write_bytes(line(HEADER)[:length])
        with pytest.raises(RunLogError, match="has no header yet"):
            read_runlog(path)


def test_unknown_types_are_skipped_and_counted_and_unknown_fields_ignored(path):
    longer = line(PLAN).replace(b'{"type":"plan",', b'{"type":"plan","colour":[{"red":1}],')
    path.write_bytes(
        line(HEADER) + b'{"type":"weather","sky":"blue"}\n' + longer + b'{"type":"weather"}\n' + line(EVENT)
    )
    run = read_runlog(path)
    assert (run.plans, run.events, run.num_unknown, run.num_unreadable) == ((PLAN,), (EVENT,), 2, 0)


@pytest.mark.parametrize(
    "damage", [b"", b'{"type":"plan"}', b'{"type":"pl', b"\0" * 50, b"\xff\xfe", b"[1]", b'{"type":7}', b"[" * 10**5]
)
def test_a_damaged_line_in_the_middle_is_skipped_and_counted(path, damage):
    path.write_bytes(line(HEADER) + damage + b"\n" + line(EVENT))
    run = read_runlog(path)
    assert (run.events, run.num_unreadable, run.num_unknown) == ((EVENT,), 1, 0)


@pytest.mark.parametrize(
    "content",
    [b"\n", b"hello\n", b"hello", b"\x89PNG\r\n", b"{}\n", b"[]\n", line(EVENT), b'{"format":"other","version":1}\n'],
)
def test_a_file_that_is_no_run_log_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(RunLogError, match=r"runlog\.jsonl: is not a run log"):
        read_runlog(path)


def test_another_version_is_refused_with_both_numbers_and_the_writer(path):
    path.write_bytes(line(HEADER).replace(b'"version":1', b'"version":2'))
    with pytest.raises(RunLogError, match=r"is a log of version 2, by cannikin '0\.1\.0'.* reads version 1"):
        read_runlog(path)


def test_a_header_that_lacks_something_is_refused(path):
    path.write_bytes(b'{"type":"header","format":"cannikin-runlog","version":1}\n')
    with pytest.raises(RunLogError, match=r"damaged header: .*cannikin_version"):
        read_runlog(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing/runlog.jsonl", "", "null\0character"])
def test_a_missing_log_is_refused(tmp_path, name):
    with pytest.raises(RunLogError, match="cannot be read"):
        read_runlog(tmp_path / name)


# Reading while it is written


def test_where_a_folder_of_runs_is_given_one_of_them_is_named(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "runlog.jsonl").touch()
    first = re.escape(str(tmp_path / "a"))
    with pytest.raises(RunLogError, match=f"has no run log itself: give a run in it, such as {first}$"):
        read_runlog(tmp_path)


def test_a_reader_gets_each_record_once_and_only_when_its_line_is_complete(path):
    path.touch()
    whole = b"".join(map(line, ALL))
    seen = []
    with RunLogReader(path) as reader, path.open("ab", buffering=0) as file:
        for byte in whole:
            file.write(bytes([byte]))
            new = reader.poll()
            assert reader.truncated == (byte != ord("\n"))
            assert len(new) == (byte == ord("\n"))
            seen += new
        assert reader.poll() == []
    assert tuple(seen) == ALL


def test_a_very_long_line_is_put_together_once(path, monkeypatch):
    """In 60,000 pieces: to copy all of it for each of them would take minutes."""
    monkeypatch.setattr("cannikin.runlog.reader._CHUNK_BYTES", 64)
    with RunLogWriter(path) as log:
        log.write(HEADER)
        log.write(EventRecord(step=1, kind="long", text="x" * 60_000 * 64))
    start_s = time.perf_counter()
    (event,) = read_runlog(path).events
    assert len(event.text) == 60_000 * 64
    assert time.perf_counter() - start_s < 30


def test_a_reader_refuses_a_foreign_file_before_its_first_line_ends(path):
    path.write_bytes(b"step,loss")
    with RunLogReader(path) as reader, pytest.raises(RunLogError, match="is not a run log"):
        reader.poll()


def test_a_log_that_becomes_shorter_under_its_reader_is_told(written):
    with RunLogReader(written) as reader:
        reader.poll()
        os.truncate(written, 10)
        with pytest.raises(RunLogError, match="became shorter"):
            reader.poll()


WRITE_ON = """
import sys, time
from cannikin.runlog import *
with RunLogWriter(sys.argv[1]) as log:
    log.write(Header(cannikin_version="1", started="", policy="even", world_size=2, job=JobInfo(batch_size=64)))
    for step in range(20_000):
        log.write(EventRecord(step=step, kind="note", text="x" * (step * 7919 % 10_000)))
    time.sleep(30)
"""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("num_before", [1, 200, 500])
def test_a_killed_writer_leaves_a_log_that_is_read_to_its_end_and_can_be_resumed(path, num_before):
    path.touch()
    child = subprocess.Popen([sys.executable, "-c", WRITE_ON, str(path)])
    try:
        seen = []
        with RunLogReader(path) as reader:
            while len(seen) < num_before:
                assert child.poll() is None
                seen += reader.poll()
            child.kill()
            child.wait()
            seen += reader.poll()
            assert reader.num_unreadable == 0
    finally:
        child.kill()
        child.wait()
    assert [record.step for record in seen[1:]] == list(range(len(seen) - 1))
    run = read_runlog(path)
    assert list(run.events) == seen[1:]
    # The kernel may break off a write at a page's end when the process is killed inside it.
    assert not run.truncated or path.stat().st_size % os.sysconf("SC_PAGE_SIZE") == 0
    with RunLogWriter(path, append=True) as log:
        log.write(HEADER)
    again = read_runlog(path)
    assert again.headers == (*run.headers, HEADER)
    assert (again.num_unreadable, again.truncated) == (run.truncated, False)


HOLD = """
import sys
from cannikin.runlog import *
with RunLogWriter(sys.argv[1], append=True) as log:
    log.write(Header(cannikin_version="1", started="", policy="even", world_size=2, job=JobInfo(batch_size=64)))
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.timeout(30)
def test_two_processes_never_write_one_log(path):
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "writing\n"
        for append in (False, True):
            with pytest.raises(RunLogError, match="another process is writing it"):
                RunLogWriter(path, append=append)
        child.stdin.close()
    RunLogWriter(path, append=True).close()
    assert len(read_runlog(path).headers) == 1


# Beginning and resuming


def test_the_writer_is_an_observer_and_makes_the_folders_it_needs(tmp_path):
    path = tmp_path / "runs" / "first" / RUNLOG_NAME
    with RunLogWriter(path) as log:
        observer: Observer = log
        observer.write(HEADER)
    assert read_runlog(path).header == HEADER


def test_the_first_record_must_be_a_header(path):
    with RunLogWriter(path) as log, pytest.raises(RunLogError, match="EventRecord: a log needs a Header"):
        log.write(EVENT)


def test_a_log_of_another_run_is_never_overwritten(written):
    before = written.read_bytes()
    with pytest.raises(RunLogError, match=r"runlog\.jsonl: exists: append to it"):
        RunLogWriter(written)
    assert written.read_bytes() == before


def test_a_resumed_run_goes_on_in_its_log_with_a_header_and_an_event(written):
    before = written.read_bytes()
    header = msgspec.structs.replace(HEADER, world_size=3, first_step=15)
    with RunLogWriter(written, append=True) as log:
        log.write(header)
        log.write(EVENT)
    assert written.read_bytes().startswith(before)
    run = read_runlog(written)
    assert run.headers == (HEADER, header)
    assert [event.kind for event in run.events] == ["eval", "resume", "eval"]
    assert run.events[1].text == "resumed at step 15 on 3 ranks"
    assert (run.events[1].step, run.events[1].data["world_size"]) == (15, 3)


def test_a_run_that_goes_on_on_one_rank_says_so_in_the_singular(written):
    with RunLogWriter(written, append=True) as log:
        log.write(msgspec.structs.replace(HEADER, world_size=1, first_step=15))
    assert read_runlog(written).events[-1].text == "resumed at step 15 on 1 rank"


def test_appending_to_no_log_begins_one_without_a_resume(path):
    with RunLogWriter(path, append=True) as log:
        log.write(HEADER)
    assert path.read_bytes() == line(HEADER)


def test_a_resume_after_a_line_cut_short_loses_only_that_line(written):
    os.truncate(written, written.stat().st_size - 5)
    with RunLogWriter(written, append=True) as log:
        log.write(HEADER)
    run = read_runlog(written)
    assert (len(run.headers), run.plans, run.num_unreadable, run.truncated) == (2, (PLAN,), 1, False)
    assert [event.kind for event in run.events] == ["resume"]


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("length", [1, 20, 100])
def test_a_log_cut_inside_its_header_is_begun_anew(path, length, append):
    path.write_bytes(line(HEADER)[:length])
    with RunLogWriter(path, append=append) as log:
        log.write(HEADER)
    assert path.read_bytes() == line(HEADER)


@pytest.mark.parametrize(
    "content", [b"step,loss\n1,2\n", b"step", line(HEADER).replace(b'"version":1', b'"version":9')]
)
def test_nothing_is_appended_to_a_foreign_file_or_another_version(path, content):
    path.write_bytes(content)
    with pytest.raises(RunLogError, match=r"is not a run log|is a log of version 9"):
        RunLogWriter(path, append=True)
    assert path.read_bytes() == content


def test_closing_twice_is_fine_and_a_closed_log_takes_nothing(written):
    before = written.read_bytes()
    log = RunLogWriter(written, append=True)
    assert not log.closed
    log.close()
    log.close()
    log.write(HEADER)
    assert log.closed
    assert written.read_bytes() == before


# Training outlives its log


def test_a_full_disk_warns_once_and_training_goes_on():
    with RunLogWriter("/dev/full") as log:
        with pytest.warns(RuntimeWarning, match="/dev/full: the log cannot be written.*No space left") as caught:
            log.write(HEADER)
        assert [each.filename for each in caught] == [__file__]
        for _ in range(3):
            log.write(EVENT)
        assert log.closed


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_a_readable_log(path, monkeypatch):
    room = len(line(HEADER)) + len(line(PLAN)) + 10
    really_write = os.write

    def write(file: int, data: bytes) -> int:
        left = room - path.stat().st_size
        if not left:
            raise OSError(28, "No space left on device")
        return really_write(file, data[:left])

    log = RunLogWriter(path)
    monkeypatch.setattr(os, "write", write)
    log.write(HEADER)
    log.write(PLAN)
    with pytest.warns(RuntimeWarning, match="No space left"):
        log.write(EVENT)
    log.write(EVENT)
    monkeypatch.undo()
    run = read_runlog(path)
    assert (run.plans, run.events, run.truncated) == ((PLAN,), (), True)


@pytest.mark.parametrize("place", ["a file/run/runlog.jsonl", "a file/runlog.jsonl", "a folder"])
def test_a_place_that_cannot_be_written_warns_once_and_training_goes_on(tmp_path, place):
    (tmp_path / "a file").touch()
    (tmp_path / "a folder").mkdir()
    with pytest.warns(RuntimeWarning, match="the log cannot be written, training goes on") as caught:
        log = RunLogWriter(tmp_path / place)
    assert [each.filename for each in caught] == [__file__]
    for record in ALL:
        log.write(record)
    log.close()


@pytest.fixture
def without_privileges():
    """Tests run as root lay it down for a while: root may write anywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


def test_a_folder_without_permission_warns_once_and_training_goes_on(tmp_path, without_privileges):
    if os.geteuid() != 65534:
        tmp_path.chmod(0o500)
    with pytest.warns(RuntimeWarning, match="training goes on without it: Permission denied"):
        log = RunLogWriter(tmp_path / RUNLOG_NAME)
    log.write(HEADER)
    assert log.closed


@pytest.mark.parametrize("value", [object(), "lone \ud800 surrogate"])
def test_a_record_that_json_cannot_hold_is_left_out_with_a_warning(path, value):
    with RunLogWriter(path) as log:
        log.write(HEADER)
        with pytest.warns(RuntimeWarning, match="EventRecord cannot be written as JSON"):
            log.write(EventRecord(step=1, kind="note", data={"value": value}))
        log.write(EVENT)
    run = read_runlog(path)
    assert (run.events, run.num_unreadable) == ((EVENT,), 0)


def test_no_file_stays_open_when_reader_or_writer_is_forgotten(written):
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    with warnings.catch_warnings(action="error"):
        RunLogWriter(written, append=True)
        RunLogReader(written)
    assert num_open() == before


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_ordinary_file_is_refused_at_once(path, make):
    make(path)
    with pytest.raises(RunLogError, match="cannot be read"):
        RunLogReader(path)


def test_two_models_of_one_process_never_mix_their_logs(path):
    with RunLogWriter(path, append=True) as first, RunLogWriter(path, append=True) as second:
        first.write(HEADER)
        with pytest.warns(RuntimeWarning, match="another model of this process writes it; give each its own run_dir"):
            second.write(HEADER)
        second.write(EventRecord(step=1, kind="note"))
        first.write(EventRecord(step=2, kind="note"))
    log = read_runlog(path)
    assert len(log.headers) == 1
    assert [event.step for event in log.events] == [2]


def test_a_reader_knows_when_another_file_took_the_place_of_its_own(written):
    with RunLogReader(written) as reader:
        reader.poll()
        assert not reader.replaced
        written.rename(written.with_name("aside"))
        assert not reader.replaced  # nothing took its place
        written.write_bytes(b"")
        assert reader.replaced
