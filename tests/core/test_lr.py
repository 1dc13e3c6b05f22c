"""Learning-rate rules against their formulas."""

from __future__ import annotations

import math

import pytest

from cannikin.core.lr import LR_RULES, lr_factor
from cannikin.core.noise_tracker import NoiseTracker
from cannikin.errors import InvalidInputError


def test_adascale_is_the_gain_of_signal_and_noise() -> None:
    tracker = NoiseTracker(initial_batch=32)
    for _ in range(5):
        tracker.update([32, 32], [3.0, 3.0], 2.0)
    noise, signal = tracker.noise_trace, tracker.signal_sqnorm
    gain = (noise / 32 + signal) / (noise / 128 + signal)
    factor = lr_factor("adascale", 128, initial_batch=32, gain=float(tracker.gain(128)))
    assert factor == pytest.approx(gain, rel=1e-12)
    assert lr_factor("adamscale", 128, initial_batch=32, gain=gain) == pytest.approx(math.sqrt(gain))


@pytest.mark.parametrize(("rule", "want"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0), ("legw", 2.0)])
def test_rules_of_the_batch_alone_ignore_the_gain(rule: str, want: float) -> None:
    assert lr_factor(rule, 128, initial_batch=32, gain=3.0) == want
    assert lr_factor(rule, 128, initial_batch=32, gain=1.0) == want


def test_legw_warms_up_over_a_length_that_grows_with_the_batch() -> None:
    factors = [
        lr_factor("legw", 128, initial_batch=32, gain=1.0, progress=p, warmup_progress=100) for p in (0, 200, 400, 800)
    ]
    assert factors == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("rule", LR_RULES)
def test_no_rule_changes_the_rate_at_the_initial_batch(rule: str) -> None:
    assert lr_factor(rule, 32, initial_batch=32, gain=1.0) == 1.0


def test_an_unknown_rule_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="adascale, adamscale, linear"):
        lr_factor("quadratic", 64, initial_batch=32, gain=1.0)
