"""Modules under `fully_shard` over NCCL, several ranks on one GPU: equal to one process, measured layer by layer."""

from __future__ import annotations

import nccl_cases
import numpy as np
import pytest
import sharded_cases
import torch
from ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LAUNCHES = {"cases on 2": (2, "cases"), "more on 3": (3, "more"), "replicated on 4": (4, "replicated")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_unequal_ranks_of_a_sharded_module_over_nccl_equal_one_process(launch, mps, tmp_path):
    world_size, group = LAUNCHES[launch]
    wrong: dict[object, object] = {}
    for errors in run_ranks(nccl_cases.run_sharded_cases, world_size, str(tmp_path), mps, group, timeout_s=280):
        for (name, dtype), error in errors.items():
            rounded = "mp_policy" in sharded_cases.ALL_CASES[group][name].options
            limit = 2e-2 if rounded else {"float32": 1e-5, "float64": 1e-12}[dtype]
            if isinstance(error, str) or error > limit:
                wrong[name, dtype] = error
        assert {name for name, _ in errors} == set(sharded_cases.ALL_CASES[group]), wrong
    assert not wrong


@pytest.mark.timeout(120)
def test_compute_of_layers_is_each_rank_s_own_over_nccl_within_10_percent(mps, tmp_path):
    """Each rank spins for a time that is known in every layer, and all wait for the slowest.

    The fastest spins for so long that its host, which takes some 70 ms for a step of these layers, keeps ahead.
    """
    speeds = (1.0, 0.5, 0.25)
    first, *_ = run_ranks(nccl_cases.layer_times, 3, str(tmp_path), mps, speeds, 64, 25, timeout_s=100)
    layers, batches = first["window"].layers, first["window"].local_batches[-1]
    assert layers.ahead
    assert layers.in_flight == 1
    computed = np.median(layers.compute_s, axis=0)  # [rank, segment]
    forward, backward = computed[:, 1 : layers.num_forward].sum(axis=1), computed[:, layers.num_forward :].sum(axis=1)
    for rank, speed in enumerate(speeds):
        spun_s = nccl_cases.FIXED_S + nccl_cases.SAMPLE_S * batches[rank] / speed
        found = (rank, forward.tolist(), backward.tolist(), spun_s)
        assert forward[rank] + backward[rank] == pytest.approx(spun_s, rel=0.1), found
        assert forward[rank] == pytest.approx(nccl_cases.FORWARD_SHARE * spun_s, rel=0.1), found
