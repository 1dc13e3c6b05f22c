"""Curves, overlap ratios and communication times out of measured ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import measure
from cannikin.core.fit import bucket_times, fit_curves, pooled_gammas, shrunken_gammas, trimmed_mean
from cannikin.core.learner import Learner
from cannikin.core.perf import Cluster, Curve
from cannikin.core.values import StepWindow

RNG = np.random.default_rng


def fitted(batches: list[float], seconds: list[float], weight: float = 50.0, noise: float = 0.01) -> Curve:
    points = np.array([batches]), np.array([seconds]), np.full((1, len(batches)), weight)
    return fit_curves(*points, noise).curve


def test_exact_points_give_their_line_back() -> None:
    curve = fitted([4, 16, 64], [0.002 + 1e-4 * b for b in (4, 16, 64)])
    assert curve.fixed_s[0] == pytest.approx(0.002, rel=0.01)
    assert curve.per_sample_s[0] == pytest.approx(1e-4, rel=0.01)
    assert curve.floor_s[0] == 0


def test_a_floor_is_found_where_a_line_would_be_wrong_in_both_regimes() -> None:
    truth = Curve(fixed_s=[0.001], per_sample_s=[1e-4], floor_s=[0.008])
    batches = [8, 16, 32, 64, 128, 256, 512]  # flat up to 70
    curve = fitted(batches, [float(truth.at([b])[0]) for b in batches])
    assert curve.floor_s[0] == pytest.approx(0.008, rel=0.02)
    assert curve.at([[10], [50], [100], [400]]) == pytest.approx(truth.at([[10], [50], [100], [400]]), rel=0.03)


def test_a_line_is_not_taken_for_a_floor_because_of_noise() -> None:
    rng = RNG(0)
    floors = 0
    for _ in range(200):
        batches = np.array([8.0, 16.0, 32.0, 64.0])
        seconds = (0.004 + 2e-4 * batches) * (1 + 0.05 / np.sqrt(10) * rng.standard_normal(4))
        floors += fitted(list(batches), list(seconds), weight=10.0, noise=0.05).floor_s[0] > 0
    assert floors <= 10


def test_neither_slope_nor_fixed_time_is_ever_negative() -> None:
    falling = fitted([8, 16], [0.010, 0.008])
    assert falling.per_sample_s[0] == 0
    assert falling.fixed_s[0] == pytest.approx(0.009, rel=0.05)
    through_zero = fitted([8, 16], [0.008, 0.018])
    assert through_zero.fixed_s[0] == 0


def test_one_batch_size_does_not_identify_a_line_and_two_close_ones_do_not_either() -> None:
    for batches, known in (([32.0, 1.0], False), ([32.0, 33.0], False), ([16.0, 64.0], True)):
        weights = np.array([[20.0, 0.0 if batches[1] == 1.0 else 20.0]])
        fit = fit_curves(np.array([batches]), np.array([[0.01, 0.012]]), weights, 0.05)
        assert fit.known.tolist() == [known]
        assert np.isfinite([fit.curve.fixed_s, fit.curve.per_sample_s]).all()


def test_a_curve_is_right_near_a_size_that_does_not_lie_on_its_line() -> None:
    batches = np.array([[64.0, 128.0, 192.0, 256.0]])
    seconds = 0.01 + 1e-4 * batches
    seconds[0, 2] *= 1.06  # this size suits the device less
    fit = fit_curves(batches, seconds, np.full((1, 4), 50.0), 0.01, waves=0.025)
    assert fit.near([192]).at([192]) == pytest.approx(seconds[0, 2], rel=0.01)
    assert fit.near([128]).at([128]) == pytest.approx(seconds[0, 1], rel=0.01)
    assert fit.near([600]).at([600]) == pytest.approx(0.07, rel=0.04)  # far away little is left of it


def test_a_rank_whose_batches_lie_close_together_takes_the_fixed_share_of_the_others() -> None:
    batches = np.array([[32.0, 128.0], [32.0, 120.0], [32.0, 110.0], [60.0, 64.0]])
    slowness = np.array([[1.0], [1.1], [1.3], [2.0]])
    seconds = slowness * (0.001 + 1e-4 * batches)  # a fixed share of a tenth or so, far from the prior's half
    seconds[3] *= [1.01, 0.99]  # noise hides the slope of the last rank
    curve = fit_curves(batches, seconds, np.full((4, 2), 20.0), 0.03, waves=0.025).curve
    assert curve.at([[128, 128, 128, 128]])[0, 3] == pytest.approx(2.0 * 0.0138, rel=0.1)


def test_all_reduce_times_are_freed_of_waiting_for_a_slow_rank() -> None:
    cluster = Cluster(
        forward=Curve(fixed_s=[0.01, 0.05], per_sample_s=[0, 0]),
        backward=Curve(fixed_s=[0.02, 0.10], per_sample_s=[0, 0]),
        gammas=[0.2, 0.6, 1.0],
        tails_s=[0.012, 0.008, 0.003],
    )
    window = measure(cluster, [(8, 8)] * 3, RNG(0), noise=0.0, outliers=0.0)
    assert bucket_times(window) == pytest.approx(np.tile([0.004, 0.005, 0.003], (3, 1)))


def test_queued_buckets_count_from_the_end_of_the_one_before() -> None:
    cluster = Cluster(
        forward=Curve(fixed_s=[0.01, 0.01], per_sample_s=[0, 0]),
        backward=Curve(fixed_s=[0.02, 0.02], per_sample_s=[0, 0]),
        gammas=[0.2, 0.6, 1.0],
        tails_s=[0.3, 0.2, 0.1],
    )
    window = measure(cluster, [(8, 8)], RNG(0), noise=0.0, outliers=0.0)
    assert bucket_times(window)[0] == pytest.approx([0.1, 0.1, 0.1])


def test_buckets_done_out_of_order_still_sum_to_the_whole() -> None:
    window = StepWindow(
        first_step=0,
        local_batches=np.array([[8, 8]]),
        before_s=np.array([[0.01, 0.01]]),
        ready_s=np.array([[[0.01, 0.02], [0.01, 0.02]]]),
        done_s=np.array([[[0.05, 0.03], [0.05, 0.03]]]),  # two all-reduces at once, the second done first
        local_sqnorm=np.full((1, 2), np.nan),
        global_sqnorm=np.full(1, np.nan),
    )
    times = bucket_times(window)[0]
    assert times == pytest.approx([0.04, 0.0])


def test_equal_ratios_are_pooled_and_unlike_ones_kept_apart() -> None:
    means, variances = np.array([[0.14], [0.16], [0.15]]), np.full((3, 1), 0.02**2)
    assert shrunken_gammas(means, variances) == pytest.approx(np.full((3, 1), 0.15))
    assert pooled_gammas(means, variances) == pytest.approx([0.15])
    unlike, sharp = np.array([[0.12], [0.20], [0.15]]), np.full((3, 1), 0.001**2)
    assert shrunken_gammas(unlike, sharp) == pytest.approx(unlike, rel=0.01)


def test_a_noisy_rank_counts_less_in_the_common_ratio() -> None:
    pooled = pooled_gammas(np.array([[0.15], [0.30]]), np.array([[1e-4], [1e-2]]))
    assert pooled[0] == pytest.approx(0.15, abs=0.01)


def test_the_trimmed_mean_ignores_outliers_and_knows_its_precision() -> None:
    rng = RNG(2)
    values = 1 + 0.1 * rng.standard_normal((4000, 1))
    values[::50] *= 3
    mean, variance = trimmed_mean(values)
    assert mean[0] == pytest.approx(1.0, abs=0.01)
    assert variance[0] == pytest.approx(0.1**2 / 4000, rel=0.1)


def test_the_learner_recovers_a_noisy_cluster() -> None:
    truth = Cluster(
        forward=Curve(fixed_s=[0.004, 0.008], per_sample_s=[1e-4, 3e-4]),
        backward=Curve(fixed_s=[0.006, 0.010], per_sample_s=[2e-4, 6e-4]),
        gammas=[0.2, 0.5, 1.0],
        tails_s=[0.009, 0.005, 0.002],
    )
    learner, rng = Learner(2), RNG(3)
    for batches in ((32, 32), (48, 16), (56, 8), (40, 24)):
        learner.observe(measure(truth, [batches] * 20, rng, noise=0.03))
    fit = learner.model(np.array([1, 1]), np.array([99, 99]))
    assert fit.known.all()
    cluster = fit.cluster
    assert cluster is not None
    assert learner.noise == pytest.approx(0.03, rel=0.3)
    assert cluster.tails_s == pytest.approx(truth.tails_s, rel=0.05)
    assert cluster.gammas == pytest.approx(truth.gammas, rel=0.05)
    for batches in ((32, 32), (56, 8)):
        assert cluster.forward.at(batches) == pytest.approx(truth.forward.at(batches), rel=0.03)
        assert cluster.backward.at(batches) == pytest.approx(truth.backward.at(batches), rel=0.03)


def test_a_curve_that_is_no_line_is_right_where_the_rank_runs_now() -> None:
    learner, rng = Learner(1), RNG(5)
    for batch, factor in ((256, 1.0), (64, 1.0), (128, 1.08)):
        truth = Cluster(
            forward=Curve(fixed_s=[0.004 * factor], per_sample_s=[1e-4 * factor]),
            backward=Curve(fixed_s=[0.006 * factor], per_sample_s=[2e-4 * factor]),
            gammas=[1.0],
            tails_s=[0.002],
        )
        learner.observe(measure(truth, [(batch,)] * 10, rng, noise=0.02))
    fitted = learner.model(np.array([1]), np.array([999])).cluster
    assert fitted is not None
    assert fitted.backward.at([128]) == pytest.approx(truth.backward.at([128]), rel=0.025)


@pytest.mark.parametrize(("forward", "backward"), [(0.9, 1.1), (1.0, 1.037)], ids=["opposite", "just below an alarm"])
def test_a_history_that_is_wrong_without_a_change_of_speed_is_corrected(forward: float, backward: float) -> None:
    learner, rng = Learner(1), RNG(6)
    for k, (batch, a, p) in enumerate([(60, 1.0, 1.0)] * 3 + [(100, 1.0, 1.0)] * 6 + [(107, forward, backward)] * 8):
        truth = Cluster(
            forward=Curve(fixed_s=[0.004 * a], per_sample_s=[1e-4 * a]),
            backward=Curve(fixed_s=[0.006 * p], per_sample_s=[2e-4 * p]),
            gammas=[1.0],
            tails_s=[0.001],
        )
        learner.observe(measure(truth, [(batch,)] * 10, rng, noise=0.003, outliers=0.0, first_step=10 * k))
    fitted = learner.model(np.array([1]), np.array([999])).cluster
    assert fitted is not None
    assert fitted.forward.at([107]) == pytest.approx(truth.forward.at([107]), rel=0.015)
    assert fitted.backward.at([107]) == pytest.approx(truth.backward.at([107]), rel=0.015)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [((1, 3, 1, 3.05), 3.0), ((3, 1, 3, 1, 1), 1.0), ((1, 3, 1, 5), 1.0), ((1, 3), 1.0)],
    ids=["half of them", "fewer than half", "not alike", "one of two"],
)
def test_steps_that_are_slow_alike_count_where_they_are_half_of_all(
    factors: tuple[float, ...], expected: float
) -> None:
    truth = Cluster(
        forward=Curve(fixed_s=[0.004], per_sample_s=[1e-4]),
        backward=Curve(fixed_s=[0.006], per_sample_s=[2e-4]),
        gammas=[1.0],
        tails_s=[0.001],
    )
    learner, rng = Learner(1), RNG(7)
    learner.observe(measure(truth, [(32,)] * 20, rng, noise=0.02))
    window = measure(truth, [(64,)] * len(factors), rng, first_step=20, noise=0.02, outliers=0.0)
    learner.observe(replace(window, ready_s=window.ready_s * np.array(factors)[:, None, None]))
    assert learner.history(0)[2, 1] == pytest.approx(expected * truth.backward.at([64])[0], rel=0.05)


def test_each_rank_has_overlap_ratios_of_its_own() -> None:
    truth = Cluster(
        forward=Curve(fixed_s=[0.004, 0.004], per_sample_s=[1e-4, 1e-4]),
        backward=Curve(fixed_s=[0.006, 0.006], per_sample_s=[2e-4, 2e-4]),
        gammas=[[0.1, 0.5, 1.0], [0.3, 0.8, 1.0]],
        tails_s=[0.009, 0.005, 0.002],
    )
    learner = Learner(2)
    learner.observe(measure(truth, [(32, 32)] * 20, RNG(4), noise=0.02))
    cluster = learner.model(np.array([1, 1]), np.array([99, 99])).cluster
    assert cluster is not None
    assert cluster.gammas == pytest.approx(truth.gammas, rel=0.05)


def test_a_rank_whose_buckets_come_at_scattered_moments_is_expected_to_end_later() -> None:
    """Two ranks are alike but for one's early buckets, which scatter by a third; then it has to be given slack."""
    shares, tails_s = np.array([0.3, 0.45, 0.6, 1.0]), np.array([0.050, 0.044, 0.038, 0.002])
    truth = Cluster(
        forward=Curve(fixed_s=[0.004] * 2, per_sample_s=[1e-4] * 2),
        backward=Curve(fixed_s=[0.006] * 2, per_sample_s=[1e-3] * 2),
        gammas=shares,
        tails_s=tails_s,
    )
    window = measure(truth, [(32, 32)] * 30, RNG(4), noise=0.01, outliers=0.0)
    scattered = shares * np.append(np.exp(0.33 * RNG(5).standard_normal((30, 3))).T, [np.ones(30)], axis=0).T
    ready_s = window.ready_s.copy()
    ready_s[:, 1] = np.minimum(np.maximum.accumulate(scattered, axis=1), 1.0) * ready_s[:, 1, -1:]
    learner = Learner(2)
    learner.observe(replace(window, ready_s=ready_s))
    cluster = learner.model(np.array([1, 1]), np.array([99, 99])).cluster
    assert cluster is not None
    ends_s = window.before_s[:, 1:] + ready_s[:, 1] + tails_s
    modelled_s = cluster.forward.at([32, 32])[1] + cluster.gammas[1] * cluster.backward.at([32, 32])[1] + tails_s
    assert modelled_s.max() == pytest.approx(np.median(ends_s.max(axis=-1)), rel=0.025)
    assert modelled_s.max() > 1.02 * np.median(ends_s, axis=0).max()
    assert cluster.gammas[0] == pytest.approx(shares, rel=0.05)  # the other's are its middle ones


def test_before_the_first_step_the_learner_says_that_it_knows_nothing() -> None:
    fit = Learner(2).model(np.array([1, 1]), np.array([9, 9]))
    assert fit.cluster is None
    assert "no step" in fit.reason


def test_ranks_that_ran_one_batch_size_are_named() -> None:
    cluster = Cluster(
        forward=Curve(fixed_s=[0.004, 0.008], per_sample_s=[1e-4, 3e-4]),
        backward=Curve(fixed_s=[0.006, 0.010], per_sample_s=[2e-4, 6e-4]),
        gammas=[1.0],
        tails_s=[0.002],
    )
    learner = Learner(2)
    learner.observe(measure(cluster, [(32, 32)] * 5, RNG(0)))
    fit = learner.model(np.array([1, 1]), np.array([99, 99]))
    assert not fit.known.any()
    assert "rank 0" in fit.reason
    assert "[32]" in fit.reason


def test_rebuilt_buckets_start_afresh() -> None:
    learner, rng = Learner(2), RNG(1)
    for tails in ([0.01], [0.009, 0.004]):
        cluster = Cluster(
            forward=Curve(fixed_s=[0.004, 0.008], per_sample_s=[1e-4, 3e-4]),
            backward=Curve(fixed_s=[0.006, 0.010], per_sample_s=[2e-4, 6e-4]),
            gammas=np.linspace(0.3, 1, len(tails)) if len(tails) > 1 else [1.0],
            tails_s=tails,
        )
        learner.observe(measure(cluster, [(32, 32)] * 5, rng, noise=0.0))
    model = learner.model(np.array([1, 1]), np.array([99, 99])).cluster
    assert model is not None
    assert model.tails_s == pytest.approx([0.009, 0.004])
