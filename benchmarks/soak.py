"""A long training, in which nothing may grow: `python -m benchmarks soak --steps 100000`.

Three real CPU ranks take tiny steps, with a run log and a snapshot every ten seconds. A hundred times each looks at
itself: memory, threads, descriptors, objects of Python, the size of the log, the time of a step. JSON lines go to --out
as it runs; the table at the end has what was seen in the second tenth of the run and in the last. Ctrl-C ends
everything.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from benchmarks.chaos.rank import end_with_parent
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import HeteroDataParallel
from cannikin.runtime.snapshot import Snapshot

NUM_RANKS = 3
NUM_LOOKS = 100
BATCH = 24
NUM_SAMPLES = 4099  # a short last batch in every epoch
COLUMNS = {
    "rss_mb": "memory, MB",
    "threads": "threads",
    "descriptors": "descriptors",
    "objects": "objects",
    "log_bytes_per_step": "log, bytes per step",
    "step_ms": "step, ms",
}

Line = dict[str, Any]


def _look(run_dir: Path) -> Line:
    """Return what this process holds now."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    gc.collect()
    return {
        "rss_mb": int(fields["VmRSS"].split()[0]) / 1024,
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
        "log_bytes": sum(path.stat().st_size for path in run_dir.glob("*") if path.is_file()),
    }


def _rank(rank: int, num_steps: int, folder: Path, out: Path, port: int) -> None:
    """Train, look, and add a line to `out` for each look."""
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=120),
    )
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    model = HeteroDataParallel(net, optimizer, run_dir=folder / "run")
    data = TensorDataset(torch.randn(NUM_SAMPLES, 8), torch.randn(NUM_SAMPLES, 1))
    loader = HeteroDataLoader(data, model=model, batch_size=BATCH)
    snapshot = Snapshot(folder / "snapshots", model, every_s=10.0)
    step, every, begun_s = 0, max(1, num_steps // NUM_LOOKS), time.perf_counter()
    while step < num_steps:
        for features, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()
            step += 1
            if step % every == 0:
                step_ms = (time.perf_counter() - begun_s) / every * 1e3
                line = {"step": step, "rank": rank, "step_ms": step_ms, **_look(folder / "run")}
                with open(out, "a") as file:
                    file.write(json.dumps(line) + "\n")
                begun_s = time.perf_counter()
            if step == num_steps:
                break
    snapshot.close()
    dist.barrier()
    os._exit(0)  # torch's gloo threads now and then abort an orderly exit


def table(lines: list[Line]) -> str:
    """Return what each rank held in the second tenth of the run and in the last, as means, with the most it ever held.

    Step times are medians: they go with the machine's load.
    """
    rows = ["rank  what                  second tenth   last tenth      largest"]
    last_step = max(line["step"] for line in lines)
    for rank in range(NUM_RANKS):
        own = sorted((line for line in lines if line["rank"] == rank), key=lambda line: line["step"])
        for before, line in zip([None, *own], own, strict=False):
            step, size = (0, 0) if before is None else (before["step"], before["log_bytes"])
            line["log_bytes_per_step"] = (line["log_bytes"] - size) / (line["step"] - step)
        second = [line for line in own if 0.1 * last_step < line["step"] <= 0.2 * last_step] or own[:1]
        last = [line for line in own if line["step"] > 0.9 * last_step] or own[-1:]
        for name, words in COLUMNS.items():
            mean = statistics.median if name == "step_ms" else statistics.fmean
            values = (mean(line[name] for line in second), mean(line[name] for line in last))
            largest = max(line[name] for line in own)
            rows.append(f"{rank:<4}  {words:<20}  {values[0]:12.1f} {values[1]:12.1f} {largest:12.1f}")
    return "\n".join([f"{last_step} steps on {NUM_RANKS} ranks", *rows])


def _read(out: Path) -> list[Line]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _wait(processes: list[Any], out: Path, num_steps: int) -> None:
    """Show how far the ranks are until all have ended, or one has failed."""
    start_s = time.monotonic()
    while any(process.is_alive() for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if failed:
            sys.exit(
                f"soak: rank {failed[0]} ended with status {processes[failed[0]].exitcode}: see what it said above"
            )
        step = max((line["step"] for line in _read(out)), default=0)
        full = round(30 * step / num_steps)
        bar = f"{'#' * full}{'.' * (30 - full)} {step}/{num_steps} steps, {time.monotonic() - start_s:.0f} s"
        print(f"\r{bar}", end="", file=sys.stderr, flush=True)
        time.sleep(1.0)
    print(file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    """Train for so many steps, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "cannikin-soak.jsonl")
    options = parser.parse_args([] if argv is None else argv)
    options.out.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.soak"])
    with tempfile.TemporaryDirectory(prefix="cannikin-soak-") as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as a launcher's agent has it
        arguments = (options.steps, Path(folder), options.out, store.port)
        processes: list[Any] = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(NUM_RANKS)]
        try:
            for process in processes:
                process.start()
            _wait(processes, options.out, options.steps)
        except KeyboardInterrupt:
            print("\ninterrupted: what was seen so far follows", file=sys.stderr)
        finally:
            for process in processes:
                process.kill()
                process.join()
    if lines := _read(options.out):
        print(table(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
