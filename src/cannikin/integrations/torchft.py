"""Trains on while replicas come and go, without a restart: cannikin's plans under torchft's quorums.

torchft's lighthouse and manager say who is in. Before every step the members of a quorum meet; a step that lost one of
them is not committed, and its samples are cut again over those who remain. What is committed is known by one `Place`,
which advances in a committed step and nowhere else, so that every sample counts once:

    meet       quorum; whoever is behind takes weights, place and profiles from a peer
    greet      only where the quorum is another one: who are you, is your history ours; rank 0's plan for all of us
    cut        every member takes its slice of the next B samples (`core.cutting`)
    reduce     sum_i (b_i/B) g_i, bucket by bucket beside backward, and one small row per member with what it measured
    commit     if every sum has arrived; then the optimizer's step, the place, and a plan where rank 0 sent one

A sum that has arrived on one member and failed on another is no harm: the first commits, and the second takes over its
weights and place in the next meeting.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cannikin.core.cutting import cut, least_local, whole_number
from cannikin.core.membership import MEASURED, Member, Membership, Place
from cannikin.core.values import NO_MAX, FloatArray
from cannikin.errors import BatchMatchError, DisagreementError, InvalidInputError
from cannikin.runtime.device import Device, find_device
from cannikin.runtime.passes import epoch_order, two_of
from cannikin.runtime.weighting import has_batch_norm, refuse_sparse, running_statistics, watch_outputs

_log = logging.getLogger("cannikin")

_GREETING_BYTES = 8192  # of a member, padded: a profile has at most 1,000
_HEAD = ("epoch", "position", "local_batch", "total_batch")  # of a row: where this member believes to be
_NO_MEASUREMENT = (float("nan"),) * len(MEASURED)


@dataclass(kw_only=True, eq=False)
class _Step:
    """The step in hand: who trains on how much, its moments, and the sums under way."""

    counts: tuple[int, ...]
    rank: int
    rows: torch.Tensor  # one per member, as `_row` has it; the sum of all once it has arrived
    load_s: float
    forward: Any = None  # marks, as below
    backward: Any = None
    ready: Any = None
    done: Any = None
    sums: list[Any] = field(default_factory=list)
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # parameters and their parts
    watched: list[Any] = field(default_factory=list)
    statistics: list[torch.Tensor] = field(default_factory=list)  # running means and variances of BatchNorm
    flat_statistics: torch.Tensor | None = None  # their weighted sum over the members

    @property
    def share(self) -> float:
        """This member's weight in the gradient, b_i/B."""
        return self.counts[self.rank] / sum(self.counts)


class _Reducer:
    """What DDP calls for every bucket; apart from the model, since DDP's C++ side would keep that for ever."""

    def __init__(self, manager: Any, device: Device) -> None:
        self._manager = manager
        self._device = device
        self.step: _Step | None = None

    def start_sum(self, values: torch.Tensor) -> None:
        """Begin to sum values over the members, in place."""
        assert self.step is not None
        self.step.sums.append(self._manager.allreduce(values, reduce_op=dist.ReduceOp.SUM))

    def hang_up(self) -> None:
        """End all connections: a member that waits for ours would not hear of the one that was lost until a time limit.

        In gloo's ring only the neighbours of a lost member notice by themselves. The next quorum connects anew.
        """
        self._manager._pg.abort()

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Begin to sum a bucket; with the last one wait for all of them, so that backward ends with the gradient."""
        step, buffer = self.step, bucket.buffer()
        if step is None or step.ready is not None:
            raise BatchMatchError(
                "backward() without a batch, or twice for one: take each batch from the LiveDataLoader, call "
                "backward() once and step() once"
            )
        step.gradients += zip(bucket.parameters(), bucket.gradients(), strict=True)
        if bucket.is_last():
            step.ready = self._device.mark()
        self.start_sum(_weighted(buffer, step.share))
        if bucket.is_last():
            if step.statistics:
                step.flat_statistics = torch.cat([each.reshape(-1) for each in step.statistics])
                self.start_sum(_weighted(step.flat_statistics, step.share))
            for work in step.sums:
                if not work.wait():  # the manager knows why, and the step will not be committed
                    self.hang_up()
            step.done = self._device.mark()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future


def _weighted(values: torch.Tensor, share: float) -> torch.Tensor:
    """Multiply values by a share, in place."""
    return values.mul_(share) if share > 0 else values.zero_()  # not multiplied by 0: 0 x NaN is NaN


class LiveDataParallel:
    """Data-parallel training by whoever is there: torchft's manager decides who, cannikin how much each takes.

    Args:
        module: the network, on its device, one per process.
        optimizer: of its parameters.
        manager: a `torchft.Manager` with `use_async_quorum=False` and no state functions for the two above.
        name: what this member is known by when it comes back; its host and device where left out.
        max_local: the largest local batch that its memory holds. The total batch is kept to what all members hold.
        profile: what an earlier run learned of it: `profiles()[name]` there.

    Call it as you would call the module, where gradients are to be summed; use the module itself to evaluate.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        manager: Any,
        *,
        name: str | None = None,
        max_local: int | None = None,
        profile: dict[str, Any] | None = None,
    ) -> None:
        from torchft.process_group import ProcessGroupDummy

        if getattr(manager, "_use_async_quorum", False):
            raise InvalidInputError(
                "the manager has use_async_quorum=True: a batch can be cut only once it is known who is in; make it "
                "with use_async_quorum=False"
            )
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise InvalidInputError(
                f"this replica has {dist.get_world_size()} processes: LiveDataParallel takes replicas of one process; "
                "start one replica for each device"
            )
        refuse_sparse(module)
        self.module = module
        self.optimizer = optimizer
        self.manager = manager
        self._device = find_device(next(module.parameters()).device)
        self._reducer = _Reducer(manager, self._device)
        # As torchft's own DDP: a group of one takes DDP's own collectives, and buckets that are never rebuilt are the
        # same on a member that has just joined.
        self._ddp = DistributedDataParallel(module, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True)

        def sum_over_members(reducer, bucket):  # type: ignore[no-untyped-def]
            return reducer.reduce(bucket)

        self._ddp.register_comm_hook(self._reducer, sum_over_members)
        device_name = os.environ.get("CANNIKIN_DEVICE") or self._device.name
        self._me = Member(
            name=name or f"{socket.gethostname()}, {device_name}",
            device=device_name,
            max_local=NO_MAX if max_local is None else whole_number("max_local", max_local, low=1),
            profile=profile,
        )
        self.membership: Membership | None = None  # once there is a loader
        self._has_met = False
        self._quorum: int | None = None  # whose members know each other
        self._measured = _NO_MEASUREMENT  # in the step before
        self._proposed: tuple[int, ...] | None = None
        self._updated: tuple[Any, Any] | None = None  # marks around the optimizer's last step
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # as they were before the step in hand
        manager.register_state_dict_fn("cannikin", self.load_state_dict, self.state_dict)

    @property
    def plan(self) -> dict[str, int]:
        """The members' local batches by name, in the order of their ranks; empty before the first meeting."""
        crew = self._crew
        return dict(zip(crew.names, crew.local_batches, strict=True))

    @property
    def reason(self) -> str:
        """Why the plan is as it is, for people."""
        return self._crew.reason

    @property
    def local_batch(self) -> int:
        """This member's samples in the batch in hand; 0 where that is padding, which counts for nothing."""
        step = self._reducer.step
        return 0 if step is None else step.counts[step.rank]

    @property
    def place(self) -> Place:
        """What has been committed so far."""
        return self._crew.place

    def profiles(self) -> dict[str, dict[str, Any]]:
        """Return what was learned of every member that ever trained here, by name, as JSON can hold it."""
        return self._crew.profiles()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        step = self._reducer.step
        if step is None or step.forward is not None:
            raise BatchMatchError(
                "a training forward without a batch, or twice for one: take each batch from the LiveDataLoader, and "
                "call step() after its backward()"
            )
        step.forward = self._device.mark()
        self._buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        step.statistics = running_statistics(self.module)
        output = self._ddp(*args, **kwargs)

        def begin_backward(*gradients: Any) -> None:
            if step.backward is None:
                step.backward = self._device.mark()

        step.watched = watch_outputs(output, begin_backward)
        return output

    def step(self) -> bool:
        """Commit the step: update the weights if every sum has arrived, and return whether they were.

        Gradients are set to None in any case. A step that is not committed leaves no trace: its samples come again, cut
        over the members of the next quorum.
        """
        step = self._reducer.step
        if step is None or step.done is None:
            raise BatchMatchError("step() without a backward(): call it once for each batch, after its backward()")
        self._reducer.step = None
        for handle in step.watched:
            handle.remove()
        committed = bool(self.manager.should_commit())
        if committed:
            self._commit(step)
        else:
            for buffer, before in self._buffers:
                buffer.copy_(before)
            self._measured = _NO_MEASUREMENT
        self.optimizer.zero_grad()
        self._has_met = False
        return committed

    def _commit(self, step: _Step) -> None:
        """Update the weights, and take note of what all members have told in this step."""
        crew = self._crew
        rows = step.rows.cpu().double().numpy()
        _check_rows(rows, crew.place, step.counts)
        for parameter, gradient in step.gradients:
            if parameter.grad is None:  # no sample of this member used it, but some of another member may have
                parameter.grad = gradient
        if step.flat_statistics is not None:
            parts = torch.split(step.flat_statistics, [each.numel() for each in step.statistics])
            for each, part in zip(step.statistics, parts, strict=True):
                each.copy_(part.view_as(each))
        seconds = self._device.seconds
        update_s = 0.0 if self._updated is None else seconds(*self._updated)
        before = self._device.mark()
        self.optimizer.step()
        self._updated = before, self._device.mark()
        if step.counts[step.rank]:
            forward_s = seconds(step.forward, step.backward)
            moments = (seconds(step.backward, mark) for mark in (step.ready, step.done))
            self._measured = (step.counts[step.rank], update_s + forward_s, *moments, step.load_s)
        else:
            self._measured = _NO_MEASUREMENT
        crew.place = crew.place.after(crew.names, step.counts, crew.num_samples)
        first = len(_HEAD) + len(MEASURED)
        plan = rows[0, first:].round().astype(np.int64)
        if plan.any():
            _log.info("plan from step %d on: %s; %s", crew.place.num_steps, self.plan, crew.reason)
            crew.install(plan.tolist())
        self._proposed = crew.observe(rows[:, len(_HEAD) : first])

    def state_dict(self) -> dict[str, Any]:
        """Return what a member that joins needs, or a restart of all of them: weights, optimizer, place, profiles."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "membership": self._crew.state_dict(),
            "manager": self.manager.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, of another member or of an earlier run."""
        self._crew.load_state_dict(state["membership"])
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.manager.load_state_dict(state["manager"])
        self._quorum, self._measured, self._proposed = None, _NO_MEASUREMENT, None

    @property
    def _crew(self) -> Membership:
        if self.membership is None:
            raise InvalidInputError("there is no data yet: make a LiveDataLoader(..., model=this) first")
        return self.membership

    def meet(self) -> None:
        """Come together with whoever is there, before a step; where that fails, with whoever is there then.

        The loader does this. Nothing happens where the members have met and no step has been taken since.
        """
        while not self._has_met:
            self.manager.start_quorum()
            self._has_met = self.manager.errored() is None and self._greet()
            if not self._has_met:
                self._reducer.hang_up()
                self.manager.should_commit()  # no: the next quorum connects anew

    def hand_out(self, counts: tuple[int, ...], rank: int, load_s: float) -> None:
        """Take note of the batch that the loader is about to yield, and begin to tell the others of the one before."""
        rows = np.zeros((len(counts), len(_HEAD) + len(MEASURED) + len(counts)))
        place = self._crew.place
        head = (place.epoch, place.position, counts[rank], sum(counts))
        rows[rank, : len(_HEAD) + len(MEASURED)] = (*head, *self._measured)
        if rank == 0 and self._proposed is not None:
            rows[0, len(_HEAD) + len(MEASURED) :] = self._proposed
        self._reducer.step = _Step(
            counts=counts,
            rank=rank,
            rows=torch.from_numpy(rows).to(self._device.torch_device),
            load_s=load_s,
        )
        self._reducer.start_sum(self._reducer.step.rows)

    def refuse_unfinished(self) -> None:
        """Raise where the batch before has not been committed or given up."""
        if self._reducer.step is not None:
            raise BatchMatchError(
                "the next batch was asked for before step() has ended the last one: call backward() and step() once "
                "for each batch"
            )

    @property
    def rank(self) -> int:
        """This member's place among `membership.members`."""
        rank: int | None = self.manager.participating_rank()
        if rank is None:
            raise InvalidInputError("this replica is a spare: make the manager with WorldSizeMode.DYNAMIC")
        return rank

    def _greet(self) -> bool:
        """Get to know the members of another quorum, and take rank 0's plan; False where one was lost meanwhile."""
        if self.manager._quorum_id == self._quorum:
            return True
        crew, rank, num_members = self._crew, self.rank, self.manager.num_participants()
        greetings = self._gather(rank, num_members)
        if greetings is None:
            return False
        first = greetings[0]["history"]
        if any(greeting.pop("history") != first for greeting in greetings):
            # They have trained apart from each other, as many steps each: torchft cannot tell. Rank 0's history holds.
            if crew.place.history != first:
                self.manager.load_state_dict({"step": 0, "batches_committed": 0})
            self.manager.report_error(RuntimeError("members have trained apart from each other"))
            return False
        crew.change([Member(**greeting) for greeting in greetings])
        plan = torch.tensor(crew.local_batches if rank == 0 else [0] * num_members, device=self._device.torch_device)
        if not self._summed(plan):
            return False
        crew.install(plan.tolist())
        self._quorum, self._measured, self._proposed = self.manager._quorum_id, _NO_MEASUREMENT, None
        _log.info("members from step %d on: %s; %s", crew.place.num_steps, self.plan, crew.reason)
        return True

    def _gather(self, rank: int, num_members: int) -> list[dict[str, Any]] | None:
        """Return what all members say of themselves, by rank; None where one was lost."""
        me = {
            "history": self._crew.place.history,
            "name": self._me.name,
            "device": self._me.device,
            "max_local": self._me.max_local,
            "profile": self._me.profile,
        }
        text = json.dumps(me).encode()
        if len(text) > _GREETING_BYTES:
            text = json.dumps({**me, "profile": None}).encode()
        texts = torch.full((num_members, _GREETING_BYTES), 0, dtype=torch.uint8)
        texts[rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = texts.to(self._device.torch_device)
        if not self._summed(texts):
            return None
        return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in texts.cpu()]

    def _summed(self, values: torch.Tensor) -> bool:
        """Sum values over the members, in place, and return whether that went well."""
        self.manager.allreduce(values, reduce_op=dist.ReduceOp.SUM).wait()
        return self.manager.errored() is None


def _check_rows(rows: FloatArray, place: Place, counts: tuple[int, ...]) -> None:
    """Raise where members did not cut this step alike: samples would be lost or seen twice."""
    told = rows[:, : len(_HEAD)].astype(np.int64).tolist()
    wanted = [[place.epoch, place.position, count, sum(counts)] for count in counts]
    if told != wanted:
        raise DisagreementError(
            f"members cut step {place.num_steps} differently: {', '.join(_HEAD)} are {told}, and {wanted} here; this "
            "is a defect of cannikin, please open an issue"
        )


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """A batch to be loaded: `count` samples from `start` on, in the order of an epoch; 0 are padding."""

    epoch: int
    start: int
    count: int


class LiveDataLoader:
    """Hands every member its part of each step, as the plan in force has it; every sample once per epoch.

    Args:
        dataset: with a length and indices, the same for every member.
        batch_size: B, over all members.
        model: what trains on it.
        shuffle, seed: how an epoch is ordered; the same for every member.
        options: what torch's DataLoader takes beside: `num_workers`, `collate_fn`, `pin_memory` and others.

    Workers load ahead for the plan and the members of the moment. Where these change, what was loaded is dropped.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        model: LiveDataParallel,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._model = model
        self._min_local = least_local(has_batch_norm(model.module))
        self._shuffle, self._seed = shuffle, whole_number("seed", seed, low=0)
        self._crew = model.membership = Membership(
            batch_size=whole_number("batch_size", batch_size, low=1),
            num_samples=len(dataset),
            min_local=self._min_local,
        )
        self._orders: dict[int, Any] = {}
        self._asked: deque[_Slice] = deque()  # of the workers, and not yielded yet
        self._ahead = Place()  # the first step that they have not been asked for
        # Workers start now, before the first meeting: the others need not wait for them.
        self._batches = iter(DataLoader(dataset, batch_sampler=_Sampler(self), **options))

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._crew.place.epoch

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are left, beginning with the one that the others are in.

        After the last one the members meet once more: one whose last step failed takes over the others' weights.
        """
        while True:
            self._model.meet()
            if self.epoch >= num_epochs:
                return
            yield self.epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield this member's batches, from where training stands to the end of that epoch."""
        self._model.refuse_unfinished()
        self._model.meet()
        epoch = self.epoch
        while self.epoch == epoch:
            yield self._next()
            self._model.refuse_unfinished()
            self._model.meet()

    def __len__(self) -> int:
        """Steps that are left of the epoch, with the total batch of the moment."""
        total = sum(self._crew.local_batches) or 1
        return -(-(self._crew.num_samples - self._crew.place.position) // total)

    def _next(self) -> Any:
        """Return this member's batch of the next step; what was loaded ahead for another cut is dropped."""
        began_s = time.perf_counter()
        rank = self._model.rank
        counts, wanted, _ = self._cut(self._crew.place, rank)
        if not self._asked or self._asked[0] != wanted:
            self._ahead = self._crew.place
        batch = next(self._batches)
        while self._asked.popleft() != wanted:
            batch = next(self._batches)
        self._model.hand_out(counts, rank, time.perf_counter() - began_s)
        return batch

    def _cut(self, place: Place, rank: int) -> tuple[tuple[int, ...], _Slice, Place]:
        """Return the members' counts at this place, this one's slice, and the place that follows."""
        slices = cut(self._crew.local_batches, self._crew.num_samples - place.position, min_local=self._min_local)
        counts = tuple(count for _, count in slices)
        mine = _Slice(epoch=place.epoch, start=place.position + slices[rank][0], count=counts[rank])
        return counts, mine, place.after((), counts, self._crew.num_samples)

    def indices(self) -> Iterator[list[int]]:
        """Yield the samples of slice after slice, as workers ask for them."""
        while True:
            mine = _Slice(epoch=0, start=0, count=0)  # while it is not known who is there
            if self._crew.members:
                _, mine, self._ahead = self._cut(self._ahead, self._model.rank)
            self._asked.append(mine)
            order = self._order(mine.epoch)
            samples = order[mine.start : mine.start + mine.count].tolist() or order[:2].tolist()
            yield two_of(samples) if self._min_local > 1 else samples  # twice in a mean counts once

    def _order(self, epoch: int) -> Any:
        """Return the order of an epoch, kept for the epoch before and this one."""
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known == epoch - 1}
            self._orders[epoch] = epoch_order(
                self._crew.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle
            )
        return self._orders[epoch]


class _Sampler:
    """What torch's DataLoader takes for a batch sampler: it never ends, since plans do not."""

    def __init__(self, loader: LiveDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.indices()
