"""How the learning rate follows the total batch, and training progress that does not depend on it.

Legend: B total batch, B0 the initial one, gain = (B/B0) * efficiency(B), the number of B0-steps that one step is worth
(AdaScale; paper, table of workloads). A rule gives the factor on the user's own rate. Progress grows by the gain with
every step taken ("scale-invariant iterations"), so that a schedule driven by it is neither stretched nor cut.
"""

from __future__ import annotations

import math

from cannikin.errors import InvalidInputError

__all__ = ["LR_RULES", "lr_factor"]

LR_RULES = ("adascale", "adamscale", "linear", "sqrt", "legw", "none")


def lr_factor(
    rule: str,
    total_batch: float,
    *,
    initial_batch: float,
    gain: float,
    progress: float = math.inf,
    warmup_progress: float = 0.0,
) -> float:
    """The factor on the learning rate at a total batch.

        adascale   gain              adamscale  sqrt(gain)
        linear     B/B0              sqrt       sqrt(B/B0)
        legw       sqrt(B/B0) * min(1, progress / (warmup_progress * B/B0))
        none       1

    Args:
        rule: one of `LR_RULES`.
        total_batch: B of the plan in force (never that of a short last batch).
        initial_batch: B0.
        gain: AdaScale's gain at B, from 1 to B/B0 for B >= B0.
        progress: B0-steps taken so far; LEGW only.
        warmup_progress: length of LEGW's warm-up at B0, in B0-steps.

    Example:
        >>> lr_factor("sqrt", 256, initial_batch=64, gain=3.0)
        2.0
        >>> lr_factor("legw", 256, initial_batch=64, gain=3.0, progress=50, warmup_progress=100)
        0.25
    """
    scale = total_batch / initial_batch
    match rule:
        case "adascale":
            return gain
        case "adamscale":
            return math.sqrt(gain)
        case "linear":
            return scale
        case "sqrt":
            return math.sqrt(scale)
        case "legw":
            warmup = warmup_progress * scale
            return math.sqrt(scale) * (min(1.0, progress / warmup) if warmup > 0 else 1.0)
        case "none":
            return 1.0
    raise InvalidInputError(f"lr_rule={rule!r} is unknown: choose one of {', '.join(LR_RULES)}")
