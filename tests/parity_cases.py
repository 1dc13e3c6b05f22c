"""Training scripts for the parity tests, each run twice: on unequal ranks, and by one process on the whole batches.

A case is a user's script in parts: a network, a loss, an optimizer, a loop, and a feed that says how batches reach the
ranks. The loop is the same code in both runs. What it `note`s, such as a loss, must agree as the parameters do.
"""

from __future__ import annotations

import copy
import math
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from cannikin.core.planner import Decision, Noise
from cannikin.core.policies.plans import make_plan
from cannikin.core.values import Job, StepWindow
from cannikin.runtime.entry import BatchEntry
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel
from cannikin.runtime.passes import epoch_order

DEVICE = "cpu"  # tests on a GPU set it in the process of each rank
NUM_STEPS = 20
TOTALS = (16, 13, 24, 9, 20)
WIDTH = 6
DTYPES = {"float32": torch.float32, "float64": torch.float64}

Batch = Any
Loss = Callable[[nn.Module, Batch], torch.Tensor]


# Networks. None has a parameter whose true gradient is zero, unless it says so.


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 3))


class Written(nn.Module):
    """The same with a forward of its own: dynamo compiles no frame of torch's own modules, such as Sequential's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Heads(nn.Module):
    """Several outputs in a dict and a tuple, some of which feed others."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.tail = nn.Linear(WIDTH, 12), nn.Linear(12, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.body(x))
        first = self.head(hidden)
        return {"hidden": hidden, "heads": (first, torch.tanh(self.tail(first))), "name": "heads", "count": len(x)}


class Named(dict[str, Any]):
    """A dict whose items are attributes as well; pytree does not know it."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Naming(nn.Module):
    """Returns a tensor beside such a dict, which the loss uses in both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.tail = mlp(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Named]:
        return self.net(x), Named(tail=self.tail(x))


@dataclass
class Answer:
    """An output in a class that pytree does not know; DDP looks into such."""

    values: torch.Tensor
    note: str = ""


class Answering(nn.Module):
    """Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(values=self.net(x), note="an answer")


class LossInside(nn.Module):
    """Takes keywords and returns the loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, *, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.net(inputs)
        return ((outputs - labels) ** 2).mean(), outputs


class Branching(nn.Module):
    """One layer is never used, one only for some samples: a rank without any of those has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.rare, self.never = mlp(), nn.Linear(WIDTH, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, chosen = self.net(x), x[:, 0] > 1.2
        return torch.where(chosen[:, None], out + self.rare(x), out) if chosen.any() else out


class Checkpointed(nn.Module):
    """Its first layers are computed again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.use_reentrant = nn.Linear(WIDTH, 12), nn.Linear(12, 3), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()  # or a reentrant checkpoint would have no gradient to hand on
        return self.last(checkpoint(self._begin, x, use_reentrant=self.use_reentrant))

    def _begin(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))


def nested() -> nn.Module:
    """A network of which a part is under plain DDP already."""
    return nn.Sequential(DistributedDataParallel(mlp()))


class Complex(nn.Module):
    """Its output is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        return torch.complex(out, out.flip(-1))


# Losses: means over the batch.


def square_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()


def twofold_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Two forwards go before the one backward."""
    x, y = batch
    return ((model(x) - y) ** 2).mean() + ((model(1.1 * x + 0.1) - y) ** 2).mean()


def inplace_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    out = model(x)
    out /= 2.0
    return ((out - y) ** 2).mean()


def heads_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    out = model(x)
    first, second = out["heads"]
    return ((first - y) ** 2).mean() + 0.5 * ((second + first - y) ** 2).mean() + 0.1 * (out["hidden"] ** 2).mean()


def naming_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    first, named = model(x)
    return ((first - y) ** 2).mean() + ((named.tail - y) ** 2).mean() + 0.5 * (named["tail"] ** 2).mean()


def answer_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return ((model(x).values - y) ** 2).mean()


def inside_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return model(inputs=x, labels=y)[0]


def complex_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).abs().square().mean()


def penalised_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return square_loss(model, batch) + 0.01 * sum((p**2).sum() for p in model.parameters())


def slope_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """With a penalty on the gradient by the inputs, of a seed that depends on the outputs."""
    x, y = batch
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad((torch.tanh(out) * y).sum(), x, create_graph=True)
    return ((out - y) ** 2).mean() + 0.1 * slope.square().sum(dim=1).mean()


def sum_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The sum over the batch, of which DDP takes the mean over ranks."""
    x, y = batch
    ranked = isinstance(model, DistributedDataParallel)
    return 0.02 * ((model(x) - y) ** 2).sum() / (1 if ranked else dist.get_world_size())


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over the tokens of sequences of different lengths; NaN where there is none."""
    x, y, mask = batch
    errors = ((model(x) - y) ** 2).mean(dim=-1)
    return (errors * mask).sum() / mask.sum()


def num_tokens(batch: Batch) -> float:
    return float(batch[2].sum())


def one(batch: Batch) -> float:
    return 1.0


# Optimizers.


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)


def grouped(net: nn.Module) -> torch.optim.Optimizer:
    first, *others = net.parameters()
    return torch.optim.SGD(
        [{"params": [first], "lr": 0.1, "weight_decay": 1e-2}, {"params": others, "lr": 0.02}], lr=0.5, momentum=0.9
    )


class Both(list[torch.optim.Optimizer]):
    """Two optimizers of one model, which step together."""

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()


def both(net: nn.Module) -> Any:
    """SGD for matrices and AdamW for the rest, as scripts have it with Muon."""
    matrices, others = ([p for p in net.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    return Both([torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)])


# Loops: what a user writes.


@dataclass
class Run:
    """A script's objects, in one of its two runs; `ranked` says which."""

    model: Any
    optimizer: torch.optim.Optimizer
    loss: Loss
    batches: Iterator[Batch]
    scaler: Any
    rank: int
    ranked: bool
    notes: list[torch.Tensor] = field(default_factory=list)

    def no_sync(self) -> Any:
        return self.model.no_sync() if self.ranked else nullcontext()

    def parts(self, batch: Batch, num_parts: int) -> Iterable[Batch]:
        return self.model.micro_batches(batch, num_parts=num_parts) if self.ranked else [batch]

    def note_mean(self, value: torch.Tensor) -> None:
        self.notes.append(self.model.weighted_mean(value) if self.ranked else value.detach())


def plain_loop(run: Run) -> None:
    for batch in run.batches:
        run.optimizer.zero_grad()
        run.loss(run.model, batch).backward()
        run.optimizer.step()


def zeroing_loop(run: Run) -> None:
    for batch in run.batches:
        run.optimizer.zero_grad(set_to_none=False)
        run.loss(run.model, batch).backward()
        run.optimizer.step()


def mean_loss_loop(run: Run) -> None:
    for batch in run.batches:
        run.optimizer.zero_grad()
        loss = run.loss(run.model, batch)
        run.note_mean(loss)
        loss.backward()
        run.note_mean(loss)
        run.optimizer.step()


def clipping_loop(run: Run) -> None:
    for batch in run.batches:
        run.optimizer.zero_grad()
        run.loss(run.model, batch).backward()
        run.notes.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.5))
        run.optimizer.step()


def lookahead_loop(run: Run) -> None:
    run.batches = looking_ahead(run.batches)
    plain_loop(run)


def evaluating_loop(run: Run) -> None:
    """Evaluates in eval mode and under no_grad between steps, and twice uses the training batch for logging."""
    for batch in run.batches:
        run.model.eval()
        run.loss(run.model, batch)
        run.model.train()
        with torch.no_grad():
            run.loss(run.model, batch)
        run.optimizer.zero_grad()
        run.loss(run.model, batch).backward()
        run.optimizer.step()


def accumulating_loop(run: Run) -> None:
    for index, batch in enumerate(run.batches):
        last = index % 3 == 2
        with nullcontext() if last else run.no_sync():
            (run.loss(run.model, batch) / 3).backward()
        if last:
            run.optimizer.step()
            run.optimizer.zero_grad()


def toggling_loop(run: Run) -> None:
    """Sets what no_sync() sets, as nanoGPT does."""
    for index, batch in enumerate(run.batches):
        last = run.model.require_backward_grad_sync = index % 3 == 2
        (run.loss(run.model, batch) / 3).backward()
        if last:
            run.optimizer.step()
            run.optimizer.zero_grad()


def forward_only_loop(run: Run) -> None:
    """Leaves no_sync() before backward, as guided-diffusion does."""
    for index, batch in enumerate(run.batches):
        last = index % 3 == 2
        with nullcontext() if last else run.no_sync():
            loss = run.loss(run.model, batch) / 3
        loss.backward()
        if last:
            run.optimizer.step()
            run.optimizer.zero_grad()


@dataclass(frozen=True)
class Shared:
    """Two forwards share each backward, one of them under no_sync; the loss is of both, or one is only logged.

    Args:
        unsynced: which of the two is under no_sync, 0 or 1.
        logged: which is only logged; None where the loss is of both.
        piles: two batches pile up for one step of the optimizer, the first one's backward under no_sync as well.
    """

    unsynced: int
    logged: int | None = None
    piles: bool = False

    def __call__(self, run: Run) -> None:
        for index, (x, y) in enumerate(run.batches):
            steps = index % 2 == 1 or not self.piles
            losses = []
            with nullcontext() if steps else run.no_sync():
                for number, inputs in enumerate((x, 1.1 * x + 0.1)):
                    with run.no_sync() if number == self.unsynced else nullcontext():
                        losses.append(run.loss(run.model, (inputs, y)))
                sum(loss for number, loss in enumerate(losses) if number != self.logged).backward()
            if steps:
                run.optimizer.step()
                run.optimizer.zero_grad()


def joint_loop(run: Run) -> None:
    """One backward for two batches, of which the first one's forward was under no_sync."""
    for first, second in zip(run.batches, run.batches, strict=False):
        with run.no_sync():
            loss = run.loss(run.model, first)
        run.optimizer.zero_grad()
        (loss + run.loss(run.model, second)).div(2).backward()
        run.optimizer.step()


def reducing_loop(run: Run) -> None:
    """Gradients pile up, and every batch's are reduced all the same."""
    for index, batch in enumerate(run.batches):
        (run.loss(run.model, batch) / 3).backward()
        if index % 3 == 2:
            run.optimizer.step()
            run.optimizer.zero_grad()


def ragged_loop(run: Run) -> None:
    for index, batch in enumerate(run.batches):
        run.optimizer.zero_grad()
        for part in run.parts(batch, 1 + (run.rank + index) % 3):
            run.loss(run.model, part).backward()
        run.optimizer.step()


def ragged_accumulating_loop(run: Run) -> None:
    for index, batch in enumerate(run.batches):
        last = index % 3 == 2
        with nullcontext() if last else run.no_sync():
            for part in run.parts(batch, 1 + (run.rank + index) % 3):
                (run.loss(run.model, part) / 3).backward()
        if last:
            run.optimizer.step()
            run.optimizer.zero_grad()


def scaler_loop(run: Run) -> None:
    for batch in run.batches:
        run.optimizer.zero_grad()
        run.scaler.scale(run.loss(run.model, batch)).backward()
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.scaler.step(run.optimizer)
        run.scaler.update()


# Data and feeds: how a step's samples are cut, and what the engine is told of it.


def regression(dtype: torch.dtype, length: int = 400) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :3] * x[:, 3:]) + 0.1 * torch.randn(length, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(DEVICE, dtype), y.to(DEVICE, dtype))


def sequences(dtype: torch.dtype, length: int = 400, longest: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(length, longest, WIDTH, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, longest + 1, (length, 1), generator=generator)
    mask = torch.arange(longest) < lengths
    y = torch.cos(x[..., :3] + 0.1 * lengths[..., None])
    return TensorDataset(*(tensor.to(DEVICE, dtype) for tensor in (x, y, mask)))


def looking_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Each batch, once the one after it has been fetched."""
    coming = next(batches, None)
    while coming is not None:
        batch, coming = coming, next(batches, None)
        yield batch


def split_of(total: int, world_size: int, step: int, least: int = 1) -> list[int]:
    """An uneven split of this step, another at every step, nobody without a sample; `least` is for two ranks."""
    ends = random.Random(f"{world_size} {step}").sample(range(least, total + 1 - least), world_size - 1)
    ends = [0, *sorted(ends), total]
    return [end - start for start, end in pairwise(ends)]


def take(data: TensorDataset, indices: Sequence[int]) -> Batch:
    return [tensor[torch.as_tensor(indices)] for tensor in data.tensors]


@dataclass(frozen=True)
class Told:
    """Batches by hand: the script tells the model what each one is.

    Args:
        num_batches: how many.
        items: whether weights are tokens.
        idle: one rank in turn gets no sample, but two of the dataset that must not count.
        poisoned: what an idle rank gets is NaN.
        tokenless: one rank in turn gets sequences of length 0 beside the others' samples.
        least: smallest local batch, of two ranks: a compiler has graphs of its own for a batch of 1.
    """

    num_batches: int = NUM_STEPS
    items: bool = False
    idle: bool = False
    poisoned: bool = False
    tokenless: bool = False
    least: int = 1

    def __call__(self, run: _Script, model: Any, rank: int, world_size: int, data: TensorDataset) -> Iterator[Batch]:
        for step, whole in enumerate(self.whole(data)):
            sizes = split_of(len(whole[0]), world_size, step, self.least)
            lazy = step % world_size
            if self.idle:
                sizes[(lazy + 1) % world_size] += sizes[lazy]
                sizes[lazy] = 0
            if self.tokenless:
                run.silent.append(slice(sum(sizes[:lazy]), sum(sizes[: lazy + 1])))
                whole[-1][run.silent[-1]] = 0
            start = sum(sizes[:rank])
            mine = [tensor[start : start + sizes[rank]] for tensor in whole]
            yield self._tell(model, mine, sum(sizes), data)

    def _tell(self, model: Any, mine: Batch, total: int, data: TensorDataset) -> Batch:
        local = len(mine[0])
        if not self.items and local > 0:
            model.use_batch(local, total)
            return mine
        items = (num_tokens(mine) if local else 0.0) if self.items else None
        step = model.engine.loop.next_step
        entry = BatchEntry(step=step, local_batch=local, total_batch=total, is_padding=local == 0, items=items)
        model.engine.loop.hand_out(entry)
        if local > 0:
            return mine
        return [tensor * math.nan for tensor in take(data, [0, 1])] if self.poisoned else take(data, [0, 1])

    def whole(self, data: TensorDataset, run: _Script | None = None) -> Iterator[Batch]:
        position = 0
        for step in range(self.num_batches):
            total = TOTALS[step % len(TOTALS)]
            batch = take(data, [index % len(data) for index in range(position, position + total)])
            if run is not None and run.silent:
                batch[-1][run.silent[step]] = 0
            yield batch
            position += total


class ScriptedPlanner:
    """Another plan at every window, taken from a list in turn; measures nothing."""

    noise = Noise(signal_sqnorm=math.nan, noise_trace=math.nan)  # not known

    def __init__(self, splits: Sequence[Sequence[int]]) -> None:
        self._splits = [tuple(split) for split in splits]
        self._num_seen = 0

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        self._num_seen += window is not None
        split = self._splits[self._num_seen % len(self._splits)]
        return Decision(plan=make_plan(step, split, reason="by script"), noise=self.noise, phase="scripted")

    def state_dict(self) -> dict[str, Any]:
        return {"num_seen": self._num_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_seen = state["num_seen"]


@dataclass(frozen=True)
class Loaded:
    """Batches of the real loader, under a planner that changes the split, and the total if `totals` do.

    The dataset's length leaves a last batch of one sample where the total is 12. `ahead`: a batch is used when the next
    of its epoch has been fetched.
    """

    totals: tuple[int, ...] = (12, 12, 12)
    length: int = 61
    num_batches: int = 30
    ahead: bool = False
    keywords: tuple[tuple[str, Any], ...] = ()

    def planner(self, world_size: int) -> ScriptedPlanner:
        return ScriptedPlanner([split_of(total, world_size, index) for index, total in enumerate(self.totals)])

    def __call__(self, run: _Script, model: Any, rank: int, world_size: int, data: TensorDataset) -> Iterator[Batch]:
        largest = None if len(set(self.totals)) == 1 else max(self.totals)
        loader = HeteroDataLoader(
            data, model=model, batch_size=self.totals[0], max_batch_size=largest, **dict(self.keywords)
        )
        while len(run.sizes) < self.num_batches:
            batches = self._noted(run, model, loader)
            yield from looking_ahead(batches) if self.ahead else batches

    def _noted(self, run: _Script, model: Any, loader: HeteroDataLoader) -> Iterator[Batch]:
        for batch in loader:
            run.sizes.append(model.engine.loop.queue.newest.total_batch)
            run.splits.add(model.engine.loop.plan_at(model.engine.loop.next_step - 1).local_batches)
            yield batch
            if len(run.sizes) == self.num_batches:
                return

    def whole(self, data: TensorDataset, run: _Script) -> Iterator[Batch]:
        """The batches that the ranks had together, from their sizes and the loader's own order."""
        epoch, position = 0, 0
        for total in run.sizes:
            order = epoch_order(len(data), seed=0, epoch=epoch, shuffle=True)
            yield take(data, order[position : position + total].tolist())
            position += total
            if position == len(data):
                epoch, position = epoch + 1, 0


class _Script:
    """What the ranked run leaves for the other: total batches, splits that were in force, sequences without tokens."""

    def __init__(self) -> None:
        self.silent: list[slice] = []
        self.sizes: list[int] = []
        self.splits: set[tuple[int, ...]] = set()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One script; `keywords` are HeteroDataParallel's."""

    net: Callable[[], nn.Module] = mlp
    loss: Loss = square_loss
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    loop: Callable[[Run], None] = plain_loop
    feed: Told | Loaded = field(default_factory=Told)
    data: Callable[..., TensorDataset] = regression
    scaler: Callable[[], Any] | None = None
    compile_net: str | None = None
    compile_model: str | None = None
    dynamic: bool | None = None  # torch.compile's
    keywords: dict[str, Any] = field(default_factory=dict)

    def error(self, dtype: torch.dtype, rank: int, world_size: int) -> float:
        """The worst relative difference of a parameter or a note between the two runs."""
        length = self.feed.length if isinstance(self.feed, Loaded) else 400
        data, script = self.data(dtype, length), _Script()
        ranked = self._ranked(dtype, data, script, rank, world_size)
        alone = self.alone(dtype, data, script)
        if isinstance(self.feed, Loaded) and world_size > 1:
            assert len(script.splits) > 1, f"the plan never changed: {script.splits}"
        return worst_difference([*ranked], [*alone])

    def _ranked(
        self, dtype: torch.dtype, data: TensorDataset, script: _Script, rank: int, world_size: int
    ) -> list[torch.Tensor]:
        net = fresh(self.net, dtype)
        optimizer = self.optimizer(net)
        keywords = {"bucket_cap_mb": 0.0005, "lr_rule": "none", **self.keywords}
        if isinstance(self.feed, Loaded):
            keywords.setdefault("policy", self.feed.planner(world_size))
        scaler = self.scaler() if self.scaler else None
        if self.compile_net or self.compile_model:
            torch._dynamo.reset()
            torch._inductor.config.compile_threads = 1
            del keywords["bucket_cap_mb"]  # DDP's own optimizer for dynamo asserts that it is 1 at least
        wrapped = torch.compile(net, backend=self.compile_net) if self.compile_net else net
        model: Any = HeteroDataParallel(wrapped, optimizer, grad_scaler=scaler, **keywords)
        batches = self.feed(script, model, rank, world_size, data)
        model = torch.compile(model, backend=self.compile_model, dynamic=self.dynamic) if self.compile_model else model
        run = Run(model, optimizer, self.loss, batches, scaler, rank, ranked=True)
        self.loop(run)
        return [*(p.detach() for p in net.parameters()), *run.notes]

    def alone(self, dtype: torch.dtype, data: TensorDataset, script: _Script) -> list[torch.Tensor]:
        net = fresh(self.net, dtype)
        scaler = self.scaler() if self.scaler else None
        run = Run(net, self.optimizer(net), self.loss, self.feed.whole(data, script), scaler, 0, ranked=False)
        self.loop(run)
        return [*(p.detach() for p in net.parameters()), *run.notes]


def fresh(net: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """The same first parameters every time, rounded from float64."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return net().to(DEVICE, dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def worst_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """max|a-b| / max|b| of the worst pair of tensors; infinite where ours is not finite."""
    assert len(ours) == len(theirs) > 0
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.isfinite(b).all()
        if not torch.isfinite(a).all():
            return math.inf
        worst = max(worst, float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30))
    return worst


def scaler_1024() -> Any:
    return torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=8)


TOKENS = {"loss": token_loss, "data": sequences}
COUNTED = (("item_count", num_tokens),)
TWICE, THRICE = Told(num_batches=2 * NUM_STEPS), Told(num_batches=3 * NUM_STEPS)

# What must hold on any number of ranks.
CASES: dict[str, Case] = {
    "sgd with momentum": Case(),
    "adamw": Case(optimizer=adamw),
    "loss weighting": Case(keywords={"weighting": "loss"}),
    "static graph": Case(keywords={"static_graph": True}),
    "gradients as bucket views": Case(keywords={"gradient_as_bucket_view": True}),
    "gradients as bucket views, zeroed in place": Case(loop=zeroing_loop, keywords={"gradient_as_bucket_view": True}),
    "unused parameters": Case(net=Branching, keywords={"find_unused_parameters": True}),
    "several param groups": Case(optimizer=grouped),
    "gradient clipping": Case(loop=clipping_loop),
    "grad scaler": Case(loop=scaler_loop, scaler=scaler_1024),
    "weighted mean of losses": Case(loop=mean_loss_loop),
    "looking one batch ahead": Case(loop=lookahead_loop),
    "outputs in a dict and a tuple": Case(net=Heads, loss=heads_loss),
    "accumulation": Case(loop=accumulating_loop, feed=THRICE),
    "ragged accumulation": Case(loop=ragged_loop),
    "item weights": Case(feed=Told(items=True), **TOKENS),
    "a rank with zero samples": Case(feed=Told(idle=True)),
    "a rank with zero samples, nan there": Case(feed=Told(idle=True, poisoned=True)),
    "loader": Case(feed=Loaded()),
    "loader, totals change": Case(feed=Loaded(totals=(12, 16, 14))),
    "loader, looking one batch ahead": Case(feed=Loaded(totals=(12, 16, 14), ahead=True)),
    "loader, accumulation": Case(feed=Loaded(totals=(12, 16, 14), length=120, num_batches=60), loop=accumulating_loop),
    "loader, ragged accumulation": Case(feed=Loaded(totals=(12, 16, 14)), loop=ragged_loop),
    "loader, item weights": Case(feed=Loaded(keywords=COUNTED), **TOKENS),
}
# Crosses of these, and what else models and loops do: on three ranks.
MORE_CASES: dict[str, Case] = {
    "loss weighting, adamw": Case(optimizer=adamw, keywords={"weighting": "loss"}),
    "static graph, loss weighting": Case(keywords={"static_graph": True, "weighting": "loss"}),
    "unused parameters, adamw, loss weighting": Case(
        net=Branching, optimizer=adamw, keywords={"find_unused_parameters": True, "weighting": "loss"}
    ),
    "weighted mean of losses over items": Case(loop=mean_loss_loop, feed=Told(items=True), **TOKENS),
    "evaluation in between": Case(loop=evaluating_loop),
    "outputs in a dict and a tuple, loss weighting": Case(net=Heads, loss=heads_loss, keywords={"weighting": "loss"}),
    "outputs in a dataclass": Case(net=Answering, loss=answer_loss),
    "outputs in a dataclass, loss weighting": Case(net=Answering, loss=answer_loss, keywords={"weighting": "loss"}),
    "outputs in a dict of its own class, accumulation": Case(
        net=Naming, loss=naming_loss, loop=accumulating_loop, feed=THRICE
    ),
    "outputs in a dict of its own class, ragged accumulation": Case(net=Naming, loss=naming_loss, loop=ragged_loop),
    "loss computed inside": Case(net=LossInside, loss=inside_loss, keywords={"weighting": "loss"}),
    "complex outputs": Case(net=Complex, loss=complex_loss, keywords={"weighting": "loss"}),
    "outputs changed in place": Case(loss=inplace_loss),
    "a penalty on parameters": Case(loss=penalised_loss),
    "a penalty on parameters, loss weighting": Case(loss=penalised_loss, keywords={"weighting": "loss"}),
    "accumulation, each batch reduced": Case(loop=reducing_loop, feed=THRICE),
    "accumulation, each batch reduced, loss weighting, padding": Case(
        feed=Loaded(num_batches=60), loop=reducing_loop, keywords={"weighting": "loss"}
    ),
    "loader, accumulation, each batch reduced, padding": Case(feed=Loaded(num_batches=60), loop=reducing_loop),
    "accumulation, synchronisation toggled by hand": Case(loop=toggling_loop, feed=THRICE),
    "accumulation, no_sync around forwards only": Case(loop=forward_only_loop, feed=THRICE),
    "two forwards before a backward": Case(loss=twofold_loss),
    "two forwards before a backward, loss weighting": Case(loss=twofold_loss, keywords={"weighting": "loss"}),
    "two forwards, the first under no_sync": Case(loop=Shared(unsynced=0)),
    "two forwards, the second under no_sync": Case(loop=Shared(unsynced=1)),
    "two forwards, the first under no_sync, which pile up": Case(loop=Shared(unsynced=0, piles=True), feed=TWICE),
    "two forwards, the second under no_sync, which pile up": Case(loop=Shared(unsynced=1, piles=True), feed=TWICE),
    "a forward that is logged, under no_sync": Case(loop=Shared(unsynced=1, logged=1)),
    "a forward that is logged, under no_sync, first": Case(loop=Shared(unsynced=0, logged=0)),
    "two batches in one backward, the first under no_sync": Case(loop=joint_loop, feed=Loaded()),
    "checkpoints": Case(net=partial(Checkpointed, use_reentrant=False)),
    "reentrant checkpoints": Case(net=partial(Checkpointed, use_reentrant=True)),
    "a plain DDP inside": Case(net=nested),
    "two optimizers": Case(optimizer=both),
    "loader, two optimizers, accumulation": Case(
        optimizer=both, feed=Loaded(totals=(12, 16, 14), length=120, num_batches=60), loop=accumulating_loop
    ),
    "accumulation, loss weighting": Case(loop=accumulating_loop, feed=THRICE, keywords={"weighting": "loss"}),
    "accumulation, gradients as bucket views": Case(
        loop=accumulating_loop, feed=THRICE, keywords={"gradient_as_bucket_view": True}
    ),
    "ragged accumulation, adamw, loss weighting": Case(
        loop=ragged_loop, optimizer=adamw, keywords={"weighting": "loss"}
    ),
    "ragged accumulation within accumulation": Case(loop=ragged_accumulating_loop, feed=THRICE),
    "item weights, loss weighting": Case(feed=Told(items=True), keywords={"weighting": "loss"}, **TOKENS),
    "item weights, accumulation": Case(
        feed=Told(items=True, num_batches=3 * NUM_STEPS), loop=accumulating_loop, **TOKENS
    ),
    "item weights, a rank without items": Case(feed=Told(items=True, tokenless=True), **TOKENS),
    "a rank with zero samples, nan there, loss weighting": Case(
        feed=Told(idle=True, poisoned=True), keywords={"weighting": "loss"}
    ),
    "a rank with zero samples, nan there, grad scaler": Case(
        feed=Told(idle=True, poisoned=True), loop=scaler_loop, scaler=scaler_1024
    ),
    "a rank with zero samples, accumulation": Case(
        feed=Told(idle=True, num_batches=3 * NUM_STEPS), loop=accumulating_loop
    ),
    "a rank with zero samples, ragged accumulation": Case(feed=Told(idle=True), loop=ragged_loop),
    "a rank with zero samples, weighted mean": Case(feed=Told(idle=True, poisoned=True), loop=mean_loss_loop),
    "a rank with zero samples, item weights": Case(feed=Told(items=True, idle=True, poisoned=True), **TOKENS),
    "a penalty on slopes": Case(loss=slope_loss),
    "a penalty on slopes, loss weighting": Case(loss=slope_loss, keywords={"weighting": "loss"}),
    "a penalty on slopes, a rank with zero samples, loss weighting": Case(
        loss=slope_loss, feed=Told(idle=True), keywords={"weighting": "loss"}
    ),
    "a penalty on slopes, accumulation": Case(loss=slope_loss, loop=accumulating_loop, feed=THRICE),
    "a penalty on slopes, ragged accumulation": Case(loss=slope_loss, loop=ragged_loop),
    "loader, adamw": Case(feed=Loaded(), optimizer=adamw),
    "loader, a worker": Case(feed=Loaded(keywords=(("num_workers", 1), ("multiprocessing_context", "fork")))),
    "loader, a sum": Case(feed=Loaded(length=60), loss=sum_loss, keywords={"weighting": "none"}),
    "loader, a sum, accumulation, padding": Case(
        feed=Loaded(num_batches=60), loss=sum_loss, loop=accumulating_loop, keywords={"weighting": "none"}
    ),
    "loader, a sum, accumulation, each batch reduced, padding": Case(
        feed=Loaded(num_batches=60), loss=sum_loss, loop=reducing_loop, keywords={"weighting": "none"}
    ),
    "loader, a sum, in parts": Case(
        feed=Loaded(length=60), loss=sum_loss, loop=ragged_loop, keywords={"weighting": "none"}
    ),
    "loader, a sum, every rank one item": Case(feed=Loaded(length=60, keywords=(("item_count", one),)), loss=sum_loss),
    "loader, accumulation, padding": Case(feed=Loaded(num_batches=60), loop=accumulating_loop),
    "loader, grad scaler": Case(feed=Loaded(), loop=scaler_loop, scaler=scaler_1024),
    "loader, item weights, ragged accumulation": Case(feed=Loaded(keywords=COUNTED), loop=ragged_loop, **TOKENS),
    "loader, looking one batch ahead of the epoch's end": Case(feed=Loaded(totals=(12, 16, 14)), loop=lookahead_loop),
}
COMPILE_CASES: dict[str, Case] = {
    "compiled after wrapping": Case(net=Written, compile_model="aot_eager"),
    "compiled before wrapping": Case(net=Written, compile_net="aot_eager"),
    "compiled after wrapping, loss weighting": Case(net=Written, compile_model="eager", keywords={"weighting": "loss"}),
    "compiled after wrapping, accumulation": Case(
        net=Written, compile_model="eager", loop=accumulating_loop, feed=THRICE
    ),
    "compiled after wrapping, loader": Case(net=Written, compile_model="eager", feed=Loaded(totals=(12, 16, 14))),
}
INDUCTOR_CASES: dict[str, Case] = {
    "compiled by inductor": Case(net=Written, compile_model="inductor", dynamic=True, feed=Told(least=2))
}
ALL_CASES = CASES | MORE_CASES | COMPILE_CASES | INDUCTOR_CASES
ALONE_CASES = (
    "sgd with momentum",
    "adamw",
    "loss weighting",
    "accumulation",
    "ragged accumulation",
    "item weights",
    "loader, totals change",
    "loader, item weights",
)
FLOAT32_ONLY = ("grad scaler", "compiled by inductor")


def dtypes_of(name: str) -> list[str]:
    """Both for what the promise names; for crosses of it the sharper one."""
    if name.endswith(FLOAT32_ONLY):
        return ["float32"]
    crossed = name in MORE_CASES or (name in COMPILE_CASES and "," in name)
    return ["float64"] if crossed else [*DTYPES]


# What runs on the ranks.


def run_cases(rank: int, world_size: int, names: Sequence[str]) -> dict[tuple[str, str], float | str]:
    """The error of each case and dtype. One that raises is the last: ranks may then be out of step."""
    errors: dict[tuple[str, str], float | str] = {}
    for name in names:
        for dtype in dtypes_of(name):
            case = ALL_CASES[name]
            try:
                errors[name, dtype] = case.error(DTYPES[dtype], rank, world_size)
            except Exception:
                errors[name, dtype] = traceback.format_exc()
                dist.destroy_process_group()  # or the harness would wait for ranks that cannot answer
                return errors
    return errors


def run_cases_alone(rank: int, world_size: int, names: Sequence[str]) -> dict[tuple[str, str], float | str]:
    """As in a plain `python script`: nobody has made a process group."""
    dist.destroy_process_group()
    return run_cases(rank, world_size, names)


def graphs(rank: int, world_size: int) -> list[list[str]]:
    """What is called in each graph that dynamo makes of a wrapped model, over 20 steps of changing size."""
    seen: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    torch._dynamo.reset()
    net = fresh(Written, torch.float32)
    optimizer = sgd(net)
    model: Any = HeteroDataParallel(net, optimizer, lr_rule="none")
    batches = Told()(_Script(), model, rank, world_size, regression(torch.float32))
    plain_loop(Run(torch.compile(model, backend=note), optimizer, square_loss, batches, None, rank, ranked=True))
    return seen


def norms(rank: int, world_size: int) -> list[list[float]]:
    """Relative errors of the squared norms, this rank's and the whole batch's, at steps of many buckets."""
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(30))).double().to(DEVICE)
    reference = copy.deepcopy(net)
    model = HeteroDataParallel(net, sgd(net), bucket_cap_mb=0.0005)
    errors, sizes = [], [3, 9]
    for step in range(10):
        torch.manual_seed(step)
        parts = torch.randn(12, 64, dtype=torch.float64).to(DEVICE).split(sizes)
        squares = []
        for part in (parts[rank], torch.cat(parts)):
            reference.zero_grad()
            reference(part).square().mean().backward()
            squares.append(sum(float(p.grad.square().sum()) for p in reference.parameters()))
        net.zero_grad()
        model.use_batch(sizes[rank], 12)
        model(parts[rank]).square().mean().backward()
        now = model.engine.loop.step
        noted = now.norms()
        read = noted.get("global_sqnorm", [])  # of every other bucket: ranks share them
        assert len(read) == len(range(rank, len(noted["local_sqnorm"]), world_size))
        whole = torch.zeros((), dtype=torch.float64, device=DEVICE) + sum(read)
        dist.all_reduce(whole)
        taken = [float(sum(noted["local_sqnorm"])), float(whole)]
        errors.append([found / truth - 1 for found, truth in zip(taken, squares, strict=True)])
    return errors


def two_models(rank: int, world_size: int) -> dict[str, float]:
    """Two wrapped models trained in turn, one by hand and one by a loader: the worse error of both, by dtype."""
    cases = (Case(), Case(net=Heads, loss=heads_loss, optimizer=adamw, feed=Loaded(num_batches=NUM_STEPS)))
    return {name: max(_interleaved(cases, dtype, rank, world_size)) for name, dtype in DTYPES.items()}


def _interleaved(cases: Sequence[Case], dtype: torch.dtype, rank: int, world_size: int) -> list[float]:
    runs, scripts, data = [], [_Script() for _ in cases], regression(dtype, 61)
    for case, script in zip(cases, scripts, strict=True):
        net = fresh(case.net, dtype)
        optimizer, policy = case.optimizer(net), Loaded().planner(world_size)
        model = HeteroDataParallel(net, optimizer, policy=policy, lr_rule="none")
        batches = case.feed(script, model, rank, world_size, data)
        runs.append(Run(model, optimizer, case.loss, batches, None, rank, ranked=True))
    for batches in zip(*(run.batches for run in runs), strict=True):
        for run, batch in zip(runs, batches, strict=True):
            plain_loop(replace(run, batches=iter([batch])))
    alone = [case.alone(dtype, data, script) for case, script in zip(cases, scripts, strict=True)]
    ours = [[p.detach() for p in run.model.parameters()] for run in runs]
    return [worst_difference(a, b) for a, b in zip(ours, alone, strict=True)]


def even_and_raw(rank: int, world_size: int) -> dict[str, float]:
    """Error of an even plan against raw DDP on the same slices, in float32, by optimizer."""
    errors = {}
    for make_optimizer in (sgd, adamw):
        ours, theirs = fresh(mlp, torch.float32), fresh(mlp, torch.float32)
        our_optimizer, their_optimizer = make_optimizer(ours), make_optimizer(theirs)
        model = HeteroDataParallel(ours, our_optimizer, policy="even", bucket_cap_mb=0.0005)
        raw = DistributedDataParallel(theirs, bucket_cap_mb=0.0005)
        loader = HeteroDataLoader(regression(torch.float32, 240), model=model, batch_size=12)
        for batch in loader:
            for net, optimizer in ((model, our_optimizer), (raw, their_optimizer)):
                optimizer.zero_grad()
                square_loss(net, batch).backward()
                optimizer.step()
        pairs = ([p.detach() for p in net.parameters()] for net in (ours, theirs))
        errors[make_optimizer.__name__] = worst_difference(*pairs)
    return errors


def compressed(rank: int, world_size: int) -> dict[str, float]:
    """Error of one step's gradient under DDP's compression wrappers."""
    errors = {}
    for wrapper in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper):
        net, reference = fresh(mlp, torch.float32), fresh(mlp, torch.float32)
        model = HeteroDataParallel(net, sgd(net), comm_wrapper=wrapper)
        data = regression(torch.float32)
        square_loss(model, next(Told()(_Script(), model, rank, world_size, data))).backward()
        square_loss(reference, next(Told().whole(data))).backward()
        errors[wrapper.__name__] = worst_difference(*([p.grad for p in m.parameters()] for m in (net, reference)))
    return errors


class NoisyPlanner(ScriptedPlanner):
    """Also claims that the noise grows."""

    noise = Noise(signal_sqnorm=2.0, noise_trace=30.0)

    def decide(self, window: StepWindow | None, job: Job, step: int) -> Decision:
        if window is not None:
            self.noise = replace(self.noise, noise_trace=self.noise.noise_trace + 7.0)
        return super().decide(window, job, step)


@dataclass(frozen=True, kw_only=True)
class RateNote:
    """One optimizer step: the plan's total batch, the rates inside of the step and outside, and what they rest on."""

    total_batch: int
    inside: tuple[float, ...]
    outside: tuple[float, ...]
    noise_scale: float


def rates(rank: int, world_size: int, policy: str, optimizer_name: str) -> tuple[list[RateNote], float]:
    """The rates of 40 steps whose total batch changes from 12, and the error of one process that uses these rates."""
    feed, data, script = Loaded(totals=(12, 24, 16), num_batches=40), regression(torch.float64, 61), _Script()
    net, notes = fresh(mlp, torch.float64), []
    optimizer = {"grouped": grouped, "adamw": adamw}[optimizer_name](net)
    splits = [split_of(total, world_size, index) for index, total in enumerate(feed.totals)]
    planner = NoisyPlanner(splits) if policy == "scripted" else policy
    model = HeteroDataParallel(net, optimizer, policy=planner)
    outside = tuple(group["lr"] for group in optimizer.param_groups)

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        inside = tuple(group["lr"] for group in optimizer.param_groups)
        notes.append(
            RateNote(
                total_batch=model.plan.total_batch, inside=inside, outside=outside, noise_scale=float(model.noise_scale)
            )
        )

    optimizer.register_step_pre_hook(note)
    for batch in feed(script, model, rank, world_size, data):
        outside = tuple(group["lr"] for group in optimizer.param_groups)
        optimizer.zero_grad()
        square_loss(model, batch).backward()
        optimizer.step()
    alone = fresh(mlp, torch.float64)
    optimizer = {"grouped": grouped, "adamw": adamw}[optimizer_name](alone)
    for batch, one in zip(feed.whole(data, script), notes, strict=True):
        for group, rate in zip(optimizer.param_groups, one.inside, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        square_loss(alone, batch).backward()
        optimizer.step()
    return notes, worst_difference(*([p.detach() for p in m.parameters()] for m in (net, alone)))
