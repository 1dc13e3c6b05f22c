"""What a sharded module's ranks measure of themselves is true, and what cannot be measured is refused in a sentence."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import sharded_measuring_cases as cases
import torch
from ranks import run_ranks
from sharded_measuring_cases import REFUSALS
from told import Raised, run_cases, values

SCRIPTS = {"one split": [(48, 24)], "splits that change": [(48, 24), (16, 56), (36, 36)]}
NOISE = {
    f"{kind}, {name}, seed {seed}": partial(cases.measure_noise, seed=seed, script=script, kind=kind, num_epochs=20)
    for kind, num_seeds in (("sgd", 1), ("adamw", 2))
    for seed in range(num_seeds)
    for name, script in SCRIPTS.items()
}
NORMS = {"norms, float64": torch.float64, "norms, float32": torch.float32}


@pytest.fixture(scope="module")
def two():
    norms = {name: partial(cases.measure_norms, num_replicas=1, dtype=dtype) for name, dtype in NORMS.items()}
    times = {
        "times": cases.measure_times,
        "times, kept whole": partial(cases.measure_times, reshard_after_forward=False),
    }
    refusals = {name: partial(cases.refuse, name=name) for name in REFUSALS}
    settling = {
        name: partial(cases.settle, samples_s=samples_s, total=total, num_steps=40)
        for name, (samples_s, total, _) in SETTLING.items()
    }
    others = {
        "names": cases.missing_names,
        "snapshot": cases.snapshot,
        "memory": cases.settle_in_little_memory,
        "statistics": cases.average_statistics,
        "unused": cases.adapt_with_an_unused_layer,
        "eval mode": partial(cases.train_in_eval_mode, is_half=False),
        "half of a step in eval mode": partial(cases.train_in_eval_mode, is_half=True),
        **{name: partial(cases.set_late, name=name) for name in cases.LATE},
    }
    return run_ranks(run_cases, 2, {**others, **norms, **times, **settling, **refusals}, timeout_s=100)


@pytest.fixture(scope="module")
def noisy():
    return run_ranks(run_cases, 2, NOISE, timeout_s=100)


@pytest.fixture(scope="module")
def four():
    norms = {
        f"{num_replicas} replicas, {name}": partial(cases.measure_norms, num_replicas=num_replicas, dtype=dtype)
        for num_replicas in (1, 2)
        for name, dtype in NORMS.items()
    }
    return run_ranks(run_cases, 4, norms, timeout_s=100)


def check_norms(told, name: str) -> None:
    found = values(told, name)
    recorded, num_steps = found[0], len(found[0].recorded_total)
    assert num_steps >= 20
    precision = 1e-9 if "float64" in name else 1e-4
    for number, local in enumerate(recorded.recorded_local):
        assert local == pytest.approx([rank.local[number] for rank in found], rel=precision)
    assert recorded.recorded_total == pytest.approx(recorded.total[:num_steps], rel=precision)


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_those_of_each_rank_s_own_gradient_and_of_the_whole_one(two, name):
    check_norms(two, name)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_replicas_of_a_shard_count_once_in_the_norm_of_the_whole_gradient(four, name, num_replicas):
    check_norms(four, f"{num_replicas} replicas, {name}")


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_noise_scale_of_sharded_gradients_agrees_with_that_of_per_sample_gradients(noisy, kind):
    found = [values(noisy, name)[0] for name in NOISE if name.startswith(kind)]
    assert all(noise.found.num_steps > 60 for noise in found)
    limits = [noise.found.limits for noise in found]
    # Under Adam each rank has the noise of its own half of the parameters, in 77 steps of 107.
    widest = 2 if kind == "sgd" else 4
    assert all(0 < low < high < widest * low for low, high in limits), "they say something"
    # The limits are to hold in nine cases of ten, and there are four, of SGD two.
    held = sum(low <= noise.true <= high for noise, (low, high) in zip(found, limits, strict=True))
    assert held >= len(found) - 1
    errors = [math.log(noise.found.noise_scale / noise.true) for noise in found]
    assert abs(sum(errors) / len(errors)) < 0.1, "no common direction"


def test_segments_begin_where_ranks_wait_for_each_other(two):
    layers = values(two, "times")[0].window.layers
    # The optimizer; the outermost layer's own; two blocks. Backward: the head; two blocks; nothing is left.
    assert layers.num_forward == 4
    assert layers.compute_s.shape[-1] == 8
    gathers, reduces = (~np.isnan(times).all(axis=(0, 1)) for times in (layers.gather_s, layers.reduce_s))
    assert gathers.tolist() == [False, True, True, True, False, True, True, False]
    assert reduces.tolist() == [False, False, False, False, False, True, True, True]
    assert not layers.ahead
    assert layers.in_flight == 0


def test_a_module_that_is_not_resharded_is_gathered_in_forward_alone(two):
    layers = values(two, "times, kept whole")[0].window.layers
    assert layers.num_forward == 4
    gathers, reduces = (~np.isnan(times).all(axis=(0, 1)) for times in (layers.gather_s, layers.reduce_s))
    assert gathers.tolist() == [False, True, True, True, False, False, False]
    assert reduces.tolist() == [False, False, False, False, True, True, True]


def test_compute_is_each_rank_s_own_though_ranks_wait_for_each_other_at_every_layer(two):
    window = values(two, "times")[0].window
    assert window.valid.any(axis=0).all()
    compute = np.nanmedian(window.layers.compute_s, axis=0)
    slow = (compute[1] - compute[0])[[2, 3, 5, 6]]  # blocks, forward and backward, of 4 samples
    assert slow == pytest.approx([8e-3, 16e-3, 16e-3, 8e-3], rel=0.5)
    wall = np.median(window.step_s, axis=0)
    assert wall[0] == pytest.approx(wall[1], rel=0.2), "they take each step together"
    assert window.before_s + window.ready_s[..., -1] == pytest.approx(window.layers.compute_s.sum(axis=-1))


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_weighted_or_measured_is_refused_in_one_sentence(two, name):
    for told in two:
        assert isinstance(told[name], Raised), "it was not refused"
        assert told[name].kind == "InvalidInputError", told[name].trace
        assert REFUSALS[name].words in told[name].text
        assert told[name].text.count(". ") == 0


@pytest.mark.parametrize("name", cases.LATE)
def test_what_would_be_refused_is_noticed_after_attaching_too(two, name):
    assert all(isinstance(told[name], Raised) and name in told[name].text for told in two)


@pytest.mark.parametrize("name", ["eval mode", "half of a step in eval mode"])
def test_gradients_of_a_forward_in_eval_mode_are_not_trained_on(two, name):
    assert all("gradients of a forward in eval mode" in told[name].text for told in two)


def test_a_layer_that_no_forward_uses_does_not_keep_the_split_from_adapting(two):
    fast, slow = values(two, "unused")[0]
    assert fast > slow


def test_what_is_read_of_torch_s_own_groups_is_there(two):
    """Nothing public tells it. Where torch renames something, this says what to look for (`sharded.groups_of`)."""
    for missing in values(two, "names"):
        assert missing == []


def test_one_rank_alone_learns_the_noise_from_steps_that_follow_each_other():
    (told,) = run_ranks(run_cases, 1, {"alone": cases.train_alone}, timeout_s=60)
    (found,) = values([told], "alone")
    assert found.num_dots >= 10
    assert found.products == pytest.approx(found.expected, rel=1e-6)


def test_a_run_goes_on_from_a_distributed_checkpoint_on_fewer_ranks_with_what_it_had_learned(tmp_path):
    """Each sample counts once, though steps after the checkpoint are lost; fast is fast, from the first plan on."""
    train = {"train": partial(cases.train_part, folder=str(tmp_path), samples_s=[5e-4, 2e-3, 2e-3], stop_at=30)}
    before = values(run_ranks(run_cases, 3, train, timeout_s=60), "train")
    resume = {"resume": partial(cases.train_part, folder=str(tmp_path), samples_s=[5e-4, 2e-3], stop_at=None)}
    after = values(run_ranks(run_cases, 2, resume, timeout_s=60), "resume")
    counted = [number for part in before for step in part.seen[:30] for number in step]
    counted += [number for part in after for step in part.seen for number in step]
    assert sorted(counted) == list(range(900))
    assert all(part.weights == before[0].weights for part in after)
    assert before[0].first == (6, 6, 6)
    fast, slow = after[0].first
    assert fast >= 2 * slow, "the first plan knows the speeds"


def test_a_snapshot_of_a_sharded_module_is_refused_and_names_what_saves_it(two):
    for told in two:
        assert told["snapshot"].kind == "InvalidInputError"
        assert "torch.distributed.checkpoint" in told["snapshot"].text


SETTLING = {
    "alike layers, ranks of speed 1 and 1/3": ([[1e-3, 1e-3], [3e-3, 3e-3]], 32, (22, 26)),
    # A step takes max(b, 2 c) + max(b, 4 c), which is least at 28.8 and 7.2; at equal compute, 27 and 9, 9% more.
    "one layer half as fast, the other a quarter": ([[1e-3, 1e-3], [2e-3, 4e-3]], 36, (28, 31)),
}


@pytest.mark.parametrize("name", SETTLING)
def test_an_adaptive_run_settles_near_the_best_split(two, name):
    low, high = SETTLING[name][2]
    for split in values(two, name):
        assert low <= split[0] <= high


def test_a_rank_is_given_no_more_than_its_memory_holds(two):
    for fast, slow in values(two, "memory"):
        assert 8 <= fast <= 10, "else it would have twelve or more"
        assert fast + slow == 16


def test_running_statistics_are_the_same_on_all_ranks(two):
    zero, one = values(two, "statistics")
    assert zero == one
    assert any(zero)
