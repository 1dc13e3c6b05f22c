"""What a training tells its observers beside windows and plans: epochs, evaluations, candidates, buckets, its end."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import time
import warnings
from functools import partial

import live_records as made_up
import pytest
import recording_cases as cases
import torch
from ranks import run_ranks
from recording_cases import NO_NUMBERS
from told import collecting_warnings, run_cases, values

from cannikin.core.planner import Decision
from cannikin.core.values import Job, Plan
from cannikin.runlog import EventRecord, Header, PlanRecord, RankInfo, WindowRecord, read_runlog
from cannikin.runtime.recorder import LastWords, Recorder

COMPARING = ("cannikin", "adaptdl", "paper")
NOT_COMPARING = ("even", "lb-bsp")
TWO_RANKS = {
    "epochs and evaluations": cases.epochs_and_evaluations,
    "refused": cases.refused_metrics,
    "resumed": cases.resumed_pass,
    "sampler": cases.sampler_passes,
    "closed": cases.closed,
    "buckets": cases.buckets,
    "changed speed": cases.changed_speed,
    **{policy: partial(cases.free_total, policy=policy) for policy in COMPARING + NOT_COMPARING},
}


@pytest.fixture(scope="module")
def two():
    return run_ranks(run_cases, 2, TWO_RANKS, timeout_s=100)


def events(records, kind):
    return [record for record in records if isinstance(record, EventRecord) and record.kind == kind]


def of_kind(records, kind):
    return [record for record in records if isinstance(record, kind)]


# Epochs and evaluations


def test_every_pass_says_where_it_begins_and_what_the_loop_has_asked_for(two):
    records, none = values(two, "epochs and evaluations")
    assert none == []
    told = [(event.step, event.data) for event in events(records, "epoch")]
    assert told == [
        (0, {"epoch": 0, "position": 0, "goal": 2.0}),
        (10, {"epoch": 1, "position": 0, "goal": 2.0}),
        (20, {"epoch": 2, "position": 0}),  # range(), not model.epochs()
    ]


def test_a_resumed_pass_says_how_much_of_its_epoch_is_done(two):
    (event,) = events(values(two, "resumed")[0], "epoch")
    assert event.data == {"epoch": 1, "position": 18}


def test_a_resumed_run_goes_on_in_its_log_and_another_run_sets_that_log_aside(tmp_path):
    case = partial(cases.runs_in_one_folder, folder=str(tmp_path))
    warned, none = values(run_ranks(run_cases, 2, {"folder": case}), "folder")
    assert none == []
    (text,) = warned
    assert re.search(r"runlog.jsonl held another run's log, which is now runlog-1.jsonl: .* load its state", text)
    resumed, alone = read_runlog(tmp_path / "runlog-1.jsonl"), read_runlog(tmp_path)
    assert [header.first_step for header in resumed.headers] == [0, 10]
    told = [(event.step, event.kind) for event in resumed.events]
    assert told == [(0, "epoch"), (10, "eval"), (10, "end"), (10, "resume"), (10, "epoch"), (20, "eval"), (20, "end")]
    steps = [window.first_step for window in resumed.windows]
    assert steps == sorted(set(steps)), "no step is told twice"
    assert all(window.timeline is None or window.timeline.step >= window.first_step for window in resumed.windows)
    assert len(alone.headers) == 1
    assert [event.step for event in alone.events] == [0, 10, 10]


def test_evaluations_are_written_with_the_steps_taken_before_them(two):
    records, _ = values(two, "epochs and evaluations")
    first, *passes, last = events(records, "eval")
    assert (first.step, first.data) == (0, {"accuracy": 0.1})
    assert [event.step for event in passes] == [10, 20]
    assert all(event.data == {"accuracy": 0.5, "loss": 2.0} for event in passes)
    assert last.step == 30
    assert last.data == {
        "whole": 3,
        "real": 0.25,
        "truth": 1,
        "tensor": 0.5,
        "half": 1.5,
        "numpy": 0.5,
        "array": 7,
        "self": 1.0,
        "huge": 2.0**70,
    }


def test_an_evaluation_before_there_is_a_loader_waits_for_the_header(two):
    records, _ = values(two, "epochs and evaluations")
    assert isinstance(records[0], Header)
    assert records[1].kind == "eval"


def test_batches_that_a_sampler_cuts_ahead_are_no_steps_yet(two):
    records, _ = values(two, "sampler")
    assert [event.step for event in events(records, "epoch")] == [0, 10]
    assert [event.step for event in events(records, "eval")] == [10, 20]


@pytest.mark.parametrize("name", [*NO_NUMBERS, "none at all"])
def test_what_is_no_number_is_refused_on_every_rank(two, name):
    for texts in values(two, "refused"):
        assert texts[name].startswith("log()" if name == "none at all" else f"log({name}=...) was given a ")


def test_every_event_says_when_it_was(two):
    for name in ("epochs and evaluations", "resumed", "sampler", "closed", "changed speed"):
        records, _ = values(two, name)
        times = [event.elapsed_ms for event in of_kind(records, EventRecord)]
        assert times
        assert all(time is not None and time >= 0 for time in times), name
        waited = 1  # for the header
        assert times[waited:] == sorted(times[waited:])


def test_a_rank_that_changes_its_speed_is_an_event(two):
    records, _ = values(two, "changed speed")
    slower = [event for event in events(records, "changed_speed") if event.data["rank"] == 1]
    assert slower
    assert max(event.data["factor"] for event in slower) > 2


# Windows and plans


def test_progress_counts_passes_over_the_data(two):
    records, _ = values(two, "epochs and evaluations")
    *_, last = of_kind(records, WindowRecord)
    assert last.progress == pytest.approx((last.first_step + last.num_steps + 3) / 10)  # known three steps later


def test_the_timeline_has_the_size_of_every_bucket(two):
    records, _ = values(two, "buckets")
    *_, last = of_kind(records, WindowRecord)
    assert last.timeline.bucket_bytes == (4000, 12000)  # the last layer's gradient comes first
    assert len(last.timeline.ready_ms[0]) == 2


@pytest.mark.parametrize("policy", COMPARING)
def test_a_plan_that_compares_total_batches_has_them_with_their_goodput(two, policy):
    records, _ = values(two, policy)
    plans = of_kind(records, PlanRecord)
    assert any(plan.candidate_totals for plan in plans)
    before = 12
    for plan in plans:
        totals, goodputs = plan.candidate_totals, plan.candidate_goodputs
        assert len(totals) == len(goodputs) <= 51
        assert list(totals) == sorted(set(totals))
        if totals and policy != "paper":  # whose rounding may move the total
            assert before in totals
            best = totals[max(range(len(totals)), key=lambda k: goodputs[k] or 0.0)]
            # On the way to a best total that is far away, the total at least nearly doubles: the grid is coarse.
            assert plan.total_batch in (before, best) or 1.8 * before <= plan.total_batch < best
        before = plan.total_batch


@pytest.mark.parametrize("policy", NOT_COMPARING)
def test_a_policy_that_keeps_the_total_compares_nothing(two, policy):
    records, _ = values(two, policy)
    assert all(plan.candidate_totals == () == plan.candidate_goodputs for plan in of_kind(records, PlanRecord))


# The end


def test_what_comes_after_a_training_was_closed_is_not_written(two):
    records, _ = values(two, "closed")
    assert isinstance(records[-1], EventRecord)
    assert (records[-1].kind, records[-1].step) == ("end", 10)
    assert len(events(records, "end")) == 1
    assert events(records, "eval") == []


WAYS = {
    "to its last line": True,
    "in a function": True,
    "collected": True,
    "by sys.exit": True,
    "sampler": True,
    "counted": True,
    "closed": True,
    "by an error": False,
    "by an error in a function": False,
    "by an interrupt": False,
    "by os._exit": False,
    "killed": False,
    "without a loader": False,
}
EARLY = {
    "by sys.exit(1) in a pass": "in the middle of epoch 0",
    "by a caught error in a pass": "in the middle of epoch 0",
    "sampler in a pass": "in the middle of epoch 0",
    "closed early in a pass": "on purpose",
    "closed in a pass": "",
    "a stream in a pass": "",
}
SCRIPT = """
import atexit, gc, os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from cannikin import HeteroBatchSampler, HeteroDataLoader, HeteroDataParallel

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(60, 3))

def main():
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = HeteroDataParallel(net, optimizer, run_dir=os.path.join(sys.argv[1], way))
    if way == "without a loader":
        return model
    if "sampler" in way:
        data = torch.randn(60, 3)
        loader = DataLoader(data, batch_sampler=HeteroBatchSampler(data, model=model, batch_size=6))
    else:
        loader = HeteroDataLoader(Stream() if "stream" in way else torch.randn(60, 3), model=model, batch_size=6)
    for number, features in zip(range(len(loader)), loader) if way == "counted" else enumerate(loader):
        optimizer.zero_grad()
        model(features).square().mean().backward()
        optimizer.step()
        if "function" in way and "error" in way and number == 7:
            raise ValueError("on purpose")
        if "in a pass" in way and number == 7:
            if "closed" in way:
                model.engine.close("on purpose" if "early" in way else "")
            if "error" in way:
                try:
                    raise ValueError("on purpose")
                except ValueError:
                    return model
            sys.exit(1)
    if os.fork() == 0:  # a child that ends, without gloo's threads, is not the training that ends
        atexit._run_exitfuncs()
        os._exit(0)
    os.wait()
    return model if way != "in a function" else None

for way in sys.argv[2:]:  # all at once, each in a process of its own, without another import of torch
    if os.fork() == 0:
        break
else:
    for _ in sys.argv[2:]:
        os.wait()
    sys.exit()
model = main()
match way:
    case "collected":
        del model
        gc.collect()
        os._exit(0)
    case "by sys.exit":
        sys.exit(0)
    case "closed":
        model.engine.close()
        os._exit(0)
    case "by an error":
        raise ValueError("on purpose")
    case "by an interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    case "by os._exit":
        os._exit(0)
    case "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run directories of trainings that ended in different ways."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-c", SCRIPT, str(folder), *WAYS, *EARLY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("way", [way for way in WAYS if way != "without a loader"])
def test_a_run_says_that_it_ended_unless_it_was_broken_off(ended, way):
    run = read_runlog(ended / way)
    kinds = [event.kind for event in run.events]
    assert kinds == ["epoch", "end"] if WAYS[way] else ["epoch"]
    if WAYS[way]:
        assert run.events[-1].step == 10
        assert run.events[-1].elapsed_ms >= run.windows[-1].elapsed_ms


@pytest.mark.parametrize("way", EARLY)
def test_a_run_that_ends_in_the_middle_of_a_pass_says_so_unless_it_was_closed_or_the_data_have_no_length(ended, way):
    run = read_runlog(ended / way)
    last = run.events[-1]
    assert (last.kind, last.step, last.text, last.is_early) == ("end", 8, EARLY[way], bool(EARLY[way]))
    assert run.ended == (not EARLY[way])


def test_a_run_that_never_began_says_nothing(ended):
    assert (ended / "without a loader" / "runlog.jsonl").read_bytes() == b""


# A log of another run in the way


def begun(run_dir):
    recorder = Recorder([], run_dir, active=True)
    recorder.begin(Job(num_ranks=1, batch_size=4), "even", torch.nn.Linear(1, 1), [RankInfo()])
    return recorder


def test_a_log_that_cannot_be_set_aside_costs_the_log_and_not_the_training(tmp_path, monkeypatch):
    begun(tmp_path).end(0)
    before = (tmp_path / "runlog.jsonl").read_bytes()

    def refuse(self, target):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.rename", refuse)
    recorder = begun(tmp_path)
    with pytest.warns(RuntimeWarning, match="cannot be set aside, so this run writes none"):
        recorder.start()
    recorder.end(0)
    assert (tmp_path / "runlog.jsonl").read_bytes() == before


def test_the_new_log_is_begun_also_where_warnings_are_errors(tmp_path):
    begun(tmp_path).end(0)
    recorder = begun(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=r"which is now runlog-1\.jsonl"):
            recorder.start()
    recorder.end(7)
    assert [event.step for event in read_runlog(tmp_path).events] == [7]


# The plan to begin with


@pytest.mark.parametrize(
    ("batches", "resumed", "told"), [((6, 2), False, True), ((4, 4), False, False), ((6, 2), True, False)]
)
def test_a_first_split_that_is_not_even_is_in_the_log_with_its_reason(tmp_path, batches, resumed, told):
    recorder = Recorder([], tmp_path, active=True)
    first = Decision(plan=Plan(first_step=0, total_batch=8, local_batches=batches, reason="by data sheets"))
    recorder.begin(Job(num_ranks=2, batch_size=8), "cannikin", torch.nn.Linear(1, 1), [RankInfo()] * 2, first)
    if resumed:  # the saved state has a plan of its own
        recorder.resume(40)
    recorder.end(0)
    plans = read_runlog(tmp_path).plans
    assert [(plan.first_step, plan.local_batches, plan.reason) for plan in plans] == [
        (0, batches, "by data sheets") for _ in range(told)
    ]


def test_what_devices_say_of_themselves_is_read_back_and_may_be_missing(tmp_path):
    ranks = [RankInfo(device="GPU", capability=(9, 0), num_multiprocessors=132, clock_mhz=1980.0), RankInfo()]
    recorder = Recorder([], tmp_path, active=True)
    recorder.begin(Job(num_ranks=2, batch_size=8), "cannikin", torch.nn.Linear(1, 1), ranks)
    recorder.end(0)
    assert read_runlog(tmp_path).header.ranks == tuple(ranks)


# Last words


TOLD = {
    "told": r"INFO:cannikin:the run ended at step 40: its last split, 6, used [\d.]+% of what .* as much\n",
    "closed": r"INFO:cannikin:the run ended at step 40: .*\n",
    "short": "",
    "quiet": "",
    "by an error": "",
}
LAST_WORDS = """
import logging, os, sys
import torch
from torch import nn
from cannikin import HeteroDataLoader, HeteroDataParallel

for way in sys.argv[1:]:  # each in a process of its own, without another import of torch
    if os.fork() == 0:
        break
    os.wait()
else:
    sys.exit()
sys.stderr = open(way, "w")
logging.basicConfig(level=logging.WARNING if way == "quiet" else logging.INFO)
net = nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = HeteroDataParallel(net, optimizer)
loader = HeteroDataLoader(torch.randn(120 if way == "short" else 240, 3), model=model, batch_size=6)
for features in loader:
    optimizer.zero_grad()
    model(features).square().mean().backward()
    optimizer.step()
if way == "closed":
    model.engine.close()
if way == "by an error":
    raise ValueError("on purpose")
"""


@pytest.fixture(scope="module")
def last_words(tmp_path_factory):
    """What trainings of one rank, without observers of their own, wrote to standard error."""
    folder = tmp_path_factory.mktemp("words")
    command = [sys.executable, "-c", LAST_WORDS, *TOLD]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return {way: (folder / way).read_text() for way in TOLD}


@pytest.mark.parametrize("way", TOLD)
def test_a_run_that_ended_says_in_one_line_how_much_of_the_hardware_it_used(last_words, way):
    said = [line for line in last_words[way].splitlines(keepends=True) if "the run ended" in line]
    assert re.fullmatch(TOLD[way], "".join(said)), last_words[way]


def test_what_is_said_last_is_of_the_last_split_and_of_ddp_as_its_plan_had_it(caplog):
    words, split = LastWords(), (20, 12)
    with caplog.at_level("INFO", "cannikin"):
        for record in [*made_up.run(2), made_up.plan(20, split, even_speed=0.5), made_up.window(2, split), made_up.END]:
            words.write(record)
    assert caplog.messages == [
        "the run ended at step 100: its last split, 20, 12, used 60% of what the hardware can do; DDP would use 30%"
    ]


class Blocking:
    """An observer that takes its time."""

    def write(self, record: object) -> None:
        time.sleep(0.4)


def test_an_observer_that_holds_the_training_up_is_named_once():
    recorder = Recorder([Blocking()], None, active=True)
    with collecting_warnings() as warned:
        recorder.begin(Job(num_ranks=1, batch_size=4), "even", torch.nn.Linear(1, 1), [RankInfo()])
        recorder.start()
        for step in range(4):
            recorder.event(step, "epoch", {"epoch": 0, "position": 0})
    (warning,) = warned
    assert "observer Blocking has taken" in warning.text
    assert "ranks wait for it" in warning.text
