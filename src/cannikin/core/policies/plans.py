"""Making plans out of splits, and plans out of saved states: what all planners share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from cannikin.core.perf import Cluster, Curve
from cannikin.core.split import optimal_split
from cannikin.core.values import FloatArray, IntArray, Job, Plan, StepWindow
from cannikin.errors import StateError


def make_plan(step: int, local_batches: tuple[int, ...], *, reason: str, predicted_step_s: float | None = None) -> Plan:
    """Make the plan of a split."""
    return Plan(
        first_step=step,
        total_batch=sum(local_batches),
        local_batches=local_batches,
        predicted_step_s=predicted_step_s,
        reason=reason,
    )


def even_batches(job: Job, total_batch: int) -> tuple[int, ...]:
    """The split of plain DDP: B//n each, the first B mod n ranks one more, as far as the bounds allow."""
    return inverse_batches(job, total_batch, np.ones(job.num_ranks))


def inverse_batches(job: Job, total_batch: int, sample_s: FloatArray) -> tuple[int, ...]:
    """Local batches in inverse proportion to the time per sample (paper, equation 8), whole and within the bounds.

        b_i = B (1/t_i) / sum_j (1/t_j)

    This is OptPerf of ranks without fixed costs: all finish at the same time.
    """
    low, high = job.bounds
    zeros = np.zeros(job.num_ranks)
    cluster = Cluster(
        forward=Curve(fixed_s=zeros, per_sample_s=zeros),
        backward=Curve(fixed_s=zeros, per_sample_s=sample_s),
        gammas=[1.0],
        tails_s=[0.0],
        min_batch=low,
        max_batch=high,
    )
    return optimal_split(cluster, total_batch).local_batches


def within_bounds(plan: Plan, job: Job, step: int) -> Plan:
    """The plan itself, or, where a bound has fallen below one of its batches, one from `step` on that keeps to it.

    Batches above their bound are cut down, and the others grow in proportion to what they have.
    """
    _, high = job.bounds
    batches = np.array(plan.local_batches)
    if (batches <= high).all():
        return plan
    fitted = inverse_batches(job, plan.total_batch, 1.0 / batches)
    rank = int((batches > high).argmax())
    reason = f"memory holds rank {rank} to {fitted[rank]} samples, {batches[rank] - fitted[rank]} less than before"
    return make_plan(step, fitted, reason=reason)


def compute_seconds(window: StepWindow) -> tuple[IntArray, FloatArray] | None:
    """The split of the window's last steps and each rank's median compute time under it; None without a valid step."""
    batches = window.local_batches[-1]
    steps = (window.local_batches == batches).all(axis=1) & window.valid.all(axis=1)
    if not steps.any():
        return None
    compute: FloatArray = np.median((window.before_s + window.ready_s[..., -1])[steps], axis=0)
    return batches, compute


def save_plan(plan: Plan) -> dict[str, Any]:
    """A plan as plain numbers, strings and lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(plan).items()}


def load_plan(state: dict[str, Any], job: Job) -> Plan:
    """Take back what `save_plan` returned, for a job with as many ranks."""
    try:
        names = {each.name for each in fields(Plan)}  # older states have more
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in state.items() if k in names}
        plan = Plan(**values)
    except (AttributeError, TypeError) as error:
        raise StateError(f"saved plan cannot be read: {error}") from error
    if len(plan.local_batches) != job.num_ranks:
        raise StateError(f"saved plan is for {len(plan.local_batches)} ranks, this job has {job.num_ranks}")
    low, high = job.bounds
    if (low > plan.local_batches).any() or (high < plan.local_batches).any():
        raise StateError(
            f"saved local batches {plan.local_batches} break this job's bounds: {low.tolist()}, {high.tolist()}"
        )
    return plan


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Turn whatever a damaged state provokes into a StateError."""
    try:
        yield
    except StateError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        text = f"not the state of a {what} ({type(error).__name__}: {error}): load what state_dict() returned"
        raise StateError(text) from error
