"""Lightning's Trainer and Fabric with unequal local batches train as one process with the whole batches does."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed: pip install -c constraints.txt '.[lightning]'", allow_module_level=True)

import lightning_cases
import torch
from lightning_cases import NUM_BATCHES

from cannikin.integrations.lightning import CannikinStrategy
from cannikin.runtime.options import DrawOptions, Options

pytestmark = pytest.mark.timeout(240)  # the first test waits for the launch

HERE = Path(__file__).parent
ALIKE = ("pinned", "adaptive", "accumulated", "clipped", "scheduled", "validated", "max_steps", "limited", "overfit",
         "seldom", "seldom_accumulated", "telling")  # fmt: skip
SAVED = ("saved", "saved_scheduled", "saved_ahead", "saved_by_fabric")
AFTER_EPOCHS = tuple(f"saved_{name}" for name in lightning_cases.AFTER_EPOCHS)


def launch(folder: Path, role: str, *starter: str) -> list[dict[str, Any]]:
    """What every rank of a launch has found."""
    paths = [HERE, HERE.parent, HERE.parent.parent / "src"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *starter, str(HERE / "lightning_cases.py"), str(folder), role]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    found = [folder / f"{role}{rank}.pt" for rank in (0, 1)]
    assert all(each.exists() for each in found), done.stderr[-3000:]
    return [torch.load(each, weights_only=False) for each in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of one launch by Lightning itself have found."""
    return launch(folder, "ranks")


@pytest.fixture(scope="module")
def alone(told: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What one process has found, with whole batches and plain Lightning."""
    return torch.load(folder / "alone.pt", weights_only=False)


def values(told: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    for answers in told:
        assert "error" not in answers[name], answers[name]["trace"]
    return [answers[name] for answers in told]


def gap(one: dict[str, Any], other: dict[str, Any], name: str = "weights") -> float:
    first, second = (torch.as_tensor(each[name], dtype=torch.float64) for each in (one, other))
    assert first.shape == second.shape
    return float((first - second).abs().max())


@pytest.mark.parametrize("name", ALIKE)
def test_two_ranks_end_where_one_process_does_and_log_the_same_losses_on_the_way(told, alone, name):
    first, second = values(told, name)
    (one,) = values([alone], name)
    assert gap(one, first) < 1e-6
    assert gap(first, second) == 0
    assert gap(one, first, "losses") < 1e-6  # of every step, over all ranks' samples
    assert gap(one, first, "epoch_losses") < 1e-6
    assert gap(one, first, "rates") == 0
    assert one["steps"] == first["steps"]
    assert [step for step, _ in one["validated"]] == [step for step, _ in first["validated"]]
    assert first["sizes"] != second["sizes"]


def test_the_cases_are_what_their_names_say(told):
    pinned, _ = values(told, "pinned")
    assert pinned["sizes"] == [*[48] * 7, 39] * 2
    assert values(told, "accumulated")[0]["steps"] == 6  # of 8 batches an epoch: 3, 3 and 2
    assert len(set(values(told, "scheduled")[0]["rates"])) > 10
    assert [step for step, _ in values(told, "validated")[0]["validated"]] == [0, 4, 8, 12, 16]
    assert values(told, "max_steps")[0]["steps"] == 11
    assert {40, 20, 50} < set(values(told, "adaptive")[0]["sizes"])


def test_the_policy_itself_gives_the_faster_rank_more_while_weights_stay_those_of_one_process(told, alone):
    first, second = values(told, "learned")
    assert gap(alone["learned"], first) < 1e-6
    assert gap(first, second) == 0
    assert [sum(sizes) for sizes in zip(first["sizes"], second["sizes"], strict=True)] == [*[64] * 7, 52] * 8
    assert first["sizes"][0] == second["sizes"][0] == 32
    assert first["plan"][0] > 1.5 * first["plan"][1]  # of ranks of speed 4 and 1


def test_a_strategy_that_is_given_by_its_name_is_ours(told, alone):
    first, second = values(told, "by_name")
    assert gap(alone["by_name"], first) < 1e-6
    assert gap(first, second) == 0
    assert sum(first["plan"]) == 64


def test_means_over_ranks_in_each_step_are_warned_of_where_the_split_is_to_adapt(told):
    assert "their speeds cannot be told apart" in values(told, "adaptive")[0]["warnings"][0]
    assert values(told, "adaptive")[1]["warnings"] == []
    assert values(told, "pinned")[0]["warnings"] == values(told, "learned")[0]["warnings"] == []


@pytest.mark.parametrize("name", ["befores", "afters"])
def test_what_is_logged_between_a_step_and_the_end_of_its_batch_is_the_mean_over_samples(told, alone, name):
    assert gap(alone["telling"], values(told, "telling")[0], name) < 1e-6


def test_what_is_logged_at_the_end_of_an_epoch_is_the_mean_over_ranks(told):
    assert values(told, "telling")[0]["means"] == [2.0] * 2


def test_the_strategys_own_settings_have_names_and_types_as_command_lines_need_them():
    own = inspect.signature(CannikinStrategy).parameters
    assert {"local_batches", "local_bounds", "max_batch_size", "run_dir", "weighting"} < own.keys()
    hints = typing.get_type_hints(CannikinStrategy.__init__)
    assert all(hints[name] is not Any for name in own if name != "options")
    passed_on = {*DrawOptions.__annotations__, *Options.__annotations__} - {"follows", "loader", "grad_scaler"}
    assert passed_on < own.keys()


def test_mixed_precision_is_as_near_as_its_rounding_lets_it_be(told, alone):
    assert gap(alone["bf16"], values(told, "bf16")[0]) < 1e-3
    assert gap(alone["bf16"], alone["pinned"]) > 1e-2  # which has another rate: the weights do move


@pytest.mark.parametrize("name", ["fabric", "fabric_accumulated", "fabric_several"])
def test_a_loop_of_ones_own_under_fabric_does_so_too(told, alone, name):
    first, second = values(told, name)
    assert gap(alone[name], first) < 1e-6
    assert gap(first, second) == 0
    assert first["sizes"] == [*[48] * 7, 39] * 2


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_growing"])
def test_validations_see_the_same_running_statistics_on_every_rank(told, name):
    first, second = values(told, name)
    assert len(first["validated"]) > 3
    for (step, statistics), (_, others) in zip(first["validated"], second["validated"], strict=True):
        assert torch.equal(statistics, others), step
    assert not torch.equal(first["validated"][1][1], first["validated"][2][1])


@pytest.mark.parametrize("name", SAVED)
def test_a_run_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch_as_if_it_had_not_stopped(told, name):
    (whole, _), (rest, _) = values(told, name), values(told, f"resumed_{name}")
    assert gap(whole, rest) == 0
    assert 0 < len(rest["sizes"]) < len(whole["sizes"])
    assert rest["sizes"] == whole["sizes"][-len(rest["sizes"]) :]


@pytest.mark.parametrize("name", AFTER_EPOCHS)
def test_a_run_goes_on_from_a_checkpoint_of_a_complete_epoch_in_the_order_of_the_next_one(told, name):
    for whole, rest in zip(values(told, name), values(told, f"resumed_{name}"), strict=True):
        assert gap(whole, rest) == 0
        assert 0 < len(rest["sizes"]) < len(whole["sizes"])
        assert rest["sizes"] == whole["sizes"][-len(rest["sizes"]) :]


def test_another_epoch_has_another_order_in_what_is_resumed_after_one(told):
    ranks = values(told, "saved_stream")
    seen = [rank["seen"][: sum(rank["sizes"][:4])] for rank in ranks]
    assert sorted(seen[0] + seen[1]) == list(range(100))
    assert [rank["seen"][len(own)] for rank, own in zip(ranks, seen, strict=True)] == [30, 54]


@pytest.mark.slow
def test_fresh_processes_under_torchrun_do_so_too(told, folder):
    resumed = launch(folder, "resumed", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    for name in (*SAVED, *AFTER_EPOCHS):
        assert gap(values(told, name)[0], values(resumed, name)[0]) == 0, name


def test_checkpoints_that_lack_gradients_are_warned_of_once(told):
    for name, advice in (("saved_in_groups", "a multiple of accumulate_grad_batches"),
                         ("saved_in_groups_by_fabric", "where no_backward_sync is off")):  # fmt: skip
        first, second = values(told, name)
        (warning,) = first["warnings"]
        assert "inside of a group of accumulated batches" in warning
        assert advice in warning
        assert second["warnings"] == []
    for name in ("saved_between_groups", "saved_ahead", "saved_growing", "saved_last_of_stream", "saved_by_fabric"):
        assert not any("group" in warning for warning in values(told, name)[0]["warnings"]), name


def test_a_progress_bar_has_the_number_of_batches_of_an_epoch(told):
    assert values(told, "shown")[0]["totals"] == (8,) * 16


@pytest.mark.parametrize("name", ["shown_growing", "shown_by_rich"])
def test_a_progress_bar_follows_a_total_batch_that_grows(told, name):
    grown, _ = values(told, name)
    ends = [step for step, _ in grown["validated"][1:]]  # of epochs
    begins = [0, *ends[:-1]]
    assert len({end - begin for begin, end in zip(begins, ends, strict=True)}) > 1
    for begin, end in zip(begins, ends, strict=True):
        assert grown["totals"][end - 1] == end - begin


def test_loggers_get_what_was_measured_now_and_then_at_the_optimizers_steps(told):
    first, second = values(told, "shown")
    ours = [(step, row) for step, row in first["rows"] if any(name.startswith("cannikin/") for name in row)]
    assert 3 <= len(ours) <= 8  # of 16 steps, though the user logs each
    assert all(step <= 16 for step, _ in ours)
    logged = {name: value for _, row in ours for name, value in row.items()}
    assert logged["cannikin/rank1/local_batch"] == 16
    assert 0 < logged["cannikin/use"] <= 1
    assert logged["cannikin/noise_scale"] > 0
    assert not any("cannikin" in name for _, row in second["rows"] for name in row)


def test_noise_scale_and_progress_are_known_under_accumulation_and_the_total_grows(told):
    (plain, _), (piled, _) = values(told, "noise"), values(told, "noise_accumulated")
    assert piled["noise_scale"] == pytest.approx(plain["noise_scale"], rel=0.5)
    assert piled["progress"] == pytest.approx(80)
    grown, _ = values(told, "growing_accumulated")
    assert sum(grown["plan"]) == 96
    assert grown["steps"] < 15 * 4  # fewer, of two batches each, than at the initial total
    assert 1.5 * grown["steps"] < grown["progress"] < 15 * 8  # and worth less than the samples in them


def test_schedules_by_the_step_follow_progress_where_the_total_grows(told):
    (fixed, _), (grown, _) = values(told, "noise_accumulated"), values(told, "growing_accumulated")
    for found in (fixed, grown):
        assert 1e-6 / found["rates"][-1] - 1 == pytest.approx(int(found["elapsed"] + 1e-6))
    assert fixed["elapsed"] == fixed["steps"] == 30
    assert int(grown["elapsed"]) != grown["steps"]


def test_a_schedule_that_is_stepped_at_every_third_batch_is_so_in_progress(told):
    assert len(set(values(told, "seldom")[0]["rates"])) == 1 + 3 * (NUM_BATCHES // 3)
    grown, _ = values(told, "seldom_growing")
    assert grown["steps"] < 4 * NUM_BATCHES
    num_passes, rest = divmod(grown["elapsed"], NUM_BATCHES)
    assert 1e-6 / grown["rates"][-1] - 1 == pytest.approx(num_passes * (NUM_BATCHES // 3) + rest // 3)


def test_a_search_of_learning_rates_leaves_no_trace_in_the_training_after_it(told):
    (plain, _), (first, second) = values(told, "pinned"), values(told, "searched")
    assert gap(plain, first) == gap(first, second) == 0
    assert first["sizes"] == [*plain["sizes"][:12], *plain["sizes"]]
    assert first["progress"] == plain["progress"] == 16
    assert first["events"][-1] == "end"
    assert first["events"].count("end") == 1


def test_every_rank_gets_the_same_learning_rate_from_a_search(told):
    first, second = values(told, "searched_by_tuner")
    assert 1e-8 < first["suggested"] == second["suggested"] < 1
    assert first["rate"] == second["rate"] == first["suggested"]


def test_a_stream_is_cut_and_a_sampler_is_kept(told):
    first, second = values(told, "stream")
    assert sorted(first["seen"] + second["seen"]) == list(range(100))
    assert values(told, "weighted")[0]["sizes"] == [48, 48, 48, 6] * 2  # 200 samples an epoch


def test_a_batch_size_that_is_ignored_is_warned_of(told):
    first, second = values(told, "other_total")
    assert "batch_size=7 is ignored" in first["warnings"][0]
    assert second["warnings"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("second_order", "LBFGS, which runs training_step several times per batch"),
        ("set_up_before", "as it was before fabric.setup_dataloaders"),
        ("manual", "use automatic optimization, or Fabric"),
        ("reloaded", "leave it at 0"),
        ("several", "put the datasets into one"),
        ("changed", "has a total batch of 64 samples when it is set up again, and had 32"),
        ("batch_sampler", "is a ByLength, which cuts batches its own way"),
        ("wrapped_sampler", "use_distributed_sampler=False"),
        ("no_loader", "give a torch.utils.data.DataLoader"),
        ("whole_batches", "give a DataLoader over single samples"),
        ("estimated", "set max_steps"),
        ("comm_hook", "comm_wrapper="),
        ("not_whole", "local_batches[0]=48.0 must be a whole number of at least 1"),
        ("misspelt", "did you mean max_batch_size?"),
    ],
)
def test_what_cannot_be_honoured_is_refused_on_every_rank_with_what_to_do(told, name, words):
    for answers in told:
        assert words in answers[name]["error"], answers[name]["trace"]
