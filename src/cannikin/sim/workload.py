"""What a step is worth: the gradient's signal and noise along training, and the progress that a batch makes.

Legend: B total batch, G = |G|^2, S = tr Sigma of one sample's gradient, phi = S/G, B0 the batch of the measured run.

    gain(B) = B/B0 (phi + B0)/(phi + B)        B0-steps that one step is worth (AdaScale)

Progress grows by the true gain of every step, so a batch beyond the noise scale costs epochs, whatever a planner
believes. The progress at which the metric reaches its target was measured at B0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cannikin.core.values import FloatArray, IntArray
from cannikin.errors import InvalidInputError
from cannikin.sim.catalog import WorkloadSpec, load_workload

_DIMENSIONS = 64  # of the gradients drawn: |e|^2 of a noise vector e scatters by sqrt(2/64), 18%


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload by name, with the target that ends its run."""

    name: str
    spec: WorkloadSpec
    target: float

    def moments(self, progress: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Return G and S at this progress, any shape, interpolated between measured epochs in logarithms."""
        curve, places = self.spec.curve, np.asarray(progress, dtype=np.float64)
        signal, noise = (
            np.asarray(np.exp(np.interp(places, curve.progress, np.log(values))))
            for values in (curve.signal_sqnorm, curve.noise_trace)
        )
        return signal, noise

    def gains(self, total_batches: npt.ArrayLike, progress: npt.ArrayLike) -> FloatArray:
        """Return the B0-steps that one step of each total batch is worth, at one progress for all or one for each."""
        signal, noise = self.moments(progress)
        initial, totals = self.spec.curve.initial_batch, np.asarray(total_batches, dtype=np.float64)
        gains: FloatArray = totals / initial * (noise + initial * signal) / (noise + totals * signal)
        return gains

    def metric(self, progress: float) -> float:
        """Return the metric at this progress; before the first measured epoch it is that epoch's."""
        return float(np.interp(progress, self.spec.curve.progress, self.spec.curve.metric))

    @property
    def target_progress(self) -> float:
        """Progress at which the target is reached; inf where the measured run never reaches it."""
        curve, sign = self.spec.curve, 1.0 if self.spec.higher_is_better else -1.0
        if self.target == self.spec.target:
            return float(curve.target_progress)
        best = np.maximum.accumulate(sign * np.array(curve.metric))
        if best[-1] < sign * self.target:
            return math.inf
        return float(np.interp(sign * self.target, best, curve.progress))

    @property
    def epoch_progress(self) -> float:
        """Progress of one pass over the data at the measured run's batch."""
        return self.spec.num_samples / self.spec.curve.initial_batch


def find_workload(name: str, target: float | None = None) -> Workload:
    """Return the workload of that name, with the paper's target or another."""
    spec = load_workload(name)
    if target is not None and not math.isfinite(target):
        raise InvalidInputError(f"target={target}: give a finite {spec.metric_name}")
    return Workload(name=name, spec=spec, target=spec.target if target is None else target)


def sample_sqnorms(
    local_batches: IntArray, signal_sqnorm: npt.ArrayLike, noise_trace: npt.ArrayLike, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Draw squared norms of the ranks' gradients, [S, n], and of their weighted mean, [S], for normal gradients.

    g_i = G + e_i,   e_i normal with trace S/b_i,   g = sum_i b_i/B g_i
    """
    shape = (*local_batches.shape, _DIMENSIONS)
    noise = rng.standard_normal(shape) * np.sqrt(np.asarray(noise_trace) / _DIMENSIONS / local_batches)[..., None]
    noise[..., 0] += np.sqrt(signal_sqnorm)
    weights = local_batches / local_batches.sum(axis=1, keepdims=True)
    mean = (weights[..., None] * noise).sum(axis=1)
    return (noise**2).sum(axis=-1), (mean**2).sum(axis=-1)
