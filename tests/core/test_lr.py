"""Learning-rate rules against their formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import pytest

from cannikin.core.lr import LR_RULES, Legw, LrRule, rule_name
from cannikin.core.noise.tracker import NoiseTracker


def test_adascale_is_the_gain_of_signal_and_noise() -> None:
    tracker = NoiseTracker(initial_batch=32)
    for _ in range(5):
        tracker.update([32, 32], [3.0, 3.0], 2.0)
    noise, signal = tracker.noise_trace, tracker.signal_sqnorm
    gain = (noise / 32 + signal) / (noise / 128 + signal)
    factor = LR_RULES["adascale"](128, initial_batch=32, gain=float(tracker.gain(128)), progress=0.0)
    assert factor == pytest.approx(gain, rel=1e-12)
    assert LR_RULES["adamscale"](128, initial_batch=32, gain=gain, progress=0.0) == pytest.approx(math.sqrt(gain))
    summary = tracker.summary()
    assert summary is not None
    assert summary.gain(128, 32) == pytest.approx(gain, rel=1e-12)


@pytest.mark.parametrize(("rule", "want"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0), ("legw", 2.0)])
def test_rules_of_the_batch_alone_ignore_the_gain(rule: str, want: float) -> None:
    assert LR_RULES[rule](128, initial_batch=32, gain=3.0, progress=0.0) == want
    assert LR_RULES[rule](128, initial_batch=32, gain=1.0, progress=0.0) == want


def test_legw_warms_up_over_a_length_that_grows_with_the_batch() -> None:
    rule = Legw(warmup_steps=100)
    factors = [rule(128, initial_batch=32, gain=1.0, progress=p) for p in (0, 200, 400, 800)]
    assert factors == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("rule", LR_RULES)
def test_no_rule_changes_the_rate_at_the_initial_batch(rule: str) -> None:
    assert LR_RULES[rule](32, initial_batch=32, gain=1.0, progress=0.0) == 1.0


def cube_root(total_batch: float, /, *, initial_batch: float, gain: float, progress: float) -> float:
    return (total_batch / initial_batch) ** (1 / 3)


@dataclass(frozen=True)
class Power:
    exponent: float

    def __call__(self, total_batch: float, /, *, initial_batch: float, gain: float, progress: float) -> float:
        return (total_batch / initial_batch) ** self.exponent


class Plain:
    def __call__(self, total_batch: float, /, *, initial_batch: float, gain: float, progress: float) -> float:
        return gain


OWN_RULES: list[tuple[LrRule, str]] = [
    (cube_root, "cube_root"),
    (Power(0.25), "Power(exponent=0.25)"),
    (Plain(), "Plain with {}"),
    (Legw(warmup_steps=5), "Legw(warmup_steps=5)"),
]


@pytest.mark.parametrize(("rule", "name"), OWN_RULES)
def test_a_rule_of_ones_own_has_a_name_that_is_no_address(rule: LrRule, name: str) -> None:
    assert rule_name(rule) == name


def test_a_function_and_a_dataclass_are_rules() -> None:
    rules: list[LrRule] = [cube_root, Power(1 / 3)]
    factors = [rule(216, initial_batch=27, gain=5.0, progress=3.0) for rule in rules]
    assert factors == pytest.approx([2.0, 2.0])


def test_equal_dataclasses_have_one_name_and_unlike_ones_two() -> None:
    assert rule_name(Power(0.25)) == rule_name(Power(0.25)) != rule_name(Power(0.5))


def test_objects_and_partial_functions_of_other_parameters_have_other_names() -> None:
    small, large, again = Plain(), Plain(), Plain()
    small.factor, large.factor, again.factor = 1.0, 3.0, 1.0  # type: ignore[attr-defined]
    assert rule_name(small) == rule_name(again) != rule_name(large)
    halves: list[LrRule] = [partial(cube_root, gain=0.5), partial(cube_root, gain=0.5), partial(cube_root, gain=2.0)]
    assert rule_name(halves[0]) == rule_name(halves[1]) != rule_name(halves[2])


def test_the_rules_of_ours_go_by_their_names() -> None:
    assert [rule_name(rule) for rule in LR_RULES.values()] == list(LR_RULES)
    assert rule_name(Legw()) == "legw"
