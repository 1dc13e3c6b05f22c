"""The probes: what they see, and that none of them hangs or leaves a process behind."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

import pytest

from cannikin.doctor.probes import Facts, NoAnswerError, ask, measure_loopback, num_gpus, relevant_environment

# Asking


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_an_answer_is_the_last_line_that_a_command_prints():
    assert ask(python("print('noise'); print('[1, 2]')"), list[int], limit_s=30) == [1, 2]


@pytest.mark.parametrize("code", ["", "print('no JSON')", "print('\"text\"')"], ids=["nothing", "words", "wrong kind"])
def test_a_command_that_prints_no_answer_is_a_problem(code):
    with pytest.raises(NoAnswerError, match="it ended without a result"):
        ask(python(code), int, limit_s=30)


def test_a_command_that_fails_is_quoted_by_its_last_line():
    with pytest.raises(NoAnswerError, match=r"^last$"):
        ask(python("import sys; sys.exit('first\\n  last  \\n')"), str, limit_s=30)


def test_a_command_that_hangs_is_given_up_with_everything_it_started(tmp_path):
    mark = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(NoAnswerError, match=r"^no answer within 1 s$"):
        ask(["/bin/sh", "-c", f"sleep 60 & echo $! > {mark}; wait"], str, limit_s=1)
    assert time.monotonic() - began < 30
    for _ in range(100):
        if not _runs(int(mark.read_text())):
            return
        time.sleep(0.05)
    pytest.fail("what the command started runs on")


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_without_a_folder_for_temporary_files_the_all_reduce_says_why_not(monkeypatch):
    def refuse(*args, **keywords):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    assert "temporary" in (measure_loopback().problem or "")


# The host and the environment


def test_gpus_are_counted_by_their_devices(tmp_path):
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert num_gpus(tmp_path) == 2


def test_no_secret_is_written_down():
    assert relevant_environment({"TOKEN": "x", "SLURM_JOB_ID": "1", "SLURM_PASSWORD": "y"}) == {"SLURM_JOB_ID": "1"}


def test_variables_are_text_whatever_bytes_they_hold():
    found = relevant_environment({"CANNIKIN_DEVICE": os.fsdecode(b"host\xff")})
    assert found == {"CANNIKIN_DEVICE": "host\ufffd"}


def test_a_number_of_any_length_is_no_count():
    assert Facts(environment={"RANK": "9" * 5000}).count("RANK") is None
