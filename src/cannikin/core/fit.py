"""Fits a performance model to measured times: pure functions, without memory (paper, sections 4.2 and 4.5).

Times scatter in proportion to themselves, so errors are relative throughout: a curve max(floor, fixed + slope b) is
fitted to averages y_k of repeated steps at batch b_k by least squares of 1 - f(b_k)/y_k. Two different batches identify
a line. With one batch only, the curve leans on a weak prior for the fixed share, and `CurveFit.known` is false.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cannikin.core.perf import Curve
from cannikin.core.values import BoolArray, FloatArray, StepWindow

# Prior on the fixed share of a time, mean and standard deviation. Public single-GPU measurements of ResNets, BERT and
# DeepSpeech2 on five kinds of GPU have shares from .1 to .8 at usual batches. The prior weighs little: as much as a
# sixth of a step at 10% noise, and less where times are steadier.
_FIXED_SHARE = 0.5
_FIXED_SHARE_SD = 0.25
# How much better (chi squared) a floor must describe the points before it is believed: three standard deviations.
_FLOOR_EVIDENCE = 9.0


@dataclass(frozen=True, kw_only=True, eq=False)
class CurveFit:
    """Fitted curves of n ranks; where `known` is false the data do not yet tell fixed from per-sample time."""

    curve: Curve
    known: BoolArray


def fit_curves(
    batches: FloatArray, seconds: FloatArray, weights: FloatArray, noise: float, trust: FloatArray | None = None
) -> CurveFit:
    """Fit one curve per rank to averages of repeated measurements.

        minimise  sum_k w_k (1 - f(b_k)/y_k)^2 / noise^2 + prior,   f(b) = max(F, s + q b),  s, q, F >= 0

    Every place of the knee among the points is tried: the first m points on the floor, the others on the line.

    Args:
        batches: b_k, increasing along each row, [n, K]; entries of weight 0 come last.
        seconds: y_k > 0, [n, K].
        weights: number of steps behind each average, [n, K].
        noise: relative scatter of one step's time.
        trust: factor on the prior's weight, [n]; 1 where it is left out.

    Example:
        >>> fit = fit_curves(np.array([[8.0, 32.0]]), np.array([[0.010, 0.022]]), np.array([[50.0, 50.0]]), 0.02)
        >>> fit.curve.fixed_s.round(3).tolist(), fit.curve.per_sample_s.round(4).tolist(), fit.known.tolist()
        ([0.006], [0.0005], [True])
    """
    count = (weights > 0).sum(axis=1)
    fixed, slope = _lines(batches, seconds, weights, noise, np.ones(len(batches)) if trust is None else trust)
    floor = _floors(seconds, weights)
    line = fixed[..., None] + slope[..., None] * batches[:, None, :]
    error = 1.0 - np.maximum(floor[..., None], line) / seconds[:, None, :]
    chi = (weights[:, None, :] * error**2).sum(axis=-1) / noise**2
    chi[:, 1:] += _FLOOR_EVIDENCE
    chi[np.arange(chi.shape[1]) >= np.maximum(count, 1)[:, None]] = np.inf
    best = chi.argmin(axis=1)[:, None]
    fixed_s, per_sample_s, floor_s = (np.take_along_axis(x, best, axis=1)[:, 0] for x in (fixed, slope, floor))
    curve = Curve(fixed_s=fixed_s, per_sample_s=per_sample_s, floor_s=floor_s)
    return CurveFit(curve=curve, known=_known(batches, weights, noise))


def _lines(
    batches: FloatArray, seconds: FloatArray, weights: FloatArray, noise: float, trust: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return fixed and per-sample time of the line through points m, m+1, ... for every m, neither negative, [n, K]."""

    def tail_sums(values: FloatArray) -> FloatArray:
        sums: FloatArray = values[:, ::-1].cumsum(axis=1)[:, ::-1]
        return sums

    scaled = weights / noise**2 / seconds
    heaviest = np.take_along_axis(seconds, weights.argmax(axis=1)[:, None], axis=1)
    prior = trust[:, None] / (_FIXED_SHARE_SD * heaviest) ** 2
    n00 = tail_sums(scaled / seconds) + prior
    n01 = tail_sums(scaled * batches / seconds)
    n11 = tail_sums(scaled * batches**2 / seconds) + 1e-12 * (batches / seconds) ** 2
    r0 = tail_sums(scaled) + prior * _FIXED_SHARE * heaviest
    r1 = tail_sums(scaled * batches)
    determinant = n00 * n11 - n01**2
    fixed = (n11 * r0 - n01 * r1) / determinant
    slope = (n00 * r1 - n01 * r0) / determinant
    slope = np.where(fixed < 0, r1 / n11, slope)
    fixed = np.where(slope < 0, r0 / n00, np.maximum(fixed, 0.0))
    return fixed, np.maximum(slope, 0.0)


def _floors(seconds: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the floor that the first m points set, for every m; 0 for m = 0, [n, K]."""
    weight, inverse = weights.cumsum(axis=1), (weights / seconds).cumsum(axis=1)
    floor = np.zeros_like(seconds)
    np.divide(weight[:, :-1], inverse[:, :-1], out=floor[:, 1:], where=inverse[:, :-1] > 0)
    return floor


def _known(batches: FloatArray, weights: FloatArray, noise: float) -> BoolArray:
    """Return where points lie so far apart that the slope's share of the time is known to a third or better, [n]."""
    total = weights.sum(axis=1)
    mean = (weights * batches).sum(axis=1) / np.maximum(total, 1e-300)
    spread = (weights * (batches - mean[:, None]) ** 2).sum(axis=1)
    known: BoolArray = (mean * noise) ** 2 < spread / 9
    return known


def bucket_times(window: StepWindow) -> FloatArray:
    """Return the all-reduce time of each bucket in each step, without waits for slower ranks, seconds, [S, J].

    Each rank sees d_j = D_j - max(ready_j, D_{j-1}) with D_j = max(done_1..done_j). If bucket j was queued behind its
    predecessor on every rank (ready_j < D_{j-1}), no rank waited for gradients: take the median of d_j over the ranks.
    Otherwise take the least over the ranks where it was not queued: the last of these to be ready waited for no other.
    """
    valid = window.valid[..., None]
    ready, done = (np.where(valid, times, 0.0) for times in (window.ready_s, window.done_s))
    finished = np.maximum.accumulate(done, axis=-1)
    previous = np.concatenate([np.full_like(finished[..., :1], -np.inf), finished[..., :-1]], axis=-1)
    seen = finished - np.maximum(ready, previous)
    queued = (ready < previous) & valid
    free = ~queued & valid
    least = np.where(free, seen, np.inf).min(axis=1)
    typical = np.zeros_like(least)
    measured = window.valid.any(axis=1)
    if measured.any():
        typical[measured] = np.nanmedian(np.where(valid, seen, np.nan)[measured], axis=1)
    times: FloatArray = np.maximum(np.where(free.any(axis=1), least, typical), 0.0)
    return times


def trimmed_mean(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the mean over axis 0 of values within 4 robust standard deviations of the median, and its variance.

    NaNs are left out; where all values are NaN, both results are NaN.
    """
    empty = np.isnan(values).all(axis=0)
    known = np.where(empty, 0.0, values)
    centre = np.nanmedian(known, axis=0)
    spread = 1.4826 * np.nanmedian(np.abs(known - centre), axis=0)
    with np.errstate(invalid="ignore"):
        inside = np.abs(known - centre) <= 4.0 * spread
    count = inside.sum(axis=0)
    mean: FloatArray = np.where(inside, known, 0.0).sum(axis=0) / count
    square = np.where(inside, (known - mean) ** 2, 0.0).sum(axis=0)
    variance = square / np.maximum(count - 1, 1) / count
    return np.where(empty, np.nan, mean), np.where(empty, np.nan, variance)


def middle_of(values: FloatArray, cut: float) -> FloatArray:
    """Return the lower median of each row, [n, 1], because outliers are usually slow.

    There is one exception. If at least as many values lie within `cut` of the upper median, the rank really is slow
    every other step, so the upper one is returned.

    Example:
        >>> middle_of(np.array([[1.0, 3.0, 1.0, 5.0], [1.0, 3.0, 1.0, 3.0]]), 0.1).tolist()
        [[1.0], [3.0]]
    """
    ordered = np.sort(values, axis=1)
    lower, upper = (ordered[:, [k // 2]] for k in (values.shape[1] - 1, values.shape[1]))
    like_lower, like_upper = ((np.abs(values - x) <= cut).sum(axis=1, keepdims=True) for x in (lower, upper))
    middle: FloatArray = np.where((values.shape[1] >= 3) & (like_upper >= like_lower), upper, lower)
    return middle


def pooled_gammas(means: FloatArray, variances: FloatArray) -> FloatArray:
    """Return one overlap ratio per bucket for all ranks, by inverse-variance weighting (paper, section 4.5), [J].

        gamma = sum_i (gamma_i / var_i) / sum_i (1 / var_i)

    Args:
        means: gamma_i of each rank, [n, J].
        variances: variance of each of these means, [n, J].

    Example:
        >>> pooled_gammas(np.array([[0.1], [0.2]]), np.array([[1e-4], [3e-4]])).round(4).tolist()
        [0.125]
    """
    weights = 1.0 / np.maximum(variances, 1e-18)
    pooled: FloatArray = (means * weights).sum(axis=0) / weights.sum(axis=0)
    return pooled


def shrunken_gammas(means: FloatArray, variances: FloatArray) -> FloatArray:
    """Return each rank's own overlap ratios, pulled towards the common one as far as they differ by chance, [n, J].

    The paper assumes one ratio for all devices, which is wrong where they differ. This is the random-effects form
    (DerSimonian and Laird): tau^2 is the variance between ranks beyond that of the measurements, and with tau = 0 it is
    the paper's inverse-variance weighting.

        gamma_i' = mu + tau^2/(tau^2 + var_i) (gamma_i - mu)

    A rank without a measurement of its own (NaN) takes the common one.
    """
    missing = np.isnan(means)
    means = np.where(missing, np.nanmean(means, axis=0), means)
    variances = np.where(missing, 1.0, np.maximum(variances, 1e-18))
    weights = 1.0 / variances
    excess = (weights * (means - pooled_gammas(means, variances)) ** 2).sum(axis=0) - (len(means) - 1)
    scale = weights.sum(axis=0) - (weights**2).sum(axis=0) / weights.sum(axis=0)
    between = np.divide(np.maximum(excess, 0.0), scale, out=np.zeros_like(scale), where=scale > 0)
    centre = pooled_gammas(means, variances + between)
    shrunken: FloatArray = centre + between / (between + variances) * (means - centre)
    return shrunken
