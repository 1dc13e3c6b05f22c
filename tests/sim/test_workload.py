"""What steps are worth, and the gradient norms that a planner gets to see."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cannikin.core.noise.estimate import noise_scale
from cannikin.errors import InvalidInputError
from cannikin.sim.catalog import workload_names
from cannikin.sim.workload import find_workload, sample_sqnorms


@pytest.mark.parametrize("name", workload_names())
def test_a_larger_batch_makes_more_progress_a_step_and_less_a_sample(name):
    workload = find_workload(name)
    totals = np.array([16, 64, 256, 1024, 4096])
    for progress in (0.0, workload.target_progress):
        gains = workload.gains(totals, progress)
        assert (np.diff(gains) > 0).all()
        assert (np.diff(gains / totals) < 0).all()


def test_a_batch_beyond_the_noise_scale_costs_epochs():
    workload = find_workload("cifar10")
    signal, noise = workload.moments(0.0)
    phi = noise / signal
    small, large = workload.gains([1.0, 1000 * phi], 0.0) / np.array([1.0, 1000 * phi])
    assert small / large == pytest.approx((phi + 1000 * phi) / (phi + 1), rel=1e-6)


@pytest.mark.parametrize("name", workload_names())
def test_the_target_is_reached_where_the_measured_run_reaches_it(name):
    workload = find_workload(name)
    sign = 1 if workload.spec.higher_is_better else -1
    assert sign * workload.metric(workload.target_progress) >= sign * workload.target
    epochs = workload.target_progress / workload.epoch_progress
    assert 1 < epochs < 90


def test_another_target_is_reached_earlier_later_or_never():
    paper = find_workload("imagenet").target_progress
    assert find_workload("imagenet", 0.6).target_progress < paper
    assert paper < find_workload("imagenet", 0.755).target_progress < math.inf
    assert find_workload("imagenet", 0.9).target_progress == math.inf
    assert find_workload("deepspeech2", 60.0).target_progress < find_workload("deepspeech2").target_progress
    with pytest.raises(InvalidInputError, match="target=nan: give a finite top-1 accuracy"):
        find_workload("imagenet", math.nan)


def test_the_norms_tell_the_noise_scale_without_bias():
    batches = np.tile([4, 12, 48], (20_000, 1))
    local, total = sample_sqnorms(batches, 2.0, 300.0, np.random.default_rng(0))
    estimates = [noise_scale(b, x, float(y)) for b, x, y in zip(batches[:4000], local, total, strict=False)]
    assert np.mean([e.signal_sqnorm for e in estimates]) == pytest.approx(2.0, rel=0.05)
    assert np.mean([e.noise_trace for e in estimates]) == pytest.approx(300.0, rel=0.02)
    assert local.mean(axis=0) == pytest.approx(2.0 + 300.0 / np.array([4, 12, 48]), rel=0.02)
    assert total.mean() == pytest.approx(2.0 + 300.0 / 64, rel=0.02)
