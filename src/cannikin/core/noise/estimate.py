"""The gradient noise scale of one step, from local batches of unlike sizes (paper, section 4.4 and Theorem 1).

Legend: n groups (ranks, or micro-batches), local batch b_i, total batch B = sum b_i, X_i = |g_i|^2 of the mean gradient
over a group's samples, X = |g|^2 of the total batch's, G the squared norm of the true gradient (signal), S the trace of
the per-sample gradient covariance (noise), phi = S / G. Each group gives an unbiased estimate of both,

    G_i = (B X - b_i X_i) / (B - b_i)          S_i = b_i B (X_i - X) / (B - b_i)

so any weights that sum to 1 give an unbiased sum; the estimators here differ only in their variance. Which member of
the pooled family has the least depends on how heavy the tails of the per-sample gradient are: `ControlVariate` learns
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cannikin.core.values import FloatArray
from cannikin.errors import InvalidInputError

ESTIMATORS = ("pooled", "theorem1", "mean")
"""Names of the known estimators."""


@dataclass(frozen=True, kw_only=True)
class NoiseEstimate:
    """Signal and noise of the gradient; raw estimates, so either may be negative.

    Args:
        signal_sqnorm: G, squared norm of the true gradient.
        noise_trace: S, trace of the per-sample gradient covariance, in the unit of G times samples.
    """

    signal_sqnorm: float
    noise_trace: float

    @property
    def noise_scale(self) -> float:
        """phi = S / G in samples; inf where G is not positive."""
        return self.noise_trace / self.signal_sqnorm if self.signal_sqnorm > 0 else math.inf


def noise_scale(
    local_batches: npt.ArrayLike,
    local_sqnorms: npt.ArrayLike,
    global_sqnorm: float,
    estimator: str = "pooled",
    tail: float = 0.5,
) -> NoiseEstimate:
    """Estimate the gradient noise scale from one step's squared norms.

        G = sum_i u_i G_i        S = sum_i w_i S_i        sum u = sum w = 1

    - `"pooled"`: u_i = w_i proportional to (B - b_i) b_i^tail. tail = 0 is the analysis of variance, best for light
      tails: S = sum b_i (X_i - X) / (n - 1), never negative. tail = 1 counts every sample's own |z|^2 alike, best for
      heavy tails: G = (X - sum r_i^2 X_i) / (1 - sum r_i^2), r_i = b_i / B. For both, S = B (X - G).
    - `"theorem1"`: the paper's weights as printed. Unbiased, but not of minimum variance: its covariances lack terms.
    - `"mean"`: u_i = w_i = 1/n, right for equal batches, where all three estimators coincide.

    The values are those of a single step, never clamped: average signal and noise over steps before taking their ratio.

    Args:
        local_batches: b_i, samples (or items, where gradients are weighted by items), [n], each at least 1, n >= 2.
        local_sqnorms: |g_i|^2 of each group's own mean gradient, [n].
        global_sqnorm: |g|^2 of g = sum r_i g_i.
        estimator: one of `ESTIMATORS`.
        tail: exponent of "pooled"; the others ignore it.

    Raises:
        InvalidInputError: fewer than two groups, lengths that differ, batches below 1, norms that are negative or not
            finite, or an unknown estimator.

    Example:
        >>> estimate = noise_scale([8, 24], [3.0, 2.0], 1.75, tail=0)
        >>> estimate.signal_sqnorm, estimate.noise_trace
        (1.25, 16.0)
        >>> estimate.noise_scale
        12.8
    """
    batches, sqnorms, total_sqnorm = checked_groups(local_batches, local_sqnorms, global_sqnorm)
    if not (total_sqnorm < math.inf and sqnorms.max() < math.inf):
        raise InvalidInputError(
            f"local_sqnorms={sqnorms.tolist()}, global_sqnorm={total_sqnorm}: norms must be finite; leave out steps "
            "whose gradient overflowed"
        )
    signal_weights, noise_weights = _weights(batches, estimator, tail)
    total = batches.sum()
    rest = total - batches
    signals = (total * total_sqnorm - batches * sqnorms) / rest
    noises = batches * total * (sqnorms - total_sqnorm) / rest
    return NoiseEstimate(signal_sqnorm=float(signal_weights @ signals), noise_trace=float(noise_weights @ noises))


def checked_groups(
    local_batches: npt.ArrayLike, local_sqnorms: npt.ArrayLike, global_sqnorm: float
) -> tuple[FloatArray, FloatArray, float]:
    """Return all three as floats, of one length n >= 2, if no batch is below 1 and no norm negative."""
    batches, sqnorms = np.asarray(local_batches, dtype=np.float64), np.asarray(local_sqnorms, dtype=np.float64)
    if batches.ndim != 1 or batches.shape != sqnorms.shape:
        raise InvalidInputError(
            f"local_batches has shape {batches.shape}, local_sqnorms {sqnorms.shape}: give one of each per group"
        )
    if batches.size < 2:
        raise InvalidInputError(
            f"{batches.size} group of samples: the noise scale compares at least 2 gradients of one step; give each "
            "micro-batch as a group, or compare with the step before by NoiseTracker.update_single"
        )
    if not (np.isfinite(batches).all() and (batches >= 1).all()):
        raise InvalidInputError(
            f"local_batches={batches.tolist()}: each group needs at least 1 sample; leave out groups without any"
        )
    if global_sqnorm < 0 or (sqnorms < 0).any():
        raise InvalidInputError(
            f"local_sqnorms={sqnorms.tolist()}, global_sqnorm={global_sqnorm}: squared norms cannot be negative"
        )
    return batches, sqnorms, float(global_sqnorm)


def whole_norms(batches: npt.ArrayLike, own_sqnorms: npt.ArrayLike, shard_sqnorms: npt.ArrayLike) -> FloatArray:
    """Return norms |g_i|^2 that tell the same noise as norms of shards do, of which each group knows its own alone.

    Where the preconditioner is sharded, group i knows |g_i|^2 and |g|^2 on the coordinates P_i of its shard. The noise
    of all shards together is unbiased, and so are these norms, from which every estimator finds that noise:

        N = sum_i (|g_i|^2_Pi - |g|^2_Pi) / (1/b_i - 1/B)        X = sum_i |g|^2_Pi        X_i = X + N (1/b_i - 1/B)

    Args:
        batches: b_i, samples, [..., n].
        own_sqnorms: |g_i|^2_Pi, [..., n]; NaN where a group has none, and then none is known of the step.
        shard_sqnorms: |g|^2_Pi, [..., n]. Of several groups with the same shard both norms are each one's part.

    Example:
        >>> whole_norms([8, 24], [2.0, 1.25], [1.0, 0.75]).round(3).tolist()
        [7.25, 2.361]
    """
    batches = np.asarray(batches, dtype=np.float64)
    own, shards = np.asarray(own_sqnorms, dtype=np.float64), np.asarray(shard_sqnorms, dtype=np.float64)
    spreads = 1 / batches - 1 / batches.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = ((own - shards) / spreads).sum(axis=-1, keepdims=True)
        norms: FloatArray = shards.sum(axis=-1, keepdims=True) + noise * spreads
    return norms


def pooled_ends(batches: FloatArray, sqnorms: FloatArray, total_sqnorm: float) -> tuple[float, float, float]:
    """Return S0, D = S1 - S0 and s = sum b_i^2 / B: both ends of the pooled family, for the tracker to blend.

    S_p = B sum b_i^(p+1) (X_i - X) / sum (B - b_i) b_i^p
    """
    total, squares = float(batches.sum()), batches * batches
    sum_squares = float(squares.sum())
    deviations = sqnorms - total_sqnorm
    noise0 = float(batches @ deviations) / (batches.size - 1)
    noise1 = float(squares @ deviations) * total / (total**2 - sum_squares)
    # With equal batches, and by `whole_norms`, S1 is S0: of their difference, rounding, nothing must be learned.
    difference, rounding = noise1 - noise0, 1e-10 * total * max(total_sqnorm, float(sqnorms.max()))
    return noise0, difference if abs(difference) > rounding else 0.0, sum_squares / total


@dataclass(kw_only=True)
class ControlVariate:
    """Learns the share t of S1 in S that gives S the least variance, as decayed sums over the steps seen.

    D has mean 0 on every split, so S = S0 + t D is unbiased for any t fixed before its step. (To choose t by the least
    running variance would prefer windows that happen to scatter little, and overstate G.) The best t,
    E[-(S0-S) D] / E[D^2], is near h / (h + s), where the weight h of the tails belongs to the gradients and not to the
    split. Learned afresh on each split, with a new split every 100 steps, t made S up to 2.1 times as noisy as the
    better of S0 and S1; learned over all splits together, up to 1.24 times (late in training, digits, B = 64):

        h = E[s a] / E[v - a]        a = -(S0 - q) D / q^2        v = (D / q)^2        q = mean of S0
    """

    num_unequal: int = 0
    weight: float = 0.0
    noise0: float = 0.0
    explained: float = 0.0
    unexplained: float = 0.0
    shift: float = 0.0
    shift_sq: float = 0.0

    def learn(self, noise0: float, difference: float, spread: float) -> None:
        """Take in one step's S0, D and s."""
        # With .998 late training shows too few of the rare large gradients in the smallest group to weigh the tails: G
        # was up to 15% noisier than with the better of S0 and S1. With .999 it was up to 7% (digits, B = 64).
        decay = 0.999
        self.weight = decay * self.weight + 1
        self.noise0 = decay * self.noise0 + noise0
        if difference == 0 or self.noise0 <= 0:
            return
        mean = self.noise0 / self.weight
        relative = difference / mean
        explained = (1 - noise0 / mean) * relative
        self.num_unequal += 1
        self.explained = decay * self.explained + spread * explained
        self.unexplained = decay * self.unexplained + relative**2 - explained
        self.shift = decay * self.shift + relative
        self.shift_sq = decay**2 * self.shift_sq + relative**2

    def blend(self, spread: float) -> float:
        """Return t, from 0 to 1, for a step with s = `spread`; 1 where `disagrees`, since S0 suffers first."""
        if self.disagrees:
            return 1.0
        if self.num_unequal < 20:
            return 0.5
        if self.explained <= 0:
            return 0.0
        return self.explained / (self.explained + spread * max(self.unexplained, 0.0))

    @property
    def disagrees(self) -> bool:
        """Whether the mean of D is over 4 standard errors from 0: small and large groups do not see the same noise."""
        return self.num_unequal >= 100 and self.shift**2 > 4.0**2 * self.shift_sq


def student_quantile(degrees: float) -> float:
    """Return the value below which 95% of Student's distribution lie, by Cornish and Fisher's expansion.

    It is 0.3% low with 3 degrees of freedom, less with more, 1.2% low with 2 and 12% with 1.

    >>> [round(student_quantile(degrees), 3) for degrees in (3, 10, 1e9)]
    [2.347, 1.812, 1.645]
    """
    z = 1.6448536
    terms = z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return sum(term / degrees**k for k, term in enumerate(terms))


def fieller_limits(
    *, signal: float, noise: float, signal_var: float, noise_var: float, covariance: float, quantile: float
) -> tuple[float, float]:
    """Return limits of phi = S / G, never below 0: all phi with (S - phi G)^2 <= z^2 (vS - 2 phi c + phi^2 vG).

    The upper limit is inf where G is not clearly positive, G^2 <= z^2 vG: phi is then at least the lower limit. Both
    are inf where G is clearly negative.

    >>> fieller_limits(signal=2.0, noise=8.0, signal_var=0.0, noise_var=1.0, covariance=0.0, quantile=2.0)
    (3.0, 5.0)
    """
    square = signal**2 - quantile**2 * signal_var
    cross = signal * noise - quantile**2 * covariance
    constant = noise**2 - quantile**2 * noise_var
    # Roots of square phi^2 - 2 cross phi + constant. The lower one is written as constant / (cross + root), which has
    # no singularity where square passes 0.
    top = cross + math.sqrt(max(cross**2 - square * constant, 0.0))
    low = 0.0 if constant <= 0 else constant / top if top > 0 else math.inf
    high = max(top / square, 0.0) if square > 0 and signal > 0 else math.inf
    return low, high


def _weights(batches: FloatArray, estimator: str, tail: float) -> tuple[FloatArray, FloatArray]:
    """Return the weights of G_i and of S_i."""
    match estimator:
        case "theorem1":
            return _theorem1_weights(batches)
        case "mean":
            weights = np.full(batches.size, 1 / batches.size)
        case "pooled" if math.isfinite(tail):
            # Relative to the largest (smallest) batch no power can overflow.
            reference = batches.max() if tail >= 0 else batches.min()
            weights = (batches.sum() - batches) * (batches / reference) ** tail
            weights = weights / weights.sum()
        case "pooled":
            raise InvalidInputError(f"tail={tail}: give a finite exponent, 0 for light tails to 1 for heavy ones")
        case _:
            raise InvalidInputError(f"estimator={estimator!r} is unknown: choose one of {', '.join(ESTIMATORS)}")
    return weights, weights


def _theorem1_weights(batches: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return w' = 1' A^-1 / (1' A^-1 1) with the matrices A_G and A_S as printed in Theorem 1."""
    total = batches.sum()
    rest = total - batches
    both_rest = np.outer(rest, rest)
    squares = batches**2
    a_signal = (total**2 - np.add.outer(squares, squares)) / (total * both_rest)
    a_noise = np.outer(batches, batches) * (total - np.add.outer(batches, batches)) / both_rest
    np.fill_diagonal(a_signal, (total + 2 * batches) / (total * rest))
    np.fill_diagonal(a_noise, total * batches / rest)
    try:
        # The matrices are symmetric, so 1' A^-1 is A^-1 1.
        signal, noise = (np.linalg.solve(matrix, np.ones_like(batches)) for matrix in (a_signal, a_noise))
    except np.linalg.LinAlgError as error:
        raise InvalidInputError("Theorem 1 gives no weights for this split (singular matrix): use 'pooled'") from error
    return signal / signal.sum(), noise / noise.sum()
