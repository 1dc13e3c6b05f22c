"""The cells of the evaluation: which there are, and running them on several processes."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from benchmarks.paper.clusters import EQUAL
from benchmarks.paper.convergence import TRAINED, train
from benchmarks.paper.prediction import gamma_spread, prediction_errors
from benchmarks.paper.steps import by_slowest, by_total_batch, from_even_start
from cannikin.errors import InvalidInputError
from cannikin.sim.catalog import workload_names

START_POLICIES = ("even", "lb-bsp@epoch", "lb-bsp", "lb-bsp@step", "paper", "cannikin")
SECTIONS = (
    "convergence",
    "cluster-a",
    "cluster-c",
    "seeds",
    "held-out",
    "one-share",
    "links",
    "start",
    "steps",
    "slowest",
    "prediction",
    "gamma",
)
# LB-BSP at B0 moves 5 samples where ranks have 4 to 8, so it is DDP at B0; it is trained on cluster B only.
OTHERS = tuple(policy for policy in TRAINED if policy != "lb-bsp@B0")
BEST = ("ddp@best", "lb-bsp@best", "cannikin")
MORE_SEEDS = (1, 2)  # after the first, of everything but ImageNet, whose training takes up to a minute to simulate
# Worlds that no constant of the planner was chosen on: name, and what `train` is told.
HELD_OUT: dict[str, dict[str, Any]] = {
    "16 equal RTX 6000": {"cluster": EQUAL},
    "C at 1 Gbit per s": {"cluster": "c", "bandwidth_gbit": 1.0},
    "A, a new size costs 2.9": {"cluster": "a", "new_size": 2.9},
    "B, a new size costs 2.9": {"cluster": "b", "new_size": 2.9},
    "C, a new size costs 2.9": {"cluster": "c", "new_size": 2.9},
}
CLUSTERS, LINKS_GBIT = ("a", "b", "c"), (10.0, 25.0, 100.0)
LINKED = ("cifar10", "bert", "deepspeech2")
# Seconds of CPU time, roughly: the longest cells go first.
_COSTS = {"imagenet": 20, "ncf": 6, "cifar10": 3}


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
    distinct = {
        (cell.section, cell.key): cell for cell in cells
    }  # the second seed's section "seeds" has the third's too
    return sorted(distinct.values(), key=lambda cell: -cell.cost)


def _trainings(section: str, cluster: str, policies: tuple[str, ...], **other: Any) -> Callable[[int], Iterator[Cell]]:
    def cells(seed: int) -> Iterator[Cell]:
        for workload in workload_names():
            for policy in policies:
                arguments = {"cluster": cluster, "workload": workload, "policy": policy, "seed": seed, **other}
                cost = _COSTS.get(workload, 2) * (3 if policy in ("cannikin", "lb-bsp@B0") else 1)
                key = (workload, policy, str(seed))
                yield Cell(section=section, key=key, function=train, arguments=arguments, cost=cost)

    return cells


def short_workloads() -> list[str]:
    """Return the workloads that are cheap to simulate: all but ImageNet."""
    return [name for name in workload_names() if name != "imagenet"]


def _seeds(seed: int) -> Iterator[Cell]:
    for more, cluster, workload, policy in itertools.product(MORE_SEEDS, CLUSTERS, short_workloads(), BEST):
        arguments = {"cluster": cluster, "workload": workload, "policy": policy, "seed": seed + more}
        yield Cell(
            section="seeds", key=(cluster, workload, policy, str(seed + more)), function=train, arguments=arguments
        )


def _held_out(seed: int) -> Iterator[Cell]:
    for (world, told), workload, policy in itertools.product(HELD_OUT.items(), short_workloads(), BEST):
        arguments = {**told, "workload": workload, "policy": policy, "seed": seed}
        yield Cell(section="held-out", key=(world, workload, policy, str(seed)), function=train, arguments=arguments)


def _links(seed: int) -> Iterator[Cell]:
    for gbit in LINKS_GBIT[1:]:
        for workload in LINKED:
            for policy in OTHERS:
                key = (f"{gbit:g}", workload, policy, str(seed))
                arguments: dict[str, Any] = {"cluster": "b", "workload": workload, "policy": policy, "seed": seed}
                arguments["bandwidth_gbit"] = gbit
                yield Cell(section="links", key=key, function=train, arguments=arguments, cost=2)


def _start(seed: int) -> Iterator[Cell]:
    for policy in START_POLICIES:
        arguments = {"cluster": "a", "workload": "imagenet", "total_batch": 128, "policy": policy, "seed": seed}
        yield Cell(section="start", key=(policy, str(seed)), function=from_even_start, arguments=arguments, cost=4)


def _steps(seed: int) -> Iterator[Cell]:
    for cluster, gbit, workload in itertools.product(CLUSTERS, LINKS_GBIT, workload_names()):
        key = (cluster, f"{gbit:g}", workload, str(seed))
        arguments = {"cluster": cluster, "workload": workload, "seed": seed, "bandwidth_gbit": gbit}
        arguments["with_changes"] = (cluster, gbit) == ("b", 10.0)
        yield Cell(section="steps", key=key, function=by_total_batch, arguments=arguments, cost=8)


def _slowest(seed: int) -> Iterator[Cell]:
    for workload in workload_names():
        arguments = {"workload": workload, "seed": seed}
        yield Cell(section="slowest", key=(workload, str(seed)), function=by_slowest, arguments=arguments, cost=4)


def _prediction(seed: int) -> Iterator[Cell]:
    for workload in workload_names():
        for cluster in CLUSTERS:
            arguments = {"cluster": cluster, "workload": workload, "seed": seed}
            key = (cluster, workload, str(seed))
            yield Cell(section="prediction", key=key, function=prediction_errors, arguments=arguments, cost=6)


def _gamma(seed: int) -> Iterator[Cell]:
    for cluster in ("a", "b"):
        arguments = {"cluster": cluster, "workload": "cifar10", "seed": seed}
        yield Cell(section="gamma", key=(cluster, str(seed)), function=gamma_spread, arguments=arguments)


_CELLS: dict[str, Callable[[int], Iterator[Cell]]] = {
    "convergence": _trainings("convergence", "b", tuple(TRAINED)),
    "cluster-a": _trainings("cluster-a", "a", OTHERS),
    "cluster-c": _trainings("cluster-c", "c", OTHERS),
    "seeds": _seeds,
    "held-out": _held_out,
    "one-share": _trainings("one-share", "b", BEST, one_share=True),
    "links": _links,
    "start": _start,
    "steps": _steps,
    "slowest": _slowest,
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
