"""What the ranks of `test_loops` run: loops that users write, and that once went wrong."""

from __future__ import annotations

import copy
import gc
import os
import time
import weakref
from dataclasses import asdict
from typing import Any

import torch
from coordination_cases import SCRIPT, build
from told import Warned, collecting_warnings
from torch import nn
from torch.utils.data import DataLoader
from training_cases import Numbered, ScriptedPlanner, Step, TinyNet, make_model, one_epoch, take_step

from cannikin.core.devices import DeviceId
from cannikin.core.noise.tracker import NoiseTracker
from cannikin.core.policies.cannikin import Controller
from cannikin.core.policies.plans import make_plan, save_plan
from cannikin.core.values import Job
from cannikin.runtime.batch_sampler import HeteroBatchSampler
from cannikin.runtime.device import Cpu
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel, attach
from cannikin.runtime.schedulers import by_progress

PINNED = [4, 2]


def state_at_a_larger_batch() -> dict[str, Any]:
    """An engine's state, as saved once the noise scale was known and the total batch had doubled."""
    controller = Controller(Job(num_ranks=2, batch_size=6, max_batch_size=24))
    noise = NoiseTracker(initial_batch=6)
    for _ in range(30):
        noise.update([3, 3], [5.0, 5.0], 3.0)
    planner = controller.state_dict()
    plan = save_plan(make_plan(90, (8, 4), reason="as saved"))
    planner |= {"noise": noise.state_dict(), "plan": plan, "phase": "optperf"}
    counts = {"progress": 100.0, "optimizer_steps": 100.0, "forgone": 0.0, "num_steps": 0, "batch_size": 6}
    device = asdict(DeviceId(name=Cpu().name))
    found = {"devices": [device] * 2, "departed": [], "saved_s": 0.0, "policy": "cannikin"}
    return {"version": 1, **counts, "pass_steps": None, **found, "planner": planner}


def resumed(rank: int, *, before_the_loader: bool) -> tuple[float, list[float], list[float]]:
    """Gain at the first step, the optimizer's rate in each of three, and the weights in the end."""
    model, optimizer = make_model(lr=0.01)
    if before_the_loader:
        model.engine.load_state_dict(state_at_a_larger_batch())
    loader = HeteroDataLoader(Numbered(120), model=model, batch_size=6, max_batch_size=24)
    if not before_the_loader:
        model.engine.load_state_dict(state_at_a_larger_batch())
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    gain = model.gain
    for number, batch in enumerate(loader, start=1):
        take_step(model, optimizer, batch)
        if number == 3:
            break
    return gain, rates, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def long_accumulation(rank: int) -> int:
    """Nine batches an optimizer step: whole windows go by without a synchronised backward."""
    model, optimizer, loader = build(num_samples=216)
    num_steps = 0
    for number, (features, targets, _) in enumerate(loader, start=1):
        if number % 9:
            with model.no_sync():
                nn.functional.mse_loss(model(features), targets).backward()
            continue
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
    return num_steps


class TimeFirst(nn.Module):
    """Takes its samples in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.net(features.transpose(0, 1))


def batch_of_the_users_own(rank: int) -> tuple[int, list[tuple[int, ...]]]:
    """What the error about a first dimension advises: use_batch before forward, on a loader of ours."""
    net = TimeFirst()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer, policy=ScriptedPlanner(SCRIPT))
    loader = HeteroDataLoader(Numbered(240), model=model, batch_size=6)
    matched = []
    for features, targets, _ in loader:
        model.use_batch(len(features), model.total_batch)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features.transpose(0, 1)), targets).backward()
        optimizer.step()
        matched.append((len(features), model.engine.current_entry.local_batch))
    return len(model.engine.loop.queue), matched


def evaluation_on_the_training_data(rank: int) -> tuple[int, list[Step]]:
    """A whole pass without a training step, then an epoch of training."""
    model, optimizer, loader = build(num_samples=240)
    model.eval()
    with torch.no_grad():
        for features, _, _ in loader:
            model(features)
    model.train()
    return len(model.engine.loop.queue), one_epoch(model, optimizer, loader)


def training_in_eval_mode(rank: int) -> list[float]:
    """Of a network in eval mode, as to freeze BatchNorm; its gradient cannot be weighted."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=PINNED)
    model.eval()
    for batch in loader:
        take_step(model, optimizer, batch)
        break
    return model.module.second.bias.grad.tolist()


def network_called_itself(rank: int) -> None:
    """The network in the wrapped model is trained, so that no gradient reaches another rank."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=PINNED)
    for features, *_ in loader:
        model.module(features).sum().backward()
        optimizer.step()


def gradient_in_eval_mode(rank: int) -> int:
    """A look at a gradient in eval mode, without a step of the optimizer, is nobody's business."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=PINNED)
    num_steps = 0
    for batch in loader:
        model.eval()
        model(batch[0]).sum().backward()
        model.train()
        take_step(model, optimizer, batch)
        num_steps += 1
    return num_steps


def optimizer_of_two_models(rank: int) -> tuple[float, float]:
    """The user's rate before and after a few steps, where a model is wrapped twice."""
    torch.manual_seed(0)
    nets = [TinyNet(), TinyNet()]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.01)
    models = [HeteroDataParallel(net, optimizer, policy=ScriptedPlanner([(6, 6)]), lr_rule="linear") for net in nets]
    loaders = [HeteroDataLoader(Numbered(60), model=model, batch_size=6) for model in models]
    for one, other in zip(*loaders, strict=True):
        optimizer.zero_grad()
        for model, batch in zip(models, (one, other), strict=True):
            nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return 0.01, optimizer.param_groups[0]["lr"]


def pinned_under_a_planner(rank: int) -> tuple[int, ...]:
    model, _ = make_model(policy=ScriptedPlanner([(3, 3)]))
    HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=PINNED)
    return model.plan.local_batches


def copied(rank: int) -> None:
    """A deep copy, as for an average of weights."""
    model, _, _ = build()
    copy.deepcopy(model)


def scaler_that_is_off(rank: int) -> float:
    """`GradScaler(enabled=use_amp)`, and no AMP; the signal that was measured."""
    model, optimizer = make_model(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    loader = HeteroDataLoader(Numbered(120), model=model, batch_size=6)
    one_epoch(model, optimizer, loader)
    return model.engine.noise_scale


def largest_forward(rank: int) -> list[int]:
    """What the memory gauge hears of batches of 4 and 2 in two parts each."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=PINNED)
    heard: list[int] = []
    for batch in loader:
        optimizer.zero_grad()
        for features, targets, _ in model.micro_batches(batch, num_parts=2):
            nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
        heard.append(model.engine.loop.memory.largest)
    return heard


def item_sums_left_over(rank: int) -> float:
    """Seconds that the end of a pass waits for a sum of items that was begun, never used, and comes late on rank 1."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(60), model=model, batch_size=6, item_count=lambda batch: float(len(batch[0])))
    batches = iter(loader)
    ahead = next(batches)
    for _ in range(3):
        batch, ahead = ahead, next(batches)
        take_step(model, optimizer, batch)
    if rank == 1:
        time.sleep(0.5)
    next(batches)
    start_s = time.monotonic()
    batches.close()
    return time.monotonic() - start_s


def attached_policy(rank: int) -> str:
    """Under CANNIKIN_POLICY=even."""
    net = nn.Linear(2, 2)
    os.environ["CANNIKIN_POLICY"] = "even"
    try:
        engine = attach(nn.parallel.DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1))
    finally:
        del os.environ["CANNIKIN_POLICY"]
    return str(engine.policy)


def epochs_of_an_attached_model(rank: int) -> list[int]:
    """The scheduler's own count after each of two epochs."""
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    ddp = nn.parallel.DistributedDataParallel(net)
    engine = attach(ddp, optimizer)
    data = Numbered(24)
    loader = DataLoader(data, batch_sampler=HeteroBatchSampler(data, model=engine, batch_size=6))
    scheduler = by_progress(torch.optim.lr_scheduler.StepLR(optimizer, 1), engine, unit="epoch")
    counts = []
    for _ in range(2):
        for batch in loader:
            take_step(ddp, optimizer, batch)
            scheduler.step()
        counts.append(scheduler.scheduler.last_epoch)
    return counts


def passes_and_mean_of_an_attached_model(rank: int) -> tuple[list[int], float]:
    """The passes that `epochs` makes, and the mean of the ranks' numbers weighted by their local batches."""
    net = TinyNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    ddp = nn.parallel.DistributedDataParallel(net)
    engine = attach(ddp, optimizer)
    loader = HeteroDataLoader(Numbered(24), model=engine, batch_size=6, local_batches=PINNED)
    passes = []
    for number in engine.epochs(2):
        for batch in loader:
            take_step(ddp, optimizer, batch)
        passes.append(number)
    return passes, float(engine.weighted_mean(rank))


def running_means(rank: int, *, attached: bool) -> list[float]:
    """BatchNorm's running means after ten steps on data whose mean is the rank's number, as 18 and 6 samples."""
    net = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    if attached:
        ddp = nn.parallel.DistributedDataParallel(net)
        engine = attach(ddp, optimizer, policy="even")
    else:  # with DDP's own default written out, as scripts do
        ddp = HeteroDataParallel(net, optimizer, policy="even", broadcast_buffers=True)
        engine = ddp.engine
    loader = HeteroDataLoader(Numbered(240), model=engine, batch_size=24, local_batches=[18, 6])
    for features, _, _ in loader:
        optimizer.zero_grad()
        ddp(torch.full((len(features), 1), float(rank))).sum().backward()
        optimizer.step()
    return net[0].running_mean.tolist()


def dropped_loader(rank: int) -> tuple[bool, bool]:
    """Whether a loader goes at once where its model stays, and where both go: in a cycle each worker takes 5 s."""
    gone = []
    for keeps_model in (True, False):
        gc.disable()
        try:
            model, optimizer = make_model()
            loader = HeteroDataLoader(Numbered(24), model=model, batch_size=6)
            for _ in model.epochs(1):
                one_epoch(model, optimizer, loader)
            known = weakref.ref(loader)
            if not keeps_model:
                del model, optimizer
            del loader
            gone.append(known() is None)
        finally:
            gc.enable()
    return gone[0], gone[1]


def numbers_of_resumed_passes(rank: int) -> list[int]:
    """What `epochs` yields after a resume at the second of four passes."""
    model, optimizer = make_model()
    loader = HeteroDataLoader(Numbered(24), model=model, batch_size=6)
    model.engine.load_state_dict({**model.engine.state_dict(), "progress": 4.0})
    loader.load_state_dict({**loader.state_dict(), "epoch": 1})
    return [(epoch, one_epoch(model, optimizer, loader))[0] for epoch in model.epochs(4)]


def resumed_schedules(rank: int, *, unit: str) -> dict[str, list[int]]:
    """Where a schedule is that goes on from two passes of four steps, after each step of one more.

    By when it is wrapped, before the engine's state is loaded or after it, and by what is saved of it.
    """
    state: dict[str, Any] = {}

    def train(*order: str) -> list[int]:
        model, optimizer = make_model()
        loader = HeteroDataLoader(Numbered(24), model=model, batch_size=6)
        bare = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scheduler: Any = None
        for what in order:
            if what == "wrap":
                scheduler = by_progress(bare, model, unit=unit)
            elif what == "engine":
                model.engine.load_state_dict(state["engine"])
                loader.load_state_dict(state["loader"])
            else:
                (bare if what == "bare" else scheduler).load_state_dict(state[what])
        places = []
        for _ in range(1 if "engine" in order else 2):
            for batch in loader:
                take_step(model, optimizer, batch)
                scheduler.step()
                places.append(bare.last_epoch)
        if not state:
            state.update(
                engine=model.engine.state_dict(),
                loader=loader.state_dict(),
                bare=bare.state_dict(),
                wrapped=scheduler.state_dict(),
            )
        return places

    train("wrap")
    orders = (
        "wrap engine bare", "wrap bare engine", "engine wrap bare", "engine bare wrap", "wrap engine wrapped",
        "wrap wrapped engine", "engine wrap wrapped", "wrap engine", "engine wrap",
    )  # fmt: skip
    return {order: train(*order.split()) for order in orders}


def profiles_of_a_policy_without(rank: int, path: str) -> list[Warned]:
    model, _ = make_model(policy="even", profiles=path)
    with collecting_warnings() as warned:
        HeteroDataLoader(Numbered(24), model=model, batch_size=6)
    return warned
