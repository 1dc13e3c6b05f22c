"""Makes plans from splits and from saved states: what all planners share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from cannikin.core.perf import Cluster, Curve
from cannikin.core.saved import LONG_S, number, whole, whole_numbers
from cannikin.core.split import optimal_split
from cannikin.core.values import NO_MAX, FloatArray, IntArray, Job, Plan, StepWindow
from cannikin.errors import InfeasibleError, StateError
from cannikin.words import counted


def make_plan(step: int, local_batches: tuple[int, ...], *, reason: str, predicted_step_s: float | None = None) -> Plan:
    """Make the plan of a split."""
    return Plan(
        first_step=step,
        total_batch=sum(local_batches),
        local_batches=local_batches,
        predicted_step_s=predicted_step_s,
        reason=reason,
    )


def epoch_samples(job: Job) -> int:
    """Return the length of an epoch, for planners that plan once per epoch; 100 steps at B0 where it is not known."""
    return job.num_samples or 100 * job.batch_size


def even_batches(job: Job, total_batch: int) -> tuple[int, ...]:
    """Return B//n each, the first B mod n ranks one more, as far as the bounds allow: a split to begin with.

    Where the bounds bind it is not even; `ddp_batches` is, or says that there is none.
    """
    return inverse_batches(job, total_batch, np.ones(job.num_ranks))


def ddp_batches(job: Job, total_batch: int) -> tuple[int, ...]:
    """Return the split of plain DDP: B//n each, the first B mod n ranks one more, or the local batches that are set.

    Raises:
        InfeasibleError: a rank cannot hold its part, or must have more.
    """
    low, high = job.bounds
    if (low == high).all():
        return tuple(low.tolist())
    least, more = divmod(total_batch, job.num_ranks)
    even = least + (np.arange(job.num_ranks) < more)
    wrong = np.flatnonzero((even < low) | (even > high))
    if len(wrong):
        rank = int(wrong[0])
        allowed = f"at most {high[rank]}" if even[rank] > high[rank] else f"at least {low[rank]}"
        raise InfeasibleError(
            f"an even split of {total_batch} gives rank {rank} {even[rank]} samples, and it may have {allowed}: plain "
            f'DDP cannot train with this total batch; change batch_size, or let policy="cannikin" split it'
        )
    return tuple(even.tolist())


def inverse_batches(job: Job, total_batch: int, sample_s: FloatArray) -> tuple[int, ...]:
    """Split a total batch in inverse proportion to the time per sample (paper, equation 8), within the bounds.

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
    """Return the plan or, where a bound has fallen below one of its batches, a plan from `step` on that keeps to it.

    Batches above their bound are cut down to it, and the others grow in proportion to their size.
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
    """Return the split of the window's last steps and each rank's median compute time; None without a valid step."""
    batches = window.local_batches[-1]
    steps = (window.local_batches == batches).all(axis=1) & window.valid.all(axis=1)
    if not steps.any():
        return None
    compute: FloatArray = np.median((window.before_s + window.ready_s[..., -1])[steps], axis=0)
    return batches, compute


def save_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain numbers, strings and lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(plan).items()}


def load_plan(state: dict[str, Any]) -> Plan:
    """Take back what `save_plan` returned, of any job; call it inside `restoring`."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in state.items()}
    whole_numbers("local_batches", state["local_batches"], 1, NO_MAX)
    whole("first_step", state["first_step"])
    if state["predicted_step_s"] is not None:
        number("predicted_step_s", state["predicted_step_s"], high=LONG_S)
    return Plan(**{**values, "reason": str(state["reason"])})


def resumed_plan(state: dict[str, Any], job: Job) -> Plan:
    """Take back what `save_plan` returned, for a job with as many ranks; call it inside `restoring`.

    Where the job allows neither its total batch nor its local batches any more, these are brought within its bounds.
    """
    plan = load_plan(state)
    if len(plan.local_batches) != job.num_ranks:
        raise StateError(
            f"saved plan is for {counted(len(plan.local_batches), 'rank')}, this job has {job.num_ranks}: resume on as "
            'many, or with policy="cannikin", which goes on with any number'
        )
    total = min(max(plan.total_batch, job.batch_size), job.largest_total)
    low, high = job.bounds
    if total == plan.total_batch and (low <= plan.local_batches).all() and (plan.local_batches <= high).all():
        return plan
    fitted = inverse_batches(job, total, 1.0 / np.array(plan.local_batches))
    return make_plan(plan.first_step, fitted, reason="the saved plan, within the bounds of this run")


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Turn any error that a damaged state causes into a StateError."""
    try:
        yield
    except StateError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"not the state of a {what} ({type(error).__name__}: {error}): load what state_dict() returned"
        raise StateError(text) from error
