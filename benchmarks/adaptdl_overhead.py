"""What AdaptDL 0.2.11 and cannikin add to a DDP step on CPU ranks: `python -m benchmarks adaptdl`.

AdaptDL needs packages that ours must not have, so it has an environment of its own, made once under `.bench`. Four
trainings (`benchmarks.training_run`: two gloo ranks, one thread each) live side by side: raw DDP and AdaptDL there, raw
DDP and cannikin here. In each round each has a turn of ten steps, in random order, while the others sleep. The batch is
fixed and the split even, so that only overhead is compared. Reported are ratios to the raw DDP of the same round:
whatever else the machine does falls on all; the second raw DDP says how far apart equal programs come out. A few more
turns of AdaptDL under cProfile say where its time goes. Where pip finds no AdaptDL its rows are left out.
"""

from __future__ import annotations

import os
import pstats
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.overhead import SHAPES

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".bench" / "adaptdl-venv"
PACKAGES = ("adaptdl==0.2.11", "setuptools<81", "requests", "torch==2.13.0")  # it imports pkg_resources and requests
WARM_UP_ROUNDS = 6  # cannikin takes norms on every step of the first 60, on one in four after that
ROUNDS = 20
PROFILED_TURNS = 5
NUM_RANKS = 2
SHAPE_LIMIT_S = 900
INSTALL_LIMIT_S = 1800
# Also one with many parameters and little else to do.
SHAPES_AND_ONE = (*SHAPES, (1280, 32))
# What cProfile calls the parts of AdaptDL: the file's name and the function's.
PARTS = {
    "noise scale, a hook a parameter": [("gradient_noise_scale.py", "_backward_hook")],
    "noise scale, after backward": [("gradient_noise_scale.py", "_final_callback")],
    "timing hooks": [("parallel.py", "_backward_hook"), ("parallel.py", "_queue_callback")],
    "gain and progress": [("parallel.py", "_final_callback")],
    "exit flag and profile": [("data.py", "profile")],
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """One row: a name, the kind that `training_run` knows it by, and the interpreter it runs under."""

    name: str
    kind: str
    python: Path


def environment() -> Path:
    """Return the interpreter of AdaptDL's environment, made where it is missing; OSError says why it cannot be."""
    python, ready = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".ready"
    wanted = "\n".join(PACKAGES)
    if ready.exists() and ready.read_text() == wanted:
        return python
    print(f"Setting up {ENVIRONMENT.relative_to(ROOT)}: a minute or two, 1.2 GB", file=sys.stderr)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    for command in ([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], [*pip, *constraints, *PACKAGES]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise OSError(f"pip did not end within {INSTALL_LIMIT_S} s") from None
        if done.returncode:
            raise OSError((done.stderr or done.stdout).strip().splitlines()[-1])
    ready.write_text(wanted)
    return python


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _variables(program: Program, folder: Path) -> dict[str, str]:
    """Return the environment of a rank: ours keeps PYTHONPATH, AdaptDL's must not see our packages."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or program.python == Path(sys.executable)}
    adaptdl = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "NUM_REPLICAS": str(NUM_RANKS),
        "NUM_NODES": "1",
        "CHECKPOINT_PATH": str(folder),
    }
    return {**inherited, "OMP_NUM_THREADS": "1", **{f"ADAPTDL_{k}": v for k, v in adaptdl.items()}}


class Training:
    """The ranks of one program, which train on command."""

    def __init__(self, program: Program, width: int, local_batch: int, folder: Path) -> None:
        self.program, self.folder = program, folder
        variables = _variables(program, folder)
        num_turns = WARM_UP_ROUNDS + ROUNDS + PROFILED_TURNS
        shape = [str(width), str(local_batch), str(num_turns), str(folder)]
        self.ranks = []
        for rank in range(NUM_RANKS):
            command = [str(program.python), "-m", "benchmarks.training_run", program.kind, str(rank), *shape]
            own = {**variables, "ADAPTDL_REPLICA_RANK": str(rank)}
            with (folder / f"rank{rank}.txt").open("w") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                self.ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, text=True, **pipes))  # type: ignore[call-overload]

    def tell(self, command: str) -> None:
        """Have every rank do one thing, and wait until all have done it."""
        self._send(command)
        self.await_ready()

    def _send(self, command: str) -> None:
        for process in self.ranks:
            process.stdin.write(f"{command}\n")
            process.stdin.flush()

    def await_ready(self) -> None:
        """Wait until every rank waits for a command."""
        for rank, process in enumerate(self.ranks):
            if process.stdout.readline() != "ready\n":
                end = (self.folder / f"rank{rank}.txt").read_text()[-2000:]
                raise RuntimeError(f"rank {rank} of {self.program.name} ended, or was too slow:\n{end}")

    def end(self) -> None:
        """Let the ranks finish; they leave their profile."""
        self._send("end")
        for process in self.ranks:
            process.wait()

    def kill(self) -> None:
        """End the ranks whatever they do."""
        for process in self.ranks:
            process.kill()


@contextmanager
def training(program: Program, width: int, local_batch: int) -> Iterator[Training]:
    """Yield a training that ends, with its folder, when the block is left or after SHAPE_LIMIT_S."""
    with tempfile.TemporaryDirectory() as name:
        started = Training(program, width, local_batch, Path(name))
        watchdog = threading.Timer(SHAPE_LIMIT_S, started.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            started.await_ready()
            yield started
        finally:
            watchdog.cancel()
            started.kill()
            for process in started.ranks:
                process.communicate()


def _profile(path: Path) -> dict[tuple[str, str], float]:
    stats = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]
    steps = max(calls for (_, _, name), (_, calls, *_) in stats.items() if "run_backward" in name)
    return {(Path(file).name, name): entry[3] / steps * 1e3 for (file, _, name), entry in stats.items()}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One shape: seconds, [program, round, step] without each turn's first step, final parameters, and AdaptDL's parts.

    The first step of a turn finds cold caches, and ranks that do not wake up together.
    """

    seconds: np.ndarray
    parameters: list[np.ndarray]
    profile: dict[tuple[str, str], float]  # file and function -> ms per step, callees included

    @property
    def turns_ms(self) -> np.ndarray:
        """Median step of every turn, [program, round]."""
        return np.median(self.seconds, axis=2) * 1e3


def measure(programs: Sequence[Program], width: int, local_batch: int) -> Measured:
    """Let the programs take turns."""
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        trainings = [stack.enter_context(training(program, width, local_batch)) for program in programs]
        for number in range(WARM_UP_ROUNDS + ROUNDS):
            if number % 5 == 0:
                print(f"width {width}: round {number} of {WARM_UP_ROUNDS + ROUNDS}", file=sys.stderr, flush=True)
            for k in rng.permutation(len(programs)):
                trainings[k].tell("go")
        for each in trainings:
            each.tell("save")
        profile = {}
        for each in trainings:
            if each.program.kind == "adaptdl":
                for _ in range(PROFILED_TURNS):
                    each.tell("profile")
                each.end()
                profile = _profile(each.folder / "profile.pstats")
        seconds = [np.load(each.folder / "seconds.npy")[WARM_UP_ROUNDS:, 1:] for each in trainings]
        parameters = [np.load(each.folder / "parameters.npy") for each in trainings]
        return Measured(seconds=np.stack(seconds), parameters=parameters, profile=profile)


def _print_rows(programs: Sequence[Program], measured: Measured, local_batch: int) -> None:
    turns_ms = measured.turns_ms
    base = measured.parameters[0]
    for k, program in enumerate(programs):
        ratios = turns_ms[k] / turns_ms[0]
        means = measured.seconds[k].mean(axis=1) / measured.seconds[0].mean(axis=1)
        low_ms, middle_ms, high_ms = np.quantile(turns_ms[k], (0.25, 0.5, 0.75))
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        apart = float(np.abs(measured.parameters[k] - base).max() / np.abs(base).max())
        print(
            f"{base.size:10,} {local_batch:6d} {program.name:24} {middle_ms:8.2f} {low_ms:8.2f}..{high_ms:6.2f} | "
            f"{middle:6.3f} {low:6.3f}..{high:5.3f} {np.median(means):8.3f} {apart:8.0e}"
        )


def _print_parts(profile: dict[tuple[str, str], float], excess_ms: float) -> None:
    parts = {name: sum(profile.get(key, 0.0) for key in keys) for name, keys in PARTS.items()}
    listed = "; ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
    print(f"{'':18}AdaptDL adds {excess_ms:.1f} ms; cProfile finds, in ms per step: {listed}")


def main() -> None:
    """Run, and print a table."""
    here = Path(sys.executable)
    try:
        there = environment()
    except OSError as error:
        print(f"AdaptDL is left out, its environment could not be made: {error}")
        there = here
    programs = [Program(name="raw DDP", kind="ddp", python=there)]
    if there != here:
        programs.append(Program(name="AdaptDL 0.2.11", kind="adaptdl", python=there))
    programs.append(Program(name="raw DDP, cannikin's venv", kind="ddp", python=here))
    programs.append(Program(name="cannikin, policy even", kind="cannikin", python=here))
    print(f"{ROUNDS} rounds of turns of 10 steps in random order, {NUM_RANKS} gloo ranks on CPU, one thread each")
    print("step: median over rounds, and quartiles; ratio: to raw DDP in the same round; apart: final parameters")
    heading = f"{'parameters':>10} {'batch':>6} {'':24} {'step, ms':>8} {'quartiles':>16} |"
    print(f"{heading} {'ratio':>6} {'quartiles':>13} {'of means':>8} {'apart':>8}")
    for width, local_batch in SHAPES_AND_ONE:
        measured = measure(programs, width, local_batch)
        _print_rows(programs, measured, local_batch)
        if measured.profile:
            _print_parts(measured.profile, float(np.median(measured.turns_ms[1] - measured.turns_ms[0])))


if __name__ == "__main__":
    main()
