"""Training under fault: what is drawn, how it is judged, and some of it for real."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from benchmarks.chaos import judge
from benchmarks.chaos.faults import KINDS, SPEEDS, draw_chain
from benchmarks.chaos.launch import Ended
from benchmarks.chaos.rank import flat, network
from benchmarks.chaos.run import Chaos, table
from benchmarks.soak import table as soak_table

EVERYTHING = frozenset({"hosts", "disk"})
CHAIN = replace(draw_chain(0, 0, 3, frozenset()), num_samples=12, batch_size=4, max_batch_size=None)


def test_a_seed_draws_the_same_faults_again_and_another_seed_others():
    assert draw_chain(3, 1, 10, EVERYTHING) == draw_chain(3, 1, 10, EVERYTHING)
    assert draw_chain(3, 1, 10, EVERYTHING) != draw_chain(4, 1, 10, EVERYTHING)


def test_a_thousand_faults_are_of_every_kind_and_each_launch_but_the_last_is_ended_by_one():
    drawn: Counter[str] = Counter()
    for number in range(100):
        chain = draw_chain(0, number, 10, EVERYTHING)
        *launches, last = chain.launches
        assert last.faults == ()
        for launch in launches:
            *before, deadly = launch.faults
            assert KINDS[deadly.kind].ends
            assert not any(KINDS[fault.kind].ends for fault in before)
            assert 3 <= len(set(launch.members)) == len(launch.members) <= len(SPEEDS)
            drawn.update(fault.kind for fault in launch.faults)
    assert drawn.keys() == KINDS.keys()
    assert drawn.total() > 950


def test_nothing_is_drawn_that_the_machine_cannot_do():
    kinds = {f.kind for n in range(60) for launch in draw_chain(0, n, 10, frozenset()).launches for f in launch.faults}
    assert not any(KINDS[kind].needs in ("hosts", "disk") for kind in kinds)


def told(steps, mark=None):
    """What two ranks write of steps of four samples: (epoch, samples), of which each rank has half."""
    diaries = []
    for rank in range(2):
        lines = [
            {"what": "step", "at_s": 0.0, "step": n, "epoch": epoch, "samples": samples[2 * rank : 2 * rank + 2]}
            for n, (epoch, samples) in enumerate(steps)
        ]
        diaries.append([{"what": "loaded", "at_s": 0.0, "mark": mark}, *lines])
    return judge.Told(diaries=diaries, ended=Ended(start_s=0.0, end_s=[1.0, 1.0], statuses=[1, 1]), printed=[])


EPOCH = [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (0, [8, 9, 10, 11])]


def test_work_beyond_the_snapshot_is_done_again_and_counts_once():
    launches = [told(EPOCH[:2]), told([EPOCH[1], EPOCH[2]], mark=[0, 1])]
    assert judge.count_samples(judge.lineage(launches), CHAIN) == {"samples": 12, "lost": 0, "repeated": 0}


def test_a_snapshot_that_skips_a_step_loses_samples_and_one_that_lags_repeats_them():
    skips = [told(EPOCH[:2]), told(EPOCH[2:], mark=[0, 1])]
    assert judge.count_samples(judge.lineage(skips), CHAIN) == {"samples": 8, "lost": 4, "repeated": 0}
    lags = [told(EPOCH[:2]), told(EPOCH[1:], mark=[0, 2])]
    assert judge.count_samples(judge.lineage(lags), CHAIN) == {"samples": 16, "lost": 0, "repeated": 4}


def test_a_launch_that_loaded_an_older_snapshot_leaves_out_the_launches_in_between():
    launches = [told(EPOCH[:1]), told(EPOCH[1:2], mark=[0, 1]), told(EPOCH[1:], mark=[0, 1])]
    assert [samples for _, samples, _ in judge.lineage(launches)] == [samples for _, samples in EPOCH]


def test_the_run_to_compare_with_begins_alike_in_threads_that_share_the_random_generator():
    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(lambda _: flat(network()[0]), range(100))
    assert all(torch.equal(first, other) for other in others)


def test_a_split_in_proportion_to_the_speeds_is_the_best():
    assert judge.excess([8, 4, 2], [1.0, 0.5, 0.25]) == 0
    assert judge.excess([5, 5, 4], [1.0, 0.5, 0.25]) > 0.5


def check(chaos, num_faults):
    """Nothing was lost, repeated or hung, and the weights are those of one process."""
    chains = [line for line in chaos.lines if line["what"] == "chain"]
    faults = [line for line in chaos.lines if line["what"] == "fault"]
    assert len(faults) == num_faults
    assert sum(fault["struck"] for fault in faults) > 0.8 * num_faults
    for fault in faults:
        assert not fault.get("hung"), fault
    for chain in chains:
        assert "failed" not in chain, chain["failed"]
        assert (chain["lost"], chain["repeated"]) == (0, 0)
        assert chain["samples"] > 0
        assert max(chain["weights_off"], *chain["loads_off"]) < 1e-12
    assert f"{len(chains)} chains, 0 of which" in table(chaos.lines)


@pytest.mark.timeout(300)  # ten seconds, where the machine is free
def test_a_few_faults_lose_no_sample_and_a_second_run_has_nothing_left_to_do(tmp_path):
    out = tmp_path / "chaos.jsonl"
    chaos = Chaos(num_faults=5, seed=4, out=out, has=frozenset())
    chaos.run(1)
    check(chaos, 5)
    written = out.read_text()
    again = Chaos(num_faults=5, seed=4, out=out, has=frozenset())
    again.run(1)
    assert out.read_text() == written
    assert again.lines == [json.loads(line) for line in written.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_minute_of_faults_loses_no_sample(tmp_path):
    chaos = Chaos(num_faults=60, seed=1, out=tmp_path / "chaos.jsonl", has=frozenset())
    chaos.run(2)
    check(chaos, 60)


def test_the_table_of_a_soak_shows_what_grows():
    flat = {"threads": 8, "descriptors": 20, "objects": 1000, "step_ms": 5.0}
    lines = [
        {"step": step, "rank": rank, "rss_mb": 300.0 + step / 10, "log_bytes": 200 * step, **flat}
        for step in range(10, 1001, 10)
        for rank in range(3)
    ]
    rows = soak_table(lines).splitlines()
    assert "1000 steps on 3 ranks" in rows[0]
    assert rows[2].split() == ["0", "memory,", "MB", "315.5", "395.5", "400.0"]
    assert rows[3].split() == ["0", "threads", "8.0", "8.0", "8.0"]
    assert rows[6].split() == ["0", "log,", "bytes", "per", "step", "200.0", "200.0", "200.0"]
