"""What a lab cluster may be, in words and in TOML, and that anything else is one clear line."""

from __future__ import annotations

import pytest

from cannikin.errors import ClusterFileError, InvalidInputError
from cannikin.lab.cluster import LabCluster, Slowdown, parse_link, parse_slowdown, parse_speeds
from cannikin.lab.lab_file import load_lab_file

FULL = """
mechanism = "hosts"
link = "400mbit"
sample_ms = 2
fixed_ms = 5
forward_share = 0.25

[[rank]]
name = "fast"
speed = 1
count = 2

[[rank]]
speed = 0.25
forward_share = 0.5

[[slow]]
rank = 2
factor = 0.5
step = 100
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text: str):
        path = tmp_path / "lab.toml"
        path.write_text(text)
        return load_lab_file(path)

    return load_text


def test_a_file_says_everything_that_a_cluster_has(load):
    found = load(FULL)
    assert found.mechanism == "hosts"
    assert found.cluster == LabCluster(
        speeds=(1.0, 1.0, 0.25),
        names=("fast", "fast", "rank1"),
        sample_s=0.002,
        fixed_s=0.005,
        forward_share=0.25,
        forward_shares=(None, None, 0.5),
        link_bit_per_s=4e8,
        slowdowns=(Slowdown(rank=2, factor=0.5, step=100),),
    )


def test_ranks_are_enough(load):
    found = load("[[rank]]\nspeed = 0.5\n")
    assert (found.cluster.speeds, found.cluster.sample_s, found.mechanism) == ((0.5,), None, "auto")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "rank is missing: add at least one [[rank]]"),
        ("rank = []", "0 ranks"),
        ("[[rank]]\nname = 'a'", 'rank[0].speed (rank "a") is missing'),
        (
            "[[rank]]\nspeed = 1\nspede = 2",
            "rank[0].spede is not a known key: did you mean speed? known here are speed, name, count, forward_share",
        ),
        ("colour = 1\n[[rank]]\nspeed = 1", "colour is not a known key"),
        ("[[rank]]\nspeed = 'fast'", 'rank[0].speed is "fast": it must be a number'),
        ("[[rank]]\nspeed = 0", "speed 0 of rank 0 must be from 0.001"),
        ("[[rank]]\nspeed = nan", "speed nan of rank 0"),
        ("[[rank]]\nspeed = 1\ncount = 0", "rank[0].count is 0"),
        ("[[rank]]\nspeed = 1\ncount = 65", "rank[0].count is 65"),
        ("mechanism = 'magic'\n[[rank]]\nspeed = 1", 'mechanism is "magic": it must be one of auto, portable'),
        ("link = '1 parsec'\n[[rank]]\nspeed = 1", "link '1 parsec'"),
        ("forward_share = 2\n[[rank]]\nspeed = 1", "forward_share=2"),
        ("[[rank]]\nspeed = 1\nforward_share = -1", "forward_share=-1"),
        ("sample_ms = 0\n[[rank]]\nspeed = 1", "sample_ms=0"),
        ("[[rank]]\nspeed = 1\n[[slow]]\nrank = 1\nfactor = 0.5\nstep = 3", "there is no rank 1, only 0 to 0"),
        ("[[rank]\nspeed", "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name_and_the_key(load, text, words):
    with pytest.raises(ClusterFileError) as caught:
        load(text)
    message = str(caught.value)
    assert words in message
    assert "lab.toml: " in message
    assert "\n" not in message


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ClusterFileError, match=r"none\.toml: cannot be read: No such file"):
        load_lab_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "bit_per_s"), [("1gbit", 1e9), ("400Mbit", 4e8), ("64 kbit", 64e3), ("5000000bit", 5e6)]
)
def test_links_are_written_as_tc_writes_them(text, bit_per_s):
    assert parse_link(text) == bit_per_s


@pytest.mark.parametrize("text", ["", "1", "1gb", "1gbyte", "fast", "1..2gbit", "-1gbit", "1tbit"])
def test_other_links_are_refused(text):
    with pytest.raises(InvalidInputError, match="link"):
        parse_link(text)


@pytest.mark.parametrize("text", ["", "1,", "1,x", "1,,2", "inf", "1 2"])
def test_other_speeds_are_refused(text):
    with pytest.raises(InvalidInputError, match="ranks: "):
        parse_speeds(text)


@pytest.mark.parametrize("text", ["", "1", "1:0.5", "1@5", "x:0.5@5", "1:x@5", "1:0.5@x", "1:0@5", "-1:1@5"])
def test_other_slowdowns_are_refused(text):
    with pytest.raises(InvalidInputError, match="slow"):
        parse_slowdown(text)
