"""Around `optimizer.step()`: the gradients it uses, rates that follow the total batch, progress, and Adam's variance.

Rates are scaled in the optimizer's public step hooks and given back after each step, so that schedulers, logging and
checkpoints see the user's own rate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from cannikin.core.lr import LR_RULES, Legw, LrRule, Progress, Worth, rule_name
from cannikin.core.schedule import Schedule
from cannikin.errors import InvalidInputError
from cannikin.runtime.device import Device, HostCopy
from cannikin.runtime.step import StepInProgress

_ADAM_FAMILY = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam")  # and what is derived from them
_WITHOUT_VARIANCE = ("Adamax", "SparseAdam")  # do not divide by the root of a variance of every parameter
_FIRST_STEPS = 30  # v of a few gradients says little: a parameter seldom used would outweigh all others
_FLOOR = 1e-4  # least v, in means of v: parameters with hardly any gradient must not count infinitely


def _is_one_of(names: tuple[str, ...], optimizer: torch.optim.Optimizer) -> bool:
    return any(kind.__name__ in names for kind in type(optimizer).__mro__)


def choose_rule(
    lr_rule: str | LrRule, optimizer: torch.optim.Optimizer, warmup_steps: float = 0.0
) -> tuple[LrRule, str]:
    """Return the rule in force and a sentence that says why; `warmup_steps` is LEGW's alone."""
    if warmup_steps < 0:
        raise InvalidInputError(f"warmup_steps={warmup_steps} must not be negative")
    if warmup_steps and lr_rule != "legw":
        warnings.warn(f"warmup_steps is ignored: lr_rule={lr_rule!r}, and only 'legw' warms up", stacklevel=4)
    if not isinstance(lr_rule, str):
        if not callable(lr_rule):
            raise InvalidInputError(f"lr_rule={lr_rule!r} is neither a name nor a callable LrRule (cannikin.core.lr)")
        return lr_rule, f"lr_rule={rule_name(lr_rule)} as given"
    if lr_rule == "legw":
        return Legw(warmup_steps=warmup_steps), "lr_rule='legw' as asked"
    if lr_rule in LR_RULES:
        return LR_RULES[lr_rule], f"lr_rule={lr_rule!r} as asked"
    if lr_rule != "auto":
        raise InvalidInputError(
            f"lr_rule={lr_rule!r} is unknown: choose one of auto, {', '.join(LR_RULES)}, or pass an LrRule"
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        return LR_RULES["adascale"], "lr_rule='adascale', because the optimizer is SGD"
    if _is_one_of(_ADAM_FAMILY, optimizer):
        return LR_RULES["sqrt"], f"lr_rule='sqrt', because the optimizer is {kind}"
    return LR_RULES["none"], f"lr_rule='none': no rule is known for {kind}; pass lr_rule= to choose one"


def choose_rules(
    lr_rule: str | LrRule | Sequence[str | LrRule],
    optimizers: Sequence[torch.optim.Optimizer],
    warmup_steps: float = 0.0,
) -> tuple[list[LrRule], str]:
    """Return the rule of each optimizer, and a sentence that says why."""
    each = [lr_rule] * len(optimizers) if isinstance(lr_rule, str) or not isinstance(lr_rule, Sequence) else lr_rule
    if len(each) != len(optimizers):
        raise InvalidInputError(
            f"lr_rule has {len(each)} rules for {len(optimizers)} optimizers: give one rule for all, or one for each"
        )
    chosen = [choose_rule(rule, one, warmup_steps) for rule, one in zip(each, optimizers, strict=True)]
    return [rule for rule, _ in chosen], "; ".join(reason for _, reason in chosen)


class Rates:
    """The learning rates of one optimizer, numbers or tensors, and the rule by which they follow the total batch."""

    def __init__(self, optimizer: torch.optim.Optimizer, rule: LrRule) -> None:
        self.optimizer, self.rule = optimizer, rule
        self._own_rates: list[tuple[dict[str, Any], Any]] = []  # the user's, while the optimizer steps

    def scale(self, factor: float) -> None:
        """Scale the rates: the optimizer is about to change the parameters."""
        self.give_back()  # what a step that raised has left behind
        if factor == 1.0:
            return
        scaled: set[int] = set()  # groups may share one tensor: torch gives them its default as it is
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                if id(rate) not in scaled:
                    self._own_rates.append((group, rate.clone()))
                    rate.mul_(factor)
                    scaled.add(id(rate))
            else:
                self._own_rates.append((group, rate))
                group["lr"] = rate * factor

    def give_back(self) -> None:
        """Give the user's own rates back."""
        for group, rate in self._own_rates:
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._own_rates.clear()


class Update:
    """What happens around each step of the optimizers of one model: progress counts once what they make of a batch.

    They step together, after one backward, or in turn, each after a pass of its own over the same batch.

    Args:
        optimizers: whose rates are scaled.
        rules: how rates follow the total batch, one per optimizer.
        device: which copies to the host whether a step was skipped.
        parameters: those of the model. Where Adam steps all that have gradients, the noise scale is the one it sees.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        rules: Sequence[LrRule],
        device: Device,
        parameters: Iterable[torch.Tensor],
    ) -> None:
        self.rates = [Rates(optimizer, rule) for optimizer, rule in zip(optimizers, rules, strict=True)]
        self.progress = Progress()  # a skipped step of a fused optimizer may be counted until the next one
        self.num_batches = 1  # whose gradients pile up for the step at hand, or for the last one
        self.num_steps = 0  # of the optimizers, since this process began
        self.resumed_from: Progress | None = None  # of a saved state, as it was then
        self._device = device
        self._stepped: list[torch.optim.Optimizer] = []  # since progress was counted
        self._round: set[int] = set()  # ids of the optimizers that have stepped since the pile of gradients was begun
        self._round_before: set[int] = set()
        self._uncertain: tuple[HostCopy, Worth] | None = None  # whether the last step was skipped
        adams = [o for o in optimizers if _is_one_of(_ADAM_FAMILY, o) and not _is_one_of(_WITHOUT_VARIANCE, o)]
        covered = {id(p) for optimizer in adams for group in optimizer.param_groups for p in group["params"]}
        covers_all = all(id(p) in covered for p in parameters if p.requires_grad)
        self.variance = AdamVariance(adams) if adams and covers_all else None

    def begin_round(self) -> None:
        """Take note that the first batch comes whose gradients the optimizers' next steps use."""
        self._round_before, self._round = self._round, set()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that this optimizer has stepped."""
        self._round.add(id(optimizer))

    @property
    def have_all_stepped(self) -> bool:
        """Whether every optimizer that stepped in the round before has stepped in this one."""
        return self._round_before <= self._round

    def rates_of(self, optimizer: torch.optim.Optimizer) -> Rates:
        """Return the rates of the optimizer whose hook was called."""
        return next((rates for rates in self.rates if rates.optimizer is optimizer), self.rates[0])

    def factor(self, schedule: Schedule, step: int, rates: Rates | None = None) -> float:
        """Return the factor on an optimizer's rates, or else the first one's, under the plan in force at this step."""
        rule, gain = (rates or self.rates[0]).rule, schedule.gain_at(step, self.num_batches)
        total, initial = schedule.plan_at(step).total_batch, schedule.job.batch_size
        return rule(total, initial_batch=initial, gain=gain, progress=self.progress.steps)

    def count(self, worth: Worth, optimizer: torch.optim.Optimizer, *, is_again: bool = False) -> None:
        """Count a step of this optimizer; `is_again` where it was made of the batch that was counted last.

        Such a step counts where this optimizer has stepped on the batch before, not where it is another one's turn. A
        fused optimizer runs its hooks on a step that GradScaler skipped too, which does not count.
        """
        if is_again and self._stepped and all(optimizer is not other for other in self._stepped):
            self._stepped.append(optimizer)
            if self.variance is not None:
                self.variance.forget_times()
            return
        self.settle()
        self.progress.add(worth)
        self.num_steps += 1
        self._stepped = [optimizer]
        found_inf: Any = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor):
            self._uncertain = self._device.copy([found_inf.clone().reshape(())]), worth
        if self.variance is not None:
            self.variance.count_step()

    def settle(self) -> Progress:
        """Take back the last step, should it have been skipped, for which this waits; return progress so far."""
        if self._uncertain is not None:
            (found_inf, worth), self._uncertain = self._uncertain, None
            if found_inf.read()[0]:
                self.progress.take_back(worth)
        return self.progress

    def restore(self, progress: Progress) -> None:
        """Go on from a saved state."""
        self.progress, self._uncertain = progress, None
        self.resumed_from = progress.times(1)

    def has_gradients(self, among: Container[int] | None = None) -> bool:
        """Return whether a gradient is kept: `zero_grad` lets go of them, unless it is told to fill them with zeros.

        Args:
            among: ids of the parameters to look at; all where left out.
        """
        groups = (group for rates in self.rates for group in rates.optimizer.param_groups)
        kept = (p for group in groups for p in group["params"] if p.grad is not None)
        return any(among is None or id(p) in among for p in kept)


class Pile:
    """The batches whose gradients pile up until the optimizer's next step uses them together.

    Args:
        update: of this model.
        out_of_sight: whether gradients under no_sync are kept where neither the optimizer nor zero_grad sees them.
    """

    def __init__(self, update: Update, *, out_of_sight: bool) -> None:
        self._update, self._out_of_sight = update, out_of_sight
        self.steps: list[StepInProgress] = []  # since the optimizer's last one, as far as their backward has begun
        self._kept: list[StepInProgress] = []  # those whose gradients the parameters still have
        self._num_unsynced = 0  # backward passes under no_sync whose gradients wait for the next synchronised one

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of some batch are in no weight yet."""
        return bool(self._kept)

    @property
    def has_own_gradients(self) -> bool:
        """Whether they came otherwise than with another model's backward, which throws them away."""
        return any(not step.is_through for step in self._kept)

    def describe(self) -> str:
        """Say what waits, for people."""
        batches = "1 batch" if len(self._kept) == 1 else f"{len(self._kept)} batches"
        return f"the gradients of {batches} since step {self._kept[0].entry.step}"

    def note_backward(self, task: int) -> None:
        """Take note that this backward, by torch's number, is another model's own, whatever it leaves here."""
        for step in self._kept:
            step.is_through = step.is_through or step.task == task

    @property
    def waits_for_sync(self) -> bool:
        """Whether the next backward's gradients come upon others that are not reduced yet."""
        return self._num_unsynced > 0

    def add(self, step: StepInProgress) -> list[StepInProgress]:
        """Put a step whose backward begins on top, once; return those whose gradients nobody will use.

        Norms are usable only if the bucket holds this rank's gradients alone, from batches split alike. It does in two
        cases: under no_sync, and in the first batch after an optimizer step.
        """
        if step.accumulated:
            return []
        forgone: list[StepInProgress] = []
        kept = self._update.has_gradients() or (self._out_of_sight and self.waits_for_sync)
        if self._kept and not kept:
            self._kept = []
            if not step.entry.is_extra:  # a step was skipped, or a batch thrown away; else SAM trains on it again
                forgone, self.steps = self.steps, []
        step.take_norms = step.take_norms and all(_is_alike(step, earlier) for earlier in self._kept)
        self.steps.append(step)
        self._kept.append(step)
        step.accumulated = len(self._kept)
        return forgone

    def join(self, step: StepInProgress, later: StepInProgress) -> None:
        """Put a step under a later one whose backward is the same."""
        if not step.accumulated:
            self.steps.append(step)
            self._kept.append(step)
            step.accumulated = later.accumulated = len(self._kept)

    def end_step(self, step: StepInProgress) -> None:
        """Take note that the backward of the uppermost step is over."""
        self._num_unsynced = 0 if step.synced else self._num_unsynced + 1

    def clear(self, *_: object) -> None:
        """Begin anew: the optimizer has stepped."""
        self.steps, self._kept = [], []


def _is_alike(step: StepInProgress, earlier: StepInProgress) -> bool:
    """Return whether an earlier batch, whose gradient lies below this step's, was split alike and not reduced yet."""
    now, before = step.entry, earlier.entry
    same = (now.local_batch, now.total_batch) == (before.local_batch, before.total_batch)
    return same and not (earlier.synced or earlier.uneven_items)


class Variance(NamedTuple):
    """v of each element of a bucket, divided by a factor that all elements have in common."""

    of_elements: torch.Tensor
    common: torch.Tensor | float  # 1 - beta^t: v begins at 0


class AdamVariance:
    """v of a bucket's parameters, out of the own state of the Adam optimizers that step them.

    The noise scale that Adam sees is that of the gradient divided by the root of its running variance v (docs,
    mathematics). v must be from before this step: with the step's own gradient in it both norms come out too small.

    An element that has never had a gradient counts nowhere: its v is infinite. Divided by the floor, the rare words of
    an embedding outweighed all that had been seen before, as noise without signal: in the first ten steps S was 2.1
    times what it is once v is known (6,000 words, 12 texts of 64 words per step), and the noise scale followed it.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners: dict[int, tuple[torch.optim.Optimizer, float, int]] = {}  # beta2, and which group, by parameter
        self._num_steps = 0
        self._commons: dict[int, torch.Tensor | float] = {}  # of this step, by group: one that came later has another t

    def count_step(self) -> None:
        """Take note that the optimizer has taken a step."""
        self._num_steps += 1
        self.forget_times()

    def forget_times(self) -> None:
        """Read t anew: some of the optimizers have taken a step."""
        self._commons.clear()

    def __call__(self, parameters: Sequence[torch.Tensor], sizes: Sequence[int] | None = None) -> Variance | None:
        """Return v of these parameters in a row; None while it says little. In few kernels: a bucket waits for it.

        Of sharded parameters it is that of this rank's shards, filled up to `sizes` elements each.
        """
        if self._num_steps < _FIRST_STEPS:
            return None
        states = [self._state(parameter) for parameter in parameters]
        if not all("exp_avg_sq" in state and "step" in state for state in states):  # of a class of the user's own
            return None
        rows = [_flat(state["exp_avg_sq"], p) for state, p in zip(states, parameters, strict=True)]
        num_own = sum(row.numel() for row in rows)
        if sizes is not None:
            pads = (size - row.numel() for size, row in zip(sizes, rows, strict=True))
            rows = [torch.nn.functional.pad(row, (0, pad)) if pad else row for row, pad in zip(rows, pads, strict=True)]
        variance = torch.cat(rows)
        variance = variance.to(torch.promote_types(variance.dtype, torch.float32))
        floor, is_new = variance.sum().mul_(_FLOOR / max(1, num_own)).add_(1e-30), variance == 0
        return Variance(variance.clamp_(min=floor).masked_fill_(is_new, math.inf), self._common(parameters[0]))

    def _common(self, parameter: torch.Tensor) -> torch.Tensor | float:
        """Return 1 - beta^t, which corrects v for its start at 0; a fused optimizer has t on the device."""
        _, decay, group = self._owner(parameter)
        if group not in self._commons:
            step = self._state(parameter)["step"]
            on_device = isinstance(step, torch.Tensor) and step.device.type != "cpu"
            self._commons[group] = 1 - decay ** (step if on_device else float(step))
        return self._commons[group]

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        optimizer, _, _ = self._owner(parameter)
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        return state

    def _owner(self, parameter: torch.Tensor) -> tuple[torch.optim.Optimizer, float, int]:
        if id(parameter) not in self._owners:  # at first, and after add_param_group
            groups = [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]
            self._owners = {
                id(p): (optimizer, float(group["betas"][1]), number)
                for number, (optimizer, group) in enumerate(groups)
                for p in group["params"]
            }
        return self._owners.get(id(parameter), (self._optimizers[0], 0.0, -1))


def _flat(variance: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of the parameter's in memory, which is the order they have in a bucket.

    Of a sharded parameter it is this rank's shard, whose order is that of its indices.
    """
    if isinstance(variance, DTensor):
        own: torch.Tensor = variance.to_local()
        return own.detach().reshape(-1)
    if variance.stride() != parameter.stride():  # a loaded state may have another order, such as that of the indices
        variance = torch.empty_like(parameter, dtype=variance.dtype).copy_(variance)
    return variance.detach().as_strided((variance.numel(),), (1,), variance.storage_offset())
