"""`cannikin simulate` and `cannikin bench` as people and programs meet them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from cannikin.cli import main
from cannikin.cli.simulate import command
from cannikin.runlog import RUNLOG_NAME, read_runlog
from cannikin.sim.catalog import cluster_names, known_devices, workload_names

QUICK = ["--max-epochs", "0.05"]


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_table_compares_the_policies():
    done = run("simulate", "a", "--workload", "bert", "--policy", "cannikin,even,lb-bsp@epoch", *QUICK)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == " BERT on SQuAD, fine-tuning on a: 3 ranks, B0 9 to 48"
    assert [line.split()[0] for line in lines[4:7]] == ["cannikin", "even", "lb-bsp@epoch"]
    assert "even: last split a5000 3; a4000 3; p4000 3" in done.stdout
    assert "stopped at its limit of 0.05 epochs with F1 86.71: target 88 not reached" in done.stdout


def test_json_is_one_object_and_the_same_for_a_seed():
    arguments = ("simulate", "a", "--workload", "deepspeech2", "--seeds", "1,2", "--json", "--max-epochs", "1")
    first, again = run(*arguments), run(*arguments)
    assert first.stdout == again.stdout
    told = json.loads(first.stdout)
    assert (told["cluster"], told["workload"], told["batch_size"]) == ("a", "deepspeech2", 12)
    assert [(entry["policy"], entry["seed"]) for entry in told["runs"]] == [("cannikin", 1), ("cannikin", 2)]
    assert told["runs"][0]["elapsed_s"] != told["runs"][1]["elapsed_s"]
    assert sum(told["runs"][0]["local_batches"]) == told["runs"][0]["total_batch"]


def test_an_even_split_that_memory_does_not_hold_is_called_infeasible(tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[link]\nbandwidth_gbit = 25\n[[node]]\ndevice = "a100"\n[[node]]\ndevice = "t4"\nmemory_gb = 4\n'
    )
    options = ("--workload", "bert", "--batch-size", 30, *QUICK)
    both = run("simulate", tmp_path / "mine.toml", "--policy", "even,cannikin", *options)
    assert both.exit_code == 0
    assert "even: infeasible: an even split of 30 gives rank 1 15 samples, and it may have at most" in both.stdout
    told = json.loads(run("simulate", tmp_path / "mine.toml", "--policy", "even,cannikin", "--json", *options).stdout)
    assert [entry["policy"] for entry in told["runs"]] == ["cannikin"]
    assert "an even split of 30" in told["infeasible"]["even"]
    alone = run("simulate", tmp_path / "mine.toml", "--policy", "even", *options)
    assert (alone.exit_code, len(alone.stderr.splitlines())) == (2, 1)


def test_a_fixed_total_batch_stays(tmp_path):
    options = ("--batch-size", 24, "--max-batch-size", 24, "--run-dir", tmp_path, "--json", *QUICK)
    told = json.loads(run("simulate", "a", "--workload", "bert", *options).stdout)
    assert told["runs"][0]["total_batch"] == 24
    log = read_runlog(tmp_path / "cannikin-seed0")
    assert (tmp_path / "cannikin-seed0" / RUNLOG_NAME).exists()
    assert {plan.total_batch for plan in log.plans} == {24}


def test_a_users_cluster_file_is_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[link]\nbandwidth_gbit = 25\n[[node]]\ndevice = "a100"\n[[node]]\ndevice = "t4"\ncount = 2\n')
    done = run("simulate", path, "--workload", "cifar10", "--policy", "even", *QUICK)
    assert done.exit_code == 0
    assert "ResNet-18 on CIFAR-10 on mine.toml: 3 ranks" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("d", "--workload", "bert"), "cluster 'd' is unknown: choose one of a, b, c, or give a TOML file"),
        (("a", "--workload", "gpt"), "workload 'gpt' is unknown: choose one of cifar10, imagenet"),
        (("a", "--workload", "bert", "--policy", "ddp"), "policy 'ddp' is unknown: choose one of cannikin, even"),
        (("a", "--workload", "bert", "--policy", "even,even"), "names a policy twice"),
        (("a", "--workload", "bert", "--seeds", "x"), "is not a list of different whole numbers"),
        (
            ("a", "--workload", "bert", "--batch-size", "2"),
            "batch_size=2 is outside what the 3 ranks can hold, 3 to 48",
        ),
        (("a", "--workload", "bert", "--batch-size", "100"), "batch_size=100 is outside what the 3 ranks can hold"),
        (("a",), "give CLUSTER and --workload, or --from-run"),
        (("a", "--from-run", "x"), "leave CLUSTER and --workload out"),
        (("--from-run", "no/such/run"), "no/such/run"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, words):
    done = run("simulate", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_log_is_fitted_and_run_again(tmp_path):
    run("simulate", "a", "--workload", "imagenet", "--run-dir", tmp_path, "--max-epochs", "0.03", "--json")
    folder = tmp_path / "cannikin-seed0"
    told = json.loads(run("simulate", "--from-run", folder, "--policy", "even,cannikin", "--json").stdout)
    assert all(abs(split["error"]) < 0.2 for split in told["splits"])
    times = {entry["policy"]: entry["step_ms"] for entry in told["policies"]}
    assert times["cannikin"] < times["even"]
    table = run("simulate", "--from-run", folder)
    assert table.exit_code == 0
    assert "measured" in table.stdout


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The lines of a simulated run's log, as JSON."""
    folder = tmp_path_factory.mktemp("runs")
    run("simulate", "a", "--workload", "bert", "--run-dir", folder, *QUICK)
    text = (folder / "cannikin-seed0" / RUNLOG_NAME).read_text()
    return [json.loads(line) for line in text.splitlines()][:60]


DAMAGES = {
    "a row of a timeline is too short": lambda window: window["timeline"]["ready_ms"][0].pop(),
    "a row of a timeline is not there": lambda window: window["timeline"]["done_ms"].pop(),
    "a timeline has no buckets": lambda window: window["timeline"].update(ready_ms=[[]] * 3, done_ms=[[]] * 3),
    "a timeline has no ranks": lambda window: window["timeline"].update(
        local_batches=[], before_ms=[], ready_ms=[], done_ms=[]
    ),
    "a timeline is of another rank too": lambda window: window["timeline"]["before_ms"].append(1.0),
    "times are of fewer ranks": lambda window: window["backward_ms"].pop(),
    "a batch is too large for any number": lambda window: window["timeline"]["local_batches"].__setitem__(0, 10**19),
    "a local batch is enormous": lambda window: window["local_batches"].__setitem__(0, 10**40),
    "a local batch is nothing": lambda window: window["local_batches"].__setitem__(0, 0),
    "a time is enormous": lambda window: window["before_ms"].__setitem__(0, 1e300),
    "a time is nothing": lambda window: window["backward_ms"].__setitem__(0, 0.0),
    "a time is negative": lambda window: window["before_ms"].__setitem__(0, -5.0),
    "a step takes no time": lambda window: window.update(step_ms=0.0),
    "a step takes next to no time": lambda window: window.update(step_ms=5e-324),
    "a time is next to nothing": lambda window: window["backward_ms"].__setitem__(0, 5e-324),
    "a step takes less than no time": lambda window: window.update(step_ms=-1.0),
    "a number of steps is enormous": lambda window: window.update(num_valid=10**40),
}


VERBS = pytest.mark.parametrize("verb", [("simulate", "--from-run"), ("plan",)], ids=["simulate", "plan"])


def damaged(lines, folder, damages):
    """The path of a log whose windows, but for the first, have these damages, one each."""
    copies = json.loads(json.dumps(lines))
    windows = [line for line in copies if line["type"] == "window"]
    for window, damage in zip(windows[1:], damages, strict=False):
        damage(window)
    path = folder / "damaged.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in copies))
    return path


@VERBS
def test_damaged_windows_are_left_out(tmp_path, lines, verb):
    done = run(*verb, damaged([*lines, *lines[1:]], tmp_path, DAMAGES.values()))
    assert (done.exit_code, done.stderr, done.exception) == (0, "", None)


@VERBS
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_log_of_damaged_windows_is_fitted_or_refused_in_one_line(tmp_path, lines, damage, verb):
    path = damaged(lines, tmp_path, itertools.repeat(damage))
    done = run(*verb, path)
    assert isinstance(done.exception, SystemExit | None), done.exc_info
    if done.exit_code == 2:
        assert done.stderr.startswith(f"cannikin: {path}: ")
        assert len(done.stderr.splitlines()) == 1
    else:
        assert (done.exit_code, done.stderr) == (0, "")


def test_help_names_what_there_is():
    words = " ".join(command.epilog.split())
    for name in (*known_devices(), *workload_names()):
        assert name in words
    assert f"Clusters: {', '.join(cluster_names())}" in words


def test_bench_says_where_the_evaluation_is_now():
    done = run("bench", "paper", "--only", "gamma")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "run python -m benchmarks paper (same options)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_simulator_never_imports_torch():
    code = "import sys, cannikin.cli.simulate, benchmarks.paper.cells; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
