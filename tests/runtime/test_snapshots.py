"""Runs that are stopped and started again: they go on where they were."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from ranks import run_ranks, run_ranks_with_errors
from snapshot_cases import (
    AHEAD,
    NUM_BATCHES,
    NUM_SAMPLES,
    accumulate,
    bad_disk,
    evaluate_for_long,
    fail_in_a_worker,
    follow,
    late,
    look_ahead,
    names,
    not_come,
    other_optimizer_beside,
    own_folders,
    refuse,
    run,
    save_after,
    seed_unlike,
    stuck,
    to_the_end,
    told_to_end,
    told_to_end_on_a_bad_disk,
    two_in_one_program,
    two_jobs,
    two_models,
)

from cannikin.core.policies import make_planner
from cannikin.core.values import Job
from cannikin.runlog import read_runlog
from cannikin.runtime.engine_state import begin_afresh, why_afresh
from cannikin.runtime.snapshot import _restarts_fail


def seen_by(results) -> list[tuple[int, int]]:
    return sorted(pair for result in results for pair in result["seen"])


def every_sample_of(num_epochs: int) -> list[tuple[int, int]]:
    return [(epoch, index) for epoch in range(num_epochs) for index in range(NUM_SAMPLES)]


def test_a_resumed_run_is_to_the_bit_what_an_undisturbed_one_is(tmp_path):
    undisturbed = run_ranks(run, 2, str(tmp_path / "whole"), 3, -1, {})
    stopped = run_ranks(run, 2, str(tmp_path / "parts"), 3, 8, {})  # in the second epoch
    resumed = run_ranks(run, 2, str(tmp_path / "parts"), 3, -1, {})
    assert [result["resumed_from"] for result in stopped + resumed] == [None, None, 7, 7]
    for result, whole in zip(resumed, undisturbed, strict=True):
        assert np.array_equal(result["weights"], whole["weights"])
        assert result["lr"] == whole["lr"]
        assert result["seen"] == whole["seen"][-len(result["seen"]) :]
    assert len(names(tmp_path / "parts")) == 2


def test_samples_are_seen_once_on_any_number_of_ranks(tmp_path):
    options = {"policy": "cannikin", "every_steps": 4}
    before = run_ranks(run, 2, str(tmp_path), 3, 9, options)
    after = run_ranks(run, 3, str(tmp_path), 3, -1, options)
    assert [result["resumed_from"] for result in after] == [8] * 3
    (lost_step,) = {tuple(sorted(result["seen"][-4:])) for result in before[:1]}
    kept = sorted(pair for result in before for pair in result["seen"][:-4])  # 8 of 9 steps are in the snapshot
    assert len(lost_step) == 4
    assert sorted(kept + seen_by(after)) == every_sample_of(3)


def test_a_larger_total_than_the_rest_of_the_epoch_does_not_train_an_epoch_more(tmp_path):
    before = run_ranks(run, 2, str(tmp_path), 3, 5, {"drop_last": True})  # 32 of 46 samples are in the snapshot
    after = run_ranks(run, 2, str(tmp_path), 3, -1, {"drop_last": True, "batch_size": 20})
    assert [result["resumed_from"] for result in before + after] == [None, None, 4, 4]
    assert {epoch: sum(seen == epoch for seen, _ in seen_by(after)) for epoch in range(3)} == {0: 0, 1: 40, 2: 40}
    assert any("training goes on with epoch 1" in text for text in after[0]["warned"])


@pytest.mark.parametrize(
    ("before", "after", "num_ranks", "has_noise"),
    [
        ("even", "cannikin", 2, False),
        ("lb-bsp", "cannikin", 3, False),
        ("adaptdl", "cannikin", 3, True),
        ("cannikin", "adaptdl", 2, True),
        ("cannikin", "even", 2, False),
        ("lb_bsp", "lb-bsp", 3, False),
    ],
)
def test_another_policy_begins_afresh_and_what_is_of_the_training_stays(tmp_path, before, after, num_ranks, has_noise):
    run_ranks(run, 2, str(tmp_path), 5, 27, {"policy": before})
    resumed = run_ranks(run, num_ranks, str(tmp_path), 5, -1, {"policy": after})
    assert {result["resumed_from"] for result in resumed} == {26}
    assert all(result["progress"] > 20 for result in resumed)
    (told,) = [text for text in resumed[0]["warned"] if "begins afresh" in text]
    assert "progress and the noise scale" in told if has_noise else "; progress, and" in told
    seen = seen_by(resumed)
    assert len(seen) == len(set(seen)) == NUM_SAMPLES - 2 * 8, "the rest of the fifth epoch"
    assert {epoch for epoch, _ in seen} == {4}


@pytest.mark.parametrize(("saved", "own"), [("adaptdl", "cannikin"), ("cannikin", "adaptdl")])
def test_the_noise_that_another_policy_has_tracked_is_taken_as_it_is(saved, own):
    job = Job(num_ranks=2, batch_size=8)
    state = make_planner(saved, job).state_dict()
    state["noise"]["steps"]["num_taken"] = 30
    planner = make_planner(own, job)
    why = why_afresh(own, {"policy": saved, "planner": state}, 2)
    assert f"policy='{own}' has no use" in why
    assert why in begin_afresh(planner, {"planner": state}, why)
    assert planner.state_dict()["noise"] == state["noise"]


def test_a_state_says_of_which_policy_it_is():
    job = Job(num_ranks=2, batch_size=8)
    of = {name: {"policy": name, "planner": make_planner(name, job).state_dict()} for name in ("cannikin", "lb-bsp")}
    assert not why_afresh("cannikin", of["cannikin"], 3)
    assert not why_afresh("lb_bsp", of["lb-bsp"], 2)
    assert "on 2 ranks" in why_afresh("lb_bsp", of["lb-bsp"], 3)
    assert "under 'lb-bsp'" in why_afresh("cannikin", of["lb-bsp"], 2)
    assert "under 'cannikin'" in why_afresh("lb-bsp", of["cannikin"], 2)
    own = make_planner("even", job)
    assert not why_afresh(own, {**of["lb-bsp"], "policy": type(own).__name__}, 3), "it reads its states itself"


def test_a_damaged_or_foreign_snapshot_is_named_and_the_one_before_is_used(tmp_path):
    run_ranks(run, 1, str(tmp_path), 3, 5, {})
    older, newest = names(tmp_path)
    foreign = tmp_path / f"step-{99:012d}-{0:016x}.snapshot"
    foreign.write_bytes((tmp_path / newest).read_bytes())
    whole = (tmp_path / newest).read_bytes()
    (tmp_path / newest).write_bytes(whole[: len(whole) // 2])
    (result,) = run_ranks(run, 1, str(tmp_path), 3, 3, {})
    assert result["resumed_from"] == int(older.split("-")[1])
    first, second = result["warned"]
    assert foreign.name in first
    assert "another model" in first
    assert newest in second
    assert "bytes of" in second
    assert foreign.exists(), "it is not ours to remove"
    for name in names(tmp_path):
        (tmp_path / name).write_bytes(b"nothing")
    (result,) = run_ranks(run, 1, str(tmp_path), 1, -1, {})
    assert result["resumed_from"] is None
    assert seen_by([result]) == every_sample_of(1)
    assert "training begins afresh" in result["warned"][-1]


def test_a_snapshot_of_another_optimizer_is_foreign(tmp_path):
    run_ranks(run, 1, str(tmp_path), 1, -1, {"optimizer": "SGD"})
    before = names(tmp_path)
    (result,) = run_ranks(run, 1, str(tmp_path), 1, -1, {"optimizer": "AdamW"})
    assert result["resumed_from"] is None
    assert "another model or optimizer" in result["warned"][0]
    assert set(before) < set(names(tmp_path)), "they are not ours to remove"


def test_an_object_whose_state_is_of_another_kind_is_named(tmp_path):
    folder = str(tmp_path / "run")
    assert run_ranks(other_optimizer_beside, 1, folder, "SGD") == [None]
    (told,) = run_ranks(other_optimizer_beside, 1, folder, "AdamW")
    assert "its 'critic' cannot be loaded into this AdamW (KeyError: 'step'): it is of another kind" in told


@pytest.mark.parametrize(("whom", "options"), [(0, {}), (1, {"workers": 1})])
def test_all_ranks_save_and_leave_when_one_is_told_to_end(tmp_path, whom, options):
    results = run_ranks(told_to_end, 2, str(tmp_path), whom, {"every_steps": None, **options})
    assert [status for status, _, _ in results] == [143, 143]
    (num_steps,) = {steps for _, steps, _ in results}
    last = read_runlog(tmp_path).events[-1]
    assert (last.kind, last.step, last.is_early) == ("end", num_steps, True)
    assert "SIGTERM" in last.text
    assert 5 <= num_steps < 40
    again = run_ranks(run, 2, str(tmp_path), 1 + num_steps // 6, -1, {})
    assert [result["resumed_from"] for result in again] == [num_steps] * 2
    assert seen_by([result for _, _, result in results] + again) == every_sample_of(1 + num_steps // 6)


@pytest.mark.parametrize(
    ("is_gone", "newest"), [(False, r"the newest is of step [34]$"), (True, "there is none at all$")]
)
def test_a_last_snapshot_that_could_not_be_written_is_not_claimed(tmp_path, is_gone, newest):
    for status, (words,) in run_ranks(told_to_end_on_a_bad_disk, 2, str(tmp_path), is_gone):
        assert status == 143
        assert re.search(f"no snapshot could be taken now: {newest}", words)
    assert re.search(
        f"SIGTERM told it to end, and no snapshot could be taken now: {newest}", read_runlog(tmp_path).events[-1].text
    )


def test_a_second_job_is_refused_the_folder_of_one_that_lives_and_gets_it_once_that_is_killed(tmp_path):
    ((refused, waited_s, printed, files),) = run_ranks(two_jobs, 1, str(tmp_path))
    assert "another job keeps its snapshots of this model" in refused
    assert "give each job a folder of its own" in refused
    assert 0.9 < waited_s < 10
    assert "cannikin: training goes on from step 2 of snapshot" in printed
    assert "saved 20" in printed
    assert all(name.endswith(".snapshot") for name in files)


def test_of_two_models_in_one_program_each_has_a_folder_and_hears_sigterm_when_the_other_is_closed(tmp_path):
    ((refused, status, heard, resumed_from),) = run_ranks(two_in_one_program, 1, str(tmp_path / "run"))
    beside, other_data = refused
    assert "this program keeps the snapshots of a model like this one" in beside
    assert "close() the first Snapshot" in beside
    assert "its 'loader' does not fit: the saved num_samples=46 is not this loader's 40" in other_data
    assert "give a Snapshot another folder" in other_data
    assert (status, heard) == (143, [1, 1]), "the script's own handler hears it too, and has its place back"
    assert resumed_from == 5, "the first one's, once it is closed"


def test_one_rank_that_sees_the_newest_snapshot_is_enough(tmp_path):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    before = run_ranks(own_folders, 2, folders, 5)
    after = run_ranks(own_folders, 2, folders[::-1], -1)
    assert [result["resumed_from"] for result in after] == [4, 4]
    assert np.array_equal(after[0]["weights"], after[1]["weights"])
    kept = [pair for result in before for pair in result["seen"][:-4]]
    assert sorted(kept + seen_by(after)) == every_sample_of(3)


def test_another_hosts_copy_is_used_where_the_first_one_is_damaged(tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    run_ranks(own_folders, 2, [str(folder) for folder in folders], 5)
    older, newest = names(folders[0])
    folders[1].mkdir(exist_ok=True)
    for name in (older, newest):
        shutil.copy(folders[0] / name, folders[1] / name)
    content = (folders[0] / newest).read_bytes()
    (folders[0] / newest).write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    for result in run_ranks(own_folders, 2, [str(folder) for folder in folders], 3):
        assert result["resumed_from"] == 4
    older, newest = names(folders[0])
    (folders[0] / newest).write_bytes(b"")
    results = run_ranks(own_folders, 2, [str(folders[0])] * 2, 3)
    assert [result["resumed_from"] for result in results] == [int(older.split("-")[1])] * 2
    (told,) = results[0]["warned"]
    assert f"{newest}, as rank 0 sees it, is left out" in told, "once, where all see the same file"


def test_generators_that_a_script_seeds_unlike_stay_unlike_and_do_not_begin_again(tmp_path):
    run_ranks(seed_unlike, 2, str(tmp_path), 5)
    results = run_ranks(seed_unlike, 2, str(tmp_path), 0)
    (fresh, drawn), (other_fresh, other_drawn) = results
    for numbers in zip(fresh, drawn, other_fresh, other_drawn, strict=True):
        assert len(set(numbers)) == 4
    assert run_ranks(seed_unlike, 2, str(tmp_path), 0) == results, "a resumed run can be repeated"


def test_no_snapshot_is_taken_while_gradients_pile_up(tmp_path):
    taken, others = run_ranks(accumulate, 2, str(tmp_path))
    assert (taken, others) == ([3], []), "six batches, and one optimizer step that another batch follows"


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """What became of the loops of `AHEAD`, by their names."""
    return run_ranks(look_ahead, 2, str(tmp_path_factory.mktemp("ahead")), timeout_s=150.0)


@pytest.mark.timeout(180)  # for the launch
@pytest.mark.parametrize("name", AHEAD)
def test_a_loop_may_fetch_its_next_batch_at_any_moment_and_is_resumed_exactly(ahead, name):
    loop = AHEAD[name]
    for told in ahead:
        stopped, resumed, ended, off = told[name]
        assert ended == NUM_BATCHES
        assert off == 0.0
        assert resumed % loop.accumulate == 0
        if loop.by_signal:
            assert loop.stop < stopped == resumed < NUM_BATCHES, "nothing is trained on again"
        else:
            assert loop.stop - loop.accumulate <= resumed <= stopped == loop.stop


@pytest.mark.parametrize(("stop", "resumed"), [(4, 2), (5, 4)])
def test_a_second_model_that_lets_gradients_pile_up_loses_none_of_them(tmp_path, stop, resumed):
    for _, stopped, ended in run_ranks(follow, 2, str(tmp_path), stop):
        assert stopped[0] == 0
        assert ended == (resumed, 0.0)


def test_what_a_snapshot_waits_for_too_long_is_said(tmp_path):
    ((warned, said, _),) = run_ranks(late, 1, str(tmp_path), False)
    (due,) = [text for text in warned if "has been due" in text]
    assert "waits for optimizer.step() with the gradients of" in due
    assert "another optimizer than the model was given" in due
    (told,) = said
    assert "training goes on until a snapshot can be taken, which waits for optimizer.step()" in told


def test_under_a_batch_sampler_with_workers_sigterm_is_answered_at_once_and_obeyed_at_the_end_of_the_pass(tmp_path):
    ((warned, said, num_after),) = run_ranks(late, 1, str(tmp_path), True)
    assert ["between epochs only, also at SIGTERM" in text for text in warned] == [True]
    first, last = said
    assert "which waits for the end of this pass" in first
    assert "a snapshot was taken" in last
    assert num_after == 12
    assert len(names(tmp_path)) == 1


def test_a_job_that_has_come_to_its_goal_has_nothing_to_train_where_it_is_started_again(tmp_path):
    assert run_ranks(to_the_end, 2, str(tmp_path)) == [[(None, 12), (12, 0)]] * 2


def test_a_second_model_is_saved_with_its_optimizer_and_an_object_named_later_begins_afresh(tmp_path):
    ((names_saved, _, _),) = run_ranks(two_models, 1, str(tmp_path / "run"), False)
    own = ["average", "critic.engine", "critic.model", "critic.optimizer", "engine", "loader", "model", "optimizer"]
    assert names_saved == own
    ((_, weight, warned),) = run_ranks(two_models, 1, str(tmp_path / "run"), True)
    assert weight == 7.0
    assert ["has no 'more': it begins afresh" in text for text in warned] == [True]


def test_a_rank_that_comes_to_no_step_leaves_at_sigterm_all_the_same(tmp_path):
    assert run_ranks_with_errors(stuck, 1, str(tmp_path)) == {0: ("died", "exit code 143")}


def test_a_program_with_workers_that_outlive_sigterm_ends_by_the_error_of_one_of_them():
    assert run_ranks(fail_in_a_worker, 1) == [1]


def test_a_snapshot_that_is_asked_for_is_on_the_disk_once_it_was_waited_for(tmp_path):
    (steps, last), others = run_ranks(save_after, 2, str(tmp_path))
    assert steps == [None, 4, 4, 6], "inside of step 1, after the updates of step 3 and of the last, after the pass"
    assert last == 7, "the last one was asked for in a step that close() followed"
    assert others == ([None] * 4, None)


def test_what_was_saved_before_a_long_evaluation_is_what_sigterm_in_it_leaves(tmp_path):
    assert run_ranks_with_errors(evaluate_for_long, 1, str(tmp_path)) == {0: ("died", "exit code 143")}
    (result,) = run_ranks(run, 1, str(tmp_path), 1, -1, {})
    assert result["resumed_from"] == 6
    assert not (result["weights"] == -1.0).any()


def test_a_slow_disk_gets_fewer_snapshots_a_full_one_costs_only_these_and_a_folder_that_is_gone_is_made_again(tmp_path):
    (((num_steps, saved, warned), after),) = run_ranks(bad_disk, 1, str(tmp_path / "slow" / "run"), False)
    assert (num_steps, warned) == (12, [])
    assert 1 <= len(saved) <= 2
    (((num_steps, saved, warned), full_after),) = run_ranks(bad_disk, 1, str(tmp_path / "full" / "run"), True)
    assert (num_steps, saved) == (12, [])
    assert all("could not be written" in text and "No space left" in text for text in warned)
    assert warned
    for files, (told,) in (after, full_after):
        assert f"{18:012d}" in files[-1]
        assert all(name.endswith(".snapshot") for name in files), "its lock is its own, and given back"
        assert "was removed while training went on, and is made again" in told


@pytest.mark.parametrize(
    ("restarts", "shares", "version", "fail"),
    [
        ("3", "True", "2.13.0+cpu", True),
        ("3", "True", "2.14.0a0", True),
        ("0", "True", "2.13.0", False),
        ("3", "False", "2.13.0", False),
        ("3", "True", "2.9.1", False),
    ],
)
def test_restarts_that_would_fail_are_known_by_what_torchrun_tells_its_ranks(restarts, shares, version, fail):
    told = {"TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_USE_AGENT_STORE": shares}
    assert _restarts_fail(told, version) == fail
    assert not _restarts_fail({}, version)


def test_ranks_that_do_not_come_to_the_snapshot_are_waited_for_as_long_as_it_says(tmp_path):
    told, _ = run_ranks(not_come, 2, str(tmp_path), 5.0)
    assert "within 5 s: build the Snapshot on every rank" in told


def test_a_folder_that_rank_0_cannot_write_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").touch()
    first, second = run_ranks(refuse, 2, str(tmp_path / "file"))
    assert first == second
    assert "rank 0 cannot keep snapshots" in first
    assert "give a folder" in first
