"""What the ranks of `test_live_ranks` run: a real training that is looked at."""

from __future__ import annotations

import io
from pathlib import Path

from live_screen import Terminal
from training_cases import Numbered, make_model, one_epoch

import cannikin
from cannikin.live.view import LiveView
from cannikin.runtime.loader import HeteroDataLoader

FORWARD_S = (1e-3, 4e-3)  # of each rank, for a sample


def watched_training(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What views of a terminal and of a file, two models in turn, and Prometheus's file got on this rank."""
    terminal, file = Terminal(), io.StringIO()
    path = Path(folder, f"rank{rank}.prom")
    for _ in range(2):
        observers = [LiveView(terminal), LiveView(file), cannikin.PrometheusObserver(path, every_s=0)]
        model, optimizer = make_model(FORWARD_S[rank], observers=observers)
        loader = HeteroDataLoader(Numbered(240), model=model, batch_size=12)
        one_epoch(model, optimizer, loader)
        for view in observers[:2]:
            view.close()
    return {
        "terminal": terminal.getvalue(),
        "file": file.getvalue(),
        "prometheus": path.read_text() if path.exists() else "",
    }
