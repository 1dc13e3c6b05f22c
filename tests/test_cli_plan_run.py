"""`cannikin plan RUN`: what it tells schedulers, and that bad input is one line and exit status 2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from benchmarks.synthetic import measure
from cannikin.cli import main
from cannikin.core.perf import Cluster, Curve
from cannikin.core.split import optimal_split
from cannikin.runlog import (
    RUNLOG_NAME,
    EventRecord,
    Header,
    JobInfo,
    ModelInfo,
    NoiseRecord,
    RankInfo,
    Record,
    RunLogWriter,
    window_record,
)

DEVICES = ("NVIDIA A100-SXM4-40GB", "Tesla V100", "Tesla T4")
TRUE = Cluster(
    forward=Curve(fixed_s=[0.01, 0.012, 0.02], per_sample_s=[4e-4, 8e-4, 2e-3]),
    backward=Curve(fixed_s=[0.01, 0.014, 0.02], per_sample_s=[9e-4, 1.7e-3, 4e-3]),
    gammas=[0.3, 1.0],
    tails_s=[0.03, 0.012],
)
SPLITS = ((22, 21, 21), (40, 20, 4), (39, 19, 6), (39, 19, 6))


def records(*, devices: tuple[str, ...] = DEVICES, **job: object) -> list[Record]:
    """A run on the true cluster, without scatter; it was told what the noise scale is."""
    header = Header(
        cannikin_version="1",
        started="",
        policy="cannikin",
        world_size=3,
        job=JobInfo(**{"batch_size": 64, **job}),
        ranks=tuple(RankInfo(device=device, host=f"node{rank}") for rank, device in enumerate(devices)),
        model=ModelInfo(name="Net", profile_key="Net-1"),
    )
    noise = NoiseRecord(signal_sqnorm=1.0, noise_trace=640.0, noise_scale=640.0, low=600.0, high=None)
    rng = np.random.default_rng(0)
    found: list[Record] = [header]
    for number, split in enumerate(SPLITS):
        window = measure(TRUE, [split] * 5, rng, noise=0.0, outliers=0.0, first_step=5 * number)
        found.append(window_record(window, noise=noise))
    return found


def written(folder: Path, lines: list[Record]) -> Path:
    with RunLogWriter(folder / RUNLOG_NAME) as log:
        for record in lines:
            log.write(record)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run", records())


def plan(*args: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, ["plan", *map(str, args)])


def output(*args: object) -> str:
    result = plan(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def answer(*args: object) -> dict:
    return json.loads(output(*args, "--json"))


def refusal(*args: object) -> str:
    result = plan(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert isinstance(result.exception, SystemExit)
    line = result.stderr[:-1]
    assert line.isprintable(), "exactly one line"
    return line


# The form that schedulers read. Whoever changes what is pinned here breaks their programs: raise the version.

OUTLOOK = {
    "possible": bool,
    "reason": type(None),
    "total_batch": int,
    "local_batches": list,
    "step_ms": float,
    "samples_per_s": float,
    "efficiency": float,
    "goodput_per_s": float,
    "extrapolated": bool,
}
CURVE = {"fixed": float, "per_sample": float, "floor": float}
RANK = {
    "rank": int,
    "device": str,
    "host": str,
    "known": bool,
    "forward_ms": dict,
    "backward_ms": dict,
    "load_ms": dict,
    "overlap": list,
    "min_batch": int,
    "max_batch": type(None),
    "measured_batches": list,
}
CLUSTER = {
    "batch_size": int,
    "max_batch_size": type(None),
    "total_batch": int,
    "local_batches": list,
    "noise_scale": float,
    "noise_scale_limits": list,
    "slowdown": float,
    "communication_ms": dict,
    "ranks": list,
}


def form(value: dict) -> dict[str, type]:
    return {key: type(entry) for key, entry in value.items()}


def test_version_1_of_the_form_has_exactly_these_keys_of_these_types(run):
    told = answer(run)
    assert (told["format"], told["version"]) == ("cannikin-advice", 1)
    assert list(told) == ["format", "version", "run", "step", "cluster", "now", "choices"]
    assert (told["run"], told["step"]) == (str(run), 20)
    assert form(told["cluster"]) == CLUSTER
    assert form(told["cluster"]["communication_ms"]) == {"num_ranks": int, "tails": list}
    for rank in told["cluster"]["ranks"]:
        assert form(rank) == RANK
        assert form(rank["forward_ms"]) == form(rank["backward_ms"]) == form(rank["load_ms"]) == CURVE
    assert form(told["now"]) == OUTLOOK
    for choice in told["choices"]:
        assert form(choice) == {"without": list, "add": list, "gain": float, **OUTLOOK}
    assert [choice["without"] for choice in told["choices"]] == [[0], [1], [2], [], [], []]
    assert [choice["add"] for choice in told["choices"][3:]] == [[{"device": name, "count": 1}] for name in DEVICES]


def test_what_cannot_be_is_null_with_a_reason(tmp_path):
    told = answer(written(tmp_path, records(max_local=(30, 30, 30))))
    first = told["choices"][0]
    assert first["possible"] is False
    assert first["reason"] == "a total batch of 64 does not fit: the 2 ranks take at most 60 samples"
    absent = ("gain", "local_batches", "step_ms", "samples_per_s", "efficiency", "goodput_per_s")
    assert [first[key] for key in absent] == [None] * 6
    assert told["cluster"]["ranks"][0]["max_batch"] == 30


def test_numbers_are_the_true_clusters(run):
    told = answer(run)
    now = optimal_split(TRUE, 64).step_s
    truths = [optimal_split(TRUE.without(rank), 64).step_s for rank in range(3)]
    truths += [optimal_split(TRUE.take([0, 1, 2, rank]), 64).step_s for rank in range(3)]
    assert told["now"]["step_ms"] == pytest.approx(now * 1e3, rel=0.01)
    for choice, truth in zip(told["choices"], truths, strict=True):
        assert 1 + choice["gain"] == pytest.approx(now / truth, rel=0.02)
        assert choice["goodput_per_s"] == pytest.approx(64e3 / choice["step_ms"])
    told_of = told["cluster"]["communication_ms"]
    assert told_of == {"num_ranks": 3, "tails": pytest.approx([30.0, 12.0], rel=0.01)}
    assert told["cluster"]["noise_scale_limits"] == [600.0, None]


# Choices of one's own


def test_ranks_that_leave_and_devices_that_join_make_one_choice(run):
    (choice,) = answer(run, "--without", 2, "--without", 1, "--add", "a100=2")["choices"]
    assert choice["without"] == [2, 1]
    assert choice["add"] == [{"device": DEVICES[0], "count": 2}]
    assert len(choice["local_batches"]) == 3
    assert choice["step_ms"] == pytest.approx(optimal_split(TRUE.take([0, 0, 0]), 64).step_s * 1e3, rel=0.02)


def test_all_of_a_runs_ranks_may_leave_where_others_join(run):
    (choice,) = answer(run, "--without", 0, "--without", 1, "--without", 2, "--add", "t4")["choices"]
    assert choice["local_batches"] == [64]


def test_a_device_of_a_profile_store_may_join(run, tmp_path):
    pytest.importorskip("torch")
    from cannikin.runtime.profile_store import ProfileStore

    def curve(batch: float) -> float:
        return 0.005 + 2e-4 * batch

    batches = [10.0, 40.0]
    times = [curve(batch) for batch in batches]
    entries = {"batches": batches, "forward_s": times, "backward_s": times, "steps": [9.0, 9.0]}
    store = tmp_path / "profiles.json"
    ProfileStore(store, "Net-1").save(["NVIDIA H100"], [{**entries, "noise": 0.01, "shared": None}])
    (choice,) = answer(run, "--add", "h100", "--profiles", store)["choices"]
    assert choice["add"] == [{"device": "NVIDIA H100", "count": 1}]
    assert choice["gain"] > max(other["gain"] for other in answer(run)["choices"]), "it is the fastest"
    assert len(answer(run, "--profiles", store)["choices"]) == 7, "it is among those that may join"


def test_the_split_of_another_total_batch_is_planned_on_the_learned_cluster(run):
    told = answer(run, "--batch", 96, "--without", 2)
    assert told["local_batches"] == pytest.approx(optimal_split(TRUE.without(2), 96).local_batches, abs=1)
    rows = answer(run, "--batch-range", "32:128", "--noise-scale", 640)["rows"]
    assert rows[0]["total_batch"] == 32


# For people


def test_the_table_ends_in_a_sentence(run):
    text = " ".join(output(run).split())
    sentence = (
        r"This job would gain \d+% from one more NVIDIA A100-SXM4-40GB, and lose 0\.\d% without rank 2 \(Tesla T4\)\."
    )
    assert re.search(sentence, text), text


def test_a_run_whose_ranks_ran_one_size_only_is_less_certain(tmp_path):
    header, first, *_ = records()
    assert "too alike to tell fixed from per-sample time" in output(written(tmp_path, [header, first]))


def test_text_of_a_log_cannot_reach_the_terminal(tmp_path):
    run = written(tmp_path, records(devices=("a\x1b[2J100", "b", "c")))
    assert "\x1b" not in output(run)


# Bad input


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--without", "3"], "rank 3 is not in this run: it has ranks 0, 1, 2"),
        (["--without", "t4"], "--without t4: of a run, give a rank by its number, from 0"),
        (["--without", "1", "--without", "1"], "--without 1: is given twice"),
        (["--without", "0", "--without", "1", "--without", "2"], "no rank would be left"),
        (["--add", "h100"], "--add h100: no such device is known, only NVIDIA A100"),
        (["--add", "tesla"], "--add tesla: may be any of Tesla V100, Tesla T4: give more of the name"),
        (["--add", "t4=0"], "'t4=0' is not DEVICE or DEVICE=N"),
        (["--add", "=2"], "'=2' is not DEVICE or DEVICE=N"),
        (["--add", "t4=many"], "'t4=many' is not DEVICE or DEVICE=N"),
        (["--profiles", "missing.json"], "--profiles missing.json: there is no such file"),
        (["--noise-scale", "5"], "--noise-scale has a meaning only with --batch-range"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(run, options, why):
    assert why in refusal(run, *options)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A profile store with one device that is damaged, beside one that is whole and one that the run has."""
    pytest.importorskip("torch")
    whole = {"batches": [10.0, 40.0], "forward_s": [0.007, 0.013], "backward_s": [0.007, 0.013], "steps": [9.0, 9.0]}
    whole |= {"noise": 0.01, "shared": None}
    damaged = whole | {"forward_s": [1e-300, 1.0]}
    known = {"NVIDIA H100": whole, "NVIDIA L40": damaged, "Tesla T4": damaged}
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps({"format": "cannikin-profiles", "version": 1, "models": {"Net-1": known}}))
    return path


def test_a_damaged_profile_of_a_store_is_left_out_of_the_usual_choices_with_one_line(run, store):
    result = plan(run, "--profiles", store, "--json")
    assert result.exit_code == 0
    added = [choice["add"][0]["device"] for choice in json.loads(result.stdout)["choices"] if choice["add"]]
    assert added == [*DEVICES, "NVIDIA H100"]
    told = f"cannikin: left out: the profile of NVIDIA L40 in {store} has forward_s=[1e-300, 1.0], which cannot be"
    assert result.stderr == f"{told}: delete it\n"


def test_a_damaged_profile_that_is_asked_for_is_refused_with_its_device_and_file(run, store):
    told = f"--add l40: the profile of NVIDIA L40 in {store} has forward_s=[1e-300, 1.0], which cannot be: delete it"
    assert refusal(run, "--add", "l40", "--profiles", store) == f"cannikin: {told}"
    assert refusal(run, "--add", "l40", "--profiles", store, "--batch", 96) == f"cannikin: {told}"


def test_a_damaged_profile_that_is_not_asked_for_is_not_spoken_of(run, store):
    assert answer(run, "--add", "h100", "--profiles", store)["choices"][0]["possible"]
    (choice,) = answer(run, "--add", "t4", "--profiles", store)["choices"]
    assert choice == answer(run, "--add", "t4")["choices"][0], "the run has measured that device itself"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--without", "9" * 4400], f"--without {'9' * 60}...: of a run, give a rank by its number, from 0"),
        (["--add", "t4=" + "9" * 4400], "999 is not DEVICE or DEVICE=N, N from 1 to 1024"),
    ],
)
def test_a_number_of_thousands_of_digits_is_one_short_sentence(run, options, why):
    line = refusal(run, *options)
    assert why in line
    assert len(line) < 200


def test_a_store_of_something_else_is_one_sentence(run, tmp_path):
    pytest.importorskip("torch")
    store = tmp_path / "other.json"
    store.write_text("[]")
    assert f"--profiles {store}: is no store of profiles" in refusal(run, "--add", "t4", "--profiles", store)


def test_a_log_too_short_to_have_learned_anything_is_one_sentence(tmp_path):
    header = records()[0]
    event = EventRecord(step=0, kind="epoch", data={"epoch": 0})
    line = refusal(written(tmp_path, [header, event]))
    assert f"{tmp_path / RUNLOG_NAME}: the run log has no window measured on all ranks" in line
    assert line.endswith("nothing was learned: train longer")


def test_no_run_at_all_is_one_sentence(tmp_path):
    assert "cannot be read: No such file or directory; give a run directory or its log" in refusal(tmp_path / "missing")
    assert "runlog.jsonl: cannot be read" in refusal(tmp_path)


def test_a_cluster_file_may_have_a_name_without_an_ending(tmp_path):
    example = Path(__file__).parent.parent / "examples" / "clusters" / "three-kinds.toml"
    path = tmp_path / "cluster"
    path.write_bytes(example.read_bytes())
    assert answer(path, "--batch", 64)["total_batch"] == 64


def test_devices_are_added_to_runs_only():
    example = Path(__file__).parent.parent / "examples" / "clusters" / "three-kinds.toml"
    assert "in a cluster file, write another [[node]]" in refusal(example, "--batch", "64", "--add", "t4")
