"""What a new local batch costs, and which were run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cannikin.core.sizes import SizeHistory
from cannikin.core.values import StepWindow
from cannikin.errors import StateError


def window(batches: list[tuple[int, ...]], intervals: list[float], first_step: int = 0) -> StepWindow:
    """Steps of these local batches and durations; on a GPU, the first at a new size is not valid."""
    shape = np.array(batches).shape
    seconds = np.broadcast_to(np.array(intervals)[:, None], shape)
    return StepWindow(
        first_step=first_step,
        local_batches=np.array(batches),
        before_s=seconds / 2,
        ready_s=seconds[..., None] / 4,
        done_s=seconds[..., None] / 2,
        local_sqnorm=np.full(shape, np.nan),
        global_sqnorm=np.full(shape[0], np.nan),
        valid=np.zeros(shape, dtype=np.bool_),
    )


def test_the_excess_of_first_steps_is_learned_though_they_do_not_count_as_measurements() -> None:
    sizes = SizeHistory(2)
    sizes.observe(window([(8, 8)] * 5, [9.0, 1.0, 1.0, 1.0, 1.0]))
    assert sizes.cost_steps == 1.0  # the first step of a run tells nothing of a change
    for k in range(8):
        sizes.observe(window([(9 + k, 7)] * 5, [2.9, 1.0, 1.0, 1.0, 1.0], 5 + 5 * k))
    assert sizes.cost_steps == pytest.approx(1.9, rel=0.15)
    assert sizes.num_sizes == [9, 2]


def test_where_new_sizes_are_as_quick_as_others_they_soon_cost_nothing() -> None:
    sizes = SizeHistory(2)
    for k in range(10):
        sizes.observe(window([(8 + k, 8)] * 5, [1.0] * 5, 5 * k))
    assert sizes.cost_steps < 0.15


def test_a_first_step_at_the_end_of_a_window_is_compared_with_the_steps_of_the_next() -> None:
    sizes = SizeHistory(1)
    sizes.observe(window([(8,), (8,), (8,), (9,)], [1.0, 1.0, 1.0, 3.0]))
    assert sizes.cost_steps == 1.0
    sizes.observe(window([(9,)] * 4, [1.0] * 4, 4))
    assert sizes.cost_steps == 1.5


def test_sizes_that_were_run_before_cost_a_tenth() -> None:
    sizes = SizeHistory(2)
    sizes.observe(window([(8, 8)] * 3 + [(10, 6)] * 3, [1.0] * 6))
    assert sizes.change_steps((8, 6)) == pytest.approx(0.1 * sizes.change_steps((8, 5)))


def test_the_short_last_batch_of_an_epoch_is_no_change_of_plan() -> None:
    sizes = SizeHistory(2)
    sizes.observe(window([(8, 8), (8, 8), (3, 2), (8, 8), (8, 8), (8, 8)], [1.0, 1.0, 5.0, 4.0, 1.0, 1.0]))
    assert sizes.cost_steps == 1.0


def test_times_that_cannot_be_are_left_out() -> None:
    sizes = SizeHistory(1)
    sizes.observe(window([(8,)] * 3, [1.0] * 3))
    sizes.observe(window([(9,)] * 5, [np.nan, np.inf, 1.0, 1.0, -1.0], 3))
    assert sizes.cost_steps == 1.0


def test_one_compilation_of_minutes_does_not_end_all_changes() -> None:
    sizes = SizeHistory(1)
    sizes.observe(window([(8,)] * 3, [1.0] * 3))
    sizes.observe(window([(9,)] * 3, [3000.0, 1.0, 1.0], 3))
    assert sizes.cost_steps <= 20.0


def test_a_saved_history_goes_on_as_it_was() -> None:
    sizes, restored = SizeHistory(2), SizeHistory(2)
    sizes.observe(window([(8, 8)] * 3 + [(10, 6)], [1.0] * 3 + [2.0]))
    restored.load_state_dict(json.loads(json.dumps(sizes.state_dict())))
    for each in (sizes, restored):
        each.observe(window([(10, 6)] * 3, [1.0] * 3, 4))
    assert restored.state_dict() == sizes.state_dict()
    with pytest.raises(StateError, match="2 ranks"):
        SizeHistory(3).load_state_dict(sizes.state_dict())
