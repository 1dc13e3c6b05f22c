"""A real all-reduce between two processes of this host, through gloo on loopback, for at most 20 seconds.

python -m cannikin.doctor.loopback RANK FOLDER        one of the two; rank 0 prints `LoopbackFacts`
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import msgspec

from cannikin.doctor.asking import ask_all
from cannikin.doctor.facts import LoopbackFacts

__all__ = ["measure"]

_LIMIT_S = 20.0
_SMALL, _NUM_SMALL = 1, 50  # numbers of float32, and repetitions
_LARGE, _NUM_LARGE = 2**22, 5
# Of a launch that this is no part of; and no GPU is to be touched.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG")


def measure() -> LoopbackFacts:
    """Time and bandwidth of an all-reduce on this host."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment |= {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        with tempfile.TemporaryDirectory(prefix="cannikin-doctor-") as folder:
            commands = [[sys.executable, "-m", __name__, str(rank), folder] for rank in range(2)]
            answers = ask_all(commands, limit_s=_LIMIT_S, environment=environment)
    except OSError as error:
        return LoopbackFacts(problem=f"there is no folder for temporary files ({error.strerror})")
    problem = next((answer.problem for answer in answers if answer.problem is not None), None)
    if problem is not None:
        return LoopbackFacts(problem=problem)
    try:
        return msgspec.json.decode(answers[0].text.splitlines()[-1], type=LoopbackFacts)
    except (IndexError, msgspec.DecodeError):
        return LoopbackFacts(problem="it ended without a result")


def _take_part(rank: int, folder: str) -> LoopbackFacts:
    import torch
    import torch.distributed as dist

    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=_LIMIT_S))
    small, large = torch.zeros(_SMALL), torch.zeros(_LARGE)
    latency_s = _median_s(lambda: dist.all_reduce(small), _NUM_SMALL)
    large_s = _median_s(lambda: dist.all_reduce(large), _NUM_LARGE)
    dist.destroy_process_group()
    return LoopbackFacts(latency_s=latency_s, bytes_per_s=4 * _LARGE / large_s)


def _median_s(call: Callable[[], object], num_times: int) -> float:
    call()
    times_s = []
    for _ in range(num_times):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


if __name__ == "__main__":
    result = _take_part(int(sys.argv[1]), sys.argv[2])
    print(msgspec.json.encode(result).decode())
