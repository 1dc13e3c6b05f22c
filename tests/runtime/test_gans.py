"""A second model that follows the first: GANs on unequal ranks end with the parameters of one process."""

from __future__ import annotations

import gan_cases
import pytest
from ranks import run_ranks
from told import values


@pytest.fixture(scope="module")
def told():
    return run_ranks(gan_cases.run, 3, timeout_s=100)


@pytest.mark.parametrize(
    "loop", [*gan_cases.LOOPS, "attached", "several attached", *(f"ahead, {name}" for name in gan_cases.AHEAD)]
)
def test_a_gan_on_unequal_ranks_ends_with_the_parameters_of_one_process(told, loop):
    assert max(values(told, loop)) <= 1e-12


def test_a_snapshot_can_be_taken_after_every_batch_of_a_gan_that_leaves_nothing_half_done(told):
    first, *others = values(told, "rests")
    assert all(other == first for other in others)
    piling = first.pop("accumulation over batches")
    assert piling == 15, "of 30 batches, two of which make one step of the discriminator"
    assert min(first.values()) >= 29


def test_an_optimizer_that_two_followers_share_follows_the_leaders_plan_once(told):
    first, *others = values(told, "rates")
    assert all(other == first for other in others)
    assert {total for _, _, total in first} == {12.0, 24.0, 16.0}
    for rate_d, rate_g, total in first:
        assert (rate_d, rate_g) == (pytest.approx(0.01 * total / 12), pytest.approx(0.1 * total / 12))


def test_mistakes_with_followers_are_answered_with_advice(told):
    for forward, loader, use_batch, follows, policy, several in values(told, "mistakes"):
        assert "this model follows another, so iterate over that one's" in forward
        assert "give the loader to that one" in loader
        assert "call use_batch(local, total) of that one" in use_batch
        assert "follow the one that has the loader" in follows
        assert "policy= of a model that follows another: give it to that one" in policy
        assert "attach() got 2 modules" in several
        assert "the others with follows=" in several
