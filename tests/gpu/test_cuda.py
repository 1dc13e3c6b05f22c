"""On a GPU: the gradient is that of one process, times are the device's own, and the step's path never waits for it."""

from __future__ import annotations

import time
from typing import Any

import nccl_cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SPLITS = [(5, 2, 1), (2, 2, 4), (6, 1, 1), (3, 3, 2)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ).cuda()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 8, 8, generator=generator).cuda(), torch.randint(0, 10, (8,), generator=generator).cuda()


def deterministic() -> None:
    torch.cuda.set_device(0)
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def make(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "fused adamw":
        return torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-3, fused=True)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def parameters_of_ranks(
    rank: int, world_size: int, folder: str, mps: dict[str, str], form: str, kind: str
) -> list[np.ndarray]:
    from cannikin import HeteroDataParallel

    nccl_cases.begin(rank, world_size, folder, mps, form)
    deterministic()
    net = network()
    if kind == "channels last":
        net = net.to(memory_format=torch.channels_last)
    optimizer = make(net, kind)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0) if kind == "grad scaler" else None
    module: Any = torch.compile(net) if kind == "compiled" else net
    model = HeteroDataParallel(module, optimizer, grad_scaler=scaler, lr_rule="none")
    for step in range(12):
        images, labels = batch(step)
        split = SPLITS[step % len(SPLITS)]
        start = sum(split[:rank])
        mine = slice(start, start + split[rank])
        model.use_batch(split[rank], 8)
        inputs = images[mine]
        if kind == "channels last":
            inputs = inputs.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels[mine])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return [p.detach().cpu().numpy() for p in net.parameters()]


def parameters_of_one(kind: str) -> list[np.ndarray]:
    deterministic()
    net = network()
    optimizer = make(net, kind)
    for step in range(12):
        images, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return [p.detach().cpu().numpy() for p in net.parameters()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["gloo", "nccl"])
@pytest.mark.parametrize("kind", ["plain", "channels last", "grad scaler", "fused adamw", "compiled"])
def test_three_unequal_ranks_on_one_gpu_end_with_the_parameters_of_one_process(kind, form, mps, tmp_path):
    expected = parameters_of_one(kind)
    for result in run_ranks(parameters_of_ranks, 3, str(tmp_path), mps, form, kind, timeout_s=110):
        for ours, theirs in zip(result, expected, strict=True):
            assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def sums_at_once(rank: int, world_size: int, folder: str, mps: dict[str, str], form: str) -> list[bool]:
    """Whether the gradient is that of all ranks when backward returns, as the optimizer will read it."""
    from cannikin import HeteroDataParallel

    nccl_cases.begin(rank, world_size, folder, mps, form)
    net = nn.Linear(8192, 8192, bias=False).cuda()  # a bucket of 256 MiB: gloo copies it for milliseconds
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = HeteroDataParallel(net, optimizer, bucket_cap_mb=1000, lr_rule="none")
    found = []
    for step in range(6):
        optimizer.zero_grad()
        model.use_batch(rank + 1, 3)
        inputs = torch.full((rank + 1, 8192), float(step + rank), device="cuda")
        (model(inputs).sum() / (rank + 1)).backward()
        early = net.weight.grad.clone()
        torch.cuda.synchronize()
        expected = (step + 2 * (step + 1)) / 3
        found.append(bool(torch.allclose(early, torch.full_like(early, expected))))
        optimizer.step()
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["gloo", "nccl"])
def test_the_optimizer_never_reads_a_sum_that_is_still_on_its_way(form, mps, tmp_path):
    for found in run_ranks(sums_at_once, 2, str(tmp_path), mps, form, timeout_s=110):
        assert all(found), found


class Pairs(nn.Module):
    """Scores of pairs out of two tables, as recommenders have them: most of the gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(2000, 32), nn.Embedding(1000, 32)
        self.output = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.users(users), self.items(items)], dim=-1)
        return self.output(joined).squeeze(-1)


def train_pairs(net: nn.Module, model: Any, parts: Any, *, half: bool) -> list[np.ndarray]:
    """80 steps of Adam, so that the noise scale's preconditioned norms are taken too; `parts` cuts a batch."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-3)
    model = model(net, optimizer)
    generator = torch.Generator().manual_seed(0)
    for step in range(80):
        users, items = (torch.randint(0, high, (300,), generator=generator).cuda() for high in (2000, 1000))
        mine = parts(step, model)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            logits = model(users[mine], items[mine])
        wanted = ((users + items) % 2)[mine].float()
        nn.functional.binary_cross_entropy_with_logits(logits.float(), wanted).backward()
        optimizer.step()
    return [p.detach().cpu().numpy() for p in net.parameters()]


def pairs_of_ranks(
    rank: int, world_size: int, folder: str, mps: dict[str, str], form: str, half: bool
) -> list[np.ndarray]:
    from cannikin import HeteroDataParallel

    nccl_cases.begin(rank, world_size, folder, mps, form)

    def parts(step: int, model: HeteroDataParallel) -> slice:
        split = ((200, 70, 30), (100, 100, 100), (30, 20, 250))[step % 3]
        model.use_batch(split[rank], 300)
        return slice(sum(split[:rank]), sum(split[: rank + 1]))

    deterministic()
    torch.manual_seed(0)
    return train_pairs(
        Pairs().cuda(), lambda net, adam: HeteroDataParallel(net, adam, lr_rule="none"), parts, half=half
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["gloo", "nccl"])
@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-4), (True, 0.05)], ids=["float32", "bfloat16"])
def test_tables_of_embeddings_under_adam_end_as_in_one_process(half, tolerance, form, mps, tmp_path):
    deterministic()
    torch.manual_seed(0)
    expected = train_pairs(Pairs().cuda(), lambda net, adam: net, lambda step, model: slice(None), half=half)
    for result in run_ranks(pairs_of_ranks, 3, str(tmp_path), mps, form, half, timeout_s=110):
        for ours, theirs in zip(result, expected, strict=True):
            assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


class _Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64 * 120

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def train_alone(rank: int, world_size: int) -> dict[str, Any]:
    """One rank on NCCL: what its windows say, and the wall time of a step."""
    from cannikin import HeteroDataLoader, HeteroDataParallel

    dist.destroy_process_group()  # the harness made a gloo group
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    net = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    windows: list[Any] = []

    class Keep:
        def write(self, event: Any) -> None:
            if type(event).__name__ == "WindowRecord":
                windows.append(event)

    model = HeteroDataParallel(net, optimizer, policy="even", observers=[Keep()], bucket_cap_mb=40)
    loader = HeteroDataLoader(_Numbers(), model=model, batch_size=64, collate_fn=len)
    pool = torch.randn(64, 4096, device="cuda")
    durations, start = [], 0.0
    for step, size in enumerate(loader):
        if step == 60:
            torch.cuda.set_sync_debug_mode("error")  # from here on nothing of ours may wait for the device
        optimizer.zero_grad()
        model(pool[:size]).square().mean().backward()
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.use_batch(64, 64)
        optimizer.zero_grad()
        model(pool).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
    steady = [w for w in windows if w.first_step >= 40]
    return {
        "windows": len(windows),
        "valid": [w.num_valid for w in steady],
        "step_ms": [w.step_ms for w in steady],
        "backward_ms": [w.backward_ms[0] for w in steady],
        "done_ms": [w.done_ms[0] for w in steady],
        "wall_ms": sorted(durations)[len(durations) // 2] * 1e3,
    }


@pytest.mark.timeout(120)
def test_one_rank_on_nccl_is_measured_without_waiting_for_the_device():
    (seen,) = run_ranks(train_alone, 1, timeout_s=110)
    assert seen["windows"] >= 10
    assert min(seen["valid"]) > 0
    # A loose check, for clocks that are wrong by more than noise: an all-reduce of one rank takes next to nothing.
    middle = sorted(seen["step_ms"])[len(seen["step_ms"]) // 2]
    assert 0.3 * seen["wall_ms"] < middle < 3 * seen["wall_ms"]
    assert all(done >= 0.5 * backward for done, backward in zip(seen["done_ms"], seen["backward_ms"], strict=True))


class Mean(nn.Module):
    """An output that is not one row per sample, so that its batch cannot be run in parts."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.mean()


def memory_of_one(rank: int, world_size: int) -> dict[str, Any]:
    """Grow the batch on a card that was cut down to 4 GiB for this process, and look at the cap that is learned."""
    from cannikin import HeteroDataParallel

    torch.cuda.set_device(0)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)
    net = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1), Mean()).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-5)
    model = HeteroDataParallel(net, optimizer, policy="even")

    def step(size: int) -> None:
        model.use_batch(size, size)
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(size, 1024, device="cuda")).backward()
        optimizer.step()

    for size in (256, 256, 256, 512, 1024, 2048, 4096):
        step(size)
    cap = model.engine.loop.memory.max_batch
    step(int(0.97 * cap))
    try:
        step(2 * cap)
    except torch.OutOfMemoryError as error:
        model.engine.explain(error)  # backward raises outside of our code; uncaught, the hook of last resort says it
        return {"cap": cap, "notes": list(getattr(error, "__notes__", ()))}
    return {"cap": cap, "notes": []}


@pytest.mark.timeout(120)
def test_the_cap_learned_from_peak_memory_holds_and_twice_of_it_does_not():
    (seen,) = run_ranks(memory_of_one, 1, timeout_s=110)
    assert 4096 < seen["cap"] < 10**6
    assert "rank 0 ran out of memory with a local batch of" in seen["notes"][-1]
