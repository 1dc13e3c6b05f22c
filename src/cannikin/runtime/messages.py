"""A plan on its way from rank 0 to the others: whole numbers only, floats by their bits."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import torch

from cannikin.core.goodput import efficiency
from cannikin.core.records import Plan

__all__ = ["Decision", "decision_length", "decode_decision", "encode_decision"]

_PHASES = ("even", "inverse", "optperf", "lb-bsp", "other")
_HEAD = 8


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What rank 0 decided at the end of a window.

    `num_nonfinite` steps so far had a gradient that was not finite; windows have `window_steps` from now on.
    """

    plan: Plan
    signal_sqnorm: float = float("nan")
    noise_trace: float = float("nan")
    num_nonfinite: int = 0
    window_steps: int = 5

    @property
    def noise_scale(self) -> float:
        """phi = S/G in samples; NaN where it is not known, inf where noise drowns the signal."""
        if self.noise_trace != self.noise_trace:
            return self.noise_trace
        return self.noise_trace / self.signal_sqnorm if self.signal_sqnorm > 0 else float("inf")

    def gain(self, total_batch: int, initial_batch: int) -> float:
        """Initial-batch steps that one step at this total batch is worth; 1 where the noise scale is not known."""
        if not self.noise_trace + self.signal_sqnorm > 0:  # not known, or no gradient at all
            return 1.0
        return _gain(total_batch, initial_batch, self.noise_trace, self.signal_sqnorm)


@lru_cache(maxsize=16)  # asked twice in every step, for the same numbers until the next window
def _gain(total_batch: int, initial_batch: int, noise_trace: float, signal_sqnorm: float) -> float:
    worth = efficiency(total_batch, initial_batch=initial_batch, noise_trace=noise_trace, signal_sqnorm=signal_sqnorm)
    return float(worth) * total_batch / initial_batch


def decision_length(num_ranks: int) -> int:
    """Numbers in an encoded decision."""
    return _HEAD + 2 * num_ranks


def encode_decision(decision: Decision) -> torch.Tensor:
    """A decision as int64, [decision_length]."""
    plan = decision.plan
    phase = _PHASES.index(plan.phase) if plan.phase in _PHASES else len(_PHASES) - 1
    predicted_s = float("nan") if plan.predicted_step_s is None else plan.predicted_step_s
    bits = struct.unpack("=3q", struct.pack("=3d", predicted_s, decision.signal_sqnorm, decision.noise_trace))
    whole = [plan.first_step, plan.total_batch, phase, decision.num_nonfinite, decision.window_steps]
    return torch.tensor([*whole, *bits, *plan.local_batches, *plan.micro_batches])


def decode_decision(values: torch.Tensor, *, reason: str) -> Decision:
    """What `encode_decision` was given; a reason does not travel, so the receiver states its own."""
    first_step, total_batch, phase, num_nonfinite, length, *others = values.tolist()
    predicted_s, signal, trace = struct.unpack("=3d", struct.pack("=3q", *others[:3]))
    batches = others[3:]
    n = len(batches) // 2
    plan = Plan(
        first_step=first_step,
        total_batch=total_batch,
        local_batches=tuple(batches[:n]),
        micro_batches=tuple(batches[n:]),
        predicted_step_s=None if predicted_s != predicted_s else predicted_s,
        phase=_PHASES[phase],
        reason=reason,
    )
    return Decision(
        plan=plan, signal_sqnorm=signal, noise_trace=trace, num_nonfinite=num_nonfinite, window_steps=length
    )
