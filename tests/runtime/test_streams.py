"""Streams on real ranks: one that all of them should share, and one of each rank's own."""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from ranks import run_ranks
from stream_cases import CASES, LENGTH, run_streams
from told import Raised, values

from cannikin.runtime.fingerprints import fingerprint
from cannikin.runtime.streams import SharedRandomness


@pytest.fixture(scope="module")
def told():
    return run_ranks(run_streams, 2, timeout_s=120)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        ("split_by_rank", 0),
        ("split_from_the_middle_on", 3),
        ("shuffled_by_process", 0),
        ("empty_on_one_rank", 0),
        ("unequal", 4),
        ("unequal_with_workers", 4),
        ("unequal_under_no_weighting", 4),
        ("unequal_in_the_last_batch", 5),
        ("sampler_by_rank", 0),
    ],
)
def test_every_rank_stops_at_the_step_at_which_streams_differ(told, case, step):
    for answers in told:
        raised = answers[case]
        assert isinstance(raised, Raised), raised
        assert raised.kind == "DisagreementError"
        assert f"different samples for step {step} " in raised.text
        assert "sharded=True" in raised.text


def test_what_is_not_checked_goes_on(told):
    assert all(len(samples) == LENGTH // 8 for samples, _ in values(told, "shuffled_by_process_and_not_checked"))


def test_shuffles_and_augmentations_by_global_generators_are_the_same_on_every_rank(told):
    ranks = values(told, "shuffled_and_augmented")
    batches = [samples for samples, *_ in ranks]
    seen = [number for step in zip(*batches, strict=True) for part in step for number in part]
    assert sorted(seen[:LENGTH]) == sorted(seen[LENGTH:]) == list(range(LENGTH))
    assert seen[:LENGTH] != seen[LENGTH:], "another epoch is another order"
    assert ranks[0][1:] != ranks[1][1:], "what the training draws stays each rank's own"
    assert all(len(samples) == 2 * LENGTH // 8 for samples, *_ in values(told, "shuffled_and_augmented_by_workers"))


def test_a_rank_that_cannot_read_stops_the_others(told):
    assert [answers["damaged_on_one_rank"].kind for answers in told] == ["DisagreementError", "OSError"]
    assert "another rank could not read" in told[0]["damaged_on_one_rank"].text
    kinds = [answers["uncounted_on_one_rank"].kind for answers in told]
    assert kinds == ["DisagreementError", "OSError"]


def gradients_of(steps: list[list[int]], weights=len) -> list[float]:
    """Of the mean over all samples of (w x)^2 at w = 0.5, on one process; parts are weighted as `weights` says."""
    means = [[(weights(part), np.mean(np.square(part, dtype=float))) for part in step if part] for step in steps]
    return [sum(w * mean for w, mean in parts) / sum(w for w, _ in parts) for parts in means]


@pytest.mark.parametrize(("case", "weights"), [("own_streams", len), ("own_streams_of_tokens", lambda x: sum(x) + 1)])
def test_streams_of_ranks_are_used_up_once_each_whatever_their_lengths(told, case, weights):
    ranks = values(told, case)
    for rank, (samples, *_) in enumerate(ranks):
        seen = [number for part in samples for number in part]
        assert seen == list(range(100 * rank, 100 * rank + (13, 30)[rank])), "every sample once"
    assert [len(samples) for samples, *_ in ranks] == [15, 15], "as many steps on both"
    steps = [list(parts) for parts in zip(*(samples for samples, *_ in ranks), strict=True)]
    for _, gradients, totals in ranks:
        assert totals == [sum(map(len, step)) for step in steps]
        np.testing.assert_allclose(gradients, gradients_of(steps, weights), rtol=1e-12)


def test_progress_counts_the_samples_that_streams_still_had(told):
    assert values(told, "progress_of_own_streams") == [11.0, 11.0]  # 88 samples, 8 per initial batch


def test_streams_of_ranks_are_resumed_each_where_it_was(told):
    states, before, after, _ = zip(*values(told, "own_streams_resumed"), strict=True)
    assert states[0] == states[1], "rank 0's state is enough"
    assert states[0]["shards"] == [24, 8]
    for rank in (0, 1):
        seen = [number for part in (*before[rank], *after[rank]) for number in part]
        once = list(range(100 * rank, 100 * rank + (13, 30)[rank]))
        assert seen == once * 2, "the rest of the first epoch, and then the second one"


@pytest.mark.parametrize("case", ["own_streams_alike", "own_batches_alike"])
def test_ranks_that_all_draw_the_same_samples_as_their_own_are_warned_once(told, case):
    (text,), others = values(told, case)
    assert "begin with the same samples on all of them" in text
    assert "leave sharded=True out" in text
    assert others == []


@pytest.mark.parametrize("case", ["own_streams_of_one_number", "own_streams_that_differ_late"])
def test_streams_of_samples_that_cannot_be_told_apart_or_differ_later_are_not_warned_of(told, case):
    assert values(told, case) == [[], []]


def test_a_rank_without_samples_stops_all(told):
    kinds = [answers["own_stream_without_samples"].kind for answers in told]
    assert kinds == ["InvalidInputError", "DisagreementError"]
    assert "has no sample" in told[0]["own_stream_without_samples"].text


def test_a_sampler_that_draws_at_random_gives_all_ranks_one_order(told):
    batches = values(told, "sampler_of_all")
    assert sorted(number for samples in batches for part in samples for number in part) == list(range(LENGTH))


def test_a_dataset_of_each_ranks_own_part_is_warned_of_once(told):
    zero, one = values(told, "dataset_by_rank")
    assert [warned.text[:47] for warned in zero] == ["the dataset's samples differ between ranks: ind"]
    assert one == []


def test_lists_that_each_rank_shuffles_before_a_pass_are_warned_of_once(told):
    (zero, *seen), (one, *others) = values(told, "lists_shuffled_by_rank")
    assert len({number for rank in (*seen, *others) for part in rank for number in part}) < LENGTH, "some never come"
    assert [text[:64] for text in zero] == ["the lists in the dataset (files, labels, indices) differ between"]
    assert "in epoch 1: where they were shuffled without a common seed" in zero[0]
    assert one == []


def test_lists_that_all_ranks_shuffle_alike_are_fine(told):
    ranks = values(told, "lists_shuffled_by_epoch")
    assert sorted(number for _, seen in ranks for part in seen for number in part) == list(range(LENGTH))
    assert [warned for warned, _ in ranks] == [[], []]


@pytest.mark.parametrize("case", ["loader_first", "attached_after"])
def test_a_model_takes_a_loader_that_was_there_before(told, case):
    assert sorted(number for seen in values(told, case) for number in seen) == list(range(LENGTH))


def test_only_loaders_of_ours_can_be_given_to_a_model(told):
    for answers in told:
        assert "loader is a DataLoader: give a cannikin.HeteroDataLoader" in answers["plain_loader"].text


def test_every_case_is_looked_at():
    assert len(CASES) == 30


# Fingerprints


@dataclass
class Example:
    image: torch.Tensor
    label: int


class Picture:
    """As an image of PIL; damaged where it has no grey."""

    def __init__(self, grey: int | None) -> None:
        self._grey = grey

    def tobytes(self) -> bytes:
        if self._grey is None:
            raise OSError("image file is truncated")
        return bytes([0] * 5000 + [self._grey] * 5000)


class Reader:
    """What a sample was read by: another one on every rank."""

    def __init__(self) -> None:
        self.number = id(self)


class Scan:
    """A sample of a class of the user's own."""

    def __init__(self, label: int, pixels: torch.Tensor | None = None, folder: str = "/data") -> None:
        self.label, self.pixels, self.path = label, pixels, f"{folder}/scan.png"
        self.reader, self._handle, self.lock = Reader(), id(self), threading.Lock()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        ("a", "b"),
        (b"a", b"b"),
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.ones(3)),
        (torch.zeros(100, 100), torch.zeros(100, 100).index_fill(0, torch.tensor(50), 1.0)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        (np.zeros(3), np.ones(3)),
        ({"x": 1}, {"x": 2}),
        ({"__key__": "1"}, {"__key__": "2"}),
        ([1, [2, 3]], [1, [2, 4]]),
        (Example(torch.zeros(2), 0), Example(torch.zeros(2), 1)),
        ((Picture(1), 0), (Picture(2), 0)),
        (array("i", [1]), array("i", [2])),
        (Scan(1), Scan(2)),
        (Scan(1, torch.zeros(2)), Scan(1, torch.ones(2))),
    ],
)
def test_different_samples_have_different_fingerprints(one, other):
    assert fingerprint(one) != fingerprint(other)
    assert 1 <= fingerprint(one) <= 2**40, "many of them can be added up without rounding"


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"x": torch.arange(5).t(), "__url__": str(object())},
        lambda: (object(), "same"),
        lambda: torch.arange(12).reshape(3, 4).t(),
        lambda: np.array([], dtype=np.float32),
        lambda: torch.zeros(0),
        lambda: np.array(["a", None], dtype=object),
        lambda: {"a": {1, 2}},
        lambda: Picture(1),
        lambda: Picture(None),
        lambda: [Scan(1, torch.zeros(2), folder=str(object()).replace("/", "")), Reader, Reader().__init__],
    ],
)
def test_equal_samples_have_one_fingerprint(make):
    assert fingerprint(make()) == fingerprint(make())


def test_images_of_pil_are_known_by_their_pixels():
    image = pytest.importorskip("PIL.Image", reason="Pillow is not a dependency")
    one, same, other = (fingerprint((image.new("RGB", (30, 20), (1, 2, blue)), "label")) for blue in (3, 3, 4))
    assert one == same != other


def test_random_numbers_for_reading_depend_on_seed_and_epoch_alone():
    def draw(seed: int, epoch: int) -> list[float]:
        shared, drawn = SharedRandomness(seed, epoch), []
        for _ in range(2):
            torch.manual_seed(len(drawn))
            with shared:
                drawn.append(float(torch.rand(())))
        return drawn

    state = torch.get_rng_state()
    assert draw(0, 0) == draw(0, 0)
    assert len({*draw(0, 0), *draw(0, 1), *draw(1, 0)}) == 6
    torch.set_rng_state(state)
