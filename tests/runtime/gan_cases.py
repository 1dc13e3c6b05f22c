"""Ways of writing the loop of a GAN, each run by unequal ranks and by one process on the whole batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from parity_cases import Loaded, NoisyPlanner, _Script, fresh, split_of, worst_difference
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from cannikin.runtime.parallel import HeteroDataParallel, attach

softplus = nn.functional.softplus


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))


def samples(length: int) -> TensorDataset:
    """Real samples and the noise that goes with them, so that one process has the same."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randn(length, size, generator=generator, dtype=torch.float64) for size in (4, 3)))


@dataclass
class Gan:
    """The objects of a script."""

    gen: Any
    disc: Any
    opt_g: torch.optim.Optimizer
    opt_d: torch.optim.Optimizer
    batches: Iterator[Any]
    ranked: bool

    def no_sync(self) -> Any:
        return self.disc.no_sync() if self.ranked else nullcontext()


def step_generator(gan: Gan, fake: torch.Tensor) -> None:
    """Through the discriminator, whose gradients are thrown away."""
    gan.opt_g.zero_grad()
    softplus(-gan.disc(fake)).mean().backward()
    gan.opt_g.step()


def dcgan(gan: Gan) -> None:
    """Discriminator on real, on fake, step; then the generator: pytorch/examples' dcgan."""
    for real, noise in gan.batches:
        gan.opt_d.zero_grad()
        softplus(-gan.disc(real)).mean().backward()
        fake = gan.gen(noise)
        softplus(gan.disc(fake.detach())).mean().backward()
        gan.opt_d.step()
        step_generator(gan, fake)


def generator_first(gan: Gan) -> None:
    """The discriminator comes last, on both in one forward and one backward: twice the samples."""
    for real, noise in gan.batches:
        fake = gan.gen(noise)
        step_generator(gan, fake)
        gan.opt_d.zero_grad()
        scores = gan.disc(torch.cat([real, fake.detach()]))
        (softplus(-scores[: len(real)]).mean() + softplus(scores[len(real) :]).mean()).backward()
        gan.opt_d.step()


def two_forwards(gan: Gan) -> None:
    """The discriminator's two forwards go before its one backward: HiFi-GAN."""
    for real, noise in gan.batches:
        fake = gan.gen(noise)
        gan.opt_d.zero_grad()
        loss = (1 - gan.disc(real)).square().mean() + gan.disc(fake.detach()).square().mean()
        loss.backward()
        gan.opt_d.step()
        step_generator(gan, fake)


def two_forwards_one_unsynced(gan: Gan) -> None:
    """The same with real samples' forward under no_sync, so that their backward comes with that of the fake ones."""
    for real, noise in gan.batches:
        fake = gan.gen(noise)
        gan.opt_d.zero_grad()
        with gan.no_sync():
            scores = gan.disc(real)
        ((1 - scores).square().mean() + gan.disc(fake.detach()).square().mean()).backward()
        gan.opt_d.step()
        step_generator(gan, fake)


def penalised(gan: Gan) -> None:
    """R1 penalty on real samples in every other step."""
    for index, (real, noise) in enumerate(gan.batches):
        fake = gan.gen(noise)
        real = real.requires_grad_()
        scores = gan.disc(real)
        loss = softplus(-scores).mean() + softplus(gan.disc(fake.detach())).mean()
        if index % 2 == 0:
            (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
            loss = loss + 5.0 * slope.square().sum(dim=1).mean()
        gan.opt_d.zero_grad()
        loss.backward()
        gan.opt_d.step()
        step_generator(gan, fake)


def penalised_first(gan: Gan) -> None:
    """A gradient penalty between real and fake goes before their forwards: WGAN-GP."""
    for real, noise in gan.batches:
        fake = gan.gen(noise)
        between = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(gan.disc(between).sum(), between, create_graph=True)
        loss = gan.disc(fake.detach()).mean() - gan.disc(real).mean() + (slope.norm(dim=1) - 1).square().mean()
        gan.opt_d.zero_grad()
        loss.backward()
        gan.opt_d.step()
        step_generator(gan, fake)


def penalised_in_between(gan: Gan) -> None:
    """R1 right behind the real samples' forward, then the fake ones': StyleGAN2, in one backward."""
    for real, noise in gan.batches:
        fake = gan.gen(noise)
        real = real.requires_grad_()
        scores = gan.disc(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        loss = softplus(-scores).mean() + slope.square().sum(dim=1).mean() + softplus(gan.disc(fake.detach())).mean()
        gan.opt_d.zero_grad()
        loss.backward()
        gan.opt_d.step()
        step_generator(gan, fake)


def two_steps(gan: Gan) -> None:
    """Two steps of the discriminator per step of the generator, on the same batch."""
    for real, noise in gan.batches:
        for scale in (1.0, 0.5):
            with torch.no_grad():
                fake = gan.gen(noise)
            gan.opt_d.zero_grad()
            (softplus(-gan.disc(scale * real)).mean() + softplus(gan.disc(fake)).mean()).backward()
            gan.opt_d.step()
        step_generator(gan, gan.gen(noise))


def accumulating(gan: Gan) -> None:
    """The discriminator's first backward waits under no_sync for the second."""
    for real, noise in gan.batches:
        fake = gan.gen(noise)
        gan.opt_d.zero_grad()
        with gan.no_sync():
            softplus(-gan.disc(real)).mean().backward()
        softplus(gan.disc(fake.detach())).mean().backward()
        gan.opt_d.step()
        step_generator(gan, fake)


def accumulating_batches(gan: Gan) -> None:
    """The discriminator steps on every other batch; the generator learns through it all the while."""
    for index, (real, noise) in enumerate(gan.batches):
        last = index % 2 == 1
        with nullcontext() if last else gan.no_sync():
            fake = gan.gen(noise)
            (softplus(-gan.disc(real)).mean() + softplus(gan.disc(fake.detach())).mean()).backward()
            step_generator(gan, fake)
        if last:
            gan.opt_d.step()
            gan.opt_d.zero_grad()


def in_parts(gan: Gan) -> None:
    """The generator's batch in parts, of which ranks may have different numbers, each through the discriminator."""
    for real, noise in gan.batches:
        gan.opt_d.zero_grad()
        with torch.no_grad():
            fake = gan.gen(noise)
        (softplus(-gan.disc(real)).mean() + softplus(gan.disc(fake)).mean()).backward()
        gan.opt_d.step()
        gan.opt_g.zero_grad()
        for part in gan.gen.micro_batches(noise, num_parts=2) if gan.ranked else [noise]:
            softplus(-gan.disc(gan.gen(part))).mean().backward()
        gan.opt_g.step()


def ahead(gan: Gan) -> None:
    gan.batches = itertools.islice(gan.batches, FEED.num_batches - 1)  # the feed itself ends by break
    generator_first(gan)


def ahead_discriminator_first(gan: Gan) -> None:
    gan.batches = itertools.islice(gan.batches, FEED.num_batches - 1)
    dcgan(gan)


LOOPS: dict[str, Callable[[Gan], None]] = {
    "discriminator on real, on fake, then the generator": dcgan,
    "the generator first": generator_first,
    "two forwards before a backward": two_forwards,
    "two forwards before a backward, the first under no_sync": two_forwards_one_unsynced,
    "a gradient penalty": penalised,
    "a gradient penalty first": penalised_first,
    "a gradient penalty in between": penalised_in_between,
    "two steps of the discriminator": two_steps,
    "accumulation": accumulating,
    "accumulation over batches": accumulating_batches,
    "the generator in parts": in_parts,
}
AHEAD = {"generator first": ahead, "discriminator first": ahead_discriminator_first}
FEED = Loaded(totals=(12, 16, 14))


def build(
    rank: int, world_size: int, script: _Script, data: TensorDataset, *, attached: bool, is_ahead: bool, **keywords: Any
) -> Gan:
    gen, disc = fresh(generator, torch.float64), fresh(discriminator, torch.float64)
    opt_g, opt_d = (torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5) for net in (gen, disc))
    feed = replace(FEED, ahead=is_ahead)
    policy: Any = {"policy": FEED.planner(world_size), "lr_rule": "none"}
    if attached:
        first, second = DistributedDataParallel(gen), DistributedDataParallel(disc)
        engine = attach(first, opt_g, **policy)
        attach(second, opt_d, follows=engine, lr_rule="none", **keywords)
        return Gan(first, second, opt_g, opt_d, feed(script, Holding(engine), rank, world_size, data), ranked=True)
    first = HeteroDataParallel(gen, opt_g, **policy)
    second = HeteroDataParallel(disc, opt_d, follows=first, lr_rule="none", **keywords)
    return Gan(first, second, opt_g, opt_d, feed(script, first, rank, world_size, data), ranked=True)


@dataclass
class Holding:
    """A model whose engine was attached."""

    engine: Any


def error(
    rank: int,
    world_size: int,
    loop: Callable[[Gan], None],
    *,
    attached: bool = False,
    is_ahead: bool = False,
    **keywords: Any,
) -> float:
    """The worst relative difference of a parameter of either model from one process's."""
    script, data = _Script(), samples(61)
    ranked = build(rank, world_size, script, data, attached=attached, is_ahead=is_ahead, **keywords)
    loop(ranked)
    assert len(script.splits) > 1
    gen, disc = fresh(generator, torch.float64), fresh(discriminator, torch.float64)
    opt_g, opt_d = (torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5) for net in (gen, disc))
    loop(Gan(gen, disc, opt_g, opt_d, FEED.whole(data, script), ranked=False))
    ours = [p.detach() for model in (ranked.gen, ranked.disc) for p in model.module.parameters()]
    return worst_difference(ours, [p.detach() for model in (gen, disc) for p in model.parameters()])


def several_attached(rank: int, world_size: int) -> float:
    """The same error where two discriminators share an optimizer and are attached at once: HiFi-GAN."""
    script, data = _Script(), samples(61)

    def trained(*, ranked: bool) -> list[torch.Tensor]:
        nets = [fresh(net, torch.float64) for net in (generator, discriminator, discriminator)]
        opt_g = torch.optim.SGD(nets[0].parameters(), lr=0.05, momentum=0.5)
        opt_d = torch.optim.SGD(itertools.chain(*(net.parameters() for net in nets[1:])), lr=0.05, momentum=0.5)
        gen, *discs = [DistributedDataParallel(net) for net in nets] if ranked else nets
        if ranked:
            engine = attach(gen, opt_g, policy=FEED.planner(world_size), lr_rule="none")
            attach(discs, opt_d, follows=engine, lr_rule="none")
            batches = FEED(script, Holding(engine), rank, world_size, data)
        else:
            batches = FEED.whole(data, script)
        dcgan(Gan(gen, lambda inputs: sum(disc(inputs) for disc in discs), opt_g, opt_d, batches, ranked=ranked))
        return [p.detach() for net in nets for p in net.parameters()]

    return worst_difference(trained(ranked=True), trained(ranked=False))


def rates(rank: int, world_size: int) -> list[tuple[float, float, float]]:
    """The rates inside of each step of an optimizer that two followers share, of the leader's, and the plan's total."""
    nets = [fresh(net, torch.float64) for net in (generator, discriminator, discriminator)]
    opt_g = torch.optim.SGD(nets[0].parameters(), lr=0.1)
    opt_d = torch.optim.SGD(itertools.chain(*(net.parameters() for net in nets[1:])), lr=0.01)
    feed = Loaded(totals=(12, 24, 16), num_batches=40)
    splits = [split_of(total, world_size, index) for index, total in enumerate(feed.totals)]
    gen = HeteroDataParallel(nets[0], opt_g, policy=NoisyPlanner(splits), lr_rule="linear")
    discs = [HeteroDataParallel(net, opt_d, follows=gen, lr_rule="linear") for net in nets[1:]]
    noted: dict[int, list[float]] = {id(opt_g): [], id(opt_d): []}
    for optimizer in (opt_g, opt_d):
        optimizer.register_step_pre_hook(lambda o, *_: noted[id(o)].append(o.param_groups[0]["lr"]))
    totals = []
    for real, noise in feed(_Script(), gen, rank, world_size, samples(61)):
        fake = gen(noise)
        opt_d.zero_grad()
        sum(softplus(-disc(real)).mean() + softplus(disc(fake.detach())).mean() for disc in discs).backward()
        opt_d.step()
        opt_g.zero_grad()
        sum(softplus(-disc(fake)).mean() for disc in discs).backward()
        opt_g.step()
        totals.append(float(gen.plan.total_batch))
    return list(zip(noted[id(opt_d)], noted[id(opt_g)], totals, strict=True))


class Resting:
    """Counts how often a loop rests, as a Snapshot asks it to."""

    num_rests = 0

    def end_step(self) -> None: ...

    def rest(self) -> None:
        self.num_rests += 1

    def end_training(self) -> None: ...


def rests(rank: int, world_size: int) -> dict[str, int]:
    """How often each way of writing the loop rests, of 30 batches, so that a snapshot can be taken."""
    counts = {}
    for name, loop in [*LOOPS.items(), *((f"ahead, {name}", loop) for name, loop in AHEAD.items())]:
        gan = build(rank, world_size, _Script(), samples(61), attached=False, is_ahead=loop in AHEAD.values())
        gan.gen.engine.loop.watcher = watcher = Resting()
        loop(gan)
        counts[name] = watcher.num_rests
    return counts


def mistakes(rank: int, world_size: int) -> list[str]:
    """What is said of a loader for a follower, of following nobody, and of a forward before any batch."""
    from cannikin.runtime.loader import HeteroDataLoader

    nets = [fresh(net, torch.float64) for net in (generator, discriminator)]
    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    gen = HeteroDataParallel(nets[0], opts[0])
    disc = HeteroDataParallel(nets[1], opts[1], follows=gen)
    said = []
    for mistake in (
        lambda: disc(torch.zeros(2, 4, dtype=torch.float64)),
        lambda: HeteroDataLoader(samples(20), model=disc, batch_size=4),
        lambda: disc.use_batch(1, 2),
        lambda: HeteroDataParallel(nets[1], opts[1], follows=disc),
        lambda: HeteroDataParallel(nets[1], opts[1], follows=gen, policy="even"),
        lambda: attach([gen, disc], opts[0]),
    ):
        try:
            mistake()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


CASES: dict[str, Callable[[int], Any]] = {
    **{name: lambda rank, loop=loop: error(rank, 3, loop) for name, loop in LOOPS.items()},
    **{f"ahead, {name}": lambda rank, loop=loop: error(rank, 3, loop, is_ahead=True) for name, loop in AHEAD.items()},
    "attached": lambda rank: error(rank, 3, dcgan, attached=True),
    "several attached": lambda rank: several_attached(rank, 3),
    "rates": lambda rank: rates(rank, 3),
    "rests": lambda rank: rests(rank, 3),
    "mistakes": lambda rank: mistakes(rank, 3),
}


def run(rank: int, world_size: int) -> dict[str, Any]:
    from told import run_cases

    return run_cases(rank, world_size, CASES)
