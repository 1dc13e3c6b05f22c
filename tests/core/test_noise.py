"""Gradient noise scale: identities, a known Gaussian, the paper's matrices, and the tracker's laws."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from cannikin.core.noise.estimate import ESTIMATORS, fieller_limits, noise_scale, whole_norms
from cannikin.core.noise.tracker import NoiseTracker
from cannikin.errors import InvalidInputError, StateError

SPLITS = [(4, 60), (8, 16, 40), (4, 4, 8, 48), (1, 2, 3, 20, 38), (1, 1, 2, 4, 8, 48)]
HOWS = [("pooled", 0.0), ("pooled", 0.5), ("pooled", 1.0), ("theorem1", 0.5), ("mean", 0.5)]
SIGNAL, NOISE = 0.5, 20.0

unhurried = settings(deadline=None)  # a busy machine is no failure
norms = st.floats(0, 1e3)
groups = st.lists(st.tuples(st.integers(1, 500), norms), min_size=2, max_size=6).map(
    lambda pairs: tuple(np.array(column) for column in zip(*pairs, strict=True))
)


def norms_of(samples, split):
    """|g_i|^2 [steps, n] and |g|^2 [steps] of per-sample gradients [steps, B, d]."""
    starts = np.cumsum(split) - np.array(split)
    means = np.add.reduceat(samples, starts, axis=1) / np.array(split)[:, None]
    return (means**2).sum(axis=2), (samples.mean(axis=1) ** 2).sum(axis=1)


def gaussian_norms(split, num_steps, rng, signal=SIGNAL, noise=NOISE):
    """Norms of steps whose per-sample gradients are normal: |mean|^2 = `signal`, trace `noise`, unequal axes."""
    variances = noise / np.arange(1, 11) / (1 / np.arange(1, 11)).sum()
    batches = np.array(split)[:, None]
    means = rng.normal(size=(num_steps, len(split), 10)) * np.sqrt(variances / batches)
    means += math.sqrt(signal / 10)
    total = (means * batches).sum(axis=1) / sum(split)
    return (means**2).sum(axis=2), (total**2).sum(axis=1)


def heavy_norms(split, num_steps, rng):
    """As above with noise ten times as large in one sample of a hundred; tr Sigma is 8 (.99 .09 + .01 9)."""
    samples = rng.normal(size=(num_steps, sum(split), 8))
    samples *= np.where(rng.random((num_steps, sum(split), 1)) < 0.01, 3.0, 0.3)
    return norms_of(samples + 0.1, split)


def feed(tracker, split, local, whole):
    """All steps into the tracker; their raw (S, G), [steps, 2]."""
    steps = [tracker.update(split, *step) for step in zip(local, whole, strict=True)]
    return np.array([(step.noise_trace, step.signal_sqnorm) for step in steps])


def both(estimate):
    return [estimate.noise_trace, estimate.signal_sqnorm]


# One step


@unhurried
@given(groups, norms)
def test_tail_zero_is_the_analysis_of_variance(group, whole):
    batches, local = group
    estimate = noise_scale(batches, local, whole, tail=0)
    noise = (batches * (local - whole)).sum() / (len(batches) - 1)
    assert both(estimate) == pytest.approx([noise, whole - noise / batches.sum()], rel=1e-9, abs=1e-6)


@unhurried
@given(groups, norms)
def test_tail_one_keeps_only_products_between_groups(group, whole):
    batches, local = group
    estimate = noise_scale(batches, local, whole, tail=1)
    squares = (batches / batches.sum()) ** 2
    signal = (whole - (squares * local).sum()) / (1 - squares.sum())
    assert both(estimate) == pytest.approx([batches.sum() * (whole - signal), signal], rel=1e-6, abs=1e-3)


@unhurried
@given(groups, norms, st.sampled_from(HOWS), st.randoms())
def test_the_order_of_the_groups_does_not_matter(group, whole, how, random):
    order = random.sample(range(len(group[0])), len(group[0]))
    shuffled = noise_scale(group[0][order], group[1][order], whole, *how)
    assert both(shuffled) == pytest.approx(both(noise_scale(*group, whole, *how)), rel=1e-6, abs=1e-3)


@unhurried
@given(groups, norms, st.sampled_from(HOWS), st.floats(0.1, 10))
def test_scaled_gradients_scale_signal_and_noise_by_the_square(group, whole, how, factor):
    scaled = noise_scale(group[0], group[1] * factor**2, whole * factor**2, *how)
    plain = noise_scale(*group, whole, *how)
    assert both(scaled) == pytest.approx(np.array(both(plain)) * factor**2, rel=1e-6, abs=1e-3)
    if plain.signal_sqnorm > 1 and plain.noise_trace > 1:
        assert scaled.noise_scale == pytest.approx(plain.noise_scale, rel=1e-6)


@unhurried
@given(st.integers(1, 100), st.lists(norms, min_size=2, max_size=6), norms, st.sampled_from(HOWS))
def test_equal_batches_give_adaptdl_s_estimate_whatever_the_estimator(batch, local, whole, how):
    count = len(local)
    signal = (count * whole - np.mean(local)) / (count - 1)
    noise = batch * count * (np.mean(local) - whole) / (count - 1)
    estimate = noise_scale([batch] * count, local, whole, *how)
    assert both(estimate) == pytest.approx([noise, signal], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("split", SPLITS)
def test_theorem1_is_the_paper_s_as_printed(split):
    rng, total, n = np.random.default_rng(0), sum(split), len(split)
    local, whole = rng.random(n) + 1, 0.9
    a_g, a_s = np.empty((n, n)), np.empty((n, n))
    for i, b_i in enumerate(split):
        for j, b_j in enumerate(split):
            rest = (total - b_i) * (total - b_j)
            a_g[i, j] = (total**2 - b_i**2 - b_j**2) / (total * rest)
            a_s[i, j] = b_i * b_j * (total - b_i - b_j) / rest
        a_g[i, i] = (total + 2 * b_i) / (total**2 - total * b_i)
        a_s[i, i] = total * b_i / (total - b_i)
    w_g, w_s = (np.ones(n) @ np.linalg.inv(a) / np.linalg.inv(a).sum() for a in (a_g, a_s))
    signal = sum(w * (total * whole - b * x) / (total - b) for w, b, x in zip(w_g, split, local, strict=True))
    noise = sum(w * b * total * (x - whole) / (total - b) for w, b, x in zip(w_s, split, local, strict=True))
    assert both(noise_scale(split, local, whole, "theorem1")) == pytest.approx([noise, signal])


@pytest.mark.parametrize("split", SPLITS)
def test_every_estimator_is_unbiased_on_a_known_gaussian(split):
    local, whole = gaussian_norms(split, 2000, np.random.default_rng(1))
    for how in HOWS:
        steps = np.array([both(noise_scale(split, *step, *how)) for step in zip(local, whole, strict=True)])
        errors = (steps.mean(axis=0) - [NOISE, SIGNAL]) / (steps.std(axis=0) / 2000**0.5)
        assert np.abs(errors).max() < 4, how


def shard_norms(split, num_steps, rng, num_replicas=1):
    """|g_i|^2 and |g|^2 on each rank's own shard of the coordinates, [steps, n]; replicas have their part of both."""
    num_shards = len(split) // num_replicas
    variances = NOISE / np.arange(1, 11) / (1 / np.arange(1, 11)).sum()
    batches = np.array(split)[:, None]
    means = rng.normal(size=(num_steps, len(split), 10)) * np.sqrt(variances / batches) + math.sqrt(SIGNAL / 10)
    total = (means * batches).sum(axis=1) / sum(split)
    shards = np.array_split(np.arange(10), num_shards)
    own = [(means[:, i, shards[i % num_shards]] ** 2).sum(axis=1) / num_replicas for i in range(len(split))]
    of_sum = [(total[:, shards[i % num_shards]] ** 2).sum(axis=1) / num_replicas for i in range(len(split))]
    return np.stack(own, axis=1), np.stack(of_sum, axis=1)


@pytest.mark.parametrize(("split", "num_replicas"), [((4, 60), 1), ((8, 16, 40), 1), ((4, 4, 8, 48), 2)])
def test_norms_of_shards_tell_the_noise_without_bias_to_every_estimator(split, num_replicas):
    own, shards = shard_norms(split, 20_000, np.random.default_rng(0), num_replicas)
    local, whole = whole_norms(np.array(split), own, shards), shards.sum(axis=1)
    for how in HOWS:
        first = both(noise_scale(split, np.maximum(local[0], 0), whole[0], *how))
        assert first == pytest.approx(both(noise_scale(split, np.maximum(local[0], 0), whole[0])), rel=1e-9)
    noise = (np.array(split) * (local - whole[:, None])).sum(axis=1) / (len(split) - 1)
    assert noise.mean() == pytest.approx(NOISE, rel=0.02)
    assert (whole - noise / sum(split)).mean() == pytest.approx(SIGNAL, rel=0.05)


def test_norms_of_shards_never_make_the_tracker_see_disagreement():
    split, tracker = (4, 60), NoiseTracker(initial_batch=64)
    own, shards = shard_norms(split, 500, np.random.default_rng(1))
    local = whole_norms(np.array(split), own, shards)
    kept = (local >= 0).all(axis=1)
    feed(tracker, split, local[kept], shards.sum(axis=1)[kept])
    assert tracker.flags == ()
    assert tracker.blend(split) == 0.5, "nothing is learned from rounding"


def test_a_rank_without_a_norm_leaves_the_step_without_one():
    assert np.isnan(whole_norms([8, 24], [math.nan, 1.0], [1.0, 0.5])).all()


def test_values_are_raw_and_the_scale_is_infinite_without_a_positive_signal():
    estimate = noise_scale([2, 62], [9.0, 0.1], 0.05, tail=1)
    assert estimate.signal_sqnorm < 0
    assert estimate.noise_scale == math.inf
    assert noise_scale([8, 8], [1.0, 1.0], 2.0).noise_trace < 0


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (([8], [1.0], 1.0), "micro-batch"),
        (([], [], 1.0), "micro-batch"),
        (([8, 8], [1.0], 1.0), "shape"),
        (([[8, 8]], [[1.0, 1.0]], 1.0), "shape"),
        (([8, 0], [1.0, 1.0], 1.0), "at least 1"),
        (([8, math.nan], [1.0, 1.0], 1.0), "at least 1"),
        (([8, 8], [1.0, math.nan], 1.0), "finite"),
        (([8, 8], [1.0, 1.0], math.inf), "finite"),
        (([8, 8], [1.0, -1.0], 1.0), "negative"),
        (([8, 8], [1.0, 1.0], 1.0, "best"), "pooled, theorem1, mean"),
        (([8, 8], [1.0, 1.0], 1.0, "pooled", math.inf), "tail"),
    ],
)
def test_bad_input_says_what_to_do(arguments, advice):
    with pytest.raises(InvalidInputError, match=advice):
        noise_scale(*arguments)


def test_the_known_estimators_are_listed():
    assert {how for how, _ in HOWS} == set(ESTIMATORS)


# The tracker


@pytest.mark.parametrize("split", SPLITS)
def test_the_tracker_is_unbiased_and_ends_near_the_truth(split):
    tracker = NoiseTracker(initial_batch=64)
    steps = feed(tracker, split, *gaussian_norms(split, 3000, np.random.default_rng(2)))
    errors = (steps.mean(axis=0) - [NOISE, SIGNAL]) / (steps.std(axis=0) / 3000**0.5)
    assert np.abs(errors).max() < 4
    assert tracker.noise_trace == pytest.approx(NOISE, rel=0.1)
    assert tracker.limits[0] < tracker.noise_scale < tracker.limits[1]
    assert tracker.flags == ()


def test_light_tails_choose_the_analysis_of_variance_and_heavy_tails_the_other_end():
    rng, split = np.random.default_rng(3), (4, 8, 20)
    light, heavy = NoiseTracker(initial_batch=32), NoiseTracker(initial_batch=32)
    feed(light, split, *gaussian_norms(split, 2000, rng))
    feed(heavy, split, *heavy_norms(split, 2000, rng))
    assert light.blend(split) < 0.15
    assert heavy.blend(split) > 0.5


def test_the_blend_is_fixed_before_the_step_it_is_used_in():
    split, rng = (4, 8, 20), np.random.default_rng(4)
    tracker = NoiseTracker(initial_batch=32)
    for local, whole in zip(*heavy_norms(split, 200, rng), strict=True):
        t = tracker.blend(split)
        ends = [noise_scale(split, local, whole, tail=tail).noise_trace for tail in (0, 1)]
        assert tracker.update(split, local, whole).noise_trace == pytest.approx((1 - t) * ends[0] + t * ends[1])


def digits_gradients(num_trained):
    """Factors x, e of the per-sample gradients x e' of softmax regression on the digits after some steps of descent."""
    digits = load_digits()
    images, labels, weights = digits.data / 16, np.eye(10)[digits.target], np.zeros((64, 10))
    for _ in range(num_trained + 1):
        error = np.exp(images @ weights)
        error = error / error.sum(axis=1, keepdims=True) - labels
        weights -= 2.0 * images.T @ error / len(images)
    return images, error


@pytest.mark.parametrize("num_trained", [0, 200])
@pytest.mark.parametrize("split", [(4, 60), (2, 14, 48)])
def test_on_real_gradients_the_tracker_keeps_up_with_the_better_end_and_with_theorem1(num_trained, split):
    images, error = digits_gradients(num_trained)
    rng, cuts = np.random.default_rng(5), np.cumsum(split)[:-1]
    local, whole = np.empty((3000, len(split))), np.empty(3000)
    for step, picks in enumerate(rng.integers(0, len(images), (3000, 64))):
        sums = [images[part].T @ error[part] for part in np.split(picks, cuts)]
        local[step] = [(part**2).sum() / batch**2 for part, batch in zip(sums, split, strict=True)]
        whole[step] = (sum(sums) ** 2).sum() / 64**2
    tracked = feed(NoiseTracker(initial_batch=64), split, local, whole)[500:]
    deviation = {}
    for how in (HOWS[0], HOWS[2], HOWS[3]):
        steps = [both(noise_scale(split, *step, *how)) for step in zip(local[500:], whole[500:], strict=True)]
        deviation[how] = np.std(steps, axis=0)
    assert (tracked.std(axis=0) < 1.15 * np.minimum(deviation[HOWS[0]], deviation[HOWS[2]])).all()
    assert (tracked.std(axis=0) < deviation[HOWS[3]]).all()
    signal = ((images.T @ error / len(images)) ** 2).sum()
    noise = ((images**2).sum(axis=1) * (error**2).sum(axis=1)).mean() - signal
    assert (np.abs(tracked.mean(axis=0) - [noise, signal]) < 3.5 * tracked.std(axis=0) / 2500**0.5).all()


def test_per_rank_batch_norm_takes_tail_one_and_says_so():
    tracker = NoiseTracker(initial_batch=64, batch_norm=True)
    estimate = tracker.update([4, 60], [3.0, 1.0], 0.9)
    assert both(estimate) == pytest.approx(both(noise_scale([4, 60], [3.0, 1.0], 0.9, tail=1)))
    assert tracker.flags == ("batch_norm",)
    assert tracker.blend([4, 60]) == 1


def test_a_small_group_noisier_than_theory_is_found_out():
    tracker, split = NoiseTracker(initial_batch=64), (4, 60)
    local, whole = gaussian_norms(split, 300, np.random.default_rng(6))
    local[:, 0] *= 3
    feed(tracker, split, local, whole)
    assert tracker.flags == ("disagreement",)
    assert tracker.blend((8, 56)) == 1


def test_equal_batches_are_never_flagged_and_leave_the_blend_alone():
    tracker, split = NoiseTracker(initial_batch=63), (21, 21, 21)
    local, whole = gaussian_norms(split, 500, np.random.default_rng(7))
    feed(tracker, split, local, whole)
    assert tracker.flags == ()
    assert tracker.blend((4, 60)) == 0.5


def test_a_change_of_split_keeps_the_estimate_and_the_weight_of_the_tails():
    rng, first, second = np.random.default_rng(8), (4, 8, 20), (10, 22)
    tracker = NoiseTracker(initial_batch=32)
    feed(tracker, first, *heavy_norms(first, 1500, rng))
    weights = [
        t / (1 - t) * sum(b * b for b in split) / 32 for split in (first, second) for t in [tracker.blend(split)]
    ]
    assert weights[0] == pytest.approx(weights[1])
    before, blend = tracker.noise_trace, tracker.blend(second)
    feed(tracker, second, *heavy_norms(second, 1, rng))
    assert tracker.noise_trace == pytest.approx(before, rel=0.05)
    assert tracker.blend(second) == pytest.approx(blend, abs=0.05)
    feed(tracker, second, *heavy_norms(second, 500, rng))
    assert tracker.noise_trace == pytest.approx(8 * (0.99 * 0.09 + 0.01 * 9), rel=0.15)


def test_steps_may_have_any_number_of_groups():
    tracker, rng = NoiseTracker(initial_batch=64), np.random.default_rng(9)
    for _ in range(500):
        for split in SPLITS:
            feed(tracker, split, *gaussian_norms(split, 1, rng))
    assert tracker.noise_trace == pytest.approx(NOISE, rel=0.1)
    assert tracker.limits == (0.0, math.inf)  # no two successive steps on one split, so no variance


def test_averages_decay_by_samples():
    tracker = NoiseTracker(initial_batch=32)
    first, second = tracker.update([16, 16], [3.0, 2.0], 1.0), tracker.update([32, 64], [5.0, 3.0], 2.0)
    decay = 0.999**3
    weights = np.array([0.001 * decay, 1 - decay])
    want = weights @ [both(first), both(second)] / weights.sum()
    assert [tracker.noise_trace, tracker.signal_sqnorm] == pytest.approx(want)


def test_gradients_that_shrink_are_followed_although_earlier_ones_were_larger():
    tracker, split = NoiseTracker(initial_batch=32), np.array([8, 24])
    for step in range(2001):  # as a network learns: |G|^2 falls faster than the noise
        signal, noise = 0.5 ** (step / 200), 20 * 0.5 ** (step / 400)
        tracker.update(split, signal + noise / split, signal + noise / 32)
    assert 0.2 < tracker.noise_scale / (noise / signal) < 1, "what was before still counts, but does not decide"


def test_a_change_of_size_alone_changes_nothing():
    rng, split = np.random.default_rng(15), (8, 24)
    local, whole = gaussian_norms(split, 400, rng)
    sizes = np.exp(np.linspace(0, 20, 400))
    steady, growing = NoiseTracker(initial_batch=32), NoiseTracker(initial_batch=32)
    feed(steady, split, local, whole)
    feed(growing, split, local * sizes[:, None], whole * sizes)
    assert growing.noise_scale == pytest.approx(steady.noise_scale, rel=0.05)
    assert growing.limits == pytest.approx(steady.limits, rel=0.1)


def test_a_total_below_what_the_limits_support_is_judged_by_the_estimate_and_one_above_by_the_lower_limit():
    tracker, rng = NoiseTracker(initial_batch=64), np.random.default_rng(16)
    feed(tracker, (8, 16, 40), *gaussian_norms((8, 16, 40), 30, rng))
    low, phi, totals = tracker.limits[0], tracker.noise_scale, np.array([64, 128, 256])
    shares = tracker.supported(totals, 128)
    assert shares[:2] == pytest.approx((phi + 64) / (phi + totals[:2]))
    assert shares[2] == pytest.approx(shares[1] * (low + 128) / (low + 256))


def test_where_noise_drowns_the_signal_for_certain_every_total_is_supported():
    tracker = NoiseTracker(initial_batch=64)
    for step in range(20):
        tracker.update([32, 32], [2.0 + 0.01 * (step % 2), 2.0], 0.5)  # G = 2 X - mean X_i < 0
    assert tracker.limits == (math.inf, math.inf)
    assert tracker.supported(np.array([64, 128, 256]), 128).tolist() == [1.0, 1.0, 1.0]


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    tracker = NoiseTracker(initial_batch=64)
    tracker.update([4, 60], [3.0, 1.0], 0.9)
    state = tracker.state_dict()
    assert tracker.update([4, 60], [math.nan, 1.0], 0.9) is None
    assert tracker.update([4, 60], [3.0, 1.0], math.inf) is None
    assert tracker.update([4, 60], [1e300, 1.0], 0.9) is None  # its square is not
    assert (tracker.num_steps, tracker.num_skipped) == (1, 3)
    assert {**tracker.state_dict(), "steps": state["steps"]} == state


@pytest.mark.parametrize("split", [(8, 16, 40), (32, 32), (4,) * 16])
@pytest.mark.parametrize("num_steps", [5, 10, 100])
def test_each_limit_is_on_its_side_of_the_truth_about_nineteen_times_in_twenty(split, num_steps):
    rng = np.random.default_rng(10)
    limits = []
    for _ in range(300):
        tracker = NoiseTracker(initial_batch=64)
        feed(tracker, split, *gaussian_norms(split, num_steps, rng))
        limits.append(tracker.limits)
    low, high = np.array(limits).T
    assert 0.915 <= np.mean(low <= NOISE / SIGNAL) <= 0.99
    assert 0.915 <= np.mean(high >= NOISE / SIGNAL) <= 0.99


def test_gradients_that_shrink_do_not_widen_the_limits():
    limits = []
    for shrunk in (1.0, 1e-2):
        tracker, sizes = NoiseTracker(initial_batch=64), np.geomspace(1.0, shrunk, 60)
        local, whole = gaussian_norms((32, 32), 60, np.random.default_rng(12))
        feed(tracker, (32, 32), local * sizes[:, None], whole * sizes)
        limits.append(tracker.limits)
    (low, high), (low_shrunk, high_shrunk) = limits
    assert low_shrunk == pytest.approx(low, rel=0.15)
    assert high_shrunk == pytest.approx(high, rel=0.15)


def test_without_signal_the_limits_only_say_at_least():
    tracker, rng = NoiseTracker(initial_batch=64), np.random.default_rng(11)
    feed(tracker, (8, 16, 40), *gaussian_norms((8, 16, 40), 300, rng, signal=0))
    low, high = tracker.limits
    assert low > 64
    assert high == math.inf


@unhurried
@given(*[st.floats(0.1, 10)] * 4, st.floats(-0.9, 0.9))
def test_finite_limits_solve_fieller_s_equation(signal, noise, signal_sd, noise_sd, correlation):
    covariance = correlation * signal_sd * noise_sd
    variances = {"signal_var": signal_sd**2, "noise_var": noise_sd**2, "covariance": covariance}
    limits = fieller_limits(signal=signal, noise=noise, quantile=1.645, **variances)
    assert limits[0] <= noise / signal <= limits[1]
    assert (limits[1] == math.inf) == (signal**2 <= 1.645**2 * signal_sd**2)
    for phi in limits:
        if 0 < phi < 1e3:
            spread = noise_sd**2 - 2 * phi * covariance + phi**2 * signal_sd**2
            assert (noise - phi * signal) ** 2 == pytest.approx(1.645**2 * spread, rel=1e-5, abs=1e-6 * (1 + phi**2))


@unhurried
@given(groups, norms)
def test_gain_lies_between_one_and_the_ratio_of_batches_and_efficiency_falls(group, whole):
    tracker = NoiseTracker(initial_batch=32)
    tracker.update(*group, whole)
    batches = np.array([32, 33, 64, 1000, 100000])
    gain, efficiency = tracker.gain(batches), tracker.efficiency(batches)
    assert gain[0] == efficiency[0] == 1
    assert (np.diff(efficiency) <= 1e-12).all()
    assert (np.diff(gain) >= -1e-9 * gain[1:]).all()
    assert (gain >= 1 - 1e-9).all()
    assert (gain <= batches / 32 * (1 + 1e-9)).all()
    assert isinstance(tracker.gain(64), float)
    assert tracker.gain(64) == gain[2]
    if 0 < tracker.noise_scale < 1e6:
        assert tracker.efficiency(64) == pytest.approx((tracker.noise_scale + 32) / (tracker.noise_scale + 64))


@unhurried
@given(st.floats(1e-60, 1e60))
def test_no_scale_of_the_gradient_overflows(unit):
    tracker = NoiseTracker(initial_batch=64)
    for factor in (1.0, 2.0, 1.5):
        tracker.update([4, 60], [3.0 * unit * factor, 1.0 * unit], 0.9 * unit)
    assert tracker.limits[0] <= tracker.noise_scale <= tracker.limits[1]
    assert tracker.gain(128) >= 1


def test_before_any_data_nothing_is_promised():
    tracker = NoiseTracker(initial_batch=32)
    assert math.isnan(tracker.noise_scale)
    assert tracker.limits == (0.0, math.inf)
    assert tracker.gain([32, 64]).tolist() == [1, 1]
    assert tracker.efficiency(32) == 1


def test_a_state_through_json_continues_bit_for_bit():
    rng, split = np.random.default_rng(12), (4, 8, 20)
    first, second = NoiseTracker(initial_batch=32), NoiseTracker(initial_batch=32)
    feed(first, split, *heavy_norms(split, 150, rng))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    local, whole = heavy_norms(split, 50, rng)
    assert (feed(first, split, local, whole) == feed(second, split, local, whole)).all()
    assert first.state_dict() == second.state_dict()
    assert first.limits == second.limits


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("averages", "weight", "much"),
        ("averages", "weight", -1.0),
        ("averages", "signal", math.nan),
        ("averages", "last_split", [4, None]),
        ("averages", "last_split", 4),
        ("control", "noise0", True),
        ("steps", "num_taken", 1.5),
        ("steps", "paired", 1),
        ("steps", "unknown", 1),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(part, name, value):
    tracker = NoiseTracker(initial_batch=32)
    tracker.update([8, 24], [3.0, 2.0], 1.75)
    good = tracker.state_dict()
    with pytest.raises(StateError):
        tracker.load_state_dict({**good, part: {**good[part], name: value}})
    for garbage in (None, [], {}, {"control": {}, "averages": {}, "steps": {}}):
        with pytest.raises(StateError):
            tracker.load_state_dict(garbage)
    assert tracker.state_dict() == good


# One group a step


def test_a_single_group_is_compared_with_the_step_before_as_adaptdl_does():
    rng, tracker = np.random.default_rng(13), NoiseTracker(initial_batch=32)
    before, now = rng.normal(size=(2, 10))
    assert tracker.update_single(32, before @ before, None) is None
    estimate = tracker.update_single(32, now @ now, before @ now)
    local, whole = (before @ before + now @ now) / 2, ((before + now) ** 2).sum() / 4
    assert both(estimate) == pytest.approx([64 * (local - whole), 2 * whole - local])
    assert tracker.flags == ("biased",)


def test_consecutive_gradients_that_point_apart_say_nothing_about_the_noise():
    """Weights that overshoot at a high rate: the larger the product's size, the less it is noise."""
    tracker = NoiseTracker(initial_batch=32)
    tracker.update_single(32, 3.0, None)
    for _ in range(10):
        tracker.update_single(32, 3.0, -0.5)
    assert math.isnan(tracker.noise_scale)
    assert tracker.limits == (0.0, math.inf)
    assert tracker.gain([32, 64, 1024]).tolist() == [1.0, 1.0, 1.0]
    for _ in range(100):
        tracker.update_single(32, 3.0, 1.0)
    assert 0 < tracker.noise_scale < math.inf


def test_pairs_of_unequal_steps_are_weighted_by_their_batches():
    rng, tracker = np.random.default_rng(14), NoiseTracker(initial_batch=32)
    before, now = rng.normal(size=(2, 10))
    tracker.update_single(8, before @ before, None)
    estimate = tracker.update_single(24, now @ now, before @ now)
    whole = ((8 * before + 24 * now) / 32) ** 2
    assert both(estimate) == pytest.approx(
        both(noise_scale([8, 24], [before @ before, now @ now], whole.sum(), tail=1))
    )


def test_leaving_pairs_forgets_their_averages_and_a_skipped_step_breaks_the_pair():
    tracker = NoiseTracker(initial_batch=32)
    tracker.update_single(32, 3.0, None)
    assert tracker.update_single(32, math.inf, math.inf) is None
    assert tracker.update_single(32, 3.0, math.nan) is None  # its partner was skipped
    assert tracker.num_skipped == 1
    assert tracker.update_single(32, 2.0, 1.5) is not None
    estimate = tracker.update([8, 24], [3.0, 2.0], 1.75)
    assert tracker.noise_trace == pytest.approx(estimate.noise_trace)
    assert tracker.flags == ()
    assert tracker.update_single(32, 2.0, 1.5) is None  # nothing to compare with


@pytest.mark.parametrize(
    "call",
    [
        lambda: NoiseTracker(initial_batch=0),
        lambda: NoiseTracker(initial_batch=32).update([8], [1.0], 1.0),
        lambda: NoiseTracker(initial_batch=32).update([8, 8], [1.0, -1.0], 1.0),
        lambda: NoiseTracker(initial_batch=32).update_single(0, 1.0, None),
        lambda: NoiseTracker(initial_batch=32).update_single(8, -1.0, None),
        lambda: NoiseTracker(initial_batch=32).efficiency([32, 0]),
        lambda: NoiseTracker(initial_batch=32).gain(math.nan),
    ],
)
def test_the_tracker_refuses_what_cannot_be(call):
    with pytest.raises(InvalidInputError):
        call()
