"""Under Transformers' Trainer, ranks with unequal batches train as one process would on the whole batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is missing: pip install -c constraints.txt '.[transformers]'")

from accelerate.state import AcceleratorState, GradientState
from transformers_cases import NUM_SAMPLES, PARITY, QUICK, Classifier, Points, Sentences, arguments, run

from cannikin.integrations.transformers import HeteroTrainer


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case found on rank 0; the second launch resumes what the first one saved."""
    folder = tmp_path_factory.mktemp("transformers")
    first = run_ranks(
        run, 2, folder, "quick", "num_forwards", "summary", "logged", "refusals", "saving_groups", timeout_s=100
    )
    return first[0] | run_ranks(run, 2, folder, "resuming", timeout_s=60)[0]


@pytest.fixture(scope="module")
def all_found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the longer cases found, by rank."""
    folder = tmp_path_factory.mktemp("transformers")
    told = run_ranks(run, 2, folder, "parity", "adaptive", "by_length", "again", "saving", timeout_s=110)
    return [first | then for first, then in zip(told, run_ranks(run, 2, folder, "resuming", timeout_s=60), strict=True)]


def check(gaps: dict[str, Any]) -> None:
    assert gaps["weights"] < 2e-5  # Adam at a rate of 1e-2; a wrong weight shows as more than 1e-2
    assert gaps["loss"] < 2e-6
    assert gaps["rate"] == 0
    assert gaps["evaluated"] < 1e-6
    assert gaps["steps"] == gaps["max_steps"]


@pytest.mark.parametrize("case", QUICK)
def test_an_unequal_split_trains_as_one_process_on_the_whole_batches(found, case):
    check(found["quick"][case])
    assert found["quick"]["means, evaluated"]["num_evaluated"] == 5


def test_a_trial_of_the_loss_in_training_mode_leaves_no_trace(found):
    assert found["num_forwards"] == 2 * 7


def test_the_loss_of_a_whole_training_is_that_of_its_samples_however_seldom_it_was_logged(found):
    assert found["summary"][500] == pytest.approx(found["summary"][1], abs=1e-4)  # rounded to four digits where logged
    assert found["summary"]["no"] == pytest.approx([found["summary"][1]] * 3, abs=1e-4)


def test_trackers_of_report_to_get_the_plan_and_the_noise_beside_the_loss(found):
    evaluated, *rows, summary = found["logged"]
    assert "eval_loss" in evaluated
    assert "train_loss" in summary
    assert not any(name.startswith("cannikin/") for name in (*evaluated, *summary))
    assert all(row["cannikin/rank0/local_batch"] == 12 and row["cannikin/rank1/local_batch"] == 4 for row in rows)
    assert rows[-1]["cannikin/noise_scale"] > 0
    assert rows[-1]["cannikin/predicted_step_ms"] > 0
    assert all(math.isfinite(value) for row in rows for value in row.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in PARITY if name != "tokens, bf16"])
def test_an_unequal_split_trains_as_one_process_in_every_way_of_training(all_found, case):
    check(all_found[0]["parity"][case])


@pytest.mark.slow
def test_in_bf16_losses_differ_from_one_process_by_rounding(all_found):
    assert all_found[0]["parity"]["tokens, bf16"]["loss"] < 2e-3


@pytest.mark.slow
def test_a_split_that_adapts_within_bounds_changes_no_weight(all_found):
    adaptive = all_found[0]["adaptive"]
    check(adaptive["tokens"])
    assert len(adaptive["splits"]) > 1
    assert all(2 <= first <= 15 and second <= 12 for first, second in adaptive["splits"])


@pytest.mark.slow
def test_accumulated_gradients_of_counted_tokens_tell_of_the_noise_and_count_as_progress(all_found):
    assert all_found[0]["adaptive"]["progress"] == pytest.approx(20 * 7)
    assert math.isfinite(all_found[0]["adaptive"]["noise"])


@pytest.mark.slow
def test_samples_grouped_by_length_come_once_and_padding_counts_for_nothing(all_found):
    steps = list(zip(*(told["by_length"]["seen"] for told in all_found), strict=True))
    trained = sorted(tuple(row) for step in steps for rank in step for row in rank)
    assert trained == sorted(tuple(row.tolist()) for row in Sentences().rows)
    assert len(trained) == NUM_SAMPLES
    assert [len(rank) for rank in steps[-1]] == [1, 0]


@pytest.mark.slow
def test_a_trainer_of_another_kind_trains_on_when_it_is_told_to_train_again(all_found):
    first, second = (all_found[0]["again"][name] for name in ("first", "second"))
    assert len(first) == len(second) == 3
    assert second[0] < first[0]


def test_a_run_saved_in_mid_epoch_ends_with_the_same_weights_in_a_fresh_process(found):
    assert found["resuming"] == {"groups": 0.0}  # dropout and all


@pytest.mark.slow
def test_a_run_saved_at_any_step_ends_with_the_same_weights_in_a_fresh_process(all_found):
    assert all_found[0]["resuming"] == {"each batch": 0.0, "between epochs": 0.0}


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("growing", "max_batch_size=64: Trainer counts all steps"),
        ("auto_find_batch_size", "auto_find_batch_size=True makes batches smaller on all ranks"),
        ("split_batches", "split_batches=True makes per_device_train_batch_size the total"),
        ("dispatch_batches", "dispatch_batches=True lets the first rank read whole batches"),
        ("batch_rebalance", "train_sampling_strategy='batch_rebalance' cuts the ranks' batches by itself"),
        ("another total", "sum to 24, and per_device_train_batch_size=8 on 2 processes makes 16: let the two agree"),
        ("not whole", "local_batches[0]=12.0 must be a whole number of at least 1"),
        ("stream", "the train dataset is an IterableDataset"),
        ("evaluated first", "trainer.evaluate() or predict() has prepared it before train()"),
        ("other batches", "get_train_dataloader() returns batches of 16, and per_device_train_batch_size=8"),
        ("broken", "no such input cannikin: this was a trial before training, in eval mode"),
        ("packed", "where the samples of a batch are packed into one row, pass item_count="),
        ("no labels", "is 0.0, which does not tell how it is made: put samples with labels first"),
        ("tokens of one's own", "average_tokens_across_devices=False makes each rank's loss a mean over its own"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_a_sentence(found, what, sentence):
    assert sentence in found["refusals"][what]


def test_on_one_process_it_is_a_plain_trainer_and_one_is_told(tmp_path: Path):
    try:
        with pytest.warns(RuntimeWarning, match="nothing to split on one process"):
            trainer = HeteroTrainer(
                model=Classifier(), args=arguments(tmp_path, max_steps=2), train_dataset=Points(), local_bounds=(1, 8)
            )
        trainer.train()
        assert trainer.engine is None
        assert trainer.state.global_step == 2
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
