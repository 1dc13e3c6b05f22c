"""Every sample once an epoch: real processes, a real group between them, plans that change while they train."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from ranks import run_ranks, run_ranks_with_errors
from training_cases import Case, Step, train, train_to_the_end, train_until_killed

# Totals change as well as splits: 4 plans for each number of ranks.
SCRIPTS = {
    1: [(6,), (9,), (4,), (11,)],
    2: [(5, 3), (2, 7), (6, 6), (1, 4)],
    3: [(4, 3, 2), (1, 1, 7), (5, 5, 2), (2, 3, 1)],
    4: [(3, 3, 2, 2), (1, 5, 1, 3), (2, 1, 2, 1), (4, 1, 6, 1)],
}


def by_step(histories: list[list[list[Step]]], epoch: int) -> list[list[Step]]:
    """The ranks' steps of an epoch side by side; ranks that took unequal numbers of steps fail here."""
    return list(zip(*(history[epoch] for history in histories), strict=True))


def assert_exactly_once(histories: list[list[list[Step]]], case: Case) -> list[tuple[int, ...]]:
    """Check each epoch of one case, and return the plans in force by step, over all epochs."""
    plans = []
    for epoch in range(case.num_epochs):
        steps = by_step(histories, epoch)
        left = case.num_samples
        for step in steps:
            (plan,) = {view.plan for view in step}
            counts = tuple(len(view.samples) for view in step)
            assert sum(counts) == min(sum(plan), left), "ranks disagree on when a plan takes effect"
            assert counts == plan or left < sum(plan)
            left -= sum(counts)
            plans.append(plan)
        dropped = left if case.keywords.get("drop_last") else 0
        seen = [sample for step in steps for view in step for sample in view.samples]
        assert len(seen) == case.num_samples - dropped
        assert set(seen) <= set(range(case.num_samples))
        assert len(set(seen)) == len(seen)
        # a tail is dropped for being shorter than the batch that the next plan asks for
        assert dropped < max(map(sum, case.policy)) if dropped else left == 0
    return plans


def random_case(rng: random.Random, world_size: int) -> Case:
    script = [tuple(rng.randint(1, 9) for _ in range(world_size)) for _ in range(rng.randint(1, 5))]
    return Case(
        num_samples=rng.randint(1, 150),
        batch_size=rng.randint(world_size, 40),
        policy=script,
        num_workers=rng.choice([0, 0, 2]),
        keywords={"seed": rng.randint(0, 99), "shuffle": rng.random() < 0.8},
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_epoch_gives_every_sample_once_under_plans_that_change_in_its_middle(world_size):
    script = SCRIPTS[world_size]
    start = sum(script[0])
    cases = [
        Case(num_samples=211, batch_size=start, policy=script, num_epochs=3),
        Case(num_samples=240, batch_size=start, policy=script, num_workers=2),
        Case(num_samples=start * 3 + 1, batch_size=start, policy=script, num_epochs=3),  # too few samples for all ranks
        Case(num_samples=157, batch_size=start, policy=script, keywords={"drop_last": True, "seed": 7}),
    ]
    if world_size == 2:
        cases.append(Case(num_samples=150, batch_size=start, policy=script, is_stream=True))
        cases.append(Case(num_samples=150, batch_size=start, policy=script, is_stream=True, num_workers=2))
    if world_size == 3:
        # A controller that has something to do: it moves samples, and changes the total too.
        slow = (1e-3, 3e-3, 9e-3)
        keywords = {"max_batch_size": 24}
        cases.append(Case(num_samples=300, batch_size=12, sample_s=slow, keywords=keywords))
        cases.append(Case(num_samples=300, batch_size=12, sample_s=slow, num_workers=2))
    cases += [random_case(random.Random(f"{world_size} {number}"), world_size) for number in range(6)]
    told = run_ranks(train, world_size, cases, timeout_s=60)
    for number, case in enumerate(cases):
        plans = assert_exactly_once([histories[number] for histories in told], case)
        if case.num_samples > 150:
            assert len(set(plans)) > 1, f"{case} saw no change of plan"
            first_epoch = plans[: len(told[0][number][0])]
            assert len(set(first_epoch)) > 1 or case.num_workers, f"{case}: no plan changed inside of the first epoch"


@pytest.mark.parametrize(
    ("policy", "num_workers", "sizes"),
    [("script", 0, (4, 2, 3)), ("script", 2, (2, 3, 1)), ("cannikin", 0, (3, 3, 2))],
    ids=["scripted", "with workers", "cannikin"],
)
def test_what_killed_runs_saw_before_their_saves_and_the_last_one_after_is_one_epoch(
    tmp_path, policy, num_workers, sizes
):
    """Saved twice in one epoch, killed twice, and finished, mostly on another number of ranks."""
    folder = str(tmp_path)
    cases = {
        size: Case(
            num_samples=203,
            batch_size=12,
            policy=SCRIPTS[size] if policy == "script" else policy,
            num_workers=num_workers,
            sample_s=() if policy == "script" else (2e-4, 4e-4, 8e-4),
        )
        for size in sizes
    }
    for size, num_steps in zip(sizes[:2], (8, 3), strict=True):
        answers = run_ranks_with_errors(train_until_killed, size, cases[size], folder, 1, num_steps, timeout_s=30)
        assert "died" in {kind for kind, _ in answers.values()}, answers
        assert all(kind == "died" or "onnection" in words for kind, words in answers.values()), answers
    files = list(Path(folder).glob("seen-*.json"))
    assert len(files) == sum(sizes[:2])
    before = [sample for file in files for sample in json.loads(file.read_text())]
    assert 0 < len(before) < 203
    told = run_ranks(train_to_the_end, sizes[2], cases[sizes[2]], folder, timeout_s=30)
    after, following = (
        [sample for step in by_step(told, epoch) for view in step for sample in view.samples] for epoch in (0, 1)
    )
    assert sorted(before + after) == list(range(203))
    assert sorted(following) == list(range(203))
