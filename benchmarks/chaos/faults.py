"""What goes wrong, where and when: chains of launches and their faults, drawn by seed before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass

LIMIT_S = 8.0  # that groups are given: no rank may wait longer for a silent one
PATIENCE_S = 2.0  # after which a rank that waits must say for whom; its default is longer
GRACE_S = 7.0  # beyond it, on a busy machine, before it counts as a hang

# Where a loop fetches its next batch: at its head, in the midst of a step as nanoGPT does, or once the step is over.
FETCHES = ("at the head", "forward|backward", "backward|step", "after the step")

# Devices that ranks pretend to be, as the lab's do; a launch has three to five of them.
SPEEDS = (1.0, 0.8, 0.5, 0.35, 0.25)
SAMPLE_S = 1e-3  # of a device of speed 1
FIXED_S = 2e-3


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault.

    Args:
        weight: how often it is drawn, beside the others.
        place: where in the rank's process it strikes; "outside" is left to the launcher, at any moment.
        ends: whether the launch ends by it.
        only_first: whether only rank 0 does such things.
        needs: what a chain must have for it: "hosts", "disk", "workers" or "no workers".
        length: seconds, or steps, that it lasts, from and to.
    """

    weight: float = 1.0
    place: str = "outside"
    ends: bool = True
    only_first: bool = False
    needs: str = ""
    length: tuple[float, float] = (0.0, 0.0)


KINDS = {
    "kill in forward": Kind(place="forward"),
    "kill in backward": Kind(place="backward"),
    "kill in loading": Kind(place="loading", needs="no workers"),
    "kill in planning": Kind(place="planning", only_first=True),
    "kill in saving": Kind(place="saving", only_first=True, weight=2.0),
    "kill at any moment": Kind(weight=2.0),
    "kill while starting": Kind(weight=0.4, length=(0.0, 1.0)),
    "kill of a loader's worker": Kind(place="loop", needs="workers", weight=2.0),
    "exception": Kind(place="forward", weight=0.7),
    "SIGTERM to one rank": Kind(weight=0.7),
    "SIGTERM to all ranks": Kind(weight=0.7),
    "stop for ever": Kind(weight=0.7),
    "network lost for ever": Kind(needs="hosts", weight=1.5),
    "torn snapshot": Kind(weight=1.5),
    "a rank leaves": Kind(weight=1.0),
    "a rank joins": Kind(weight=1.0),
    "another order of ranks": Kind(weight=1.0),
    "stop for a while": Kind(ends=False, length=(0.2, 2.5), weight=2.0),
    "stall in loading": Kind(place="loading", needs="no workers", ends=False, length=(0.2, 2.0), weight=1.5),
    "slow spell": Kind(place="loop", ends=False, length=(5, 60), weight=2.0),
    "NaN": Kind(place="loop", ends=False, length=(1, 4), weight=2.0),
    "disk full": Kind(needs="disk", ends=False, length=(0.3, 2.0), weight=1.5),
    "network lost for a while": Kind(needs="hosts", ends=False, length=(0.2, 2.5), weight=3.0),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: of which kind, on which rank, from which of the launch's steps on.

    Args:
        length: seconds or steps that it lasts, where it is of such a kind.
        chance: a number below 1 that decides the rest: the moment inside of a step, which byte is torn.
    """

    kind: str
    rank: int
    step: int
    length: float
    chance: float


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Ranks that are started together, the device of each, and what happens to them; the last one ends the launch."""

    members: tuple[int, ...]
    faults: tuple[Fault, ...]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One training over many launches.

    Args:
        max_batch_size: None for a fixed total.
        save_every: steps between two snapshots.
        fetch: one of `FETCHES`.
        has_hosts: whether each device has a network of its own.
    """

    number: int
    seed: int
    num_samples: int
    batch_size: int
    max_batch_size: int | None
    num_workers: int
    save_every: int
    fetch: str
    has_hosts: bool
    launches: tuple[Launch, ...]


def draw_chain(seed: int, number: int, num_faults: int, available: frozenset[str], only: str = "") -> Chain:
    """Draw a training and its faults.

    Args:
        seed, number: decide everything, along with the next two.
        num_faults: at least 1.
        available: "hosts" and "disk", where this machine has them.
        only: words in the names of the kinds to draw, of which one must end a launch; "" for all kinds.
    """
    rng = random.Random(f"{seed} {number}")
    has_hosts = rng.random() < 0.35 and "hosts" in available
    num_workers = 2 if rng.random() < 0.1 else 0
    has = {*(available - {"hosts"}), "workers" if num_workers else "no workers", *(["hosts"] if has_hosts else [])}
    members = tuple(rng.sample(range(len(SPEEDS)), rng.randint(3, len(SPEEDS))))
    launches: list[Launch] = []
    while (left := num_faults - sum(len(launch.faults) for launch in launches)) > 0:
        faults: list[Fault] = []
        step = 0
        for _ in range(min(rng.choice((0, 1, 1, 2, 3)), left - 1)):
            step += rng.randint(3, 25)
            if kinds := _kinds(members, has, only, ends=False):
                faults.append(_draw(rng, step, members, kinds))
        faults.append(_draw(rng, step + rng.randint(3, 40), members, _kinds(members, has, only, ends=True)))
        if faults[-1].kind == "kill while starting":
            faults = faults[-1:]
        launches.append(Launch(members=members, faults=tuple(faults)))
        members = _members_after(rng, faults[-1], members)
    return Chain(
        number=number,
        seed=seed,
        num_samples=rng.randint(300, 900),
        batch_size=rng.randint(30, 48),
        max_batch_size=rng.choice((None, None, 96)),
        num_workers=num_workers,
        save_every=rng.randint(4, 20),
        # By numbers of its own: the faults of a seed stay the same.
        fetch=random.Random(f"{seed} {number} fetch").choice(FETCHES),
        has_hosts=has_hosts,
        launches=(*launches, Launch(members=members, faults=())),
    )


def _kinds(members: tuple[int, ...], has: set[str], only: str, *, ends: bool) -> dict[str, Kind]:
    """Return the kinds that can be drawn for these ranks."""
    kinds = {name: kind for name, kind in KINDS.items() if kind.ends == ends and (not kind.needs or kind.needs in has)}
    if len(members) == 3:
        kinds.pop("a rank leaves", None)
    if len(members) == len(SPEEDS):
        kinds.pop("a rank joins", None)
    return {name: kind for name, kind in kinds.items() if only in name} or (kinds if ends else {})


def _draw(rng: random.Random, step: int, members: tuple[int, ...], kinds: dict[str, Kind]) -> Fault:
    name = rng.choices(list(kinds), [kind.weight for kind in kinds.values()])[0]
    kind = kinds[name]
    rank = 0 if kind.only_first else rng.randrange(len(members))
    step = 0 if name == "kill while starting" else step
    return Fault(kind=name, rank=rank, step=step, length=rng.uniform(*kind.length), chance=rng.random())


def _members_after(rng: random.Random, fault: Fault, members: tuple[int, ...]) -> tuple[int, ...]:
    """Return the devices of the next launch, by rank."""
    if fault.kind == "a rank leaves":
        return tuple(device for rank, device in enumerate(members) if rank != fault.rank)
    if fault.kind == "a rank joins":
        return (*members, rng.choice([device for device in range(len(SPEEDS)) if device not in members]))
    if fault.kind == "another order of ranks":
        return tuple(rng.sample(members, len(members)))
    return members
