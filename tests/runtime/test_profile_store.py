"""Profiles: what one run learned of its devices is where the next one begins."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import profile_cases
import pytest
import torch
from ranks import run_ranks
from torch import nn

from cannikin.errors import InvalidInputError
from cannikin.runlog import RankInfo
from cannikin.runtime.device import Cpu, find_device
from cannikin.runtime.profile_store import ProfileStore, model_key, share_profiles

FAST, SLOW = {"batches": [8.0], "note": "fast"}, {"batches": [4.0], "note": "slow"}


def test_what_is_saved_for_a_device_is_loaded_for_it_and_for_no_other(tmp_path):
    path = tmp_path / "new" / "profiles.json"
    ProfileStore(path, "net").save(["fast", "slow"], [FAST, SLOW])
    assert ProfileStore(path, "net").load(["slow", "unknown", "fast", "slow"]) == [SLOW, None, FAST, SLOW]
    assert ProfileStore(path, "other net").load(["fast"]) == [None]


def test_a_file_that_is_not_there_has_no_profiles(tmp_path):
    path = tmp_path / "profiles.json"
    assert ProfileStore(path, "net").load(["fast"]) == [None]
    assert not path.exists()


def test_saving_keeps_other_devices_and_other_models(tmp_path):
    path = tmp_path / "profiles.json"
    ProfileStore(path, "net").save(["fast"], [FAST])
    ProfileStore(path, "other net").save(["fast"], [SLOW])
    ProfileStore(path, "net").save(["slow", "silent"], [SLOW, None])
    assert ProfileStore(path, "net").load(["fast", "slow", "silent"]) == [FAST, SLOW, None]
    assert ProfileStore(path, "other net").load(["fast"]) == [SLOW]


def test_of_two_ranks_on_one_kind_of_device_the_first_is_kept(tmp_path):
    store = ProfileStore(tmp_path / "profiles.json", "net")
    store.save(["card", "card"], [FAST, SLOW])
    assert store.load(["card"]) == [FAST]
    store.save(["card", "card"], [None, SLOW])
    assert store.load(["card"]) == [SLOW]


def test_of_many_writers_at_once_none_loses_what_it_saved(tmp_path):
    path = tmp_path / "profiles.json"

    def write(writer: int) -> None:
        for number in range(12):
            ProfileStore(path, f"net {number % 2}").save([f"card {writer}-{number}"], [FAST])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    names = [f"card {writer}-{number}" for writer in range(4) for number in range(12)]
    found = [ProfileStore(path, f"net {model}").load(names[model::2]) for model in range(2)]
    assert found == [[FAST] * 24] * 2
    assert os.listdir(tmp_path) == ["profiles.json"]


def test_a_link_to_a_common_store_stays_a_link(tmp_path):
    (tmp_path / "common").mkdir()
    common, link = tmp_path / "common" / "profiles.json", tmp_path / "profiles.json"
    ProfileStore(common, "net").save(["card"], [FAST])
    link.symlink_to(common)
    ProfileStore(link, "net").save(["other card"], [SLOW])
    assert link.is_symlink()
    assert ProfileStore(common, "net").load(["card", "other card"]) == [FAST, SLOW]


def test_nothing_is_left_of_writers_that_were_killed_or_failed(tmp_path, monkeypatch):
    path = tmp_path / "profiles.json"
    (tmp_path / "profiles.json.123.part").write_text("{")
    ProfileStore(path, "net").save(["card"], [FAST])
    assert os.listdir(tmp_path) == ["profiles.json"]

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        ProfileStore(path, "net").save(["card"], [SLOW])
    assert os.listdir(tmp_path) == ["profiles.json"]
    assert ProfileStore(path, "net").load(["card"]) == [FAST]


def test_a_file_of_a_hundred_thousand_brackets_is_left_out(tmp_path):
    path = tmp_path / "profiles.json"
    path.write_text('{"format": "cannikin-profiles", "version": 1, "models": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.warns(RuntimeWarning, match="learned afresh"):
        assert ProfileStore(path, "net").load(["card"]) == [None]


def test_the_file_is_replaced_whole(tmp_path):
    """Whoever has the old file open goes on reading the old file."""
    path = tmp_path / "profiles.json"
    store = ProfileStore(path, "net")
    store.save(["card"], [FAST])
    with path.open() as old:
        before = os.stat(path).st_ino
        store.save(["card"], [SLOW])
        assert json.load(old)["models"]["net"]["card"] == FAST
    assert os.stat(path).st_ino != before
    assert [file.name for file in tmp_path.iterdir()] == ["profiles.json"], "nothing else is left behind"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "17",
        "{}",
        json.dumps({"format": "cannikin-runlog", "version": 1, "models": {}}),
        json.dumps({"format": "cannikin-profiles", "version": 99, "models": {}}),
        json.dumps({"format": "cannikin-profiles", "version": 1, "models": []}),
        json.dumps({"format": "cannikin-profiles", "version": 1, "models": {"net": [1, 2]}}),
    ],
)
def test_a_file_that_is_damaged_or_not_ours_warns_is_left_out_and_is_not_overwritten(tmp_path, text):
    path = tmp_path / "profiles.json"
    path.write_text(text)
    store = ProfileStore(path, "net")
    with pytest.warns(RuntimeWarning, match=r"profiles=.*profiles\.json.* cannot be read and is left out"):
        assert store.load(["fast", "slow"]) == [None, None]
    with pytest.warns(RuntimeWarning, match="left out"):
        store.save(["fast"], [FAST])
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        ProfileStore(tmp_path / "file" / "profiles.json", "net").save(["fast"], [FAST])


def test_a_damaged_profile_is_left_out_by_its_device_and_file_and_the_others_are_used(tmp_path):
    path = tmp_path / "profiles.json"
    whole = {name: [8.0] for name in ("batches", "forward_s", "backward_s", "steps")} | {"noise": 0.0}
    store = ProfileStore(path, "net")
    store.save(["fast", "slow"], [whole, whole | {"max_batch": "many"}])
    ranks = [RankInfo(device=device) for device in ("slow", "fast", "slow", "unknown")]
    told = re.escape(f"left out: the profile of slow in {path} has max_batch='many', which cannot be: delete it")
    with pytest.warns(RuntimeWarning, match=told) as warned:
        assert share_profiles(Alone(), store, ranks) == [None, whole, None, None]
    assert len(warned) == 1


class Alone:
    """An exchange of one rank."""

    def gather_text(self, text: str) -> list[str]:
        return [text]


def test_the_name_of_a_device_is_the_users_own_where_there_is_one(monkeypatch):
    monkeypatch.delenv("CANNIKIN_DEVICE", raising=False)
    assert re.search(rf", {torch.get_num_threads()} threads?$", Cpu().name)
    assert [names[0] for names in run_ranks(profile_cases.names_of_the_ranks, 2)] == ["card 0"] * 2


def test_a_device_that_cannot_be_timed_is_refused():
    with pytest.raises(InvalidInputError, match="the model is on 'meta': cannikin can time cpu and cuda devices only"):
        find_device(torch.device("meta"))


def test_models_are_told_apart_by_shapes_names_and_precision():
    net = nn.Sequential(nn.Linear(3, 4))
    keys = {
        model_key(net, scaled=False),
        model_key(net, scaled=True),
        model_key(nn.Sequential(nn.Linear(3, 5)), scaled=False),
        model_key(nn.Sequential(nn.ReLU(), nn.Linear(3, 4)), scaled=False),
        model_key(nn.Sequential(nn.Linear(3, 4)).to(torch.bfloat16), scaled=False),
    }
    assert len(keys) == 5
    assert model_key(nn.Sequential(nn.Linear(3, 4)), scaled=False) in keys, "values do not matter"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Trainings on two unequal ranks, one after another, and the folder of their files."""
    folder = tmp_path_factory.mktemp("profiles")
    (folder / "foreign.json").write_text('{"format": "someone else\'s"}')
    damaged = {"card 0": {"batches": "many"}, "card 1": {}}
    models = {profile_cases.tiny_key(): damaged}
    (folder / "damaged.json").write_text(json.dumps({"format": "cannikin-profiles", "version": 1, "models": models}))
    return folder, run_ranks(profile_cases.learn_then_start_again, 2, str(folder), timeout_s=60)


def test_a_second_run_begins_with_the_unequal_split_that_the_first_one_learned(told):
    _, (zero, one) = told
    assert zero["first"].splits == one["first"].splits
    assert zero["first"].splits[0] == (6, 6)
    fast, slow = zero["second"].splits[0]
    assert fast > 1.5 * slow
    assert fast + slow == profile_cases.TOTAL
    assert zero["second"].splits == one["second"].splits, "all ranks begin with rank 0's plan"
    assert "from stored profiles of all 2 ranks" in zero["second"].reason
    assert not any(run.warned for rank in (zero, one) for run in (rank["first"], rank["second"]))


def test_rank_0_has_the_learned_cluster_as_a_value(told):
    _, (zero, one) = told
    cluster = zero["first"].cluster
    assert [rank["device"] for rank in cluster["ranks"]] == ["card 0", "card 1"]
    assert cluster["total_batch"] == profile_cases.TOTAL
    fast, slow = (rank["backward_ms"]["per_sample"] for rank in cluster["ranks"])
    assert slow / fast > 1.5, "4 ms per sample against 1 ms"
    assert one["first"].cluster is None, "rank 0 learns"


def test_the_file_has_each_device_by_its_name(told):
    folder, _ = told
    content = json.loads((folder / "cards" / "profiles.json").read_text())
    assert list(content["models"]) == [profile_cases.tiny_key()]
    assert sorted(content["models"][profile_cases.tiny_key()]) == ["card 0", "card 1"]


@pytest.mark.parametrize("name", ["foreign", "damaged", "no folder"])
def test_profiles_that_cannot_be_used_warn_on_rank_0_and_training_goes_on(told, name):
    folder, (zero, one) = told
    assert zero[name].splits == one[name].splits
    assert zero[name].splits[0] == (6, 6)
    assert len(zero[name].splits) == 8
    assert zero[name].warned
    assert one[name].warned == []
    assert (folder / "foreign.json").read_text() == '{"format": "someone else\'s"}'
