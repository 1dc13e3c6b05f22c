"""Markdown tables, and the results of one cell over its seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Page", "Results", "mean_of", "of_seeds", "table"]

Results = dict[str, dict[str, Any]]
Page = tuple[str, dict[str, str]]  # text, and plots by file name


def table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def of_seeds(cells: dict[str, Any], *key: str) -> list[Any]:
    """The results of one cell for every seed."""
    prefix = "/".join(key) + "/"
    return [value for name, value in cells.items() if name.startswith(prefix) and "/" not in name[len(prefix) :]]


def mean_of(cells: dict[str, Any], field: str, *key: str) -> float:
    return float(np.mean([run[field] for run in of_seeds(cells, *key)]))
