"""Segments of a sharded step: compute between the places where ranks wait for each other, by a clock that is told."""

from __future__ import annotations

import math

import pytest

from cannikin.runtime.passage import Passage

NONE = math.nan


class Clock:
    """Says what it is told, as marks and as durations."""

    def __init__(self, *, blocks: bool = False) -> None:
        self.now = 0.0
        self.passage = Passage(lambda: self.now, lambda start, end: end - start, 3, blocks=blocks)

    def forward(self, layer: int, *, wait: float, compute: float) -> None:
        """Needs a layer, waits for its all-gather, computes."""
        self.passage.need(layer)
        start = self.now
        self.now += wait
        self.passage.gathered(layer, start, self.now)
        self.passage.have()
        self.now += compute

    def backward(self, layer: int, *, wait: float, compute: float, reduce: float) -> None:
        """Needs a layer whose all-gather is ahead, waits, computes, reduces beside what follows."""
        self.passage.need(layer)
        self.now += wait
        self.passage.have()
        self.now += compute
        self.passage.end_layer()
        self.now += 0.5  # waits for an older reduction
        self.passage.begin_reduction()
        start = self.now
        self.passage.reduced(start, start + reduce)
        if self.passage.blocks:
            self.now += reduce


def walk(clock: Clock) -> float:
    """Three layers; the first is the outermost, whose parameters stay whole. The start of backward."""
    clock.passage.begin_forward()
    clock.forward(0, wait=1.0, compute=2.0)
    clock.forward(1, wait=3.0, compute=10.0)
    clock.forward(2, wait=0.0, compute=20.0)
    clock.passage.end_forward()
    clock.passage.begin_backward()
    start = clock.now
    clock.passage.need(0)
    clock.passage.have()
    clock.now += 4.0
    clock.passage.gathered(2, clock.now - 3.0, clock.now + 7.0)
    clock.passage.gathered(1, clock.now - 1.0, clock.now + 1.0)
    clock.backward(2, wait=7.0, compute=40.0, reduce=6.0)
    clock.now += 1.0  # on the way to the next layer
    clock.backward(1, wait=0.0, compute=30.0, reduce=5.0)
    clock.now += 8.0  # the outermost layer's own
    clock.passage.end_backward()
    clock.passage.begin_reduction()
    clock.passage.reduced(clock.now, clock.now + 9.0)
    return start


def test_waiting_is_no_compute_and_every_wait_begins_a_segment():
    clock = Clock()
    start = walk(clock)
    found = clock.passage.close(start, before_s=0.25)
    assert found.num_forward == 4
    assert found.compute_s == pytest.approx([0.25, 2.0, 10.0, 20.0, 4.0, 40.0, 31.0, 8.0])
    assert found.gather_s == pytest.approx([NONE, 1.0, 3.0, 0.0, NONE, 10.0, 2.0, NONE], nan_ok=True)
    assert found.reduce_s == pytest.approx([NONE, NONE, NONE, NONE, NONE, 6.0, 5.0, 9.0], nan_ok=True)
    assert found.before_s == pytest.approx(32.25)
    assert found.ready_s == pytest.approx([4.0, 44.0, 75.0, 83.0])
    assert found.done_s == pytest.approx([4.0, 57.5, 88.0, 100.0])


def test_a_reduction_that_blocks_is_no_compute_of_what_follows():
    clock = Clock(blocks=True)
    start = walk(clock)
    found = clock.passage.close(start, before_s=0.25)
    assert found.compute_s == pytest.approx([0.25, 2.0, 10.0, 20.0, 4.0, 40.0, 31.0, 8.0])


def test_layers_of_earlier_micro_batches_count_as_what_comes_before():
    clock = Clock()
    clock.passage.begin_forward()
    clock.forward(0, wait=1.0, compute=2.0)
    clock.passage.end_forward()
    clock.passage.begin_backward()
    clock.now += 3.0
    start = walk(clock)
    found = clock.passage.close(start, before_s=0.25)
    assert found.compute_s == pytest.approx([5.25, 2.0, 10.0, 20.0, 4.0, 40.0, 31.0, 8.0])
    assert len(found.compute_s) <= clock.passage.most_segments


def test_a_layer_that_nobody_waited_for_leaves_the_step_without_times():
    clock = Clock()
    clock.passage.begin_forward()
    clock.passage.need(0)
    clock.passage.need(1)
    clock.passage.have()
    clock.passage.need(2)
    assert clock.passage.close(0.0, before_s=0.0) is None
