"""A run that is killed may leave its log cut at any byte: what came before is read, and the log says where it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from cannikin.errors import RunLogError
from cannikin.runlog import RUNLOG_NAME, RunLogReader, RunLogWriter, read_runlog
from cannikin.sim.runs import find_machine, simulate
from cannikin.sim.workload import find_workload

STRIDE = 17  # bytes between cuts


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """The log of a whole run, from its header to its end, that was resumed once on the way."""
    path: Path = tmp_path_factory.mktemp("run") / RUNLOG_NAME
    machine, workload = find_machine("a", "bert"), find_workload("bert")
    for append in (False, True):
        with RunLogWriter(path, append=append) as log:
            simulate(machine, workload, "cannikin", max_epochs=0.012, observers=(log,))
    return path.read_bytes()


def lengths(whole: bytes) -> list[int]:
    """Both sides of every line's end, and bytes in between."""
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    around = {length for end in ends for length in (end - 1, end, end + 1) if length <= len(whole)}
    return sorted({*around, *range(0, len(whole), STRIDE)})


def test_a_whole_run_cut_anywhere_gives_all_records_before_the_cut(whole, tmp_path):
    path = tmp_path / RUNLOG_NAME
    path.write_bytes(whole)
    with RunLogReader(path) as reader:
        records = reader.poll()
    assert len(records) == whole.count(b"\n") > 30
    header_length = whole.index(b"\n") + 1
    steps = [0]
    for length in reversed(lengths(whole)):
        with path.open("r+b") as file:
            file.truncate(length)
        if length < header_length:
            with pytest.raises(RunLogError, match=r"runlog\.jsonl: has no header yet"):
                read_runlog(path)
            continue
        with RunLogReader(path) as reader:
            kept = reader.poll()
        assert kept == records[: whole.count(b"\n", 0, length)]
        run = read_runlog(path)
        assert len(run.headers) + len(run.windows) + len(run.plans) + len(run.events) == len(kept)
        assert run.truncated == (whole[length - 1] != ord("\n"))
        assert (run.num_unreadable, run.num_unknown) == (0, 0)
        steps.append(run.last_step)
    assert steps[1:] == sorted(steps[1:], reverse=True), "the less is left, the earlier it ends"
    assert steps[-1] == 0


def test_only_a_log_with_its_last_line_says_that_the_run_ended(whole, tmp_path):
    path = tmp_path / RUNLOG_NAME
    for length, ended in ((len(whole), True), (len(whole) - 1, False), (len(whole) // 2 + len(whole) // 4, False)):
        path.write_bytes(whole[:length])
        assert read_runlog(path).ended == ended
    first_run = whole[: whole.index(b'{"type":"header"', 1)]
    path.write_bytes(first_run)
    assert read_runlog(path).ended
    path.write_bytes(whole[: whole.index(b"\n", len(first_run)) + 1])  # its header alone, before its event "resume"
    resumed = read_runlog(path)
    assert len(resumed.headers) == 2
    assert not resumed.ended
