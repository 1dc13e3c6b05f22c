"""The data files, and cluster files of users' own: what is refused, and in which words."""

from __future__ import annotations

import pytest

from benchmarks.paper.optimum import expected_s
from cannikin.errors import ClusterFileError, InvalidInputError
from cannikin.sim.catalog import cluster_names, known_devices, load_cluster_spec, load_workload, workload_names
from cannikin.sim.hardware import build_machine

GOOD = """
[link]
bandwidth_gbit = 10.0

[[node]]
device = "v100"
count = 2
share = 0.5

[[node]]
device = "mine"
name = "new"

[device.mine]
like = "rtx6000"
speed = 2.0
memory_gb = 48.0
"""


def spec_of(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return load_cluster_spec(path)


def test_the_clusters_are_the_papers():
    kinds = {name: [(node.device, node.count) for node in load_cluster_spec(name).node] for name in cluster_names()}
    assert kinds["a"] == [("a5000", 1), ("a4000", 1), ("p4000", 1)]
    assert kinds["b"] == [("a100", 4), ("v100", 4), ("rtx6000", 8)]
    assert kinds["c"] == [("rtx6000", 1)] * 16
    shares = [node.share for node in load_cluster_spec("c").node]
    assert shares[0] == 1.0
    assert shares[-1] == 0.25
    assert shares == sorted(shares, reverse=True)


def test_the_workloads_are_those_of_the_papers_table():
    table = {name: (load_workload(name).batch_size, load_workload(name).target) for name in workload_names()}
    assert table == {
        "cifar10": (64, 0.94),
        "imagenet": (100, 0.75),
        "bert": (9, 88.0),
        "deepspeech2": (12, 40.0),
        "ncf": (64, 0.69),
    }


@pytest.mark.parametrize("name", workload_names())
def test_a_workloads_numbers_fit_each_other(name):
    spec = load_workload(name)
    assert sum(spec.bucket_mb) * 1e6 == pytest.approx(4 * spec.num_parameters, rel=0.03)
    assert len(spec.bucket_mb) == len(spec.ready_by_layers) == len(spec.ready_by_work)
    assert spec.ready_by_layers[-1] == spec.ready_by_work[-1] == 1.0
    curve = spec.curve
    lengths = {len(getattr(curve, key)) for key in ("progress", "metric", "signal_sqnorm", "noise_trace")}
    assert len(lengths) == 1
    assert curve.progress == sorted(curve.progress)
    assert curve.target_progress in curve.progress


@pytest.mark.parametrize("device", known_devices())
def test_every_device_runs_every_workload(device, tmp_path):
    spec = spec_of(tmp_path, f'link = {{ bandwidth_gbit = 1 }}\n[[node]]\ndevice = "{device}"\n')
    for workload in workload_names():
        machine = build_machine(spec, workload, load_workload(workload))
        assert 0 < expected_s(machine, [1]) < expected_s(machine, machine.max_batch)


def test_a_users_file_has_its_own_devices_shares_and_names(tmp_path):
    machine = build_machine(spec_of(tmp_path, GOOD), "imagenet", load_workload("imagenet"))
    assert machine.names == ("v100", "v100", "new")
    assert machine.max_batch.tolist() == [300, 300, 800]
    alone = spec_of(tmp_path, 'link = { bandwidth_gbit = 10 }\n[[node]]\ndevice = "rtx6000"\n')
    rtx6000 = build_machine(alone, "imagenet", load_workload("imagenet"))
    assert machine.sample_s[:, 2] == pytest.approx(rtx6000.sample_s[:, 0] / 2)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        InvalidInputError, match=r"workload 'imagnet' is unknown: did you mean imagenet\? choose one of"
    ):
        load_workload("imagnet")
    with pytest.raises(InvalidInputError, match="cluster 'd' is unknown: choose one of a, b, c, or give a TOML file"):
        load_cluster_spec("d")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'device = "v100"',
            'device = "v10"',
            r"node\[0\].device 'v10' is unknown: did you mean v100\? choose one of a100",
        ),
        ("bandwidth_gbit = 10.0", "bandwidth_gbit = 0", r"link.bandwidth_gbit is 0.0: it must be above 0"),
        ("bandwidth_gbit = 10.0", "bandwidth_gbit = inf", r"link.bandwidth_gbit is inf: it must be above 0"),
        ("bandwidth_gbit = 10.0", "latency_us = 1", r"link.bandwidth_gbit is missing: give the speed"),
        (
            "bandwidth_gbit = 10.0",
            "bandwidth_gbit = 10\nlatency_us = -1",
            r"link.latency_us is -1.0: it must be finite",
        ),
        ("bandwidth_gbit = 10.0", 'bandwidth_gbit = "10"', r'link.bandwidth_gbit is "10": it must be a number'),
        ("share = 0.5", "share = 0", r"node\[0\].share is 0.0: it must be above 0 and at most 1"),
        ("share = 0.5", "share = 1.5", r"node\[0\].share is 1.5: it must be above 0 and at most 1"),
        ("share = 0.5", "memory_gb = -1", r"node\[0\].memory_gb is -1.0: it must be above 0"),
        ("share = 0.5", "memory_gb = inf", r"node\[0\].memory_gb is inf: it must be above 0, from 1e-9 to 1e9"),
        ("share = 0.5", "memory_gb = 1e300", r"node\[0\].memory_gb is 1e\+300: it must be above 0, from 1e-9 to 1e9"),
        ("speed = 2.0", "speed = 1e-300", r"device.mine.speed is 1e-300: it must be above 0, from 1e-9 to 1e9"),
        ("share = 0.5", "link_gbit = 0", r"node\[0\].link_gbit is 0.0: it must be above 0"),
        ("count = 2", "count = 0", r"node\[0\].count is 0: it must be from 1 to 4096"),
        ("count = 2", "per_server = 0", r"node\[0\].per_server is 0: it must be from 1 to 4096"),
        ("count = 2", "cuont = 2", r"node\[0\].cuont is not a known key: did you mean count\? known here are device"),
        ("speed = 2.0", "speed = 0", r"device.mine.speed is 0.0: it must be above 0"),
        ("speed = 2.0", "jitter = 2.0", r"device.mine.jitter is 2.0: it must be from 0 to 0.5"),
        ('like = "rtx6000"', 'like = "banana"', r"device.mine.like is 'banana': choose one of"),
        ("[link]", "[lnik]", r"link is missing|lnik is not a known key"),
        ("[link]", "[link", r"is not TOML"),
    ],
)
def test_an_impossible_cluster_is_refused_with_the_key_named(tmp_path, old, new, words):
    assert old in GOOD
    with pytest.raises(ClusterFileError, match=words) as caught:
        spec_of(tmp_path, GOOD.replace(old, new))
    assert str(caught.value).startswith(str(tmp_path / "cluster.toml"))
    assert "\n" not in str(caught.value)


def test_an_empty_cluster_is_refused(tmp_path):
    with pytest.raises(ClusterFileError, match="node has no entry: add at least one"):
        spec_of(tmp_path, "node = []\n[link]\nbandwidth_gbit = 1\n")
    with pytest.raises(ClusterFileError, match="is missing"):
        spec_of(tmp_path, "")


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(ClusterFileError, match=r"no\.toml: cannot be read: No such file"):
        load_cluster_spec(tmp_path / "no.toml")


@pytest.mark.parametrize(("key", "value"), [("memory_gb", 0.5), ("share", 0.01)])
def test_a_memory_that_holds_no_sample_is_refused_with_the_key_named(tmp_path, key, value):
    text = f'link = {{ bandwidth_gbit = 1 }}\n[[node]]\ndevice = "t4"\n{key} = {value}\n'
    words = rf"node\[0\].{key} is {value}: that does not hold one sample of bert; the whole t4 with 16 GB holds 12"
    with pytest.raises(ClusterFileError, match=words):
        build_machine(spec_of(tmp_path, text), "bert", load_workload("bert"))
