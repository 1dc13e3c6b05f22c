"""The live view and the observers in a real training: rank 0 shows it, the others show nothing."""

from __future__ import annotations

import re

import pytest
from live_cases import watched_training
from live_screen import Screen
from ranks import run_ranks


@pytest.mark.timeout(100)
def test_only_rank_0_shows_the_run_and_it_shows_both_ranks(tmp_path):
    first, other = run_ranks(watched_training, 2, str(tmp_path), timeout_s=80)
    assert set(other.values()) == {""}
    screen = Screen(rows=60).feed(first["terminal"])
    assert screen.text.count("╭─ cannikin") == 2  # the last panel of each model stays
    assert "2 ranks" in screen.text
    assert "step time" in screen.text
    assert "slowest       rank 1" in screen.text
    lines = first["file"].splitlines()
    assert all(line.startswith("cannikin: step ") for line in lines)
    assert (
        len([line for line in lines if "total batch" in line]) == 2
    )  # others tell of ranks that other programs slowed
    assert re.search(r'cannikin_rank_local_batch\{.*rank="1"', first["prometheus"])
