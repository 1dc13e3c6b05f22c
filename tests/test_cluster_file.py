"""Cluster files: what a good one means, and that a bad one is refused in one line naming file, key and limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cannikin import load_cluster
from cannikin.cluster_file import MAX_RANKS
from cannikin.core.values import NO_MAX
from cannikin.errors import ClusterFileError
from cannikin.toml_files import MAX_BYTES

GOOD = """\
[comm]
gamma = 0.15
overlapped_ms = 12
last_ms = 3.0

[[node]]
name = "a100"
count = 2
forward_ms = { fixed = 8, per_sample = 0.010 }
backward_ms = { fixed = 4.0, per_sample = 0.022, floor = 6.0 }
min_batch = 2
max_batch = 512

[[node]]
forward_ms = { fixed = 23.3, per_sample = 0.0607, floor = 1 }
backward_ms = { fixed = 46.6, per_sample = 0.1213 }
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str | bytes) -> Path:
        path = tmp_path / "cluster.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def refusal(path: str | Path) -> str:
    """The one line with which a file is refused, without the file's name."""
    with pytest.raises(ClusterFileError) as caught:
        load_cluster(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable(), "one line, nothing that moves the cursor"
    assert len(message) < 400
    return message.removeprefix(f"{path}: ")


def test_a_good_file_gives_one_rank_for_each_count_in_seconds(write):
    cluster = load_cluster(write(GOOD))
    assert cluster.names == ("a100", "a100", "node1")
    np.testing.assert_array_equal(cluster.forward.fixed_s, [0.008, 0.008, 0.0233])
    np.testing.assert_array_equal(cluster.forward.floor_s, [0, 0, 0.001])
    np.testing.assert_array_equal(cluster.backward.per_sample_s, np.array([0.022, 0.022, 0.1213]) / 1000)
    np.testing.assert_array_equal(cluster.backward.floor_s, [0.006, 0.006, 0])
    np.testing.assert_array_equal(cluster.gammas, [[0.15, 1]] * 3)
    np.testing.assert_allclose(cluster.tails_s, [0.015, 0.003], rtol=1e-15)
    assert cluster.min_batch.tolist() == [2, 2, 1]
    assert cluster.max_batch.tolist() == [512, 512, NO_MAX]


def test_a_path_may_be_a_string(write):
    assert load_cluster(str(write(GOOD))).num_ranks == 3


@pytest.mark.parametrize("encode", [lambda text: text.replace("\n", "\r\n"), lambda text: "\ufeff" + text])
def test_windows_line_ends_and_a_byte_order_mark_are_fine(write, encode):
    assert load_cluster(write(encode(GOOD))).names == ("a100", "a100", "node1")


def test_nodes_may_share_a_name(write):
    text = GOOD.replace("forward_ms = { fixed = 23.3", 'name = "a100"\nforward_ms = { fixed = 23.3')
    assert load_cluster(write(text)).names == ("a100",) * 3


def test_a_name_may_be_in_any_script(write):
    assert load_cluster(write(GOOD.replace("a100", "Knoten é 節点"))).names[0] == "Knoten é 節点"


@pytest.mark.parametrize("value", ["0", "0.0", "-0.0", "1e-12", "1e9", "1_000"])
def test_times_at_the_ends_of_their_range_are_fine(write, value):
    load_cluster(write(GOOD.replace("last_ms = 3.0", f"last_ms = {value}")))


def test_the_most_ranks_a_file_may_have_are_fine(write):
    assert load_cluster(write(GOOD.replace("count = 2", f"count = {MAX_RANKS - 1}"))).num_ranks == MAX_RANKS


TIME = "finite time in ms and not negative: 0, or from 1e-12 to 1e9"
TABLE = "{ fixed = 8.0, per_sample = 0.01 }"

# What is replaced, by what, and the words the message must have.
BAD_VALUES = [
    # missing keys
    ("gamma = 0.15\n", "", ["comm.gamma is missing", "0 to 1"]),
    ("last_ms = 3.0\n", "", ["comm.last_ms is missing", "in ms"]),
    ("[comm]\ngamma = 0.15\noverlapped_ms = 12\nlast_ms = 3.0\n", "", ["comm is missing", "[comm]"]),
    ("fixed = 8, ", "", ['node[0].forward_ms.fixed (node "a100") is missing']),
    (", per_sample = 0.1213", "", ["node[1].backward_ms.per_sample is missing"]),
    ("backward_ms = { fixed = 46.6, per_sample = 0.1213 }", "", ["node[1].backward_ms is missing", TABLE]),
    # unknown keys
    ("gamma =", "gama = 1\ngamma =", ["comm.gama is not a known key", "did you mean gamma?", "overlapped_ms"]),
    ("count =", "cuont =", ['node[0].cuont (node "a100")', "did you mean count?", "min_batch"]),
    ("floor = 6.0", "flor = 6.0", ['node[0].backward_ms.flor (node "a100")', "did you mean floor?"]),
    ("[comm]", "[link]\nspeed = 3\n[comm]", ["link is not a known key", "comm, node"]),
    ("count =", '"a\\nb\\u001b[31m" = 1\ncount =', ["node[0].a\\nb\\x1b[31m", "not a known key"]),
    ("count =", '"" = 1\ncount =', ["node[0]", "not a known key"]),
    ("count =", '"x - at `$.node[9].y" = 1\ncount =', ["not a known key"]),
    # wrong types
    ("gamma = 0.15", "gamma = true", ["comm.gamma is true", "a number"]),
    ("gamma = 0.15", 'gamma = "0.15"', ['comm.gamma is "0.15"', "a number"]),
    ("gamma = 0.15", "gamma = 1979-05-27", ["comm.gamma", "1979-05-27", "a number"]),
    ("gamma = 0.15", "gamma = [0.15]", ["comm.gamma is an array", "a number"]),
    ("count = 2", "count = 2.0", ['node[0].count (node "a100") is 2.0', "whole number"]),
    ("count = 2", "count = true", ["count", "is true", "whole number"]),
    ("min_batch = 2", "min_batch = 2.5", ["min_batch", "2.5", "whole number"]),
    ("max_batch = 512", "max_batch = inf", ["max_batch", "inf", "whole number"]),
    ('name = "a100"', "name = 100", ["node[0].name is 100", "quotes"]),
    ("{ fixed = 8, per_sample = 0.010 }", "8.0", ['node[0].forward_ms (node "a100") is 8.0', TABLE]),
    ("{ fixed = 8, per_sample = 0.010 }", "[8, 0.01]", ["node[0].forward_ms", "an array", TABLE]),
    # values no cluster has
    ("gamma = 0.15", "gamma = 1.5", ["comm.gamma is 1.5", "from 0 to 1"]),
    ("gamma = 0.15", "gamma = -0.1", ["comm.gamma is -0.1", "from 0 to 1"]),
    ("gamma = 0.15", "gamma = nan", ["comm.gamma is nan", "from 0 to 1"]),
    ("gamma = 0.15", "gamma = inf", ["comm.gamma is inf", "from 0 to 1"]),
    ("last_ms = 3.0", "last_ms = -3", ["comm.last_ms is -3.0", TIME]),
    ("overlapped_ms = 12", "overlapped_ms = nan", ["comm.overlapped_ms is nan", TIME]),
    ("fixed = 8", "fixed = -inf", ['node[0].forward_ms.fixed (node "a100") is -inf', TIME]),
    ("per_sample = 0.1213", "per_sample = -0.1213", ["node[1].backward_ms.per_sample is -0.1213", TIME]),
    ("floor = 6.0", "floor = -6", ['node[0].backward_ms.floor (node "a100") is -6.0', TIME]),
    ("fixed = 46.6", "fixed = 1e300", ["node[1].backward_ms.fixed is 1e+300", TIME]),
    ("fixed = 46.6", "fixed = 9007199254740993", ["node[1].backward_ms.fixed", TIME]),
    ("fixed = 46.6", "fixed = 5e-324", ["node[1].backward_ms.fixed is 5e-324", TIME]),
    ("fixed = 46.6", "fixed = 1" + "0" * 400, ["node[1].backward_ms.fixed", "more than 20 digits", TIME]),
    ("fixed = 46.6", "fixed = 1" + "0" * 5000, ["line 16", "thousands of digits"]),
    ("count = 2", "count = 0", ['node[0].count (node "a100") is 0', "1 to 100000"]),
    ("count = 2", "count = -1", ["node[0].count", "-1", "1 to 100000"]),
    ("count = 2", "count = 1_000_000_000_000", ["node[0].count", "is 1000000000000", "1 to 100000"]),
    ("count = 2", "count = 100_000", ["sum of node[].count is 100001", "100000 ranks"]),
    ("min_batch = 2", "min_batch = 0", ["node[0].min_batch", "is 0", "from 1"]),
    ("min_batch = 2", "min_batch = 513", ["node[0].max_batch", "is 512", "min_batch, 513"]),
    ("max_batch = 512", "max_batch = 1", ["node[0].max_batch", "is 1", "min_batch, 2"]),
    ("max_batch = 512", "max_batch = 1" + "0" * 30, ["node[0].max_batch", "to 1000000000000"]),
    ('name = "a100"', 'name = ""', ['node[0].name is ""', "1 to 64"]),
    ('name = "a100"', 'name = "a\\nb"', ["node[0].name", "printable"]),
    ('name = "a100"', f'name = "{"x" * 65}"', ["node[0].name", "1 to 64"]),
    (
        "forward_ms = { fixed = 23.3, per_sample = 0.0607, floor = 1 }\n"
        "backward_ms = { fixed = 46.6, per_sample = 0.1213 }",
        "forward_ms = { fixed = 0, per_sample = 0 }\nbackward_ms = { fixed = 0, per_sample = 0 }",
        ["node[1].forward_ms and backward_ms are all 0"],
    ),
    # not TOML
    ("gamma = 0.15", "gamma = 0.15\ngamma = 0.2", ["not TOML", "overwrite", "line 3"]),
    ("gamma = 0.15", "gamma = ", ["not TOML", "line 2"]),
    ("gamma = 0.15", "gamma = 0.15\rx", ["not TOML"]),
    ("gamma = 0.15", "gamma = " + "[" * 5000, ["nested too deeply"]),
]


@pytest.mark.parametrize(
    ("old", "new", "words"), BAD_VALUES, ids=[new[:40] or f"no {old[:30]}" for old, new, _ in BAD_VALUES]
)
def test_a_wrong_value_is_refused_by_key_and_limit(write, old, new, words):
    assert old in GOOD
    message = refusal(write(GOOD.replace(old, new, 1)))
    for word in words:
        assert word in message


BAD_FILES = {
    "an empty file": (b"", ["is empty", "[comm]", "[[node]]"]),
    "only a comment": (b"# nothing here\n", ["is empty"]),
    "not TOML": (b"all: prerequisites\n\tcc -o all\n", ["not TOML", "line 1"]),
    "not UTF-8": (b"[comm]\ngamma = 0.1 # \xff\n", ["not UTF-8", "line 2", "0xff"]),
    "UTF-16": ("\ufeff[comm]".encode("utf-16"), ["not UTF-8"]),
    "a null byte": (b"\0", ["not TOML"]),
    "no nodes": (GOOD.split("[[node]]")[0].encode(), ["node is missing", "[[node]]"]),
    "an empty list of nodes": (b"node = []\n" + GOOD.split("[[node]]")[0].encode(), ["node has no entry", "[[node]]"]),
    "single brackets": (b"[node]\nname = 'x'\n" + GOOD.split("[[node]]")[0].encode(), ["node is a table", "[[node]]"]),
    "nodes that are numbers": (b"node = [3]\n" + GOOD.split("[[node]]")[0].encode(), ["node[0] is 3", "table"]),
    "a file too large": (b"#" * (MAX_BYTES + 1), ["larger than", str(MAX_BYTES)]),
}


@pytest.mark.parametrize(("content", "words"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_is_no_cluster_file_is_refused(write, content, words):
    message = refusal(write(content))
    for word in words:
        assert word in message


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "nowhere.toml")
    assert "directory" in refusal(tmp_path)
    with pytest.raises(ClusterFileError, match="cannot be read"):
        load_cluster("null\0character")


def test_a_file_without_read_permission_is_refused(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert "cannot be read: Permission denied" in refusal("cluster.toml")


def test_an_endless_file_is_not_read_to_its_end():
    assert "larger than" in refusal("/dev/zero")


def test_the_cause_of_a_refusal_is_kept_for_whoever_debugs_it(write):
    with pytest.raises(ClusterFileError) as caught:
        load_cluster(write("x"))
    assert caught.value.__cause__ is not None


WORDS = "nan inf -1 1e999 true \"\" { } [ ] [[ = # , . ''' node comm [[node]] [comm] 1979-05-27 0x_ \\u é"
SNIPPETS = st.sampled_from([*WORDS.split(), "\n", "\r", "\0", " ", "9" * 30, "fixed = 1", "count = 3\n"])
EDITS = st.lists(
    st.tuples(st.integers(0, len(GOOD)), st.integers(0, 12), st.one_of(SNIPPETS, st.text(max_size=4))), max_size=5
)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS)
@example(edits=[])
def test_any_mutation_of_a_file_is_read_or_refused_and_nothing_else(write, edits):
    text = GOOD
    for start, length, insert in edits:
        text = text[:start] + insert + text[start + length :]
    path = write(text.encode("utf-8", "surrogatepass"))
    try:
        load_cluster(path)
    except ClusterFileError:
        refusal(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_and_nothing_else(write, content):
    refusal(write(content))
