"""Snapshots of a training under fault, as docs/migrate/ddp.md has them: written beside, renamed, two kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch


class Keeper:
    """Saves on rank 0, loads on every rank."""

    def __init__(
        self,
        folder: Path,
        model: Any,
        optimizer: Any,
        loader: Any,
        scaler: Any,
        *,
        every: int,
        launch: int,
    ) -> None:
        self._parts = {
            "net": model.module,
            "optimizer": optimizer,
            "engine": model.engine,
            "loader": loader,
            "scaler": scaler,
        }
        self._is_first = model.engine.rank == 0
        self._folder, self._every, self._launch = folder, every, launch

    def load(self) -> list[int] | None:
        """Take the newest snapshot that can be read; return the launch and the step it is of, None for none."""
        for name in ("newest.pt", "before.pt"):
            path = self._folder / name
            if not path.exists():
                continue
            try:
                saved = torch.load(path, map_location="cpu")
            except Exception as error:
                print(f"{path} cannot be read ({type(error).__name__}): the one before is used", file=sys.stderr)
                continue
            for part, state in saved["parts"].items():
                self._parts[part].load_state_dict(state)
            mark: list[int] = saved["mark"]
            return mark
        return None

    def step(self, num_steps: int) -> None:
        """Save, where it is time, once so many steps are done."""
        if self._is_first and num_steps % self._every == 0:
            try:
                self._save([self._launch, num_steps])
            except OSError as error:
                print(f"no snapshot ({error}): training goes on", file=sys.stderr)

    def _save(self, mark: list[int]) -> None:
        saved = {"parts": {name: part.state_dict() for name, part in self._parts.items()}, "mark": mark}
        part, newest = self._folder / "part", self._folder / "newest.pt"
        try:
            torch.save(saved, part)
        except RuntimeError as error:  # torch says so of a full disk
            raise OSError(str(error)) from error
        if newest.exists():
            os.replace(newest, self._folder / "before.pt")
        os.replace(part, newest)
