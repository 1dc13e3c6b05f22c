"""What the ranks of the multi-process tests run: small real trainings that write down what each step was."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from told import collecting_warnings
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from cannikin.core.planner import Decision, Noise
from cannikin.core.policies.cannikin import Controller
from cannikin.core.policies.plans import make_plan
from cannikin.core.values import Job, StepWindow
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel

Script = Sequence[tuple[int, ...]]  # local batches of one plan after another


class Numbered(Dataset):
    """Sample i is some features, a target and the number i itself."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        features = torch.sin(torch.arange(1.0, 4.0) * (index + 1))
        return features, features.sum().reshape(1), index


class NumberedStream(IterableDataset):
    """The same samples in order, without a length, from worker processes in turn."""

    def __init__(self, length: int) -> None:
        self.data = Numbered(length)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.data[index] for index in range(first, len(self.data), step))


class Kept:
    """An observer that keeps all that it is told."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)


class ScriptedPlanner:
    """Takes the next plan of a script at every window, whatever was measured; begins again at the script's end."""

    noise = Noise(signal_sqnorm=math.nan, noise_trace=math.nan)  # not known

    def __init__(self, script: Script) -> None:
        self.script = script
        self.num_windows = 0

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        if window is not None:
            assert window.num_ranks == len(self.script[0])
            self.num_windows += 1
        return self.scripted(step)

    def scripted(self, step: int) -> Decision:
        batches = self.script[self.num_windows % len(self.script)]
        return Decision(plan=make_plan(step, batches, reason="by script"), noise=self.noise, phase="scripted")

    def state_dict(self) -> dict[str, Any]:
        return {"num_windows": self.num_windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_windows = state["num_windows"]


class ScriptedController(Controller):
    """Learns everything that `policy="cannikin"` does, and plans by script all the same."""

    def __init__(self, job: Job, script: Script) -> None:
        super().__init__(job)
        self.scripted = ScriptedPlanner(script)

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        learned = super().decide(window, job, step)
        # Windows of the same length in every run.
        return replace(learned, plan=self.scripted.decide(window, job, step).plan, changes=(), settled=True)


class _Slow(torch.autograd.Function):
    """Identity that takes a time per sample in forward and as long in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, sample_s: float) -> torch.Tensor:
        ctx.sample_s = sample_s
        time.sleep(sample_s * len(inputs))
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.sample_s * len(gradients[0]))
        return gradients[0], None


class TinyNet(nn.Module):
    """Two layers, slowed by `sample_s` for each sample and direction between them."""

    def __init__(self, sample_s: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.sample_s = sample_s

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(features))
        if self.sample_s:
            hidden = _Slow.apply(hidden, self.sample_s)
        return self.second(hidden)


def fail_on_warnings() -> None:
    """A planner that fails costs its plans and a warning, not the training; here it must cost the test."""
    warnings.simplefilter("error", RuntimeWarning)


def make_model(
    sample_s: float = 0.0, *, lr: float = 1e-3, optimizer: Any = torch.optim.SGD, **keywords: Any
) -> tuple[HeteroDataParallel, Any]:
    fail_on_warnings()
    torch.manual_seed(0)
    net = TinyNet(sample_s)
    optimizer = optimizer(net.parameters(), lr=lr)
    return HeteroDataParallel(net, optimizer, **keywords), optimizer


def workers(num_workers: int) -> dict[str, Any]:
    """Keywords for a loader. Forked, since a rank's own start method, forkserver, would import torch in each."""
    return {"num_workers": num_workers, **({"multiprocessing_context": "fork"} if num_workers else {})}


def take_step(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
    features, targets, _ = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(features), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step as one rank saw it."""

    samples: list[int]
    plan: tuple[int, ...]
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training; `policy` is a name or a script, `sample_s` one time per sample and direction for each rank."""

    num_samples: int
    batch_size: int
    policy: str | Script = "cannikin"
    num_epochs: int = 2
    num_workers: int = 0
    sample_s: tuple[float, ...] = ()
    is_stream: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)

    def data(self) -> Dataset:
        return NumberedStream(self.num_samples) if self.is_stream else Numbered(self.num_samples)

    def build(self, rank: int) -> tuple[HeteroDataParallel, Any, HeteroDataLoader]:
        policy = self.policy if isinstance(self.policy, str) else ScriptedPlanner(self.policy)
        model, optimizer = make_model(self.sample_s[rank] if self.sample_s else 0.0, policy=policy)
        loader = HeteroDataLoader(
            self.data(), model=model, batch_size=self.batch_size, **workers(self.num_workers), **self.keywords
        )
        return model, optimizer, loader


def one_epoch(model: Any, optimizer: Any, loader: Any, after_step: Callable[[int], None] | None = None) -> list[Step]:
    """Train through one epoch; what each step was. A step's duration is from its batch to the next one's."""
    steps: list[Step] = []
    start_s = time.perf_counter()
    for number, batch in enumerate(loader):
        take_step(model, optimizer, batch)
        samples = [] if loader.is_padding else batch[2].tolist()
        duration_s, start_s = time.perf_counter() - start_s, time.perf_counter()
        steps.append(Step(samples=samples, plan=model.plan.local_batches, duration_s=duration_s))
        if after_step is not None:
            after_step(number)
    return steps


def train(rank: int, world_size: int, cases: Sequence[Case]) -> list[list[list[Step]]]:
    """Each case's steps by epoch, all cases in one launch."""
    histories = []
    for case in cases:
        model, optimizer, loader = case.build(rank)
        histories.append([one_epoch(model, optimizer, loader) for _ in range(case.num_epochs)])
    return histories


# A save, a kill, and a resume elsewhere


def train_until_killed(rank: int, world_size: int, case: Case, folder: str, epoch: int, num_steps: int) -> None:
    """Resume from `folder` if it holds a save; save after `num_steps` of `epoch`; train on a little; be killed."""
    model, optimizer, loader = resumed(rank, case, folder)
    while loader.epoch < epoch:
        one_epoch(model, optimizer, loader)
    seen: list[int] = []
    for number, batch in enumerate(loader, start=1):
        take_step(model, optimizer, batch)
        seen += [] if loader.is_padding else batch[2].tolist()
        if number == num_steps:
            _save(rank, folder, seen, loader, model)
        if number == num_steps + 2:
            os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the epoch ended before the kill")


def train_to_the_end(rank: int, world_size: int, case: Case, folder: str) -> list[list[Step]]:
    """Resume from `folder`; finish that epoch, and one more."""
    model, optimizer, loader = resumed(rank, case, folder)
    return [one_epoch(model, optimizer, loader) for _ in range(2)]


def resumed(rank: int, case: Case, folder: str) -> tuple[HeteroDataParallel, Any, HeteroDataLoader]:
    model, optimizer, loader = case.build(rank)
    path = Path(folder, "state.pt")
    if path.exists():
        state = torch.load(path, weights_only=True)
        loader.load_state_dict(state["loader"])
        model.module.load_state_dict(state["module"])
        if "engine" in state:
            model.engine.load_state_dict(state["engine"])
    return model, optimizer, loader


def _save(rank: int, folder: str, seen: list[int], loader: Any, model: Any) -> None:
    """Rank 0 saves alone, as scripts do; every rank leaves word of what it has seen."""
    if rank == 0:
        state = {"loader": loader.state_dict(), "module": model.module.state_dict()}
        if hasattr(model.engine, "state_dict"):
            state["engine"] = model.engine.state_dict()
        torch.save(state, Path(folder, "state.pt"))
    path = Path(folder, f"seen-{time.monotonic_ns()}-{rank}.json")
    path.write_text(json.dumps(seen))
    dist.barrier()


# Bad settings


def outcomes(rank: int, world_size: int, cases: dict[str, Callable[[int], Any]]) -> dict[str, tuple[str, str, float]]:
    """What each case raised on this rank, {name: (type, message, seconds)}; one after another, ranks in step."""
    told = {}
    for name, case in cases.items():
        dist.barrier()
        start_s = time.perf_counter()
        try:
            case(rank)
            told[name] = ("nothing", "", time.perf_counter() - start_s)
        except Exception as error:
            told[name] = (type(error).__name__, str(error), time.perf_counter() - start_s)
    return told


@dataclass(frozen=True, kw_only=True)
class LoaderOf:
    """Builds a loader on each rank, by keywords; `ranks` has what single ranks do otherwise."""

    keywords: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, rank: int) -> None:
        keywords = {"num_samples": 20, "batch_size": 6, **self.keywords, **self.ranks.get(rank, {})}
        own = {name: keywords.pop(name) for name in ("policy", "weighting", "lr_rule") if name in keywords}
        model, _ = make_model(**{**self.model, **own})
        HeteroDataLoader(Numbered(keywords.pop("num_samples")), model=model, **keywords)


def loader_of_a_plain_module(rank: int) -> None:
    HeteroDataLoader(Numbered(20), model=TinyNet(), batch_size=6)


def second_loader_of_one_model(rank: int) -> None:
    model, _ = make_model()
    HeteroDataLoader(Numbered(20), model=model, batch_size=6)
    HeteroDataLoader(Numbered(20), model=model, batch_size=6)


def forward_without_a_batch(rank: int) -> None:
    model, _ = make_model()
    HeteroDataLoader(Numbered(20), model=model, batch_size=6)
    model(torch.zeros(3, 3))


def forward_without_a_loader(rank: int) -> None:
    model, _ = make_model()
    model(torch.zeros(3, 3))


def forward_with_the_loader_of_another_model(rank: int) -> None:
    (model, _), (other, _) = make_model(), make_model()
    HeteroDataLoader(Numbered(20), model=model, batch_size=6)
    for features, _, _ in HeteroDataLoader(Numbered(20), model=other, batch_size=6):
        model(features)


def forward_with_a_batch_of_another_size(rank: int) -> None:
    model, _ = make_model()
    for _ in HeteroDataLoader(Numbered(20), model=model, batch_size=6):
        model(torch.zeros(5, 3))


def plain_hook(state, bucket):  # DDP compares annotations with types, and ours are strings
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def attach_to_a_module_with_a_hook(rank: int) -> None:
    from cannikin.runtime.parallel import attach

    net = TinyNet()
    ddp = nn.parallel.DistributedDataParallel(net)
    ddp.register_comm_hook(None, plain_hook)
    attach(ddp, torch.optim.SGD(net.parameters(), lr=0.1))


def wrap_a_ddp_module(rank: int) -> None:
    ddp = nn.parallel.DistributedDataParallel(TinyNet())
    HeteroDataParallel(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))


def attach_to_sparse_gradients(rank: int) -> None:
    net = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
    HeteroDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))


def attach_twice(rank: int) -> None:
    from cannikin.runtime.parallel import attach

    model, optimizer = make_model()
    attach(model, optimizer)


def register_a_hook_after_ours(rank: int) -> None:
    model, _ = make_model()
    model.register_comm_hook(None, plain_hook)


# Faults in the middle of training


def one_rank_fails(rank: int, world_size: int, how: str, step: int, timeout_s: float) -> str:
    """Rank 1 raises, is killed or hangs before its forward of `step`; the others would train on."""
    model, optimizer = make_model(process_group=dist.new_group(timeout=timedelta(seconds=timeout_s)))
    loader = HeteroDataLoader(Numbered(400), model=model, batch_size=6)
    for number, batch in enumerate(loader):
        if rank == 1 and number == step:
            if how == "raises":
                raise FloatingPointError("rank 1 has had enough")
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(timeout_s + 4)
            raise TimeoutError("rank 1 woke up")
        take_step(model, optimizer, batch)
    return "trained to the end"


def one_rank_never_comes(rank: int, world_size: int, timeout_s: float) -> str:
    """Rank 1 does not build a loader, nor does it leave."""
    model, _ = make_model(process_group=dist.new_group(timeout=timedelta(seconds=timeout_s)))
    if rank == 1:
        time.sleep(timeout_s + 4)
        return "never came"
    HeteroDataLoader(Numbered(20), model=model, batch_size=6)
    return "built a loader"


@dataclass(frozen=True, kw_only=True)
class NoiseReport:
    """What is known at the end of a training with bad gradients in it."""

    num_nonfinite: int
    noise_scale: float
    limits: tuple[float, float] | None
    num_steps: int
    bad_steps_seen: list[int]


def train_with_bad_gradients(rank: int, world_size: int, bad: dict[int, tuple[int, ...]], value: float) -> NoiseReport:
    """What is known in the end where ranks `bad[step]` have a gradient full of `value` at that step."""
    told = Kept()
    model, optimizer = make_model(observers=[told])
    return noise_report(rank, model, told, leave_out_bad_gradients(model, optimizer, bad, value))


def warnings_of_bad_gradients(
    rank: int, world_size: int, bad_steps: range, num_parts: int = 1, bad_ranks: tuple[int, ...] | None = None
) -> list[str]:
    """What is warned of where these steps have gradients full of NaN; gradients of `num_parts` batches add up."""
    model, optimizer = make_model()
    bad = {step: tuple(range(world_size)) if bad_ranks is None else bad_ranks for step in bad_steps}
    with collecting_warnings() as caught:
        leave_out_bad_gradients(model, optimizer, bad, math.nan, num_parts)
    return [warning.text for warning in caught]


def leave_out_bad_gradients(
    model: HeteroDataParallel, optimizer: Any, bad: dict[int, tuple[int, ...]], value: float, num_parts: int = 1
) -> list[int]:
    """A script that leaves out steps whose gradient is not finite, as many do; which those were.

    Local batches are set: with those that follow from times, the noise scale would be another one in every run.
    """
    n = model.engine.world_size
    local_batches = [6 // n + (rank < 6 % n) for rank in range(n)]
    loader = HeteroDataLoader(Numbered(600), model=model, batch_size=6, local_batches=local_batches)
    seen = []
    for number, (features, targets, _) in enumerate(loader):
        is_last = (number + 1) % num_parts == 0
        with nullcontext() if is_last else model.no_sync():
            loss = nn.functional.mse_loss(model(features), targets)
            (loss * value if model.engine.rank in bad.get(number, ()) else loss).backward()
        if not is_last:
            continue
        if all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()):
            optimizer.step()
        else:
            seen.append(number)
        optimizer.zero_grad()
    return seen


def train_with_a_scaler(rank: int, world_size: int, bad: dict[int, tuple[int, ...]], optimizer: Any) -> NoiseReport:
    """The same under a GradScaler, which leaves those steps out by itself and lowers its scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
    told = Kept()
    model, optimizer = make_model(grad_scaler=scaler, optimizer=optimizer, observers=[told])
    loader = HeteroDataLoader(Numbered(600), model=model, batch_size=6)
    seen = []
    for number, (features, targets, _) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        scaler.scale(loss * math.inf if rank in bad.get(number, ()) else loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            seen.append(number)
    return noise_report(rank, model, told, seen)


def noise_report(rank: int, model: HeteroDataParallel, told: Kept, seen: list[int]) -> NoiseReport:
    """What the engine knows at the end, and was told of; `seen` is what the script itself has seen."""
    noise = model.engine.coordinator.schedule.decision.noise
    assert noise is not None
    return NoiseReport(
        num_nonfinite=sum(event.data["count"] for event in told.records if getattr(event, "kind", "") == "nonfinite"),
        noise_scale=model.noise_scale,
        limits=noise.limits if rank == 0 else None,
        num_steps=noise.num_steps,
        bad_steps_seen=seen,
    )


# Loops that do not go straight through


class AbandonError(Exception):
    """Raised inside a loop's body."""


def crooked_loops(rank: int, world_size: int, num_workers: int) -> dict[str, Any]:
    """Epochs broken off in all sorts of places, each followed by a whole one with plans that change."""
    script = [(4, 2), (3, 5), (2, 2), (5, 3)]
    model, optimizer = make_model(policy=ScriptedPlanner(script))
    loader = HeteroDataLoader(Numbered(100), model=model, batch_size=6, **workers(num_workers))
    told: dict[str, Any] = {}

    def whole(name: str) -> None:
        told[name] = one_epoch(model, optimizer, loader)

    for number, batch in enumerate(loader):
        take_step(model, optimizer, batch)
        if number == 7:
            break
    whole("break after the step")
    for _ in loader:
        break
    whole("break before forward")
    for features, _, _ in loader:
        model(features)
        break
    whole("break between forward and backward")
    try:
        for number, batch in enumerate(loader):
            take_step(model, optimizer, batch)
            if number == 4:
                raise AbandonError
    except AbandonError:
        whole("an exception in the body")
    told["a batch skipped after forward"] = _epoch_with_a_skipped_batch(model, optimizer, loader)
    told["evaluation in between"] = _epoch_with_evaluation(model, optimizer, loader)
    whole("after evaluation")
    told["weights"] = [p.tolist() for p in model.parameters()]
    return told


def _epoch_with_a_skipped_batch(model: Any, optimizer: Any, loader: Any) -> list[Step]:
    """`if the loss looks bad: continue`, on every rank alike."""
    steps = []
    for number, (features, targets, indices) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        steps.append(Step(samples=[] if loader.is_padding else indices.tolist(), plan=model.plan.local_batches))
        if number % 5 == 3:
            continue
        loss.backward()
        optimizer.step()
    return steps


def _epoch_with_evaluation(model: Any, optimizer: Any, loader: Any) -> list[Step]:
    def evaluate(step: int) -> None:
        if step % 3:
            return
        model.eval()
        with torch.no_grad():
            model(torch.zeros(7, 3))
        model(torch.zeros(9, 3))  # with gradients on, as some scripts have it
        model.train()
        with torch.no_grad():
            model(torch.zeros(8, 3))

    return one_epoch(model, optimizer, loader, evaluate)


# Noise scale


@dataclass(frozen=True, kw_only=True)
class NoiseCase:
    """A training on digits with frozen weights; `script` has the splits to change between, a single one pins it.

    With `accumulate` above 1 so many batches pile up for a step: under no_sync, or each of them reduced. They are
    fetched together, as trainers do, and a last group of an epoch may be shorter.
    """

    seed: int
    script: Script
    num_epochs: int = 5
    weighting: str = "hook"
    accumulate: int = 1
    no_sync: bool = True


@dataclass(frozen=True, kw_only=True)
class NoiseFound:
    noise_scale: float
    limits: tuple[float, float]
    splits: set[tuple[int, ...]]
    num_steps: int


def digits(num_samples: int = 900) -> TensorDataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    inputs = torch.tensor(bunch.data[:num_samples], dtype=torch.float32) / 16
    return TensorDataset(inputs, torch.tensor(bunch.target[:num_samples]))


def digits_net(seed: int) -> nn.Module:
    """An MLP after a few steps on all of the data: its noise scale is then about 90, two or three times the batch."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    inputs, targets = digits().tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return net


def true_noise(net: nn.Module) -> tuple[float, float]:
    """(S, G) without bias from every sample's own gradient.

    S = sum_k |g_k - mean g|^2 / (N - 1)        G = |mean g|^2 - S / N
    """
    inputs, targets = digits().tensors
    values = {name: value.detach() for name, value in net.named_parameters()}

    def loss(values: Any, sample: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(net, values, (sample[None],))
        return nn.functional.cross_entropy(output, target[None])

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(values, inputs, targets)
    table = torch.cat([g.flatten(1) for g in gradients.values()], dim=1).double()
    mean = table.mean(dim=0)
    noise = float((table - mean).square().sum() / (len(table) - 1))
    return noise, float(mean.square().sum()) - noise / len(table)


def measure_noise(rank: int, world_size: int, cases: Sequence[NoiseCase]) -> list[NoiseFound | None]:
    """What the tracker on rank 0 says after training with a rate of 0."""
    fail_on_warnings()
    found: list[NoiseFound | None] = []
    for case in cases:
        net = digits_net(case.seed)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        pinned = len(case.script) == 1
        total = sum(case.script[0])
        job = Job(num_ranks=world_size, batch_size=total)
        model = HeteroDataParallel(
            net,
            optimizer,
            policy="cannikin" if pinned else ScriptedController(job, case.script),
            weighting=case.weighting,
        )
        loader = HeteroDataLoader(
            digits(),
            model=model,
            batch_size=total,
            local_batches=list(case.script[0]) if pinned else None,
            seed=case.seed,
        )
        splits = set()
        for _ in range(case.num_epochs):
            batches = iter(loader)
            while group := list(islice(batches, case.accumulate)):
                for number, (inputs, targets) in enumerate(group, start=1):
                    with nullcontext() if number == len(group) or not case.no_sync else model.no_sync():
                        loss = nn.functional.cross_entropy(model(inputs), targets)
                        if case.weighting == "none":  # the loss's own weight, by the count over all ranks
                            loss = loss * world_size * len(inputs) / total
                        # Reduced one by one, norms are those of a group's first batch, whatever the loss is divided by.
                        (loss / (len(group) if case.no_sync else case.accumulate)).backward()
                optimizer.step()
                optimizer.zero_grad()
                splits.add(model.plan.local_batches)
        noise = model.engine.coordinator.schedule.decision.noise
        assert noise is not None
        if rank == 0:
            found.append(
                NoiseFound(noise_scale=noise.noise_scale, limits=noise.limits, splits=splits, num_steps=noise.num_steps)
            )
    return found
