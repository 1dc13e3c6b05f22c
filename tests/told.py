"""Many small cases in one launch of ranks: what each returned or raised, on each rank."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["Raised", "Warned", "collecting_warnings", "run_cases", "values"]


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An error that ended a case."""

    kind: str
    text: str
    notes: tuple[str, ...]
    trace: str


@dataclass(frozen=True, kw_only=True)
class Warned:
    """One warning."""

    kind: str
    text: str


def run_cases(rank: int, world_size: int, cases: dict[str, Callable[..., Any]], *args: Any) -> dict[str, Any]:
    """{name: what `case(rank, *args)` returned, or `Raised`}; one after another, ranks in step."""
    told: dict[str, Any] = {}
    for name, case in cases.items():
        dist.barrier()
        with warnings.catch_warnings():
            try:
                told[name] = case(rank, *args)
            except Exception as error:
                told[name] = Raised(
                    kind=type(error).__name__,
                    text=str(error),
                    notes=tuple(getattr(error, "__notes__", ())),
                    trace=traceback.format_exc(),
                )
    return told


def values(told: list[dict[str, Any]], name: str) -> list[Any]:
    """What a case returned, by rank; it must not have raised."""
    for rank, answers in enumerate(told):
        assert not isinstance(answers[name], Raised), f"rank {rank}: {answers[name].trace}"
    return [answers[name] for answers in told]


@contextmanager
def collecting_warnings(kind: type[Warning] = RuntimeWarning) -> Iterator[list[Warned]]:
    """The warnings of this kind that are given inside, filled in at the end."""
    found: list[Warned] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
        found += [Warned(kind=w.category.__name__, text=str(w.message)) for w in caught if issubclass(w.category, kind)]
