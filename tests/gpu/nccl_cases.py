"""What ranks that share one GPU run over NCCL, or over gloo to compare; `begin` makes their group as scripts do."""

from __future__ import annotations

import gc
import itertools
import os
from datetime import timedelta
from typing import Any

import numpy as np
import parity_cases
import sharded_cases
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from training_cases import ScriptedPlanner

from cannikin import HeteroDataLoader, HeteroDataParallel, attach, step_time
from cannikin.lab.cluster import LabDevice
from cannikin.lab.mechanisms.gpu import as_host
from cannikin.lab.spin import SpinPace
from cannikin.lab.throttle import Throttle
from cannikin.runtime.device import carrier

FORMS: dict[str, dict[str, Any]] = {
    "nothing named": {},
    "nccl": {"backend": "nccl"},
    "both": {"backend": "cpu:gloo,cuda:nccl"},
    "eager": {"device_id": torch.device("cuda:0")},
    "gloo": {"backend": "gloo"},
}
SAMPLE_S, FIXED_S, FORWARD_SHARE = 2.5e-3, 5e-3, 0.4  # so long that real work, about 2 ms per step, hardly counts
NUM_LAYERS, WIDTH = 12, 1024
LAST = 20  # steps that are compared


def begin(rank: int, world_size: int, folder: str, mps: dict[str, str], form: str) -> None:
    """Make the default process group in one of the forms in which scripts do, instead of the harness's."""
    dist.destroy_process_group()
    os.environ.update({**as_host(rank, world_size), **mps})
    torch.cuda.set_device(0)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    limit = timedelta(seconds=60)
    dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=limit, **FORMS[form])


def run_cases(rank: int, world_size: int, folder: str, mps: dict[str, str], form: str, names: list[str]) -> Any:
    """Run parity cases on the GPU."""
    begin(rank, world_size, folder, mps, form)
    parity_cases.DEVICE = "cuda"
    return parity_cases.run_cases(rank, world_size, names)


def run_sharded_cases(rank: int, world_size: int, folder: str, mps: dict[str, str], group: str) -> Any:
    """Run parity cases of modules under `fully_shard` on the GPU."""
    begin(rank, world_size, folder, mps, "nccl")
    parity_cases.DEVICE = "cuda"
    return sharded_cases.run_cases(rank, world_size, group)


class Keeping(ScriptedPlanner):
    """Keeps the last window that it was shown."""

    window: Any = None

    def decide(self, window: Any, job: Any, step: int) -> Any:
        self.window = self.window if window is None else window
        return super().decide(window, job, step)


def layer_times(
    rank: int, world_size: int, folder: str, mps: dict[str, str], speeds: tuple[float, ...], size: int, num_steps: int
) -> dict[str, Any]:
    """Return the last window of a run of sharded layers that spin for a known time, with so many samples per rank."""
    begin(rank, world_size, folder, mps, "nccl")
    device = LabDevice(speed=speeds[rank], sample_s=SAMPLE_S, fixed_s=FIXED_S, forward_share=FORWARD_SHARE)
    Throttle(device, make_pace=SpinPace).install()
    net = layers()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    planner, total = Keeping([(size,) * world_size]), size * world_size
    engine = attach(net, optimizer, policy=planner)
    for _ in HeteroDataLoader(Numbers(total * num_steps), model=engine, batch_size=total):
        optimizer.zero_grad()
        inputs = torch.randn(engine.local_batch, WIDTH, device="cuda", requires_grad=True)  # so that all layers spin
        net(inputs).square().mean().backward()
        optimizer.step()
    return {"window": planner.window}


def carriers(rank: int, world_size: int, folder: str, mps: dict[str, str], form: str) -> list[str]:
    """Return who carries CUDA tensors over the default group, over a new group and over a mesh's."""
    begin(rank, world_size, folder, mps, form)
    mesh = dist.device_mesh.init_device_mesh("cuda", (world_size,))
    groups = [dist.group.WORLD, dist.new_group(list(range(world_size))), mesh.get_group()]
    return [carrier(group, torch.device("cuda")) for group in groups]


class Numbers(torch.utils.data.Dataset):
    """Sample numbers, as many as asked for."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def layers(*first: nn.Module) -> nn.Sequential:
    """Layers of one size, so that spinning is shared out over buckets in a way that is known."""
    torch.manual_seed(0)
    return nn.Sequential(*first, *(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).cuda()


def memory_beyond_ddp(rank: int, world_size: int, folder: str, mps: dict[str, str], form: str) -> int:
    """Train an even split with plain DDP and with ours; return the bytes that ours takes more of the GPU's memory."""
    begin(rank, world_size, folder, mps, form)
    inputs, taken = torch.randn(32, WIDTH, device="cuda"), []
    for wrap in (lambda net, _: nn.parallel.DistributedDataParallel(net, bucket_cap_mb=4), _even):
        net = layers()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-6)
        model = wrap(net, optimizer)
        for _ in range(60):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        taken.append(torch.cuda.max_memory_reserved())
        del net, optimizer, model
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return taken[1] - taken[0]


def _even(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Ours, which takes a batch from its loader whenever forward is called."""
    model = HeteroDataParallel(net, optimizer, bucket_cap_mb=4, policy="even")
    total = 32 * dist.get_world_size()
    batches = iter(HeteroDataLoader(Numbers(60 * total), model=model, batch_size=total, collate_fn=len))

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs[: next(batches)])

    return forward


def learned(
    rank: int,
    world_size: int,
    folder: str,
    mps: dict[str, str],
    form: str,
    speeds: tuple[float, ...],
    steps: int,
    normed: bool = False,
) -> dict[str, Any] | None:
    """Train on devices of known times; return what rank 0 has learned of them, and the truth, by name."""
    begin(rank, world_size, folder, mps, form)
    device = LabDevice(speed=speeds[rank], sample_s=SAMPLE_S, fixed_s=FIXED_S, forward_share=FORWARD_SHARE)
    throttle = Throttle(device, make_pace=SpinPace)
    throttle.install()
    net = layers(nn.BatchNorm1d(WIDTH)) if normed else layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    model = HeteroDataParallel(net, optimizer, bucket_cap_mb=16)
    sums = Sums(model.engine._reducer)
    total = 32 * world_size
    loader = HeteroDataLoader(Numbers(total * steps), model=model, batch_size=total, collate_fn=len)
    inputs = torch.randn(total, WIDTH, device="cuda")
    plans, marks = [], []
    for step, size in enumerate(loader):
        if step == steps // 2 and form != "gloo":  # which waits by itself
            torch.cuda.set_sync_debug_mode("error")  # from here on nothing may wait for the device
        optimizer.zero_grad()
        sums.begin_step()
        loss = model(inputs[:size]).square().mean()
        marks.append([_event()])
        loss.backward()
        marks[-1].append(_event())
        optimizer.step()
        plans.append(model.plan.local_batches)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    throttle.remove()
    # From the optimizer's start to the next backward's, and from one backward to the next, by the script's own events.
    before = [end[1].elapsed_time(start[0]) / 1e3 for end, start in itertools.pairwise(marks)]
    interval = [first[0].elapsed_time(second[0]) / 1e3 for first, second in itertools.pairwise(marks)]
    own = torch.tensor([np.median(before[-LAST:]), np.median(interval[-LAST:])], dtype=torch.float64, device="cuda")
    everybody = [torch.zeros_like(own) for _ in speeds]
    dist.all_gather(everybody, own)
    befores, intervals = torch.stack(everybody).T.tolist()
    sizes, sums_s = model.engine._reducer.bucket_bytes, sums.seconds()
    if rank != 0:
        return None
    cluster = model.engine.coordinator.planner.model().cluster
    batches = np.array(plans[-1])
    seconds = FIXED_S + SAMPLE_S * batches / np.array(speeds)
    num_layers = np.round(np.cumsum(sizes) / (4 * WIDTH * (WIDTH + 1)))
    shares = np.broadcast_to(num_layers / NUM_LAYERS, cluster.gammas.shape)
    return {
        "plans": [plan for plan, before in zip(plans, [None, *plans], strict=False) if plan != before],
        "at_30": plans[30],
        "spun forward": (FORWARD_SHARE * seconds).tolist(),
        "forward": (cluster.forward.at(batches).tolist(), befores),
        "backward": (cluster.backward.at(batches).tolist(), ((1 - FORWARD_SHARE) * seconds).tolist()),
        "overlap": (cluster.gammas.ravel().tolist(), shares.ravel().tolist()),
        "communication": ((-np.diff(cluster.tails_s, append=0.0)).tolist(), sums_s),
        "step": ([step_time(cluster, plans[-1])], [float(np.median(intervals))]),
    }


class Sums:
    """The test's own events around every all-reduce in training, on a stream that has nothing else to do."""

    def __init__(self, reducer: Any) -> None:
        self._steps: list[list[list[torch.cuda.Event]]] = []
        self._side = torch.cuda.Stream()
        self._sum, reducer.sum_weighted = reducer.sum_weighted, self._watched_sum

    def begin_step(self) -> None:
        self._steps.append([])

    def _watched_sum(self, buffer: torch.Tensor, weight: float) -> dist.Work:
        events, work = [_event()], self._sum(buffer, weight)
        self._steps[-1].append(events)
        if dist.get_backend() == "gloo":  # on the host by then, and being copied to the device
            work.get_future().add_done_callback(lambda _: events.append(self._end(work)))
        else:
            events.append(self._end(work))
        return work

    def _end(self, work: dist.Work) -> torch.cuda.Event:
        with torch.cuda.stream(self._side):
            work.synchronize()  # the stream waits, the host does not
            return _event()

    def seconds(self) -> list[float]:
        """Return each bucket's median: of the rank that came last, which waited for none; none was queued here."""
        last = [[start.elapsed_time(end) / 1e3 for start, end in step] for step in self._steps[-LAST:]]
        least = torch.tensor(last, dtype=torch.float64, device="cuda")
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        medians: list[float] = least.median(dim=0).values.tolist()
        return medians


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
