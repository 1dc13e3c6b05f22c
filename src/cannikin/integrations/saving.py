"""What a checkpoint of a framework lacks where it is made inside of a group of accumulated batches: their gradients.

No framework saves gradients, so a run that goes on from such a checkpoint never learns from the group's first batches.
"""

from __future__ import annotations

import warnings

from cannikin.runtime.engine import Engine


class LostGradients:
    """Warns once, on rank 0, of a checkpoint that lacks gradients.

    Args:
        advice: when to save instead, under this framework.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._warned = False

    def check(self, engine: Engine) -> None:
        """Warn where a checkpoint that is made now would lose what a backward of the model has found."""
        step = engine.loop.step
        if self._warned or engine.rank != 0 or step is None or not step.backward_began or engine.loop.is_at_rest:
            return
        self._warned = True
        warnings.warn(
            "this checkpoint is made inside of a group of accumulated batches, whose gradients are not saved: a run "
            f"that goes on from it leaves the group's batches so far out; {self._advice}",
            RuntimeWarning,
            stacklevel=3,
        )
