"""A rank that does not come is named: by every other rank within seconds, and in the error at the end."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import lookout_cases
import pytest
from lookout_cases import AT_STEP, LIMIT_S
from ranks import run_ranks, run_ranks_with_errors
from torch.distributed import TCPStore

from cannikin.core.absence import BEFORE, NOT_COME, Phase, Place, Sighting, awaited, lost, missing, parted, waiting
from cannikin.errors import InvalidInputError
from cannikin.runtime import lookout
from cannikin.runtime.entry import BatchEntry
from cannikin.runtime.lookout import Lookout, patience_s
from cannikin.runtime.step import StepInProgress

HERE = Place(31, Phase.BACKWARD, 2)
BEHIND = Place(30, Phase.AFTER)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# Whom a rank waits for


def test_nobody_is_missed_where_all_are_at_the_same_place():
    assert missing(HERE, {1: Sighting(place=HERE), 2: Sighting(place=HERE)}, 10.0) == {}
    assert awaited(0, HERE, 40.0, "", {1: Sighting(place=HERE)}) is None


def test_a_rank_that_is_not_as_far_is_named_with_the_line_it_is_at():
    others = {1: Sighting(place=BEHIND, line="data.py:12 (__getitem__)"), 2: Sighting(place=HERE)}
    assert missing(HERE, others, 10.0) == {1: "it is alive and after step 30, in data.py:12 (__getitem__)"}


def test_a_line_that_cannot_be_told_ends_nothing(monkeypatch):
    here = sys._getframe()
    gone = SimpleNamespace(f_code=threading.Thread.run.__code__, f_back={})  # seen once: a frame that had become a dict
    for frame, line in ((here, "test_lookout.py:"), (gone, "")):
        monkeypatch.setattr(lookout, "_frame_of", lambda _, frame=frame: frame)
        assert lookout._line(threading.get_ident())[0].startswith(line)
    assert lookout._line(0) == ("", False)


def test_a_rank_that_is_not_heard_of_is_named_wherever_it_was():
    for place in (BEHIND, HERE, Place(32, Phase.FORWARD)):
        (told,) = missing(HERE, {2: Sighting(place=place, silent_s=11.0)}, 10.0).values()
        assert "has not been heard of for 11 s" in told
        assert missing(HERE, {2: Sighting(place=place, silent_s=9.0)}, 10.0).keys() == ({2} if place < HERE else set())


def test_a_rank_whose_program_has_ended_in_order_is_missed_only_where_it_was_not_as_far():
    assert missing(HERE, {1: Sighting(place=HERE, end="ended", silent_s=99.0)}, 10.0) == {}
    assert missing(HERE, {1: Sighting(place=BEHIND, end="ended")}, 10.0) == {1: "its program has ended after step 30"}
    assert 1 in missing(HERE, {1: Sighting(place=HERE, end="failed")}, 10.0)


def test_a_rank_that_has_let_go_of_a_model_is_not_missed_by_one_that_still_has_it():
    assert missing(HERE, {1: Sighting(place=BEFORE, end="let go", silent_s=99.0)}, 10.0) == {}


def test_a_rank_that_has_not_come_to_its_model_is_missed_once_there_was_time_for_it():
    assert missing(BEFORE, {1: Sighting(place=NOT_COME, silent_s=9.0)}, 10.0) == {}
    (told,) = missing(BEFORE, {1: Sighting(place=NOT_COME, silent_s=11.0)}, 10.0).values()
    assert "it has not come to its model" in told


def test_a_rank_that_ends_by_another_ones_fault_names_that_one_instead():
    others = {1: Sighting(place=BEHIND, end="failed", silent_s=99.0, lost=(2,)), 2: Sighting(place=HERE, silent_s=1.0)}
    assert missing(HERE, others, 10.0) == {2: "rank 1 has lost it as well"}


def test_the_awaited_rank_says_where_it_is_and_who_has_gone_on():
    told = awaited(1, BEHIND, 40.0, "data.py:12 (read)", {0: Sighting(place=HERE), 2: Sighting(place=BEHIND)})
    assert told is not None
    assert "rank 1 has been after step 30 for 40 s, in data.py:12 (read)" in told
    assert "rank 0 is in the backward pass of step 31" in told
    assert "rank 2" not in told


def at_lines(*lines: tuple[str, float, bool]) -> dict[int, Sighting]:
    return {
        n: Sighting(place=HERE, line=line, still_s=still, waits=waits) for n, (line, still, waits) in enumerate(lines)
    }


def test_ranks_that_wait_while_another_stands_elsewhere_say_where_each_of_them_is():
    seen = at_lines(
        ("train.py:40 (main)", 31.0, True), ("evaluate.py:12 (score)", 32.0, False), ("train.py:40 (main)", 33.0, True)
    )
    told = parted(0, 38.0, seen, 30.0, 1800.0)
    assert "ranks 0 and 2 wait in train.py:40 (main), rank 1 is in evaluate.py:12 (score)" in told
    assert "at different lines of the script, which they have not left for 31 s" in told
    assert "some ranks have called what all ranks must call, such as weighted_mean()" in told
    assert "limit of 1800 s" in told
    assert parted(1, 38.0, seen, 30.0, 1800.0) is None, "it does not wait"


@pytest.mark.parametrize(
    "lines",
    [
        [("a.py:1 (f)", 99.0, True), ("a.py:1 (f)", 99.0, True)],  # a slow collective
        [("a.py:1 (f)", 99.0, False), ("a.py:1 (f)", 99.0, False)],  # an evaluation by all
        [("a.py:1 (f)", 99.0, True), ("b.py:2 (g)", 3.0, False)],  # one by rank 1, which moves
        [("a.py:1 (f)", 40.0, False), ("b.py:2 (g)", 40.0, False)],  # by all, of unlike parts
        [("a.py:1 (f)", 99.0, True), ("", 0.0, False)],  # not known
    ],
)
def test_of_ranks_that_move_or_are_at_one_line_nothing_is_said(lines):
    assert parted(0, 99.0, at_lines(*lines), 30.0, 1800.0) is None


def test_where_nobody_is_seen_to_wait_it_takes_twice_as_long():
    seen = at_lines(("a.py:1 (f)", 61.0, False), ("b.py:2 (g)", 61.0, False))
    assert "rank 0 is in a.py:1 (f), rank 1 is in b.py:2 (g)" in parted(1, 70.0, seen, 30.0, 1800.0)


def test_places_are_ordered_as_training_goes():
    places = [BEFORE, Place(-1, Phase.MEETING), *(Place(0, phase) for phase in Phase), Place(1, Phase.FORWARD)]
    assert places == sorted(places)
    assert Place(1, Phase.BACKWARD, 1) < Place(1, Phase.BACKWARD, 2) < Place(1, Phase.OPTIMIZER)


def test_who_waits_in_what_all_ranks_do_together_is_further_than_who_has_not_come_to_it():
    for phase in Phase:
        here, behind = Place(31, phase, is_meeting=True), Place(31, phase)
        assert missing(here, {1: Sighting(place=behind)}, 10.0) == {1: f"it is alive and {behind}"}
    assert str(Place(31, Phase.FORWARD, is_meeting=True)) == "in the forward pass of step 31, where all ranks meet"


def test_sentences_name_all_ranks_and_the_limit():
    absent = {1: "it is alive and after step 30", 4: "it is alive and after step 29"}
    assert "waits for ranks 1 and 4" in waiting(0, HERE, 30.0, absent, 1800.0)
    assert "limit of 1800 s" in waiting(0, HERE, 30.0, absent, 1800.0)
    assert "has lost ranks 1 and 4" in lost(0, HERE, absent)
    many = waiting(0, HERE, 30.0, dict.fromkeys(range(1, 64), "it is alive"), 1800.0)
    assert "and 60 more" in many
    assert len(many) < 400


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(monkeypatch, text):
    monkeypatch.setenv("CANNIKIN_PATIENCE_S", text)
    with pytest.raises(InvalidInputError, match="CANNIKIN_PATIENCE_S"):
        patience_s()


def test_a_rank_tells_whom_it_has_lost_before_it_ends_by_it():
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    lookout = Lookout(store, rank=1, world_size=2, limit=timedelta(seconds=60))
    assert "has lost rank 0 " in str(lookout.explain())  # which never comes
    assert json.loads(store.get("cannikin-lookout-1"))[-1] == [0]
    lookout.close()


def test_a_rank_that_others_have_lost_does_not_wait_for_itself(monkeypatch, caplog):
    monkeypatch.setenv("CANNIKIN_PATIENCE_S", "1000")
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    lookout = Lookout(store, rank=0, world_size=2, limit=timedelta(seconds=60))
    lookout._hear(1, json.dumps([1, 9, Phase.AFTER, 0, False, "failed", "", 0.0, False, [0]]))
    with caplog.at_level("INFO", "cannikin"):
        lookout._speak(60.0)
    (told,) = caplog.messages
    assert "waits for" not in told
    lookout.close()


def test_a_rank_that_ends_tells_how_far_it_has_come_since_its_last_beat(monkeypatch):
    monkeypatch.setenv("CANNIKIN_PATIENCE_S", "1000")
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    lookout = Lookout(store, rank=1, world_size=2, limit=timedelta(seconds=60))

    class AfterStep:
        step = StepInProgress(entry=BatchEntry(step=9, local_batch=1, total_batch=2), optimizer_end=1.0)

    loop = AfterStep()
    lookout._loop = weakref.ref(loop)
    lookout.close()
    _, step, phase, *_ = json.loads(store.get("cannikin-lookout-1"))
    assert (step, phase) == (9, Phase.AFTER)


def test_a_rank_that_goes_on_before_it_has_read_anything_does_not_miss_who_holds_the_store():
    class Slow(TCPStore):
        def clone(self) -> Slow:
            for each in made:
                each._place = HERE  # this rank has gone on when the connection stands
            return self

    made: list[Lookout] = []
    store = Slow("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    lookout = Lookout(store, rank=1, world_size=2, limit=timedelta(seconds=60))
    made.append(lookout)
    lookout._listen()
    time.sleep(3 * lookout._beat_s)
    assert lookout._sightings() == {}
    lookout.close()


def test_models_that_are_gone_leave_no_descriptors_and_no_threads():
    for counts in run_ranks(lookout_cases.descriptors_and_threads, 2, 5):
        assert not lookout_cases.has_grown(counts[1], counts[-1]), f"the first one makes what stays: {counts}"


def test_a_loaders_worker_that_collects_a_model_of_its_rank_leaves_the_ranks_group_alone():
    assert run_ranks(lookout_cases.status_of_a_child_that_collects_a_model, 2) == [0, 0]


# Real ranks


def survivors(who: int, fault, run=lookout_cases.train, **options) -> list[dict]:
    answers = run_ranks_with_errors(partial(run, **options), 3, free_port(), partial(fault, who), timeout_s=50)
    others = [answers[rank] for rank in range(3) if rank != who]
    assert [kind for kind, _ in others] == ["ok", "ok"], others
    return [told for _, told in others]


def test_every_rank_says_who_has_stopped_and_the_error_at_the_limit_names_it():
    who = 0  # which holds the store
    for told in survivors(who, lookout_cases.stop):
        assert told["said"], "nothing was said"
        assert re.search(rf"in the backward pass of step {AT_STEP} .*for rank {who} \(.*has stopped", told["said"][0])
        assert f"limit of {LIMIT_S:.0f} s" in told["said"][0]
        assert f"has lost rank {who} " in told["error"]
        assert "start again from the last checkpoint" in told["error"]


def test_a_rank_that_hangs_where_others_wait_in_a_collective_of_the_scripts_own_is_named_with_its_line():
    for told in survivors(1, lookout_cases.hang_elsewhere):
        (words,) = told["said"]
        lines = (
            r"ranks 0 and 2 wait in lookout_cases.py:\d+ \(hang_elsewhere\), rank 1 is in lookout_cases.py:\d+ \(hang"
        )
        assert re.search(lines, words)


def test_the_error_names_a_rank_that_was_killed_well_before_the_limit():
    for told in survivors(1, lookout_cases.die):
        assert "has lost rank 1 " in told["error"]
        assert told["took_s"] < LIMIT_S


def test_an_error_out_of_ddps_own_forward_names_the_rank_too():
    for told in survivors(1, lookout_cases.die, after=True):
        assert "has lost rank 1 " in told["error"]
        assert "start again from the last checkpoint" in told["error"]


@pytest.mark.parametrize("fault", [lookout_cases.die_before_the_model, lookout_cases.die_in_ddps_constructor])
def test_a_rank_that_dies_while_all_make_their_model_is_named(fault):
    for told in survivors(1, fault, lookout_cases.make_a_model):
        assert "has lost rank 1 " in told["error"]
        assert "start again from the last checkpoint" in told["error"]


@pytest.mark.parametrize("meet", [lookout_cases.of_a_number, lookout_cases.of_a_tensor])
def test_a_rank_that_does_not_come_to_a_mean_over_ranks_is_named_before_the_limit_and_in_the_error(meet):
    told, _ = run_ranks(lookout_cases.take_means, 2, free_port(), meet, timeout_s=50)
    where = rf"rank 1: it is alive and after step {AT_STEP // 2}, in lookout_cases.py:\d+ \(take_means\)"
    assert any(re.search(rf"waits for rank 1 \({where}", words) for words in told["said"])
    assert re.search(rf"has lost rank 1 \({where}", told["error"])


def test_a_rank_that_comes_late_to_its_model_is_named_and_waited_for():
    told = run_ranks(lookout_cases.make_a_model, 2, free_port(), partial(lookout_cases.come_late, 1), timeout_s=50)
    assert [what["error"] for what in told] == [None, None]
    assert re.search(r"rank 0 .* waits for rank 1 \(.*has not come to its model", told[0]["said"][0])


def test_a_rank_that_sleeps_in_its_dataset_is_named_with_its_line_and_an_evaluation_by_all_is_not():
    fault = partial(lookout_cases.evaluate_and_sleep_in_data, 1)
    told = run_ranks(lookout_cases.train, 2, free_port(), fault, timeout_s=50)
    assert [one["error"] for one in told] == [None, None]
    waits, sleeps = (one["said"] for one in told)
    assert waits, "nothing was said"
    assert sleeps, "nothing was said"
    at_line = rf"waits for rank 1 \(rank 1: it is alive and after step {AT_STEP}, in lookout_cases.py"
    for words in waits:  # of the evaluation, in which nobody waits, nothing
        assert re.search(at_line, words)
    for words in sleeps:
        assert re.search(
            r"rank 1 has been after step .* in lookout_cases.py:\d+ \(__getitem__\), and others wait", words
        )
