"""What the ranks of `test_in_hand` run: forwards whose inputs do not show how many samples they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from told import Warned, collecting_warnings
from torch import nn
from torch.utils.data import Dataset
from training_cases import Numbered, ScriptedPlanner, TinyNet, make_model, take_step

from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel, attach
from cannikin.runtime.passes import epoch_order

SCRIPT = [(4, 2), (2, 4), (5, 1), (6, 3), (1, 5)]  # totals change too
NUM_SAMPLES = 121  # a last batch shorter than any plan's


class Net(nn.Module):
    """Takes samples in a dimension of choice; sums over time."""

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features).sum(1 - self.dim)[:, 0]


class Series(Dataset):
    """Sample i: four moments of three numbers, and a target."""

    def __init__(self, length: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.features = torch.randn(length, 4, 3, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(length, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[index], self.targets[index]


Backward = Callable[[Any, torch.Tensor, torch.Tensor], None]


def plain(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    nn.functional.mse_loss(model(features), targets).backward()


def time_first(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    """Samples in dimension 1, of a model that does not know it."""
    if isinstance(model, HeteroDataParallel):
        model.use_batch()
    plain(model, features.transpose(0, 1), targets)


def time_first_in_parts(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    """Samples in dimension 1, of a model that knows it."""
    features = features.transpose(0, 1)
    if not isinstance(model, HeteroDataParallel):
        plain(model, features, targets)
        return
    for part in model.micro_batches((features, targets), num_parts=2):
        plain(model, *part)


def two_views(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    if isinstance(model, HeteroDataParallel):
        model.use_batch()
    plain(model, torch.cat([features, features + 0.1]), targets.repeat(2))


def two_views_by_numbers(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    if isinstance(model, HeteroDataParallel):
        model.use_batch(2 * model.local_batch, 2 * model.total_batch)
    plain(model, torch.cat([features, features + 0.1]), targets.repeat(2))


def three_views_by_numbers(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    if isinstance(model, HeteroDataParallel):
        model.use_batch(3 * model.local_batch, 3 * model.total_batch)
    plain(model, torch.cat([features, features + 0.1, features - 0.1]), targets.repeat(3))


def sharpness_aware(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    """SAM: a second pass on the same batch, at weights that the first one's gradient has moved."""
    plain(model, features, targets)
    moves = [0.05 * parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.add_(move)
    model.zero_grad()
    if isinstance(model, HeteroDataParallel):
        model.use_batch()
    plain(model, features, targets)
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.sub_(move)


def residual_first(model: Any, features: torch.Tensor, targets: torch.Tensor, *, says_so: bool = False) -> None:
    """A loss of slopes, by autograd.grad, and one of values on other inputs, in one backward: physics-informed."""
    inside = features.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
    if says_so and isinstance(model, HeteroDataParallel):
        model.use_batch()
    (slope.square().mean() + nn.functional.mse_loss(model(0.5 * features), targets)).backward()


def attacked(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    """Clean and attacked samples in one backward, the attack found by autograd.grad: TRADES."""
    clean = features.clone().requires_grad_()
    loss = nn.functional.mse_loss(model(clean), targets)
    (slope,) = torch.autograd.grad(loss, clean, retain_graph=True)
    (loss + nn.functional.mse_loss(model(features + 0.1 * slope.sign()), targets)).backward()


def attacked_while_frozen(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    """The attack is found by backward(), in the very first forward too, while all parameters are frozen."""
    clean = features.clone().requires_grad_()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    nn.functional.mse_loss(model(clean), targets).backward()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    plain(model, features + 0.1 * clean.grad.sign(), targets)


def slopes_of_weights(model: Any, features: torch.Tensor, targets: torch.Tensor) -> None:
    """The gradient is asked for, such as for its norm, and then added to the weights' by another backward."""
    loss = nn.functional.mse_loss(model(features), targets)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    (loss + nn.functional.mse_loss(model(2.0 * features), targets)).backward()


def fresh(dim: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net = Net(dim).double()
    return net, torch.optim.SGD(net.parameters(), lr=0.02)


def worst_error(rank: int, backward: Backward, *, dim: int = 0, batch_dim: int = 0) -> tuple[float, int]:
    """Error of the gradient against one process on the union of samples, in two epochs; and how many splits it saw."""
    data = Series()
    net, optimizer = fresh(dim)
    model = HeteroDataParallel(
        net, optimizer, policy=ScriptedPlanner(SCRIPT), lr_rule="none", batch_dim=batch_dim, bucket_cap_mb=0.0001
    )
    loader = HeteroDataLoader(data, model=model, batch_size=6, max_batch_size=9)
    alone, alone_optimizer = fresh(dim)
    splits, worst = set(), 0.0
    for epoch in range(2):
        order, position = epoch_order(len(data), seed=0, epoch=epoch, shuffle=True).tolist(), 0
        for features, targets in loader:
            total = model.total_batch
            mine = 0 if loader.is_padding else len(targets)
            assert model.local_batch == mine
            splits.add((mine, total))
            indices = order[position : position + total]
            position += total
            pairs = [(model, optimizer, features, targets)]
            pairs.append((alone, alone_optimizer, data.features[indices], data.targets[indices]))
            for one, its_optimizer, x, y in pairs:
                its_optimizer.zero_grad()
                backward(one, x, y)
            for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
                worst = max(worst, float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
            optimizer.step()
            alone.load_state_dict(net.state_dict())
        assert position == len(data)
    return worst, len(splits)


def progress_of(rank: int, backward: Backward) -> float:
    """What a pass of three batches is worth, at twice the initial batch; the last is shorter than the plan's."""
    net, optimizer = fresh(int(backward is time_first))
    model = HeteroDataParallel(net, optimizer, policy=ScriptedPlanner([(8, 4)]))
    for features, targets in HeteroDataLoader(Series(28), model=model, batch_size=6, max_batch_size=12):
        optimizer.zero_grad()
        backward(model, features, targets)
        optimizer.step()
    return model.progress


def pairs(rank: int, script: Sequence[tuple[int, ...]]) -> tuple[float, float, list[Warned]]:
    """Two batches of the loader in each backward: worst error of the gradient, progress, and what was warned of."""
    data = Series(96)
    net, optimizer = fresh(0)
    alone, _ = fresh(0)
    model = HeteroDataParallel(net, optimizer, policy=ScriptedPlanner(script), lr_rule="none")
    order, position, worst = epoch_order(len(data), seed=0, epoch=0, shuffle=True).tolist(), 0, 0.0
    loader = HeteroDataLoader(data, model=model, batch_size=6)
    with collecting_warnings() as found:
        batches = iter(loader)
        for first in batches:
            optimizer.zero_grad()
            sum(nn.functional.mse_loss(model(x), y) for x, y in (first, next(batches))).backward()
            alone.zero_grad()
            for begin in (position, position + 6):
                indices = order[begin : begin + 6]
                nn.functional.mse_loss(alone(data.features[indices]), data.targets[indices]).backward()
            position += 12
            for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
                worst = max(worst, float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
            optimizer.step()
            alone.load_state_dict(net.state_dict())
    return worst, model.progress, found


def labelled_and_not(rank: int, **keywords: Any) -> float:
    """A batch of the loader's and one of the script's own, split otherwise, in one backward: FixMatch."""
    data, own = Series(48), Series(20)
    net, optimizer = fresh(0)
    alone, _ = fresh(0)
    model = HeteroDataParallel(net, optimizer, policy=ScriptedPlanner([(4, 2)]), lr_rule="none", **keywords)
    order, worst = epoch_order(len(data), seed=0, epoch=0, shuffle=True).tolist(), 0.0
    for step, (features, targets) in enumerate(HeteroDataLoader(data, model=model, batch_size=6)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        model.use_batch(3, 6)
        (loss + model(own.features[3 * rank : 3 * rank + 3]).square().mean()).backward()
        indices = order[6 * step : 6 * step + 6]
        alone.zero_grad()
        loss = nn.functional.mse_loss(alone(data.features[indices]), data.targets[indices])
        (loss + alone(own.features[:6]).square().mean()).backward()
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            worst = max(worst, float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
    return worst


# What is said


def told_the_plans_total(rank: int) -> None:
    """`use_batch(len(x), model.plan.total_batch)`, wrong on a short last batch."""
    model, _ = make_model()
    for features, targets, _ in HeteroDataLoader(Numbered(16), model=model, batch_size=6, local_batches=[4, 2]):
        model.use_batch(len(features), model.plan.total_batch)
        nn.functional.mse_loss(model(features), targets).backward()


def told_too_small_a_total(rank: int) -> None:
    """A total of the plan before, on every rank: no rank alone can know that nobody has left samples out."""
    model, optimizer = make_model(policy="even")
    for features, targets, _ in HeteroDataLoader(Numbered(96), model=model, batch_size=6):
        model.use_batch(len(features), 5)
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()


class Watching(ScriptedPlanner):
    """Remembers the local batches that it was shown."""

    def __init__(self, script: Sequence[tuple[int, ...]]) -> None:
        super().__init__(script)
        self.seen: set[tuple[int, ...]] = set()

    def decide(self, window: Any, job: Any, step: int) -> Any:
        self.seen |= set() if window is None else set(map(tuple, window.local_batches.tolist()))
        return super().decide(window, job, step)


def measured_by_samples(rank: int) -> set[tuple[int, ...]]:
    """Local batches that times are told of, where the script's numbers count views."""
    net, optimizer = fresh(0)
    planner = Watching([(4, 2)])
    model = HeteroDataParallel(net, optimizer, policy=planner)
    for features, targets in HeteroDataLoader(Series(180), model=model, batch_size=6):
        three_views_by_numbers(model, features, targets)
        optimizer.step()
        optimizer.zero_grad()
    return planner.seen if rank == 0 else set()


def wrong_total_without_a_loader(rank: int) -> None:
    """The sum of unequal batches taken for so many times one's own."""
    model, optimizer = make_model()
    for _ in range(4):
        size = (4, 2)[rank]
        model.use_batch(size, 2 * size)
        take_step(model, optimizer, (torch.randn(size, 3), torch.randn(size, 1), None))


class Wrapped:
    """An object of the script's own, in which no tensor can be found."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Wrapping(TinyNet):
    def forward(self, features: torch.Tensor) -> Wrapped:
        return Wrapped(super().forward(features))


def hidden_outputs_that_accumulate(rank: int) -> None:
    net = Wrapping()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = HeteroDataParallel(net, optimizer, policy="even")
    with collecting_warnings():
        for number, (features, targets, _) in enumerate(HeteroDataLoader(Numbered(48), model=model, batch_size=6)):
            with model.no_sync() if number == 3 else nullcontext():
                nn.functional.mse_loss(model(features).value, targets).backward()
            optimizer.step()


def padding_under_sync_batch_norm(rank: int) -> list[str]:
    """What is warned of in a step in which rank 1 has no samples; torch has no SyncBatchNorm on a CPU."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 1))
    ddp = nn.parallel.DistributedDataParallel(net)
    net[1] = nn.SyncBatchNorm(3)  # DDP itself takes it on GPUs only
    engine = attach(ddp, torch.optim.SGD(net.parameters(), lr=0.1), policy="even")
    with collecting_warnings() as found:
        for features, *_ in HeteroDataLoader(Numbered(1), model=engine, batch_size=2):
            with suppress(ValueError, NotImplementedError, RuntimeError):
                ddp(features)
    return [warned.text for warned in found if "SyncBatchNorm" in warned.text]


def filtered_on_one_rank(rank: int) -> int:
    """Rank 0 leaves a sample out of every batch, and both ranks say so."""
    model, optimizer = make_model(policy="even")
    num_steps = 0
    for features, targets, _ in HeteroDataLoader(Numbered(96), model=model, batch_size=6):
        kept = slice(rank == 0, None)
        model.use_batch(len(features[kept]), model.total_batch - 1)
        nn.functional.mse_loss(model(features[kept]), targets[kept]).backward()
        optimizer.step()
        num_steps += 1
    return num_steps


def slices(rank: int) -> list[Warned]:
    """Each batch in two slices, by use_batch."""
    model, optimizer = make_model(policy="even")
    with collecting_warnings() as found:
        for features, targets, _ in HeteroDataLoader(Numbered(96), model=model, batch_size=12):
            total = model.total_batch
            for part in (slice(0, 4), slice(4, None)):
                model.use_batch(len(features[part]), total)
                nn.functional.mse_loss(model(features[part]), targets[part]).backward()
            optimizer.step()
    return found


def no_loader(rank: int) -> list[Warned]:
    """Batches of the script's own, for 40 steps."""
    model, optimizer = make_model()
    with collecting_warnings() as found:
        for _ in range(40):
            model.use_batch(3, 6)
            take_step(model, optimizer, (torch.randn(3, 3), torch.randn(3, 1), None))
    return found


def _training(loader: HeteroDataLoader, model: Any, optimizer: Any, skipped: Callable[[int], bool]) -> Iterator[int]:
    """Yield the local batch that each step of a loop was taken for, less what it should be; copies hide the batch."""
    for number, batch in enumerate(loader):
        if not skipped(number):
            take_step(model, optimizer, batch)
            yield model.engine.current_entry.local_batch - len(batch[0])


def skipping(rank: int) -> tuple[list[Warned], set[int], int]:
    """Batches left out at the start, as to resume, and in the middle, under plans that change."""
    model, optimizer = make_model(policy=ScriptedPlanner(SCRIPT))
    loader = HeteroDataLoader(Numbered(240), model=model, batch_size=6, max_batch_size=9)
    with collecting_warnings() as found:
        errors = set(_training(loader, model, optimizer, lambda number: number < 3 or number == 20))
    return found, errors, len(model.engine.loop.queue)


def skipping_copies(rank: int, *, says_so: bool, script: Sequence[tuple[int, ...]] = SCRIPT) -> int:
    """The same where forward gets copies, as on a GPU, which cannot be known again."""
    model, optimizer = make_model(policy=ScriptedPlanner(script))
    num_steps = 0
    for number, (features, targets, _) in enumerate(
        HeteroDataLoader(Numbered(240), model=model, batch_size=6, max_batch_size=9)
    ):
        if number < 3:
            if says_so:
                model.skip_batch()
            continue
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features.clone()), targets.clone()).backward()
        optimizer.step()
        num_steps += 1
    return num_steps


def passes_with_a_batch_left_out(rank: int, *, says_so: bool) -> tuple[int, float]:
    """How many passes `epochs(4)` makes of ten batches, of which one is left out in each, and the progress of them."""
    model, optimizer = make_model(policy="even")
    loader = HeteroDataLoader(Numbered(60), model=model, batch_size=6)
    num_passes = 0
    with collecting_warnings():
        for _ in model.epochs(4):
            num_passes += 1
            for number, batch in enumerate(loader):
                if number != 4:
                    take_step(model, optimizer, batch)
                elif says_so:
                    model.skip_batch()
    return num_passes, model.progress


def looking_ahead(rank: int) -> tuple[list[Warned], int]:
    """A loop that takes batches before it needs them leaves none out."""
    model, optimizer = make_model(policy=ScriptedPlanner(SCRIPT))
    loader = HeteroDataLoader(Numbered(240), model=model, batch_size=6, max_batch_size=9)
    num_steps = 0
    with collecting_warnings() as found:
        batches = iter(loader)
        waiting = [next(batches), next(batches)]
        while waiting:
            batch = waiting.pop(0)
            following = next(batches, None)
            waiting += [] if following is None else [following]
            take_step(model, optimizer, batch)
            assert model.engine.current_entry.local_batch == len(batch[0])
            num_steps += 1
    return found, num_steps


class Ragged(nn.Module):
    """Takes a list of sequences of unlike lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyNet()

    def forward(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([self.net(sequence).mean(0) for sequence in sequences])


def ragged_parts(rank: int) -> float:
    """Worst difference from one process of a loop over parts of lists with one item per sample."""
    torch.manual_seed(0)
    data = [(torch.randn(2 + i % 5, 3, dtype=torch.float64), {"target": torch.randn(1).double()}) for i in range(45)]
    nets = []
    for _ in range(2):
        torch.manual_seed(1)
        nets.append(Ragged().double())
    net, alone = nets
    optimizer, alone_optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in nets)
    model = HeteroDataParallel(net, optimizer, policy=ScriptedPlanner(SCRIPT), lr_rule="none")
    loader = HeteroDataLoader(data, model=model, batch_size=6, max_batch_size=9, collate_fn=as_lists)
    order, position, worst = epoch_order(len(data), seed=0, epoch=0, shuffle=True).tolist(), 0, 0.0

    def loss(one: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(one(batch[0]), torch.stack([target["target"] for target in batch[1]]))

    for batch in loader:
        total = model.total_batch
        optimizer.zero_grad()
        for part in model.micro_batches(batch, num_parts=2):
            loss(model, part).backward()
        optimizer.step()
        alone_optimizer.zero_grad()
        loss(alone, as_lists([data[index] for index in order[position : position + total]])).backward()
        alone_optimizer.step()
        position += total
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            worst = max(worst, float((ours - theirs).detach().norm() / theirs.detach().norm()))
    return worst


def as_lists(samples: list[Any]) -> tuple[list[Any], list[Any]]:
    """Collate as torchvision's detection reference does."""
    inputs, targets = zip(*samples, strict=True)
    return list(inputs), list(targets)


def parts_of_another_size(rank: int) -> None:
    model, _ = make_model()
    for batch in HeteroDataLoader(Numbered(24), model=model, batch_size=6, local_batches=[4, 2]):
        list(model.micro_batches({"features": batch[0], "weights": torch.eye(7)}, num_parts=2))
