"""How the learning rate follows the total batch, and training progress that does not depend on it.

Legend: B total batch, B0 the initial one, gain = (B/B0) * efficiency(B), the number of B0-steps that one step is worth
(AdaScale; paper, table of workloads). A rule gives the factor on the user's own rate. Progress grows by the gain with
every step taken ("scale-invariant iterations"), so that a schedule driven by it is neither stretched nor cut. Where K
batches pile up for each step of the optimizer, its total is K B, and compares with K B0: the ratio is the same.

    adascale   gain              adamscale  sqrt(gain)
    linear     B/B0              sqrt       sqrt(B/B0)
    legw       sqrt(B/B0) * min(1, progress / (warmup_steps * B/B0))
    none       1
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol


class LrRule(Protocol):
    """The factor on the learning rate at a total batch: any function of these arguments alone is a rule.

    Ranks call it apart, and not equally often: a rule that counts its calls would part them.
    """

    def __call__(self, total_batch: float, /, *, initial_batch: float, gain: float, progress: float) -> float:
        """Return the factor.

        Args:
            total_batch: B of the plan in force (never that of a short last batch).
            initial_batch: B0.
            gain: AdaScale's gain at B, from 1 to B/B0 for B >= B0.
            progress: steps of the optimizer at the initial batch that training so far has been worth.
        """


@dataclass(kw_only=True)
class Progress:
    """What training so far has been worth, the same on every rank.

    Args:
        batches: initial batches (B0 samples each) that the optimizer's steps were worth.
        steps: steps of the optimizer at the initial batch that they were worth: a K-th of it where K batches pile up.
        forgone: initial batches whose gradients no step has used, for instance one that a GradScaler skipped.
        num_batches: K of the last step.

    Example:
        >>> progress = Progress()
        >>> for num_batches in (4, 4, 2):  # ten batches per pass, and a step for each four and at the end
        ...     progress.add(progress.worth(lengths=[1.0] * num_batches, gain=1.0, ratio=1.0))
        >>> progress.batches, progress.steps
        (10.0, 3.0)
    """

    batches: float = 0.0
    steps: float = 0.0
    forgone: float = 0.0
    num_batches: int = 1

    def worth(self, *, lengths: Sequence[float], gain: float, ratio: float) -> Worth:
        """Return what a step over these batches is worth.

        Args:
            lengths: of each batch in initial batches, `Schedule.length`; B/B0 for a whole one.
            gain: steps at the initial batch that a step over as many whole batches is worth.
            ratio: B/B0.
        """
        batches = gain / ratio * sum(lengths)
        # At B0 every step is one, as a schedule counts it; else a last group that is not full counts for less.
        steps = 1.0 if ratio == 1 else batches / max(self.num_batches, len(lengths))
        return Worth(batches=batches, steps=steps, num_batches=len(lengths))

    def times(self, ratio: float) -> Progress:
        """Return the same progress counted in other initial batches: `ratio` of them make one of these."""
        counts = {name: ratio * getattr(self, name) for name in ("batches", "steps", "forgone")}
        return Progress(num_batches=self.num_batches, **counts)

    def add(self, worth: Worth) -> None:
        """Count a step."""
        self.batches += worth.batches
        self.steps += worth.steps
        self.num_batches = worth.num_batches

    def take_back(self, worth: Worth) -> None:
        """Take a step back that was skipped after all."""
        self.batches -= worth.batches
        self.steps -= worth.steps
        self.forgone += worth.batches


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What one step of the optimizer adds to `Progress`."""

    batches: float
    steps: float
    num_batches: int


@dataclass(frozen=True, kw_only=True)
class Legw:
    """Linear-epoch gradual warm-up (LEGW): the square root of B/B0, after a warm-up of as many epochs at any batch.

    Args:
        warmup_steps: length of the warm-up at the initial batch, in B0-steps.

    Example:
        >>> Legw(warmup_steps=100)(256, initial_batch=64, gain=3.0, progress=50)
        0.25
    """

    warmup_steps: float = 0.0

    def __call__(self, total_batch: float, /, *, initial_batch: float, gain: float, progress: float) -> float:
        """Return the factor, as `LrRule` describes it."""
        scale = total_batch / initial_batch
        warmup = self.warmup_steps * scale
        return math.sqrt(scale) * (min(1.0, progress / warmup) if warmup > 0 else 1.0)


LR_RULES: dict[str, LrRule] = {
    "adascale": lambda total_batch, /, *, initial_batch, gain, progress: gain,
    "adamscale": lambda total_batch, /, *, initial_batch, gain, progress: math.sqrt(gain),
    "linear": lambda total_batch, /, *, initial_batch, gain, progress: total_batch / initial_batch,
    "sqrt": lambda total_batch, /, *, initial_batch, gain, progress: math.sqrt(total_batch / initial_batch),
    "legw": Legw(),
    "none": lambda total_batch, /, *, initial_batch, gain, progress: 1.0,
}


def rule_name(rule: LrRule) -> str:
    """Return a rule as logs and messages say it: the same on every rank, another for other parameters.

    Example:
        >>> rule_name(LR_RULES["sqrt"]), rule_name(Legw(warmup_steps=100))
        ('sqrt', 'Legw(warmup_steps=100)')
        >>> rule_name(partial(Legw(warmup_steps=100), gain=2.0))
        "Legw(warmup_steps=100) with {'gain': 2.0}"
    """
    for name, known in LR_RULES.items():
        if rule is known or rule == known:
            return name
    if isinstance(rule, partial):
        return f"{rule_name(rule.func)} with {rule.keywords}"
    if type(rule).__repr__ is object.__repr__:
        return f"{type(rule).__qualname__} with {vars(rule)}"
    name = str(getattr(rule, "__qualname__", None) or repr(rule))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", name)  # addresses differ between ranks
