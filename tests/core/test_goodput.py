"""Efficiency, goodput and the choice of the total batch, against AdaptDL's own formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cannikin.core.goodput import choose_total, efficiency, total_grid
from cannikin.core.perf import Cluster, Curve
from cannikin.core.split import SplitSolver
from cannikin.errors import InvalidInputError

positive = st.floats(1e-3, 1e6)


@given(trace=positive, signal=positive, initial=st.integers(1, 512), scale=st.floats(1, 64))
def test_efficiency_is_adaptdls_gain_over_scale(trace: float, signal: float, initial: int, scale: float) -> None:
    # AdaptDL's variance is that of a batch of B0: var = S / B0.
    var = trace / initial
    adaptdl = (var + signal) / (var / scale + signal) / scale
    ours = efficiency(initial * scale, initial_batch=initial, noise_trace=trace, signal_sqnorm=signal)
    assert ours == pytest.approx(adaptdl, rel=1e-12)


@given(trace=positive, signal=positive, initial=st.integers(1, 512))
def test_efficiency_is_one_at_the_initial_batch_and_falls_from_there(trace: float, signal: float, initial: int) -> None:
    worth = efficiency(initial * np.arange(1, 9), initial_batch=initial, noise_trace=trace, signal_sqnorm=signal)
    assert worth[0] == 1.0
    assert (np.diff(worth) <= 0).all()
    assert (worth > 0).all()


@pytest.mark.parametrize(("trace", "signal", "want"), [(5.0, 0.0, 1.0), (5.0, -1.0, 1.0), (-1.0, 2.0, 0.25)])
def test_noise_without_signal_makes_every_sample_count_and_signal_without_noise_none_of_the_extra_ones(
    trace: float, signal: float, want: float
) -> None:
    assert efficiency(64, initial_batch=16, noise_trace=trace, signal_sqnorm=signal) == want


@given(
    trace=positive,
    signal=positive,
    initial=st.integers(8, 256),
    factor=st.floats(2, 64),
    fixed_s=st.floats(1e-3, 1.0),
    slope_s=st.floats(1e-6, 1e-2),
)
def test_the_choice_is_the_argmax_of_adaptdls_goodput_on_the_same_grid(
    trace: float, signal: float, initial: int, factor: float, fixed_s: float, slope_s: float
) -> None:
    grid = total_grid(initial, round(initial * factor), num=50)
    step_s = fixed_s + slope_s * grid
    var = trace / initial
    scale = grid / initial
    goodput = grid / step_s * ((var + signal) / (var / scale + signal) / scale)
    worth = efficiency(grid, initial_batch=initial, noise_trace=trace, signal_sqnorm=signal)
    choice = choose_total(grid, step_s, worth, int(grid[0]), threshold=0.0)
    assert goodput[grid == choice.total_batch][0] == pytest.approx(goodput.max(), rel=1e-12)


def test_a_gain_of_five_per_cent_or_less_changes_nothing() -> None:
    totals = np.array([64, 128])
    for step_s, want in ((0.1 * 2 / 1.05, 64), (0.1 * 2 / 1.06, 128)):
        choice = choose_total(totals, np.array([0.1, step_s]), np.ones(2), 64)
        assert choice.total_batch == want
    assert "64 -> 128" in choice.reason


def test_a_distant_total_is_approached_in_steps_if_it_is_worth_it_even_where_the_first_step_alone_is_not() -> None:
    totals = np.array([100, 200, 400])
    choice = choose_total(totals, totals / np.array([100.0, 104.0, 107.0]), np.ones(3), 100, growth=2.0)
    assert choice.total_batch == 200
    assert choice.reason == "total batch 100 -> 200, on its way to 400: goodput there +7%"
    last = choose_total(totals, totals / np.array([100.0, 104.0, 107.0]), np.ones(3), 200, growth=2.0)
    assert last.total_batch == 200, "the rest of the way would gain less than 5%"


@given(
    initial=st.integers(1, 256),
    noise_scale=st.floats(1e-2, 1e6),
    fixed_s=st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=4),
    sample_us=st.lists(st.floats(1.0, 1e4), min_size=4, max_size=4),
    most=st.lists(st.integers(8, 4096), min_size=4, max_size=4),
)
def test_on_the_way_to_the_best_total_goodput_only_rises(
    initial: int, noise_scale: float, fixed_s: list[float], sample_us: list[float], most: list[int]
) -> None:
    n = len(fixed_s)
    cluster = Cluster(
        forward=Curve(fixed_s=fixed_s, per_sample_s=np.array(sample_us[:n]) * 1e-6),
        backward=Curve(fixed_s=[0.0] * n, per_sample_s=np.array(sample_us[:n]) * 2e-6),
        gammas=[0.3, 1.0],
        tails_s=[0.2, 0.01],
        max_batch=most[:n],
    )
    grid = total_grid(max(n, min(initial, sum(most[:n]))), sum(most[:n]))
    # In whole samples a step time has stairs, of at most one sample of the slowest rank.
    smooth = 3e-6 * max(sample_us[:n])
    goodput = grid * efficiency(grid, initial_batch=int(grid[0]), noise_trace=noise_scale, signal_sqnorm=1.0)
    slower, faster = (goodput / (SplitSolver(cluster).step_times(grid) + extra) for extra in (smooth, 0.0))
    best = int(slower.argmax())
    for here in range(best):
        assert faster[here : best + 1].min() >= slower[here] * (1 - 1e-9)


def test_a_total_that_is_the_best_already_is_not_compared_with_itself() -> None:
    choice = choose_total(np.array([64, 128]), np.array([0.1, 0.3]), np.ones(2), 64)
    assert choice.reason == "total batch stays 64: the best in reach"


def test_a_total_that_the_ranks_cannot_hold_is_never_chosen() -> None:
    choice = choose_total(np.array([64, 128, 256]), np.array([0.1, 0.16, np.inf]), np.ones(3), 64)
    assert choice.total_batch == 128
    assert choice.totals == (64, 128, 256)
    assert choice.goodputs == (640.0, 800.0, 0.0)


def test_the_grid_is_whole_distinct_and_has_both_ends() -> None:
    grid = total_grid(10, 20)
    assert grid[0] == 10
    assert grid[-1] == 20
    assert (np.diff(grid) > 0).all()
    assert len(total_grid(64, 65536)) == 50
    assert total_grid(64, 64).tolist() == [64]


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="lowest"):
        total_grid(64, 32)
    with pytest.raises(InvalidInputError, match="current_total=10"):
        choose_total(np.array([64, 128]), np.ones(2), np.ones(2), 10)
