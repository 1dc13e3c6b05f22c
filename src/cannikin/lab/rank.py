"""The shim around a script on one rank: `python -m cannikin.lab.rank train.py --epochs 3`, as `cannikin lab` starts it.

Sends the rank's output where the launcher reads it, takes on the rank's device, runs the script as `__main__`, and
notes how it ended. `-m module` runs a module instead of a file.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

import msgspec

from cannikin.lab.run_folder import FOLDER, HOST, Exit, RankSettings, end_with_parent, note_exits

# What gloo and NCCL say where another rank has gone.
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def main() -> None:
    """Run the script named by the arguments; its exit is ours."""
    end_with_parent()  # the agent
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if folder is None or rank is None:
        sys.exit("cannikin.lab.rank is started by 'cannikin lab -- train.py', which says what each rank is to be")
    if os.environ.get(HOST, rank) != rank:
        sys.exit(f"cannikin.lab.rank: rank {rank} came up on host {os.environ[HOST]}: speeds would be mixed up")
    _redirect_output(Path(folder), rank)
    settings = Path(folder, f"rank{rank}.settings").read_bytes()
    _take_on(msgspec.json.decode(settings, type=RankSettings))
    status, lost_peer = 1, False
    try:
        _run_script(sys.argv[1:])
        _leave_process_group()
        status = 0
    except SystemExit as end:
        status = _status(end.code)
        raise
    except Exception as error:
        lost_peer = any(words in str(error) for words in LOST_PEER)
        raise
    finally:
        own = Exit(rank=int(rank), status=status, at_s=time.monotonic(), lost_peer=lost_peer)
        note_exits(Path(folder), f"rank{rank}", [own])


def _redirect_output(folder: Path, rank: str) -> None:
    """Write to the rank's own pipes, from which the launcher reads whole lines."""
    for descriptor, name in ((1, "out"), (2, "err")):
        pipe = os.open(folder / f"rank{rank}.{name}", os.O_WRONLY)
        os.dup2(pipe, descriptor)
        os.close(pipe)


def _take_on(settings: RankSettings) -> None:
    """Become what the settings say: change the environment, and slow this process."""
    os.environ.update(settings.environment)
    if settings.device is not None:
        from cannikin.lab.spin import SpinPace
        from cannikin.lab.throttle import Pace, Throttle

        Throttle(settings.device, make_pace=SpinPace if settings.spins else Pace).install()


def _run_script(arguments: list[str]) -> None:
    """Run it as `python script.py ...` or `python -m module ...` would."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _leave_process_group() -> None:
    """End a process group that the script left open: torch's gloo threads now and then abort an exit with one."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _status(code: object) -> int:
    """Return the exit status that Python makes of `sys.exit(code)`."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


if __name__ == "__main__":
    main()
