"""What the four ranks of `test_groups` run: models over some of the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training_cases import Numbered, TinyNet, make_model, take_step

from cannikin.runtime.binding import ranks_beside
from cannikin.runtime.loader import HeteroDataLoader
from cannikin.runtime.parallel import attach

NUM_SAMPLES, BATCH = 60, 8


def train(loader: dict[str, Any], **model_options: Any) -> tuple[int, int, list[int], list[float]]:
    """Rank and number of ranks in the model's group, its samples of two epochs, and the weights in the end."""
    torch.manual_seed(0)
    model, optimizer = make_model(lr=0.05, **model_options)
    data = HeteroDataLoader(Numbered(NUM_SAMPLES), model=model, batch_size=BATCH, **loader)
    samples = []
    for _ in range(2):
        for batch in data:
            take_step(model, optimizer, batch)
            samples += [] if data.is_padding else batch[2].tolist()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return model.engine.rank, model.engine.world_size, samples, weights.tolist()


def whole(rank: int) -> list[float]:
    """Weights of one process on the whole batches."""
    return train({})[3]


def alone(rank: int, *, of: str, **loader: Any) -> Any:
    """A model per pair of ranks, or one of two ranks while the others have none."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if of == "one pair" and rank >= 2:
        return None
    return train(loader, process_group=pairs[rank // 2])


def in_a_mesh(rank: int, *, by: str, **loader: Any) -> Any:
    """A model per column of a mesh whose rows are for tensor parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = {"process_group": mesh["dp"].get_group()} if by == "process_group" else {"device_mesh": mesh["dp"]}
    return train(loader, **group)


def beside(rank: int) -> tuple[list[int], list[int], list[int]]:
    """Ranks beside those of a group of all, of a pair, and of a column of a mesh."""
    before = ranks_beside(dist.group.WORLD)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    alone = ranks_beside(pair)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return before, alone, ranks_beside(mesh["dp"].get_group())


def outputs(net: Any) -> list[float]:
    """What a network says to a few samples."""
    with torch.no_grad():
        return net(torch.stack([Numbered(NUM_SAMPLES)[index][0] for index in range(5)])).flatten().tolist()


def tensor_parallel(rank: int, **loader: Any) -> list[float]:
    """Outputs after two epochs of a model whose layers are cut over pairs of ranks, on two such pairs."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = parallelize_module(TinyNet(), mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    model = DistributedDataParallel(net, device_mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # DDP has made the cut parameters plain ones
    engine = attach(model, optimizer)
    data = HeteroDataLoader(Numbered(NUM_SAMPLES), model=engine, batch_size=BATCH, **loader)
    for _ in range(2):
        for batch in data:
            take_step(model, optimizer, batch)
    return outputs(model)


def whole_outputs(rank: int) -> list[float]:
    """Outputs after the same training of one process."""
    torch.manual_seed(0)
    model, optimizer = make_model(lr=0.05)
    data = HeteroDataLoader(Numbered(NUM_SAMPLES), model=model, batch_size=BATCH)
    for _ in range(2):
        for batch in data:
            take_step(model, optimizer, batch)
    return outputs(model)
