"""A loss that is a sum over the local batch is told from a mean by the norms of unequal batches."""

from __future__ import annotations

import numpy as np
import pytest

from cannikin.core.gone_wrong import SumLoss
from cannikin.core.values import StepWindow


def window(power: float, split: tuple[int, ...], *, signal: float, seed: int = 0, steps: int = 30) -> StepWindow:
    """Norms of made-up gradients in 50 dimensions, each times its local batch to this power."""
    rng, n = np.random.default_rng(seed), len(split)
    batches = np.tile(split, (steps, 1))
    gradients = signal + rng.normal(size=(steps, n, 50)) / np.sqrt(batches)[..., None]
    times = np.ones((steps, n, 1))
    return StepWindow(
        first_step=0,
        local_batches=batches,
        before_s=times[..., 0],
        ready_s=times,
        done_s=times,
        local_sqnorm=(gradients**2).sum(axis=-1) * batches ** (2 * power),
        global_sqnorm=np.ones(steps),
    )


@pytest.mark.parametrize("signal", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("split", [(20, 12), (32, 16, 8)])
def test_a_sum_is_noticed_once_whatever_the_noise(split, signal):
    notices = SumLoss()
    first, second = (notices.observe(window(1.0, split, signal=signal, seed=seed)) for seed in (0, 1))
    assert 'weighting="none"' in first
    assert second is None


@pytest.mark.parametrize("signal", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("split", [(20, 12), (32, 16, 8), (17, 16), (16, 16)])
def test_a_mean_is_never_taken_for_a_sum(split, signal):
    notices = SumLoss()
    assert [notices.observe(window(0.0, split, signal=signal, seed=seed)) for seed in range(30)] == [None] * 30


def test_equal_batches_and_norms_that_were_not_taken_say_nothing():
    notices, untaken = SumLoss(), window(1.0, (24, 8), signal=1.0)
    untaken.local_sqnorm[:, 1] = np.nan
    assert notices.observe(untaken) is None
    assert notices.observe(window(1.0, (16, 16), signal=1.0)) is None
    assert notices.observe(window(1.0, (24, 8), signal=1.0)) is not None
