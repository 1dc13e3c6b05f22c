"""Under Adam the norms, and with them the noise scale, are those of the gradient that Adam steps by."""

from __future__ import annotations

import math
from functools import partial

import adam_cases as cases
import pytest
import torch
from adam_cases import NormCase
from ranks import run_ranks
from told import run_cases, values

NORMS = {
    "AdamW": NormCase(),
    "Adam": NormCase(kind=torch.optim.Adam),
    "AdamW, weighted by the loss": NormCase(weighting="loss"),
    "AdamW, its state loaded in another order": NormCase(reload_at=15),
}
SCRIPTS = {"one split": [(48, 24)], "splits that change": [(48, 24), (16, 56), (36, 36)]}
NOISE = {
    f"noise, {name}, seed {seed}": partial(cases.measure_adam_noise, seed=seed, script=script, num_epochs=20)
    for seed in range(5)
    for name, script in SCRIPTS.items()
}


@pytest.fixture(scope="module")
def told():
    norms = {name: partial(cases.measure_norms, case=case) for name, case in NORMS.items()}
    return run_ranks(run_cases, 2, {**norms, **NOISE}, timeout_s=100)


@pytest.mark.parametrize("name", NORMS)
def test_the_norms_in_the_records_are_those_of_the_gradient_over_the_root_of_v_before_the_step(told, name):
    zero, one = values(told, name)
    num_steps = len(zero.recorded_total)
    assert num_steps >= 40
    assert zero.least > 1e-4, "no v so small that it would be raised"
    assert all(math.isnan(norm) for norms in zero.recorded_local[:30] for norm in norms)
    assert all(math.isnan(norm) for norm in zero.recorded_total[:30])
    expected = zip(zero.local[30:num_steps], one.local[30:num_steps], strict=True)
    for recorded, local in zip(zero.recorded_local[30:], expected, strict=True):
        assert recorded == pytest.approx(local, rel=1e-6)  # they travel as float32
    assert zero.recorded_total[30:] == pytest.approx(zero.total[30:num_steps], rel=1e-6)
    assert zero.total == pytest.approx(one.total, rel=1e-12, nan_ok=True)


def test_the_noise_scale_under_adamw_agrees_with_the_one_of_preconditioned_per_sample_gradients(told):
    found = [values(told, name)[0] for name in NOISE]
    assert all(noise.found.num_steps > 60 for noise in found)
    limits = [noise.found.limits for noise in found]
    assert all(0 < low < high < 2 * low for low, high in limits), "they say something"
    # The limits are to hold in nine cases of ten.
    assert sum(low <= noise.true <= high for noise, (low, high) in zip(found, limits, strict=True)) >= 8
    errors = [math.log(noise.found.noise_scale / noise.true) for noise in found]
    assert abs(sum(errors) / len(errors)) < 0.1, "no common direction"
