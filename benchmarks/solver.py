"""Time of the exact split against the paper's Algorithm 1, and its growth: `python -m benchmarks.solver`.

BLAS runs on one thread. Where both are timed they take turns on the same instances within one run, so that whatever
else the machine does falls on both. A turn is three calls, of which the first finds caches full of the other's data:
the ratio of first calls alone is given too. A time is the calling thread's, which on an idle machine is the wall
clock's, and the median, with the 10th and 90th percentile beside it.

**Instances.** Speeds over an 8x range, one ratio of forward to backward and one fixed backward time for all ranks,
fixed forward times over a range, T_o such that ranks cross from communication- to compute-bound at about the same
time, and B such that T* falls on a random quantile (10 to 90%) of their crossing times. With one ratio and one fixed
backward time the paper's order by fixed time is the right one. Of these, instances are kept on which Algorithm 1 is
valid and needs its search. How often it fails otherwise is counted apart, on instances in which every coefficient is
drawn by itself and neither of its checks settles the matter (`random_mixed`).
"""

from __future__ import annotations

import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from cannikin.core.perf import Cluster, Curve
from cannikin.core.policies.algorithm1 import algorithm1
from cannikin.core.split import SplitSolver, optimal_split

SEED = 20
SIZES = (16, 64, 128, 256, 512)
GROWTH_SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
NUM_INSTANCES = 8
TURN = 3
NUM_TOTALS = 50


def main() -> int:
    """Measure and print; the status is always 0, since a slow machine is no fault."""
    rng = np.random.default_rng(SEED)
    with threadpool_limits(limits=1):
        blas = ", ".join(sorted({f"{pool['internal_api']} {pool['version']}" for pool in threadpool_info()}))
        rows = [*against_algorithm1(rng), *growth(rng), *choice_of_total(rng), *failures(rng)]
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {blas} on one thread, {platform.machine()}")
    print_table(("what", "measured", "target", "met"), rows)
    return 0


Row = tuple[str, str, str, str]


def against_algorithm1(rng: np.random.Generator) -> Iterator[Row]:
    """Time both solvers, turn by turn, on instances that Algorithm 1 solves."""
    ratio_target = {128: 1.0, 256: 10.0, 512: 50.0}
    for num_ranks in SIZES:
        progress(f"n = {num_ranks}: against Algorithm 1")
        instances = [searchable(rng, num_ranks) for _ in range(NUM_INSTANCES)]
        solves = [algorithm1(cluster, total).num_solves for cluster, total in instances]
        ours_s, theirs_s = interleaved(
            [(lambda c=c, b=b: optimal_split(c, b)) for c, b in instances],
            [(lambda c=c, b=b: algorithm1(c, b)) for c, b in instances],
            rounds=max(4, 2_000 // num_ranks),
        )
        limit_ms = 0.5 if num_ranks == 16 else None
        yield row(f"n = {num_ranks}: exact split", ours_s, limit_ms)
        yield (f"n = {num_ranks}: Algorithm 1", spread(theirs_s), "", "")
        ratio = float(np.median(theirs_s) / np.median(ours_s))
        target = ratio_target.get(num_ranks)
        wanted = "" if target is None else f">= {target:g} x"
        first = float(np.median(theirs_s[::TURN]) / np.median(ours_s[::TURN]))
        text = f"{ratio:.1f} x (first calls {first:.1f} x; {np.mean(solves):.1f} linear solves)"
        yield (f"n = {num_ranks}: Algorithm 1 / exact", text, wanted, "" if target is None else mark(ratio >= target))


def growth(rng: np.random.Generator) -> Iterator[Row]:
    """Time the exact split alone, up to 100,000 ranks."""
    progress(f"n = {GROWTH_SIZES[0]:,} to {GROWTH_SIZES[-1]:,}: growth")
    instances = {num_ranks: typical(rng, num_ranks) for num_ranks in GROWTH_SIZES}
    times_s: dict[int, list[float]] = {num_ranks: [] for num_ranks in GROWTH_SIZES}
    for _ in range(15):
        for num_ranks, (cluster, total) in instances.items():
            times_s[num_ranks] += timed(lambda c=cluster, b=total: optimal_split(c, b), rounds=TURN)
    for num_ranks in GROWTH_SIZES:
        limit_ms = 150.0 if num_ranks == 100_000 else None
        yield row(f"n = {num_ranks:,}: exact split", times_s[num_ranks], limit_ms)
    first = GROWTH_SIZES[0]
    for num_ranks in GROWTH_SIZES[1:]:
        grown = float(np.median(times_s[num_ranks]) / np.median(times_s[first]))
        expected = num_ranks * np.log(num_ranks) / (first * np.log(first))
        wanted = f"<= {expected:.1f} x (n log n)"
        yield (f"growth from n = {first:,} to {num_ranks:,}", f"{grown:.1f} x", wanted, mark(grown <= expected))


def choice_of_total(rng: np.random.Generator) -> Iterator[Row]:
    """Time one choice of the total batch: 50 optima in reals and one whole split."""
    progress(f"{NUM_TOTALS} totals for 16 ranks")
    cluster, total = typical(rng, 16)
    grid = np.geomspace(total / 4, total * 16, NUM_TOTALS)

    def choose() -> None:
        solver = SplitSolver(cluster)
        per_s = grid / solver.step_times(grid)
        solver.split(int(grid[per_s.argmax()]))

    yield row(f"choice among {NUM_TOTALS} totals, 16 ranks", timed(choose, rounds=300), 5.0)


def failures(rng: np.random.Generator) -> Iterator[Row]:
    """Count how often Algorithm 1 is not valid on mixed instances with independent coefficients, and why."""
    for num_ranks in (3, 16):
        progress(f"n = {num_ranks}: failures of Algorithm 1")
        counts = Counter(algorithm1(*random_mixed(rng, num_ranks)).failure for _ in range(1_000))
        num_wrong = counts.total() - counts[""]
        causes = ", ".join(f"{cause} {counts[cause]}" for cause in sorted(counts) if cause)
        text = f"{num_wrong} of {counts.total()} ({causes})"
        yield (f"Algorithm 1 not valid, random mixed, n = {num_ranks}", text, "", "")


def typical(rng: np.random.Generator, num_ranks: int) -> tuple[Cluster, int]:
    """Draw a cluster on which the order by fixed time is right, and a total batch with ranks of both bottlenecks."""
    gamma, ratio, fixed_backward_s = 0.2, 0.5, 0.004
    per_sample_s = 1e-4 * 8.0 ** rng.random(num_ranks)
    fixed_s = rng.uniform(0.010, 0.014, num_ranks)
    overlapped_s = (1 - gamma) * 0.020
    cluster = Cluster.two_point(
        forward=Curve(fixed_s=fixed_s, per_sample_s=ratio * per_sample_s),
        backward=Curve(fixed_s=np.full(num_ranks, fixed_backward_s), per_sample_s=per_sample_s),
        gamma=gamma,
        overlapped_s=overlapped_s,
        last_s=0.002,
    )
    crossing_s = fixed_s + ratio * (0.020 - fixed_backward_s) + 0.020
    step_s = np.quantile(crossing_s, rng.uniform(0.1, 0.9)) + 0.002
    return cluster, int(SplitSolver(cluster).batches_at(step_s).sum())


def searchable(rng: np.random.Generator, num_ranks: int) -> tuple[Cluster, int]:
    """Draw a `typical` instance that Algorithm 1 solves, and not by its two checks alone."""
    while True:
        cluster, total = typical(rng, num_ranks)
        result = algorithm1(cluster, total)
        if not result.failure and result.num_solves > 2:
            return cluster, total


def random_mixed(rng: np.random.Generator, num_ranks: int) -> tuple[Cluster, int]:
    """Draw an instance with independent coefficients that neither check of Algorithm 1 settles."""
    while True:
        q, s, k, m = rng.uniform(0, 1, (4, num_ranks)) * np.array([[1.0], [10.0], [2.0], [5.0]])
        cluster = Cluster.two_point(
            forward=Curve(fixed_s=s, per_sample_s=q),
            backward=Curve(fixed_s=m, per_sample_s=k),
            gamma=rng.uniform(0.05, 0.5),
            overlapped_s=rng.uniform(5, 50),
            last_s=1.0,
        )
        total = int(rng.integers(4, 40)) * num_ranks
        if algorithm1(cluster, total).num_solves > 2:
            return cluster, total


Work = Callable[[], object]


def interleaved(ours: Sequence[Work], theirs: Sequence[Work], *, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of every call of both, `TURN` calls of each in turn."""
    ours_s: list[float] = []
    theirs_s: list[float] = []
    for _ in range(rounds):
        for one, other in zip(ours, theirs, strict=True):
            ours_s += timed(one, rounds=TURN)
            theirs_s += timed(other, rounds=TURN)
    return ours_s, theirs_s


def timed(work: Work, *, rounds: int) -> list[float]:
    """Return the seconds of every call."""
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return times


def row(what: str, times_s: Sequence[float], limit_ms: float | None) -> Row:
    """Return a measured time beside the most that it may be."""
    if limit_ms is None:
        return (what, spread(times_s), "", "")
    return (what, spread(times_s), f"< {limit_ms:g} ms", mark(float(np.median(times_s)) * 1e3 < limit_ms))


def spread(times_s: Sequence[float]) -> str:
    """Return the median, and the 10th and 90th percentile."""
    low, middle, high = np.quantile(times_s, (0.1, 0.5, 0.9)) * 1e3
    return f"{middle:.3g} ms ({low:.3g} to {high:.3g})"


def mark(met: bool) -> str:
    """Return one word for the last column."""
    return "yes" if met else "NO"


def progress(text: str) -> None:
    """Print a line for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def print_table(header: Row, rows: Sequence[Row]) -> None:
    """Print a table with columns as wide as they need to be."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    for line in (header, tuple("-" * width for width in widths), *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
