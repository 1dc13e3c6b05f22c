"""Which total batch trains fastest: goodput = throughput x statistical efficiency (paper, section 2.2; Pollux).

Legend: B total batch, B0 the initial one, T(B) the step time, S the trace of the gradient noise, G the squared norm of
the true gradient, phi = S/G the noise scale.

    efficiency(B) = (S + B0 G)/(S + B G) = (phi + B0)/(phi + B)        goodput(B) = B/T(B) * efficiency(B)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cannikin.core.values import FloatArray, IntArray
from cannikin.errors import InvalidInputError

_GROWTH, _LEAP = 2.0, 8.0  # a total batch grows at once by this at least, and at most


@dataclass(frozen=True, kw_only=True)
class TotalChoice:
    """The total batch to train with next, and why.

    `totals` are the candidates. `goodputs` says what each gives, in samples at B0 per second; 0 where the ranks cannot
    hold it.
    """

    total_batch: int
    reason: str
    totals: tuple[int, ...]
    goodputs: tuple[float, ...]


def efficiency(
    total_batch: npt.ArrayLike, *, initial_batch: float, noise_trace: float, signal_sqnorm: float
) -> FloatArray:
    """Return how much one sample is worth in a batch of B against one of B0, from 0 to 1.

        efficiency(B) = (S + B0 max(G, 0)) / (S + B max(G, 0))

    Args:
        total_batch: B, any shape.
        initial_batch: B0.
        noise_trace: S; below 0 it counts as 0.
        signal_sqnorm: G; where it is not positive, noise drowns the signal and every sample counts in full.

    Example:
        >>> efficiency([64, 192], initial_batch=64, noise_trace=64.0, signal_sqnorm=1.0).tolist()
        [1.0, 0.5]
    """
    noise, signal = max(noise_trace, 0.0), max(signal_sqnorm, 0.0)
    batches = np.asarray(total_batch, dtype=np.float64)
    if signal == 0.0:
        return np.ones_like(batches)
    shares: FloatArray = (noise + initial_batch * signal) / (noise + batches * signal)
    return shares


def growth_limit(least_noise_scale: float, total_batch: float) -> float:
    """Return by how much a total batch may grow at once, at least 2 and at most 8.

    g times the samples take at most g times as long, so at worst goodput falls with efficiency, by
    (phi + B)/(phi + g B). Where there is no noise doubling loses a half at worst; g = 2 + phi/B loses no more.

    Args:
        least_noise_scale: phi at the lower limit of what is known of it, samples.
        total_batch: B, samples of one step of the optimizer.

    Example:
        >>> growth_limit(0.0, 64), growth_limit(128.0, 64), growth_limit(1e6, 64)
        (2.0, 4.0, 8.0)
    """
    return min(_LEAP, _GROWTH + least_noise_scale / total_batch)


def total_grid(lowest: int, highest: int, num: int = 50) -> IntArray:
    """Return at most `num` whole total batches in geometric progression, both ends included.

    Example:
        >>> total_grid(64, 256, num=3).tolist()
        [64, 128, 256]
    """
    if not 1 <= lowest <= highest:
        raise InvalidInputError(f"total batches from {lowest} to {highest}: need 1 <= lowest <= highest")
    grid: IntArray = np.unique(np.rint(np.geomspace(lowest, highest, num)).astype(np.int64))
    return grid


def choose_total(
    totals: IntArray,
    step_s: FloatArray,
    efficiency: FloatArray,
    current_total: int,
    *,
    threshold: float = 0.05,
    growth: float = np.inf,
) -> TotalChoice:
    """Choose the total batch of the highest goodput, if it beats the present one by more than the threshold.

    Where the best one is further away than `growth` allows, the total goes towards it. That loses nothing: the step
    time of the best split is convex in B, so goodput only rises between the present total and the best
    (docs/mathematics.md).

    Args:
        totals: candidates, increasing, the present total among them.
        step_s: T(B) of each; inf where the ranks cannot hold it.
        efficiency: efficiency(B) of each.
        current_total: the total batch now in force.
        threshold: share by which the goodput of the best one must exceed the present, so that the total does not flap.
        growth: the factor by which the total may grow at once.
    """
    if current_total not in totals:
        raise InvalidInputError(f"current_total={current_total} is not among the candidates {totals.tolist()}")
    goodput = totals / step_s * efficiency
    best = int(goodput.argmax())
    now = goodput[totals == current_total][0]
    chosen, gain = int(totals[best]), float(goodput[best] / now) if now > 0 else np.inf
    reason = f"total batch {current_total} -> {chosen}: goodput {gain - 1:+.0%}"
    if gain <= 1 + threshold:
        rival = f"{chosen} would gain {gain - 1:.1%}, not more than {threshold:.1%}"
        reason = f"total batch stays {current_total}: {'the best in reach' if chosen == current_total else rival}"
        chosen = current_total
    elif chosen > growth * current_total:
        way = int(totals[totals <= growth * current_total][-1])
        reason = f"total batch {current_total} -> {way}, on its way to {chosen}: goodput there {gain - 1:+.0%}"
        chosen = way
    return TotalChoice(
        total_batch=chosen,
        reason=reason,
        totals=tuple(totals.tolist()),
        goodputs=tuple(goodput.tolist()),
    )
