"""The batch in hand: forwards that do not show their samples, batches left out, and parts of batches."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from functools import partial

import in_hand_cases as cases
import numpy as np
import pytest
import torch
from ranks import run_ranks
from told import Raised, run_cases, values

from cannikin.errors import BatchMatchError, InvalidInputError
from cannikin.runtime.entry import BatchEntry, PendingSum
from cannikin.runtime.slicing import Slicer
from cannikin.runtime.waiting import BatchQueue, check_size

PARITY = {
    "time first": partial(cases.worst_error, backward=cases.time_first, dim=1),
    "time first, in parts": partial(cases.worst_error, backward=cases.time_first_in_parts, dim=1, batch_dim=1),
    "two views": partial(cases.worst_error, backward=cases.two_views),
    "two views by numbers": partial(cases.worst_error, backward=cases.two_views_by_numbers),
    "three views by numbers": partial(cases.worst_error, backward=cases.three_views_by_numbers),
    "sharpness aware": partial(cases.worst_error, backward=cases.sharpness_aware),
    "residual first": partial(cases.worst_error, backward=cases.residual_first),
    "residual first, and said": partial(cases.worst_error, backward=partial(cases.residual_first, says_so=True)),
    "attacked": partial(cases.worst_error, backward=cases.attacked),
    "attacked while frozen": partial(cases.worst_error, backward=cases.attacked_while_frozen),
    "slopes of weights": partial(cases.worst_error, backward=cases.slopes_of_weights),
}
PROGRESS = {
    f"progress, {backward.__name__}": partial(cases.progress_of, backward=backward)
    for backward in (cases.plain, cases.time_first, cases.two_views, cases.sharpness_aware, cases.attacked)
}
SAID = {
    "the plan's total": cases.told_the_plans_total,
    "too small a total": cases.told_too_small_a_total,
    "filtered": cases.filtered_on_one_rank,
    "measured": cases.measured_by_samples,
    "wrong total": cases.wrong_total_without_a_loader,
    "hidden": cases.hidden_outputs_that_accumulate,
    "padding": cases.padding_under_sync_batch_norm,
    "slices": cases.slices,
    "no loader": cases.no_loader,
    "skipping": cases.skipping,
    "skipping copies": partial(cases.skipping_copies, says_so=True),
    "passes": partial(cases.passes_with_a_batch_left_out, says_so=True),
    "passes, not said": partial(cases.passes_with_a_batch_left_out, says_so=False),
    "looking ahead": cases.looking_ahead,
    "ragged": cases.ragged_parts,
    "other parts": cases.parts_of_another_size,
    "pairs": partial(cases.pairs, script=[(4, 2)]),
    "pairs under plans that change": partial(cases.pairs, script=[(4, 2), (2, 4)]),
    "labelled and not": cases.labelled_and_not,
    "labelled and not, by loss": partial(cases.labelled_and_not, weighting="loss"),
}


@pytest.fixture(scope="module")
def told():
    """What every case said on both ranks, in one launch."""
    return run_ranks(run_cases, 2, {**PARITY, **PROGRESS, **SAID}, timeout_s=60)


@pytest.mark.parametrize("case", PARITY)
def test_the_batch_in_hand_is_weighted_right_however_its_forward_looks(told, case):
    for error, num_splits in values(told, case):
        assert error < 1e-12
        assert num_splits > 3


@pytest.mark.parametrize("case", PROGRESS)
def test_a_pass_is_worth_the_same_however_its_forwards_look(told, case):
    assert values(told, case) == values(told, "progress, plain")
    assert values(told, case)[0] > 0


def test_the_plans_total_is_refused_on_a_short_last_batch_by_every_rank(told):
    for answers in told:
        raised = answers["the plan's total"]
        assert raised.kind == "BatchMatchError"
        assert "of 4 samples for step 2" in raised.text
        assert "use_batch() without numbers" in raised.text


def test_a_total_that_the_local_batches_do_not_make_stops_every_rank(told):
    for answers in told:
        raised = answers["too small a total"]
        assert raised.kind == "DisagreementError"
        assert "told totals [5, 5] for step 0" in raised.text
        assert "local batches [3, 3], together 6" in raised.text


def test_tokens_may_be_told_instead_of_samples_also_by_a_rank_without_any():
    queue = BatchQueue()
    queue.add(BatchEntry(step=0, local_batch=1, total_batch=6))
    told = queue.describe(5, 40)
    assert (told.local_batch, told.size, told.is_uneven) == (5, 1, True)
    queue.take()
    queue.add(BatchEntry(step=1, local_batch=0, total_batch=4, is_padding=True))
    assert queue.describe(2, 13).local_batch == 0, "what it was given to pad with does not count"


def test_times_are_of_samples_where_the_script_counts_views(told):
    assert values(told, "measured")[0] == {(4, 2)}


def test_a_total_is_known_without_waiting_for_what_ranks_compare():
    def wait(work):
        raise AssertionError("waited")

    sums = PendingSum(work=None, totals=torch.zeros(3), num_ranks=2, finish=wait)
    assert BatchEntry(step=0, local_batch=2, total_batch=6, tag=5, sums=sums).count_all() == 6


def test_a_total_without_a_loader_that_the_local_batches_do_not_make_stops_every_rank(told):
    for answers, told_total in zip(told, (8, 4), strict=True):
        raised = answers["wrong total"]
        assert raised.kind == "DisagreementError"
        assert f", {told_total}) for step 0: the ranks' local batches make 6, which is not the total" in raised.text


def test_outputs_that_cannot_be_found_are_refused_as_soon_as_they_would_have_to_be_weighted(told):
    for answers in told:
        assert answers["hidden"].kind == "InvalidInputError"
        assert "its loss cannot be weighted" in answers["hidden"].text


def test_a_rank_warns_where_sync_batch_norm_counts_what_it_pads_with(told):
    none, (text,) = values(told, "padding")
    assert none == []
    assert text.startswith("rank 1 has no samples in step 0")


def test_samples_may_be_left_out_on_one_rank(told):
    assert values(told, "filtered") == [16, 16]


def test_slices_by_use_batch_are_told_of_micro_batches_once(told):
    for (warned,) in values(told, "slices"):
        assert "model.micro_batches(batch)" in warned.text


def test_a_script_without_a_loader_hears_once_that_nothing_adapts_and_what_does(told):
    for (warned,) in values(told, "no loader"):
        assert "nothing adapts" in warned.text
        assert "model.batches(batch_size=...)" in warned.text


def test_batches_that_were_passed_over_are_left_out_with_a_word(told):
    for (warned,), errors, num_waiting in values(told, "skipping"):
        assert warned.text.startswith("3 batches were taken and never trained on")
        assert "load_state_dict" in warned.text
        assert errors == {0}
        assert num_waiting == 0
    one, other = values(told, "skipping copies")
    assert one == other > 20


@pytest.mark.parametrize("case", ["passes", "passes, not said"])
def test_batches_that_are_left_out_count_as_passed_but_not_as_progress(told, case):
    assert values(told, case) == [(4, 36.0), (4, 36.0)]


def test_batches_passed_over_that_cannot_be_known_again_are_named_by_the_error():
    case = partial(cases.skipping_copies, says_so=False, script=[(6,), (9,)])
    (told,) = run_ranks(run_cases, 1, {"copies": case}, timeout_s=30)
    assert isinstance(told["copies"], Raised)
    assert "3 batches were taken after it and not trained on" in told["copies"].text
    assert "load_state_dict" in told["copies"].text
    assert "skip_batch" in told["copies"].text


def test_a_loop_that_looks_ahead_leaves_no_batch_out(told):
    for warned, num_steps in values(told, "looking ahead"):
        assert warned == []
        assert num_steps > 20


def test_parts_of_lists_with_one_item_per_sample_are_weighted_right(told):
    assert max(values(told, "ragged")) < 1e-12


def test_parts_of_what_has_another_number_of_samples_are_refused(told):
    for answers, local in zip(told, (4, 2), strict=True):
        assert answers["other parts"].kind == "InvalidInputError"
        assert (
            f"have {local}, 7 samples in dimension 0, where the batch in hand has {local}"
            in answers["other parts"].text
        )


def test_batches_that_share_a_backward_are_all_counted_where_they_are_split_alike(told):
    for error, progress, warned in values(told, "pairs"):
        assert error < 1e-12
        assert progress == 16
        assert warned == []


@pytest.mark.parametrize("case", ["pairs under plans that change", "labelled and not"])
def test_batches_that_share_a_backward_and_no_split_stop_every_rank(told, case):
    for answers in told:
        raised = answers[case]
        assert raised.kind == "BatchMatchError"
        assert "one backward for the batches of steps" in raised.text
        assert 'weighting="loss"' in raised.text


def test_batches_that_share_a_backward_are_right_where_each_is_weighted_as_it_enters(told):
    assert max(values(told, "labelled and not, by loss")) < 1e-12


# Sizes, of a batch of 4


def sized(*inputs, dim=0):
    check_size(BatchEntry(step=7, local_batch=4, total_batch=6), BatchQueue(), inputs, {}, dim)


def rows(*shape):
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("inputs", "got"),
    [
        ([rows(3, 2)], "3 samples in dimension 0"),
        ([{"x": rows(3, 2), "scale": 1.0, "name": None}], "tensors of 3 samples in dimension 0"),
        ([UserDict(x=rows(3, 2)), rows()], "tensors of 3 samples in dimension 0"),
        ([[rows(3, 2), {"more": (rows(3),)}]], "tensors of 3 samples in dimension 0 and lists of 2"),
        ([[rows(9), rows(9), rows(9)]], "tensors of 9 samples in dimension 0 and lists of 3"),
        ([["a", "b"], 5], "lists of 2"),
    ],
)
def test_samples_that_are_missing_are_noticed_wherever_the_inputs_keep_them(inputs, got):
    with pytest.raises(BatchMatchError, match=f"^forward got {got}, the loader handed out 4 for step 7: .*use_batch"):
        sized(*inputs)


def test_samples_of_another_loader_beside_the_batch_are_told_their_proportion():
    for inputs in (rows(10, 2), {"x": rows(10, 2)}):
        with pytest.raises(BatchMatchError, match="draw them in proportion to"):
            sized(inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        [{"x": rows(4, 2), "table": rows(7)}],
        [[rows(2, 5), rows(2, 6), rows(2, 7), rows(2, 8)]],
        [["a"] * 4, (64, 64)],
        [(64, 64)],
        [{"nodes": rows(31, 2), "edges": rows(2, 80)}],
        [[rows(5), rows(7)]],
        [torch.nn.utils.rnn.pack_sequence([rows(3, 2), rows(2, 2)]), {"table": rows(7)}],
        [{"x": rows(3, 2), "graph": object()}],
        [np.zeros((3, 2))],
        [rows(), 5, "name"],
    ],
)
def test_inputs_that_have_the_samples_or_do_not_show_them_are_left_alone(inputs):
    sized(*inputs)


def test_samples_in_another_dimension_are_looked_for_there():
    sized({"x": rows(9, 4, 2), "mask": rows(4, 9)}, dim=1)
    with pytest.raises(BatchMatchError, match="tensors of 3 samples in dimension 1"):
        sized({"x": rows(9, 3, 2)}, dim=1)


# Cutting


def cut(batch, start, end, *, size=0, slicer=None):
    slicer = slicer or Slicer()
    slicer.num_samples(batch, size)
    return slicer.cut(batch, start, end)


def test_a_batch_is_cut_whatever_it_is_made_of():
    @dataclass
    class Fields:
        ids: torch.Tensor
        name: str

    Pair = namedtuple("Pair", ["left", "right"])  # what scripts have
    numbers = torch.arange(4)
    batch = {
        "tensor": numbers,
        "array": np.arange(4),
        "texts": ["a", "b", "c", "d"],
        "pair": Pair(numbers, (numbers, numbers)),
        "fields": Fields(ids=numbers, name="train"),
        "mapping": UserDict(ids=numbers),
        "images": [torch.zeros(3, size, size) for size in (5, 6, 7, 8)],
        "scale": torch.tensor(2.0),
        "step": 7,
    }
    part = cut(batch, 1, 3)
    assert part["tensor"].tolist() == part["array"].tolist() == part["fields"].ids.tolist() == [1, 2]
    assert part["texts"] == ["b", "c"]
    assert part["pair"].right[1].tolist() == part["mapping"]["ids"].tolist() == [1, 2]
    assert type(part["mapping"]) is UserDict
    assert [image.shape for image in part["images"]] == [(3, 6, 6), (3, 7, 7)]
    assert (part["fields"].name, part["step"], float(part["scale"])) == ("train", 7, 2.0)
    assert len(batch["mapping"]["ids"]) == 4, "the batch itself stays whole"


def test_images_in_a_list_are_cut_between_images_where_these_have_as_many_colours_as_there_are_images():
    slicer = Slicer()
    targets = [{"boxes": torch.zeros(i, 4)} for i in range(5)]
    assert len(cut(([torch.zeros(3, 9, 9)] * 5, targets), 0, 2, size=5, slicer=slicer)[0]) == 2
    images, _ = cut(([torch.zeros(3, 9, 9)] * 3, targets[:3]), 0, 2, size=3, slicer=slicer)
    assert [image.shape for image in images] == [(3, 9, 9)] * 2


def test_two_fields_of_two_samples_are_fields():
    first, second = cut([torch.zeros(2, 3), torch.ones(2)], 0, 1)
    assert (first.shape, second.shape) == ((1, 3), (1,))


def test_with_time_first_tensors_are_cut_in_dimension_1_and_vectors_by_sample():
    slicer = Slicer(1)
    tokens, lengths = cut((torch.zeros(7, 4), torch.arange(4)), 0, 3, slicer=slicer)
    assert (tokens.shape, lengths.tolist()) == ((7, 3), [0, 1, 2])


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((torch.zeros(4, 2), torch.zeros(5)), "4, 5 samples"),
        ((torch.zeros(4, 2), ["a", "b"]), "4, 2 samples"),
        ((torch.zeros(4), object()), "a object in it"),
        (7, "no tensor and no list"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, text):
    with pytest.raises(InvalidInputError, match=text):
        Slicer().num_samples(batch, 4, certain=True)
