"""Weights and gradients of unequal ranks against one process on the union of samples: `python -m benchmarks loops`.

Every way of writing a loop that the tests hold to 1e-12 is run in float64, and its worst relative error over ranks,
steps and tensors is printed: of the weights after the last step, or of the gradients where the table says so.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1] / "tests"
Errors = dict[str, float]


def main() -> int:
    """Run and print; the status says whether every error was below 1e-12."""
    sys.path[:0] = [str(TESTS), str(TESTS / "runtime")]
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print("\n| loop | ranks | worst relative error |\n|---|---|---|")
    worst = 0.0
    for num_ranks, measure in (
        (3, plain_loops),
        (2, compiled_models),
        (3, two_models),
        (3, across_ranks),
        (2, in_hand),
    ):
        for name, error in measure(num_ranks).items():
            worst = max(worst, error)
            print(f"| {name} | {num_ranks} | {error:.1e} |", flush=True)
    print(f"\nworst of all: {worst:.1e}")
    return int(not worst < 1e-12)


def plain_loops(num_ranks: int) -> Errors:
    """Run the scripts of the parity tests, but for those in float32 only."""
    import parity_cases

    return _of_parity_cases([*parity_cases.CASES, *parity_cases.MORE_CASES], num_ranks)


def compiled_models(num_ranks: int) -> Errors:
    """Run those under torch.compile."""
    import parity_cases

    return _of_parity_cases([*parity_cases.COMPILE_CASES], num_ranks)


def _of_parity_cases(names: list[str], num_ranks: int) -> Errors:
    from parity_cases import dtypes_of, run_cases
    from ranks import run_ranks

    names = [name for name in names if "float64" in dtypes_of(name)]
    answers = run_ranks(run_cases, num_ranks, names, timeout_s=600)
    return {name: max(answer[name, "float64"] for answer in answers) for name in names}


def two_models(num_ranks: int) -> Errors:
    """Run the loops of GANs: a discriminator that follows the generator."""
    import gan_cases

    names = [*gan_cases.LOOPS, *(f"ahead, {name}" for name in gan_cases.AHEAD), "attached", "several attached"]
    return _of_told(gan_cases.run, names, "GAN: ", num_ranks)


def across_ranks(num_ranks: int) -> Errors:
    """Run losses over the samples of all ranks: contrastive ones, centres."""
    import across_cases

    return _of_told(across_cases.errors, [*across_cases.CASES], "", num_ranks)


def in_hand(num_ranks: int) -> Errors:
    """Run forwards that do not show their samples (time first, two views, SAM, ragged lists), and nanoGPT's draws."""
    import drawing_cases
    import test_in_hand
    from ranks import run_ranks
    from told import run_cases, values

    gradients = {**test_in_hand.PARITY, "draws without a loader": drawing_cases.like_nanogpt}
    ragged = {"ragged lists, in parts": test_in_hand.SAID["ragged"]}
    told = run_ranks(run_cases, num_ranks, gradients | ragged, timeout_s=600)
    errors = {f"{name} (gradients)": max(answer[0] for answer in values(told, name)) for name in gradients}
    return errors | {name: max(values(told, name)) for name in ragged}


def _of_told(run: Callable[..., Any], names: list[str], prefix: str, num_ranks: int) -> Errors:
    from ranks import run_ranks
    from told import values

    told = run_ranks(run, num_ranks, timeout_s=600)
    return {f"{prefix}{name}": max(values(told, name)) for name in names}


if __name__ == "__main__":
    sys.exit(main())
