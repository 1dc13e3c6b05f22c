"""One training step, in the order in which it happens, from taking its batch to counting its progress.

    the loader hands a batch out            hand_out
    forward begins: the batch is taken      _before_forward, _take: what is due between the ranks is done first
    forward ends: its outputs are marked    _after_forward
    backward begins, buckets are reduced    _begin_backward, called by the marks of `weighting`; then `hook`
    the optimizer steps                     _before_optimizer, _after_optimizer

Hooks around forward, gradients and optimizer write all of it into the step in progress. Nothing waits.
"""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch

from cannikin.core.cutting import EpochState, least_local
from cannikin.core.lr import Worth
from cannikin.core.values import Plan
from cannikin.errors import BatchMatchError, InvalidInputError
from cannikin.runtime.compiling import not_compiled
from cannikin.runtime.coordinator import Coordinator, Happened, Unplanned
from cannikin.runtime.device import Device
from cannikin.runtime.entry import BatchEntry, added_up, different_streams
from cannikin.runtime.exchange import Exchange
from cannikin.runtime.hook import Reducer
from cannikin.runtime.memory import MemoryGauge
from cannikin.runtime.mistakes import Mistakes
from cannikin.runtime.notice import Notices
from cannikin.runtime.parts import PartedForward, can_cut
from cannikin.runtime.passage import at_end_of_backward
from cannikin.runtime.profile_store import ProfileStore
from cannikin.runtime.recorder import Recorder
from cannikin.runtime.slicing import Slicer, tensors_of
from cannikin.runtime.step import Part, StepInProgress
from cannikin.runtime.update import Pile, Rates, Update
from cannikin.runtime.waiting import BatchQueue, ToldTotals, check_size
from cannikin.runtime.weighting import (
    ParameterGradients,
    RunningStatistics,
    find_hidden,
    has_batch_norm,
    has_tensors,
    is_inward,
    joins,
    mixes_ranks,
    refuse_inner_slopes,
    scale_inputs,
    scale_outputs,
    trains,
    watch_outputs,
    weigh,
)

_NO_BACKWARD = -1  # what torch says where none is under way
_KNOWN = 4  # tensors of a batch by which its forward may be known

# What to do where a snapshot waits for these.
_ON_PILES = "if it has been called, that was another optimizer than the model was given, or a backward came after it"
_ON_FORWARDS = "a forward of no use but its output belongs under torch.no_grad()"
_ON_PLACES = "a HeteroDataLoader knows it, a HeteroBatchSampler does not"


class StepWatcher(Protocol):
    """What is told of the moments between steps, on every rank at the same ones."""

    def end_step(self) -> None:
        """Take note that the loop has come for its next batch, or for the end of its pass."""

    def rest(self) -> None:
        """Take note that nothing is half done: what the loader's state counts is in the weights."""

    def end_training(self) -> None:
        """Take note that the loop over epochs is over, and all that belongs to the last one is done."""


class Beside(Protocol):
    """The loop of a model that follows another, as that one's sees it."""

    def no_own_sync(self) -> AbstractContextManager[None]:
        """Let this model's gradients pile up."""

    def note_backward(self, task: int) -> None:
        """Take note that the first model's backward has come to its outputs; `task` is torch's number of it."""

    def half_done_beside(self, oldest: int | None, *, begins: bool) -> str:
        """Return `Loop.half_done` of this model, where the oldest batch that waits, if any, is of step `oldest`."""


class Loop:
    """The steps of one module; a loader that is bound to the model feeds it.

    Args:
        device, memory, exchange, reducer, update, statistics, recorder: of this model.
        weighting: "hook", "loss" or "none".
        grad_scaler: one that is enabled, if any.
        notices: what looks for code that assumes equal batches.
        batch_dim: the dimension of forward's inputs that counts samples.
    """

    def __init__(
        self,
        *,
        device: Device,
        memory: MemoryGauge,
        exchange: Exchange,
        reducer: Reducer,
        update: Update,
        statistics: RunningStatistics,
        recorder: Recorder,
        weighting: str,
        grad_scaler: Any,
        notices: Notices,
        batch_dim: int = 0,
    ) -> None:
        self._coordinator: Unplanned | Coordinator = Unplanned()
        self.store: ProfileStore | None = None  # of what is learned about devices, on rank 0
        self.queue = BatchQueue()
        self.memory = memory
        self._parted = PartedForward(memory, device.torch_device, exchange.rank)
        self._can_cut = False  # whether a forward that runs out of memory can be run in parts
        self.goal: float | None = None  # passes of progress that the loop has asked for (`epochs`)
        self._device, self._exchange, self._reducer, self._update = device, exchange, reducer, update
        self._statistics, self._recorder = statistics, recorder
        self._weighting, self._grad_scaler, self._notices = weighting, grad_scaler, notices
        self._item_count: Callable[[Any], float] | None = None
        self._part: Part | None = None  # the micro-batch in hand
        self._own: set[int] = set()  # the module's parameters
        self._gradients = ParameterGradients()
        self._counts_padding = False  # in statistics over all ranks, which only the module knows to make
        self._least_part = 1  # samples of a batch that is cut into parts
        self._batch_dim, self._slicer = batch_dim, Slicer(batch_dim)
        self._has_marked_inputs = False  # whether the last forward's inputs were marked
        self._cuts_batches = False  # the script uses micro_batches()
        self._sizes: set[int] = set()  # local batches with which a step has been finished
        self._pile = Pile(update, out_of_sight=reducer.keeps_piles)
        self._num_taken = 0
        self._told = ToldTotals(exchange)
        self._mistakes = Mistakes(exchange.rank, exchange.world_size)
        self._pass: dict[str, int] | None = None  # where a pass begins, until the ranks have agreed on it
        self._lists = 0  # of the dataset when the pass began, as a number
        self._pass_over = False
        self.followers: list[Beside] = []
        self.watcher: StepWatcher | None = None  # a Snapshot, or a RayRun
        self._has_to_rest = False  # something was half done when the loop came for its last batch
        self._may_be_over = False  # whether the pass may have ended: the next batch has not been read yet

    def register(self, module: torch.nn.Module) -> None:
        """Set the hooks around forward and the optimizer."""
        # Hooks run outside of forward, so its own exemption from the compiler does not cover them.
        self._can_cut = can_cut(module) and self._batch_dim == 0
        # A sharded module's first all-gather is part of the step: before FSDP's own hook.
        is_first = self._reducer.runs_together
        module.register_forward_pre_hook(not_compiled(self._before_forward), with_kwargs=True, prepend=is_first)
        module.register_forward_hook(not_compiled(self._after_forward))
        self._own = {id(parameter) for parameter in module.parameters()}
        self._least_part = least_local(has_batch_norm(module))
        self._counts_padding = mixes_ranks(module)
        for rates in self._update.rates:
            self._watch_optimizer(rates.optimizer)

    def _watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._before_optimizer)
        optimizer.register_step_post_hook(self._after_optimizer)

    def begin(self, coordinator: Coordinator, item_count: Callable[[Any], float] | None) -> None:
        """Follow the plans of this coordinator from now on: a loader has been bound."""
        self._coordinator, self._item_count = coordinator, item_count

    @property
    def coordinator(self) -> Unplanned | Coordinator:
        """Who keeps the plans."""
        return self._coordinator

    @property
    def step(self) -> StepInProgress | None:
        """The step in training."""
        return self._reducer.step

    @property
    def in_hand(self) -> BatchEntry | None:
        """The batch that a training forward now would belong to, or that the last one belonged to."""
        return self.queue.in_hand(self.step)

    @property
    def loss_entry(self) -> BatchEntry | None:
        """The batch whose loss is being computed: that of the last forward, until its backward has begun.

        From then on it is the next one that was handed out, if there is one: a teacher may run before the student.
        """
        if self.step is not None and not self.step.backward_began:
            return self.step.entry
        return self._around()

    def _around(self) -> BatchEntry | None:
        """Return the batch that the loop is at, before and after the model trains on it."""
        return self.queue.entry_at(self.step)

    @property
    def has_part(self) -> bool:
        """Whether a micro-batch is in hand."""
        return self._part is not None

    @property
    def current_step(self) -> int:
        """Number of the step in training, or of the first one."""
        return 0 if self.step is None else self.step.entry.step

    # What a loader calls. All ranks call it at the same steps.

    @property
    def next_step(self) -> int:
        """Number of the first step that no batch has been handed out for yet."""
        return self.queue.next_step

    def plan_at(self, step: int) -> Plan:
        """Return the plan in force at this step, asked when the step's indices are cut; it may be asked repeatedly."""
        plan = self.coordinator.plan_at(step)
        assert plan is not None, "only a loader that is bound asks"
        return plan

    def begin_epoch(self, epoch: int, position: int, lists: int = 0) -> None:
        """Begin a new iteration, at this sample of this epoch; forget batches of an abandoned one.

        `lists` stands for the lists in the dataset, which should be the same on all ranks.
        """
        self.queue.begin_pass()
        self._lists = lists
        self._pass = {"epoch": epoch, "position": position, "step": self.next_step}
        goal = {} if self.goal is None else {"goal": self.goal}
        has_length = self.coordinator.job is not None and self.coordinator.job.pass_steps is not None
        self._recorder.begin_pass(self.next_step, {"epoch": epoch, "position": position, **goal}, has_length=has_length)

    def hand_out(self, entry: BatchEntry, batch: Any = None) -> bool:
        """Queue a batch that is being yielded: its backward is to be weighted and measured.

        Returns False where there is no such step: the streams that ranks have of their own have ended on all of them.
        """
        if self._may_be_over:
            self._may_be_over = False
            self._come_to_rest()
        self._statistics.finish_average()  # of a step that the optimizer has skipped
        tensors = tuple(weakref.ref(tensor) for tensor in itertools.islice(tensors_of(batch), _KNOWN))
        entry = replace(entry, tensors=tensors) if tensors else entry
        if entry.items is not None or entry.tag is not None or entry.own:
            second = entry.local_batch if entry.own else entry.tag or 0
            sums = self._exchange.start_sum(entry.items or 0.0, second, entry.head or 0.0)
            entry = replace(entry, sums=sums)
            if entry.own and entry.is_padding and sums.values()[1] == 0:
                return False
        self.queue.add(entry)
        self._pass_over = False
        return True

    def between_steps(self, *, is_over: bool | None) -> float:
        """Let a snapshot be taken before the next batch is read; return the seconds that it took.

        `is_over` is whether the pass has no more batches, so that the script still has to finish its epoch. None:
        unknown until the next batch is read; the snapshot waits for that.
        """
        if self.watcher is None:
            return 0.0
        start_s = time.perf_counter()
        self._may_be_over, self._has_to_rest = is_over is None, True
        self.watcher.end_step()
        if is_over is False:
            self._come_to_rest()
        return time.perf_counter() - start_s

    def _come_to_rest(self, *, begins: bool = False) -> None:
        """Tell the watcher that no batch is half used, where that is so.

        A loop may come for its next batch in the midst of a step. Then it rests once the next batch's forward `begins`;
        not sooner than it must, since a batch that has been read may have drawn random numbers.
        """
        if self.watcher is None or self._half_done(begins=begins) or not (begins or self._have_all_stepped):
            return
        self._has_to_rest = False
        self.watcher.rest()

    @property
    def _have_all_stepped(self) -> bool:
        """Whether no other optimizer is likely to step on the last batch; a batch sampler's loop cannot rest later."""
        return self._update.have_all_stepped or (self.step is not None and self.step.entry.place is None)

    @property
    def half_done(self) -> str:
        """What is not in the weights yet of the batches that forwards have taken, and what to do; empty at rest.

        Others may wait in a loop that looks ahead: the loader's state is the place where the oldest begins.
        """
        return self._half_done(begins=False)

    def _half_done(self, *, begins: bool) -> str:
        """Return `half_done`, at any moment or where the first forward of the next batch `begins`."""
        step = self.step
        if step is not None and not step.backward_began:
            return f"the backward of step {step.entry.step}, which has had its forward; {_ON_FORWARDS}"
        if self._pile.has_gradients:
            return f"optimizer.step() with {self._pile.describe()}; {_ON_PILES}"
        oldest = self.queue.in_hand(step) if self.queue else None
        if oldest is not None and (self.queue.place is None or oldest.is_extra):
            return f"the forward of step {oldest.step}, whose place in the data is not known; {_ON_PLACES}"
        first = None if oldest is None else oldest.step
        beside = (follower.half_done_beside(first, begins=begins) for follower in self.followers)
        return next(filter(None, beside), "")

    def end_training(self) -> None:
        """Take note that the loop over epochs has come to its goal."""
        if self.watcher is not None:
            self.watcher.end_training()

    @property
    def is_at_rest(self) -> bool:
        """Whether every batch that a forward has taken is in the weights, or was left out."""
        return not self.half_done

    @property
    def has_stepped(self) -> bool:
        """Whether this moment, which may be inside of the loop's body, is between two steps and at rest."""
        return self.step is not None and self.step.backward_began and self.is_at_rest

    @property
    def is_between_passes(self) -> bool:
        """Whether the last pass is over or was broken off, and no batch of another has been handed out."""
        return self._pass_over

    def give_up(self) -> None:
        """Tell the ranks that wait for this one's part of the next step that there will be none: it could not read."""
        self._exchange.give_up()

    def end_stream(self) -> None:
        """Raise an error on every rank where the samples that they read in common have not ended on all of them."""
        if self._exchange.start_sum(0.0, 0.0, 0.0).values()[1] != 0:
            raise different_streams(self.next_step)

    def complete_epoch(self) -> None:
        """Make BatchNorm's statistics the same on all ranks, for the evaluation: every batch was handed out."""
        self.pass_is_out()
        self.queue.complete_pass()
        self.settle_statistics()

    def settle_statistics(self) -> None:
        """Average what BatchNorm's statistics have become under no_sync, on all ranks: no step comes that would."""
        self._average_statistics()
        self._statistics.finish_average()

    @property
    def place(self) -> EpochState | None:
        """Where in the data the oldest batch begins that was handed out and is not trained on yet, if there is one."""
        return self.queue.place

    def pass_is_out(self) -> None:
        """Take note that the pass has handed out its last batch, or that the loop has said that it wants no more."""
        self._recorder.end_pass()

    def end_epoch(self) -> None:
        """Let what is under way arrive: the iterator ends, and nothing of ours stays outstanding, or starts here."""
        self._pass_over = True
        self._exchange.wait()
        if self.store is not None:
            self.store.keep(self.coordinator.planner)

    def micro_batches(self, module: Any, batch: Any, num_parts: int | None) -> Iterator[Any]:
        """Cut a batch between samples, hold synchronisation back on all parts but the last, and weight each part.

        The batch in hand is not used up before the last part is. Where left out, `num_parts` is what memory asks for.
        """
        self._skip_to(tensors_of(batch))
        cuts = self._cuts(batch, num_parts)
        synced = self._reducer.syncs(module)  # False in an outer no_sync
        try:
            for number, (start, end, share) in enumerate(cuts, start=1):
                part = self._slicer.cut(batch, start, end)
                self._begin_part(part, share, synced=synced)
                with nullcontext() if number == len(cuts) else self.without_sync(module):
                    yield part
        finally:
            self._part = None

    def _cuts(self, batch: Any, num_parts: int | None) -> list[tuple[int, int, float]]:
        """Return where each part of a batch begins and ends, and its share of the samples."""
        entry = self.in_hand
        if entry is None:
            size = self._slicer.num_samples(batch)
        else:
            certain = entry.checked and not entry.is_padding
            size = self._slicer.num_samples(batch, entry.local_batch, certain=certain)
        num_parts = -(-size // max(1, min(self.memory.max_batch, size))) if num_parts is None else num_parts
        num_parts = max(1, min(num_parts, size // self._least_part))
        bounds = torch.linspace(0, size, num_parts + 1).round().long().tolist()
        cuts = [(start, end, (end - start) / size) for start, end in itertools.pairwise(bounds)]
        if self._reducer.runs_together:  # all take as many parts as the one with most, some perhaps of weight 0
            num_parts = max(self._exchange.gather_count(len(cuts)))
            cuts = [(0, min(2, size), 0.0)] * (num_parts - len(cuts)) + cuts  # BatchNorm cannot normalise one sample
        return cuts

    @contextmanager
    def without_sync(self, module: Any) -> Iterator[None]:
        """Let gradients of this module pile up, and those of models that follow it and may be part of its loss."""
        with ExitStack() as stack:
            stack.enter_context(self._reducer.no_sync(module))
            for follower in self.followers:
                stack.enter_context(follower.no_own_sync())
            yield

    def _begin_part(self, part: Any, share: float, *, synced: bool) -> None:
        """Let the next forward take this part, a share of the batch in hand; 0 where it only keeps others company.

        `synced` is whether the last part will be: the batch is not one of several that accumulate.
        """
        step = self.current_or_next()
        self._cuts_batches = True
        self.memory.in_hand = step.part_size = max(step.part_size, round(share * step.entry.size))
        items = step.entry.items
        if items is not None and self._item_count is None:
            raise InvalidInputError("micro_batches() of items needs item_count= of the loader to weigh the parts")
        share = self._item_count(part) / items if share and items and self._item_count is not None else share
        self._part = Part(share=share, synced=synced)

    # Forward.

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        self._statistics.finish_average()
        if not trains(module):
            if self.step is not None and self.step.backward_began and torch.is_grad_enabled():
                self.step.is_stale = True
            return None
        if self._recomputes():
            return None
        if self._part is None:
            self._skip_to(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        step = self.current_or_next()
        step.is_stale = False
        if self._part is None:
            check_size(step.entry, self.queue, args, kwargs, self._batch_dim)
            if self._can_cut and step.entry.samples is None and self.memory.is_new(step.entry.size):
                self._parted.watch(module, step)
        self._choose_place(module, step)
        if step.forward_start is None:
            step.forward_start = self._device.mark()
        if step.passage is not None:
            step.passage.begin_forward()
        self._notices.begin_forward(step.entry.local_batch, step.entry.total_batch)
        scale = self._output_scale(step)
        if scale is None:
            return None
        inputs = scale_inputs((args, kwargs), lambda: 1.0 / scale() if scale() else 0.0)
        self._has_marked_inputs = inputs is not None
        return inputs

    def _recomputes(self) -> bool:
        """Return whether the forward that begins or ends is one that a checkpoint runs again in the step's backward."""
        task = torch._C._current_graph_task_id()
        return task != _NO_BACKWARD and self.step is not None and self.step.task == task

    def _choose_place(self, module: Any, step: StepInProgress) -> None:
        """Choose where the gradients of a step are weighted: on their way in, if they pile up on others or under them.

        All that go into one backward are weighted at one place. So a step's first forward chooses for the later ones,
        which may be under no_sync where it was not, or the other way round: one forward outside of it is enough for
        DDP to reduce. Parts of a batch are weighted as the last of them is reduced.
        """
        if self._part is None and step.forward_start is not None:
            return
        synced = self._reducer.syncs(module) if self._part is None else self._part.synced
        step.accumulates = step.accumulates or not synced or self._pile.waits_for_sync

    def _output_scale(self, step: StepInProgress) -> Callable[[], float] | None:
        """Return what tells the factor on the gradient of this forward's outputs; None where there is none."""
        part, world_size = self._part, self._exchange.world_size
        averages = self._weighting == "none"  # the hook does: parts of a sum add up, and padding must not
        share = 1.0 if part is None or (averages and part.share) else part.share
        share = 0.0 if averages and step.entry.is_padding else share
        if is_inward(self._weighting, accumulating=step.accumulates):
            return lambda: share * world_size * step.share()
        return None if part is None and share == 1.0 else lambda: share

    def _skip_to(self, inputs: Iterable[torch.Tensor]) -> None:
        """Forget batches that the loop has passed over, where these inputs are certainly of a later one."""
        inputs = list(inputs)
        if not self.queue.is_over(self.step) and self.queue.has(inputs):  # of several that go into one backward
            self.queue.leave_step()
        skipped = self.queue.skip_to(inputs) if self.queue.is_over(self.step) else []
        self._forgo(skipped)
        self._mistakes.note_skipped(len(skipped))

    def skip_batch(self) -> None:
        """Leave out the oldest batch that waits."""
        self._forgo([self.queue.skip()])

    def _forgo(self, entries: Iterable[BatchEntry]) -> None:
        """Count batches that nobody trains on as passed, though they bring no progress."""
        for entry in entries:
            self._add_forgone([StepInProgress(entry=entry)])

    def _add_forgone(self, steps: list[StepInProgress]) -> None:
        progress = self._update.progress
        progress.forgone += self.coordinator.worth(progress, steps).batches

    def current_or_next(self) -> StepInProgress:
        """Return the step that a training forward now belongs to."""
        step = self.step
        if step is None or (self._part is None and self._is_over(step)):
            if self._has_to_rest:
                self._come_to_rest(begins=True)
            return self._take()
        return step

    def _is_over(self, step: StepInProgress) -> bool:
        """Return whether the next forward is another step's."""
        return self.queue.is_over(step)

    def _next_entry(self) -> BatchEntry:
        """Return the batch of the next step, which is the oldest in the queue."""
        return self.queue.take()

    def _take(self) -> StepInProgress:
        """Finish with the step before, do what is due between ranks, and begin the next one."""
        entry, previous, scale = self._next_entry(), self.step, self._loss_scale()
        if previous is not None:
            self._compare_told(previous)
            previous.next_scale = scale
            if previous.backward_began:
                previous.unwatch()
                self._add_to_pile(previous)
                self._pile.end_step(previous)
                if previous.synced and self.coordinator.is_bound:
                    self._mistakes.note_gradient()
            self._mistakes.note_batch(previous.entry)
        self._meet(entry, previous)
        step = StepInProgress(entry=entry, valid=self._num_taken >= self._reducer.num_first_steps, loss_scale=scale)
        if previous is not None and not previous.backward_began:  # it may come together with this one's
            step.accumulates = previous.accumulates
        step.previous_end = None if previous is None else previous.optimizer_end
        step.passage = self._reducer.new_passage()
        # Products with the step before must be with the step before.
        step.take_norms = self.coordinator.takes_norms(self._update.num_steps) or self._reducer.compares
        self._notices.begin_step(self._num_taken, self.coordinator.plan_at(entry.step))
        self._num_taken += 1
        if not self.coordinator.is_bound:
            self._mistakes.note_unplanned(self._num_taken)
        if entry.is_padding and self._counts_padding:
            self._mistakes.note_padding(entry.step)
        self.memory.begin_step(entry.size)
        self._reducer.step = step
        return step

    def _meet(self, entry: BatchEntry, previous: StepInProgress | None) -> None:
        """Do what ranks do together at fixed steps, between the end of one step and the next."""
        if self._pass is not None:
            begun, self._pass = self._pass, None
            self._agree(entry, begun)
        if previous is not None:
            self.coordinator.add(previous)
        if self._pass_over and not self.queue:  # looked ahead: nobody will come to finish what starts now
            self._exchange.wait()
            return
        if not self._cuts_batches:
            self.coordinator.max_batch = self.memory.max_batch
        self._record(self.coordinator.tick(entry.step))

    def _agree(self, entry: BatchEntry, begun: dict[str, int]) -> None:
        """Refuse, on every rank, a pass that begins at another place or with other progress on some of them."""
        if entry.sums is not None:
            added_up(entry, entry.sums)  # before waiting for ranks that may have found out that there is no step
        place = {
            **begun,
            "progress": self._update.progress.batches,
            "local_batches": self.plan_at(entry.step).local_batches,
            "lr_factor": self.coordinator.lr_factor(self._update, entry.step),
        }
        advice = "load the same saved state on every rank, and begin passes together"
        if self._num_taken:
            advice = f"call optimizer.step() after the same batches on every rank, and none left out; or {advice}"
        if not self._exchange.check_agreement(place, advice, beside=self._lists):
            self._mistakes.note_lists(begun["epoch"])

    def _record(self, happened: Happened) -> None:
        """Tell the observers of a decision, on rank 0."""
        job, progress = self.coordinator.job, None
        if happened.decision is None or happened.gathered is None or job is None:
            return
        if job.pass_steps:
            progress = self._update.progress.batches / job.pass_steps
        self._recorder.decided(
            happened.gathered,
            happened.decision,
            progress=progress,
            lr_factor=self.coordinator.lr_factor(self._update, self.current_step),
            bucket_bytes=tuple(self._reducer.bucket_bytes),
        )

    def _average_statistics(self) -> None:
        if self.step is None:
            return
        work = self._statistics.start_average(self.step.sample_share())
        if work is not None:
            self.step.ahead = self._device.mark(), work

    def _compare_told(self, previous: StepInProgress) -> None:
        """Let ranks compare what their scripts said of the step before, where no loader has a plan to compare with."""
        self._told.check()
        if previous.synced and self._weighting != "none" and not self.coordinator.is_bound:
            self._told.compare(previous.entry)

    def _loss_scale(self) -> torch.Tensor | None:
        """Return what a GradScaler multiplies the next loss by, as it is now."""
        if self._grad_scaler is None:
            return None
        scale = getattr(self._grad_scaler, "_scale", None)  # its public get_scale() would wait for the device
        if scale is None:  # before the first loss, when get_scale() has nothing to wait for
            return torch.full((), self._grad_scaler.get_scale(), device=self._device.torch_device)
        kept: torch.Tensor = scale.clone()
        return kept

    def _after_forward(self, module: Any, args: Any, output: Any) -> Any:
        step = self.step
        if step is None or not trains(module) or self._recomputes():
            return output
        if step.passage is not None:
            step.passage.end_forward()
        self._statistics.note_forward()
        self._gradients.find(module, output)
        if self._reducer.syncs(module) and not joins(module):
            self._average_statistics()
        weigh(step, self._weighting, self._exchange.world_size, accumulating=step.accumulates)
        scale, has_marked_inputs = self._output_scale(step), self._has_marked_inputs
        is_part = self._part is not None

        def begin(*_: Any) -> None:
            self._begin_backward(step, module, is_part=is_part)

        def begin_and_scale() -> float:
            begin()
            factor = 1.0 if scale is None else scale()
            if factor not in (0.0, 1.0) and not has_marked_inputs:
                refuse_inner_slopes()
            return factor

        # FSDP's own hooks are on the outputs: where layers are timed, a mark behind them tells that backward begins.
        if scale is not None or step.passage is not None:
            output, num_marked = scale_outputs(output, begin_and_scale)
        else:
            handles = watch_outputs(output, begin)
            step.watches += handles
            num_marked = len(handles)
        hidden = None if scale is None else find_hidden(output)
        is_unmarked = num_marked == 0 and (self._num_taken == 1 or (scale is not None and not has_tensors(output)))
        if is_unmarked or hidden is not None:
            _explain_unmarked(output, hidden, needed=scale is not None)
        return output

    # Backward.

    def _begin_backward(self, step: StepInProgress, module: Any, *, is_part: bool) -> None:
        """Take note that backward has come to the outputs of this step's forward, or of a part of its batch."""
        step.task = torch._C._current_graph_task_id()
        if not self._gradients.come():  # but those of inputs, by torch.autograd.grad: the batch is not used up
            return
        self._notices.begin_backward()
        if step.weight is None and not is_part and self._reducer.keeps_piles and not self._reducer.syncs(module):
            raise BatchMatchError(
                f"the first forward of step {step.entry.step} was to be followed by a reduction, its backward is not "
                "(no_sync, set_requires_gradient_sync(False)), so that its gradients have no weight: turn "
                "synchronisation off before the batch's first forward, and put one that is not trained on under "
                "torch.no_grad()"
            )
        for follower in self.followers:
            follower.note_backward(step.task)
        if self.step is not step:
            self._join_later(step)
            return
        self._add_to_pile(step)
        # Of a batch in parts, all but the last one's backward counts as what comes before.
        if step.backward_start is None or (is_part and not step.synced):
            step.backward_start = self._device.mark()
            if step.passage is not None:
                step.passage.begin_backward()
                at_end_of_backward(step.passage.end_backward)

    def _join_later(self, step: StepInProgress) -> None:
        """Count a batch whose gradients come together with those of a later one; refuse what cannot be weighted.

        A bucket has both batches' gradients, so that they have one weight, unless both were weighted on their way in.
        """
        later = self.step
        if step.backward_began or later is None:  # a graph that was kept, once more
            return
        if (step.weight is None) != (later.weight is None):
            raise BatchMatchError(
                f"one backward for the batches of steps {step.entry.step} and {later.entry.step}, of which only the "
                "later one's forward was under no_sync: put the earlier one's under it as well, or neither"
            )
        is_inward = step.weight is not None
        if not (is_inward or self.coordinator.splits_alike(step.entry, later.entry)):
            raise BatchMatchError(
                f"one backward for the batches of steps {step.entry.step} and {later.entry.step}, of which ranks have "
                "other shares: call backward() on each batch's loss before the forward of the next (gradients add up "
                'until optimizer.step()), or pass weighting="loss", which weights each where it enters the model'
            )
        self._add_to_pile(later)
        self._pile.join(step, later)

    def _add_to_pile(self, step: StepInProgress) -> None:
        """Let the optimizer's next step use the gradients of this one, whose backward begins."""
        if not (self._pile.has_gradients or step.accumulated or step.entry.is_extra):
            self._update.begin_round()
        forgone = self._pile.add(step)
        if forgone:
            self._mistakes.note_forgone()
            self._add_forgone(forgone)

    def _worth(self) -> Worth:
        """Return what a step of the optimizer would be worth now."""
        return self.coordinator.worth(self._update.progress, self._pile.steps)

    @property
    def passed(self) -> float:
        """Initial batches that all batches so far were worth, those whose gradients no step has used included."""
        progress = self._update.progress
        return progress.batches + progress.forgone + (self._worth().batches if self._pile.steps else 0.0)

    # The optimizer.

    def _before_optimizer(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        rates = self._update.rates_of(optimizer)
        if closure is None:
            self._begin_update(rates)
            return None

        def train_and_begin_update() -> Any:
            # Lightning trains in here: the update begins once it is done.
            loss = closure()
            self._begin_update(rates)
            return loss

        return (args[0], train_and_begin_update, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _begin_update(self, rates: Rates) -> None:
        self._statistics.finish_average()
        step = self.step
        self._mistakes.note_update()
        self._refuse_unmatched()
        if step is not None and step.backward_began:
            self._add_to_pile(step)
        if step is not None and step.synced and step.optimizer_start is None:  # of several the first
            step.optimizer_start = self._device.mark()
        if self._pile.steps:
            self._update.num_batches = self._worth().num_batches
        rates.scale(self.coordinator.lr_factor(self._update, self.current_step, rates))

    def _refuse_unmatched(self) -> None:
        """Refuse a step of the optimizer whose gradients no batch of ours has brought, so that they have no weight."""
        if self._reducer.unmatched and (self.coordinator.is_bound or self.queue):
            self._reducer.unmatched = False
            raise BatchMatchError(
                "optimizer.step() with gradients of a forward in eval mode, or of a method other than forward, which "
                "cannot be matched to a batch and are not weighted: train with model.train() and by calling the model; "
                "to freeze layers call eval() on those alone"
            )
        step = self.step
        if step is None and self.queue and self._exchange.world_size > 1 and self._update.has_gradients(self._own):
            raise BatchMatchError(
                "optimizer.step() with gradients, but no training forward of the wrapped model has taken the loader's "
                "batch: gradients are not averaged over ranks; call the model that HeteroDataParallel or "
                "DistributedDataParallel made, model(x), not the network in it"
            )

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self.step
        self._update.rates_of(optimizer).give_back()
        self._update.note_step(optimizer)
        if self._pile.steps:  # of several optimizers the first to step has all of the group's worth
            is_again = all(step.entry.is_again for step in self._pile.steps)
            self._update.count(self._worth(), optimizer, is_again=is_again)
            self._pile.clear()
        if step is not None and step.optimizer_start is not None:
            step.optimizer_end = self._device.mark()
            self.memory.end_step(step.forward_size)
            if self._device.slow_at_new_sizes and step.forward_size not in self._sizes:
                self._sizes.add(step.forward_size)
                step.valid = False


def loops_of(optimizer: torch.optim.Optimizer) -> list[Loop]:
    """Return those that watch an optimizer's steps."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return [owner for hook in hooks if isinstance(owner := getattr(hook, "__self__", None), Loop)]


def _explain_unmarked(output: Any, hidden: object | None, *, needed: bool) -> None:
    """Say what follows where forward's output has nothing to mark, or tensors out of sight in an object."""
    text = f"forward returned a {type(output).__name__} in which no tensor with a gradient was found"
    if hidden is not None and hidden is not output:
        within = type(hidden).__name__
        text = f"forward returned a {type(output).__name__} with a {within}, whose tensors with a gradient are not seen"
    advice = (
        "return tensors, also in lists, tuples, dicts or dataclasses, and make a torch.distributions object of them in "
        "the loss"
    )
    if needed:
        raise InvalidInputError(f"{text}, so its loss cannot be weighted: {advice}")
    effect = "this rank's time cannot be measured, so that nothing adapts, and batches cannot accumulate"
    warnings.warn(f"{text}: {effect}; {advice}", RuntimeWarning, stacklevel=2)
