"""A thousand faults: `python -m benchmarks chaos --faults 1000 --seed 0`.

Chains of launches of 3 to 5 real ranks, each killed, stopped, cut off, starved of disk or rearranged at a moment that
the seed draws, and started again from its snapshot. One JSON line per fault and per chain goes to --out as it happens;
begun again with the same --out and seed, chains that are there are left out. Ctrl-C ends everything that it started.
Prints a table by kind at the end, and what survivors said.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.chaos import judge
from benchmarks.chaos.faults import GRACE_S, KINDS, LIMIT_S, draw_chain
from benchmarks.chaos.launch import Ground, available, run_launch
from cannikin.words import percent

PER_CHAIN = 10
EXACT = 1e-9  # weights that are further off are wrong, not rounded; all that such a chain wrote is kept beside --out
Line = dict[str, Any]


class Chaos:
    """Runs chains on several grounds at once, and keeps what they show.

    Args:
        num_faults, seed, only: which chains; see `draw_chain`.
        out: file of JSON lines, read first and then added to.
        has: of `launch.available()`.
    """

    def __init__(self, *, num_faults: int, seed: int, out: Path, has: frozenset[str], only: str = "") -> None:
        self._seed, self._out, self._has, self._only = seed, out, has, only
        self.lines: list[Line] = finished_lines(out, seed)
        done = {line["chain"] for line in self.lines if line["what"] == "chain"}
        self._chains: queue.Queue[tuple[int, int]] = queue.Queue()
        for number in range(-(-num_faults // PER_CHAIN)):
            if number not in done:
                self._chains.put((number, min(PER_CHAIN, num_faults - number * PER_CHAIN)))
        self._num_faults, self._start_s = num_faults, time.monotonic()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.interrupted = False
        self._failed: list[BaseException] = []

    def run(self, num_jobs: int) -> None:
        """Run all chains, as many at once as there are jobs; SIGINT and SIGTERM end them, and all that they started."""
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(num_jobs)]
        previous = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._failed:
            raise self._failed[0]

    def _hear(self, *_: Any) -> None:
        self.interrupted = True
        self._stopping.set()

    def _work(self, number: int) -> None:
        try:
            with ExitStack() as undo:
                ground = Ground(undo, number, self._has)
                while not self._stopping.is_set():
                    try:
                        chain, num_faults = self._chains.get_nowait()
                    except queue.Empty:
                        return
                    self._run_chain(chain, num_faults, ground)
        except BaseException as error:
            self._failed.append(error)
            self._stopping.set()

    def _run_chain(self, number: int, num_faults: int, ground: Ground) -> None:
        chain = draw_chain(self._seed, number, num_faults, self._has, self._only)
        launches: list[judge.Told] = []
        pending: list[tuple[int, int]] = []  # faults whose cost the next launch shows
        ground.clear()
        for index in range(len(chain.launches)):
            ended = run_launch(chain, index, ground, self._stopping)
            if self._stopping.is_set():
                return
            launches.append(judge.read(ground.folder / f"launch{index}", ended))
            if ended.hung_at:
                self._write("hung", number, launch=index, at=ended.hung_at, ranks=self._said(ground, index, ended.hung))
            for launch, which in pending:
                self._write("fault", number, launch=launch, **judge.judge_fault(chain, launches, launch, which))
            pending = [(index, which) for which in range(len(chain.launches[index].faults))]
        if any(status != 0 for status in ended.statuses):
            self._write("chain", number, failed=self._said(ground, index, range(len(ended.statuses))))
            return
        judged = judge.judge_chain(chain, launches)
        self._write("chain", number, **judged)
        if max(judged["weights_off"], *judged["loads_off"]) > EXACT or judged["lost"] or judged["repeated"]:
            shutil.copytree(ground.folder, self._out.with_name(f"{self._out.stem}-chain{number}"), dirs_exist_ok=True)

    @staticmethod
    def _said(ground: Ground, launch: int, ranks: Iterable[int]) -> dict[int, str]:
        """Return the end of what these ranks printed."""
        return {r: (ground.folder / f"launch{launch}" / f"rank{r}.err").read_text()[-3000:] for r in ranks}

    def _write(self, what: str, chain: int, **values: Any) -> None:
        line = {"what": what, "seed": self._seed, "chain": chain, **values}
        with self._lock:
            self.lines.append(line)
            with open(self._out, "a") as file:
                file.write(json.dumps(line) + "\n")
            self._show()

    def _show(self) -> None:
        done = sum(line["what"] == "fault" for line in self.lines)
        full = round(30 * done / self._num_faults)
        elapsed_s = time.monotonic() - self._start_s
        bad = sum(1 for line in self.lines if line.get("hung") or _is_wrong(line))
        bar = f"{'#' * full}{'.' * (30 - full)} {done}/{self._num_faults} faults, {bad} bad, {elapsed_s:.0f} s"
        print(f"\r{bar}", end="", file=sys.stderr, flush=True)


def _is_wrong(line: Line) -> bool:
    off = max([line.get("weights_off", 0.0), *line.get("loads_off", ())])
    return bool(line.get("lost") or line.get("repeated") or "failed" in line or off > EXACT)


def finished_lines(out: Path, seed: int) -> list[Line]:
    """Return the lines of chains that an earlier run has finished."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    whole = {line["chain"] for line in lines if line["what"] == "chain" and line["seed"] == seed}
    return [line for line in lines if line["seed"] == seed and line["chain"] in whole]


# Tables, of the lines.


def table(lines: list[Line]) -> str:
    """Return the faults by kind, what they cost, and the totals."""
    faults = [line for line in lines if line["what"] == "fault" and line["struck"]]
    head = ("fault", "n", "end s", "go on s", "steps again", "first plan", "to good", "hung", "rank", "remedy")
    rows = [_row(kind, [line for line in faults if line["kind"] == kind]) for kind in KINDS]
    rows = [head, *(row for row in rows if row[1] != "0"), _row("all", faults)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*text, "", *_totals(lines)])


def _row(kind: str, faults: list[Line]) -> tuple[str, ...]:
    messages = [message for fault in faults for message in fault.get("messages", ())]
    first = [fault["first_excess"] for fault in faults if fault.get("first_excess") is not None]
    settled = [fault["to_good"] for fault in faults if fault.get("to_good") is not None]
    late = [fault for fault in faults if fault.get("to_good_beyond") is not None]
    return (
        kind,
        str(len(faults)),
        _spread([fault["end_s"] for fault in faults if fault.get("messages")]),
        _spread([fault["go_on_s"] for fault in faults if fault.get("go_on_s") is not None]),
        _spread([fault["steps_again"] for fault in faults if "steps_again" in fault], digits=0),
        f"+{percent(statistics.median(first))}" if first else "",
        f"{_spread(settled, digits=0)}{f' ({len(late)} not)' if late else ''}" if settled or late else "",
        str(sum(bool(fault.get("hung") or fault.get("hung_at")) for fault in faults)),
        _part(messages, "names_rank"),
        _part(messages, "names_remedy"),
    )


def _spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} to {max(values):.{digits}f}" if values else ""


def _part(messages: list[Line], name: str) -> str:
    return f"{sum(message[name] for message in messages)}/{len(messages)}" if messages else ""


def _totals(lines: list[Line]) -> list[str]:
    chains = [line for line in lines if line["what"] == "chain"]
    whole = [line for line in chains if "failed" not in line]
    off = [value for line in whole for value in (line["weights_off"], *line.get("loads_off", ()))]
    missed = sum(line["what"] == "fault" and not line["struck"] for line in lines)
    silent = [fault for fault in lines if fault.get("kind") in ("stop for ever", "network lost for ever")]
    waits = [message for fault in silent for message in fault.get("messages", ())]
    sums = {name: sum(line[name] for line in whole) for name in ("samples", "lost", "repeated", "steps", "nan_steps")}
    return [
        "Columns: median to largest; a row's hangs are ranks alive more than "
        f"{LIMIT_S + GRACE_S:.0f} s after the fault, with groups limited to {LIMIT_S:.0f} s. While groups are being "
        "made, where torch waits for one rank after another, that limit counts once per rank and twice more.",
        f"{len(chains)} chains, {len(chains) - len(whole)} of which did not come to their end; {missed} faults drawn "
        "did not strike.",
        f"{sums['samples']} samples in {sums['steps']} steps: {sums['lost']} lost, {sums['repeated']} repeated; "
        f"{sums['nan_steps']} steps with NaN left out.",
        f"Of {len(waits)} ranks that waited for one that was silent, {sum(wait['warned'] for wait in waits)} had said "
        "for which, before the limit.",
        "Weights against one process, undisturbed or on the committed steps, at the start of every launch and at the "
        f"end: at most {max(off, default=0.0):.1e} off.",
    ]


def messages(lines: list[Line]) -> str:
    """Return what survivors said, by kind of fault, with numbers left out, the most frequent first."""
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for message in line.get("messages", ()):
            named = {(True, True): "both", (True, False): "rank only", (False, True): "remedy only"}
            which = named.get((message["names_rank"], message["names_remedy"]), "neither")
            found[which, _shape(message["text"])] += 1
    return "\n".join(f"{count:5d}  {which:<11}  {text}" for (which, text), count in found.most_common())


def _shape(text: str) -> str:
    """Return a message in which ranks and numbers look alike, on one line."""
    text = re.sub(r"\[[0-9a-f.:]+\](:\d+)?", "[ADDRESS]", " ".join(text.split()))
    return re.sub(r"\d+", "N", text)[:300]


def main(argv: list[str] | None = None) -> None:
    """Run the chains that are not done yet, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="how many to draw; some may not come to strike")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="WORDS", help="only kinds with these words in their name")
    parser.add_argument("--jobs", type=int, default=2, help="chains at once: ranks mostly sleep, as a device would run")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "cannikin-chaos.jsonl")
    options = parser.parse_args([] if argv is None else argv)
    has = available()
    for name, words in (("hosts", "network is lost"), ("disk", "disk is full")):
        if name not in has:
            print(f"chaos: not as root, or no namespaces here: no fault in which the {words}", file=sys.stderr)
    chaos = Chaos(num_faults=options.faults, seed=options.seed, out=options.out, has=has, only=options.only)
    chaos.run(options.jobs)
    if chaos.interrupted:
        print("\ninterrupted: what was found so far follows; the same command goes on from here", file=sys.stderr)
    print(f"\n{table(chaos.lines)}\n\n{messages(chaos.lines)}")


if __name__ == "__main__":
    main(sys.argv[1:])
