"""The adaptive side of one model: what users see of it, and its state.

One engine per model; no global state. What happens inside a step is `loop`'s; `bind` makes an engine complete.
"""

from __future__ import annotations

import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cannikin.core.advice import LearnedCluster
from cannikin.core.cutting import whole_number
from cannikin.core.layer_split import require_scipy
from cannikin.core.lr import Progress, rule_name
from cannikin.core.planner import Planner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.profiles import Profile
from cannikin.core.values import Job, Plan
from cannikin.errors import BatchMatchError, InvalidInputError, StateError
from cannikin.runlog import RankInfo
from cannikin.runtime.across import Together, gather_rows, mean_over_ranks
from cannikin.runtime.binding import (
    check_agreement,
    check_owner,
    data_sheets,
    give_loader,
    make_planner,
    policy_name,
    refuse_groups_beside,
)
from cannikin.runtime.coordinator import Coordinator, Unplanned
from cannikin.runtime.device import Device, find_device
from cannikin.runtime.drawing import Draws
from cannikin.runtime.engine_state import (
    batch_ratio,
    begin_afresh,
    departed_devices,
    device_id,
    read_engine_state,
    restore_planner,
    saved_policy,
    why_afresh,
)
from cannikin.runtime.entry import BatchEntry, BatchSource
from cannikin.runtime.exchange import Exchange, pause_at_exit, when_gone
from cannikin.runtime.follow import Follower, leader_of
from cannikin.runtime.hook import DdpReducer, Reducer
from cannikin.runtime.loop import Loop
from cannikin.runtime.memory import MemoryGauge, later_bytes
from cannikin.runtime.notice import Notices
from cannikin.runtime.options import DrawOptions, OneOrMore, Options, check_model, check_names
from cannikin.runtime.profile_store import ProfileStore, introduce, model_key, share_profiles
from cannikin.runtime.recorder import Recorder, check_metrics, end_run
from cannikin.runtime.sharded import FsdpReducer
from cannikin.runtime.step import StepInProgress
from cannikin.runtime.update import Update, choose_rules
from cannikin.runtime.weighting import (
    RunningStatistics,
    choose_weighting,
    has_batch_norm,
    is_training,
    network,
    refuse_sparse,
    weighted,
)


class Engine:
    """The adaptive side of one module; made by `attach`, kept as `model.engine`.

    Args:
        module: under DDP or `fully_shard`, before its first training step and without collectives of its own.
        optimizer: the one that steps its parameters, or several that step together.
        exchange: of the ranks, where the module was made after it.
        **options: see `Options`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: OneOrMore,
        exchange: Exchange | None = None,
        **options: Unpack[Options],
    ) -> None:
        check_names("attach", Options.__annotations__, None, options)
        net = network(module)
        optimizers = check_model(net, optimizer, options.get("policy"))
        refuse_sparse(net)
        # Options are refused before ranks make a group: in its midst, one rank's error becomes gloo's on the others.
        self.batch_dim = whole_number("batch_dim", options.get("batch_dim", 0), low=0)
        leader = None if options.get("follows") is None else leader_of(options["follows"], options)
        policy, scaler, profiles = options.get("policy"), options.get("grad_scaler"), options.get("profiles")
        scaler = scaler if scaler is not None and scaler.is_enabled() else None  # GradScaler(enabled=use_amp)
        self.policy = os.environ.get("CANNIKIN_POLICY", "cannikin") if policy is None else policy
        self.weighting, self.weighting_reason = choose_weighting(options.get("weighting", "auto"), module)
        rules, self.lr_reason = choose_rules(
            options.get("lr_rule", "auto"), optimizers, options.get("warmup_steps", 0.0)
        )
        self.lr_rule = " and ".join(rule_name(rule) for rule in rules)
        self.has_batch_norm = has_batch_norm(net)
        self._module = module
        # The loader, which has this engine: in a cycle torch would wait 5 s for each of its workers when both go.
        self._source: weakref.ref[BatchSource] | None = None
        self._restored: dict[str, Any] | None = None  # a state loaded before there was a planner to take it
        self._ranks: list[RankInfo] = []  # who they are, once a loader is bound
        self._profiles: list[Profile | None] | None = None  # stored ones of their devices
        self._departed: list[Profile] = []  # of devices that this run has had and that no rank has now, newest first
        self.device = find_device(next(net.parameters()).device)
        self._update = Update(optimizers, rules, self.device, net.parameters())
        self._reducer = _make_reducer(module, self.device, self._update, options.get("comm_wrapper"))
        self._exchange = Exchange(self._reducer.group) if exchange is None else exchange
        self._recorder = Recorder(options.get("observers", ()), options.get("run_dir"), active=self._exchange.rank == 0)
        self._profile_key = model_key(net, scaled=scaler is not None, sharded=net is module)
        self._store = ProfileStore(profiles, self._profile_key) if profiles is not None and self.rank == 0 else None
        self._grad_scaler = scaler
        self._follows = leader is not None
        self.loop = self._make_loop(leader)
        self.loop.register(module)
        self._look_out()
        when_gone(self, end_run, self._recorder, self.loop.queue, self.loop.memory, self.rank)
        pause_at_exit()
        if options.get("loader") is not None:
            give_loader(options["loader"], self)

    def _make_loop(self, leader: Loop | None) -> Loop:
        """Return the loop of this model's steps, which are on another loop's batches where it follows that one."""
        net = network(self._module)
        make: Callable[..., Loop] = Loop if leader is None else partial(Follower, leader)
        return make(
            device=self.device,
            memory=MemoryGauge(self.device.memory, later_bytes=later_bytes(net)),
            exchange=self._exchange,
            reducer=self._reducer,
            update=self._update,
            statistics=RunningStatistics(self._module, self._reducer.group, self._reducer.sum_weighted),
            recorder=self._recorder,
            weighting=self.weighting,
            grad_scaler=self._grad_scaler,
            notices=Notices(
                net,
                self.rank,
                num_ranks=self.world_size,
                may_differ=self.policy != "even",
                seeks_models=not self._follows,
            ),
            batch_dim=self.batch_dim,
        )

    def _look_out(self) -> None:
        """Look out for missing ranks, and give threads and sockets back once nothing trains any more."""
        lookout = self._exchange.lookout
        if self._follows:  # the model that it follows looks out for both
            lookout.close()
        else:
            lookout.follow(self.loop)
            self._reducer.name_missing = lookout.name_missing
            when_gone(self.loop, lookout.close)
        # Not at the end of the program: there the system does so, and ranks may still wait for each other.
        when_gone(self.loop, self._exchange.destroy, at_exit=False)

    # What a loader needs before it is bound; then it has the loop.

    @property
    def rank(self) -> int:
        """This process's rank in the model's process group."""
        return self._exchange.rank

    @property
    def world_size(self) -> int:
        """n."""
        return self._exchange.world_size

    @property
    def is_training(self) -> bool:
        """Whether the module is in training mode, so that its next forward is a step's."""
        return is_training(self._module)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks, which wait in `bind`, that this one cannot build its loader."""
        self._exchange.refuse(error)

    def agrees(self, number: int) -> bool:
        """Return whether all ranks, which must all ask, have the same number."""
        return self._exchange.agrees(number)

    def bind(self, source: BatchSource, job: Job, settings: dict[str, int]) -> Loop:
        """Take this loader as the source of batches, after checking that all ranks agree on it.

        Raises the same error on every rank, within seconds of the last one's arrival.
        """
        if self._follows:
            raise InvalidInputError("this model follows another (follows=): give the loader to that one")
        if self.loop.coordinator.is_bound:
            raise InvalidInputError(
                "this model has a loader already: give each model one HeteroDataLoader, and evaluate with a torch "
                "DataLoader"
            )
        check_owner([rates.optimizer for rates in self._update.rates], self.loop)
        policy = policy_name(self.policy)
        choices = {"policy": policy, "weighting": self.weighting, "lr_rule": self.lr_rule, "lag": self.device.lag}
        check_agreement(self._exchange, job, **settings, **choices)
        refuse_groups_beside(self._exchange, self._reducer.group, job)
        ranks = self._ranks = introduce(self._exchange, self.device)
        self._profiles = share_profiles(self._exchange, self._store, ranks)
        sheets = data_sheets(ranks, network(self._module))
        state, batch_norm = self._restored, self.has_batch_norm
        begins = state is None or why_afresh(self.policy, state, self.world_size)
        planner = make_planner(self.policy, job, batch_norm, sheets, self._profiles if begins else None)
        if state is not None:
            self._restore_planner(planner, state)
            self._update.restore(self._update.progress.times(batch_ratio(state, job)))
        coordinator = Coordinator(self._exchange, self.device, job, planner, prefetch_depth=source.prefetch_depth)
        coordinator.agree()
        self._source = weakref.ref(source)
        self.loop.begin(coordinator, source.item_count)
        if self.world_size == 1 and job.largest_total > job.batch_size:
            self._reducer.compare_with_previous()
        if self._store is not None:
            self._store.ranks, self.loop.store = ranks, self._store
            self._store.check(planner, policy)
        first = coordinator.schedule.decision
        self._recorder.begin(job, policy, network(self._module), ranks, first, profile_key=self._profile_key)
        return self.loop

    @property
    def exchange(self) -> Exchange:
        """What carries messages between the ranks, beside the gradients."""
        return self._exchange

    def parts(self) -> dict[str, Any]:
        """Return all that has a state of its own, by name, as a snapshot holds it."""
        if network(self._module) is self._module:
            raise InvalidInputError(
                "a Snapshot is rank 0's, which has only its shards of a module under fully_shard: save the module and "
                "the optimizer by torch.distributed.checkpoint, and engine.state_dict() and loader.state_dict() beside "
                "them (docs/integrations/fsdp.md)"
            )
        optimizers = [rates.optimizer for rates in self._update.rates]
        found = {"model": network(self._module), "optimizer": optimizers, "grad_scaler": self._grad_scaler}
        return {**{k: v for k, v in found.items() if v is not None}, "engine": self, "loader": self._loader}

    @property
    def _loader(self) -> BatchSource | None:
        return None if self._source is None else self._source()

    # Batches of the user's own.

    def use_batch(self, local: int | None = None, total: int | None = None) -> None:
        """See `HeteroDataParallel.use_batch`."""
        if self._follows:
            if local is None and total is None:
                return  # it always is
            raise InvalidInputError("this model follows another (follows=): call use_batch(local, total) of that one")
        if local is None and total is None:
            self.loop.queue.use_in_hand(self.loop.step)
            return
        if local is None or total is None:
            raise InvalidInputError("use_batch() takes both numbers, use_batch(local, total), or none")
        total = whole_number("total", total, low=1)
        self.loop.queue.describe(whole_number("local", local, low=0, high=total), total)

    def batches(self, batch_size: int, **options: Unpack[DrawOptions]) -> Draws:
        """See `HeteroDataParallel.batches`."""
        return Draws(self, batch_size, **options)

    def skip_batch(self) -> None:
        """See `HeteroDataParallel.skip_batch`."""
        self.loop.skip_batch()

    @property
    def local_batch(self) -> int:
        """See `HeteroDataParallel.local_batch`."""
        return self._in_hand().local_batch

    @property
    def total_batch(self) -> int:
        """See `HeteroDataParallel.total_batch`."""
        return self._in_hand().count_all()

    def _in_hand(self) -> BatchEntry:
        entry = self.loop.in_hand
        if entry is None:
            raise BatchMatchError("no batch was handed out yet: read local_batch and total_batch inside of the loop")
        return entry

    def micro_batches(self, batch: Any, num_parts: int | None = None) -> Iterator[Any]:
        """See `HeteroDataParallel.micro_batches`."""
        return self.loop.micro_batches(self._module, batch, num_parts)

    @property
    def current_entry(self) -> BatchEntry | None:
        """The batch in training."""
        return None if self.loop.step is None else self.loop.step.entry

    @property
    def current_share(self) -> float:
        """This rank's part of the samples, or items, of the batch in training; 0 where it is padding."""
        step = self.loop.step
        if step is None:
            raise BatchMatchError("there is no training step yet: call the wrapped model, not the module inside")
        return 0.0 if step.entry.is_padding else step.share()

    @property
    def share_of_loss(self) -> float:
        """This rank's part of the batch that a loss would be of now, before or after its forward; 0 in padding.

        In an evaluation, and before there is a batch, all ranks count alike: 1.
        """
        entry = self.loop.loss_entry if self.is_training else None
        if entry is None:
            return 1.0
        return 0.0 if entry.is_padding else StepInProgress(entry=entry).share()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return progress and everything learned, in plain types. Rank 0 has learned it: save there."""
        num_steps = self.loop.queue.num_taken + self._recorder.steps_before
        planner = None if self._follows else self.loop.coordinator.planner_state()
        progress = self._update.settle()
        return {
            "version": 1,
            "progress": progress.batches,
            "optimizer_steps": progress.steps,
            "forgone": progress.forgone,
            "num_steps": num_steps,
            "batch_size": None if self.job is None else self.job.batch_size,
            "pass_steps": None if self.job is None else self.job.pass_steps,
            "saved_s": time.time(),
            "devices": [asdict(device_id(rank)) for rank in self._ranks],
            "departed": self._departed,
            "policy": saved_policy(self.policy),
            "planner": planner,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, on every rank, and on another number of them too."""
        if not isinstance(state, dict) or state.get("version") != 1:
            raise StateError("not the state of a cannikin engine of version 1: load what engine.state_dict() returned")
        saved = read_engine_state(state)
        progress, coordinator = saved.progress, self.loop.coordinator
        if state["planner"] is not None and isinstance(coordinator, Coordinator):
            self._restore_planner(coordinator.planner, state)
            progress = progress.times(batch_ratio(state, coordinator.schedule.job))
            coordinator.begin_again()
            if self._loader is not None:
                self._loader.settle_place()
        # Nothing has been changed before: a state that is refused leaves all as it was.
        self._update.restore(progress)
        self._recorder.resume(saved.num_steps - self.loop.queue.num_taken)
        self._restored = state if state["planner"] is not None else None

    def _restore_planner(self, planner: Planner, state: dict[str, Any]) -> None:
        """Let the planner take what was saved; of another policy's, what fits, and say so."""
        why = why_afresh(self.policy, state, self.world_size)
        if not why:
            departed = departed_devices(planner, state, self._ranks)
            restore_planner(planner, state, self._ranks, self._profiles)
            self._departed = departed
            return
        told = begin_afresh(planner, state, why)
        self._departed = []
        if self.rank == 0:
            warnings.warn(told, RuntimeWarning, stacklevel=4)

    # For users.

    @property
    def coordinator(self) -> Unplanned | Coordinator:
        """Who keeps the plans."""
        return self.loop.coordinator

    @property
    def job(self) -> Job | None:
        """What the planner may choose from; None before a loader is built."""
        return self.loop.coordinator.job

    def epochs(self, num_epochs: float) -> Iterator[int]:
        """See `HeteroDataParallel.epochs`."""
        job, source = self.job, self._loader
        if job is None or source is None or job.pass_steps is None:
            raise InvalidInputError("epochs() needs a HeteroDataLoader of known length: build it first, or use range()")
        goal = num_epochs * job.pass_steps
        self.loop.goal = float(num_epochs)
        try:
            while self.loop.passed < goal - 0.5:  # a last step that is half done would cost a whole pass
                yield source.epoch
            self.loop.end_training()
        finally:
            self.loop.goal = None

    @property
    def goal(self) -> float | None:
        """Passes that `epochs` has been asked for, while its loop runs."""
        return self.loop.goal

    @property
    def resumed_from(self) -> Progress | None:
        """The progress of the saved state that was loaded last, another object each time; None where none was."""
        return self._update.resumed_from

    def elapsed(self, unit: str, at: Progress | None = None) -> float:
        """Return the steps of the optimizer, or the passes, that training so far has been worth; never above `goal`.

        Args:
            unit: "step", or "epoch", which needs a loader of known length.
            at: what training was worth at another time, between two steps; now where left out.
        """
        job, progress = self.job, self._update.progress
        pass_steps = job.pass_steps if job is not None else None
        if at is not None:
            return at.steps if unit == "step" else (at.batches + at.forgone) / (pass_steps or math.nan)
        beyond = 0.0
        if self.goal is not None and pass_steps is not None:
            beyond = max(0.0, self.loop.passed - self.goal * pass_steps)
        if unit == "step":
            return progress.steps - beyond / progress.num_batches
        assert pass_steps, "by_progress asks for a loader of known length"
        return (self.loop.passed - beyond) / pass_steps

    def cluster(self) -> LearnedCluster | None:
        """Return the cluster as it has been learned by now, as a value: every rank's device and curves, and the job.

        Rank 0 learns: the others get None. So does rank 0 before the first window, and under policies without a model.
        A window that is just being learned from is waited for, some milliseconds.
        """
        planner = self.loop.coordinator.planner
        if self.rank != 0 or not isinstance(planner, Controller):
            return None
        return planner.cluster([(rank.device, rank.host) for rank in self._ranks])

    def weighted_mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """See `HeteroDataParallel.weighted_mean`."""
        share = self.current_share if self.is_training else 1 / self.world_size
        total = weighted(torch.as_tensor(value, device=self.device.torch_device).detach(), share)
        with self._exchange.meeting():
            dist.all_reduce(total, group=self._reducer.group)
        return total

    def global_mean(self, values: torch.Tensor) -> torch.Tensor:
        """See `HeteroDataParallel.global_mean`."""
        return mean_over_ranks(values, self._together())

    def all_gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `HeteroDataParallel.all_gather`."""
        together = self._together()
        sizes = self._exchange.gather_count(len(rows) if together.weight else 0)
        start = sum(sizes[: self.rank])
        numbers = torch.arange(start, start + len(rows), device=rows.device)
        if together.weight == 0:  # padding: any rows of the others' will do, with weight 0
            numbers = torch.zeros_like(numbers)
        return gather_rows(rows, together, sizes, self.rank), numbers

    def _together(self) -> Together:
        """Return this rank's weight in the loss of all ranks; in an evaluation all count."""
        if self.loop.has_part:
            raise InvalidInputError(
                "global_mean() and all_gather() inside micro_batches(): ranks may have different numbers of parts, and "
                "would wait for each other; call them on the whole batch"
            )
        share = self.share_of_loss
        weight = 1 / self.world_size if self.weighting == "none" and share else share
        return Together(self._reducer.group, weight, self._exchange.meeting)

    def log(self, /, **metrics: Any) -> None:
        """See `HeteroDataParallel.log`."""
        numbers = check_metrics(metrics, read=self._recorder.active)
        self._recorder.event(self.loop.queue.num_taken, "eval", numbers)

    def close(self, early: str = "") -> None:
        """Say in the run log that the training is over, and write nothing more.

        Without it that is done when the program ends without an exception. A process that leaves by `os._exit`, as
        those of `multiprocessing` do, never gets there. A program that ends in the middle of a pass over its data is
        said to have ended early: call this after a `break` that was meant. Python tells nobody the status that
        `sys.exit` was given, so before `sys.exit(1)` between two passes say why.

        Args:
            early: why the training is over before its time, such as "the loss is not finite"; empty where it is not.
        """
        self._recorder.end(self.loop.queue.num_taken, early)

    @property
    def plan(self) -> Plan | None:
        """The plan in force at the step in training, or at the first one; None before a loader is built."""
        return self.loop.coordinator.plan_at(self.loop.current_step)

    @property
    def gain(self) -> float:
        """B0-steps that one step at the plan's total batch is worth; 1 before the noise scale is known."""
        return self.loop.coordinator.gain_at(self.loop.current_step, self._update.num_batches)

    @property
    def noise_scale(self) -> float:
        """phi = S/G in samples, the same on every rank; NaN before it is known, inf where noise drowns the signal."""
        return self.loop.coordinator.noise_scale

    @property
    def progress(self) -> float:
        """Initial batches that training so far has been worth; a step over K batches that pile up counts K of them."""
        return self._update.progress.batches

    @property
    def num_updates(self) -> int:
        """Steps that the optimizer has taken since this process began."""
        return self._update.num_steps

    @property
    def lr_scale(self) -> float:
        """The factor on every learning rate, of several optimizers the first one's, under the plan in force."""
        return self.loop.coordinator.lr_factor(self._update, self.loop.current_step)

    def explain(self, error: BaseException) -> None:
        """Say in a note of the error what to do, where a training step ran out of memory or lost a rank."""
        self.loop.memory.explain(error, self.rank)
        self._exchange.lookout.note_missing(error)


def _make_reducer(module: torch.nn.Module, device: Device, update: Update, comm_wrapper: Any) -> Reducer:
    """Return what reduces this module's gradients."""
    if isinstance(module, DistributedDataParallel):
        return DdpReducer(module, device, comm_wrapper=comm_wrapper, variance_of=update.variance)
    if comm_wrapper is not None:
        raise InvalidInputError(
            "comm_wrapper= is for DDP's buckets: under fully_shard, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) "
            "compresses what is reduced"
        )
    require_scipy()  # which solves for the best split of layers
    return FsdpReducer(module, device, variance_of=update.variance)
