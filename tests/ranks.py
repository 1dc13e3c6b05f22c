"""Runs a function on several real processes with a real gloo group between them, within a hard time limit."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

__all__ = ["RankError", "run_ranks"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "cannikin.runtime.parallel", "numpy"])


class RankError(AssertionError):
    """A rank raised, died or took too long; the message has every rank's last words."""


def _work(rank: int, world_size: int, store: str, results: Any, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world_size > 0:
            try:
                _connect(rank, world_size, store)
            except RuntimeError as error:
                results.put((rank, "unconnected", f"{type(error).__name__}: {error}"))
                results.close()
                results.join_thread()
                os._exit(0)
        results.put((rank, "ok", function(rank, world_size, *args)))
        if dist.is_initialized():
            dist.barrier()
    except BaseException as error:
        results.put((rank, "error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    # torch's gloo threads now and then abort an orderly exit (plain DDP does so too): leave without it.
    os._exit(0)


def _connect(rank: int, world_size: int, store: str) -> None:
    """Join the process group, and leave no rank to begin before all are in it."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )
    dist.barrier()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """`function(rank, world_size, *args)` on every rank; what each returned, by rank.

    The function must be importable (module level), its arguments and result picklable. Raises `RankError` where a rank
    raised, died, or was not done in time; no process survives.
    """
    answers = run_ranks_with_errors(function, world_size, *args, timeout_s=timeout_s)
    failed = {rank: answer for rank, (kind, answer) in answers.items() if kind != "ok"}
    if failed:
        raise RankError("\n".join(f"rank {rank}: {answer}" for rank, answer in sorted(failed.items())))
    return [answers[rank][1] for rank in range(world_size)]


def run_ranks_with_errors(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0
) -> dict[int, tuple[str, Any]]:
    """As `run_ranks`, but returns {rank: ("ok" | "error" | "died" | "late", result or words)} and does not raise.

    Gloo's own sockets may fail to connect ("Connection closed by peer", seen once on a busy machine). No rank has begun
    `function` then, and the ranks are launched once more.
    """
    answers = _launched(function, world_size, args, timeout_s)
    if any(kind == "unconnected" for kind, _ in answers.values()):
        answers = _launched(function, world_size, args, timeout_s)
    return answers


def _launched(function: Callable[..., Any], world_size: int, args: Any, timeout_s: float) -> dict[int, tuple[str, Any]]:
    """Launch every rank, and return what became of each within the time limit."""
    answers: dict[int, tuple[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        results = _context.Queue()
        store = os.path.join(folder, "store")
        processes = [
            _context.Process(target=_work, args=(rank, world_size, store, results, function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        while len(answers) < world_size and time.monotonic() < deadline:
            try:
                rank, kind, answer = results.get(timeout=0.1)
                answers[rank] = (kind, answer)
                if kind == "unconnected":
                    deadline = time.monotonic()
            except queue.Empty:
                for rank, process in enumerate(processes):
                    if rank not in answers and process.exitcode not in (None, 0):
                        answers[rank] = ("died", f"exit code {process.exitcode}")
        for process in processes:
            process.join(timeout=max(0.1, min(5.0, deadline - time.monotonic())))
            if process.is_alive():
                process.kill()
                process.join()
    for rank in range(world_size):
        answers.setdefault(rank, ("late", f"not done within {timeout_s} s"))
    return answers
