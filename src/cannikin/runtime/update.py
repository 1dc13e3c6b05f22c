"""Around `optimizer.step()`: learning rates that follow the total batch, progress, and the variance that Adam keeps.

Rates are scaled in the optimizer's public step hooks and given back after each step, so that schedulers, logging and
checkpoints see the user's own rate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cannikin.core.lr import LR_RULES, Legw, LrRule, rule_name
from cannikin.core.schedule import Schedule
from cannikin.errors import InvalidInputError
from cannikin.runtime.device import Device, HostCopy

_ADAM_FAMILY = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam")  # and what is derived from them
_WITHOUT_VARIANCE = ("Adamax", "SparseAdam")  # do not divide by the root of a variance of every parameter
_FIRST_STEPS = 30  # v of a few gradients says little: a parameter seldom used would outweigh all others
_FLOOR = 1e-4  # least v, in means of v: parameters without a gradient must not count infinitely


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


class Update:
    """What happens around each step of one optimizer.

    Args:
        optimizer: whose rates are scaled; they may be numbers or tensors.
        rule: how rates follow the total batch.
        device: which copies to the host whether a step was skipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: LrRule, device: Device) -> None:
        self.optimizer = optimizer
        self.progress = 0.0  # B0-steps so far; a skipped step of a fused optimizer may be counted until the next one
        has_variance = _is_one_of(_ADAM_FAMILY, optimizer) and not _is_one_of(_WITHOUT_VARIANCE, optimizer)
        self.variance = AdamVariance(optimizer) if has_variance else None
        self._rule = rule
        self._device = device
        self._own_rates: list[tuple[dict[str, Any], Any]] = []  # the user's, while the optimizer steps
        self._uncertain: tuple[HostCopy, float] | None = None  # whether the last step was skipped, and its gain

    def factor(self, schedule: Schedule, step: int) -> float:
        """Return the factor on every learning rate under the plan in force at this step."""
        total, initial = schedule.plan_at(step).total_batch, schedule.job.batch_size
        return self._rule(total, initial_batch=initial, gain=schedule.gain_at(step), progress=self.progress)

    def begin(self, factor: float) -> None:
        """Scale the rates: the optimizer is about to change the parameters."""
        self._give_back()  # what a step that raised has left behind
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

    def end(self, gain: float) -> None:
        """Give the rates back, and count what the step was worth.

        A fused optimizer runs its hooks on a step that GradScaler skipped too, which does not count.
        """
        self._give_back()
        self.settle()
        self.progress += gain
        found_inf: Any = getattr(self.optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor):
            self._uncertain = self._device.copy([found_inf.clone().reshape(())]), gain
        if self.variance is not None:
            self.variance.count_step()

    def _give_back(self) -> None:
        for group, rate in self._own_rates:
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._own_rates.clear()

    def settle(self) -> float:
        """Take back the last step, should it have been skipped, for which this waits; return progress so far."""
        if self._uncertain is not None:
            (found_inf, gain), self._uncertain = self._uncertain, None
            self.progress -= gain * found_inf.read()[0]
        return self.progress

    def restore(self, progress: float) -> None:
        """Go on from a saved state."""
        self.progress, self._uncertain = progress, None


class Variance(NamedTuple):
    """v of each element of a bucket, divided by a factor that all elements have in common."""

    of_elements: torch.Tensor
    common: torch.Tensor | float  # 1 - beta^t: v begins at 0


class AdamVariance:
    """v of a bucket's parameters, out of an Adam optimizer's own state.

    The noise scale that Adam sees is that of the gradient divided by the root of its running variance v (docs,
    mathematics). v must be from before this step: with the step's own gradient in it both norms come out too small.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._decays: dict[int, float] = {}
        self._num_steps = 0
        self._commons: dict[tuple[float, bool], torch.Tensor | float] = {}  # of this step

    def count_step(self) -> None:
        """Take note that the optimizer has taken a step."""
        self._num_steps += 1
        self._commons.clear()

    def __call__(self, parameters: Sequence[torch.Tensor]) -> Variance | None:
        """Return v of these parameters in a row; None while it says little. In few kernels: a bucket waits for it."""
        state = self._optimizer.state
        if self._num_steps < _FIRST_STEPS or any("exp_avg_sq" not in state.get(p, {}) for p in parameters):
            return None
        variance = torch.cat([_flat(state[p]["exp_avg_sq"], p) for p in parameters])
        variance = variance.to(torch.promote_types(variance.dtype, torch.float32))
        floor = variance.mean().mul_(_FLOOR).add_(1e-30)
        return Variance(variance.clamp_(min=floor), self._common(parameters[0]))

    def _common(self, parameter: torch.Tensor) -> torch.Tensor | float:
        """Return 1 - beta^t, which corrects v for its start at 0; a fused optimizer has t on the device."""
        decay, step = self._decay(parameter), self._optimizer.state[parameter]["step"]
        key = decay, isinstance(step, torch.Tensor) and step.device.type != "cpu"
        if key not in self._commons:
            self._commons[key] = 1 - decay ** (step if key[1] else float(step))
        return self._commons[key]

    def _decay(self, parameter: torch.Tensor) -> float:
        if id(parameter) not in self._decays:  # at first, and after add_param_group
            groups = self._optimizer.param_groups
            self._decays = {id(p): float(group["betas"][1]) for group in groups for p in group["params"]}
        return self._decays[id(parameter)]


def _flat(variance: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of the parameter's in memory, which is the order they have in a bucket."""
    if variance.stride() != parameter.stride():  # a loaded state may have another order, such as that of the indices
        variance = torch.empty_like(parameter, dtype=variance.dtype).copy_(variance)
    return variance.detach().as_strided((variance.numel(),), (1,), variance.storage_offset())


class ProgressScheduler:
    """Steps a torch scheduler once per unit of progress; call `step()` after every optimizer step."""

    def __init__(self, scheduler: Any, model: Any, unit_steps: float) -> None:
        self.scheduler = scheduler
        self._model = model
        self._unit_steps = unit_steps
        self._taken = math.floor(model.progress / unit_steps)

    def step(self) -> None:
        """Bring the scheduler up to the model's progress."""
        units = math.floor(self._model.progress / self._unit_steps + 1e-9)
        while self._taken < units:
            self.scheduler.step()
            self._taken += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and the units it has taken."""
        return {"scheduler": self.scheduler.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.scheduler.load_state_dict(state["scheduler"])
        self._taken = int(state["taken"])


def by_progress(scheduler: Any, model: Any, unit: str = "step") -> ProgressScheduler:
    """Drive any torch scheduler by the model's progress, so that a growing batch neither stretches nor cuts it.

    Args:
        scheduler: counts steps or epochs at the initial batch, as it would without cannikin.
        model: a HeteroDataParallel or the engine `attach` returned, with its loader built for `unit="epoch"`.
        unit: "step" or "epoch", what one `scheduler.step()` stands for.
    """
    if unit == "step":
        return ProgressScheduler(scheduler, model, 1.0)
    if unit != "epoch":
        raise InvalidInputError(f"unit={unit!r} is unknown: choose step or epoch")
    job = getattr(model, "engine", model).job
    if job is None or job.num_samples is None:
        raise InvalidInputError('unit="epoch" needs a HeteroDataLoader of known length: build the loader first')
    return ProgressScheduler(scheduler, model, job.num_samples / job.batch_size)
