"""Replicas that come and go under torchft: nothing is lost, nothing is repeated, and all end with the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import run_ranks

pytest.importorskip("torchft", reason="torchft is not installed: pip install -c constraints.txt '.[torchft]'")

from torchft.coordination import LighthouseServer
from torchft_cases import misuse, stop_and_resume, train_apart

from benchmarks.torchft_churn import SAMPLE_MS, churn, count


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a lighthouse that waits for so many replicas as the test asks for."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=request.param, join_timeout_ms=10_000)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def test_a_replica_that_is_killed_and_comes_back_costs_no_sample_and_no_weight():
    with churn(SAMPLE_MS, num_epochs=6, num_samples=500) as running:
        running.wait_for(20, 3, limit_s=60)
        running.kill("a")  # whose plans all follow
        running.wait_for(25, 2, limit_s=60)
        running.start("a")
        running.wait_for(27, 3, limit_s=60)
        running.wait(limit_s=60)
        found = count(running)
        back = next(step["plan"] for step in running.steps() if step["step"] > 25 and len(step["plan"]) == 3)
    assert (found.lost, found.repeated) == (0, 0)
    assert found.off < 1e-9
    assert back["a"] > back["b"] > back["c"]  # a has its share again, and is not learned anew


@pytest.mark.parametrize("lighthouse", [2], indirect=True)
def test_replicas_that_trained_apart_and_lost_each_other_end_with_one_model(lighthouse):
    first, second = run_ranks(train_apart, 2, lighthouse, timeout_s=100)
    assert 6 in first["refused"]
    assert 6 in second["refused"]
    assert first["history"] == second["history"]
    assert first["plan"] == second["plan"]
    assert first["state"] == second["state"]  # BatchNorm's statistics too, and a layer that not every step used
    for epoch in (0, 1):
        trained = [
            index for run in (first, second) for at, _, indices in run["seen"] if at == epoch for index in indices
        ]
        assert sorted(trained) == list(range(65))


@pytest.mark.parametrize("lighthouse", [1], indirect=True)
def test_a_saved_state_goes_on_where_it_was_when_all_replicas_were_lost(lighthouse):
    (seen,) = run_ranks(stop_and_resume, 1, lighthouse, timeout_s=60)
    assert sorted(seen) == list(range(65))


@pytest.mark.parametrize("lighthouse", [1], indirect=True)
def test_misuse_is_answered_with_what_to_do(lighthouse):
    (told,) = run_ranks(misuse, 1, lighthouse, timeout_s=60)
    loop = {"no loader", "no batch", "no backward", "two forwards", "no step"}
    assert told.keys() == {"async quorum", "SyncBatchNorm", *loop}
    assert "make it with use_async_quorum=False" in told["async quorum"]
    assert "make a LiveDataLoader" in told["no loader"]
    assert "call step() after its backward()" in told["two forwards"]
    assert "call backward() and step() once for each batch" in told["no step"]
