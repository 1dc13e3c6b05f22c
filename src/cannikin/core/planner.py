"""What a planner is: windows of measured steps go in, decisions come out.

All that a decision found out is in its value: drivers (the runtime, the simulator, benchmarks) and logs never look
into a planner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cannikin.core.goodput import TotalChoice, efficiency
from cannikin.core.values import FloatArray, Job, Plan, StepWindow


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The gradient noise as a planner knows it at the time of a decision.

    Args:
        signal_sqnorm: G, squared norm of the true gradient; NaN where it is not known.
        noise_trace: S, trace of the covariance of one sample's gradient; NaN where it is not known.
        limits: 90% limits of the noise scale in samples; an infinite upper limit means "at least the lower".
        flags: reasons for care, as `NoiseTracker` lists them.
        num_steps: steps that this was estimated from.
        num_batches: K, batches that pile up for one step of the optimizer: the gradients that this is of are means of
            K B samples.
    """

    signal_sqnorm: float
    noise_trace: float
    limits: tuple[float, float] = (0.0, math.inf)
    flags: tuple[str, ...] = ()
    num_steps: int = 0
    num_batches: int = 1

    @property
    def noise_scale(self) -> float:
        """phi = S/G in samples; NaN where it is not known, inf where noise drowns the signal."""
        if math.isnan(self.noise_trace):
            return math.nan
        return self.noise_trace / self.signal_sqnorm if self.signal_sqnorm > 0 else math.inf

    @property
    def _is_known(self) -> bool:
        # Else it is NaN or infinite, or there is no gradient at all.
        return 0 < self.noise_trace + self.signal_sqnorm < math.inf

    def efficiency(self, total_batch: npt.ArrayLike, initial_batch: float) -> FloatArray:
        """Return how much a sample is worth at each total batch B against the initial one, B0, from 0 to 1.

        Where K batches pile up, at K B against K B0. Where the noise is not known, it counts as 0 and a larger batch
        promises nothing: B0/B.
        """
        noise, signal = (self.noise_trace, self.signal_sqnorm) if self._is_known else (0.0, 1.0)
        totals, initial = self.num_batches * np.asarray(total_batch), self.num_batches * initial_batch
        return efficiency(totals, initial_batch=initial, noise_trace=noise, signal_sqnorm=signal)

    def gain(self, total_batch: int, initial_batch: int) -> float:
        """Return how many steps at the initial batch one step at `total_batch` is worth; 1 where that is not known.

        Example:
            >>> Noise(signal_sqnorm=1.0, noise_trace=64.0).gain(192, 64)
            1.5
        """
        return (
            float(self.efficiency(total_batch, initial_batch)) * total_batch / initial_batch if self._is_known else 1.0
        )


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """A rank that takes `factor` times as long since `step`."""

    step: int
    rank: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a planner makes of a window: the plan, and all that it found out on the way.

    Args:
        plan: what every rank does from `plan.first_step` on.
        noise: the gradient noise, which learning rates and progress follow where the total batch grows; None where the
            planner measures none.
        choice: the total batches compared, where some were.
        changes: ranks whose speed was seen to change in this window.
        even_speed: how fast DDP's even split of the same total batch would be against the plan's, by the model; 0 where
            it breaks a bound, None where no model is known.
        settled: whether windows may be long; False while the planner learns, for instance after a change of speed.
        phase: one word for logs: what the planner is doing.
        norms_always: whether gradient norms are to be taken in every step; the first decision of a run says it for all.
    """

    plan: Plan
    noise: Noise | None = None
    choice: TotalChoice | None = None
    changes: tuple[SpeedChange, ...] = ()
    even_speed: float | None = None
    settled: bool = True
    phase: str = ""
    norms_always: bool = False


class Planner(Protocol):
    """Turns measured windows into decisions; never looks at a clock, a GPU or a file."""

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        """Learn from a window and plan.

        Args:
            window: the latest steps; None at the start, when the driver asks for the plan to begin with.
            job: what may be chosen from, its upper bounds already limited to what ranks' memories hold.
            step: the first step at which a new plan can be in force.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned, as plain numbers, strings, lists and dicts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""


@runtime_checkable
class NoisePlanner(Planner, Protocol):
    """A planner that tracks the gradient noise, which is of the training and not of the policy."""

    def start_with_noise(self, state: dict[str, Any]) -> None:
        """Begin with the noise that another policy's planner had tracked, its `state_dict()["noise"]`."""


@runtime_checkable
class DevicePlanner(Planner, Protocol):
    """A planner that learns something about devices which later runs can begin with (`profiles=`)."""

    def profiles(self) -> list[dict[str, Any] | None]:
        """Return one profile per rank, None where nothing is known."""

    def start_from(self, profiles: list[dict[str, Any] | None]) -> None:
        """Begin with what another run learned of these ranks' devices, before the first window."""
