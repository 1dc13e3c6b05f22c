"""The state of a run as one value: everything that has a state, by name, and the random generators of rank 0."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from cannikin._version import __version__
from cannikin.errors import InvalidInputError, StateError
from cannikin.runtime.engine import Engine
from cannikin.runtime.options import unwrapped
from cannikin.runtime.randomness import digest, get_randomness, set_randomness


class RunState:
    """What is saved of a run and loaded again: what the model knows, and what the script names beside it.

    Args:
        engine: of the model, with its loader built.
        objects: what else to save, by names that stay the same.

    Attributes:
        parts: every object with a state by name, each once.
    """

    def __init__(self, engine: Engine, objects: Mapping[str, Any]) -> None:
        self._engine = engine
        self.parts = _by_name(engine, objects)
        self._randomness: tuple[Mapping[str, Any], Mapping[str, bool]] | None = None  # to go on from

    def state_dict(self) -> dict[str, Any]:
        """Return all states. Those of rank 0 are to be saved, between two steps."""
        return {
            "objects": {label: part.state_dict() for label, part in self.parts.items()},
            "randomness": get_randomness(self._engine.device.torch_device),
            "about": {"cannikin": __version__, "torch": str(torch.__version__), "saved_at_s": time.time()},
        }

    def load(self, state: Mapping[str, Any], origin: str, take: Callable[[Any], Any] = lambda part: part) -> None:
        """Load what `state_dict` returned, on every rank, and on another number of them too.

        Args:
            state: the same on every rank.
            origin: where it comes from, for people.
            take: makes a part of the state ready to be loaded, where that is put off until it is needed.
        """
        saved = state["objects"]
        for label, part in self.parts.items():
            if label in saved:
                _load_part(part, take(saved[label]), f"{origin}: its {label!r}")
            else:
                self.warn(f"{origin} has no {label!r}: it begins afresh")
        unused = sorted(saved.keys() - self.parts.keys())
        if unused:
            self.warn(f"{origin} also has {', '.join(unused)}, which this script does not name, and leaves it alone")
        # Asked of the generators as the script has seeded them, used once the first pass has begun: that draws too.
        now = get_randomness(self._engine.device.torch_device)
        alike = {label: self._engine.agrees(digest(own)) for label, own in sorted(now.items())}
        self._randomness = take(state["randomness"]), alike

    def go_on(self) -> None:
        """Let the generators go on from a state that was loaded; for the moment at which the first pass has begun."""
        if self._randomness is not None:
            (states, alike), self._randomness = self._randomness, None
            set_randomness(states, self._engine.device.torch_device, self._engine.rank, alike)

    def warn(self, text: str) -> None:
        """Warn on rank 0 only."""
        if self._engine.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=6)


def _load_part(part: Any, state: Any, origin: str) -> None:
    """Load one object's state; name it where it is of another kind, of which torch says no more than a key."""
    try:
        part.load_state_dict(state)
    except StateError as error:
        raise StateError(f"{origin} does not fit: {error}") from error
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise StateError(
            f"{origin} cannot be loaded into this {type(part).__name__} ({type(error).__name__}: {error}): it is of "
            "another kind, or of one with other parameters; build what was saved, or give another folder"
        ) from error


def _by_name(engine: Engine, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return all objects with a state, by name, each once: a model's parts, and the entries of lists."""
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, list | tuple):
            for number, part in enumerate(value):
                add(name if len(value) == 1 else f"{name}.{number}", part)
        elif not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            raise InvalidInputError(
                f"{name} is a {type(value).__name__}: what is saved needs state_dict() and load_state_dict()"
            )
        elif all(value is not other for other in found.values()):
            if name in found:
                raise InvalidInputError(
                    f"{name}= is another object than the model's own {name}, which is saved under that name: give it "
                    "another name"
                )
            found[name] = value

    for name, value in chain(engine.parts().items(), objects.items()):
        other = unwrapped(value)
        if isinstance(other, Engine) and other is not engine:  # a second model, which trains on the first one's batches
            for label, part in other.parts().items():
                if part is not None:
                    add(f"{name}.{label}", part)
        elif other is value or not isinstance(other, Engine):
            add(name, value)
    return found
