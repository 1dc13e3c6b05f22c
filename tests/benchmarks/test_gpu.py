"""The GPU benchmarks, as far as they go without one: their jobs, their arithmetic, and what a failed job costs."""

from __future__ import annotations

import inspect
import time
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import gpu, gpu_accuracy, launching
from benchmarks.gpu_overlap import cluster_of, excess
from benchmarks.gpu_ranks import JOBS
from benchmarks.gpu_splits import QuickLbBsp, around
from benchmarks.gpu_steps import Run
from benchmarks.gpu_tasks import recipe_of
from benchmarks.gpu_truth import scripted
from benchmarks.synthetic import Training
from cannikin.core.perf import Cluster, Curve
from cannikin.core.values import Job, Plan

BEDS = [
    gpu.Bed(mechanism="gpu", device="cuda"),
    gpu.Bed(mechanism="mps", device="cuda"),
    gpu.Bed(mechanism="portable", device="cpu"),
]
GIVEN = {"speeds", "sample_ms", "forward_shares", "device", "folder"}  # by gpu_ranks, to jobs that name them


def jobs_of(part: str, bed: gpu.Bed) -> list[gpu.Job]:
    return [job for launch in gpu.PARTS[part](bed) for job in launch.jobs]


@pytest.mark.parametrize("bed", BEDS, ids=lambda bed: bed.mechanism)
@pytest.mark.parametrize("part", gpu.PARTS)
def test_every_part_makes_jobs_that_their_functions_take(part, bed):
    jobs = jobs_of(part, bed)
    assert len({id(job) for job in jobs}) == len(jobs) > 0  # each gets a number of its own
    for job in jobs:
        parameters = inspect.signature(JOBS[job["name"]]).parameters
        given = dict.fromkeys(GIVEN & parameters.keys())
        inspect.signature(JOBS[job["name"]]).bind(**{**given, **job["keywords"]})
        assert len(job["forward_shares"]) == len(job["speeds"])


@pytest.mark.parametrize(
    ("part", "networks"),
    [
        ("limit", "resnet18,neumf,resnet50,deepspeech2"),
        ("limit", "bert"),
        ("limit", "gpt2-small"),
        *((part, ",".join(gpu.NETWORKS)) for part in gpu.PARTS if part != "limit"),
    ],
)
def test_every_part_is_guessed_to_fit_into_one_call_of_ten_minutes(part, networks):
    launches = gpu.PARTS[part](gpu.Bed(mechanism="gpu", device="cuda", networks=networks.split(",")))
    assert sum(job["expect_s"] for launch in launches for job in launch.jobs) + 15 * len(launches) < 570


def test_settling_makes_forty_starts_and_more_on_shapes_of_two_to_four_ranks():
    jobs = jobs_of("settling", BEDS[0])
    assert sum(job["keywords"]["starts"] for job in jobs) >= 40
    assert {len(job["speeds"]) for job in jobs} == {2, 3, 4}
    assert all(0.2 <= speed <= 1.0 for job in jobs for speed in job["speeds"])


def test_equal_compute_is_five_per_cent_and_more_from_the_best_in_every_cell_of_overlap():
    for job in jobs_of("overlap", BEDS[0]):
        kind, total = job["keywords"]["kind"], job["keywords"]["total"]
        sample_s = recipe_of(kind, "cuda").sample_ms / 1e3
        equal, _, _ = excess(cluster_of(kind, job["speeds"], job["forward_shares"], sample_s), total)
        assert equal > 1.05


def made_run(plans: list[tuple[tuple[int, int], float | None]], seconds: list[float]) -> Run:
    made = [Plan(first_step=0, total_batch=8, local_batches=split, predicted_step_s=s) for split, s in plans]
    nothing: dict = {"model": None, "optimizer": None, "engine": None}
    return Run(**nothing, seconds=np.array(seconds), plans=made)


def test_a_run_knows_at_which_steps_its_splits_changed():
    run = made_run([((4, 4), None)] * 3 + [((6, 2), 1.0)] * 2 + [((4, 4), 1.0)], [1.0] * 6)
    assert run.path() == [(0, (4, 4)), (3, (6, 2)), (5, (4, 4))]


def test_lb_bsp_in_a_hurry_ends_where_lb_bsp_as_it_is_would_stay():
    rng, job = np.random.default_rng(0), Job(num_ranks=3, batch_size=960)
    curve = Curve(fixed_s=np.full(3, 1e-3), per_sample_s=np.array([1e-4, 2e-4, 4e-4]))
    cluster = Cluster(forward=curve, backward=curve, gammas=[1.0], tails_s=[0.0])
    hurried = Training(QuickLbBsp(job), job, rng, delay=5)
    hurried.run(cluster, 120, noise=0.0)
    split = hurried.plans[-1].local_batches
    seconds = 2 * curve.at(split)
    assert hurried.plans[0].local_batches == (320, 320, 320)
    assert seconds.max() - seconds.min() < 2 * 10 * 4e-4  # twice LB-BSP's 5 samples on the slowest rank
    assert sum(before != after for before, after in pairwise(p.local_batches for p in hurried.plans)) < 20


def test_splits_of_a_search_keep_the_total_and_leave_every_rank_two_samples():
    splits = around((20, 8, 4), (0.02, 0.1))
    assert len(splits) == len(set(splits)) > 6
    assert all(sum(split) == 32 and min(split) >= 2 for split in splits)


def test_the_splits_of_a_record_keep_the_total_and_change_as_they_are_said_to():
    splits = scripted(48, (1.0, 0.5, 0.25), 160, np.random.default_rng(0))
    assert all(sum(split) == 48 and min(split) >= 2 for split in splits)
    assert len(set(splits[:80])) > 60
    assert [len(set(splits[start : start + 20])) for start in range(80, 160, 20)] == [1, 1, 1, 1]


def test_a_job_that_fails_costs_no_other_its_result(tmp_path):
    bed = gpu.Bed(mechanism="portable", device="cpu")

    def job(number: int, **keywords: object) -> gpu.Job:
        made = bed.job("stability", "chain", (1.0, 0.5), num_steps=8, total=8, steps=8, **keywords)
        return {**made, "number": number, "expect_s": 0.0}

    out = tmp_path / "out.jsonl"
    launch = gpu.Launch(jobs=[job(0), job(1, unknown=True), job(2)], backend="gloo")
    gpu.run(launch, bed, out, time.time() + 80)
    good, bad, last = launching.read(out)
    assert (good["number"], bad["number"], last["number"]) == (0, 1, 2)
    assert "unexpected keyword argument 'unknown'" in bad["failed"]
    assert good["plan_path"][0] == last["plan_path"][0] == [0, [4, 4]]
    assert "FAILED" in gpu.table([good, bad, last])


def test_the_table_says_how_many_starts_have_settled():
    made = {"job": "settling", "kind": "neumf", "total": 24, "speeds": [1.0, 0.5], "over_best": {"even": 1.5}}
    made |= {"split_ms": {"best": 20.0}, "splits": {"best": [16, 8]}, "control_over_ours": 0.99}
    results = [{**made, "over_best_at_30": [1.0, 1.02]}, {**made, "over_best_at_30": [1.03, 1.2]}]
    assert gpu.table(results).splitlines()[-1] == "4 starts: 3 (75%) within 3% at step 30, worst 1.200"


def test_a_result_without_a_figure_costs_the_table_nothing_else():
    truth, record = {"job": "truth", "speeds": [1.0]}, {"job": "record", "speeds": [1.0], "steps": 9, "buckets": 2}
    first, second = gpu.table([truth, {**record, "file": "record-neumf.json"}]).splitlines()
    assert first.endswith("incomplete, KeyError 'learned_over_added'")
    assert second.endswith("9 steps, 2 buckets in record-neumf.json")


def epochs(*seconds_and_accuracy: tuple[float, float]) -> list[dict[str, float]]:
    return [{"train_s": seconds, "accuracy": value} for seconds, value in seconds_and_accuracy]


def test_the_best_fixed_batch_is_the_one_that_was_first_at_the_target():
    entries = [gpu_accuracy.Entry(policy="even", fixed=fixed) for fixed in ("256:0.2", "512:0.4", "1024:0.8")]
    results = [
        {"example": "cifar10", "entry": "even-256x0.2", "epochs": epochs((50.0, 0.93), (60.0, 0.945))},
        {"example": "cifar10", "entry": "even-512x0.4", "epochs": epochs((20.0, 0.93), (40.0, 0.941))},
        {"example": "cifar10", "entry": "even-1024x0.8", "epochs": epochs((10.0, 0.91), (20.0, 0.92))},
    ]
    assert gpu_accuracy.quickest(results, entries) == [entries[1]]
    assert gpu_accuracy.quickest(results[2:], entries) == []
    assert entries[1].flags() == ["--batch-size", "512", "--lr", "0.4", "--max-batch-size", "0"]
