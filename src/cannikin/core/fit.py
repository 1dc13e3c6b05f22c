"""Fits a performance model to measured times: pure functions, without memory (paper, sections 4.2 and 4.5).

Times scatter in proportion to themselves, so errors are relative throughout: a curve max(floor, fixed + slope b) is
fitted to averages y_k of repeated steps at batch b_k by least squares of 1 - f(b_k)/y_k. Two different batches identify
a line. Where a rank's batches lie too close together for that, its curve leans on the fixed share of the other ranks'
times, since all of them run one network, and `CurveFit.known` is false.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cannikin.core.perf import Curve
from cannikin.core.values import BoolArray, FloatArray, StepWindow

# Prior on the fixed share of a time, mean and standard deviation. Public single-GPU measurements of ResNets, BERT and
# DeepSpeech2 on five kinds of GPU have shares from .1 to .8 at usual batches.
_FIXED_SHARE = 0.5
_FIXED_SHARE_SD = 0.25
# Variance of the share between ranks before it is known, which weighs as much as so many ranks.
_SHARE_VARIANCE = 0.12**2
_PRIOR_RANKS = 4.0
_ROUNDS = 4  # of expectation and maximisation
REACH = 0.15  # distance in logarithms at which two sizes' deviations from the curve have a correlation of 1/e
_MOST_DEVIATION = 0.3  # larger ones are not believed
# How much better (chi squared) a floor must describe the points before it is believed: three standard deviations.
_FLOOR_EVIDENCE = 9.0


@dataclass(frozen=True, kw_only=True, eq=False)
class CurveFit:
    """Fitted curves of n ranks; where `known` is false the data do not yet tell fixed from per-sample time.

    `deviations` are what `near` needs to know of the points, [n, K]: V^-1 e, in `fit_curves`'s terms.
    """

    curve: Curve
    known: BoolArray
    batches: FloatArray
    deviations: FloatArray
    waves: float

    def near(self, local_batches: npt.ArrayLike) -> Curve:
        """Return the curves as they are near these batches, [n]: times the deviation that the points around promise."""
        away = np.abs(np.log(self.batches) - np.log(np.asarray(local_batches, dtype=np.float64))[:, None])
        related = self.waves**2 * np.exp(-away / REACH)
        factor = 1.0 + (related * self.deviations).sum(axis=1).clip(-_MOST_DEVIATION, _MOST_DEVIATION)
        curve = self.curve
        return Curve(
            fixed_s=curve.fixed_s * factor,
            per_sample_s=curve.per_sample_s * factor,
            floor_s=curve.floor_s * factor,
        )

    def take(self, ranks: Sequence[int]) -> CurveFit:
        """Return the fits of these ranks only."""
        rows = np.asarray(ranks)
        return replace(
            self,
            curve=self.curve.take(rows),
            known=self.known[rows],
            batches=self.batches[rows],
            deviations=self.deviations[rows],
        )


def join_fits(fits: Sequence[CurveFit]) -> CurveFit:
    """Return the fits of several groups of ranks, one behind the other; all with as many points."""
    return CurveFit(
        curve=Curve(
            fixed_s=np.concatenate([fit.curve.fixed_s for fit in fits]),
            per_sample_s=np.concatenate([fit.curve.per_sample_s for fit in fits]),
            floor_s=np.concatenate([fit.curve.floor_s for fit in fits]),
        ),
        known=np.concatenate([fit.known for fit in fits]),
        batches=np.concatenate([fit.batches for fit in fits]),
        deviations=np.concatenate([fit.deviations for fit in fits]),
        waves=fits[0].waves,
    )


def fit_curves(
    batches: FloatArray,
    seconds: FloatArray,
    weights: FloatArray,
    noise: float,
    *,
    waves: float = 0.0,
) -> CurveFit:
    """Fit one curve per rank to averages of repeated measurements.

        minimise  e' V^-1 e + prior,   e_k = 1 - f(b_k)/y_k,   f(b) = max(F, s + q b),  s, q, F >= 0
        V_kl = [k = l] noise^2/w_k + waves^2 exp(-|log b_k/b_l| / reach)

    Times lie on a curve within a few per cent only, because GPUs work in waves and some sizes suit them better: V has
    the noise of each average and the deviations of sizes, which neighbouring sizes share. Every place of the knee among
    the points is tried: the first m points on the floor, the others on the line.

    Args:
        batches: b_k, increasing along each row, [n, K]; entries of weight 0 come last.
        seconds: y_k > 0, [n, K].
        weights: number of steps behind each average, [n, K].
        noise: relative scatter of one step's time.
        waves: relative standard deviation of a size's time from the curve.

    Example:
        >>> fit = fit_curves(np.array([[8.0, 32.0]]), np.array([[0.010, 0.022]]), np.array([[50.0, 50.0]]), 0.02)
        >>> fit.curve.fixed_s.round(3).tolist(), fit.curve.per_sample_s.round(4).tolist(), fit.known.tolist()
        ([0.006], [0.0005], [True])
    """
    count = (weights > 0).sum(axis=1)
    logs = np.log(batches)
    shared = waves**2 * np.exp(-np.abs(logs[:, :, None] - logs[:, None, :]) / REACH)
    own = noise**2 / np.maximum(weights, 1e-12)
    certainty = np.linalg.inv(shared + own[:, :, None] * np.eye(batches.shape[1]))
    fixed, slope, floor = _lines(batches, seconds, weights, certainty)
    line = np.maximum(floor[..., None], fixed[..., None] + slope[..., None] * batches[:, None, :])
    error = 1.0 - line / seconds[:, None, :]
    chi = np.einsum("nmk,nkl,nml->nm", error, certainty, error)
    chi[:, 1:] += _FLOOR_EVIDENCE
    chi[np.arange(chi.shape[1]) >= np.maximum(count, 1)[:, None]] = np.inf
    best = chi.argmin(axis=1)[:, None]
    fixed_s, per_sample_s, floor_s = (np.take_along_axis(x, best, axis=1)[:, 0] for x in (fixed, slope, floor))
    errors = np.take_along_axis(error, best[:, :, None], axis=1)[:, 0]
    return CurveFit(
        curve=Curve(fixed_s=fixed_s, per_sample_s=per_sample_s, floor_s=floor_s),
        known=_known(batches, weights, noise),
        batches=batches.copy(),
        deviations=np.einsum("nkl,nl->nk", certainty, errors),
        waves=waves,
    )


def _lines(
    batches: FloatArray, seconds: FloatArray, weights: FloatArray, certainty: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return fixed time, per-sample time and floor for every number m of points on the floor, none negative, [n, K]."""
    num_points = batches.shape[1]
    heaviest = np.take_along_axis(seconds, weights.argmax(axis=1)[:, None], axis=1)
    largest = np.where(weights > 0, batches, 1.0).max(axis=1, keepdims=True)
    # Unknowns: fixed and floor in units of the heaviest point's time, slope in units of it per largest batch.
    rising = np.arange(num_points) >= np.arange(num_points)[:, None]  # [m, k]
    unit = (heaviest / seconds)[:, None, :]
    design = np.stack([rising * unit, rising * unit * (batches / largest)[:, None, :], ~rising * unit])  # [3, n, m, k]
    explained = np.einsum("anmk,nkl->anml", design, certainty)
    normal = np.einsum("anml,bnml->nmab", explained, design)
    right = explained.sum(axis=-1).transpose(1, 2, 0)
    share, variance = _common_share(normal[:, 0, :2, :2], right[:, 0, :2])
    normal[..., 0, 0] += 1.0 / variance
    right[..., 0] += share / variance
    normal += 1e-9 * np.eye(3)

    def solve(without: int | None) -> FloatArray:
        matrix = normal.copy()
        if without is not None:
            matrix[..., without, without] += 1e15
        solved: FloatArray = np.linalg.solve(matrix, right[..., None])[..., 0]
        return solved

    found = solve(None)
    found = np.where(found[..., :1] < 0, solve(0), found)
    found = np.maximum(np.where(found[..., 1:2] < 0, solve(1), found), 0.0)
    fixed, slope, floor = (heaviest * found[..., k] for k in range(3))
    return fixed, slope / largest, np.where(np.arange(num_points) > 0, floor, 0.0)


def _common_share(normal: FloatArray, right: FloatArray) -> tuple[float, float]:
    """Return mean and variance over the ranks of the fixed share of a time, by expectation and maximisation.

    All ranks run one network, so their shares are related: a rank whose batches lie too close together to tell its own
    takes what the others have.

    Args:
        normal, right: of each rank's line alone, without a prior, [n, 2, 2] and [n, 2]; the share is the first unknown.
    """
    share, variance = _FIXED_SHARE, _SHARE_VARIANCE
    slope = np.maximum(normal[:, 1, 1], 1e-12)
    weight = np.maximum(normal[:, 0, 0] - normal[:, 0, 1] ** 2 / slope, 0.0)  # certainty of the share alone,
    pull = right[:, 0] - normal[:, 0, 1] / slope * right[:, 1]  # and that times the share
    for _ in range(_ROUNDS):
        spread = 1.0 / (weight + 1.0 / variance)
        shares = np.clip(spread * (pull + share / variance), 0.0, 1.0)
        certainty = len(shares) / variance
        share = (shares.sum() / variance + _FIXED_SHARE / _FIXED_SHARE_SD**2) / (certainty + _FIXED_SHARE_SD**-2)
        squares = ((shares - share) ** 2 + spread).sum()
        variance = (_PRIOR_RANKS * _SHARE_VARIANCE + squares) / (_PRIOR_RANKS + len(shares))
    return float(share), float(variance)


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


def lateness(gammas: FloatArray, tails_s: FloatArray, before_s: FloatArray, backward_s: FloatArray) -> FloatArray:
    """Return how much later each rank lets a step end than its middle overlap ratios say, as a share of backward, [n].

    A rank lets it end with the latest of its buckets, and where their moments scatter, the latest comes later in the
    middle than the latest of the middles:

        med_s max_j(a + gamma_sj P + C_j) >= max_j(a + med_s(gamma_sj) P + C_j)

    Medians, since lone outliers say nothing of the next step.

    Args:
        gammas: of each of several steps, [S, n, J]; NaN where a rank has not measured.
        tails_s: C_j, [J].
        before_s, backward_s: a and P of each rank, [n].

    Example:
        >>> gammas = np.array([[[0.2, 0.6, 1.0]], [[0.6, 0.2, 1.0]]])  # one or the other bucket is late
        >>> lateness(gammas, np.array([1.0, 1.0, 0.0]), np.array([1.0]), np.array([1.0])).round(3).tolist()
        [0.2]
    """
    measured = np.isfinite(gammas).all(axis=(1, 2))
    if not measured.any():
        return np.zeros(gammas.shape[1])

    def ends(shares: FloatArray) -> FloatArray:
        latest: FloatArray = (before_s[:, None] + shares * backward_s[:, None] + tails_s).max(axis=-1)
        return latest

    steps = gammas[measured]
    later = np.median(ends(steps), axis=0) - ends(np.median(steps, axis=0))
    found: FloatArray = np.maximum(later, 0.0) / np.maximum(backward_s, 1e-12)
    return found


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
