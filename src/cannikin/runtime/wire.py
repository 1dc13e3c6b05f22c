"""What ranks exchange, beside the step instead of in it, on a group of their own.

Two vectors, both with named columns: measurements to rank 0 and a decision from it; and a few words at the start.
Columns are those of a numpy record type, 8 bytes each, so that a vector is one tensor and nothing is pickled. A new
statistic of a step is a name in `_STEP`, a value in `encode_steps` and a field of `StepWindow`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import chain, compress
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from cannikin.core.noise.estimate import whole_norms
from cannikin.core.planner import Decision, Noise
from cannikin.core.values import NO_MAX, BoolArray, FloatArray, LayerTimes, Plan, StepWindow
from cannikin.errors import DisagreementError
from cannikin.runtime.device import DEVICES, Device, HostCopy
from cannikin.runtime.entry import BatchEntry, PendingSum
from cannikin.runtime.lookout import Lookout
from cannikin.runtime.step import StepInProgress, StepRecord

_log = logging.getLogger("cannikin")
_c10d: Any = dist.distributed_c10d

# A rank that cannot go on waits this long for the others to hear why; then it leaves, which they notice as well.
_REFUSAL = timedelta(seconds=60)

_LIMIT = timedelta(minutes=30)  # torch's default
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
    columns: dict[str, list[Any]] = {
        "valid": [record.valid and whole for record, whole in zip(records, is_whole, strict=True)],
        "local_batch": [step.entry.local_batch for step in steps],
        "size": [step.entry.size for step in steps],
        # Totals are compared between ranks, below 0 where the script has told them; 0 is not ours to check.
        "total_batch": [_checked_total(step.entry) for step in steps],
        "accumulated": [max(1, step.accumulated) for step in steps],
        "before_s": [record.before_s + usual for record in records],
        "load_s": [record.load_s for record in records],
        "other_s": [max(0.0, record.other_s - usual) for record in records],
        "num_segments": [0 if record.segments is None else len(record.segments.compute_s) for record in records],
        "num_forward": [0 if record.segments is None else record.segments.num_forward for record in records],
    }
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


class Exchange:
    """Gather floats from all ranks and broadcast whole numbers from rank 0, without waiting in between.

    The group is gloo's, whatever the gradients travel on: these tensors live on the host. It is not one of torch's
    registered ones, which have the same name, and old addresses in the store, when one is made after another is gone.
    """

    def __init__(self, group: Any) -> None:
        limit, store = _timeout(group), _store(group)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        number = store.add(f"cannikin-models-{self.rank}", 1)  # the same on every rank: all make the same models
        store = _c10d.PrefixStore(f"cannikin-{number}", store)
        self.lookout = Lookout(store, self.rank, self.world_size, limit)
        when_gone(self, self.lookout.close)
        with self._naming_missing():
            self._group = _c10d.ProcessGroupGloo(store, self.rank, self.world_size, limit)
        self._gathering: tuple[Any, torch.Tensor] | None = None
        self._broadcasting: tuple[Any, torch.Tensor] | None = None
        self._summing: list[Any] = []

    def start_gather(self, values: torch.Tensor) -> None:
        """Begin to collect a vector of float64, as long on every rank."""
        out = torch.empty(self.world_size * len(values), dtype=torch.float64)
        work = self._group.allgather([list(out.chunk(self.world_size))], [values])
        self._gathering = (work, out)

    def finish_gather(self) -> torch.Tensor:
        """Return what all ranks sent, [n, length]."""
        assert self._gathering is not None
        (work, out), self._gathering = self._gathering, None
        self._finish(work)
        return out.view(self.world_size, -1)

    def start_broadcast(self, values: torch.Tensor) -> None:
        """Begin to send rank 0's vector of int64 to all; as long on every rank."""
        work = self._group.broadcast(values, 0)
        self._broadcasting = (work, values)

    def finish_broadcast(self) -> torch.Tensor:
        """Return rank 0's vector."""
        assert self._broadcasting is not None
        (work, values), self._broadcasting = self._broadcasting, None
        self._finish(work)
        return values

    def start_sum(self, *values: float) -> PendingSum:
        """Begin to sum numbers over ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        work = self._group.allreduce(total)
        self._summing = [*(other for other in self._summing if not other.is_completed()), work]
        return PendingSum(work, total, self.world_size, self._finish)

    def give_up(self) -> None:
        """Take part in the sum that others have begun with what is no number, so that all of them stop."""
        with suppress(RuntimeError):  # they are gone: this rank's own error is the one to be seen
            self.start_sum(math.nan, math.nan, math.nan).work.wait(_REFUSAL)

    def wait(self) -> None:
        """Let whatever is under way arrive; it stays to be finished. Nothing arrives once a rank has been lost."""
        if self.lookout.has_lost:
            return
        for pending in (self._gathering, self._broadcasting):
            if pending is not None:
                self._finish(pending[0])
        for work in self._summing:
            self._finish(work)
        self._summing.clear()

    def _finish(self, work: Any, limit: timedelta | None = None) -> None:
        """Wait for a collective, within `limit`, or else the group's own; an error names the rank that is missing."""
        with self.meeting():
            work.wait() if limit is None else work.wait(limit)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Let the others see that this rank waits for all in this block, and its error name the one that is missing."""
        self.lookout.is_meeting = True
        try:
            with self._naming_missing():
                yield
        finally:
            self.lookout.is_meeting = False

    @contextmanager
    def _naming_missing(self) -> Iterator[None]:
        """Let the error of a collective in this block name the rank that is missing."""
        try:
            yield
        except RuntimeError as error:
            self.lookout.name_missing(error)
            raise

    def destroy(self) -> None:
        """Give the group's threads and sockets back; a thread does, where ranks still wait for something in it."""
        pending = [work for work, _ in filter(None, (self._gathering, self._broadcasting))] + self._summing
        held, self._group = [self._group], None  # a group that nobody refers to waits for what is under way
        if not all(work.is_completed() for work in pending):
            threading.Thread(target=held.clear, daemon=True).start()

    def broadcast_now(self, values: torch.Tensor) -> torch.Tensor:
        """Return rank 0's vector, on every rank."""
        self.start_broadcast(values)
        return self.finish_broadcast()

    def check_agreement(self, settings: dict[str, Any], advice: str = "give every rank the same") -> None:
        """Raise the same error on every rank where they disagree on a setting, or where one of them refuses."""
        names = sorted(settings)
        mine = [_digest(settings[name]) for name in names] + [_digest(names)]
        refusals = self._refusals("", len(mine))
        if refusals:
            raise DisagreementError("; ".join(refusals))
        table = self._gather_now(torch.tensor(mine, dtype=torch.int64))
        differing = (table != table[0]).any(dim=0)[:-1].tolist()
        wrong = [name for name, differs in zip(names, differing, strict=True) if differs]
        if wrong:
            told = ", ".join(f"{name}={settings[name]!r}" for name in wrong)
            raise DisagreementError(f"ranks disagree on {', '.join(wrong)}; rank {self.rank} has {told}: {advice}")

    def agrees(self, number: int) -> bool:
        """Return whether all ranks have the same number."""
        table = self._gather_now(torch.tensor([number]))
        return bool((table == table[0]).all())

    def refuse(self, error: Exception) -> None:
        """Tell the ranks in `check_agreement` why this one cannot go on, so that they raise too; the caller raises."""
        _log.error("rank %d: %s", self.rank, error)  # before waiting for ranks that may never come
        with suppress(RuntimeError):  # they are gone: this rank's own error is the one to be seen
            self._refusals(f"rank {self.rank} could not build its loader: {error}", 0)

    def _refusals(self, mine: str, num_settings: int) -> list[str]:
        """Return what ranks have against going on."""
        text = mine.encode()
        heads = self._gather_now(torch.tensor([len(text), num_settings]), _REFUSAL if mine else None)
        if not heads[:, 0].any():
            same = len(set(heads[:, 1].tolist())) == 1
            return [] if same else ["ranks pass different settings to the loader: run the same script on every rank"]
        return [told for told in self._gather_bytes(text, heads[:, 0].tolist()) if told]

    def gather_count(self, mine: int) -> list[int]:
        """Return a whole number of every rank, by rank, for which this waits."""
        counts: list[int] = self._gather_now(torch.tensor([mine]))[:, 0].tolist()
        return counts

    def gather_text(self, mine: str, limit: timedelta | None = None) -> list[str]:
        """Return a text of every rank, by rank, for which this waits `limit`, or else the group's own."""
        text = mine.encode()
        return self._gather_bytes(text, self._gather_now(torch.tensor([len(text)]), limit)[:, 0].tolist())

    def send(self, values: torch.Tensor, source: int, limit: timedelta) -> None:
        """Fill this tensor on every rank with what one rank has in it."""
        self._finish(self._group.broadcast(values, source), limit)

    def _gather_bytes(self, mine: bytes, lengths: list[int]) -> list[str]:
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        rows = zip(self._gather_now(padded), lengths, strict=True)
        return [bytes(row[:length].tolist()).decode() for row, length in rows]

    def _gather_now(self, values: torch.Tensor, limit: timedelta | None = None) -> torch.Tensor:
        """Return a vector of every rank, all of one length, [n, length]; within `limit`, or else the group's own."""
        rows = [torch.empty_like(values) for _ in range(self.world_size)]
        work = self._group.allgather([rows], [values])
        self._finish(work, limit)
        return torch.stack(rows)


_inherited: list[Any] = []  # from the process that this one was forked from, and not this one's to give back


def when_gone(owner: object, function: Callable[..., None], *args: Any, at_exit: bool = True) -> None:
    """Call a function once an object is gone, in this process alone.

    A loader's worker is a copy of its rank, and may collect a model that its rank had just let go of. To end the copy
    of a group there, whose threads are the rank's, is a segmentation fault; the copy is kept instead.
    """
    process = os.getpid()

    def end() -> None:
        if os.getpid() == process:
            function(*args)
        else:
            _inherited.append((function, args))

    weakref.finalize(owner, end).atexit = at_exit


def pause_at_exit() -> None:
    """Leave gloo's threads a moment before the interpreter ends.

    One that drops the last all-reduce needs the GIL for it, and Python ends threads that ask for the GIL too late: the
    process aborts with "terminate called without an active exception" (plain DDP's too: 9 of 50 launches, none of 20
    with the pause).
    """
    atexit.unregister(_pause)  # however many models there are, once is enough
    atexit.register(_pause)


def _pause() -> None:
    time.sleep(0.05)


def _store(group: Any) -> Any:
    """Return what the ranks of a group can leave words in for each other."""
    try:
        return _c10d._get_process_group_store(group)
    except KeyError:  # a group that is not torch's own
        return _c10d.PrefixStore(str(dist.get_process_group_ranks(group)), _c10d._get_default_store())


def _timeout(group: Any) -> timedelta:
    """Return the time limit of the model's own group."""
    for kind in reversed(DEVICES):
        with suppress(RuntimeError, AttributeError):
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return timeout
    return _LIMIT


def _digest(value: Any) -> int:
    """Return a number that stands for a setting: itself, or a hash of its JSON form."""
    if isinstance(value, int) and abs(value) < 2**62:
        return value
    text = json.dumps(value, default=str, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
