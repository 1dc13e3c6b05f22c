"""What the pages of the evaluation share: tables, and results by key."""

from __future__ import annotations

from typing import Any

import numpy as np

Results = dict[str, dict[str, Any]]
Page = tuple[str, dict[str, str]]  # text, and plots by file name


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def of_seeds(cells: dict[str, Any], *key: str) -> list[Any]:
    """Return the results of one cell for every seed."""
    prefix = "/".join(key) + "/"
    return [value for name, value in cells.items() if name.startswith(prefix) and "/" not in name[len(prefix) :]]


def mean_of(cells: dict[str, Any], field: str, *key: str) -> float:
    """Return the mean over seeds of a number of one cell."""
    return float(np.mean([run[field] for run in of_seeds(cells, *key)]))


def over(cells: dict[str, Any], rival: str, *key: str) -> float | None:
    """Return the time to target of ours over another policy's, less 1, as the mean over seeds; None without either."""
    if not (of_seeds(cells, *key, "cannikin") and of_seeds(cells, *key, rival)):
        return None
    return mean_of(cells, "elapsed_s", *key, "cannikin") / mean_of(cells, "elapsed_s", *key, rival) - 1


def below(shares: dict[str, float]) -> str:
    """Return "85% below DDP, 52% below AdaptDL"."""
    return ", ".join(f"{share:.0%} below {name}" for name, share in shares.items())
