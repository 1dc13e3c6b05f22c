"""`cannikin plan`: what it prints for people and for programs, and that bad input is one line and exit status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import cannikin
from cannikin.cli import main

EXAMPLE = Path(__file__).parent.parent / "examples" / "clusters" / "three-kinds.toml"

COMM = "comm = { gamma = 0.25, overlapped_ms = 2, last_ms = 1 }\n"


def node(per_sample: float, *, fixed: float = 1, **keys: object) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    curve = f"{{ fixed = {fixed}, per_sample = {per_sample} }}"
    return "\n".join(["[[node]]", *lines, f"forward_ms = {curve}", f"backward_ms = {curve}", ""])


# The ranks named slow take 200 ms before their first sample, the fast ones 2 ms.
SLOW_RANKS = COMM + node(0.01, name="fast", count=2) + node(0.01, fixed=100, name="slow", count=2)
PAIR = COMM + node(0.25, name="fast") + node(0.5, name="slow")
BOUNDED = COMM + node(0.25, min_batch=2, max_batch=8) + node(0.5, min_batch=3, max_batch=10)


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> str:
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return str(path)

    return write_file


def plan(*args: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, ["plan", *map(str, args)])


def output(*args: object) -> str:
    """What a successful run prints."""
    result = plan(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def report(*args: object) -> dict:
    return json.loads(output(*args, "--json"))


def refusal(*args: object) -> str:
    """The one line of a refused run."""
    result = plan(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert isinstance(result.exception, SystemExit)
    line, end = result.stderr[:-1], result.stderr[-1:]
    assert end == "\n"
    assert line.isprintable(), "exactly one line"
    assert line.startswith("cannikin: ")
    return line


# For programs


def test_json_is_one_object_with_exactly_the_agreed_keys(write):
    got = report(write(PAIR), "--batch", 12)
    numbers = {key: got.pop(key) for key in ("step_ms", "even_step_ms", "speedup_over_even", "use", "even_use")}
    fewer = {"faster_without": None}
    assert got == {"total_batch": 12, "local_batches": [8, 4], "bottlenecks": ["compute", "compute"], **fewer}
    wanted = {"step_ms": 7.0, "even_step_ms": 9.0, "speedup_over_even": 9 / 7, "use": 6 / 7, "even_use": 6 / 9}
    assert numbers == pytest.approx(wanted, rel=1e-15)  # alone, each rank takes 6 ms


def test_json_expands_counts_in_node_order_and_agrees_with_the_library():
    got = report(EXAMPLE, "--batch", 4099)
    cluster = cannikin.load_cluster(EXAMPLE)
    split = cannikin.optimal_split(cluster, 4099)
    assert tuple(got["local_batches"]) == split.local_batches
    assert tuple(got["bottlenecks"]) == split.bottlenecks
    assert got["step_ms"] == cannikin.step_time(cluster, split.local_batches) * 1000, "a full double, not rounded"
    even = [257] * 3 + [256] * 13
    assert got["even_step_ms"] == cannikin.step_time(cluster, even) * 1000
    assert got["speedup_over_even"] == pytest.approx(got["even_step_ms"] / got["step_ms"], rel=1e-15)


@pytest.mark.parametrize(("batch", "why"), [(18, "9 is above 8"), (5, "2 is below 3")])
def test_an_even_split_that_breaks_a_bound_is_null(write, batch, why):
    got = report(write(BOUNDED), "--batch", batch)
    assert got["even_step_ms"] is None, why
    assert got["speedup_over_even"] is None
    assert got["even_use"] is None


@pytest.mark.parametrize("batch", [4, 5, 6, 7, 1001])
def test_on_equal_ranks_the_speed_up_is_exactly_one(write, batch):
    assert report(write(COMM + node(0.3, fixed=1.7, count=4)), "--batch", batch)["speedup_over_even"] == 1


def test_json_says_without_which_ranks_the_batch_would_be_faster(write):
    path = write(SLOW_RANKS)
    got = report(path, "--batch", 64)
    assert (got["faster_without"]["ranks"], got["faster_without"]["names"]) == ([2, 3], ["slow", "slow"])
    alone = report(path, "--batch", 64, "--without", "slow", "--without", "slow")
    assert got["faster_without"]["local_batches"] == alone["local_batches"]
    assert got["faster_without"]["step_ms"] == pytest.approx(alone["step_ms"], rel=1e-12)
    of_range = report(path, "--batch-range", "16:64")
    assert of_range["best_total_batch"] == 64
    assert of_range["faster_without"] == got["faster_without"], "a range has it for its best total batch"


# Without a node


def test_without_a_node_the_ring_is_shorter(write):
    path = write(COMM + node(0.25, name="a", count=2) + node(0.5, name="b"))
    got = report(path, "--batch", 12, "--without", "a")
    pair = cannikin.load_cluster(path).without(0)
    assert got["step_ms"] == pytest.approx(cannikin.optimal_split(pair, 12).step_s * 1000, rel=1e-12)
    assert pair.tails_s * 1000 == pytest.approx([3 * 0.75, 1 * 0.75]), "n(n-2)/(n-1)^2 is 3/4 at n = 3"
    assert got["local_batches"] == [8, 4]


def test_without_may_be_repeated_down_to_one_rank(write):
    got = report(write(PAIR + node(1, name="slower")), "--batch", 12, "--without", "fast", "--without", "slower")
    assert got["local_batches"] == [12]
    assert got["step_ms"] == pytest.approx(1 + 12 * 0.5 + 1 + 12 * 0.5), "one rank alone communicates with nobody"


def test_without_takes_one_node_of_the_name_at_a_time():
    title = output(
        EXAMPLE, "--batch", 1024, "--without", "v100", "--without", "a100", "--without", "v100"
    ).splitlines()[0]
    assert title.split(":")[0].strip() == "three-kinds.toml without 2 v100, a100"
    assert title.endswith("13 ranks")


def test_without_refuses_to_choose_between_unlike_nodes_of_one_name(write):
    path = write(COMM + node(0.25, name="x") + node(0.5, name="x"))
    assert "--without x: unlike nodes share that name" in refusal(path, "--batch", 8, "--without", "x")
    assert "x x2" not in output(path, "--batch", 8), "and the table keeps them apart"


# A range of total batches


def test_a_range_has_throughput_and_the_largest_is_best(write):
    got = report(write(PAIR), "--batch-range", "2:64")
    assert set(got) == {"rows", "best_total_batch", "faster_without"}
    assert set(got["rows"][0]) == {"total_batch", "step_ms", "local_batches", "throughput_per_s"}
    for row in got["rows"]:
        assert sum(row["local_batches"]) == row["total_batch"]
        assert row["throughput_per_s"] == pytest.approx(row["total_batch"] / row["step_ms"] * 1000)
    assert got["best_total_batch"] == 64


def test_a_noise_scale_adds_goodput_with_the_low_end_as_initial_batch(write):
    got = report(write(PAIR), "--batch-range", "4:256", "--noise-scale", 10)
    for row in got["rows"]:
        efficiency = (10 + 4) / (10 + row["total_batch"])
        assert row["efficiency"] == pytest.approx(efficiency)
        assert row["goodput_per_s"] == pytest.approx(row["throughput_per_s"] * efficiency)
    best = max(got["rows"], key=lambda row: row["goodput_per_s"])
    assert got["best_total_batch"] == best["total_batch"]
    assert 4 < best["total_batch"] < 256


def test_a_noise_scale_of_zero_makes_a_larger_batch_worthless(write):
    assert report(write(PAIR), "--batch-range", "4:256", "--noise-scale", 0)["best_total_batch"] == 4


def totals(path: str, low: int, high: int) -> list[int]:
    """The total batches that a range is tried at."""
    return [row["total_batch"] for row in report(path, "--batch-range", f"{low}:{high}")["rows"]]


@given(low=st.integers(1, 10**12), factor=st.floats(1, 1e12))
@example(low=256, factor=32.0)
@example(low=1, factor=1e12)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_totals_of_a_range_are_few_and_rising_and_have_both_ends(write, low, factor):
    high = min(10**12, int(low * factor))
    tried = totals(write(COMM + node(0.25)), low, high)
    assert tried[0] == low
    assert tried[-1] == high
    assert len(tried) <= 12
    assert tried == sorted(set(tried))


def test_the_totals_of_a_range_have_every_doubling_where_they_fit(write):
    assert {256, 512, 1024, 2048, 4096, 8192} <= set(totals(write(COMM + node(0.25)), 256, 8192))


# Any cluster within the limits

TIMES = st.sampled_from([0, 1e-12, 1, 1e9]) | st.floats(-12, 9).map(lambda exponent: 10**exponent) | st.floats(0.5, 100)
NODES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 50), st.none() | st.integers(50, 10**12), *[TIMES] * 6),
    min_size=1,
    max_size=3,
)


@given(gamma=st.floats(0, 1), comm=st.tuples(TIMES, TIMES), nodes=NODES, more=st.integers(0, 1000))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cluster_within_the_limits_is_planned_to_the_last_sample(write, gamma, comm, nodes, more):
    text = f"comm = {{ gamma = {gamma!r}, overlapped_ms = {comm[0]!r}, last_ms = {comm[1]!r} }}\n"
    for count, low, high, s, q, a, m, k, p in nodes:
        text += f"[[node]]\ncount = {count}\nmin_batch = {low}\n" + (f"max_batch = {high}\n" if high else "")
        text += f"forward_ms = {{ fixed = {s!r}, per_sample = {q!r}, floor = {a!r} }}\n"
        text += f"backward_ms = {{ fixed = {m!r}, per_sample = {k!r}, floor = {p or 1!r} }}\n"
    most = sum(count * (high or 10**12) for count, _, high, *_ in nodes)
    batch = min(most, sum(count * low for count, low, *_ in nodes) + more)
    got = report(write(text), "--batch", batch)
    assert sum(got["local_batches"]) == batch
    assert got["speedup_over_even"] is None or got["speedup_over_even"] >= 1 - 1e-9
    assert f"total batch {batch:,} on" in output(write(text), "--batch", batch)


# For people


def test_the_example_reads_well_in_eighty_columns():
    lines = output(EXAMPLE, "--batch", 1024).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in (
        "three-kinds.toml: total batch 1,024 on 16 ranks",
        "0-3    a100 x4              145   14.2%   43.20 ms   compute",
        "4-7    v100 x4                1    0.1%   73.08 ms   min_batch",
        "step time   73.08 ms",
        "even split  84.55 ms, with 64 samples per rank",
        "speed-up    1.16x over the even split",
        "use         55% of what the hardware can do; DDP would use 48%",
        "faster without the 4 ranks of v100: 43.22 ms per step, 40.9% less",
    ):
        assert words in text


def test_a_range_reads_well_in_eighty_columns():
    lines = output(EXAMPLE, "--batch-range", "256:8192", "--noise-scale", 3000).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.endswith("best of these")] == ["4,096"]


def test_numbers_are_never_cut_short_however_narrow_the_terminal():
    args = ["plan", str(EXAMPLE), "--batch-range", "16:40960", "--noise-scale", "1e9"]
    narrow = CliRunner(env={"COLUMNS": "20"}).invoke(main, args)
    wide = CliRunner(env={"COLUMNS": "300"}).invoke(main, args)
    assert narrow.stdout.split() == wide.stdout.split()


def test_a_hundred_equal_ranks_are_one_or_two_rows(write):
    text = output(write(COMM + node(0.5, name="gpu", count=100)), "--batch", 1050)
    assert "0-49    gpu x50" in text
    assert "50-99   gpu x50" in text
    assert len(text.splitlines()) < 15


def test_equal_ranks_use_as_much_as_ddp_would(write):
    assert "can do; DDP would use as much" in output(write(COMM + node(0.5, count=4)), "--batch", 64)


def test_two_thousand_unbounded_ranks_are_solved(write):
    assert report(write(COMM + node(0.5, count=2000)), "--batch", 4000)["local_batches"] == [2] * 2000


def test_no_rank_is_sent_away_where_all_help(write):
    assert "faster without" not in output(write(COMM + node(0.5, count=4)), "--batch", 4000)


def test_one_slow_rank_is_named_with_the_gain(write):
    text = output(write(COMM + node(0.1, name="fast", count=3) + node(0.1, fixed=500, name="old box")), "--batch", 64)
    assert "faster without rank 3 (old box)" in text
    assert "7.289 ms per step, 99.3% less (--without 'old box')." in " ".join(text.split())


def test_a_range_says_so_of_its_best_total_batch(write):
    cluster = write(COMM + node(0.1, name="fast", count=3) + node(0.1, fixed=500, name="old box"))
    text = " ".join(output(cluster, "--batch-range", "16:64", "--noise-scale", 1e6).split())
    assert "A total batch of 64 would be faster without rank 3 (old box)" in text


def test_all_slow_ranks_of_a_name_are_named_together(write):
    assert "without the 2 ranks of slow" in output(write(SLOW_RANKS), "--batch", 64)


def test_an_impossible_even_split_is_said_in_words(write):
    text = output(write(BOUNDED), "--batch", 17)
    assert "not possible: 8 or 9 samples per rank" in text
    assert "speed-up" not in text
    assert "of what the hardware can do; DDP's even split does not fit" in text


def test_names_are_printed_as_they_are(write):
    text = output(write(COMM + node(0.5, name="[red]節点 :smile:")), "--batch", 8)
    assert "[red]節点 :smile:" in text


def test_piped_output_has_no_escape_codes_even_if_colour_is_forced():
    result = CliRunner(env={"FORCE_COLOR": "1"}).invoke(main, ["plan", str(EXAMPLE), "--batch", "1024"])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout


# Bad input

REQUESTS = {
    "neither batch nor range": ([], ["exactly one of --batch and --batch-range"]),
    "both batch and range": (["--batch", 8, "--batch-range", "8:9"], ["exactly one of --batch and --batch-range"]),
    "zero": (["--batch", 0], ["--batch", "0", "1 to 1000000000000"]),
    "negative": (["--batch", -4], ["--batch", "-4", "1 to"]),
    "a fraction": (["--batch", 8.5], ["--batch", "8.5", "whole number"]),
    "a word": (["--batch", "many"], ["--batch", "many", "whole number"]),
    "two lines": (["--batch", "8\n9"], ["--batch", "8\\n9", "whole number"]),
    "absurdly large": (["--batch", 10**13], ["--batch", "1 to 1000000000000"]),
    "beyond reading": (["--batch", "9" * 5000], ["--batch", "1 to 1000000000000"]),
    "below the minimums": (["--batch", 4], ["cluster.toml", "4 is below 5", "min_batch"]),
    "above the maximums": (["--batch", 19], ["cluster.toml", "19 is above 18", "max_batch"]),
    "half a range": (["--batch-range", "8"], ["--batch-range", "LO:HI"]),
    "three ends": (["--batch-range", "8:9:10"], ["--batch-range", "LO:HI"]),
    "a range of words": (["--batch-range", "a:b"], ["--batch-range", "LO:HI"]),
    "a range upside down": (["--batch-range", "9:8"], ["--batch-range", "9:8", "LO <= HI"]),
    "a range from zero": (["--batch-range", "0:8"], ["--batch-range", "1 <= LO"]),
    "a range that begins too low": (["--batch-range", "4:8"], ["4 is below 5", "min_batch"]),
    "a range that ends too high": (["--batch-range", "8:19"], ["19 is above 18", "max_batch"]),
    "a range out of reach": (["--batch-range", "100:200"], ["100 is above 18", "max_batch"]),
    "noise scale without a range": (["--batch", 8, "--noise-scale", 3], ["--noise-scale", "--batch-range"]),
    "negative noise scale": (["--batch-range", "8:9", "--noise-scale", -1], ["--noise-scale", "-1", "not negative"]),
    "NaN noise scale": (["--batch-range", "8:9", "--noise-scale", "nan"], ["--noise-scale", "nan", "finite"]),
    "infinite noise scale": (["--batch-range", "8:9", "--noise-scale", "inf"], ["--noise-scale", "inf", "finite"]),
    "noise scale in words": (["--batch-range", "8:9", "--noise-scale", "low"], ["--noise-scale", "low"]),
    "an unknown name": (
        ["--batch", 8, "--without", "h100"],
        ["--without h100", "no node has that name", "node0, node1"],
    ),
    "a name used up": (["--batch", 8, *["--without", "node0"] * 2], ["--without node0", "no more nodes", "node1"]),
    "everybody leaves": (["--batch", 8, "--without", "node0", "--without", "node1"], ["node1", "only rank left"]),
    "an unknown option": (["--batch", 8, "--fast"], ["--fast", "cannikin plan --help"]),
    "a missing value": (["--batch"], ["--batch", "argument"]),
    "a second file": (["--batch", 8, "other.toml"], ["other.toml"]),
}


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
@pytest.mark.parametrize(("args", "words"), REQUESTS.values(), ids=REQUESTS.keys())
def test_an_impossible_request_is_refused_in_one_line(write, args, words, form):
    line = refusal(write(BOUNDED), *form, *args)
    for word in words:
        assert word in line


def test_a_bad_file_is_refused_by_file_key_and_limit(write):
    path = write(PAIR.replace("per_sample = 0.5", "per_sample = -0.5"))
    line = refusal(path, "--batch", 8)
    for words in (path, "node[1].forward_ms.per_sample", '"slow"', "-0.5", "not negative"):
        assert words in line


def test_a_missing_file_and_a_missing_argument_are_refused():
    assert "nowhere.toml: cannot be read: No such file" in refusal("nowhere.toml", "--batch", 8)
    assert "CLUSTER.toml" in refusal()


def test_an_unknown_verb_is_refused():
    result = CliRunner().invoke(main, ["plam"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "cannikin: No such command 'plam' (see 'cannikin --help')\n"


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_names_the_verbs(args):
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0
    assert "plan" in result.stdout


def test_the_version_is_the_package_s():
    assert CliRunner().invoke(main, ["--version"]).stdout == f"cannikin, version {cannikin.__version__}\n"


# The real process


def run(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cannikin", *args]
    return subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=60, **{"stdout": subprocess.PIPE, **kwargs}
    )


def test_the_real_command_prints_json_and_nothing_else():
    done = run("plan", str(EXAMPLE), "--batch", "1024", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert sum(json.loads(done.stdout)["local_batches"]) == 1024


def test_the_real_command_refuses_in_one_line():
    done = run("plan", str(EXAMPLE), "--batch", "15")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "15 is below 16" in done.stderr


def test_a_reader_that_left_is_no_traceback():
    command = [sys.executable, "-m", "cannikin", "plan", str(EXAMPLE), "--batch", "1024"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_a_full_disk_is_one_line_and_status_1():
    with open("/dev/full", "w") as full:
        done = run("plan", str(EXAMPLE), "--batch", "1024", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "cannikin: output could not be written: No space left on device\n"


def test_an_ascii_terminal_gets_escapes_for_other_letters(write):
    path = write(COMM + node(0.5, name="é"))
    done = run("plan", path, "--batch", "8", env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe9" in done.stdout
    assert done.stdout.isascii()
