"""`cannikin doctor` itself: the real command on this machine, and what a person reads of made-up ones."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from click.testing import CliRunner
from rich.console import Console

from cannikin.cli import doctor as doctor_command
from cannikin.cli import main
from cannikin.doctor.checks import diagnose
from cannikin.doctor.probes import Facts, LoopbackFacts, TorchFacts
from cannikin.lab.mechanisms import MECHANISMS

HIDE_TORCH = """
import sys
sys.modules["torch"] = None
from cannikin.cli import main
main(["doctor"])
"""
BOX = Facts(torch=TorchFacts(version="2.13.0+cpu"), num_cores=2)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    foreign = ("RANK", "WORLD_SIZE", "CANNIKIN_POLICY", "CANNIKIN_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    command = (sys.executable, *command)
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=110)


def test_the_real_command_says_what_this_machine_is_and_tries_gloo():
    pytest.importorskip("torch")
    mark = uuid4().hex
    done = run("-m", "cannikin", "doctor", "--json", CANNIKIN_POLICE="even", DOCTOR_TEST=mark)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["possible"] is True
    assert "gloo" in answer["facts"]["torch"]["backends"]
    assert set(answer["facts"]["mechanisms"]) == set(MECHANISMS)
    assert {"Software", "GPUs", "Host", "Network", "Launch", "Lab"} >= {each["area"] for each in answer["findings"]}
    assert "CANNIKIN_POLICE is no variable" in done.stdout
    (gloo,) = (each for each in answer["findings"] if each["subject"] == "gloo")
    assert gloo["level"] in {"ok", "warning"}  # a crowded machine may need more than its 20 seconds
    if gloo["level"] == "ok":
        assert 0 < answer["facts"]["loopback"]["latency_s"] < 20
    assert not _marked(f"DOCTOR_TEST={mark}"), "a process of the all-reduce was left behind"


def _marked(mark: str) -> list[int]:
    """Return the processes whose environment has this mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def test_without_torch_it_works_and_exits_with_status_1():
    done = run("-c", HIDE_TORCH)
    assert done.returncode == 1
    assert "pip install 'cannikin[torch]'" in done.stdout
    assert "Training is impossible as things are: PyTorch is not installed." in done.stdout


@pytest.fixture
def shown(monkeypatch):
    def show(facts: Facts, *args: str):
        monkeypatch.setattr(doctor_command, "look", lambda *, quick: facts)
        return CliRunner().invoke(main, ["doctor", *args])

    return show


def test_the_exit_status_is_0_with_warnings_and_1_with_a_blocker(shown):
    assert shown(replace(BOX, environment={"RANK": "0"})).exit_code == 0
    assert shown(replace(BOX, environment={"CANNIKIN_BACKEND": "luck"})).exit_code == 1


def test_every_line_fits_80_columns(shown):
    name = "a-host-with-a-name-that-goes-on-and-on" * 3
    facts = replace(BOX, hostname=name, environment={"CANNIKIN_" + "X" * 90: "1"})
    lines = shown(facts).stdout.splitlines()
    assert max(map(len, lines)) <= 80


def test_what_a_terminal_would_obey_is_not_printed(shown):
    result = shown(replace(BOX, environment={"CANNIKIN_DEVICE": "\x1b]0;title\x07"}))
    assert "\x1b" not in result.stdout
    assert "\x07" not in result.stdout


def test_levels_are_words_so_that_colours_are_not_needed():
    facts = replace(BOX, environment={"CANNIKIN_POLICE": "even"})
    console = Console(file=io.StringIO(), width=80)
    console.print(doctor_command.rendered(facts, diagnose(facts)))
    text = console.file.getvalue()
    assert "warning  variables" in text
    assert "Did you mean CANNIKIN_POLICY?" in text


def test_a_box_under_torchrun_prints_its_golden(shown, golden):
    launch = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    facts = Facts(
        torch=TorchFacts(
            version="2.11.0", build="CUDA 12.8", backends=("gloo", "nccl"), devices=("A100", "A100", "T4")
        ),
        num_gpus=3,
        num_cores=64,
        environment={**launch, "CANNIKIN_POLICE": "even"},
        mechanisms={"portable": None, "hosts": "network namespaces need root"},
        loopback=LoopbackFacts(latency_s=2e-4, bytes_per_s=1.2e9),
    )
    golden("doctor", shown(facts).stdout)


def test_json_is_one_object_with_facts_and_findings(shown):
    answer = json.loads(shown(BOX, "--json").stdout)
    assert set(answer) == {"possible", "summary", "findings", "facts"}
    assert set(answer["findings"][0]) == {"area", "subject", "level", "text", "advice", "limits"}
