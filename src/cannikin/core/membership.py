"""Who trains now, where in the data, and by which plan, while members come and go (paper, section 6).

All members hold the same `Membership`; who joins takes it over from a peer, together with the weights. What has been
learned belongs to members by name: who stays keeps its curve through every change, who comes back finds the one that it
left, and who is new begins with its own profile, or with that of a device of the same kind.

Legend: n members, B the total batch, b_i the local batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cannikin.core.learner import Learner
from cannikin.core.policies.cannikin import Controller
from cannikin.core.profiles import Profile, load_profiles
from cannikin.core.schedule import Schedule
from cannikin.core.values import NO_MAX, FloatArray, Job, StepWindow
from cannikin.errors import InvalidInputError, StateError

MEASURED = ("local_batch", "before_s", "ready_s", "done_s", "load_s")
"""What each member tells of a step, in this order; NaN where it has nothing to tell. See `StepWindow`."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where training stands: what has been committed, and nothing else.

    Args:
        epoch, position: so many samples of this epoch have been trained on.
        num_steps: steps committed so far.
        history: a number that stands for all of these steps, their members and their local batches. Members that have
            committed as many steps with another history have trained apart from each other.
    """

    epoch: int = 0
    position: int = 0
    num_steps: int = 0
    history: int = 0

    def after(self, names: Sequence[str], counts: Sequence[int], num_samples: int) -> Place:
        """Return the place once a step of these members with these local batches is committed.

        Example:
            >>> place = Place().after(["a", "b"], [6, 2], num_samples=10)
            >>> place.position, place.after(["a"], [2], num_samples=10).epoch
            (8, 1)
        """
        text = repr((self.history, self.epoch, self.position, [*names], [int(count) for count in counts]))
        history = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
        position = self.position + sum(counts)
        return Place(
            epoch=self.epoch + (position >= num_samples),
            position=0 if position >= num_samples else position,
            num_steps=self.num_steps + 1,
            history=history,
        )


@dataclass(frozen=True, kw_only=True)
class Member:
    """One who trains.

    Args:
        name: what it is known by, also after it has left and come back.
        device: what kind of device it has.
        max_local: the largest local batch that it can take.
        profile: what earlier runs have learned of it (`core.profiles`), or None.
    """

    name: str
    device: str = ""
    max_local: int = NO_MAX
    profile: Profile | None = None

    def __post_init__(self) -> None:
        if self.profile is not None:
            load_profiles(Learner(1), [self.profile])  # a damaged one must stop its own member, not all of them


class Membership:
    """The members, the plan in force, what is known of every member so far, and the place in the data.

    Args:
        batch_size: B, which stays as long as the members together can take it.
        num_samples: length of an epoch.
        min_local: the fewest samples that a member should train on (`least_local`).
        seed: what orders the samples; None where they come in order. All members must have the same.

    Example:
        >>> crew = Membership(batch_size=12, num_samples=100)
        >>> crew.change([Member(name="a"), Member(name="b")])
        >>> crew.local_batches
        (6, 6)
        >>> crew.change([Member(name="b")])
        >>> crew.local_batches
        (12,)
    """

    def __init__(self, *, batch_size: int, num_samples: int, min_local: int = 1, seed: int | None = None) -> None:
        if num_samples < 1:
            raise InvalidInputError("the dataset is empty: there is nothing to train on; check its path or split")
        if batch_size < min_local:
            raise InvalidInputError(f"batch_size={batch_size} is below {min_local}: give at least so many samples")
        self.batch_size = batch_size
        self._min_local = min_local
        self._seed = seed
        self.num_samples = num_samples
        self.place = Place()
        self.members: tuple[Member, ...] = ()
        self.local_batches: tuple[int, ...] = ()
        self.reason = ""
        self._planner: Controller | None = None
        self._learned: dict[str, Any] | None = None  # a planner's state, of members with these names and devices:
        self._who: list[tuple[str, str]] = []
        self._left: dict[str, tuple[str, Profile]] = {}  # device and profile by name, of those who are not in

    @property
    def names(self) -> tuple[str, ...]:
        """The members' names, by rank."""
        return tuple(member.name for member in self.members)

    def change(self, members: Sequence[Member]) -> None:
        """Plan for these members, by rank; names that occur twice are numbered."""
        self._keep()
        self.members = _numbered(members)
        total = min(self.batch_size, sum(member.max_local for member in self.members))
        used = self.members[: max(1, total // self._min_local)]  # others wait: B is too small for them
        job = Job(
            num_ranks=len(used),
            batch_size=min(total, sum(member.max_local for member in used)),
            min_local=tuple(min(self._min_local, member.max_local) for member in used),
            max_local=tuple(member.max_local for member in used),
        )
        self._planner = Controller(job)
        origins = [self._origin(member) for member in used]
        if self._learned is not None:
            self._planner.load_state_dict(self._learned, origins)
        elif any(origins):
            self._planner.start_from([member.profile for member in used])
        self._who = [(member.name, member.device) for member in used]
        self._left = {name: left for name, left in self._left.items() if name not in dict(self._who)}
        decision = self._planner.decide(None, job, 0)
        self._schedule = Schedule(job, decision)
        self._rows: list[FloatArray] = []
        self._window_start = self._num_measured = 0
        self.reason = decision.plan.reason
        self.install(self._padded(decision.plan.local_batches))

    def install(self, local_batches: Sequence[int]) -> None:
        """Let a plan be in force: one local batch per member, 0 where one waits."""
        self.local_batches = tuple(int(batch) for batch in local_batches)

    def observe(self, measured: FloatArray) -> tuple[int, ...] | None:
        """Learn from one step of all members, [n, len(MEASURED)]; return a new plan where a window ends with it.

        A new plan is a proposal: it holds once it is installed, on all members before the same step.
        """
        assert self._planner is not None, "change() comes first"
        measured = measured[: len(self._who)]
        if np.isnan(measured).all():
            return None
        self._rows.append(measured)
        self._num_measured += 1
        if len(self._rows) < self._schedule.window_steps(self._window_start):
            return None
        window = _window(np.stack(self._rows), self._window_start)
        self._rows, self._window_start = [], self._num_measured
        decision = self._schedule.decide(self._planner, window, self._num_measured)
        self._schedule.install(decision, self._num_measured)
        self.reason = decision.plan.reason
        return self._padded(decision.plan.local_batches)

    def profiles(self) -> dict[str, Profile]:
        """Return what is known of every member that has ever trained here, by name."""
        now = [] if self._planner is None else zip(self._who, self._planner.profiles(), strict=True)
        return {name: profile for name, (_, profile) in self._left.items()} | {
            name: profile for (name, _), profile in now if profile is not None
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all of this as plain numbers, strings, lists and dicts."""
        return {
            "batch_size": self.batch_size,
            "num_samples": self.num_samples,
            "seed": self._seed,
            "place": asdict(self.place),
            "learned": self._learned if self._planner is None else self._planner.state_dict(),
            "who": [list(who) for who in self._who],
            "left": {name: list(left) for name, left in self._left.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another member has; the members themselves come with the next `change`."""
        own_settings = {"batch_size": self.batch_size, "num_samples": self.num_samples, "seed": self._seed}
        for name, own in own_settings.items():
            if state[name] != own:
                raise StateError(
                    f"the others train with {name}={state[name]}, and this one has {own}: start it with the same "
                    "dataset and the same arguments"
                )
        self.place = Place(**state["place"])
        self._planner, self._learned = None, state["learned"]
        self._who = [(name, device) for name, device in state["who"]]
        self._left = {name: (device, profile) for name, (device, profile) in state["left"].items()}
        self.members, self.local_batches = (), ()

    def _keep(self) -> None:
        """Keep what the planner has learned, and a profile of each of its members, whether they stay or not."""
        if self._planner is not None:
            self._learned = self._planner.state_dict()
            profiles = zip(self._who, self._planner.profiles(), strict=True)
            self._left |= {name: (device, profile) for (name, device), profile in profiles if profile is not None}

    def _origin(self, member: Member) -> int | Profile | None:
        """Return what is known of a member: the rank it had, its own profile, or the rank or profile of one alike."""
        names, devices = [name for name, _ in self._who], [device for _, device in self._who]
        if self._learned is not None and member.name in names:
            return names.index(member.name)
        if member.name in self._left:
            return self._left[member.name][1]
        if member.profile is not None:
            return member.profile
        if self._learned is not None and member.device in devices:
            return devices.index(member.device)
        return next((profile for device, profile in self._left.values() if device == member.device), None)

    def _padded(self, local_batches: Sequence[int]) -> tuple[int, ...]:
        return (*local_batches, *[0] * (len(self.members) - len(self._who)))


def _numbered(members: Sequence[Member]) -> tuple[Member, ...]:
    """Return members whose names differ: the second "a" becomes "a #2"."""
    seen: dict[str, int] = {}
    named = []
    for member in members:
        seen[member.name] = count = seen.get(member.name, 0) + 1
        named.append(member if count == 1 else replace(member, name=f"{member.name} #{count}"))
    return tuple(named)


def _window(rows: FloatArray, first_step: int) -> StepWindow:
    """Make a window of measured steps, [S, n, len(MEASURED)]. All of a gradient counts as one bucket."""
    local, before_s, ready_s, done_s, load_s = np.moveaxis(rows, -1, 0)
    steps, num_ranks = local.shape
    return StepWindow(
        first_step=first_step,
        local_batches=np.nan_to_num(local).astype(np.int64).clip(1),
        before_s=before_s,
        ready_s=ready_s[..., None],
        done_s=done_s[..., None],
        local_sqnorm=np.full((steps, num_ranks), np.nan),
        global_sqnorm=np.full(steps, np.nan),
        valid=(local > 0),
        load_s=np.nan_to_num(load_s),
    )
