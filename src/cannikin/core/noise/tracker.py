"""The gradient noise scale over many steps: averages, limits, efficiency and gain (paper, section 4.4).

Legend as in `estimate`: b_i, B, X_i, X, G signal, S noise, phi = S / G; B0 the initial total batch; S0 and S1 the
pooled estimates of S with tail 0 and 1, D = S1 - S0, t the share of S1 in S, chosen by `ControlVariate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from cannikin.core.noise.estimate import (
    ControlVariate,
    NoiseEstimate,
    checked_groups,
    fieller_limits,
    pooled_ends,
    student_quantile,
)
from cannikin.core.planner import Noise
from cannikin.core.saved import whole
from cannikin.core.values import FloatArray, IntArray, StepWindow
from cannikin.errors import InvalidInputError, StateError

# A norm of 1e35 counts as overflowed; fourth powers of smaller norms stay below the largest float.
SQNORM_LIMIT = 1e70


_SMOOTHING = 0.999  # decay of averages, per B0 samples

# Of the running mean of log X by which steps are made comparable, per step: X scatters far less than G, and the mean
# must follow a gradient that shrinks by half in a hundred steps.
_SIZE_DECAY = 0.95


@dataclass(kw_only=True)
class _Averages:
    """Decayed sums of S and G, and of the differences of successive steps on one split: dS^2/2, dG^2/2, dS dG/2.

    Every step is taken relative to the size that gradients had just before it, exp(mean of log X), so that it counts
    alike whether gradients are large or have shrunk. Otherwise the first, large ones decide for as long as they are
    remembered: where |G|^2 fell by half every 200 steps and S every 400, phi came out 12 times too small after 2,000
    steps, and so 4 times. A step's weight is fixed before the step, so signal and noise stay unbiased. The sums are
    kept in today's size: where gradients shrink, so do they.
    """

    weight: float = 0.0
    weight_sq: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    scatter_weight: float = 0.0
    scatter_weight_sq: float = 0.0
    noise_scatter: float = 0.0
    signal_scatter: float = 0.0
    joint_scatter: float = 0.0
    last_split: list[float] = field(default_factory=list)
    last_noise: float = 0.0
    last_signal: float = 0.0
    size_weight: float = 0.0
    log_size: float = 0.0

    def add(self, split: list[float], noise: float, signal: float, *, decay: float, share: float) -> None:
        """Take in one step with this weight, after the earlier ones have decayed."""
        self.weight = decay * self.weight + share
        self.weight_sq = decay**2 * self.weight_sq + share**2
        self.noise = decay * self.noise + share * noise
        self.signal = decay * self.signal + share * signal
        if split == self.last_split:
            noise_step, signal_step = noise - self.last_noise, signal - self.last_signal
            self.scatter_weight = decay * self.scatter_weight + share
            self.scatter_weight_sq = decay**2 * self.scatter_weight_sq + share**2
            self.noise_scatter = decay * self.noise_scatter + share * noise_step**2 / 2
            self.signal_scatter = decay * self.signal_scatter + share * signal_step**2 / 2
            self.joint_scatter = decay * self.joint_scatter + share * noise_step * signal_step / 2
        self.last_split, self.last_noise, self.last_signal = split, noise, signal

    def resize(self, sqnorm: float) -> None:
        """Take in this step's X, and bring the sums to the size that gradients have now."""
        if sqnorm <= 0:
            return
        self.size_weight, before = _SIZE_DECAY * self.size_weight + 1, self.log_size
        self.log_size += (math.log(sqnorm) - self.log_size) / self.size_weight
        if self.size_weight == 1:  # what came before, if anything, is of this size
            return
        change = math.exp(self.log_size - before)
        self.weight, self.noise, self.signal = (change * x for x in (self.weight, self.noise, self.signal))
        self.noise_scatter, self.signal_scatter, self.joint_scatter = (
            change**2 * x for x in (self.noise_scatter, self.signal_scatter, self.joint_scatter)
        )

    def limits(self) -> tuple[float, float]:
        if 0 in (self.weight, self.scatter_weight, self.scatter_weight_sq):
            return 0.0, math.inf
        shrink = self.weight_sq / self.weight**2 / self.scatter_weight
        return fieller_limits(
            signal=self.signal / self.weight,
            noise=max(self.noise / self.weight, 0.0),
            signal_var=shrink * self.signal_scatter,
            noise_var=shrink * self.noise_scatter,
            covariance=shrink * self.joint_scatter,
            quantile=student_quantile(self._degrees_of_freedom()),
        )

    def _degrees_of_freedom(self) -> float:
        """Return how well variances are known: as by so many independent values.

        m successive differences that weigh alike are worth 2 m^2/(3 m - 1) of them, since neighbours share a step.
        """
        num_differences = max(1.0, self.scatter_weight**2 / self.scatter_weight_sq)
        return 2 * num_differences**2 / (3 * num_differences - 1)


@dataclass(kw_only=True)
class _Steps:
    """Counts, and the last gradient of a single group; `previous_batch` is 0 where that gradient is not known.

    `samples_passed` are those of steps whose norms were not taken, since the last whose were.
    """

    num_taken: int = 0
    num_skipped: int = 0
    samples_passed: float = 0.0
    paired: bool = False
    previous_batch: float = 0.0
    previous_sqnorm: float = 0.0


class NoiseTracker:
    """Running estimate of the gradient noise scale, with limits, and with weights chosen on the way.

    Averages decay by .999^(B/B0) per step, so by samples rather than steps, whether a step's norms were taken or not,
    and are corrected for their start. Steps count relative to the gradients' size at their time. Signal and noise are
    clamped at 0 after averaging, never before. `flags` says where the numbers need care:

    - "batch_norm": statistics of each rank's own batch make small batches noisier than in theory; t = 1.
    - "disagreement": the mean of D is over 4 standard errors from 0: small and large groups see unlike noise; t = 1.
    - "biased": consecutive steps are compared (`update_single`), between which the weights moved.

    Args:
        initial_batch: B0, the total batch at the start, samples.
        batch_norm: whether ranks normalise by statistics of their own batch.
        smoothing: for AdaptDL's policy, its averages instead of ours: they decay by smoothing^(B/B0) per step, and each
            step counts in its gradient's own size.

    Example:
        >>> tracker = NoiseTracker(initial_batch=32)
        >>> for _ in range(3):
        ...     estimate = tracker.update([8, 24], [3.0, 2.0], 1.75)
        >>> tracker.num_steps, round(tracker.noise_scale, 2), round(tracker.gain(64), 2)
        (3, 14.34, 1.18)
    """

    def __init__(self, *, initial_batch: int, batch_norm: bool = False, smoothing: float | None = None) -> None:
        if not (math.isfinite(initial_batch) and initial_batch >= 1):
            raise InvalidInputError(f"initial_batch={initial_batch}: a batch needs at least 1 sample")
        self._initial_batch = initial_batch
        self._batch_norm = batch_norm
        self._smoothing, self._is_resized = smoothing or _SMOOTHING, smoothing is None
        self._control, self._averages, self._steps = ControlVariate(), _Averages(), _Steps()
        self.num_batches = 1  # that pile up for one step of the optimizer: phi is in samples of them all

    def update(
        self, local_batches: npt.ArrayLike, local_sqnorms: npt.ArrayLike, global_sqnorm: float
    ) -> NoiseEstimate | None:
        """Take in one step of two or more groups; arguments as for `noise_scale`.

            S = S0 + t D        G = X - S / B        with t from earlier steps

        Returns these raw values, or None where a norm is not finite: the step is skipped, and counted in `num_skipped`.

        >>> NoiseTracker(initial_batch=32, batch_norm=True).update([8, 24], [3.25, 2.5], 1.75).noise_trace
        44.0
        """
        batches, sqnorms, total_sqnorm = checked_groups(local_batches, local_sqnorms, global_sqnorm)
        if not (total_sqnorm < SQNORM_LIMIT and sqnorms.max() < SQNORM_LIMIT):
            self._steps.num_skipped += 1
            return None
        if self._steps.paired:
            # Averages from comparing consecutive steps are biased, and must not outlive that mode.
            self._averages, self._steps.paired, self._steps.previous_batch = _Averages(), False, 0.0
        noise0, difference, spread = pooled_ends(batches, sqnorms, total_sqnorm)
        noise = noise0 + self._blend(spread) * difference
        self._control.learn(noise0, difference, spread)
        return self._record(batches.tolist(), noise, total_sqnorm - noise / float(batches.sum()))

    def update_single(self, batch: int, sqnorm: float, dot_previous: float | None) -> NoiseEstimate | None:
        """Take in one step of a single group by comparing its gradient g with the step before's, g'.

            G = g.g'        S = B (X - G)        X = |(b g + b' g') / B|^2        B = b + b'

        With b = b' this is AdaptDL's differencing. The weights moved in between, so `flags` has "biased": at high rates
        they overshoot, g.g' is negative on average, and the noise is not known. Neighbouring estimates share a
        gradient, so the limits are too narrow. The next `update` starts the averages afresh.

        Args:
            batch: b, samples.
            sqnorm: |g|^2.
            dot_previous: g.g'; None, or ignored, where the step before is not known or was skipped.

        Returns the raw values, or None: nothing to compare with, or a value is not finite (counted in `num_skipped`).

        >>> tracker = NoiseTracker(initial_batch=32)
        >>> tracker.update_single(32, 3.0, None)
        >>> estimate = tracker.update_single(32, 2.0, 1.5)
        >>> estimate.signal_sqnorm, estimate.noise_trace, tracker.flags
        (1.5, 32.0, ('biased',))
        """
        if not (math.isfinite(batch) and batch >= 1) or sqnorm < 0:
            raise InvalidInputError(f"batch={batch}, sqnorm={sqnorm}: need at least 1 sample and no negative norm")
        steps = self._steps
        if not steps.paired:
            steps.paired, self._averages.last_split = True, []
        before, sqnorm_before = steps.previous_batch, steps.previous_sqnorm
        finite = sqnorm < SQNORM_LIMIT
        steps.previous_batch, steps.previous_sqnorm = (float(batch), float(sqnorm)) if finite else (0.0, 0.0)
        if finite and (dot_previous is None or before == 0):
            return None
        if not finite or dot_previous is None or not abs(dot_previous) < SQNORM_LIMIT:
            steps.num_skipped += 1
            return None
        total, dot = batch + before, float(dot_previous)
        total_sqnorm = (batch**2 * sqnorm + before**2 * sqnorm_before + 2 * batch * before * dot) / total**2
        return self._record([before, float(batch)], total * (total_sqnorm - dot), dot)

    def observe(self, window: StepWindow) -> None:
        """Take in every step whose norms were taken on all ranks; steps with an infinite norm are counted as skipped.

        Of other steps only the number of samples counts: averages forget by what was trained on, not by what was seen.

        Times need not be valid: an overflow mostly makes the optimizer skip its step (GradScaler), and where gradients
        pile up after each has been reduced, it is those of the group's first batch whose norms are taken. One rank
        alone is compared with itself one step before, where both steps are in the window: flagged as biased.
        """
        previous, batches = -1, window.local_batches * window.accumulated[:, None]
        missing = np.isnan(window.local_sqnorm).any(axis=1) | np.isnan(window.global_sqnorm)
        totals = window.local_batches.sum(axis=1)
        for s in range(window.num_steps):
            if missing[s] and not window.overflowed[s]:
                self._steps.samples_passed += float(totals[s])
                continue
            # A step with a negative norm is counted as skipped, like one whose norm is not finite.
            local = np.where(window.local_sqnorm[s] >= 0, window.local_sqnorm[s], np.nan)
            if window.num_ranks > 1:
                self.update(batches[s], local, float(window.global_sqnorm[s]))
            else:
                dot = float(window.previous_dot[s])
                near = previous >= 0 and s - previous <= window.accumulated[previous : s + 1].max()
                known = near and not np.isnan(dot)
                self.update_single(int(batches[s, 0]), float(local[0]), dot if known else None)
            previous = s
        stepped = np.flatnonzero(window.valid.all(axis=1))
        if len(stepped):
            self.num_batches = int(window.accumulated[stepped[-1]])

    def summary(self) -> Noise | None:
        """Return what is known by now, for a decision; None before the first step."""
        if not self.num_steps:
            return None
        return Noise(
            signal_sqnorm=self.signal_sqnorm,
            noise_trace=self.noise_trace,
            limits=self.limits,
            flags=self.flags,
            num_steps=self.num_steps,
            num_batches=self.num_batches,
        )

    def blend(self, local_batches: npt.ArrayLike) -> float:
        """Return t, the share of S1 in S (0 to 1), that the next step on this split will use.

        >>> NoiseTracker(initial_batch=64).blend([4, 60])
        0.5
        """
        batches, *_ = checked_groups(local_batches, local_batches, 0.0)
        return self._blend(float(batches @ batches / batches.sum()))

    @property
    def num_steps(self) -> int:
        """Steps taken in."""
        return self._steps.num_taken

    @property
    def num_skipped(self) -> int:
        """Steps left out because a value was not finite."""
        return self._steps.num_skipped

    @property
    def flags(self) -> tuple[str, ...]:
        """Reasons for care, as the class's description lists them."""
        reasons = (self._batch_norm, self._control.disagrees, self._steps.paired)
        return tuple(compress(("batch_norm", "disagreement", "biased"), reasons))

    @property
    def signal_sqnorm(self) -> float:
        """G, averaged, then clamped at 0; NaN where it is not known."""
        return max(self._averages.signal / self._averages.weight, 0.0) if self._is_known else math.nan

    @property
    def noise_trace(self) -> float:
        """S, averaged, then clamped at 0; NaN where it is not known."""
        return max(self._averages.noise / self._averages.weight, 0.0) if self._is_known else math.nan

    @property
    def _is_known(self) -> bool:
        """Whether there are data, and consecutive gradients do not point apart, which a high rate causes, not noise."""
        return self._averages.weight > 0 and not (self._steps.paired and self._averages.signal <= 0)

    @property
    def noise_scale(self) -> float:
        """phi = S / G in samples, inf where G is 0; NaN where not known. Beyond about 30 B trust only `limits[0]`."""
        return math.inf if self.signal_sqnorm == 0 else self.noise_trace / self.signal_sqnorm

    @property
    def limits(self) -> tuple[float, float]:
        """90% limits of phi in samples, by `fieller_limits`; an upper limit of inf means "at least the lower".

        Variances come from differences of successive steps on one split: a drift of the truth does not widen them.
        """
        return self._averages.limits() if self._is_known else (0.0, math.inf)

    @overload
    def efficiency(self, total_batch: float) -> float: ...
    @overload
    def efficiency(self, total_batch: npt.NDArray[Any] | Sequence[float]) -> FloatArray: ...
    def efficiency(self, total_batch: Any) -> Any:
        """Return the progress per sample at total batch B' against B0: (S + B0 G) / (S + B' G).

        Where K batches pile up for each step of the optimizer, K B' against K B0: it is these that gradients are of.
        Where S and G are not known, or both are 0, a larger batch promises nothing: B0 / B'.

        >>> NoiseTracker(initial_batch=32).efficiency([32, 64]).tolist()
        [1.0, 0.5]
        """
        batches = np.asarray(total_batch, dtype=np.float64)
        if not (np.isfinite(batches).all() and (batches > 0).all()):
            raise InvalidInputError(f"total_batch={total_batch}: a total batch is a positive number of samples")
        known = Noise(signal_sqnorm=self.signal_sqnorm, noise_trace=self.noise_trace, num_batches=self.num_batches)
        shares = known.efficiency(batches, self._initial_batch)
        return shares if batches.ndim else float(shares)

    def supported(self, total_batches: IntArray, now: int) -> FloatArray:
        """Return the efficiency of total batches as far as it is certain, for the choice of one.

        Below the present total it is `efficiency`. Above it, a total must be worth it even if phi is at its lower 90%
        limit: a few noisy steps can put phi anywhere above that, and a total that has grown too far costs samples.

        >>> tracker = NoiseTracker(initial_batch=32)
        >>> _ = tracker.update([8, 24], [3.0, 2.0], 1.75)  # a single step: no limits yet
        >>> (tracker.supported(np.array([16, 32, 64]), 32) * [16, 32, 64]).round(1).tolist()
        [24.4, 32.0, 32.0]
        """
        shares: FloatArray = self.efficiency(total_batches)
        # phi as S with G = 1, or as S = 1 without G where noise drowns the signal for certain.
        low = self.limits[0]
        noise, signal = (1.0, 0.0) if low == math.inf else (low, 1.0)
        phi = Noise(noise_trace=noise, signal_sqnorm=signal, num_batches=self.num_batches)
        sure = phi.efficiency(np.maximum(total_batches, now), now)
        return np.where(total_batches > now, self.efficiency(now) * sure, shares)

    @overload
    def gain(self, total_batch: float) -> float: ...
    @overload
    def gain(self, total_batch: npt.NDArray[Any] | Sequence[float]) -> FloatArray: ...
    def gain(self, total_batch: Any) -> Any:
        """Return the progress per step at total batch B' against B0: B'/B0 efficiency(B'); 1 without data.

        >>> NoiseTracker(initial_batch=32).gain(64)
        1.0
        """
        gain = self.efficiency(total_batch) * np.asarray(total_batch, dtype=np.float64) / self._initial_batch
        return gain if gain.ndim else float(gain)

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned, in plain types; through JSON and back it continues bit for bit."""
        learned = {"control": asdict(self._control), "averages": asdict(self._averages), "steps": asdict(self._steps)}
        return {**learned, "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned; anything else raises StateError and changes nothing."""
        kinds = {"control": ControlVariate, "averages": _Averages, "steps": _Steps}
        if not isinstance(state, dict) or state.keys() != {*kinds, "num_batches"}:
            raise StateError(f"not the state of a NoiseTracker: {state!r:.200}; load what state_dict() returned")
        num_batches = whole("num_batches", state["num_batches"], 1)
        self._control, self._averages, self._steps = [_restored(kinds[name], state[name]) for name in kinds]
        self.num_batches = num_batches

    def _blend(self, spread: float) -> float:
        return 1.0 if self._batch_norm else self._control.blend(spread)

    def _record(self, split: list[float], noise: float, signal: float) -> NoiseEstimate:
        # What was not seen makes earlier steps older, and this one no weightier.
        own, passed = (self._smoothing ** (x / self._initial_batch) for x in (sum(split), self._steps.samples_passed))
        self._averages.add(split, noise, signal, decay=own * passed, share=1 - own)
        if self._is_resized:
            self._averages.resize(signal + noise / sum(split))
        self._steps.num_taken, self._steps.samples_passed = self._steps.num_taken + 1, 0.0
        return NoiseEstimate(signal_sqnorm=signal, noise_trace=noise)


def _restored(kind: type[Any], saved: Any) -> Any:
    """Return a `kind` with the saved values, if they have the names, types and signs of a real one's."""
    fresh = vars(kind())
    if not isinstance(saved, dict) or saved.keys() != fresh.keys():
        raise StateError(f"a NoiseTracker's state needs {', '.join(fresh)}, not {saved!r:.200}")
    for name, value in saved.items():
        if not _fits(value, fresh[name]) or (("num" in name or "weight" in name) and value < 0):
            raise StateError(f"{name}={value!r:.200} cannot be part of a NoiseTracker's state: is the file damaged?")
    return kind(**{name: list(value) if isinstance(value, list) else value for name, value in saved.items()})


def _fits(value: Any, fresh: Any) -> bool:
    if isinstance(fresh, list):
        return isinstance(value, list) and all(_fits(item, 0.0) for item in value)
    if isinstance(fresh, float):
        return type(value) in (int, float) and abs(value) < 1e300
    return type(value) is type(fresh)
