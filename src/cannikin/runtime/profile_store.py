"""What earlier runs learned about a device: `profiles=PATH`, one JSON file for all models and devices.

A profile is a start, not a truth: whatever is measured soon outweighs it.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from cannikin.core.planner import DevicePlanner
from cannikin.core.profiles import Profile, check_profile
from cannikin.errors import StateError
from cannikin.runlog import RankInfo
from cannikin.runtime.device import Device, name_of
from cannikin.runtime.exchange import Exchange
from cannikin.whole_files import whole_file

_FORMAT = "cannikin-profiles"
_VERSION = 1
_LOCK_S = 5.0  # that a writer waits for others, who take milliseconds


def introduce(exchange: Exchange, device: Device) -> list[RankInfo]:
    """Return who the ranks are, by rank; the same list on all of them, which must all ask."""
    mine = RankInfo(
        host=socket.gethostname(),
        device=name_of(device),
        memory_bytes=device.memory_bytes,
        memory_limit_bytes=None if device.memory is None else device.memory.limit(),
        **device.data_sheet(),
    )
    texts = exchange.gather_text(msgspec.json.encode(mine).decode())
    return [msgspec.json.decode(text, type=RankInfo) for text in texts]


def share_profiles(
    exchange: Exchange, store: ProfileStore | None, ranks: Sequence[RankInfo]
) -> list[Profile | None] | None:
    """Return the stored profile of each rank's device, the same on all ranks, which must all ask.

    Rank 0 alone has a store, if the user keeps one; else there is None. Damaged profiles are left out with a warning.
    """
    found = None
    if store is not None:
        found = store.load([rank.device for rank in ranks])
        given = {rank.device: profile for rank, profile in zip(ranks, found, strict=True) if profile is not None}
        damaged = find_damaged(given, store.path)
        if damaged:  # not worth a run: these ranks are learned afresh
            warnings.warn(f"stored profiles are left out: {'; '.join(damaged.values())}", RuntimeWarning, stacklevel=5)
            found = [None if rank.device in damaged else profile for rank, profile in zip(ranks, found, strict=True)]
    shared: list[Profile | None] | None = json.loads(exchange.gather_text(json.dumps(found))[0])
    return shared


def find_damaged(profiles: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return of each damaged profile of a store, by device, what is wrong with it."""
    damaged = {}
    for device, profile in profiles.items():
        try:
            check_profile(profile, f"{device} in {path}")
        except StateError as error:
            damaged[device] = str(error)
    return damaged


def model_key(module: torch.nn.Module, *, scaled: bool, sharded: bool = False) -> str:
    """Return what tells one model and precision from another.

    Args:
        module: the network.
        scaled: whether a GradScaler is in use.
        sharded: whether it is under `fully_shard`, where steps have layers in place of DDP's buckets.
    """
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    digest = hashlib.blake2b(json.dumps([shapes, scaled]).encode(), digest_size=8).hexdigest()
    return f"{type(module).__name__}-{digest}" + ("-fsdp" if sharded else "")


class ProfileStore:
    """Profiles by model and device, in one file that is replaced whole: a reader never sees half of one."""

    def __init__(self, path: str | Path, model: str) -> None:
        self.path = Path(path)
        self._model = model
        self.ranks: Sequence[RankInfo] = ()  # of this run

    def load(self, devices: list[str]) -> list[Profile | None]:
        """Return the profile of each of these devices, None where there is none; a file that cannot be read warns."""
        known = self.known()
        return [known.get(device) for device in devices]

    def known(self) -> dict[str, Profile]:
        """Return all profiles of the model by device; a file that cannot be read warns."""
        profiles: dict[str, Profile] = (self._read() or {}).get(self._model, {})
        return profiles

    def check(self, planner: object, policy: str) -> None:
        """Say where a planner learns nothing that could be kept."""
        if not isinstance(planner, DevicePlanner):
            text = f"profiles= is ignored: policy {policy!r} learns no profiles"
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def keep(self, planner: object) -> None:
        """Save what a planner has learned of the run's devices, if it learns such things."""
        if isinstance(planner, DevicePlanner):
            marks = [{"saved_s": time.time(), "host": rank.host, "uuid": rank.uuid} for rank in self.ranks]
            profiles = [known and {**known, **mark} for known, mark in zip(planner.profiles(), marks, strict=True)]
            self.save([rank.device for rank in self.ranks], profiles)

    def save(self, devices: list[str], profiles: list[Profile | None]) -> None:
        """Put these profiles in place of older ones; of several ranks on one kind of device the first is kept."""
        found = {d: p for d, p in reversed(list(zip(devices, profiles, strict=True))) if p is not None}
        if not found:
            return
        path = self.path.resolve()  # a link to a common store stays one
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.parent):  # others may save meanwhile: what they wrote is kept
                models = self._read()
                if models is not None:  # what is not ours is not overwritten
                    models[self._model] = {**models.get(self._model, {}), **found}
                    _replace(path, json.dumps({"format": _FORMAT, "version": _VERSION, "models": models}))
        except OSError as error:
            warnings.warn(f"profiles={str(self.path)!r} cannot be written ({error})", RuntimeWarning, stacklevel=2)

    def _read(self) -> dict[str, Any] | None:
        """Return profiles by model and device; None where there is a file that has none."""
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text())
            if content["format"] != _FORMAT or content["version"] != _VERSION:
                raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
            models: dict[str, Any] = content["models"]
            if not all(isinstance(part, dict) for part in (models, *models.values())):
                raise ValueError("profiles are not sorted by model and device")
            return models
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            warnings.warn(
                f"profiles={str(self.path)!r} cannot be read and is left out ({error}): every rank is learned afresh",
                RuntimeWarning,
                stacklevel=2,
            )
            return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of a folder, or go on without where it cannot be locked: profiles can be learned again."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise OSError(f"another program has locked {folder} for {_LOCK_S:.0f} s") from None
                time.sleep(0.01)
            except OSError:  # some network file systems have no locks
                break
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Put a text in a file's place, whole or not at all, and clear away what writers that were killed have left."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        left.unlink(missing_ok=True)
    with whole_file(path) as file:
        file.write(text)
