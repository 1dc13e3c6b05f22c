"""Observers of trackers: the names, the steps, and what TensorBoard and Prometheus read back."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path

import pytest
from live_records import END, HEADER, Clock, event, header, plan, run, window

import cannikin
from cannikin.errors import InvalidInputError
from cannikin.runlog import JobInfo, NoiseRecord
from cannikin.runlog.times import step_of
from cannikin.trackers import SCALARS, PrometheusObserver, ScalarObserver, TensorBoardObserver, scalars

ROOT = Path(__file__).parent.parent.parent


def template(name: str) -> str:
    """The name's entry in the table."""
    return re.sub(r"cannikin/eval/.*", "cannikin/eval/{name}", re.sub(r"/rank\d+/", "/rank{rank}/", name))


# The names


def test_the_table_in_the_documentation_is_the_one_in_the_code():
    text = (ROOT / "docs" / "observers.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) \|$", text, re.M)
    assert {name: (unit.strip(), meaning) for name, unit, meaning in rows} == {
        name: (scalar.unit, scalar.meaning) for name, scalar in SCALARS.items()
    }


def test_every_name_of_the_table_is_given_and_no_other():
    records = [window(0), plan(10), event(3, "eval", accuracy=0.5), event(0, "epoch", epoch=1)]
    names = {template(name) for record in records for name in scalars(record, initial_batch=32)}
    assert names == set(SCALARS)


def test_a_windows_numbers():
    found = scalars(window(2, (96, 32)), initial_batch=32)
    assert found["cannikin/step"] == step_of(window(2)) == 30
    assert found["cannikin/samples_per_s"] == pytest.approx(3200)
    assert found["cannikin/goodput"] == pytest.approx(3200 * 128 / 224)
    assert found["cannikin/use"] == pytest.approx(128 / (96 / 0.5 + 32 / 0.9))
    assert found["cannikin/rank0/local_batch"] == 96
    assert [found[f"cannikin/rank0/{part}_ms"] for part in ("compute", "communication", "wait")] == [20.0, 4.0, 16.0]


@pytest.mark.parametrize(
    "record",
    [
        HEADER,
        window(0, step_ms=None, noise=NoiseRecord(noise_scale=math.inf), progress=math.nan, before_ms=()),
        plan(10, predicted_step_ms=None),
        event(3, "eval", loss=math.nan, name="text", missing=None),
        event(3, "epoch"),
        END,
    ],
)
def test_only_finite_numbers_are_given(record):
    assert all(math.isfinite(value) for value in scalars(record).values())
    assert not {"cannikin/step_ms", "cannikin/noise_scale", "cannikin/eval/loss"} & set(scalars(record))


# Trackers


class ByPosition:
    """A tracker whose step has another name."""

    def __init__(self) -> None:
        self.calls = []

    def log(self, values, at):
        self.calls.append((at, values))


class ByName(ByPosition):
    """As W&B."""

    def log(self, values, *, step=None, commit=None):
        self.calls.append((step, values))


class Metrics(ByPosition):
    """As MLflow, or a logger of Lightning, which have log() for something else."""

    def log(self, name, value):
        raise AssertionError("not this one")

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, metrics))


@pytest.mark.parametrize("kind", [ByPosition, ByName, Metrics])
def test_any_tracker_gets_the_numbers_at_their_step(kind):
    tracker = kind()
    observer = ScalarObserver(tracker, every_s=0)
    for record in run(2):
        observer.write(record)
    assert [step for step, _ in tracker.calls] == [0, 10, 10, 20, 20]
    assert tracker.calls[1][1] == scalars(window(0), initial_batch=32)
    assert tracker.calls[2][1] == {"cannikin/predicted_step_ms": 32.0, "cannikin/even_speed": 0.8}


def test_steps_never_go_back_but_with_a_resumed_run():
    tracker = ByName()
    observer = ScalarObserver(tracker, every_s=0)
    for record in (HEADER, event(14, "eval", accuracy=0.5), window(0), header(first_step=5), event(5, "eval", a=1.0)):
        observer.write(record)
    assert [step for step, _ in tracker.calls] == [14, 14, 5]


def test_a_script_that_counts_its_own_steps_gets_none():
    tracker = ByName()
    ScalarObserver(tracker, with_step=False).write(window(0))
    ((step, values),) = tracker.calls
    assert step is None
    assert values["cannikin/step"] == 10


def test_windows_are_thinned_out_and_evaluations_and_the_last_window_are_not():
    tracker, clock = ByName(), Clock()
    observer = ScalarObserver(tracker, every_s=5.0, clock=clock)
    observer.write(HEADER)
    for number in range(10):
        observer.write(window(number))
        observer.write(plan(10 * number + 10))
        clock.now += 1.0
    observer.write(event(95, "eval", accuracy=0.5))
    observer.write(END)
    assert [step for step, _ in tracker.calls] == [10, 10, 60, 60, 100, 100]
    assert tracker.calls[-1][1]["cannikin/step"] == 100


def test_single_ranks_are_left_out_where_they_are_many():
    tracker = ByName()
    ScalarObserver(tracker).write(window(0, (1,) * 17))
    assert not [name for name in tracker.calls[0][1] if "rank" in name]
    assert "cannikin/step_ms" in tracker.calls[0][1]


@pytest.mark.parametrize("observer", [ScalarObserver, TensorBoardObserver])
def test_what_is_no_tracker_is_refused_at_once(observer):
    with pytest.raises(InvalidInputError, match="object has n"):
        observer(object())


@pytest.mark.parametrize("observer", [ScalarObserver, TensorBoardObserver])
def test_other_ranks_may_give_none(observer):
    observer(None).write(window(0))


def test_tensorboard_reads_the_numbers_back(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'cannikin[tensorboard]'")
    pytest.importorskip("torch", reason="torch is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        observer = TensorBoardObserver(writer, every_s=0)
        for record in [*run(3), event(25, "eval", accuracy=0.75)]:
            observer.write(record)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {template(name) for name in events.Tags()["scalars"]} == set(SCALARS)
    assert [(found.step, found.value) for found in events.Scalars("cannikin/step_ms")] == [(10, 40), (20, 40), (30, 40)]
    assert [(found.step, found.value) for found in events.Scalars("cannikin/eval/accuracy")] == [(25, 0.75)]


# Prometheus

EVIL = 'a "b"\\c\nd'


def parsed(text: str):
    """{family: {labels: value}} by Prometheus's own parser; the order of labels means nothing."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    return {
        family.name: (family.type, family.documentation, {frozenset(s.labels.items()): s.value for s in family.samples})
        for family in parser.text_string_to_metric_families(text)
    }


def test_prometheus_reads_every_number_back_with_its_labels(tmp_path):
    observer = PrometheusObserver(tmp_path / "run.prom", labels={"run": EVIL}, every_s=0)
    for record in [header((EVIL, "slow gpu")), *run(1)[1:], event(7, "eval", **{"top-1": 0.5})]:
        observer.write(record)
    families = parsed((tmp_path / "run.prom").read_text())
    assert {kind for kind, _, _ in families.values()} == {"gauge"}
    assert all(help_text for _, help_text, _ in families.values())
    assert families["cannikin_step_seconds"][2] == {frozenset({("run", EVIL)}): 0.04}
    assert families["cannikin_eval"][2] == {frozenset({("run", EVIL), ("metric", "top-1")}): 0.5}
    assert families["cannikin_rank_wait_seconds"][2] == {
        frozenset({("run", EVIL), ("rank", "0"), ("device", EVIL), ("host", "node0")}): pytest.approx(0.016),
        frozenset({("run", EVIL), ("rank", "1"), ("device", "slow gpu"), ("host", "node1")}): 0.0,
    }
    assert len(families) == len(SCALARS) + 1  # and cannikin_info


def test_each_family_is_in_one_piece_with_its_help_before_it(tmp_path):
    observer = PrometheusObserver(tmp_path / "run.prom")
    observer.write(window(0, (1,) * 5))
    text = observer.path.read_text()
    seen = re.findall(r"^(?:# (?:HELP|TYPE) )?(\w+)", text, re.M)
    runs = [name for i, name in enumerate(seen) if i == 0 or seen[i - 1] != name]
    assert len(runs) == len(set(runs))
    assert text.endswith("\n")


def test_the_file_is_replaced_as_a_whole_and_not_too_often(tmp_path):
    clock = Clock()
    path = tmp_path / "made" / "run.prom"
    observer = PrometheusObserver(path, every_s=5.0, clock=clock)
    observer.write(HEADER)
    first = path.stat().st_ino
    observer.write(window(0))
    assert path.stat().st_ino == first
    clock.now = 5.0
    observer.write(window(1))
    assert path.stat().st_ino != first
    assert "cannikin_step 20.0" in path.read_text()
    observer.write(window(2))
    observer.write(END)
    assert "cannikin_step 30.0" in path.read_text()
    assert os.listdir(path.parent) == ["run.prom"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("name", ["9a", "a-b", "", "__name__", "rank"])
def test_a_label_that_prometheus_would_not_take_is_refused(tmp_path, name):
    with pytest.raises(InvalidInputError, match="label"):
        PrometheusObserver(tmp_path / "run.prom", labels={name: "x"})


def test_without_prometheus_client_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'cannikin\[prometheus\]'"):
        PrometheusObserver(tmp_path / "run.prom")


def test_the_observers_are_public_names():
    assert cannikin.ScalarObserver is ScalarObserver
    assert cannikin.TensorBoardObserver is TensorBoardObserver
    assert cannikin.PrometheusObserver is PrometheusObserver


def test_goodput_needs_the_initial_batch_of_the_header(tmp_path):
    observer = PrometheusObserver(tmp_path / "run.prom", every_s=0)
    observer.write(window(0))
    assert "cannikin_goodput" not in observer.path.read_text()
    observer.write(header(job=JobInfo(batch_size=32)))
    observer.write(window(0))
    assert "cannikin_goodput 800.0" in observer.path.read_text()
