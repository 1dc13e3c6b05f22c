"""The police of tests/leaks.py sees what a test leaves behind, names it, and does not mind what is argued for."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from leaks import leaks, look

Undo = Callable[[], object]


def a_process() -> Undo:
    code = "print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return lambda: process.communicate(b"\n")


def a_process_that_ended() -> Undo:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.wait


def a_process_of_the_forkserver() -> Undo:
    process = multiprocessing.get_context("forkserver").Process(target=signal.pause, daemon=True)
    process.start()
    return lambda: (process.kill(), process.join())


def a_thread(daemon: bool = False) -> Undo:
    end = threading.Event()
    threading.Thread(target=end.wait, name="left over", daemon=daemon).start()
    return end.set


def a_daemon() -> Undo:
    return a_thread(daemon=True)


def a_variable() -> Undo:
    os.environ["CANNIKIN_LEFT"] = "1"
    return lambda: os.environ.pop("CANNIKIN_LEFT")


def a_folder() -> Undo:
    home = os.getcwd()
    os.chdir("..")
    return lambda: os.chdir(home)


def a_file() -> Undo:
    Path("left.txt").touch()
    return Path("left.txt").unlink


def an_open_file() -> Undo:
    descriptor = os.open("open.txt", os.O_CREAT)
    Path("open.txt").unlink()  # open all the same
    return lambda: os.close(descriptor)


def an_excepthook() -> Undo:
    before, sys.excepthook = sys.excepthook, print
    return lambda: setattr(sys, "excepthook", before)


def a_signal_handler() -> Undo:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    return lambda: signal.signal(signal.SIGTERM, before)


def a_process_group() -> Undo:
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.destroy_process_group


LEFT = [
    (a_process, r"process \d+ is left: .*input"),
    (a_process_that_ended, r"process \d+ is left: it has ended, but nobody waited for it"),
    (a_process_of_the_forkserver, r"process \d+ is left: started by multiprocessing's server"),
    (a_thread, "^thread 'left over' still runs"),
    (a_daemon, "daemon thread 'left over' still runs"),
    (a_variable, "the environment's CANNIKIN_LEFT was None and is '1'"),
    (a_folder, "the working directory was .* and is "),
    (a_file, "left.txt is new in the working directory"),
    (an_open_file, "open.txt.* is still open, as descriptor"),
    (an_excepthook, "sys.excepthook was .* and is <built-in function print>"),
    (a_signal_handler, "the handler of SIGTERM was"),
    (a_process_group, "torch.distributed still has its process group"),
]


@pytest.mark.parametrize(("make", "words"), LEFT, ids=[make.__name__ for make, _ in LEFT])
def test_whatever_is_left_is_named_until_it_is_gone(tmp_path, monkeypatch, make, words):
    monkeypatch.chdir(tmp_path)
    before = look(tmp_path)
    undo = make()
    try:
        (sentence,) = leaks(before, tmp_path, grace_s=0.0)
    finally:
        undo()
    assert re.search(words, sentence)
    assert leaks(before, tmp_path) == []


def test_what_ends_within_the_grace_is_no_leak(tmp_path):
    before = look(tmp_path)
    threading.Timer(0.2, lambda: None).start()
    assert leaks(before, tmp_path, grace_s=0.0) != []
    assert leaks(before, tmp_path) == []


LEAKING = """
import os, threading, pytest

def test_a_variable(): os.environ["CANNIKIN_LEFT"] = "1"

def test_nothing(): pass

def test_that_fails(): os.environ["CANNIKIN_LEFT"] = "2"; assert False

@pytest.fixture(scope="module")
def folder(tmp_path_factory): os.environ["CANNIKIN_LEFT"] = "3"

def test_of_a_leaking_fixture(folder): pass
"""


def test_a_leak_fails_the_test_that_made_it_and_a_fixtures_leak_the_files_last(tmp_path):
    for name in ("conftest.py", "leaks.py"):
        shutil.copy(Path(__file__).parent / name, tmp_path)
    (tmp_path / "test_made_up.py").write_text(LEAKING)
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    errors = [line.partition("::")[2] for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert [error.split()[0] for error in errors] == ["test_a_variable", "test_of_a_leaking_fixture"], done.stdout
    assert "this test left something behind" in done.stdout
    assert "  the environment's CANNIKIN_LEFT was None and is '1'\n" in done.stdout
    assert "this file's fixtures or tests left something behind" in done.stdout
    assert "1 failed, 3 passed, 2 errors" in done.stdout
