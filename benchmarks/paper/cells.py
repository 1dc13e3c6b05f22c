"""The cells of the evaluation: which there are, and running them on several processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from benchmarks.paper.convergence import train
from benchmarks.paper.prediction import gamma_spread, prediction_errors
from benchmarks.paper.steps import by_total_batch, from_even_start
from cannikin.errors import InvalidInputError
from cannikin.sim.catalog import workload_names

POLICIES = ("even", "adaptdl", "lb-bsp@epoch", "lb-bsp", "paper", "cannikin")
START_POLICIES = ("even", "lb-bsp@epoch", "lb-bsp", "paper", "cannikin")
SECTIONS = ("convergence", "cluster-c", "links", "start", "steps", "prediction", "gamma")
_LINKS_GBIT = (25.0, 100.0)
_COSTS = {"imagenet": 30, "ncf": 8, "cifar10": 3}  # seconds, roughly: the longest cells go first


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One experiment: its section, its place there, and the function that does it."""

    section: str
    key: tuple[str, ...]
    function: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    cost: int = 1


def all_cells(sections: tuple[str, ...], seeds: tuple[int, ...]) -> list[Cell]:
    """Return every cell of these sections, the longest first.

    >>> len(all_cells(("gamma",), (0,)))
    2
    """
    unknown = sorted(set(sections) - set(SECTIONS))
    if unknown:
        raise InvalidInputError(f"section {unknown[0]!r} is unknown: choose from {', '.join(SECTIONS)}")
    cells = [cell for seed in seeds for section in sections for cell in _CELLS[section](seed)]
    return sorted(cells, key=lambda cell: -cell.cost)


def _trainings(section: str, cluster: str) -> Callable[[int], Iterator[Cell]]:
    def cells(seed: int) -> Iterator[Cell]:
        for workload in workload_names():
            for policy in POLICIES:
                arguments = {"cluster": cluster, "workload": workload, "policy": policy, "seed": seed}
                cost = _COSTS.get(workload, 2) * (3 if policy in ("cannikin", "lb-bsp") else 1)
                key = (workload, policy, str(seed))
                yield Cell(section=section, key=key, function=train, arguments=arguments, cost=cost)

    return cells


def _links(seed: int) -> Iterator[Cell]:
    for gbit in _LINKS_GBIT:
        for workload in ("cifar10", "bert", "deepspeech2"):
            for policy in ("even", "adaptdl", "paper", "cannikin"):
                key = (f"{gbit:g}", workload, policy, str(seed))
                arguments: dict[str, Any] = {"cluster": "b", "workload": workload, "policy": policy, "seed": seed}
                arguments["bandwidth_gbit"] = gbit
                yield Cell(section="links", key=key, function=train, arguments=arguments, cost=2)


def _start(seed: int) -> Iterator[Cell]:
    for policy in START_POLICIES:
        arguments = {"cluster": "a", "workload": "imagenet", "total_batch": 128, "policy": policy, "seed": seed}
        yield Cell(section="start", key=(policy, str(seed)), function=from_even_start, arguments=arguments, cost=4)


def _steps(seed: int) -> Iterator[Cell]:
    for workload in workload_names():
        arguments = {"cluster": "b", "workload": workload, "seed": seed}
        yield Cell(section="steps", key=(workload, str(seed)), function=by_total_batch, arguments=arguments, cost=20)


def _prediction(seed: int) -> Iterator[Cell]:
    for workload in workload_names():
        for cluster in ("a", "b"):
            arguments = {"cluster": cluster, "workload": workload, "seed": seed}
            key = (cluster, workload, str(seed))
            yield Cell(section="prediction", key=key, function=prediction_errors, arguments=arguments, cost=6)


def _gamma(seed: int) -> Iterator[Cell]:
    for cluster in ("a", "b"):
        arguments = {"cluster": cluster, "workload": "cifar10", "seed": seed}
        yield Cell(section="gamma", key=(cluster, str(seed)), function=gamma_spread, arguments=arguments)


_CELLS: dict[str, Callable[[int], Iterator[Cell]]] = {
    "convergence": _trainings("convergence", "b"),
    "cluster-c": _trainings("cluster-c", "c"),
    "links": _links,
    "start": _start,
    "steps": _steps,
    "prediction": _prediction,
    "gamma": _gamma,
}


def run_cells(
    cells: list[Cell], *, num_processes: int = 1, on_done: Callable[[Cell], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Return results by section and key ("a/b/c"), in the order of keys, whatever ran first."""
    results: dict[tuple[str, str], Any] = {}
    if num_processes == 1:
        for cell in cells:
            results[cell.section, "/".join(cell.key)] = cell.function(**cell.arguments)
            if on_done is not None:
                on_done(cell)
    else:
        context = multiprocessing.get_context("spawn")
        ignore = (signal.SIGINT, signal.SIG_IGN)  # in the workers: this process ends them
        pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=signal.signal, initargs=ignore)
        try:
            waiting = {pool.submit(cell.function, **cell.arguments): cell for cell in cells}
            for future in as_completed(waiting):
                cell = waiting[future]
                results[cell.section, "/".join(cell.key)] = future.result()
                if on_done is not None:
                    on_done(cell)
        except BaseException:
            for worker in list(pool._processes.values()):  # a cell takes minutes, and nobody wants it any more
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    sections: dict[str, dict[str, Any]] = {}
    for section, key in sorted(results):
        sections.setdefault(section, {})[key] = results[section, key]
    return sections
