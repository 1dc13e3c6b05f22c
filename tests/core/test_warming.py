"""The first steps of a process are slow, and must not pass for what its devices take."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import Training, measure, random_cluster
from cannikin.core.learner import Learner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.values import Job, StepWindow

FIXED_S, SAMPLE_S = np.array([4e-3, 4e-3]), np.array([1e-4, 2e-4])


def window(first_step: int, batches: tuple[int, int], slower: np.ndarray, rng: np.random.Generator) -> StepWindow:
    """Five steps of two ranks, each as many times slower than usual as `slower` says, [S, n]; forward as backward."""
    times = (FIXED_S + SAMPLE_S * np.array(batches)) * slower * np.exp(0.02 * rng.standard_normal((5, 2)))
    nothing = np.zeros((5, 2))
    return StepWindow(
        first_step=first_step,
        local_batches=np.tile(batches, (5, 1)),
        before_s=times,
        ready_s=times[..., None],
        done_s=times[..., None] + 1e-3,
        local_sqnorm=nothing,
        global_sqnorm=nothing[:, 0],
        valid=np.ones((5, 2), dtype=np.bool_),
        load_s=nothing,
    )


def learned_time(slowness: np.ndarray, seed: int) -> np.ndarray:
    """What ranks are thought to take for 160 samples, over the truth, after four windows of two sizes."""
    rng, learner = np.random.default_rng(seed), Learner(2)
    for first, batches in ((0, (64, 64)), (5, (64, 64)), (10, (84, 44)), (15, (84, 44))):
        slower = 1.0 + slowness * np.exp(-np.arange(first, first + 5) / 3.0)[:, None]
        learner.observe(window(first, batches, slower, rng))
    fit = learner.model(np.ones(2, dtype=np.int64), np.full(2, 1000))
    return fit.near((160.0, 160.0)).forward.at((160, 160)) / (FIXED_S + SAMPLE_S * 160)


@pytest.mark.parametrize("slowness", [(2.0, 0.5), (0.5, 2.0), (3.0, 3.0)])
def test_ranks_that_begin_slowly_are_known_by_their_later_steps(slowness):
    errors = np.array([np.abs(learned_time(np.array(slowness), seed) - 1.0).max() for seed in range(10)])
    assert np.median(errors) < 0.25


def test_the_first_steps_of_ranks_that_do_not_begin_slowly_count_as_all_others():
    errors = np.array([np.abs(learned_time(np.zeros(2), seed) - 1.0).max() for seed in range(10)])
    assert np.median(errors) < 0.08


def test_the_slow_first_steps_of_a_resumed_run_are_no_change_of_its_ranks_speed():
    alarms = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        cluster, total = random_cluster(rng, max_ranks=5)
        job, n = Job(num_ranks=cluster.num_ranks, batch_size=total), cluster.num_ranks
        planner, resumed = Controller(job), Controller(job)
        Training(planner, job, rng).run(cluster, 60, noise=0.02)
        resumed.load_state_dict(json.loads(json.dumps(planner.state_dict())), list(range(n)))
        plan = resumed.decide(None, job, 60).plan
        for first in (60, 65, 70):
            slow = 1.0 + np.linspace(1.0, 2.0, n) * np.exp(-np.arange(first - 60, first - 55) / 2.0)[:, None]
            seen = measure(cluster, [plan.local_batches] * 5, rng, noise=0.02, outliers=0.0, first_step=first)
            seen = replace(seen, before_s=seen.before_s * slow, ready_s=seen.ready_s * slow[..., None])
            alarms += len(resumed.decide(seen, job, first + 5).changes)
    assert alarms <= 2
