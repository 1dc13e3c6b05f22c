"""The ground truth: laws that hold whatever the cluster, and the ways in which it is richer than the core's model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.paper.clusters import with_forward_shares
from benchmarks.paper.optimum import expected_s
from cannikin.core.fit import bucket_times
from cannikin.core.values import StepWindow
from cannikin.sim.catalog import load_cluster_spec, load_workload, workload_names
from cannikin.sim.hardware import Machine, build_machine
from cannikin.sim.runs import find_machine

QUIET = {"comm_jitter": 0.0, "comm_outliers": 0.0, "drift": 0.0}


def quiet(machine: Machine) -> Machine:
    zeros = np.zeros(machine.num_ranks)
    return replace(machine, jitter=zeros, bucket_jitter=zeros, outliers=zeros, **QUIET)


def measured(machine, batches, steps=1, seed=0):
    return machine.measure(np.tile(batches, (steps, 1)), 0, np.random.default_rng(seed))


@pytest.mark.parametrize("workload", workload_names())
@pytest.mark.parametrize("cluster", ["a", "b", "c"])
def test_without_noise_the_steps_simulated_are_the_formulas(cluster, workload):
    machine = quiet(find_machine(cluster, workload))
    for batches in (np.ones(machine.num_ranks, dtype=int), machine.max_batch // 2, machine.max_batch):
        times = measured(machine, batches)
        assert times.step_s[0] == pytest.approx(float(expected_s(machine, batches)))
        assert (np.diff(times.ready_s, axis=-1) >= 0).all()
        assert (times.done_s >= times.ready_s).all()


@pytest.mark.parametrize("workload", workload_names())
def test_more_samples_never_take_less_time(workload):
    machine = find_machine("b", workload)
    batches = np.unique(np.geomspace(1, machine.max_batch.min(), 40).astype(int))
    times = expected_s(machine, np.tile(batches[:, None], (1, machine.num_ranks)))
    assert (np.diff(times) > -1e-12).all()


def test_devices_split_their_time_into_forward_and_backward_in_their_own_way():
    machine = find_machine("b", "bert")
    forward, backward = machine.compute(np.full(16, 8))
    assert forward / (forward + backward) == pytest.approx([0.39] * 4 + [0.31] * 4 + [0.30] * 8)
    alike = with_forward_shares(machine, 1 / 3)
    assert sum(alike.compute(np.full(16, 8))) == pytest.approx(forward + backward)
    assert alike.compute(np.full(16, 8))[0] == pytest.approx((forward + backward) / 3)
    assert with_forward_shares(machine, np.linspace(0.2, 0.4, 16)).compute(np.full(16, 8))[0][-1] == pytest.approx(
        0.4 * (forward + backward)[-1]
    )


def test_a_device_of_the_users_own_has_its_own_share_or_that_of_the_one_it_is_like(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        '[link]\nbandwidth_gbit = 10\n[[node]]\ndevice = "one"\n[[node]]\ndevice = "two"\n'
        '[device.one]\nlike = "a100"\nmemory_gb = 40\n'
        '[device.two]\nlike = "a100"\nmemory_gb = 40\nforward_share = 0.2\n'
    )
    forward, backward = find_machine(str(path), "bert").compute(np.full(2, 8))
    assert forward / (forward + backward) == pytest.approx([0.39, 0.2])


def test_a_small_batch_costs_the_launch_and_a_large_one_the_samples():
    machine = find_machine("b", "cifar10")
    forward, backward = machine.compute(np.full(16, 1))
    assert forward + backward == pytest.approx(machine.launch_s.sum(axis=0), rel=0.01)
    few, many = (sum(machine.compute(np.full(16, batch)))[4] for batch in (2000, 2100))
    assert (many - few) / 100 == pytest.approx(machine.sample_s[:, 4].sum(), rel=0.03)


def test_the_overlap_ratio_depends_on_the_batch_and_on_the_device():
    machine = find_machine("b", "deepspeech2")
    ready = machine.ready(np.array([[4], [200]]) * np.ones(16))
    gammas = ready[..., 0] / ready[..., -1]
    assert gammas[0, 4] > 1.2 * gammas[1, 4]
    assert gammas[0, 4] != pytest.approx(gammas[0, 8], rel=0.02)


def test_a_ring_takes_2n_minus_2_rounds_at_the_slowest_link(tmp_path):
    text = "[link]\nbandwidth_gbit = 8.0\nlatency_us = 100.0\nlocal_bandwidth_gbit = 80.0\nlocal_latency_us = 1.0\n"
    path = tmp_path / "c.toml"

    def seconds(nodes):
        path.write_text(text + nodes)
        return build_machine(load_cluster_spec(path), "ncf", load_workload("ncf")).bucket_s[1]

    node = '[[node]]\ndevice = "v100"\ncount = {}\nper_server = {}\n'
    alone, within, between = seconds(node.format(1, 1)), seconds(node.format(4, 4)), seconds(node.format(4, 2))
    assert alone == 0.0
    assert within == pytest.approx(6 * (1e-6 + 19.1e6 / 4 / 10e9))
    assert between == pytest.approx(6 * (100e-6 + 19.1e6 / 4 / 1e9))
    slow = seconds(node.format(4, 2) + '[[node]]\ndevice = "t4"\nlink_gbit = 1.0\n')
    assert slow == pytest.approx(8 * (100e-6 + 19.1e6 / 5 / 0.125e9))


def test_the_noise_has_the_sizes_that_the_data_say():
    machine = replace(find_machine("a", "cifar10"), drift=0.0)
    times = measured(machine, [20, 20, 20], steps=20_000)
    logs = np.log(times.before_s)
    middle = np.abs(logs - np.median(logs, axis=0))
    spread = 1.4826 * np.median(middle, axis=0)
    assert spread == pytest.approx(machine.jitter * np.sqrt(1.25), rel=0.05)
    assert (middle > 0.5).mean(axis=0) == pytest.approx(machine.outliers, rel=0.35)


def test_each_rank_drifts_in_its_own_time():
    machine = replace(quiet(find_machine("a", "cifar10")), drift=0.02)
    before = np.array([machine.measure(np.full((1, 3), 20), step, np.random.default_rng(0)).before_s[0]
                       for step in range(0, 4000, 50)])  # fmt: skip
    assert np.ptp(np.log(before), axis=0) == pytest.approx(0.04, abs=1e-3)
    assert len(set(before.argmax(axis=0).tolist())) == 3


def test_the_core_recovers_the_all_reduce_times_from_what_is_measured():
    machine = replace(find_machine("b", "imagenet"), comm_outliers=0.0)
    batches = np.tile(machine.max_batch // 4, (400, 1))
    times = machine.measure(batches, 0, np.random.default_rng(1))
    window = StepWindow(
        first_step=0,
        local_batches=batches,
        before_s=times.before_s,
        ready_s=times.ready_s,
        done_s=times.done_s,
        local_sqnorm=np.full(batches.shape, np.nan),
        global_sqnorm=np.full(len(batches), np.nan),
    )
    assert np.median(bucket_times(window), axis=0) == pytest.approx(machine.bucket_s, rel=0.02)
