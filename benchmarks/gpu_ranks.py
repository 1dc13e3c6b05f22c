"""What each rank of the GPU benchmarks runs, under torchrun: `benchmarks.gpu` launches it on ranks of the lab.

Takes jobs one after another, appends the result of each to a file of JSON lines as soon as it has it, and passes over
those that no longer fit into the time. An error in a job ends the launch, and a line says why: other ranks may wait in
a collective for ever, so `benchmarks.gpu` launches the rest anew.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import gpu_overhead, gpu_splits, gpu_truth
from benchmarks.gpu_steps import agreed, set_speed

JOBS: dict[str, Callable[..., dict[str, Any]]] = {**gpu_splits.JOBS, **gpu_overhead.JOBS, **gpu_truth.JOBS}
STUCK = timedelta(seconds=60)  # after which a collective that not all ranks have come to is an error


def run_job(job: dict[str, Any], device: str, folder: str) -> dict[str, Any]:
    """Make this rank as fast as the job says, and do it; a job's function gets what it names of the job's settings."""
    rank, settings = dist.get_rank(), {**job, "device": device, "folder": folder}
    set_speed(job["speeds"][rank], job["sample_ms"], forward_share=job["forward_shares"][rank])
    function = JOBS[job["name"]]
    known = {name: settings[name] for name in inspect.signature(function).parameters if name in settings}
    return function(**{**known, **job["keywords"]})


def main() -> None:
    """Do the jobs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=Path, required=True, help="JSON: a list of jobs, as benchmarks.gpu makes them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="", help="of the process group; where left out none is named")
    parser.add_argument("--until", type=float, required=True, help="by time.time(); no job begins that would end later")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(0)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = False  # local batches change: no search for kernels at each new size
    dist.init_process_group(options.backend or None, timeout=STUCK)
    about = {"backend": options.backend, "carries": dist.get_backend_config(), "torch": torch.__version__}
    for job in json.loads(options.jobs.read_text()):
        began = time.time()
        head = {"job": job["name"], **{k: v for k, v in job.items() if k != "keywords"}, **job["keywords"], **about}
        if not agreed(began + job["expect_s"] < options.until, options.device):
            _write(options.out, {**head, "failed": "passed over: the time was up"})
            continue
        try:
            result = run_job(job, options.device, str(options.out.parent))
        except Exception as error:
            traceback.print_exc()
            if dist.get_rank() == 0:
                _write(options.out, {**head, "failed": f"{type(error).__name__}: {error}"})
            os._exit(1)
        _write(options.out, {**head, **result, "took_s": time.time() - began})
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an ordinary exit


def _write(out: Path, result: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        took = f"{result['took_s']:.0f} s" if "took_s" in result else result.get("failed", "")
        print(
            f"{result['job']} {result.get('kind', '')} {result.get('total', '')} {result['speeds']}: {took}", flush=True
        )


if __name__ == "__main__":
    main()
