"""Which backend the process group has that we make."""

from __future__ import annotations

import pytest
import torch

from cannikin.runtime import parallel


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
