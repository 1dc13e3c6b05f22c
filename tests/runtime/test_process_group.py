"""Which backend the process group has that we make."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from cannikin.runtime import parallel
from cannikin.runtime.device import Cpu, carrier


@pytest.mark.parametrize(
    ("device", "asked", "backend"),
    [("cpu", None, "gloo"), ("cuda", None, "nccl"), ("cuda", "gloo", "gloo"), ("cuda", "", "nccl")],
)
def test_the_backend_is_the_devices_unless_the_environment_asks_for_another(monkeypatch, device, asked, backend):
    made = []
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(parallel.dist, "init_process_group", lambda name, **_: made.append(name))
    monkeypatch.delenv("CANNIKIN_BACKEND", raising=False)
    if asked is not None:
        monkeypatch.setenv("CANNIKIN_BACKEND", asked)
    parallel.ensure_process_group(torch.device(device))
    assert made == [backend]


def words_of_carriers(rank: int, world_size: int) -> dict[str, list[str]]:
    """What is said of a group of gloo, one without a name and torch's fake one, and who carries a CPU's tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    said = {}
    for name, keywords in {"gloo": {}, "": {}, "fake": {"store": FakeStore()}}.items():
        dist.destroy_process_group()
        store = {"store": dist.HashStore(), **keywords}
        dist.init_process_group(name or None, rank=0, world_size=1, **store)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Cpu().end_marker(dist.group.WORLD)
        said[name] = [carrier(dist.group.WORLD, torch.device("cpu")), *(str(warning.message) for warning in caught)]
    return said


def test_a_carrier_whose_sums_were_never_timed_is_named_with_what_is_not_known():
    (said,) = run_ranks(words_of_carriers, 1)
    assert said["gloo"] == ["gloo"]
    assert said[""] == ["gloo"]
    name, text = said["fake"]
    assert name == "fake"
    assert "summed by 'fake'" in text
    assert "communication times, and splits that rest on them, may be wrong" in text
