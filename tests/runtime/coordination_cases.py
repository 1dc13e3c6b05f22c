"""What the ranks of `test_coordination` run: when plans take effect, planners that fail, ranks that are not in step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from told import Warned, collecting_warnings
from torch import nn
from training_cases import Numbered, Script, ScriptedPlanner, Step, make_model, one_epoch, take_step, workers

from cannikin.core.planner import Decision
from cannikin.core.policies.plans import make_plan
from cannikin.core.values import Job, StepWindow
from cannikin.runtime.loader import HeteroDataLoader

SCRIPT = [(3, 3), (4, 2), (2, 4), (5, 1), (1, 5), (2, 6), (6, 3)]
NUM_STEPS = 56  # windows end before steps 5, 10, ..., 40, 50


def build(*, num_samples: int = 120, **keywords: Any) -> tuple[Any, Any, HeteroDataLoader]:
    """A model on `SCRIPT`, its optimizer and its loader; `model` has keywords for the first."""
    script = keywords.pop("script", SCRIPT)
    model, optimizer = make_model(policy=ScriptedPlanner(script), **keywords.pop("model", {}))
    return model, optimizer, HeteroDataLoader(Numbered(num_samples), model=model, batch_size=6, **keywords)


# When a plan is in force


def plain_loop(rank: int) -> list[Step]:
    model, optimizer, loader = build(num_samples=400)
    return one_epoch(model, optimizer, loader)[:NUM_STEPS]


def loop_with_workers(rank: int) -> tuple[int, list[Step]]:
    model, optimizer, loader = build(num_samples=400, **workers(1))
    return loader.prefetch_depth, one_epoch(model, optimizer, loader)[:NUM_STEPS]


def loop_that_looks_ahead(rank: int) -> list[Step]:
    """The next batch is fetched before this one is trained on, as a prefetcher does."""
    model, optimizer, loader = build(num_samples=400)
    batches, steps = iter(loader), []
    ahead = next(batches)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        take_step(model, optimizer, batch)
        steps.append(Step(samples=batch[2].tolist(), plan=model.plan.local_batches))
    return steps[:NUM_STEPS]


# Planners


class HeldPlanner(ScriptedPlanner):
    """Notes its thread, and takes no window in before it is let go."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.let_go = threading.Event()
        self.was_let_go: list[bool] = []
        self.threads: set[str] = set()

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        if window is not None:
            self.threads.add(threading.current_thread().name)
            self.was_let_go.append(self.let_go.wait(timeout=10))
            time.sleep(0.1)
        return super().decide(window, job, step)


def planner_that_is_held(rank: int) -> tuple[list[bool], list[str], int]:
    """The planner is let go, and the state saved, after the step in which it has begun."""
    planner = HeldPlanner(SCRIPT)
    model, optimizer = make_model(policy=planner)
    loader = HeteroDataLoader(Numbered(60), model=model, batch_size=6)
    saved = None
    for number, batch in enumerate(loader):
        take_step(model, optimizer, batch)
        if number == 6:
            planner.let_go.set()
            saved = model.engine.state_dict()
    assert saved is not None
    return planner.was_let_go[:1], sorted(planner.threads), saved["planner"]["num_windows"]


class WrongPlanner(ScriptedPlanner):
    """From its `after`-th window on it gives plans that cannot be carried out."""

    def __init__(self, wrong: Any, after: int) -> None:
        super().__init__(SCRIPT)
        self.wrong = wrong
        self.after = after

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        good = super().decide(window, job, step)
        if self.num_windows < self.after:
            return good
        return self.wrong if self.wrong is None else replace(good, plan=make_plan(step, self.wrong, reason="wrong"))


def train_with(planner: ScriptedPlanner) -> tuple[list[Step], list[Warned], str]:
    """Every step, the warnings and the last plan's reason."""
    model, optimizer = make_model(policy=planner)
    loader = HeteroDataLoader(Numbered(180), model=model, batch_size=6)
    with collecting_warnings() as warned:
        steps = one_epoch(model, optimizer, loader)
        last = model.engine.coordinator.schedule.decision.plan
    return steps, warned, last.reason


def plans_for_three_ranks(rank: int) -> Any:
    return train_with(WrongPlanner((2, 2, 2), after=2))


def plans_with_an_empty_batch(rank: int) -> Any:
    return train_with(WrongPlanner((6, 0), after=2))


def no_plan_at_all(rank: int) -> Any:
    return train_with(WrongPlanner(None, after=2))


def first_plan_for_three_ranks(rank: int) -> Any:
    return train_with(WrongPlanner((2, 2, 2), after=0))


def first_plan_with_an_empty_batch(rank: int) -> Any:
    return train_with(WrongPlanner((6, 0), after=0))


class GrowingPlanner(ScriptedPlanner):
    """Lets the total batch grow, and says nothing of the gradient noise."""

    noise = None


def grown_without_a_noise_estimate(rank: int) -> list[Warned]:
    """What is warned of in three growing windows; the gain stays 1."""
    model, optimizer = make_model(policy=GrowingPlanner([(3, 3), (4, 4), (6, 6), (8, 8)]))
    loader = HeteroDataLoader(Numbered(300), model=model, batch_size=6, max_batch_size=16)
    with collecting_warnings() as warned:
        one_epoch(model, optimizer, loader)
        assert model.plan.total_batch > 6
        assert model.gain == 1.0
    return warned


# Ranks that are not in step


def states_of_a_run(num_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loader's and engine's states in the middle of an epoch, at a plan that is not the first."""
    model, optimizer, loader = build()
    for number, batch in enumerate(loader, start=1):
        take_step(model, optimizer, batch)
        if number == num_steps:
            break
    saved: list[Any] = [loader.state_dict(), model.engine.state_dict()]
    dist.broadcast_object_list(saved)  # rank 0's: it has learned
    return saved[0], saved[1]


def first_steps(model: Any, optimizer: Any, loader: Any) -> int:
    """Steps taken, up to 3."""
    for number, batch in enumerate(loader, start=1):
        take_step(model, optimizer, batch)
        if number == 3:
            break
    return number


def loader_state_on(rank: int, ranks: Sequence[int]) -> int:
    saved, _ = states_of_a_run(7)
    model, optimizer, loader = build()
    if rank in ranks:
        loader.load_state_dict(saved)
    return first_steps(model, optimizer, loader)


def engine_state_on(rank: int, ranks: Sequence[int], *, before_the_loader: bool = False) -> int:
    _, saved = states_of_a_run(12)
    model, optimizer = make_model(policy=ScriptedPlanner(SCRIPT))
    if before_the_loader and rank in ranks:
        model.engine.load_state_dict(saved)
    loader = HeteroDataLoader(Numbered(120), model=model, batch_size=6)
    if not before_the_loader and rank in ranks:
        model.engine.load_state_dict(saved)
    return first_steps(model, optimizer, loader)


def epoch_set_on(rank: int, ranks: Sequence[int]) -> int:
    model, optimizer, loader = build()
    if rank in ranks:
        loader.set_epoch(3)
    return first_steps(model, optimizer, loader)


def optimizer_step_left_out_on(rank: int, ranks: Sequence[int]) -> int:
    model, optimizer, loader = build(num_samples=18)
    for number, (x, *_) in enumerate(loader):
        model(x).sum().backward()
        if number != 1 or rank not in ranks:
            optimizer.step()
        optimizer.zero_grad()
    return first_steps(model, optimizer, loader)


def peek_on(rank: int, ranks: Sequence[int]) -> list[Step]:
    """A look at the first batch, as some scripts take to print its shape."""
    model, optimizer, loader = build()
    if rank in ranks:
        next(iter(loader))
    return one_epoch(model, optimizer, loader)


def engine_state_in_the_middle_of_a_pass_on(rank: int, ranks: Sequence[int]) -> None:
    """From then on these ranks cut by another plan than the others."""
    _, saved = states_of_a_run(12)
    model, optimizer, loader = build()
    for number, batch in enumerate(loader):
        take_step(model, optimizer, batch)
        if number == 2 and rank in ranks:
            model.engine.load_state_dict(saved)


class UnlikePlanner(ScriptedPlanner):
    """A planner that does not do the same on every rank: rank 1's own plans are never asked for."""

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        if dist.get_rank() == 1 and window is not None:
            raise AssertionError("only rank 0 plans")
        return super().decide(window, job, step)


def planners_of_other_ranks_rest(rank: int) -> tuple[int, list[Step]]:
    planner = UnlikePlanner(SCRIPT)
    model, optimizer = make_model(policy=planner)
    loader = HeteroDataLoader(Numbered(120), model=model, batch_size=6)
    steps = one_epoch(model, optimizer, loader)
    return planner.num_windows, steps


# Rates that follow the batch


def legw_rates(rank: int, warmup_steps: float) -> list[tuple[int, float, float]]:
    """(total batch, rate within the step, rate after it) of every step."""
    model, optimizer, loader = build(
        num_samples=240,
        script=[(3, 3), (8, 4), (12, 12)],
        model={"lr": 0.01, "lr_rule": "legw", "warmup_steps": warmup_steps},
    )
    inside: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: inside.append(optimizer.param_groups[0]["lr"]))
    notes = []
    for batch in loader:
        take_step(model, optimizer, batch)
        notes.append((model.plan.total_batch, inside[-1], optimizer.param_groups[0]["lr"]))
    return notes


def warmup_of_another_rule(rank: int) -> list[Warned]:
    with collecting_warnings(UserWarning) as warned:
        make_model(lr_rule="linear", warmup_steps=10)
    return warned


# Outputs that cannot be seen into


class Opaque:
    """Not a dataclass, nor anything that pytree knows."""

    def __init__(self, value: Any) -> None:
        self.value = value


class OpaqueNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, features: Any) -> Opaque:
        return Opaque(self.net(features))


def train_opaque(rank: int, weighting: str, *, peeks: bool) -> tuple[int, list[Warned]]:
    """Steps taken, and warnings."""
    import torch

    from cannikin.runtime.parallel import HeteroDataParallel

    net = OpaqueNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer, weighting=weighting)
    loader = HeteroDataLoader(Numbered(120), model=model, batch_size=6)
    num_steps = 0
    with collecting_warnings() as warned:
        if peeks:
            next(iter(loader))
        for features, targets, _ in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features).value, targets).backward()
            optimizer.step()
            num_steps += 1
    return num_steps, warned
