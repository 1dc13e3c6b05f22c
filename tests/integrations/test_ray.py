"""Under a real Ray Train: weights as one process, checkpoints that go on exactly, nodes that come and go."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt '.[ray]', or make test-all")

from pages import ROOT
from ray.train.torch import train_loop_utils
from ray_cases import (
    BOUNDS,
    NUM_SAMPLES,
    ONE,
    PINNED,
    SEVERAL,
    TOTAL,
    Recorded,
    committed,
    make_parts,
    read_runs,
    train_alone,
)
from torch.utils.data import DataLoader

from cannikin.errors import InvalidInputError
from cannikin.integrations.ray import prepare
from cannikin.runtime.loader import HeteroDataLoader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAST, MIDDLE, SLOW = (f"lab device of speed {speed}" for speed in ("1", "0.5", "0.25"))


def run_under_ray(*command: str, limit_s: float) -> str:
    """Run a program that starts a Ray of its own, and end all that is left of it; what it printed."""
    faulthandler.cancel_dump_traceback_later()  # pytest's limit for a test that hangs is shorter than `limit_s`
    path = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(
        [sys.executable, *command],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed[-5000:]
    return printed


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def each_sample_once(steps: list[dict]) -> bool:
    """Whether every epoch has every sample once, over all ranks."""
    epochs: dict[int, list[int]] = {}
    for step in steps:
        epochs.setdefault(step["epoch"], []).extend(step["indices"])
    return all(sorted(indices) == list(range(NUM_SAMPLES)) for indices in epochs.values())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder in which `several` has left what it trained."""
    folder = tmp_path_factory.mktemp("several")
    run_under_ray(str(Path(__file__).with_name("ray_cases.py")), "several", str(folder), limit_s=400)
    return folder


@pytest.mark.parametrize("config", SEVERAL, ids=lambda config: config["name"])
def test_three_workers_with_unequal_batches_train_as_one_process_would(trained, config):
    (ranks,) = read_runs(trained, config["name"])
    steps = committed([ranks])
    weights, losses = train_alone(steps, config)
    rounding = 5e-3 if config.get("bf16") else 1e-6
    assert len(ranks) == 3
    assert each_sample_once(steps)
    assert largest_difference(torch.load(trained / f"{config['name']}.pt"), weights) < rounding
    assert max(abs(loss - step["loss"]) for loss, step in zip(losses, steps, strict=True)) < rounding
    if config["name"] == "adaptive":
        fast, middle, slow = steps[-1]["plan"]
        assert fast > middle > slow
    else:
        assert tuple(steps[-1]["plan"]) == PINNED


def test_a_single_worker_trains_too_for_which_ray_makes_no_ddp_module(trained):
    (ranks,) = read_runs(trained, "one")
    weights, _ = train_alone(committed([ranks]), ONE)
    assert len(ranks) == 1
    assert largest_difference(torch.load(trained / "one.pt"), weights) < 1e-6


def test_a_report_in_the_middle_of_gradients_that_pile_up_is_refused(trained):
    (ranks,) = read_runs(trained, "accumulate")
    assert ["call it after optimizer.step()" in steps[0]["refused"] for _, steps in ranks.values()] == [True] * 3


def test_a_shard_of_ray_data_is_refused_with_what_to_do():
    net, optimizer, _ = make_parts()
    with pytest.raises(InvalidInputError, match="dealt out to the workers in equal parts already; give a DataLoader"):
        prepare(net, optimizer, iter(()))


def test_a_loader_that_ray_has_wrapped_is_taken_apart_by_the_name_that_its_class_has():
    wrapped = train_loop_utils._WrappedDataLoader(DataLoader(Recorded(), batch_size=8), torch.device("cpu"), False)
    loader = HeteroDataLoader.like(wrapped, batch_size=16)
    assert isinstance(loader.dataset, Recorded)
    assert not loader.sharded  # as batches of an iterator would be


def test_ray_has_the_loss_that_was_reported_last(trained):
    steps = committed(read_runs(trained, "pinned"))
    result = json.loads((trained / "result.json").read_text())
    assert result == {"loss": steps[-1]["loss"], "step": len(steps)}


def test_a_run_that_was_stopped_in_mid_epoch_ends_with_exactly_the_weights_of_one_that_was_not(trained):
    before, after = read_runs(trained, "resumed")
    assert after[0][0]["first"] == len(before[0][1]) == 16
    assert each_sample_once(committed([before, after]))
    assert largest_difference(torch.load(trained / "resumed.pt"), torch.load(trained / "pinned.pt")) == 0


def test_a_lost_worker_a_lost_node_and_one_that_comes_back_cost_no_sample_and_no_plan(tmp_path):
    run_under_ray(str(Path(__file__).with_name("ray_cases.py")), "faults", str(tmp_path), limit_s=800)
    runs = read_runs(tmp_path, "faults")
    steps = committed(runs)
    weights, _ = train_alone(steps, {})
    assert [len(ranks) for ranks in runs] == [3, 3, 2, 3]
    assert {sum(step["plan"]) for step in steps} == {TOTAL}  # on two workers too
    assert each_sample_once(steps)
    assert largest_difference(torch.load(tmp_path / "faults.pt"), weights) < 1e-5
    for number, ranks in enumerate(runs):
        devices = [ranks[rank][0]["device"] for rank in sorted(ranks)]
        plans = [dict(zip(devices, step["plan"], strict=True)) for step in ranks[0][1]]
        assert max(plan.get(SLOW, 0) for plan in plans) <= BOUNDS["slow"][1]  # whatever ranks Ray has given the devices
        if number > 0:
            assert 1.6 <= plans[0][FAST] / plans[0][MIDDLE] <= 2.4
            assert plans[0].get(SLOW, 6) >= 5


def test_the_script_of_the_page_runs_and_goes_on_under_its_name(tmp_path):
    script, storage = str(ROOT / "examples" / "launch" / "ray_train.py"), str(tmp_path / "storage")
    starter = tmp_path / "start.py"
    starter.write_text(
        "import runpy, sys\nfrom ray_cases import one_node\nwith one_node():\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n".replace("sys.argv[0]", repr(script))
    )
    for epochs in ("1", "2"):
        printed = run_under_ray(str(starter), "--epochs", epochs, "--storage", storage, limit_s=200)
    assert "'epoch': 1, 'loss': 0." in printed
    assert (Path(storage, "digits")).is_dir()
    shutil.rmtree(storage)
