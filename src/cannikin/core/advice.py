"""What a scheduler wants to know of a job: its cluster as it was learned, and what it would gain with other ranks.

The paper hands its metrics to a scheduler (section 6). A `LearnedCluster` is those metrics as a value. Ranks can be
taken away from it and devices added, and `outlook` says what the job would then do:

    goodput = max over B of  B / T(B) * efficiency(B),    T(B) = OptPerf of B on these ranks

B is the job's own total batch, or any from its initial batch up to as far as the planner would go next, where the job
lets it grow and the gradient noise is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cannikin.core.fit import CurveFit, join_fits
from cannikin.core.goodput import growth_limit, total_grid
from cannikin.core.layers import Layers
from cannikin.core.learner import TRUST, TRUST_DOWN, Learner, ModelFit
from cannikin.core.perf import Cluster, Curve, rescaled_tails, step_time
from cannikin.core.planner import Noise
from cannikin.core.profiles import check_profile, load_profiles, profile_caps
from cannikin.core.split import solver_for
from cannikin.core.values import NO_MAX, FloatArray, Job
from cannikin.errors import InvalidInputError

_ROUNDS = 3  # solutions, each with the curves near the batches of the one before


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedRank:
    """What was learned of one rank and its device.

    Args:
        rank: its number in the run; None for a rank that would join.
        device, host: as the rank introduced itself; "" where it did not.
        forward, backward: fits of a_i and P_i, of this rank alone.
        load: L_i, one entry; 0 where loading never held the rank up.
        gammas: share of backward after which each bucket is ready, [J].
        shares: share of forward or of backward in each segment, [K], where ranks meet layer by layer; else empty.
        history: measured local batches, the two mean times at each in seconds, and the steps behind these, [4, K].
        min_batch, max_batch: bounds on the local batch.
    """

    rank: int | None
    device: str
    host: str
    forward: CurveFit
    backward: CurveFit
    load: Curve
    gammas: FloatArray
    shares: FloatArray
    history: FloatArray
    min_batch: int
    max_batch: int

    @property
    def known(self) -> bool:
        """Whether the measured batches lie far enough apart to tell fixed from per-sample time."""
        return bool(self.forward.known[0] and self.backward.known[0])

    @property
    def measured_batches(self) -> tuple[int, int]:
        """The smallest and the largest local batch that was measured."""
        return round(float(self.history[0].min())), round(float(self.history[0].max()))

    @property
    def usual_batch(self) -> int:
        """The local batch that was measured most."""
        return round(float(self.history[0, self.history[3].argmax()]))

    def reaches(self, local_batch: int) -> bool:
        """Return whether a local batch is so near to what was measured that the planner would go there at once."""
        smallest, largest = self.measured_batches
        return smallest / TRUST_DOWN <= local_batch <= largest * TRUST

    def as_dict(self, local_batch: int) -> dict[str, Any]:
        """Return this rank in plain types, times in milliseconds, its curves as they are near this local batch."""
        return {
            "rank": self.rank,
            "device": self.device,
            "host": self.host,
            "known": self.known,
            "forward_ms": _curve_ms(self.forward.near([local_batch])),
            "backward_ms": _curve_ms(self.backward.near([local_batch])),
            "load_ms": _curve_ms(self.load),
            "overlap": self.gammas.tolist(),
            "min_batch": self.min_batch,
            "max_batch": None if self.max_batch >= NO_MAX else self.max_batch,
            "measured_batches": list(self.measured_batches),
        }


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a job does on some ranks at its best total batch; `reason` says why where they cannot train it.

    Then the step time is infinite, the rates are 0 and there is no split. `extrapolated` says that a rank's batch is
    further from what it was measured at than the planner would go at once: such an outlook is less certain.
    """

    total_batch: int
    local_batches: tuple[int, ...]
    step_s: float
    efficiency: float
    extrapolated: bool = False
    reason: str = ""

    @property
    def samples_per_s(self) -> float:
        """Throughput, B/T."""
        return self.total_batch / self.step_s

    @property
    def goodput_per_s(self) -> float:
        """Samples per second, each at its worth in the initial batch."""
        return self.samples_per_s * self.efficiency

    def as_dict(self) -> dict[str, Any]:
        """Return the outlook in plain types, times in milliseconds; null where the ranks cannot train the job."""
        possible = not self.reason
        return {
            "possible": possible,
            "reason": self.reason or None,
            "total_batch": self.total_batch,
            "local_batches": list(self.local_batches) if possible else None,
            "step_ms": self.step_s * 1e3 if possible else None,
            "samples_per_s": self.samples_per_s if possible else None,
            "efficiency": self.efficiency if possible else None,
            "goodput_per_s": self.goodput_per_s if possible else None,
            "extrapolated": self.extrapolated,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedCluster:
    """A cluster and a job as far as a run has learned them; a value, which later steps do not change.

    Args:
        ranks: what was learned of each.
        tails_s: C_j, all-reduce time of bucket j and every later one between all these ranks, seconds, [J].
        batch_size, max_batch_size: the job's initial batch B0, and what it may grow to; None where it stays.
        local_batches: the split now in force, over the run's own ranks.
        noise: the gradient noise; None where it is not measured.
        layers: how all these ranks meet layer by layer; None where they meet in all-reduces of buckets.
        slowdown: measured over modelled step time: scatter makes the slowest of n ranks slower than each is alone.
        time_noise: relative scatter of one step's time.
    """

    ranks: tuple[LearnedRank, ...]
    tails_s: FloatArray
    batch_size: int
    max_batch_size: int | None
    local_batches: tuple[int, ...]
    noise: Noise | None
    layers: Layers | None = None
    slowdown: float = 1.0
    time_noise: float = 0.01

    @property
    def num_ranks(self) -> int:
        """n."""
        return len(self.ranks)

    @property
    def total_batch(self) -> int:
        """The total batch now in force."""
        return sum(self.local_batches)

    def cluster(self, near: Sequence[float] | None = None) -> Cluster:
        """Return the performance model, its curves as they are known near these local batches, or on the whole."""
        forward, backward = (
            join_fits(fits) for fits in zip(*((r.forward, r.backward) for r in self.ranks), strict=True)
        )
        load = [rank.load for rank in self.ranks]
        return Cluster(
            forward=forward.curve if near is None else forward.near(near),
            backward=backward.curve if near is None else backward.near(near),
            gammas=np.stack([rank.gammas for rank in self.ranks]),
            tails_s=self.tails_s,
            min_batch=[rank.min_batch for rank in self.ranks],
            max_batch=[rank.max_batch for rank in self.ranks],
            names=[rank.device or f"rank {i}" for i, rank in enumerate(self.ranks)],
            load=Curve(
                fixed_s=np.concatenate([line.fixed_s for line in load]),
                per_sample_s=np.concatenate([line.per_sample_s for line in load]),
            ),
            layers=self.layers,
        )

    # Other ranks.

    def without(self, *ranks: int) -> LearnedCluster:
        """Return the cluster after these ranks have left, by their numbers in the run."""
        numbers = [rank.rank for rank in self.ranks]
        for rank in ranks:
            if rank not in numbers:
                known = ", ".join(str(number) for number in numbers if number is not None)
                raise InvalidInputError(f"rank {rank} is not in this run: it has ranks {known}")
        rest = tuple(rank for rank in self.ranks if rank.rank not in ranks)
        if not rest:
            raise InvalidInputError("no rank would be left: at least 1 must stay, or one be added")
        return self._of(rest)

    def plus(self, newcomer: LearnedRank, count: int = 1) -> LearnedCluster:
        """Return the cluster after so many ranks like this one have joined."""
        return self._of(self.ranks + (replace(newcomer, rank=None),) * count)

    def _of(self, ranks: tuple[LearnedRank, ...]) -> LearnedCluster:
        layers = None if self.layers is None else self.layers.of(np.stack([rank.shares for rank in ranks]))
        tails_s = rescaled_tails(self.tails_s, self.num_ranks, len(ranks))
        return replace(self, ranks=ranks, tails_s=tails_s, layers=layers)

    def like(self, device: str) -> LearnedRank | None:
        """Return the rank of middle speed among those with this device; None where there is none."""
        alike = [rank for rank in self.ranks if rank.device == device]
        share = self.total_batch / len(self.local_batches)
        alike.sort(key=lambda r: float((r.forward.curve.at([share]) + r.backward.curve.at([share]))[0]))
        return alike[(len(alike) - 1) // 2] if alike else None

    def from_profile(self, device: str, profile: dict[str, Any]) -> LearnedRank:
        """Return a rank on a device of which a profile store knows; a damaged profile raises StateError.

        Its overlap ratios are the profile's where these have as many buckets, else the mean of the run's ranks.
        """
        check_profile(profile, device)
        learner = Learner(self.num_ranks + 1)
        columns = ("batches", "forward_s", "backward_s", "steps")
        own = [dict(zip(columns, r.history.tolist(), strict=True)) for r in self.ranks]
        known = [{**entries, "noise": self.time_noise, "shared": None} for entries in own]
        load_profiles(learner, [*known, profile])
        max_batch = int(profile_caps([profile])[0])
        model = learner.model(*Job(num_ranks=self.num_ranks + 1, batch_size=self.num_ranks + 1).bounds)
        forward, backward = (fit.take([self.num_ranks]) for fit in model.fits)
        shared = profile.get("shared") or {}
        gammas = np.array(shared.get("gammas", ()), dtype=np.float64)
        if gammas.shape != self.tails_s.shape:
            gammas = np.mean([rank.gammas for rank in self.ranks], axis=0)
        return LearnedRank(
            rank=None,
            device=device,
            host="",
            forward=forward,
            backward=backward,
            load=Curve(fixed_s=[0.0], per_sample_s=[0.0]),
            gammas=gammas,
            shares=np.mean([rank.shares for rank in self.ranks], axis=0),
            history=learner.history(self.num_ranks),
            min_batch=min(min(rank.min_batch for rank in self.ranks), max_batch),
            max_batch=max_batch,
        )

    # What the job does on them.

    def outlook(self) -> Outlook:
        """Return what the job does on these ranks at the total batch of the highest goodput."""
        low, high = (sum(bounds) for bounds in zip(*((r.min_batch, r.max_batch) for r in self.ranks), strict=True))
        totals = self._totals(min(high, NO_MAX))
        if not low <= totals[0] <= high:
            ranks = "1 rank takes" if self.num_ranks == 1 else f"{self.num_ranks} ranks take"
            most = f"at most {high}" if totals[0] > high else f"at least {low}"
            return Outlook(
                total_batch=totals[0],
                local_batches=(),
                step_s=math.inf,
                efficiency=0.0,
                reason=f"a total batch of {totals[0]} does not fit: the {ranks} {most} samples",
            )
        worth = self._efficiencies(totals)
        share = self.total_batch / self.num_ranks
        step_s = solver_for(self.cluster([share] * self.num_ranks)).step_times(totals)
        best = int(np.argmax(np.array(totals) / step_s * worth))
        batches, best_s = self._split(totals[best])
        return Outlook(
            total_batch=totals[best],
            local_batches=batches,
            step_s=best_s * self.slowdown,
            efficiency=float(worth[best]),
            extrapolated=not all(map(LearnedRank.reaches, self.ranks, batches)),
        )

    def _totals(self, high: int) -> list[int]:
        """Return the total batches to choose from, increasing."""
        now, noise = self.total_batch, self.noise
        largest = min(self.max_batch_size or self.batch_size, high)
        if largest <= self.batch_size or noise is None or math.isnan(noise.noise_scale):
            return [now]
        largest = max(self.batch_size, min(largest, int(growth_limit(noise.limits[0], noise.num_batches * now) * now)))
        return [int(total) for total in total_grid(self.batch_size, largest)]

    def _efficiencies(self, totals: list[int]) -> FloatArray:
        if self.noise is None:
            return np.ones(len(totals))
        return self.noise.efficiency(totals, self.batch_size)

    def _split(self, total_batch: int) -> tuple[tuple[int, ...], float]:
        """Return the best split of a total batch that fits, each curve taken near its batch, and its seconds."""
        near: tuple[float, ...] = (total_batch / self.num_ranks,) * self.num_ranks
        tried: list[tuple[float, tuple[int, ...]]] = []
        for _ in range(_ROUNDS):
            split = solver_for(self.cluster(near)).split(total_batch)
            near = split.local_batches
            tried.append((step_time(self.cluster(near), near), split.local_batches))
        best_s, batches = min(tried)
        return batches, best_s

    def as_dict(self) -> dict[str, Any]:
        """Return everything in plain types that JSON can hold, times in milliseconds: the form of `docs/reference`."""
        noise = self.noise or Noise(signal_sqnorm=math.nan, noise_trace=math.nan)
        own = list(self.local_batches)
        if [rank.rank for rank in self.ranks] != list(range(len(own))):  # ranks have left or joined
            own = [rank.usual_batch for rank in self.ranks]
        return {
            "batch_size": self.batch_size,
            "max_batch_size": self.max_batch_size,
            "total_batch": self.total_batch,
            "local_batches": list(self.local_batches),
            "noise_scale": _finite(noise.noise_scale),
            "noise_scale_limits": [_finite(limit) for limit in noise.limits],
            "slowdown": self.slowdown,
            "communication_ms": {"num_ranks": self.num_ranks, "tails": (self.tails_s * 1e3).tolist()},
            "ranks": [rank.as_dict(batch) for rank, batch in zip(self.ranks, own, strict=True)],
        }


def learned_ranks(learner: Learner, model: ModelFit, devices: Iterable[tuple[str, str]]) -> tuple[LearnedRank, ...]:
    """Return what a learner knows of each rank, for its model; `devices` has each rank's device and host."""
    assert model.cluster is not None
    cluster, (forward, backward) = model.cluster, model.fits
    return tuple(
        LearnedRank(
            rank=i,
            device=device,
            host=host,
            forward=forward.take([i]),
            backward=backward.take([i]),
            load=cluster.load.take(np.array([i])),
            gammas=cluster.gammas[i],
            shares=np.zeros(0) if cluster.layers is None else cluster.layers.shares[i],
            history=learner.history(i),
            min_batch=int(cluster.min_batch[i]),
            max_batch=int(cluster.max_batch[i]),
        )
        for i, (device, host) in enumerate(devices)
    )


def _curve_ms(curve: Curve) -> dict[str, float]:
    """Return the curve of one rank as a cluster file has it."""
    fixed, per_sample, floor = (float(times[0]) * 1e3 for times in (curve.fixed_s, curve.per_sample_s, curve.floor_s))
    return {"fixed": fixed, "per_sample": per_sample, "floor": floor}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
