"""Every example trains to its end at its reduced size on two ranks, on made-up data; one also under torchrun and alone.

Ranks come from `run_ranks`, which has imported torch already: torchrun's launcher and ranks import it three times.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import made_up
import pytest
from ranks import run_ranks

import cannikin

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run_example(name: str, data: Path, *flags: str, launcher: list[str] | None = None) -> tuple[str, dict]:
    """What the example printed and its summary; it must end well within the time limit, and nothing outlives it."""
    summary = data / "summary.json"
    command = [*(launcher or [sys.executable]), str(EXAMPLES / f"{name}.py"), "--data", str(data), "--quick"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CANNIKIN_")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = str(Path(cannikin.__file__).parents[1])
    process = subprocess.Popen(
        [*command, "--json", str(summary), *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, complaints = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, f"{printed}\n{complaints}"
    return printed, json.loads(summary.read_text())


def train(rank: int, world_size: int, name: str, flags: list[str]) -> str:
    """Run an example as one of torchrun's ranks does; what it printed."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    sys.argv = [str(EXAMPLES / f"{name}.py"), *flags]
    sys.path.insert(0, str(EXAMPLES))
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return printed.getvalue()


def train_on_two_ranks(name: str, data: Path, *flags: str) -> tuple[str, dict]:
    """What both ranks of an example printed, and its summary."""
    summary = data / "summary.json"
    printed = run_ranks(train, 2, name, ["--data", str(data), "--quick", "--json", str(summary), *flags], timeout_s=90)
    return "".join(printed), json.loads(summary.read_text())


def check_two_ranks(printed: str, summary: dict) -> None:
    """That two ranks trained for as much progress as was asked, and that there is a line for every epoch."""
    epochs, settings = summary["epochs"], summary["settings"]
    assert summary["num_ranks"] == 2
    assert epochs[-1]["progress"] == pytest.approx(settings["epochs"], abs=1.0)
    for epoch in epochs:
        assert len(epoch["local_batches"]) == 2
        assert sum(epoch["local_batches"]) == epoch["total_batch"] >= settings["batch_size"]
    lines = [line for line in printed.splitlines() if line.startswith("epoch")]
    assert len(lines) == len(epochs), "rank 0 alone prints, a line an epoch"
    assert summary["seconds_to_target"] is None


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("cifar10", made_up.write_cifar10),
        ("ncf", made_up.write_movielens),
        ("speech_ctc", made_up.write_an4),
        ("gpt_fsdp", made_up.write_text),
    ],
)
def test_the_example_learns_on_two_ranks(name, write, tmp_path):
    write(tmp_path)
    printed, summary = train_on_two_ranks(name, tmp_path)
    check_two_ranks(printed, summary)
    losses = [epoch["loss"] for epoch in summary["epochs"]]
    assert losses[-1] < losses[0]


def test_an_example_learns_on_two_ranks_that_torchrun_has_started(tmp_path):
    made_up.write_text(tmp_path)
    printed, summary = run_example("char_lm", tmp_path, launcher=TORCHRUN)
    check_two_ranks(printed, summary)
    losses = [epoch["loss"] for epoch in summary["epochs"]]
    assert losses[-1] < losses[0]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="examples/squad.py needs transformers")
def test_the_squad_example_learns_on_two_ranks(tmp_path):
    made_up.write_squad(tmp_path)
    (tmp_path / "encoder").mkdir()
    made_up.write_encoder(tmp_path / "encoder")
    flags = ("--model", str(tmp_path / "encoder"), "--epochs", "2", "--num-train", "48")
    printed, summary = train_on_two_ranks("squad", tmp_path, *flags)
    check_two_ranks(printed, summary)
    losses = [epoch["loss"] for epoch in summary["epochs"]]
    assert losses[-1] < losses[0]
    assert 0 <= summary["best"] <= 1


def test_an_example_runs_alone_and_stops_at_its_target(tmp_path):
    made_up.write_text(tmp_path)
    printed, summary = run_example("char_lm", tmp_path, "--target", "100", "--epochs", "50")
    assert summary["num_ranks"] == 1
    assert len(summary["epochs"]) == 1
    assert summary["seconds_to_target"] == summary["train_s"] > 0
    assert "target validation_loss 100.0 reached after" in printed
