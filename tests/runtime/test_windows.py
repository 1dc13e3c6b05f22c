"""What a rank makes of the norms and the times of its steps when it sends them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from cannikin.runtime.device import Cpu
from cannikin.runtime.entry import BatchEntry
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.wire import decode_steps, encode_steps, merge_windows, start_reading


def sent_norms(*, local: Sequence[float] = (), whole: Sequence[float] = (), **measured) -> list[float]:
    """|g_i|^2, |g|^2 and g . g' as they are sent of a step in which this was measured, bucket by bucket."""
    noted = {("local_sqnorm", index): torch.tensor(value) for index, value in enumerate(local)}
    noted |= {("global_sqnorm", index): torch.tensor(value) for index, value in enumerate(whole)}
    entry, buckets = BatchEntry(step=0, local_batch=4, total_batch=8), [None] * len(local)
    step = StepInProgress(entry, noted=noted, ready=buckets, **measured)
    sent = decode_steps(encode_steps([step], start_reading([step], Cpu()), Cpu())[None], 1)
    return [float(sent[name][0, 0]) for name in ("local_sqnorm", "global_sqnorm", "previous_dot")]


def test_norms_of_buckets_are_added_up_and_those_not_taken_are_not_numbers():
    mine, whole, previous = sent_norms(local=(1.0, 2.0), whole=(0.5, 0.25))
    assert (mine, whole) == (3.0, 0.75)
    assert math.isnan(previous)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_a_norm_or_in_the_sample_is_infinite(bad):
    assert sent_norms(local=(1.0, bad), whole=(1.0, bad))[:2] == [math.inf, math.inf]
    assert sent_norms(sample=torch.tensor(bad))[1] == math.inf


@pytest.mark.parametrize(("after", "whole"), [(64.0, 2.0), (32.0, math.inf)])
def test_norms_are_those_of_the_loss_before_a_grad_scaler_and_its_falling_scale_tells_of_infinite_ones(after, whole):
    scales = {"loss_scale": torch.tensor(64.0), "next_scale": torch.tensor(after)}
    found = sent_norms(local=(64.0**2,), whole=(2 * 64.0**2,), **scales)
    assert found[:2] == [1.0, whole]


def test_a_scale_that_has_fallen_to_zero_is_a_run_that_diverged_and_goes_on():
    scales = {"loss_scale": torch.tensor(0.0), "next_scale": torch.tensor(0.0)}
    assert sent_norms(local=(0.0,), whole=(0.0,), **scales)[:2] == [math.inf, math.inf]


def timed(*, forward_s: float, valid: bool) -> StepInProgress:
    """A step with marks of its own: forward, 2 s of backward and its sum, 1 s of the optimizer."""
    began = forward_s
    return StepInProgress(
        BatchEntry(step=0, local_batch=4, total_batch=4),
        forward_start=0.0,
        backward_start=began,
        ready=[began + 1.0],
        done=[began + 2.0],
        optimizer_start=began + 2.0,
        optimizer_end=began + 3.0,
        synced=True,
        valid=valid,
    )


def test_a_step_that_does_not_count_keeps_its_times_and_one_without_any_has_none():
    # What a first step at a new size took is learned from them.
    steps = [timed(forward_s=3.0, valid=True), timed(forward_s=7.0, valid=False)]
    steps.append(StepInProgress(BatchEntry(step=0, local_batch=4, total_batch=4)))
    sent = encode_steps(steps, start_reading(steps, Cpu()), Cpu())[None]
    window = merge_windows(sent, 0, 3).window
    assert window.valid.ravel().tolist() == [True, False, False]
    assert window.interval_s.ravel()[:2].tolist() == [6.0, 10.0]
    assert math.isnan(window.interval_s[2, 0])
