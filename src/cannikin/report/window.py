"""What one window of a log says: its speed and worth, what was predicted for it, and its times rank by rank."""

from __future__ import annotations

from collections.abc import Reversible, Sequence

from cannikin.core.goodput import efficiency
from cannikin.runlog import PlanRecord, WindowRecord

__all__ = ["before_ms", "padded", "predicted_ms", "samples_per_s", "worth"]


def samples_per_s(window: WindowRecord) -> float | None:
    """Samples of all ranks a second, in the steps of the window; None where they were not measured."""
    return window.total_batch / window.step_ms * 1e3 if window.step_ms else None


def worth(window: WindowRecord, initial_batch: int) -> float | None:
    """Efficiency of the window's total batch, from the noise measured by then; None where it is not known.

    Example:
        >>> from cannikin.runlog import NoiseRecord
        >>> worth(WindowRecord(first_step=0, num_steps=5, num_valid=5, total_batch=192, local_batches=(96, 96),
        ...                    noise=NoiseRecord(signal_sqnorm=1.0, noise_trace=64.0, noise_scale=64.0)), 64)
        0.5
    """
    noise = window.noise
    if noise is None or noise.signal_sqnorm is None or noise.noise_trace is None:
        return None
    share = efficiency(
        window.total_batch,
        initial_batch=initial_batch,
        noise_trace=noise.noise_trace,
        signal_sqnorm=noise.signal_sqnorm,
    )
    return float(share)


def predicted_ms(window: WindowRecord, plans: Reversible[PlanRecord]) -> float | None:
    """What the last of the plans with the window's split said of its steps; None where none did."""
    alike = (plan.predicted_step_ms for plan in reversed(plans) if plan.local_batches == window.local_batches)
    return next(alike, None)


def before_ms(window: WindowRecord) -> tuple[float | None, ...]:
    """Optimizer and forward of every rank, without the loading that the log may count there."""
    size = len(window.local_batches)
    before = padded(window.before_ms, size)
    if not window.loader_inside:
        return before
    pairs = zip(before, padded(window.loader_ms, size), strict=True)
    return tuple(None if ms is None else max(0.0, ms - (loader or 0.0)) for ms, loader in pairs)


def padded(times: Sequence[float | None], num_ranks: int) -> tuple[float | None, ...]:
    """One entry a rank, None where the log has none.

    Example:
        >>> padded((1.0,), 2), padded((1.0, 2.0, 3.0), 2)
        ((1.0, None), (1.0, 2.0))
    """
    return (*times, *(None,) * num_ranks)[:num_ranks]
