"""Learns the cluster's performance model while it trains (paper, section 4.2), in steps instead of epochs.

Each rank has a short history of averages: a local batch, the mean log time of forward (a) and of backward (P), and the
number of steps behind it. Averages are of logarithms, since times scatter in proportion to themselves, and leave lone
outliers out; old steps are forgotten slowly. Curves are fitted to all ranks' averages together (`fit`), and are known
better near sizes that were run: `ModelFit.near`.

A rank whose times leave its own history on one side (a clipped CUSUM of standardised residuals) has changed its speed:
its history is multiplied by the observed factor, which keeps the shape of its curve, and given little weight, so that
later steps soon outweigh it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cannikin.core.fit import (
    REACH,
    CurveFit,
    bucket_times,
    fit_curves,
    lateness,
    middle_of,
    shrunken_gammas,
    trimmed_mean,
)
from cannikin.core.layers import LayerHistory
from cannikin.core.loading import LoadHistory
from cannikin.core.perf import Cluster, Curve, rescaled_tails, step_time
from cannikin.core.planner import SpeedChange
from cannikin.core.saved import LONG_S, number, table, whole
from cannikin.core.values import BoolArray, FloatArray, IntArray, StepWindow
from cannikin.errors import StateError

# Times are extrapolated only so far from what was measured:
TRUST = 2.0  # a rank gets at most this times the largest batch it was measured at,
TRUST_DOWN = 8.0  # and at least the smallest one divided by this.
_BENDS = 0.25  # share of the fixed time that grows with the batch beyond the largest one that was measured
# A process's first steps are slow, since libraries are loaded and memory is found: on an H200 the first five take up to
# 2.5 times as long, the next five 1.3 times. They say how ranks compare until others do, and then next to nothing.
_YOUNG_STEPS, _YOUNG_WEIGHTS = (5, 10), (0.002, 0.06, 1.0)
_WARM = 0.07  # the most that a rank's times (in logarithms) fall from its first steps to the next where it was warm
_KEEP = 0.99  # share of its weight that a step keeps with every later step: a memory of about 100 steps
_NEVER_FORGOTTEN = 4.0  # an average keeps the weight of this many steps: nothing else may tell the slope
_MAX_POINTS = 8  # averages kept for each rank
# An average this close (in logarithms) that rests on at least so many steps says what a time should be.
_NEAR_BATCH, _MIN_WEIGHT = 0.10, 2.5
# Elsewhere the fitted curve says it, with an allowance for the error of the fit that grows with the distance.
_ALLOWANCE, _DISTANCE_ALLOWANCE, _LARGE_ALLOWANCE = 0.2, 0.3, 0.5
# Relative standard deviation of a size's time from its line. GPUs work in waves: on shares of an H200 ResNet-18 takes 7
# to 10% more at 189 or 356 samples than the sizes around say.
_WAVES = 0.025
_OUTLIER = 3.0  # standard deviations
_LEAST_CHANGE = 0.04  # the least standard deviation for changes of speed: averages follow a drift of a few per cent
_AFTER_CHANGE = 4.0  # weight, in steps, that a rescaled history keeps
_CUSUM_DRIFT, _CUSUM_ALARM, _CUSUM_CLIP = 0.5, 9.0, 3.0  # in standard deviations: four steps of a doubled time
_RECENT = 32  # steps whose median gives communication times and overlap ratios
_LEAST_NOISE, _MOST_NOISE = 0.01, 0.5  # bounds on the relative scatter that is believed


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFit:
    """The performance model as far as it is known, with the reason; `cluster` is None while nothing was measured."""

    cluster: Cluster | None
    known: BoolArray
    reason: str
    fits: tuple[CurveFit, ...] = ()

    def near(self, local_batches: Sequence[float]) -> Cluster:
        """Return the cluster with every curve as it is known near these batches; only where there is a cluster."""
        assert self.cluster is not None
        forward, backward = (fit.near(local_batches) for fit in self.fits)
        return replace(self.cluster, forward=forward, backward=backward)

    def beyond(self, largest: FloatArray, local_batches: Sequence[float]) -> Cluster:
        """Return the cluster near these batches, with steeper curves where they exceed the largest that a rank has run.

        Times bend upwards, and a line that was fitted below the bend is too low beyond it: a split by such lines loads
        the very ranks whose times will be longer than promised. So there a part of the fixed time grows with the batch,
        and the line turns about the time at the largest batch.
        """
        cluster, is_beyond = self.near(local_batches), np.asarray(local_batches) > largest
        curves = []
        for curve in (cluster.forward, cluster.backward):
            share = np.where(is_beyond, _BENDS, 0.0)
            slope_s = curve.at(largest) / np.maximum(largest, 1.0)
            curves.append(
                Curve(
                    fixed_s=(1 - share) * curve.fixed_s,
                    per_sample_s=(1 - share) * curve.per_sample_s + share * slope_s,
                    floor_s=curve.floor_s,
                )
            )
        return replace(cluster, forward=curves[0], backward=curves[1])

    def step_s(self, local_batches: tuple[int, ...]) -> float:
        """Return the step time of a split by what is known near its own batches, seconds."""
        return step_time(self.near(local_batches), local_batches)


class Learner:
    """Online fit of every rank's curves, the overlap ratios, the communication tails, and layers if there are any."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.noise = 0.0
        self.loading = LoadHistory(num_ranks)
        self.layers = LayerHistory(num_ranks)
        self._rank_noise = np.zeros(num_ranks)
        self._present = np.zeros(num_ranks)  # the batch each rank was measured at last
        self._batches = np.ones((num_ranks, _MAX_POINTS + 1))
        self._logs = np.zeros((2, num_ranks, _MAX_POINTS + 1))
        self._weights = np.zeros((2, num_ranks, _MAX_POINTS + 1))
        self._cusum = np.zeros((2, num_ranks))
        self._comm = np.zeros((0, 0))
        self._gammas = np.zeros((0, num_ranks, 0))
        self._doubted: set[int] = set()  # ranks whose curve is another device's: see `doubt`
        self.num_steps = 0  # seen by this process: its first ones are slow

    def observe(self, window: StepWindow) -> tuple[SpeedChange, ...]:
        """Take in one window, without the steps marked invalid; return which ranks changed their speed in it."""
        if not window.valid.any():
            return ()
        times = np.stack([window.before_s, window.ready_s[..., -1]])
        logs = np.log(np.where(window.valid, times, 1.0).clip(1e-9))
        self._find_levels(window, logs)
        residuals, promised = self._residuals(window, logs)
        age = np.searchsorted(_YOUNG_STEPS, self.num_steps + np.arange(window.num_steps), side="right")
        weights = self._step_weights(window, logs, age)
        self.num_steps += window.num_steps
        self._update_noise(window, logs, is_young=bool((age < len(_YOUNG_STEPS)).all()))
        kept = np.minimum(self._weights, _NEVER_FORGOTTEN)
        self._weights = np.maximum(self._weights * _KEEP**window.num_steps, kept)
        trusted = np.where(promised & (weights > _YOUNG_WEIGHTS[0]), residuals, np.nan)
        changed_at, self._cusum = find_changes(trusted, self._scatter(_LEAST_CHANGE), self._cusum)
        changes = []
        for rank in range(self.num_ranks):
            steps = np.flatnonzero(window.valid[:, rank])
            if len(steps):
                self._present[rank] = window.local_batches[steps[-1], rank]
            split = int(changed_at[rank])
            self._remember(rank, window, logs, residuals, promised, steps[steps < split], weights)
            if split < window.num_steps:
                factor = self._rescale(rank, residuals[:, split:, rank])
                changes.append(SpeedChange(step=window.first_step + split, rank=rank, factor=factor))
                residuals[:, split:, rank] = np.nan
                self._remember(rank, window, logs, residuals, promised, steps[steps >= split], weights)
        self._observe_buckets(window)
        self.layers.observe(window)
        self.loading.observe(window)
        return tuple(changes)

    def model(self, low: IntArray, high: IntArray) -> ModelFit:
        """Return the cluster as measured so far, with these bounds on the local batches.

        Its curves are right near the batches that ranks run now: `ModelFit.near` has them near others.
        """
        measured = (self._weights.min(axis=0) > 0).any(axis=1)
        if not measured.all():
            rank = f"rank {int(measured.argmin())} has not been measured yet"
            reason = rank if measured.any() else "no step measured yet"
            return ModelFit(cluster=None, known=measured & False, reason=reason)
        forward, backward = self._fits()
        heaviest = self._batches[np.arange(self.num_ranks), self._weights.min(axis=0).argmax(axis=1)]
        present = np.where(self._present > 0, self._present, heaviest)
        # While communication is not known it counts as 0: the split then balances the computation.
        gammas, tails = self.buckets() or (np.ones((self.num_ranks, 1)), np.zeros(1))
        curves = forward.near(present), backward.near(present)
        if len(self._gammas):
            late = lateness(self._gammas, tails, *(curve.at(present) for curve in curves))
            gammas[:, :-1] = np.minimum(gammas[:, :-1] + late[:, None], 1.0)
        cluster = Cluster(
            forward=curves[0],
            backward=curves[1],
            gammas=gammas,
            tails_s=tails,
            min_batch=low,
            max_batch=high,
            load=self.loading.curve(),
            layers=self.layers.layers(),
        )
        known = forward.known & backward.known
        return ModelFit(cluster=cluster, known=known, reason=self._reason(known), fits=(forward, backward))

    @property
    def precision(self) -> float:
        """Relative standard error of the time of the rank that is known least well."""
        steps = self._weights.min(axis=0).sum(axis=1).min()
        return float(self.noise / np.sqrt(steps)) if steps > 0 else 1.0

    def batch_range(self) -> tuple[FloatArray, FloatArray]:
        """Return the smallest and largest local batch that each rank's history still holds."""
        seen = self._weights.max(axis=0) > 0
        smallest = np.where(seen, self._batches, np.inf).min(axis=1)
        largest = np.where(seen, self._batches, 0.0).max(axis=1)
        return smallest, largest

    def buckets(self) -> tuple[FloatArray, FloatArray] | None:
        """Return overlap ratios, [n, J], and tails, [J]; None before any were measured."""
        if not len(self._comm):
            return None
        gammas = shrunken_gammas(*trimmed_mean(self._gammas)).clip(0.0, 1.0)
        gammas[:, -1] = 1.0
        return gammas, trimmed_mean(self._comm)[0][::-1].cumsum()[::-1]

    def history(self, rank: int) -> FloatArray:
        """Return one rank's averages: local batches, times of forward and of backward, steps, [4, K]."""
        steps = self._weights[:, rank].min(axis=0)
        table = np.stack([self._batches[rank], *np.exp(self._logs[:, rank]), steps])
        return table[:, steps > 0]

    def fill(self, rank: int, table: FloatArray) -> None:
        """Begin with a history from another run, as `history` returned it, with little weight.

        Every average counts as one step, so that the curve keeps its shape. The one that rested on most steps counts as
        just as many as it takes to notice that the rank has become slower or faster since.
        """
        steps = np.minimum(table[3], 1.0)
        steps[table[3].argmax()] = _MIN_WEIGHT
        for (batch, *seconds, _), weight in zip(table.T, steps, strict=True):
            self._merge(rank, float(batch), np.log(seconds), np.full(2, weight))

    def fill_buckets(self, gammas: FloatArray, tails_s: FloatArray) -> None:
        """Begin with overlap ratios, [n, J], and tails, [J], from another run, as if they were one step's."""
        self._gammas, self._comm = gammas[None], -np.diff(tails_s, append=0.0)[None]

    def with_ranks(self, origins: Sequence[int | None]) -> Learner:
        """Return a learner of other ranks with what this one has learned of their devices; this one stays as it is.

        Communication times are rescaled to the new number of ranks (`rescaled_tails`), and then weigh as little as one
        step's. One rank alone knows none.

        Args:
            origins: for each of the new ranks, the rank here whose device it has; None where its device is not known.
                Where a rank is named again, the later one has another device of the same kind: it begins with the same
                curve, with little weight (`fill`).

        Example:
            >>> learner = Learner(3)
            >>> learner.fill(2, np.array([[8.0], [0.01], [0.02], [1.0]]))
            >>> [learner.with_ranks([2, None, 2]).history(rank)[0].tolist() for rank in range(3)]
            [[8.0], [], [8.0]]
        """
        other = Learner(len(origins))
        other.noise, other.loading = self.noise, self.loading.with_ranks(origins)
        other.layers = self.layers.with_ranks(origins)
        other.num_steps = self.num_steps
        pairs = [(now, was) for now, was in enumerate(origins) if was is not None]
        first = {was: now for now, was in reversed(pairs)}
        for name, axis in _RANK_AXES.items():
            old, new = (np.moveaxis(getattr(learner, name), axis, 0) for learner in (self, other))
            for was, now in first.items():
                new[now] = old[was]
        for now, was in pairs:
            if now != first[was] and (table := self.history(was)).size:
                other.fill(now, table)
                other.doubt(now)
        other._doubted |= {first[was] for was in self._doubted if was in first}
        if pairs:
            other._take_buckets(self, pairs)
        return other

    def doubt(self, rank: int) -> None:
        """Believe the shape of a rank's curve alone, which is another device's; its level is that of its first steps.

        Else a device that is slower than its kind, with a batch beyond those of the curve, would look as if small
        batches took it as long as large ones, and would keep its batch.
        """
        self._doubted.add(rank)

    def _find_levels(self, window: StepWindow, logs: FloatArray) -> None:
        """Give the curves of doubted ranks the level of their first steps."""
        ranks = [rank for rank in self._doubted if window.valid[:, rank].any()]
        if not ranks or not (self._weights.min(axis=0) > 0).any(axis=1).all():
            return
        for c, fit in enumerate(self._fits()):
            residuals = logs[c] - np.log(fit.curve.at(window.local_batches))
            for rank in ranks:
                self._logs[c, rank] += np.median(residuals[window.valid[:, rank], rank])
        self._doubted.difference_update(ranks)

    def _take_buckets(self, before: Learner, pairs: list[tuple[int, int]]) -> None:
        """Take over communication times and overlap ratios; of ranks that are in no (now, was) pair there are none."""
        comm, gammas, buckets = before._comm, before._gammas, before.buckets()
        if buckets is None or (before.num_ranks == 1 and self.num_ranks > 1):
            return
        if self.num_ranks != before.num_ranks:
            tails_s = rescaled_tails(buckets[1], before.num_ranks, self.num_ranks)
            gammas, comm = buckets[0][None], -np.diff(tails_s, append=0.0)[None]
        self._comm = comm.copy()
        self._gammas = np.full((len(gammas), self.num_ranks, gammas.shape[-1]), np.nan)
        for now, was in pairs:
            self._gammas[:, now] = gammas[:, was]

    def _fits(self) -> list[CurveFit]:
        """Fit the curves of forward and of backward."""
        noise = max(self.noise, _LEAST_NOISE)
        times = np.exp(self._logs)
        return [fit_curves(self._batches, times[c], self._weights[c], noise, waves=_WAVES) for c in (0, 1)]

    def _reason(self, known: BoolArray) -> str:
        if known.all():
            return f"all ranks' lines known, relative noise {self.noise:.1%}"
        rank = int(np.flatnonzero(~known)[0])
        seen = sorted({round(float(b)) for b in self._batches[rank][self._weights[0, rank] > 0]})
        return f"rank {rank} has run local batches {seen} only: too close together to tell fixed from per-sample time"

    def _residuals(self, window: StepWindow, logs: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Return log time over what the rank's history promises, NaN without one, and where the promise is trusted.

        Near a batch with a solid average, that average is moved along the fitted curve, and what waves between the two
        sizes may add is allowed for: a size that suits a device less is no change of its speed. Elsewhere the curve
        itself is the promise, and only the excess over an allowance for its error counts. Between batches that were
        seen, where the curve is known, the allowance is small. Beyond them it is large, and the excess tells outliers
        only: it is not trusted for changes of speed.
        """
        residuals, promised = np.full(logs.shape, np.nan), np.zeros(window.valid.shape, dtype=np.bool_)
        if not (self._weights.min(axis=0) > 0).any(axis=1).all():
            return residuals, promised
        solid = self._weights.min(axis=0) >= _MIN_WEIGHT
        batches = np.maximum(window.local_batches, 1)
        distance = np.abs(np.log(self._batches)[None] - np.log(batches)[..., None])
        distance = np.where(solid[None], distance, 10.0)
        nearest, away = distance.argmin(axis=-1), distance.min(axis=-1)
        near = away < _NEAR_BATCH
        wave = 2.0 * _WAVES * np.sqrt(2.0 * (1.0 - np.exp(-away / REACH)))  # two deviations of a difference
        rank = np.arange(self.num_ranks)[None]
        smallest, largest = self.batch_range()
        curves = self._fits()
        between = (window.local_batches >= smallest) & (window.local_batches <= largest)
        between &= curves[0].known & curves[1].known
        for c, fit in enumerate(curves):
            error = self._logs[c, rank, nearest] - np.log(fit.curve.at(self._batches[rank, nearest]))
            residual = logs[c] - np.log(fit.curve.at(window.local_batches))
            allowed = np.where(between, _ALLOWANCE + _DISTANCE_ALLOWANCE * away, _LARGE_ALLOWANCE)
            residual = np.where(near, residual - error, residual)
            beyond = np.sign(residual) * np.maximum(np.abs(residual) - np.where(near, wave, allowed), 0.0)
            residuals[c] = np.where(window.valid, beyond, np.nan)
        return residuals, window.valid & (near | between)

    def _step_weights(self, window: StepWindow, logs: FloatArray, age: IntArray) -> FloatArray:
        """Return what each step of each rank weighs, [S, n]; `age` counts the limits of `_YOUNG_STEPS` that it is past.

        A rank whose times do not fall, from its first window to the second or within a window, was warm from the start,
        and all of its steps count.
        """
        weights = np.repeat(np.array(_YOUNG_WEIGHTS)[age], self.num_ranks).reshape(-1, self.num_ranks)
        if self.num_steps >= _YOUNG_STEPS[-1]:
            return weights
        for rank in range(self.num_ranks):
            history, batches = self._weights[:, rank], window.local_batches[:, rank]
            steps = np.flatnonzero(window.valid[:, rank] & (batches == batches[0]))
            young = (history.min(axis=0) > 0) & (history.max(axis=0) < 2 * _YOUNG_STEPS[0] * _YOUNG_WEIGHTS[0])
            seen = young & (self._batches[rank] == batches[0])
            times = logs[:, steps, rank].mean(axis=0)
            half = len(steps) // 2
            if half == 0:
                continue
            fall = times[:half].min() - times[-half:].min()  # outliers are slow
            if seen.any():
                fall = self._logs[:, rank, seen.argmax()].mean() - np.median(times)
            if fall < _WARM:
                weights[:, rank] = 1.0
            if fall < _WARM and seen.any():
                history[:, young] /= _YOUNG_WEIGHTS[0]
        return weights

    def _update_noise(self, window: StepWindow, logs: FloatArray, *, is_young: bool) -> None:
        """Learn the relative scatter from neighbouring steps with the same local batch."""
        same = (np.diff(window.local_batches, axis=0) == 0) & window.valid[1:] & window.valid[:-1]
        steps = np.abs(np.diff(logs, axis=1))[:, same]
        if steps.size:
            # The median of |x - y| for two normal variables is 0.6745 sqrt(2) standard deviations.
            scatter = float(np.clip(np.median(steps) / 0.9539, _LEAST_NOISE, _MOST_NOISE))
            self.noise = scatter if is_young or self.noise == 0.0 else 0.7 * self.noise + 0.3 * scatter
        for rank in np.flatnonzero(same.sum(axis=0) >= 3):
            own = float(np.median(np.abs(np.diff(logs[:, :, rank], axis=1))[:, same[:, rank]])) / 0.9539
            # The weight is small: two outliers in a short window must not pass for a noisy rank.
            before = self._rank_noise[rank] or self.noise
            self._rank_noise[rank] = before + 0.1 * (min(own, _MOST_NOISE) - before)

    def _scatter(self, least: float) -> FloatArray:
        """Return each rank's standard deviation: its own where that is larger than the common one, [n]."""
        scatter: FloatArray = np.clip(np.maximum(self._rank_noise, self.noise), least, _MOST_NOISE)
        return scatter

    def _rescale(self, rank: int, residuals: FloatArray) -> float:
        """Multiply a rank's history by the factor of its change, lower its weight, and return the factor."""
        factor = np.nanmedian(residuals, axis=1)
        self._logs[:, rank] += factor[:, None]
        total = self._weights[:, rank].sum(axis=1, keepdims=True)
        self._weights[:, rank] *= np.minimum(1.0, _AFTER_CHANGE / np.maximum(total, 1e-300))
        return float(np.exp(factor.mean()))

    def _remember(
        self,
        rank: int,
        window: StepWindow,
        logs: FloatArray,
        residuals: FloatArray,
        promised: BoolArray,
        steps: IntArray,
        weights: FloatArray,
    ) -> None:
        """Average these steps of one rank into its history, each component without its outliers."""
        for batch in np.unique(window.local_batches[steps, rank]):
            same = steps[window.local_batches[steps, rank] == batch]
            values = logs[:, same, rank]
            off = residuals[:, same, rank]
            cut = _OUTLIER * self._scatter(_LEAST_NOISE)[rank]
            alone = np.isnan(off) | (~promised[same, rank] & (len(same) >= 3))
            # If most steps of this window disagree with the history and no speed change is suspected (CUSUM at 0), the
            # history is wrong: trust the window.
            alone |= (np.mean(np.abs(off) > cut, axis=1, keepdims=True) > 0.5) & ~self._cusum[:, rank].any()
            off = np.where(alone, values - middle_of(values, cut), off)
            weight = np.where(np.abs(off) <= cut, weights[same, rank], 0.0)
            total = weight.sum(axis=1)
            mean = (weight * values).sum(axis=1) / np.where(total > 0, total, 1.0)
            self._merge(rank, float(batch), mean, total)

    def _merge(self, rank: int, batch: float, logs: FloatArray, counts: IntArray | FloatArray) -> None:
        """Add an average to a rank's history: to the point of its batch, or as a point of its own.

        Neighbours stay apart as long as there is room, since one of them may suit the device better than the other.
        Where there is none, the two nearest points become one.

        The history has one place more than is kept, so that there is always a place for the new point.
        """
        points, weights = self._batches[rank], self._weights[:, rank]
        points[-1], self._logs[:, rank, -1], weights[:, -1] = batch, logs, counts
        used = weights.max(axis=0) > 0
        order = np.argsort(np.where(used, points, np.inf), kind="stable")
        points[:], weights[:] = points[order], weights[:, order]
        self._logs[:, rank] = self._logs[:, rank, order]
        num_used = int(used.sum())
        gaps = np.diff(np.log(points[:num_used]))
        if num_used > 1 and (gaps.min() == 0 or num_used == len(points)):
            self._join(rank, int(gaps.argmin()))

    def _join(self, rank: int, k: int) -> None:
        """Make points k and k + 1 of a rank one, and close the gap."""
        points, weights, logs = self._batches[rank], self._weights[:, rank], self._logs[:, rank]
        total = weights[:, k] + weights[:, k + 1]
        share = weights[:, k + 1] / np.maximum(total, 1e-300)
        logs[:, k] += share * (logs[:, k + 1] - logs[:, k])
        points[k] *= (points[k + 1] / points[k]) ** share.mean()
        weights[:, k] = total
        for array in (points, *weights, *logs):
            array[k + 1 : -1] = array[k + 2 :]
        points[-1], weights[:, -1], logs[:, -1] = 1.0, 0.0, 0.0

    def _observe_buckets(self, window: StepWindow) -> None:
        """Keep the recent communication times and overlap ratios."""
        usable = window.valid.mean(axis=1) >= 0.5
        if not usable.any():
            return
        if self._comm.shape[1] != window.num_buckets:  # DDP has rebuilt its buckets: forget the times of the old ones
            self._comm = np.zeros((0, window.num_buckets))
            self._gammas = np.zeros((0, self.num_ranks, window.num_buckets))
        valid = window.valid[..., None]
        gammas = np.where(valid, window.ready_s / np.where(valid, window.ready_s[..., -1:], 1.0), np.nan)
        self._comm = np.concatenate([self._comm, bucket_times(window)[usable]])[-_RECENT:]
        self._gammas = np.concatenate([self._gammas, gammas[usable]])[-_RECENT:]

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned, as plain lists and numbers."""
        # An overlap ratio that a rank did not measure is NaN, which is not JSON.
        arrays = {name: [None if x != x else x for x in getattr(self, name).ravel().tolist()] for name in _ARRAYS}
        return {
            "num_ranks": self.num_ranks,
            "num_buckets": self._comm.shape[1],
            "noise": self.noise,
            "loading": self.loading.state_dict(),
            "layers": self.layers.state_dict(),
            "doubted": sorted(self._doubted),
            "num_steps": self.num_steps,
            **arrays,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        if state.get("num_ranks") != self.num_ranks:
            raise StateError(f"state of {state.get('num_ranks')} ranks loaded into a learner of {self.num_ranks}")
        self.noise = number("noise", state["noise"], high=_LIMITS["_rank_noise"][1])
        self.loading.load_state_dict(state["loading"])
        self.layers.load_state_dict(state["layers"])
        self.num_steps = whole("num_steps", state["num_steps"])
        self._doubted = {whole("doubted", rank) for rank in state["doubted"]} & set(range(self.num_ranks))
        buckets = whole("num_buckets", state["num_buckets"])
        rows = len(state["_comm"]) // max(buckets, 1)
        shapes: dict[str, tuple[int, ...]] = {"_comm": (rows, buckets), "_gammas": (rows, self.num_ranks, buckets)}
        for name in _ARRAYS:
            shape = shapes.get(name, getattr(self, name).shape)
            setattr(self, name, table(name, state[name], shape, *_LIMITS[name], gaps=name == "_gammas"))


_LIMITS = {  # of what can have been measured
    "_present": (0.0, 1e12),
    "_batches": (0.5, 1e12),
    "_logs": (-30.0, 15.0),
    "_weights": (0.0, 1e12),
    "_cusum": (0.0, 1e6),
    "_comm": (0.0, LONG_S),
    "_gammas": (0.0, 1e3),
    "_rank_noise": (0.0, 100.0),
}
_ARRAYS = ("_present", "_batches", "_logs", "_weights", "_cusum", "_comm", "_gammas", "_rank_noise")
_RANK_AXES = {"_present": 0, "_batches": 0, "_logs": 1, "_weights": 1, "_cusum": 1, "_rank_noise": 0}


def find_changes(residuals: FloatArray, scatter: FloatArray, cusum: FloatArray) -> tuple[IntArray, FloatArray]:
    """Return the step of a window at which each rank's speed changed (S where it did not), and the sums after it.

    Args:
        residuals: log time over what was promised, of forward and of backward, [2, S, n]; NaN without a promise.
        scatter: standard deviation of each rank, [n].
        cusum: the sums before this window, for slower and for faster, [2, n]; 0 at the start and after a change.

    Example:
        >>> slower = np.full((2, 6, 1), 0.7)
        >>> slower[:, :2] = 0.0
        >>> find_changes(slower, np.array([0.05]), np.zeros((2, 1)))[0].tolist()
        [2]
    """
    steps, num_ranks = residuals.shape[1:]
    sums, changed = cusum.copy(), np.full(num_ranks, steps)
    # Each component is clipped by itself: a lone outlier in one of them is no change of speed.
    scores = np.clip(np.nan_to_num(residuals) / scatter, -_CUSUM_CLIP, _CUSUM_CLIP).mean(axis=0)
    began = np.zeros((2, num_ranks), dtype=np.int64)
    for s in range(steps):
        seen = ~np.isnan(residuals[0, s])
        for sign, side in ((1.0, 0), (-1.0, 1)):
            began[side] = np.where(sums[side] == 0, s, began[side])
            grown = np.maximum(0.0, sums[side] + sign * scores[s] - _CUSUM_DRIFT)
            sums[side] = np.where(seen, grown, sums[side])
            alarm = (sums[side] > _CUSUM_ALARM) & (changed == steps)
            changed = np.where(alarm, began[side], changed)
    sums[:, changed < steps] = 0.0
    return changed, sums
