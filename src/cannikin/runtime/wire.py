"""What ranks tell each other at every window, beside the step instead of in it.

Two vectors, both with named columns: measurements to rank 0 and a decision from it. Columns are those of a numpy record
type, 8 bytes each, so that a vector is one tensor and nothing is pickled. A new statistic of a step is a name in
`_STEP`, a value in `_single_numbers` and a field of `StepWindow`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, compress
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cannikin.core.noise.estimate import whole_norms
from cannikin.core.planner import Decision, Noise
from cannikin.core.values import NO_MAX, BoolArray, FloatArray, LayerTimes, Plan, StepWindow
from cannikin.errors import DisagreementError
from cannikin.runtime.device import Device, HostCopy
from cannikin.runtime.entry import BatchEntry
from cannikin.runtime.step import StepInProgress, StepRecord

# Of a rank: batches cut ahead of the one in training, the largest batch that its memory holds, and of a sharded module
# how many segments there is room for and whether its collectives hold up the compute.
_RANK = ("num_ahead", "max_batch", "most_segments", "blocks")
# Of each of its steps, before the moments of the buckets; g' is the gradient of the step before.
_STEP = (
    "valid",
    "local_batch",
    "total_batch",
    "size",  # the samples of the local batch, which the script may count otherwise
    "before_s",
    "load_s",
    "other_s",
    "local_sqnorm",  # |g_i|^2
    "shard_sqnorm",  # |g_i|^2 of this rank's own shard, where Adam's variance is known of that alone
    "global_sqnorm",  # |g|^2 of the buckets whose sum this rank has read, or of its own shard
    "previous_dot",  # g . g'
    "accumulated",  # batches whose gradients are in g
    "num_segments",  # of a sharded module, and how many of them come before backward; 0 of others
    "num_forward",
)
_BUCKET = ("ready_s", "done_s")  # of each of its buckets, or of the segments of backward
_SEGMENT = ("compute_s", "gather_s", "reduce_s")  # of each of its segments


@cache  # making a record type takes as long as sending one
def _step_type(num_buckets: int, most_segments: int) -> np.dtype[np.void]:
    moments = [(name, np.float64, (num_buckets,)) for name in _BUCKET]
    durations = [(name, np.float64, (most_segments,)) for name in _SEGMENT] if most_segments else []
    return np.dtype([*((name, np.float64) for name in _STEP), *moments, *durations])


@dataclass(frozen=True, kw_only=True, eq=False)
class Gathered:
    """What rank 0 makes of all ranks' vectors.

    Args:
        window: for the planner.
        load_s: waiting for data, [S, n]; the window has it too where loading goes on beside the training.
        other_s: the user's own work between steps beyond what is usual, [S, n].
        num_ahead: batches that some rank has cut beyond the one in training.
    """

    window: StepWindow
    load_s: FloatArray
    other_s: FloatArray
    num_ahead: int


def start_reading(steps: list[StepInProgress], device: Device) -> HostCopy:
    """Begin to copy all that these steps measured on their device to the host."""
    return device.copy([tensor for step in steps for tensor in (*chain(*step.norms().values()), *_scales(step))])


def _scales(step: StepInProgress) -> list[torch.Tensor]:
    """Return what a GradScaler multiplied the losses of this step and of the next one by; [] where there is none."""
    return [scale for scale in (step.loss_scale, step.next_scale) if scale is not None]


def _read_norms(step: StepInProgress, values: Iterator[float]) -> dict[str, float]:
    """Return |g_i|^2, a part of |g|^2, and g . g', as far as they were taken; infinite where a gradient is not finite.

    A GradScaler that lowers its scale after a step has found that in it; else the norms tell, or the sample.
    """
    noted = {name: [next(values) for _ in parts] for name, parts in step.norms().items()}
    scale, after = [next(values) for _ in _scales(step)] or (1.0, 1.0)
    sample = sum(noted.pop("sample", ()))
    sums = {name: _unscaled(sum(parts), scale) for name, parts in noted.items()}
    for name in ("local_sqnorm", "shard_sqnorm"):
        if name in sums:
            sums[name] *= step.norm_scale
    if step.has_norms:
        sums.setdefault("global_sqnorm", 0.0)
    if after < scale or not math.isfinite(sample):
        sums["global_sqnorm"] = math.inf
    return sums


def _unscaled(norm: float, scale: float) -> float:
    """Return infinity where it is not a number, and where the scale has fallen to 0, as in a run that has diverged."""
    return norm / scale**2 if scale and math.isfinite(norm) else math.inf


def _checked_total(entry: BatchEntry) -> int:
    if not entry.whole:
        return 0
    return -entry.total_batch if entry.is_told else entry.total_batch


def encode_steps(
    steps: list[StepInProgress],
    measured: HostCopy,
    device: Device,
    *,
    num_ahead: int = 0,
    max_batch: int = NO_MAX,
) -> torch.Tensor:
    """Return these steps as one vector of float64.

    What lies between steps every time (zeroing gradients, copying the batch to the device, clipping) is part of
    `before`: its median over the window, so that an evaluation now and then is not.
    """
    records = [step.close(device) for step in steps]
    gaps = [record.other_s for record in records if record.valid]
    usual = median(gaps) if gaps else 0.0
    passage = steps[0].passage
    most_segments, blocks = (0, False) if passage is None else (passage.most_segments, passage.blocks)
    # 1 where gradients only piled up, under no_sync.
    num_buckets = most_segments or max([1, *(len(step.ready) for step in steps)])
    values = iter(measured.read())
    table = np.full(len(steps), math.nan, dtype=_step_type(num_buckets, most_segments))
    is_whole = [_is_whole(record, num_buckets, most_segments) for record in records]
    norms = [_read_norms(step, values) for step in steps]
    columns = _single_numbers(steps, records, usual)
    columns["valid"] = [record.valid and whole for record, whole in zip(records, is_whole, strict=True)]
    for name in sorted({name for noted in norms for name in noted}):
        columns[name] = [noted.get(name, math.nan) for noted in norms]
    for name, column in columns.items():
        table[name] = column
    for row, record in compress(zip(table, records, strict=True), is_whole):
        for name in _BUCKET:
            row[name][: len(record.ready_s)] = getattr(record, name)
        if record.segments is not None:
            for name in _SEGMENT:
                row[name][: len(record.segments.compute_s)] = getattr(record.segments, name)
            row["compute_s"][0] += usual
    head = np.array([num_ahead, max_batch, most_segments, blocks], dtype=np.float64)
    return torch.from_numpy(np.concatenate([head, table.view(np.float64)]))


def _single_numbers(
    steps: Sequence[StepInProgress], records: Sequence[StepRecord], usual_s: float
) -> dict[str, list[Any]]:
    """Return what each step has one number of, by column; `usual_s` of what lies between steps is part of `before`."""
    return {
        "local_batch": [step.entry.local_batch for step in steps],
        "size": [step.entry.size for step in steps],
        # Totals are compared between ranks, below 0 where the script has told them; 0 is not ours to check.
        "total_batch": [_checked_total(step.entry) for step in steps],
        "accumulated": [max(1, step.accumulated) for step in steps],
        "before_s": [record.before_s + usual_s for record in records],
        "load_s": [record.load_s for record in records],
        "other_s": [max(0.0, record.other_s - usual_s) for record in records],
        "num_segments": [0 if record.segments is None else len(record.segments.compute_s) for record in records],
        "num_forward": [0 if record.segments is None else record.segments.num_forward for record in records],
    }


def _is_whole(record: StepRecord, num_buckets: int, most_segments: int) -> bool:
    """Return whether a step has all times: of every bucket, or of its segments, for which there is room."""
    if not most_segments:
        return len(record.ready_s) == num_buckets
    return record.segments is not None and len(record.segments.compute_s) <= most_segments


def decode_steps(sent: torch.Tensor, num_steps: int) -> npt.NDArray[Any]:
    """Return what ranks sent of each step, as records with the columns' names, [S, n]."""
    numbers, most_segments = sent[:, len(_RANK) :].numpy(), int(sent[0, _RANK.index("most_segments")])
    of_buckets = numbers.shape[1] // num_steps - len(_STEP) - len(_SEGMENT) * most_segments
    row = _step_type(of_buckets // len(_BUCKET), most_segments)
    table: npt.NDArray[Any] = np.ascontiguousarray(numbers).view(row).T
    return table


def _layer_times(table: npt.NDArray[Any], valid: BoolArray, *, blocks: bool) -> tuple[LayerTimes | None, BoolArray]:
    """Return the segments of a sharded module's steps, and which steps have them, [S]; None where none has.

    They are those of the last step that counts: others are of another kind, such as the first one after accumulation.
    """
    counts, forwards = table["num_segments"].astype(np.int64), table["num_forward"].astype(np.int64)
    counted = np.flatnonzero(valid.all(axis=1))
    if not len(counted):
        return None, np.zeros(len(table), dtype=np.bool_)
    num_segments, num_forward = int(counts[counted[-1], 0]), int(forwards[counted[-1], 0])
    layers = LayerTimes(
        **{name: table[name][..., :num_segments].copy() for name in _SEGMENT},
        num_forward=num_forward,
        ahead=not blocks,
        in_flight=0 if blocks else 1,
    )
    return layers, ((counts == num_segments) & (forwards == num_forward)).all(axis=1)


def merge_windows(sent: torch.Tensor, first_step: int, num_steps: int, *, loaded_alone: bool = False) -> Gathered:
    """Make one window of all ranks' vectors, [n, length]; `loaded_alone` as in `BatchEntry`.

    A step that does not count keeps its times where it has any: they tell what a new size costs.
    """
    table = decode_steps(sent, num_steps)
    ahead, max_batch, most_segments, blocks = sent[:, : len(_RANK)].numpy().T
    valid, layers = table["valid"] == 1, None
    num_buckets = table["ready_s"].shape[-1]
    if most_segments[0]:
        layers, alike = _layer_times(table, valid, blocks=bool(blocks[0]))
        valid &= alike[:, None]
        num_buckets = 1 if layers is None else layers.compute_s.shape[-1] - layers.num_forward
    load_s, other_s = (np.where(valid, table[name], 0.0) for name in ("load_s", "other_s"))
    parts, of_shards = table["global_sqnorm"], table["shard_sqnorm"]
    batches = np.maximum(table["size"], 1).astype(np.int64)
    window = StepWindow(
        first_step=first_step,
        local_batches=batches,
        before_s=table["before_s"].copy(),
        ready_s=table["ready_s"][..., :num_buckets].copy(),
        done_s=table["done_s"][..., :num_buckets].copy(),
        local_sqnorm=np.where(np.isnan(of_shards), table["local_sqnorm"], whole_norms(batches, of_shards, parts)),
        global_sqnorm=np.where(np.isinf(parts).any(axis=1), np.inf, parts.sum(axis=1)),
        valid=valid,
        load_s=np.zeros_like(load_s) if loaded_alone else load_s,
        max_batch=max_batch.astype(np.int64),
        previous_dot=table["previous_dot"][:, 0].copy(),  # only one rank alone takes it
        accumulated=table["accumulated"].max(axis=1).astype(np.int64),
        layers=layers,
    )
    return Gathered(window=window, load_s=load_s, other_s=other_s, num_ahead=int(ahead.max()))


def check_cuts(sent: torch.Tensor, first_step: int, num_steps: int) -> None:
    """Raise `DisagreementError` where ranks cut a step differently: some samples would be seen twice, others never.

    Every step's local batches must add up to the total that each rank took it for.
    """
    table = decode_steps(sent, num_steps)
    batches, totals = table["local_batch"], table["total_batch"]
    wrong = (totals != 0).all(axis=1) & (abs(totals) != batches.sum(axis=1, keepdims=True)).any(axis=1)
    if wrong.any():
        step = int(wrong.argmax())
        cut, total = batches[step].astype(int).tolist(), abs(totals[step]).astype(int).tolist()
        if (totals[step] < 0).any():
            raise DisagreementError(
                f"use_batch() was told totals {total} for step {first_step + step}, in which ranks had local batches "
                f"{cut}, together {sum(cut)}: gradients were weighted wrongly; call model.use_batch() without numbers, "
                "or pass model.total_batch"
            )
        raise DisagreementError(
            f"ranks cut step {first_step + step} differently, into local batches {cut} of totals {total}: take "
            "batches from the loader in the same order on every rank, none ahead of the others"
        )


@cache
def _decision_type(num_ranks: int) -> np.dtype[np.void]:
    numbers = ("predicted_step_s", "signal_sqnorm", "noise_trace")
    return np.dtype(
        [
            ("first_step", np.int64),
            ("settled", np.int64),
            *((name, np.float64) for name in numbers),
            ("local_batches", np.int64, (num_ranks,)),
        ]
    )


def empty_decision(num_ranks: int) -> torch.Tensor:
    """Return a vector that a decision can be received into."""
    return torch.empty(_decision_type(num_ranks).itemsize // 8, dtype=torch.int64)


def encode_decision(decision: Decision) -> torch.Tensor:
    """Return what all ranks need of a decision as int64: floats travel by their bits, so that ranks have the same."""
    plan, noise = decision.plan, decision.noise
    row = np.zeros(1, dtype=_decision_type(len(plan.local_batches)))
    row["first_step"], row["settled"] = plan.first_step, decision.settled
    row["predicted_step_s"] = math.nan if plan.predicted_step_s is None else plan.predicted_step_s
    row["signal_sqnorm"] = math.nan if noise is None else noise.signal_sqnorm
    row["noise_trace"] = math.nan if noise is None else noise.noise_trace
    row["local_batches"] = plan.local_batches
    return torch.from_numpy(row.view(np.int64))


def decode_decision(values: torch.Tensor) -> Decision:
    """Return what `encode_decision` was given; a reason does not travel, so the receiver states its own."""
    row = values.numpy().view(_decision_type(len(values) - len(empty_decision(0))))[0]
    batches, predicted_s = tuple(row["local_batches"].tolist()), float(row["predicted_step_s"])
    signal, trace = float(row["signal_sqnorm"]), float(row["noise_trace"])
    plan = Plan(
        first_step=int(row["first_step"]),
        total_batch=sum(batches),
        local_batches=batches,
        predicted_step_s=None if math.isnan(predicted_s) else predicted_s,
        reason="as rank 0 planned",
    )
    noise = None if math.isnan(trace) else Noise(signal_sqnorm=signal, noise_trace=trace)
    return Decision(plan=plan, noise=noise, settled=bool(row["settled"]))
