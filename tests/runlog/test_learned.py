"""The learned cluster out of a run log: of simulated runs, whose machines are known."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from benchmarks.synthetic import Training, measure, slowed
from cannikin.core.perf import Cluster, Curve
from cannikin.core.policies.cannikin import Controller
from cannikin.core.split import optimal_split
from cannikin.core.values import Job, StepWindow
from cannikin.errors import RunLogError
from cannikin.runlog import EventRecord, Header, JobInfo, RankInfo, Record, WindowRecord, window_record
from cannikin.runlog.learned import learned_cluster

TRUE = Cluster(
    forward=Curve(fixed_s=[0.01, 0.012, 0.02], per_sample_s=[4e-4, 8e-4, 2e-3]),
    backward=Curve(fixed_s=[0.01, 0.014, 0.02], per_sample_s=[9e-4, 1.7e-3, 4e-3]),
    gammas=[0.3, 0.6, 1.0],
    tails_s=[0.03, 0.012, 0.004],
)
TOTAL = 64


def header(devices: tuple[str, ...] = ("a100", "v100", "t4")) -> Header:
    return Header(
        cannikin_version="1",
        started="",
        policy="cannikin",
        world_size=len(devices),
        job=JobInfo(batch_size=TOTAL),
        ranks=tuple(RankInfo(device=device, host="here") for device in devices),
    )


def windows(cluster: Cluster, num_steps: int, *, later: Cluster | None = None) -> list[Record]:
    """What a run on this cluster logs, and as many steps more on another where there is one."""
    job = Job(num_ranks=cluster.num_ranks, batch_size=TOTAL)
    shown: list[StepWindow] = []

    class Watched(Training):
        def show(self, window):
            shown.append(window)
            return super().show(window)

    training = Watched(Controller(job), job, np.random.default_rng(1))
    for each in (cluster, later) if later is not None else (cluster,):
        training.run(each, num_steps, noise=0.02, outliers=0.0)
    changes = [
        EventRecord(step=change.step, kind="changed_speed", data={"rank": change.rank, "factor": change.factor})
        for change in training.changes
    ]
    records = [window_record(window) for window in shown]
    return sorted(
        [*records, *changes], key=lambda r: r.first_step + r.num_steps if isinstance(r, WindowRecord) else r.step
    )


def error(records: list[Record], truth: Cluster) -> float:
    """By how much the learned step time is off."""
    learned = learned_cluster(records).outlook()
    return learned.step_s / optimal_split(truth, TOTAL).step_s - 1


def test_the_learned_cluster_is_the_one_that_was_measured():
    records = [header(), *windows(TRUE, 100)]
    assert abs(error(records, TRUE)) < 0.05
    learned = learned_cluster(records)
    assert [(rank.rank, rank.device, rank.host) for rank in learned.ranks] == [
        (0, "a100", "here"),
        (1, "v100", "here"),
        (2, "t4", "here"),
    ]
    assert learned.tails_s == pytest.approx(TRUE.tails_s, rel=0.15)
    for rank in range(3):
        truth = optimal_split(TRUE.without(rank), TOTAL).step_s
        assert learned.without(rank).outlook().step_s == pytest.approx(truth, rel=0.05)


def test_a_window_in_which_the_machine_was_busy_with_other_things_does_not_count():
    """Rank 0 ran this local batch in that window only."""
    records = windows(TRUE, 60)
    busy = window_record(measure(slowed(TRUE, 0, 0.5), [[45, 15, 4]] * 5, np.random.default_rng(0), noise=0.02))
    assert abs(error([header(), *records[:2], busy, *records[2:]], TRUE)) < 0.05


def test_a_rank_that_has_become_slower_is_as_slow_as_it_is_now():
    now = slowed(TRUE, 0, 0.5)
    records = [header(), *windows(TRUE, 100, later=now)]
    assert abs(error(records, now)) < 0.06


def test_a_run_resumed_on_other_ranks_knows_only_those():
    pair = TRUE.without(0)
    records = [header(), *windows(TRUE, 100), header(("v100", "t4")), *windows(pair, 100)]
    assert abs(error(records, pair)) < 0.05
    assert learned_cluster(records).num_ranks == 2


def test_a_run_resumed_on_the_same_ranks_is_one_run():
    first = windows(TRUE, 100)
    resumed = learned_cluster([header(), *first, header()])
    assert resumed.local_batches == first[-1].local_batches


def test_what_memory_was_found_to_hold_is_a_bound():
    data = {"rank": 1, "local_batch": 40, "max_batch": 25}
    event = EventRecord(step=3, kind="out_of_memory", data=data)
    learned = learned_cluster([header(), *windows(TRUE, 60), event])
    assert [rank.max_batch for rank in learned.ranks][1] == 25
    assert learned.without(0).outlook().local_batches[0] == 25


def test_a_long_log_is_learned_from_as_it_was_last():
    """Drifts do not count as changes of speed."""
    many = windows(TRUE, 60)
    records = [header(), *windows(slowed(TRUE, 2, 0.9), 60) * 50, *many * 50]
    assert abs(error(records, TRUE)) < 0.05


def test_of_a_window_that_one_rank_has_no_times_of_the_others_are_learned_from():
    records = windows(TRUE, 100)
    partly = [without_times(record) if i % 2 else record for i, record in enumerate(records)]
    assert abs(error([header(), *partly], TRUE)) < 0.06


def without_times(record: WindowRecord) -> WindowRecord:
    return msgspec.structs.replace(record, before_ms=(None, *record.before_ms[1:]))


def without_full_step(record: WindowRecord) -> WindowRecord:
    return msgspec.structs.replace(record, timeline=None)


@pytest.mark.parametrize("damage", [without_times, without_full_step])
def test_a_log_without_a_window_on_all_ranks_has_learned_nothing(damage):
    with pytest.raises(RunLogError, match="no window measured on all ranks, so nothing was learned: train longer"):
        learned_cluster([header(), *map(damage, windows(TRUE, 20))])
    with pytest.raises(RunLogError, match="nothing was learned"):
        learned_cluster([header()])


def test_windows_of_another_number_of_ranks_than_the_header_says_are_left_out():
    with pytest.raises(RunLogError, match="nothing was learned"):
        learned_cluster([replace_world(header(), 5), *windows(TRUE, 20)])


def replace_world(record: Header, world_size: int) -> Header:
    return msgspec.structs.replace(record, world_size=world_size)
