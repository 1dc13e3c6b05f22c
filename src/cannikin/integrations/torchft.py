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
import socket
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cannikin.core.cutting import whole_number
from cannikin.core.membership import MEASURED, Member, Membership, Place
from cannikin.core.values import NO_MAX, FloatArray
from cannikin.errors import BatchMatchError, DisagreementError, InvalidInputError
from cannikin.integrations.live_data import LiveDataLoader as LiveDataLoader  # users find both here
from cannikin.runtime.device import Device, find_device, name_of
from cannikin.runtime.weighting import refuse_sparse, running_statistics, watch_outputs, weighted_

_log = logging.getLogger("cannikin")

_GREETING_BYTES = 8192  # of a member, padded: a profile has at most 1,000
_HEAD = ("epoch", "position", "local_batch", "total_batch")  # of a row: where this member believes to be
_NO_MEASUREMENT = (float("nan"),) * len(MEASURED)


@dataclass(kw_only=True, eq=False)
class _Step:
    """The step in hand: who trains on how much, its moments, and the sums under way."""

    counts: tuple[int, ...]
    rank: int
    rows: torch.Tensor  # one per member, `_HEAD`, `MEASURED` and rank 0's plan; the sum of all once it has arrived
    load_s: float
    is_loaded_alone: bool  # nothing else went on meanwhile
    forward: Any = None  # marks: the beginning of forward and of backward,
    backward: Any = None
    ready: Any = None  # the end of backward, and that of all sums
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
        self.start_sum(weighted_(buffer, step.share))
        if bucket.is_last():
            if step.statistics:
                step.flat_statistics = torch.cat([each.reshape(-1) for each in step.statistics])
                self.start_sum(weighted_(step.flat_statistics, step.share))
            for work in step.sums:
                if not work.wait():  # the manager knows why, and the step will not be committed
                    self.hang_up()
            step.done = self._device.mark()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future


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
        if any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules()):
            raise InvalidInputError(
                "the network has SyncBatchNorm, which sums over a group that cannot change: use BatchNorm, whose "
                "running statistics are averaged over the members, or another kind of normalisation"
            )
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
        device_name = name_of(self._device)
        self._me = Member(
            name=name or f"{socket.gethostname()}, {device_name}",
            device=device_name,
            max_local=NO_MAX if max_local is None else whole_number("max_local", max_local, low=1),
            profile=profile,
        )
        self.membership: Membership | None = None  # once there is a loader
        self._has_met = False
        self._has_failed = False  # the planner
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
            alone_s, beside_s = (step.load_s, 0.0) if step.is_loaded_alone else (0.0, step.load_s)
            self._measured = (step.counts[step.rank], alone_s + update_s + forward_s, *moments, beside_s)
        else:
            self._measured = _NO_MEASUREMENT
        crew.place = crew.place.after(crew.names, step.counts, crew.num_samples)
        first = len(_HEAD) + len(MEASURED)
        plan = rows[0, first:].round().astype(np.int64)
        if plan.any():
            crew.install(plan.tolist())
            _log.info("plan from step %d on: %s; %s", crew.place.num_steps, self.plan, crew.reason)
        self._proposed = self._learn(rows[:, len(_HEAD) : first])

    def _learn(self, measured: FloatArray) -> tuple[int, ...] | None:
        """Learn from a step, and return a plan where there is a new one; a planner that fails costs its plans only."""
        if self._has_failed:
            return None
        try:
            return self._crew.observe(measured)
        except Exception as error:
            self._has_failed = True
            warnings.warn(
                f"the planner failed at step {self.place.num_steps} ({type(error).__name__}: {error}): training goes "
                f"on with local batches {self._crew.local_batches}, which no longer adapt; please open an issue",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

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

    def hand_out(self, counts: tuple[int, ...], rank: int, load_s: float, *, is_loaded_alone: bool) -> None:
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
            is_loaded_alone=is_loaded_alone,
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
        texts = torch.zeros((num_members, _GREETING_BYTES), dtype=torch.uint8)
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
