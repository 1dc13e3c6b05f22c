"""Is the noise scale right in the first hundred steps under a fresh AdamW, while its v is young?

    python -m benchmarks.noise_adam [--runs 40] [--seed 0]

A small network tells kinds of made-up texts apart. Its words are as rare as those of a language (Zipf), so that most
rows of the embedding have had few gradients, or none, while the first steps are taken. Two ranks' gradients of every
step go through the runtime's `AdamVariance` into the tracker. At some steps the weights are held still, and S and G are
taken of many texts' own gradients over the root of v: once of v as the optimizer has it then ("true"), once of v as it
would be after very many steps at these weights ("settled"), which is G_k + S_k / B of element k.

The claims under test: each of the tracker's 90% limits is on the right side of "true" in nine runs of ten, and "true"
is within a factor of two of "settled". The plain gradient's noise scale stands beside them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from cannikin.core.noise.tracker import NoiseTracker
from cannikin.runtime.hook import dot
from cannikin.runtime.update import AdamVariance, Variance

NUM_WORDS, TEXT_LENGTH, WIDTH, NUM_KINDS = 2000, 32, 12, 8
SPLIT = (4, 8)
RATE, WARMUP_STEPS = 2e-3, 100
FLOOR = 1e-4  # least v in means of v, as in AdamVariance
POOL = 2000  # texts of which the truth is taken
STEPS = (35, 40, 60, 80, 100)  # the first is the one at which limits are first believed


@dataclass(frozen=True, kw_only=True)
class Found:
    """One step of one run: the noise scale that the tracker says, its limits, and the true ones, in samples."""

    step: int
    tracked: float
    low: float
    high: float
    true: float  # of the gradient over the root of v as the optimizer has it
    settled: float  # of v as it would be after very many steps
    plain: float  # of the gradient as it is


class Texts:
    """Texts of several kinds, each of which prefers some words."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        taste = torch.randn(NUM_KINDS, NUM_WORDS, generator=generator)
        self._shares = torch.exp(taste / 2) / torch.arange(1, NUM_WORDS + 1)

    def draw(self, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return words [num, length] and kinds [num]."""
        kinds = torch.randint(NUM_KINDS, (num,), generator=self._generator)
        return torch.multinomial(self._shares[kinds], TEXT_LENGTH, True, generator=self._generator), kinds


class Reader(nn.Module):
    """A bag of words: an embedding and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.last = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, 8)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Return a score per kind."""
        return self.last(torch.tanh(self.hidden(self.words(texts).mean(1) * TEXT_LENGTH**0.5)))


def gradient(net: nn.Module, texts: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a batch's mean loss, all parameters in a row."""
    loss = nn.functional.cross_entropy(net(texts), kinds)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def true_moments(net: nn.Module, texts: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return S_k and G_k, unbiased, of every element k of the gradient."""
    parameters = dict(net.named_parameters())

    def loss(values: dict[str, torch.Tensor], text: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(net, values, (text[None],)), kind[None])

    of_each, num = torch.func.vmap(torch.func.grad(loss), (None, 0, 0)), len(texts)
    total, squares = torch.zeros(2, sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    for first in range(0, num, 100):
        some = slice(first, first + 100)
        rows = torch.cat([g.flatten(1) for g in of_each(parameters, texts[some], kinds[some]).values()], 1).detach()
        total += rows.sum(0)
        squares += rows.square_().sum(0)
    noise = (squares - total.square() / num) / (num - 1)
    return noise, (total / num).square() - noise / num


def compare(step: int, tracker: NoiseTracker, variance: Variance, moments: tuple[torch.Tensor, torch.Tensor]) -> Found:
    """Put what the tracker says beside the truth."""
    noise, signal = moments
    settled = noise / sum(SPLIT) + signal.clamp(min=0)
    settled = settled.clamp(min=FLOOR * float(settled.mean())).masked_fill(settled == 0, math.inf)

    def scale(v: torch.Tensor | float) -> float:
        return float((noise / v).sum() / (signal / v).sum())

    low, high = tracker.limits
    return Found(
        step=step,
        tracked=tracker.noise_scale,
        low=low,
        high=high,
        true=scale(variance.of_elements),
        settled=scale(settled),
        plain=scale(1.0),
    )


def run(seed: int) -> Iterator[Found]:
    """Train with two ranks' batches, and compare at each of STEPS."""
    torch.manual_seed(seed)
    texts = Texts(torch.Generator().manual_seed(seed))
    net, pool, total = Reader(), texts.draw(POOL), sum(SPLIT)
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    variance_of, tracker = AdamVariance([optimizer]), NoiseTracker(initial_batch=total)
    for step in range(1, max(STEPS) + 1):
        local = torch.stack([gradient(net, *texts.draw(size)) for size in SPLIT])
        whole = torch.tensor(SPLIT, dtype=local.dtype) @ local / total
        variance = variance_of(parameters)
        if variance is not None:
            tracker.update(SPLIT, [float(dot(g, g, variance)) for g in local], float(dot(whole, whole, variance)))
            if step in STEPS:
                yield compare(step, tracker, variance, true_moments(net, *pool))
        parts = whole.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        warmup.step()
        variance_of.count_step()


def print_report(found: list[Found]) -> None:
    """Print medians over runs by step, and how often each limit is on the right side of the truth."""
    names = ("plain", "true", "settled", "tracked", "low", "high")
    print(f"{'step':>5}" + "".join(f"{name:>9}" for name in names) + f"{'low holds':>11}{'high holds':>11}")
    for step in STEPS:
        here = [one for one in found if one.step == step]
        medians = [statistics.median(getattr(one, name) for one in here) for name in names]
        low_holds = statistics.mean(one.low <= one.true for one in here)
        high_holds = statistics.mean(one.true <= one.high for one in here)
        print(f"{step:>5}" + "".join(f"{x:>9.0f}" for x in medians) + f"{low_holds:>11.0%}{high_holds:>11.0%}")
    ratios = sorted(one.true / one.settled for one in found)
    print(f"true over settled: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}")


def main(num_runs: int = 40, seed: int = 0) -> None:
    """Do all runs; progress on stderr, the report on stdout."""
    found, started_s = [], time.perf_counter()
    for number in range(seed, seed + num_runs):
        found += run(number)
        print(f"{time.perf_counter() - started_s:6.1f} s  run {number}: {found[-1]}", file=sys.stderr, flush=True)
    print_report(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="trainings, each from another seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    arguments = parser.parse_args()
    main(arguments.runs, arguments.seed)
