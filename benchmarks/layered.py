"""Made-up clusters whose ranks meet layer by layer, simulated event by event, and the windows measured on them.

The simulator knows nothing of the recursion in `core.layers`: ranks are programs that join collectives, wait for them
and compute. A wire carries out one collective at a time, once all ranks have joined it, in the order of the programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cannikin.core.layers import Layers
from cannikin.core.perf import Cluster, Curve
from cannikin.core.values import LayerTimes, StepWindow


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulated:
    """One step: its end, when each collective was done, and how long it took each rank, its waiting included.

    The last two have gathers first, then reduce-scatters, [2, K] and [2, n, K]; NaN where there is none.
    """

    end_s: float
    done_s: npt.NDArray[np.float64]
    seen_s: npt.NDArray[np.float64]


def simulate(layers: Layers, compute_s: npt.NDArray[np.float64]) -> Simulated:
    """Run one step of ranks with these times of their segments, [n, K]."""
    num_ranks, num_segments = compute_s.shape
    programs = [_program(layers, rank, compute_s) for rank in range(num_ranks)]
    seconds = np.stack([layers.gather_s, layers.reduce_s])
    joined, done = np.full((2, num_ranks, num_segments), np.nan), np.full((2, num_segments), np.nan)
    free = done.copy()  # when the wire was free for it
    clocks, places = [0.0] * num_ranks, [0] * num_ranks
    order: list[tuple[int, int]] = []  # collectives in the order of the wire
    wire_s, num_done = 0.0, 0
    while True:
        for rank, program in enumerate(programs):
            while places[rank] < len(program):
                action, what = program[places[rank]]
                if action == "compute":
                    clocks[rank] += compute_s[rank, what[1]]
                elif action == "join":
                    joined[what[0], rank, what[1]] = clocks[rank]
                    if what not in order:
                        order.append(what)
                elif np.isnan(done[what]):
                    break
                else:
                    clocks[rank] = max(clocks[rank], done[what])
                places[rank] += 1
        progress = False
        while num_done < len(order) and not np.isnan(joined[order[num_done][0], :, order[num_done][1]]).any():
            kind, k = order[num_done]
            free[kind, k] = wire_s
            wire_s = max(wire_s, joined[kind, :, k].max()) + seconds[kind, k]
            done[kind, k], num_done, progress = wire_s, num_done + 1, True
        if not progress:
            break
    assert all(place == len(program) for place, program in zip(places, programs, strict=True)), "ranks hang"
    seen = done[:, None] - np.maximum(joined, free[:, None])
    return Simulated(end_s=max(wire_s, *clocks), done_s=done, seen_s=seen)


def _program(layers: Layers, rank: int, compute_s: npt.NDArray[np.float64]) -> list[tuple[str, tuple[int, int]]]:
    """Return what a rank does in a step, one after the other."""
    gathers, reduces = (~np.isnan(times) for times in (layers.gather_s, layers.reduce_s))
    first_backward = layers.num_forward
    program: list[tuple[str, tuple[int, int]]] = []
    pending: list[tuple[int, int]] = []
    asked: set[int] = set()
    for k in range(compute_s.shape[1]):
        if gathers[k]:
            if k not in asked:
                program.append(("join", (0, k)))
            program.append(("wait", (0, k)))
            following = k + 1
            if layers.ahead and following < len(gathers) and gathers[following] and following != first_backward:
                program.append(("join", (0, following)))
                asked.add(following)
        program.append(("compute", (0, k)))
        if reduces[k]:
            while layers.in_flight and len(pending) >= layers.in_flight:
                program.append(("wait", pending.pop(0)))
            program.append(("join", (1, k)))
            pending.append((1, k))
            if not layers.in_flight:
                program.append(("wait", pending.pop()))
    return program


def fsdp_layers(
    forward: npt.ArrayLike, backward: npt.ArrayLike, gather_s: npt.ArrayLike, *, ahead: bool, optimizer: float = 0.05
) -> Layers:
    """Return the segments of a module of L sharded layers, as `fully_shard` runs them.

    Args:
        forward, backward: relative cost of each layer, in forward's order, [n, L].
        gather_s: all-gather of each layer, [L]; a reduce-scatter takes as long.
        ahead: whether collectives run beside the computing, as on a GPU, or block.
        optimizer: its share of a_i.
    """
    costs = [np.asarray(forward, dtype=np.float64), np.asarray(backward, dtype=np.float64)[:, ::-1]]
    shares = [cost / cost.sum(axis=1, keepdims=True) for cost in costs]
    times = np.asarray(gather_s, dtype=np.float64)
    none = np.full(len(times), np.nan)
    first = np.full((len(costs[0]), 1), optimizer)
    return Layers(
        shares=np.concatenate([first, (1 - optimizer) * shares[0], shares[1]], axis=1),
        gather_s=np.concatenate([[np.nan], times, times[::-1]]),
        reduce_s=np.concatenate([[np.nan], none, times[::-1]]),
        num_forward=1 + len(times),
        ahead=ahead,
        in_flight=int(ahead),
    )


def random_layered(
    rng: np.random.Generator, *, unlike: bool = False, max_ranks: int = 8, max_layers: int = 12
) -> tuple[Cluster, int]:
    """Draw a cluster over an 8x range of speeds, a module sharded over it, and a total batch.

    Fixed costs are up to those of the samples. Communication takes anything up to the mean compute time. With `unlike`,
    every rank has layers that it is better at than at others, within a factor of 2 up and down, else layers differ but
    all ranks' alike.
    """
    n, num_layers = int(rng.integers(2, max_ranks + 1)), int(rng.integers(2, max_layers + 1))
    speed = 2 ** rng.uniform(0, 3, n)
    total_batch = round(n * np.exp(rng.uniform(np.log(8), np.log(64))))
    share = total_batch * speed / speed.sum()
    curves = []
    for portion in (1 / 3, 2 / 3):
        per_sample = 8e-3 * portion / speed
        curves.append(Curve(fixed_s=rng.uniform(0, 1, n) * per_sample * share, per_sample_s=per_sample))
    compute_s = float((curves[0].at(share) + curves[1].at(share)).mean())
    cost = rng.uniform(0.5, 2.0, num_layers) * (2 ** rng.uniform(-1, 1, (n, num_layers)) if unlike else np.ones((n, 1)))
    times = rng.dirichlet(np.full(num_layers, 5.0)) * rng.uniform(0, 1) * compute_s / 3
    layers = fsdp_layers(cost, cost, times, ahead=bool(rng.integers(2)))
    return Cluster(forward=curves[0], backward=curves[1], gammas=[1.0], tails_s=[0.0], layers=layers), total_batch


def measure_layers(
    cluster: Cluster,
    batches: npt.ArrayLike,
    rng: np.random.Generator,
    *,
    noise: float = 0.03,
    outliers: float = 0.02,
    first_step: int = 0,
    sqnorms: tuple[float, float] = (np.nan, np.nan),
) -> StepWindow:
    """Draw one window of steps with these local batches, [S, n], as a runtime would measure it under `fully_shard`.

    Each rank's speed in a step has lognormal noise, and each segment on top of it; now and then all of a rank's
    segments take 3 times as long. Collectives scatter likewise. Squared norms are those that `sqnorms` = (|G|^2,
    tr Sigma) make us expect.
    """
    layers, batches = cluster.layers, np.asarray(batches)
    assert layers is not None
    num_steps, n = batches.shape
    shape = (num_steps, n, layers.shares.shape[1])
    passes = np.where(
        np.arange(shape[2]) < layers.num_forward,
        cluster.forward.at(batches)[..., None],
        cluster.backward.at(batches)[..., None],
    )
    shared = np.exp(noise * rng.standard_normal((num_steps, n))) * np.where(rng.random((num_steps, n)) < outliers, 3, 1)
    compute = layers.shares * passes * shared[..., None] * np.exp(noise * rng.standard_normal(shape))
    seen, ends = np.full((2, *shape), np.nan), np.empty(num_steps)
    done = np.empty((num_steps, n, shape[2] - layers.num_forward))
    for s in range(num_steps):
        scatter = np.exp(noise * rng.standard_normal((2, shape[2])))
        times = {"gather_s": layers.gather_s * scatter[0], "reduce_s": layers.reduce_s * scatter[1]}
        step = simulate(replace(layers, **times), compute[s])
        seen[:, s], ends[s] = step.seen_s, step.end_s
        done[s] = np.where(np.isnan(step.done_s[1]), 0.0, step.done_s[1])[layers.num_forward :]
    before = compute[..., : layers.num_forward].sum(axis=-1)
    done[..., -1] = ends[:, None]
    return StepWindow(
        first_step=first_step,
        local_batches=batches,
        before_s=before,
        ready_s=compute[..., layers.num_forward :].cumsum(axis=-1),
        done_s=done - before[..., None],
        local_sqnorm=sqnorms[0] + sqnorms[1] / batches,
        global_sqnorm=sqnorms[0] + sqnorms[1] / batches.sum(axis=1),
        layers=LayerTimes(
            compute_s=compute,
            gather_s=seen[0],
            reduce_s=seen[1],
            num_forward=layers.num_forward,
            ahead=layers.ahead,
            in_flight=layers.in_flight,
        ),
    )
