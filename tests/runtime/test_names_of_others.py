"""What is read of others by names that are not public is there.

Each is read with a default, so that a name that is gone would end a warning or a check in silence. Where one of these
tests fails, its docstring says who reads the name.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from cannikin.runtime.fingerprints import list_fingerprint
from cannikin.runtime.loader import HeteroDataLoader


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Watcher:
    """Has a method that is an optimizer's hook."""

    def watch(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None: ...


def test_an_optimizer_has_its_hooks_by_their_owners():
    """`loop.loops_of` finds the models that watch an optimizer."""
    optimizer, watcher = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), Watcher()
    optimizer.register_step_pre_hook(watcher.watch)
    (hook,) = optimizer._optimizer_step_pre_hooks.values()
    assert hook.__self__ is watcher


def test_a_module_says_that_it_is_compiled_in_place(monkeypatch):
    """`notice` leaves compiled modules alone."""
    net = torch.nn.Linear(2, 2)
    assert net._compiled_call_impl is None
    monkeypatch.setattr(torch, "compile", lambda call: call)  # the real one takes seconds to import
    net.compile()
    assert net._compiled_call_impl is not None


def test_ddp_has_its_hooks_with_their_states_and_says_that_it_has_trained(alone):
    """`notice` looks for modules under plain DDP that train beside ours."""
    ddp, state = DistributedDataParallel(torch.nn.Linear(2, 2)), object()
    assert ddp._comm_hooks == []
    ddp.register_comm_hook(state, lambda _, bucket: allreduce_hook(None, bucket))
    assert [each for _, each in ddp._comm_hooks] == [state]
    assert ddp._has_rebuilt_buckets is False
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    assert ddp._has_rebuilt_buckets is True


def test_datasets_of_hugging_face_are_known():
    """`fingerprints` reads rows as they are stored; `loader` asks whether a stream is divided by rank."""
    reason = "datasets is not installed: pip install datasets"
    datasets = pytest.importorskip("datasets", reason=reason)
    split = pytest.importorskip("datasets.distributed", reason=reason).split_dataset_by_node
    rows = datasets.Dataset.from_dict({"number": list(range(8))})
    assert isinstance(vars(rows)["_fingerprint"], str)
    assert list_fingerprint(rows.shard(2, 0)) != list_fingerprint(rows.shard(2, 1))
    stream = split(rows.to_iterable_dataset(), rank=0, world_size=2)
    assert stream._distributed.world_size == 2
    assert isinstance(stream, IterableDataset)
    assert HeteroDataLoader(stream, batch_size=4).sharded
